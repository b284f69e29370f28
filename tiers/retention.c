/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/retention.h"

#include "tiers/pin.h"

#include <errno.h>
#include <inttypes.h>

/*
 * Deleting checkpoints is the most dangerous thing that this program does. So:
 *
 *   - what goes is chosen by a pure function from a scan, and the newest complete version of a tier
 *     is never among it: the old goes only after the new is complete in the same tier;
 *   - a version goes in one step, by a rename, so that nobody meets half of one; only then is it looked
 *     through for pins, because a pin that was made before the rename is seen afterwards, and one that
 *     comes later fails, for its directory is gone, and its maker takes another version;
 *   - the renames are durable before anything is unlinked, and the grace lets readers finish that
 *     opened a file by its old name.
 *
 * Several daemons may sweep the same tier at the same time: the rename has one winner, everybody
 * else finds the name absent and goes on.
 */

static bool is_among(const struct version_id *items, size_t count, struct version_id id) {
    for (size_t i = 0; i < count; i++) {
        if (version_compare(items[i], id) == 0)
            return true;
    }
    return false;
}

static bool counts_as_complete(const struct catalog_version *version, const struct retention_known *known) {
    return version->complete || is_among(known->elsewhere, known->elsewhere_count, version->id);
}

static const struct catalog_version *newest_complete(const struct catalog *catalog,
                                                     const struct retention_known *known) {
    for (size_t i = catalog->version_count; i-- > 0;) {
        if (counts_as_complete(&catalog->versions[i], known))
            return &catalog->versions[i];
    }
    return NULL;
}

static bool has_complete(const struct catalog *catalog, uint64_t generation) {
    for (size_t i = 0; i < catalog->version_count; i++) {
        if (catalog->versions[i].complete && catalog->versions[i].id.generation == generation)
            return true;
    }
    return false;
}

/* Did a run go on from this version that has nothing newer of its own yet? Runs older than the running one
 * are dead and need nothing. The newest run may: it is running, or will be resumed. */
static bool is_resume_version(const struct catalog *catalog, uint64_t current, struct version_id id) {
    for (size_t i = 0; i < catalog->generation_count; i++) {
        const struct catalog_generation *generation = &catalog->generations[i];
        bool matters = i == catalog->generation_count - 1 || (current && generation->generation >= current);
        if (!matters || !generation->has_run || !generation->run.resumes)
            continue;
        struct version_id resumed = {generation->run.resume_generation, generation->run.resume_step};
        if (version_compare(resumed, id) == 0 && !has_complete(catalog, generation->generation))
            return true;
    }
    return false;
}

int retention_choose(const struct catalog *catalog, const struct retention_policy *policy, uint64_t current,
                     struct retention_known known, struct version_id **ret_victims, size_t *ret_count) {
    struct version_id *victims = calloc(catalog->version_count + 1, sizeof *victims);
    if (!victims)
        return -ENOMEM;
    size_t count = 0;
    uint64_t newer_complete = 0, keep = max_u64(policy->keep, 1);
    const struct catalog_version *newest = newest_complete(catalog, &known);
    for (size_t i = catalog->version_count; i-- > 0;) {
        const struct catalog_version *version = &catalog->versions[i];
        bool superseded = newest && version_compare(version->id, newest->id) < 0;
        bool victim;
        if (version->unreadable)
            continue; /* nobody knows what it is */
        if (counts_as_complete(version, &known)) {
            bool every = policy->keep_every && version->id.step % policy->keep_every == 0;
            victim = newer_complete >= keep && !every && !is_resume_version(catalog, current, version->id);
            newer_complete++;
        } else if (version->damaged) {
            victim = superseded; /* it may be repaired from another tier */
        } else {
            victim = superseded || current == 0 || version->id.generation < current;
        }
        if (victim && !version->pinned && !is_among(known.busy, known.busy_count, version->id))
            victims[count++] = version->id;
    }
    *ret_victims = victims;
    *ret_count = count;
    return 0;
}

