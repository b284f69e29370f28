/* SPDX-License-Identifier: Apache-2.0 */
/* `show`: what is in a version: its parts and, once per tensor, dtype, shape and pieces. */
#include "tools/inventory.h"
#include "tools/table.h"

#include <inttypes.h>

#define RANKS_TEXT_MAX 96

static bool is_local(const struct piece *piece) { return piece->flags & SHARD_RANK_LOCAL; }

/* How many pieces from `first` on are one tensor's. */
static size_t tensor_pieces(const struct pieces *pieces, size_t first) {
    const struct piece *one = &pieces->items[first];
    size_t count = 1;
    for (; first + count < pieces->count; count++) {
        const struct piece *other = &pieces->items[first + count];
        if (strcmp(one->name, other->name) != 0 || is_local(one) != is_local(other) ||
            (is_local(one) && one->rank != other->rank))
            break;
    }
    return count;
}

static void shape_text(const struct geometry *geometry, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (unsigned i = 0; i < geometry->dims && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRIu64, i ? ", " : "", geometry->shape[i]);
    if (used < size)
        snprintf(text + used, size - used, "]");
}

/* "0-3,7": the ranks that hold pieces; they ascend. */
static void ranks_text(const struct piece *pieces, size_t count, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < count && used < size;) {
        uint32_t from = pieces[i].rank, to = from;
        for (; i < count && pieces[i].rank <= to + 1; i++)
            to = pieces[i].rank;
        used += (size_t)snprintf(text + used, size - used, from == to ? "%s%" PRIu32 : "%s%" PRIu32 "-%" PRIu32,
                                 used ? "," : "", from, to);
    }
    if (used >= size)
        memcpy(text + size - 4, "...", 4);
}

static void print_tensors(const struct pieces *pieces) {
    CLEANUP(table_deinit) struct table table = {0};
    table_init(&table, "TENSOR|DTYPE|SHAPE|>BYTES|>PIECES|RANKS|");
    for (size_t i = 0; i < pieces->count;) {
        const struct piece *first = &pieces->items[i];
        size_t count = tensor_pieces(pieces, i);
        char shape[1024], ranks[RANKS_TEXT_MAX], bytes[FORMAT_MAX];
        shape_text(&first->geometry, shape, sizeof shape);
        ranks_text(first, count, ranks, sizeof ranks);
        table_cell(&table, "%s", first->name);
        table_cell(&table, "%s", dtype_name(first->dtype));
        table_cell(&table, "%s", shape);
        table_cell(&table, "%s",
                   format_bytes(geometry_tensor_elements(&first->geometry) * dtype_size(first->dtype), bytes));
        table_cell(&table, "%zu", first->target ? (size_t)0 : count);
        table_cell(&table, "%s", ranks);
        if (first->target)
            table_cell(&table, "alias of %s", first->target);
        else
            table_cell(&table, "%s", is_local(first) ? "of this rank" : "");
        i += count;
    }
    table_print(&table, stdout);
}

static void print_parts(const struct complete *complete) {
    CLEANUP(table_deinit) struct table table = {0};
    table_init(&table, ">RANK|>BYTES|>STATE|>CHUNKS|DIGEST");
    for (uint32_t i = 0; i < complete->summary.world; i++) {
        const struct complete_part *part = &complete->parts[i];
        char digest[DIGEST_HEX_SIZE], bytes[FORMAT_MAX], state[FORMAT_MAX];
        digest_hex(&part->image_digest, digest);
        table_cell(&table, "%" PRIu32, part->rank);
        table_cell(&table, "%s", format_bytes(part->image_size, bytes));
        table_cell(&table, "%s", part->state_length ? format_bytes(part->state_length, state) : "-");
        table_cell(&table, "%" PRIu64, (part->image_size + part->chunk_size - 1) / part->chunk_size);
        table_cell(&table, "%s", digest);
    }
    table_print(&table, stdout);
}

