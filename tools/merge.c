/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a merged file. Keys are the tensors' true names; what only one rank has gets
 * "%rank-N/" before it, and the inline state of rank N is "%rank-N/%state", a U8 tensor. An alias
 * (a tied weight) gets bytes of its own: readers of safetensors refuse tensors that share bytes.
 * What the format cannot say (complex numbers) stands in __metadata__ under ckptd.tensors, in the
 * form that parts have.
 */
#include "tools/merge.h"

#include "proto/text.h"

#include <endian.h>
#include <fnmatch.h>
#include <inttypes.h>

#define FILE_ALIGNMENT 4096
#define FILE_MAX (UINT64_C(1) << 62) /* as of a single tensor (geometry.h): the sum of two fits */

/* Consecutive pieces of the index that belong to one tensor. */
struct group {
    const struct piece *first;
    size_t count;
};

struct plan {
    const struct complete *complete;
    const struct merge_options *options;
    struct group *groups;
    size_t group_count;
    struct merge merge;
};

static bool is_local(const struct piece *piece) { return piece->flags & SHARD_RANK_LOCAL; }

static bool same_tensor(const struct piece *a, const struct piece *b) {
    return strcmp(a->name, b->name) == 0 && is_local(a) == is_local(b) && (!is_local(a) || a->rank == b->rank);
}

static bool find_groups(struct plan *plan) {
    const struct pieces *pieces = &plan->complete->pieces;
    plan->groups = calloc(pieces->count + 1, sizeof *plan->groups);
    if (!plan->groups)
        return false;
    for (size_t i = 0; i < pieces->count; i++) {
        struct group *last = plan->group_count ? &plan->groups[plan->group_count - 1] : NULL;
        if (last && same_tensor(last->first, &pieces->items[i]))
            last->count++;
        else
            plan->groups[plan->group_count++] = (struct group){&pieces->items[i], 1};
    }
    return true;
}

/* Where the bytes of a tensor are: its own pieces, or those of the tensor that it is an alias of. */
static const struct group *find_bytes(const struct plan *plan, const struct group *group) {
    const struct piece *alias = group->first;
    if (!alias->target)
        return group;
    for (size_t i = 0; i < plan->group_count; i++) {
        const struct piece *piece = plan->groups[i].first;
        if (!piece->target && strcmp(piece->name, alias->target) == 0 && is_local(piece) == is_local(alias) &&
            (!is_local(piece) || piece->rank == alias->rank))
            return &plan->groups[i];
    }
    return NULL;
}

static bool matches(const struct merge_options *options, const char *name) {
    for (size_t i = 0; i < options->glob_count; i++) {
        if (fnmatch(options->globs[i], name, 0) == 0)
            return true;
    }
    return options->glob_count == 0;
}

static bool wanted(const struct merge_options *options, const struct piece *piece) {
    if (!options->model)
        return matches(options, piece->name);
    size_t length = strlen(options->prefix);
    return !is_local(piece) && !piece->target && strncmp(piece->name, options->prefix, length) == 0 &&
           piece->name[length];
}

static char *make_key(const struct merge_options *options, const char *name, bool local, uint32_t rank) {
    char *key = NULL;
    int length = local ? asprintf(&key, "%%rank-%" PRIu32 "/%s", rank, name)
                       : asprintf(&key, "%s", name + (options->model ? strlen(options->prefix) : 0));
    return length < 0 ? NULL : key;
}

static int add_group(struct plan *plan, const struct group *group) {
    struct merge *merge = &plan->merge;
    const struct group *bytes = find_bytes(plan, group);
    if (!bytes)
        return ctl_fail(STATUS_PROBLEM, "%s is an alias of %s, which is not there", group->first->name,
                        group->first->target);
    const struct piece *piece = bytes->first;
    size_t index = merge->tensor_count;
    struct merge_tensor *tensor = &merge->tensors[merge->tensor_count++];
    *tensor = (struct merge_tensor){
        .key = make_key(plan->options, group->first->name, is_local(piece), piece->rank),
        .name = group->first->name,
        .dtype = piece->dtype,
        .geometry = {.dims = piece->geometry.dims},
        .bytes = geometry_tensor_elements(&piece->geometry) * dtype_size(piece->dtype),
    };
    memcpy(tensor->geometry.shape, piece->geometry.shape, sizeof tensor->geometry.shape);
    memcpy(tensor->geometry.extent, piece->geometry.shape, sizeof tensor->geometry.extent);
    if (!tensor->key)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    for (size_t i = 0; i < bytes->count; i++) {
        const struct piece *from = &bytes->first[i];
        merge->pieces[merge->piece_count++] = (struct merge_piece){
            .rank = from->rank, .image_offset = from->image_offset, .piece = from, .tensor = index};
    }
    return STATUS_OK;
}

