/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/claim.h"

#include "tiers/catalog.h"

#include <errno.h>
#include <inttypes.h>

/*
 * The ranks of a launch come up at different moments, on different nodes, and each asks: which
 * generation are we, and from which version do we go on? They must all get the same answer, also if
 * half of the previous launch is still alive somewhere. The answer is a file that only one can make:
 *
 *     look at the greatest generation
 *       its run is ours, not ended  -> join: its record is the answer
 *       it cannot be read           -> an error: whoever holds the job may be alive
 *       its run is another, alive   -> CLAIM_E_HELD
 *       its run is dead or ended    -> choose a version; link `run` into the next generation
 *       it has no run file          -> choose a version; link `run` into this generation
 *     the link failed, somebody was faster -> look again
 *     meanwhile the greatest generation has changed -> look again
 *
 * A generation without a run file is what a crash leaves between the directory and the link. It is
 * claimed as it stands, and not skipped: of two ranks that come at that moment one would otherwise
 * link there (it made the directory) and the other in the next one, and both would believe they had
 * decided. All contend for the same name, so one wins. Only if versions lie in it, it was claimed
 * once, and somebody deleted the run file: then the next number is taken.
 *
 * The number exceeds every generation in any tier, not only in the deciding one: after somebody
 * emptied that, old versions in a node's own tier must not look newer than new ones.
 */

#define CLAIM_ATTEMPTS_MAX 64 /* each lost to another claim, so more are not a race but a fault */

struct claim {
    const struct claim_request *request;
    char job[256];            /* escaped */
    struct catalog *catalogs; /* [tier_count] */
    struct problem *problem;
    bool unsure; /* publishing failed, perhaps after the link */
};

static void enter(const struct claim *claim, struct tier *tier) {
    if (claim->request->at)
        atomic_store_explicit(claim->request->at, tier, memory_order_relaxed);
}

static struct catalog *decider_catalog(const struct claim *claim) {
    const struct claim_request *request = claim->request;
    for (size_t i = 0; i < request->tier_count; i++) {
        if (request->tiers[i] == request->decider)
            return &claim->catalogs[i];
    }
    assert(!"the decider is one of the tiers");
    return NULL;
}

static void forget(struct claim *claim) {
    for (size_t i = 0; i < claim->request->tier_count; i++)
        catalog_deinit(&claim->catalogs[i]);
}

static int look_at_decider(struct claim *claim) {
    const struct claim_request *request = claim->request;
    forget(claim);
    enter(claim, request->decider);
    return catalog_scan_runs(request->decider, request->job, decider_catalog(claim), claim->problem);
}

/* Alive, by the heartbeat or by its process. -errno, 0, or 1; *ret_here: its process is alive on this host. */
static int holder_alive(const struct claim *claim, const struct catalog_generation *generation, bool *ret_here,
                        int64_t *ret_silent_ns) {
    const struct claim_request *request = claim->request;
    const struct run_record *run = &generation->run;
    *ret_here = false;
    if (generation->has_run && strcmp(run->host, request->host) == 0 && strcmp(run->boot_id, request->boot_id) == 0) {
        uint64_t start;
        int r = claim_pid_start(run->pid, &start);
        if (r == -ESRCH || (r == 0 && start != run->pid_start))
            return 0;
        *ret_here = r == 0;
    }
    int64_t now_ns;
    int r = tier_now(request->decider, &now_ns);
    if (r)
        return tier_problem(claim->problem, request->decider, r, "read the clock of the file system of", "");
    *ret_silent_ns = now_ns - generation->touched_ns;
    if (*ret_silent_ns < -(int64_t)(CLAIM_LAPSE_MS * NANOSECONDS_PER_MS)) {
        r = claim_touch(request->decider, request->job, generation->generation);
        if (r < 0)
            return tier_problem(claim->problem, request->decider, r, "touch the run file of", request->job);
    }
    return *ret_silent_ns < (int64_t)(CLAIM_LAPSE_MS * NANOSECONDS_PER_MS);
}

static int refuse(const struct claim *claim, const struct catalog_generation *generation, int64_t silent_ns) {
    const struct run_record *run = &generation->run;
    const char *job = claim->request->job;
    long long silent_s = silent_ns > 0 ? silent_ns / (long long)NANOSECONDS_PER_SECOND : 0;
    if (!generation->has_run)
        return problem_set(claim->problem, CLAIM_E_HELD,
                           "job '%.100s' is held by a run whose record cannot be read (generation %" PRIu64
                           ", last sign of life %lld s ago): %.200s",
                           job, generation->generation, silent_s, decider_catalog(claim)->first_bad.text);
    return problem_set(claim->problem, CLAIM_E_HELD,
                       "job '%.100s' is held by run '%s': process %" PRIu32
                       " on host %.64s, last sign of life %lld s ago; stop it, or wait until it has been silent for "
                       "%d s, or use another job name",
                       job, run->run_id, run->pid, run->host, silent_s, CLAIM_LAPSE_MS / 1000);
}

