/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One safetensors file out of the parts of a version: which tensors, under which keys, where in the
 * file, and from which pieces.
 */

#include "tools/inventory.h"

struct merge_options {
    const char *const *globs; /* names must match one of them; none: all */
    size_t glob_count;
    bool model;         /* global tensors below `prefix` only, which is cut off; no state, no aliases */
    const char *prefix; /* with model */
};

struct merge_tensor {
    char *key; /* in the file */
    const char *name;
    enum dtype dtype;
    struct geometry geometry; /* the whole tensor */
    uint64_t bytes;
    uint64_t offset; /* in the file, absolute */
};

struct merge_piece { /* bytes to bring */
    uint32_t rank;
    uint64_t image_offset;
    const struct piece *piece; /* NULL: a part's inline state */
    size_t tensor;
};

struct merge {
    struct merge_tensor *tensors; /* in the order of the file */
    size_t tensor_count;
    struct merge_piece *pieces; /* by rank, then image offset */
    size_t piece_count;
    char *header; /* length word, JSON, padding */
    size_t header_length;
    uint64_t size; /* of the file */
};

/* An exit status, its sentence printed; STATUS_ABSENT: nothing matches. `complete` must outlive it. */
int merge_plan(const struct complete *complete, const struct merge_options *options,
               struct merge *ret_merge) MUST_CHECK;
void merge_deinit(struct merge *merge);