struct sweep {
    struct tier *tier;
    char job[256]; /* escaped */
    uint64_t nonce;
    struct problem *problem;
};

static int sweep_init(struct sweep *sweep, struct tier *tier, const char *job, uint64_t nonce,
                      struct problem *problem) {
    *sweep = (struct sweep){.tier = tier, .nonce = nonce, .problem = problem};
    return job_escape(job, sweep->job, problem);
}

static int sync_both(const struct sweep *sweep, uint64_t generation) {
    char directory[TIER_PATH_MAX];
    layout_generation(sweep->job, generation, directory);
    int r = tier_sync_directory(sweep->tier, directory);
    if (r && r != -ENOENT)
        return tier_problem(sweep->problem, sweep->tier, r, "sync the directory", directory);
    r = tier_sync_directory(sweep->tier, sweep->job);
    return r ? tier_problem(sweep->problem, sweep->tier, r, "sync the directory", sweep->job) : 0;
}

/* Puts a version that turned out to be pinned back where it was. */
static int put_back(const struct sweep *sweep, const char *trash, struct version_id version) {
    char path[TIER_PATH_MAX];
    layout_version(sweep->job, version, path);
    int r = tier_rename(sweep->tier, trash, path);
    if (r == TIER_E_ABSENT || r == -ENOTEMPTY || r == -EEXIST)
        return 0; /* somebody else did, or the name is taken: it stays in the trash while it is pinned */
    if (r)
        return tier_problem(sweep->problem, sweep->tier, r, "put back the pinned", path);
    point_reached(sweep->tier->hook, POINT_TRASH_PUT_BACK);
    return sync_both(sweep, version.generation);
}

/* 0: it is in the trash. TIER_E_ABSENT: somebody was faster. TIER_E_EXISTS: it is pinned, and stays. */
static int trash_version(const struct sweep *sweep, struct version_id version, char ret_trash[TIER_PATH_MAX]) {
    char path[TIER_PATH_MAX], trash[TIER_PATH_MAX];
    layout_version(sweep->job, version, path);
    layout_trash(sweep->job, version, sweep->nonce, trash);
    /* Its time stamp tells later when the grace is over; set before, so that a crash in between
     * does not leave a directory in the trash that looks old. */
    int r = tier_touch(sweep->tier, path);
    if (r == 0) {
        point_reached(sweep->tier->hook, POINT_TRASH_TOUCHED);
        r = tier_rename(sweep->tier, path, trash);
    }
    if (r == TIER_E_ABSENT)
        return r;
    if (r)
        return tier_problem(sweep->problem, sweep->tier, r, "move to the trash", path);
    point_reached(sweep->tier->hook, POINT_TRASH_RENAMED);
    r = sync_both(sweep, version.generation);
    if (r)
        return r;
    point_reached(sweep->tier->hook, POINT_TRASH_SYNCED);
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    r = tier_list(sweep->tier, trash, &entries);
    if (r < 0)
        return tier_problem(sweep->problem, sweep->tier, r, "list", trash);
    if (r == 0 && pin_holds(sweep->tier, trash, &entries)) {
        r = put_back(sweep, trash, version);
        return r ? r : TIER_E_EXISTS;
    }
    strcpy(ret_trash, trash);
    return 0;
}

static int unlink_entry(const struct sweep *sweep, const char *directory, const struct tier_entry *entry) {
    char path[TIER_PATH_MAX + 256];
    int length = snprintf(path, sizeof path, "%s/%s", directory, entry->name);
    if (length >= TIER_PATH_MAX)
        return -ENAMETOOLONG;
    int r = entry->is_directory ? tier_remove_directory(sweep->tier, path) : tier_unlink(sweep->tier, path);
    if (r == TIER_E_ABSENT || r == -ENOTEMPTY) /* -ENOTEMPTY is told by the directory above */
        return 0;
    return r ? tier_problem(sweep->problem, sweep->tier, r, "remove", path) : 0;
}