/* The next smaller version that any tier knows complete, or had. */
static bool next_candidate(const struct claim *claim, bool first, struct version_id below, struct version_id *ret_id) {
    bool found = false;
    for (size_t i = 0; i < claim->request->tier_count; i++) {
        const struct catalog *catalog = &claim->catalogs[i];
        for (size_t k = 0; k < catalog->version_count; k++) {
            const struct catalog_version *version = &catalog->versions[k];
            if (!version->complete && !version->damaged && !version->unreadable)
                continue;
            if (!first && version_compare(version->id, below) >= 0)
                continue;
            if (found && version_compare(version->id, *ret_id) <= 0)
                continue;
            *ret_id = version->id;
            found = true;
        }
    }
    return found;
}

/* HERE: in a tier that the ranks on other nodes do not see. */
enum candidate { CANDIDATE_GOOD, CANDIDATE_HERE, CANDIDATE_BAD, CANDIDATE_GONE };

/* What is complete in a node's own tier was written by ranks that were all on this node. As many, or fewer,
 * are likely to be here again, and to want that newest version; a run that has grown is likely to have grown
 * beyond the node, and then its other ranks could restore nothing. */
static bool all_see(const struct claim *claim, struct tier *tier, const struct catalog_version *version) {
    const struct claim_request *request = claim->request;
    return tier == request->decider || tier->capabilities & TIER_SHARED || request->world <= version->summary.world;
}

/* Is there a tier that holds a good copy? Says in `why` what is wrong with the first bad one. */
static enum candidate check_candidate(const struct claim *claim, struct version_id id, struct problem *why) {
    enum candidate result = CANDIDATE_GONE;
    bool here = false;
    for (size_t i = 0; i < claim->request->tier_count; i++) {
        struct tier *tier = claim->request->tiers[i];
        const struct catalog_version *version = catalog_find(&claim->catalogs[i], id);
        if (!version)
            continue;
        if (version->damaged) {
            problem_set(why, -EBADMSG, "tier %s: complete.json is damaged, or was set aside as damaged",
                        claim->request->tiers[i]->name);
            result = CANDIDATE_BAD;
        }
        if (!version->complete && !version->unreadable)
            continue;
        enter(claim, tier);
        int r = catalog_check(tier, claim->request->job, id, why);
        if (r == 0 && all_see(claim, tier, version))
            return CANDIDATE_GOOD;
        if (r == 0) {
            problem_set(why, -EXDEV,
                        "tier %s: it is complete on this node only, which ranks on others cannot see, and this run has "
                        "more ranks than wrote it; ckptctl drain --wait would have copied it",
                        tier->name);
            here = true;
        }
        if (r < 0)
            result = CANDIDATE_BAD;
    }
    return here ? CANDIDATE_HERE : result;
}

/* A generation newer than the choice that could not be looked at may hold a newer version. */
static bool find_unreadable(const struct claim *claim, const struct run_record *record, struct version_id *ret_id,
                            struct problem *why) {
    for (size_t i = 0; i < claim->request->tier_count; i++) {
        const struct catalog *catalog = &claim->catalogs[i];
        for (size_t k = 0; k < catalog->generation_count; k++) {
            const struct catalog_generation *generation = &catalog->generations[k];
            if (!generation->error || (record->resumes && generation->generation <= record->resume_generation))
                continue;
            *ret_id = (struct version_id){generation->generation, 0};
            problem_set(why, generation->error, "tier %s: generation %" PRIu64 " cannot be read: %s",
                        claim->request->tiers[i]->name, generation->generation, strerror(-generation->error));
            return true;
        }
    }
    return false;
}

static void warn(const struct run_record *record, struct version_id passed, const struct problem *why,
                 struct problem *warning) {
    problem_set(warning, -EBADMSG,
                "generation %" PRIu64 ", step %" PRIu64 " cannot be used (%.300s); going on from generation %" PRIu64
                ", step %" PRIu64 " instead",
                passed.generation, passed.step, why->text, record->resume_generation, record->resume_step);
}

static void go_on_from(struct run_record *record, struct version_id id) {
    record->resumes = true;
    record->resume_generation = id.generation;
    record->resume_step = id.step;
}

