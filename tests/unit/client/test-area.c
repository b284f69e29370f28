/* SPDX-License-Identifier: Apache-2.0 */
#include "client/area.h"
#include "client/ckpt.h"
#include "tests/unit/client/unit.h"

#include <time.h>

static void small_ones_share(void **state) {
    struct areas areas = {0};
    void *pointers[5000];
    for (size_t i = 0; i < ARRAY_SIZE(pointers); i++) {
        assert_int_equal(areas_alloc(&areas, 1 + i, &pointers[i]), CKPT_OK);
        assert_int_equal((uintptr_t)pointers[i] % AREA_ALIGNMENT, 0);
        memset(pointers[i], 0xff, 1 + i);
    }
    assert_true(areas.end < 10);
    for (size_t i = 0; i < ARRAY_SIZE(pointers); i += 2)
        assert_true(areas_free(&areas, pointers[i]));
    for (size_t i = 1; i < ARRAY_SIZE(pointers); i += 2)
        for (size_t byte = 0; byte < 1 + i; byte++)
            assert_int_equal(((uint8_t *)pointers[i])[byte], 0xff);
    /* What is handed out again is zeroed. */
    void *again;
    assert_int_equal(areas_alloc(&areas, 4096, &again), CKPT_OK);
    for (size_t byte = 0; byte < 4096; byte++)
        assert_int_equal(((uint8_t *)again)[byte], 0);
    areas_deinit(&areas);
}

static void no_limit_is_met(void **state) {
    struct areas areas = {0};
    for (size_t i = 0; i < 3000; i++) {
        void *pointer;
        assert_int_equal(areas_alloc(&areas, KIB(100), &pointer), CKPT_OK);
    }
    assert_true(areas.end < 100);
    areas_deinit(&areas);
}

static void finding(void **state) {
    struct areas areas = {0};
    void *pointer;
    uint32_t area;
    uint64_t offset;
    assert_int_equal(areas_alloc(&areas, 1000, &pointer), CKPT_OK);
    assert_true(areas_find(&areas, pointer, 1000, &area, &offset));
    assert_ptr_equal(areas.items[area].map + offset, pointer);
    assert_false(areas_find(&areas, &area, 4, &area, &offset));
    assert_false(areas_find(&areas, pointer, MIB(64), &area, &offset));
    assert_int_equal(areas_size(&areas, pointer), 1000);
    assert_false(areas_free(&areas, (uint8_t *)pointer + 64));
    areas_deinit(&areas);
}

static unsigned dropped_count;
static void dropped(void *context, uint32_t area) { dropped_count++; }

static void trimming(void **state) {
    struct areas areas = {0};
    void *small, *large;
    assert_int_equal(areas_alloc(&areas, 100, &small), CKPT_OK);
    assert_int_equal(areas_alloc(&areas, MIB(20), &large), CKPT_OK);
    assert_int_equal(areas.end, 2);
    areas.items[0].announced = areas.items[1].announced = true;
    assert_true(areas_free(&areas, large));
    areas_trim(&areas, dropped, NULL);
    assert_int_equal(dropped_count, 1);
    assert_int_equal(areas.end, 1);
    assert_int_equal(areas.total, MIB(4));
    assert_true(areas_free(&areas, small));
    areas_trim(&areas, dropped, NULL);
    assert_int_equal(areas.end, 0);
    areas_deinit(&areas);
}

/* Random allocations and frees, each filled with its own byte. */
static void random_use(void **state) {
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srandom(seed);
    struct areas areas = {0};
    struct {
        uint8_t *pointer;
        uint64_t size;
    } blocks[200] = {0};
    for (unsigned round = 0; round < 20000; round++) {
        size_t i = (size_t)random() % ARRAY_SIZE(blocks);
        uint8_t mark = (uint8_t)(i + 1);
        if (blocks[i].pointer) {
            for (uint64_t byte = 0; byte < blocks[i].size; byte += 61)
                assert_int_equal(blocks[i].pointer[byte], mark);
            assert_true(areas_free(&areas, blocks[i].pointer));
            blocks[i].pointer = NULL;
            continue;
        }
        void *pointer;
        blocks[i].size = (uint64_t)random() % (random() % 10 ? 2000 : 300000);
        assert_int_equal(areas_alloc(&areas, blocks[i].size, &pointer), CKPT_OK);
        blocks[i].pointer = pointer;
        for (uint64_t byte = 0; byte < blocks[i].size; byte++)
            assert_int_equal(blocks[i].pointer[byte], 0);
        memset(pointer, mark, blocks[i].size);
    }
    areas_deinit(&areas);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_ones_share), cmocka_unit_test(no_limit_is_met), cmocka_unit_test(finding),
        cmocka_unit_test(trimming),         cmocka_unit_test(random_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
