/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/survey.h"

/*
 * A look at a tier may take long where a job has many versions. As long as the tier answers anybody, it is not silent.
 */

static struct lane *lane_of(const struct job *job, const struct tier *tier) {
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (job->lanes[i]->tier == tier)
            return job->lanes[i];
    return NULL;
}

static bool waits(struct watch *watch) {
    struct survey *survey = CONTAINER_OF(watch, struct survey, watch);
    struct lane *lane = lane_of(survey->job, atomic_load_explicit(&survey->at, memory_order_relaxed));
    if (!lane || !loop_op_busy(&survey->op))
        return false;
    if (watch->stuck) /* until it has come back */
        return true;
    uint64_t answers = atomic_load_explicit(&lane->tier->counters.answers, memory_order_relaxed);
    if (lane != watch->lane || answers != survey->answers)
        watch->progress++;
    watch->lane = lane;
    survey->answers = answers;
    return true;
}

static void stuck(struct watch *watch) {
    struct survey *survey = CONTAINER_OF(watch, struct survey, watch);
    if (!survey->ops->left)
        return;
    atomic_store_explicit(&survey->abandoned, true, memory_order_relaxed);
    survey->ops->left(survey);
}

static void ended(struct watch *watch) {
    struct survey *survey = CONTAINER_OF(watch, struct survey, watch);
    struct job *job = survey->job;
    struct server *server = job->server;
    survey->ops->free(survey);
    job_unref(job);
    server_settled(server);
}

static const struct watch_ops watch_ops = {.waits = waits, .stuck = stuck, .ended = ended};

static void run(struct loop_op *op) {
    struct survey *survey = CONTAINER_OF(op, struct survey, op);
    survey->ops->run(survey);
}

static void done(struct loop_op *op) {
    struct survey *survey = CONTAINER_OF(op, struct survey, op);
    if (survey->ops->done && !atomic_load_explicit(&survey->abandoned, memory_order_relaxed))
        survey->ops->done(survey);
    watch_end(&survey->watch);
}

void survey_start(struct survey *survey, const struct survey_ops *ops, struct job *job) {
    struct server *server = job->server;
    *survey = (struct survey){
        .ops = ops,
        .job = job_ref(job),
        .silent = job_silent_lanes(job),
        .watch = {.ops = &watch_ops, .lane = job->lanes[0], .group = server->across},
    };
    watch_start(&survey->watch);
    loop_work(server->loop, &survey->op, server->across, run, done);
}

bool survey_enter(struct survey *survey, uint32_t lane) {
    if (survey->silent & 1u << lane || atomic_load_explicit(&survey->abandoned, memory_order_relaxed))
        return false;
    atomic_store_explicit(&survey->at, survey->job->lanes[lane]->tier, memory_order_relaxed);
    return true;
}