/* Removes a directory and what was found in it. */
static int remove_with_files(const struct sweep *sweep, const char *directory, const struct tier_entries *entries) {
    for (size_t i = 0; i < entries->count; i++) {
        int r = unlink_entry(sweep, directory, &entries->items[i]);
        if (r)
            return r;
        point_reached(sweep->tier->hook, POINT_TRASH_FILE_REMOVED);
    }
    int r = tier_remove_directory(sweep->tier, directory);
    if (r == 0)
        point_reached(sweep->tier->hook, POINT_TRASH_DIRECTORY_REMOVED);
    /* Not empty: somebody has a file open over NFS, which keeps a name for it. The next sweep comes again. */
    if (r == TIER_E_ABSENT || r == -ENOTEMPTY)
        return 0;
    return r ? tier_problem(sweep->problem, sweep->tier, r, "remove", directory) : 0;
}

static bool ends_in(const char *name, const char *suffix) {
    size_t length = strlen(name), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(name + length - suffix_length, suffix) == 0;
}

/* Promises go before what they promise, and for good: after a crash some of what was unlinked may be
 * there again, a pin among it, and what is put back for its sake must not be listed without its data. */
static int remove_trash(const struct sweep *sweep, const char *trash, const struct tier_entries *entries) {
    static const char *const promises[] = {"complete.json", ".json"};
    static const enum point points[] = {POINT_TRASH_COMPLETE_REMOVED, POINT_TRASH_MANIFESTS_REMOVED};
    for (size_t k = 0; k < ARRAY_SIZE(promises); k++) {
        bool removed = false;
        for (size_t i = 0; i < entries->count; i++) {
            if (!ends_in(entries->items[i].name, promises[k]))
                continue;
            int r = unlink_entry(sweep, trash, &entries->items[i]);
            if (r)
                return r;
            removed = true;
        }
        int r = removed ? tier_sync_directory(sweep->tier, trash) : 0;
        if (r == -ENOENT)
            return 0; /* somebody else empties it, too */
        if (r)
            return tier_problem(sweep->problem, sweep->tier, r, "sync the directory", trash);
        if (removed)
            point_reached(sweep->tier->hook, points[k]);
    }
    return remove_with_files(sweep, trash, entries);
}

static int consider_trash(const struct sweep *sweep, const struct tier_entry *entry, struct version_id version,
                          int64_t now_ns, uint64_t grace_ns) {
    char trash[TIER_PATH_MAX];
    int length = snprintf(trash, sizeof trash, "%s/%s", sweep->job, entry->name);
    assert(length < TIER_PATH_MAX);
    if (entry->mtime_ns > now_ns) { /* the clock was set back: the grace begins again, or it might take years */
        int r = tier_touch(sweep->tier, trash);
        point_reached(sweep->tier->hook, POINT_TRASH_TOUCHED);
        return r < 0 ? tier_problem(sweep->problem, sweep->tier, r, "touch", trash) : 0;
    }
    if ((uint64_t)(now_ns - entry->mtime_ns) < grace_ns)
        return 0;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = tier_list(sweep->tier, trash, &entries);
    if (r == TIER_E_ABSENT)
        return 0;
    if (r)
        return tier_problem(sweep->problem, sweep->tier, r, "list", trash);
    if (pin_holds(sweep->tier, trash, &entries))
        return put_back(sweep, trash, version);
    return remove_trash(sweep, trash, &entries);
}

static int empty_old_trash(const struct sweep *sweep, uint64_t grace_ms) {
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int64_t now_ns = 0;
    int failed = 0; /* one that cannot be emptied does not keep the others */
    int r = tier_list(sweep->tier, sweep->job, &entries);
    if (r)
        return r < 0 ? tier_problem(sweep->problem, sweep->tier, r, "list", sweep->job) : 0;
    for (size_t i = 0; i < entries.count; i++) {
        struct version_id version;
        if (!entries.items[i].is_directory || !layout_parse_trash(entries.items[i].name, &version))
            continue;
        if (now_ns == 0) {
            r = tier_now(sweep->tier, &now_ns);
            if (r)
                return tier_problem(sweep->problem, sweep->tier, r, "read the clock of the file system of", "");
        }
        uint64_t grace_ns = min_u64(grace_ms, INT64_MAX / NANOSECONDS_PER_MS) * NANOSECONDS_PER_MS;
        r = consider_trash(sweep, &entries.items[i], version, now_ns, grace_ns);
        if (r && !failed)
            failed = r;
    }
    return failed;
}

