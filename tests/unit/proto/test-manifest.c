/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/lines.h"
#include "proto/manifest.h"
#include "proto/pieces.h"
#include "tests/unit/proto/unit.h"

#include <errno.h>

#define CHUNK KIB(64)

static struct piece piece(const char *name, struct geometry geometry, uint64_t at) {
    return (struct piece){.name = strdup(name), .dtype = DTYPE_F32, .image_offset = at, .geometry = geometry};
}

static struct geometry rows(uint64_t offset, uint64_t extent) {
    return (struct geometry){.dims = 2, .shape = {8, 4}, .offset = {offset, 0}, .extent = {extent, 4}};
}

/* The part of one rank of `world`: 8 / world rows of "w", its generator, and rank 0's aliases. */
static struct manifest part(uint32_t rank, uint32_t world) {
    struct manifest manifest = {.summary = {
                                    .job = "train \"7\"",
                                    .run_id = "run-1",
                                    .generation = 3,
                                    .step = 1200,
                                    .rank = rank,
                                    .world = world,
                                    .image_size = 2 * CHUNK + 100,
                                    .data_length = 2 * CHUNK + 100,
                                    .chunk_size = CHUNK,
                                    .created_ns = UINT64_C(1700000000000000000) + rank,
                                }};
    manifest_data_name(rank, CODEC_RAW, manifest.summary.data_file);
    manifest.chunk_count = 3;
    manifest.chunks = calloc(3, sizeof *manifest.chunks);
    struct digest digests[3];
    for (uint64_t i = 0; i < 3; i++) {
        uint32_t length = i < 2 ? CHUNK : 100;
        manifest.chunks[i] =
            (struct manifest_chunk){.offset = i * CHUNK, .stored_length = length, .raw_length = length};
        digest_leaf(&(uint64_t){rank * 100 + i}, 8, &manifest.chunks[i].digest);
        digests[i] = manifest.chunks[i].digest;
    }
    digest_fold(digests, 3, &manifest.summary.image_digest);

    struct pieces *pieces = &manifest.pieces;
    pieces->items = calloc(5, sizeof *pieces->items);
    pieces->items[pieces->count++] = piece("w", rows(rank * (8 / world), 8 / world), 4096);
    pieces->items[pieces->count] = piece("rng", (struct geometry){.dims = 1, .shape = {16}, .extent = {16}}, 8192);
    pieces->items[pieces->count++].flags = SHARD_RANK_LOCAL;
    pieces->items[pieces->count] = piece("tied", rows(0, 8), 0);
    pieces->items[pieces->count].flags = SHARD_ALIAS;
    pieces->items[pieces->count++].target = strdup("w");
    pieces->items[pieces->count++] =
        piece("flat",
              (struct geometry){.is_range = true, .dims = 1, .shape = {100 * world}, .start = 100 * rank, .count = 100},
              9000);
    if (rank == 0)
        pieces->items[pieces->count++] = piece("scalar \xc3\xa9", (struct geometry){0}, 10000);
    for (size_t i = 0; i < pieces->count; i++)
        pieces->items[i].rank = rank;
    pieces->has_state = true;
    pieces->state_offset = 2 * CHUNK;
    pieces->state_length = 100;
    return manifest;
}

static void assert_same_pieces(const struct pieces *a, const struct pieces *b) {
    assert_int_equal(a->count, b->count);
    for (size_t i = 0; i < a->count; i++) {
        const struct piece *p = &a->items[i], *q = &b->items[i];
        assert_string_equal(p->name, q->name);
        assert_int_equal(p->target != NULL, q->target != NULL);
        if (p->target)
            assert_string_equal(p->target, q->target);
        assert_int_equal(p->dtype, q->dtype);
        assert_int_equal(p->flags, q->flags);
        assert_int_equal(p->rank, q->rank);
        assert_int_equal(p->image_offset, q->image_offset);
        assert_int_equal(p->geometry.is_range, q->geometry.is_range);
        assert_int_equal(p->geometry.dims, q->geometry.dims);
        assert_memory_equal(p->geometry.shape, q->geometry.shape, sizeof p->geometry.shape);
        assert_memory_equal(p->geometry.offset, q->geometry.offset, sizeof p->geometry.offset);
        assert_memory_equal(p->geometry.extent, q->geometry.extent, sizeof p->geometry.extent);
        assert_int_equal(p->geometry.start, q->geometry.start);
        assert_int_equal(p->geometry.count, q->geometry.count);
    }
}

