/* SPDX-License-Identifier: Apache-2.0 */
/* The pool against a model: which bytes are out, what the limit is, who may be evicted. */
#include "daemon/pool.h"
#include "tests/unit/daemon/random.h"
#include "tests/unit/daemon/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

static struct loop *loop;

static int setup(void **state) {
    (void)state;
    return loop_new("posix", &loop);
}

static int teardown(void **state) {
    (void)state;
    loop_free(loop);
    return 0;
}

static struct pool *make(uint64_t limit) {
    struct pool *pool = NULL;
    assert_int_equal(pool_new(loop, limit, false, &pool), 0);
    return pool;
}

static struct pool_usage usage_of(struct pool *pool) {
    struct pool_usage usage;
    pool_get_usage(pool, &usage);
    return usage;
}

static void fills_to_its_limit_and_no_further(void **state) {
    (void)state;
    struct pool *pool = make(MIB(1));
    struct pool_buffer *buffers[256], *more;
    for (size_t i = 0; i < ARRAY_SIZE(buffers); i++) {
        assert_int_equal(pool_alloc(pool, 1, &buffers[i]), 0);
        assert_int_equal(buffers[i]->size, POOL_PAGE);
        memset(buffers[i]->data, (int)i, POOL_PAGE);
    }
    assert_int_equal(pool_alloc(pool, 1, &more), POOL_E_FULL);
    assert_int_equal(usage_of(pool).used, MIB(1));
    for (size_t i = 0; i < ARRAY_SIZE(buffers); i++) {
        assert_int_equal(buffers[i]->data[0], (uint8_t)i);
        assert_int_equal(buffers[i]->data[POOL_PAGE - 1], (uint8_t)i);
    }
    /* Every second one given back makes no room for two pages together; then all of it is one piece again. */
    for (size_t i = 0; i < ARRAY_SIZE(buffers); i += 2)
        pool_buffer_unref(buffers[i]);
    assert_int_equal(pool_alloc(pool, 2 * POOL_PAGE, &more), POOL_E_FULL);
    for (size_t i = 1; i < ARRAY_SIZE(buffers); i += 2)
        pool_buffer_unref(buffers[i]);
    assert_int_equal(pool_alloc(pool, MIB(1), &more), 0);
    pool_buffer_unref(more);
    assert_int_equal(usage_of(pool).used, 0);
    pool_free(pool);
}

static void a_thousand_small_images_fit_in_64_mib(void **state) {
    (void)state;
    struct pool *pool = make(MIB(64));
    struct pool_buffer *buffers[1000];
    for (size_t i = 0; i < ARRAY_SIZE(buffers); i++) {
        assert_true(pool_reserve(pool, KIB(16)));
        assert_int_equal(pool_alloc(pool, KIB(16), &buffers[i]), 0);
    }
    for (size_t i = 0; i < ARRAY_SIZE(buffers); i++) {
        pool_buffer_unref(buffers[i]);
        pool_release(pool, KIB(16));
    }
    pool_free(pool);
}

static void reservations_keep_to_the_limit(void **state) {
    (void)state;
    struct pool *pool = make(MIB(8));
    assert_true(pool_reserve(pool, MIB(5)));
    assert_false(pool_reserve(pool, MIB(4)));
    assert_true(pool_reserve(pool, MIB(3)));
    assert_false(pool_reserve(pool, 1));
    pool_release(pool, MIB(5));
    pool_release(pool, MIB(3));
    assert_true(pool_reserve(pool, GIB(100))); /* as much as there is */
    assert_int_equal(usage_of(pool).reserved, MIB(8));
    pool_release(pool, GIB(100));
    assert_int_equal(usage_of(pool).reserved, 0);
    pool_free(pool);
}

