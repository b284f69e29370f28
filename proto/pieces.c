/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/pieces.h"

#include "proto/lines.h"

#include <errno.h>

void piece_deinit(struct piece *piece) {
    free(piece->name);
    free(piece->target);
    *piece = (struct piece){0};
}

void pieces_deinit(struct pieces *pieces) {
    for (size_t i = 0; i < pieces->count; i++)
        piece_deinit(&pieces->items[i]);
    free(pieces->items);
    *pieces = (struct pieces){0};
}

uint64_t piece_bytes(const struct piece *piece) {
    return piece->flags & SHARD_ALIAS ? 0 : geometry_elements(&piece->geometry) * dtype_size(piece->dtype);
}

int piece_compare(const struct piece *a, const struct piece *b) {
    int order = strcmp(a->name, b->name);
    if (order)
        return order;
    bool a_local = a->flags & SHARD_RANK_LOCAL, b_local = b->flags & SHARD_RANK_LOCAL;
    if (a_local != b_local)
        return a_local ? 1 : -1;
    if (a->rank != b->rank)
        return a->rank < b->rank ? -1 : 1;
    if (a->image_offset != b->image_offset)
        return a->image_offset < b->image_offset ? -1 : 1;
    return 0;
}

int pieces_from_layout(const struct shards *shards, const struct image_layout *layout, uint32_t rank,
                       uint64_t state_length, struct pieces *ret_pieces) {
    CLEANUP(pieces_deinit)
    struct pieces pieces = {
        .has_state = state_length > 0,
        .state_offset = state_length ? layout->state_offset : 0,
        .state_length = state_length,
    };
    pieces.items = calloc(max_u64(layout->shard_count, 1), sizeof *pieces.items);
    if (!pieces.items)
        return -ENOMEM;
    for (uint32_t i = 0; i < layout->shard_count; i++) {
        struct shard shard;
        shards_get(shards, i, &shard);
        if (shard.replica_index > 0)
            continue;
        struct piece *piece = &pieces.items[pieces.count++];
        *piece = (struct piece){
            .name = strdup(shard.name),
            .target = shard.target ? strdup(shard.target) : NULL,
            .dtype = shard.dtype,
            .flags = shard.flags & (SHARD_RANK_LOCAL | SHARD_ALIAS),
            .rank = rank,
            .image_offset = shard.target ? 0 : layout->shard_offset[i],
            .geometry = shard.geometry,
        };
        if (!piece->name || (shard.target && !piece->target))
            return -ENOMEM;
        if (piece->image_offset == UINT64_MAX)
            piece->image_offset = layout->data_start; /* no elements: any place is as good */
    }
    *ret_pieces = pieces;
    pieces = (struct pieces){0};
    return 0;
}

void piece_write_place(const struct geometry *geometry, struct text *text) {
    if (geometry->is_range) {
        text_add(text, ",\"range\":");
        text_add_numbers(text, (uint64_t[]){geometry->start, geometry->count}, 2);
    } else if (!geometry_is_whole(geometry)) {
        text_add(text, ",\"box\":[");
        text_add_numbers(text, geometry->offset, geometry->dims);
        text_add(text, ",");
        text_add_numbers(text, geometry->extent, geometry->dims);
        text_add(text, "]");
    }
}

void piece_write(const struct piece *piece, bool with_rank, struct text *text) {
    text_add(text, "{\"name\":");
    text_add_quoted(text, piece->name, strlen(piece->name));
    lines_add_text(text, "dtype", dtype_name(piece->dtype));
    text_add(text, ",\"shape\":");
    text_add_numbers(text, piece->geometry.shape, piece->geometry.dims);
    if (with_rank)
        lines_add_number(text, "rank", piece->rank);
    if (piece->flags & SHARD_RANK_LOCAL)
        text_add(text, ",\"local\":true");
    if (piece->flags & SHARD_ALIAS) {
        lines_add_text(text, "alias", piece->target);
    } else {
        piece_write_place(&piece->geometry, text);
        lines_add_number(text, "at", piece->image_offset);
    }
    text_add(text, "}\n");
}

