/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"
#include "client/runid.h"
#include "tests/unit/client/unit.h"

static const char *const variables[] = {"CKPT_RUN_ID",   "PMIX_NAMESPACE",      "SLURM_JOB_ID",
                                        "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"};

static int clear(void **state) {
    for (size_t i = 0; i < ARRAY_SIZE(variables); i++)
        unsetenv(variables[i]);
    return 0;
}

static void order(void **state) {
    char id[MANIFEST_RUN_ID_MAX];
    setenv("SLURM_JOB_ID", "12", 1);
    setenv("SLURM_STEP_ID", "3", 1);
    assert_int_equal(runid_find(NULL, 4, id), CKPT_OK);
    assert_string_equal(id, "12.3.0");
    setenv("SLURM_RESTART_COUNT", "2", 1);
    assert_int_equal(runid_find(NULL, 4, id), CKPT_OK);
    assert_string_equal(id, "12.3.2");
    setenv("PMIX_NAMESPACE", "prterun-1", 1);
    assert_int_equal(runid_find(NULL, 4, id), CKPT_OK);
    assert_string_equal(id, "prterun-1");
    setenv("CKPT_RUN_ID", "mine", 1);
    assert_int_equal(runid_find("", 4, id), CKPT_OK);
    assert_string_equal(id, "mine");
    assert_int_equal(runid_find("given", 4, id), CKPT_OK);
    assert_string_equal(id, "given");
}

static void drawn_for_one_rank_only(void **state) {
    char one[MANIFEST_RUN_ID_MAX], two[MANIFEST_RUN_ID_MAX];
    assert_int_equal(runid_find(NULL, 1, one), CKPT_OK);
    assert_int_equal(runid_find(NULL, 1, two), CKPT_OK);
    assert_string_not_equal(one, two);
    assert_int_equal(runid_find(NULL, 2, one), CKPT_E_INVALID);
    assert_non_null(strstr(ckpt_strerror_last(), "CKPT_RUN_ID"));
    setenv("TORCHELASTIC_RUN_ID", "none", 1);
    assert_int_equal(runid_find(NULL, 2, one), CKPT_E_INVALID);
    assert_non_null(strstr(ckpt_strerror_last(), "process group"));
    setenv("SLURM_JOB_ID", "12", 1); /* the job alone is the same for all its launches */
    assert_int_equal(runid_find(NULL, 2, one), CKPT_E_INVALID);
}

static void refused(void **state) {
    char id[MANIFEST_RUN_ID_MAX], text[MANIFEST_RUN_ID_MAX + 1];
    memset(text, 'x', sizeof text);
    text[MANIFEST_RUN_ID_MAX] = '\0';
    assert_int_equal(runid_find(text, 1, id), CKPT_E_LIMIT);
    text[MANIFEST_RUN_ID_MAX - 1] = '\0';
    assert_int_equal(runid_find(text, 1, id), CKPT_OK);
    assert_int_equal(runid_find("\xff", 1, id), CKPT_E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(order, clear),
        cmocka_unit_test_setup(drawn_for_one_rank_only, clear),
        cmocka_unit_test_setup(refused, clear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
