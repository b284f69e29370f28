/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `verify`: reads every chunk of every part in every root and checks its digest; every bad one is
 * told. With --repair a bad or missing part is replaced by another root's copy: every chunk of that
 * copy is verified on the way, so a copy that is bad too is refused and the next root is tried.
 */
#include "tiers/commit.h"
#include "tools/hold.h"
#include "tools/source.h"
#include "tools/table.h"

#include <errno.h>
#include <inttypes.h>

struct verifying {
    struct ctl *ctl;
    const struct inventory *inventory;
    uint64_t versions, parts, chunks, bytes;
    uint64_t bad, repaired; /* parts, and indexes */
    json_t *findings;
};

static void found(struct verifying *verifying, size_t root, struct version_id id, const uint32_t *rank,
                  const uint32_t *chunk, const char *what) {
    const char *label = root_label(verifying->inventory->roots, root);
    if (verifying->findings) {
        json_t *finding = json_pack("{s:s, s:I, s:I, s:s}", "root", label, "generation", (json_int_t)id.generation,
                                    "step", (json_int_t)id.step, "problem", what);
        if (rank)
            json_object_set_new(finding, "rank", json_integer(*rank));
        if (chunk)
            json_object_set_new(finding, "chunk", json_integer(*chunk));
        json_array_append_new(verifying->findings, finding);
        return;
    }
    printf("BAD  %s  %" PRIu64 "/%" PRIu64, label, id.generation, id.step);
    if (rank)
        printf("  rank %" PRIu32, *rank);
    if (chunk)
        printf("  chunk %" PRIu32, *chunk);
    fputs("  ", stdout);
    print_safe(stdout, what);
    putchar('\n');
}

/* False: some chunk is bad. A tier that fails outright is STATUS_STORAGE. */
static int verify_chunks(struct verifying *verifying, size_t root, struct version_id id, struct copy *copy,
                         bool *ret_good) {
    CLEANUP(freep) char *data = copy_buffer(copy);
    CLEANUP(freep) char *scratch = copy_buffer(copy);
    uint32_t rank = copy->manifest.summary.rank;
    if (!data || !scratch)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    for (uint32_t i = 0; i < copy->manifest.chunk_count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (ctl_interrupted())
            return ctl_fail(STATUS_STORAGE, "interrupted");
        int r = catalog_read_chunk(&copy->file, &copy->manifest, i, data, scratch, &problem);
        verifying->chunks++;
        verifying->bytes += copy->manifest.chunks[i].raw_length;
        if (r != 0) {
            found(verifying, root, id, &rank, &i, problem_text(&problem, r));
            *ret_good = false;
        }
    }
    return STATUS_OK;
}

/* `part`: what the index says of it; NULL: there is none to compare with. `expected`: a part that is not
 * there is bad; else it may lie on another node, or be on its way. */
static int verify_part(struct verifying *verifying, size_t root, struct version_id id, uint32_t rank,
                       const struct complete_part *part, bool expected, bool *ret_good) {
    CLEANUP(copy_close) struct copy copy = {0};
    struct problem problem = PROBLEM_NONE;
    int r =
        copy_open(verifying->inventory->roots->items[root].tier, verifying->inventory->job, id, rank, &copy, &problem);
    *ret_good = true;
    if (r == TIER_E_ABSENT && !expected)
        return STATUS_OK;
    verifying->parts++;
    if (r != 0) {
        *ret_good = false;
        found(verifying, root, id, &rank, NULL, problem_text(&problem, r));
        return STATUS_OK;
    }
    if (part && !digest_equal(&copy.manifest.summary.image_digest, &part->image_digest)) {
        *ret_good = false;
        found(verifying, root, id, &rank, NULL, "the manifest is not that of the index");
    }
    return verify_chunks(verifying, root, id, &copy, ret_good);
}

static bool repair_part(struct verifying *verifying, size_t root, struct version_id id, uint32_t rank) {
    const struct roots *roots = verifying->inventory->roots;
    for (size_t i = 0; i < roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (i == root)
            continue;
        int r = catalog_repair_part(roots->items[root].tier, roots->items[i].tier, verifying->inventory->job, id, rank,
                                    ctl_nonce(), &problem);
        if (r == 0) {
            if (!verifying->findings)
                printf("REPAIRED  %s  %" PRIu64 "/%" PRIu64 "  rank %" PRIu32 "  from %s\n", root_label(roots, root),
                       id.generation, id.step, rank, root_label(roots, i));
            verifying->repaired++;
            return true;
        }
        if (r != TIER_E_ABSENT)
            ctl_warn("%s", problem_text(&problem, r));
    }
    ctl_warn("%s: the part of rank %" PRIu32 " of %" PRIu64 "/%" PRIu64
             " cannot be repaired: no other root has a good one",
             root_label(roots, root), rank, id.generation, id.step);
    return false;
}

