/* SPDX-License-Identifier: Apache-2.0 */
#include "base/timers.h"

/*
 * Invariant: no operation expires before its parent, and heap[op->heap_index] == op. The index in
 * the operation is what makes cancelling cheap, and most timers of this service are deadlines
 * that are cancelled.
 */

#include <errno.h>

#define TIMERS_CAPACITY_MIN 16

void timers_deinit(struct timers *timers) {
    assert(timers->count == 0);
    free(timers->heap);
    *timers = TIMERS_INIT;
}

static bool timers_before(const struct loop_op *a, const struct loop_op *b) {
    return a->offset != b->offset ? a->offset < b->offset : a->order < b->order;
}

static void timers_place(struct timers *timers, struct loop_op *op, size_t index) {
    timers->heap[index] = op;
    op->heap_index = index;
}

/* Puts the operation at a free index, moving its ancestors or descendants out of the way. */
static void timers_settle(struct timers *timers, struct loop_op *op, size_t index) {
    while (index > 0) {
        size_t parent = (index - 1) / 2;
        if (!timers_before(op, timers->heap[parent]))
            break;
        timers_place(timers, timers->heap[parent], index);
        index = parent;
    }
    for (;;) {
        size_t child = 2 * index + 1;
        if (child >= timers->count)
            break;
        if (child + 1 < timers->count && timers_before(timers->heap[child + 1], timers->heap[child]))
            child++;
        if (!timers_before(timers->heap[child], op))
            break;
        timers_place(timers, timers->heap[child], index);
        index = child;
    }
    timers_place(timers, op, index);
}

int timers_add(struct timers *timers, struct loop_op *op) {
    if (timers->count == timers->capacity) {
        size_t capacity = timers->capacity ? 2 * timers->capacity : TIMERS_CAPACITY_MIN;
        struct loop_op **heap = reallocarray(timers->heap, capacity, sizeof *heap);
        if (!heap)
            return -ENOMEM;
        timers->heap = heap;
        timers->capacity = capacity;
    }
    op->order = timers->added++;
    timers->heap[timers->count] = op;
    timers->count++;
    timers_settle(timers, op, timers->count - 1);
    return 0;
}

void timers_remove(struct timers *timers, struct loop_op *op) {
    size_t index = op->heap_index;
    assert(index < timers->count && timers->heap[index] == op);
    timers->count--;
    struct loop_op *last = timers->heap[timers->count];
    if (last != op)
        timers_settle(timers, last, index);
}

struct loop_op *timers_first(const struct timers *timers) {
    return timers->count ? timers->heap[0] : NULL;
}
