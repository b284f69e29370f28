/* SPDX-License-Identifier: Apache-2.0 */
/* What can be protected: names, shapes, strides, dtypes, sizes from nothing to very many. */
#include "tests/functional/support.h"

#include <stdlib.h>

static void protect_bytes(ckpt *c, const char *name, const void *data, uint64_t count) {
    CHECK_OK(ckpt_protect_array(c, name, CKPT_U8, data, count));
}

static void names_of_every_kind(void) {
    char long_name[4097], longest[8193];
    memset(long_name, 'n', sizeof long_name - 1);
    memset(longest, 'N', sizeof longest - 1);
    long_name[sizeof long_name - 1] = longest[sizeof longest - 1] = '\0';
    const char *const names[] = {"a/b/c",        "/",         "..",           "../../etc/passwd",
                                 "with space",   " ",         "dot.ted",      "quo\"te",
                                 "back\\slash",  "new\nline", "tab\t",        "[0]",
                                 "a[0:2]",       "{\"x\":1}", "__metadata__", "emoji \xf0\x9f\xa6\x80",
                                 "\x01\x1f\x7f", "%2F",       "state",        long_name,
                                 longest};
    daemon_start();
    ckpt *c = job_open("names");
    uint8_t data[ARRAY_SIZE(names)];
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        data[i] = (uint8_t)(i + 1);
        protect_bytes(c, names[i], &data[i], 1);
    }
    CHECK_IS(CKPT_E_INVALID, ckpt_protect_array(c, "\xff\xfe", CKPT_U8, data, 1));
    CHECK_IS(CKPT_E_EXISTS, ckpt_protect_array(c, "a/b/c", CKPT_U8, data, 1));
    save_durable(c, 1, CKPT_GLOBAL);
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    daemon_start(); /* from the files, not from memory */
    c = job_open("names");
    ckpt_restore *r = restore_step(c, 1);
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_get_info(r, &info));
    CHECK(info.tensors == ARRAY_SIZE(names));
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        uint8_t byte = 0;
        CHECK_OK(restore_array(r, names[i], CKPT_U8, &byte, 1));
        CHECK(byte == i + 1);
    }
    uint8_t byte;
    CHECK_IS(CKPT_E_NOT_FOUND, restore_array(r, "nobody", CKPT_U8, &byte, 1));
    CHECK_SAYS("nobody");
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* A job's name is a directory's name in the tiers, by one escaping only. */
static void job_names_of_every_kind(void) {
    static const char *const jobs[] = {"a/b", "..", "with space", "100%", "\xf0\x9f\xa6\x80", "new\nline", "%2F"};
    configure(&(struct settings){.parallel = "trash_grace_s = 0"});
    daemon_start();
    for (size_t i = 0; i < ARRAY_SIZE(jobs); i++) {
        for (uint64_t step = 1; step <= 2; step++) { /* the second resumes the first */
            ckpt *c = job_open(jobs[i]);
            struct ckpt_info info;
            CKPT_INIT(info);
            CHECK_OK(ckpt_get_info(c, &info));
            CHECK(info.resumes == (step == 2) && (step == 1 || info.resume_step == 1));
            uint64_t words[100];
            words_fill(words, 100, i);
            if (step == 2) {
                ckpt_restore *r = restore_step(c, 1);
                restore_words_check(r, "words", 100, i);
                ckpt_restore_close(r);
            }
            CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, 100));
            save_durable(c, step, CKPT_GLOBAL);
            CHECK_OK(ckpt_close(c));
        }
    }
    CHECK(files_ending("parallel", "/run") == 2 * ARRAY_SIZE(jobs));
    CHECK(file_exists(test_path("parallel/a%%2Fb/2/2/complete.json")));
    ckpt *c = NULL;
    CHECK_IS(CKPT_E_INVALID, ckpt_open("", NULL, &c));
    CHECK_IS(CKPT_E_INVALID, ckpt_open("\xff", NULL, &c));
}

