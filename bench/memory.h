/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the actor saves and restores: bytes that are cut into shards of (almost) equal size. */

#include <stddef.h>
#include <stdint.h>

#define MEMORY_STAMP_SIZE 8 /* the first bytes of a shard are its number */

struct memory {
    unsigned char *data;
    size_t size, count; /* bytes; shards */
};

/* Pages of 4 KiB, all touched. Ends the program if there is no memory. */
void memory_new(struct memory *memory, size_t size, size_t count);
/* Pages that are not there before somebody writes to them; they read as zeros. */
void memory_reserve(struct memory *memory, size_t size, size_t count);
void memory_free(struct memory *memory);

size_t memory_begin(const struct memory *memory, size_t shard);
size_t memory_length(const struct memory *memory, size_t shard);

/* Fills and stamps. Noise does not compress; the rest does, to about a quarter. */
void memory_fill_noise(struct memory *memory);
void memory_fill_compressible(struct memory *memory);
/* Stamps only. */
void memory_fill_nothing(struct memory *memory);

/* The first shard of [first, end) without its stamp; SIZE_MAX: all have theirs. */
size_t memory_find_wrong(const struct memory *memory, size_t first, size_t end);
