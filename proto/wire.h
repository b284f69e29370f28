/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Packing and checking packets. wire_check() is the one place where bytes from a peer become a
 * message: size, opcode, direction, state, body size, tail bound and descriptor count are checked
 * against messages.def before anybody looks at a field.
 */

#include "base/problem.h"
#include "proto/messages.h"

#include <sys/socket.h>

/* A packet with room for the largest message and its descriptor: to receive into, or to send from. */
struct wire_packet {
    _Alignas(8) uint8_t data[MESSAGE_SIZE_MAX];
    size_t size;
    int fd; /* -1: none. Owned by the packet until taken with steal_fd(). */
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * 4)];
    struct iovec iov;
    struct msghdr header;
};

/* A checked message; points into its packet. */
struct wire_message {
    uint16_t opcode;
    uint32_t serial;
    const void *body;
    const char *tail; /* not NUL-terminated */
    size_t tail_length;
};

/* Builds a packet: copies body and tail. fd -1: none; it is only borrowed until the packet was sent,
 * and packet->fd stays -1, so that wire_packet_close() does not close it. */
void wire_pack(struct wire_packet *packet, enum opcode opcode, uint32_t serial, const void *body, const void *tail,
               size_t tail_length, int fd);
/* Prepares packet->header for recvmsg into packet->data, or sendmsg from it. */
struct msghdr *wire_receive_header(struct wire_packet *packet);
struct msghdr *wire_send_header(struct wire_packet *packet);
/* After recvmsg returned `received` bytes: takes the descriptors out of the control data (closing
 * all beyond the first) and checks the packet. -EPROTO with the reason in problem; 0: *ret_message
 * is valid. `from_client` and `state` as in messages.def. */
int wire_check(struct wire_packet *packet, ssize_t received, bool from_client, uint32_t state,
               struct wire_message *ret_message, struct problem *problem) MUST_CHECK;
/* Closes a received descriptor that nobody took. */
void wire_packet_close(struct wire_packet *packet);

/* A sealed memfd with these bytes (for anything larger than a packet). Negative errno. */
int wire_memfd(const char *name, const void *data, size_t size) MUST_CHECK;
/* Maps a received memfd read-only after checking that it is one, sealed against shrinking (and
 * writing, if `immutable`), and has at least `size` bytes. Unmap with munmap(size). */
int wire_map(int fd, size_t size, bool immutable, void **ret_data, struct problem *problem) MUST_CHECK;

/* The daemon's socket, found as the client and ckptctl both must: CKPT_SOCKET; /run/ckptd/<user>/sock
 * if it exists; $XDG_RUNTIME_DIR/ckptd/<key>, else /tmp/ckptd-<uid>/<key>; key = $SLURM_JOB_ID or
 * "user". *ret_on_demand: whether a daemon may be started for this path. */
int wire_socket_path(char ret_path[108], bool *ret_on_demand, struct problem *problem) MUST_CHECK;
