/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must be true, kept apart from the code that makes it so: the bytes of every save at its
 * moment, what trainers were told, and a look at all disks that no daemon takes part in.
 */
#include "tests/sim/sim.h"
#include "tiers/catalog.h"

#define SAVES_MAX 2048
#define PROMISES_MAX 4096
#define RUNS_MAX 64
#define DRAIN_TRIES 4 /* at least, before a tier is given up */

struct promise {
    struct version_id id;
    uint32_t rank;
    int node;
    enum level level;
    bool whole, void_;
};

struct run {
    char run_id[32];
    uint64_t generation;
    bool resumes;
    struct version_id resume;
};

static struct save *saves[SAVES_MAX];
static size_t save_count;
static struct promise promises[PROMISES_MAX];
static size_t promise_count;
static struct run runs[RUNS_MAX];
static size_t run_count;
static uint64_t failures_at_launch;
static uint32_t world_at_launch;

struct save *model_save(struct version_id id, uint32_t rank, uint32_t world, int node, const void *image,
                        uint64_t image_size) {
    struct save *save = calloc(1, sizeof *save);
    assert(save && save_count < SAVES_MAX);
    *save = (struct save){
        .id = id, .rank = rank, .world = world, .node = node, .image_size = image_size, .failures = sim.failures};
    save->image = malloc(image_size);
    assert(save->image);
    memcpy(save->image, image, image_size);
    saves[save_count++] = save;
    return save;
}

void model_durable(struct version_id id, uint32_t rank, int node, enum level level, bool whole) {
    assert(promise_count < PROMISES_MAX);
    promises[promise_count++] = (struct promise){.id = id, .rank = rank, .node = node, .level = level, .whole = whole};
}

void model_given_up(struct version_id id, const char *reason) {
    uint64_t before = sim.failures;
    for (size_t i = 0; i < save_count; i++) {
        if (version_compare(saves[i]->id, id) != 0)
            continue;
        before = min_u64(before, saves[i]->failures);
        if (saves[i]->image_size > nodes[saves[i]->node].config.pool_size)
            return; /* its bytes go through memory only once */
    }
    SIM_CHECK(sim.failures - before >= DRAIN_TRIES, "a tier is given up after its tries, not before",
              "step %llu, after %llu failures: %s", (unsigned long long)id.step,
              (unsigned long long)(sim.failures - before), reason);
}

static uint32_t world_of(struct version_id id) {
    for (size_t i = 0; i < save_count; i++)
        if (version_compare(saves[i]->id, id) == 0)
            return saves[i]->world;
    return 0;
}

/* The newest version that whoever decides must go on from: what is GLOBAL; what is LOCAL if there is one node
 * and the run has not grown. */
static bool newest_reported(struct version_id *ret_id) {
    bool found = false;
    for (size_t i = 0; i < promise_count; i++) {
        const struct promise *promise = &promises[i];
        bool all_see = promise->level == LEVEL_GLOBAL || (node_count == 1 && world_of(promise->id) >= world_at_launch);
        bool known = promise->whole && !promise->void_ && all_see;
        if (known && (!found || version_compare(promise->id, *ret_id) > 0)) {
            *ret_id = promise->id;
            found = true;
        }
    }
    return found;
}

void model_launch(uint32_t world) {
    failures_at_launch = sim.failures;
    world_at_launch = world;
}

static uint64_t greatest_generation(void) {
    uint64_t greatest = 0;
    for (size_t i = 0; i < run_count; i++)
        greatest = max_u64(greatest, runs[i].generation);
    return greatest;
}

static void check_same(const struct run *run, uint64_t generation, bool resumes, struct version_id resume) {
    bool same = run->generation == generation && run->resumes == resumes && version_compare(run->resume, resume) == 0;
    SIM_CHECK(same, "all ranks of a run get the same decision",
              "run %s: generation %llu resumes %llu/%llu, and then generation %llu resumes %llu/%llu", run->run_id,
              (unsigned long long)run->generation, (unsigned long long)run->resume.generation,
              (unsigned long long)run->resume.step, (unsigned long long)generation,
              (unsigned long long)resume.generation, (unsigned long long)resume.step);
}

