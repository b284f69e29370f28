/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"
#include "tests/unit/client/fixture.h"

/* The daemon may not read the program's memory: a thread of the library copies it. */

#define COUNT 300000

static double numbers[COUNT];
static uint8_t flags[1000];

static int refused_setup(void **state) {
    int r = fixture_setup(state);
    struct fixture *fixture = *state;
    fixture->knobs->refuse_private = true;
    uint64_t shape = COUNT / 2;
    int64_t stride = 16;
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F64;
    shard.name = "numbers"; /* every second one */
    shard.data = numbers;
    shard.dimensions = 1;
    shard.shape = &shape;
    shard.stride = &stride;
    if (r == 0)
        r = ckpt_protect(fixture->c, &shard, NULL);
    if (r == 0)
        r = ckpt_protect_array(fixture->c, "flags", CKPT_U8, flags, sizeof flags);
    return r;
}

static void fill(unsigned step) {
    for (size_t i = 0; i < COUNT; i++)
        numbers[i] = (double)(i + step);
    memset(flags, (int)step, sizeof flags);
}

static void assert_image(struct fixture *fixture, unsigned step, const char *text) {
    uint64_t size;
    const uint8_t *image = fake_image(fixture->fake, &size);
    const double *got = (const double *)(const void *)(image + 4096);
    assert_int_equal(size, 4096 + COUNT / 2 * sizeof *got + sizeof flags + strlen(text));
    for (size_t i = 0; i < COUNT / 2; i++)
        assert_true(got[i] == (double)(2 * i + step));
    assert_int_equal(image[4096 + COUNT / 2 * sizeof *got + 999], step);
    assert_memory_equal(image + size - strlen(text), text, strlen(text));
}

static void pushed_images(void **state) {
    struct fixture *fixture = *state;
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "the state";
    options.state_size = 9;
    void *shared;
    for (unsigned step = 1; step <= 20; step++) {
        fill(step);
        assert_result(ckpt_save(fixture->c, step, &options), CKPT_OK);
        assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
        assert_image(fixture, step, "the state");
    }
    assert_int_equal(fixture_info(fixture).push, 1);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_ATTACH), 1);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_REGISTER), 2);
    /* Shared memory is pushed too. */
    assert_result(ckpt_alloc(fixture->c, 100, &shared), CKPT_OK);
    memset(shared, 0x42, 100);
    assert_result(ckpt_protect_array(fixture->c, "shared", CKPT_U8, shared, 100), CKPT_OK);
    assert_result(ckpt_save(fixture->c, 21, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    uint64_t size;
    const uint8_t *image = fake_image(fixture->fake, &size);
    assert_memory_equal(image + size - 100, shared, 100);
}

static void forced(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->refuse_private = false;
    ckpt_close(fixture->c);
    setenv("CKPT_FORCE_PUSH", "1", 1);
    assert_result(fixture_open(fixture, 5000), CKPT_OK);
    unsetenv("CKPT_FORCE_PUSH");
    assert_result(ckpt_protect_array(fixture->c, "flags", CKPT_U8, flags, sizeof flags), CKPT_OK);
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    assert_true(fake_count(fixture->fake, MESSAGE_PUSH) > 0);
}

static void a_fence_stops_it(void **state) {
    struct fixture *fixture = *state;
    fill(1);
    fixture->knobs->fault[MESSAGE_PUSH] = FAKE_SILENT;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    assert_within(2000, assert_result(ckpt_fence(fixture->c, 100), CKPT_E_TIMEOUT));
    fixture->knobs->fault[MESSAGE_PUSH] = FAKE_ANSWERS;
    fill(2);
    assert_result(ckpt_save(fixture->c, 2, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    assert_image(fixture, 2, "");
}

static void failures(void **state) {
    struct fixture *fixture = *state;
    static const int kinds[] = {FAKE_ERROR, FAKE_GARBAGE, FAKE_DIES};
    uint64_t step = 1;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        fixture->knobs->fault[MESSAGE_PUSH] = kinds[i];
        assert_result(ckpt_save(fixture->c, step++, NULL), CKPT_OK);
        assert_within(3000, assert_result(ckpt_fence(fixture->c, 0), CKPT_E_LOST));
        fixture->knobs->fault[MESSAGE_PUSH] = FAKE_ANSWERS;
        if (kinds[i] == FAKE_DIES) {
            fake_stop(fixture->fake);
            fake_start(fixture->fake);
        }
        fill((unsigned)step);
        int r;
        do /* connections are tried once a second */
            r = ckpt_save(fixture->c, step, NULL);
        while (r == CKPT_E_UNREACHABLE);
        assert_result(r, CKPT_OK);
        assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
        assert_image(fixture, (unsigned)step, "");
        step++;
    }
    fixture->knobs->fault[MESSAGE_ATTACH] = FAKE_ERROR;
    fake_stop(fixture->fake);
    fake_start(fixture->fake);
    int r;
    do /* connections are tried once a second */
        r = ckpt_save(fixture->c, step, NULL);
    while (r == CKPT_E_UNREACHABLE);
    assert_result(r, CKPT_E_IO);
    fixture->knobs->fault[MESSAGE_ATTACH] = FAKE_ANSWERS;
    assert_result(ckpt_save(fixture->c, step, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
}

#define refused_test(test) cmocka_unit_test_setup_teardown(test, refused_setup, fixture_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        refused_test(pushed_images),
        refused_test(forced),
        refused_test(a_fence_stops_it),
        refused_test(failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