/* The least recently used entry that nobody else holds goes first; its slot is cleared. */
static void evicts_the_oldest_unused_entry(void **state) {
    (void)state;
    struct pool *pool = make(MIB(1));
    struct pool_buffer *slots[4], *more;
    for (size_t i = 0; i < ARRAY_SIZE(slots); i++) {
        assert_int_equal(pool_alloc(pool, KIB(256), &slots[i]), 0);
        pool_buffer_cache(slots[i], &slots[i]);
    }
    assert_int_equal(usage_of(pool).cached, MIB(1));
    pool_buffer_touch(slots[0]);
    struct pool_buffer *held = pool_buffer_ref(slots[1]);
    assert_int_equal(pool_alloc(pool, KIB(256), &more), 0);
    assert_null(slots[2]);
    assert_non_null(slots[0]);
    assert_ptr_equal(slots[1], held);
    pool_buffer_uncache(slots[3]);
    pool_buffer_unref(more);
    assert_int_equal(pool_alloc(pool, KIB(512), &more), POOL_E_FULL); /* 0 goes, but 1 lies between */
    assert_null(slots[0]);
    pool_buffer_unref(held);
    assert_int_equal(pool_alloc(pool, KIB(768), &more), 0);
    assert_null(slots[1]);
    pool_buffer_unref(more);
    pool_buffer_unref(slots[3]);
    pool_free(pool);
}

struct waiting {
    struct pool_waiter waiter;
    struct pool *pool;
    int calls, again;
};

static void room_came(struct pool_waiter *waiter) {
    struct waiting *waiting = CONTAINER_OF(waiter, struct waiting, waiter);
    waiting->calls++;
    if (waiting->again-- > 0)
        pool_wait(waiting->pool, waiter);
}

static void waiters_are_told_from_the_loop(void **state) {
    (void)state;
    struct pool *pool = make(MIB(1));
    struct pool_buffer *buffer;
    struct waiting one = {.waiter.fn = room_came, .pool = pool, .again = 3},
                   two = {.waiter.fn = room_came, .pool = pool}, gone = {.waiter.fn = room_came, .pool = pool};
    assert_int_equal(pool_alloc(pool, MIB(1), &buffer), 0);
    pool_wait(pool, &one.waiter);
    pool_wait(pool, &two.waiter);
    pool_wait(pool, &gone.waiter);
    pool_unwait(pool, &gone.waiter);
    pool_buffer_unref(buffer);
    assert_int_equal(one.calls, 0);
    assert_int_equal(loop_run(loop), 0);
    assert_int_equal(one.calls, 1); /* it waits again, for the next change */
    assert_int_equal(two.calls, 1);
    assert_int_equal(gone.calls, 0);
    pool_unwait(pool, &one.waiter);
    pool_free(pool);
}

/* A client may map a segment, and read it; it can neither write it nor change its size. */
static void segments_are_read_only_for_others(void **state) {
    (void)state;
    struct pool *pool = make(MIB(1));
    struct pool_buffer *buffer;
    assert_int_equal(pool_alloc(pool, POOL_PAGE, &buffer), 0);
    memset(buffer->data, 42, POOL_PAGE);
    uint32_t segment = pool_buffer_segment(buffer);
    int fd = pool_segment_fd(pool, segment);
    uint64_t size = pool_segment_size(pool, segment);
    assert_int_equal(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED, 1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, (off_t)size * 2), -1);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    const uint8_t *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    assert_int_equal(map[buffer->offset], 42);
    munmap((void *)map, size);
    pool_buffer_unref(buffer);
    pool_free(pool);
}

/* ---- against a model ---- */

#define MODEL_BUFFERS 300

struct model_buffer {
    struct pool_buffer *buffer;
    uint8_t mark;
    uint64_t size;
    bool cached, held; /* held: one more reference */
};

/* Eviction clears slots: what the model holds is what slots still say. */
static void check_model(struct pool *pool, const struct model_buffer *model, uint64_t limit) {
    uint64_t used = 0, cached = 0;
    for (size_t i = 0; i < MODEL_BUFFERS; i++) {
        const struct model_buffer *entry = &model[i];
        if (!entry->buffer)
            continue;
        used += entry->size;
        cached += entry->cached ? entry->size : 0;
        assert_int_equal(entry->buffer->size, entry->size);
        assert_int_equal(entry->buffer->data[0], entry->mark);
        assert_int_equal(entry->buffer->data[entry->size - 1], entry->mark);
    }
    struct pool_usage usage = usage_of(pool);
    assert_int_equal(usage.used, used);
    assert_int_equal(usage.cached, cached);
    assert_true(usage.used <= usage.allocated && usage.allocated <= limit);
}

