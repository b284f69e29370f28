/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/catalog.h"
#include "tiers/codec.h"
#include "tiers/commit.h"

#include <errno.h>
#include <inttypes.h>

/*
 * Chunks: reading, verifying, copying. A chunk that was read is always digested, also right after
 * it was written, because this is the only place where the disk, the controller, the network and
 * the codec are all checked at once.
 */

/* "tier local: /root/job/1/20/rank-00003.safetensors, chunk 7: why" */
static int bad_chunk(struct problem *problem, const struct tier *tier, const struct manifest *manifest, uint32_t index,
                     int code, const char *why) {
    const struct manifest_summary *summary = &manifest->summary;
    char escaped[256], path[TIER_PATH_MAX], text[TIER_PATH_MAX * 2];
    if (job_escape(summary->job, escaped, NULL) != 0)
        strcpy(escaped, "?");
    layout_file(escaped, (struct version_id){summary->generation, summary->step}, summary->data_file, path);
    tier_path_text(tier, path, text);
    return problem_set(problem, code, "tier %s: %.300s, chunk %" PRIu32 ": %s", tier->name, text, index, why);
}

int catalog_read_chunk(struct tier_file *file, const struct manifest *manifest, uint32_t index, void *data,
                       void *scratch, struct problem *problem) {
    assert(index < manifest->chunk_count);
    const struct manifest_chunk *chunk = &manifest->chunks[index];
    bool encoded = chunk->stored_length != chunk->raw_length;
    if (chunk->stored_length > chunk->raw_length)
        return bad_chunk(problem, file->tier, manifest, index, -EBADMSG, "it is stored longer than it is");
    assert(!encoded || scratch);
    void *target = encoded ? scratch : data;
    size_t got;
    int r = tier_read(file, target, align_up(chunk->stored_length, TIER_ALIGNMENT), chunk->offset, &got);
    if (r)
        return bad_chunk(problem, file->tier, manifest, index, r, strerror(-r));
    if (got < chunk->stored_length)
        return bad_chunk(problem, file->tier, manifest, index, -EBADMSG, "the file ends before it");
    if (encoded) {
        r = codec_decode(manifest->summary.codec, scratch, chunk->stored_length, data, chunk->raw_length);
        if (r)
            return bad_chunk(problem, file->tier, manifest, index, r, "the bytes are damaged, they cannot be decoded");
    }
    struct digest digest;
    digest_chunk(data, chunk->raw_length, &digest);
    if (!digest_equal(&digest, &chunk->digest))
        return bad_chunk(problem, file->tier, manifest, index, -EBADMSG,
                         "the bytes are damaged, their digest is not that of the manifest");
    return 0;
}

/* A part that is open for reading, with room for one chunk. */
struct part {
    struct manifest manifest;
    struct tier_file file;
    bool open;
    char *data, *scratch;
};

static void part_deinit(struct part *part) {
    if (part->open)
        (void)tier_close(&part->file);
    manifest_deinit(&part->manifest);
    free(part->data);
    free(part->scratch);
}

static int part_open(struct part *part, struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                     struct problem *problem) {
    int r = catalog_read_manifest(tier, job, version, rank, &part->manifest, problem);
    if (r)
        return r;
    const struct manifest_summary *summary = &part->manifest.summary;
    if (summary->absent)
        return TIER_E_ABSENT;
    uint64_t largest = 1;
    for (size_t i = 0; i < part->manifest.chunk_count; i++)
        largest = max_u64(largest, part->manifest.chunks[i].raw_length);
    largest = align_up(largest, TIER_ALIGNMENT);
    part->data = aligned_alloc(TIER_ALIGNMENT, largest);
    part->scratch = aligned_alloc(TIER_ALIGNMENT, largest);
    char escaped[256], path[TIER_PATH_MAX];
    r = job_escape(job, escaped, problem);
    assert(r == 0);
    layout_file(escaped, version, summary->data_file, path);
    if (!part->data || !part->scratch)
        return tier_problem(problem, tier, -ENOMEM, "read", path);
    r = tier_open(tier, path, &part->file);
    if (r)
        return tier_problem(problem, tier, r, "open", path);
    part->open = true;
    return 0;
}

int catalog_verify_part(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                        struct problem *problem) {
    CLEANUP(part_deinit) struct part part = {0};
    int r = part_open(&part, tier, job, version, rank, problem);
    for (uint32_t i = 0; r == 0 && i < part.manifest.chunk_count; i++)
        r = catalog_read_chunk(&part.file, &part.manifest, i, part.data, part.scratch, problem);
    return r;
}

static int copy_chunk(struct part *part, uint32_t index, struct commit *commit, struct problem *problem) {
    const struct manifest_chunk *chunk = &part->manifest.chunks[index];
    int r = catalog_read_chunk(&part->file, &part->manifest, index, part->data, part->scratch, problem);
    if (r)
        return r;
    char *stored = chunk->stored_length == chunk->raw_length ? part->data : part->scratch;
    size_t size = align_up(chunk->stored_length, TIER_ALIGNMENT);
    memset(stored + chunk->stored_length, 0, size - chunk->stored_length);
    r = tier_write(&commit->file, stored, size, chunk->offset);
    return r ? tier_problem(problem, commit->tier, r, "write", commit->temporary) : 0;
}

int catalog_repair_part(struct tier *bad, struct tier *good, const char *job, struct version_id version, uint32_t rank,
                        uint64_t nonce, struct problem *problem) {
    CLEANUP(part_deinit) struct part part = {0};
    int r = part_open(&part, good, job, version, rank, problem);
    if (r)
        return r;
    struct commit commit;
    r = commit_begin(&commit, bad, job, version, rank, nonce, part.manifest.summary.data_length, problem);
    if (r)
        return r;
    for (uint32_t i = 0; r == 0 && i < part.manifest.chunk_count; i++)
        r = copy_chunk(&part, i, &commit, problem);
    /* Only now, when a good copy is at hand, is the bad one taken away. */
    if (r == 0) {
        point_reached(bad->hook, POINT_REPAIR_COPIED);
        r = catalog_condemn(bad, job, version, rank, problem);
    }
    if (r) {
        commit_abandon(&commit);
        return r;
    }
    r = commit_finish(&commit, &part.manifest, problem);
    if (r)
        return r;
    r = commit_complete(bad, job, version, nonce, problem);
    return r > 0 ? 0 : r;
}
