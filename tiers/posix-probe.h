/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the file system under a root can do, found out by trying. Blocking. */

#include "base/problem.h"

/* Leaves nothing behind. Sets TIER_* capability bits; `buffered`: do not try O_DIRECT. */
int posix_probe(int root_fd, const char *name, const char *root, bool buffered, unsigned *ret_capabilities,
                struct problem *problem) MUST_CHECK;
/* Network and cluster file systems, by statfs f_type. */
bool posix_type_is_network(uint64_t type);
/* A name for messages: "nfs", "lustre", ...; "local" where it is none of those. */
const char *posix_type_name(uint64_t type);
