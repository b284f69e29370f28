/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Strided memory and row-major bytes: the program's tensors may have any strides, the image has
 * none. Pure; the caller has checked that geometry and strides are valid.
 */

#include "proto/geometry.h"

/* A piece in the program's memory. */
struct pack_view {
    const struct geometry *geometry; /* box or range */
    const int64_t *stride;           /* per dimension of the box; a range: stride[0]; NULL: without holes */
    uint8_t *data;                   /* element 0 of the piece */
    unsigned element_size;
};

/* Fills stride[0 .. dims) for row-major storage of the piece without holes. */
void pack_strides(const struct geometry *geometry, unsigned element_size, int64_t *ret_stride);
/* True if these strides are that, whatever they are where an extent is 0 or 1. */
bool pack_is_contiguous(const struct geometry *geometry, unsigned element_size, const int64_t *stride);

/* Gives out elements [first, first + count) of the piece in row-major order, as rows of `count` elements that lie
 * `stride` bytes apart; `packed` is where the row begins among the packed bytes. Ends with the first result that is not
 * 0. */
typedef int (*pack_row_fn)(void *context, uint8_t *data, int64_t stride, uint64_t count, uint64_t packed);
int pack_rows(const struct pack_view *view, uint64_t first, uint64_t count, pack_row_fn row, void *context);

/* Copies elements [first, first + count) of the piece, in row-major order, out of or into the view. */
void pack_gather(void *destination, const struct pack_view *view, uint64_t first, uint64_t count);
void pack_scatter(const struct pack_view *view, uint64_t first, uint64_t count, const void *source);
