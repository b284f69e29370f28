/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/lines.h"
#include "proto/manifest.h"
#include "proto/pieces.h"

#include <errno.h>

/*
 * complete.json: the sealed line, one line per rank, the merged index of pieces, the last line.
 * Whoever merges the same manifests writes the same bytes: the pieces are sorted, an alias that
 * several ranks declare is kept once, and nothing of the writer goes in.
 */

#define COMPLETE_FORMAT "ckptd-complete"
#define PART_LINE_MIN 60
#define PIECE_LINE_MIN 40

static bool is_alias(const struct piece *piece) { return piece->flags & SHARD_ALIAS; }

static bool is_local(const struct piece *piece) { return piece->flags & SHARD_RANK_LOCAL; }

/* The same tensor: a rank-local one is another tensor in every rank. */
static bool same_tensor(const struct piece *a, const struct piece *b) {
    return strcmp(a->name, b->name) == 0 && is_local(a) == is_local(b) && (!is_local(a) || a->rank == b->rank);
}

static bool same_kind(const struct piece *a, const struct piece *b) {
    return a->dtype == b->dtype && a->geometry.dims == b->geometry.dims &&
           memcmp(a->geometry.shape, b->geometry.shape, a->geometry.dims * sizeof a->geometry.shape[0]) == 0;
}

static int compare(const void *left, const void *right) { return piece_compare(left, right); }

static int check_agreement(const struct manifest *manifests, size_t count, struct problem *problem) {
    const struct manifest_summary *first = &manifests[0].summary;
    for (size_t i = 0; i < count; i++) {
        const struct manifest_summary *summary = &manifests[i].summary;
        if (summary->absent)
            return problem_set(problem, -EINVAL, "rank %zu has no part: %s", i, summary->reason);
        if (summary->rank != i || summary->world != count)
            return problem_set(problem, -EINVAL, "the part of rank %zu of %zu says that it is rank %u of %u", i, count,
                               summary->rank, summary->world);
        if (strcmp(summary->job, first->job) != 0 || summary->generation != first->generation ||
            summary->step != first->step)
            return problem_set(
                problem, -EINVAL, "rank 0 has job %s, version %llu/%llu, but rank %zu has job %s, version %llu/%llu",
                first->job, (unsigned long long)first->generation, (unsigned long long)first->step, i, summary->job,
                (unsigned long long)summary->generation, (unsigned long long)summary->step);
        if (strcmp(summary->run_id, first->run_id) != 0)
            return problem_set(problem, -EINVAL, "ranks 0 and %zu are of different runs: %s and %s", i, first->run_id,
                               summary->run_id);
    }
    return 0;
}

static int piece_copy(const struct piece *piece, struct piece *ret_piece) {
    CLEANUP(piece_deinit) struct piece copy = *piece;
    copy.name = strdup(piece->name);
    copy.target = piece->target ? strdup(piece->target) : NULL;
    if (!copy.name || (piece->target && !copy.target))
        return -ENOMEM;
    *ret_piece = copy;
    copy = (struct piece){0};
    return 0;
}

static int merge(const struct manifest *manifests, size_t count, struct pieces *pieces) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += manifests[i].pieces.count;
    pieces->items = calloc(max_u64(total, 1), sizeof *pieces->items);
    if (!pieces->items)
        return -ENOMEM;
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < manifests[i].pieces.count; j++) {
            int r = piece_copy(&manifests[i].pieces.items[j], &pieces->items[pieces->count]);
            if (r < 0)
                return r;
            pieces->count++;
        }
    qsort(pieces->items, pieces->count, sizeof *pieces->items, compare);
    return 0;
}

