/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * XXH3-128 for several instruction sets. digest.c takes the first usable one of a table
 * that each architecture's file defines; xxHash's own library has only the baseline.
 */

#include "proto/digest.h"

struct digest_kernel {
    const char *name;
    bool (*usable)(void);
    void (*leaf)(const void *data, size_t length, struct digest *ret_digest);
    void (*copy)(void *destination, const void *source, size_t length, struct digest *ret_digest);
};

/* Best first, ended by NULL; the last one is usable everywhere. */
extern const struct digest_kernel *const digest_kernels[];
