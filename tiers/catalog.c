/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/catalog.h"

#include "tiers/pin.h"

#include <errno.h>
#include <inttypes.h>

/*
 * A scan is three levels of listings and the first line of one file for each complete version. What
 * it does not understand it counts, names once, and leaves alone: a file system full of other
 * people's files is the normal case, and a scan that fails because of one of them would keep a job
 * from starting.
 *
 * A version says twice what it is: by its directory and by its summary. Where they differ, somebody
 * has moved or copied directories by hand; such a version is bad, because its manifests would be
 * refused one by one later, in the middle of a restore.
 */

struct scan {
    struct tier *tier;
    const char *job;     /* the name */
    const char *escaped; /* the directory */
    struct catalog *catalog;
    size_t version_capacity, generation_capacity;
    bool fresh;     /* directories are synced before they are listed */
    bool runs_only; /* versions are not looked at */
};

static int list(const struct scan *scan, const char *path, struct tier_entries *ret_entries) {
    int r = scan->fresh ? tier_sync_directory(scan->tier, path) : 0;
    if (r == -ENOENT)
        return TIER_E_ABSENT;
    return r ? r : tier_list_names(scan->tier, path, ret_entries);
}

static void note_bad(struct scan *scan, const char *path, const char *why) {
    char text[TIER_PATH_MAX * 2];
    tier_path_text(scan->tier, path, text);
    scan->catalog->bad++;
    problem_set(&scan->catalog->first_bad, -EBADMSG, "tier %s: %.300s: %s", scan->tier->name, text, why);
}

static void *grow(void *items, size_t count, size_t *capacity, size_t item_size) {
    if (items && count < *capacity)
        return items;
    size_t larger = *capacity ? *capacity * 2 : 16;
    void *grown = reallocarray(items, larger, item_size);
    if (grown)
        *capacity = larger;
    return grown;
}

static int add_version(struct scan *scan, const struct catalog_version *version) {
    struct catalog *catalog = scan->catalog;
    struct catalog_version *versions =
        grow(catalog->versions, catalog->version_count, &scan->version_capacity, sizeof *versions);
    if (!versions)
        return -ENOMEM;
    catalog->versions = versions;
    versions[catalog->version_count++] = *version;
    return 0;
}

static int add_generation(struct scan *scan, const struct catalog_generation *generation) {
    struct catalog *catalog = scan->catalog;
    struct catalog_generation *generations =
        grow(catalog->generations, catalog->generation_count, &scan->generation_capacity, sizeof *generations);
    if (!generations)
        return -ENOMEM;
    catalog->generations = generations;
    generations[catalog->generation_count++] = *generation;
    return 0;
}

static void child_path(const char *directory, const char *name, char ret_path[TIER_PATH_MAX]) {
    /* Three of our own components and one that the file system returned always fit. */
    int length = snprintf(ret_path, TIER_PATH_MAX, "%s/%s", directory, name);
    assert(length < TIER_PATH_MAX);
}

