/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The room of one save in the device tier: a place in the arena of each device of its set, all or none.
 * Its part leaves it when it needs it no more; transfers that are still on the way have references, and
 * find in it where their bytes were. On the control thread, except where said; what is in it stays as it
 * was made.
 */

#include "daemon/arena.h"
#include "daemon/device.h"
#include "daemon/set.h"

struct berth {
    uint32_t refs;
    struct set *set;
    uint64_t image_size;
    uint32_t count; /* the set's devices */
    struct {
        struct device *device;
        struct arena_place place;
        uint32_t generation; /* of the context in which the place is */
    } rooms[];
};

/* False: there is none for an image of this size, in one of the arenas at least. */
bool berth_take(struct set *set, uint64_t image_size, struct berth **ret_berth);
/* The places are free for others; the reference goes. */
void berth_leave(struct berth *berth);
struct berth *berth_ref(struct berth *berth);
void berth_unref(struct berth *berth);
/* On the thread of the device of this index: where the arena has this piece of its place. 0: it is gone. */
CUdeviceptr berth_address(const struct berth *berth, uint32_t index, uint64_t at, struct problem *problem);