/* Field by field: what lies between them is not part of the value. */
static void assert_same_summary(const struct manifest_summary *a, const struct manifest_summary *b) {
    assert_string_equal(a->job, b->job);
    assert_string_equal(a->run_id, b->run_id);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->world, b->world);
    assert_int_equal(a->absent, b->absent);
    assert_string_equal(a->reason, b->reason);
    assert_int_equal(a->image_size, b->image_size);
    assert_true(digest_equal(&a->image_digest, &b->image_digest));
    assert_string_equal(a->data_file, b->data_file);
    assert_int_equal(a->data_length, b->data_length);
    assert_int_equal(a->chunk_size, b->chunk_size);
    assert_int_equal(a->codec, b->codec);
    assert_int_equal(a->created_ns, b->created_ns);
}

static void assert_same_complete(const struct complete_summary *a, const struct complete_summary *b) {
    assert_string_equal(a->job, b->job);
    assert_string_equal(a->run_id, b->run_id);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->world, b->world);
    assert_int_equal(a->bytes, b->bytes);
    assert_int_equal(a->tensors, b->tensors);
    assert_int_equal(a->created_ns, b->created_ns);
}

static void assert_same_part(const struct complete_part *a, const struct complete_part *b) {
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->image_size, b->image_size);
    assert_true(digest_equal(&a->image_digest, &b->image_digest));
    assert_int_equal(a->chunk_size, b->chunk_size);
    assert_int_equal(a->state_offset, b->state_offset);
    assert_int_equal(a->state_length, b->state_length);
}

static void assert_same_record(const struct run_record *a, const struct run_record *b) {
    assert_string_equal(a->job, b->job);
    assert_string_equal(a->run_id, b->run_id);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->resumes, b->resumes);
    assert_int_equal(a->resume_generation, b->resume_generation);
    assert_int_equal(a->resume_step, b->resume_step);
    assert_string_equal(a->host, b->host);
    assert_string_equal(a->boot_id, b->boot_id);
    assert_int_equal(a->pid, b->pid);
    assert_int_equal(a->pid_start, b->pid_start);
    assert_int_equal(a->world, b->world);
}

static void test_manifest_round_trip(void **state) {
    struct manifest manifest = part(1, 2), again;
    struct manifest_summary summary;
    char *text, *text_again;
    size_t length, length_again;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    if (manifest_read(text, length, &again, &problem) < 0)
        fail_msg("%s", problem.text);
    assert_same_summary(&manifest.summary, &again.summary);
    assert_int_equal(again.chunk_count, 3);
    assert_memory_equal(manifest.chunks, again.chunks, 3 * sizeof *again.chunks);
    assert_same_pieces(&manifest.pieces, &again.pieces);
    assert_true(again.pieces.has_state);
    assert_int_equal(again.pieces.state_offset, 2 * CHUNK);
    assert_int_equal(again.pieces.state_length, 100);

    assert_int_equal(manifest_write(&again, &text_again, &length_again), 0);
    assert_int_equal(length, length_again);
    assert_memory_equal(text, text_again, length);
    free(text_again);

    /* Who only reads chunks: their table, and the pieces' is not parsed. */
    manifest_deinit(&again);
    assert_int_equal(manifest_read_chunks(text, length, &again, &problem), 0);
    assert_same_summary(&manifest.summary, &again.summary);
    assert_int_equal(again.chunk_count, 3);
    assert_memory_equal(manifest.chunks, again.chunks, 3 * sizeof *again.chunks);
    assert_int_equal(again.pieces.count, 0);

    /* The last line is of fixed width, the first is all that a scan reads. */
    assert_memory_equal(text + length - MANIFEST_TAIL_SIZE, "{\"digest\":\"", 11);
    assert_int_equal(text[length - MANIFEST_TAIL_SIZE - 1], '\n');
    assert_int_equal(manifest_read_summary(text, min_u64(length, MANIFEST_LINE_MAX), &summary, &problem), 0);
    assert_same_summary(&manifest.summary, &summary);
    free(text);
    manifest_deinit(&manifest);
    manifest_deinit(&again);
}

static void test_absent(void **state) {
    struct manifest manifest = {.summary = {.job = "j", .run_id = "r", .rank = 0, .world = 1, .absent = true}}, again;
    memset(manifest.summary.reason, 'x', MANIFEST_REASON_MAX - 1);
    manifest.summary.reason[MANIFEST_REASON_MAX - 2] = (char)0xc3; /* cut inside a character */
    char *text;
    size_t length;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    assert_int_equal(manifest_read(text, length, &again, NULL), 0);
    assert_true(again.summary.absent);
    assert_int_equal(strlen(again.summary.reason), MANIFEST_REASON_MAX - 2);
    assert_int_equal(again.chunk_count, 0);
    free(text);
    manifest_deinit(&again);
}

