/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/job.h"

#include "daemon/part.h"
#include "daemon/session.h"

#include <errno.h>

#define JOBS_IDLE_MAX 64 /* jobs nobody uses, kept for what they hold in memory */
#define LOOK_FIRST_NS (50 * NANOSECONDS_PER_MS)
#define LOOK_LAST_NS (2 * NANOSECONDS_PER_SECOND)
#define PUBLISH_OTHERS_NS (5 * NANOSECONDS_PER_SECOND)

static struct loop *job_loop(struct job *job) { return job->server->loop; }

/* ---- jobs ---- */

static void version_free(struct version *version) {
    struct job *job = version->job;
    struct part *part;
    while ((part = TAILQ_FIRST(&version->parts)))
        part_free(part);
    for (uint32_t i = 0; i < job->lane_count; i++)
        free(version->lanes[i].problem);
    TAILQ_REMOVE(&job->versions, version, link);
    job->version_count--;
    free(version);
}

static void job_free(struct job *job) {
    struct version *version;
    while ((version = TAILQ_FIRST(&job->versions)))
        version_free(version);
    for (uint32_t i = 0; i < job->lane_count; i++) {
        lane_unref(job->lanes[i]);
    }
    TAILQ_REMOVE(&job->server->jobs, job, link);
    free(job->closed_ranks);
    free(job);
}

static void add_lane(struct job *job, struct lane *lane) {
    uint32_t at = job->lane_count++;
    for (; at > 0 && job->lanes[at - 1]->config.level > lane->config.level; at--)
        job->lanes[at] = job->lanes[at - 1];
    job->lanes[at] = lane_ref(lane);
}

int job_get(struct server *server, const char *name, const char *parallel_root, struct job **ret_job,
            struct problem *problem) {
    struct job *job;
    TAILQ_FOREACH(job, &server->jobs, link)
    if (strcmp(job->name, name) == 0 && strcmp(job->parallel_root, parallel_root) == 0) {
        /* The one in use last is at the end: idle ones are dropped from the front. */
        TAILQ_REMOVE(&server->jobs, job, link);
        TAILQ_INSERT_TAIL(&server->jobs, job, link);
        *ret_job = job_ref(job);
        return 0;
    }
    job = calloc(1, sizeof *job);
    if (!job)
        return problem_set(problem, -ENOMEM, "out of memory");
    int r = job_escape(name, job->directory, problem);
    if (r < 0) {
        free(job);
        return r;
    }
    job->server = server;
    job->refs = 1;
    for (uint32_t i = 0; i < LANES_MAX; i++) {
        job->sweeps[i].job = job;
        job->sweeps[i].lane = i;
    }
    snprintf(job->name, sizeof job->name, "%s", name);
    snprintf(job->parallel_root, sizeof job->parallel_root, "%s", parallel_root);
    job->trace_name = trace_name(server->trace, name);
    TAILQ_INIT(&job->openings);
    TAILQ_INIT(&job->versions);
    struct lane *lane;
    TAILQ_FOREACH(lane, &server->lanes, link) {
        bool chosen = *parallel_root ? lane->config.level < LEVEL_GLOBAL || strcmp(lane->tier->root, parallel_root) == 0
                                     : !lane->from_job;
        if (chosen && job->lane_count < LANES_MAX)
            add_lane(job, lane);
    }
    TAILQ_INSERT_TAIL(&server->jobs, job, link);
    if (!job->lane_count) {
        job_free(job);
        return problem_set(problem, -EINVAL,
                           "no tier is configured: name one in ckptd.conf, or a directory in CKPT_DIR");
    }
    job->decider = job->lane_count - 1;
    *ret_job = job;
    return 0;
}

struct job *job_ref(struct job *job) {
    job->refs++;
    return job;
}

static bool job_idle(struct job *job) {
    struct version *version;
    struct part *part;
    if (job->refs)
        return false;
    TAILQ_FOREACH(version, &job->versions, link) {
        if (version->busy)
            return false;
        TAILQ_FOREACH(part, &version->parts, link)
        if (!part_idle(part))
            return false;
    }
    return true;
}