/* The pieces of one tensor agree with each other. */
static int check_same(const struct piece *pieces, size_t count, struct problem *problem) {
    for (size_t i = 1; i < count; i++) {
        const struct piece *a = &pieces[0], *b = &pieces[i];
        if (!same_kind(a, b))
            return problem_set(problem, -EINVAL, "tensor %s: ranks %u and %u disagree about its dtype or global shape",
                               a->name, a->rank, b->rank);
        if (is_alias(a) != is_alias(b) || (is_alias(a) && strcmp(a->target, b->target) != 0))
            return problem_set(problem, -EINVAL, "tensor %s: ranks %u and %u disagree about what it is an alias of",
                               a->name, a->rank, b->rank);
    }
    return 0;
}

static int check_cover(const struct piece *pieces, size_t count, struct problem *problem) {
    if (is_alias(&pieces[0]))
        return 0;
    CLEANUP(freep) const struct geometry **places = calloc(count, sizeof *places);
    if (!places)
        return problem_set(problem, -ENOMEM, "out of memory for %zu pieces of tensor %s", count, pieces[0].name);
    for (size_t i = 0; i < count; i++)
        places[i] = &pieces[i].geometry;
    size_t a, b;
    int r = geometry_partition(places, count, &a, &b);
    if (r < 0)
        return problem_set(problem, r, "out of memory for %zu pieces of tensor %s", count, pieces[0].name);
    if (r == GEOMETRY_E_OVERLAP)
        return problem_set(
            problem, -EINVAL,
            "tensor %s: the pieces of ranks %u and %u overlap; if they are copies, declare them replicas",
            pieces[0].name, pieces[a].rank, pieces[b].rank);
    if (r == GEOMETRY_E_GAP && !is_local(&pieces[0])) {
        uint32_t low = pieces[0].rank, high = pieces[count - 1].rank;
        return problem_set(problem, -EINVAL, "tensor %s: the pieces of ranks %u to %u leave a gap in it",
                           pieces[0].name, low, high);
    }
    return 0;
}

/* The end of the tensor that begins at piece `start`. */
static size_t tensor_end(const struct pieces *pieces, size_t start) {
    size_t end = start + 1;
    while (end < pieces->count && same_tensor(&pieces->items[start], &pieces->items[end]))
        end++;
    return end;
}

