/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The handle's standing with the daemon: connecting (starting a daemon if need be), greeting,
 * joining the run, and after a daemon's death all of that again.
 *
 *   down --connect--> greeting --HELLO_OK--> opening --OPENED--> up
 *     ^-------- connection lost, refused, or too slow ---------'
 *
 * A phase that is not answered by the caller's deadline goes on at the next call: a daemon that
 * needs ten seconds to open the job costs a save its patience once, not every time.
 */

#include "client/link.h"
#include "client/starter.h"
#include "proto/word.h"

struct ckpt;

enum session_phase { SESSION_DOWN, SESSION_GREETING, SESSION_OPENING, SESSION_UP };

struct session {
    struct link link;
    struct starter starter;
    const char *program; /* the daemon to start; NULL: none may be started */
    enum session_phase phase;
    uint32_t awaited;        /* the serial of the phase's request */
    uint64_t phase_deadline; /* when the phase is given up */
    uint64_t next_attempt;   /* not before */
    uint64_t id, generation; /* the session's, for push; of the run */
    uint64_t resume_generation, resume_step;
    bool resumes;
    uint32_t levels, chunk_size;
    uint32_t version;       /* of the protocol */
    uint32_t epoch;         /* counts the times it came up: numbers of the daemon are of one epoch */
    struct word_page *word; /* of the last session; NULL before the first */
};

void session_deinit(struct session *session);
/* In the forked child. */
void session_close_descriptors(struct session *session);

/* Up, or not by the deadline (monotonic ns). */
int session_ensure(struct ckpt *c, uint64_t deadline) MUST_CHECK;
/* The same for a save, which may not be slowed: waits a second at most, and not every time. */
int session_ensure_for_save(struct ckpt *c) MUST_CHECK;
/* The connection is gone (as link_is_up says), or is given up here: what depended on it is settled. */
void session_down(struct ckpt *c);
/* Notices a connection that the link has closed. */
static inline bool session_is_up(const struct session *session) {
    return session->phase == SESSION_UP && link_is_up(&session->link);
}
