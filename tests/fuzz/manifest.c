/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Manifests, as they are and with digests that match.
 *
 * What is read keeps the bounds that readers of chunks and pieces rely on, and written again it reads
 * and writes the same. Its summary alone is read from its first 4096 bytes. If it is all of a version,
 * and its pieces fit together, then the complete.json that is made of it can be read. White space between
 * its tokens changes nothing.
 */
#include "proto/manifest.h"

#include "proto/pieces.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>

static void check_bounds(const struct manifest *manifest) {
    const struct manifest_summary *summary = &manifest->summary;
    uint64_t raw = 0, end = 0;
    for (size_t i = 0; i < manifest->chunk_count; i++) {
        const struct manifest_chunk *chunk = &manifest->chunks[i];
        assert(chunk->raw_length > 0 && chunk->raw_length <= summary->chunk_size);
        assert(i + 1 == manifest->chunk_count || chunk->raw_length == summary->chunk_size);
        assert(chunk->stored_length > 0 && chunk->stored_length <= chunk->raw_length && chunk->offset >= end);
        raw += chunk->raw_length;
        end = chunk->offset + chunk->stored_length;
    }
    assert(raw == summary->image_size && end <= summary->data_length);
    for (size_t i = 0; i < manifest->pieces.count; i++) {
        const struct piece *piece = &manifest->pieces.items[i];
        assert(geometry_valid(&piece->geometry, dtype_size(piece->dtype)) && piece->rank == summary->rank);
        assert(piece->image_offset <= raw && piece_bytes(piece) <= raw - piece->image_offset);
    }
    if (manifest->pieces.has_state)
        assert(manifest->pieces.state_offset <= raw &&
               manifest->pieces.state_length <= raw - manifest->pieces.state_offset);
}

static void check_same(const struct manifest *a, const struct manifest *b) {
    const struct manifest_summary *one = &a->summary, *other = &b->summary;
    assert(strcmp(one->job, other->job) == 0 && strcmp(one->run_id, other->run_id) == 0);
    assert(one->generation == other->generation && one->step == other->step && one->rank == other->rank);
    assert(one->world == other->world && one->created_ns == other->created_ns && one->absent == other->absent);
    assert(one->image_size == other->image_size && digest_equal(&one->image_digest, &other->image_digest));
    assert(one->data_length == other->data_length && one->chunk_size == other->chunk_size);
    assert(one->codec == other->codec && strcmp(one->data_file, other->data_file) == 0);
    assert(strcmp(one->reason, other->reason) == 0 && a->chunk_count == b->chunk_count);
    assert(a->pieces.count == b->pieces.count && a->pieces.has_state == b->pieces.has_state);
    assert(a->pieces.state_offset == b->pieces.state_offset && a->pieces.state_length == b->pieces.state_length);
    for (size_t i = 0; i < a->chunk_count; i++)
        assert(a->chunks[i].offset == b->chunks[i].offset && digest_equal(&a->chunks[i].digest, &b->chunks[i].digest) &&
               a->chunks[i].stored_length == b->chunks[i].stored_length);
    for (size_t i = 0; i < a->pieces.count; i++)
        assert(piece_compare(&a->pieces.items[i], &b->pieces.items[i]) == 0);
}

static void check_again(const struct manifest *manifest) {
    CLEANUP(freep) char *text = NULL, *again = NULL;
    CLEANUP(manifest_deinit) struct manifest same = {0};
    size_t length, again_length;
    int r = manifest_write(manifest, &text, &length);
    assert(r == 0 || r == -E2BIG); /* escapes may be longer than they were */
    if (r < 0)
        return;
    r = manifest_read(text, length, &same, NULL);
    assert(r == 0);
    check_same(manifest, &same);
    r = manifest_write(&same, &again, &again_length);
    assert(r == 0 && again_length == length && memcmp(text, again, length) == 0);
}

/* Who reads more reads less, too. */
static void check_chunks(const char *data, size_t size, const struct manifest *manifest) {
    CLEANUP(manifest_deinit) struct manifest chunks = {0};
    int r = manifest_read_chunks(data, size, &chunks, NULL);
    assert(r == 0 && chunks.pieces.count == 0 && chunks.chunk_count == manifest->chunk_count);
    for (size_t i = 0; i < chunks.chunk_count; i++)
        assert(chunks.chunks[i].offset == manifest->chunks[i].offset &&
               digest_equal(&chunks.chunks[i].digest, &manifest->chunks[i].digest));
}

static void check_complete(const struct manifest *manifest) {
    CLEANUP(complete_deinit) struct complete complete = {0}, same = {0};
    CLEANUP(freep) char *text = NULL;
    struct problem problem = PROBLEM_NONE;
    size_t length;
    int r = complete_build(manifest, 1, &complete, &problem);
    assert(r == 0 || (r == -EINVAL && problem.text[0]));
    if (r == 0)
        r = complete_write(&complete, &text, &length);
    assert(r <= 0);
    if (r == 0)
        r = complete_read(text, length, &same, &problem);
    assert(r == 0 || r == -E2BIG || r == -EINVAL);
}

static void check(const char *data, size_t size) {
    CLEANUP(manifest_deinit) struct manifest manifest = {0};
    struct manifest_summary summary;
    struct problem problem = PROBLEM_NONE, summary_problem = PROBLEM_NONE;
    int summary_result = manifest_read_summary(data, min_u64(size, MANIFEST_LINE_MAX), &summary, &summary_problem);
    int r = manifest_read(data, size, &manifest, &problem);
    assert((r == 0 || r == -EBADMSG || r == -ENOTSUP) && (r == 0) == !problem.text[0]);
    assert((summary_result == 0) == !summary_problem.text[0]);
    assert(r < 0 || summary_result == 0);
    if (r < 0)
        return;
    assert(manifest.summary.absent || manifest.summary.image_size > 0);
    if (!manifest.summary.absent)
        check_bounds(&manifest);
    check_chunks(data, size, &manifest);
    check_again(&manifest);
    if (manifest.summary.world == 1)
        check_complete(&manifest);
}

static void check_two_ways(const char *data, size_t size) {
    CLEANUP(manifest_deinit) struct manifest one = {0}, other = {0};
    CLEANUP(freep) char *text = NULL, *same = NULL;
    size_t spaced_size, length = 0, same_length = 0;
    CLEANUP(freep) char *spaced = fuzz_spaced(data, size, &spaced_size);
    int r = manifest_read(data, size, &one, NULL), s = manifest_read(spaced, spaced_size, &other, NULL);
    assert(r == s);
    if (r < 0)
        return;
    r = manifest_write(&one, &text, &length);
    s = manifest_write(&other, &same, &same_length);
    assert(r == s && length == same_length && (r < 0 || memcmp(text, same, length) == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t sealed_size;
    CLEANUP(freep) char *sealed = fuzz_seal(data, size, &sealed_size);
    check((const char *)data, size);
    check(sealed, sealed_size);
    check_two_ways(sealed, sealed_size);
    return 0;
}