/* Idle jobs are kept for their cached bytes, the oldest go. */
static void forget_idle_jobs(struct server *server) {
    struct job *job, *next;
    uint32_t idle = 0;
    TAILQ_FOREACH(job, &server->jobs, link)
    idle += job_idle(job);
    for (job = TAILQ_FIRST(&server->jobs); job && idle > JOBS_IDLE_MAX; job = next) {
        next = TAILQ_NEXT(job, link);
        if (job_idle(job)) {
            job_free(job);
            idle--;
        }
    }
}

void job_unref(struct job *job) {
    assert(job->refs);
    if (--job->refs == 0)
        forget_idle_jobs(job->server);
}

static void sessions_changed(struct job *job) {
    struct session *session = NULL;
    while ((session = session_next(job->server, session)))
        if (session_job(session) == job)
            session_job_changed(session);
}

/* ---- versions ---- */

struct version *job_find_version(struct job *job, struct version_id id) {
    struct version *version;
    TAILQ_FOREACH_REVERSE(version, &job->versions, version_list, link) {
        int order = version_compare(version->id, id);
        if (order == 0)
            return version;
        if (order < 0)
            return NULL;
    }
    return NULL;
}

struct version *job_version(struct job *job, struct version_id id, uint32_t world) {
    struct version *version = job_find_version(job, id);
    if (version)
        return version;
    version = calloc(1, sizeof *version + job->lane_count * sizeof version->lanes[0]);
    if (!version)
        return NULL;
    version->job = job;
    version->id = id;
    version->world = world;
    version->created_ns = loop_wall(job_loop(job));
    TAILQ_INIT(&version->parts);
    for (uint32_t i = 0; i < job->lane_count; i++) {
        version->lanes[i].version = version;
        version->lanes[i].lane = i;
    }
    struct version *before;
    TAILQ_FOREACH_REVERSE(before, &job->versions, version_list, link)
    if (version_compare(before->id, id) < 0)
        break;
    if (before)
        TAILQ_INSERT_AFTER(&job->versions, before, version, link);
    else
        TAILQ_INSERT_HEAD(&job->versions, version, link);
    job->version_count++;
    if (job->version_count > JOB_VERSIONS_MAX) {
        version->busy++; /* it is wanted now */
        job_prune(job);
        version->busy--;
    }
    return version;
}

struct part *version_find_part(struct version *version, uint32_t rank) {
    struct part *part, *found = NULL;
    TAILQ_FOREACH(part, &version->parts, link)
    if (part->rank == rank) /* a retry after a failure comes later: it counts */
        found = part;
    return found;
}

bool version_busy(struct version *version) {
    if (version->busy)
        return true;
    struct part *part;
    TAILQ_FOREACH(part, &version->parts, link)
    if (!part_idle(part))
        return true;
    return false;
}

bool job_unsettled(struct job *job) {
    struct version *version;
    struct part *part;
    TAILQ_FOREACH(version, &job->versions, link) {
        TAILQ_FOREACH(part, &version->parts, link)
        if (!part->durable && !part_idle(part))
            return true;
        /* Its parts are there, and it is just being declared complete. */
        for (uint32_t i = 0; i < job->lane_count; i++)
            if (loop_op_busy(&version->lanes[i].op))
                return true;
    }
    return false;
}

bool job_completing(struct job *job) {
    struct version *version;
    TAILQ_FOREACH(version, &job->versions, link)
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (loop_op_busy(&version->lanes[i].op) || loop_op_busy(&version->lanes[i].timer))
            return true;
    return false;
}

void job_prune(struct job *job) {
    struct version *version, *next;
    uint32_t with_parts = 0;
    for (version = TAILQ_LAST(&job->versions, version_list); version; version = next) {
        next = TAILQ_PREV(version, version_list, link);
        if (TAILQ_EMPTY(&version->parts) || version_busy(version) || ++with_parts <= JOB_VERSIONS_WITH_PARTS)
            continue;
        struct part *part;
        while ((part = TAILQ_FIRST(&version->parts)))
            part_free(part);
    }
    for (version = TAILQ_FIRST(&job->versions); version && job->version_count > JOB_VERSIONS_MAX; version = next) {
        next = TAILQ_NEXT(version, link);
        if (TAILQ_EMPTY(&version->parts) && !version_busy(version))
            version_free(version);
    }
}