static void test_write_refusals(void **state) {
    char *text;
    size_t length;
    struct manifest manifest = {.summary = {.job = "j", .run_id = "r", .rank = 1, .world = 1, .absent = true}};
    assert_int_equal(manifest_write(&manifest, &text, &length), -EINVAL);
    manifest.summary.rank = 0;
    manifest.summary.step = UINT64_C(1) << 63;
    assert_int_equal(manifest_write(&manifest, &text, &length), -EINVAL);
    manifest.summary.step = INT64_MAX;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    free(text);
    manifest.summary.run_id[0] = (char)0xff;
    assert_int_equal(manifest_write(&manifest, &text, &length), -EINVAL);
}

static void test_every_flipped_bit_is_seen(void **state) {
    struct manifest manifest = part(0, 1), again;
    char *text;
    size_t length;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    for (size_t i = 0; i < length; i++)
        for (unsigned bit = 0; bit < 8; bit++) {
            text[i] ^= (char)(1 << bit);
            struct problem problem = PROBLEM_NONE;
            assert_int_equal(manifest_read(text, length, &again, &problem), -EBADMSG);
            assert_true(problem.text[0]);
            assert_int_equal(manifest_read_chunks(text, length, &again, NULL), -EBADMSG);
            text[i] ^= (char)(1 << bit);
        }
    for (size_t size = 0; size < length; size++)
        assert_int_equal(manifest_read(text, size, &again, NULL), -EBADMSG);
    free(text);
    manifest_deinit(&manifest);
}

/* Signs text again after a change: what an attacker with a keyboard can make. */
static char *resign(const char *text, size_t length, size_t *ret_length) {
    struct text out = TEXT_NONE;
    const char *newline = memchr(text, '\n', length);
    size_t first = newline ? (size_t)(newline - text) : length;
    text_append(&out, text, first > 46 ? first - 45 : first);
    lines_seal(&out, 0);
    if (newline && length > first + 1 + MANIFEST_TAIL_SIZE)
        text_append(&out, newline + 1, length - first - 1 - MANIFEST_TAIL_SIZE);
    lines_finish(&out);
    char *data;
    assert_int_equal(text_take(&out, &data, ret_length), 0);
    return data;
}

/* Replaces the first `from` by `to`, and signs. */
static char *edited(const char *text, const char *from, const char *to, size_t *ret_length) {
    const char *at = strstr(text, from);
    if (!at)
        fail_msg("no '%s' in '%s'", from, text);
    struct text out = TEXT_NONE;
    char *changed;
    size_t length;
    text_append(&out, text, (size_t)(at - text));
    text_add(&out, to);
    text_add(&out, at + strlen(from));
    assert_int_equal(text_take(&out, &changed, &length), 0);
    char *signed_text = resign(changed, length, ret_length);
    free(changed);
    return signed_text;
}

static void test_contradictions(void **state) {
    static const struct {
        const char *from, *to;
        int code;
    } edits[] = {
        {"\"version\":1", "\"version\":2", -ENOTSUP},
        {"\"version\":1", "\"version\":0", -EBADMSG},
        {"ckptd-manifest", "ckptd-complete", -EBADMSG},
        {"\"step\":1200", "\"step\":-1", -EBADMSG},
        {"\"step\":1200", "\"step\":1.5", -EBADMSG},
        {"\"step\":1200", "\"step\":9223372036854775808", -EBADMSG},
        {"\"rank\":0", "\"rank\":1", -EBADMSG},
        {"\"world\":1", "\"world\":4294967297", -EBADMSG},
        {"rank-00000.safetensors", "../00000.safetensors", -EBADMSG},
        {"rank-00000.safetensors", "rank-00001.safetensors", -EBADMSG},
        {"\"codec\":\"raw\"", "\"codec\":\"zip\"", -EBADMSG},
        {"\"codec\":\"raw\"", "\"codec\":\"lz4\"", -EBADMSG},
        {"\"image_size\":131172", "\"image_size\":131173", -EBADMSG},
        {"\"chunk_size\":65536", "\"chunk_size\":0", -EBADMSG},
        {"\"chunk_size\":65536", "\"chunk_size\":65537", -EBADMSG},
        {"\"chunks\":3", "\"chunks\":2", -EBADMSG},
        {"\"pieces\":5", "\"pieces\":4", -EBADMSG},
        {"\"pieces\":5", "\"pieces\":6", -EBADMSG},
        {"\"pieces\":5", "\"pieces\":9223372036854775807", -EBADMSG},
        {"\"state\":[131072,100]", "\"state\":[131072,101]", -EBADMSG},
        {"\"state\":[131072,100]", "\"state\":[131072]", -EBADMSG},
        {"[65536,65536,", "[65535,65536,", -EBADMSG},
        {"[65536,65536,", "[65536,65535,", -EBADMSG},
        {"\"at\":4096", "\"at\":131100", -EBADMSG},
        {"\"at\":4096", "\"at\":9223372036854775807", -EBADMSG},
        {"\"shape\":[8,4]", "\"shape\":[8,-4]", -EBADMSG},
        {"\"shape\":[16]", "\"shape\":[4611686018427387904]", -EBADMSG},
        {"\"range\":[0,100]", "\"range\":[1,100]", -EBADMSG},
        {"\"range\":[0,100]", "\"range\":[0,100],\"box\":[[0],[100]]", -EBADMSG},
        {"\"local\":true", "\"local\":false", -EBADMSG},
        {"\"alias\":\"w\"", "\"alias\":\"\"", -EBADMSG},
        {"\"F32\"", "\"F31\"", -EBADMSG},
        {"{\"name\":\"w\"", "{\"name\":\"\"", -EBADMSG},
        {"{\"name\":\"w\"", "{\"name\":\"w\",\"name\":\"v\"", -EBADMSG},
        {"{\"name\":\"w\"", "{\"name\":\"w\\u0000\"", -EBADMSG},
    };
    struct manifest manifest = part(0, 1), again;
    char *text;
    size_t length;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    char *same = edited(text, "ckptd", "ckptd", &length);
    assert_string_equal(same, text);
    free(same);
    for (size_t i = 0; i < ARRAY_SIZE(edits); i++) {
        char *changed = edited(text, edits[i].from, edits[i].to, &length);
        struct problem problem = PROBLEM_NONE;
        int r = manifest_read(changed, length, &again, &problem);
        if (r != edits[i].code)
            fail_msg("%s -> %s gave %d: %s", edits[i].from, edits[i].to, r, problem.text);
        assert_true(problem.text[0]);
        free(changed);
    }
    free(text);
    manifest_deinit(&manifest);
}

