/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"
#include "tests/unit/client/fixture.h"

/* A version is saved through the fake daemon and read back in every way. */

#define ROWS 300
#define COLUMNS 200

static float matrix[ROWS][COLUMNS];
static double doubles[7];
static uint8_t bytes[MIB(1)];

static int saved_setup(void **state) {
    int r = fixture_setup(state);
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < COLUMNS; j++)
            matrix[i][j] = (float)(i * COLUMNS + j);
    for (size_t i = 0; i < ARRAY_SIZE(doubles); i++)
        doubles[i] = (double)i / 3;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 24);
    uint64_t shape[2] = {ROWS, COLUMNS}, extent[2] = {ROWS / 2, COLUMNS}, offset[2] = {0, 0};
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F32;
    shard.name = "matrix";
    shard.dimensions = 2;
    shard.shape = shape;
    shard.offset = offset;
    shard.extent = extent;
    for (unsigned half = 0; half < 2 && r == 0; half++) { /* two pieces */
        offset[0] = half * ROWS / 2;
        shard.data = matrix[offset[0]];
        r = ckpt_protect(c, &shard, NULL);
    }
    if (r == 0)
        r = ckpt_protect_array(c, "bytes", CKPT_U8, bytes, sizeof bytes);
    if (r == 0)
        r = ckpt_alias(c, "tied", "matrix");
    CKPT_INIT(shard);
    uint64_t count = ARRAY_SIZE(doubles);
    shard.dtype = CKPT_F64;
    shard.name = "doubles";
    shard.data = doubles;
    shard.dimensions = 1;
    shard.shape = &count;
    shard.flags = CKPT_RANK_LOCAL;
    if (r == 0)
        r = ckpt_protect(c, &shard, NULL);
    shard.name = "scalar";
    shard.dimensions = 0;
    shard.flags = 0;
    if (r == 0)
        r = ckpt_protect(c, &shard, NULL);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "epoch 3";
    options.state_size = 7;
    if (r == 0)
        r = ckpt_save(c, 42, &options);
    if (r == 0)
        r = ckpt_fence(c, 0);
    uint64_t size;
    fake_image(fixture->fake, &size);
    return r;
}

static ckpt_restore *open_latest(struct fixture *fixture) {
    ckpt_restore *r = NULL;
    assert_result(ckpt_restore_open(fixture->c, NULL, &r), CKPT_OK);
    return r;
}

static struct ckpt_read read_of(const char *name, uint32_t dtype, uint32_t dimensions, void *data) {
    struct ckpt_read read;
    CKPT_INIT(read);
    read.name = name;
    read.dtype = dtype;
    read.dimensions = dimensions;
    read.data = data;
    return read;
}

static void the_index(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    assert_result(ckpt_restore_get_info(r, &info), CKPT_OK);
    assert_int_equal(info.step, 42);
    assert_int_equal(info.world, 1);
    assert_int_equal(info.tensors, 5);
    static const char *const names[] = {"bytes", "doubles", "matrix", "scalar", "tied"};
    struct ckpt_tensor tensor;
    CKPT_INIT(tensor);
    for (uint64_t i = 0; i < info.tensors; i++) {
        assert_result(ckpt_restore_tensor(r, i, &tensor), CKPT_OK);
        assert_string_equal(tensor.name, names[i]);
    }
    assert_string_equal(tensor.alias_of, "matrix");
    assert_int_equal(tensor.dimensions, 2);
    assert_int_equal(tensor.shape[1], COLUMNS);
    assert_int_equal(tensor.pieces, 2);
    assert_result(ckpt_restore_tensor(r, 5, &tensor), CKPT_E_NOT_FOUND);
    assert_result(ckpt_restore_find(r, "doubles", 0, &tensor), CKPT_OK);
    assert_int_equal(tensor.flags, CKPT_RANK_LOCAL);
    assert_result(ckpt_restore_find(r, "doubles", 1, &tensor), CKPT_E_NOT_FOUND);
    assert_result(ckpt_restore_find(r, "matriy", 0, &tensor), CKPT_E_NOT_FOUND);
    assert_says("matriy");
    ckpt_restore_close(r);
}