static void report(struct job *job, const struct problem *problem) {
    job->report = *problem;
    job->report_number++;
    sessions_withdraw(job->server, job); /* their next saves bring it */
}

void version_captured(struct version *version) {
    version->captured++;
    sessions_changed(version->job);
}

void job_note_durable(struct job *job, enum level level, struct version_id id, uint64_t wall_ns) {
    for (enum level at = LEVEL_LOCAL; at <= level; at++) {
        struct job_durable *durable = &job->durable[at];
        if (!durable->found || version_compare(durable->id, id) < 0)
            *durable = (struct job_durable){.found = true, .id = id, .since_wall_ns = wall_ns};
    }
}

/* ---- completing ---- */

static void look_again(struct version *version, uint32_t lane);

static void complete_run(struct loop_op *op) {
    struct version_lane *vl = CONTAINER_OF(op, struct version_lane, op);
    struct version *version = vl->version;
    uint32_t lane = vl->lane;
    struct job *job = version->job;
    struct tier *tier = job->lanes[lane]->tier;
    op->result = vl->op_publish ? commit_complete(tier, job->name, version->id, vl->op_nonce, vl->op_problem)
                                : commit_completed(tier, job->name, version->id, vl->op_problem);
}

static void version_complete(struct version *version, uint32_t lane) {
    struct job *job = version->job;
    struct server *server = job->server;
    version->lanes[lane].complete = true;
    job->complete_generation[lane] = max_u64(job->complete_generation[lane], version->id.generation);
    server->counters.versions_complete++;
    trace_add(server->trace, &(struct trace_record){.kind = TRACE_COMPLETE,
                                                    .generation = version->id.generation,
                                                    .step = version->id.step,
                                                    .rank = TRACE_RANK_NONE,
                                                    .job = job->trace_name,
                                                    .tier = job->lanes[lane]->trace_name});
    uint64_t now = loop_wall(server->loop);
    job_note_durable(job, job->lanes[lane]->config.level, version->id, now);
    for (uint32_t i = 0; i < lane; i++) /* what is older may go there, too, complete or not */
        if (version->lanes[i].committed)
            job_sweep(job, i);
    log_debug(server->log, "complete job=%s generation=%llu step=%llu tier=%s after_ms=%llu", job->name,
              (unsigned long long)version->id.generation, (unsigned long long)version->id.step,
              job->lanes[lane]->config.name, (unsigned long long)((now - version->created_ns) / NANOSECONDS_PER_MS));
    job_sweep(job, lane);
}

/* The problem is the version's now. */
static void lane_failed(struct version_lane *vl, struct problem *problem) {
    free(vl->problem);
    vl->problem = problem;
    vl->failed = true;
}

static void complete_done(struct loop_op *op) {
    struct version_lane *vl = CONTAINER_OF(op, struct version_lane, op);
    struct version *version = vl->version;
    uint32_t lane = vl->lane;
    struct job *job = version->job;
    struct problem *problem = STEAL(vl->op_problem);
    int r = (int)op->result;
    if (r == 0) {
        if (!vl->complete)
            version_complete(version, lane);
    } else if (r == COMMIT_E_INCOMPLETE) {
        look_again(version, lane);
    } else if (r == COMMIT_E_ABSENT) {
        version->doomed = true;
    } else if (r == -EINVAL) {
        report(job, problem);
        lane_error(job->lanes[lane], problem);
        lane_failed(vl, STEAL(problem));
    } else {
        problem_set(problem, r, "cannot complete a version: %s", strerror(-r));
        lane_error(job->lanes[lane], problem);
        look_again(version, lane);
    }
    free(problem);
    sessions_changed(job);
    version->busy--;
    job_prune(job);
    struct server *server = job->server;
    job_unref(job);
    server_settled(server);
}

