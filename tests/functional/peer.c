/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/peer.h"

#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/un.h>

void peer_connect(struct peer *peer) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    *peer = (struct peer){.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), .packet.fd = -1};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", test_path("sock"));
    if (connect(peer->fd, (struct sockaddr *)&address, sizeof address) < 0)
        FAIL("connect: %s", strerror(errno));
}

void peer_close(struct peer *peer) {
    wire_packet_close(&peer->packet);
    close(peer->fd);
}

bool peer_send_raw(struct peer *peer, const void *data, size_t size, const int *fds, size_t fd_count) {
    struct iovec iov = {.iov_base = (void *)data, .iov_len = size};
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * 8)] = {0};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1};
    CHECK(fd_count <= 8);
    if (fd_count) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *message = CMSG_FIRSTHDR(&header);
        *message = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int) * fd_count)};
        memcpy(CMSG_DATA(message), fds, sizeof(int) * fd_count);
    }
    return sendmsg(peer->fd, &header, MSG_NOSIGNAL) == (ssize_t)size;
}

bool peer_send(struct peer *peer, enum opcode opcode, const void *body, const void *tail, size_t tail_length, int fd) {
    struct wire_packet packet;
    wire_pack(&packet, opcode, ++peer->serial, body, tail, tail_length, fd);
    return sendmsg(peer->fd, wire_send_header(&packet), MSG_NOSIGNAL) > 0;
}

bool peer_receive(struct peer *peer) {
    struct problem problem = PROBLEM_NONE;
    struct pollfd pollfd = {.fd = peer->fd, .events = POLLIN};
    wire_packet_close(&peer->packet);
    if (poll(&pollfd, 1, PATIENCE_MS) != 1)
        FAIL("the daemon does not answer");
    ssize_t received = recvmsg(peer->fd, wire_receive_header(&peer->packet), MSG_CMSG_CLOEXEC);
    if (received <= 0)
        return false;
    if (wire_check(&peer->packet, received, false, 0, &peer->message, &problem) < 0)
        FAIL("what the daemon sent is wrong: %s", problem.text);
    return true;
}

uint16_t peer_answer(struct peer *peer) {
    while (peer_receive(peer))
        if (peer->message.serial == peer->serial)
            return peer->message.opcode;
    return 0;
}

int peer_error(struct peer *peer) {
    uint16_t opcode = peer_answer(peer);
    if (opcode && opcode != MESSAGE_ERROR)
        FAIL("answered with %s, not with an error", message_rule(opcode)->name);
    return opcode ? ((const struct message_error *)peer->message.body)->code : 0;
}

void peer_greet(struct peer *peer) {
    struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    CHECK(peer_send(peer, MESSAGE_HELLO, &hello, NULL, 0, -1));
    CHECK(peer_answer(peer) == MESSAGE_HELLO_OK);
}

void peer_ask_open(struct peer *peer, const char *job, uint32_t rank, uint32_t world) {
    char tail[256];
    static const char run_id[] = "peer";
    peer_greet(peer);
    struct message_open open = {.rank = rank,
                                .world = world,
                                .pid = (uint32_t)getpid(),
                                .job_length = (uint16_t)strlen(job),
                                .run_id_length = sizeof run_id - 1,
                                .deadline_ms = PATIENCE_MS};
    int length = snprintf(tail, sizeof tail, "%s%s", job, run_id);
    CHECK(peer_send(peer, MESSAGE_OPEN, &open, tail, (size_t)length, -1));
}

uint16_t peer_open_as(struct peer *peer, const char *job, uint32_t rank, uint32_t world) {
    peer_ask_open(peer, job, rank, world);
    return peer_answer(peer);
}

void peer_open(struct peer *peer, const char *job) {
    if (peer_open_as(peer, job, 0, 1) != MESSAGE_OPENED)
        FAIL("open was answered with %.*s", (int)peer->message.tail_length, peer->message.tail);
}

int peer_memfd(size_t size, int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && fallocate(fd, 0, 0, (off_t)size) == 0 && (!seals || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}

void peer_expect_end(struct peer *peer) {
    while (peer_receive(peer))
        ;
}

unsigned peer_trace_count(uint16_t kind, uint64_t step) {
    struct peer peer;
    struct problem problem = PROBLEM_NONE;
    void *map;
    peer_connect(&peer);
    peer_greet(&peer);
    CHECK(peer_send(&peer, MESSAGE_TRACE, &(struct message_empty){0}, NULL, 0, -1));
    CHECK(peer_answer(&peer) == MESSAGE_TRACE_IS);
    const struct message_trace_is *is = peer.message.body;
    size_t size = is->size;
    CHECK(wire_map(peer.packet.fd, size, true, &map, &problem) == 0);
    const struct trace_record *records = map;
    unsigned count = 0;
    for (uint32_t i = 0; i < is->records; i++)
        count += records[i].kind == kind && records[i].step == step;
    munmap(map, size);
    peer_close(&peer);
    return count;
}

char *peer_status(void) {
    struct peer peer;
    struct problem problem = PROBLEM_NONE;
    void *map;
    peer_connect(&peer);
    peer_greet(&peer);
    CHECK(peer_send(&peer, MESSAGE_STATUS, &(struct message_empty){0}, NULL, 0, -1));
    CHECK(peer_answer(&peer) == MESSAGE_STATUS_IS);
    size_t size = ((const struct message_status_is *)peer.message.body)->size;
    CHECK(wire_map(peer.packet.fd, size, true, &map, &problem) == 0);
    char *text = strndup(map, size);
    munmap(map, size);
    peer_close(&peer);
    return text;
}
