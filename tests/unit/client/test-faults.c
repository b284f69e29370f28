/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"
#include "client/handle.h"
#include "tests/unit/client/fixture.h"

#include <fcntl.h>
#include <sys/stat.h>

/*
 * Whatever the daemon does, each call returns by its deadline, says what happened, and leaves the
 * handle in a state from which the next save recovers. Times are bounds with room for a busy machine.
 */

#define GRACE 2000 /* of HANDLE_GRACE_MS */
#define SLACK 1500

static float weights[50000];

static int protected_setup(void **state) {
    int r = fixture_setup(state);
    struct fixture *fixture = *state;
    if (r == 0)
        r = ckpt_protect_array(fixture->c, "weights", CKPT_F32, weights, ARRAY_SIZE(weights));
    return r;
}

static void fault(struct fixture *fixture, enum opcode opcode, int what) { fixture->knobs->fault[opcode] = what; }

/* The daemon is there again and everything works: the set is registered anew, the missed steps are told. */
static void assert_recovers(struct fixture *fixture, uint64_t step) {
    int r = CKPT_E_UNREACHABLE;
    for (unsigned i = 0; i < 60 && r < 0; i++) {
        r = ckpt_save(fixture->c, step, NULL);
        if (r < 0)
            usleep(50000);
    }
    assert_result(r, CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
}

static void nobody_there(void **state) {
    ckpt *c;
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.socket = "/tmp/no-such-directory-of-ckptd/sock";
    options.open_timeout_ms = 300;
    unsetenv("CKPTD_PROGRAM");
    assert_within(300 + SLACK, assert_result(ckpt_open("job", &options, &c), CKPT_E_UNREACHABLE));
    assert_says("/tmp/no-such-directory-of-ckptd/sock");
    options.open_timeout_ms = CKPT_NO_WAIT;
    assert_within(SLACK, assert_result(ckpt_open("job", &options, &c), CKPT_E_UNREACHABLE));
}

static void a_program_that_does_not_stay(void **state) {
    ckpt *c;
    struct ckpt_open_options options;
    char directory[] = "/tmp/test-client-XXXXXX", path[64];
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/sock", directory);
    CKPT_INIT(options);
    options.socket = path;
    options.daemon = "/bin/false";
    options.open_timeout_ms = 200;
    assert_result(ckpt_open("job", &options, &c), CKPT_E_UNREACHABLE);
    options.daemon = "/nonexistent/ckptd";
    assert_result(ckpt_open("job", &options, &c), CKPT_E_UNREACHABLE);
    assert_says("/nonexistent/ckptd");
    chmod(directory, 0777);
    assert_result(ckpt_open("job", &options, &c), CKPT_E_DENIED);
    assert_says("0700");
    rmdir(directory);
}

static void open_answered_badly(void **state) {
    struct fixture *fixture = *state;
    static const struct {
        enum opcode opcode;
        int what, result;
    } cases[] = {
        {MESSAGE_HELLO, FAKE_SILENT, CKPT_E_TIMEOUT}, {MESSAGE_HELLO, FAKE_GARBAGE, CKPT_E_PROTOCOL},
        {MESSAGE_HELLO, FAKE_WRONG, CKPT_E_PROTOCOL}, {MESSAGE_HELLO, FAKE_ERROR, CKPT_E_IO},
        {MESSAGE_OPEN, FAKE_SILENT, CKPT_E_TIMEOUT},  {MESSAGE_OPEN, FAKE_GARBAGE, CKPT_E_PROTOCOL},
        {MESSAGE_OPEN, FAKE_WRONG, CKPT_E_PROTOCOL},  {MESSAGE_OPEN, FAKE_ERROR, CKPT_E_IO},
    };
    ckpt *first = fixture->c;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        fault(fixture, cases[i].opcode, cases[i].what);
        assert_within(300 + SLACK, assert_result(fixture_open(fixture, 300), cases[i].result));
        fault(fixture, cases[i].opcode, FAKE_ANSWERS);
    }
    fault(fixture, MESSAGE_OPEN, FAKE_ERROR);
    assert_result(fixture_open(fixture, 300), CKPT_E_IO);
    assert_says("broken on purpose");
    fault(fixture, MESSAGE_OPEN, FAKE_ANSWERS);
    fixture->c = first;
}

