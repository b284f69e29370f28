/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where a piece lies in its global tensor, and copying what two pieces share. A piece is a box
 * (offset and extent per dimension) or a row-major element range [start, start + count); both are
 * stored without holes, row-major, in the image. Pure functions; every product is checked.
 */

#include "base/util.h"

#define GEOMETRY_DIMS_MAX 32

struct geometry {
    bool is_range;
    uint8_t dims;                       /* of the global tensor; 0 = a scalar with one element */
    uint64_t shape[GEOMETRY_DIMS_MAX];  /* of the global tensor */
    uint64_t offset[GEOMETRY_DIMS_MAX]; /* box only */
    uint64_t extent[GEOMETRY_DIMS_MAX]; /* box only */
    uint64_t start, count;              /* range only, in elements */
};

/* False: an extent that leaves the shape, or a product that overflows 2^62 bytes. */
bool geometry_valid(const struct geometry *piece, unsigned element_size);

/* Number of elements of the piece, and of its whole tensor. The geometry is valid. */
uint64_t geometry_elements(const struct geometry *piece);
uint64_t geometry_tensor_elements(const struct geometry *piece);

/* True if the piece is all of its tensor. */
bool geometry_is_whole(const struct geometry *piece);

/* True if two pieces of the same tensor share at least one element. */
bool geometry_overlap(const struct geometry *a, const struct geometry *b);

/* The elements that two pieces of one tensor share, as runs of consecutive elements that are
 * contiguous in both pieces' row-major storage. Offsets are element indices from the start of each
 * piece's storage; runs come in ascending order of a_offset for boxes. `each` returns 0 to go on;
 * anything else ends the walk and is returned. Works in O(runs), not O(elements), and merges
 * neighbouring runs that continue each other in both. */
typedef int (*geometry_run_fn)(void *context, uint64_t a_offset, uint64_t b_offset, uint64_t count);
int geometry_intersect(const struct geometry *a, const struct geometry *b, geometry_run_fn each, void *context);

/* Do these pieces (all of one tensor) cover it exactly once? 0: yes. 1: a gap; 2: an overlap, with
 * *ret_a and *ret_b the indices of two pieces that overlap. Not quadratic for the usual
 * partitions (sorted sweep). Negative errno: out of memory. */
enum { GEOMETRY_E_GAP = 1, GEOMETRY_E_OVERLAP = 2 };
int geometry_partition(const struct geometry *const *pieces, size_t count, size_t *ret_a, size_t *ret_b);
