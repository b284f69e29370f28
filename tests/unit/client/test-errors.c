/* SPDX-License-Identifier: Apache-2.0 */
#include "client/errors.h"
#include "client/options.h"
#include "tests/unit/client/unit.h"

#include <errno.h>
#include <pthread.h>

static void names(void **state) {
    assert_string_equal(ckpt_strerror(CKPT_OK), "CKPT_OK");
    assert_string_equal(ckpt_strerror(CKPT_SKIPPED), "CKPT_SKIPPED");
    assert_string_equal(ckpt_strerror(CKPT_E_MISMATCH), "CKPT_E_MISMATCH");
    assert_string_equal(ckpt_strerror(-1000), "CKPT_E_UNKNOWN");
    for (int code = CKPT_E_INVALID; code >= CKPT_E_MISMATCH; code--)
        assert_string_not_equal(ckpt_strerror(code), "CKPT_E_UNKNOWN");
    assert_string_equal(ckpt_strerror(CKPT_E_MISMATCH - 1), "CKPT_E_UNKNOWN");
}

static void *look(void *context) {
    assert_string_equal(ckpt_strerror_last(), "");
    error_set(CKPT_E_IO, "another");
    return NULL;
}

static void sentences_are_per_thread(void **state) {
    assert_int_equal(error_set(CKPT_E_LIMIT, "one %d", 1), CKPT_E_LIMIT);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, look, NULL), 0);
    pthread_join(thread, NULL);
    assert_string_equal(ckpt_strerror_last(), "one 1");
    error_set(CKPT_E_LIMIT, "again: %s", ckpt_strerror_last());
    assert_string_equal(ckpt_strerror_last(), "again: one 1");
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -EOVERFLOW, "too much");
    assert_int_equal(error_from(-EOVERFLOW, &problem, "the set"), CKPT_E_LIMIT);
    assert_string_equal(ckpt_strerror_last(), "the set: too much");
}

struct known {
    uint32_t size, a;
    uint64_t b;
};

static void sizes(void **state) {
    struct {
        struct known known;
        uint64_t later;
    } given = {.known = {.size = sizeof(struct known), .a = 1, .b = 2}};
    struct known read;
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_OK);
    assert_int_equal(read.b, 2);
    given.known.size = 8; /* from before `b` */
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_OK);
    assert_int_equal(read.a, 1);
    assert_int_equal(read.b, 0);
    given.known.size = sizeof given; /* from after this library */
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_OK);
    assert_int_equal(read.b, 2);
    given.later = 1;
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_E_INVALID);
    assert_non_null(strstr(ckpt_strerror_last(), "newer library"));
    given.known.size = 0;
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_E_INVALID);
    assert_non_null(strstr(ckpt_strerror_last(), "CKPT_INIT"));
    given.known.size = 0xcccccccc;
    assert_int_equal(options_get("known", &given, &read, sizeof read), CKPT_E_INVALID);
    assert_int_equal(options_get("known", NULL, &read, sizeof read), CKPT_OK);
    assert_int_equal(read.a, 0);
}

static void filling(void **state) {
    struct known values = {.a = 5, .b = 6};
    struct {
        struct known known;
        uint64_t later;
    } given = {.known = {.size = 8, .b = 99}, .later = 99};
    assert_int_equal(options_fill("known", &values, sizeof values, &given), CKPT_OK);
    assert_int_equal(given.known.a, 5);
    assert_int_equal(given.known.b, 99);
    given.known.size = sizeof given;
    assert_int_equal(options_fill("known", &values, sizeof values, &given), CKPT_OK);
    assert_int_equal(given.known.b, 6);
    assert_int_equal(given.later, 0);
    assert_int_equal(given.known.size, sizeof given);
    assert_int_equal(options_fill("known", &values, sizeof values, NULL), CKPT_E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(sentences_are_per_thread),
        cmocka_unit_test(sizes),
        cmocka_unit_test(filling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
