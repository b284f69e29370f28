/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session reads one packet at a time. A request that takes long (open, register, a save that
 * waits for room, a listing) suspends reading until it is answered, so a client cannot pile work up;
 * waits, restores' fetches and pushes do not suspend.
 *
 * When a session ends, its operations are cancelled and it is freed by the last of them; captures
 * and drains that it began go on by themselves.
 */
#include "daemon/session.h"

#include "daemon/status.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#define URGENT_WAIT_MS 86400000 /* an urgent save waits: its client's deadline ends that */
#define SEND_QUEUE_MAX 256      /* packets that a client has not read yet */

struct outgoing {
    TAILQ_ENTRY(outgoing) link;
    int fd; /* owned duplicate, or -1 */
    struct wire_packet packet;
};
TAILQ_HEAD(outgoing_list, outgoing);

struct wait {
    TAILQ_ENTRY(wait) link;
    struct session *session;
    uint32_t serial;
    struct message_wait message;
    bool answered;
    struct loop_op timer;
};
TAILQ_HEAD(wait_list, wait);

/* A save that waits for room. */
struct pending_save {
    bool active;
    uint32_t serial;
    struct message_save message;
    uint64_t deadline_ns;
    struct pool_waiter waiter;
    struct loop_op timer;
};

struct session {
    TAILQ_ENTRY(session) link;
    struct server *server;
    uint64_t number; /* random: also the key for ATTACH */
    int fd;
    struct peer *peer;
    uint32_t state; /* MESSAGE_STATE_...; 0: nothing more is accepted */
    bool ended, suspended;
    uint32_t holds;
    struct wire_packet incoming;
    struct loop_op receive, send, death;
    struct outgoing_list queue;
    uint32_t queued;

    struct job *job; /* from O on */
    bool open;
    uint32_t rank, world;
    struct word_map *word;
    struct area *areas[AREAS_MAX];
    struct set *set;
    struct part *part; /* being captured */
    struct pending_save save;
    bool has_step;
    uint64_t last_step, saves, skipped, report_number;
    struct problem push_reason;
    struct wait_list waits;
    uint32_t wait_count;
    struct restore *restores[RESTORES_MAX];
    uint32_t next_restore;
    uint8_t segments[POOL_SEGMENTS_MAX / 8]; /* the client has them */

    struct session *pusher;  /* O: its push connection */
    struct session *push_of; /* A: whose */
};

static void receive_next(struct session *session);
static void save_try(struct session *session);

/* ---- sending ---- */

static void send_next(struct session *session);

static void sent(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, send);
    struct outgoing *outgoing = TAILQ_FIRST(&session->queue);
    TAILQ_REMOVE(&session->queue, outgoing, link);
    session->queued--;
    if (outgoing->fd >= 0)
        close(outgoing->fd);
    free(outgoing);
    if (op->result < 0)
        session_end(session, "cannot be sent to");
    else
        send_next(session);
    session_unhold(session);
}

static void send_next(struct session *session) {
    struct outgoing *outgoing = TAILQ_FIRST(&session->queue);
    if (!outgoing || session->ended || loop_op_busy(&session->send))
        return;
    session_hold(session);
    loop_send(session->server->loop, &session->send, session->fd, wire_send_header(&outgoing->packet), sent);
}

void session_reply(struct session *session, enum opcode opcode, uint32_t serial, const void *body, const void *tail,
                   size_t tail_length, int fd) {
    if (session->ended)
        return;
    if (session->queued == SEND_QUEUE_MAX) {
        session_end(session, "does not read its answers");
        return;
    }
    struct outgoing *outgoing = malloc(sizeof *outgoing);
    if (!outgoing) {
        session_end(session, "no memory to answer it");
        return;
    }
    outgoing->fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && outgoing->fd < 0) {
        free(outgoing);
        session_end(session, "no descriptor to answer it");
        return;
    }
    wire_pack(&outgoing->packet, opcode, serial, body, tail, tail_length, outgoing->fd);
    TAILQ_INSERT_TAIL(&session->queue, outgoing, link);
    session->queued++;
    send_next(session);
}

static void reply_ok(struct session *session, uint32_t serial) {
    session_reply(session, MESSAGE_OK, serial, &(struct message_empty){0}, NULL, 0, -1);
}

void session_error(struct session *session, uint32_t serial, enum code code, const struct problem *problem) {
    struct message_error error = {.code = code};
    const char *text = problem && problem->text[0] ? problem->text : "failed";
    session_reply(session, MESSAGE_ERROR, serial, &error, text, min_u64(strlen(text), 512), -1);
}