/* Chooses the version to go on from. 0 with record->resumes set or not; -ENODATA. */
static int choose(const struct claim *claim, struct run_record *record, struct problem *warning) {
    struct version_id id = {0};
    struct problem why = PROBLEM_NONE;
    struct version_id newest_bad = {0}, newest_here = {0};
    bool bad = false, here = false;
    record->resumes = false;
    for (bool first = true; next_candidate(claim, first, id, &id); first = false) {
        enum candidate candidate = check_candidate(claim, id, &why);
        if (candidate == CANDIDATE_GOOD) {
            go_on_from(record, id);
            break;
        }
        if (candidate == CANDIDATE_HERE && !here) {
            newest_here = id;
            here = true;
        }
        if (candidate != CANDIDATE_GONE && !bad) {
            newest_bad = id;
            bad = true;
        }
    }
    /* Better than a fresh start that nobody asked for: who cannot see it is told so. */
    if (here && !record->resumes) {
        go_on_from(record, newest_here);
        if (version_compare(newest_bad, newest_here) == 0)
            return 0;
    }
    if (!bad && !find_unreadable(claim, record, &newest_bad, &why))
        return 0;
    if (!record->resumes)
        return problem_set(claim->problem, -ENODATA,
                           "job '%.80s' has versions, but none is usable; the newest is generation %" PRIu64
                           ", step %" PRIu64 ": %.250s; repair or remove them, or use another job name to start afresh",
                           claim->request->job, newest_bad.generation, newest_bad.step, why.text);
    warn(record, newest_bad, &why, warning);
    return 0;
}

void claim_passed_over(const struct claim_request *request, struct catalog *catalogs, const struct run_record *record,
                       struct problem *ret_warning) {
    struct claim claim = {.request = request, .catalogs = catalogs};
    struct version_id resume = {record->resume_generation, record->resume_step}, id = {record->generation, 0};
    while (record->resumes && next_candidate(&claim, false, id, &id) && version_compare(id, resume) > 0) {
        struct problem why = PROBLEM_NONE;
        if (check_candidate(&claim, id, &why) != CANDIDATE_BAD) /* a good one came late, after the decision */
            continue;
        warn(record, id, &why, ret_warning);
        return;
    }
}

static bool has_versions(const struct claim *claim, uint64_t generation) {
    for (size_t i = 0; i < claim->request->tier_count; i++) {
        const struct catalog *catalog = &claim->catalogs[i];
        for (size_t k = 0; k < catalog->version_count; k++) {
            if (catalog->versions[k].id.generation == generation)
                return true;
        }
    }
    return false;
}

/* The generation that all who look now contend for; from 1, for 0 means none. */
static uint64_t next_generation(const struct claim *claim, const struct catalog_generation *greatest) {
    uint64_t next = greatest ? greatest->generation + 1 : 1, unclaimed = 0;
    if (greatest && !greatest->has_run && !greatest->run_damaged && !has_versions(claim, greatest->generation))
        unclaimed = greatest->generation;
    if (unclaimed)
        next = unclaimed;
    for (size_t i = 0; i < claim->request->tier_count; i++) {
        const struct catalog *catalog = &claim->catalogs[i];
        for (size_t k = 0; k < catalog->generation_count; k++) {
            uint64_t found = catalog->generations[k].generation;
            if (found != unclaimed && found >= next)
                next = found + 1;
        }
    }
    return next;
}

static int publish(struct claim *claim, const struct run_record *record) {
    struct tier *decider = claim->request->decider;
    enter(claim, decider);
    char directory[TIER_PATH_MAX], path[TIER_PATH_MAX + 8], temporary[TIER_PATH_MAX + 32];
    layout_generation(claim->job, record->generation, directory);
    int r = tier_make_directories(decider, directory);
    if (r)
        return tier_problem(claim->problem, decider, r, "make the directory", directory);
    point_reached(decider->hook, POINT_RUN_DIRECTORY_MADE);
    snprintf(path, sizeof path, "%s/run", directory);
    snprintf(temporary, sizeof temporary, "%s/run.%016" PRIx64 ".tmp", directory, claim->request->nonce);
    CLEANUP(freep) char *text = NULL;
    size_t length;
    r = run_record_write(record, &text, &length);
    if (r)
        return tier_problem(claim->problem, decider, r, "write", path);
    r = tier_publish_once(decider, path, temporary, text, length, POINT_RUN_WRITTEN);
    claim->unsure = r < 0;
    return r < 0 ? tier_problem(claim->problem, decider, r, "publish", path) : r;
}

/* Whoever made the record may have died before it was durable, and it may have gone with him after we
 * had read it: only what is still there after the sync will stay. 0, TIER_E_EXISTS (look again), -errno. */
