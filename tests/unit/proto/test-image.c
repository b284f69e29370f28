/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/image.h"
#include "proto/pieces.h"
#include "tests/unit/proto/unit.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>

struct set {
    struct shards_writer writer;
    struct shards *shards;
};

static void set_add(struct set *set, struct shard shard) {
    struct problem problem = PROBLEM_NONE;
    if (!shard.replica_count)
        shard.replica_count = 1;
    shard.contiguous = true;
    if (shards_writer_add(&set->writer, &shard, &problem) < 0)
        fail_msg("%s", problem.text);
}

static struct geometry whole(uint64_t elements) {
    return (struct geometry){.dims = 1, .shape = {elements}, .extent = {elements}};
}

static int set_layout(struct set *set, struct image_layout *layout, struct problem *problem) {
    struct image_identity identity = {.job = "job \"x\"", .rank = 3, .world = 8};
    if (shards_parse(set->writer.data, set->writer.size, set->writer.count, &set->shards, problem) < 0)
        fail_msg("%s", problem->text);
    return image_layout(set->shards, &identity, layout, problem);
}

static void set_deinit(struct set *set) {
    shards_writer_deinit(&set->writer);
    shards_free(set->shards);
}

static void set_layout_ok(struct set *set, struct image_layout *layout) {
    struct problem problem = PROBLEM_NONE;
    if (set_layout(set, layout, &problem) < 0)
        fail_msg("%s", problem.text);
}

static void set_refused(struct set *set, int code, const char *words) {
    struct image_layout layout;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(set_layout(set, &layout, &problem), code);
    if (!strstr(problem.text, words))
        fail_msg("'%s' does not say '%s'", problem.text, words);
    set_deinit(set);
    *set = (struct set){0};
}

/* The header as jansson sees it. */
static json_t *header_parse(const struct image_layout *layout, uint64_t state_length) {
    uint8_t *bytes = malloc(layout->data_start);
    uint64_t length;
    image_header(layout, state_length, bytes);
    memcpy(&length, bytes, sizeof length);
    assert_int_equal(length + 8, layout->data_start);
    assert_int_equal(layout->data_start % IMAGE_ALIGNMENT, 0);
    json_error_t error;
    json_t *header = json_loadb((char *)bytes + 8, length, JSON_REJECT_DUPLICATES, &error);
    if (!header)
        fail_msg("%s", error.text);
    free(bytes);
    return header;
}

static const char *text_at(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    assert_non_null(text);
    return text;
}

static void assert_entry(const json_t *header, const char *key, const char *dtype, uint64_t from, uint64_t to) {
    const json_t *entry = json_object_get(header, key);
    if (!entry)
        fail_msg("no key %s", key);
    assert_string_equal(text_at(entry, "dtype"), dtype);
    const json_t *offsets = json_object_get(entry, "data_offsets");
    assert_int_equal(json_integer_value(json_array_get(offsets, 0)), from);
    assert_int_equal(json_integer_value(json_array_get(offsets, 1)), to);
}

