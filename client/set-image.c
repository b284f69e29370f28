/* SPDX-License-Identifier: Apache-2.0 */
#include "client/errors.h"
#include "client/pack.h"
#include "client/set.h"
#include "client/transfer.h"

/*
 * From the protected set to what is registered: where each shard's bytes are (the eager buffer, an
 * area, the program's own memory), the table of all of them, and the image's layout. The layout is
 * computed from the table, as the daemon does it, so both come to the same one.
 */

void set_image_deinit(struct set_image *image) {
    free(image->devices);
    image_layout_deinit(&image->layout);
    shards_free(image->shards);
    *image = (struct set_image){0};
}

void set_place_eager(struct set *set) {
    set->eager_bytes = 0;
    memset(set->device_eager_bytes, 0, sizeof set->device_eager_bytes);
    set->has_large_eager = false;
    for (size_t i = 0; i < set->count; i++) {
        struct set_shard *shard = set->shards[i];
        if (!shard || !set_is_copied(shard)) {
            set->has_large_eager |= shard && (shard->flags & SHARD_EAGER) && set_is_stored(shard);
            continue;
        }
        uint64_t *bytes = shard->device == DEVICE_HOST ? &set->eager_bytes : &set->device_eager_bytes[shard->device];
        shard->eager_offset = *bytes;
        *bytes = align_up(*bytes + shard->bytes, AREA_ALIGNMENT);
    }
}

/* What places a set's shards, and what is made of them. */
struct building {
    const struct areas *areas;
    struct exports *exports; /* NULL: the daemon reads no device memory */
    const struct set_eager *eager;
    struct shards_writer table;
    struct set_image *image;
    struct problem problem;
};

static void building_deinit(struct building *building) { shards_writer_deinit(&building->table); }

static int place_on_device(const struct building *building, const struct set_shard *shard, const uint8_t *from,
                           uint64_t size, uint64_t element, struct shard *record) {
    if (!building->exports || !set_is_stored(shard))
        return CKPT_OK;
    uint32_t memory;
    uint64_t offset;
    int r = exports_place(building->exports, shard->device, from, size, &memory, &offset);
    if (r != CKPT_OK)
        return r;
    record->area = SHARDS_AREA_DEVICE + memory;
    record->address = offset + element;
    return CKPT_OK;
}

/* How the daemon reaches the piece: the eager copy, an area, a device, or the program's own memory. */
static int shard_place(const struct building *building, const struct set_shard *shard, struct shard *record) {
    bool on_device = shard->device != DEVICE_HOST;
    record->area = SHARDS_AREA_PRIVATE;
    record->address = (uintptr_t)shard->data;
    if (set_is_copied(shard)) {
        const uint8_t *buffer =
            on_device ? (const uint8_t *)(uintptr_t)building->eager->device[shard->device] : building->eager->host;
        const uint8_t *copy = buffer + shard->eager_offset;
        record->contiguous = true;
        record->address = (uintptr_t)copy;
        if (on_device)
            return place_on_device(building, shard, copy, shard->bytes, 0, record);
        (void)areas_find(building->areas, copy, shard->bytes, &record->area, &record->address);
        return CKPT_OK;
    }
    record->flags &= ~(uint32_t)SHARD_EAGER;
    int64_t low, high;
    shard_span(record, &low, &high);
    const uint8_t *from = (const uint8_t *)shard->data + low;
    if (on_device)
        return place_on_device(building, shard, from, (uint64_t)(high - low), (uint64_t)-low, record);
    uint32_t area;
    uint64_t offset;
    if (areas_find(building->areas, from, (uint64_t)(high - low), &area, &offset)) {
        record->area = area;
        record->address = offset - (uint64_t)low;
    }
    return CKPT_OK;
}

static int table_add(struct building *building, const struct shard *record) {
    int r = shards_writer_add(&building->table, record, &building->problem);
    return r < 0 ? error_from(r, &building->problem, "the protected set") : CKPT_OK;
}

