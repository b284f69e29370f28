/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/manifest.h"

#include "proto/lines.h"
#include "proto/pieces.h"

#include <errno.h>

/*
 * rank-N.json: the sealed line, one line per chunk, one per piece, the last line. Each line is
 * parsed alone, so that a manifest of a million pieces needs no tree of them.
 */

#define MANIFEST_FORMAT "ckptd-manifest"
#define CHUNK_SIZE_MAX GIB(1)
#define CHUNK_LINE_MIN 40 /* bytes of the shortest line of a chunk, and of a piece: bounds what a count may claim */
#define PIECE_LINE_MIN 40
#define ENCODED_ALIGNMENT 4096

static const char *codec_name(enum codec codec) { return codec == CODEC_LZ4 ? "lz4" : "raw"; }

void manifest_file_name(uint32_t rank, char ret_name[32]) { snprintf(ret_name, 32, "rank-%05u.json", rank); }

void manifest_data_name(uint32_t rank, enum codec codec, char ret_name[64]) {
    snprintf(ret_name, 64, "rank-%05u.%s", rank, codec == CODEC_RAW ? "safetensors" : "chunks");
}

static uint64_t chunks_in(uint64_t size, uint32_t chunk_size) { return (size + chunk_size - 1) / chunk_size; }

static bool strings_valid(const struct manifest_summary *summary) {
    return text_is_utf8(summary->job, strlen(summary->job)) && text_is_utf8(summary->run_id, strlen(summary->run_id));
}

static void reason_write(const char *reason, struct text *text) {
    /* It may have been cut to fit, inside a character. */
    size_t length = strnlen(reason, MANIFEST_REASON_MAX - 1);
    while (!text_is_utf8(reason, length))
        length--;
    text_add(text, ",\"absent\":");
    text_add_quoted(text, reason, length);
}

static void summary_write(const struct manifest *manifest, struct text *text) {
    const struct manifest_summary *summary = &manifest->summary;
    text_add(text, "{\"format\":\"" MANIFEST_FORMAT "\"");
    lines_add_number(text, "version", MANIFEST_FORMAT_VERSION);
    lines_add_text(text, "job", summary->job);
    lines_add_text(text, "run", summary->run_id);
    lines_add_number(text, "generation", summary->generation);
    lines_add_number(text, "step", summary->step);
    lines_add_number(text, "rank", summary->rank);
    lines_add_number(text, "world", summary->world);
    lines_add_number(text, "created_ns", summary->created_ns);
    if (summary->absent) {
        reason_write(summary->reason, text);
    } else {
        lines_add_number(text, "image_size", summary->image_size);
        lines_add_digest(text, "image_digest", &summary->image_digest);
        lines_add_text(text, "file", summary->data_file);
        lines_add_number(text, "file_length", summary->data_length);
        lines_add_text(text, "codec", codec_name(summary->codec));
        lines_add_number(text, "chunk_size", summary->chunk_size);
        lines_add_number(text, "chunks", manifest->chunk_count);
        lines_add_number(text, "pieces", manifest->pieces.count);
        if (manifest->pieces.has_state) {
            text_add(text, ",\"state\":");
            text_add_numbers(text, (uint64_t[]){manifest->pieces.state_offset, manifest->pieces.state_length}, 2);
        }
    }
    lines_seal(text, 0);
}

static void chunk_write(const struct manifest_chunk *chunk, struct text *text) {
    char hex[DIGEST_HEX_SIZE];
    digest_hex(&chunk->digest, hex);
    text_add(text, "[");
    text_add_number(text, chunk->offset);
    text_add(text, ",");
    text_add_number(text, chunk->stored_length);
    text_add(text, ",\"");
    text_add(text, hex);
    text_add(text, "\"]\n");
}