static void test_encoded(void **state) {
    struct manifest manifest = part(2, 4), again;
    manifest.summary.codec = CODEC_LZ4;
    manifest_data_name(2, CODEC_LZ4, manifest.summary.data_file);
    manifest.chunks[0].stored_length = 5000;
    manifest.chunks[1].offset = 8192;
    manifest.chunks[2].offset = 8192 + CHUNK;
    manifest.chunks[2].stored_length = 90;
    manifest.summary.data_length = 8192 + CHUNK + 90;
    char *text, *changed;
    size_t length, changed_length;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    if (manifest_read(text, length, &again, &problem) < 0)
        fail_msg("%s", problem.text);
    assert_string_equal(again.summary.data_file, "rank-00002.chunks");
    assert_memory_equal(manifest.chunks, again.chunks, 3 * sizeof *again.chunks);
    manifest_deinit(&again);
    static const char *const edits[][2] = {{"[8192,", "[8191,"},
                                           {"[8192,", "[4096,"},
                                           {"[0,5000,", "[0,65537,"},
                                           {"[0,5000,", "[0,0,"},
                                           {"[73728,90", "[73728,91"}};
    for (size_t i = 0; i < ARRAY_SIZE(edits); i++) {
        changed = edited(text, edits[i][0], edits[i][1], &changed_length);
        assert_int_equal(manifest_read(changed, changed_length, &again, NULL), -EBADMSG);
        free(changed);
    }
    free(text);
    manifest_deinit(&manifest);
}

static void version_new(struct manifest *manifests, uint32_t world) {
    for (uint32_t rank = 0; rank < world; rank++)
        manifests[rank] = part(rank, world);
}

static void version_free(struct manifest *manifests, uint32_t world) {
    for (uint32_t rank = 0; rank < world; rank++)
        manifest_deinit(&manifests[rank]);
}