static void nothing_at_all(void) {
    daemon_start();
    ckpt *c = job_open("nothing");
    save_durable(c, 1, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 1);
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_get_info(r, &info));
    CHECK(info.tensors == 0);
    const void *state;
    uint64_t size = 1;
    CHECK_OK(ckpt_restore_state(r, 0, &state, &size));
    CHECK(size == 0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void tensors_without_elements(void) {
    daemon_start();
    ckpt *c = job_open("empty");
    uint64_t shape[3] = {4, 0, 7};
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F64;
    shard.name = "empty";
    shard.data = &shard;
    shard.dimensions = 3;
    shard.shape = shape;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    double scalar = 2.5, restored = 0;
    shard.name = "scalar";
    shard.data = &scalar;
    shard.dimensions = 0;
    shard.shape = NULL;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    save_durable(c, 1, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 1);
    struct ckpt_tensor tensor;
    CKPT_INIT(tensor);
    CHECK_OK(ckpt_restore_find(r, "empty", 0, &tensor));
    CHECK(tensor.dimensions == 3 && memcmp(tensor.shape, shape, sizeof shape) == 0);
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_F64;
    read.name = "empty";
    read.data = &restored;
    read.dimensions = 3;
    CHECK_OK(ckpt_restore_read(r, &read));
    CHECK(restored == 0);
    read.name = "scalar";
    read.dimensions = 0;
    CHECK_OK(ckpt_restore_read(r, &read));
    CHECK(restored == scalar);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* Every dtype of one element and of many; a read as another dtype or shape is refused. */
static void dtypes(void) {
    static const unsigned sizes[] = {0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8, 16};
    daemon_start();
    ckpt *c = job_open("dtypes");
    uint8_t data[ARRAY_SIZE(sizes)][16 * 100], restored[16 * 100];
    char name[16];
    for (uint32_t dtype = CKPT_BOOL; dtype <= CKPT_C128; dtype++) {
        for (size_t i = 0; i < sizeof data[0]; i++)
            data[dtype][i] = dtype == CKPT_BOOL ? i & 1 : (uint8_t)random_number(256);
        snprintf(name, sizeof name, "one-%u", dtype);
        CHECK_OK(ckpt_protect_array(c, name, dtype, data[dtype], 1));
        snprintf(name, sizeof name, "many-%u", dtype);
        CHECK_OK(ckpt_protect_array(c, name, dtype, data[dtype], 99));
    }
    CHECK_IS(CKPT_E_INVALID, ckpt_protect_array(c, "wrong", 0, data, 1));
    CHECK_IS(CKPT_E_INVALID, ckpt_protect_array(c, "wrong", CKPT_C128 + 1, data, 1));
    save_durable(c, 1, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 1);
    for (uint32_t dtype = CKPT_BOOL; dtype <= CKPT_C128; dtype++) {
        snprintf(name, sizeof name, "one-%u", dtype);
        CHECK_OK(restore_array(r, name, dtype, restored, 1));
        CHECK(memcmp(restored, data[dtype], sizes[dtype]) == 0);
        snprintf(name, sizeof name, "many-%u", dtype);
        CHECK_OK(restore_array(r, name, dtype, restored, 99));
        CHECK(memcmp(restored, data[dtype], (size_t)sizes[dtype] * 99) == 0);
        CHECK_IS(CKPT_E_MISMATCH, restore_array(r, name, dtype % CKPT_C128 + 1, restored, 99));
        CHECK_IS(CKPT_E_MISMATCH, restore_array(r, name, dtype, restored, 98));
    }
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* A column block of a large storage, a reversed and a transposed view, one element repeated: only the
 * view's elements are stored, in row-major order, from private and from shared memory alike. */
static void views(void) {
    enum { ROWS = 300, COLUMNS = 1000, WIDTH = 5 };
    daemon_start();
    for (int in_shared = 0; in_shared <= 1; in_shared++) {
        ckpt *c = job_open(in_shared ? "views-shared" : "views-private");
        uint32_t *storage = NULL;
        if (in_shared)
            CHECK_OK(ckpt_alloc(c, (size_t)ROWS * COLUMNS * 4, (void **)&storage));
        else
            storage = malloc((size_t)ROWS * COLUMNS * 4);
        for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
            storage[i] = i;
        const struct {
            const char *name;
            uint64_t first, shape[2];
            int64_t stride[2];
        } views[] = {
            {"slice", 7, {ROWS, WIDTH}, {COLUMNS * 4, 4}},
            {"reversed", ROWS * COLUMNS - 1, {ROWS, COLUMNS}, {-COLUMNS * 4, -4}},
            {"transposed", 0, {COLUMNS, ROWS}, {4, COLUMNS * 4}},
            {"repeated", 12345, {300, 400}, {0, 0}},
            {"rows repeated", 3, {1000, 50}, {0, 4}},
            {"diagonal", 0, {1, ROWS}, {0, (COLUMNS + 1) * 4}},
        };
        for (size_t i = 0; i < ARRAY_SIZE(views); i++) {
            struct ckpt_shard shard;
            CKPT_INIT(shard);
            shard.dtype = CKPT_U32;
            shard.name = views[i].name;
            shard.data = storage + views[i].first;
            shard.dimensions = 2;
            shard.shape = views[i].shape;
            shard.stride = views[i].stride;
            uint64_t id;
            CHECK_OK(ckpt_protect(c, &shard, &id));
            if (i == 0) {
                struct ckpt_info info;
                CKPT_INIT(info);
                save_captured(c, 1);
                CHECK_OK(ckpt_get_info(c, &info));
                CHECK(info.image_size >= ROWS * WIDTH * 4 && info.image_size <= ROWS * WIDTH * 4 + 8192);
            }
        }
        save_durable(c, 2, CKPT_GLOBAL);
        ckpt_restore *r = restore_step(c, 2);
        for (size_t i = 0; i < ARRAY_SIZE(views); i++) {
            uint64_t rows = views[i].shape[0], columns = views[i].shape[1];
            uint32_t *restored = malloc(rows * columns * 4);
            struct ckpt_read read;
            CKPT_INIT(read);
            read.dtype = CKPT_U32;
            read.name = views[i].name;
            read.data = restored;
            read.dimensions = 2;
            CHECK_OK(ckpt_restore_read(r, &read));
            for (uint64_t y = 0; y < rows; y++)
                for (uint64_t x = 0; x < columns; x++) {
                    int64_t at = (int64_t)views[i].first +
                                 ((int64_t)y * views[i].stride[0] + (int64_t)x * views[i].stride[1]) / 4;
                    if (restored[y * columns + x] != (uint32_t)at)
                        FAIL("%s [%llu, %llu]: %u, not %lld", views[i].name, (unsigned long long)y,
                             (unsigned long long)x, restored[y * columns + x], (long long)at);
                }
            free(restored);
        }
        ckpt_restore_close(r);
        CHECK_OK(ckpt_close(c));
        if (!in_shared)
            free(storage);
    }
}

/* Tied weights are stored once and restored under both names. */
static void aliases(void) {
    enum { COUNT = 100000 };
    daemon_start();
    ckpt *c = job_open("aliases");
    uint64_t *words = malloc(COUNT * 8);
    words_fill(words, COUNT, 1);
    CHECK_OK(ckpt_protect_array(c, "embedding", CKPT_U64, words, COUNT));
    CHECK_OK(ckpt_alias(c, "head", "embedding"));
    CHECK_IS(CKPT_E_EXISTS, ckpt_alias(c, "head", "embedding"));
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_alias(c, "other", "nobody"));
    save_durable(c, 1, CKPT_GLOBAL);
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.image_size < COUNT * 8 + 8192);
    ckpt_restore *r = restore_step(c, 1);
    restore_words_check(r, "embedding", COUNT, 1);
    restore_words_check(r, "head", COUNT, 1);
    struct ckpt_tensor tensor;
    CKPT_INIT(tensor);
    CHECK_OK(ckpt_restore_find(r, "head", 0, &tensor));
    CHECK(tensor.alias_of && strcmp(tensor.alias_of, "embedding") == 0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* A flat optimizer state in ranges of one process, read back across them, and mapped. */
static void ranges_and_maps(void) {
    enum { COUNT = 300000, CUT_A = 100001, CUT_B = 100002 };
    daemon_start();
    ckpt *c = job_open("ranges");
    uint64_t *words = malloc(COUNT * 8), shape[2] = {600, 500};
    words_fill(words, COUNT, 1);
    const uint64_t cuts[] = {0, CUT_A, CUT_B, COUNT};
    for (size_t i = 0; i + 1 < ARRAY_SIZE(cuts); i++) {
        struct ckpt_shard shard;
        CKPT_INIT(shard);
        shard.dtype = CKPT_U64;
        shard.name = "flat";
        shard.data = words + cuts[i];
        shard.dimensions = 2;
        shard.shape = shape;
        shard.range = 1;
        shard.start = cuts[i];
        shard.count = cuts[i + 1] - cuts[i];
        CHECK_OK(ckpt_protect(c, &shard, NULL));
        CHECK_IS(CKPT_E_EXISTS, ckpt_protect(c, &shard, NULL));
    }
    CHECK_OK(ckpt_protect_array(c, "small", CKPT_U64, words, 1000));
    save_durable(c, 1, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 1);
    uint64_t *restored = calloc(COUNT, 8);
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U64;
    read.name = "flat";
    read.data = restored;
    read.dimensions = 2;
    CHECK_OK(ckpt_restore_read(r, &read));
    CHECK(memcmp(restored, words, COUNT * 8) == 0);
    read.range = 1;
    read.start = CUT_A - 10;
    read.count = 50;
    CHECK_OK(ckpt_restore_read(r, &read));
    CHECK(memcmp(restored, words + CUT_A - 10, 50 * 8) == 0);
    uint64_t offset[2] = {199, 3}, extent[2] = {4, 490};
    read.range = 0;
    read.offset = offset;
    read.extent = extent;
    CHECK_OK(ckpt_restore_read(r, &read));
    for (uint64_t y = 0; y < extent[0]; y++)
        CHECK(memcmp(restored + y * extent[1], words + (offset[0] + y) * shape[1] + offset[1], extent[1] * 8) == 0);
    const void *mapped;
    uint64_t size;
    CHECK_OK(ckpt_restore_map(r, "small", 0, &mapped, &size));
    CHECK(size == 8000 && memcmp(mapped, words, size) == 0);
    CHECK_OK(ckpt_restore_map(r, "flat", 0, &mapped, &size));
    CHECK(size == COUNT * 8 && memcmp(mapped, words, size) == 0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
    free(restored);
}

static void hundred_thousand_shards(void) {
    enum { COUNT = 100000 };
    daemon_start();
    ckpt *c = job_open("many");
    uint32_t *values = malloc(COUNT * 4);
    char(*names)[16] = malloc(COUNT * 16);
    for (uint32_t i = 0; i < COUNT; i++) {
        values[i] = i * 2654435761u;
        snprintf(names[i], sizeof names[i], "shard-%u", i);
        CHECK_OK(ckpt_protect_array(c, names[i], CKPT_U32, &values[i], 1));
    }
    save_durable(c, 1, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 1);
    uint32_t *restored = calloc(COUNT, 4);
    struct ckpt_read *reads = calloc(COUNT, sizeof *reads);
    for (uint32_t i = 0; i < COUNT; i++) {
        CKPT_INIT(reads[i]);
        reads[i].dtype = CKPT_U32;
        reads[i].name = names[i];
        reads[i].data = &restored[i];
        reads[i].dimensions = 1;
    }
    CHECK_OK(ckpt_restore_read_many(r, reads, COUNT));
    CHECK(memcmp(values, restored, COUNT * 4) == 0);
    memset(restored, 0, COUNT * 4);
    reads[COUNT - 1].name = "nobody"; /* found out before the first byte is written */
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_restore_read_many(r, reads, COUNT));
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(restored[i] == 0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(reads);
    free(restored);
    free(names);
    free(values);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(names_of_every_kind),
        TEST(job_names_of_every_kind),
        TEST(nothing_at_all),
        TEST(tensors_without_elements),
        TEST(dtypes),
        TEST(views),
        TEST(aliases),
        TEST(ranges_and_maps),
        TEST(hundred_thousand_shards),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
