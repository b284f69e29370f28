/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/catalog.h"
#include "tiers/commit.h"

#include <errno.h>

/*
 * When is a version complete? When every rank's part is committed, and only a listing can tell: no
 * rank knows of the others. It is asked again and again while parts arrive, so the common answer
 * (not yet) is found from the names alone, and from the first line of one manifest, which says how
 * many ranks there are. A manifest without a data file beside it may be one that says `absent`;
 * those are looked at early, because such a version will never be complete.
 */

struct parts {
    struct tier *tier;
    const char *job; /* escaped */
    struct version_id version;
    struct tier_entries entries;
    size_t manifests; /* in entries */
};

static void parts_deinit(struct parts *parts) { tier_entries_deinit(&parts->entries); }

static int compare_name(const void *key, const void *entry) {
    return strcmp(key, ((const struct tier_entry *)entry)->name);
}

static const struct tier_entry *find_entry(const struct parts *parts, const char *name) {
    if (parts->entries.count == 0)
        return NULL;
    return bsearch(name, parts->entries.items, parts->entries.count, sizeof *parts->entries.items, compare_name);
}

static bool has_data(const struct parts *parts, uint32_t rank) {
    char name[64];
    for (enum codec codec = CODEC_RAW; codec < CODEC_AUTO; codec++) {
        manifest_data_name(rank, codec, name);
        if (find_entry(parts, name))
            return true;
    }
    return false;
}

