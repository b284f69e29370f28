/* SPDX-License-Identifier: Apache-2.0 */
/* Images of sets on several devices: each byte is at home with one, where the device that has it says, and a device's
 * bytes fill its place without gaps. */
#include "daemon/set.h"
#include "daemon/spread.h"
#include "tests/unit/daemon/unit.h"

#include <stdlib.h>
#include <sys/random.h>

#define DEVICES 3
#define SHARDS_MAX 40
#define MEMORY_SIZE MIB(1)

/* Nothing is read: devices and memories are there to be told apart. Memory i is on device i % DEVICES. */
static struct device devices[DEVICES];
static struct device_extent extent = {.size = MEMORY_SIZE};
static struct device_memory memories[2 * DEVICES];
static struct device_memory *memory_list[ARRAY_SIZE(memories)];

static void describe_memories(void) {
    for (uint32_t i = 0; i < ARRAY_SIZE(memories); i++) {
        memories[i] = (struct device_memory){.refs = 1,
                                             .number = i,
                                             .kind = DEVICE_LEGACY,
                                             .device = &devices[i % DEVICES],
                                             .size = MEMORY_SIZE,
                                             .count = 1,
                                             .extents = &extent};
        memory_list[i] = &memories[i];
    }
}

/* A set of byte tensors of these sizes, in these memories (UINT32_MAX: the client's own). */
static struct set *set_of(const uint32_t *where, const uint64_t *sizes, uint32_t count) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    for (uint32_t i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%03u", i);
        const struct shard shard = {
            .name = name,
            .name_length = (uint32_t)strlen(name),
            .dtype = DTYPE_U8,
            .area = where[i] == UINT32_MAX ? SHARDS_AREA_PRIVATE : SHARDS_AREA_DEVICE + where[i],
            .address = where[i] == UINT32_MAX ? 4096 : 0,
            .contiguous = true,
            .replica_count = 1,
            .geometry = {.dims = 1, .shape = {sizes[i]}, .extent = {sizes[i]}},
        };
        assert_int_equal(shards_writer_add(&writer, &shard, &problem), 0);
    }
    const struct image_identity identity = {.job = "spread", .world = 1};
    static struct area *areas[AREAS_MAX];
    const struct set_options options = {.count = count,
                                        .identity = &identity,
                                        .areas = areas,
                                        .memories = memory_list,
                                        .memory_count = ARRAY_SIZE(memories)};
    struct set *set;
    if (set_new(writer.data, writer.size, &options, &set, &problem) < 0)
        fail_msg("%s", problem.text);
    shards_writer_deinit(&writer);
    return set;
}

static uint32_t index_of(const struct set *set, uint32_t memory) {
    uint32_t i = 0;
    while (set->devices[i] != memories[memory].device)
        i++;
    return i;
}

/* All runs of a device in [0, image_size) fill its place, in order; a map says whose each byte is. */
static uint8_t *map_of(const struct set *set, uint64_t image_size) {
    uint8_t *map = malloc(image_size);
    memset(map, UINT8_MAX, image_size);
    for (uint32_t device = 0; device < set->device_count; device++) {
        uint64_t at = 0, filled = 0;
        struct spread_run run;
        for (; spread_next(set->spread, device, at, image_size, &run); at = run.offset + run.length) {
            assert_true(run.length && run.offset >= at && run.length <= image_size - run.offset);
            assert_int_equal(run.at, filled);
            filled += run.length;
            for (uint64_t i = run.offset; i < run.offset + run.length; i++) {
                assert_int_equal(map[i], UINT8_MAX);
                map[i] = (uint8_t)device;
            }
        }
        assert_int_equal(spread_size(set->spread, device, image_size), filled);
    }
    return map;
}

static void check(const struct set *set, const uint32_t *where, const uint64_t *sizes, uint32_t count,
                  uint64_t image_size) {
    uint8_t *map = map_of(set, image_size);
    for (uint64_t i = 0; i < image_size; i++)
        assert_int_not_equal(map[i], UINT8_MAX);
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t byte = 0; where[i] != UINT32_MAX && byte < sizes[i]; byte++)
            assert_int_equal(map[set->layout.shard_offset[i] + byte], index_of(set, where[i]));
    free(map);
}