void model_opened(const char *run_id, uint64_t generation, bool resumes, struct version_id resume) {
    struct run *before = NULL;
    for (size_t i = 0; i < run_count; i++)
        if (strcmp(runs[i].run_id, run_id) == 0)
            before = &runs[i];
    /* Its record lapsed and another run claimed the job in between: then it is claimed anew, as one more run. */
    if (before && generation <= before->generation + 1) {
        check_same(before, generation, resumes, resume);
        return;
    }
    SIM_CHECK(generation > greatest_generation(), "generations increase", "run %s got generation %llu", run_id,
              (unsigned long long)generation);
    struct version_id newest;
    bool failed = sim.failures != failures_at_launch; /* what cannot be read is passed over */
    if (newest_reported(&newest) && !failed)
        SIM_CHECK(resumes && version_compare(resume, newest) >= 0, "a run resumes from what was reported durable",
                  "run %s resumes from %llu/%llu, but %llu/%llu was durable", run_id,
                  (unsigned long long)resume.generation, (unsigned long long)resume.step,
                  (unsigned long long)newest.generation, (unsigned long long)newest.step);
    assert(run_count < RUNS_MAX);
    struct run *run = &runs[run_count++];
    *run = (struct run){.generation = generation, .resumes = resumes, .resume = resume};
    snprintf(run->run_id, sizeof run->run_id, "%s", run_id);
}

void model_check_image(struct version_id id, uint32_t rank, const void *image, uint64_t size, const char *where) {
    const struct save *last = NULL;
    for (size_t i = 0; i < save_count; i++) {
        const struct save *save = saves[i];
        if (version_compare(save->id, id) != 0 || save->rank != rank)
            continue;
        last = save;
        if (save->image_size != size || memcmp(save->image, image, size) != 0)
            continue;
        SIM_CHECK(save->state != SAVE_VOID, "a save that was given up is never committed", "%llu/%llu rank %u in %s",
                  (unsigned long long)id.generation, (unsigned long long)id.step, rank, where);
        return;
    }
    uint64_t at = 0;
    while (last && at < size && at < last->image_size && last->image[at] == ((const uint8_t *)image)[at])
        at++;
    sim_fail("bytes are those of the moment of the save", "%llu/%llu rank %u in %s: differs from byte %llu on",
             (unsigned long long)id.generation, (unsigned long long)id.step, rank, where, (unsigned long long)at);
}

void model_disk_lost(int node) {
    for (size_t i = 0; i < promise_count; i++)
        if (promises[i].node == node && promises[i].level < LEVEL_GLOBAL)
            promises[i].void_ = true;
}

/* ---- what lies in the tiers ---- */

struct view {
    struct tier *tier;
    struct catalog catalog;
    int node; /* SIM_OUTSIDE: the parallel one */
};

static bool has_part(const struct view *view, struct version_id id, uint32_t rank) {
    struct manifest manifest;
    struct problem problem = PROBLEM_NONE;
    if (catalog_read_manifest(view->tier, SIM_JOB, id, rank, &manifest, &problem) != 0)
        return false;
    bool there = !manifest.summary.absent;
    manifest_deinit(&manifest);
    return there;
}

/* Every manifest promises its data. */
static void check_part(const struct view *view, struct version_id id, uint32_t rank) {
    struct problem problem = PROBLEM_NONE;
    struct manifest manifest;
    struct tier_file file;
    char path[TIER_PATH_MAX], directory[256];
    int r = catalog_read_manifest(view->tier, SIM_JOB, id, rank, &manifest, &problem);
    SIM_CHECK(r == 0, "a manifest promises its data", "%s", problem.text);
    if (manifest.summary.absent) {
        manifest_deinit(&manifest);
        return;
    }
    r = job_escape(SIM_JOB, directory, &problem);
    layout_file(directory, id, manifest.summary.data_file, path);
    r = r ? r : tier_open(view->tier, path, &file);
    SIM_CHECK(r == 0, "a manifest promises its data", "%s: %d", path, r);
    void *data = NULL, *scratch = NULL;
    uint8_t *image = malloc(manifest.summary.image_size);
    if (!image || posix_memalign(&data, TIER_ALIGNMENT, MIB(1)) || posix_memalign(&scratch, TIER_ALIGNMENT, MIB(1)))
        abort();
    for (uint32_t i = 0; i < manifest.chunk_count; i++) {
        r = catalog_read_chunk(&file, &manifest, i, data, scratch, &problem);
        SIM_CHECK(r == 0, "a manifest promises its data", "%s chunk %u: %s", path, i, problem.text);
        memcpy(image + (uint64_t)i * manifest.summary.chunk_size, data, manifest.chunks[i].raw_length);
    }
    model_check_image(id, rank, image, manifest.summary.image_size, path);
    free(image);
    free(data);
    free(scratch);
    (void)tier_close(&file);
    manifest_deinit(&manifest);
}

/* Set aside, because a read of one of its parts brought other bytes. */
static bool is_condemned(const struct view *view, const char *path) {
    char aside[TIER_PATH_MAX + 32];
    struct tier_entry entry;
    snprintf(aside, sizeof aside, "%s/complete.json.bad", path);
    return sim.rotten && tier_stat(view->tier, aside, &entry) == 0;
}

