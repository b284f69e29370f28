/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base/cuda-abi.h against the CUDA Toolkit: every constant, every size and place of a member (the types of functions
 * the compiler has compared in abi-table.c), and every function against the symbols of the driver library that the
 * toolkit brings to link with (STUB, if it does).
 */
#include "base/cuda-abi.h"
#include "base/util.h"
#include "tests/cuda-standin/abi-table.h"
#include "tests/unit/base/unit.h"

#include <dlfcn.h>

static void names_and_layouts(void **state) {
    int wrong = 0, n = 0;
    for (; abi_ours[n].name; n++) {
        assert_non_null(abi_toolkit[n].name);
        assert_string_equal(abi_ours[n].name, abi_toolkit[n].name);
        if (abi_ours[n].value != abi_toolkit[n].value) {
            print_error("%s is %#llx here and %#llx in cuda.h\n", abi_ours[n].name, abi_ours[n].value,
                        abi_toolkit[n].value);
            wrong++;
        }
    }
    assert_null(abi_toolkit[n].name);
    assert_true(n > 0);
    print_message("%d names compared with cuda.h %d\n", n, abi_toolkit_version);
    assert_int_equal(wrong, 0);
}

static void functions(void **state) {
    static const char *const names[] = {
#define CUDA_FUNCTION(name, arguments) #name,
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION
    };
    void *library = dlopen(STUB, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        print_message("not compared with the driver's symbols: %s\n", dlerror());
        skip();
    }
    int missing = 0;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        if (!dlsym(library, names[i])) {
            print_error("the driver has no %s\n", names[i]);
            missing++;
        }
    }
    dlclose(library);
    assert_int_equal(missing, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(names_and_layouts), cmocka_unit_test(functions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