/* The index itself: made anew from the manifests. */
static void repair_index(struct verifying *verifying, size_t root, struct version_id id) {
    struct tier *tier = verifying->inventory->roots->items[root].tier;
    struct problem problem = PROBLEM_NONE;
    int r = commit_complete(tier, verifying->inventory->job, id, ctl_nonce(), &problem);
    if (r == 0) {
        if (!verifying->findings)
            printf("REPAIRED  %s  %" PRIu64 "/%" PRIu64 "  the index\n", root_label(verifying->inventory->roots, root),
                   id.generation, id.step);
        verifying->repaired++;
    } else if (r < 0) {
        ctl_warn("%s", problem_text(&problem, r));
    }
}

static int verify_in_root(struct verifying *verifying, const struct inventory_version *version, size_t root) {
    struct tier *tier = verifying->inventory->roots->items[root].tier;
    const struct catalog_version *scanned = catalog_find(&verifying->inventory->catalogs[root], version->id);
    const struct catalog_generation *generation = inventory_generation(verifying->inventory, version->id.generation);
    CLEANUP(complete_deinit) struct complete complete = {0};
    struct problem problem = PROBLEM_NONE;
    bool index_good = false,
         expected = version->complete & 1u << root || (scanned && (scanned->damaged || scanned->unreadable));
    if (expected) {
        int r = catalog_read_complete(tier, verifying->inventory->job, version->id, &complete, &problem);
        index_good = r == 0;
        if (r != 0) {
            found(verifying, root, version->id, NULL, NULL,
                  r < 0 ? problem_text(&problem, r) : "complete.json is set aside or missing");
            verifying->bad++;
        }
    }
    uint32_t world = index_good          ? complete.summary.world
                     : version->complete ? version->summary.world
                     : generation        ? generation->run.world
                                         : version->parts;
    for (uint32_t rank = 0; rank < world; rank++) {
        bool good;
        int status =
            verify_part(verifying, root, version->id, rank, index_good ? &complete.parts[rank] : NULL, expected, &good);
        if (status != STATUS_OK)
            return status;
        if (good)
            continue;
        verifying->bad++;
        if (verifying->ctl->repair)
            repair_part(verifying, root, version->id, rank);
    }
    if (expected && !index_good && verifying->ctl->repair)
        repair_index(verifying, root, version->id);
    return STATUS_OK;
}

static int verify_version(struct verifying *verifying, const struct inventory_version *version) {
    struct hold hold = {0};
    int status = STATUS_OK;
    hold_take(&hold, verifying->inventory, version);
    verifying->versions++;
    for (size_t i = 0; status == STATUS_OK && i < verifying->inventory->roots->count; i++) {
        hold_renew(&hold);
        if (version->present & 1u << i)
            status = verify_in_root(verifying, version, i);
    }
    hold_release(&hold);
    return status;
}

static int report(struct verifying *verifying) {
    int status = verifying->bad > verifying->repaired ? STATUS_PROBLEM : STATUS_OK;
    char bytes[FORMAT_MAX];
    if (verifying->findings) {
        int r = ctl_print_json(json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:O}", "job", verifying->inventory->job,
                                         "versions", (json_int_t)verifying->versions, "parts",
                                         (json_int_t)verifying->parts, "chunks", (json_int_t)verifying->chunks, "bytes",
                                         (json_int_t)verifying->bytes, "bad", (json_int_t)verifying->bad, "repaired",
                                         (json_int_t)verifying->repaired, "findings", verifying->findings));
        return r == STATUS_OK ? status : r;
    }
    printf("%" PRIu64 " version%s, %" PRIu64 " parts, %" PRIu64 " chunks, %s: %" PRIu64 " bad, %" PRIu64 " repaired\n",
           verifying->versions, verifying->versions == 1 ? "" : "s", verifying->parts, verifying->chunks,
           format_bytes(verifying->bytes, bytes), verifying->bad, verifying->repaired);
    return status;
}

int verb_verify(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    if (ctl->all && ctl->word_count > 1)
        return ctl_fail(STATUS_USAGE, "verify takes a version or --all, not both");
    int status = inventory_open(ctl, &roots, &inventory);
    if (status != STATUS_OK)
        return status;
    struct verifying verifying = {.ctl = ctl, .inventory = &inventory, .findings = ctl->json ? json_array() : NULL};
    const struct inventory_version *version;
    if (ctl->all) {
        for (size_t i = 0; status == STATUS_OK && i < inventory.count; i++)
            status = verify_version(&verifying, &inventory.versions[i]);
    } else {
        status = inventory_find(&inventory, ctl->word_count > 1 ? ctl->words[1] : NULL, &version);
        if (status == STATUS_OK)
            status = verify_version(&verifying, version);
    }
    if (status == STATUS_OK)
        status = report(&verifying);
    json_decref(verifying.findings);
    return status;
}
