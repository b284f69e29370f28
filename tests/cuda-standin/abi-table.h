/* SPDX-License-Identifier: Apache-2.0 */
/* What abi-table.c finds in one of the two headers, base/cuda-abi.h or the toolkit's cuda.h. */
#pragma once

#include <stddef.h>

struct abi_entry {
    const char *name;
    unsigned long long value; /* a constant, the size of a type, or place (shifted by 32) and size of a member */
};

extern const struct abi_entry abi_ours[], abi_toolkit[]; /* both end with a name NULL */
extern const int abi_toolkit_version;
