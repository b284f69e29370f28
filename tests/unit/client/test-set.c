/* SPDX-License-Identifier: Apache-2.0 */
#include "client/clock.h"
#include "client/set.h"
#include "tests/unit/client/unit.h"

static float memory[4096];
static const struct image_identity identity = {.job = "job", .rank = 0, .world = 1};

static const struct set_eager no_eager;

static int add(struct set *set, const char *name, uint64_t shape, uint64_t offset, uint64_t extent) {
    struct ckpt_shard shard = {.size = sizeof shard,
                               .dtype = CKPT_F32,
                               .name = name,
                               .data = memory,
                               .dimensions = 1,
                               .shape = &shape,
                               .offset = &offset,
                               .extent = &extent};
    uint64_t id;
    return set_add(set, &shard, DEVICE_HOST, &id);
}

static void names(void **state) {
    struct set set = {0};
    static char long_name[SHARDS_NAME_MAX + 2];
    assert_int_equal(add(&set, NULL, 4, 0, 4), CKPT_E_INVALID);
    assert_int_equal(add(&set, "", 4, 0, 4), CKPT_E_INVALID);
    assert_int_equal(add(&set, "\xc0\x80", 4, 0, 4), CKPT_E_INVALID);
    memset(long_name, 'n', SHARDS_NAME_MAX + 1);
    assert_int_equal(add(&set, long_name, 4, 0, 4), CKPT_E_LIMIT);
    assert_non_null(strstr(ckpt_strerror_last(), "8192"));
    long_name[SHARDS_NAME_MAX] = '\0';
    assert_int_equal(add(&set, long_name, 4, 0, 4), CKPT_OK);
    assert_int_equal(set.used, 1);
    set_deinit(&set);
}

static void pieces(void **state) {
    struct set set = {0};
    assert_int_equal(add(&set, "w", 100, 0, 10), CKPT_OK);
    assert_int_equal(add(&set, "w", 100, 20, 10), CKPT_OK);
    assert_int_equal(add(&set, "w", 100, 10, 10), CKPT_OK);
    assert_int_equal(add(&set, "w", 100, 0, 10), CKPT_E_EXISTS);
    assert_int_equal(add(&set, "w", 100, 29, 10), CKPT_E_EXISTS);
    assert_int_equal(add(&set, "w", 100, 0, 100), CKPT_E_EXISTS);
    assert_int_equal(add(&set, "w", 101, 50, 10), CKPT_E_MISMATCH);
    assert_int_equal(add(&set, "w", 100, 95, 10), CKPT_E_INVALID);
    assert_int_equal(add(&set, "w", 100, 40, 0), CKPT_OK); /* no elements: overlaps nothing */
    assert_int_equal(add(&set, "w", 100, 60, 0), CKPT_E_EXISTS);
    struct set_shard *second = set_find(&set, 2);
    assert_non_null(second);
    set_remove(&set, second);
    assert_null(set_find(&set, 2));
    assert_int_equal(add(&set, "w", 100, 20, 10), CKPT_OK);
    set_deinit(&set);
}

static void grids(void **state) {
    struct set set = {0};
    uint64_t shape[2] = {8, 8}, extent[2] = {2, 2}, offset[2], id;
    for (offset[0] = 0; offset[0] < 8; offset[0] += 2)
        for (offset[1] = 0; offset[1] < 8; offset[1] += 2) {
            struct ckpt_shard shard = {.size = sizeof shard,
                                       .dtype = CKPT_I8,
                                       .name = "g",
                                       .data = memory,
                                       .dimensions = 2,
                                       .shape = shape,
                                       .offset = offset,
                                       .extent = extent};
            assert_int_equal(set_add(&set, &shard, DEVICE_HOST, &id), CKPT_OK);
            assert_int_equal(set_add(&set, &shard, DEVICE_HOST, &id), CKPT_E_EXISTS);
            shard.replica_count = 2; /* another replica is not stored: it overlaps nothing */
            shard.replica_index = 1;
            assert_int_equal(set_add(&set, &shard, DEVICE_HOST, &id), CKPT_OK);
        }
    struct ckpt_shard range = {.size = sizeof range,
                               .dtype = CKPT_I8,
                               .name = "g",
                               .data = memory,
                               .dimensions = 2,
                               .shape = shape,
                               .range = 1,
                               .start = 63,
                               .count = 1};
    assert_int_equal(set_add(&set, &range, DEVICE_HOST, &id), CKPT_E_EXISTS);
    set_deinit(&set);
}

static void bad_options(void **state) {
    struct set set = {0};
    uint64_t shape = 4, offset = 2, id;
    struct ckpt_shard good = {
        .size = sizeof good, .dtype = CKPT_F32, .name = "x", .data = memory, .dimensions = 1, .shape = &shape};
    struct ckpt_shard bad = good;
    bad.dtype = 18;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.data = NULL;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.dimensions = 33;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_LIMIT);
    bad = good, bad.shape = NULL;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.offset = &offset;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.flags = 4;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.count = 4;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.range = 1, bad.start = 2, bad.count = 3;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    bad = good, bad.replica_index = 1;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    int64_t stride = INT64_MAX / 2;
    bad = good, bad.stride = &stride;
    assert_int_equal(set_add(&set, &bad, DEVICE_HOST, &id), CKPT_E_INVALID);
    assert_int_equal(set.used, 0);
    assert_null(set.tensors);
    set_deinit(&set);
}