static int join(const struct claim *claim, const struct catalog_generation *generation) {
    struct tier *decider = claim->request->decider;
    char directory[TIER_PATH_MAX], path[TIER_PATH_MAX + 8];
    layout_generation(claim->job, generation->generation, directory);
    snprintf(path, sizeof path, "%s/run", directory);
    int r = tier_make_directories(decider, directory);
    if (r == 0)
        r = tier_sync_directory(decider, directory);
    if (r)
        return tier_problem(claim->problem, decider, r, "sync the directory", directory);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    struct run_record record;
    r = tier_read_file(decider, path, MANIFEST_LINE_MAX, &data, &size);
    if (r < 0)
        return tier_problem(claim->problem, decider, r, "read", path);
    if (r == 0)
        r = run_record_read(data, size, &record, NULL);
    return r == 0 && strcmp(record.run_id, generation->run.run_id) == 0 ? 0 : TIER_E_EXISTS;
}

static const struct catalog_generation *greatest_of(const struct catalog *catalog) {
    return catalog->generation_count ? &catalog->generations[catalog->generation_count - 1] : NULL;
}

/* Looks at all tiers anew, and thoroughly: what is decided now stays. Only who is about to decide needs
 * it; the many who join do not. The deciding tier comes last: is its greatest generation still what it
 * was? A claim that was made while the other tiers were looked at has left its number there already,
 * and that number would be passed over instead of joined. 0, TIER_E_EXISTS (look again), or -errno. */
static int look_at_all(struct claim *claim) {
    const struct claim_request *request = claim->request;
    struct catalog *decider = decider_catalog(claim);
    CLEANUP(catalog_deinit) struct catalog before = *decider;
    *decider = (struct catalog){0};
    int r = 0;
    for (size_t i = 0; r == 0 && i < request->tier_count; i++)
        if (&claim->catalogs[i] != decider) {
            enter(claim, request->tiers[i]);
            r = catalog_scan_fresh(request->tiers[i], request->job, &claim->catalogs[i], claim->problem);
        }
    enter(claim, request->decider);
    if (r == 0)
        r = catalog_scan_fresh(request->decider, request->job, decider, claim->problem);
    if (r)
        return r;
    const struct catalog_generation *was = greatest_of(&before), *is = greatest_of(decider);
    if (!was || !is)
        return was == is ? 0 : TIER_E_EXISTS;
    bool same = was->generation == is->generation && was->has_run == is->has_run &&
                was->run_damaged == is->run_damaged && was->error == is->error;
    return same ? 0 : TIER_E_EXISTS;
}

enum { ATTEMPT_LOST = TIER_E_EXISTS };
static_assert((int)ATTEMPT_LOST != (int)CLAIM_E_HELD, "both are results of attempt()");

/* One look and, where the job is free, one attempt. */
static int attempt(struct claim *claim, struct claim_result *result, bool *ret_retry) {
    const struct claim_request *request = claim->request;
    int r = look_at_decider(claim);
    if (r)
        return r;
    const struct catalog_generation *greatest = greatest_of(decider_catalog(claim));
    if (greatest && greatest->error)
        return problem_set(claim->problem, greatest->error,
                           "tier %s: cannot see who holds job '%.100s' (generation %" PRIu64 "): %s",
                           request->decider->name, request->job, greatest->generation, strerror(-greatest->error));
    if (greatest && !greatest->run_ended && (greatest->has_run || greatest->run_damaged)) {
        if (greatest->has_run && strcmp(greatest->run.run_id, request->run_id) == 0) {
            result->record = greatest->run;
            result->joined = true;
            return join(claim, greatest);
        }
        bool here;
        int64_t silent_ns = 0;
        r = holder_alive(claim, greatest, &here, &silent_ns);
        if (r < 0)
            return r;
        if (r > 0) {
            *ret_retry = !here;
            return refuse(claim, greatest, silent_ns);
        }
    }
    r = look_at_all(claim);
    if (r)
        return r;
    struct run_record *record = &result->record;
    *record = (struct run_record){
        .pid = request->pid,
        .pid_start = request->pid_start,
        .world = request->world,
        .generation = next_generation(claim, greatest_of(decider_catalog(claim))),
    };
    snprintf(record->job, sizeof record->job, "%s", request->job);
    snprintf(record->run_id, sizeof record->run_id, "%s", request->run_id);
    snprintf(record->host, sizeof record->host, "%s", request->host);
    snprintf(record->boot_id, sizeof record->boot_id, "%s", request->boot_id);
    r = choose(claim, record, &result->warning);
    if (r)
        return r;
    /* The tier may have taken minutes, and the claim of a process that is no more would keep others out. */
    if (request->abandoned && atomic_load_explicit(request->abandoned, memory_order_relaxed))
        return problem_set(claim->problem, -ECANCELED, "job '%.100s': the process that wanted to open it has gone",
                           request->job);
    return publish(claim, record);
}