enum code session_code(int error) {
    switch (error < 0 ? -error : error) {
    case 0:
        return CODE_OK;
    case EINVAL:
    case EPROTO:
        return CODE_E_INVALID;
    case ENOMEM:
        return CODE_E_MEMORY;
    case EACCES:
    case EPERM:
        return CODE_E_DENIED;
    case E2BIG:
    case EFBIG:
    case EMSGSIZE:
        return CODE_E_LIMIT;
    case ENOTSUP:
        return CODE_E_VERSION;
    case ENODATA:
    case EBADMSG:
        return CODE_E_DAMAGED;
    case ENOENT:
        return CODE_E_NOT_FOUND;
    case EEXIST:
        return CODE_E_EXISTS;
    case ETIMEDOUT:
        return CODE_E_TIMEOUT;
    case ECANCELED:
    case ESRCH:
    case EFAULT:
        return CODE_E_LOST;
    default:
        return CODE_E_IO;
    }
}

/* ---- life ---- */

void session_hold(struct session *session) { session->holds++; }

void session_unhold(struct session *session) {
    assert(session->holds);
    if (--session->holds || !session->ended)
        return;
    struct server *server = session->server;
    struct outgoing *outgoing;
    while ((outgoing = TAILQ_FIRST(&session->queue))) {
        TAILQ_REMOVE(&session->queue, outgoing, link);
        if (outgoing->fd >= 0)
            close(outgoing->fd);
        free(outgoing);
    }
    close(session->fd);
    if (session->peer)
        peer_unref(session->peer);
    if (session->job)
        job_unref(session->job);
    if (session->word)
        word_map_unref(session->word);
    server->session_count--;
    free(session);
    server_settled(server);
}

bool session_gone(const struct session *session) { return session->ended; }
bool session_sending(const struct session *session) { return session->queued > 0; }
struct server *session_server(struct session *session) {
    return session->server;
}
struct job *session_job(struct session *session) {
    return session->open ? session->job : NULL;
}

struct session *session_next(struct server *server, struct session *after) {
    return after ? TAILQ_NEXT(after, link) : TAILQ_FIRST(&server->sessions);
}

static void drop_set(struct session *session) {
    if (!session->set)
        return;
    set_unuse(session->set);
    set_unref(STEAL(session->set));
}

static void leave_job(struct session *session, bool orderly) {
    if (!session->open)
        return;
    session->open = false;
    job_session_closed(session->job, orderly);
}

void session_end(struct session *session, const char *why) {
    struct server *server = session->server;
    if (session->ended)
        return;
    session->ended = true;
    if (why)
        log_info(server->log, "client of process %d %s session=%016llx job=%s", session->peer ? session->peer->pid : 0,
                 why, (unsigned long long)session->number, session->job ? session->job->name : "-");
    session_hold(session); /* until the end of this function */
    TAILQ_REMOVE(&server->sessions, session, link);
    leave_job(session, false);
    if (session->part)
        part_session_gone(STEAL(session->part));
    pool_unwait(server->pool, &session->save.waiter);
    session->save.active = false;
    struct loop_op *operations[] = {&session->receive, &session->send, &session->death, &session->save.timer};
    for (size_t i = 0; i < ARRAY_SIZE(operations); i++)
        loop_cancel(server->loop, operations[i]);
    struct wait *wait;
    TAILQ_FOREACH(wait, &session->waits, link)
    loop_cancel(server->loop, &wait->timer);
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i])
            restore_close(STEAL(session->restores[i]));
    for (size_t i = 0; i < AREAS_MAX; i++)
        if (session->areas[i])
            area_unref(STEAL(session->areas[i]));
    drop_set(session);
    if (session->pusher) {
        struct session *pusher = STEAL(session->pusher);
        pusher->push_of = NULL;
        session_end(pusher, NULL);
    }
    if (session->push_of) {
        session->push_of->pusher = NULL;
        if (session->push_of->part)
            part_session_gone(STEAL(session->push_of->part));
    }
    session_unhold(session);
}

static void client_died(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, death);
    if (op->result >= 0)
        session_end(session, "has ended");
    session_unhold(session);
}

void session_accept(struct server *server, int fd) {
    struct problem problem = PROBLEM_NONE;
    struct session *session = server->session_count < SESSIONS_MAX ? calloc(1, sizeof *session) : NULL;
    if (!session) {
        log_warning(server->log, "a client was turned away: %u sessions are the limit", SESSIONS_MAX);
        close(fd);
        return;
    }
    session->server = server;
    session->fd = fd;
    session->number = server_nonce(server);
    session->state = MESSAGE_STATE_N;
    session->incoming.fd = -1;
    TAILQ_INIT(&session->queue);
    TAILQ_INIT(&session->waits);
    TAILQ_INSERT_TAIL(&server->sessions, session, link);
    server->session_count++;
    session_hold(session);
    int r = peer_new(fd, server->uid, &session->peer, &problem);
    if (r < 0) {
        log_warning(server->log, "a client was turned away: %s", problem.text);
        session_end(session, NULL);
    } else {
        if (session->peer->pidfd >= 0) {
            session_hold(session);
            loop_poll(server->loop, &session->death, session->peer->pidfd, POLLIN, client_died);
        }
        receive_next(session);
    }
    session_unhold(session);
}

