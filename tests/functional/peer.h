/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A client without the library: it says to the daemon whatever it is told to, right or wrong. */

#include "proto/trace.h"
#include "proto/wire.h"

struct peer {
    int fd;
    uint32_t serial;
    struct wire_packet packet; /* the last one received */
    struct wire_message message;
};

void peer_connect(struct peer *peer);
void peer_close(struct peer *peer);
/* Exactly these bytes, with up to 8 descriptors. False: the daemon has hung up. */
bool peer_send_raw(struct peer *peer, const void *data, size_t size, const int *fds, size_t fd_count);
bool peer_send(struct peer *peer, enum opcode opcode, const void *body, const void *tail, size_t tail_length, int fd);
/* The next packet, checked. False: the daemon has hung up. */
bool peer_receive(struct peer *peer);
/* Receives until an answer to the last request. Returns its opcode; 0: hung up. */
uint16_t peer_answer(struct peer *peer);
/* The code of an ERROR answer; fails if it is something else, 0 if the daemon has hung up. */
int peer_error(struct peer *peer);
/* HELLO; then OPEN in the run "peer", for world 1, or as any rank (returns the answer's opcode), or without waiting for
 * the answer. */
void peer_greet(struct peer *peer);
void peer_open(struct peer *peer, const char *job);
uint16_t peer_open_as(struct peer *peer, const char *job, uint32_t rank, uint32_t world);
void peer_ask_open(struct peer *peer, const char *job, uint32_t rank, uint32_t world);
/* A memfd of so many bytes, all there, with these seals. */
int peer_memfd(size_t size, int seals);
/* Nothing more is expected but the end of the connection. */
void peer_expect_end(struct peer *peer);
/* The daemon's status as JSON, by a connection of its own; the caller frees. */
char *peer_status(void);
/* How many records of this kind its trace has of that step. */
unsigned peer_trace_count(uint16_t kind, uint64_t step);