static void whole_and_boxes(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    static float got[ROWS][COLUMNS];
    static const char *const names[] = {"matrix", "tied"};
    for (size_t i = 0; i < 2; i++) {
        memset(got, 0, sizeof got);
        struct ckpt_read whole = read_of(names[i], CKPT_F32, 2, got);
        assert_result(ckpt_restore_read(r, &whole), CKPT_OK);
        assert_memory_equal(got, matrix, sizeof matrix);
    }
    /* A box across both pieces, into a transposed destination. */
    static float transposed[50][100];
    uint64_t offset[2] = {100, 30}, extent[2] = {100, 50};
    int64_t stride[2] = {sizeof(float), sizeof transposed[0]};
    struct ckpt_read box = read_of("matrix", CKPT_F32, 2, transposed);
    box.offset = offset;
    box.extent = extent;
    box.stride = stride;
    assert_result(ckpt_restore_read(r, &box), CKPT_OK);
    for (size_t i = 0; i < 100; i++)
        for (size_t j = 0; j < 50; j++)
            assert_true(transposed[j][i] == matrix[100 + i][30 + j]);
    struct ckpt_read range = read_of("matrix", CKPT_F32, 2, got);
    range.range = 1;
    range.start = 29990;
    range.count = 20;
    assert_result(ckpt_restore_read(r, &range), CKPT_OK);
    assert_memory_equal(got, &matrix[0][0] + 29990, 80);
    double scalar = -1;
    struct ckpt_read one = read_of("scalar", CKPT_F64, 0, &scalar);
    assert_result(ckpt_restore_read(r, &one), CKPT_OK);
    assert_true(scalar == 0);
    range.count = 0;
    range.data = NULL;
    assert_result(ckpt_restore_read(r, &range), CKPT_OK);
    ckpt_restore_close(r);
    assert_result(ckpt_test(fixture->c, 1, CKPT_LOCAL, CKPT_PART), CKPT_PENDING); /* what was sent is handled */
    assert_int_equal(fake_leases(fixture->fake), 0);
    assert_int_equal(fake_restores(fixture->fake), 0);
}

static void only_what_is_needed(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    uint8_t byte;
    struct ckpt_read range = read_of("bytes", CKPT_U8, 1, &byte);
    range.range = 1;
    range.start = 500000;
    range.count = 1;
    assert_result(ckpt_restore_read(r, &range), CKPT_OK);
    assert_int_equal(byte, bytes[500000]);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_FETCH), 1);
    ckpt_restore_close(r);
}

static void many_at_once(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    static float rows[ROWS][COLUMNS];
    static uint8_t got[sizeof bytes];
    struct ckpt_read reads[ROWS + 1];
    uint64_t offsets[ROWS][2], extent[2] = {1, COLUMNS};
    for (size_t i = 0; i < ROWS; i++) {
        reads[i] = read_of(i % 2 ? "matrix" : "tied", CKPT_F32, 2, rows[i]);
        offsets[i][0] = i;
        offsets[i][1] = 0;
        reads[i].offset = offsets[i];
        reads[i].extent = extent;
    }
    reads[ROWS] = read_of("bytes", CKPT_U8, 1, got);
    reads[ROWS].dimensions = 2; /* a mistake in the last is found before the first byte is written */
    memset(rows, 0xee, sizeof rows);
    assert_result(ckpt_restore_read_many(r, reads, ROWS + 1), CKPT_E_MISMATCH);
    for (size_t i = 0; i < sizeof rows; i++)
        assert_int_equal(((uint8_t *)rows)[i], 0xee);
    reads[ROWS].dimensions = 1;
    assert_result(ckpt_restore_read_many(r, reads, ROWS + 1), CKPT_OK);
    assert_memory_equal(rows, matrix, sizeof matrix);
    assert_memory_equal(got, bytes, sizeof bytes);
    ckpt_restore_close(r);
}

