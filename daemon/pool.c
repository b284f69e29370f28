/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room is found first-fit in a sorted array of free extents per segment: segments are few, and
 * extents are few because most buffers are whole chunks. Neighbouring extents merge when freed.
 *
 * A segment counts as allocated from its creation. With prefaulting, one worker touches its pages
 * in pieces; buffers may be handed out meanwhile, from the start of the segment, which is where the
 * prefault has already been. When more than half of the last segment is taken, the next is made, so
 * that captures do not pay for first touches; and for images that are expected before they come.
 *
 * Segments are never given back while the daemon lives: memory that was fast to write once stays
 * fast. The limit bounds them.
 */
#include "daemon/pool.h"

#include "base/map.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define PREFAULT_STEP KIB(512) /* the memory map is locked meanwhile: growing must not wait long */

struct extent {
    uint64_t offset, size;
};

struct pool_segment {
    struct pool *pool;
    uint32_t number;
    int fd;
    uint8_t *data;
    uint64_t size;
    uint64_t free;          /* bytes */
    size_t buffers;         /* handed out */
    struct extent *extents; /* free ones, ascending */
    size_t extent_count, extent_capacity;
    struct loop_op prefault;
};

TAILQ_HEAD(buffer_list, pool_buffer);
TAILQ_HEAD(waiter_list, pool_waiter);

struct pool {
    struct loop *loop;
    struct loop_group *prefaulters; /* NULL: no prefaulting */
    uint64_t limit, allocated, used, cached, reserved, expected;
    struct pool_segment *segments[POOL_SEGMENTS_MAX];
    uint32_t segment_count, prefaulted;
    void (*grew)(void *context); /* a segment is prefaulted */
    void *grew_context;
    struct buffer_list cache; /* least recently used first */
    struct waiter_list waiters;
    uint32_t waiter_count;
    struct loop_op wake;
    _Atomic bool stopping; /* read by the prefaulting worker */
};

static void prefault_run(struct loop_op *op) {
    struct pool_segment *segment = CONTAINER_OF(op, struct pool_segment, prefault);
    for (uint64_t offset = 0; offset < segment->size && !segment->pool->stopping; offset += PREFAULT_STEP) {
        uint64_t length = min_u64(PREFAULT_STEP, segment->size - offset);
        if (madvise(segment->data + offset, length, MADV_POPULATE_WRITE) < 0)
            break; /* an old kernel or no memory: pages come at first touch */
    }
    op->result = 0;
}

static void prefault_done(struct loop_op *op) {
    struct pool *pool = CONTAINER_OF(op, struct pool_segment, prefault)->pool;
    pool->prefaulted++; /* they come in order: there is one worker */
    if (pool->grew)
        pool->grew(pool->grew_context);
}