static json_t *numbers_json(const uint64_t *numbers, size_t count) {
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, json_integer((json_int_t)numbers[i]));
    return list;
}

static json_t *piece_json(const struct piece *piece) {
    const struct geometry *geometry = &piece->geometry;
    json_t *json =
        json_pack("{s:I, s:I}", "rank", (json_int_t)piece->rank, "image_offset", (json_int_t)piece->image_offset);
    if (geometry->is_range) {
        json_object_set_new(json, "start", json_integer((json_int_t)geometry->start));
        json_object_set_new(json, "count", json_integer((json_int_t)geometry->count));
    } else {
        json_object_set_new(json, "offset", numbers_json(geometry->offset, geometry->dims));
        json_object_set_new(json, "extent", numbers_json(geometry->extent, geometry->dims));
    }
    return json;
}

static json_t *tensor_json(const struct piece *first, size_t count) {
    json_t *json = json_pack("{s:s, s:s, s:o}", "name", first->name, "dtype", dtype_name(first->dtype), "shape",
                             numbers_json(first->geometry.shape, first->geometry.dims));
    if (is_local(first))
        json_object_set_new(json, "rank", json_integer(first->rank));
    if (first->target) {
        json_object_set_new(json, "alias", json_string(first->target));
        return json;
    }
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, piece_json(&first[i]));
    json_object_set_new(json, "pieces", list);
    return json;
}

static int print_json(const struct complete *complete) {
    json_t *parts = json_array(), *tensors = json_array();
    for (uint32_t i = 0; i < complete->summary.world; i++) {
        const struct complete_part *part = &complete->parts[i];
        char digest[DIGEST_HEX_SIZE];
        digest_hex(&part->image_digest, digest);
        json_array_append_new(parts,
                              json_pack("{s:I, s:I, s:I, s:I, s:s}", "rank", (json_int_t)part->rank, "bytes",
                                        (json_int_t)part->image_size, "state_bytes", (json_int_t)part->state_length,
                                        "chunk_size", (json_int_t)part->chunk_size, "digest", digest));
    }
    for (size_t i = 0; i < complete->pieces.count;) {
        size_t count = tensor_pieces(&complete->pieces, i);
        json_array_append_new(tensors, tensor_json(&complete->pieces.items[i], count));
        i += count;
    }
    const struct complete_summary *summary = &complete->summary;
    return ctl_print_json(json_pack("{s:s, s:I, s:I, s:s, s:I, s:I, s:I, s:o, s:o}", "job", summary->job, "generation",
                                    (json_int_t)summary->generation, "step", (json_int_t)summary->step, "run_id",
                                    summary->run_id, "world", (json_int_t)summary->world, "bytes",
                                    (json_int_t)summary->bytes, "created_ns", (json_int_t)summary->created_ns, "parts",
                                    parts, "tensors", tensors));
}

int verb_show(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    CLEANUP(complete_deinit) struct complete complete = {0};
    const struct inventory_version *version;
    int status = inventory_open(ctl, &roots, &inventory);
    if (status == STATUS_OK)
        status = inventory_find(&inventory, ctl->word_count > 1 ? ctl->words[1] : NULL, &version);
    if (status == STATUS_OK)
        status = inventory_complete(&inventory, version, &complete);
    if (status != STATUS_OK)
        return status;
    if (ctl->json)
        return print_json(&complete);
    char bytes[FORMAT_MAX], age[FORMAT_MAX];
    printf("job %s, version %" PRIu64 "/%" PRIu64 ", %s, %s old, run %s\n\n", inventory.job, version->id.generation,
           version->id.step, format_bytes(complete.summary.bytes, bytes), format_age(complete.summary.created_ns, age),
           complete.summary.run_id);
    print_parts(&complete);
    if (complete.pieces.count)
        putchar('\n');
    print_tensors(&complete.pieces);
    return STATUS_OK;
}