/* Reads the summary of complete.json into the version, or finds it bad. */
static void scan_complete(struct scan *scan, const char *directory, struct catalog_version *version) {
    char path[TIER_PATH_MAX];
    child_path(directory, "complete.json", path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    int r = tier_read_file(scan->tier, path, MANIFEST_LINE_MAX, &data, &size);
    if (r == TIER_E_ABSENT) /* it is being trashed */
        return;
    struct problem problem = PROBLEM_NONE;
    if (r < 0) {
        version->damaged = catalog_is_no_file(r);
        version->unreadable = !version->damaged;
        note_bad(scan, path, strerror(-r));
        return;
    }
    r = complete_read_summary(data, size, &version->summary, &problem);
    if (r) {
        version->damaged = r == -EBADMSG;
        version->unreadable = !version->damaged;
        note_bad(scan, path, problem_text(&problem, r));
        return;
    }
    if (strcmp(version->summary.job, scan->job) != 0 || version->summary.generation != version->id.generation ||
        version->summary.step != version->id.step) {
        version->damaged = true;
        note_bad(scan, path, "it is of another version than its directory says");
        return;
    }
    version->complete = true;
}

static bool ends_in(const char *name, const char *suffix) {
    size_t length = strlen(name), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(name + length - suffix_length, suffix) == 0;
}

static int compare_name(const void *key, const void *entry) {
    return strcmp(key, ((const struct tier_entry *)entry)->name);
}

/* An index is set aside with every part, and counts only where it alone was bad. */
static void count_damage(struct scan *scan, const struct tier_entries *entries) {
    struct catalog_damage parts = {0}, index = {0};
    for (size_t i = 0; i < entries->count; i++) {
        char name[256];
        uint32_t rank;
        snprintf(name, sizeof name, "%s", entries->items[i].name);
        if (!ends_in(name, ".bad"))
            continue;
        name[strlen(name) - strlen(".bad")] = '\0';
        bool is_index = strcmp(name, "complete.json") == 0;
        if (!is_index && !layout_parse_manifest(name, &rank))
            continue;
        struct catalog_damage *damage = is_index ? &index : &parts;
        damage->set_aside++;
        damage->repaired += bsearch(name, entries->items, entries->count, sizeof *entries->items, compare_name) != NULL;
    }
    const struct catalog_damage *counts = parts.set_aside ? &parts : &index;
    scan->catalog->damage.set_aside += counts->set_aside;
    scan->catalog->damage.repaired += counts->repaired;
}

static int scan_version(struct scan *scan, struct version_id id) {
    char directory[TIER_PATH_MAX];
    layout_version(scan->escaped, id, directory);
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = list(scan, directory, &entries);
    if (r == TIER_E_ABSENT)
        return 0;
    struct catalog_version version = {.id = id, .unreadable = r != 0};
    if (r) {
        note_bad(scan, directory, strerror(-r));
        return r == -ENOMEM ? r : add_version(scan, &version);
    }
    bool condemned = false;
    for (size_t i = 0; i < entries.count; i++) {
        if (strcmp(entries.items[i].name, "complete.json") == 0)
            scan_complete(scan, directory, &version);
        else if (strcmp(entries.items[i].name, "complete.json.bad") == 0)
            condemned = true;
    }
    if (condemned && !version.complete && !version.unreadable)
        version.damaged = true;
    count_damage(scan, &entries);
    version.pinned = pin_holds(scan->tier, directory, &entries);
    return add_version(scan, &version);
}

static void scan_run(struct scan *scan, const char *directory, struct catalog_generation *generation) {
    char path[TIER_PATH_MAX];
    child_path(directory, "run", path);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    /* Read before it is examined: opening a file makes a network client ask the server for its
     * times, while examining it alone may show attributes that were cached a minute ago, and a
     * heartbeat would look dead. */
    int r = tier_read_file(scan->tier, path, MANIFEST_LINE_MAX, &data, &size);
    if (r == TIER_E_ABSENT)
        return;
    struct problem problem = PROBLEM_NONE;
    if (r < 0)
        generation->error = r;
    else
        r = run_record_read(data, size, &generation->run, &problem);
    if (r == 0 && (strcmp(generation->run.job, scan->job) != 0 || generation->run.generation != generation->generation))
        r = problem_set(&problem, -EBADMSG, "it is of another run than its directory says");
    if (r)
        note_bad(scan, path, problem_text(&problem, r));
    generation->has_run = r == 0;
    generation->run_damaged = r != 0;
    struct tier_entry entry;
    r = tier_stat(scan->tier, path, &entry);
    if (r == 0)
        generation->touched_ns = entry.mtime_ns;
    else if (r < 0)
        generation->error = r;
}

static int scan_generation(struct scan *scan, uint64_t number) {
    char directory[TIER_PATH_MAX], path[TIER_PATH_MAX];
    layout_generation(scan->escaped, number, directory);
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = list(scan, directory, &entries);
    if (r == TIER_E_ABSENT)
        return 0;
    if (r)
        note_bad(scan, directory, strerror(-r));
    if (r == -ENOMEM)
        return r;
    struct catalog_generation generation = {.generation = number, .run_damaged = r != 0, .error = r};
    for (size_t i = 0; i < entries.count; i++) {
        const struct tier_entry *entry = &entries.items[i];
        struct version_id id = {.generation = number};
        r = 0;
        if (strcmp(entry->name, "run") == 0) {
            scan_run(scan, directory, &generation);
        } else if (strcmp(entry->name, "run-ended") == 0) {
            generation.run_ended = true;
        } else if (entry->is_directory && layout_parse_number(entry->name, &id.step)) {
            r = scan->runs_only ? 0 : scan_version(scan, id);
        } else if (!ends_in(entry->name, ".tmp")) {
            child_path(directory, entry->name, path);
            note_bad(scan, path, "this is nothing that belongs here");
        }
        if (r)
            return r;
    }
    return add_generation(scan, &generation);
}

static int compare_versions(const void *a, const void *b) {
    return version_compare(((const struct catalog_version *)a)->id, ((const struct catalog_version *)b)->id);
}

static int compare_generations(const void *a, const void *b) {
    uint64_t left = ((const struct catalog_generation *)a)->generation;
    uint64_t right = ((const struct catalog_generation *)b)->generation;
    return left < right ? -1 : left > right;
}

static int scan_job(struct tier *tier, const char *job, bool fresh, bool runs_only, struct catalog *ret_catalog,
                    struct problem *problem) {
    char escaped[256], path[TIER_PATH_MAX];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    CLEANUP(catalog_deinit) struct catalog catalog = {0};
    struct scan scan = {
        .tier = tier, .job = job, .escaped = escaped, .catalog = &catalog, .fresh = fresh, .runs_only = runs_only};
    r = fresh ? tier_sync_directory(tier, "") : 0;
    if (r == 0)
        r = list(&scan, escaped, &entries);
    if (r < 0)
        return tier_problem(problem, tier, r, "list", escaped);
    for (size_t i = 0; i < entries.count; i++) {
        const struct tier_entry *entry = &entries.items[i];
        struct version_id trashed;
        uint64_t number;
        if (entry->is_directory && layout_parse_number(entry->name, &number)) {
            r = scan_generation(&scan, number);
            if (r)
                return tier_problem(problem, tier, r, "scan", escaped);
        } else if (!entry->is_directory || !layout_parse_trash(entry->name, &trashed)) {
            child_path(escaped, entry->name, path);
            note_bad(&scan, path, "this is nothing that belongs here");
        }
    }
    if (catalog.version_count)
        qsort(catalog.versions, catalog.version_count, sizeof *catalog.versions, compare_versions);
    if (catalog.generation_count)
        qsort(catalog.generations, catalog.generation_count, sizeof *catalog.generations, compare_generations);
    *ret_catalog = catalog;
    catalog = (struct catalog){0};
    return 0;
}

int catalog_scan(struct tier *tier, const char *job, struct catalog *ret_catalog, struct problem *problem) {
    return scan_job(tier, job, false, false, ret_catalog, problem);
}

int catalog_scan_fresh(struct tier *tier, const char *job, struct catalog *ret_catalog, struct problem *problem) {
    return scan_job(tier, job, true, false, ret_catalog, problem);
}

int catalog_scan_runs(struct tier *tier, const char *job, struct catalog *ret_catalog, struct problem *problem) {
    return scan_job(tier, job, false, true, ret_catalog, problem);
}

static int compare_descending(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left > right ? -1 : left < right;
}

/* The directories whose names are numbers, the greatest first. */
static int list_numbers(const struct scan *scan, const char *path, uint64_t **ret_numbers, size_t *ret_count) {
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = list(scan, path, &entries);
    if (r)
        return r;
    uint64_t *numbers = malloc(max_u64(entries.count, 1) * sizeof *numbers);
    if (!numbers)
        return -ENOMEM;
    size_t count = 0;
    for (size_t i = 0; i < entries.count; i++)
        if (entries.items[i].is_directory && layout_parse_number(entries.items[i].name, &numbers[count]))
            count++;
    qsort(numbers, count, sizeof *numbers, compare_descending);
    *ret_numbers = numbers;
    *ret_count = count;
    return 0;
}

static bool newest_found(const struct catalog *catalog, uint32_t max) {
    return catalog->version_count == max ||
           (catalog->version_count && catalog->versions[catalog->version_count - 1].complete);
}

static int scan_newest(struct scan *scan, uint64_t generation, uint32_t max) {
    char directory[TIER_PATH_MAX];
    CLEANUP(freep) uint64_t *steps = NULL;
    size_t count;
    layout_generation(scan->escaped, generation, directory);
    int r = list_numbers(scan, directory, &steps, &count);
    if (r == -ENOMEM)
        return r;
    for (size_t i = 0; r == 0 && i < count && !newest_found(scan->catalog, max); i++) {
        r = scan_version(scan, (struct version_id){generation, steps[i]});
        if (r)
            return r;
    }
    return 0;
}

int catalog_scan_newest(struct tier *tier, const char *job, uint32_t max, struct catalog *ret_catalog,
                        struct problem *problem) {
    char escaped[256];
    int r = job_escape(job, escaped, problem);
    if (r)
        return r;
    CLEANUP(catalog_deinit) struct catalog catalog = {0};
    CLEANUP(freep) uint64_t *generations = NULL;
    size_t count = 0;
    struct scan scan = {.tier = tier, .job = job, .escaped = escaped, .catalog = &catalog};
    r = list_numbers(&scan, escaped, &generations, &count);
    if (r < 0)
        return tier_problem(problem, tier, r, "list", escaped);
    for (size_t i = 0; i < count && !newest_found(&catalog, max); i++) {
        r = scan_newest(&scan, generations[i], max);
        if (r)
            return tier_problem(problem, tier, r, "scan", escaped);
    }
    if (catalog.version_count)
        qsort(catalog.versions, catalog.version_count, sizeof *catalog.versions, compare_versions);
    *ret_catalog = catalog;
    catalog = (struct catalog){0};
    return 0;
}

void catalog_deinit(struct catalog *catalog) {
    free(catalog->versions);
    free(catalog->generations);
    *catalog = (struct catalog){0};
}

const struct catalog_version *catalog_find(const struct catalog *catalog, struct version_id id) {
    const struct catalog_version key = {.id = id};
    if (catalog->version_count == 0)
        return NULL;
    return bsearch(&key, catalog->versions, catalog->version_count, sizeof key, compare_versions);
}

static void free_names(char **names, size_t count) {
    for (size_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

int catalog_jobs(struct tier *tier, char ***ret_jobs, size_t *ret_count, struct problem *problem) {
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    int r = tier_list(tier, "", &entries);
    if (r)
        return tier_problem(problem, tier, r, "list", "");
    char **jobs = calloc(entries.count + 1, sizeof *jobs);
    if (!jobs)
        return tier_problem(problem, tier, -ENOMEM, "list", "");
    size_t count = 0;
    for (size_t i = 0; i < entries.count; i++) {
        char job[MANIFEST_JOB_MAX];
        if (!entries.items[i].is_directory || job_unescape(entries.items[i].name, job) != 0)
            continue;
        jobs[count] = strdup(job);
        if (!jobs[count]) {
            free_names(jobs, count);
            return tier_problem(problem, tier, -ENOMEM, "list", "");
        }
        count++;
    }
    *ret_jobs = jobs;
    *ret_count = count;
    return 0;
}