static void mismatches(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    static float got[ROWS][COLUMNS];
    uint64_t shape[2] = {ROWS, COLUMNS + 1}, offset[2] = {ROWS, 0}, extent[2] = {1, 1};
    struct ckpt_read read = read_of("matrix", CKPT_F16, 2, got);
    assert_result(ckpt_restore_read(r, &read), CKPT_E_MISMATCH);
    assert_says("F32");
    assert_says("F16");
    read.dtype = CKPT_F32;
    read.shape = shape;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_MISMATCH);
    assert_says("201");
    read.shape = NULL;
    read.offset = offset;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_INVALID);
    read.extent = extent;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_INVALID);
    read.offset = NULL;
    read.data = NULL;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_INVALID);
    read.data = got;
    read.name = "nothing";
    assert_result(ckpt_restore_read(r, &read), CKPT_E_NOT_FOUND);
    read.name = "matrix";
    read.flags = CKPT_RANK_LOCAL;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_NOT_FOUND);
    ckpt_restore_close(r);
}

static void which_version(void **state) {
    struct fixture *fixture = *state;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    ckpt_restore *r = NULL;
    options.which = CKPT_RESTORE_STEP;
    options.step = 41;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_E_NOT_FOUND);
    options.step = 42;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_OK);
    ckpt_restore_close(r);
    options.which = CKPT_RESTORE_EXACT;
    options.generation = 1;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_OK);
    ckpt_restore_close(r);
    options.which = 3;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_E_INVALID);
    /* Another handle has not saved: it gets what its run resumes from, which is nothing. */
    ckpt *first = fixture->c;
    assert_result(fixture_open(fixture, 5000), CKPT_OK);
    assert_result(ckpt_restore_open(fixture->c, NULL, &r), CKPT_NONE);
    assert_int_equal(fixture_info(fixture).resumes, 0);
    ckpt_close(fixture->c);
    fixture->knobs->resumes = true;
    assert_result(fixture_open(fixture, 5000), CKPT_OK);
    assert_int_equal(fixture_info(fixture).resumes, 1);
    assert_int_equal(fixture_info(fixture).resume_step, 42);
    r = open_latest(fixture);
    ckpt_close(fixture->c);
    struct ckpt_restore_info info; /* a restore outlives its handle, but is of no use */
    CKPT_INIT(info);
    assert_result(ckpt_restore_get_info(r, &info), CKPT_E_INVALID);
    ckpt_restore_close(r);
    fixture->c = first;
}

static void state_and_map(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    const void *data, *again;
    uint64_t size;
    assert_result(ckpt_restore_state(r, 0, &data, &size), CKPT_OK);
    assert_int_equal(size, 7);
    assert_memory_equal(data, "epoch 3", 7);
    assert_result(ckpt_restore_state(r, 0, &again, &size), CKPT_OK);
    assert_ptr_equal(data, again);
    assert_result(ckpt_restore_state(r, 1, &data, &size), CKPT_E_NOT_FOUND);

    assert_result(ckpt_restore_map(r, "bytes", 0, &data, &size), CKPT_OK);
    assert_int_equal(size, sizeof bytes);
    assert_memory_equal(data, bytes, sizeof bytes);
    assert_result(ckpt_restore_map(r, "bytes", 0, &again, &size), CKPT_OK);
    assert_ptr_equal(data, again);
    assert_result(ckpt_restore_map(r, "tied", 0, &data, &size), CKPT_OK); /* two pieces: a copy */
    assert_memory_equal(data, matrix, sizeof matrix);
    assert_result(ckpt_restore_map(r, "doubles", 0, &data, &size), CKPT_OK);
    assert_memory_equal(data, doubles, sizeof doubles);
    assert_result(ckpt_restore_prefetch(r, UINT32_MAX), CKPT_OK);
    assert_result(ckpt_restore_prefetch(r, 1), CKPT_E_NOT_FOUND);
    assert_int_equal(fake_leases(fixture->fake), 2);
    /* Maps stay when the daemon goes. */
    assert_result(ckpt_restore_map(r, "bytes", 0, &data, &size), CKPT_OK);
    fake_stop(fixture->fake);
    assert_result(ckpt_save(fixture->c, 43, NULL), CKPT_E_UNREACHABLE);
    assert_memory_equal(data, bytes, sizeof bytes);
    fake_start(fixture->fake);
    ckpt_restore_close(r);
}

