/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/source.h"

#include "tiers/layout.h"

#include <errno.h>
#include <inttypes.h>

void copy_close(struct copy *copy) {
    if (copy->open)
        (void)tier_close(&copy->file);
    manifest_deinit(&copy->manifest);
    *copy = (struct copy){0};
}

int copy_open(struct tier *tier, const char *job, struct version_id version, uint32_t rank, struct copy *ret_copy,
              struct problem *problem) {
    CLEANUP(copy_close) struct copy copy = {.tier = tier};
    char escaped[256], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r < 0)
        return r;
    r = catalog_read_manifest(tier, job, version, rank, &copy.manifest, problem);
    if (r == TIER_E_ABSENT)
        return problem_set(problem, r, "rank %" PRIu32 " has no manifest", rank);
    if (r < 0)
        return r;
    if (copy.manifest.summary.absent)
        return problem_set(problem, TIER_E_ABSENT, "rank %" PRIu32 " gave no part: %s", rank,
                           copy.manifest.summary.reason);
    layout_file(escaped, version, copy.manifest.summary.data_file, path);
    r = tier_open(tier, path, &copy.file);
    if (r != 0)
        return tier_problem(problem, tier, r, "open", path);
    copy.open = true;
    *ret_copy = copy;
    copy = (struct copy){0};
    return 0;
}

char *copy_buffer(const struct copy *copy) {
    uint64_t largest = 1;
    for (size_t i = 0; i < copy->manifest.chunk_count; i++)
        largest = max_u64(largest, copy->manifest.chunks[i].raw_length);
    return aligned_alloc(TIER_ALIGNMENT, align_up(largest, TIER_ALIGNMENT));
}

int source_open(const struct inventory *inventory, struct version_id version, const struct complete_part *part,
                struct source *ret_source) {
    struct source source = {.inventory = inventory, .part = *part, .chunk = UINT64_MAX};
    for (size_t i = 0; i < inventory->roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        struct copy *copy = &source.copies[source.count];
        int r = copy_open(inventory->roots->items[i].tier, inventory->job, version, part->rank, copy, &problem);
        if (r < 0)
            ctl_warn("%s", problem_text(&problem, r));
        if (r != 0)
            continue;
        const struct manifest_summary *summary = &copy->manifest.summary;
        if (summary->image_size != part->image_size || summary->chunk_size != part->chunk_size ||
            !digest_equal(&summary->image_digest, &part->image_digest)) {
            ctl_warn("%s: the part of rank %" PRIu32 " is not that of the index", root_label(inventory->roots, i),
                     part->rank);
            copy_close(copy);
            continue;
        }
        source.count++;
    }
    if (source.count) {
        source.data = copy_buffer(&source.copies[0]);
        source.scratch = copy_buffer(&source.copies[0]);
    }
    if (!source.count || !source.data || !source.scratch) {
        bool absent = !source.count;
        source_close(&source);
        return absent ? ctl_fail(STATUS_PROBLEM, "no root has a usable part of rank %" PRIu32, part->rank)
                      : ctl_fail(STATUS_STORAGE, "out of memory");
    }
    *ret_source = source;
    return STATUS_OK;
}

void source_close(struct source *source) {
    for (size_t i = 0; i < source->count; i++)
        copy_close(&source->copies[i]);
    free(source->data);
    free(source->scratch);
    *source = (struct source){0};
}

static int load_chunk(struct source *source, uint64_t chunk) {
    for (size_t i = 0; i < source->count; i++) {
        struct copy *copy = &source->copies[i];
        struct problem problem = PROBLEM_NONE;
        int r =
            catalog_read_chunk(&copy->file, &copy->manifest, (uint32_t)chunk, source->data, source->scratch, &problem);
        if (r == 0) {
            source->chunk = chunk;
            return STATUS_OK;
        }
        if (!source->bad[i])
            ctl_warn("%s", problem_text(&problem, r));
        source->bad[i] = true;
    }
    source->chunk = UINT64_MAX;
    return ctl_fail(STATUS_PROBLEM, "no root has an undamaged chunk %" PRIu64 " of rank %" PRIu32, chunk,
                    source->part.rank);
}

int source_read(struct source *source, uint64_t offset, uint64_t length, void *data) {
    char *to = data;
    assert(offset + length <= source->part.image_size);
    while (length) {
        uint64_t chunk = offset / source->part.chunk_size, within = offset % source->part.chunk_size;
        if (chunk != source->chunk) {
            if (ctl_interrupted())
                return ctl_fail(STATUS_STORAGE, "interrupted");
            int status = load_chunk(source, chunk);
            if (status != STATUS_OK)
                return status;
        }
        uint64_t part = min_u64(length, source->part.chunk_size - within);
        memcpy(to, source->data + within, part);
        to += part;
        offset += part;
        length -= part;
    }
    return STATUS_OK;
}