static int add_state(struct plan *plan, const struct complete_part *part) {
    struct merge *merge = &plan->merge;
    size_t index = merge->tensor_count;
    merge->tensors[merge->tensor_count++] = (struct merge_tensor){
        .key = make_key(plan->options, IMAGE_STATE_KEY, true, part->rank),
        .name = IMAGE_STATE_KEY,
        .dtype = DTYPE_U8,
        .geometry = {.dims = 1, .shape = {part->state_length}, .extent = {part->state_length}},
        .bytes = part->state_length,
    };
    merge->pieces[merge->piece_count++] =
        (struct merge_piece){.rank = part->rank, .image_offset = part->state_offset, .tensor = index};
    return merge->tensors[index].key ? STATUS_OK : ctl_fail(STATUS_STORAGE, "out of memory");
}

/* Aliases repeat pieces, so the room is counted before. */
static bool make_room(struct plan *plan) {
    size_t pieces = plan->complete->summary.world;
    for (size_t i = 0; i < plan->group_count; i++) {
        const struct group *bytes = find_bytes(plan, &plan->groups[i]);
        pieces += bytes ? bytes->count : 0;
    }
    size_t tensors = plan->group_count + plan->complete->summary.world;
    plan->merge.tensors = calloc(tensors + 1, sizeof *plan->merge.tensors);
    plan->merge.pieces = calloc(pieces + 1, sizeof *plan->merge.pieces);
    return plan->merge.tensors && plan->merge.pieces;
}

static int by_key(const void *a, const void *b) {
    return strcmp((*(const struct merge_tensor *const *)a)->key, (*(const struct merge_tensor *const *)b)->key);
}

/* No two tensors under one key, and none under that of the metadata. */
static int check_keys(const struct merge *merge) {
    CLEANUP(freep) const struct merge_tensor **sorted = calloc(merge->tensor_count + 1, sizeof *sorted);
    if (!sorted)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    for (size_t i = 0; i < merge->tensor_count; i++)
        sorted[i] = &merge->tensors[i];
    qsort(sorted, merge->tensor_count, sizeof *sorted, by_key);
    for (size_t i = 0; i < merge->tensor_count; i++) {
        if (strcmp(sorted[i]->key, "__metadata__") == 0 || (i > 0 && strcmp(sorted[i]->key, sorted[i - 1]->key) == 0))
            return ctl_fail(STATUS_PROBLEM, "the key %s is taken in the merged file; export with --split or --tensors",
                            sorted[i]->key);
    }
    return STATUS_OK;
}

/* Larger elements first, so that each tensor is aligned to its element without holes. `order` tells
 * where each tensor of the plan went. */
static int by_element(const void *a, const void *b, void *context) {
    const struct merge_tensor *tensors = context;
    size_t one = *(const size_t *)a, other = *(const size_t *)b;
    unsigned size = dtype_size(tensors[one].dtype), other_size = dtype_size(tensors[other].dtype);
    if (size != other_size)
        return size > other_size ? -1 : 1;
    return strcmp(tensors[one].key, tensors[other].key);
}

static int by_place(const void *a, const void *b) {
    const struct merge_piece *one = a, *other = b;
    if (one->rank != other->rank)
        return one->rank < other->rank ? -1 : 1;
    return one->image_offset < other->image_offset ? -1 : one->image_offset > other->image_offset;
}

static bool sort(struct merge *merge) {
    CLEANUP(freep) size_t *order = calloc(merge->tensor_count + 1, sizeof *order);
    CLEANUP(freep) size_t *place = calloc(merge->tensor_count + 1, sizeof *place);
    CLEANUP(freep) struct merge_tensor *sorted = calloc(merge->tensor_count + 1, sizeof *sorted);
    if (!order || !place || !sorted)
        return false;
    for (size_t i = 0; i < merge->tensor_count; i++)
        order[i] = i;
    qsort_r(order, merge->tensor_count, sizeof *order, by_element, merge->tensors);
    for (size_t i = 0; i < merge->tensor_count; i++) {
        sorted[i] = merge->tensors[order[i]];
        place[order[i]] = i;
    }
    memcpy(merge->tensors, sorted, merge->tensor_count * sizeof *sorted);
    for (size_t i = 0; i < merge->piece_count; i++)
        merge->pieces[i].tensor = place[merge->pieces[i].tensor];
    qsort(merge->pieces, merge->piece_count, sizeof *merge->pieces, by_place);
    return true;
}

static bool is_stored_otherwise(enum dtype dtype) { return strcmp(dtype_name(dtype), dtype_stored_name(dtype)) != 0; }

static void write_metadata(const struct plan *plan, struct text *text) {
    const struct complete_summary *summary = &plan->complete->summary;
    text_add(text, "{\"__metadata__\":{\"format\":\"pt\"");
    if (!plan->options->model) {
        text_add(text, ",\"job\":");
        text_add_quoted(text, summary->job, strlen(summary->job));
        text_add(text, ",\"ckptd.generation\":\"");
        text_add_number(text, summary->generation);
        text_add(text, "\",\"ckptd.step\":\"");
        text_add_number(text, summary->step);
        text_add(text, "\"");
    }
    struct text retyped = TEXT_NONE;
    for (size_t i = 0; i < plan->merge.tensor_count; i++) {
        const struct merge_tensor *tensor = &plan->merge.tensors[i];
        if (!is_stored_otherwise(tensor->dtype))
            continue;
        text_add(&retyped, retyped.length ? "," : "{");
        text_add_quoted(&retyped, tensor->key, strlen(tensor->key));
        text_add(&retyped, ":{\"name\":");
        text_add_quoted(&retyped, tensor->name, strlen(tensor->name));
        text_add(&retyped, ",\"dtype\":\"");
        text_add(&retyped, dtype_name(tensor->dtype));
        text_add(&retyped, "\",\"shape\":");
        text_add_numbers(&retyped, tensor->geometry.shape, tensor->geometry.dims);
        text_add(&retyped, "}");
    }
    if (retyped.length) {
        text_add(&retyped, "}");
        text_add(text, ",\"ckptd.tensors\":");
        text_add_quoted(text, retyped.data, retyped.length);
    }
    text->failed |= retyped.failed;
    text_deinit(&retyped);
    text_add(text, "}");
}