static void test_complete_round_trip(void **state) {
    struct manifest manifests[4];
    struct complete complete, again;
    struct complete_summary summary;
    struct problem problem = PROBLEM_NONE;
    version_new(manifests, 4);
    if (complete_build(manifests, 4, &complete, &problem) < 0)
        fail_msg("%s", problem.text);
    assert_int_equal(complete.summary.tensors, 4); /* flat, scalar, tied, w */
    assert_int_equal(complete.summary.bytes, 4 * (2 * CHUNK + 100));
    assert_int_equal(complete.summary.created_ns, UINT64_C(1700000000000000003));
    assert_int_equal(complete.pieces.count, 4 + 4 + 1 + 1 + 4);
    static const char *const names[] = {"flat", "flat", "flat", "flat", "rng", "rng", "rng", "rng", "scalar \xc3\xa9",
                                        "tied", "w",    "w",    "w",    "w"};
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        assert_string_equal(complete.pieces.items[i].name, names[i]);

    char *text, *text_again;
    size_t length, length_again;
    assert_int_equal(complete_write(&complete, &text, &length), 0);
    if (complete_read(text, length, &again, &problem) < 0)
        fail_msg("%s", problem.text);
    assert_same_complete(&complete.summary, &again.summary);
    for (unsigned i = 0; i < 4; i++)
        assert_same_part(&complete.parts[i], &again.parts[i]);
    assert_same_pieces(&complete.pieces, &again.pieces);
    assert_int_equal(complete_write(&again, &text_again, &length_again), 0);
    assert_string_equal(text, text_again);
    assert_int_equal(complete_read_summary(text, min_u64(length, MANIFEST_LINE_MAX), &summary, NULL), 0);
    assert_same_complete(&complete.summary, &summary);
    free(text_again);

    /* From manifests that went through their files, the same bytes. */
    struct complete other;
    struct manifest reread[4];
    for (unsigned i = 0; i < 4; i++) {
        char *part_text;
        size_t part_length;
        assert_int_equal(manifest_write(&manifests[i], &part_text, &part_length), 0);
        assert_int_equal(manifest_read(part_text, part_length, &reread[i], NULL), 0);
        free(part_text);
    }
    assert_int_equal(complete_build(reread, 4, &other, NULL), 0);
    assert_int_equal(complete_write(&other, &text_again, &length_again), 0);
    assert_string_equal(text, text_again);
    free(text_again);
    complete_deinit(&other);
    version_free(reread, 4);

    for (size_t i = 0; i < length; i++) {
        text[i] ^= (char)(1 << i % 8);
        struct complete unused;
        assert_int_equal(complete_read(text, length, &unused, NULL), -EBADMSG);
        text[i] ^= (char)(1 << i % 8);
    }
    static const char *const edits[][2] = {
        {"\"world\":4", "\"world\":3"},
        {"\"world\":4", "\"world\":5"},
        {"\"world\":4", "\"world\":4294967295"},
        {"\"bytes\":524688", "\"bytes\":524689"},
        {"\"tensors\":4", "\"tensors\":5"},
        {"[1,131172", "[2,131172"},
        {"\"name\":\"flat\"", "\"name\":\"x\""},
        {"\"rank\":3", "\"rank\":4"},
        {"\"rank\":3", "\"rank\":0"},
        {"\"shape\":[400]", "\"shape\":[401]"},
        {"\"alias\":\"w\"", "\"alias\":\"v\""},
        {"\"at\":9000", "\"at\":131172"},
    };
    for (size_t i = 0; i < ARRAY_SIZE(edits); i++) {
        size_t changed_length;
        char *changed = edited(text, edits[i][0], edits[i][1], &changed_length);
        struct complete unused;
        if (complete_read(changed, changed_length, &unused, NULL) != -EBADMSG)
            fail_msg("%s -> %s was accepted", edits[i][0], edits[i][1]);
        free(changed);
    }
    free(text);
    complete_deinit(&complete);
    complete_deinit(&again);
    version_free(manifests, 4);
}

static void assert_conflict(struct manifest *manifests, uint32_t world, const char *const *words) {
    struct complete complete;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(complete_build(manifests, world, &complete, &problem), -EINVAL);
    for (; *words; words++)
        if (!strstr(problem.text, *words))
            fail_msg("'%s' does not say '%s'", problem.text, *words);
    version_free(manifests, world);
}

#define SAYS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_conflicts_are_named(void **state) {
    struct manifest manifests[4];
    version_new(manifests, 4);
    manifests[2].pieces.items[0].geometry.offset[0] = 3;
    assert_conflict(manifests, 4, SAYS("tensor w", "ranks 1 and 2", "overlap"));
    version_new(manifests, 4);
    manifests[2].pieces.items[0].geometry.extent[0] = 1;
    assert_conflict(manifests, 4, SAYS("tensor w", "gap", "ranks 0 to 3"));
    version_new(manifests, 4);
    manifests[3].pieces.items[0].dtype = DTYPE_F16;
    assert_conflict(manifests, 4, SAYS("tensor w", "ranks 0 and 3", "dtype"));
    version_new(manifests, 4);
    manifests[1].pieces.items[0].geometry.shape[0] = 9;
    assert_conflict(manifests, 4, SAYS("tensor w", "ranks 0 and 1", "shape"));
    version_new(manifests, 4);
    manifests[1].pieces.items[2].target[0] = 'x';
    assert_conflict(manifests, 4, SAYS("tensor tied", "ranks 0 and 1", "alias"));
    version_new(manifests, 4);
    for (unsigned i = 0; i < 4; i++)
        manifests[i].pieces.items[2].target[0] = 'x';
    assert_conflict(manifests, 4, SAYS("tensor tied", "alias of x", "no rank"));
    version_new(manifests, 4);
    manifests[1].summary.step++;
    assert_conflict(manifests, 4, SAYS("rank 1", "3/1201", "3/1200"));
    version_new(manifests, 4);
    manifests[1].summary.run_id[0] = 'R';
    assert_conflict(manifests, 4, SAYS("0 and 1", "different runs"));
    version_new(manifests, 4);
    manifests[1].summary.world = 5;
    assert_conflict(manifests, 4, SAYS("rank 1 of 5"));
    version_new(manifests, 4);
    manifests[3].summary.absent = true;
    strcpy(manifests[3].summary.reason, "the source died");
    assert_conflict(manifests, 4, SAYS("rank 3", "the source died"));

    /* Where it ends early, after aliases were merged, everything is still freed once. */
    version_new(manifests, 4);
    manifests[1].pieces.items[0].geometry.offset[0] = 0;
    assert_conflict(manifests, 4, SAYS("tensor w", "overlap"));
}

