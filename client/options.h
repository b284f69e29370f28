/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Structures of ckpt.h that begin with `size`, as programs built for an older or newer library pass them. */

#include "base/util.h"

/* Copies *options into ret_options, which has `size` bytes: an older, shorter one is filled up with
 * zeros, a newer, longer one is accepted if what this library does not know is zero. NULL: all
 * zeros. CKPT_E_INVALID names the structure. */
int options_get(const char *name, const void *options, void *ret_options, uint32_t size) MUST_CHECK;

/* Copies as much of *values as the program's structure has room for; its size stays. */
int options_fill(const char *name, const void *values, uint32_t size, void *ret_options) MUST_CHECK;