static void silent_at_save(void **state) {
    struct fixture *fixture = *state;
    fault(fixture, MESSAGE_SAVE, FAKE_SILENT);
    assert_within(GRACE + SLACK, assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_TIMEOUT));
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK); /* nothing was taken */
    fault(fixture, MESSAGE_SAVE, FAKE_ANSWERS);
    assert_recovers(fixture, 1);
}

static void late_saved_is_nobodys(void **state) {
    struct fixture *fixture = *state;
    fault(fixture, MESSAGE_SAVE, FAKE_LATE);
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_TIMEOUT);
    fault(fixture, MESSAGE_SAVE, FAKE_ANSWERS);
    /* The answer to step 1 comes before that to step 2; its capture is revoked already. */
    assert_result(ckpt_save(fixture->c, 2, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    assert_int_equal(fixture_info(fixture).saves, 1);
}

static void silent_at_register(void **state) {
    struct fixture *fixture = *state;
    fault(fixture, MESSAGE_REGISTER, FAKE_ERROR);
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_IO);
    assert_says("broken on purpose");
    fault(fixture, MESSAGE_REGISTER, FAKE_SILENT);
    assert_within(10000 + SLACK, assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_TIMEOUT));
    fault(fixture, MESSAGE_REGISTER, FAKE_ANSWERS);
    assert_recovers(fixture, 1);
}

static void refused_areas(void **state) {
    struct fixture *fixture = *state;
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "state";
    options.state_size = 5;
    assert_recovers(fixture, 1);
    fault(fixture, MESSAGE_AREA, FAKE_ERROR);
    fixture->knobs->save_result = CODE_E_INVALID; /* as it must say of a state that lies nowhere */
    assert_result(ckpt_save(fixture->c, 2, &options), CKPT_E_IO);
    assert_says("broken on purpose");
    fault(fixture, MESSAGE_AREA, FAKE_ANSWERS);
    fixture->knobs->save_result = CODE_OK;
    assert_recovers(fixture, 3);
    assert_result(ckpt_save(fixture->c, 4, &options), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
}

static void garbage_everywhere(void **state) {
    struct fixture *fixture = *state;
    fault(fixture, MESSAGE_REGISTER, FAKE_GARBAGE);
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_PROTOCOL);
    fault(fixture, MESSAGE_REGISTER, FAKE_ANSWERS);
    assert_recovers(fixture, 2);
    static const int kinds[] = {FAKE_GARBAGE, FAKE_WRONG};
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        fault(fixture, MESSAGE_SAVE, kinds[i]);
        assert_result(ckpt_save(fixture->c, 10 * i + 10, NULL), CKPT_E_PROTOCOL);
        assert_int_equal(fixture_info(fixture).connected, 0);
        fault(fixture, MESSAGE_SAVE, FAKE_ANSWERS);
        assert_recovers(fixture, 10 * i + 11);
        fault(fixture, MESSAGE_WAIT, kinds[i]);
        assert_result(ckpt_wait(fixture->c, 1, CKPT_LOCAL, CKPT_PART, 500), CKPT_E_PROTOCOL);
        fault(fixture, MESSAGE_WAIT, FAKE_ANSWERS);
        assert_result(ckpt_wait(fixture->c, 1, CKPT_LOCAL, CKPT_PART, 500), CKPT_OK); /* connects again */
    }
}