int manifest_write(const struct manifest *manifest, char **ret_text, size_t *ret_length) {
    const struct manifest_summary *summary = &manifest->summary;
    if (!strings_valid(summary) || summary->generation > LINES_NUMBER_MAX || summary->step > LINES_NUMBER_MAX ||
        summary->created_ns > LINES_NUMBER_MAX || summary->rank >= summary->world || summary->codec == CODEC_AUTO)
        return -EINVAL;
    CLEANUP(text_deinit) struct text text = TEXT_NONE;
    summary_write(manifest, &text);
    if (!text.failed && text.length > MANIFEST_LINE_MAX)
        return -E2BIG;
    if (!summary->absent) {
        for (size_t i = 0; i < manifest->chunk_count; i++)
            chunk_write(&manifest->chunks[i], &text);
        for (size_t i = 0; i < manifest->pieces.count; i++)
            piece_write(&manifest->pieces.items[i], false, &text);
    }
    lines_finish(&text);
    if (text.length > MANIFEST_FILE_MAX)
        return -E2BIG;
    return text_take(&text, ret_text, ret_length);
}

struct tables { /* what line 1 says about the lines that follow */
    uint64_t chunks, pieces;
    bool has_state;
    uint64_t state_offset, state_length;
};

static bool codec_read(const json_t *object, enum codec *ret_codec) {
    const char *name = json_string_value(json_object_get(object, "codec"));
    if (!name || (strcmp(name, "raw") != 0 && strcmp(name, "lz4") != 0))
        return false;
    *ret_codec = strcmp(name, "raw") == 0 ? CODEC_RAW : CODEC_LZ4;
    return true;
}

static bool state_read(const json_t *object, uint64_t image_size, struct tables *tables) {
    const json_t *state = json_object_get(object, "state");
    if (!state)
        return true;
    tables->has_state = true;
    return json_is_array(state) && json_array_size(state) == 2 &&
           lines_number(json_array_get(state, 0), image_size, &tables->state_offset) &&
           lines_number(json_array_get(state, 1), image_size - tables->state_offset, &tables->state_length) &&
           tables->state_length > 0;
}

static bool present_read(const json_t *object, struct manifest_summary *summary, struct tables *tables) {
    char expected[64];
    uint64_t chunk_size;
    if (!lines_field_number(object, "image_size", LINES_NUMBER_MAX, &summary->image_size) ||
        !lines_field_digest(object, "image_digest", &summary->image_digest) ||
        !lines_field_text(object, "file", summary->data_file, sizeof summary->data_file) ||
        !lines_field_number(object, "file_length", LINES_NUMBER_MAX, &summary->data_length) ||
        !codec_read(object, &summary->codec) ||
        !lines_field_number(object, "chunk_size", CHUNK_SIZE_MAX, &chunk_size) ||
        !lines_field_number(object, "chunks", LINES_NUMBER_MAX, &tables->chunks) ||
        !lines_field_number(object, "pieces", LINES_NUMBER_MAX, &tables->pieces))
        return false;
    summary->chunk_size = (uint32_t)chunk_size;
    manifest_data_name(summary->rank, summary->codec, expected);
    return summary->image_size > 0 && chunk_size > 0 && strcmp(summary->data_file, expected) == 0 &&
           tables->chunks == chunks_in(summary->image_size, summary->chunk_size) &&
           (summary->codec != CODEC_RAW || summary->data_length == summary->image_size) &&
           state_read(object, summary->image_size, tables);
}

