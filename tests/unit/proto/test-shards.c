/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/messages.h"
#include "proto/shards.h"
#include "tests/unit/proto/unit.h"

#include <errno.h>
#include <inttypes.h>

static struct shard plain(const char *name, uint64_t elements) {
    return (struct shard){
        .name = name,
        .dtype = DTYPE_F32,
        .area = SHARDS_AREA_PRIVATE,
        .address = 0x10000,
        .contiguous = true,
        .replica_count = 1,
        .geometry = {.dims = 1, .shape = {elements}, .extent = {elements}},
    };
}

static void add(struct shards_writer *writer, const struct shard *shard) {
    struct problem problem = PROBLEM_NONE;
    if (shards_writer_add(writer, shard, &problem) < 0)
        fail_msg("%s", problem.text);
}

static void assert_same(const struct shard *a, const struct shard *b) {
    assert_string_equal(a->name, b->name);
    assert_int_equal(b->name_length, strlen(a->name));
    assert_int_equal(a->target != NULL, b->target != NULL);
    if (a->target)
        assert_string_equal(a->target, b->target);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->flags, b->flags);
    assert_int_equal(a->area, b->area);
    assert_int_equal(a->address, b->address);
    assert_int_equal(a->contiguous, b->contiguous);
    assert_int_equal(a->replica_index, b->replica_index);
    assert_int_equal(a->replica_count, b->replica_count);
    assert_memory_equal(&a->geometry.shape, &b->geometry.shape, sizeof a->geometry.shape);
    assert_memory_equal(&a->geometry.offset, &b->geometry.offset, sizeof a->geometry.offset);
    assert_memory_equal(&a->geometry.extent, &b->geometry.extent, sizeof a->geometry.extent);
    assert_int_equal(a->geometry.start, b->geometry.start);
    assert_int_equal(a->geometry.count, b->geometry.count);
    assert_int_equal(a->geometry.is_range, b->geometry.is_range);
    assert_int_equal(a->geometry.dims, b->geometry.dims);
    if (!a->contiguous)
        assert_memory_equal(a->stride, b->stride, sizeof a->stride);
}

/* One of each kind. */
static size_t samples(struct shard ret_samples[9]) {
    size_t n = 0;
    ret_samples[n++] = plain("layers.0.weight", 1000);
    ret_samples[n] = plain("scalar", 1);
    ret_samples[n].dtype = DTYPE_F64;
    ret_samples[n++].geometry = (struct geometry){0};
    ret_samples[n] = plain("transposed", 0);
    ret_samples[n].contiguous = false;
    ret_samples[n].stride[0] = 4;
    ret_samples[n].stride[1] = -400;
    ret_samples[n++].geometry = (struct geometry){.dims = 2, .shape = {8, 9}, .offset = {2, 3}, .extent = {4, 5}};
    ret_samples[n] = plain("flat", 0);
    ret_samples[n++].geometry =
        (struct geometry){.is_range = true, .dims = 2, .shape = {8, 9}, .start = 5, .count = 60};
    ret_samples[n] = plain("every other", 0);
    ret_samples[n].contiguous = false;
    ret_samples[n].stride[0] = 8;
    ret_samples[n++].geometry = (struct geometry){.is_range = true, .dims = 1, .shape = {99}, .start = 0, .count = 9};
    ret_samples[n] = plain("tied", 1000);
    ret_samples[n].flags = SHARD_ALIAS;
    ret_samples[n++].target = "layers.0.weight";
    ret_samples[n] = plain("rng \xc3\xa9\xf0\x9f\x98\x80", 625);
    ret_samples[n].flags = SHARD_RANK_LOCAL | SHARD_EAGER;
    ret_samples[n].area = AREAS_MAX - 1;
    ret_samples[n++].address = 0;
    ret_samples[n] = plain("replica", 10);
    ret_samples[n].replica_index = 3;
    ret_samples[n++].replica_count = 4;
    ret_samples[n] = plain("empty", 0);
    ret_samples[n++].dtype = DTYPE_C128;
    return n;
}

