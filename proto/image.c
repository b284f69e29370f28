/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/image.h"

#include "proto/pieces.h"
#include "proto/text.h"
#include "proto/word.h"

#include <errno.h>

/*
 * The layout costs 12 bytes a shard and the header's text; while it is computed, 18 more for an
 * index by name. The header is text from the start, never a tree.
 *
 * The order: element sizes descending, so that every tensor is aligned to its dtype without holes
 * (the data start on a page), then protect order. A tensor without elements has its place in that
 * order too, since safetensors demands that offsets ascend without gaps.
 */

#define STATE_ENTRY_MAX 160 /* bytes of the inline state's entry: two lengths of at most 20 digits twice */
#define ELEMENT_SIZE_MAX 16

enum note {
    NOTE_SEVERAL = 1 << 0,   /* other pieces of its tensor are stored in this image, too */
    NOTE_EXPLAINED = 1 << 1, /* even alone, the plain safetensors entry does not tell all of it */
};

struct by_name { /* the set sorted by (rank-local, name, index): where pieces of one tensor meet */
    const struct shards *shards;
    struct entry {
        const char *name;
        uint32_t shard;
        bool rank_local, alias;
    } * entries;
    uint32_t count;
    uint8_t *notes; /* [shard] */
    uint8_t *sizes; /* [shard] of its elements; 0: it is not stored */
};

static void by_name_deinit(struct by_name *index) {
    free(index->entries);
    free(index->notes);
    free(index->sizes);
}

static int entry_compare_name(const struct entry *a, const struct entry *b) {
    if (a->rank_local != b->rank_local)
        return a->rank_local ? 1 : -1;
    return strcmp(a->name, b->name);
}

static int entry_compare(const void *left, const void *right) {
    const struct entry *a = left, *b = right;
    int order = entry_compare_name(a, b);
    if (order)
        return order;
    return a->shard < b->shard ? -1 : a->shard > b->shard;
}

static bool is_stored(const struct shard *shard) { return !(shard->flags & SHARD_ALIAS) && shard->replica_index == 0; }

static bool same_tensor_shape(const struct geometry *a, const struct geometry *b) {
    return a->dims == b->dims && memcmp(a->shape, b->shape, a->dims * sizeof a->shape[0]) == 0;
}

static bool same_place(const struct geometry *a, const struct geometry *b) {
    if (a->is_range != b->is_range)
        return false;
    if (a->is_range)
        return a->start == b->start && a->count == b->count;
    return memcmp(a->offset, b->offset, a->dims * sizeof a->offset[0]) == 0 &&
           memcmp(a->extent, b->extent, a->dims * sizeof a->extent[0]) == 0;
}

/* entries[0..count) have one name: several pieces of one tensor. */
static int check_group(struct by_name *index, struct entry *entries, uint32_t count, struct problem *problem) {
    CLEANUP(freep) struct geometry *geometries = malloc(count * sizeof *geometries);
    CLEANUP(freep) const struct geometry **stored = malloc(count * sizeof *stored);
    if (!geometries || !stored)
        return problem_set(problem, -ENOMEM, "out of memory for %u pieces of tensor %s", count, entries[0].name);
    struct shard first, shard;
    shards_get(index->shards, entries[0].shard, &first);
    uint32_t stored_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        shards_get(index->shards, entries[i].shard, &shard);
        if (entries[i].alias)
            return problem_set(problem, -EEXIST, "tensor %s: protected twice, once as an alias of %s", shard.name,
                               shard.target);
        if (shard.dtype != first.dtype || !same_tensor_shape(&shard.geometry, &first.geometry))
            return problem_set(problem, -EINVAL, "tensor %s: its pieces disagree about the dtype or the global shape",
                               shard.name);
        geometries[i] = shard.geometry;
        if (is_stored(&shard))
            stored[stored_count++] = &geometries[i];
    }
    size_t a, b;
    int r = geometry_partition(stored, stored_count, &a, &b);
    if (r < 0)
        return problem_set(problem, r, "out of memory for %u pieces of tensor %s", count, first.name);
    if (r == GEOMETRY_E_OVERLAP)
        return problem_set(problem, -EEXIST,
                           same_place(stored[a], stored[b]) ? "tensor %s: protected twice in the same place"
                                                            : "tensor %s: two of its pieces overlap in this rank",
                           first.name);
    /* Pieces without elements overlap nothing, but two in one place would have one key. */
    const struct geometry *empty = NULL;
    for (uint32_t i = 0; i < stored_count; i++) {
        if (geometry_elements(stored[i]) > 0)
            continue;
        if (empty)
            return problem_set(problem, -EEXIST, "tensor %s: protected twice without elements in this rank",
                               first.name);
        empty = stored[i];
    }
    for (uint32_t i = 0; i < count && stored_count > 1; i++)
        index->notes[entries[i].shard] |= NOTE_SEVERAL;
    return 0;
}

