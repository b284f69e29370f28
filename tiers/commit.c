/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/commit.h"

#include <errno.h>

/*
 * The order that must hold, and what would happen without each step. A crash (of the daemon, of the
 * node, of the power) may come between any two of them.
 *
 *   directories made, each synced into its parent
 *       else everything below is there, durable, and cannot be reached by any name.
 *   data written to a temporary name
 *       a reader looks for final names only, so that half a file is never taken for a whole one.
 *   truncated, synced
 *       a rename can reach the disk before the data of the file it renames: the name would then
 *       stand for zeros. The sync also reports errors of earlier writes; once only, hence after an
 *       error the file is given up and never synced again.
 *   length compared
 *       what the file system says it holds is what the manifest will promise; cheap, and it catches
 *       writes that went missing on the way to a server.
 *   closed
 *       network file systems report there what they could not at the sync.
 *   data renamed, directory synced
 *       before the manifest becomes visible: a manifest promises that its data file is there.
 *   manifest written to a temporary name, synced, renamed, directory synced
 *       the rename is the moment in which the part begins to exist; until the directory is synced a
 *       crash may undo it, so only afterwards is it reported as durable.
 *
 * A version is complete by one more file, complete.json, made by link(2): of several daemons that
 * find all parts there one makes it, and the others find it made. All would write the same bytes.
 */

static int make_version(struct tier *tier, const char *job, struct version_id version, struct problem *problem) {
    char path[TIER_PATH_MAX];
    layout_version(job, version, path);
    int r = tier_make_directories(tier, path);
    return r ? tier_problem(problem, tier, r, "make the directory", path) : 0;
}

int commit_begin(struct commit *commit, struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                 uint64_t nonce, uint64_t size, struct problem *problem) {
    *commit = (struct commit){.tier = tier, .version = version, .rank = rank, .nonce = nonce};
    int r = job_escape(job, commit->job, problem);
    if (r)
        return r;
    r = make_version(tier, commit->job, version, problem);
    if (r)
        return r;
    point_reached(tier->hook, POINT_DIRECTORIES_MADE);

    layout_temporary(commit->job, version, rank, nonce, "data", commit->temporary);
    r = tier_create(tier, commit->temporary, align_up(size, TIER_ALIGNMENT), &commit->file);
    if (r)
        return tier_problem(problem, tier, r, "create", commit->temporary);
    commit->open = true;
    point_reached(tier->hook, POINT_DATA_CREATED);
    return 0;
}

void commit_abandon(struct commit *commit) {
    if (!commit->open)
        return;
    (void)tier_close(&commit->file);
    (void)tier_unlink(commit->tier, commit->temporary);
    commit->open = false;
}

/* The data: truncated, synced, compared, closed. */
static int settle_data(struct commit *commit, uint64_t length, struct problem *problem) {
    struct tier *tier = commit->tier;
    uint64_t found;
    int r = tier_length(&commit->file, &found);
    if (r)
        return tier_problem(problem, tier, r, "examine", commit->temporary);
    if (found < length)
        return tier_problem(problem, tier, -EIO, "commit (it is shorter than what was written)", commit->temporary);
    r = tier_truncate(&commit->file, length);
    if (r)
        return tier_problem(problem, tier, r, "truncate", commit->temporary);
    r = tier_sync(&commit->file);
    if (r)
        return tier_problem(problem, tier, r, "sync", commit->temporary);
    point_reached(commit->tier->hook, POINT_DATA_SYNCED);
    r = tier_length(&commit->file, &found);
    if (r)
        return tier_problem(problem, tier, r, "examine", commit->temporary);
    if (found != length)
        return tier_problem(problem, tier, -EIO, "commit (its length is not what was written)", commit->temporary);
    point_reached(commit->tier->hook, POINT_LENGTH_COMPARED);
    commit->open = false;
    r = tier_close(&commit->file);
    return r ? tier_problem(problem, tier, r, "close", commit->temporary) : 0;
}

static int sync_version(struct tier *tier, const char *job, struct version_id version, struct problem *problem) {
    char path[TIER_PATH_MAX];
    layout_version(job, version, path);
    int r = tier_sync_directory(tier, path);
    return r ? tier_problem(problem, tier, r, "sync the directory", path) : 0;
}

static int rename_temporary(struct tier *tier, const char *from, const char *to, struct problem *problem) {
    int r = tier_rename(tier, from, to);
    return r ? tier_problem(problem, tier, r, "rename a temporary file to", to) : 0;
}

/* What stands where the manifest shall go: nothing, a part (-EEXIST), an absent one, or something
 * that cannot be read and is set aside. */
