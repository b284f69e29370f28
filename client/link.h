/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A connection to the daemon: packets out, packets in, and replies matched to requests by their
 * serials. Every function that may wait has a deadline (monotonic ns) and keeps it. Results are
 * those of the API, with the sentence set.
 *
 * A message that nobody waits for (an event; a reply that came after its request timed out) goes to
 * the owner's `unclaimed`, on the thread that happens to receive it.
 */

#include "client/errors.h"
#include "proto/wire.h"

#define LINK_PATH_MAX 108

struct link;
typedef void (*link_unclaimed_fn)(void *context, struct link *link);

struct link {
    int fd; /* -1: not connected */
    uint32_t serial;
    link_unclaimed_fn unclaimed;
    void *context;
    char path[LINK_PATH_MAX];
    struct wire_packet packet;   /* the last one received */
    struct wire_message message; /* points into it */
    int complaint;               /* an ERROR that no one waited for; 0: none */
    char complaint_text[PROBLEM_TEXT_MAX];
};

void link_init(struct link *link, const char *path, link_unclaimed_fn unclaimed, void *context);
static inline bool link_is_up(const struct link *link) { return link->fd >= 0; }
/* One attempt, without waiting. 0, or the negative errno of connect(2); -EPERM: the socket belongs to another user. */
int link_connect(struct link *link) MUST_CHECK;
void link_close(struct link *link);

struct link_request {
    enum opcode opcode;
    const void *body;
    const char *tail;
    size_t tail_length;
    int fd; /* borrowed; -1: none */
};

/* Sends; *ret_serial (may be NULL) is what the reply will repeat. */
int link_send(struct link *link, const struct link_request *request, uint64_t deadline,
              uint32_t *ret_serial) MUST_CHECK;
/* Waits for the next message, whatever it is: link->message, until the next call. */
int link_receive(struct link *link, uint64_t deadline) MUST_CHECK;
/* Waits for the reply to one request. An ERROR reply becomes its code and sentence. */
int link_await(struct link *link, uint32_t serial, enum opcode expected, uint64_t deadline) MUST_CHECK;
/* Both. `what` begins the sentence of a timeout. */
int link_call(struct link *link, const struct link_request *request, enum opcode expected,
              uint64_t deadline) MUST_CHECK;
/* Passes the message received last on as one that nobody waits for. */
void link_unclaimed(struct link *link);
/* Handles what has arrived, without waiting. */
void link_drain(struct link *link);
/* The message is an ERROR: sets its sentence and returns its code. */
int link_error(const struct link *link);
/* The peer broke the protocol: closes. Returns CKPT_E_PROTOCOL with the sentence. */
int link_distrust(struct link *link, const char *why);