static void check_version(const struct view *view, const struct catalog_version *version) {
    char path[TIER_PATH_MAX], directory[256];
    struct tier_entries entries;
    struct problem problem = PROBLEM_NONE;
    (void)!job_escape(SIM_JOB, directory, &problem);
    layout_version(directory, version->id, path);
    SIM_CHECK(!version->damaged || is_condemned(view, path), "complete.json is never torn", "%s in %s: %s", path,
              view->tier->name, view->catalog.first_bad.text);
    if (tier_list(view->tier, path, &entries) != 0)
        return;
    for (size_t i = 0; i < entries.count; i++) {
        uint32_t rank;
        if (layout_parse_manifest(entries.items[i].name, &rank))
            check_part(view, version->id, rank);
    }
    tier_entries_deinit(&entries);
    if (!version->complete)
        return;
    int r = catalog_check(view->tier, SIM_JOB, version->id, &problem);
    SIM_CHECK(r == 0, "a version listed complete is complete", "%s in %s: %s", path, view->tier->name, problem.text);
}

static bool reaches(const struct view *view, const struct promise *promise) {
    return view->node == SIM_OUTSIDE || (promise->level <= LEVEL_LOCAL && view->node == promise->node);
}

static bool kept(const struct view *views, size_t count, const struct promise *promise) {
    if (!promise->whole && promise->id.generation < greatest_generation())
        return true; /* of a dead run, and incomplete as far as we know */
    for (size_t i = 0; i < count; i++) {
        if (!reaches(&views[i], promise))
            continue;
        const struct catalog *catalog = &views[i].catalog;
        for (size_t v = 0; v < catalog->version_count; v++)
            if (catalog->versions[v].complete && version_compare(catalog->versions[v].id, promise->id) >= 0)
                return true;
        if (!promise->whole && has_part(&views[i], promise->id, promise->rank))
            return true;
    }
    return false;
}

static bool complete_on(struct disk *disk, struct version_id id) {
    struct tier *tier = sim_tier_new(disk, "", LEVEL_LOCAL, SIM_OUTSIDE);
    struct problem problem = PROBLEM_NONE;
    bool complete = catalog_check(tier, SIM_JOB, id, &problem) == 0;
    tier_free(tier);
    return complete;
}

bool model_reachable(struct version_id id, int node) {
    return complete_on(parallel, id) || (nodes[node].local && complete_on(nodes[node].local, id));
}

/* "job/generation/step/file" */
static bool parse_path(const char *path, struct version_id *ret_id) {
    unsigned long long generation, step;
    if (sscanf(path, SIM_JOB "/%llu/%llu/", &generation, &step) != 2)
        return false;
    *ret_id = (struct version_id){generation, step};
    return true;
}

bool model_is_newest_run(const char *path) {
    struct version_id id;
    if (!parse_path(path, &id))
        return false;
    char newer[TIER_PATH_MAX];
    layout_generation(SIM_JOB, id.generation + 1, newer);
    return !disk_find(parallel, newer);
}

bool model_is_global(const char *path) {
    struct version_id id;
    return parse_path(path, &id) && complete_on(parallel, id);
}

void model_check_tiers(void) {
    struct view views[1 + SIM_NODES_MAX] = {
        {.tier = sim_tier_new(parallel, "parallel", LEVEL_GLOBAL, SIM_OUTSIDE), .node = SIM_OUTSIDE}};
    size_t count = 1;
    for (int i = 0; i < node_count; i++)
        if (nodes[i].local) {
            views[count].tier = sim_tier_new(nodes[i].local, disk_name(nodes[i].local), LEVEL_LOCAL, SIM_OUTSIDE);
            views[count++].node = i;
        }
    for (size_t i = 0; i < count; i++) {
        struct problem problem = PROBLEM_NONE;
        int r = catalog_scan(views[i].tier, SIM_JOB, &views[i].catalog, &problem);
        SIM_CHECK(r == 0, "tiers can be scanned", "%s", problem.text);
        for (size_t v = 0; v < views[i].catalog.version_count; v++)
            check_version(&views[i], &views[i].catalog.versions[v]);
    }
    for (size_t i = 0; i < promise_count; i++)
        if (!promises[i].void_)
            SIM_CHECK(kept(views, count, &promises[i]), "what was reported durable is kept",
                      "%s of %llu/%llu, rank %u of node %d, was reported at level %d",
                      promises[i].whole ? "the version" : "a part", (unsigned long long)promises[i].id.generation,
                      (unsigned long long)promises[i].id.step, promises[i].rank, promises[i].node, promises[i].level);
    for (size_t i = 0; i < count; i++) {
        catalog_deinit(&views[i].catalog);
        tier_free(views[i].tier);
    }
}