static void complete_start(struct version *version, uint32_t lane) {
    struct version_lane *vl = &version->lanes[lane];
    struct job *job = version->job;
    if (vl->complete || vl->failed || version->doomed || loop_op_busy(&vl->op))
        return;
    uint64_t waited = loop_now(job_loop(job)) - vl->first_ns;
    /* Anybody may publish, the bytes are the same; rank 0's daemon goes first, so that not every node
     * lists the directory. */
    vl->op_publish = vl->committed >= version->world || version_find_part(version, 0) || !job->sessions ||
                     waited > PUBLISH_OTHERS_NS;
    vl->op_nonce = server_nonce(job->server);
    vl->op_problem = calloc(1, sizeof *vl->op_problem);
    if (!vl->op_problem) {
        look_again(version, lane);
        return;
    }
    job_ref(job);
    version->busy++;
    loop_work(job_loop(job), &vl->op, job->lanes[lane]->group, complete_run, complete_done);
}

static void look_elapsed(struct loop_op *op) {
    struct version_lane *vl = CONTAINER_OF(op, struct version_lane, timer);
    struct version *version = vl->version;
    uint32_t lane = vl->lane;
    struct job *job = version->job;
    version->busy--;
    if (op->result == 0)
        complete_start(version, lane);
    struct server *server = job->server;
    job_unref(job);
    server_settled(server);
}

/* Other ranks' parts may come from other daemons: look, less and less often, until a newer version is complete. */
static void look_again(struct version *version, uint32_t lane) {
    struct version_lane *vl = &version->lanes[lane];
    struct job *job = version->job;
    const struct job_durable *durable = &job->durable[job->lanes[lane]->config.level];
    bool outdated = durable->found && version_compare(durable->id, version->id) > 0;
    uint64_t waited = loop_now(job_loop(job)) - vl->first_ns;
    /* Also after this node's ranks have left: the others' parts may be on their way. */
    bool over = version->id.generation != job->run.generation ||
                waited > 2 * job->server->config->takeover_ms * NANOSECONDS_PER_MS;
    if (outdated || over || job->server->stopping || loop_op_busy(&vl->timer))
        return;
    vl->retry_ns = vl->retry_ns ? min_u64(vl->retry_ns * 2, LOOK_LAST_NS) : LOOK_FIRST_NS;
    job_ref(job);
    version->busy++;
    loop_timer(job_loop(job), &vl->timer, loop_now(job_loop(job)) + vl->retry_ns, look_elapsed);
}

void version_committed(struct version *version, uint32_t lane) {
    struct version_lane *vl = &version->lanes[lane];
    if (!vl->committed++)
        vl->first_ns = loop_now(job_loop(version->job));
    sessions_changed(version->job);
    complete_start(version, lane);
}

void version_there_already(struct version *version, uint32_t lane) {
    sessions_changed(version->job);
    if (!version->lanes[lane].first_ns)
        version->lanes[lane].first_ns = loop_now(job_loop(version->job));
    complete_start(version, lane);
}

void version_failed(struct version *version, uint32_t lane, const struct problem *problem) {
    struct job *job = version->job;
    struct problem *kept = malloc(sizeof *kept);
    if (kept)
        *kept = *problem;
    lane_failed(&version->lanes[lane], kept);
    struct problem told = PROBLEM_NONE;
    problem_set(&told, problem->code, "step %llu did not reach tier %s: %s", (unsigned long long)version->id.step,
                job->lanes[lane]->config.name, problem->text);
    report(job, &told);
    sessions_changed(job);
}

void version_superseded(struct version *version, uint32_t lane) {
    struct lane *slow = version->job->lanes[lane];
    version->lanes[lane].superseded = true;
    slow->superseded++;
    if ((slow->superseded & (slow->superseded - 1)) == 0) /* the first, and each doubling */
        log_warning(version->job->server->log,
                    "left out: newer versions wait for the tier, which is slower than the saves (%llu so far) job=%s "
                    "step=%llu tier=%s",
                    (unsigned long long)slow->superseded, version->job->name, (unsigned long long)version->id.step,
                    slow->config.name);
    sessions_changed(version->job);
}

/* ---- absent parts ---- */

struct absence {
    struct loop_op op;
    struct version *version;
    struct manifest_summary summary;
    uint32_t lane;
    uint64_t nonce;
    struct problem problem;
};

static void absent_run(struct loop_op *op) {
    struct absence *absence = CONTAINER_OF(op, struct absence, op);
    struct job *job = absence->version->job;
    op->result = commit_absent(job->lanes[absence->lane]->tier, job->name, absence->version->id, &absence->summary,
                               absence->nonce, &absence->problem);
}

