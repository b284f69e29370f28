/* SPDX-License-Identifier: Apache-2.0 */
/* What is found where there is no driver, and the toolkit's stub (STUB, where one is installed). */
#include "base/cuda.h"
#include "tests/unit/base/unit.h"

#include <errno.h>

static void test_no_driver(void **state) {
    struct cuda cuda;
    cuda_init(&cuda, "libcuda-that-does-not-exist.so.1");
    assert_int_equal(cuda.state, CUDA_NO_DRIVER);
    assert_int_equal(cuda.problem.code, -ENODEV);
    assert_non_null(strstr(cuda.problem.text, "libcuda-that-does-not-exist.so.1"));
    assert_string_equal(cuda_state_name(cuda.state), "no driver");
    assert_null(cuda.cuMemAlloc_v2);
}

/* A library that is no driver, and which this program has loaded. */
static void test_not_a_driver(void **state) {
    struct cuda cuda;
    cuda_init_loaded(&cuda, "libc.so.6");
    assert_int_equal(cuda.state, CUDA_UNFIT);
    assert_string_equal(cuda_state_name(cuda.state), "unfit");
    assert_null(cuda.cuMemAlloc_v2);
}

static void test_not_loaded(void **state) {
    struct cuda cuda;
    const char *stub = getenv("STUB");
    cuda_init_loaded(&cuda, stub ? stub : "libcuda-that-does-not-exist.so.1");
    assert_int_equal(cuda.state, CUDA_NO_DRIVER);
    assert_true(cuda.problem.text[0]);
}

static void test_stub(void **state) {
    struct cuda cuda;
    const char *stub = getenv("STUB");
    if (!stub)
        skip(); /* no toolkit here */
    cuda_init(&cuda, stub);
    assert_int_equal(cuda.state, CUDA_STUB);
    assert_string_equal(cuda_state_name(cuda.state), "stub");
    assert_non_null(strstr(cuda.problem.text, "34"));
    assert_null(cuda.cuMemAlloc_v2);
}

static CUresult name_of(CUresult error, const char **ret_name) {
    if (error == CUDA_ERROR_UNKNOWN)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_name = "CUDA_ERROR_OUT_OF_MEMORY";
    return CUDA_SUCCESS;
}

static CUresult text_of(CUresult error, const char **ret_text) {
    if (error == CUDA_ERROR_UNKNOWN)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_text = "out of memory";
    return CUDA_SUCCESS;
}

static void test_problem(void **state) {
    struct cuda cuda = {.cuGetErrorName = name_of, .cuGetErrorString = text_of};
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(cuda_problem(&cuda, CUDA_SUCCESS, &problem, "cuMemAlloc"), 0);
    assert_int_equal(problem.code, 0);
    assert_int_equal(cuda_problem(&cuda, CUDA_ERROR_OUT_OF_MEMORY, &problem, "cuMemAlloc"), -ENOMEM);
    assert_string_equal(problem.text, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
    problem = PROBLEM_NONE;
    assert_int_equal(cuda_problem(&cuda, CUDA_ERROR_UNKNOWN, &problem, "cuInit"), -EIO);
    assert_non_null(strstr(problem.text, "999"));
    assert_true(cuda_is_sticky(CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_false(cuda_is_sticky(CUDA_ERROR_OUT_OF_MEMORY));
    assert_false(cuda_is_sticky(CUDA_ERROR_NOT_READY));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_driver),  cmocka_unit_test(test_not_a_driver),
        cmocka_unit_test(test_not_loaded), /* before the stub is */
        cmocka_unit_test(test_stub),       cmocka_unit_test(test_problem),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