/* The same lines with a blank before each but the first and the last, signed again. */
static char *spaced(const char *text, size_t length, size_t *ret_length) {
    struct text out = TEXT_NONE;
    size_t end = length > MANIFEST_TAIL_SIZE ? length - MANIFEST_TAIL_SIZE : 0;
    char *changed;
    for (size_t i = 0; i < length; i++) {
        text_append(&out, &text[i], 1);
        if (text[i] == '\n' && i + 1 < end)
            text_add(&out, " ");
    }
    assert_int_equal(text_take(&out, &changed, &length), 0);
    char *signed_text = resign(changed, length, ret_length);
    free(changed);
    return signed_text;
}

/* Lines as we write them are taken apart without jansson, and others, as those that begin with a blank, with it: both
 * come to the same, whatever the lines say. */
static void test_two_ways(void **state) {
    struct random random = random_seeded("lines read in two ways");
    struct manifest manifests[2];
    struct complete complete;
    char *texts[2];
    size_t lengths[2], accepted = 0;
    version_new(manifests, 2);
    assert_int_equal(complete_build(manifests, 2, &complete, NULL), 0);
    assert_int_equal(manifest_write(&manifests[0], &texts[0], &lengths[0]), 0);
    assert_int_equal(complete_write(&complete, &texts[1], &lengths[1]), 0);
    for (unsigned round = 0; round < 30000; round++) {
        unsigned which = round % 2;
        size_t capacity = lengths[which] + 64, length, other_length;
        size_t first = (size_t)(strchr(texts[which], '\n') - texts[which]) + 1;
        size_t body = lengths[which] - first - MANIFEST_TAIL_SIZE;
        uint8_t *data = calloc(1, capacity + MANIFEST_TAIL_SIZE);
        memcpy(data, texts[which], lengths[which]);
        if (round >= 2) /* the two as they are, first */
            body = random_mutate(&random, data + first, body, body + 64);
        char *text = resign((char *)data, first + body + MANIFEST_TAIL_SIZE, &length);
        char *other = spaced(text, length, &other_length);
        int r, s;
        if (which == 0) {
            struct manifest one, two;
            r = manifest_read(text, length, &one, NULL);
            s = manifest_read(other, other_length, &two, NULL);
            if (r == 0 && s == 0) {
                assert_same_pieces(&one.pieces, &two.pieces);
                assert_memory_equal(one.chunks, two.chunks, one.chunk_count * sizeof *one.chunks);
            }
            if (r == 0)
                manifest_deinit(&one);
            if (s == 0)
                manifest_deinit(&two);
        } else {
            struct complete one, two;
            r = complete_read(text, length, &one, NULL);
            s = complete_read(other, other_length, &two, NULL);
            if (r == 0 && s == 0)
                assert_same_pieces(&one.pieces, &two.pieces);
            if (r == 0)
                complete_deinit(&one);
            if (s == 0)
                complete_deinit(&two);
        }
        if (r != s)
            fail_msg("%d and %d: %.*s", r, s, (int)length, text);
        assert_true(round >= 2 || r == 0);
        accepted += r == 0;
        free(text);
        free(other);
        free(data);
    }
    print_message("%zu of 30000 were still valid\n", accepted);
    free(texts[0]);
    free(texts[1]);
    complete_deinit(&complete);
    version_free(manifests, 2);
}

