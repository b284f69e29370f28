/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session reads one packet at a time. A request that takes long (open, register, a save that
 * waits for room, a listing) suspends reading until it is answered, so a client cannot pile work up;
 * waits, restores' fetches and pushes do not suspend.
 *
 * When a session ends, its operations are cancelled and it is freed by the last of them; captures
 * and drains that it began go on by themselves.
 */
#include "daemon/opening.h"
#include "daemon/session-state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>

#define LAST_LOOKS_MAX 1000
#define SEND_QUEUE_MAX 256 /* packets that a client has not read yet */
/* With so many unread answers it is not listened to: each may hold a descriptor (SESSION_DESCRIPTORS). */
#define SEND_QUEUE_PATIENCE 4

/* ---- sending ---- */

static void send_next(struct session *session);

static void drop_queue(struct session *session) {
    struct outgoing *outgoing;
    while ((outgoing = TAILQ_FIRST(&session->queue))) {
        TAILQ_REMOVE(&session->queue, outgoing, link);
        session->queued--;
        if (outgoing->fd >= 0)
            close(outgoing->fd);
        free(outgoing);
    }
}

/* A client may close right after its last words: they count, though nobody hears the answers. */
static void become_deaf(struct session *session) {
    session->deaf = true;
    if (!loop_op_busy(&session->send)) /* else when that has failed */
        drop_queue(session);
}

static void sent(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, send);
    struct outgoing *outgoing = TAILQ_FIRST(&session->queue);
    TAILQ_REMOVE(&session->queue, outgoing, link);
    session->queued--;
    if (outgoing->fd >= 0)
        close(outgoing->fd);
    free(outgoing);
    if (op->result < 0)
        become_deaf(session);
    else
        send_next(session);
    session_receive_next(session); /* if it was not listened to */
    if (session->server->stopping) /* a stop waits for the answers to be sent */
        server_settled(session->server);
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
    if (session->ended || session->deaf)
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

void session_reply_ok(struct session *session, uint32_t serial) {
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
    drop_queue(session);
    close(session->fd);
    if (session->peer)
        peer_unref(session->peer);
    if (session->job)
        job_unref(session->job);
    if (session->word)
        word_map_unref(session->word);
    server->session_count--;
    free(session->memories);
    free(session);
    server_settled(server);
}

uint32_t session_rank(const struct session *session) { return session->rank; }
bool session_hung_up(const struct session *session) {
    struct pollfd ends = {.fd = session->fd, .events = POLLRDHUP};
    return session->ended || (poll(&ends, 1, 0) == 1 && ends.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

void session_set_opening(struct session *session, struct opening *opening) { session->opening = opening; }
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

void session_drop_set(struct session *session) {
    if (!session->set)
        return;
    pool_unexpect(session->server->pool, session->set->expected);
    set_unuse(session->set);
    set_unref(STEAL(session->set));
}

static void leave_job(struct session *session, bool orderly) {
    if (!session->open)
        return;
    session->open = false;
    job_session_closed(session->job, session->rank, orderly);
}

void session_end(struct session *session, const char *why) {
    struct server *server = session->server;
    if (session->ended)
        return;
    session->ended = true;
    if (session->opening)
        opening_abandon(session->opening);
    if (why && session->state)
        log_info(server->log, "client of process %d %s session=%016llx job=%s", session->peer ? session->peer->pid : 0,
                 why, (unsigned long long)session->number, session->job ? session->job->name : "-");
    session_hold(session); /* until the end of this function */
    TAILQ_REMOVE(&server->sessions, session, link);
    leave_job(session, false);
    if (session->part)
        part_session_gone(STEAL(session->part));
    pool_unwait(server->pool, &session->save.waiter);
    session->save.active = false;
    struct loop_op *operations[] = {&session->receive, &session->send, &session->death, &session->save.timer,
                                    &session->taken};
    for (size_t i = 0; i < ARRAY_SIZE(operations); i++)
        loop_cancel(server->loop, operations[i]);
    struct wait *wait;
    TAILQ_FOREACH(wait, &session->waits, link)
    loop_cancel(server->loop, &wait->timer);
    for (size_t i = 0; i < RESTORES_MAX; i++)
        if (session->restores[i])
            restore_close(STEAL(session->restores[i]));
    for (size_t i = 0; i < AREAS_MAX; i++)
        session_drop_area(session, (uint32_t)i);
    session_inadmissible(session);
    session_drop_set(session);
    session_drop_devices(session);
    if (session->pusher) {
        struct session *pusher = STEAL(session->pusher);
        pusher->push_of = NULL;
        session_end(pusher, NULL);
    }
    if (session->push_of) {
        struct session *owner = STEAL(session->push_of);
        owner->pusher = NULL;
        if (owner->part)
            part_push_lost(owner->part);
    }
    session_unhold(session);
}

/* What the client said before it died is still in the socket: its goodbye, most of all. */
static void last_words(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, death);
    int unread = 0;
    /* Forked children may hold the socket, and go on to talk: not for ever. */
    bool patient = session->last_looks++ < LAST_LOOKS_MAX;
    if (patient && !session->ended && !session->suspended && ioctl(session->fd, FIONREAD, &unread) == 0 && unread > 0) {
        loop_post(session->server->loop, &session->death, 0, last_words);
        return;
    }
    session_end(session, "has ended");
    session_unhold(session);
}

static void client_died(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, death);
    if (op->result >= 0) { /* after the packets that were received together with this */
        loop_post(session->server->loop, &session->death, 0, last_words);
        return;
    }
    session_unhold(session);
}