static void fence_revokes(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    assert_within(200 + SLACK, assert_result(ckpt_fence(fixture->c, 200), CKPT_E_TIMEOUT));
    assert_says("200 ms");
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    assert_int_equal(fixture_info(fixture).lost, 1);
    fixture->knobs->hold = false;
    assert_recovers(fixture, 1); /* what was lost may be saved again */
    uint64_t size;
    assert_non_null(fake_image(fixture->fake, &size));
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 2, NULL), CKPT_OK);
    assert_within(SLACK, assert_result(ckpt_fence(fixture->c, CKPT_NO_WAIT), CKPT_E_TIMEOUT));
}

static void fence_shard_watches(void **state) {
    struct fixture *fixture = *state;
    uint64_t shape = 1000, first, second;
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F32;
    shard.data = weights;
    shard.dimensions = 1;
    shard.shape = &shape;
    shard.name = "first";
    assert_result(ckpt_protect(fixture->c, &shard, &first), CKPT_OK);
    shard.name = "second";
    assert_result(ckpt_protect(fixture->c, &shard, &second), CKPT_OK);
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    fixture->knobs->stop_at = 4096 + sizeof weights + 4000;
    assert_result(ckpt_fence_shard(fixture->c, first, 5000), CKPT_OK);
    assert_within(100 + SLACK, assert_result(ckpt_fence_shard(fixture->c, second, 100), CKPT_E_TIMEOUT));
}

static void captures_fail(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->captured = CODE_E_LOST;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_E_LOST);
    assert_says("step 1");
    fixture->knobs->captured = CODE_OK;
    assert_recovers(fixture, 1);
}

static void death_at_each_message(void **state) {
    struct fixture *fixture = *state;
    static const enum opcode opcodes[] = {MESSAGE_REGISTER, MESSAGE_SAVE};
    uint64_t step = 1;
    for (size_t i = 0; i < ARRAY_SIZE(opcodes); i++) {
        fault(fixture, opcodes[i], FAKE_DIES);
        assert_within(SLACK, assert_result(ckpt_save(fixture->c, step++, NULL), CKPT_E_UNREACHABLE));
        fault(fixture, opcodes[i], FAKE_ANSWERS);
        assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
        /* No daemon: a save fails in about a second at most, and the next ones at once. */
        assert_within(1000 + SLACK, assert_result(ckpt_save(fixture->c, step++, NULL), CKPT_E_UNREACHABLE));
        assert_within(200, assert_result(ckpt_save(fixture->c, step++, NULL), CKPT_E_UNREACHABLE));
        fake_stop(fixture->fake);
        fake_start(fixture->fake);
        assert_recovers(fixture, step++);
    }
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(fake_missed(fixture->fake, i), i + 1);
    static const enum opcode questions[] = {MESSAGE_WAIT, MESSAGE_LAST_DURABLE, MESSAGE_VERSIONS};
    for (size_t i = 0; i < ARRAY_SIZE(questions); i++) {
        struct ckpt_durable durable;
        CKPT_INIT(durable);
        struct ckpt_version_entry *versions;
        size_t count;
        fault(fixture, questions[i], FAKE_DIES);
        int r = questions[i] == MESSAGE_WAIT           ? ckpt_wait(fixture->c, 1, CKPT_LOCAL, CKPT_PART, 1000)
                : questions[i] == MESSAGE_LAST_DURABLE ? ckpt_last_durable(fixture->c, CKPT_LOCAL, &durable)
                                                       : ckpt_versions(fixture->c, &versions, &count);
        assert_int_equal(r, CKPT_E_UNREACHABLE);
        fault(fixture, questions[i], FAKE_ANSWERS);
        fake_stop(fixture->fake);
        fake_start(fixture->fake);
    }
    assert_recovers(fixture, step++);
}

