/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planted bugs: does the simulator find what it is there for? Each is named on the command line; a
 * test looks for it. Those of disks stand where disks are made (sim_bug() in sim-disk.c and
 * sim-tier.c), those of clients in sim-trainer.c, that of the kernel in sim-kernel.c; those of the
 * daemon are here, in functions that the linker puts before the daemon's own.
 *
 *   sync              a file's sync does nothing
 *   sync-late         a file is synced after it was renamed, not before
 *   directory-sync    the sync of a version's directory does nothing
 *   parent-sync       nor that of the directories above
 *   link              link(2) replaces the name that is there
 *   rename            a rename makes a copy that nobody has synced
 *   listing           a shared directory's newest name is sometimes missing from its listing
 *   short-write       a write stores half and says all
 *   early-change      a trainer changes its memory before its fence has ended
 *   revoked-commit    a fence that was given up is not seen, the capture is committed
 *   torn-capture      a capture leaves a part of its chunk as it was, and digests that
 *   early-release     memory of the pool is given back when it is written, before that is synced
 *   digest-check      chunks are handed out whatever their digest is
 *   other-generation  a part of an older generation completes a version
 *   own-latest        a rank that joins goes on from the newest version that it sees itself
 *   join-dead         a run joins the generation of the run before, which is dead
 *   reap-live         an opening removes the temporaries of all ranks
 *   delete-early      the old version goes when the new one has begun
 *   trust-eof         a process is dead when its socket ends, and not before
 *   lost-room         a reservation of the pool is not given back
 *   kept-admission    the room kept for a client's next save is not given back when it ends
 *   lost-news         waiting clients are not told of a change
 */
#include "daemon/part.h"
#include "daemon/session.h"
#include "tests/sim/sim.h"
#include "tiers/catalog.h"
#include "tiers/claim.h"
#include "tiers/commit.h"
#include "tiers/retention.h"

#include <errno.h>

/* ---- the daemon's memory and its news ---- */

void __real_pool_release(struct pool *pool, uint64_t bytes);
void __wrap_pool_release(struct pool *pool, uint64_t bytes);
void __real_session_inadmissible(struct session *session);
void __wrap_session_inadmissible(struct session *session);
void __real_session_job_changed(struct session *session);
void __wrap_session_job_changed(struct session *session);
void __real_part_chunk_written(struct part *part, uint32_t index);
void __wrap_part_chunk_written(struct part *part, uint32_t index);

void __wrap_pool_release(struct pool *pool, uint64_t bytes) {
    if (!sim_bug("lost-room") || !sim_chance(1, 20))
        __real_pool_release(pool, bytes);
}

void __wrap_session_inadmissible(struct session *session) {
    if (!sim_bug("kept-admission"))
        __real_session_inadmissible(session);
}

void __wrap_session_job_changed(struct session *session) {
    if (!sim_bug("lost-news") || !sim_chance(1, 4))
        __real_session_job_changed(session);
}

void __wrap_part_chunk_written(struct part *part, uint32_t index) {
    if (sim_bug("early-release") && part->chunks[index].buffer)
        pool_buffer_unref(STEAL(part->chunks[index].buffer));
    __real_part_chunk_written(part, index);
}

/* ---- what is read and completed ---- */

int __real_catalog_read_chunk(struct tier_file *file, const struct manifest *manifest, uint32_t index, void *data,
                              void *scratch, struct problem *problem);
int __wrap_catalog_read_chunk(struct tier_file *file, const struct manifest *manifest, uint32_t index, void *data,
                              void *scratch, struct problem *problem);
int __real_commit_complete(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                           struct problem *problem);
int __wrap_commit_complete(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                           struct problem *problem);

int __wrap_catalog_read_chunk(struct tier_file *file, const struct manifest *manifest, uint32_t index, void *data,
                              void *scratch, struct problem *problem) {
    int r = __real_catalog_read_chunk(file, manifest, index, data, scratch, problem);
    return r == -EBADMSG && sim.node != SIM_OUTSIDE && sim_bug("digest-check") ? 0 : r;
}

/* The manifest of this version, or of the same step of a generation before. */
static int any_manifest(struct tier *tier, const char *job, struct version_id id, uint32_t rank,
                        struct manifest *ret_manifest, struct problem *problem) {
    int r = TIER_E_ABSENT;
    for (struct version_id from = id; r == TIER_E_ABSENT && from.generation; from.generation--)
        r = catalog_read_manifest(tier, job, from, rank, ret_manifest, problem);
    if (r == 0)
        ret_manifest->summary.generation = id.generation;
    return r;
}

static int complete_with_others(struct tier *tier, const char *job, struct version_id id, uint64_t nonce,
                                struct problem *problem) {
    struct manifest manifests[SIM_RANKS_MAX] = {0};
    struct complete complete;
    char directory[256], path[TIER_PATH_MAX], temporary[TIER_PATH_MAX];
    CLEANUP(freep) char *text = NULL;
    size_t length;
    uint32_t count = 0, world = 1;
    int r = job_escape(job, directory, problem);
    for (; r == 0 && count < world; count++) {
        r = any_manifest(tier, job, id, count, &manifests[count], problem);
        if (r == 0 && manifests[count].summary.absent)
            r = TIER_E_ABSENT;
        world = count ? world : manifests[0].summary.world;
        if (r)
            break;
    }
    if (r == 0)
        r = complete_build(manifests, world, &complete, problem);
    for (uint32_t i = 0; i < count; i++)
        manifest_deinit(&manifests[i]);
    if (r)
        return r;
    r = complete_write(&complete, &text, &length);
    complete_deinit(&complete);
    layout_file(directory, id, "complete.json", path);
    layout_temporary(directory, id, 0, nonce, "complete", temporary);
    return r ? r : tier_publish_once(tier, path, temporary, text, length, POINT_COMPLETE_WRITTEN);
}