/* ---- areas and sets ---- */

static void handle_area(struct session *session, uint32_t serial, const struct message_area *message) {
    struct problem problem = PROBLEM_NONE;
    int r = 0;
    if (message->area >= AREAS_MAX || session->areas[message->area])
        r = problem_set(&problem, -EINVAL, "area %u is in use, or over the limit of %d areas", message->area,
                        AREAS_MAX);
    if (!r)
        r = area_new(message->area, session->incoming.fd, message->size, &session->areas[message->area], &problem);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
    else
        reply_ok(session, serial);
}

static void handle_area_drop(struct session *session, uint32_t serial, const struct message_area_drop *message) {
    if (message->area < AREAS_MAX && session->areas[message->area])
        area_unref(STEAL(session->areas[message->area])); /* sets and captures hold their own references */
    reply_ok(session, serial);
}

struct registration {
    struct loop_op op;
    struct session *session;
    uint32_t serial;
    struct message_register message;
    void *table;
    struct area *areas[AREAS_MAX]; /* as they are now: the session may end meanwhile */
    struct set *set;
    int result, probe;
    struct problem problem, probe_problem;
};

static void register_run(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    struct session *session = registration->session;
    const struct message_register *message = &registration->message;
    const struct image_identity identity = {.job = session->job->name, .rank = session->rank, .world = session->world};
    const struct set_options options = {
        .number = message->set,
        .count = message->count,
        .push = message->flags & REGISTER_PUSH,
        .identity = &identity,
        .areas = registration->areas,
    };
    registration->result =
        set_new(registration->table, message->table_size, &options, &registration->set, &registration->problem);
    if (registration->result || !registration->set->has_private)
        return;
    registration->set->nonce_address = message->nonce_address;
    registration->set->nonce = message->nonce;
    registration->probe =
        peer_probe(session->peer, message->nonce_address, message->nonce, &registration->probe_problem);
}

static void register_done(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    struct session *session = registration->session;
    struct set *set = registration->set;
    munmap(registration->table, max_u64(registration->message.table_size, 1));
    for (size_t i = 0; i < AREAS_MAX; i++)
        if (registration->areas[i])
            area_unref(registration->areas[i]);
    if (session->ended) {
        if (set)
            set_unref(set);
    } else if (registration->result < 0) {
        session_error(session, registration->serial, session_code(registration->result), &registration->problem);
    } else {
        struct message_registered registered = {.set = set->number, .image_size = image_size(&set->layout, 0)};
        const char *why = "";
        if (registration->probe < 0) {
            registered.flags = REGISTERED_PRIVATE_REFUSED;
            why = registration->probe_problem.text;
            session->push_reason = registration->probe_problem;
            log_warning(session->server->log, "private memory cannot be read, the client must push: %s job=%s rank=%u",
                        why, session->job->name, session->rank);
            set_unref(set);
        } else {
            drop_set(session);
            session->set = set;
        }
        session_reply(session, MESSAGE_REGISTERED, registration->serial, &registered, why, strlen(why), -1);
    }
    free(registration);
    session->suspended = false;
    receive_next(session);
    session_unhold(session);
}

static void handle_register(struct session *session, uint32_t serial, const struct message_register *message) {
    struct problem problem = PROBLEM_NONE;
    void *table = NULL;
    int r = 0;
    if (message->table_size > SHARDS_TABLE_MAX || message->count > SHARDS_COUNT_MAX)
        r = problem_set(&problem, -E2BIG, "a set of %u shards in %llu bytes is over the limit (%d shards, %llu bytes)",
                        message->count, (unsigned long long)message->table_size, SHARDS_COUNT_MAX,
                        (unsigned long long)SHARDS_TABLE_MAX);
    if (!r)
        r = wire_map(session->incoming.fd, max_u64(message->table_size, 1), true, &table, &problem);
    struct registration *registration = r ? NULL : calloc(1, sizeof *registration);
    if (!r && !registration) {
        munmap(table, max_u64(message->table_size, 1));
        r = problem_set(&problem, -ENOMEM, "out of memory");
    }
    if (r < 0) {
        session_error(session, serial, session_code(r), &problem);
        return;
    }
    registration->session = session;
    registration->serial = serial;
    registration->message = *message;
    registration->table = table;
    for (size_t i = 0; i < AREAS_MAX; i++)
        registration->areas[i] = session->areas[i] ? area_ref(session->areas[i]) : NULL;
    session->suspended = true;
    session_hold(session);
    loop_work(session->server->loop, &registration->op, session->server->names, register_run, register_done);
}