static void test_order_and_offsets(void **state) {
    struct set set = {0};
    struct image_layout layout;
    set_add(&set, (struct shard){.name = "b", .dtype = DTYPE_U8, .geometry = whole(3)});
    set_add(&set, (struct shard){.name = "f", .dtype = DTYPE_F32, .geometry = whole(5)});
    set_add(&set, (struct shard){.name = "d", .dtype = DTYPE_F64, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "g", .dtype = DTYPE_I32, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "c", .dtype = DTYPE_C128, .geometry = whole(2)});
    set_add(&set, (struct shard){.name = "e", .dtype = DTYPE_BF16, .geometry = whole(0)});
    set_add(&set, (struct shard){
                      .name = "r", .dtype = DTYPE_F32, .geometry = whole(5), .replica_index = 1, .replica_count = 2});
    set_layout_ok(&set, &layout);

    static const uint32_t order[] = {4, 2, 1, 3, 0};
    assert_int_equal(layout.ordered_count, 5);
    assert_memory_equal(layout.order, order, sizeof order);
    uint64_t start = layout.data_start;
    assert_int_equal(layout.shard_offset[4], start);
    assert_int_equal(layout.shard_offset[2], start + 32);
    assert_int_equal(layout.shard_offset[1], start + 40);
    assert_int_equal(layout.shard_offset[3], start + 60);
    assert_int_equal(layout.shard_offset[0], start + 64);
    assert_true(layout.shard_offset[5] == UINT64_MAX && layout.shard_offset[6] == UINT64_MAX);
    assert_int_equal(layout.state_offset, start + 67);
    assert_int_equal(image_size(&layout, 0), start + 67);
    assert_int_equal(image_size(&layout, 100), start + 167);

    json_t *header = header_parse(&layout, 100);
    assert_entry(header, "c", "U8", 0, 32);
    assert_entry(header, "d", "F64", 32, 40);
    assert_entry(header, "f", "F32", 40, 60);
    assert_entry(header, "g", "I32", 60, 64);
    assert_entry(header, "e", "BF16", 64, 64);
    assert_entry(header, "b", "U8", 64, 67);
    assert_entry(header, "%state", "U8", 67, 167);
    assert_null(json_object_get(header, "r"));
    assert_int_equal(json_object_size(header), 8);
    const json_t *metadata = json_object_get(header, "__metadata__");
    assert_string_equal(text_at(metadata, "format"), "pt");
    assert_string_equal(text_at(metadata, "ckptd"), "1");
    assert_string_equal(text_at(metadata, "job"), "job \"x\"");
    assert_string_equal(text_at(metadata, "rank"), "3");
    assert_string_equal(text_at(metadata, "world"), "8");
    json_decref(header);
    header = header_parse(&layout, 0);
    assert_null(json_object_get(header, "%state"));
    json_decref(header);
    header = header_parse(&layout, IMAGE_STATE_MAX);
    assert_entry(header, "%state", "U8", 67, 67 + IMAGE_STATE_MAX);
    json_decref(header);

    assert_int_equal(image_find(&layout, set.shards, 0), 0); /* the header comes before the first */
    assert_int_equal(image_find(&layout, set.shards, start), 0);
    assert_int_equal(image_find(&layout, set.shards, start + 31), 0);
    assert_int_equal(image_find(&layout, set.shards, start + 32), 1);
    assert_int_equal(image_find(&layout, set.shards, start + 59), 2);
    assert_int_equal(image_find(&layout, set.shards, start + 60), 3);
    assert_int_equal(image_find(&layout, set.shards, start + 66), 4);
    assert_int_equal(image_find(&layout, set.shards, start + 67), 5);
    assert_int_equal(image_find(&layout, set.shards, UINT64_MAX), 5);
    image_layout_deinit(&layout);
    set_deinit(&set);
}

static void test_keys(void **state) {
    struct set set = {0};
    struct image_layout layout;
    struct geometry box = {.dims = 2, .shape = {8, 8}, .offset = {0, 4}, .extent = {2, 4}};
    struct geometry range = {.is_range = true, .dims = 2, .shape = {8, 8}, .start = 16, .count = 48};
    struct geometry all = {.is_range = true, .dims = 2, .shape = {8, 8}, .count = 64};
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = box});
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = range});
    set_add(&set, (struct shard){.name = "a@b%c", .dtype = DTYPE_F32, .geometry = all});
    set_add(&set, (struct shard){.name = "__metadata__", .dtype = DTYPE_F32, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "%state", .dtype = DTYPE_F32, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "rng", .dtype = DTYPE_C64, .flags = SHARD_RANK_LOCAL, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "rng", .dtype = DTYPE_F32, .geometry = whole(1)});
    set_add(&set, (struct shard){.name = "\"\\\n\xc3\xa9", .dtype = DTYPE_F32, .geometry = {0}});
    set_add(&set,
            (struct shard){.name = "tied", .dtype = DTYPE_F32, .flags = SHARD_ALIAS, .target = "w", .geometry = box});
    set_layout_ok(&set, &layout);
    json_t *header = header_parse(&layout, 1);
    static const char *const keys[] = {"w@0+2,4+4", "w@r16+48", "a%40b%25c",      "%5F_metadata__", "%25state",
                                       "%rank/rng", "rng",      "\"\\\n\xc3\xa9", "%state",         "__metadata__"};
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (!json_object_get(header, keys[i]))
            fail_msg("no key %s", keys[i]);
    assert_int_equal(json_object_size(header), ARRAY_SIZE(keys));

    json_t *explained = json_loads(text_at(json_object_get(header, "__metadata__"), "ckptd.tensors"), 0, NULL);
    assert_non_null(explained);
    assert_int_equal(json_object_size(explained), 7);
    const json_t *entry = json_object_get(explained, "w@0+2,4+4");
    assert_string_equal(text_at(entry, "name"), "w");
    char *box_text = json_dumps(json_object_get(entry, "box"), JSON_COMPACT);
    assert_string_equal(box_text, "[[0,4],[2,4]]");
    free(box_text);
    entry = json_object_get(explained, "%rank/rng");
    assert_string_equal(text_at(entry, "dtype"), "C64");
    assert_true(json_is_true(json_object_get(entry, "local")));
    assert_string_equal(text_at(json_object_get(explained, "tied"), "alias"), "w");
    assert_string_equal(text_at(json_object_get(explained, "%5F_metadata__"), "name"), "__metadata__");
    json_decref(explained);
    json_decref(header);

    /* The pieces of the manifest say the same. */
    struct pieces pieces;
    assert_int_equal(pieces_from_layout(set.shards, &layout, 3, 10, &pieces), 0);
    assert_int_equal(pieces.count, 9);
    assert_true(pieces.has_state && pieces.state_offset == layout.state_offset && pieces.state_length == 10);
    assert_int_equal(pieces.items[1].image_offset, layout.shard_offset[1]);
    assert_string_equal(pieces.items[8].target, "w");
    pieces_deinit(&pieces);
    image_layout_deinit(&layout);
    set_deinit(&set);
}

