/* SPDX-License-Identifier: Apache-2.0 */
#include "base/problem.h"
#include "tests/unit/base/unit.h"

#include <errno.h>

static void test_set_returns_code(void **state) {
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(problem_set(&problem, -ENOSPC, "tier %s: full", "local"), -ENOSPC);
    assert_int_equal(problem.code, -ENOSPC);
    assert_string_equal(problem_text(&problem, -ENOSPC), "tier local: full");
}

static void test_null_problem(void **state) {
    assert_int_equal(problem_set(NULL, -EIO, "unheard"), -EIO);
    assert_string_equal(problem_text(NULL, -EIO), strerror(EIO));
}

static void test_first_sentence_stays(void **state) {
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -EIO, "the disk");
    assert_int_equal(problem_set(&problem, -EINVAL, "the caller"), -EINVAL);
    assert_int_equal(problem.code, -EINVAL);
    assert_string_equal(problem_text(&problem, -EINVAL), "the disk");
}

static void test_unset_falls_back(void **state) {
    struct problem problem = PROBLEM_NONE;
    assert_string_equal(problem_text(&problem, -ENOENT), strerror(ENOENT));
    assert_string_equal(problem_text(&problem, ENOENT), strerror(ENOENT));
}

/* For every position of the cut inside and around a character of two to four bytes: what remains
 * is whole characters, and all of them but at most one. */
static void test_cut_at_character(void **state) {
    static const char *const characters[] = {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x92\xbe"};
    for (size_t c = 0; c < ARRAY_SIZE(characters); c++) {
        size_t width = strlen(characters[c]);
        for (size_t before = PROBLEM_TEXT_MAX - 2 * width - 2; before < PROBLEM_TEXT_MAX + 2; before++) {
            struct problem problem = PROBLEM_NONE;
            char text[PROBLEM_TEXT_MAX + 64];
            memset(text, 'a', before);
            text[before] = '\0';
            strcat(strcat(strcat(text, characters[c]), characters[c]), "tail");
            problem_set(&problem, -EINVAL, "%s", text);
            size_t length = strlen(problem.text);
            assert_memory_equal(problem.text, text, length);
            if (length > before && length < before + 2 * width)
                assert_int_equal((length - before) % width, 0);
            assert_true(length + width >= min_u64(strlen(text), PROBLEM_TEXT_MAX - 1));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_returns_code),     cmocka_unit_test(test_null_problem),
        cmocka_unit_test(test_first_sentence_stays), cmocka_unit_test(test_unset_falls_back),
        cmocka_unit_test(test_cut_at_character),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