static void one_device_has_it_as_it_is(void **state) {
    (void)state;
    const uint32_t where[] = {UINT32_MAX, 1, UINT32_MAX, 1 + DEVICES, UINT32_MAX};
    const uint64_t sizes[] = {100, 200, 300, 400, 500};
    struct set *set = set_of(where, sizes, ARRAY_SIZE(where));
    uint64_t size = image_size(&set->layout, 77);
    struct spread_run run;
    assert_int_equal(spread_size(set->spread, 0, size), size);
    assert_true(spread_next(set->spread, 0, 1000, 2000, &run));
    assert_int_equal(run.offset, 1000);
    assert_int_equal(run.length, 1000);
    assert_int_equal(run.at, 1000);
    set_unref(set);
}

/* The header with the first, what the host has with what is before it, the inline state with the last. */
static void what_the_host_has_goes_along(void **state) {
    (void)state;
    const uint32_t where[] = {UINT32_MAX, 0, UINT32_MAX, 1, UINT32_MAX};
    const uint64_t sizes[] = {100, 200, 300, 400, 500};
    struct set *set = set_of(where, sizes, ARRAY_SIZE(where));
    uint64_t start = set->layout.data_start, size = image_size(&set->layout, 77);
    assert_int_equal(spread_size(set->spread, 0, size), start + 600);
    assert_int_equal(spread_size(set->spread, 1, size), size - start - 600);
    uint64_t without = image_size(&set->layout, 0);
    assert_int_equal(spread_size(set->spread, 0, without), start + 600);
    assert_int_equal(spread_size(set->spread, 1, without), 900);
    check(set, where, sizes, ARRAY_SIZE(where), size);
    set_unref(set);
}

static void pieces_within_a_range(void **state) {
    (void)state;
    const uint32_t where[] = {0, 1, 0, 2, 0};
    const uint64_t sizes[] = {100, 100, 100, 100, 100};
    struct set *set = set_of(where, sizes, ARRAY_SIZE(where));
    uint64_t start = set->layout.data_start;
    struct spread_run run;
    assert_true(spread_next(set->spread, 1, start + 50, start + 150, &run));
    assert_int_equal(run.offset, start + 100);
    assert_int_equal(run.length, 50);
    assert_int_equal(run.at, 0);
    assert_true(spread_next(set->spread, 0, start + 120, start + 260, &run));
    assert_int_equal(run.offset, start + 200);
    assert_int_equal(run.length, 60);
    assert_int_equal(run.at, start + 100);
    assert_false(spread_next(set->spread, 2, start, start + 300, &run));
    assert_false(spread_next(set->spread, 2, start + 400, start + 500, &run));
    assert_false(spread_next(set->spread, 1, start + 150, start + 150, &run));
    set_unref(set);
}

static void at_random(void **state) {
    (void)state;
    unsigned int seed = 0;
    const char *given = getenv("TEST_SEED");
    if (given)
        seed = (unsigned)strtoul(given, NULL, 0);
    else if (getrandom(&seed, sizeof seed, 0) != sizeof seed)
        fail();
    print_message("TEST_SEED=%u\n", seed);
    for (int round = 0; round < 200; round++) {
        uint32_t where[SHARDS_MAX], count = 1 + (unsigned)rand_r(&seed) % SHARDS_MAX, on_devices = 0;
        uint64_t sizes[SHARDS_MAX];
        for (uint32_t i = 0; i < count; i++) {
            where[i] = rand_r(&seed) % 4 ? (unsigned)rand_r(&seed) % ARRAY_SIZE(memories) : UINT32_MAX;
            sizes[i] = rand_r(&seed) % 8 ? (unsigned)rand_r(&seed) % 3000 : 0;
            on_devices += where[i] != UINT32_MAX && sizes[i];
        }
        struct set *set = set_of(where, sizes, count);
        if (on_devices)
            check(set, where, sizes, count, image_size(&set->layout, (unsigned)rand_r(&seed) % 100));
        else
            assert_null(set->spread);
        set_unref(set);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_device_has_it_as_it_is),
        cmocka_unit_test(what_the_host_has_goes_along),
        cmocka_unit_test(pieces_within_a_range),
        cmocka_unit_test(at_random),
    };
    describe_memories();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