static void death_during_a_capture(void **state) {
    struct fixture *fixture = *state;
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    fake_stop(fixture->fake);
    assert_within(SLACK, assert_result(ckpt_fence(fixture->c, 0), CKPT_E_LOST));
    assert_int_equal(word_watermark(word_load(fixture->c->session.word)), WORD_REVOKED);
    fixture->knobs->hold = false;
    fake_start(fixture->fake);
    assert_recovers(fixture, 2);
    assert_int_equal(fake_missed(fixture->fake, 0), 1);
    /* The same, noticed by another call: the fence tells it all the same, once. */
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 3, NULL), CKPT_OK);
    fake_stop(fixture->fake);
    fixture->knobs->hold = false;
    assert_result(ckpt_wait(fixture->c, 3, CKPT_LOCAL, CKPT_PART, 100), CKPT_E_UNREACHABLE);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_E_LOST);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
    fake_start(fixture->fake);
    assert_recovers(fixture, 4);
}

static void death_after_a_capture(void **state) {
    struct fixture *fixture = *state;
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_OK);
    uint64_t size;
    fake_image(fixture->fake, &size);
    fake_stop(fixture->fake);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_OK); /* the word outlives the daemon */
    fake_start(fixture->fake);
    assert_recovers(fixture, 2);
}

static void unprotect_and_close_revoke(void **state) {
    struct fixture *fixture = *state;
    assert_recovers(fixture, 1);
    fixture->knobs->hold = true;
    assert_result(ckpt_save(fixture->c, 2, NULL), CKPT_OK);
    fake_stop(fixture->fake);
    assert_result(ckpt_unprotect_all(fixture->c), CKPT_E_LOST);
    fixture->knobs->hold = false;
    fake_start(fixture->fake);
    assert_recovers(fixture, 3);
    fixture->knobs->captured = CODE_E_LOST;
    assert_result(ckpt_save(fixture->c, 4, NULL), CKPT_OK);
    ckpt *c = fixture->c;
    fixture->c = NULL;
    assert_result(ckpt_close(c), CKPT_E_LOST);
}

static void slow_opening_goes_on(void **state) {
    struct fixture *fixture = *state;
    assert_recovers(fixture, 1);
    fake_stop(fixture->fake);
    fault(fixture, MESSAGE_OPEN, FAKE_SILENT);
    fake_start(fixture->fake);
    /* Waited for once; then only looked at. */
    assert_within(1000 + SLACK, assert_result(ckpt_save(fixture->c, 2, NULL), CKPT_E_UNREACHABLE));
    assert_says("not opened");
    assert_within(200, assert_result(ckpt_save(fixture->c, 3, NULL), CKPT_E_UNREACHABLE));
    assert_int_equal(fake_count(fixture->fake, MESSAGE_OPEN), 2);
    fake_stop(fixture->fake);
    fault(fixture, MESSAGE_OPEN, FAKE_ANSWERS);
    fake_start(fixture->fake);
    assert_recovers(fixture, 4);
    assert_int_equal(fake_missed(fixture->fake, 0), 2);
    assert_int_equal(fake_missed(fixture->fake, 1), 3);
}

static void a_bug_disables(void **state) {
    struct fixture *fixture = *state;
    assert_int_equal(handle_bug(fixture->c, "condition", "file.c", 1), CKPT_E_BUG);
    assert_result(ckpt_save(fixture->c, 1, NULL), CKPT_E_BUG);
    assert_result(ckpt_fence(fixture->c, 0), CKPT_E_BUG);
    ckpt *c = fixture->c;
    fixture->c = NULL;
    assert_result(ckpt_close(c), CKPT_E_BUG);
}

#define protected_test(test) cmocka_unit_test_setup_teardown(test, protected_setup, fixture_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_there),
        cmocka_unit_test(a_program_that_does_not_stay),
        fixture_test(open_answered_badly),
        protected_test(silent_at_save),
        protected_test(late_saved_is_nobodys),
        protected_test(silent_at_register),
        protected_test(refused_areas),
        protected_test(garbage_everywhere),
        protected_test(fence_revokes),
        protected_test(fence_shard_watches),
        protected_test(captures_fail),
        protected_test(death_at_each_message),
        protected_test(death_during_a_capture),
        protected_test(death_after_a_capture),
        protected_test(unprotect_and_close_revoke),
        protected_test(slow_opening_goes_on),
        fixture_test(a_bug_disables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
