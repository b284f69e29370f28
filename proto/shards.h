/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The table of a protected set: what `protect` collected, as it travels from client to daemon (a
 * sealed memfd). Variable-length little-endian records, 8-byte aligned; PROTOCOL.md has the
 * layout. The daemon parses it as hostile input; the client builds it; image.c lays it out; so
 * both sides compute the same image.
 */

#include "base/problem.h"
#include "proto/dtype.h"
#include "proto/geometry.h"

#define SHARDS_NAME_MAX 8192           /* bytes of a tensor name, UTF-8 */
#define SHARDS_COUNT_MAX 4000000       /* shards in one set */
#define SHARDS_TABLE_MAX GIB(1)        /* bytes of one table */
#define SHARDS_AREA_PRIVATE UINT32_MAX /* `address` is one in the client's own memory */
#define SHARDS_AREA_DEVICE (1u << 31)  /* plus a device memory's number: `address` is an offset in it */

enum shard_flags {
    SHARD_RANK_LOCAL = 1 << 0, /* stored under its rank, not part of a global tensor */
    SHARD_EAGER = 1 << 1,      /* the client copied it inside save: the address is in its eager area */
    SHARD_ALIAS = 1 << 2,      /* no bytes of its own: `target` names the shard that has them */
};

struct shard {
    const char *name; /* NUL-terminated; owned by the table */
    uint32_t name_length;
    const char *target; /* SHARD_ALIAS: the other tensor's name; else NULL */
    enum dtype dtype;
    uint32_t flags;
    uint32_t area;    /* id of a shared area, SHARDS_AREA_PRIVATE, or SHARDS_AREA_DEVICE + number */
    uint64_t address; /* of element 0: offset in the area or device memory, or address in the client */
    int64_t
        stride[GEOMETRY_DIMS_MAX]; /* bytes per step in each dimension of the box (a range: stride[0] per element) */
    bool contiguous;               /* row-major without holes: stride need not be looked at */
    uint32_t replica_index, replica_count; /* 0 of 1 where not declared; index > 0 is not captured */
    struct geometry geometry;
};

/* Is `area` a device memory's? Its number is area - SHARDS_AREA_DEVICE. */
static inline bool shards_area_is_device(uint32_t area) {
    return area >= SHARDS_AREA_DEVICE && area != SHARDS_AREA_PRIVATE;
}

/* Could a table hold it? Writing and parsing ask this of every shard; name_length need not be set. */
int shard_check(const struct shard *shard, struct problem *problem) MUST_CHECK;

/* Building (client). */
struct shards_writer {
    uint8_t *data;
    size_t size, capacity;
    uint32_t count;
};
int shards_writer_add(struct shards_writer *writer, const struct shard *shard, struct problem *problem) MUST_CHECK;
void shards_writer_deinit(struct shards_writer *writer);

/* Parsing (daemon). The table keeps compact records; a shard is decoded on demand, so that a set
 * of a million shards costs its table and an index, not a million structs. Every field of every
 * record is validated here: UTF-8, dtype, geometry, stride span overflow, replica, area id < areas. */
struct shards;
int shards_parse(const void *data, size_t size, uint32_t count, struct shards **ret_shards,
                 struct problem *problem) MUST_CHECK;
/* What was written, which need not be checked once more. The writer is empty afterwards. */
int shards_consume(struct shards_writer *writer, struct shards **ret_shards, struct problem *problem) MUST_CHECK;
void shards_free(struct shards *shards);
void shards_freep(struct shards **shards);
uint32_t shards_count(const struct shards *shards);
/* The table's bytes. */
const void *shards_table(const struct shards *shards, size_t *ret_size);
/* Decodes shard i; names point into the table. */
void shards_get(const struct shards *shards, uint32_t i, struct shard *ret_shard);
/* Bytes of shard i in the image: 0 for aliases and replicas with index > 0. */
uint64_t shard_bytes(const struct shard *shard);
/* The lowest and one-past-highest byte that the shard touches, relative to address; 0,0 for no bytes. */
void shard_span(const struct shard *shard, int64_t *ret_low, int64_t *ret_high);
