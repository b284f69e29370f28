/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An image is the bytes of a part: exactly one valid safetensors file. image_layout() decides where
 * each shard lies, from a parsed shard table: 8-byte header length, JSON header padded with spaces
 * so that data starts on a 4 KiB boundary, tensors without holes by element size descending, then
 * protect order; last the per-save inline state as a U8 tensor. The header has reserved room for
 * the state's entry, so its length (and so every offset) is fixed at protect; image_header() fills
 * it in for one save. See FORMAT.md.
 *
 * Key rule: a tensor's key is its name, with '%' written %25 and '@' written %40, and a leading
 * "__" written "%5F_". Rank-local tensors: "%rank/" + that. The inline state: "%state". When a rank
 * holds several pieces of one tensor, or a piece that is not the whole tensor, "@" follows with the
 * box as off+ext per dimension joined by "," ("w@0+2,4+8"), or the range as "start+count"
 * ("w@r128+64"). So keys never collide unless names are equal.
 */

#include "base/problem.h"
#include "proto/shards.h"

#define IMAGE_ALIGNMENT 4096
#define IMAGE_HEADER_MAX 100000000 /* bytes of JSON: the limit that safetensors readers have */
#define IMAGE_CHUNK_DEFAULT MIB(4)
#define IMAGE_STATE_KEY "%state"
#define IMAGE_STATE_MAX MIB(256) /* bytes of inline state in one save */

struct image_identity { /* goes into __metadata__, fixed for a registration */
    const char *job;
    uint32_t rank, world;
};

struct image_layout {
    uint64_t data_start;   /* bytes before the first tensor: 8 + header length; multiple of 4096 */
    uint64_t state_offset; /* where inline state begins; the image's size without it */
    uint32_t shard_count;
    uint64_t *shard_offset; /* [shard_count] absolute offset in the image; UINT64_MAX where no bytes */
    uint32_t *order;        /* [ordered_count] shards that have bytes, by offset ascending */
    uint32_t ordered_count;
    char *header; /* the JSON without its last part; private */
    size_t header_length;
};

int image_layout(const struct shards *shards, const struct image_identity *identity, struct image_layout *ret_layout,
                 struct problem *problem) MUST_CHECK;
void image_layout_deinit(struct image_layout *layout);

/* The image's size for a save with this many bytes of inline state (0 = none). */
uint64_t image_size(const struct image_layout *layout, uint64_t state_length);
/* Writes exactly layout->data_start bytes: length word, JSON, padding. */
void image_header(const struct image_layout *layout, uint64_t state_length, void *ret_header);
/* The first position in layout->order whose shard ends after `offset`; ordered_count if none. */
uint32_t image_find(const struct image_layout *layout, const struct shards *shards, uint64_t offset);

/*
 * Pieces: the table that manifests and complete.json carry, one per stored tensor piece, and what
 * a restore reads. As JSON, one object on one line per piece; FORMAT.md has the fields.
 */
struct piece {
    char *name;   /* the tensor's true name */
    char *target; /* an alias: the tensor that has the bytes; else NULL */
    enum dtype dtype;
    uint32_t flags; /* SHARD_RANK_LOCAL, SHARD_ALIAS */
    uint32_t rank;  /* the part that holds it */
    uint64_t image_offset;
    struct geometry geometry;
};

struct pieces {
    struct piece *items;
    size_t count;
    bool has_state; /* only of one part */
    uint64_t state_offset, state_length;
};

void pieces_deinit(struct pieces *pieces);
/* From the layout of a part about to be saved (aliases included, replicas > 0 left out). */
int pieces_from_layout(const struct shards *shards, const struct image_layout *layout, uint32_t rank,
                       uint64_t state_length, struct pieces *ret_pieces) MUST_CHECK;