/* A dead run of which no version is left: its directory only costs every scan a little more. What
 * does not belong there keeps the directory. */
static int prune_generation(const struct sweep *sweep, uint64_t generation) {
    char directory[TIER_PATH_MAX];
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    layout_generation(sweep->job, generation, directory);
    int r = tier_list(sweep->tier, directory, &entries);
    if (r)
        return r < 0 ? tier_problem(sweep->problem, sweep->tier, r, "list", directory) : 0;
    for (size_t i = 0; i < entries.count; i++) {
        const char *name = entries.items[i].name;
        if (entries.items[i].is_directory || strncmp(name, "run", 3) != 0)
            return 0;
    }
    return remove_with_files(sweep, directory, &entries);
}

static int prune_generations(const struct sweep *sweep, const struct catalog *catalog, uint64_t current) {
    size_t version = 0;
    /* Not the greatest: the next run counts from there. */
    for (size_t i = 0; i + 1 < catalog->generation_count; i++) {
        uint64_t generation = catalog->generations[i].generation;
        while (version < catalog->version_count && catalog->versions[version].id.generation < generation)
            version++;
        bool is_empty = version == catalog->version_count || catalog->versions[version].id.generation != generation;
        if (generation >= current || !is_empty)
            continue;
        int r = prune_generation(sweep, generation);
        if (r)
            return r;
    }
    return 0;
}

int retention_sweep(struct tier *tier, const char *job, const struct retention_policy *policy, uint64_t current,
                    struct retention_known known, uint64_t nonce, struct retention_swept *ret_swept,
                    struct problem *problem) {
    struct sweep sweep;
    int r = sweep_init(&sweep, tier, job, nonce, problem);
    if (r)
        return r;
    CLEANUP(catalog_deinit) struct catalog catalog = {0};
    r = catalog_scan(tier, job, &catalog, problem);
    if (r)
        return r;
    CLEANUP(freep) struct version_id *victims = NULL;
    size_t count;
    r = retention_choose(&catalog, policy, current, known, &victims, &count);
    if (r)
        return tier_problem(problem, tier, r, "sweep", sweep.job);
    struct retention_swept swept = {.damage = catalog.damage};
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        char trash[TIER_PATH_MAX];
        r = trash_version(&sweep, victims[i], trash);
        if (r < 0 && !failed)
            failed = r;
        swept.removed += r == 0;
    }
    r = empty_old_trash(&sweep, policy->trash_grace_ms);
    if (r == 0)
        r = prune_generations(&sweep, &catalog, current);
    if (failed || r)
        return failed ? failed : r;
    *ret_swept = swept;
    return 0;
}

int retention_remove(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                     struct problem *problem) {
    struct sweep sweep;
    bool pinned;
    int r = sweep_init(&sweep, tier, job, nonce, problem);
    if (r)
        return r;
    char trash[TIER_PATH_MAX];
    layout_version(sweep.job, version, trash);
    r = retention_pinned(tier, job, version, &pinned);
    if (r)
        return r < 0 ? tier_problem(problem, tier, r, "list", trash) : r;
    r = pinned ? TIER_E_EXISTS : trash_version(&sweep, version, trash);
    if (r == TIER_E_EXISTS)
        return tier_problem(problem, tier, -EBUSY, "remove (it is pinned)", trash);
    if (r)
        return r;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    r = tier_list(tier, trash, &entries);
    if (r)
        return r < 0 ? tier_problem(problem, tier, r, "list", trash) : 0;
    return remove_trash(&sweep, trash, &entries);
}