static int summary_read(const char *data, size_t size, struct manifest_summary *ret_summary, struct tables *ret_tables,
                        size_t *ret_length, struct problem *problem) {
    json_auto_t *object = NULL;
    int r = lines_read_sealed(data, size, MANIFEST_LINE_MAX, MANIFEST_FORMAT, MANIFEST_FORMAT_VERSION, &object,
                              ret_length, problem);
    if (r < 0)
        return r;
    struct manifest_summary summary = {0};
    struct tables tables = {0};
    if (!lines_field_text(object, "job", summary.job, sizeof summary.job) ||
        !lines_field_text(object, "run", summary.run_id, sizeof summary.run_id) ||
        !lines_field_number(object, "generation", LINES_NUMBER_MAX, &summary.generation) ||
        !lines_field_number(object, "step", LINES_NUMBER_MAX, &summary.step) ||
        !lines_field_u32(object, "rank", &summary.rank) || !lines_field_u32(object, "world", &summary.world) ||
        summary.rank >= summary.world ||
        !lines_field_number(object, "created_ns", LINES_NUMBER_MAX, &summary.created_ns))
        return problem_set(problem, -EBADMSG,
                           MANIFEST_FORMAT ": a field of the first line is missing or out of bounds");
    if (json_object_get(object, "absent")) {
        summary.absent = true;
        if (!lines_field_text(object, "absent", summary.reason, sizeof summary.reason))
            return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": \"absent\" is not a reason");
    } else if (!present_read(object, &summary, &tables)) {
        return problem_set(problem, -EBADMSG,
                           MANIFEST_FORMAT ": the first line contradicts itself about image and file");
    }
    *ret_summary = summary;
    *ret_tables = tables;
    return 0;
}

int manifest_read_summary(const char *data, size_t size, struct manifest_summary *ret_summary,
                          struct problem *problem) {
    struct tables tables;
    size_t length;
    return summary_read(data, size, ret_summary, &tables, &length, problem);
}

static bool chunk_scan(const char *line, size_t length, struct manifest_chunk *chunk, uint64_t *ret_stored) {
    struct lines_scan scan = {line, line + length};
    return lines_scan_is(&scan, "[") && lines_scan_number(&scan, &chunk->offset) && lines_scan_is(&scan, ",") &&
           lines_scan_number(&scan, ret_stored) && lines_scan_is(&scan, ",") &&
           lines_scan_digest(&scan, &chunk->digest) && lines_scan_is(&scan, "]") && scan.at == scan.end;
}

static bool chunk_parse(const char *line, size_t length, struct manifest_chunk *chunk, uint64_t *ret_stored) {
    json_auto_t *array = lines_parse(line, length);
    return json_is_array(array) && json_array_size(array) == 3 &&
           lines_number(json_array_get(array, 0), LINES_NUMBER_MAX, &chunk->offset) &&
           lines_number(json_array_get(array, 1), LINES_NUMBER_MAX, ret_stored) &&
           lines_digest(json_array_get(array, 2), &chunk->digest);
}

/* Chunk i, where the encoded ones before it end at *end. */
static bool chunk_read(const char *line, size_t length, const struct manifest_summary *summary, uint64_t i,
                       uint64_t *end, struct manifest_chunk *ret_chunk) {
    struct manifest_chunk chunk = {0};
    uint64_t stored;
    uint64_t raw = min_u64(summary->image_size - i * summary->chunk_size, summary->chunk_size);
    if (!chunk_scan(line, length, &chunk, &stored) && !chunk_parse(line, length, &chunk, &stored))
        return false;
    if (chunk.offset > summary->data_length || stored > min_u64(raw, summary->data_length - chunk.offset) ||
        stored == 0)
        return false;
    if (summary->codec == CODEC_RAW ? chunk.offset != i * summary->chunk_size || stored != raw
                                    : chunk.offset % ENCODED_ALIGNMENT != 0 || chunk.offset < *end)
        return false;
    chunk.stored_length = (uint32_t)stored;
    chunk.raw_length = (uint32_t)raw;
    *end = chunk.offset + stored;
    *ret_chunk = chunk;
    return true;
}

