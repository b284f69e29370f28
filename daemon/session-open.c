/* SPDX-License-Identifier: Apache-2.0 */
/* How a session comes to serve a rank of a job, or to push for another one. */
#include "daemon/session-state.h"

#include <errno.h>

enum code session_opened(struct session *session, const struct opening_request *request, struct job *job,
                         const struct opening_result *result, struct problem *problem) {
    struct session *other = NULL, *next = session_next(session->server, NULL);
    while ((other = next)) {
        next = session_next(session->server, other);
        if (session_job(other) != job)
            continue;
        if (other->generation != job->run.generation || other->world != job->run.world) {
            session_end(other, "belongs to a run that is over: its record was deleted, or says so");
            next = session_next(session->server, NULL);
            continue;
        }
        if (other->rank != request->rank)
            continue;
        if (other->peer->pid != session->peer->pid && peer_alive(other->peer)) {
            problem_set(problem, -EEXIST, "rank %u of run %s is served already, for process %d", request->rank,
                        request->run_id, other->peer->pid);
            return CODE_E_HELD;
        }
        session_end(other, "has connected anew, or has ended");
        next = session_next(session->server, NULL); /* its push connection went with it */
    }
    if (session->ended)
        return CODE_E_UNREACHABLE;
    int r = word_map_new(&session->word);
    if (r < 0) {
        problem_set(problem, r, "cannot make the word page: %s", strerror(-r));
        return session_code(r);
    }
    session->job = job_ref(job);
    session->open = true;
    session->rank = request->rank;
    session->world = request->world;
    session->generation = job->run.generation;
    session->state = MESSAGE_STATE_O;
    session->report_number = job->report_number;
    session->has_tier_step = result->has_tier_step;
    session->tier_step = result->tier_step;
    job_session_opened(job);
    struct message_opened opened = {
        .generation = job->run.generation,
        .resume_generation = job->run.resume_generation,
        .resume_step = job->run.resume_step,
        .session = session->number,
        .flags = job->run.resumes ? OPENED_HAS_RESUME : 0,
        .levels = 1u << LEVEL_CAPTURED,
    };
    for (uint32_t i = 0; i < job->lane_count; i++)
        opened.levels |= 1u << job->lanes[i]->config.level;
    log_info(session->server->log,
             "open session=%016llx pid=%d job=%s run=%s generation=%llu rank=%u world=%u resumes=%s",
             (unsigned long long)session->number, session->peer->pid, job->name, job->run.run_id,
             (unsigned long long)job->run.generation, request->rank, request->world, job->run.resumes ? "yes" : "no");
    session_reply(session, MESSAGE_OPENED, request->serial, &opened, result->warning.text, strlen(result->warning.text),
                  session->word->fd);
    session->suspended = false;
    session_receive_next(session);
    return CODE_OK;
}

void session_open_failed(struct session *session) {
    session->suspended = false;
    session_receive_next(session);
}

void session_handle_open(struct session *session, const struct wire_message *message) {
    const struct message_open *open = message->body;
    struct problem problem = PROBLEM_NONE;
    struct opening_request request = {
        .serial = message->serial,
        .rank = open->rank,
        .world = open->world,
        .pid = (uint32_t)session->peer->pid,
        .pid_start = session->peer->pid_start,
        .deadline_ms = min_u64(open->deadline_ms, 86400000),
    };
    size_t job = open->job_length, run_id = open->run_id_length, directory = open->directory_length;
    const char *tail = message->tail;
    int r = 0;
    if (session->server->stopping)
        problem_set(&problem, r = -ESHUTDOWN, "the daemon is stopping; a new one can be started when it has gone");
    else if (job + run_id + directory != message->tail_length || !job || job >= sizeof request.job || !run_id ||
             run_id >= sizeof request.run_id || directory >= sizeof request.directory ||
             memchr(tail, '\0', message->tail_length))
        r = problem_set(&problem, -EINVAL,
                        "a job name has 1 to %d bytes, a run id 1 to %d, a directory at most %d; none has a NUL",
                        MANIFEST_JOB_MAX - 1, MANIFEST_RUN_ID_MAX - 1, TIER_PATH_MAX - 1);
    else if (!open->world || open->rank >= open->world)
        r = problem_set(&problem, -EINVAL, "rank %u of a world of %u does not exist", open->rank, open->world);
    else if (directory && tail[job + run_id] != '/')
        r = problem_set(&problem, -EINVAL, "the checkpoint directory must be an absolute path");
    if (!r) {
        memcpy(request.job, tail, job);
        memcpy(request.run_id, tail + job, run_id);
        memcpy(request.directory, tail + job + run_id, directory);
        session->suspended = true;
        r = opening_start(session, &request);
    }
    if (r < 0) {
        session->suspended = false;
        session_error(session, message->serial, r == -ESHUTDOWN ? CODE_E_STOPPING : session_code(r), &problem);
    }
}

void session_handle_attach(struct session *session, uint32_t serial, const struct message_attach *message) {
    struct session *owner = NULL;
    while ((owner = session_next(session->server, owner)))
        if (owner->open && owner->number == message->session && owner->peer->pid == session->peer->pid &&
            !owner->pusher) {
            owner->pusher = session;
            session->push_of = owner;
            session->state = MESSAGE_STATE_A;
            session_reply_ok(session, serial);
            return;
        }
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -ENOENT, "there is no such session to push for");
    session_error(session, serial, CODE_E_NOT_FOUND, &problem);
}