static const struct piece *find_target(const struct pieces *pieces, const struct piece *alias) {
    size_t low = 0, high = pieces->count;
    struct piece wanted = {
        .name = alias->target, .flags = alias->flags & SHARD_RANK_LOCAL, .rank = is_local(alias) ? alias->rank : 0};
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (piece_compare(&pieces->items[middle], &wanted) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < pieces->count && same_tensor(&pieces->items[low], &wanted) && !is_alias(&pieces->items[low]);
    return found ? &pieces->items[low] : NULL;
}

static int check_aliases(const struct pieces *pieces, struct problem *problem) {
    for (size_t i = 0; i < pieces->count; i++) {
        const struct piece *alias = &pieces->items[i], *target;
        if (!is_alias(alias))
            continue;
        target = find_target(pieces, alias);
        if (!target || !same_kind(alias, target))
            return problem_set(problem, -EINVAL, "tensor %s of rank %u: an alias of %s, %s", alias->name, alias->rank,
                               alias->target, target ? "which has another dtype or shape" : "which no rank holds");
    }
    return 0;
}

/* Checks tensor by tensor, keeps one of each alias, counts the global names. */
static int check_tensors(struct pieces *pieces, uint64_t *ret_tensors, struct problem *problem) {
    uint64_t tensors = 0;
    size_t kept = 0;
    for (size_t i = 0, end; i < pieces->count; i = end) {
        end = tensor_end(pieces, i);
        struct piece *first = &pieces->items[i];
        int r = check_same(first, end - i, problem);
        if (r == 0)
            r = check_cover(first, end - i, problem);
        if (r < 0) {
            /* What lies between was moved down: the caller frees each piece once. */
            memmove(&pieces->items[kept], first, (pieces->count - i) * sizeof *first);
            pieces->count -= i - kept;
            return r;
        }
        tensors += !is_local(first);
        for (size_t j = i; j < end; j++) {
            if (j > i && is_alias(&pieces->items[j]))
                piece_deinit(&pieces->items[j]);
            else
                pieces->items[kept++] = pieces->items[j];
        }
    }
    pieces->count = kept;
    *ret_tensors = tensors;
    return check_aliases(pieces, problem);
}

int complete_build(const struct manifest *manifests, size_t count, struct complete *ret_complete,
                   struct problem *problem) {
    if (count == 0 || count > UINT32_MAX)
        return problem_set(problem, -EINVAL, "a version of %zu parts", count);
    int r = check_agreement(manifests, count, problem);
    if (r < 0)
        return r;
    CLEANUP(complete_deinit) struct complete complete = {0};
    struct complete_summary *summary = &complete.summary;
    memcpy(summary->job, manifests[0].summary.job, sizeof summary->job);
    memcpy(summary->run_id, manifests[0].summary.run_id, sizeof summary->run_id);
    summary->generation = manifests[0].summary.generation;
    summary->step = manifests[0].summary.step;
    summary->world = (uint32_t)count;
    complete.parts = calloc(count, sizeof *complete.parts);
    if (!complete.parts)
        return problem_set(problem, -ENOMEM, "out of memory for %zu parts", count);
    for (size_t i = 0; i < count; i++) {
        const struct manifest *manifest = &manifests[i];
        complete.parts[i] = (struct complete_part){
            .rank = (uint32_t)i,
            .image_size = manifest->summary.image_size,
            .image_digest = manifest->summary.image_digest,
            .chunk_size = manifest->summary.chunk_size,
            .state_offset = manifest->pieces.state_offset,
            .state_length = manifest->pieces.state_length,
        };
        summary->created_ns = max_u64(summary->created_ns, manifest->summary.created_ns);
        if (add_overflows(summary->bytes, manifest->summary.image_size, &summary->bytes) ||
            summary->bytes > LINES_NUMBER_MAX)
            return problem_set(problem, -EINVAL, "the parts' sizes overflow");
    }
    r = merge(manifests, count, &complete.pieces);
    if (r < 0)
        return problem_set(problem, r, "out of memory for the index of %zu parts", count);
    r = check_tensors(&complete.pieces, &summary->tensors, problem);
    if (r < 0)
        return r;
    *ret_complete = complete;
    complete = (struct complete){0};
    return 0;
}

int complete_write(const struct complete *complete, char **ret_text, size_t *ret_length) {
    const struct complete_summary *summary = &complete->summary;
    CLEANUP(text_deinit) struct text text = TEXT_NONE;
    text_add(&text, "{\"format\":\"" COMPLETE_FORMAT "\"");
    lines_add_number(&text, "version", MANIFEST_FORMAT_VERSION);
    lines_add_text(&text, "job", summary->job);
    lines_add_text(&text, "run", summary->run_id);
    lines_add_number(&text, "generation", summary->generation);
    lines_add_number(&text, "step", summary->step);
    lines_add_number(&text, "world", summary->world);
    lines_add_number(&text, "bytes", summary->bytes);
    lines_add_number(&text, "tensors", summary->tensors);
    lines_add_number(&text, "created_ns", summary->created_ns);
    lines_add_number(&text, "pieces", complete->pieces.count);
    lines_seal(&text, 0);
    if (!text.failed && text.length > MANIFEST_LINE_MAX)
        return -E2BIG;
    for (uint32_t i = 0; i < summary->world; i++) {
        const struct complete_part *part = &complete->parts[i];
        char hex[DIGEST_HEX_SIZE];
        digest_hex(&part->image_digest, hex);
        text_add(&text, "[");
        text_add_number(&text, part->rank);
        text_add(&text, ",");
        text_add_number(&text, part->image_size);
        text_add(&text, ",\"");
        text_add(&text, hex);
        text_add(&text, "\",");
        text_add_number(&text, part->chunk_size);
        text_add(&text, ",");
        text_add_number(&text, part->state_offset);
        text_add(&text, ",");
        text_add_number(&text, part->state_length);
        text_add(&text, "]\n");
    }
    for (size_t i = 0; i < complete->pieces.count; i++)
        piece_write(&complete->pieces.items[i], true, &text);
    lines_finish(&text);
    if (text.length > MANIFEST_FILE_MAX)
        return -E2BIG;
    return text_take(&text, ret_text, ret_length);
}

static int summary_read(const char *data, size_t size, struct complete_summary *ret_summary, uint64_t *ret_pieces,
                        size_t *ret_length, struct problem *problem) {
    json_auto_t *object = NULL;
    int r = lines_read_sealed(data, size, MANIFEST_LINE_MAX, COMPLETE_FORMAT, MANIFEST_FORMAT_VERSION, &object,
                              ret_length, problem);
    if (r < 0)
        return r;
    struct complete_summary summary = {0};
    if (!lines_field_text(object, "job", summary.job, sizeof summary.job) ||
        !lines_field_text(object, "run", summary.run_id, sizeof summary.run_id) ||
        !lines_field_number(object, "generation", LINES_NUMBER_MAX, &summary.generation) ||
        !lines_field_number(object, "step", LINES_NUMBER_MAX, &summary.step) ||
        !lines_field_u32(object, "world", &summary.world) || summary.world == 0 ||
        !lines_field_number(object, "bytes", LINES_NUMBER_MAX, &summary.bytes) ||
        !lines_field_number(object, "tensors", LINES_NUMBER_MAX, &summary.tensors) ||
        !lines_field_number(object, "created_ns", LINES_NUMBER_MAX, &summary.created_ns) ||
        !lines_field_number(object, "pieces", LINES_NUMBER_MAX, ret_pieces))
        return problem_set(problem, -EBADMSG,
                           COMPLETE_FORMAT ": a field of the first line is missing or out of bounds");
    *ret_summary = summary;
    return 0;
}

int complete_read_summary(const char *data, size_t size, struct complete_summary *ret_summary,
                          struct problem *problem) {
    uint64_t pieces;
    size_t length;
    return summary_read(data, size, ret_summary, &pieces, &length, problem);
}

static bool part_read(const char *line, size_t length, uint32_t rank, struct complete_part *ret_part) {
    json_auto_t *array = lines_parse(line, length);
    struct complete_part part = {.rank = rank};
    uint64_t said_rank, chunk_size;
    if (!json_is_array(array) || json_array_size(array) != 6 ||
        !lines_number(json_array_get(array, 0), UINT32_MAX, &said_rank) || said_rank != rank ||
        !lines_number(json_array_get(array, 1), LINES_NUMBER_MAX, &part.image_size) || part.image_size == 0 ||
        !lines_digest(json_array_get(array, 2), &part.image_digest) ||
        !lines_number(json_array_get(array, 3), UINT32_MAX, &chunk_size) || chunk_size == 0 ||
        !lines_number(json_array_get(array, 4), part.image_size, &part.state_offset) ||
        !lines_number(json_array_get(array, 5), part.image_size - part.state_offset, &part.state_length))
        return false;
    part.chunk_size = (uint32_t)chunk_size;
    *ret_part = part;
    return true;
}

static int parts_read(const char **data, size_t *size, struct complete *complete, struct problem *problem) {
    uint32_t world = complete->summary.world;
    uint64_t bytes = 0;
    if (world > *size / PART_LINE_MIN + 1)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": no room for %u parts", world);
    complete->parts = calloc(world, sizeof *complete->parts);
    if (!complete->parts)
        return problem_set(problem, -ENOMEM, "out of memory for %u parts", world);
    for (uint32_t i = 0; i < world; i++) {
        const char *line;
        size_t length;
        if (!lines_next(data, size, &line, &length) || !part_read(line, length, i, &complete->parts[i]) ||
            add_overflows(bytes, complete->parts[i].image_size, &bytes))
            return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": part %u is not as it should be", i);
    }
    if (bytes != complete->summary.bytes)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": the parts' sizes do not add up");
    return 0;
}

