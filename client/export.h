/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The device memory that the daemon is told of: allocations and ranges of addresses, each under a
 * number (PROTOCOL.md, "Device memory"). What is placed here is described at the next
 * exports_announce(); what no set uses any longer is dropped at exports_trim().
 */

#include "client/device.h"
#include "client/link.h"
#include "proto/messages.h"

/* A physical allocation, mapped into a range. */
struct export_chunk {
    uint64_t offset, size; /* in the range */
    uint64_t buffer_id;
    bool announced;
};

struct export {
    enum device_kind kind; /* 0: this number is free */
    int device;
    CUdeviceptr base;
    uint64_t size, buffer_id;
    uint32_t pool;
    struct export_chunk *chunks; /* DEVICE_VMM: ascending */
    size_t chunk_count, chunk_capacity;
    bool announced, wanted;
};

struct export_pool {
    CUmemoryPool pool; /* NULL: this number is free */
    int device;
    bool announced, wanted;
};

struct exports {
    struct devices *devices;
    struct export *items;
    size_t count, last; /* `last`: where the last pointer was found */
    struct export_pool pools[DEVICE_POOLS_MAX];
    bool probed[DEVICES_MAX][DEVICE_POOLED + 1];
};

void exports_deinit(struct exports *exports);

/* Before a set is placed: nothing is wanted. */
void exports_begin(struct exports *exports);
/* In which memory [pointer, pointer + size) of a device lies, and where. CKPT_NONE: it cannot be given to the daemon,
 * the sentence says why. */
int exports_place(struct exports *exports, int device, const void *pointer, uint64_t size, uint32_t *ret_memory,
                  uint64_t *ret_offset) MUST_CHECK;
/* Whether memory that was placed is no longer what it was: given back, and the addresses used anew. */
bool exports_are_stale(const struct exports *exports);

/* Asks the daemon once for each device and kind whether it can read such memory, and tells it what it does not know
 * yet. CKPT_NONE: it cannot, the sentence says why. The registered set may be gone in any case. */
int exports_announce(struct exports *exports, struct link *link, uint64_t deadline) MUST_CHECK;
/* Takes back what is not wanted. */
int exports_trim(struct exports *exports, struct link *link, uint64_t deadline) MUST_CHECK;
/* Whether the daemon has any. */
bool exports_told(const struct exports *exports);
/* The daemon closes everything, and the registered set is gone: when this returns, the memory may be freed. */
int exports_release(struct exports *exports, struct link *link, uint64_t deadline) MUST_CHECK;
/* The daemon knows nothing (any more). */
void exports_forget(struct exports *exports);
