/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a read needs: which bytes of which chunk go where. A plan collects the copies of any number
 * of reads, then sorts them into the order of storage and cuts the chunks into windows for FETCH.
 * Pure, but for targets on devices.
 */

#include "client/index.h"
#include "client/pack.h"
#include "client/transfer.h"

/* `count` elements from byte `image_offset` of a part's image, all in one chunk, to element `element`
 * of a target. */
struct plan_copy {
    uint64_t image_offset;
    uint64_t element, count;
    uint32_t rank;
    uint32_t target;
};

/* Where a read's elements go. */
struct plan_target {
    const char *name; /* of the tensor, for sentences; the index's */
    struct geometry geometry;
    const int64_t *stride; /* NULL: row-major without holes */
    uint8_t *data;
    unsigned element_size;
    bool on_device; /* `device` and the rest hold */
    bool on_stream; /* by way of `stream`; else of one of ours */
    int device;
    CUstream stream;
};

struct plan_window { /* consecutive chunks of one part, and the copies out of them */
    uint32_t rank, first, count;
    size_t first_copy, copy_count;
};

struct plan {
    const struct index *index;
    const struct plan_target *targets;
    struct plan_copy *copies;
    size_t count, capacity, limit;
    /* Called when `limit` copies are collected; the plan is empty when it returns CKPT_OK. */
    int (*full)(void *context, struct plan *plan);
    void *context;
    struct staging *staging; /* for targets on devices */
    uint64_t deadline;       /* until which a device may take to accept them */
};

#define PLAN_COPIES_MAX 500000

void plan_deinit(struct plan *plan);
/* Adds what targets[target] needs of a tensor that has bytes. CKPT_OK, CKPT_E_MEMORY,
 * CKPT_E_DAMAGED (the pieces do not cover it), or what `full` returned. */
int plan_add(struct plan *plan, const struct index_tensor *tensor, uint32_t target) MUST_CHECK;
/* Adds bytes of an image as elements of size 1. */
int plan_add_bytes(struct plan *plan, uint32_t rank, uint64_t image_offset, uint64_t length,
                   uint32_t target) MUST_CHECK;
/* Sorts; plan_next() then gives the windows in order. */
void plan_sort(struct plan *plan);
/* The window whose first copy is copies[*at], of at most chunks_max chunks; moves *at. False: no more. */
bool plan_next(const struct plan *plan, size_t *at, uint32_t chunks_max, struct plan_window *ret_window);
uint32_t plan_chunk_size(const struct plan *plan, uint32_t rank);
/* The length of a chunk: the last one of an image may be shorter. */
uint64_t plan_chunk_length(const struct plan *plan, uint32_t rank, uint32_t chunk);
/* Makes pages of a window's targets that the program has not touched yet present, all of them in one call instead of
 * by a fault each; what they hold stays. For the time until its chunks come. */
void plan_prepare(const struct plan *plan, const struct plan_window *window);
/* Copies out of a chunk that lies at `data`. Not CKPT_OK only where the target is on a device. */
int plan_execute(const struct plan *plan, const struct plan_copy *copy, const uint8_t *data) MUST_CHECK;
