/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Chunks from the daemon: segments of its pool, mapped read-only and kept by number; FETCHes in
 * flight; leases given back. A chunk's bytes are verified by the daemon before FETCHED names them.
 */

#include "client/link.h"
#include "client/plan.h"

struct segment {
    uint32_t number;
    unsigned refs; /* the table, and each map that points into it */
    uint64_t size;
    const uint8_t *map;
    struct segment *next;
};

struct segments {
    struct segment *first;
    uint32_t pinned; /* leases that maps hold */
};

void segment_unref(struct segment *segment);
/* The connection is gone, and its numbers with it; what maps point into stays mapped. */
void segments_forget(struct segments *segments);
/* A message that no call waits for: maps a SEGMENT, gives back what a late reply brought. */
void segments_unclaimed(struct segments *segments, struct link *link);

/* Executes a sorted plan. Waits at most timeout_ms for each answer. CKPT_E_UNREACHABLE: the
 * connection was lost, all may be tried again. */
int fetch_plan(struct segments *segments, struct link *link, const struct plan *plan, uint32_t restore,
               uint64_t timeout_ms) MUST_CHECK;

/* A held lease on bytes that lie in one piece. */
struct fetch_lease {
    struct segment *segment;
    uint32_t lease;
    const uint8_t *data;
};

/* Leases `length` bytes of an image, if the daemon has them in consecutive memory. CKPT_NONE: it has not. */
int fetch_map(struct segments *segments, struct link *link, const struct plan *plan, uint32_t restore, uint32_t rank,
              uint64_t image_offset, uint64_t length, uint64_t timeout_ms, struct fetch_lease *ret_lease) MUST_CHECK;
/* `link` NULL: the session that gave it is gone. */
void fetch_release(struct segments *segments, struct link *link, struct fetch_lease *lease);