static bool numbers_read(const json_t *array, uint64_t *ret_numbers, size_t count) {
    if (!json_is_array(array) || json_array_size(array) != count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (!lines_number(json_array_get(array, i), LINES_NUMBER_MAX, &ret_numbers[i]))
            return false;
    return true;
}

static bool geometry_read(const json_t *object, struct geometry *ret_geometry) {
    const json_t *shape = json_object_get(object, "shape"), *box = json_object_get(object, "box"),
                 *range = json_object_get(object, "range");
    if (!json_is_array(shape) || json_array_size(shape) > GEOMETRY_DIMS_MAX || (box && range))
        return false;
    struct geometry *geometry = ret_geometry;
    geometry->dims = (uint8_t)json_array_size(shape);
    if (!numbers_read(shape, geometry->shape, geometry->dims))
        return false;
    if (range) {
        uint64_t place[2];
        if (!numbers_read(range, place, 2))
            return false;
        geometry->is_range = true;
        geometry->start = place[0];
        geometry->count = place[1];
        return true;
    }
    if (!box) {
        memcpy(geometry->extent, geometry->shape, sizeof geometry->extent);
        return true;
    }
    return json_is_array(box) && json_array_size(box) == 2 &&
           numbers_read(json_array_get(box, 0), geometry->offset, geometry->dims) &&
           numbers_read(json_array_get(box, 1), geometry->extent, geometry->dims);
}

/* A tensor's name: bounded, not empty. jansson has checked that it is UTF-8 without NULs. */
static bool name_read(const json_t *value, char **ret_name) {
    if (!json_is_string(value) || json_string_length(value) == 0 || json_string_length(value) > SHARDS_NAME_MAX)
        return false;
    *ret_name = strdup(json_string_value(value));
    return *ret_name != NULL;
}

/* `,"range":[...]`, `,"box":[[...],[...]]`, or nothing. */
static bool place_scan(struct lines_scan *scan, struct geometry *geometry) {
    uint64_t place[2];
    size_t count, more;
    if (lines_scan_is(scan, ",\"range\":")) {
        if (!lines_scan_numbers(scan, 2, place, &count) || count != 2)
            return false;
        geometry->is_range = true;
        geometry->start = place[0];
        geometry->count = place[1];
        return true;
    }
    if (!lines_scan_is(scan, ",\"box\":[")) {
        memcpy(geometry->extent, geometry->shape, sizeof geometry->extent);
        return true;
    }
    return lines_scan_numbers(scan, geometry->dims, geometry->offset, &count) && lines_scan_is(scan, ",") &&
           lines_scan_numbers(scan, geometry->dims, geometry->extent, &more) && count == geometry->dims &&
           more == geometry->dims && lines_scan_is(scan, "]");
}

/* A line as piece_write() makes it, of a piece with bytes. False: anything else, also what is wrong. */
static bool piece_scan(const char *line, size_t length, const uint32_t *rank, struct piece *ret_piece) {
    struct lines_scan scan = {line, line + length};
    struct piece piece = {0};
    struct geometry *geometry = &piece.geometry;
    const char *name, *dtype;
    size_t name_length, dtype_length, dims;
    uint64_t said_rank = 0;
    if (!lines_scan_is(&scan, "{\"name\":") || !lines_scan_text(&scan, &name, &name_length) || name_length == 0 ||
        name_length > SHARDS_NAME_MAX || !lines_scan_is(&scan, ",\"dtype\":") ||
        !lines_scan_text(&scan, &dtype, &dtype_length) || !lines_scan_is(&scan, ",\"shape\":") ||
        !lines_scan_numbers(&scan, GEOMETRY_DIMS_MAX, geometry->shape, &dims))
        return false;
    if (!rank &&
        (!lines_scan_is(&scan, ",\"rank\":") || !lines_scan_number(&scan, &said_rank) || said_rank > UINT32_MAX))
        return false;
    if (lines_scan_is(&scan, ",\"local\":true"))
        piece.flags |= SHARD_RANK_LOCAL;
    geometry->dims = (uint8_t)dims;
    piece.dtype = dtype_from_text(dtype, dtype_length);
    if (piece.dtype == DTYPE_INVALID || !place_scan(&scan, geometry) || !lines_scan_is(&scan, ",\"at\":") ||
        !lines_scan_number(&scan, &piece.image_offset) || !lines_scan_is(&scan, "}") || scan.at != scan.end ||
        !geometry_valid(geometry, dtype_size(piece.dtype)))
        return false;
    piece.rank = rank ? *rank : (uint32_t)said_rank;
    piece.name = malloc(name_length + 1);
    if (!piece.name)
        return false;
    memcpy(piece.name, name, name_length);
    piece.name[name_length] = '\0';
    *ret_piece = piece;
    return true;
}

int piece_read(const char *line, size_t length, const uint32_t *rank, struct piece *ret_piece,
               struct problem *problem) {
    if (piece_scan(line, length, rank, ret_piece))
        return 0;
    json_auto_t *object = lines_parse(line, length);
    CLEANUP(piece_deinit) struct piece piece = {0};
    const json_t *alias = json_object_get(object, "alias"), *local = json_object_get(object, "local");
    char dtype[16];
    if (!name_read(json_object_get(object, "name"), &piece.name))
        return problem_set(problem, -EBADMSG, "a piece without a name");
    if (!lines_field_text(object, "dtype", dtype, sizeof dtype) ||
        (piece.dtype = dtype_from_name(dtype)) == DTYPE_INVALID)
        return problem_set(problem, -EBADMSG, "tensor %s: an unknown dtype", piece.name);
    if (!geometry_read(object, &piece.geometry) || !geometry_valid(&piece.geometry, dtype_size(piece.dtype)))
        return problem_set(problem, -EBADMSG, "tensor %s: a place that is not in its shape", piece.name);
    if (local && !json_is_true(local))
        return problem_set(problem, -EBADMSG, "tensor %s: \"local\" is not true", piece.name);
    if (local)
        piece.flags |= SHARD_RANK_LOCAL;
    if (alias) {
        piece.flags |= SHARD_ALIAS;
        if (!name_read(alias, &piece.target))
            return problem_set(problem, -EBADMSG, "tensor %s: an alias of nothing", piece.name);
    } else if (!lines_field_number(object, "at", LINES_NUMBER_MAX, &piece.image_offset)) {
        return problem_set(problem, -EBADMSG, "tensor %s: no offset", piece.name);
    }
    if (rank)
        piece.rank = *rank;
    else if (!lines_field_u32(object, "rank", &piece.rank))
        return problem_set(problem, -EBADMSG, "tensor %s: no rank", piece.name);
    *ret_piece = piece;
    piece = (struct piece){0};
    return 0;
}
