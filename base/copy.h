/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Copying much memory that is not needed soon: stores go past the cache (copy-x86.c; copy-plain.c is
 * memcpy). The C library does that only for single copies of the size of the last-level cache and
 * more; a tensor that comes in pieces of a few MiB would push everything else out, and pay for
 * reading each line of the destination first.
 */

#include "base/util.h"

/* As memcpy. */
void copy_past_cache(void *destination, const void *source, size_t length);
