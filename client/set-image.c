/* SPDX-License-Identifier: Apache-2.0 */
#include "client/errors.h"
#include "client/pack.h"
#include "client/set.h"

/*
 * From the protected set to what is registered: where each shard's bytes are (the eager buffer, an
 * area, the program's own memory), the table of all of them, and the image's layout. The layout is
 * computed from the parsed table, as the daemon does it, so both come to the same one.
 */

void set_image_deinit(struct set_image *image) {
    image_layout_deinit(&image->layout);
    shards_free(image->shards);
    shards_writer_deinit(&image->table);
    *image = (struct set_image){0};
}

uint64_t set_place_eager(struct set *set) {
    set->eager_bytes = 0;
    set->has_large_eager = false;
    for (size_t i = 0; i < set->count; i++) {
        struct set_shard *shard = set->shards[i];
        if (!shard || !set_is_copied(shard)) {
            set->has_large_eager |= shard && (shard->flags & SHARD_EAGER) && set_is_stored(shard);
            continue;
        }
        shard->eager_offset = set->eager_bytes;
        set->eager_bytes = align_up(set->eager_bytes + shard->bytes, AREA_ALIGNMENT);
    }
    return set->eager_bytes;
}

/* How the daemon reaches the piece: the eager copy, an area, or the program's own memory. */
static void shard_place(const struct set_shard *shard, const struct areas *areas, const void *eager,
                        struct shard *record) {
    record->area = SHARDS_AREA_PRIVATE;
    record->address = (uintptr_t)shard->data;
    if (set_is_copied(shard)) {
        if (areas_find(areas, (const uint8_t *)eager + shard->eager_offset, shard->bytes, &record->area,
                       &record->address))
            record->contiguous = true;
        return;
    }
    record->flags &= ~(uint32_t)SHARD_EAGER;
    int64_t low, high;
    shard_span(record, &low, &high);
    uint32_t area;
    uint64_t offset;
    if (areas_find(areas, (const uint8_t *)shard->data + low, (uint64_t)(high - low), &area, &offset)) {
        record->area = area;
        record->address = offset - (uint64_t)low;
    }
}

static int add_shard(const struct set_shard *shard, const struct areas *areas, const void *eager,
                     struct set_image *image, struct problem *problem) {
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
    shard_place(shard, areas, eager, &record);
    return shards_writer_add(&image->table, &record, problem);
}

/* An alias whose tensor is protected no longer waits for it to come back. */
static int add_alias(const struct set *set, const struct set_tensor *alias, struct set_image *image,
                     struct problem *problem) {
    const struct set_tensor *target = set_find_tensor(set, alias->target);
    if (!target)
        return 0;
    struct shard record = {
        .name = alias->key + 1,
        .target = target->key + 1,
        .dtype = target->dtype,
        .flags = SHARD_ALIAS | (set_tensor_is_local(target) ? SHARD_RANK_LOCAL : 0),
        .area = SHARDS_AREA_PRIVATE,
        .contiguous = true,
        .replica_count = 1,
    };
    record.geometry.dims = target->dims;
    memcpy(record.geometry.shape, target->shape, target->dims * sizeof(uint64_t));
    memcpy(record.geometry.extent, target->shape, target->dims * sizeof(uint64_t));
    return shards_writer_add(&image->table, &record, problem);
}

int set_build(struct set *set, const struct areas *areas, const void *eager, const struct image_identity *identity,
              struct set_image *ret_image) {
    struct problem problem = PROBLEM_NONE;
    CLEANUP(set_image_deinit) struct set_image image = {0};
    int r = 0;
    uint32_t index = 0;
    for (size_t i = 0; i < set->count && r == 0; i++)
        if (set->shards[i]) {
            set->shards[i]->index = index++;
            r = add_shard(set->shards[i], areas, eager, &image, &problem);
        }
    for (size_t i = 0; i < set->alias_count && r == 0; i++)
        r = add_alias(set, set->aliases[i], &image, &problem);
    if (r == 0)
        r = shards_parse(image.table.data, image.table.size, image.table.count, &image.shards, &problem);
    if (r == 0)
        r = image_layout(image.shards, identity, &image.layout, &problem);
    if (r < 0)
        return error_from(r, &problem, "the protected set");
    *ret_image = image;
    image = (struct set_image){0};
    return CKPT_OK;
}

void set_copy_eager(const struct set *set, void *eager) {
    for (size_t i = 0; i < set->count; i++) {
        const struct set_shard *shard = set->shards[i];
        if (!shard || !set_is_copied(shard) || shard->bytes == 0)
            continue;
        struct geometry geometry;
        set_geometry(shard, &geometry);
        unsigned element_size = dtype_size(set_dtype(shard));
        struct pack_view view = {.geometry = &geometry,
                                 .stride = set_stride(shard),
                                 .data = (uint8_t *)(uintptr_t)shard->data,
                                 .element_size = element_size};
        pack_gather((uint8_t *)eager + shard->eager_offset, &view, 0, shard->bytes / element_size);
    }
}
