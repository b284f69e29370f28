/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How much memory there is, of the machine and of this process's control group (v1 or v2). */

#include "base/util.h"

struct memory {
    uint64_t available;     /* of the machine */
    uint64_t group_left;    /* limit - usage, the least on the way up; UINT64_MAX: no limit */
    const char *group_kind; /* "cgroup v2", "cgroup v1", "none" */
};

void memory_look(struct memory *ret_memory);
/* What this process may still take: the lesser of both. */
uint64_t memory_available(void);
