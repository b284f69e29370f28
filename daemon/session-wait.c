/* SPDX-License-Identifier: Apache-2.0 */
/* A session waits for a level. */
#include "daemon/session-state.h"

#include <errno.h>

static void wait_over(struct loop_op *op) {
    struct wait *wait = CONTAINER_OF(op, struct wait, timer);
    struct session *session = wait->session;
    if (!wait->answered && !session->ended)
        session_reply(session, MESSAGE_WAITED, wait->serial, &(struct message_waited){.result = CODE_PENDING}, NULL, 0,
                      -1);
    TAILQ_REMOVE(&session->waits, wait, link);
    session->wait_count--;
    free(wait);
    session_unhold(session);
}

/* True if there is an answer other than "not yet". */
static bool wait_answer(struct session *session, uint32_t serial, const struct message_wait *message, bool last) {
    struct problem problem = PROBLEM_NONE;
    struct version_id id = {session->job->run.generation, message->step};
    int result =
        job_level_reached(session->job, id, session->rank, message->level, message->scope == WAIT_VERSION, &problem);
    if (result == CODE_PENDING && !last)
        return false;
    session_reply(session, MESSAGE_WAITED, serial, &(struct message_waited){.result = result}, problem.text,
                  strlen(problem.text), -1);
    return true;
}

void session_handle_wait(struct session *session, uint32_t serial, const struct message_wait *message) {
    struct problem problem = PROBLEM_NONE;
    if (message->level < LEVEL_CAPTURED || message->level > LEVEL_GLOBAL || message->scope > WAIT_VERSION) {
        problem_set(&problem, -EINVAL, "level %u or scope %u does not exist", message->level, message->scope);
        session_error(session, serial, CODE_E_INVALID, &problem);
        return;
    }
    if (wait_answer(session, serial, message, !message->timeout_ms))
        return;
    struct wait *wait = session->wait_count < WAITS_MAX ? calloc(1, sizeof *wait) : NULL;
    if (!wait) {
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
    loop_timer(session->server->loop, &wait->timer, loop_now(session->server->loop) + wait_ms * NANOSECONDS_PER_MS,
               wait_over);
}

void session_job_changed(struct session *session) {
    struct wait *wait;
    TAILQ_FOREACH(wait, &session->waits, link)
    if (!wait->answered && wait_answer(session, wait->serial, &wait->message, false)) {
        wait->answered = true;
        loop_cancel(session->server->loop, &wait->timer);
    }
}