static void absent_done(struct loop_op *op) {
    struct absence *absence = CONTAINER_OF(op, struct absence, op);
    struct version *version = absence->version;
    struct job *job = version->job;
    if (op->result < 0)
        lane_error(job->lanes[absence->lane], &absence->problem);
    uint32_t lane = absence->lane;
    free(absence);
    version->absences--;
    version->busy--;
    struct server *server = job->server;
    job_sweep(job, lane);
    job_unref(job);
    server_settled(server);
}

void version_absent(struct version *version, uint32_t rank, const char *reason) {
    struct job *job = version->job;
    sessions_changed(job);
    if (version->world == 1)
        return; /* no other part can wait for it */
    for (uint32_t i = 0; i < job->lane_count; i++) {
        struct absence *absence = calloc(1, sizeof *absence);
        if (!absence)
            return;
        absence->version = version;
        absence->lane = i;
        absence->nonce = server_nonce(job->server);
        struct manifest_summary *summary = &absence->summary;
        snprintf(summary->job, sizeof summary->job, "%s", job->name);
        snprintf(summary->run_id, sizeof summary->run_id, "%s", job->run.run_id);
        summary->generation = version->id.generation;
        summary->step = version->id.step;
        summary->rank = rank;
        summary->world = version->world;
        summary->absent = true;
        snprintf(summary->reason, sizeof summary->reason, "%s", reason);
        summary->created_ns = loop_wall(job_loop(job));
        version->absences++;
        version->busy++;
        job_ref(job);
        loop_work(job_loop(job), &absence->op, job->lanes[i]->group, absent_run, absent_done);
    }
}

/* ---- questions ---- */

uint32_t job_silent_lanes(const struct job *job) {
    uint32_t silent = 0;
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (lane_silent(job->lanes[i]))
            silent |= 1u << i;
    return silent;
}

/* It may be here only because somebody reads it, or its parts are forgotten. */
static bool is_known(const struct version *version) {
    bool known = version->captured || version->doomed || !TAILQ_EMPTY(&version->parts);
    for (uint32_t i = 0; i < version->job->lane_count && !known; i++)
        known = version->lanes[i].wanted || version->lanes[i].first_ns;
    return known;
}

int job_level_reached(struct job *job, struct version_id id, uint32_t rank, enum level level, bool whole_version,
                      struct problem *problem) {
    struct version *version = job_find_version(job, id);
    if (!version || !is_known(version)) {
        for (enum level at = level; at < LEVEL_COUNT; at++)
            if (job->durable[at].found && version_compare(job->durable[at].id, id) == 0)
                return CODE_OK;
        return problem_set(problem, CODE_E_NOT_FOUND, "the daemon knows of no save of step %llu in this run",
                           (unsigned long long)id.step);
    }
    struct part *part = version_find_part(version, rank);
    if (level == LEVEL_CAPTURED &&
        (whole_version ? version->captured >= version->world : part && part_is_captured(part)))
        return CODE_OK;
    bool possible = level == LEVEL_CAPTURED && part && part->state != PART_FAILED;
    static const struct problem unknown = {.code = -EIO, .text = "it did not reach the tier"};
    const struct problem *failure = NULL;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        struct version_lane *vl = &version->lanes[i];
        if (job->lanes[i]->config.level < level)
            continue;
        if (vl->complete || (!whole_version && part && (part->committed_lanes & 1u << i)))
            return CODE_OK;
        if (vl->failed)
            failure = vl->problem ? vl->problem : &unknown;
        else if (vl->wanted && !vl->superseded)
            possible = true;
    }
    if (part && part->state == PART_FAILED)
        return problem_set(problem, CODE_E_LOST, "step %llu was given up: %s", (unsigned long long)id.step,
                           part->problem.text);
    if (version->doomed)
        return problem_set(problem, CODE_E_LOST, "step %llu can never be complete: a rank has no part of it",
                           (unsigned long long)id.step);
    if (possible)
        return CODE_PENDING;
    if (!failure)
        return CODE_SKIPPED;
    return problem_set(problem, failure->code == -EINVAL ? CODE_E_CONFLICT : CODE_E_IO, "%s", failure->text);
}