static void model_alloc(struct pool *pool, struct model_buffer *entry, uint64_t size) {
    struct pool_buffer *buffer;
    int r = pool_alloc(pool, size, &buffer);
    assert_true(r == 0 || r == POOL_E_FULL);
    if (r)
        return;
    *entry =
        (struct model_buffer){.buffer = buffer, .mark = (uint8_t)random_number(256), .size = align_up(size, POOL_PAGE)};
    memset(buffer->data, entry->mark, entry->size);
}

static void model_drop(struct model_buffer *entry) {
    if (entry->cached)
        pool_buffer_uncache(entry->buffer);
    if (entry->held)
        pool_buffer_unref(entry->buffer);
    pool_buffer_unref(STEAL(entry->buffer));
}

static void random_operations(void **state) {
    (void)state;
    random_seed();
    struct model_buffer *model = calloc(MODEL_BUFFERS, sizeof *model);
    for (int round = 0; round < 5; round++) {
        uint64_t limit = MIB(4 + random_number(12));
        struct pool *pool = make(limit);
        for (int step = 0; step < 20000; step++) {
            struct model_buffer *entry = &model[random_number(MODEL_BUFFERS)];
            if (!entry->buffer) {
                model_alloc(pool, entry, random_number(10) ? 1 + random_number(KIB(64)) : 1 + random_number(MIB(2)));
            } else if (random_number(3) == 0) {
                model_drop(entry);
            } else if (!entry->cached && random_number(2)) {
                entry->cached = true;
                pool_buffer_cache(entry->buffer, &entry->buffer);
            } else if (entry->held) {
                entry->held = false;
                pool_buffer_unref(entry->buffer);
            } else if (random_number(2)) {
                entry->held = true;
                pool_buffer_ref(entry->buffer);
            } else {
                pool_buffer_touch(entry->buffer);
            }
            if (step % 500 == 0)
                check_model(pool, model, limit);
        }
        for (size_t i = 0; i < MODEL_BUFFERS; i++)
            if (model[i].buffer)
                model_drop(&model[i]);
        check_model(pool, model, limit);
        struct pool_buffer *all; /* everything has merged again */
        assert_int_equal(pool_alloc(pool, limit, &all), 0);
        pool_buffer_unref(all);
        pool_free(pool);
    }
    free(model);
}

static void count_grown(void *context) { ++*(unsigned *)context; }

/* Segments for what is expected, in the background; no more than the limit, and none when it is gone again. */
static void expected_images_have_their_segments(void **state) {
    (void)state;
    struct pool *pool = NULL;
    unsigned grown = 0;
    assert_int_equal(pool_new(loop, MIB(280), true, &pool), 0);
    pool_on_prefault(pool, count_grown, &grown);
    assert_int_equal(usage_of(pool).segments, 1);
    pool_expect(pool, MIB(200));
    assert_int_equal(usage_of(pool).segments, 1);
    pool_expect(pool, MIB(200));
    assert_int_equal(usage_of(pool).segments, 2);
    assert_int_equal(usage_of(pool).allocated, MIB(280));
    pool_expect(pool, MIB(2000));
    pool_unexpect(pool, MIB(2400));
    assert_int_equal(usage_of(pool).segments, 2);
    assert_int_equal(pool_prefaulted(pool), 0);
    assert_int_equal(loop_run(loop), 0);
    assert_int_equal(pool_prefaulted(pool), 2);
    assert_int_equal(grown, 2);
    pool_free(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(fills_to_its_limit_and_no_further, setup, teardown),
        cmocka_unit_test_setup_teardown(a_thousand_small_images_fit_in_64_mib, setup, teardown),
        cmocka_unit_test_setup_teardown(reservations_keep_to_the_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(evicts_the_oldest_unused_entry, setup, teardown),
        cmocka_unit_test_setup_teardown(waiters_are_told_from_the_loop, setup, teardown),
        cmocka_unit_test_setup_teardown(segments_are_read_only_for_others, setup, teardown),
        cmocka_unit_test_setup_teardown(expected_images_have_their_segments, setup, teardown),
        cmocka_unit_test_setup_teardown(random_operations, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
