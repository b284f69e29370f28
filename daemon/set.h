/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A registered set: what one client protects, laid out as an image. Immutable once made, shared by
 * the session and by captures that outlive it. Areas are the client's shared memory, mapped here
 * read-only; a set holds those that its shards lie in.
 */

#include "base/problem.h"
#include "daemon/imports.h"
#include "daemon/spread.h"
#include "proto/image.h"

struct area {
    _Atomic uint32_t refs;
    uint32_t number;
    uint64_t size;
    const uint8_t *data;
};

/* Checks the descriptor (a memfd, sealed against shrinking, not sparse, not on huge pages) and maps it. */
int area_new(uint32_t number, int fd, uint64_t size, struct area **ret_area, struct problem *problem) MUST_CHECK;
struct area *area_ref(struct area *area);
void area_unref(struct area *area);

struct set {
    _Atomic uint32_t refs;
    uint32_t number;
    struct shards *shards;
    struct image_layout layout;
    struct area *areas[AREAS_MAX];   /* by number; those in use at registration */
    struct device_memory **memories; /* [memory_count] by number; NULL: not used */
    uint32_t memory_count;
    struct device *devices[DEVICES_MAX]; /* on which they lie */
    uint32_t device_count;
    struct spread *spread; /* of the image over them; NULL: there are none */
    uint64_t expected;     /* what its session has told the pool to expect */
    uint32_t users;        /* a registration and running captures: they need the areas and memories */
    bool has_private, push;
    uint64_t nonce_address, nonce; /* in the client's memory, if private shards were probed */
    uint32_t private_count, shared_count, device_shards;
};

struct set_options {
    uint32_t number, count;
    bool push;
    const struct image_identity *identity;
    struct area *const *areas;             /* [AREAS_MAX]; NULL where there is none */
    struct device_memory *const *memories; /* [memory_count]; NULL where there is none */
    uint32_t memory_count;
};

/* Takes its own copy of the table, parses, checks that shards lie inside their areas, and lays out.
 * Blocking in proportion to the table: run it on a worker for large ones. */
int set_new(const void *table, size_t size, const struct set_options *options, struct set **ret_set,
            struct problem *problem) MUST_CHECK;
/* The areas and device memories (the client's) are kept only as long as somebody uses the set; it starts
 * with one user. The last unuse, on the control thread, lets them go; layout and names stay for the drains. */
void set_use(struct set *set);
void set_unuse(struct set *set);
struct set *set_ref(struct set *set);
void set_unref(struct set *set);
void set_unrefp(struct set **set);