/* ---- saves ---- */

void session_captured(struct session *session, struct part *part) {
    if (session->part == part)
        session->part = NULL;
    bool good = part->state == PART_CAPTURED;
    struct message_captured captured = {
        .step = part->version->id.step,
        .result = good ? CODE_OK : CODE_E_LOST,
        .counter = part->counter,
    };
    session_reply(session, MESSAGE_CAPTURED, 0, &captured, part->problem.text, good ? 0 : strlen(part->problem.text),
                  -1);
    if (session->save.active)
        save_try(session);
}

void session_pushed(struct session *session, uint64_t image_offset, int32_t result) {
    if (!session->pusher)
        return;
    struct message_pushed pushed = {.image_offset = image_offset, .result = result};
    session_reply(session->pusher, MESSAGE_PUSHED, 0, &pushed, NULL, 0, -1);
}

/* What went wrong with earlier versions is told once to each session. */
static const char *take_report(struct session *session) {
    if (session->report_number == session->job->report_number)
        return "";
    session->report_number = session->job->report_number;
    return session->job->report.text;
}

static void save_answer(struct session *session, int result, uint64_t image_size, const char *tail) {
    struct pending_save *save = &session->save;
    struct message_saved saved = {.result = result, .image_size = image_size};
    pool_unwait(session->server->pool, &save->waiter);
    loop_cancel(session->server->loop, &save->timer);
    save->active = false;
    session_reply(session, MESSAGE_SAVED, save->serial, &saved, tail, strlen(tail), -1);
    session->suspended = false;
    receive_next(session);
}

static void save_refuse(struct session *session, enum code code, const struct problem *problem) {
    struct pending_save *save = &session->save;
    pool_unwait(session->server->pool, &save->waiter);
    loop_cancel(session->server->loop, &save->timer);
    save->active = false;
    session_error(session, save->serial, code, problem);
    session->suspended = false;
    receive_next(session);
}

static void save_skip(struct session *session) {
    struct version_id id = {session->job->run.generation, session->save.message.step};
    struct version *version = job_find_version(session->job, id);
    session->skipped++;
    session->server->counters.saves_skipped++;
    if (version)
        version_absent(version, session->rank, "skipped: no room in the pool");
    save_answer(session, CODE_SKIPPED, 0,
                "no room in the pool: the tiers are slower than the saves, or the pool is small");
}

static void save_timer_start(struct session *session);

/* Also after a cancellation: by then the next save may be waiting, for which it starts again. */
static void save_timer_elapsed(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, save.timer);
    if (session->save.active && !session->ended) {
        if (loop_now(session->server->loop) >= session->save.deadline_ns)
            save_skip(session);
        else
            save_timer_start(session);
    }
    session_unhold(session);
}

static void save_timer_start(struct session *session) {
    if (loop_op_busy(&session->save.timer))
        return;
    session_hold(session);
    loop_timer(session->server->loop, &session->save.timer, session->save.deadline_ns, save_timer_elapsed);
}

static void save_room(struct pool_waiter *waiter) { save_try(CONTAINER_OF(waiter, struct session, save.waiter)); }

static int check_save(struct session *session, const struct message_save *message, struct area **ret_state_area,
                      struct problem *problem) {
    if (!session->set || session->set->number != message->set)
        return problem_set(problem, -EINVAL, "set %u is not registered", message->set);
    if (message->to > LEVEL_GLOBAL)
        return problem_set(problem, -EINVAL, "level %u does not exist", message->to);
    if (session->has_step && message->step < session->last_step)
        return problem_set(problem, -EINVAL, "step %llu comes after step %llu: steps increase within a run",
                           (unsigned long long)message->step, (unsigned long long)session->last_step);
    if (message->step > INT64_MAX)
        return problem_set(problem, -EINVAL, "step %llu is over the limit of 2^63-1",
                           (unsigned long long)message->step);
    if (session->set->push && !session->pusher)
        return problem_set(problem, -EINVAL, "the set is to be pushed, but no push connection is attached");
    *ret_state_area = NULL;
    if (!message->state_length || session->set->push)
        return message->state_length > IMAGE_STATE_MAX
                   ? problem_set(problem, -E2BIG, "inline state of %llu bytes is over the limit of %llu bytes",
                                 (unsigned long long)message->state_length, (unsigned long long)IMAGE_STATE_MAX)
                   : 0;
    struct area *area = message->state_area < AREAS_MAX ? session->areas[message->state_area] : NULL;
    if (!area || message->state_length > IMAGE_STATE_MAX || message->state_offset > area->size ||
        message->state_length > area->size - message->state_offset)
        return problem_set(problem, -EINVAL, "the inline state (%llu bytes) does not lie in a shared area",
                           (unsigned long long)message->state_length);
    *ret_state_area = area;
    return 0;
}

