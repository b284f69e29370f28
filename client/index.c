/* SPDX-License-Identifier: Apache-2.0 */
#include "client/index.h"

#include "client/errors.h"
#include "proto/shards.h"

/*
 * complete.json lists pieces in the order in which tensors are wanted here, so a tensor is a run of
 * neighbours. The index came verified, but it is still checked where a wrong value would make this
 * library read or write out of bounds: ranks, image ranges, alignment of elements.
 */

static bool piece_is_local(const struct piece *piece) { return piece->flags & SHARD_RANK_LOCAL; }

static bool same_tensor(const struct piece *a, const struct piece *b) {
    if (strcmp(a->name, b->name) != 0 || piece_is_local(a) != piece_is_local(b))
        return false;
    return !piece_is_local(a) || a->rank == b->rank;
}

static int compare(const char *name, bool rank_local, uint32_t rank, const struct index_tensor *tensor) {
    int order = strcmp(name, tensor->name);
    if (order)
        return order;
    if (rank_local != tensor->rank_local)
        return rank_local ? 1 : -1;
    if (rank_local && rank != tensor->rank)
        return rank < tensor->rank ? -1 : 1;
    return 0;
}

static bool piece_is_sound(const struct complete *complete, const struct piece *piece, const struct piece *first) {
    if (!dtype_valid(piece->dtype) || !geometry_valid(&piece->geometry, dtype_size(piece->dtype)))
        return false;
    if (piece->dtype != first->dtype || piece->geometry.dims != first->geometry.dims ||
        memcmp(piece->geometry.shape, first->geometry.shape, first->geometry.dims * sizeof(uint64_t)) != 0)
        return false;
    if (piece->target)
        return true;
    if (piece->rank >= complete->summary.world)
        return false;
    uint64_t bytes = geometry_elements(&piece->geometry) * dtype_size(piece->dtype);
    uint64_t image_size = complete->parts[piece->rank].image_size;
    return piece->image_offset % dtype_size(piece->dtype) == 0 && piece->image_offset <= image_size &&
           bytes <= image_size - piece->image_offset;
}

static bool parts_are_sound(const struct complete *complete) {
    for (uint32_t i = 0; i < complete->summary.world; i++) {
        const struct complete_part *part = &complete->parts[i];
        if (part->chunk_size < 4096 || part->chunk_size % 4096 || part->state_offset > part->image_size ||
            part->state_length > part->image_size - part->state_offset ||
            part->image_size / part->chunk_size >= UINT32_MAX) /* chunks are numbered with 32 bits */
            return false;
    }
    return true;
}

void index_deinit(struct index *index) {
    free(index->tensors);
    complete_deinit(&index->complete);
    *index = (struct index){0};
}

static int damaged(const char *why, const char *name) {
    return error_set(CKPT_E_DAMAGED, "the index of this version is unusable: %s%s", why, name);
}

int index_read(const char *text, size_t size, struct index *ret_index) {
    struct problem problem = PROBLEM_NONE;
    CLEANUP(index_deinit) struct index index = {0};
    int r = complete_read(text, size, &index.complete, &problem);
    if (r < 0)
        return error_from(r, &problem, "the index of this version");
    if (!parts_are_sound(&index.complete))
        return damaged("the sizes of its parts", "");
    const struct pieces *pieces = &index.complete.pieces;
    index.tensors = calloc(max_u64(pieces->count, 1), sizeof *index.tensors);
    if (!index.tensors)
        return error_set(CKPT_E_MEMORY, "out of memory for an index of %zu pieces", pieces->count);
    for (size_t i = 0; i < pieces->count; i++) {
        const struct piece *piece = &pieces->items[i];
        struct index_tensor *last = index.count > 0 ? &index.tensors[index.count - 1] : NULL;
        if (last && same_tensor(piece, &pieces->items[last->first])) {
            last->count++;
        } else {
            struct index_tensor *tensor = &index.tensors[index.count];
            *tensor = (struct index_tensor){.name = piece->name,
                                            .alias_of = piece->target,
                                            .dtype = piece->dtype,
                                            .rank_local = piece_is_local(piece),
                                            .rank = piece->rank,
                                            .first = i,
                                            .count = 1,
                                            .form = &piece->geometry};
            if (last && compare(tensor->name, tensor->rank_local, tensor->rank, last) <= 0)
                return damaged("tensors out of order at ", tensor->name);
            index.count++;
            last = tensor;
        }
        if (!piece_is_sound(&index.complete, piece, &pieces->items[last->first]))
            return damaged("a piece of ", piece->name);
    }
    *ret_index = index;
    index = (struct index){0};
    return CKPT_OK;
}

static const struct index_tensor *search(const struct index *index, const char *name, bool rank_local, uint32_t rank) {
    size_t first = 0, end = index->count;
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        int order = compare(name, rank_local, rank, &index->tensors[middle]);
        if (order == 0)
            return &index->tensors[middle];
        if (order < 0)
            end = middle;
        else
            first = middle + 1;
    }
    return NULL;
}

const struct index_tensor *index_find(const struct index *index, const char *name, bool local_only, uint32_t rank) {
    const struct index_tensor *tensor = local_only ? NULL : search(index, name, false, 0);
    return tensor ? tensor : search(index, name, true, rank);
}

const struct index_tensor *index_resolve(const struct index *index, const struct index_tensor *tensor) {
    if (!tensor->alias_of)
        return tensor;
    const struct index_tensor *target = search(index, tensor->alias_of, tensor->rank_local, tensor->rank);
    return target && !target->alias_of ? target : NULL;
}

void index_describe(const struct index *index, const struct index_tensor *tensor, struct ckpt_tensor *ret_tensor) {
    const struct index_tensor *stored = index_resolve(index, tensor);
    const struct index_tensor *form = stored ? stored : tensor;
    *ret_tensor = (struct ckpt_tensor){
        .dtype = form->dtype,
        .name = tensor->name,
        .dimensions = form->form->dims,
        .flags = tensor->rank_local ? CKPT_RANK_LOCAL : 0,
        .rank = tensor->rank_local ? tensor->rank : 0,
        .pieces = (uint32_t)min_u64(form->count, UINT32_MAX),
        .shape = form->form->shape,
        .alias_of = tensor->alias_of,
    };
}