static int check_alias(const struct by_name *index, const struct entry *entry, struct problem *problem) {
    struct shard alias, target;
    shards_get(index->shards, entry->shard, &alias);
    struct entry wanted = {.name = alias.target, .rank_local = entry->rank_local};
    uint32_t low = 0, high = index->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (entry_compare_name(&index->entries[middle], &wanted) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == index->count || entry_compare_name(&index->entries[low], &wanted) != 0 || index->entries[low].alias)
        return problem_set(problem, -EINVAL, "tensor %s: an alias of %s, which is not a tensor of this set", alias.name,
                           alias.target);
    shards_get(index->shards, index->entries[low].shard, &target);
    if (target.dtype != alias.dtype || !same_tensor_shape(&target.geometry, &alias.geometry))
        return problem_set(problem, -EINVAL, "tensor %s: an alias of %s, which has another dtype or shape", alias.name,
                           alias.target);
    return 0;
}

static bool is_retyped(const struct shard *shard) {
    return strcmp(dtype_name(shard->dtype), dtype_stored_name(shard->dtype)) != 0;
}

/* What key_write() and tensor_write() do not write as it is; of all but few shards, nothing. */
static bool is_explained(const struct shard *shard) {
    const char *name = shard->name;
    return shard->flags & (SHARD_RANK_LOCAL | SHARD_ALIAS) || (name[0] == '_' && name[1] == '_') ||
           name[strcspn(name, "%@")] || is_retyped(shard) || !geometry_is_whole(&shard->geometry);
}

static int by_name_init(struct by_name *index, const struct shards *shards, struct problem *problem) {
    index->shards = shards;
    index->count = shards_count(shards);
    index->entries = calloc(max_u64(index->count, 1), sizeof *index->entries);
    index->notes = calloc(max_u64(index->count, 1), sizeof *index->notes);
    index->sizes = calloc(max_u64(index->count, 1), sizeof *index->sizes);
    if (!index->entries || !index->notes || !index->sizes)
        return problem_set(problem, -ENOMEM, "out of memory for %u shards", index->count);
    for (uint32_t i = 0; i < index->count; i++) {
        struct shard shard;
        shards_get(shards, i, &shard);
        index->entries[i] = (struct entry){
            .name = shard.name,
            .shard = i,
            .rank_local = shard.flags & SHARD_RANK_LOCAL,
            .alias = shard.flags & SHARD_ALIAS,
        };
        index->notes[i] = is_explained(&shard) ? NOTE_EXPLAINED : 0;
        index->sizes[i] = is_stored(&shard) ? (uint8_t)dtype_size(shard.dtype) : 0;
    }
    qsort(index->entries, index->count, sizeof *index->entries, entry_compare);
    for (uint32_t i = 0, next; i < index->count; i = next) {
        for (next = i + 1; next < index->count; next++)
            if (entry_compare_name(&index->entries[i], &index->entries[next]) != 0)
                break;
        int r = next - i > 1 ? check_group(index, &index->entries[i], next - i, problem) : 0;
        if (r < 0)
            return r;
    }
    for (uint32_t i = 0; i < index->count; i++) {
        int r = index->entries[i].alias ? check_alias(index, &index->entries[i], problem) : 0;
        if (r < 0)
            return r;
    }
    return 0;
}

/* The key of a tensor as plain text (still to be quoted). */
static void key_write(const struct shard *shard, bool several, struct text *text) {
    const struct geometry *geometry = &shard->geometry;
    if (shard->flags & SHARD_RANK_LOCAL)
        text_add(text, "%rank/");
    const char *name = shard->name;
    if (name[0] == '_' && name[1] == '_') {
        text_add(text, "%5F_");
        name += 2;
    }
    for (;;) {
        size_t plain = strcspn(name, "%@");
        text_append(text, name, plain);
        name += plain;
        if (*name == '\0')
            break;
        text_add(text, *name++ == '%' ? "%25" : "%40");
    }
    if (shard->flags & SHARD_ALIAS || (!several && geometry_is_whole(geometry)))
        return;
    text_add(text, geometry->is_range ? "@r" : "@");
    unsigned places = geometry->is_range ? 1 : geometry->dims;
    for (unsigned i = 0; i < places; i++) {
        if (i)
            text_add(text, ",");
        text_add_number(text, geometry->is_range ? geometry->start : geometry->offset[i]);
        text_add(text, "+");
        text_add_number(text, geometry->is_range ? geometry->count : geometry->extent[i]);
    }
}

