/* SPDX-License-Identifier: Apache-2.0 */
#include "client/handle.h"

#include <pthread.h>

/*
 * Fork: the list is locked across it, so that the child finds it whole. The child closes its copies
 * of our descriptors (the daemon must see the connection end when the parent does) and marks every
 * handle; the memory stays, since the child may read what was allocated from it. The parent counts:
 * a process that has forked is read in another way (message_save.forks).
 */

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(, ckpt) handles = LIST_HEAD_INITIALIZER(handles);
static pthread_once_t handles_once = PTHREAD_ONCE_INIT;
static int handles_error;

static void before_fork(void) { pthread_mutex_lock(&handles_lock); }

static void after_fork_in_parent(void) {
    struct ckpt *c;
    LIST_FOREACH(c, &handles, link)
    atomic_fetch_add_explicit(&c->forks, 1, memory_order_relaxed);
    pthread_mutex_unlock(&handles_lock);
}

static void after_fork_in_child(void) {
    struct ckpt *c;
    LIST_FOREACH(c, &handles, link) {
        atomic_store_explicit(&c->forked, true, memory_order_relaxed);
        session_close_descriptors(&c->session);
        areas_close(&c->areas);
        push_close_descriptors(&c->push);
    }
    pthread_mutex_unlock(&handles_lock);
}

static void install(void) { handles_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

int handle_list(struct ckpt *c) {
    pthread_once(&handles_once, install);
    if (handles_error)
        return error_set(CKPT_E_MEMORY, "pthread_atfork: %s", strerror(handles_error));
    pthread_mutex_lock(&handles_lock);
    LIST_INSERT_HEAD(&handles, c, link);
    pthread_mutex_unlock(&handles_lock);
    return CKPT_OK;
}

void handle_unlist(struct ckpt *c) {
    pthread_mutex_lock(&handles_lock);
    LIST_REMOVE(c, link);
    pthread_mutex_unlock(&handles_lock);
}

int handle_bug(struct ckpt *c, const char *condition, const char *file, int line) {
    atomic_store_explicit(&c->disabled, true, memory_order_relaxed);
    return error_set(CKPT_E_BUG, "libckpt found itself wrong (%s, %s:%d); this handle is disabled, please report it",
                     condition, file, line);
}

int handle_enter(struct ckpt *c) {
    error_clear();
    if (!c)
        return error_set(CKPT_E_INVALID, "the handle is NULL");
    if (atomic_load_explicit(&c->forked, memory_order_relaxed))
        return error_set(CKPT_E_FORKED, "job %s: the handle belongs to the parent process; open one in the child",
                         c->job);
    if (atomic_load_explicit(&c->disabled, memory_order_relaxed))
        return error_set(CKPT_E_BUG, "job %s: the handle was disabled by an earlier error in libckpt", c->job);
    return CKPT_OK;
}

void handle_unclaimed(void *context, struct link *link) {
    struct ckpt *c = context;
    const struct wire_message *message = &link->message;
    if (message->opcode == MESSAGE_CAPTURED) {
        const struct message_captured *body = message->body;
        saves_event(&c->saves, body->counter, body->result, message->tail, message->tail_length);
    } else {
        segments_unclaimed(&c->segments, link);
    }
}