static void test_round_trip(void **state) {
    struct shard expected[9];
    struct shards_writer writer = {0};
    size_t count = samples(expected);
    for (size_t i = 0; i < count; i++)
        add(&writer, &expected[i]);
    assert_int_equal(writer.count, count);
    assert_int_equal(writer.size % 8, 0);

    struct shards *shards = NULL;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(writer.data, writer.size, writer.count, &shards, &problem), 0);
    memset(writer.data, 0xee, writer.size); /* the table has its own copy */
    shards_writer_deinit(&writer);
    assert_int_equal(shards_count(shards), count);
    for (uint32_t i = 0; i < count; i++) {
        struct shard shard;
        memset(&shard, 0x77, sizeof shard);
        shards_get(shards, i, &shard);
        assert_same(&expected[i], &shard);
    }
    struct shard shard;
    int64_t low, high;
    shards_get(shards, 2, &shard);
    shard_span(&shard, &low, &high);
    assert_int_equal(low, -1600);
    assert_int_equal(high, 16);
    assert_int_equal(shard_bytes(&shard), 80);
    shards_get(shards, 4, &shard);
    shard_span(&shard, &low, &high);
    assert_int_equal(low, 0);
    assert_int_equal(high, 68);
    shards_get(shards, 5, &shard);
    assert_int_equal(shard_bytes(&shard), 0);
    shards_get(shards, 7, &shard);
    assert_int_equal(shard_bytes(&shard), 0);
    shards_get(shards, 8, &shard);
    shard_span(&shard, &low, &high);
    assert_int_equal(low, 0);
    assert_int_equal(high, 0);
    shards_free(shards);
}

/* The table that was written, and what is known of it, as if somebody had sent it. */
static void test_consume(void **state) {
    struct shard expected[9];
    struct shards_writer writer = {0};
    size_t count = samples(expected), size;
    for (size_t i = 0; i < count; i++)
        add(&writer, &expected[i]);
    struct shards *parsed = NULL, *shards = NULL;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(writer.data, writer.size, writer.count, &parsed, &problem), 0);
    assert_int_equal(shards_consume(&writer, &shards, &problem), 0);
    assert_null(writer.data);
    assert_int_equal(writer.size + writer.capacity + writer.count, 0);
    assert_int_equal(shards_count(shards), count);
    const void *table = shards_table(parsed, &size);
    assert_memory_equal(shards_table(shards, &size), table, size);
    for (uint32_t i = 0; i < count; i++) {
        struct shard shard;
        shards_get(shards, i, &shard);
        assert_same(&expected[i], &shard);
    }
    shards_free(parsed);
    shards_free(shards);

    assert_int_equal(shards_consume(&writer, &shards, &problem), 0); /* nothing was written */
    assert_int_equal(shards_count(shards), 0);
    (void)shards_table(shards, &size);
    assert_int_equal(size, 0);
    shards_free(shards);
}

static void assert_refused(const struct shard *shard, int code, const char *words) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(shards_writer_add(&writer, shard, &problem), code);
    if (!strstr(problem.text, words))
        fail_msg("'%s' does not say '%s'", problem.text, words);
    assert_int_equal(writer.count, 0);
    shards_writer_deinit(&writer);
}

