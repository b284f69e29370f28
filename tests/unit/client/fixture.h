/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fake daemon and a handle that is open on it. */

#include "client/ckpt.h"
#include "client/clock.h"
#include "tests/unit/client/fake-daemon.h"
#include "tests/unit/client/unit.h"

struct fixture {
    struct fake *fake;
    struct fake_knobs *knobs;
    ckpt *c;
};

static inline int fixture_open(struct fixture *fixture, uint64_t open_timeout_ms) {
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.socket = fake_path(fixture->fake);
    options.run_id = "run";
    options.open_timeout_ms = open_timeout_ms;
    options.busy_timeout_ms = CKPT_NO_WAIT;
    return ckpt_open("job", &options, &fixture->c);
}

/* Set-up and tear-down of a test; `*state` is the fixture. */
static inline int fixture_setup(void **state) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    fixture->fake = fake_new();
    fixture->knobs = fake_knobs(fixture->fake);
    *state = fixture;
    return fixture_open(fixture, 5000);
}

static inline int fixture_teardown(void **state) {
    struct fixture *fixture = *state;
    ckpt_close(fixture->c);
    fake_free(fixture->fake);
    free(fixture);
    return 0;
}

#define fixture_test(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

/* The call returned `expected` within so many ms; its sentence is shown if not. */
#define assert_result(call, expected)                                                                                  \
    do {                                                                                                               \
        int result_ = (call);                                                                                          \
        if (result_ != (expected))                                                                                     \
            print_message("%s: %s: %s\n", #call, ckpt_strerror(result_), ckpt_strerror_last());                        \
        assert_int_equal(result_, expected);                                                                           \
    } while (0)

#define assert_within(milliseconds, statement)                                                                         \
    do {                                                                                                               \
        uint64_t begun_ = clock_now();                                                                                 \
        statement;                                                                                                     \
        assert_true(clock_now() - begun_ < (milliseconds)*NANOSECONDS_PER_MS);                                         \
    } while (0)

#define assert_says(text) assert_non_null(strstr(ckpt_strerror_last(), text))

static inline struct ckpt_info fixture_info(struct fixture *fixture) {
    struct ckpt_info info;
    CKPT_INIT(info);
    assert_int_equal(ckpt_get_info(fixture->c, &info), CKPT_OK);
    return info;
}
