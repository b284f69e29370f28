/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The worker threads of a real loop: its groups, and the list through which finished operations
 * come back. Groups do op->run(op); they know nothing of kinds, results or callbacks.
 *
 * All functions are for the loop's thread.
 */

#include "base/loop.h"

struct workers;

int workers_new(struct workers **ret_workers) MUST_CHECK;
/* Every group was freed before. */
void workers_free(struct workers *workers);

/* An eventfd that is written to when an operation finishes while the loop sleeps. It need not be
 * read: watch it edge-triggered. */
int workers_wake_fd(const struct workers *workers);

/* Says that the loop is about to sleep. False: something is finished, collect it instead. */
bool workers_sleep(struct workers *workers);
/* Says that the loop is awake, and appends what is finished. */
void workers_collect(struct workers *workers, struct loop_queue *finished);

int workers_group_new(struct workers *workers, struct loop *loop, const char *name, unsigned threads,
                      unsigned max_threads, struct loop_group **ret_group) MUST_CHECK;
/* -EBUSY: the bound is reached. */
int workers_group_relieve(struct loop_group *group);
/* Appends what was not begun; returns how many operations are lost in stuck workers. */
unsigned workers_group_free(struct loop_group *group, struct loop_queue *unbegun);

/* Negative errno: the group has no thread and could not make one. */
int workers_submit(struct loop_op *op) MUST_CHECK;
/* Takes back an operation that has not begun. False: it has. */
bool workers_withdraw(struct loop_op *op);