static void test_refusals(void **state) {
    struct shard shard = plain("", 4);
    assert_refused(&shard, -EINVAL, "empty");
    static const char *const not_utf8[] = {"\xff",        "a\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                           "\xe0\x80\x80"};
    for (size_t i = 0; i < ARRAY_SIZE(not_utf8); i++) {
        shard = plain(not_utf8[i], 4);
        assert_refused(&shard, -EINVAL, "UTF-8");
    }
    for (size_t i = 0; i < 24; i++) { /* wherever it stands in a longer one */
        char text[] = "model.layers.0.attention";
        text[i] = '\xe9';
        shard = plain(text, 4);
        assert_refused(&shard, -EINVAL, "UTF-8");
    }
    char *name = malloc(SHARDS_NAME_MAX + 2);
    memset(name, 'n', SHARDS_NAME_MAX + 1);
    name[SHARDS_NAME_MAX + 1] = '\0';
    shard = plain(name, 4);
    assert_refused(&shard, -E2BIG, "SHARDS_NAME_MAX");
    name[SHARDS_NAME_MAX] = '\0';
    struct shards_writer writer = {0};
    add(&writer, &shard);
    shards_writer_deinit(&writer);
    free(name);

    shard = plain("w", 4);
    shard.dtype = DTYPE_MAX;
    assert_refused(&shard, -EINVAL, "dtype");
    shard = plain("w", 4);
    shard.geometry.extent[0] = 5;
    assert_refused(&shard, -EINVAL, "shape");
    shard = plain("w", 4);
    shard.geometry.dims = GEOMETRY_DIMS_MAX + 1;
    assert_refused(&shard, -E2BIG, "dimensions");
    shard = plain("w", 4);
    shard.replica_count = 0;
    assert_refused(&shard, -EINVAL, "replica");
    shard.replica_count = shard.replica_index = 2;
    assert_refused(&shard, -EINVAL, "replica");
    shard = plain("w", 4);
    shard.area = AREAS_MAX;
    assert_refused(&shard, -EINVAL, "AREAS_MAX");
    shard = plain("w", 4);
    shard.flags = 1 << 5;
    assert_refused(&shard, -EINVAL, "flags");
    shard = plain("w", 4);
    shard.flags = SHARD_ALIAS;
    assert_refused(&shard, -EINVAL, "target");
    shard.target = "w";
    assert_refused(&shard, -EINVAL, "itself");
    shard.target = "\xff";
    assert_refused(&shard, -EINVAL, "UTF-8");
    shard.flags = 0;
    assert_refused(&shard, -EINVAL, "alias");

    shard = plain("w", 4);
    shard.address = UINT64_MAX - 3;
    assert_refused(&shard, -EINVAL, "address space");
    shard.address = INT64_MAX - 3;
    assert_refused(&shard, -EINVAL, "address space");
    shard = plain("w", 4);
    shard.contiguous = false;
    shard.stride[0] = -8;
    shard.address = 23;
    assert_refused(&shard, -EINVAL, "address space");
    shard.stride[0] = INT64_MIN;
    assert_refused(&shard, -EINVAL, "overflow");
    shard.geometry.extent[0] = 2; /* a low end of INT64_MIN exactly */
    assert_refused(&shard, -EINVAL, "address space");
    shard.geometry.extent[0] = 4;
    shard.stride[0] = INT64_MAX / 3;
    assert_refused(&shard, -EINVAL, "overflow");
}

static void test_table_refusals(void **state) {
    struct shards_writer writer = {0};
    struct shard shard = plain("w", 4);
    add(&writer, &shard);
    struct shards *shards = NULL;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(writer.data, writer.size, 2, &shards, &problem), -EINVAL);
    problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(writer.data, writer.size, 0, &shards, &problem), -EINVAL);
    assert_non_null(strstr(problem.text, "follow"));
    problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(writer.data, writer.size, SHARDS_COUNT_MAX + 1, &shards, &problem), -E2BIG);
    for (size_t size = 0; size < writer.size; size++)
        assert_int_equal(shards_parse(writer.data, size, 1, &shards, NULL), -EINVAL);
    assert_null(shards);
    assert_int_equal(shards_parse(NULL, 0, 0, &shards, &problem), 0);
    assert_int_equal(shards_count(shards), 0);
    shards_free(shards);
    shards_writer_deinit(&writer);
}

/* Whatever the bytes: refused with a sentence, or shards that are valid in every respect. */
static void test_hostile(void **state) {
    struct random random = random_seeded("hostile shard tables");
    struct shard list[9];
    struct shards_writer writer = {0};
    size_t count = samples(list), accepted = 0;
    for (size_t i = 0; i < count; i++)
        add(&writer, &list[i]);
    for (unsigned round = 0; round < 50000; round++) {
        size_t capacity = writer.size + 64;
        uint8_t *data = malloc(capacity);
        memcpy(data, writer.data, writer.size);
        size_t size = random_mutate(&random, data, writer.size, capacity);
        uint8_t *exact = malloc(max_u64(size, 1)); /* so that reading past the end is seen */
        memcpy(exact, data, size);
        free(data);
        struct shards *shards = NULL;
        struct problem problem = PROBLEM_NONE;
        uint32_t announced = random_below(&random, 4) ? (uint32_t)count : (uint32_t)random_next(&random) % 20;
        int r = shards_parse(exact, size, announced, &shards, &problem);
        free(exact);
        if (r < 0) {
            assert_true(problem.text[0]);
            continue;
        }
        accepted++;
        for (uint32_t i = 0; i < shards_count(shards); i++) {
            struct shard shard;
            int64_t low, high;
            shards_get(shards, i, &shard);
            assert_int_equal(strlen(shard.name), shard.name_length);
            assert_true(dtype_valid(shard.dtype));
            assert_true(geometry_valid(&shard.geometry, dtype_size(shard.dtype)));
            shard_span(&shard, &low, &high);
            assert_true(low <= high);
            assert_true((int64_t)shard.address >= -low);
        }
        shards_free(shards);
    }
    print_message("%zu of 50000 were still valid\n", accepted);
    shards_writer_deinit(&writer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_consume), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_table_refusals), cmocka_unit_test(test_hostile),
    };
    return cmocka_run_group_tests_name("shards", tests, NULL, NULL);
}