static int add_shard(struct building *building, const struct set_shard *shard) {
    struct shard record = {
        .name = set_name(shard),
        .dtype = set_dtype(shard),
        .flags = shard->flags,
        .contiguous = shard->contiguous,
        .replica_index = shard->replica_index,
        .replica_count = shard->replica_count,
    };
    set_geometry(shard, &record.geometry);
    if (!shard->contiguous)
        memcpy(record.stride, set_stride(shard), (shard->is_range ? 1 : shard->tensor->dims) * sizeof record.stride[0]);
    int r = shard_place(building, shard, &record);
    if (shard->device != DEVICE_HOST) {
        building->image->devices[shard->index] = shard->device;
        building->image->on_device[shard->device] = true;
    }
    return r == CKPT_OK ? table_add(building, &record) : r;
}

/* An alias whose tensor is protected no longer waits for it to come back. */
static int add_alias(struct building *building, const struct set *set, const struct set_tensor *alias) {
    const struct set_tensor *target = set_find_tensor(set, alias->target);
    if (!target)
        return CKPT_OK;
    struct shard record;
    set_alias_shard(alias->key + 1, target, &record);
    return table_add(building, &record);
}

static int add_all(struct building *building, struct set *set) {
    int r = CKPT_OK;
    uint32_t index = 0;
    for (size_t i = 0; i < set->count && r == CKPT_OK; i++)
        if (set->shards[i]) {
            set->shards[i]->index = index++;
            r = add_shard(building, set->shards[i]);
        }
    for (size_t i = 0; i < set->alias_count && r == CKPT_OK; i++)
        r = add_alias(building, set, set->aliases[i]);
    return r;
}

int set_build(struct set *set, const struct areas *areas, struct exports *exports, const struct set_eager *eager,
              const struct image_identity *identity, struct set_image *ret_image) {
    CLEANUP(set_image_deinit) struct set_image image = {0};
    if (set->on_devices > 0) {
        size_t records = set->used + set->alias_count;
        image.devices = malloc(records);
        if (!image.devices)
            return error_set(CKPT_E_MEMORY, "the protected set: out of memory");
        memset(image.devices, DEVICE_HOST, records);
    }
    if (exports)
        exports_begin(exports);
    CLEANUP(building_deinit)
    struct building building = {.areas = areas, .exports = exports, .eager = eager, .image = &image};
    int r = add_all(&building, set);
    if (r != CKPT_OK)
        return r;
    r = shards_consume(&building.table, &image.shards, &building.problem);
    if (r == 0)
        r = image_layout(image.shards, identity, &image.layout, &building.problem);
    if (r < 0)
        return error_from(r, &building.problem, "the protected set");
    *ret_image = image;
    image = (struct set_image){0};
    return CKPT_OK;
}

/* ---- eager shards ---- */

/* The geometry is the caller's. */
static struct pack_view view_of(const struct set_shard *shard, struct geometry *geometry) {
    set_geometry(shard, geometry);
    return (struct pack_view){.geometry = geometry,
                              .stride = set_stride(shard),
                              .data = (uint8_t *)(uintptr_t)shard->data,
                              .element_size = dtype_size(set_dtype(shard))};
}

static bool is_copied_bytes(const struct set_shard *shard) { return shard && set_is_copied(shard) && shard->bytes > 0; }

void set_copy_eager(const struct set *set, const struct set_eager *eager) {
    for (size_t i = 0; i < set->count && set->eager_bytes > 0; i++) {
        const struct set_shard *shard = set->shards[i];
        if (!is_copied_bytes(shard) || shard->device != DEVICE_HOST)
            continue;
        struct geometry geometry;
        struct pack_view view = view_of(shard, &geometry);
        pack_gather((uint8_t *)eager->host + shard->eager_offset, &view, 0, shard->bytes / view.element_size);
    }
}

int set_copy_device_eager(const struct set *set, const struct devices *devices, const struct set_eager *eager,
                          void *const *streams) {
    for (size_t i = 0; i < set->count; i++) {
        const struct set_shard *shard = set->shards[i];
        if (!is_copied_bytes(shard) || shard->device == DEVICE_HOST)
            continue;
        struct geometry geometry;
        struct pack_view view = view_of(shard, &geometry);
        int r = transfer_pack(devices, shard->device, streams[shard->device], &view,
                              eager->device[shard->device] + shard->eager_offset);
        if (r < 0)
            return r;
    }
    return CKPT_OK;
}
