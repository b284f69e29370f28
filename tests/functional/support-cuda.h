/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A program with GPUs, for tests: memory of each kind that there is, on the stand-in driver (tests/cuda-standin), or
 * on whatever driver LD_LIBRARY_PATH leads to. One in each process: the driver is a process's, and a child that is
 * forked after gpu_begin() has none.
 *
 * What only the stand-in does (faults on demand, copies that are late, addresses that come back, mistakes that it
 * notes) a test expects only of it.
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

extern struct cuda gpu; /* the driver */

/* Whether the devices are the stand-in's. Another process looks: this one's driver stays as it is. */
bool gpu_is_standin(void);
/* Skips the test on a real driver, where nothing fails, or is late, when it is told to. */
void gpu_need_standin(void);
/* Before the daemon starts: the driver's directory, and the stand-in's settings, words NAME=VALUE without
 * CUDA_STANDIN_. May be called again with more. */
void gpu_settings(const char *words);
/* In the process that trains: the driver is loaded, and device 0's primary context is current. Skips the test if there
 * is none. */
void gpu_begin(void);
/* Skips the test if there are fewer devices. */
void gpu_need_devices(int count);
/* The device's primary context becomes current, and is held until gpu_end(). */
void gpu_use(int device);
/* Gives the contexts back. */
void gpu_end(void);
/* The stand-in has noted no mistake of anybody. */
void gpu_check_mistakes(void);
/* "[PROGRAM/]NAME:N[+]=CODE[!]" from now on. NULL: none. */
void gpu_fault(const char *text);
/* Something hangs by such a fault. */
bool gpu_hangs(void);
/* What hangs by such a fault goes on. */
void gpu_unhang(void);
uint64_t gpu_free_bytes(void);
/* With the stand-in's RECORD: how many copies to the host the daemon has queued on the device, and the most that it has
 * ever had. */
unsigned gpu_queued_copies(int device, unsigned *ret_most);

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

/* A call of the driver that must work. */
#define CU(call)                                                                                                       \
    do {                                                                                                               \
        CUresult cu_ = (call);                                                                                         \
        if (cu_ != CUDA_SUCCESS)                                                                                       \
            FAIL("%s: CUDA error %d", #call, (int)cu_);                                                                \
    } while (0)
