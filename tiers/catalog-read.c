/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/catalog.h"

#include <errno.h>
#include <inttypes.h>

/*
 * Reading what a version's small files promise, and checking that the promise can be kept. Nothing
 * that is read here is believed: the files carry digests against damage, and are compared with where
 * they were found against being moved. Whatever is wrong with the content is -EBADMSG, so that
 * callers can tell a bad copy (try the next tier) from a tier that fails.
 */

/* A sentence about the content of a file. */
static int bad(struct problem *problem, const struct tier *tier, const char *path, int code, const char *why) {
    char text[TIER_PATH_MAX * 2];
    tier_path_text(tier, path, text);
    return problem_set(problem, code, "tier %s: %.300s: %s", tier->name, text, why);
}

bool catalog_is_no_file(int error) { return error == -EISDIR || error == -ELOOP || error == -EBADMSG; }

/* Reads a whole file whose readers verify it. */
static int read_whole(struct tier *tier, const char *path, char **ret_data, size_t *ret_size, struct problem *problem) {
    int r = tier_read_file(tier, path, MANIFEST_FILE_MAX, ret_data, ret_size);
    if (catalog_is_no_file(r))
        return bad(problem, tier, path, -EBADMSG, "it is no file");
    return r < 0 ? tier_problem(problem, tier, r, "read", path) : r;
}

typedef int (*complete_reader)(const char *data, size_t size, struct complete *ret_complete, struct problem *problem);