int __wrap_commit_complete(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                           struct problem *problem) {
    int r = __real_commit_complete(tier, job, version, nonce, problem);
    if (r == COMMIT_E_INCOMPLETE && sim_bug("other-generation") &&
        complete_with_others(tier, job, version, nonce, problem) == 0)
        return 0;
    return r;
}

/* ---- who we are, and what we go on from ---- */

int __real_claim_run(const struct claim_request *request, struct claim_result *ret_result, bool *ret_retry,
                     struct problem *problem);
int __wrap_claim_run(const struct claim_request *request, struct claim_result *ret_result, bool *ret_retry,
                     struct problem *problem);

static void choose_again(const struct claim_request *request, struct run_record *record) {
    struct problem ignored = PROBLEM_NONE;
    for (size_t i = 0; i < request->tier_count; i++) {
        struct catalog catalog;
        if (catalog_scan(request->tiers[i], request->job, &catalog, &ignored) != 0)
            continue;
        for (size_t v = 0; v < catalog.version_count; v++) {
            struct version_id chosen = {record->resume_generation, record->resume_step};
            const struct catalog_version *version = &catalog.versions[v];
            if (!version->complete || (record->resumes && version_compare(version->id, chosen) <= 0))
                continue;
            record->resumes = true;
            record->resume_generation = version->id.generation;
            record->resume_step = version->id.step;
        }
        catalog_deinit(&catalog);
    }
}

static bool run_before(const struct claim_request *request, struct run_record *ret_record) {
    struct problem ignored = PROBLEM_NONE;
    struct catalog catalog;
    if (catalog_scan(request->decider, request->job, &catalog, &ignored) != 0)
        return false;
    const struct catalog_generation *last =
        catalog.generation_count ? &catalog.generations[catalog.generation_count - 1] : NULL;
    bool found = last && last->has_run && last->run.world == request->world;
    if (found)
        *ret_record = last->run;
    catalog_deinit(&catalog);
    return found;
}

int __wrap_claim_run(const struct claim_request *request, struct claim_result *ret_result, bool *ret_retry,
                     struct problem *problem) {
    struct claim_request asked = *request;
    struct run_record before;
    if (sim_bug("join-dead") && run_before(request, &before))
        asked.run_id = before.run_id;
    int r = __real_claim_run(&asked, ret_result, ret_retry, problem);
    if (r == 0 && ret_result->joined && sim_bug("own-latest"))
        choose_again(request, &ret_result->record);
    return r;
}

/* ---- what is removed ---- */

int __real_retention_reap(struct tier *tier, const char *job, uint64_t generation, uint32_t rank, uint32_t *ret_reaped,
                          struct problem *problem);
int __wrap_retention_reap(struct tier *tier, const char *job, uint64_t generation, uint32_t rank, uint32_t *ret_reaped,
                          struct problem *problem);
int __real_retention_sweep(struct tier *tier, const char *job, const struct retention_policy *policy, uint64_t current,
                           struct retention_known known, uint64_t nonce, struct retention_swept *ret_swept,
                           struct problem *problem);
int __wrap_retention_sweep(struct tier *tier, const char *job, const struct retention_policy *policy, uint64_t current,
                           struct retention_known known, uint64_t nonce, struct retention_swept *ret_swept,
                           struct problem *problem);

int __wrap_retention_reap(struct tier *tier, const char *job, uint64_t generation, uint32_t rank, uint32_t *ret_reaped,
                          struct problem *problem) {
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < SIM_RANKS_MAX; i++)
        if (i == rank || sim_bug("reap-live"))
            r = __real_retention_reap(tier, job, generation, i, ret_reaped, problem);
    return r;
}

int __wrap_retention_sweep(struct tier *tier, const char *job, const struct retention_policy *policy, uint64_t current,
                           struct retention_known known, uint64_t nonce, struct retention_swept *ret_swept,
                           struct problem *problem) {
    CLEANUP(catalog_deinit) struct catalog catalog = {0};
    CLEANUP(freep) struct version_id *begun = NULL;
    struct problem ignored = PROBLEM_NONE;
    if (sim_bug("delete-early") && catalog_scan(tier, job, &catalog, &ignored) == 0 && catalog.version_count) {
        begun = calloc(catalog.version_count, sizeof *begun);
        assert(begun);
        for (size_t i = 0; i < catalog.version_count; i++)
            begun[i] = catalog.versions[i].id;
        known.elsewhere = begun;
        known.elsewhere_count = catalog.version_count;
    }
    return __real_retention_sweep(tier, job, policy, current, known, nonce, ret_swept, problem);
}
