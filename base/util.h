/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The few helpers that every file uses: cleanup attributes, ownership transfer, arithmetic that
 * says what it does. Nothing here knows of checkpoints.
 */

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CLEANUP(function) __attribute__((__cleanup__(function), __unused__)) /* the cleanup is a use */
#define PRINTF_LIKE(format_index, first) __attribute__((__format__(__printf__, format_index, first)))
#define MUST_CHECK __attribute__((__warn_unused_result__))

#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define CONTAINER_OF(pointer, type, member) ((type *)((char *)(pointer)-offsetof(type, member)))

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)
#define GIB(n) ((uint64_t)(n) << 30)

#define NANOSECONDS_PER_MS UINT64_C(1000000)
#define NANOSECONDS_PER_SECOND UINT64_C(1000000000)

static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Rounds up to a multiple of a power of two. The caller knows that it cannot overflow. */
static inline uint64_t align_up(uint64_t value, uint64_t alignment) {
    assert(alignment && (alignment & (alignment - 1)) == 0);
    return (value + alignment - 1) & ~(alignment - 1);
}

static inline bool add_overflows(uint64_t a, uint64_t b, uint64_t *ret_sum) {
    return __builtin_add_overflow(a, b, ret_sum);
}

static inline bool mul_overflows(uint64_t a, uint64_t b, uint64_t *ret_product) {
    return __builtin_mul_overflow(a, b, ret_product);
}

/* Cleanup functions for locals: `CLEANUP(freep) char *name = NULL;`. */
static inline void freep(void *pointer) { free(*(void **)pointer); }

static inline void closep(int *fd) {
    if (*fd >= 0)
        close(*fd);
}

static inline void fclosep(FILE **file) {
    if (*file)
        fclose(*file);
}

/* Hands a local over to its new owner: what the cleanup attribute sees afterwards is empty. */
static inline int steal_fd(int *fd) {
    int stolen = *fd;
    *fd = -1;
    return stolen;
}

#define STEAL(pointer)                                                                                                 \
    ({                                                                                                                 \
        __typeof__(pointer) *steal_from_ = &(pointer);                                                                 \
        __typeof__(pointer) stolen_ = *steal_from_;                                                                    \
        *steal_from_ = NULL;                                                                                           \
        stolen_;                                                                                                       \
    })
