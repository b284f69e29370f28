/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A program with a GPU, for tests: memory of each kind that there is, on the stand-in driver (tests/cuda-standin), or
 * on whatever driver LD_LIBRARY_PATH leads to.
 */

#include "base/cuda.h"
#include "tests/functional/support.h"

enum gpu_kind {
    GPU_LEGACY, /* cuMemAlloc */
    GPU_MAPPED, /* cuMemMap: several physical allocations in one range */
    GPU_POOLED, /* out of an exportable pool */
    GPU_CLOSED, /* mapped, but not exportable: can only be pushed */
    GPU_KINDS,
};

struct gpu_memory {
    enum gpu_kind kind;
    int device;
    CUdeviceptr at;
    size_t size, reserved, piece; /* mapped: of the range, of each physical allocation */
    CUmemoryPool pool;
};

extern struct cuda gpu;

/* Before the daemon starts: the driver's own directory, in the test's, and its settings. */
void gpu_setting(const char *name, const char *value);
/* The driver's directory is there. A process that is forked later can still use the driver; after gpu_begin() not. */
void gpu_prepare(void);
/* The driver is loaded and device 0's primary context is current. Skips the test if there is none. */
void gpu_begin(void);
/* Another device's primary context becomes current, for good. */
void gpu_use(int device);
/* Contexts are given back; nobody has made a mistake. */
void gpu_end(void);

struct gpu_memory gpu_alloc(enum gpu_kind kind, size_t size);
void gpu_free(struct gpu_memory *memory);
/* A range that was mapped grows in place. */
void gpu_grow(struct gpu_memory *memory, size_t size);

/* Synchronous copies. */
void gpu_write(CUdeviceptr at, const void *data, size_t size);
void gpu_read(CUdeviceptr at, void *data, size_t size);
/* words_fill() and words_check(), in device memory. */
void gpu_words_fill(CUdeviceptr at, size_t count, uint64_t seed);
void gpu_words_check(CUdeviceptr at, size_t count, uint64_t seed);

static inline void *gpu_pointer(CUdeviceptr at) { return (void *)(uintptr_t)at; }

#define GPU_OK(call)                                                                                                   \
    do {                                                                                                               \
        CUresult gpu_result_ = (call);                                                                                 \
        if (gpu_result_ != CUDA_SUCCESS)                                                                               \
            FAIL("%s: CUDA error %d", #call, (int)gpu_result_);                                                        \
    } while (0)
