/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The protected set: what the program named as its state. Protecting only records, and checks all
 * that can be checked here; set_build() turns it into the table that the daemon gets and the layout
 * that both sides compute from it.
 */

#include "client/area.h"
#include "client/ckpt.h"
#include "client/export.h"
#include "proto/image.h"
#include "proto/shards.h"

#include <uthash.h>

#define SET_EAGER_COPY_MAX MIB(16) /* a larger eager shard is fenced inside save instead of copied */
#define SET_INDEX_NONE UINT32_MAX

/* One protected piece; a single allocation with its arrays. */
struct set_shard {
    uint64_t id;
    struct set_tensor *tensor;
    const void *data;
    uint64_t bytes;
    uint64_t low, high; /* its hull in the tensor's row-major order, in elements */
    uint32_t flags;     /* enum shard_flags */
    uint32_t replica_index, replica_count;
    uint32_t index; /* in the table last built; SET_INDEX_NONE: protected since */
    bool is_range, contiguous;
    int8_t device;         /* whose memory it is, or DEVICE_HOST */
    uint64_t eager_offset; /* in the eager buffer (of its device), if it is copied */
    uint64_t numbers[];    /* range: start, count, stride; box: offset, extent, stride, per dimension */
};

/* All pieces of one name; or an alias. */
struct set_tensor {
    char *key; /* kind and name */
    enum dtype dtype;
    uint32_t pieces;           /* all, stored or not */
    struct set_shard **stored; /* by hull */
    size_t stored_count, stored_capacity;
    uint64_t longest; /* of the hulls */
    bool has_empty;
    char *target; /* an alias: the key of the tensor that has the bytes */
    uint8_t dims;
    UT_hash_handle hh;
    uint64_t shape[];
};

struct set {
    struct set_shard **shards; /* by id ascending; NULL: unprotected */
    size_t count, used, capacity;
    uint64_t next_id;
    struct set_tensor *tensors;  /* hash by name and kind */
    struct set_tensor **aliases; /* in the order in which they were made */
    size_t alias_count, alias_capacity;
    uint64_t header_bytes; /* a lower bound of the image header's length */
    uint64_t eager_bytes;  /* of the eager buffer */
    uint64_t device_eager_bytes[DEVICES_MAX];
    bool has_large_eager;
    size_t on_devices; /* pieces in device memory */
    bool changed;      /* since set_build() */
};

void set_deinit(struct set *set);

/* `device`: whose memory it is, or DEVICE_HOST. CKPT_OK, CKPT_E_... with the sentence. */
int set_add(struct set *set, const struct ckpt_shard *shard, int device, uint64_t *ret_id) MUST_CHECK;
int set_alias(struct set *set, const char *alias, const char *name) MUST_CHECK;
/* NULL: no such piece. */
struct set_shard *set_find(const struct set *set, uint64_t id);
void set_remove(struct set *set, struct set_shard *shard);
void set_clear(struct set *set);
/* The first piece (NULL: from the start) after `shard` that touches [data, data + size). */
struct set_shard *set_next_in(const struct set *set, const struct set_shard *shard, const void *data, uint64_t size);

void set_geometry(const struct set_shard *shard, struct geometry *ret_geometry);
enum dtype set_dtype(const struct set_shard *shard);
const char *set_name(const struct set_shard *shard);
/* By key: 'G' or 'L' (rank-local), then the name. NULL: none. */
struct set_tensor *set_find_tensor(const struct set *set, const char *key);
static inline bool set_tensor_is_local(const struct set_tensor *tensor) { return tensor->key[0] == 'L'; }
/* What the table says of an alias. */
void set_alias_shard(const char *alias, const struct set_tensor *target, struct shard *ret_shard);
/* NULL if contiguous. */
const int64_t *set_stride(const struct set_shard *shard);
/* Eager, stored, and small enough to be copied inside save. */
bool set_is_copied(const struct set_shard *shard);
bool set_is_stored(const struct set_shard *shard);

/* A set as it was registered. */
struct set_image {
    struct shards *shards;
    struct image_layout layout;
    int8_t *devices;             /* of each shard of the table, or DEVICE_HOST; NULL: all lie in host memory */
    bool on_device[DEVICES_MAX]; /* some of them lie there */
};

/* Where the copies of eager shards go: buffers of the sizes that set_place_eager() found. */
struct set_eager {
    void *host; /* in an area */
    CUdeviceptr device[DEVICES_MAX];
};

void set_image_deinit(struct set_image *image);
/* Decides where each copied eager shard lies in its eager buffer: eager_bytes, device_eager_bytes. */
void set_place_eager(struct set *set);
/* `exports`: tells the daemon of device memory; NULL: it need not read any (push). CKPT_NONE: it cannot be told of
 * some, the sentence says why. */
int set_build(struct set *set, const struct areas *areas, struct exports *exports, const struct set_eager *eager,
              const struct image_identity *identity, struct set_image *ret_image) MUST_CHECK;
/* Copies every eager shard of host memory that is copied into the buffer. */
void set_copy_eager(const struct set *set, const struct set_eager *eager);
/* The same on devices, each copy behind what is queued on `streams[device]`. */
int set_copy_device_eager(const struct set *set, const struct devices *devices, const struct set_eager *eager,
                          void *const *streams) MUST_CHECK;