/* `"key":`, where key is what key_write() makes. */
static void quoted_key_write(const struct shard *shard, uint8_t notes, struct text *scratch, struct text *text) {
    if (!notes) {
        text_add_quoted(text, shard->name, shard->name_length);
        text_add(text, ":");
        return;
    }
    scratch->length = 0;
    key_write(shard, notes & NOTE_SEVERAL, scratch);
    if (scratch->failed) {
        text->failed = true;
        return;
    }
    text_add_quoted(text, scratch->data, scratch->length);
    text_add(text, ":");
}

/* What the plain safetensors entry does not tell: an object of `ckptd.tensors`. */
static void explanation_write(const struct shard *shard, uint8_t notes, struct text *scratch, struct text *text) {
    const struct geometry *geometry = &shard->geometry;
    text_add(text, text->length ? "," : "{");
    quoted_key_write(shard, notes, scratch, text);
    text_add(text, "{\"name\":");
    text_add_quoted(text, shard->name, shard->name_length);
    text_add(text, ",\"dtype\":\"");
    text_add(text, dtype_name(shard->dtype));
    text_add(text, "\",\"shape\":");
    text_add_numbers(text, geometry->shape, geometry->dims);
    if (shard->flags & SHARD_RANK_LOCAL)
        text_add(text, ",\"local\":true");
    if (shard->flags & SHARD_ALIAS) {
        text_add(text, ",\"alias\":");
        text_add_quoted(text, shard->target, strlen(shard->target));
    } else {
        piece_write_place(geometry, text);
    }
    text_add(text, "}");
}

/* `{"dtype":...,"shape":[...],"data_offsets":[...]}` */
static void tensor_write(const struct shard *shard, uint64_t from, uint64_t to, struct text *text) {
    const struct geometry *geometry = &shard->geometry;
    uint64_t shape[GEOMETRY_DIMS_MAX + 1];
    unsigned dims;
    if (geometry->is_range && !geometry_is_whole(geometry)) {
        shape[0] = geometry->count;
        dims = 1;
    } else {
        dims = geometry->dims;
        memcpy(shape, geometry->is_range ? geometry->shape : geometry->extent, dims * sizeof shape[0]);
    }
    if (is_retyped(shard))
        shape[dims++] = dtype_size(shard->dtype);
    text_add(text, "{\"dtype\":\"");
    text_add(text, dtype_stored_name(shard->dtype));
    text_add(text, "\",\"shape\":");
    text_add_numbers(text, shape, dims);
    text_add(text, ",\"data_offsets\":");
    text_add_numbers(text, (uint64_t[]){from, to}, 2);
    text_add(text, "}");
}

static void metadata_write(const struct image_identity *identity, const struct text *explanations, struct text *text) {
    text_add(text, "{\"__metadata__\":{\"format\":\"pt\",\"ckptd\":\"1\",\"job\":");
    text_add_quoted(text, identity->job, strlen(identity->job));
    text_add(text, ",\"rank\":\"");
    text_add_number(text, identity->rank);
    text_add(text, "\",\"world\":\"");
    text_add_number(text, identity->world);
    text_add(text, "\",\"ckptd.state\":\"" IMAGE_STATE_KEY "\"");
    if (explanations->length) {
        text_add(text, ",\"ckptd.tensors\":");
        text_add_quoted(text, explanations->data, explanations->length);
    }
    text_add(text, "}");
}

static int header_too_long(struct problem *problem) {
    return problem_set(
        problem, -E2BIG,
        "the header of this rank's image is over the limit of %d bytes (IMAGE_HEADER_MAX); protect fewer "
        "tensors, or shorter names",
        IMAGE_HEADER_MAX);
}

/* All stored shards, by element size descending, then protect order. */
static uint32_t order_write(const struct by_name *index, uint32_t *ret_order) {
    const uint8_t *sizes = index->sizes;
    uint32_t at[ELEMENT_SIZE_MAX + 1] = {0}, stored = 0;
    for (uint32_t i = 0; i < index->count; i++)
        at[sizes[i]]++;
    for (unsigned size = ELEMENT_SIZE_MAX; size > 0; size--) {
        uint32_t of_size = at[size];
        at[size] = stored;
        stored += of_size;
    }
    for (uint32_t i = 0; i < index->count; i++)
        if (sizes[i])
            ret_order[at[sizes[i]]++] = i;
    return stored;
}

static int explanations_write(const struct by_name *index, struct text *scratch, struct text *text,
                              struct problem *problem) {
    for (uint32_t i = 0; i < index->count; i++) {
        if (!index->notes[i])
            continue;
        struct shard shard;
        shards_get(index->shards, i, &shard);
        if (shard.replica_index == 0)
            explanation_write(&shard, index->notes[i], scratch, text);
        if (text->length > IMAGE_HEADER_MAX)
            return header_too_long(problem);
    }
    if (text->length)
        text_add(text, "}");
    return text->failed ? problem_set(problem, -ENOMEM, "out of memory for what the header says of its tensors") : 0;
}