static int chunks_read(const char **data, size_t *size, uint64_t count, struct manifest *manifest,
                       struct problem *problem) {
    if (count > *size / CHUNK_LINE_MIN)
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": no room for %llu chunks", (unsigned long long)count);
    manifest->chunks = calloc(count, sizeof *manifest->chunks);
    CLEANUP(freep) struct digest *digests = calloc(count, sizeof *digests);
    if (!manifest->chunks || !digests)
        return problem_set(problem, -ENOMEM, "out of memory for a table of %llu chunks", (unsigned long long)count);
    uint64_t end = 0;
    for (uint64_t i = 0; i < count; i++) {
        const char *line;
        size_t length;
        if (!lines_next(data, size, &line, &length) ||
            !chunk_read(line, length, &manifest->summary, i, &end, &manifest->chunks[i]))
            return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": chunk %llu is not as it should be",
                               (unsigned long long)i);
        digests[i] = manifest->chunks[i].digest;
    }
    manifest->chunk_count = count;
    struct digest fold;
    digest_fold(digests, count, &fold);
    if (!digest_equal(&fold, &manifest->summary.image_digest))
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": the image's digest is not that of its chunks");
    return 0;
}

static int pieces_read(const char **data, size_t *size, const struct tables *tables, struct manifest *manifest,
                       struct problem *problem) {
    struct pieces *pieces = &manifest->pieces;
    if (tables->pieces > *size / PIECE_LINE_MIN)
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": no room for %llu pieces",
                           (unsigned long long)tables->pieces);
    pieces->has_state = tables->has_state;
    pieces->state_offset = tables->state_offset;
    pieces->state_length = tables->state_length;
    pieces->items = calloc(max_u64(tables->pieces, 1), sizeof *pieces->items);
    if (!pieces->items)
        return problem_set(problem, -ENOMEM, "out of memory for a table of %llu pieces",
                           (unsigned long long)tables->pieces);
    for (; pieces->count < tables->pieces; pieces->count++) {
        const char *line;
        size_t length;
        struct piece *piece = &pieces->items[pieces->count];
        if (!lines_next(data, size, &line, &length))
            return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": pieces are missing");
        int r = piece_read(line, length, &manifest->summary.rank, piece, problem);
        if (r < 0)
            return r;
        if (piece->image_offset > manifest->summary.image_size ||
            piece_bytes(piece) > manifest->summary.image_size - piece->image_offset) {
            pieces->count++; /* the piece is ours to free now */
            return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": tensor %s leaves the image", piece->name);
        }
    }
    return 0;
}

/* The whole file is verified; `with_pieces` says whether their table is parsed, too. */
static int read_all(const char *data, size_t size, bool with_pieces, struct manifest *ret_manifest,
                    struct problem *problem) {
    CLEANUP(manifest_deinit) struct manifest manifest = {0};
    struct tables tables;
    size_t length;
    if (size > MANIFEST_FILE_MAX)
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": the file is over the limit of %llu bytes",
                           (unsigned long long)MANIFEST_FILE_MAX);
    int r = summary_read(data, size, &manifest.summary, &tables, &length, problem);
    if (r < 0)
        return r;
    r = lines_check_finish(data, size, MANIFEST_FORMAT, &size, problem);
    if (r < 0)
        return r;
    if (size < length)
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": there is only one line");
    data += length;
    size -= length;
    if (!manifest.summary.absent) {
        r = chunks_read(&data, &size, tables.chunks, &manifest, problem);
        if (r < 0)
            return r;
        if (with_pieces)
            r = pieces_read(&data, &size, &tables, &manifest, problem);
        if (r < 0)
            return r;
    }
    if (size && (with_pieces || manifest.summary.absent))
        return problem_set(problem, -EBADMSG, MANIFEST_FORMAT ": there are more lines than the first one says");
    *ret_manifest = manifest;
    manifest = (struct manifest){0};
    return 0;
}

int manifest_read(const char *data, size_t size, struct manifest *ret_manifest, struct problem *problem) {
    return read_all(data, size, true, ret_manifest, problem);
}

int manifest_read_chunks(const char *data, size_t size, struct manifest *ret_manifest, struct problem *problem) {
    return read_all(data, size, false, ret_manifest, problem);
}

void manifest_deinit(struct manifest *manifest) {
    free(manifest->chunks);
    pieces_deinit(&manifest->pieces);
    *manifest = (struct manifest){0};
}
