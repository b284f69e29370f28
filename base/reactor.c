/* SPDX-License-Identifier: Apache-2.0 */
#include "base/reactor.h"

/*
 * A turn of the loop: wait (not at all when callbacks are due), complete what the kernel, the
 * workers and the clock have finished, then call back one batch. A batch is what was ready when it
 * began: callbacks that post without end cannot starve the sockets, and the sockets cannot starve
 * them. Nothing is kept on the stack across a callback but the batch's last member, and that only
 * to compare addresses, so a callback may free whatever it likes.
 */

#include <errno.h>
#include <sys/random.h>
#include <time.h>

int reactor_init(struct reactor *reactor, const struct loop_ops *ops, reactor_wait_fn wait) {
    *reactor = (struct reactor){.loop.ops = ops, .wait = wait, .timers = TIMERS_INIT};
    TAILQ_INIT(&reactor->ready);
    return workers_new(&reactor->workers);
}

void reactor_deinit(struct reactor *reactor) {
    assert(reactor->in_flight == 0);
    workers_free(reactor->workers);
    timers_deinit(&reactor->timers);
}

void reactor_complete(struct reactor *reactor, struct loop_op *op, int64_t result) {
    op->result = result;
    op->stage = REACTOR_READY;
    TAILQ_INSERT_TAIL(&reactor->ready, op, link);
}

void reactor_abandon(struct reactor *reactor) {
    assert(reactor->in_flight > 0);
    reactor->in_flight--;
}

void reactor_submit_work(struct reactor *reactor, struct loop_op *op) {
    op->stage = REACTOR_QUEUED;
    int r = workers_submit(op);
    if (r < 0)
        reactor_complete(reactor, op, r);
    else
        reactor->with_workers++;
}

bool reactor_submit(struct reactor *reactor, struct loop_op *op) {
    reactor->in_flight++;
    if (op->kind == LOOP_TIMER) {
        op->stage = REACTOR_TIMED;
        int r = timers_add(&reactor->timers, op);
        if (r < 0)
            reactor_complete(reactor, op, r);
        return true;
    }
    if (op->kind == LOOP_WORK) {
        reactor_submit_work(reactor, op);
        return true;
    }
    if (op->kind == LOOP_POST) {
        reactor_complete(reactor, op, op->result);
        return true;
    }
    return false;
}

bool reactor_cancel(struct reactor *reactor, struct loop_op *op) {
    switch (op->stage) {
    case REACTOR_READY:
        return true;
    case REACTOR_TIMED:
        timers_remove(&reactor->timers, op);
        reactor_complete(reactor, op, -ECANCELED);
        return true;
    case REACTOR_QUEUED:
        /* File I/O stays even if not begun: cancelling means the same whichever loop runs. */
        if (op->kind == LOOP_WORK && workers_withdraw(op)) {
            reactor->with_workers--;
            reactor_complete(reactor, op, -ECANCELED);
        }
        return true;
    }
    return false;
}

static void reactor_collect(struct reactor *reactor) {
    struct loop_queue finished = TAILQ_HEAD_INITIALIZER(finished);
    workers_collect(reactor->workers, &finished);
    struct loop_op *op;
    while ((op = TAILQ_FIRST(&finished))) {
        TAILQ_REMOVE(&finished, op, link);
        reactor->with_workers--;
        reactor_complete(reactor, op, op->result);
    }
}

static void reactor_expire(struct reactor *reactor) {
    struct loop_op *op = timers_first(&reactor->timers);
    if (!op)
        return;
    uint64_t now = reactor_now(&reactor->loop);
    for (; op && op->offset <= now; op = timers_first(&reactor->timers)) {
        timers_remove(&reactor->timers, op);
        reactor_complete(reactor, op, 0);
    }
}

static uint64_t reactor_timeout(struct reactor *reactor) {
    if (!TAILQ_EMPTY(&reactor->ready))
        return 0;
    struct loop_op *op = timers_first(&reactor->timers);
    if (!op)
        return REACTOR_FOREVER;
    uint64_t now = reactor_now(&reactor->loop);
    return op->offset > now ? op->offset - now : 0;
}

static int reactor_gather(struct reactor *reactor) {
    uint64_t timeout_ns = reactor_timeout(reactor);
    if (timeout_ns > 0 && reactor->with_workers > 0 && !workers_sleep(reactor->workers))
        timeout_ns = 0;
    int r = reactor->wait(reactor, timeout_ns);
    if (r < 0)
        return r;
    if (reactor->with_workers > 0)
        reactor_collect(reactor);
    reactor_expire(reactor);
    return 0;
}

static void reactor_dispatch(struct reactor *reactor) {
    struct loop_op *last = TAILQ_LAST(&reactor->ready, loop_queue);
    struct loop_op *op = NULL;
    while (op != last && !reactor->stopping) {
        op = TAILQ_FIRST(&reactor->ready);
        TAILQ_REMOVE(&reactor->ready, op, link);
        reactor->in_flight--;
        op->kind = LOOP_IDLE;
        op->fn(op);
    }
}

int reactor_run(struct loop *loop) {
    struct reactor *reactor = reactor_from_loop(loop);
    assert(!reactor->running);
    reactor->running = true;
    int r = 0;
    while (r == 0 && reactor->in_flight > 0 && !reactor->stopping) {
        r = reactor_gather(reactor);
        if (r == 0)
            reactor_dispatch(reactor);
    }
    reactor->running = false;
    reactor->stopping = false;
    return r;
}

void reactor_stop(struct loop *loop) { reactor_from_loop(loop)->stopping = true; }

static uint64_t reactor_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * NANOSECONDS_PER_SECOND + now.tv_nsec;
}

uint64_t reactor_now(struct loop *loop) { return reactor_clock(CLOCK_MONOTONIC); }

uint64_t reactor_wall(struct loop *loop) { return reactor_clock(CLOCK_REALTIME); }

uint64_t reactor_random(struct loop *loop) {
    uint64_t bits;
    int r = getentropy(&bits, sizeof bits);
    assert(r == 0);
    return bits;
}

int reactor_group_new(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                      struct loop_group **ret_group) {
    return workers_group_new(reactor_from_loop(loop)->workers, loop, name, threads, max_threads, ret_group);
}

int reactor_group_relieve(struct loop_group *group) { return workers_group_relieve(group); }

void reactor_group_free(struct loop_group *group) {
    struct reactor *reactor = reactor_from_loop(group->loop);
    struct loop_queue unbegun = TAILQ_HEAD_INITIALIZER(unbegun);
    unsigned lost = workers_group_free(group, &unbegun);
    reactor->with_workers -= lost;
    for (; lost > 0; lost--)
        reactor_abandon(reactor);
    struct loop_op *op;
    while ((op = TAILQ_FIRST(&unbegun))) {
        TAILQ_REMOVE(&unbegun, op, link);
        reactor->with_workers--;
        reactor_complete(reactor, op, -ECANCELED);
    }
}
