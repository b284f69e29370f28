/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BLOCK 64
#define BLOCK_NOISE 16 /* of a compressible block */

void memory_reserve(struct memory *memory, size_t size, size_t count) {
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        perror("bench: mmap");
        exit(1);
    }
    madvise(data, size, MADV_NOHUGEPAGE);
    *memory = (struct memory){.data = data, .size = size, .count = count};
}

void memory_new(struct memory *memory, size_t size, size_t count) {
    memory_reserve(memory, size, count);
    memset(memory->data, 1, size);
}

void memory_free(struct memory *memory) {
    if (memory->data)
        munmap(memory->data, memory->size);
    *memory = (struct memory){0};
}

/* Multiples of 8 bytes. */
size_t memory_begin(const struct memory *memory, size_t shard) {
    return shard == memory->count ? memory->size : memory->size / memory->count / 8 * 8 * shard;
}

size_t memory_length(const struct memory *memory, size_t shard) {
    return memory_begin(memory, shard + 1) - memory_begin(memory, shard);
}

/* splitmix64 */
static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void stamp(struct memory *memory) {
    for (size_t shard = 0; shard < memory->count; shard++)
        memcpy(memory->data + memory_begin(memory, shard), &(uint64_t){shard}, MEMORY_STAMP_SIZE);
}

static void fill(struct memory *memory, size_t noise_per_block) {
    uint64_t state = 1;
    for (size_t block = 0; block + BLOCK <= memory->size; block += BLOCK)
        for (size_t at = 0; at < noise_per_block; at += sizeof state)
            memcpy(memory->data + block + at, &(uint64_t){draw(&state)}, sizeof state);
    stamp(memory);
}

void memory_fill_noise(struct memory *memory) { fill(memory, BLOCK); }

void memory_fill_compressible(struct memory *memory) { fill(memory, BLOCK_NOISE); }

void memory_fill_nothing(struct memory *memory) { stamp(memory); }

size_t memory_find_wrong(const struct memory *memory, size_t first, size_t end) {
    for (size_t shard = first; shard < end; shard++)
        if (memcmp(memory->data + memory_begin(memory, shard), &(uint64_t){shard}, MEMORY_STAMP_SIZE) != 0)
            return shard;
    return SIZE_MAX;
}
