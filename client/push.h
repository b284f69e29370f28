/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Push: where the daemon may not read the program's memory, a thread of the library copies it. The
 * thread has a connection of its own, attached to the session; for each save it goes through the
 * image in order, fills a slot of a shared area with each chunk, and tells the daemon.
 *
 * The same thread waits for the work on a GPU that a save comes after, where the daemon reads the
 * memory itself: then it tells it to start.
 *
 * In check mode it keeps the digest of each piece of a tensor, and the last chunk back, until the program
 * is in its fence; then it reads everything once more and compares.
 *
 * The thread reads the program's memory only between push_begin() and the moment from which
 * push_settle() or push_stop() returns.
 */

#include "client/link.h"
#include "client/set.h"
#include "client/transfer.h"
#include "proto/word.h"

#include <pthread.h>
#include <stdatomic.h>

#define PUSH_SLOTS 4

/* One save's work; all it points to stays until the push has settled. */
struct push_job {
    bool check;  /* the last chunk waits for push_fence(), then for a second reading of all */
    bool starts; /* only waits for the marks of `devices`, and tells the daemon to start */
    struct word_page *word;
    uint16_t counter;
    uint64_t image_size;
    const struct set_image *image;
    const struct areas *areas;
    const struct devices *devices;
    const void *state; /* inline state */
    uint64_t state_size;
    uint32_t chunk_size;
    uint8_t *slots; /* PUSH_SLOTS chunks */
    uint32_t slots_area;
    uint64_t slots_offset;
    uint64_t answer_ms; /* how long one chunk may go unanswered */
};

struct push {
    bool started; /* the thread exists */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct push_job job;
    bool busy, ending; /* under the lock */
    bool fenced;       /* likewise: push_fence() was called for the job */
    atomic_bool stop;  /* leave the job as soon as possible */
    atomic_bool failed;
    char reason[PROBLEM_TEXT_MAX]; /* of the failure; under the lock */
    struct link link;
    uint64_t attached; /* the session of the link; 0: none */
    void *slots;       /* the owner's allocation */
    uint64_t slots_size;
    void *pinned; /* the slots, as they were registered with the CUDA driver */
    int pinned_device;
    struct transfer transfer;
};

void push_init(struct push *push, const char *path, const struct devices *devices);
/* Ends the thread. */
void push_deinit(struct push *push);
/* In the forked child, which has no such thread. */
void push_close_descriptors(struct push *push);
/* Before a save: connects the thread's link and attaches it to the session, if it is not. */
int push_attach(struct push *push, uint64_t session, uint64_t deadline) MUST_CHECK;
/* Starts copying for a save that the daemon has accepted. */
int push_begin(struct push *push, const struct push_job *job) MUST_CHECK;
/* Check mode: the program is in its fence, and what it should not have done it has done. */
void push_fence(struct push *push);
/* Waits until the thread is done with the job (it was captured, or failed, or is stopped). */
void push_settle(struct push *push);
/* Stops the job, if one runs, and waits. */
void push_stop(struct push *push);
/* Before the slots are freed; the push has settled. */
void push_unpin(struct push *push);
/* Copies the reason; false: it has not failed. */
bool push_failed(struct push *push, char *ret_reason, size_t size);
