/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where the bytes of an image come from. A source fills any byte range of the image of one save:
 * the header (made here), the shards, the inline state. There is one kind of memory per file:
 * source-shared.c (an area, our own mapping), source-private.c (the client's memory, by
 * process_vm_readv or /proc/PID/mem) and source-cuda.c (a GPU's, by its driver). Pushed images have no
 * source: their bytes arrive by PUSH.
 *
 * Runs on capture workers, for device memory on the device's thread; each fills what it can reach
 * and leaves the rest alone. Everything it reads is immutable while the capture runs, except the
 * bytes themselves, which the fence protects.
 */

#include "daemon/peer.h"
#include "daemon/set.h"

enum source_reach {
    SOURCE_HOST,              /* the header, the inline state, and shards in host memory */
    SOURCE_DEVICE,            /* shards in the memory of `device` */
    SOURCE_DEVICE_STRIDED,    /* those of them that must be packed by the host */
    SOURCE_DEVICE_CONTIGUOUS, /* the others */
};

struct source {
    enum source_reach reach;
    struct device *device;        /* unless SOURCE_HOST */
    bool within_device;           /* destinations are the device's pointers (SOURCE_DEVICE_CONTIGUOUS) */
    struct problem *cuda_problem; /* unless SOURCE_HOST: what the driver said */
    struct set *set;
    struct peer *peer;
    struct area *state_area; /* NULL: no inline state */
    uint64_t state_offset, state_length;
    uint64_t image_size;
    uint8_t *header; /* [layout.data_start] */
    bool forked;     /* read private memory through /proc/PID/mem */
};

/* A contiguous piece of some memory, to be copied to `destination`. */
struct source_span {
    uint8_t *destination;
    uint64_t address;
    size_t length;
};

#define SOURCE_SPANS_MAX 512

struct source_memory {
    const char *name;
    /* Copies all spans; negative errno if any byte cannot be had. */
    int (*read)(const struct source *source, uint32_t area, const struct source_span *spans, size_t count);
    /* A place where the bytes can be looked at without a copy; NULL: only by read. */
    const uint8_t *(*look)(const struct source *source, uint32_t area, uint64_t address, size_t length);
};

extern const struct source_memory source_shared;
extern const struct source_memory source_private;
extern const struct source_memory source_cuda;         /* queues its copies: device_wait() before they are looked at */
extern const struct source_memory source_cuda_waiting; /* waits for them */

/* Fills of [offset, offset + length) of the image into destination what the source reaches. On failure the problem
 * names the tensor. */
int source_fill(const struct source *source, uint64_t offset, size_t length, uint8_t *destination,
                struct problem *problem) MUST_CHECK;
/* Any byte of the range that is no contiguous shard's in device memory? */
bool source_mixed(const struct source *source, uint64_t offset, size_t length);
/* If the whole range is one contiguous piece of mapped memory, its address: the caller can copy and
 * digest in one pass. NULL: use source_fill. */
const uint8_t *source_look(const struct source *source, uint64_t offset, size_t length);
/* The memory is still that of the process that registered it: asked before a capture counts. */
bool source_valid(const struct source *source);
