/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A session is one connected client: what it has said so far, what it waits for, and what is to be
 * sent to it. Everything a client sends is hostile until wire_check() and this file have looked at
 * it; what is wrong ends that session and nothing else.
 */

#include "daemon/opening.h"
#include "daemon/part.h"
#include "daemon/restore.h"
#include "proto/wire.h"

/* A client connects: takes the descriptor over. */
void session_accept(struct server *server, int fd);
/* Ends it: replies that are queued are dropped. Freed from the loop when nothing is in flight. */
void session_end(struct session *session, const char *why);

/* To the client. An overflowing queue ends the session. */
void session_reply(struct session *session, enum opcode opcode, uint32_t serial, const void *body, const void *tail,
                   size_t tail_length, int fd);
void session_error(struct session *session, uint32_t serial, enum code code, const struct problem *problem);
/* negative errno to the code that a client sees. */
enum code session_code(int error);

/* From an opening. session_opened: the job is the session's now, or the code says why not. */
enum code session_opened(struct session *session, const struct opening_request *request, struct job *job,
                         const struct opening_result *result, struct problem *problem);
void session_open_failed(struct session *session);
/* The one that works for it; NULL: none. */
struct opening;
void session_set_opening(struct session *session, struct opening *opening);

/* Events from parts and jobs. */
void session_captured(struct session *session, struct part *part);
void session_pushed(struct session *session, uint64_t image_offset, int32_t result);
/* One more (or one less) restore is being opened: they count against the limit. */
void session_restore_opening(struct session *session, bool begins);
void session_restore_opened(struct session *session, struct restore *restore);
void session_job_changed(struct session *session); /* waits may be answered */

/* Admission ahead of a save (proto/word.h): room that is kept for the next one, and is the first to be given back. */
/* If nobody waits for room, the sessions that may have some get it. */
void sessions_admit(struct server *server);
/* Others need room: one session loses what was kept for it. False: there is none. */
bool sessions_withdraw_one(struct server *server);
/* All sessions, or those of this job, are to ask. */
void sessions_withdraw(struct server *server, const struct job *job);

/* For status. */
struct session_info {
    uint64_t number;
    int pid;
    struct job *job; /* NULL: not open */
    uint32_t rank, world;
    const struct set *set; /* may be NULL */
    bool push;
    const char *push_reason;
    bool has_step;
    uint64_t last_step, saves, skipped;
    bool capturing;
};
void session_get_info(const struct session *session, struct session_info *ret_info);
struct session *session_next(struct server *server, struct session *after);

/* Sends this segment to the client if it has not got it. */
void session_send_segment(struct session *session, uint32_t segment);
struct server *session_server(struct session *session);
struct job *session_job(struct session *session);
uint32_t session_rank(const struct session *session);
/* Also before its end was received: nothing is received while a request is being worked on. */
bool session_hung_up(const struct session *session);
bool session_gone(const struct session *session);
/* Answers are still on their way to the client. */
bool session_sending(const struct session *session);
/* An operation elsewhere uses the session: it is not freed before the unhold. */
void session_hold(struct session *session);
void session_unhold(struct session *session);
