/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/retention.h"

#include <errno.h>

/*
 * Temporaries that a crash left behind. Whether one is left over or being written cannot be seen from
 * the file; it follows from who may still write it. A rank's files are written by the daemon that
 * serves it, which knows what it is doing when that rank opens; and the writers of earlier
 * generations are dead, or, if they drain after all, what they drain will not be chosen.
 *
 * Two kinds are nobody's in particular, though named for rank 0: any daemon may publish that a version
 * is complete, and pin one of whatever generation while it reads it. In a tier that other nodes see, those
 * stay as long as they may be in use: the former while the run lives, the latter, a few bytes, until their
 * version goes.
 *
 * A directory that cannot be looked at keeps nobody from the others; the first such error is the result.
 */

struct reap {
    struct tier *tier;
    uint64_t generation; /* the running one */
    uint32_t rank;
    uint32_t count;
    int failed;
    struct problem *problem;
};

static void note_failure(struct reap *reap, int result) {
    if (result < 0 && !reap->failed)
        reap->failed = result;
}

static int reap_file(struct reap *reap, const char *directory, const char *name) {
    char path[TIER_PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (length >= TIER_PATH_MAX)
        return 0; /* nothing that this program has made */
    int r = tier_unlink(reap->tier, path);
    if (r < 0)
        return tier_problem(reap->problem, reap->tier, r, "remove the left-over", path);
    if (r == 0)
        point_reached(reap->tier->hook, POINT_TEMPORARY_REAPED);
    reap->count += r == 0;
    return 0;
}

static bool ends_in(const char *name, const char *suffix) {
    size_t length = strlen(name), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(name + length - suffix_length, suffix) == 0;
}

static bool may_be_in_use(const struct reap *reap, const char *name, uint32_t rank, bool is_dead) {
    bool is_pin = ends_in(name, ".pin.tmp"), is_nobodys = is_pin || ends_in(name, ".complete.tmp");
    if (is_nobodys && (reap->tier->capabilities & TIER_SHARED))
        return is_pin || !is_dead;
    return !is_dead && rank != reap->rank;
}

static int reap_version(struct reap *reap, const char *directory, bool is_dead) {
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = tier_list_names(reap->tier, directory, &entries);
    if (r)
        return r < 0 ? tier_problem(reap->problem, reap->tier, r, "list", directory) : 0;
    for (size_t i = 0; i < entries.count; i++) {
        uint32_t rank;
        if (entries.items[i].is_directory || !layout_parse_temporary(entries.items[i].name, &rank))
            continue;
        if (may_be_in_use(reap, entries.items[i].name, rank, is_dead))
            continue;
        note_failure(reap, reap_file(reap, directory, entries.items[i].name));
    }
    return 0;
}

static bool is_run_temporary(const char *name) { return strncmp(name, "run.", 4) == 0 && ends_in(name + 4, ".tmp"); }

static int reap_generation(struct reap *reap, const char *job, uint64_t generation) {
    char directory[TIER_PATH_MAX], version_directory[TIER_PATH_MAX];
    bool is_dead = generation < reap->generation;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    layout_generation(job, generation, directory);
    int r = tier_list_names(reap->tier, directory, &entries);
    if (r)
        return r < 0 ? tier_problem(reap->problem, reap->tier, r, "list", directory) : 0;
    for (size_t i = 0; i < entries.count; i++) {
        const struct tier_entry *entry = &entries.items[i];
        struct version_id version = {.generation = generation};
        if (entry->is_directory && layout_parse_number(entry->name, &version.step)) {
            layout_version(job, version, version_directory);
            note_failure(reap, reap_version(reap, version_directory, is_dead));
        } else if (is_dead && !entry->is_directory && is_run_temporary(entry->name)) {
            note_failure(reap, reap_file(reap, directory, entry->name));
        }
    }
    return 0;
}

int retention_reap(struct tier *tier, const char *job, uint64_t generation, uint32_t rank, uint32_t *ret_reaped,
                   struct problem *problem) {
    char escaped[256];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    struct reap reap = {.tier = tier, .generation = generation, .rank = rank, .problem = problem};
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    r = tier_list_names(tier, escaped, &entries);
    if (r < 0)
        return tier_problem(problem, tier, r, "list", escaped);
    for (size_t i = 0; i < entries.count; i++) {
        uint64_t number;
        if (!entries.items[i].is_directory || !layout_parse_number(entries.items[i].name, &number) ||
            number > generation)
            continue;
        note_failure(&reap, reap_generation(&reap, escaped, number));
    }
    if (reap.failed)
        return reap.failed;
    *ret_reaped = reap.count;
    return 0;
}