/* In order, in its part, and of one kind with its tensor's other pieces. */
static bool piece_fits(const struct complete *complete, const struct piece *before, const struct piece *piece) {
    if (piece->rank >= complete->summary.world)
        return false;
    const struct complete_part *part = &complete->parts[piece->rank];
    if (piece->image_offset > part->image_size || piece_bytes(piece) > part->image_size - piece->image_offset)
        return false;
    if (!before)
        return true;
    return piece_compare(before, piece) <= 0 &&
           (!same_tensor(before, piece) || (same_kind(before, piece) && !is_alias(before) && !is_alias(piece)));
}

static int pieces_read(const char **data, size_t *size, uint64_t count, struct complete *complete,
                       struct problem *problem) {
    struct pieces *pieces = &complete->pieces;
    if (count > *size / PIECE_LINE_MIN)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": no room for %llu pieces", (unsigned long long)count);
    pieces->items = calloc(max_u64(count, 1), sizeof *pieces->items);
    if (!pieces->items)
        return problem_set(problem, -ENOMEM, "out of memory for an index of %llu pieces", (unsigned long long)count);
    uint64_t tensors = 0;
    while (pieces->count < count) {
        const char *line;
        size_t length;
        struct piece *piece = &pieces->items[pieces->count];
        if (!lines_next(data, size, &line, &length))
            return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": pieces are missing");
        int r = piece_read(line, length, NULL, piece, problem);
        if (r < 0)
            return r;
        const struct piece *before = pieces->count++ ? piece - 1 : NULL;
        if (!piece_fits(complete, before, piece))
            return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": a piece of tensor %s contradicts the rest",
                               piece->name);
        tensors += !is_local(piece) && (!before || !same_tensor(before, piece));
    }
    if (tensors != complete->summary.tensors)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": the number of tensors is wrong");
    if (check_aliases(pieces, problem) < 0)
        return -EBADMSG;
    return 0;
}