static void test_refusals(void **state) {
    struct set set = {0};
    struct geometry box = {.dims = 2, .shape = {8, 8}, .offset = {0, 4}, .extent = {2, 4}};
    struct geometry other = {.dims = 2, .shape = {8, 8}, .offset = {1, 0}, .extent = {2, 5}};
    struct geometry empty = {.dims = 2, .shape = {8, 8}};
    struct shard w = {.name = "w", .dtype = DTYPE_F32, .geometry = whole(4)};
    set_add(&set, w);
    set_add(&set, w);
    set_refused(&set, -EEXIST, "tensor w: protected twice");
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = box});
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = other});
    set_refused(&set, -EEXIST, "tensor w: two of its pieces overlap");
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = box});
    set_add(&set, w);
    set_refused(&set, -EINVAL, "tensor w: its pieces disagree");
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = empty});
    set_add(&set, (struct shard){.name = "w", .dtype = DTYPE_F32, .geometry = empty});
    set_refused(&set, -EEXIST, "tensor w: protected twice");

    struct shard alias = {.name = "v", .dtype = DTYPE_F32, .flags = SHARD_ALIAS, .target = "w", .geometry = whole(4)};
    set_add(&set, alias);
    set_refused(&set, -EINVAL, "tensor v: an alias of w, which is not");
    set_add(&set, w);
    set_add(&set, alias);
    set_add(&set, alias);
    set_refused(&set, -EEXIST, "tensor v: protected twice");
    alias.dtype = DTYPE_F16;
    set_add(&set, w);
    set_add(&set, alias);
    set_refused(&set, -EINVAL, "another dtype");
    alias.dtype = DTYPE_F32;
    alias.flags |= SHARD_RANK_LOCAL;
    set_add(&set, w);
    set_add(&set, alias);
    set_refused(&set, -EINVAL, "not a tensor of this set");
    alias.flags = SHARD_ALIAS;
    set_add(&set, w);
    set_add(&set, alias);
    set_add(&set,
            (struct shard){.name = "u", .dtype = DTYPE_F32, .flags = SHARD_ALIAS, .target = "v", .geometry = whole(4)});
    set_refused(&set, -EINVAL, "alias of v");

    set_add(&set, (struct shard){.name = "huge", .dtype = DTYPE_U8, .geometry = whole(UINT64_C(1) << 47)});
    set_refused(&set, -E2BIG, "WORD_IMAGE_MAX");
    static char name[SHARDS_NAME_MAX + 1]; /* each '%' is three bytes of a key */
    memset(name, '%', SHARDS_NAME_MAX);
    for (unsigned i = 0; i < IMAGE_HEADER_MAX / (3 * SHARDS_NAME_MAX); i++) {
        snprintf(name + SHARDS_NAME_MAX - 8, 9, "%08u", i);
        set_add(&set, (struct shard){.name = name, .dtype = DTYPE_U8, .geometry = whole(1)});
    }
    set_refused(&set, -E2BIG, "IMAGE_HEADER_MAX");
}