/* Somebody who only keeps a connection takes no place from who wants to use one: the oldest of those goes. */
static bool make_place(struct server *server) {
    struct session *session = NULL;
    if (server->session_count < server->sessions_max)
        return true;
    while ((session = session_next(server, session)))
        if ((session->state == MESSAGE_STATE_N || session->state == MESSAGE_STATE_G) && !session->suspended) {
            session_end(session, "was silent, and others need its place");
            return true;
        }
    return false;
}

void session_accept(struct server *server, int fd) {
    struct problem problem = PROBLEM_NONE;
    struct session *session = make_place(server) ? calloc(1, sizeof *session) : NULL;
    if (!session) {
        log_warning(server->log, "a client was turned away: %u sessions are the limit", server->sessions_max);
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
        session_receive_next(session);
    }
    session_unhold(session);
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
    session_reply_ok(session, serial);
}

static void handle(struct session *session, const struct wire_message *message) {
    const void *body = message->body;
    switch ((enum opcode)message->opcode) {
    case MESSAGE_HELLO:
        handle_hello(session, message->serial, body);
        break;
    case MESSAGE_OPEN:
        session_handle_open(session, message);
        break;
    case MESSAGE_CLOSE:
        handle_close(session, message->serial);
        break;
    case MESSAGE_ATTACH:
        session_handle_attach(session, message->serial, body);
        break;
    case MESSAGE_AREA:
        session_handle_area(session, message->serial, body);
        break;
    case MESSAGE_AREA_DROP:
        session_handle_area_drop(session, message->serial, body);
        break;
    case MESSAGE_REGISTER:
        session_handle_register(session, message->serial, body);
        break;
    case MESSAGE_SAVE:
        session_handle_save(session, message->serial, body);
        break;
    case MESSAGE_PUSH:
        session_handle_push(session, body);
        break;
    case MESSAGE_FENCE:
        if (session->part && session->part->counter == ((const struct message_fence *)body)->counter)
            part_fence(session->part);
        break;
    case MESSAGE_START:
        session_handle_start(session, body);
        break;
    case MESSAGE_MISSED:
        session_handle_missed(session, message->serial, body);
        break;
    case MESSAGE_WAIT:
        session_handle_wait(session, message->serial, body);
        break;
    case MESSAGE_LAST_DURABLE:
        session_handle_last_durable(session, message->serial, body);
        break;
    case MESSAGE_VERSIONS:
        session_handle_versions(session, message->serial);
        break;
    case MESSAGE_RESTORE_OPEN:
        session_handle_restore_open(session, message->serial, body);
        break;
    case MESSAGE_RESTORE_CLOSE:
        session_handle_restore_close(session, message->serial, ((const struct message_restore_close *)body)->restore);
        break;
    case MESSAGE_FETCH:
        session_handle_fetch(session, message->serial, body);
        break;
    case MESSAGE_RELEASE:
        session_handle_release(session, ((const struct message_release *)body)->lease);
        break;
    case MESSAGE_PREFETCH:
        session_handle_prefetch(session, message->serial, body);
        break;
    case MESSAGE_STATUS:
        session_handle_status(session, message->serial);
        break;
    case MESSAGE_DEVICE_POOL:
    case MESSAGE_DEVICE_MEMORY:
    case MESSAGE_DEVICE_CHUNK:
    case MESSAGE_DEVICE_DROP:
    case MESSAGE_DEVICE_PROBE:
    case MESSAGE_DEVICE_RELEASE:
    case MESSAGE_DEVICE_USAGE:
        session_handle_device(session, message);
        break;
    case MESSAGE_TRACE:
        session_handle_trace(session, message->serial);
        break;
    case MESSAGE_STOP:
        session_reply_ok(session, message->serial);
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
    } else if (op->result == -ECONNRESET && !session->reset) {
        session->reset = true; /* told once, before the packets that are still there */
        become_deaf(session);
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
    session_receive_next(session);
    session_unhold(session);
}

void session_receive_next(struct session *session) {
    if (session->ended || session->suspended || loop_op_busy(&session->receive) ||
        session->queued > SEND_QUEUE_PATIENCE)
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
