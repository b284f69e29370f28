/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How the image of a set is spread over the arenas of its devices. Each byte has its home with one of
 * them: what lies on a device with that one, what comes from the host with the bytes before it (the
 * header with those behind it). In an arena the bytes that are at home there follow each other without
 * gaps, in the image's order. Made once for a set.
 */

#include "base/util.h"

struct set;
struct spread;

/* A piece of an image in the place of one device. */
struct spread_run {
    uint64_t offset, length; /* in the image */
    uint64_t at;             /* in the place */
};

/* Of a set that has devices and is laid out. */
int spread_new(const struct set *set, struct spread **ret_spread) MUST_CHECK;
void spread_free(struct spread *spread);
/* What an image of this size takes of the arena of the set's device of this index. */
uint64_t spread_size(const struct spread *spread, uint32_t device, uint64_t image_size);
/* The first piece of [offset, end) that is at home there. False: none is. */
bool spread_next(const struct spread *spread, uint32_t device, uint64_t offset, uint64_t end,
                 struct spread_run *ret_run);
