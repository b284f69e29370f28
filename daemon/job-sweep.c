/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Retention of a job, one sweep at a time per lane: after a version became complete there, when the
 * trash has had its grace, and again for what was spared only because it was busy.
 */
#include "daemon/job.h"

#include <errno.h>

#define REVISIT_FIRST_NS (200 * NANOSECONDS_PER_MS)
#define REVISIT_LAST_NS (60 * NANOSECONDS_PER_SECOND)

static struct loop *job_loop(struct job *job) { return job->server->loop; }

static void sweep_start(struct sweep *sweep);

static void sweep_run(struct loop_op *op) {
    struct sweep *sweep = CONTAINER_OF(op, struct sweep, op);
    struct job *job = sweep->job;
    op->result = retention_sweep(job->lanes[sweep->lane]->tier, job->name, &sweep->policy, sweep->generation,
                                 sweep->known, sweep->nonce, &sweep->swept, &sweep->problem);
}

static void sweep_timer_elapsed(struct loop_op *op) {
    struct sweep *sweep = CONTAINER_OF(op, struct sweep, timer);
    struct job *job = sweep->job;
    if (op->result == 0 && !job->server->stopping)
        job_sweep(job, sweep->lane);
    job_unref(job);
}

static void revisit_elapsed(struct loop_op *op) {
    struct sweep *sweep = CONTAINER_OF(op, struct sweep, revisit);
    struct job *job = sweep->job;
    if (op->result == 0 && !job->server->stopping)
        job_sweep(job, sweep->lane);
    job_unref(job);
}

/* What was busy is looked at again, less and less often: a restore may take long. */
static void revisit_start(struct sweep *sweep) {
    struct job *job = sweep->job;
    if (!sweep->spared) {
        sweep->revisit_ns = 0;
        return;
    }
    if (loop_op_busy(&sweep->revisit))
        return;
    sweep->revisit_ns = sweep->revisit_ns ? min_u64(2 * sweep->revisit_ns, REVISIT_LAST_NS) : REVISIT_FIRST_NS;
    job_ref(job);
    loop_timer(job_loop(job), &sweep->revisit, loop_now(job_loop(job)) + sweep->revisit_ns, revisit_elapsed);
}

static void sweep_done(struct loop_op *op) {
    struct sweep *sweep = CONTAINER_OF(op, struct sweep, op);
    struct job *job = sweep->job;
    struct server *server = job->server;
    if (op->result < 0)
        lane_error(job->lanes[sweep->lane], &sweep->problem);
    else
        job->damage[sweep->lane] = sweep->swept.damage;
    server->counters.versions_removed += sweep->swept.removed;
    free(STEAL(sweep->ids));
    if (!server->stopping)
        revisit_start(sweep);
    if (sweep->again && !server->stopping) {
        sweep_start(sweep);
    } else if (sweep->swept.removed && !loop_op_busy(&sweep->timer) && !server->stopping) {
        /* The trash is emptied after its grace, by another sweep. */
        job_ref(job);
        loop_timer(server->loop, &sweep->timer,
                   loop_now(server->loop) + (sweep->policy.trash_grace_ms + 1000) * NANOSECONDS_PER_MS,
                   sweep_timer_elapsed);
    }
    job_unref(job);
    server_settled(server);
}

static void sweep_start(struct sweep *sweep) {
    struct job *job = sweep->job;
    const struct config_tier *config = &job->lanes[sweep->lane]->config;
    struct version *version;
    sweep->again = false;
    sweep->ids = malloc((2 * (size_t)job->version_count + 1 /* resume */) * sizeof *sweep->ids);
    if (!sweep->ids)
        return;
    size_t busy = 0, elsewhere = 0;
    const struct job_durable *durable = &job->durable[config->level];
    sweep->spared = 0;
    TAILQ_FOREACH(version, &job->versions, link)
    if (version_busy(version)) {
        sweep->ids[busy++] = version->id;
        sweep->spared += durable->found && version_compare(version->id, durable->id) < 0;
    }
    /* Run files, which say what a run resumes from, exist only in the deciding tier. */
    if (job->run.resumes && job->complete_generation[sweep->lane] < job->run.generation)
        sweep->ids[busy++] = (struct version_id){job->run.resume_generation, job->run.resume_step};
    TAILQ_FOREACH(version, &job->versions, link)
    for (uint32_t i = sweep->lane + 1; i < job->lane_count; i++)
        if (version->lanes[i].complete) {
            sweep->ids[busy + elsewhere++] = version->id;
            break;
        }
    sweep->known = (struct retention_known){
        .busy = sweep->ids, .busy_count = busy, .elsewhere = sweep->ids + busy, .elsewhere_count = elsewhere};
    sweep->swept = (struct retention_swept){0};
    sweep->nonce = server_nonce(job->server);
    sweep->generation = job->run.generation;
    sweep->problem = PROBLEM_NONE;
    sweep->policy = (struct retention_policy){
        .keep = config->keep, .keep_every = config->keep_every, .trash_grace_ms = config->trash_grace_ms};
    job_ref(job);
    loop_work(job_loop(job), &sweep->op, job->lanes[sweep->lane]->group, sweep_run, sweep_done);
}

void job_sweep(struct job *job, uint32_t lane) {
    struct sweep *sweep = &job->sweeps[lane];
    if (loop_op_busy(&sweep->op))
        sweep->again = true;
    else
        sweep_start(sweep);
}