static void test_hostile(void **state) {
    struct random random = random_seeded("hostile manifests");
    struct manifest manifests[2];
    struct complete complete;
    char *texts[3];
    size_t lengths[3], accepted = 0;
    version_new(manifests, 2);
    assert_int_equal(complete_build(manifests, 2, &complete, NULL), 0);
    assert_int_equal(manifest_write(&manifests[0], &texts[0], &lengths[0]), 0);
    assert_int_equal(complete_write(&complete, &texts[1], &lengths[1]), 0);
    struct run_record record = {
        .job = "j", .run_id = "r", .generation = 7, .resumes = true, .host = "h", .boot_id = "b"};
    assert_int_equal(run_record_write(&record, &texts[2], &lengths[2]), 0);
    for (unsigned round = 0; round < 30000; round++) {
        unsigned which = round % 3;
        size_t capacity = lengths[which] + 64, length;
        uint8_t *data = malloc(capacity);
        memcpy(data, texts[which], lengths[which]);
        size_t size = random_mutate(&random, data, lengths[which], capacity);
        /* Signed again, or nothing but the digests would be tested; each in a block of its own size. */
        char *text = random_below(&random, 8) ? resign((char *)data, size, &length)
                                              : memcpy(malloc(size + 1), data, length = size);
        char *exact = malloc(max_u64(length, 1));
        memcpy(exact, text, length);
        struct problem problem = PROBLEM_NONE;
        int r;
        if (which == 0) {
            struct manifest manifest;
            struct manifest_summary summary;
            r = manifest_read_summary(exact, length, &summary, NULL);
            r = manifest_read(exact, length, &manifest, &problem);
            if (r == 0)
                manifest_deinit(&manifest);
        } else if (which == 1) {
            struct complete read;
            struct complete_summary summary;
            r = complete_read_summary(exact, length, &summary, NULL);
            r = complete_read(exact, length, &read, &problem);
            if (r == 0)
                complete_deinit(&read);
        } else {
            size_t first = memchr(exact, '\n', length) ? (size_t)((char *)memchr(exact, '\n', length) - exact) + 1 : 0;
            r = run_record_read(exact, first, &record, &problem);
        }
        assert_true(r == 0 || problem.text[0]);
        accepted += r == 0;
        free(exact);
        free(text);
        free(data);
    }
    print_message("%zu of 30000 were still valid\n", accepted);
    for (unsigned i = 0; i < 3; i++)
        free(texts[i]);
    complete_deinit(&complete);
    version_free(manifests, 2);
}