static void scattered_chunks(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->scattered = true;
    ckpt_restore *r = open_latest(fixture);
    const void *data;
    uint64_t size;
    assert_result(ckpt_restore_map(r, "bytes", 0, &data, &size), CKPT_OK); /* a copy */
    assert_memory_equal(data, bytes, sizeof bytes);
    assert_result(ckpt_test(fixture->c, 1, CKPT_LOCAL, CKPT_PART), CKPT_PENDING);
    assert_int_equal(fake_leases(fixture->fake), 0);
    ckpt_restore_close(r);
}

static void little_room(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_NO_ROOM;
    ckpt_restore *r = open_latest(fixture);
    static uint8_t got[sizeof bytes];
    struct ckpt_read read = read_of("bytes", CKPT_U8, 1, got);
    assert_result(ckpt_restore_read(r, &read), CKPT_OK);
    assert_memory_equal(got, bytes, sizeof bytes);
    const void *data;
    uint64_t size;
    assert_result(ckpt_restore_map(r, "bytes", 0, &data, &size), CKPT_OK); /* a copy, piece by piece */
    assert_memory_equal(data, bytes, sizeof bytes);
    ckpt_restore_close(r);
    assert_result(ckpt_test(fixture->c, 1, CKPT_LOCAL, CKPT_PART), CKPT_PENDING);
    assert_int_equal(fake_leases(fixture->fake), 0);
}

static void the_daemon_dies_in_between(void **state) {
    struct fixture *fixture = *state;
    ckpt_restore *r = open_latest(fixture);
    static uint8_t got[sizeof bytes];
    struct ckpt_read read = read_of("bytes", CKPT_U8, 1, got);
    fake_stop(fixture->fake);
    fake_start(fixture->fake);
    assert_result(ckpt_restore_read(r, &read), CKPT_OK); /* opened again, by generation and step */
    assert_memory_equal(got, bytes, sizeof bytes);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_RESTORE_OPEN), 2);
    ckpt_restore_close(r);
}

static void faults(void **state) {
    struct fixture *fixture = *state;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.timeout_ms = 300;
    ckpt_restore *r = NULL;
    fixture->knobs->fault[MESSAGE_RESTORE_OPEN] = FAKE_LATE;
    assert_within(4000, assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_E_TIMEOUT));
    fixture->knobs->fault[MESSAGE_RESTORE_OPEN] = FAKE_ERROR;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_E_IO);
    fixture->knobs->fault[MESSAGE_RESTORE_OPEN] = FAKE_ANSWERS;
    assert_result(ckpt_restore_open(fixture->c, &options, &r), CKPT_OK);
    assert_result(ckpt_test(fixture->c, 1, CKPT_LOCAL, CKPT_PART), CKPT_PENDING);
    assert_int_equal(fake_restores(fixture->fake), 1); /* the one that came late was closed */

    static uint8_t got[sizeof bytes];
    struct ckpt_read read = read_of("bytes", CKPT_U8, 1, got);
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_LATE;
    assert_within(4000, assert_result(ckpt_restore_read(r, &read), CKPT_E_TIMEOUT));
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_ANSWERS;
    assert_result(ckpt_restore_read(r, &read), CKPT_OK);
    assert_result(ckpt_test(fixture->c, 1, CKPT_LOCAL, CKPT_PART), CKPT_PENDING);
    assert_int_equal(fake_leases(fixture->fake), 0); /* what came late was given back */
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_ERROR;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_IO);
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_GARBAGE;
    assert_result(ckpt_restore_read(r, &read), CKPT_E_PROTOCOL);
    fixture->knobs->fault[MESSAGE_FETCH] = FAKE_DIES;
    assert_within(4000, assert_int_not_equal(ckpt_restore_read(r, &read), CKPT_OK));
    ckpt_restore_close(r);
}

#define saved_test(test) cmocka_unit_test_setup_teardown(test, saved_setup, fixture_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        saved_test(the_index),     saved_test(whole_and_boxes),
        saved_test(many_at_once),  saved_test(only_what_is_needed),
        saved_test(mismatches),    saved_test(which_version),
        saved_test(state_and_map), saved_test(scattered_chunks),
        saved_test(little_room),   saved_test(the_daemon_dies_in_between),
        saved_test(faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