/* Tries to admit the save that waits. */
static void save_try(struct session *session) {
    struct pending_save *save = &session->save;
    const struct message_save *message = &save->message;
    struct job *job = session->job;
    struct problem problem = PROBLEM_NONE;
    if (session->part) /* revoked by the client, but a worker is still on it: session_captured tries again */
        return;
    struct area *state_area;
    int r = check_save(session, message, &state_area, &problem);
    if (r < 0) {
        save_refuse(session, session_code(r), &problem);
        return;
    }
    struct version_id id = {job->run.generation, message->step};
    struct version *version = job_version(job, id, session->world);
    struct part *before = version ? version_find_part(version, session->rank) : NULL;
    if ((session->has_step && message->step == session->last_step) || (before && before->state != PART_FAILED)) {
        save_answer(session, CODE_ALREADY, 0, take_report(session));
        return;
    }
    const struct part_options options = {
        .session = session,
        .rank = session->rank,
        .word = session->word,
        .counter = message->counter,
        .set = session->set,
        .peer = session->peer,
        .state_area = state_area,
        .state_offset = message->state_offset,
        .state_length = message->state_length,
        .urgent = message->flags & SAVE_URGENT,
        .forked = message->forks > 0,
        .check = message->flags & SAVE_CHECK,
        .to = message->to,
    };
    struct part *part;
    r = version ? part_new(version, &options, &part, &problem) : problem_set(&problem, -ENOMEM, "out of memory");
    if (r == PART_E_BUSY) {
        pool_wait(session->server->pool, &save->waiter);
        return;
    }
    if (r < 0) {
        save_refuse(session, session_code(r), &problem);
        return;
    }
    session->part = part;
    session->has_step = true;
    session->last_step = message->step;
    session->saves++;
    session->server->counters.saves_accepted++;
    save_answer(session, CODE_OK, part->source.image_size, take_report(session));
}

static void handle_save(struct session *session, uint32_t serial, const struct message_save *message) {
    struct pending_save *save = &session->save;
    struct server *server = session->server;
    if (server->stopping) {
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, -ESHUTDOWN, "the daemon is stopping");
        session_error(session, serial, CODE_E_STOPPING, &problem);
        return;
    }
    save->active = true;
    save->serial = serial;
    save->message = *message;
    save->waiter = (struct pool_waiter){.fn = save_room};
    session->suspended = true;
    uint64_t wait_ms =
        message->flags & SAVE_URGENT ? URGENT_WAIT_MS : min_u64(message->busy_deadline_ms, URGENT_WAIT_MS);
    save->deadline_ns = loop_now(server->loop) + wait_ms * NANOSECONDS_PER_MS;
    save_try(session);
    if (save->active)
        save_timer_start(session);
}

static void handle_push(struct session *session, const struct message_push *message) {
    struct session *owner = session->push_of;
    struct part *part = owner ? owner->part : NULL;
    struct area *area = owner && message->area < AREAS_MAX ? owner->areas[message->area] : NULL;
    struct message_pushed pushed = {.image_offset = message->image_offset};
    if (!part || part->counter != message->counter || !area)
        pushed.result = CODE_E_LOST;
    else if (part_push(part, area, message->area_offset, message->image_offset, message->length) < 0)
        pushed.result = CODE_E_INVALID;
    if (pushed.result)
        session_reply(session, MESSAGE_PUSHED, 0, &pushed, NULL, 0, -1);
}

static void handle_missed(struct session *session, uint32_t serial, const struct message_missed *message) {
    struct version_id id = {session->job->run.generation, message->step};
    struct version *version = message->step <= INT64_MAX ? job_version(session->job, id, session->world) : NULL;
    if (version && !version_find_part(version, session->rank))
        version_absent(version, session->rank, "saved while no daemon could be reached");
    reply_ok(session, serial);
}

/* ---- waits and questions ---- */

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

