/* SPDX-License-Identifier: Apache-2.0 */
#include "client/options.h"

#include "client/errors.h"

/*
 * Every such structure begins with a 32-bit size that its user sets. The bound keeps a size that was
 * never set (garbage on the stack) from being read through.
 */

#define OPTIONS_SIZE_MAX 4096

static int options_size(const char *name, const void *options, uint32_t *ret_size) {
    uint32_t size;
    memcpy(&size, options, sizeof size);
    if (size < sizeof size || size > OPTIONS_SIZE_MAX)
        return error_set(CKPT_E_INVALID, "struct %s: size is %u; set it with CKPT_INIT", name, size);
    *ret_size = size;
    return CKPT_OK;
}

int options_get(const char *name, const void *options, void *ret_options, uint32_t size) {
    if (!options) {
        memset(ret_options, 0, size);
        return CKPT_OK;
    }
    uint32_t given = 0;
    int r = options_size(name, options, &given);
    if (r < 0)
        return r;
    for (uint32_t i = size; i < given; i++)
        if (((const uint8_t *)options)[i])
            return error_set(CKPT_E_INVALID,
                             "struct %s: byte %u is set, but this libckpt (%s) knows only %u bytes of it; use a newer "
                             "library, or leave the new fields zero",
                             name, i, ckpt_version(), size);
    memset(ret_options, 0, size);
    memcpy(ret_options, options, min_u64(size, given));
    return CKPT_OK;
}

int options_fill(const char *name, const void *values, uint32_t size, void *ret_options) {
    if (!ret_options)
        return error_set(CKPT_E_INVALID, "struct %s: the pointer is NULL", name);
    uint32_t given = 0;
    int r = options_size(name, ret_options, &given);
    if (r < 0)
        return r;
    memset((uint8_t *)ret_options + sizeof given, 0, given - sizeof given);
    memcpy((uint8_t *)ret_options + sizeof given, (const uint8_t *)values + sizeof given,
           min_u64(size, given) - sizeof given);
    return CKPT_OK;
}
