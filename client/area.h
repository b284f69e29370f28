/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory that client and daemon share: memfds, sealed against shrinking, each an "area" with a
 * number. Allocations are cut out of areas that grow with the total, so that neither a million small
 * tensors nor a thousand large ones come near AREAS_MAX. Knows nothing of the connection: which
 * areas the daemon has been told of is kept here as a mark that the session sets.
 */

#include "base/util.h"
#include "proto/messages.h"

#define AREA_ALIGNMENT 64

struct area {
    int fd;
    uint8_t *map; /* NULL: this number is free */
    uint64_t size;
    uint64_t used, blocks;
    bool announced; /* the daemon of this connection has it */
    struct area_hole *holes;
    size_t hole_count, hole_capacity;
};

struct areas {
    struct area items[AREAS_MAX];
    uint32_t end; /* one past the greatest number in use */
    uint64_t total;
    struct area_block *blocks; /* hash by pointer */
};

void areas_deinit(struct areas *areas);
/* In the forked child: closes descriptors; memory stays mapped, since the child may look at it. */
void areas_close(struct areas *areas);

/* size bytes, aligned to AREA_ALIGNMENT, zeroed, present. CKPT_E_MEMORY, CKPT_E_LIMIT. */
int areas_alloc(struct areas *areas, uint64_t size, void **ret_pointer) MUST_CHECK;
/* False: not a pointer from areas_alloc. */
bool areas_free(struct areas *areas, void *pointer);
bool areas_has(const struct areas *areas, const void *pointer);
/* The size given to areas_alloc; 0: not a pointer from it. */
uint64_t areas_size(const struct areas *areas, const void *pointer);

/* Where [pointer, pointer + size) lies, if wholly in one area. */
bool areas_find(const struct areas *areas, const void *pointer, uint64_t size, uint32_t *ret_area,
                uint64_t *ret_offset);

/* Gives back areas in which nothing is allocated; calls `dropped` for those that were announced. */
void areas_trim(struct areas *areas, void (*dropped)(void *context, uint32_t area), void *context);
/* A new daemon knows none of them. */
void areas_forget_announced(struct areas *areas);