int claim_run(const struct claim_request *request, struct claim_result *ret_result, bool *ret_retry,
              struct problem *problem) {
    assert(strlen(request->run_id) < MANIFEST_RUN_ID_MAX);
    struct claim claim = {.request = request, .problem = problem};
    int r = job_escape(request->job, claim.job, problem);
    if (r)
        return r;
    claim.catalogs = calloc(request->tier_count, sizeof *claim.catalogs);
    if (!claim.catalogs)
        return -ENOMEM;
    struct claim_result result;
    bool retry = false, again = false;
    for (int i = 0; i < CLAIM_ATTEMPTS_MAX; i++) {
        result = (struct claim_result){0};
        r = attempt(&claim, &result, &retry);
        /* The record may stand there, and would hold the job for a run that was told it has failed. The second
         * time finds it and joins, if the error has passed. */
        bool look_again = r < 0 && claim.unsure && !again;
        if (r != ATTEMPT_LOST && !look_again)
            break;
        again = again || look_again;
        claim.unsure = false;
        if (look_again && problem)
            *problem = PROBLEM_NONE;
    }
    forget(&claim);
    free(claim.catalogs);
    if (r == ATTEMPT_LOST)
        return problem_set(problem, -EAGAIN,
                           "tier %s: job '%.100s' was claimed by somebody else %d times in a row; are several runs "
                           "being restarted in a loop?",
                           request->decider->name, request->job, CLAIM_ATTEMPTS_MAX);
    if (r == CLAIM_E_HELD)
        *ret_retry = retry;
    if (r == 0)
        *ret_result = result;
    return r;
}

static int generation_file(const char *job, uint64_t generation, const char *name, char ret_path[TIER_PATH_MAX + 32]) {
    char escaped[256], directory[TIER_PATH_MAX];
    int r = job_escape(job, escaped, NULL);
    if (r)
        return r;
    layout_generation(escaped, generation, directory);
    snprintf(ret_path, TIER_PATH_MAX + 32, "%s/%s", directory, name);
    return 0;
}

int claim_touch(struct tier *decider, const char *job, uint64_t generation) {
    char path[TIER_PATH_MAX + 32];
    int r = generation_file(job, generation, "run", path);
    return r ? r : tier_touch(decider, path);
}

int claim_end(struct tier *decider, const char *job, uint64_t generation) {
    char path[TIER_PATH_MAX + 32];
    int r = generation_file(job, generation, "run-ended", path);
    if (r)
        return r;
    r = tier_write_file(decider, path, "", 0);
    if (r && r != -EEXIST)
        return r;
    point_reached(decider->hook, POINT_RUN_END_WRITTEN);
    *strrchr(path, '/') = '\0';
    r = tier_sync_directory(decider, path);
    if (r == 0)
        point_reached(decider->hook, POINT_RUN_ENDED);
    return r;
}

int claim_pid_start(uint32_t pid, uint64_t *ret_start) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/stat", pid);
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    if (!file)
        return errno == ENOENT ? -ESRCH : -errno;
    size_t size = fread(text, 1, sizeof text - 1, file);
    if (size == 0) /* it died between open and read */
        return -ESRCH;
    text[size] = '\0';
    /* Field 2 is the command in parentheses and may itself hold spaces and parentheses. */
    const char *fields[23];
    const char *at = strrchr(text, ')');
    for (int field = 3; field <= 22; field++) {
        at = at ? strchr(at + 1, ' ') : NULL;
        if (!at)
            return -EBADMSG;
        fields[field] = at + 1;
    }
    /* A zombie has ended; only its parent has not looked yet, and may never. But a process whose first
     * thread has ended before the others shows as a zombie with several threads, and lives. */
    if (*fields[3] == 'X' || (*fields[3] == 'Z' && strtoul(fields[20], NULL, 10) <= 1))
        return -ESRCH;
    *ret_start = strtoull(fields[22], NULL, 10);
    return 0;
}

int claim_host(char ret_host[256], char ret_boot_id[40]) {
    if (gethostname(ret_host, 256) < 0)
        return -errno;
    ret_host[255] = '\0';
    CLEANUP(fclosep) FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file)
        return -errno;
    if (!fgets(ret_boot_id, 40, file))
        return -EIO;
    ret_boot_id[strcspn(ret_boot_id, "\n")] = '\0';
    return 0;
}
