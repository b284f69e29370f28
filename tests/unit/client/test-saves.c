/* SPDX-License-Identifier: Apache-2.0 */
#include "client/saves.h"
#include "tests/unit/client/unit.h"

static void steps_increase(void **state) {
    struct saves saves = {0};
    assert_int_equal(saves_check(&saves, 0), CKPT_OK);
    saves_begin(&saves, 5, 4096);
    saves_answered(&saves, CKPT_OK, 4096);
    saves_settle(&saves, true);
    assert_int_equal(saves_check(&saves, 5), CKPT_ALREADY);
    assert_int_equal(saves_check(&saves, 4), CKPT_E_INVALID);
    assert_non_null(strstr(ckpt_strerror_last(), "step 4"));
    assert_non_null(strstr(ckpt_strerror_last(), "step 5"));
    assert_int_equal(saves_check(&saves, 6), CKPT_OK);
    saves_begin(&saves, 6, 4096);
    saves_answered(&saves, CKPT_SKIPPED, 0);
    assert_int_equal(saves_check(&saves, 6), CKPT_OK);
    assert_int_equal(saves.accepted, 1);
    assert_int_equal(saves.skipped, 1);
}

static void a_lost_one_may_be_retried(void **state) {
    struct saves saves = {0};
    saves_begin(&saves, 5, 4096);
    saves_answered(&saves, CKPT_OK, 4096);
    saves_settle(&saves, false);
    assert_int_equal(saves.lost, 1);
    assert_int_equal(saves_check(&saves, 5), CKPT_OK);
    assert_true(saves_take_untold(&saves));
    assert_false(saves_take_untold(&saves));
    saves_begin(&saves, 5, 4096);
    saves_answered(&saves, CKPT_ALREADY, 0);
    assert_int_equal(saves_check(&saves, 5), CKPT_ALREADY);
}

static void verdicts(void **state) {
    struct saves saves = {0};
    uint16_t counter = saves_begin(&saves, 1, 10000);
    saves_answered(&saves, CKPT_OK, 10000);
    assert_int_equal(saves_judge(&saves, word_make(counter, 0)), SAVES_PENDING);
    assert_int_equal(saves_judge(&saves, word_make(counter, 9999)), SAVES_PENDING);
    assert_int_equal(saves_judge(&saves, word_make(counter, 10000)), SAVES_CAPTURED);
    assert_int_equal(saves_judge(&saves, word_make(counter, WORD_FAILED)), SAVES_FAILED);
    assert_int_equal(saves_judge(&saves, word_make(counter, WORD_REVOKED)), SAVES_FAILED);
    assert_int_equal(saves_judge(&saves, word_make(counter + 1, 10000)), SAVES_FAILED);
    assert_true(saves_reached(&saves, word_make(counter, 5000), 5000));
    assert_false(saves_reached(&saves, word_make(counter, 4999), 5000));
    assert_false(saves_reached(&saves, word_make(counter, WORD_FAILED), 5000));
    assert_false(saves_reached(&saves, word_make(counter + 1, 5000), 5000));
}

static void counters_wrap(void **state) {
    struct saves saves = {0};
    uint16_t last = 0;
    for (uint64_t step = 0; step < 70000; step++) {
        uint16_t counter = saves_begin(&saves, step, 4096);
        assert_true(counter != last || step == 0);
        last = counter;
        saves_answered(&saves, CKPT_SKIPPED, 0);
    }
}

static void events(void **state) {
    struct saves saves = {0};
    uint16_t counter = saves_begin(&saves, 1, 4096);
    saves_event(&saves, counter - 1, CKPT_E_LOST, "old", 3);
    assert_string_equal(saves.reason, "");
    saves_event(&saves, counter, CKPT_E_LOST, "bad memory", 10);
    assert_string_equal(saves.reason, "bad memory");
    saves_answered(&saves, CKPT_OK, 4096);
    saves_settle(&saves, false);
    saves_event(&saves, counter, CKPT_E_LOST, "late", 4);
    assert_string_equal(saves.reason, "bad memory");
}

static void missed_steps(void **state) {
    struct saves saves = {0};
    uint64_t step;
    assert_false(saves_missed_take(&saves, &step));
    for (uint64_t i = 0; i < 100; i++) {
        saves_missed_add(&saves, i);
        saves_missed_add(&saves, i);
    }
    assert_int_equal(saves.missed_count, SAVES_MISSED_MAX);
    for (uint64_t i = 100 - SAVES_MISSED_MAX; i < 100; i++) {
        assert_true(saves_missed_take(&saves, &step));
        assert_int_equal(step, i);
    }
    assert_false(saves_missed_take(&saves, &step));
    /* The step that no daemon took is saved after all. */
    saves_missed_add(&saves, 200);
    saves_missed_add(&saves, 201);
    saves_begin(&saves, 201, 4096);
    saves_answered(&saves, CKPT_OK, 4096);
    assert_true(saves_missed_take(&saves, &step));
    assert_int_equal(step, 200);
    assert_false(saves_missed_take(&saves, &step));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_increase), cmocka_unit_test(a_lost_one_may_be_retried),
        cmocka_unit_test(verdicts),       cmocka_unit_test(counters_wrap),
        cmocka_unit_test(events),         cmocka_unit_test(missed_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
