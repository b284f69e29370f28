/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The index of an opened version: its pieces (proto/manifest.h, `struct complete`) gathered into
 * tensors, sorted and searchable. Pure.
 */

#include "client/ckpt.h"
#include "proto/manifest.h"

struct index_tensor {
    const char *name;
    const char *alias_of; /* or NULL */
    enum dtype dtype;
    bool rank_local;
    uint32_t rank;               /* rank-local: whose */
    size_t first, count;         /* its pieces */
    const struct geometry *form; /* dims and shape: those of a piece */
};

struct index {
    struct complete complete;
    struct index_tensor *tensors; /* by name, global before rank-local, then rank */
    size_t count;
};

/* Parses and checks the text that RESTORE_OPENED came with. */
int index_read(const char *text, size_t size, struct index *ret_index) MUST_CHECK;
void index_deinit(struct index *index);
/* A global tensor of that name, unless `local_only`; else the rank-local one of `rank`. NULL: none. */
const struct index_tensor *index_find(const struct index *index, const char *name, bool local_only, uint32_t rank);
/* The tensor that has the bytes: itself, or the target of an alias. NULL: the index lacks it. */
const struct index_tensor *index_resolve(const struct index *index, const struct index_tensor *tensor);
void index_describe(const struct index *index, const struct index_tensor *tensor, struct ckpt_tensor *ret_tensor);