static void handle_wait(struct session *session, uint32_t serial, const struct message_wait *message) {
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

static void handle_last_durable(struct session *session, uint32_t serial, const struct message_last_durable *message) {
    struct job *job = session->job;
    struct message_durable durable = {0};
    uint64_t now = loop_wall(session->server->loop);
    enum level level = max_u64(message->level, LEVEL_CAPTURED);
    if (level < LEVEL_COUNT) {
        const struct job_durable *known = &job->durable[max_u64(level, LEVEL_LOCAL)];
        durable = (struct message_durable){.generation = known->id.generation,
                                           .step = known->id.step,
                                           .age_ms = (now - min_u64(now, known->since_wall_ns)) / NANOSECONDS_PER_MS,
                                           .found = known->found};
    }
    struct version *version = level == LEVEL_CAPTURED ? TAILQ_LAST(&job->versions, version_list) : NULL;
    while (version && version->captured < version->world)
        version = TAILQ_PREV(version, version_list, link);
    if (version &&
        (!durable.found || version_compare(version->id, (struct version_id){durable.generation, durable.step}) > 0))
        durable = (struct message_durable){.generation = version->id.generation,
                                           .step = version->id.step,
                                           .age_ms = (now - min_u64(now, version->created_ns)) / NANOSECONDS_PER_MS,
                                           .found = 1};
    session_reply(session, MESSAGE_DURABLE, serial, &durable, NULL, 0, -1);
}

struct listing {
    struct loop_op op;
    struct session *session;
    uint32_t serial;
    struct version_record *records;
    size_t count;
    int result;
    struct problem problem;
};

static int compare_records(const void *a, const void *b) {
    const struct version_record *x = a, *y = b;
    return -version_compare((struct version_id){x->generation, x->step}, (struct version_id){y->generation, y->step});
}

static int list_tier(struct listing *listing, struct lane *lane, const char *directory) {
    struct catalog catalog;
    int r = catalog_scan(lane->tier, directory, &catalog, &listing->problem);
    if (r < 0)
        return r;
    struct version_record *records =
        realloc(listing->records, (listing->count + catalog.version_count + 1) * sizeof *records);
    if (records)
        listing->records = records;
    for (size_t i = 0; records && i < catalog.version_count; i++)
        if (catalog.versions[i].complete)
            records[listing->count++] = (struct version_record){
                .generation = catalog.versions[i].id.generation,
                .step = catalog.versions[i].id.step,
                .bytes = catalog.versions[i].summary.bytes,
                .created_ns = catalog.versions[i].summary.created_ns,
                .world = catalog.versions[i].summary.world,
                .levels = 1u << lane->config.level,
                .flags = catalog.versions[i].pinned ? VERSION_PINNED : 0,
            };
    catalog_deinit(&catalog);
    return records ? 0 : -ENOMEM;
}

static void list_run(struct loop_op *op) {
    struct listing *listing = CONTAINER_OF(op, struct listing, op);
    struct job *job = listing->session->job;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        int r = list_tier(listing, job->lanes[i], job->directory);
        if (r < 0)
            listing->result = r;
    }
    if (listing->count)
        qsort(listing->records, listing->count, sizeof *listing->records, compare_records);
    size_t kept = 0;
    for (size_t i = 0; i < listing->count; i++) {
        struct version_record *last = kept ? &listing->records[kept - 1] : NULL;
        if (last && compare_records(last, &listing->records[i]) == 0) {
            last->levels |= listing->records[i].levels;
            last->flags |= listing->records[i].flags;
        } else {
            listing->records[kept++] = listing->records[i];
        }
    }
    if (kept) /* what could be read is an answer */
        listing->result = 0;
    listing->count = kept;
}

static void list_done(struct loop_op *op) {
    struct listing *listing = CONTAINER_OF(op, struct listing, op);
    struct session *session = listing->session;
    size_t size = listing->count * sizeof *listing->records;
    CLEANUP(closep) int fd = -1;
    if (listing->result >= 0) {
        fd = wire_memfd("ckptd-versions", listing->records ? (void *)listing->records : "", size);
        if (fd < 0)
            listing->result = problem_set(&listing->problem, fd, "cannot make a memfd: %s", strerror(-fd));
    }
    struct message_versions_are versions = {.size = size, .count = (uint32_t)listing->count};
    if (listing->result < 0)
        session_error(session, listing->serial, session_code(listing->result), &listing->problem);
    else
        session_reply(session, MESSAGE_VERSIONS_ARE, listing->serial, &versions, NULL, 0, fd);
    free(listing->records);
    free(listing);
    session->suspended = false;
    receive_next(session);
    session_unhold(session);
}

static void handle_versions(struct session *session, uint32_t serial) {
    struct listing *listing = calloc(1, sizeof *listing);
    if (!listing) {
        session_error(session, serial, CODE_E_MEMORY, NULL);
        return;
    }
    listing->session = session;
    listing->serial = serial;
    session->suspended = true;
    session_hold(session);
    loop_work(session->server->loop, &listing->op, session->server->names, list_run, list_done);
}

