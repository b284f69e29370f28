/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A blocking connection to the daemon, greeted: one request, one answer. Every wait is bounded.
 */

#include "base/problem.h"
#include "proto/wire.h"

#define CONNECTION_TIMEOUT_MS 10000

enum { CONNECTION_E_ABSENT = 1 }; /* nobody listens */

struct connection {
    int fd;
    uint32_t serial;
    uint32_t daemon_pid;
    char path[108];
};

/* `path` NULL: searched as the client does. CONNECTION_E_ABSENT with the sentence. */
int connection_init(struct connection *connection, const char *path, struct problem *problem) MUST_CHECK;
void connection_deinit(struct connection *connection);
/* Sends one message without tail or descriptor and waits for its answer (events are passed over). An
 * ERROR from the daemon is -EREMOTEIO with its sentence. The packet owns what the message points to. */
int connection_ask(struct connection *connection, enum opcode opcode, const void *body, enum opcode expected,
                   struct wire_packet *ret_packet, struct wire_message *ret_message,
                   struct problem *problem) MUST_CHECK;
