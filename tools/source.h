/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reading one part of a version: from one root (a copy), or from the nearest root whose bytes are
 * good (a source), chunk by chunk, all of them verified.
 */

#include "tools/inventory.h"

struct copy {
    struct tier *tier;
    struct manifest manifest;
    struct tier_file file;
    bool open;
};

/* 0, TIER_E_ABSENT (no manifest, or it says `absent`: the reason is in problem), negative errno. */
int copy_open(struct tier *tier, const char *job, struct version_id version, uint32_t rank, struct copy *ret_copy,
              struct problem *problem) MUST_CHECK;
void copy_close(struct copy *copy);
/* Room for any chunk of the copy. NULL: out of memory. */
char *copy_buffer(const struct copy *copy);

struct source {
    const struct inventory *inventory;
    struct complete_part part;
    struct copy copies[ROOTS_MAX];
    bool bad[ROOTS_MAX]; /* a chunk of it was: it has been told */
    size_t count;
    char *data, *scratch;
    uint64_t chunk; /* the one in data; UINT64_MAX: none */
};

/* Opens every copy whose image is that of the index. An exit status, its sentence printed. */
int source_open(const struct inventory *inventory, struct version_id version, const struct complete_part *part,
                struct source *ret_source) MUST_CHECK;
void source_close(struct source *source);
/* Bytes of the image; fast if offsets ascend. STATUS_PROBLEM: no root has that chunk undamaged. */
int source_read(struct source *source, uint64_t offset, uint64_t length, void *data) MUST_CHECK;
