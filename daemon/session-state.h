/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the files of a session share: session.c (life, sending, receiving), session-open.c (open and
 * attach), session-save.c (areas, sets, saves, pushes), session-device.c (device memory), session-wait.c (waits for a
 * level), session-ask.c (questions) and session-restore.c. Nobody else includes this.
 */

#include "daemon/session.h"

struct outgoing {
    TAILQ_ENTRY(outgoing) link;
    int fd; /* owned duplicate, or -1 */
    struct wire_packet packet;
};
TAILQ_HEAD(outgoing_list, outgoing);

struct look;
struct wait {
    TAILQ_ENTRY(wait) link;
    struct session *session;
    uint32_t serial;
    struct message_wait message;
    bool answered;
    struct look *look; /* into the tiers; NULL: none is under way */
    struct loop_op timer;
};
TAILQ_HEAD(wait_list, wait);

/* A save that waits for room. */
struct pending_save {
    bool active;
    uint32_t serial;
    struct message_save message;
    bool admitted;                        /* the client says so, and it was */
    uint64_t deadline_ns, waits_since_ns; /* the latter 0: it does not wait */
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
    bool deaf, reset; /* it has hung up: what it said before is still read */
    uint32_t holds;
    struct wire_packet incoming;
    struct loop_op receive, send, death;
    struct outgoing_list queue;
    uint32_t queued;

    struct job *job; /* from O on */
    bool open;
    uint32_t rank, world;
    uint64_t generation; /* of the run that it joined */
    struct word_map *word;
    struct area *areas[AREAS_MAX];
    struct device_memory **memories; /* [memory_room] by number; NULL where there is none */
    uint32_t memory_room;
    uint32_t chunk_count; /* of all its ranges */
    struct import_pool *device_pools[DEVICE_POOLS_MAX];
    struct set *set;
    struct part *part; /* being captured */
    struct pending_save save;
    uint64_t admissible; /* the size of the image that the client may save without asking; 0: none yet of this set */
    uint64_t admission;  /* bytes of the pool kept for it */
    bool admitted;       /* it was told so, since its last save */
    uint64_t taken_ns;   /* when others first missed what the client has taken of it; 0: they have not */
    struct loop_op taken;
    uint32_t last_looks; /* for words of a client that has died */
    bool has_tier_step;
    uint64_t tier_step; /* this rank's newest part of this run that tiers held at open */
    bool has_step;
    uint64_t last_step, saves, skipped, report_number;
    struct problem push_reason;
    struct wait_list waits;
    uint32_t wait_count;
    struct restore *restores[RESTORES_MAX];
    uint32_t restores_opening;
    uint32_t missed; /* MISSED messages so far */
    uint32_t next_restore;
    uint8_t segments[POOL_SEGMENTS_MAX / 8]; /* the client has them */

    struct opening *opening; /* while it opens */
    struct session *pusher;  /* O: its push connection */
    struct session *push_of; /* A: whose */
};

void session_receive_next(struct session *session);
void session_reply_ok(struct session *session, uint32_t serial);
void session_drop_set(struct session *session);
void session_drop_devices(struct session *session);
/* Why it must push: for status, and in the log. */
void session_device_refused(struct session *session, const struct problem *problem);
void session_drop_area(struct session *session, uint32_t number);
/* What is kept for its next save is given back, also if the client has taken it: its save would have come. */
void session_withdraw(struct session *session);
/* Its set is another one now: the next save must ask. */
void session_inadmissible(struct session *session);
/* Tries to admit the save that waits. */
void session_save_try(struct session *session);

/* One function per message; the body is checked by wire_check(), its values are not. */
void session_handle_open(struct session *session, const struct wire_message *message);
void session_handle_attach(struct session *session, uint32_t serial, const struct message_attach *message);
void session_handle_area(struct session *session, uint32_t serial, const struct message_area *message);
void session_handle_area_drop(struct session *session, uint32_t serial, const struct message_area_drop *message);
void session_handle_register(struct session *session, uint32_t serial, const struct message_register *message);
void session_handle_save(struct session *session, uint32_t serial, const struct message_save *message);
void session_handle_push(struct session *session, const struct message_push *message);
void session_handle_start(struct session *session, const struct message_start *message);
void session_handle_device(struct session *session, const struct wire_message *message);
void session_handle_missed(struct session *session, uint32_t serial, const struct message_missed *message);
void session_handle_wait(struct session *session, uint32_t serial, const struct message_wait *message);
void session_handle_last_durable(struct session *session, uint32_t serial, const struct message_last_durable *message);
void session_handle_versions(struct session *session, uint32_t serial);
void session_handle_status(struct session *session, uint32_t serial);
void session_handle_trace(struct session *session, uint32_t serial);
void session_handle_restore_open(struct session *session, uint32_t serial, const struct message_restore_open *message);
void session_handle_restore_close(struct session *session, uint32_t serial, uint32_t number);
void session_handle_fetch(struct session *session, uint32_t serial, const struct message_fetch *message);
void session_handle_release(struct session *session, uint32_t lease);
void session_handle_prefetch(struct session *session, uint32_t serial, const struct message_prefetch *message);
