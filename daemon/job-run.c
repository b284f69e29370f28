/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The run that a job is in: its heartbeat, as long as a rank of it is here, and the word that it is
 * over, once every rank has said goodbye here.
 */
#include "daemon/job.h"
#include "tiers/claim.h"

#include <errno.h>

static struct loop *job_loop(struct job *job) { return job->server->loop; }

static void heartbeat_elapsed(struct loop_op *op);

static void heartbeat_start(struct job *job) {
    if (!job->sessions || loop_op_busy(&job->heartbeat_timer) || loop_op_busy(&job->heartbeat))
        return;
    job_ref(job);
    loop_timer(job_loop(job), &job->heartbeat_timer,
               loop_now(job_loop(job)) + CLAIM_TOUCH_INTERVAL_MS * NANOSECONDS_PER_MS, heartbeat_elapsed);
}

static void touch_run(struct loop_op *op) {
    struct job *job = CONTAINER_OF(op, struct job, heartbeat);
    op->result = claim_touch(job->lanes[job->decider]->tier, job->name, job->heartbeat_generation);
}

static void end_run(struct loop_op *op) {
    struct job *job = CONTAINER_OF(op, struct job, heartbeat);
    op->result = claim_end(job->lanes[job->decider]->tier, job->name, job->heartbeat_generation);
}

static void end_done(struct loop_op *op);

/* Every rank said goodbye here: the next run need not wait for the heartbeat to lapse. */
static void end_start(struct job *job) {
    job->end_due = false;
    job->heartbeat_generation = job->run.generation;
    job_ref(job);
    loop_work(job_loop(job), &job->heartbeat, job->lanes[job->decider]->group, end_run, end_done);
}

/* What the heartbeat's work leaves to be done next. */
static void heartbeat_over(struct job *job) {
    struct server *server = job->server;
    if (job->end_due)
        end_start(job);
    else
        heartbeat_start(job);
    job_unref(job);
    server_settled(server);
}

static void end_done(struct loop_op *op) { heartbeat_over(CONTAINER_OF(op, struct job, heartbeat)); }

static void touch_done(struct loop_op *op) {
    struct job *job = CONTAINER_OF(op, struct job, heartbeat);
    if (op->result) {
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, op->result < 0 ? (int)op->result : -ENOENT,
                    "cannot touch the run file of job %s: %s; another run may take the job over after %d s", job->name,
                    op->result < 0 ? strerror((int)-op->result) : "it is gone", CLAIM_LAPSE_MS / 1000);
        lane_error(job->lanes[job->decider], &problem);
    }
    heartbeat_over(job);
}

static void heartbeat_elapsed(struct loop_op *op) {
    struct job *job = CONTAINER_OF(op, struct job, heartbeat_timer);
    if (op->result == 0 && job->sessions && !loop_op_busy(&job->heartbeat)) {
        job->heartbeat_generation = job->run.generation;
        loop_work(job_loop(job), &job->heartbeat, job->lanes[job->decider]->group, touch_run, touch_done);
        return;
    }
    heartbeat_start(job); /* cancelled when the last session left: there may be one again */
    job_unref(job);
}

void job_joined(struct job *job, const struct run_record *record) {
    /* A generation has one world, unless its record was deleted and made anew. */
    if (job->run.generation != record->generation || job->run.world != record->world) {
        free(job->closed_ranks);
        job->closed_ranks = calloc(record->world / 8 + 1, 1); /* without it the run just is not marked as ended */
        job->closed_count = 0;
        job->end_due = false;
    }
    job->run = *record;
}

void job_session_opened(struct job *job) {
    job->sessions++;
    heartbeat_start(job);
}

void job_session_closed(struct job *job, uint32_t rank, bool orderly) {
    assert(job->sessions);
    job->sessions--;
    uint8_t bit = (uint8_t)(1 << rank % 8);
    if (orderly && job->closed_ranks && rank < job->run.world && !(job->closed_ranks[rank / 8] & bit)) {
        job->closed_ranks[rank / 8] |= bit;
        job->closed_count++;
    }
    if (job->sessions)
        return;
    loop_cancel(job_loop(job), &job->heartbeat_timer);
    if (job->closed_count < job->run.world)
        return;
    if (loop_op_busy(&job->heartbeat))
        job->end_due = true;
    else
        end_start(job);
}

bool job_ending(struct job *job) { return !job->sessions && loop_op_busy(&job->heartbeat); }
