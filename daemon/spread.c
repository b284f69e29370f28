/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A list of stretches, ascending, each of which ends where the next one begins. One device has one
 * stretch; where the tensors of several alternate in the image, there is one for each change. The inline
 * state is the image's end, whose length differs from save to save: it belongs to the last stretch, and
 * so lies at the end of that device's place.
 */
#include "daemon/spread.h"

#include "daemon/set.h"

#include <errno.h>

struct stretch {
    uint64_t offset; /* in the image */
    uint64_t at;     /* in its device's place */
    uint32_t device; /* index in the set's */
};

struct spread {
    uint64_t sizes[DEVICES_MAX]; /* without the last stretch */
    uint32_t count;
    struct stretch stretches[];
};

static uint32_t device_index(const struct set *set, const struct shard *shard) {
    const struct device *device = set->memories[shard->area - SHARDS_AREA_DEVICE]->device;
    uint32_t i = 0;
    while (set->devices[i] != device)
        i++;
    return i;
}

/* Counts the stretches, and writes them down if there is a list. */
static uint32_t walk(const struct set *set, struct stretch *stretches) {
    uint32_t count = 0, device = 0;
    for (uint32_t i = 0; i < set->layout.ordered_count; i++) {
        struct shard shard;
        shards_get(set->shards, set->layout.order[i], &shard);
        if (!shards_area_is_device(shard.area))
            continue;
        uint32_t its = device_index(set, &shard);
        if (count && its == device)
            continue;
        device = its;
        if (stretches)
            stretches[count] = (struct stretch){.offset = count ? set->layout.shard_offset[set->layout.order[i]] : 0,
                                                .device = device};
        count++;
    }
    return count;
}

int spread_new(const struct set *set, struct spread **ret_spread) {
    uint32_t count = walk(set, NULL);
    struct spread *spread = calloc(1, sizeof *spread + count * sizeof spread->stretches[0]);
    assert(count);
    if (!spread)
        return -ENOMEM;
    spread->count = walk(set, spread->stretches);
    for (uint32_t i = 0; i < count; i++) {
        struct stretch *stretch = &spread->stretches[i];
        stretch->at = spread->sizes[stretch->device];
        if (i + 1 < count)
            spread->sizes[stretch->device] += stretch[1].offset - stretch->offset;
    }
    *ret_spread = spread;
    return 0;
}

void spread_free(struct spread *spread) { free(spread); }

uint64_t spread_size(const struct spread *spread, uint32_t device, uint64_t image_size) {
    const struct stretch *last = &spread->stretches[spread->count - 1];
    return spread->sizes[device] + (last->device == device ? image_size - last->offset : 0);
}

/* The stretch in which the image's byte lies. */
static uint32_t find(const struct spread *spread, uint64_t offset) {
    uint32_t low = 0, high = spread->count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (spread->stretches[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

bool spread_next(const struct spread *spread, uint32_t device, uint64_t offset, uint64_t end,
                 struct spread_run *ret_run) {
    for (uint32_t i = find(spread, offset); i < spread->count && offset < end; i++) {
        const struct stretch *stretch = &spread->stretches[i];
        uint64_t until = i + 1 < spread->count ? min_u64(stretch[1].offset, end) : end;
        if (stretch->device == device) {
            *ret_run = (struct spread_run){
                .offset = offset, .length = until - offset, .at = stretch->at + (offset - stretch->offset)};
            return true;
        }
        offset = until;
    }
    return false;
}
