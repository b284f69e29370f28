/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The pending timers of a loop: a binary heap of operations, nearest deadline first, equal
 * deadlines in the order in which they were added.
 */

#include "base/loop.h"

struct timers {
    struct loop_op **heap;
    size_t count;
    size_t capacity;
    uint64_t added;
};

#define TIMERS_INIT ((struct timers){0})

void timers_deinit(struct timers *timers);

int timers_add(struct timers *timers, struct loop_op *op) MUST_CHECK;
void timers_remove(struct timers *timers, struct loop_op *op);

/* The nearest timer, or NULL. */
struct loop_op *timers_first(const struct timers *timers);