static int clear_the_way(struct tier *tier, const char *job, struct version_id version, const char *manifest_path,
                         uint32_t rank, struct problem *problem) {
    CLEANUP(freep) char *data = NULL;
    size_t size;
    int r = tier_read_file(tier, manifest_path, MANIFEST_LINE_MAX, &data, &size);
    if (r == TIER_E_ABSENT)
        return 0;
    if (r)
        return tier_problem(problem, tier, r, "read", manifest_path);
    struct manifest_summary summary;
    struct problem damage = PROBLEM_NONE;
    r = manifest_read_summary(data, size, &summary, &damage);
    if (r == -ENOTSUP)
        return problem_set(problem, r, "tier %s: a part is there already, %s", tier->name, problem_text(&damage, r));
    if (r == 0) {
        if (summary.absent)
            return 0;
        /* It counts as committed now, and perhaps it is our own, from a try whose last sync failed. */
        r = sync_version(tier, job, version, problem);
        if (r)
            return r;
        return tier_problem(problem, tier, -EEXIST, "commit a part twice", manifest_path);
    }
    char aside[TIER_PATH_MAX], name[64], file[32];
    manifest_file_name(rank, file);
    snprintf(name, sizeof name, "%s.bad", file);
    layout_file(job, version, name, aside);
    r = tier_rename(tier, manifest_path, aside);
    if (r)
        return tier_problem(problem, tier, r, "set aside the damaged", manifest_path);
    point_reached(tier->hook, POINT_MANIFEST_SET_ASIDE);
    return 0;
}

struct manifest_paths {
    char final[TIER_PATH_MAX], temporary[TIER_PATH_MAX];
};

static void manifest_paths(const char *job, struct version_id version, uint32_t rank, uint64_t nonce,
                           struct manifest_paths *ret_paths) {
    char name[32];
    manifest_file_name(rank, name);
    layout_file(job, version, name, ret_paths->final);
    layout_temporary(job, version, rank, nonce, "json", ret_paths->temporary);
}

static int publish_data(struct commit *commit, const struct manifest *manifest, struct problem *problem) {
    char path[TIER_PATH_MAX];
    int r = settle_data(commit, manifest->summary.data_length, problem);
    if (r)
        return r;
    layout_file(commit->job, commit->version, manifest->summary.data_file, path);
    r = rename_temporary(commit->tier, commit->temporary, path, problem);
    if (r)
        return r;
    point_reached(commit->tier->hook, POINT_DATA_RENAMED);
    r = sync_version(commit->tier, commit->job, commit->version, problem);
    if (r)
        return r;
    point_reached(commit->tier->hook, POINT_DATA_DIRECTORY_SYNCED);
    return 0;
}

static int publish_manifest(struct commit *commit, const struct manifest_paths *paths, const char *text, size_t length,
                            struct problem *problem) {
    int r = tier_write_file(commit->tier, paths->temporary, text, length);
    if (r)
        return tier_problem(problem, commit->tier, r, "write", paths->temporary);
    point_reached(commit->tier->hook, POINT_MANIFEST_WRITTEN);
    r = rename_temporary(commit->tier, paths->temporary, paths->final, problem);
    if (r) {
        (void)tier_unlink(commit->tier, paths->temporary);
        return r;
    }
    point_reached(commit->tier->hook, POINT_MANIFEST_RENAMED);
    r = sync_version(commit->tier, commit->job, commit->version, problem);
    if (r)
        return r;
    point_reached(commit->tier->hook, POINT_MANIFEST_DIRECTORY_SYNCED);
    return 0;
}

int commit_finish(struct commit *commit, const struct manifest *manifest, struct problem *problem) {
    const struct manifest_summary *summary = &manifest->summary;
    char data_name[64];
    assert(commit->open && !summary->absent && summary->rank == commit->rank);
    assert(summary->generation == commit->version.generation && summary->step == commit->version.step);
    manifest_data_name(summary->rank, summary->codec, data_name);
    assert(strcmp(summary->data_file, data_name) == 0);

    point_reached(commit->tier->hook, POINT_DATA_WRITTEN);
    CLEANUP(freep) char *text = NULL;
    size_t length;
    struct manifest_paths paths;
    manifest_paths(commit->job, commit->version, commit->rank, commit->nonce, &paths);
    int r = manifest_write(manifest, &text, &length);
    if (r)
        problem_set(problem, r, "tier %s: cannot write down the manifest of rank %u, step %llu: %s", commit->tier->name,
                    summary->rank, (unsigned long long)summary->step, strerror(-r));
    if (r == 0)
        r = clear_the_way(commit->tier, commit->job, commit->version, paths.final, commit->rank, problem);
    if (r == 0)
        r = publish_data(commit, manifest, problem);
    if (r == 0)
        r = publish_manifest(commit, &paths, text, length, problem);
    if (r) {
        commit_abandon(commit);
        (void)tier_unlink(commit->tier, commit->temporary);
    }
    return r;
}

int commit_absent(struct tier *tier, const char *job, struct version_id version, const struct manifest_summary *summary,
                  uint64_t nonce, struct problem *problem) {
    assert(summary->absent && summary->generation == version.generation && summary->step == version.step);
    char escaped[256];
    int r = job_escape(job, escaped, problem);
    if (r == 0)
        r = make_version(tier, escaped, version, problem);
    if (r)
        return r;
    struct manifest_paths paths;
    manifest_paths(escaped, version, summary->rank, nonce, &paths);
    struct manifest manifest = {.summary = *summary};
    CLEANUP(freep) char *text = NULL;
    size_t length;
    r = manifest_write(&manifest, &text, &length);
    if (r)
        return problem_set(problem, r, "tier %s: cannot write down that rank %u has no part: %s", tier->name,
                           summary->rank, strerror(-r));
    r = tier_publish_once(tier, paths.final, paths.temporary, text, length, POINT_ABSENT_WRITTEN);
    return r < 0 ? tier_problem(problem, tier, r, "publish", paths.final) : 0;
}