static int segment_new(struct pool *pool, uint64_t size, struct pool_segment **ret_segment) {
    struct pool_segment *segment = calloc(1, sizeof *segment);
    if (!segment)
        return -ENOMEM;
    segment->extents = malloc(16 * sizeof *segment->extents);
    segment->fd = memfd_create("ckptd-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    segment->data = MAP_FAILED;
    int r = 0;
    if (!segment->extents)
        r = -ENOMEM;
    else if (segment->fd < 0 || ftruncate(segment->fd, (off_t)size) < 0)
        r = -errno;
    if (!r) {
        segment->data = map_file(segment->fd, size, true);
        if (segment->data == MAP_FAILED)
            r = -errno;
    }
    if (!r && fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
        r = -errno;
    if (r) {
        if (segment->data != MAP_FAILED)
            munmap(segment->data, size);
        if (segment->fd >= 0)
            close(segment->fd);
        free(segment->extents);
        free(segment);
        return r;
    }
    madvise(segment->data, size, MADV_DONTFORK);
    madvise(segment->data, size, MADV_HUGEPAGE);
    segment->size = segment->free = size;
    segment->extent_capacity = 16;
    segment->extents[0] = (struct extent){.offset = 0, .size = size};
    segment->extent_count = 1;
    segment->pool = pool;
    segment->number = pool->segment_count;
    *ret_segment = segment;
    return 0;
}

static int pool_grow(struct pool *pool) {
    uint64_t size = min_u64(POOL_SEGMENT_SIZE, pool->limit - pool->allocated);
    if (size < POOL_PAGE || pool->segment_count == POOL_SEGMENTS_MAX)
        return POOL_E_FULL;
    struct pool_segment *segment = NULL;
    int r = segment_new(pool, size, &segment);
    if (r < 0)
        return r;
    pool->segments[pool->segment_count++] = segment;
    pool->allocated += size;
    if (pool->prefaulters)
        loop_work(pool->loop, &segment->prefault, pool->prefaulters, prefault_run, prefault_done);
    return 0;
}

int pool_new(struct loop *loop, uint64_t limit, bool prefault, struct pool **ret_pool) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->loop = loop;
    pool->limit = limit & ~(uint64_t)(POOL_PAGE - 1);
    TAILQ_INIT(&pool->cache);
    TAILQ_INIT(&pool->waiters);
    int r = prefault ? loop_group_new(loop, "prefault", 1, 1, &pool->prefaulters) : 0;
    if (!r)
        r = pool_grow(pool);
    if (r) {
        pool_free(pool);
        return r == POOL_E_FULL ? -ENOMEM : r;
    }
    *ret_pool = pool;
    return 0;
}

void pool_on_prefault(struct pool *pool, void (*fn)(void *context), void *context) {
    pool->grew = fn;
    pool->grew_context = context;
}

void pool_expect(struct pool *pool, uint64_t bytes) {
    pool->expected += bytes;
    while (pool->prefaulters && pool->allocated < min_u64(pool->expected, pool->limit) && !pool_grow(pool))
        ;
}

void pool_unexpect(struct pool *pool, uint64_t bytes) {
    assert(pool->expected >= bytes);
    pool->expected -= bytes;
}

uint32_t pool_prefaulted(const struct pool *pool) { return pool->prefaulted; }

void pool_free(struct pool *pool) {
    if (!pool)
        return;
    pool->stopping = true;
    if (pool->prefaulters)
        loop_group_free(pool->prefaulters);
    for (uint32_t i = 0; i < pool->segment_count; i++) {
        struct pool_segment *segment = pool->segments[i];
        munmap(segment->data, segment->size);
        close(segment->fd);
        free(segment->extents);
        free(segment);
    }
    free(pool);
}

bool pool_reserve(struct pool *pool, uint64_t bytes) {
    bytes = min_u64(bytes, pool->limit);
    if (pool->reserved + bytes > pool->limit)
        return false;
    pool->reserved += bytes;
    return true;
}

/* One round: as many waiters as there are now. One that queues itself again goes to the end. */
static void wake_waiters(struct loop_op *op) {
    struct pool *pool = CONTAINER_OF(op, struct pool, wake);
    struct pool_waiter *waiter;
    for (uint32_t round = pool->waiter_count; round && (waiter = TAILQ_FIRST(&pool->waiters)); round--) {
        pool_unwait(pool, waiter);
        waiter->fn(waiter);
    }
}

static void pool_changed(struct pool *pool) {
    if (!TAILQ_EMPTY(&pool->waiters) && !loop_op_busy(&pool->wake))
        loop_post(pool->loop, &pool->wake, 0, wake_waiters);
}

void pool_release(struct pool *pool, uint64_t bytes) {
    bytes = min_u64(bytes, pool->limit);
    assert(pool->reserved >= bytes);
    pool->reserved -= bytes;
    pool_changed(pool);
}

static bool segment_take(struct pool_segment *segment, uint64_t size, uint64_t *ret_offset) {
    if (segment->free < size)
        return false;
    for (size_t i = 0; i < segment->extent_count; i++) {
        struct extent *extent = &segment->extents[i];
        if (extent->size < size)
            continue;
        *ret_offset = extent->offset;
        extent->offset += size;
        extent->size -= size;
        if (!extent->size)
            memmove(extent, extent + 1, (--segment->extent_count - i) * sizeof *extent);
        segment->free -= size;
        return true;
    }
    return false;
}

/* There are never more free extents than buffers out plus one: with that much room, giving back
 * cannot fail. */
static int segment_ready_to_give(struct pool_segment *segment) {
    size_t needed = segment->buffers + 2;
    if (needed <= segment->extent_capacity)
        return 0;
    struct extent *extents = realloc(segment->extents, 2 * needed * sizeof *extents);
    if (!extents)
        return -ENOMEM;
    segment->extents = extents;
    segment->extent_capacity = 2 * needed;
    return 0;
}

static void segment_give(struct pool_segment *segment, uint64_t offset, uint64_t size) {
    size_t low = 0, high = segment->extent_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segment->extents[middle].offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    struct extent *extents = segment->extents;
    bool joins_before = low > 0 && extents[low - 1].offset + extents[low - 1].size == offset;
    bool joins_after = low < segment->extent_count && offset + size == extents[low].offset;
    if (joins_before && joins_after) {
        extents[low - 1].size += size + extents[low].size;
        memmove(&extents[low], &extents[low + 1], (--segment->extent_count - low) * sizeof *extents);
    } else if (joins_before) {
        extents[low - 1].size += size;
    } else if (joins_after) {
        extents[low].offset = offset;
        extents[low].size += size;
    } else {
        assert(segment->extent_count < segment->extent_capacity);
        memmove(&extents[low + 1], &extents[low], (segment->extent_count++ - low) * sizeof *extents);
        extents[low] = (struct extent){.offset = offset, .size = size};
    }
    segment->free += size;
}

static bool take_anywhere(struct pool *pool, uint64_t size, struct pool_segment **ret_segment, uint64_t *ret_offset) {
    for (uint32_t i = 0; i < pool->segment_count; i++)
        if (segment_take(pool->segments[i], size, ret_offset)) {
            *ret_segment = pool->segments[i];
            return true;
        }
    return false;
}

static void buffer_give_back(struct pool_buffer *buffer) {
    struct pool *pool = buffer->pool;
    segment_give(buffer->segment, buffer->offset, buffer->size);
    buffer->segment->buffers--;
    pool->used -= buffer->size;
    free(buffer);
    pool_changed(pool);
}

/* Evicts the least recently used cache entry that nobody else holds. */
static bool evict_one(struct pool *pool) {
    struct pool_buffer *buffer;
    TAILQ_FOREACH(buffer, &pool->cache, link)
    if (buffer->refs == 1) {
        *buffer->slot = NULL;
        TAILQ_REMOVE(&pool->cache, buffer, link);
        pool->cached -= buffer->size;
        buffer_give_back(buffer);
        return true;
    }
    return false;
}

int pool_alloc(struct pool *pool, uint64_t size, struct pool_buffer **ret_buffer) {
    size = align_up(size, POOL_PAGE);
    struct pool_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return -ENOMEM;
    struct pool_segment *segment;
    uint64_t offset;
    while (!take_anywhere(pool, size, &segment, &offset)) {
        int r = pool->allocated < pool->limit ? pool_grow(pool) : POOL_E_FULL;
        if (r && !evict_one(pool)) {
            free(buffer);
            return POOL_E_FULL;
        }
    }
    int r = segment_ready_to_give(segment);
    if (r < 0) {
        segment_give(segment, offset, size);
        free(buffer);
        return r;
    }
    segment->buffers++;
    pool->used += size;
    *buffer = (struct pool_buffer){
        .pool = pool, .segment = segment, .offset = offset, .size = size, .data = segment->data + offset, .refs = 1};
    /* Have the next segment ready (prefaulted) before this one is full. Failing is harmless now. */
    if (pool->prefaulters && pool->allocated < pool->limit && pool->allocated - pool->used < POOL_SEGMENT_SIZE / 2)
        (void)!pool_grow(pool);
    *ret_buffer = buffer;
    return 0;
}

struct pool_buffer *pool_buffer_ref(struct pool_buffer *buffer) {
    buffer->refs++;
    return buffer;
}

void pool_buffer_unref(struct pool_buffer *buffer) {
    assert(buffer->refs > 0);
    struct pool *pool = buffer->pool;
    if (--buffer->refs == 0) {
        assert(!buffer->slot);
        buffer_give_back(buffer);
    } else if (buffer->refs == 1 && buffer->slot) {
        pool_changed(pool); /* evictable now */
    }
}

void pool_buffer_cache(struct pool_buffer *buffer, struct pool_buffer **slot) {
    assert(*slot == buffer);
    if (buffer->slot)
        return;
    buffer->slot = slot;
    TAILQ_INSERT_TAIL(&buffer->pool->cache, buffer, link);
    buffer->pool->cached += buffer->size;
    if (buffer->refs == 1)
        pool_changed(buffer->pool);
}

void pool_buffer_touch(struct pool_buffer *buffer) {
    if (!buffer->slot)
        return;
    TAILQ_REMOVE(&buffer->pool->cache, buffer, link);
    TAILQ_INSERT_TAIL(&buffer->pool->cache, buffer, link);
}

void pool_buffer_uncache(struct pool_buffer *buffer) {
    if (!buffer->slot)
        return;
    TAILQ_REMOVE(&buffer->pool->cache, buffer, link);
    buffer->pool->cached -= buffer->size;
    buffer->slot = NULL;
}

uint32_t pool_buffer_segment(const struct pool_buffer *buffer) { return buffer->segment->number; }

int pool_segment_fd(struct pool *pool, uint32_t segment) {
    assert(segment < pool->segment_count);
    return pool->segments[segment]->fd;
}

uint64_t pool_segment_size(struct pool *pool, uint32_t segment) {
    assert(segment < pool->segment_count);
    return pool->segments[segment]->size;
}

void *pool_segment_data(const struct pool *pool, uint32_t segment) { return pool->segments[segment]->data; }

void pool_wait(struct pool *pool, struct pool_waiter *waiter) {
    if (waiter->queued)
        return;
    waiter->queued = true;
    pool->waiter_count++;
    TAILQ_INSERT_TAIL(&pool->waiters, waiter, link);
}

void pool_unwait(struct pool *pool, struct pool_waiter *waiter) {
    if (!waiter->queued)
        return;
    waiter->queued = false;
    pool->waiter_count--;
    TAILQ_REMOVE(&pool->waiters, waiter, link);
}

bool pool_is_waited_for(const struct pool *pool) { return !TAILQ_EMPTY(&pool->waiters); }

void pool_get_usage(struct pool *pool, struct pool_usage *ret_usage) {
    *ret_usage = (struct pool_usage){
        .limit = pool->limit,
        .allocated = pool->allocated,
        .used = pool->used,
        .cached = pool->cached,
        .reserved = pool->reserved,
        .segments = pool->segment_count,
    };
}
