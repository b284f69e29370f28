/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `verify`: reads every chunk of every part in every root and checks its digest; every bad one is
 * told. With --repair a bad or missing part is replaced by another root's copy: every chunk of that
 * copy is verified on the way, so a copy that is bad too is refused and the next root is tried.
 *
 * What a newer ckptd wrote is not understood, hence neither good nor repaired.
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
    uint64_t newer;         /* those of the bad ones that a newer ckptd wrote */
    json_t *findings, *repairs;
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

/* `rank`: NULL: the index. `from`: NULL: made anew. */
static void repaired(struct verifying *verifying, size_t root, struct version_id id, const uint32_t *rank,
                     const char *from) {
    const char *label = root_label(verifying->inventory->roots, root);
    verifying->repaired++;
    if (verifying->repairs) {
        json_t *repair = json_pack("{s:s, s:I, s:I}", "root", label, "generation", (json_int_t)id.generation, "step",
                                   (json_int_t)id.step);
        if (rank)
            json_object_set_new(repair, "rank", json_integer(*rank));
        if (from)
            json_object_set_new(repair, "from", json_string(from));
        json_array_append_new(verifying->repairs, repair);
        return;
    }
    printf("REPAIRED  %s  %" PRIu64 "/%" PRIu64, label, id.generation, id.step);
    if (rank)
        printf("  rank %" PRIu32 "  from %s\n", *rank, from);
    else
        puts("  the index");
}

enum verdict { VERDICT_GOOD, VERDICT_BAD, VERDICT_NEWER };

/* Some chunk is bad: *ret_verdict. A tier that fails outright is STATUS_STORAGE. */
static int verify_chunks(struct verifying *verifying, size_t root, struct version_id id, struct copy *copy,
                         enum verdict *ret_verdict) {
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
            *ret_verdict = VERDICT_BAD;
        }
    }
    return STATUS_OK;
}

/* `part`: what the index says of it; NULL: there is none to compare with. `expected`: a part that is not
 * there is bad; else it may lie on another node, or be on its way. */
static int verify_part(struct verifying *verifying, size_t root, struct version_id id, uint32_t rank,
                       const struct complete_part *part, bool expected, enum verdict *ret_verdict) {
    CLEANUP(copy_close) struct copy copy = {0};
    struct problem problem = PROBLEM_NONE;
    int r =
        copy_open(verifying->inventory->roots->items[root].tier, verifying->inventory->job, id, rank, &copy, &problem);
    *ret_verdict = VERDICT_GOOD;
    if (r == TIER_E_ABSENT && !expected)
        return STATUS_OK;
    verifying->parts++;
    if (r != 0) {
        *ret_verdict = r == -ENOTSUP ? VERDICT_NEWER : VERDICT_BAD;
        found(verifying, root, id, &rank, NULL, problem_text(&problem, r));
        return STATUS_OK;
    }
    if (part && !digest_equal(&copy.manifest.summary.image_digest, &part->image_digest)) {
        *ret_verdict = VERDICT_BAD;
        found(verifying, root, id, &rank, NULL, "the manifest is not that of the index");
    }
    return verify_chunks(verifying, root, id, &copy, ret_verdict);
}

static void repair_part(struct verifying *verifying, size_t root, struct version_id id, uint32_t rank) {
    const struct roots *roots = verifying->inventory->roots;
    for (size_t i = 0; i < roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (i == root)
            continue;
        int r = catalog_repair_part(roots->items[root].tier, roots->items[i].tier, verifying->inventory->job, id, rank,
                                    ctl_nonce(), &problem);
        if (r == 0) {
            repaired(verifying, root, id, &rank, root_label(roots, i));
            return;
        }
        if (r != TIER_E_ABSENT)
            ctl_warn("%s", problem_text(&problem, r));
    }
    ctl_warn("%s: the part of rank %" PRIu32 " of %" PRIu64 "/%" PRIu64
             " cannot be repaired: no other root has a good one; name more with --root, or ckptctl rm it",
             root_label(roots, root), rank, id.generation, id.step);
}

/* The index itself: made anew from the manifests. */
static void repair_index(struct verifying *verifying, size_t root, struct version_id id) {
    struct tier *tier = verifying->inventory->roots->items[root].tier;
    struct problem problem = PROBLEM_NONE;
    int r = commit_complete(tier, verifying->inventory->job, id, ctl_nonce(), &problem);
    if (r == 0)
        repaired(verifying, root, id, NULL, NULL);
    else if (r < 0)
        ctl_warn("%s", problem_text(&problem, r));
    else
        ctl_warn("%s: the index of %" PRIu64 "/%" PRIu64 " cannot be made anew: parts are missing or bad",
                 root_label(verifying->inventory->roots, root), id.generation, id.step);
}

static int verify_in_root(struct verifying *verifying, const struct inventory_version *version, size_t root) {
    struct tier *tier = verifying->inventory->roots->items[root].tier;
    const struct catalog_version *scanned = catalog_find(&verifying->inventory->catalogs[root], version->id);
    const struct catalog_generation *generation = inventory_generation(verifying->inventory, version->id.generation);
    CLEANUP(complete_deinit) struct complete complete = {0};
    struct problem problem = PROBLEM_NONE;
    bool index_good = false, index_newer = false,
         expected = version->complete & 1u << root || (scanned && (scanned->damaged || scanned->unreadable));
    if (expected) {
        int r = catalog_read_complete(tier, verifying->inventory->job, version->id, &complete, &problem);
        index_good = r == 0;
        index_newer = r == -ENOTSUP;
        verifying->newer += index_newer;
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
        enum verdict verdict;
        int status = verify_part(verifying, root, version->id, rank, index_good ? &complete.parts[rank] : NULL,
                                 expected, &verdict);
        if (status != STATUS_OK)
            return status;
        verifying->bad += verdict != VERDICT_GOOD;
        verifying->newer += verdict == VERDICT_NEWER;
        if (verdict == VERDICT_BAD && verifying->ctl->repair && !index_newer)
            repair_part(verifying, root, version->id, rank);
    }
    if (expected && !index_good && !index_newer && verifying->ctl->repair)
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
        int r = ctl_print_json(
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:O}", "job", verifying->inventory->job,
                      "versions", (json_int_t)verifying->versions, "parts", (json_int_t)verifying->parts, "chunks",
                      (json_int_t)verifying->chunks, "bytes", (json_int_t)verifying->bytes, "bad",
                      (json_int_t)verifying->bad, "repaired", (json_int_t)verifying->repaired, "newer",
                      (json_int_t)verifying->newer, "findings", verifying->findings, "repairs", verifying->repairs));
        return r == STATUS_OK ? status : r;
    }
    printf("%" PRIu64 " version%s, %" PRIu64 " parts, %" PRIu64 " chunks, %s: %" PRIu64 " bad, %" PRIu64 " repaired\n",
           verifying->versions, verifying->versions == 1 ? "" : "s", verifying->parts, verifying->chunks,
           format_bytes(verifying->bytes, bytes), verifying->bad, verifying->repaired);
    if (verifying->newer)
        ctl_warn("a newer ckptd wrote %" PRIu64 " of them: only its ckptctl can verify them", verifying->newer);
    if (verifying->bad > verifying->newer && !verifying->ctl->repair)
        ctl_warn("ckptctl verify --repair replaces bad copies by good ones of other roots");
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
    struct verifying verifying = {.ctl = ctl,
                                  .inventory = &inventory,
                                  .findings = ctl->json ? json_array() : NULL,
                                  .repairs = ctl->json ? json_array() : NULL};
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
    json_decref(verifying.repairs);
    return status;
}