static void handle_status(struct session *session, uint32_t serial) {
    CLEANUP(freep) char *text = NULL;
    CLEANUP(closep) int fd = -1;
    int r = status_text(session->server, &text);
    if (r >= 0)
        r = fd = wire_memfd("ckptd-status", text, strlen(text));
    if (r < 0)
        session_error(session, serial, session_code(r), NULL);
    else
        session_reply(session, MESSAGE_STATUS_IS, serial, &(struct message_status_is){.size = strlen(text)}, NULL, 0,
                      fd);
}

/* ---- open ---- */

enum code session_opened(struct session *session, const struct opening_request *request, struct job *job,
                         const struct problem *warning, struct problem *problem) {
    struct session *other = NULL, *next = session_next(session->server, NULL);
    while ((other = next)) {
        next = session_next(session->server, other);
        if (session_job(other) != job || other->rank != request->rank)
            continue;
        if (other->peer->pid != session->peer->pid && peer_alive(other->peer)) {
            problem_set(problem, -EEXIST, "rank %u of run %s is served already, for process %d", request->rank,
                        request->run_id, other->peer->pid);
            return CODE_E_HELD;
        }
        session_end(other, "has connected anew, or has ended");
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
    session->state = MESSAGE_STATE_O;
    session->report_number = job->report_number;
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
    session_reply(session, MESSAGE_OPENED, request->serial, &opened, warning->text, strlen(warning->text),
                  session->word->fd);
    session->suspended = false;
    receive_next(session);
    return CODE_OK;
}

void session_open_failed(struct session *session) {
    session->suspended = false;
    receive_next(session);
}

static void handle_open(struct session *session, const struct wire_message *message) {
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

static void handle_attach(struct session *session, uint32_t serial, const struct message_attach *message) {
    struct session *owner = NULL;
    while ((owner = session_next(session->server, owner)))
        if (owner->open && owner->number == message->session && owner->peer->pid == session->peer->pid &&
            !owner->pusher) {
            owner->pusher = session;
            session->push_of = owner;
            session->state = MESSAGE_STATE_A;
            reply_ok(session, serial);
            return;
        }
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -ENOENT, "there is no such session to push for");
    session_error(session, serial, CODE_E_NOT_FOUND, &problem);
}

/* ---- restores ---- */

static struct restore *find_restore(struct session *session, uint32_t number) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_number(session->restores[i]) == number)
            return session->restores[i];
    return NULL;
}

void session_restore_opened(struct session *session, struct restore *restore) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (!session->restores[i]) {
            session->restores[i] = restore;
            return;
        }
    restore_close(restore); /* more were opened at once than are allowed: fetches will not find it */
}

static void handle_restore_open(struct session *session, uint32_t serial, const struct message_restore_open *message) {
    struct problem problem = PROBLEM_NONE;
    size_t count = 0;
    for (size_t i = 0; i < RESTORES_MAX; i++)
        count += session->restores[i] != NULL;
    int r = 0;
    if (count == RESTORES_MAX)
        problem_set(&problem, r = -E2BIG, "%d open restores are the limit: close one", RESTORES_MAX);
    else if (message->which < RESTORE_RESUME || message->which > RESTORE_EXACT)
        problem_set(&problem, r = -EINVAL, "unknown kind of restore %u", message->which);
    else
        r = restore_open(session, serial, 1 + session->next_restore++ % 4000, message);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
}

static void handle_restore_close(struct session *session, uint32_t serial, uint32_t number) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_number(session->restores[i]) == number)
            restore_close(STEAL(session->restores[i]));
    reply_ok(session, serial);
}

static void handle_fetch(struct session *session, uint32_t serial, const struct message_fetch *message) {
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

static void handle_release(struct session *session, uint32_t lease) {
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i] && restore_release(session->restores[i], lease))
            return;
}

static void handle_prefetch(struct session *session, uint32_t serial, const struct message_prefetch *message) {
    struct problem problem = PROBLEM_NONE;
    struct restore *restore = find_restore(session, message->restore);
    int r = restore ? restore_prefetch(restore, message->rank, &problem)
                    : problem_set(&problem, -ENOENT, "restore %u is not open", message->restore);
    if (r < 0)
        session_error(session, serial, session_code(r), &problem);
    else
        reply_ok(session, serial);
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

/* ---- receiving ---- */

static void handle_hello(struct session *session, uint32_t serial, const struct message_hello *hello) {
    if (hello->magic != MESSAGE_MAGIC) {
        session->server->counters.protocol_errors++;
        session_end(session, "does not speak our protocol");
        return;
    }
    if (hello->version_min > PROTOCOL_VERSION_MAX || hello->version_max < PROTOCOL_VERSION_MIN) {
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, -ENOTSUP,
                    "the daemon speaks protocol versions %d to %d, the client %u to %u: update the older one",
                    PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX, hello->version_min, hello->version_max);
        session_error(session, serial, CODE_E_VERSION, &problem);
        return;
    }
    struct message_hello_ok ok = {
        .version = (uint32_t)min_u64(hello->version_max, PROTOCOL_VERSION_MAX),
        .daemon_pid = (uint32_t)getpid(),
        .chunk_size = session->server->config->chunk_size,
    };
    session->state = MESSAGE_STATE_G;
    session_reply(session, MESSAGE_HELLO_OK, serial, &ok, NULL, 0, -1);
}

