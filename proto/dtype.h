/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Element types. The codes go over the wire and into ckpt.h (CKPT_F32 = DTYPE_F32 ...): they never
 * change. The names are those of safetensors; a dtype that safetensors lacks is stored as U8 with
 * its element size as an extra last dimension, and its true name stands in __metadata__.
 */

#include "base/util.h"

enum dtype {
    DTYPE_INVALID = 0,
    DTYPE_BOOL = 1,
    DTYPE_U8 = 2,
    DTYPE_I8 = 3,
    DTYPE_F8_E5M2 = 4,
    DTYPE_F8_E4M3 = 5,
    DTYPE_I16 = 6,
    DTYPE_U16 = 7,
    DTYPE_F16 = 8,
    DTYPE_BF16 = 9,
    DTYPE_I32 = 10,
    DTYPE_U32 = 11,
    DTYPE_F32 = 12,
    DTYPE_I64 = 13,
    DTYPE_U64 = 14,
    DTYPE_F64 = 15,
    DTYPE_C64 = 16,  /* two F32; stored as U8 */
    DTYPE_C128 = 17, /* two F64; stored as U8 */
    DTYPE_MAX = 18,
};

bool dtype_valid(uint32_t code);
/* Bytes per element: 1, 2, 4, 8 or 16. The dtype must be valid. */
unsigned dtype_size(enum dtype dtype);
/* The true name ("F32", "C64", ...). */
const char *dtype_name(enum dtype dtype);
/* What the safetensors header says ("F32"; "U8" for C64 and C128). */
const char *dtype_stored_name(enum dtype dtype);
/* DTYPE_INVALID where there is no such true name. */
enum dtype dtype_from_name(const char *name);
enum dtype dtype_from_text(const char *text, size_t length);