static void test_nothing(void **state) {
    struct set set = {0};
    struct image_layout layout;
    set_layout_ok(&set, &layout);
    assert_int_equal(image_size(&layout, 0), IMAGE_ALIGNMENT);
    json_decref(header_parse(&layout, 0));
    json_decref(header_parse(&layout, 7));
    assert_int_equal(image_find(&layout, set.shards, 0), 0);
    image_layout_deinit(&layout);
    set_deinit(&set);
}

/* The linker sends the library's allocations here (--wrap): one of them fails. */
static unsigned long allocations_left = ULONG_MAX;

static bool allocation_fails(void) {
    return allocations_left != ULONG_MAX && allocations_left-- == 0;
} /* once: it is ULONG_MAX then */

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size) { return allocation_fails() ? NULL : __real_malloc(size); }
void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size) { return allocation_fails() ? NULL : __real_calloc(count, size); }
void *__real_realloc(void *data, size_t size);
void *__wrap_realloc(void *data, size_t size);
void *__wrap_realloc(void *data, size_t size) { return allocation_fails() ? NULL : __real_realloc(data, size); }

/* Without memory there is no layout, or the whole one: none that lacks what it says of some tensors. */
static void test_out_of_memory(void **state) {
    struct set set = {0};
    struct image_layout whole_layout, layout;
    const struct image_identity identity = {.job = "job", .world = 1};
    char name[SHARDS_NAME_MAX];
    for (unsigned i = 0; i < 8; i++) { /* names that are long, and mean something else than keys of a header can */
        memset(name, '%', sizeof name - 1);
        snprintf(name + 200 * (i + 1), 16, "%u", i);
        struct geometry part = {.dims = 1, .shape = {4}, .offset = {2}, .extent = {2}};
        set_add(&set, (struct shard){.name = name, .dtype = DTYPE_F32, .geometry = part});
    }
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(shards_parse(set.writer.data, set.writer.size, set.writer.count, &set.shards, &problem), 0);
    assert_int_equal(image_layout(set.shards, &identity, &whole_layout, &problem), 0);
    unsigned refused = 0;
    for (unsigned long nth = 0;; nth++) {
        problem = PROBLEM_NONE;
        allocations_left = nth;
        int r = image_layout(set.shards, &identity, &layout, &problem);
        bool none_failed = allocations_left != ULONG_MAX;
        allocations_left = ULONG_MAX;
        if (r == 0) {
            assert_int_equal(layout.header_length, whole_layout.header_length);
            assert_memory_equal(layout.header, whole_layout.header, layout.header_length);
            image_layout_deinit(&layout);
        } else {
            assert_int_equal(r, -ENOMEM);
            assert_non_null(strstr(problem.text, "out of memory"));
            refused++;
        }
        if (none_failed)
            break;
    }
    assert_true(refused > 10);
    image_layout_deinit(&whole_layout);
    set_deinit(&set);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_a_hundred_thousand(void **state) {
    enum { COUNT = 100000 };
    struct set set = {0};
    struct image_layout layout;
    char name[64];
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "model.layers.%u.experts.%u.weight", i / 64, i % 64);
        struct geometry half = {.dims = 2, .shape = {128, 64}, .offset = {64, 0}, .extent = {64, 64}};
        set_add(&set, (struct shard){.name = name, .dtype = i % 3 ? DTYPE_BF16 : DTYPE_F32, .geometry = half});
    }
    double start = seconds();
    set_layout_ok(&set, &layout);
    double taken = seconds() - start;
    print_message("%d shards laid out in %.3f s, header of %llu bytes\n", COUNT, taken,
                  (unsigned long long)layout.data_start);
    assert_int_equal(layout.ordered_count, COUNT);
    json_t *header = header_parse(&layout, 0);
    assert_int_equal(json_object_size(header), COUNT + 1);
    json_decref(header);
    image_layout_deinit(&layout);
    set_deinit(&set);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_offsets),  cmocka_unit_test(test_keys),
        cmocka_unit_test(test_refusals),           cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_a_hundred_thousand), cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests_name("image", tests, NULL, NULL);
}
