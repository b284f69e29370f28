/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Admission ahead of the save. Once a session's save was accepted and captured, room for the next one
 * is reserved and its client is told so in the word's page: `save` then sends its message and returns.
 *
 * That room is only kept, not used: saves and restores that find none take it back, from sessions whose
 * clients have not taken it yet. A client that has taken it sends its save at once; one that was stopped
 * in between loses the room too, after a while, and its save waits for room like any other.
 */
#include "daemon/session-state.h"

#define SLACK_MIN KIB(64)                         /* inline state differs from save to save */
#define TAKEN_MAX_NS (2 * NANOSECONDS_PER_SECOND) /* between taking and sending */

void session_withdraw(struct session *session) {
    if (!session->admission)
        return;
    (void)word_withdraw(session->word->page);
    uint64_t bytes = session->admission;
    session->admission = 0;
    session->taken_ns = 0;
    session->server->admissions -= bytes;
    pool_release(session->server->pool, bytes);
}

void session_inadmissible(struct session *session) {
    session_withdraw(session);
    session->admissible = 0;
}

void sessions_withdraw(struct server *server, const struct job *job) {
    struct session *session = NULL;
    while ((session = session_next(server, session)))
        if ((!job || session->job == job) && session->admission && word_withdraw(session->word->page))
            session_withdraw(session);
}

static void taken_start(struct session *session);

/* Its save has not come; or it has, and the client has taken the next admission since. */
static void taken_elapsed(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, taken);
    if (session->taken_ns && loop_now(session->server->loop) - session->taken_ns >= TAKEN_MAX_NS)
        session_withdraw(session);
    else if (session->taken_ns)
        taken_start(session);
    session_unhold(session);
}

static void taken_start(struct session *session) {
    if (loop_op_busy(&session->taken))
        return;
    session_hold(session);
    loop_timer(session->server->loop, &session->taken, session->taken_ns + TAKEN_MAX_NS, taken_elapsed);
}

bool sessions_withdraw_one(struct server *server) {
    struct session *session = NULL;
    if (!server->admissions)
        return false;
    while ((session = session_next(server, session))) {
        if (!session->admission)
            continue;
        if (word_withdraw(session->word->page)) {
            session_withdraw(session);
            return true;
        }
        if (!session->taken_ns)
            session->taken_ns = loop_now(server->loop);
        taken_start(session);
    }
    return false;
}

/* It has saved this set before, and nothing has happened since that its next save must be told. */
static bool may_have(const struct session *session) {
    return session->admissible && !session->admission && session->open && !session->part && !session->save.active &&
           session->report_number == session->job->report_number;
}

void sessions_admit(struct server *server) {
    struct session *session = NULL;
    if (server->stopping || pool_is_waited_for(server->pool))
        return;
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    while ((session = session_next(server, session))) {
        if (!may_have(session))
            continue;
        uint64_t size = session->admissible + max_u64(session->admissible / 16, SLACK_MIN);
        uint64_t room = min_u64(part_room(server, size), usage.limit);
        if (!part_reserve(server, room, false))
            continue;
        session->admission = room;
        session->admitted = true;
        server->admissions += room;
        word_admit(session->word->page, size);
    }
}