static int read_summary(const struct parts *parts, uint32_t rank, struct manifest_summary *ret_summary,
                        struct problem *problem) {
    char name[32], path[TIER_PATH_MAX];
    manifest_file_name(rank, name);
    layout_file(parts->job, parts->version, name, path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    int r = tier_read_file(parts->tier, path, MANIFEST_LINE_MAX, &data, &size);
    if (r)
        return tier_problem(problem, parts->tier, r, "read", path);
    struct problem damage = PROBLEM_NONE;
    r = manifest_read_summary(data, size, ret_summary, &damage);
    if (r)
        return problem_set(problem, r, "tier %s: %s/%s: %s", parts->tier->name, parts->tier->root, path,
                           problem_text(&damage, r));
    if (ret_summary->generation != parts->version.generation || ret_summary->step != parts->version.step ||
        ret_summary->rank != rank)
        return problem_set(problem, -EBADMSG, "tier %s: %s/%s is of another version or rank", parts->tier->name,
                           parts->tier->root, path);
    return 0;
}

/* A manifest whose data is absent or short is no part. */
static bool data_is_there(const struct parts *parts, const struct manifest_summary *summary) {
    const struct tier_entry *data = find_entry(parts, summary->data_file);
    return data && !data->is_directory && data->size == summary->data_length;
}

/* Reads first lines: of all manifests if `all`, else of one and of those that may be absent ones. */
static int examine(const struct parts *parts, bool all, uint32_t *ret_world, struct problem *problem) {
    bool known = false, data_missing = false;
    uint32_t world = 0;
    for (size_t i = 0; i < parts->entries.count; i++) {
        uint32_t rank;
        if (!layout_parse_manifest(parts->entries.items[i].name, &rank))
            continue;
        if (known && !all && has_data(parts, rank))
            continue;
        struct manifest_summary summary;
        int r = read_summary(parts, rank, &summary, problem);
        if (r)
            return r;
        if (summary.absent)
            return COMMIT_E_ABSENT;
        if (known && summary.world != world)
            return problem_set(problem, -EINVAL, "rank %u says that there are %u ranks, others say %u", rank,
                               summary.world, world);
        if (rank >= summary.world)
            return problem_set(problem, -EINVAL, "rank %u of %u ranks is impossible", rank, summary.world);
        if (!data_is_there(parts, &summary))
            data_missing = true;
        world = summary.world;
        known = true;
    }
    if (!known || data_missing || parts->manifests < world)
        return COMMIT_E_INCOMPLETE;
    *ret_world = world;
    return 0;
}

static void free_manifests(struct manifest *manifests, size_t count) {
    for (size_t i = 0; i < count; i++)
        manifest_deinit(&manifests[i]);
    free(manifests);
}

static int build(const struct parts *parts, const char *job, uint32_t world, struct complete *ret_complete,
                 struct problem *problem) {
    struct manifest *manifests = calloc(world, sizeof *manifests);
    if (!manifests)
        return -ENOMEM;
    int r = 0;
    uint32_t read = 0;
    for (; r == 0 && read < world; read++) {
        r = catalog_read_manifest(parts->tier, job, parts->version, read, &manifests[read], problem);
        if (r)
            break;
    }
    if (r == TIER_E_ABSENT)
        r = COMMIT_E_INCOMPLETE; /* trashed or condemned meanwhile */
    if (r == 0)
        r = complete_build(manifests, world, ret_complete, problem);
    free_manifests(manifests, read);
    return r;
}

static int publish(const struct parts *parts, const struct complete *complete, uint64_t nonce,
                   struct problem *problem) {
    char path[TIER_PATH_MAX], temporary[TIER_PATH_MAX];
    CLEANUP(freep) char *text = NULL;
    size_t length;
    layout_file(parts->job, parts->version, "complete.json", path);
    layout_temporary(parts->job, parts->version, 0, nonce, "complete", temporary);
    int r = complete_write(complete, &text, &length);
    if (r)
        return problem_set(problem, r, "tier %s: cannot write down that step %llu is complete: %s", parts->tier->name,
                           (unsigned long long)parts->version.step, strerror(-r));
    r = tier_publish_once(parts->tier, path, temporary, text, length, POINT_COMPLETE_WRITTEN);
    return r < 0 ? tier_problem(problem, parts->tier, r, "publish", path) : 0;
}

/* 0: complete.json is there, good, and will stay. TIER_E_ABSENT; -EBADMSG: it is damaged. */
static int check_complete(struct tier *tier, const char *job, const char *escaped, struct version_id version,
                          struct problem *problem) {
    char path[TIER_PATH_MAX];
    struct complete complete;
    /* Whoever published it may have died before this, and it may have gone with him after we had seen
     * it: only what is still there after the sync will stay. */
    layout_version(escaped, version, path);
    int r = tier_sync_directory(tier, path);
    if (r == -ENOENT)
        return TIER_E_ABSENT;
    if (r)
        return tier_problem(problem, tier, r, "sync the directory", path);
    r = catalog_read_complete(tier, job, version, &complete, problem);
    if (r == 0)
        complete_deinit(&complete);
    return r;
}

/* 0: it was complete before. TIER_E_ABSENT: not, or what stood there was bad and is set aside. */
static int find_complete(const struct parts *parts, const char *job, struct problem *problem) {
    char path[TIER_PATH_MAX], aside[TIER_PATH_MAX];
    struct problem damage = PROBLEM_NONE;
    if (!find_entry(parts, "complete.json"))
        return TIER_E_ABSENT;
    int r = check_complete(parts->tier, job, parts->job, parts->version, &damage);
    if (r == 0 || r == TIER_E_ABSENT)
        return r;
    if (r != -EBADMSG)
        return problem_set(problem, r, "%s", problem_text(&damage, r));
    layout_file(parts->job, parts->version, "complete.json", path);
    layout_file(parts->job, parts->version, "complete.json.bad", aside);
    r = tier_rename(parts->tier, path, aside);
    if (r < 0)
        return tier_problem(problem, parts->tier, r, "set aside the damaged", path);
    point_reached(parts->tier->hook, POINT_COMPLETE_SET_ASIDE);
    return TIER_E_ABSENT;
}

int commit_completed(struct tier *tier, const char *job, struct version_id version, struct problem *problem) {
    char escaped[256], path[TIER_PATH_MAX];
    struct tier_entry entry;
    struct problem damage = PROBLEM_NONE;
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    layout_file(escaped, version, "complete.json", path);
    r = tier_stat(tier, path, &entry);
    if (r == TIER_E_ABSENT)
        return COMMIT_E_INCOMPLETE;
    if (r)
        return tier_problem(problem, tier, r, "examine", path);
    r = check_complete(tier, job, escaped, version, &damage);
    if (r == TIER_E_ABSENT || r == -EBADMSG) /* whoever completes the version sets it aside */
        return COMMIT_E_INCOMPLETE;
    return r ? problem_set(problem, r, "%s", problem_text(&damage, r)) : 0;
}

int commit_complete(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                    struct problem *problem) {
    char escaped[256], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    CLEANUP(parts_deinit) struct parts parts = {.tier = tier, .job = escaped, .version = version};
    layout_version(escaped, version, path);
    r = tier_list(tier, path, &parts.entries);
    if (r == TIER_E_ABSENT)
        return COMMIT_E_INCOMPLETE;
    if (r)
        return tier_problem(problem, tier, r, "list", path);
    for (size_t i = 0; i < parts.entries.count; i++) {
        uint32_t rank;
        parts.manifests += layout_parse_manifest(parts.entries.items[i].name, &rank);
    }
    r = find_complete(&parts, job, problem);
    if (r != TIER_E_ABSENT)
        return r;

    uint32_t world;
    r = examine(&parts, false, &world, problem);
    if (r == 0)
        r = examine(&parts, true, &world, problem);
    if (r)
        return r;
    struct complete complete;
    r = build(&parts, job, world, &complete, problem);
    if (r)
        return r;
    r = publish(&parts, &complete, nonce, problem);
    complete_deinit(&complete);
    return r;
}