/* The whole file is verified; `with_pieces` says whether the index is parsed, too. */
static int read_all(const char *data, size_t size, bool with_pieces, struct complete *ret_complete,
                    struct problem *problem) {
    CLEANUP(complete_deinit) struct complete complete = {0};
    uint64_t pieces;
    size_t length;
    if (size > MANIFEST_FILE_MAX)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": the file is over the limit of %llu bytes",
                           (unsigned long long)MANIFEST_FILE_MAX);
    int r = summary_read(data, size, &complete.summary, &pieces, &length, problem);
    if (r < 0)
        return r;
    r = lines_check_finish(data, size, COMPLETE_FORMAT, &size, problem);
    if (r < 0)
        return r;
    if (size < length)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": there is only one line");
    data += length;
    size -= length;
    r = parts_read(&data, &size, &complete, problem);
    if (r < 0)
        return r;
    if (with_pieces)
        r = pieces_read(&data, &size, pieces, &complete, problem);
    if (r < 0)
        return r;
    if (with_pieces && size)
        return problem_set(problem, -EBADMSG, COMPLETE_FORMAT ": there are more lines than the first one says");
    *ret_complete = complete;
    complete = (struct complete){0};
    return 0;
}

int complete_read(const char *data, size_t size, struct complete *ret_complete, struct problem *problem) {
    return read_all(data, size, true, ret_complete, problem);
}

int complete_read_parts(const char *data, size_t size, struct complete *ret_complete, struct problem *problem) {
    return read_all(data, size, false, ret_complete, problem);
}

void complete_deinit(struct complete *complete) {
    free(complete->parts);
    pieces_deinit(&complete->pieces);
    *complete = (struct complete){0};
}