static void test_deep_nesting(void **state) {
    struct text text = TEXT_NONE;
    char *data;
    size_t length;
    text_add(&text, "{\"format\":");
    for (unsigned i = 0; i < 100000; i++)
        text_add(&text, "[");
    lines_seal(&text, 0);
    assert_int_equal(text_take(&text, &data, &length), 0);
    struct manifest_summary summary;
    assert_int_equal(manifest_read_summary(data, length, &summary, NULL), -EBADMSG);
    free(data);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_a_hundred_thousand(void **state) {
    enum { COUNT = 100000 };
    struct manifest manifest = part(0, 1), again;
    struct complete complete, complete_again;
    pieces_deinit(&manifest.pieces);
    manifest.pieces.items = calloc(COUNT, sizeof *manifest.pieces.items);
    manifest.pieces.count = COUNT;
    for (unsigned i = 0; i < COUNT; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%u.weight", i);
        manifest.pieces.items[i] = piece(name, (struct geometry){0}, 4096);
    }
    char *text;
    size_t length;
    double start = seconds();
    assert_int_equal(manifest_write(&manifest, &text, &length), 0);
    double written = seconds();
    assert_int_equal(manifest_read(text, length, &again, NULL), 0);
    double read = seconds();
    print_message("manifest of %d pieces: %zu bytes, written in %.2f s, read in %.2f s\n", COUNT, length,
                  written - start, read - written);
    free(text);
    start = seconds();
    assert_int_equal(complete_build(&again, 1, &complete, NULL), 0);
    double built = seconds();
    assert_int_equal(complete_write(&complete, &text, &length), 0);
    written = seconds();
    assert_int_equal(complete_read(text, length, &complete_again, NULL), 0);
    print_message("complete.json of them: built in %.2f s, written in %.2f s, read in %.2f s\n", built - start,
                  written - built, seconds() - written);
    assert_int_equal(complete_again.summary.tensors, COUNT);
    free(text);
    complete_deinit(&complete);
    complete_deinit(&complete_again);
    manifest_deinit(&manifest);
    manifest_deinit(&again);
}

static void test_run_record(void **state) {
    struct run_record record = {
        .job = "job/\xc3\xa9",
        .run_id = "4711.0.2",
        .generation = 12,
        .resumes = true,
        .resume_generation = 11,
        .resume_step = INT64_MAX,
        .host = "node17",
        .boot_id = "c2f8c1a2-9a57-4c9b-8e1b-0d5f5f1b7a11",
        .pid = 4242,
        .pid_start = 123456789,
        .world = 512,
    };
    struct run_record again;
    char *text;
    size_t length;
    assert_int_equal(run_record_write(&record, &text, &length), 0);
    assert_ptr_equal(memchr(text, '\n', length), text + length - 1);
    assert_int_equal(run_record_read(text, length, &again, NULL), 0);
    assert_same_record(&record, &again);
    for (size_t i = 0; i < length; i++) {
        text[i] ^= 4;
        assert_int_equal(run_record_read(text, length, &again, NULL), -EBADMSG);
        text[i] ^= 4;
        assert_int_equal(run_record_read(text, i, &again, NULL), -EBADMSG);
    }
    free(text);
    record.resumes = false;
    record.resume_generation = record.resume_step = 0;
    assert_int_equal(run_record_write(&record, &text, &length), 0);
    assert_int_equal(run_record_read(text, length, &again, NULL), 0);
    assert_same_record(&record, &again);
    free(text);
}

static void test_job_names(void **state) {
    static const char *const pairs[][2] = {
        {"train", "train"}, {"a.b-c_D9", "a.b-c_D9"}, {".hidden", "%2Ehidden"},          {"..", "%2E."},
        {"a/b", "a%2Fb"},   {"%41", "%2541"},         {"\xc3\xa9 x\n", "%C3%A9%20x%0A"}, {"~", "%7E"},
    };
    char directory[256], job[MANIFEST_JOB_MAX], long_name[300];
    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        assert_int_equal(job_escape(pairs[i][0], directory, NULL), 0);
        assert_string_equal(directory, pairs[i][1]);
        assert_int_equal(job_unescape(directory, job), 0);
        assert_string_equal(job, pairs[i][0]);
    }
    memset(long_name, 'x', 299);
    long_name[299] = '\0';
    assert_int_equal(job_escape(long_name, directory, NULL), -EINVAL);
    long_name[255] = '\0';
    assert_int_equal(job_escape(long_name, directory, NULL), 0);
    assert_int_equal(job_unescape(directory, job), 0);
    long_name[0] = ' ';
    assert_int_equal(job_escape(long_name, directory, NULL), -EINVAL);
    assert_int_equal(job_escape("", directory, NULL), -EINVAL);
    assert_int_equal(job_escape("\xff", directory, NULL), -EINVAL);
    static const char *const none[] = {"",    ".",    "..",  ".x",  "%",   "%4", "%41", "%2f",
                                       "%00", "a%00", "a b", "%FF", "a/b", "%2", "a%2"};
    for (size_t i = 0; i < ARRAY_SIZE(none); i++)
        assert_int_equal(job_unescape(none[i], job), -EINVAL);

    struct random random = random_seeded("job names");
    for (unsigned round = 0; round < 100000; round++) {
        size_t length = random_below(&random, 300);
        char *name = malloc(length + 1);
        for (size_t i = 0; i < length; i++)
            name[i] = random_below(&random, 2) ? "%2EFafx."[random_below(&random, 8)]
                                               : (char)(1 + random_below(&random, 255));
        name[length] = '\0';
        if (job_unescape(name, job) == 0) {
            assert_int_equal(job_escape(job, directory, NULL), 0);
            assert_string_equal(directory, name);
        }
        if (job_escape(name, directory, NULL) == 0) {
            assert_int_equal(job_unescape(directory, job), 0);
            assert_string_equal(job, name);
        }
        free(name);
    }
}

static void test_file_names(void **state) {
    char name[32], data[64];
    manifest_file_name(7, name);
    assert_string_equal(name, "rank-00007.json");
    manifest_file_name(UINT32_MAX, name);
    assert_string_equal(name, "rank-4294967295.json");
    manifest_data_name(7, CODEC_RAW, data);
    assert_string_equal(data, "rank-00007.safetensors");
    manifest_data_name(123456, CODEC_LZ4, data);
    assert_string_equal(data, "rank-123456.chunks");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_manifest_round_trip),
        cmocka_unit_test(test_absent),
        cmocka_unit_test(test_write_refusals),
        cmocka_unit_test(test_every_flipped_bit_is_seen),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_encoded),
        cmocka_unit_test(test_complete_round_trip),
        cmocka_unit_test(test_conflicts_are_named),
        cmocka_unit_test(test_two_ways),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_deep_nesting),
        cmocka_unit_test(test_a_hundred_thousand),
        cmocka_unit_test(test_run_record),
        cmocka_unit_test(test_job_names),
        cmocka_unit_test(test_file_names),
    };
    return cmocka_run_group_tests_name("manifest", tests, NULL, NULL);
}