static int read_complete(struct tier *tier, const char *job, struct version_id version, complete_reader reader,
                         struct complete *ret_complete, char **ret_text, size_t *ret_size, struct problem *problem) {
    char escaped[256], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    layout_file(escaped, version, "complete.json", path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    r = read_whole(tier, path, &data, &size, problem);
    if (r)
        return r;
    struct complete complete;
    struct problem damage = PROBLEM_NONE;
    r = reader(data, size, &complete, &damage);
    if (r)
        return bad(problem, tier, path, r, problem_text(&damage, r));
    const struct complete_summary *summary = &complete.summary;
    if (strcmp(summary->job, job) != 0 || summary->generation != version.generation || summary->step != version.step) {
        complete_deinit(&complete);
        return bad(problem, tier, path, -EBADMSG, "it is of another version than its directory says");
    }
    *ret_complete = complete;
    *ret_text = STEAL(data);
    *ret_size = size;
    return 0;
}

int catalog_read_complete(struct tier *tier, const char *job, struct version_id version, struct complete *ret_complete,
                          struct problem *problem) {
    CLEANUP(freep) char *text = NULL;
    size_t size;
    return read_complete(tier, job, version, complete_read, ret_complete, &text, &size, problem);
}

int catalog_read_complete_text(struct tier *tier, const char *job, struct version_id version, char **ret_text,
                               size_t *ret_size, struct problem *problem) {
    struct complete complete;
    int r = read_complete(tier, job, version, complete_read, &complete, ret_text, ret_size, problem);
    if (r == 0)
        complete_deinit(&complete);
    return r;
}

/* Is the summary that of the place where it was found? NULL, or what is wrong. */
static const char *misplaced(const struct manifest_summary *summary, const char *job, struct version_id version,
                             uint32_t rank) {
    char data_name[64];
    if (strcmp(summary->job, job) != 0 || summary->generation != version.generation || summary->step != version.step)
        return "it is of another version than its directory says";
    if (summary->rank != rank)
        return "it is of another rank than its name says";
    if (summary->absent)
        return NULL;
    manifest_data_name(rank, summary->codec, data_name);
    return strcmp(summary->data_file, data_name) == 0 ? NULL : "it names a data file that is not its own";
}

static bool is_gone(struct tier *tier, const char *escaped, struct version_id version, const char *name) {
    char path[TIER_PATH_MAX];
    struct tier_entry ignored;
    layout_file(escaped, version, name, path);
    return tier_stat(tier, path, &ignored) == TIER_E_ABSENT;
}

typedef int (*manifest_reader)(const char *data, size_t size, struct manifest *ret_manifest, struct problem *problem);

static int read_manifest(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                         manifest_reader reader, struct manifest *ret_manifest, struct problem *problem) {
    char escaped[256], name[32], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    manifest_file_name(rank, name);
    layout_file(escaped, version, name, path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    r = read_whole(tier, path, &data, &size, problem);
    if (r)
        return r;
    CLEANUP(manifest_deinit) struct manifest manifest = {0};
    struct problem damage = PROBLEM_NONE;
    r = reader(data, size, &manifest, &damage);
    if (r)
        return bad(problem, tier, path, r, problem_text(&damage, r));
    const char *wrong = misplaced(&manifest.summary, job, version, rank);
    if (wrong)
        return bad(problem, tier, path, -EBADMSG, wrong);
    if (!manifest.summary.absent) {
        struct tier_entry entry;
        layout_file(escaped, version, manifest.summary.data_file, path);
        r = tier_stat(tier, path, &entry);
        if (r == TIER_E_ABSENT && is_gone(tier, escaped, version, name)) /* removed since it was read */
            return TIER_E_ABSENT;
        if (r == TIER_E_ABSENT)
            return bad(problem, tier, path, -EBADMSG, "the data file is missing");
        if (r)
            return tier_problem(problem, tier, r, "examine", path);
        if (entry.size != manifest.summary.data_length)
            return bad(problem, tier, path, -EBADMSG, "the data file's length is not that of its manifest");
    }
    *ret_manifest = manifest;
    manifest = (struct manifest){0};
    return 0;
}

int catalog_read_manifest(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                          struct manifest *ret_manifest, struct problem *problem) {
    return read_manifest(tier, job, version, rank, manifest_read, ret_manifest, problem);
}

int catalog_read_manifest_chunks(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                                 struct manifest *ret_manifest, struct problem *problem) {
    return read_manifest(tier, job, version, rank, manifest_read_chunks, ret_manifest, problem);
}

struct check {
    struct tier *tier;
    const char *job, *escaped;
    struct version_id version;
    struct tier_entries entries;
    const struct complete *complete;
};

static int compare_name(const void *key, const void *entry) {
    return strcmp(key, ((const struct tier_entry *)entry)->name);
}

/* One part: its manifest's first line against complete.json, its data file's length against that. */
static int check_part(const struct check *check, const struct complete_part *part, struct problem *problem) {
    char name[32], path[TIER_PATH_MAX];
    manifest_file_name(part->rank, name);
    layout_file(check->escaped, check->version, name, path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    int r = tier_read_file(check->tier, path, MANIFEST_LINE_MAX, &data, &size);
    if (r == TIER_E_ABSENT)
        return bad(problem, check->tier, path, -EBADMSG, "the manifest is missing");
    if (r)
        return tier_problem(problem, check->tier, r, "read", path);
    struct manifest_summary summary;
    struct problem damage = PROBLEM_NONE;
    r = manifest_read_summary(data, size, &summary, &damage);
    if (r)
        return bad(problem, check->tier, path, r, problem_text(&damage, r));
    const char *wrong = misplaced(&summary, check->job, check->version, part->rank);
    if (wrong)
        return bad(problem, check->tier, path, -EBADMSG, wrong);
    if (summary.absent || summary.image_size != part->image_size || summary.chunk_size != part->chunk_size ||
        summary.world != check->complete->summary.world ||
        strcmp(summary.run_id, check->complete->summary.run_id) != 0 ||
        !digest_equal(&summary.image_digest, &part->image_digest))
        return bad(problem, check->tier, path, -EBADMSG, "it says otherwise than complete.json");
    const struct tier_entry *entry = bsearch(summary.data_file, check->entries.items, check->entries.count,
                                             sizeof *check->entries.items, compare_name);
    layout_file(check->escaped, check->version, summary.data_file, path);
    if (!entry || entry->is_directory)
        return bad(problem, check->tier, path, -EBADMSG, "the data file is missing");
    if (entry->size != summary.data_length)
        return bad(problem, check->tier, path, -EBADMSG, "the data file's length is not that of its manifest");
    return 0;
}

/* What is missing may have been removed since complete.json was read, which goes first. */
static bool was_removed(const struct check *check) {
    return is_gone(check->tier, check->escaped, check->version, "complete.json");
}

int catalog_check_parts(struct tier *tier, const char *job, struct version_id version, struct complete *ret_complete,
                        char **ret_text, size_t *ret_size, struct problem *problem) {
    char escaped[256], path[TIER_PATH_MAX];
    CLEANUP(complete_deinit) struct complete complete = {0};
    CLEANUP(freep) char *text = NULL;
    size_t size;
    int r = read_complete(tier, job, version, complete_read_parts, &complete, &text, &size, problem);
    if (r)
        return r;
    r = job_escape(job, escaped, problem);
    assert(r == 0);
    struct check check = {.tier = tier, .job = job, .escaped = escaped, .version = version, .complete = &complete};
    layout_version(escaped, version, path);
    r = tier_list(tier, path, &check.entries);
    if (r < 0)
        tier_problem(problem, tier, r, "list", path);
    struct problem damage = PROBLEM_NONE;
    for (uint32_t i = 0; r == 0 && i < complete.summary.world; i++)
        r = check_part(&check, &complete.parts[i], &damage);
    tier_entries_deinit(&check.entries);
    if (r == -EBADMSG && was_removed(&check))
        return TIER_E_ABSENT;
    if (r < 0)
        return problem_set(problem, r, "%s", problem_text(&damage, r));
    if (r)
        return r;
    *ret_complete = complete;
    complete = (struct complete){0};
    *ret_text = STEAL(text);
    *ret_size = size;
    return 0;
}

int catalog_check(struct tier *tier, const char *job, struct version_id version, struct problem *problem) {
    CLEANUP(complete_deinit) struct complete complete = {0};
    CLEANUP(freep) char *text = NULL;
    size_t size;
    return catalog_check_parts(tier, job, version, &complete, &text, &size, problem);
}

static int condemn_file(struct tier *tier, const char *escaped, struct version_id version, const char *name,
                        enum point point, struct problem *problem) {
    char path[TIER_PATH_MAX], aside[TIER_PATH_MAX], aside_name[64];
    snprintf(aside_name, sizeof aside_name, "%s.bad", name);
    layout_file(escaped, version, name, path);
    layout_file(escaped, version, aside_name, aside);
    int r = tier_rename(tier, path, aside);
    if (r < 0)
        return tier_problem(problem, tier, r, "set aside", path);
    if (r == 0)
        point_reached(tier->hook, point);
    return 0;
}

int catalog_condemn(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                    struct problem *problem) {
    char escaped[256], name[32], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    manifest_file_name(rank, name);
    /* complete.json first: in between, the version is not complete, rather than complete without a part. */
    r = condemn_file(tier, escaped, version, "complete.json", POINT_COMPLETE_CONDEMNED, problem);
    if (r == 0)
        r = condemn_file(tier, escaped, version, name, POINT_MANIFEST_CONDEMNED, problem);
    if (r)
        return r;
    layout_version(escaped, version, path);
    r = tier_sync_directory(tier, path);
    if (r)
        return tier_problem(problem, tier, r, "sync the directory", path);
    point_reached(tier->hook, POINT_CONDEMNED);
    return 0;
}
