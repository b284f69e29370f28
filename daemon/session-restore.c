/* SPDX-License-Identifier: Apache-2.0 */
/* The restores of a session, and the segments that its client has been given. */
#include "daemon/session-state.h"

#include <errno.h>

static struct restore *find_restore(struct session *session, uint32_t number) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_number(session->restores[i]) == number)
            return session->restores[i];
    return NULL;
}

void session_restore_opening(struct session *session, bool begins) { session->restores_opening += begins ? 1 : -1u; }

void session_restore_opened(struct session *session, struct restore *restore) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (!session->restores[i]) {
            session->restores[i] = restore;
            return;
        }
    restore_close(restore); /* cannot be: those being opened are counted */
}

void session_handle_restore_open(struct session *session, uint32_t serial, const struct message_restore_open *message) {
    struct problem problem = PROBLEM_NONE;
    size_t count = session->restores_opening;
    for (size_t i = 0; i < RESTORES_MAX; i++)
        count += session->restores[i] != NULL;
    int r = 0;
    if (count >= RESTORES_MAX)
        problem_set(&problem, r = -E2BIG, "%d open restores are the limit: close one", RESTORES_MAX);
    else if (message->which < RESTORE_RESUME || message->which > RESTORE_EXACT)
        problem_set(&problem, r = -EINVAL, "unknown kind of restore %u", message->which);
    else
        r = restore_open(session, serial, 1 + session->next_restore++ % 4000, message);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
}

void session_handle_restore_close(struct session *session, uint32_t serial, uint32_t number) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_number(session->restores[i]) == number)
            restore_close(STEAL(session->restores[i]));
    session_reply_ok(session, serial);
}

void session_handle_fetch(struct session *session, uint32_t serial, const struct message_fetch *message) {
    struct problem problem = PROBLEM_NONE;
    uint32_t leases = 0, fetches = 0;
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i]) {
            leases += restore_leases(session->restores[i]);
            fetches += restore_fetches(session->restores[i]);
        }
    struct restore *restore = find_restore(session, message->restore);
    int r;
    if (!restore)
        r = problem_set(&problem, -ENOENT, "restore %u is not open", message->restore);
    else if (leases >= LEASES_MAX || fetches >= FETCHES_MAX)
        r = problem_set(&problem, -E2BIG, "%d unreleased leases and %d fetches in flight are the limit", LEASES_MAX,
                        FETCHES_MAX);
    else
        r = restore_fetch(restore, serial, message, &problem);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
}

void session_handle_release(struct session *session, uint32_t lease) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_release(session->restores[i], lease))
            return;
}

void session_handle_prefetch(struct session *session, uint32_t serial, const struct message_prefetch *message) {
    struct problem problem = PROBLEM_NONE;
    struct restore *restore = find_restore(session, message->restore);
    int r = restore ? restore_prefetch(restore, message->rank, &problem)
                    : problem_set(&problem, -ENOENT, "restore %u is not open", message->restore);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
    else
        session_reply_ok(session, serial);
}

void session_send_segment(struct session *session, uint32_t segment) {
    uint8_t *byte = &session->segments[segment / 8];
    uint8_t bit = (uint8_t)(1 << segment % 8);
    if (*byte & bit)
        return;
    *byte |= bit;
    struct message_segment message = {.segment = segment, .size = pool_segment_size(session->server->pool, segment)};
    session_reply(session, MESSAGE_SEGMENT, 0, &message, NULL, 0, pool_segment_fd(session->server->pool, segment));
}
