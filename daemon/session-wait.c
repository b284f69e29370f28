/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session waits for a level. What became of a version, the daemon remembers for a while; of one that it has
 * forgotten, or that a daemon before it saved, the tiers tell.
 */
#include "daemon/session-state.h"
#include "daemon/survey.h"
#include "tiers/catalog.h"

#include <errno.h>

#define LOOK_MS 1000 /* less than a client waits for an answer beyond its own deadline */

/* Looking in the tiers, for one wait. */
struct look {
    struct survey survey;
    struct wait *wait; /* NULL: it is over */
    struct version_id id;
    uint32_t rank;
    struct message_wait message;
    int result;
    struct problem problem;
};

static struct version_id wait_version(const struct session *session, const struct message_wait *message) {
    return (struct version_id){session->job->run.generation, message->step};
}

static int level_reached(struct session *session, const struct message_wait *message, struct problem *problem) {
    return job_level_reached(session->job, wait_version(session, message), session->rank, message->level,
                             message->scope == WAIT_VERSION, problem);
}

static void answer(struct session *session, uint32_t serial, int result, const struct problem *problem) {
    session_reply(session, MESSAGE_WAITED, serial, &(struct message_waited){.result = result}, problem->text,
                  strlen(problem->text), -1);
}

/* The timer of a wait that was answered is cancelled. */
static void wait_over(struct loop_op *op) {
    struct wait *wait = CONTAINER_OF(op, struct wait, timer);
    struct session *session = wait->session;
    struct problem problem = PROBLEM_NONE;
    int result = CODE_PENDING;
    if (wait->look) {
        wait->look->wait = NULL;
        result = CODE_E_TIMEOUT;
        problem_set(&problem, -ETIMEDOUT,
                    "step %llu is looked for in the tiers, and one of them has not answered yet; is it hanging?",
                    (unsigned long long)wait->message.step);
    }
    if (!wait->answered && !session->ended)
        answer(session, wait->serial, result, &problem);
    TAILQ_REMOVE(&session->waits, wait, link);
    session->wait_count--;
    free(wait);
    session_unhold(session);
}

static void wait_answer(struct wait *wait, int result, const struct problem *problem) {
    answer(wait->session, wait->serial, result, problem);
    wait->answered = true;
    loop_cancel(wait->session->server->loop, &wait->timer);
}

/* ---- what the tiers have ---- */

/* 0: it is there. TIER_E_ABSENT; -errno. */
static int look_in(struct look *look, struct tier *tier, struct problem *problem) {
    if (look->message.scope == WAIT_VERSION)
        return catalog_check(tier, look->survey.job->name, look->id, problem);
    struct manifest manifest;
    int r = catalog_read_manifest(tier, look->survey.job->name, look->id, look->rank, &manifest, problem);
    if (r)
        return r;
    bool absent = manifest.summary.absent;
    manifest_deinit(&manifest);
    return absent ? TIER_E_ABSENT : 0;
}

static void look_run(struct survey *survey) {
    struct look *look = CONTAINER_OF(survey, struct look, survey);
    struct job *job = survey->job;
    look->result = CODE_E_NOT_FOUND;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (job->lanes[i]->config.level < look->message.level)
            continue;
        int r = survey_enter(survey, i) ? look_in(look, job->lanes[i]->tier, &problem)
                                        : lane_silent_problem(job->lanes[i], &problem);
        if (r == 0) {
            look->result = CODE_OK;
            return;
        }
        if (r < 0) { /* perhaps another one has it */
            look->result = session_code(r);
            look->problem = problem;
        }
    }
    if (look->result == CODE_E_NOT_FOUND)
        problem_set(&look->problem, -ENOENT,
                    "the daemon knows of no save of step %llu in this run, and no tier of that level has it",
                    (unsigned long long)look->id.step);
}

static void wait_try(struct wait *wait, const struct look *looked);

static void look_done(struct survey *survey) {
    struct look *look = CONTAINER_OF(survey, struct look, survey);
    if (!look->wait)
        return;
    look->wait->look = NULL;
    wait_try(look->wait, look);
}

static void look_left(struct survey *survey) {
    struct look *look = CONTAINER_OF(survey, struct look, survey);
    struct wait *wait = STEAL(look->wait);
    if (!wait)
        return;
    wait->look = NULL;
    wait_try(wait, NULL); /* without that tier */
}

static void look_free(struct survey *survey) { free(CONTAINER_OF(survey, struct look, survey)); }

static const struct survey_ops look_ops = {.run = look_run, .done = look_done, .left = look_left, .free = look_free};

static int look_start(struct wait *wait) {
    struct session *session = wait->session;
    struct look *look = calloc(1, sizeof *look);
    if (!look)
        return -ENOMEM;
    look->wait = wait;
    look->id = wait_version(session, &wait->message);
    look->rank = session->rank;
    look->message = wait->message;
    wait->look = look;
    survey_start(&look->survey, &look_ops, session->job);
    return 0;
}

/* ---- the wait ---- */

/* `looked`: what the tiers have said. */
static void wait_try(struct wait *wait, const struct look *looked) {
    struct problem problem = PROBLEM_NONE;
    if (wait->answered || wait->session->ended || wait->look)
        return;
    int result = level_reached(wait->session, &wait->message, &problem);
    if (result == CODE_E_NOT_FOUND && looked)
        wait_answer(wait, looked->result, &looked->problem);
    else if (result == CODE_E_NOT_FOUND && look_start(wait) < 0)
        wait_answer(wait, CODE_E_MEMORY, &problem);
    else if (result != CODE_E_NOT_FOUND && (result != CODE_PENDING || !wait->message.timeout_ms))
        wait_answer(wait, result, &problem);
}

void session_handle_wait(struct session *session, uint32_t serial, const struct message_wait *message) {
    struct problem problem = PROBLEM_NONE;
    if (message->level < LEVEL_CAPTURED || message->level > LEVEL_GLOBAL || message->scope > WAIT_VERSION) {
        problem_set(&problem, -EINVAL, "level %u or scope %u does not exist", message->level, message->scope);
        session_error(session, serial, CODE_E_INVALID, &problem);
        return;
    }
    int result = level_reached(session, message, &problem);
    if (result != CODE_E_NOT_FOUND && (result != CODE_PENDING || !message->timeout_ms)) {
        answer(session, serial, result, &problem);
        return;
    }
    struct wait *wait = session->wait_count < WAITS_MAX ? calloc(1, sizeof *wait) : NULL;
    if (!wait) {
        problem = PROBLEM_NONE;
        problem_set(&problem, -EBUSY, "%d waits at a time are the limit", WAITS_MAX);
        session_error(session, serial, CODE_E_LIMIT, &problem);
        return;
    }
    wait->session = session;
    wait->serial = serial;
    wait->message = *message;
    TAILQ_INSERT_TAIL(&session->waits, wait, link);
    session->wait_count++;
    session_hold(session);
    uint64_t wait_ms = min_u64(message->timeout_ms, UINT64_C(1000) * 86400 * 365);
    if (result == CODE_E_NOT_FOUND)
        wait_ms = max_u64(wait_ms, LOOK_MS);
    loop_timer(session->server->loop, &wait->timer, loop_now(session->server->loop) + wait_ms * NANOSECONDS_PER_MS,
               wait_over);
    wait_try(wait, NULL);
}

void session_job_changed(struct session *session) {
    struct wait *wait;
    TAILQ_FOREACH(wait, &session->waits, link)
    wait_try(wait, NULL);
}