static void handle_close(struct session *session, uint32_t serial) {
    leave_job(session, true);
    session->state = 0; /* only the end of the connection is expected now */
    reply_ok(session, serial);
}

static void handle(struct session *session, const struct wire_message *message) {
    const void *body = message->body;
    switch ((enum opcode)message->opcode) {
    case MESSAGE_HELLO:
        handle_hello(session, message->serial, body);
        break;
    case MESSAGE_OPEN:
        handle_open(session, message);
        break;
    case MESSAGE_CLOSE:
        handle_close(session, message->serial);
        break;
    case MESSAGE_ATTACH:
        handle_attach(session, message->serial, body);
        break;
    case MESSAGE_AREA:
        handle_area(session, message->serial, body);
        break;
    case MESSAGE_AREA_DROP:
        handle_area_drop(session, message->serial, body);
        break;
    case MESSAGE_REGISTER:
        handle_register(session, message->serial, body);
        break;
    case MESSAGE_SAVE:
        handle_save(session, message->serial, body);
        break;
    case MESSAGE_PUSH:
        handle_push(session, body);
        break;
    case MESSAGE_FENCE:
        if (session->part && session->part->counter == ((const struct message_fence *)body)->counter)
            part_fence(session->part);
        break;
    case MESSAGE_MISSED:
        handle_missed(session, message->serial, body);
        break;
    case MESSAGE_WAIT:
        handle_wait(session, message->serial, body);
        break;
    case MESSAGE_LAST_DURABLE:
        handle_last_durable(session, message->serial, body);
        break;
    case MESSAGE_VERSIONS:
        handle_versions(session, message->serial);
        break;
    case MESSAGE_RESTORE_OPEN:
        handle_restore_open(session, message->serial, body);
        break;
    case MESSAGE_RESTORE_CLOSE:
        handle_restore_close(session, message->serial, ((const struct message_restore_close *)body)->restore);
        break;
    case MESSAGE_FETCH:
        handle_fetch(session, message->serial, body);
        break;
    case MESSAGE_RELEASE:
        handle_release(session, ((const struct message_release *)body)->lease);
        break;
    case MESSAGE_PREFETCH:
        handle_prefetch(session, message->serial, body);
        break;
    case MESSAGE_STATUS:
        handle_status(session, message->serial);
        break;
    case MESSAGE_STOP:
        reply_ok(session, message->serial);
        server_stop(session->server, ((const struct message_stop *)body)->mode == STOP_NOW);
        break;
    default:
        session_end(session, "sent what only a daemon may send"); /* wire_check lets nothing of this through */
    }
}

static void received(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, receive);
    struct problem problem = PROBLEM_NONE;
    struct wire_message message;
    if (session->ended) {
        if (op->result > 0) /* it may have brought a descriptor */
            (void)!wire_check(&session->incoming, op->result, true, 0, &message, &problem);
    } else if (op->result <= 0) {
        session_end(session, op->result == 0 ? "has disconnected" : "cannot be read from");
    } else if (wire_check(&session->incoming, op->result, true, session->state, &message, &problem) < 0) {
        session->server->counters.protocol_errors++;
        log_warning(session->server->log, "protocol error: %s session=%016llx pid=%d", problem.text,
                    (unsigned long long)session->number, session->peer->pid);
        session_end(session, "broke the protocol");
    } else {
        handle(session, &message);
    }
    wire_packet_close(&session->incoming);
    receive_next(session);
    session_unhold(session);
}

static void receive_next(struct session *session) {
    if (session->ended || session->suspended || loop_op_busy(&session->receive))
        return;
    session_hold(session);
    loop_recv(session->server->loop, &session->receive, session->fd, wire_receive_header(&session->incoming), received);
}

void session_get_info(const struct session *session, struct session_info *ret_info) {
    *ret_info = (struct session_info){
        .number = session->number,
        .pid = session->peer ? session->peer->pid : 0,
        .job = session->open ? session->job : NULL,
        .rank = session->rank,
        .world = session->world,
        .set = session->set,
        .push = session->set && session->set->push,
        .push_reason = session->push_reason.text,
        .has_step = session->has_step,
        .last_step = session->last_step,
        .saves = session->saves,
        .skipped = session->skipped,
        .capturing = session->part != NULL,
    };
}