int image_layout(const struct shards *shards, const struct image_identity *identity, struct image_layout *ret_layout,
                 struct problem *problem) {
    if (!text_is_utf8(identity->job, strlen(identity->job)))
        return problem_set(problem, -EINVAL, "the job's name is not UTF-8");
    CLEANUP(by_name_deinit) struct by_name index = {0};
    int r = by_name_init(&index, shards, problem);
    if (r < 0)
        return r;

    CLEANUP(image_layout_deinit) struct image_layout layout = {.shard_count = index.count};
    layout.shard_offset = malloc(max_u64(index.count, 1) * sizeof *layout.shard_offset);
    layout.order = malloc(max_u64(index.count, 1) * sizeof *layout.order);
    if (!layout.shard_offset || !layout.order)
        return problem_set(problem, -ENOMEM, "out of memory for the layout of %u shards", index.count);
    memset(layout.shard_offset, 0xff, index.count * sizeof *layout.shard_offset);

    CLEANUP(text_deinit) struct text header = TEXT_NONE, explanations = TEXT_NONE, scratch = TEXT_NONE;
    r = explanations_write(&index, &scratch, &explanations, problem);
    if (r < 0)
        return r;
    metadata_write(identity, &explanations, &header);
    text_deinit(&explanations);

    uint32_t stored = order_write(&index, layout.order);
    uint64_t end = 0;
    for (uint32_t i = 0; i < stored; i++) {
        struct shard shard;
        uint32_t number = layout.order[i];
        shards_get(shards, number, &shard);
        uint64_t from = end;
        if (add_overflows(end, shard_bytes(&shard), &end) || end > WORD_IMAGE_MAX - IMAGE_STATE_MAX)
            return problem_set(problem, -E2BIG,
                               "tensor %s: this rank's image is over the limit of %llu bytes (WORD_IMAGE_MAX)",
                               shard.name, (unsigned long long)WORD_IMAGE_MAX);
        text_add(&header, ",");
        quoted_key_write(&shard, index.notes[number], &scratch, &header);
        tensor_write(&shard, from, end, &header);
        if (header.length > IMAGE_HEADER_MAX)
            return header_too_long(problem);
        if (end > from) {
            layout.shard_offset[number] = from;
            layout.order[layout.ordered_count++] = number;
        }
    }

    layout.data_start = align_up(sizeof(uint64_t) + header.length + STATE_ENTRY_MAX, IMAGE_ALIGNMENT);
    layout.state_offset = layout.data_start + end;
    if (layout.data_start - sizeof(uint64_t) > IMAGE_HEADER_MAX)
        return header_too_long(problem);
    for (uint32_t i = 0; i < layout.ordered_count; i++)
        layout.shard_offset[layout.order[i]] += layout.data_start;
    header.failed = header.failed || scratch.failed; /* then it lacks something */
    r = text_take(&header, &layout.header, &layout.header_length);
    if (r < 0)
        return problem_set(problem, r, "out of memory for the header of %u shards", index.count);

    *ret_layout = layout;
    layout = (struct image_layout){0};
    return 0;
}

void image_layout_deinit(struct image_layout *layout) {
    free(layout->shard_offset);
    free(layout->order);
    free(layout->header);
    *layout = (struct image_layout){0};
}

uint64_t image_size(const struct image_layout *layout, uint64_t state_length) {
    assert(state_length <= IMAGE_STATE_MAX);
    return layout->state_offset + state_length;
}

void image_header(const struct image_layout *layout, uint64_t state_length, void *ret_header) {
    uint64_t json_length = layout->data_start - sizeof json_length;
    uint8_t *at = mempcpy(ret_header, &json_length, sizeof json_length), *end = at + json_length;
    at = mempcpy(at, layout->header, layout->header_length);
    if (state_length) {
        uint64_t from = layout->state_offset - layout->data_start;
        char entry[STATE_ENTRY_MAX];
        int length =
            snprintf(entry, sizeof entry, ",\"%s\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                     IMAGE_STATE_KEY, (unsigned long long)state_length, (unsigned long long)from,
                     (unsigned long long)(from + state_length));
        assert(length > 0 && length < (int)sizeof entry);
        at = mempcpy(at, entry, (size_t)length);
    }
    *at++ = '}';
    memset(at, ' ', (size_t)(end - at));
}

uint32_t image_find(const struct image_layout *layout, const struct shards *shards, uint64_t offset) {
    /* There are no holes: the shard that ends after `offset` comes right before the first one that
     * begins after it. */
    uint32_t low = 0, high = layout->ordered_count;
    if (offset >= layout->state_offset)
        return layout->ordered_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (layout->shard_offset[layout->order[middle]] > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low ? low - 1 : 0;
}
