/* SPDX-License-Identifier: Apache-2.0 */
#include "client/link.h"

#include "client/clock.h"

#include <errno.h>
#include <poll.h>
#include <sys/un.h>

/*
 * The socket is non-blocking; waiting is ppoll with what is left until the deadline, so a daemon that
 * is stopped, slow or gone costs the program no more than it agreed to. A closed connection stays
 * closed until its owner connects again: nothing here retries.
 *
 * A link is used by one thread at a time. Signals of the program interrupt ppoll and are waited out;
 * MSG_NOSIGNAL keeps SIGPIPE away from it.
 */

static const char *const link_gone = "the daemon at %s has gone; the next save connects again";

void link_init(struct link *link, const char *path, link_unclaimed_fn unclaimed, void *context) {
    *link = (struct link){.fd = -1, .unclaimed = unclaimed, .context = context, .packet.fd = -1};
    snprintf(link->path, sizeof link->path, "%s", path);
}

void link_close(struct link *link) {
    wire_packet_close(&link->packet);
    if (link->fd >= 0)
        close(steal_fd(&link->fd));
}

/* A socket made by the service manager for us shows the manager's uid, which is root's or ours. */
static bool peer_is_ours(int fd) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0)
        return false;
    return peer.uid == geteuid() || peer.uid == 0;
}

int link_connect(struct link *link) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, link->path, sizeof address.sun_path);
    CLEANUP(closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int r;
    do
        r = connect(fd, (struct sockaddr *)&address, sizeof address);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return -errno;
    if (!peer_is_ours(fd))
        return -EPERM;
    link->fd = steal_fd(&fd);
    link->complaint = 0;
    return 0;
}

int link_distrust(struct link *link, const char *why) {
    link_close(link);
    return error_set(CKPT_E_PROTOCOL, "the daemon at %s broke the protocol (%s); the connection was closed", link->path,
                     why);
}

static int link_timeout(const struct link *link) {
    return error_set(CKPT_E_TIMEOUT,
                     "the daemon at %s did not answer before the deadline; is it stopped or overloaded?", link->path);
}

/* Waits for events. CKPT_E_TIMEOUT when the deadline has passed. */
static int link_poll(struct link *link, short events, uint64_t deadline) {
    for (;;) {
        uint64_t now = clock_now(), left = now < deadline ? deadline - now : 0;
        struct timespec timeout = {.tv_sec = (time_t)min_u64(left / NANOSECONDS_PER_SECOND, INT32_MAX),
                                   .tv_nsec = (long)(left % NANOSECONDS_PER_SECOND)};
        struct pollfd pollfd = {.fd = link->fd, .events = events};
        int r = ppoll(&pollfd, 1, &timeout, NULL);
        if (r > 0)
            return CKPT_OK;
        if (r < 0 && errno != EINTR)
            return error_set(CKPT_E_IO, "cannot wait for the daemon at %s: poll: %m", link->path);
        if (left == 0)
            return link_timeout(link);
    }
}

static int link_lost(struct link *link) {
    link_close(link);
    return error_set(CKPT_E_UNREACHABLE, link_gone, link->path);
}

int link_send(struct link *link, const struct link_request *request, uint64_t deadline, uint32_t *ret_serial) {
    if (link->fd < 0)
        return error_set(CKPT_E_UNREACHABLE, link_gone, link->path);
    if (++link->serial == 0)
        link->serial = 1;
    struct wire_packet packet;
    wire_pack(&packet, request->opcode, link->serial, request->body, request->tail, request->tail_length, request->fd);
    for (;;) {
        ssize_t n = sendmsg(link->fd, wire_send_header(&packet), MSG_NOSIGNAL);
        if (n >= 0)
            break;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int r = link_poll(link, POLLOUT, deadline);
            if (r < 0)
                return r;
        } else if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
            return link_lost(link);
        } else if (errno != EINTR) {
            return error_set(CKPT_E_IO, "cannot send to the daemon at %s: %m", link->path);
        }
    }
    if (ret_serial)
        *ret_serial = link->serial;
    return CKPT_OK;
}

/* Takes a message that is there. CKPT_PENDING: none is. */
static int link_take(struct link *link) {
    for (;;) {
        if (link->fd < 0)
            return error_set(CKPT_E_UNREACHABLE, link_gone, link->path);
        wire_packet_close(&link->packet);
        ssize_t n = recvmsg(link->fd, wire_receive_header(&link->packet), MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n > 0) {
            struct problem problem = PROBLEM_NONE;
            if (wire_check(&link->packet, n, false, 0, &link->message, &problem) < 0)
                return link_distrust(link, problem.text);
            return CKPT_OK;
        }
        if (n == 0 || errno == ECONNRESET)
            return link_lost(link);
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return CKPT_PENDING;
        if (errno != EINTR)
            return error_set(CKPT_E_IO, "cannot receive from the daemon at %s: %m", link->path);
    }
}

int link_receive(struct link *link, uint64_t deadline) {
    for (;;) {
        int r = link_take(link);
        if (r == CKPT_PENDING)
            r = link_poll(link, POLLIN, deadline);
        else
            return r;
        if (r < 0)
            return r;
    }
}

int link_error(const struct link *link) {
    const struct message_error *body = link->message.body;
    int code = error_known(body->code) ? body->code : CKPT_E_PROTOCOL;
    if (link->message.tail_length == 0)
        return error_set(code, "the daemon at %s answered %s", link->path, error_name(code));
    return error_set(code, "%.*s", (int)link->message.tail_length, link->message.tail);
}

void link_unclaimed(struct link *link) {
    if (link->message.opcode == MESSAGE_ERROR) {
        link->complaint = link_error(link);
        snprintf(link->complaint_text, sizeof link->complaint_text, "%.*s", PROBLEM_TEXT_MAX - 1, error_last());
    } else if (link->message.opcode != MESSAGE_OK) {
        link->unclaimed(link->context, link);
    }
}

int link_await(struct link *link, uint32_t serial, enum opcode expected, uint64_t deadline) {
    for (;;) {
        int r = link_receive(link, deadline);
        if (r < 0)
            return r;
        if (link->message.serial != serial) {
            link_unclaimed(link);
            continue;
        }
        if (link->message.opcode == MESSAGE_ERROR)
            return link_error(link);
        if (link->message.opcode != expected)
            return link_distrust(link, "a reply of the wrong kind");
        return CKPT_OK;
    }
}

int link_call(struct link *link, const struct link_request *request, enum opcode expected, uint64_t deadline) {
    uint32_t serial;
    int r = link_send(link, request, deadline, &serial);
    if (r < 0)
        return r;
    return link_await(link, serial, expected, deadline);
}

void link_drain(struct link *link) {
    while (link_is_up(link) && link_take(link) == CKPT_OK)
        link_unclaimed(link);
}
