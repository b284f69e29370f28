/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon: one control thread that owns all state and takes no locks; workers get immutable jobs
 * and give back completions. This file names what the rooms of the daemon share; who owns what:
 *
 *   server -> lanes     a tier at work: its workers, its queue of drains
 *          -> jobs      -> versions -> parts (one rank's contribution: its capture and its drains)
 *          -> sessions  one per connected client; parts outlive them
 *          -> pool      the host memory that chunks lie in
 */

#include "base/log.h"
#include "base/loop.h"
#include "daemon/pool.h"
#include "daemon/trace.h"
#include "tiers/commit.h"
#include "tiers/config.h"
#include "tiers/tier.h"

#define LANES_MAX 4 /* tiers that one job drains to */
#define SESSIONS_MAX 4096
#define SESSION_DESCRIPTORS 8 /* socket, pidfd, memory file, word, and what unread answers carry */
#define DESCRIPTORS_OWN 256   /* of tiers, loops and the log; segments of the pool come on top */
#define AREAS_TOTAL_MAX 16384 /* mapped areas of all clients: the kernel allows a process 65530 maps */
#define STUCK_WORKERS_MAX 60  /* in the memory of clients, before captures stand still; a process can have one */
#define JOB_LANES_MAX 256     /* lanes that came with jobs: each has its workers */

struct devices;
struct job;
struct lane;
struct part;
struct session;
struct version;

/* Counters, one line each; `ckptctl status` shows them by these names, ckptd(8) explains them. */
#define SERVER_COUNTERS(COUNTER)                                                                                       \
    COUNTER(saves_accepted, "saves accepted")                                                                          \
    COUNTER(saves_skipped, "saves skipped because the pool was busy")                                                  \
    COUNTER(captures_failed, "captures that ended without a part: revoked, source gone or unreadable")                 \
    COUNTER(bytes_captured, "image bytes captured")                                                                    \
    COUNTER(parts_committed, "parts committed, over all tiers")                                                        \
    COUNTER(parts_failed, "parts given up in a tier after all tries")                                                  \
    COUNTER(parts_superseded, "parts not written to a tier because a newer version waited behind them")                \
    COUNTER(versions_complete, "versions that became complete, over all tiers")                                        \
    COUNTER(versions_removed, "versions removed by retention")                                                         \
    COUNTER(chunks_fetched, "chunks read back from tiers")                                                             \
    COUNTER(chunks_bad, "chunks whose digest was wrong")                                                               \
    COUNTER(protocol_errors, "clients disconnected for what they sent")

struct server_counters {
#define COUNTER(name, help) uint64_t name;
    SERVER_COUNTERS(COUNTER)
#undef COUNTER
};

/* Opens a configured tier (blocking). */
typedef int (*server_open_tier)(const struct config_tier *config, struct tier **ret_tier, struct problem *problem);

TAILQ_HEAD(lane_list, lane);
TAILQ_HEAD(job_list, job);
TAILQ_HEAD(session_list, session);
TAILQ_HEAD(fetch_queue, fetch);

struct server {
    struct loop *loop;
    const struct config *config;
    struct log *log;
    struct pool *pool;
    struct loop_group *capturers; /* copy and digest */
    uint32_t capturing;           /* of their threads, or waiting for one */
    struct loop_group *verifiers; /* digest what restores take from memory: the program waits, so on all processors */
    struct loop_group *encoders;  /* compress */
    uint32_t encoding;            /* chunks that they have */
    struct loop_group *probers;   /* look whether a client's memory can be read; may get stuck there */
    struct loop_group *names;     /* registrations */
    struct loop_group *across;    /* what looks at several tiers, or opens one: any of them may never answer */
    struct devices *devices;      /* GPUs */
    struct point_hook point_hook; /* of all its tiers */
    server_open_tier open_tier;
    struct lane_list lanes;
    struct job_list jobs;
    struct session_list sessions;
    uint32_t session_count, sessions_max;
    uint32_t areas;             /* of all sessions */
    uint64_t fetching;          /* bytes of the pool in fetches and leases */
    uint64_t admissions;        /* bytes reserved for saves that have not come yet */
    uint64_t windowed;          /* bytes reserved for an image larger than the pool, which makes do with less */
    struct fetch_queue fetches; /* those that wait for room among them */
    struct pool_waiter fetch_waiter;
    struct server_counters counters;
    struct trace *trace;
    char host[256], boot_id[40];
    uid_t uid;
    uint64_t started_ns;
    char socket_path[108];
    int listen_fd, signal_fd;
    bool on_demand, stopping, quitting, accepting;
    uint64_t accept_error_ns; /* when the last one was logged */
    uint64_t idle_since_ns;   /* 0: in use */
    uint32_t signals;
    struct loop_op accept, signal, idle, grace, quit, accept_pause;
};

struct server_options {
    const char *socket_path;
    int listen_fd; /* bound and listening; taken over */
    int signal_fd; /* SIGTERM, SIGINT; taken over */
    bool on_demand;
    server_open_tier open_tier; /* NULL: lane_open_tier() */
};

int server_new(struct loop *loop, const struct config *config, struct log *log, const struct server_options *options,
               struct server **ret_server, struct problem *problem) MUST_CHECK;
/* Runs until it has stopped: a signal or STOP and the drain after it, or (on demand) idleness. */
int server_run(struct server *server) MUST_CHECK;
/* Only of a server that has never run. */
void server_free(struct server *server);

/* Begins the stop: no new opens; ends when everything captured is LOCAL, or at the grace. */
void server_stop(struct server *server, bool now);
/* Something ended: a session, a drain. Looks whether the daemon may exit or is idle now. */
void server_settled(struct server *server);

uint64_t server_nonce(struct server *server);
