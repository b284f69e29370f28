/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packets: 1 byte for the number of descriptors and two flags, then the packet. Each is checked as it
 * is, and with a head that agrees with its size, from both sides in every state.
 *
 * A packet is taken exactly if the table of messages allows it; body and tail lie inside of it, with
 * room for what their reader indexes; packed again it has the same bytes; every descriptor is closed
 * but the one that the message has.
 */
#include "proto/wire.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>
#include <fcntl.h>

#define DESCRIPTORS_MAX 4

static int null_fd = -1;

static bool allowed(const uint8_t *data, size_t size, unsigned descriptors, bool cut, bool from_client,
                    uint32_t state) {
    struct message_head head;
    if (size < sizeof head || cut)
        return false;
    memcpy(&head, data, sizeof head);
    const struct message_rule *rule = message_rule(head.opcode);
    size_t least = rule ? sizeof head + rule->body_size : 0;
    return rule && rule->from_client == from_client && (!from_client || rule->states & state) && head.size == size &&
           !head.flags && !head.reserved && size >= least && size <= least + rule->tail_max &&
           descriptors == rule->descriptors;
}

/* As recvmsg() would have left it. */
static void receive(struct wire_packet *packet, const uint8_t *data, size_t size, unsigned descriptors, bool cut,
                    int *ret_fds) {
    wire_receive_header(packet);
    memcpy(packet->data, data, size);
    packet->header.msg_flags = cut ? MSG_TRUNC : 0;
    packet->header.msg_controllen = 0;
    if (!descriptors)
        return;
    for (unsigned i = 0; i < descriptors; i++) {
        ret_fds[i] = fcntl(null_fd, F_DUPFD_CLOEXEC, 0);
        assert(ret_fds[i] >= 0);
    }
    packet->header.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    struct cmsghdr *control = CMSG_FIRSTHDR(&packet->header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
    memcpy(CMSG_DATA(control), ret_fds, descriptors * sizeof(int));
}

static void check_message(const struct wire_packet *packet, const struct wire_message *message) {
    static struct wire_packet again;
    const struct message_rule *rule = message_rule(message->opcode);
    assert((uintptr_t)message->body % 8 == 0);
    assert((const uint8_t *)message->body == packet->data + sizeof(struct message_head));
    assert((const uint8_t *)message->tail + message->tail_length == packet->data + packet->size);
    assert((const uint8_t *)message->body + rule->body_size == (const uint8_t *)message->tail);
    if (message->opcode == MESSAGE_FETCHED)
        assert(message->tail_length / sizeof(struct chunk_place) <= FETCH_CHUNKS_MAX);
    wire_pack(&again, (enum opcode)message->opcode, message->serial, message->body, message->tail, message->tail_length,
              rule->descriptors ? packet->fd : -1);
    assert(again.size == packet->size && memcmp(again.data, packet->data, again.size) == 0);
}

static void check(const uint8_t *data, size_t size, unsigned descriptors, bool cut, bool from_client, uint32_t state) {
    static struct wire_packet packet;
    struct wire_message message;
    struct problem problem = PROBLEM_NONE;
    int fds[DESCRIPTORS_MAX];
    receive(&packet, data, size, descriptors, cut, fds);
    int r = wire_check(&packet, (ssize_t)size, from_client, state, &message, &problem);
    assert((r == 0) == allowed(data, size, descriptors, cut, from_client, state));
    if (r == 0)
        check_message(&packet, &message);
    else
        assert(r == -EPROTO && problem.text[0] && packet.fd == -1);
    assert((packet.fd >= 0) == (r == 0 && descriptors > 0));
    wire_packet_close(&packet);
    for (unsigned i = 0; i < descriptors; i++)
        assert(fcntl(fds[i], F_GETFD) < 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t agreeing[MESSAGE_SIZE_MAX];
    struct feed feed = {data, size};
    unsigned first = (unsigned)feed_number(&feed, 1), descriptors = first % (DESCRIPTORS_MAX + 1);
    bool cut = first & 0x80;
    if (null_fd < 0)
        null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    feed.left = min_u64(feed.left, MESSAGE_SIZE_MAX);
    if (feed.left)
        memcpy(agreeing, feed.at, feed.left);
    if (feed.left >= sizeof(struct message_head)) {
        struct message_head head;
        memcpy(&head, agreeing, sizeof head);
        head.size = (uint32_t)feed.left;
        head.flags = 0;
        head.reserved = 0;
        memcpy(agreeing, &head, sizeof head);
    }
    for (uint32_t state = MESSAGE_STATE_N; state <= MESSAGE_STATE_A; state <<= 1)
        for (int from_client = 0; from_client < 2; from_client++) {
            check(agreeing, feed.left, descriptors, cut, from_client, state);
            check(agreeing, feed.left, 0, false, from_client, state);
            check(agreeing, feed.left, 1, false, from_client, state);
        }
    check(feed.left ? feed.at : agreeing, feed.left, descriptors, cut, first & 0x40, MESSAGE_STATE_O);
    return 0;
}