/* Sets the tensors' offsets, first relative to the data, then in the file. */
static int write_header(struct plan *plan) {
    struct merge *merge = &plan->merge;
    struct text text = TEXT_NONE;
    uint64_t offset = 0;
    text_append(&text, "\0\0\0\0\0\0\0\0", 8);
    write_metadata(plan, &text);
    for (size_t i = 0; i < merge->tensor_count; i++) {
        struct merge_tensor *tensor = &merge->tensors[i];
        uint64_t shape[GEOMETRY_DIMS_MAX + 1];
        size_t dims = tensor->geometry.dims;
        memcpy(shape, tensor->geometry.shape, dims * sizeof shape[0]);
        if (is_stored_otherwise(tensor->dtype))
            shape[dims++] = dtype_size(tensor->dtype);
        text_add(&text, ",");
        text_add_quoted(&text, tensor->key, strlen(tensor->key));
        text_add(&text, ":{\"dtype\":\"");
        text_add(&text, dtype_stored_name(tensor->dtype));
        text_add(&text, "\",\"shape\":");
        text_add_numbers(&text, shape, dims);
        text_add(&text, ",\"data_offsets\":");
        text_add_numbers(&text, (uint64_t[]){offset, offset + tensor->bytes}, 2);
        text_add(&text, "}");
        tensor->offset = offset;
        offset += tensor->bytes;
        if (offset > FILE_MAX) { /* shapes come from a file; below, offsets are added to */
            text_deinit(&text);
            return ctl_fail(STATUS_PROBLEM, "%s: the merged file would have more than 2^62 bytes", tensor->name);
        }
    }
    text_add(&text, "}");
    while (!text.failed && text.length % FILE_ALIGNMENT)
        text_add(&text, " ");
    int r = text_take(&text, &merge->header, &merge->header_length);
    if (r < 0)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    if (merge->header_length - 8 > IMAGE_HEADER_MAX)
        return ctl_fail(STATUS_PROBLEM, "the header would have %zu bytes, readers of safetensors take %d; use --split",
                        merge->header_length - 8, IMAGE_HEADER_MAX);
    uint64_t length = htole64(merge->header_length - 8);
    memcpy(merge->header, &length, sizeof length);
    for (size_t i = 0; i < merge->tensor_count; i++)
        merge->tensors[i].offset += merge->header_length;
    merge->size = merge->header_length + offset;
    return STATUS_OK;
}

static int build(struct plan *plan) {
    if (!find_groups(plan) || !make_room(plan))
        return ctl_fail(STATUS_STORAGE, "out of memory");
    for (size_t i = 0; i < plan->group_count; i++) {
        int status = wanted(plan->options, plan->groups[i].first) ? add_group(plan, &plan->groups[i]) : STATUS_OK;
        if (status != STATUS_OK)
            return status;
    }
    bool states = !plan->options->model && matches(plan->options, IMAGE_STATE_KEY);
    for (uint32_t rank = 0; states && rank < plan->complete->summary.world; rank++) {
        const struct complete_part *part = &plan->complete->parts[rank];
        int status = part->state_length ? add_state(plan, part) : STATUS_OK;
        if (status != STATUS_OK)
            return status;
    }
    if (!plan->merge.tensor_count)
        return plan->options->model
                   ? ctl_fail(STATUS_ABSENT, "no global tensor's name begins with \"%s\"; name another --prefix",
                              plan->options->prefix)
                   : ctl_fail(STATUS_ABSENT, "no tensor matches");
    int status = check_keys(&plan->merge);
    if (status != STATUS_OK)
        return status;
    return sort(&plan->merge) ? write_header(plan) : ctl_fail(STATUS_STORAGE, "out of memory");
}

int merge_plan(const struct complete *complete, const struct merge_options *options, struct merge *ret_merge) {
    struct plan plan = {.complete = complete, .options = options};
    int status = build(&plan);
    free(plan.groups);
    if (status == STATUS_OK)
        *ret_merge = plan.merge;
    else
        merge_deinit(&plan.merge);
    return status;
}

void merge_deinit(struct merge *merge) {
    for (size_t i = 0; i < merge->tensor_count; i++)
        free(merge->tensors[i].key);
    free(merge->tensors);
    free(merge->pieces);
    free(merge->header);
    *merge = (struct merge){0};
}
