/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The host pool: where captured and fetched chunks live. It is made of memfd segments, mapped by
 * the daemon and then sealed SHRINK|GROW|FUTURE_WRITE, so that clients may map them read-only for
 * restores, O_DIRECT works from and into them, and nothing is left when everything is killed.
 *
 * A buffer is a reference-counted run of 4 KiB pages. A buffer that only a cache still wants is
 * evictable: the pool takes the least recently used back when it needs room.
 */

#include "base/loop.h"
#include "base/problem.h"

#define POOL_PAGE 4096
#define POOL_SEGMENT_SIZE MIB(256)
#define POOL_SEGMENTS_MAX 4096

enum { POOL_E_FULL = 1 };

struct pool;
struct pool_segment;

struct pool_buffer {
    struct pool *pool;
    struct pool_segment *segment;
    uint64_t offset; /* in the segment */
    uint64_t size;   /* a multiple of POOL_PAGE */
    uint8_t *data;
    uint32_t refs;
    struct pool_buffer **slot; /* cached: whose pointer to clear at eviction; that pointer is one reference */
    TAILQ_ENTRY(pool_buffer) link;
};

/* Told when room may have come back. */
struct pool_waiter {
    void (*fn)(struct pool_waiter *waiter);
    bool queued;
    TAILQ_ENTRY(pool_waiter) link;
};

struct pool_usage {
    uint64_t limit;     /* never more than this */
    uint64_t allocated; /* memory taken from the system */
    uint64_t used;      /* in buffers, cached ones included */
    uint64_t cached;    /* in evictable buffers */
    uint64_t reserved;  /* admitted and not yet durable */
    uint32_t segments;
};

/* `prefault`: a background thread of its own group touches each new segment before it is needed. */
int pool_new(struct loop *loop, uint64_t limit, bool prefault, struct pool **ret_pool) MUST_CHECK;
/* Told whenever a segment has been prefaulted. */
void pool_on_prefault(struct pool *pool, void (*fn)(void *context), void *context);
/* How many segments, the first ones, are prefaulted. */
uint32_t pool_prefaulted(const struct pool *pool);
/* An image of so many bytes is going to be saved, again and again: with prefaulting, there will be segments for all
 * such images together. */
void pool_expect(struct pool *pool, uint64_t bytes);
void pool_unexpect(struct pool *pool, uint64_t bytes);
/* Waits for a running prefault. */
void pool_free(struct pool *pool);

/* Admission: keeps `bytes` (at most the limit) free of other admissions until released. */
bool pool_reserve(struct pool *pool, uint64_t bytes);
void pool_release(struct pool *pool, uint64_t bytes);

/* A buffer with one reference; its last page's tail is the caller's to fill. POOL_E_FULL: wait for room. */
int pool_alloc(struct pool *pool, uint64_t size, struct pool_buffer **ret_buffer) MUST_CHECK;
struct pool_buffer *pool_buffer_ref(struct pool_buffer *buffer);
void pool_buffer_unref(struct pool_buffer *buffer);
/* From now on *slot (which holds one reference) is a cache entry: the pool may clear it. */
void pool_buffer_cache(struct pool_buffer *buffer, struct pool_buffer **slot);
/* *slot was just used. */
void pool_buffer_touch(struct pool_buffer *buffer);
/* Takes it out of the cache again; *slot stays a plain reference. */
void pool_buffer_uncache(struct pool_buffer *buffer);

/* For clients: a segment's number, descriptor (borrowed) and size. */
uint32_t pool_buffer_segment(const struct pool_buffer *buffer);
int pool_segment_fd(struct pool *pool, uint32_t segment);
uint64_t pool_segment_size(struct pool *pool, uint32_t segment);
/* Of any thread that has been told of the segment: where it is mapped. */
void *pool_segment_data(const struct pool *pool, uint32_t segment);

void pool_wait(struct pool *pool, struct pool_waiter *waiter);
void pool_unwait(struct pool *pool, struct pool_waiter *waiter);

bool pool_is_waited_for(const struct pool *pool);

void pool_get_usage(struct pool *pool, struct pool_usage *ret_usage);