static void aliases(void **state) {
    struct set set = {0};
    struct areas areas = {0};
    assert_int_equal(add(&set, "w", 8, 0, 8), CKPT_OK);
    assert_int_equal(set_alias(&set, "a", "nothing"), CKPT_E_NOT_FOUND);
    assert_int_equal(set_alias(&set, "w", "w"), CKPT_E_INVALID);
    assert_int_equal(set_alias(&set, "a", "w"), CKPT_OK);
    assert_int_equal(set_alias(&set, "a", "w"), CKPT_E_EXISTS);
    assert_int_equal(set_alias(&set, "b", "a"), CKPT_OK); /* of w */
    assert_int_equal(add(&set, "a", 8, 0, 8), CKPT_E_EXISTS);
    struct set_image image;
    assert_int_equal(set_build(&set, &areas, NULL, &no_eager, &identity, &image), CKPT_OK);
    assert_int_equal(shards_count(image.shards), 3);
    struct shard shard;
    shards_get(image.shards, 2, &shard);
    assert_string_equal(shard.name, "b");
    assert_string_equal(shard.target, "w");
    set_image_deinit(&image);
    /* Without its tensor an alias sleeps. */
    set_remove(&set, set_find(&set, 1));
    assert_int_equal(set_build(&set, &areas, NULL, &no_eager, &identity, &image), CKPT_OK);
    assert_int_equal(shards_count(image.shards), 0);
    assert_int_equal(image_size(&image.layout, 0), 4096);
    set_image_deinit(&image);
    set_deinit(&set);
}

static void places(void **state) {
    struct set set = {0};
    struct areas areas = {0};
    void *shared, *eager;
    assert_int_equal(areas_alloc(&areas, 4096, &shared), CKPT_OK);
    uint64_t shape = 10, id;
    int64_t backwards = -4;
    struct ckpt_shard one = {.size = sizeof one,
                             .dtype = CKPT_F32,
                             .name = "shared",
                             .data = (float *)shared + 9,
                             .dimensions = 1,
                             .shape = &shape,
                             .stride = &backwards};
    struct ckpt_shard two = {
        .size = sizeof two, .dtype = CKPT_F32, .name = "private", .data = memory, .dimensions = 1, .shape = &shape};
    struct ckpt_shard three = {.size = sizeof three,
                               .dtype = CKPT_F32,
                               .name = "eager",
                               .data = memory,
                               .dimensions = 1,
                               .shape = &shape,
                               .flags = CKPT_EAGER};
    assert_int_equal(set_add(&set, &one, DEVICE_HOST, &id), CKPT_OK);
    assert_int_equal(set_add(&set, &two, DEVICE_HOST, &id), CKPT_OK);
    assert_int_equal(set_add(&set, &three, DEVICE_HOST, &id), CKPT_OK);
    set_place_eager(&set);
    assert_int_equal(set.eager_bytes, 64);
    assert_int_equal(areas_alloc(&areas, 64, &eager), CKPT_OK);
    struct set_image image;
    assert_int_equal(set_build(&set, &areas, NULL, &(struct set_eager){.host = eager}, &identity, &image), CKPT_OK);
    struct shard shard;
    shards_get(image.shards, 0, &shard);
    assert_int_equal(shard.area, 0);
    assert_int_equal(shard.address, 36);
    assert_false(shard.contiguous);
    shards_get(image.shards, 1, &shard);
    assert_true(shard.area == SHARDS_AREA_PRIVATE);
    assert_int_equal(shard.address, (uintptr_t)memory);
    shards_get(image.shards, 2, &shard);
    assert_int_equal(shard.area, 0);
    assert_ptr_equal(areas.items[0].map + shard.address, eager);
    assert_true(shard.flags & SHARD_EAGER);
    memory[3] = 42;
    set_copy_eager(&set, &(struct set_eager){.host = eager});
    assert_true(((float *)eager)[3] == 42);
    assert_ptr_equal(set_next_in(&set, NULL, shared, 4096), set_find(&set, 1));
    assert_null(set_next_in(&set, set_find(&set, 1), shared, 4096));
    set_image_deinit(&image);
    set_deinit(&set);
    areas_deinit(&areas);
}

static void many(void **state) {
    struct set set = {0};
    uint64_t start = clock_now();
    char name[32];
    for (unsigned i = 0; i < 100000; i++) {
        snprintf(name, sizeof name, "layer.%u.weight", i);
        assert_int_equal(add(&set, name, 100, 0, 100), CKPT_OK);
    }
    for (uint64_t i = 0; i < 100000; i++)
        assert_int_equal(add(&set, "one tensor", 1000000, i * 10, 10), CKPT_OK);
    uint64_t protecting = clock_now() - start;
    struct areas areas = {0};
    struct set_image image;
    assert_int_equal(set_build(&set, &areas, NULL, &no_eager, &identity, &image), CKPT_OK);
    print_message("protect %.0f ms, build %.0f ms\n", (double)protecting / 1e6,
                  (double)(clock_now() - start - protecting) / 1e6);
    set_image_deinit(&image);
    for (uint64_t id = 1; id <= 200000; id += id % 3 ? 1 : 2)
        set_remove(&set, set_find(&set, id));
    set_deinit(&set);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),   cmocka_unit_test(pieces), cmocka_unit_test(grids), cmocka_unit_test(bad_options),
        cmocka_unit_test(aliases), cmocka_unit_test(places), cmocka_unit_test(many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
