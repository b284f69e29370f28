/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/berth.h"

#include "daemon/spread.h"

#include <errno.h>

bool berth_take(struct set *set, uint64_t image_size, struct berth **ret_berth) {
    struct berth *berth = calloc(1, sizeof *berth + set->device_count * sizeof berth->rooms[0]);
    if (!berth)
        return false;
    berth->refs = 1;
    berth->set = set_ref(set);
    berth->image_size = image_size;
    for (; berth->count < set->device_count; berth->count++) {
        struct device *device = set->devices[berth->count];
        if (!arena_take(device->arena, spread_size(set->spread, berth->count, image_size),
                        &berth->rooms[berth->count].place))
            break;
        berth->rooms[berth->count].device = device;
        berth->rooms[berth->count].generation = device->facts.generation;
        device_use(device);
    }
    if (berth->count < set->device_count) {
        berth_leave(berth);
        return false;
    }
    *ret_berth = berth;
    return true;
}

void berth_leave(struct berth *berth) {
    for (uint32_t i = 0; i < berth->count; i++) {
        struct arena_place place = berth->rooms[i].place; /* a transfer may be looking at that one */
        arena_give(berth->rooms[i].device->arena, &place);
        device_unuse(berth->rooms[i].device);
    }
    berth_unref(berth);
}

struct berth *berth_ref(struct berth *berth) {
    berth->refs++;
    return berth;
}

void berth_unref(struct berth *berth) {
    if (--berth->refs)
        return;
    set_unref(berth->set);
    free(berth);
}

CUdeviceptr berth_address(const struct berth *berth, uint32_t index, uint64_t at, struct problem *problem) {
    const struct device *device = berth->rooms[index].device;
    if (!device->own.facts.arena || device->own.facts.generation != berth->rooms[index].generation) {
        problem_set(problem, -EIO, "device %s: the arena was lost with its context", device->own.facts.text);
        return 0;
    }
    return device->own.facts.arena + berth->rooms[index].place.offset + at;
}
