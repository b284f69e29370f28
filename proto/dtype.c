/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/dtype.h"

static const struct {
    const char *name, *stored_name;
    unsigned size;
} dtypes[DTYPE_MAX] = {
    [DTYPE_BOOL] = {"BOOL", "BOOL", 1},
    [DTYPE_U8] = {"U8", "U8", 1},
    [DTYPE_I8] = {"I8", "I8", 1},
    [DTYPE_F8_E5M2] = {"F8_E5M2", "F8_E5M2", 1},
    [DTYPE_F8_E4M3] = {"F8_E4M3", "F8_E4M3", 1},
    [DTYPE_I16] = {"I16", "I16", 2},
    [DTYPE_U16] = {"U16", "U16", 2},
    [DTYPE_F16] = {"F16", "F16", 2},
    [DTYPE_BF16] = {"BF16", "BF16", 2},
    [DTYPE_I32] = {"I32", "I32", 4},
    [DTYPE_U32] = {"U32", "U32", 4},
    [DTYPE_F32] = {"F32", "F32", 4},
    [DTYPE_I64] = {"I64", "I64", 8},
    [DTYPE_U64] = {"U64", "U64", 8},
    [DTYPE_F64] = {"F64", "F64", 8},
    [DTYPE_C64] = {"C64", "U8", 8},
    [DTYPE_C128] = {"C128", "U8", 16},
};

bool dtype_valid(uint32_t code) { return code > DTYPE_INVALID && code < DTYPE_MAX; }

unsigned dtype_size(enum dtype dtype) {
    assert(dtype_valid(dtype));
    return dtypes[dtype].size;
}

const char *dtype_name(enum dtype dtype) {
    assert(dtype_valid(dtype));
    return dtypes[dtype].name;
}

const char *dtype_stored_name(enum dtype dtype) {
    assert(dtype_valid(dtype));
    return dtypes[dtype].stored_name;
}

enum dtype dtype_from_text(const char *text, size_t length) {
    for (unsigned code = DTYPE_INVALID + 1; code < DTYPE_MAX; code++)
        if (strlen(dtypes[code].name) == length && memcmp(dtypes[code].name, text, length) == 0)
            return (enum dtype)code;
    return DTYPE_INVALID;
}

enum dtype dtype_from_name(const char *name) { return dtype_from_text(name, strlen(name)); }
