/* SPDX-License-Identifier: Apache-2.0 */
#include "base/loop.h"

/*
 * The face of every loop: fills in an operation and hands it to the loop's table. An operation is
 * idle or in flight, nothing else; submitting one that is in flight is a bug in its owner and would
 * corrupt whatever list it is on, so that is asserted here, once for all kinds of loop.
 */

#include "base/loop-posix.h"
#include "base/loop-uring.h"

#include <errno.h>

int loop_new(const char *kind, struct loop **ret_loop) {
    if (strcmp(kind, "uring") == 0)
        return loop_uring_new(ret_loop);
    if (strcmp(kind, "posix") == 0)
        return loop_posix_new(ret_loop);
    if (strcmp(kind, "auto") != 0)
        return -EINVAL;
    int r = loop_uring_new(ret_loop);
    return r == -EOPNOTSUPP ? loop_posix_new(ret_loop) : r;
}

void loop_free(struct loop *loop) {
    if (loop)
        loop->ops->free(loop);
}

void loop_freep(struct loop **loop) { loop_free(*loop); }

const char *loop_name(struct loop *loop) { return loop->ops->name; }

int loop_run(struct loop *loop) { return loop->ops->run(loop); }

void loop_stop(struct loop *loop) { loop->ops->stop(loop); }

uint64_t loop_now(struct loop *loop) { return loop->ops->now(loop); }

uint64_t loop_wall(struct loop *loop) { return loop->ops->wall(loop); }

uint64_t loop_random(struct loop *loop) { return loop->ops->random(loop); }

int loop_group_new(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                   struct loop_group **ret_group) {
    if (threads < 1 || threads > max_threads || max_threads > LOOP_GROUP_THREADS_MAX)
        return -EINVAL;
    return loop->ops->group_new(loop, name, threads, max_threads, ret_group);
}

int loop_group_relieve(struct loop_group *group) { return group->loop->ops->group_relieve(group); }

void loop_group_free(struct loop_group *group) {
    if (group)
        group->loop->ops->group_free(group);
}

static void loop_claim(struct loop *loop, struct loop_op *op, enum loop_kind kind, loop_fn fn) {
    assert(op->kind == LOOP_IDLE);
    assert(fn);
    op->kind = kind;
    op->loop = loop;
    op->fn = fn;
    op->cancelled = false;
    op->begun = false;
}

static void loop_claim_for_group(struct loop *loop, struct loop_op *op, struct loop_group *group, enum loop_kind kind,
                                 loop_fn fn) {
    assert(group && group->loop == loop);
    loop_claim(loop, op, kind, fn);
    op->group = group;
    op->result = 0;
}

void loop_read(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, void *buffer, size_t length,
               uint64_t offset, loop_fn fn) {
    loop_claim_for_group(loop, op, group, LOOP_READ, fn);
    op->fd = fd;
    op->buffer = buffer;
    op->length = length;
    op->offset = offset;
    loop->ops->submit(loop, op);
}

void loop_write(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, const void *buffer,
                size_t length, uint64_t offset, loop_fn fn) {
    loop_claim_for_group(loop, op, group, LOOP_WRITE, fn);
    op->fd = fd;
    op->buffer = (void *)buffer;
    op->length = length;
    op->offset = offset;
    loop->ops->submit(loop, op);
}

void loop_sync(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, loop_fn fn) {
    loop_claim_for_group(loop, op, group, LOOP_SYNC, fn);
    op->fd = fd;
    loop->ops->submit(loop, op);
}

void loop_work(struct loop *loop, struct loop_op *op, struct loop_group *group, loop_fn run, loop_fn fn) {
    assert(run);
    loop_claim_for_group(loop, op, group, LOOP_WORK, fn);
    op->run = run;
    loop->ops->submit(loop, op);
}

void loop_accept(struct loop *loop, struct loop_op *op, int fd, loop_fn fn) {
    loop_claim(loop, op, LOOP_ACCEPT, fn);
    op->fd = fd;
    loop->ops->submit(loop, op);
}

void loop_recv(struct loop *loop, struct loop_op *op, int fd, struct msghdr *message, loop_fn fn) {
    loop_claim(loop, op, LOOP_RECV, fn);
    op->fd = fd;
    op->message = message;
    loop->ops->submit(loop, op);
}

void loop_send(struct loop *loop, struct loop_op *op, int fd, struct msghdr *message, loop_fn fn) {
    loop_claim(loop, op, LOOP_SEND, fn);
    op->fd = fd;
    op->message = message;
    loop->ops->submit(loop, op);
}

void loop_poll(struct loop *loop, struct loop_op *op, int fd, uint32_t events, loop_fn fn) {
    loop_claim(loop, op, LOOP_POLL, fn);
    op->fd = fd;
    op->events = events;
    loop->ops->submit(loop, op);
}

void loop_timer(struct loop *loop, struct loop_op *op, uint64_t deadline_ns, loop_fn fn) {
    loop_claim(loop, op, LOOP_TIMER, fn);
    op->offset = deadline_ns;
    loop->ops->submit(loop, op);
}

void loop_post(struct loop *loop, struct loop_op *op, int64_t result, loop_fn fn) {
    loop_claim(loop, op, LOOP_POST, fn);
    op->result = result;
    loop->ops->submit(loop, op);
}

void loop_cancel(struct loop *loop, struct loop_op *op) {
    if (op->kind == LOOP_IDLE || op->cancelled)
        return;
    op->cancelled = true;
    loop->ops->cancel(loop, op);
}
