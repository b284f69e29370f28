/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Shared memory files, mapped where the kernel can use huge pages for them. */

#include "base/util.h"

#define MAP_HUGE_SIZE MIB(2) /* of x86-64 and of arm64 with 4 KiB pages; elsewhere only an alignment */

/* The whole file, readable, and writable if that is said. MAP_FAILED and errno as mmap. */
void *map_file(int fd, size_t size, bool writable) MUST_CHECK;
