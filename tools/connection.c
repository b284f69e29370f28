/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tools speak to the daemon of their own uid only: a socket that somebody else listens on is
 * refused, so that nobody is told lies (or to stop) by a stranger in /tmp.
 */
#include "tools/connection.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

void connection_deinit(struct connection *connection) {
    closep(&connection->fd);
    connection->fd = -1;
}

static int connect_to(const char *path, int *ret_fd, struct problem *problem) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return problem_set(problem, -ENAMETOOLONG, "the socket path %s is longer than %zu bytes", path,
                           sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    CLEANUP(closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return problem_set(problem, -errno, "cannot make a socket: %s", strerror(errno));
    struct timeval timeout = {.tv_sec = CONNECTION_TIMEOUT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        if (errno == ENOENT || errno == ECONNREFUSED || errno == ENOTDIR)
            return problem_set(problem, CONNECTION_E_ABSENT, "no daemon listens on %s", path);
        return problem_set(problem, -errno, "cannot connect to %s: %s", path, strerror(errno));
    }
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
        return problem_set(problem, -errno, "cannot tell who listens on %s: %s", path, strerror(errno));
    if (peer.uid != geteuid() && peer.uid != 0)
        return problem_set(problem, -EPERM, "%s is served by uid %u, not by yours (%u)", path, (unsigned)peer.uid,
                           (unsigned)geteuid());
    *ret_fd = steal_fd(&fd);
    return 0;
}

static int receive(struct connection *connection, struct wire_packet *packet, struct wire_message *ret_message,
                   struct problem *problem) {
    ssize_t got;
    do {
        got = recvmsg(connection->fd, wire_receive_header(packet), MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN)
        return problem_set(problem, -ETIMEDOUT, "the daemon on %s does not answer", connection->path);
    if (got < 0)
        return problem_set(problem, -errno, "the connection to %s broke: %s", connection->path, strerror(errno));
    if (got == 0)
        return problem_set(problem, -ECONNRESET, "the daemon on %s closed the connection", connection->path);
    return wire_check(packet, got, false, UINT32_MAX, ret_message, problem);
}

int connection_ask(struct connection *connection, enum opcode opcode, const void *body, enum opcode expected,
                   struct wire_packet *ret_packet, struct wire_message *ret_message, struct problem *problem) {
    uint32_t serial = ++connection->serial;
    wire_pack(ret_packet, opcode, serial, body, NULL, 0, -1);
    if (sendmsg(connection->fd, wire_send_header(ret_packet), MSG_NOSIGNAL) < 0)
        return problem_set(problem, -errno, "cannot send to the daemon on %s: %s", connection->path, strerror(errno));
    for (;;) {
        struct wire_message message;
        int r = receive(connection, ret_packet, &message, problem);
        if (r < 0)
            return r;
        if (message.serial != serial) {
            wire_packet_close(ret_packet);
            continue;
        }
        if (message.opcode == expected) {
            *ret_message = message;
            return 0;
        }
        wire_packet_close(ret_packet);
        if (message.opcode == MESSAGE_ERROR)
            return problem_set(problem, -EREMOTEIO, "the daemon says: %.*s", (int)message.tail_length, message.tail);
        return problem_set(problem, -EPROTO, "the daemon answered with message %u", message.opcode);
    }
}

int connection_init(struct connection *connection, const char *path, struct problem *problem) {
    *connection = (struct connection){.fd = -1};
    bool on_demand;
    int r = 0;
    if (path)
        snprintf(connection->path, sizeof connection->path, "%s", path);
    else
        r = wire_socket_path(connection->path, &on_demand, problem);
    if (r < 0)
        return r;
    r = connect_to(path ? path : connection->path, &connection->fd, problem);
    if (r != 0)
        return r;

    struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    struct wire_packet packet = {.fd = -1};
    struct wire_message answer;
    r = connection_ask(connection, MESSAGE_HELLO, &hello, MESSAGE_HELLO_OK, &packet, &answer, problem);
    if (r < 0) {
        connection_deinit(connection);
        return r;
    }
    struct message_hello_ok ok;
    memcpy(&ok, answer.body, sizeof ok);
    connection->daemon_pid = ok.daemon_pid;
    wire_packet_close(&packet);
    return 0;
}
