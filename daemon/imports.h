/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Clients' device memory, opened here. An import is one allocation of one process on one device: one
 * open and one close, however many descriptions name it. Descriptions (struct device_memory) are what
 * shards and sets refer to: one import, or for a range of addresses one for each chunk.
 *
 * An import is found again by process, buffer id and length, as long as anybody holds it. The last
 * unref closes it: open memory stays allocated in the client too. All on the control thread, except
 * where said; sets are made on a worker, which may add references to a description and drop them
 * again, but never drops the last.
 */

#include "daemon/device.h"
#include "daemon/peer.h"

struct import_pool; /* an exportable memory pool of a client */
struct import;

struct device_extent {
    uint64_t offset, size; /* in the memory */
    struct import *import;
};

struct device_memory {
    _Atomic uint32_t refs;
    uint32_t number;
    enum device_kind kind;
    struct device *device;
    uint64_t size;
    uint32_t count;
    struct device_extent *extents; /* ascending, disjoint */
};

/* Takes the descriptor over, also on failure. */
int import_pool_new(struct device *device, int fd, struct import_pool **ret_pool) MUST_CHECK;
struct import_pool *import_pool_ref(struct import_pool *pool);
void import_pool_unref(struct import_pool *pool);
const struct device *import_pool_device(const struct import_pool *pool);

/* A legacy or pooled allocation; of a range: without chunks yet. `pool` NULL unless pooled. */
int device_memory_new(struct device *device, const struct peer *peer, const struct message_device_memory *message,
                      struct import_pool *pool, struct device_memory **ret_memory, struct problem *problem) MUST_CHECK;
/* One more chunk. *memory is replaced if a set or a capture uses it, so that theirs stays as it was.
 * Takes the descriptor over, also on failure. */
int device_memory_add(struct device_memory **memory, const struct peer *peer,
                      const struct message_device_chunk *message, int fd, struct problem *problem) MUST_CHECK;
struct device_memory *device_memory_ref(struct device_memory *memory);
void device_memory_unref(struct device_memory *memory);
/* [offset, offset + size) is mapped. */
bool device_memory_covers(const struct device_memory *memory, uint64_t offset, uint64_t size);

/* Opens what is not open yet of one device, then perhaps reads a nonce. */
struct import_open {
    struct device_job job;
    void (*over)(struct import_open *open, int result,
                 const struct problem *problem); /* the open itself goes by itself */
    void *context;
    struct device_memory *probed; /* NULL: none */
    uint64_t offset, nonce, free_bytes;
    uint32_t count;
    struct import *imports[];
};
/* Of those memories that lie on `device`. */
int imports_open(struct device *device, struct device_memory *const *memories, uint32_t count,
                 const struct message_device_probe *probe,
                 void (*over)(struct import_open *, int, const struct problem *), void *context,
                 struct problem *problem) MUST_CHECK;

/* How many imports of a session's memories are open, and their bytes (each once). */
void imports_count(struct device_memory *const *memories, uint32_t count, uint32_t *ret_imports, uint64_t *ret_bytes);
/* For status: of a device. */
void imports_of(const struct device *device, uint32_t *ret_imports, uint64_t *ret_bytes);

/* On the device's thread: where a byte of the memory lies in the context, and how many follow it in one
 * piece. -EIO: it is not open in this context (any more). */
int device_memory_find(const struct device_memory *memory, uint64_t offset, CUdeviceptr *ret_pointer,
                       uint64_t *ret_length) MUST_CHECK;
