/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the two real loops share: the ready queue and who calls it, timers, workers, clocks. A real
 * loop embeds a reactor as its first member, puts the reactor's functions into its table, and adds
 * how it submits and cancels what needs the kernel, and how it waits.
 */

#include "base/loop.h"
#include "base/timers.h"
#include "base/workers.h"

#define REACTOR_FOREVER UINT64_MAX

/* Where an operation in flight is. */
enum reactor_stage {
    REACTOR_READY,  /* has its result, its callback comes next */
    REACTOR_TIMED,  /* in the heap */
    REACTOR_QUEUED, /* with its group */
    REACTOR_STAGES, /* from here on: with the loop that embeds the reactor */
};

struct reactor;

/* Hands the kernel what is due, waits at most so long (0: does not wait; REACTOR_FOREVER), and
 * completes what has happened. May return early. Negative errno: the loop broke. */
typedef int (*reactor_wait_fn)(struct reactor *reactor, uint64_t timeout_ns);

struct reactor {
    struct loop loop;
    reactor_wait_fn wait;
    struct loop_queue ready;
    struct timers timers;
    struct workers *workers;
    uint64_t in_flight;
    uint64_t with_workers; /* of those in flight */
    bool running;
    bool stopping;
};

int reactor_init(struct reactor *reactor, const struct loop_ops *ops, reactor_wait_fn wait) MUST_CHECK;
/* Nothing is in flight. */
void reactor_deinit(struct reactor *reactor);

static inline struct reactor *reactor_from_loop(struct loop *loop) { return CONTAINER_OF(loop, struct reactor, loop); }

/* Takes charge of an operation; false: it needs the kernel, and is the embedding loop's to do. */
bool reactor_submit(struct reactor *reactor, struct loop_op *op);
/* Gives an operation to its group, whose worker calls op->run. */
void reactor_submit_work(struct reactor *reactor, struct loop_op *op);
/* The same for cancelling. */
bool reactor_cancel(struct reactor *reactor, struct loop_op *op);

/* Queues the callback. The operation is on no list. */
void reactor_complete(struct reactor *reactor, struct loop_op *op, int64_t result);
/* Waits no longer for an operation that will not come back. */
void reactor_abandon(struct reactor *reactor);

/* For the table. */
int reactor_run(struct loop *loop) MUST_CHECK;
void reactor_stop(struct loop *loop);
uint64_t reactor_now(struct loop *loop);
uint64_t reactor_wall(struct loop *loop);
uint64_t reactor_random(struct loop *loop);
int reactor_group_new(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                      struct loop_group **ret_group) MUST_CHECK;
int reactor_group_relieve(struct loop_group *group);
void reactor_group_free(struct loop_group *group);
