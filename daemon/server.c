/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/server.h"

#include "base/memory.h"
#include "daemon/device.h"
#include "daemon/job.h"
#include "daemon/lane.h"
#include "daemon/part.h"
#include "daemon/session.h"
#include "tiers/claim.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>

#define ACCEPT_PAUSE_NS (100 * NANOSECONDS_PER_MS)
#define ACCEPT_LOG_NS (60 * NANOSECONDS_PER_SECOND)
#define VERIFIERS_MAX 4
#define SESSIONS_MIN 16 /* also where descriptors are very few */
#define PROBERS 2
#define NAMES_WORKERS 8
#define NAMES_WORKERS_MAX 32
#define ACROSS_WORKERS 64
#define ACROSS_WORKERS_MAX 128

/* ---- clients ---- */

static void accept_next(struct server *server);

static void pause_elapsed(struct loop_op *op) { accept_next(CONTAINER_OF(op, struct server, accept_pause)); }

static void accepted(struct loop_op *op) {
    struct server *server = CONTAINER_OF(op, struct server, accept);
    uint64_t now = loop_now(server->loop);
    server->accepting = false;
    if (op->result >= 0) {
        session_accept(server, (int)op->result);
        accept_next(server);
        return;
    }
    if (op->result == -ECANCELED || loop_op_busy(&server->accept_pause))
        return;
    /* Out of descriptors, most likely: the client stays in the queue until some are free. */
    if (!server->accept_error_ns || now - server->accept_error_ns > ACCEPT_LOG_NS) {
        log_error(server->log, "cannot accept a client: %s", strerror((int)-op->result));
        server->accept_error_ns = now;
    }
    loop_timer(server->loop, &server->accept_pause, now + ACCEPT_PAUSE_NS, pause_elapsed);
}

static void accept_next(struct server *server) {
    if (server->quitting || server->accepting)
        return;
    server->accepting = true;
    loop_accept(server->loop, &server->accept, server->listen_fd, accepted);
}

/* ---- ending ---- */

static bool unsettled(struct server *server) {
    struct job *job;
    TAILQ_FOREACH(job, &server->jobs, link)
    if (job_unsettled(job) || job_ending(job))
        return true;
    return false;
}

/* Nothing pending in any lane: an on-demand daemon may go. */
static bool drained(struct server *server) {
    struct lane *lane;
    TAILQ_FOREACH(lane, &server->lanes, link)
    if (lane->pending_parts)
        return false;
    struct job *job;
    TAILQ_FOREACH(job, &server->jobs, link)
    if (job_completing(job))
        return false;
    return !unsettled(server);
}

static void quit(struct server *server, const char *why) {
    if (server->quitting)
        return;
    server->quitting = true;
    log_info(server->log, "stopped: %s", why);
    loop_stop(server->loop);
}

static void grace_elapsed(struct loop_op *op) {
    struct server *server = CONTAINER_OF(op, struct server, grace);
    if (op->result == 0)
        quit(server, "the grace is over, some parts are not LOCAL");
}

void server_stop(struct server *server, bool now) {
    if (!server->stopping) {
        server->stopping = true;
        sessions_withdraw(server, NULL);
        log_info(server->log, "stopping: no new runs, captured parts are made LOCAL first");
        loop_timer(server->loop, &server->grace,
                   loop_now(server->loop) + server->config->stop_grace_ms * NANOSECONDS_PER_MS, grace_elapsed);
    }
    if (now)
        quit(server, "at once, as asked");
    else
        server_settled(server);
}

static void idle_elapsed(struct loop_op *op) {
    struct server *server = CONTAINER_OF(op, struct server, idle);
    uint64_t now = loop_now(server->loop), limit = server->config->idle_exit_ms * NANOSECONDS_PER_MS;
    bool idle = server->idle_since_ns && now - server->idle_since_ns >= limit;
    if (idle && drained(server)) {
        quit(server, "nobody has used it for a while");
        return;
    }
    if (idle) /* a tier is slow: another round */
        server->idle_since_ns = now;
    server_settled(server);
}

/* From the loop, so that whoever settled is done with what it holds. */
static void look(struct loop_op *op) {
    struct server *server = CONTAINER_OF(op, struct server, quit);
    struct session *session = NULL;
    bool waiting = false; /* a client may have asked for the stop: it gets its answer first */
    if (server->quitting)
        return;
    while (server->stopping && (session = session_next(server, session)))
        waiting = waiting || session_sending(session);
    if (server->stopping && !waiting && !unsettled(server)) {
        quit(server, "everything captured is LOCAL");
        return;
    }
    if (!server->on_demand || server->stopping)
        return;
    if (server->session_count) {
        server->idle_since_ns = 0;
        return;
    }
    if (!server->idle_since_ns)
        server->idle_since_ns = loop_now(server->loop);
    if (!loop_op_busy(&server->idle))
        loop_timer(server->loop, &server->idle,
                   server->idle_since_ns + server->config->idle_exit_ms * NANOSECONDS_PER_MS, idle_elapsed);
}

void server_settled(struct server *server) {
    if (!loop_op_busy(&server->quit))
        loop_post(server->loop, &server->quit, 0, look);
}

static void signalled(struct loop_op *op) {
    struct server *server = CONTAINER_OF(op, struct server, signal);
    struct signalfd_siginfo info;
    if (op->result < 0)
        return;
    bool again = server->signals++ > 0;
    while (read(server->signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
        log_info(server->log, "signal %u from process %u", info.ssi_signo, info.ssi_pid);
    server_stop(server, again); /* the second one does not wait */
    loop_poll(server->loop, &server->signal, server->signal_fd, POLLIN, signalled);
}

/* ---- life ---- */

uint64_t server_nonce(struct server *server) {
    uint64_t nonce;
    do
        nonce = loop_random(server->loop);
    while (!nonce);
    return nonce;
}

static int open_lanes(struct server *server, struct problem *problem) {
    for (size_t i = 0; i < server->config->tier_count; i++) {
        struct tier *tier;
        struct lane *lane;
        const struct config_tier *config = &server->config->tiers[i];
        struct problem reason = PROBLEM_NONE;
        int r = server->open_tier(config, &tier, &reason);
        if (r < 0 && config->line) /* a wrong path is a mistake in the file like any other */
            return problem_set(problem, -EINVAL, "%s:%d: %.400s", server->config->file, config->line,
                               problem_text(&reason, r));
        if (r < 0)
            return problem_set(problem, r, "%s", problem_text(&reason, r));
        r = lane_new(server, config, tier, false, &lane);
        if (r < 0) {
            tier_free(tier);
            return problem_set(problem, r, "cannot start the workers of tier %s: %s", config->name, strerror(-r));
        }
    }
    return 0;
}

static int make_pool(struct server *server, struct problem *problem) {
    const struct config *config = server->config;
    uint64_t available = memory_available();
    uint64_t limit = config->pool_size ? config->pool_size : available / 100 * config->pool_percent;
    if (config->pool_size > available)
        log_warning(server->log, "the pool may grow to %llu MiB, but only %llu MiB are available now",
                    (unsigned long long)(config->pool_size >> 20), (unsigned long long)(available >> 20));
    limit = max_u64(limit, 4 * (uint64_t)config->chunk_size);
    int r = pool_new(server->loop, limit, config->prefault, &server->pool);
    return r < 0 ? problem_set(problem, r, "cannot make a pool of %llu MiB: %s", (unsigned long long)(limit >> 20),
                               strerror(-r))
                 : 0;
}

/* Clients must not take the descriptors that others' files need. */
static uint32_t sessions_possible(const struct server *server) {
    struct rlimit limit;
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    uint64_t own = DESCRIPTORS_OWN + usage.limit / POOL_SEGMENT_SIZE;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
        return SESSIONS_MAX;
    uint64_t most = limit.rlim_cur > own ? (limit.rlim_cur - own) / SESSION_DESCRIPTORS : 0;
    return (uint32_t)min_u64(max_u64(most, SESSIONS_MIN), SESSIONS_MAX);
}

int server_new(struct loop *loop, const struct config *config, struct log *log, const struct server_options *options,
               struct server **ret_server, struct problem *problem) {
    struct server *server = calloc(1, sizeof *server);
    if (!server)
        return problem_set(problem, -ENOMEM, "out of memory");
    server->loop = loop;
    server->config = config;
    server->log = log;
    server->uid = geteuid();
    server->started_ns = loop_now(loop);
    server->listen_fd = options->listen_fd;
    server->signal_fd = options->signal_fd;
    server->on_demand = options->on_demand;
    server->open_tier = options->open_tier ? options->open_tier : lane_open_tier;
    snprintf(server->socket_path, sizeof server->socket_path, "%s", options->socket_path);
    TAILQ_INIT(&server->lanes);
    TAILQ_INIT(&server->jobs);
    TAILQ_INIT(&server->sessions);
    TAILQ_INIT(&server->fetches);
    server->point_hook = point_hook_from_environment();
    int r = claim_host(server->host, server->boot_id);
    if (r < 0)
        problem_set(problem, r, "cannot learn this host's name and boot id: %s", strerror(-r));
    if (!r)
        r = make_pool(server, problem);
    if (!r)
        server->sessions_max = sessions_possible(server);
    if (!r)
        r = trace_new(loop, server->pool, TRACE_RECORDS, &server->trace);
    if (!r)
        r = loop_group_new(loop, "capture", config->capture_threads, config->capture_threads + STUCK_WORKERS_MAX,
                           &server->capturers);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned verifiers = processors < 1 ? 1 : processors > VERIFIERS_MAX ? VERIFIERS_MAX : (unsigned)processors;
    if (!r)
        r = loop_group_new(loop, "verify", verifiers, verifiers, &server->verifiers);
    if (!r)
        r = loop_group_new(loop, "encode", config->codec_threads, config->codec_threads, &server->encoders);
    if (!r)
        r = loop_group_new(loop, "probe", PROBERS, PROBERS + STUCK_WORKERS_MAX, &server->probers);
    if (!r)
        r = loop_group_new(loop, "names", NAMES_WORKERS, NAMES_WORKERS_MAX, &server->names);
    if (!r)
        r = devices_new(server, &server->devices);
    if (!r)
        r = loop_group_new(loop, "across", ACROSS_WORKERS, ACROSS_WORKERS_MAX, &server->across);
    if (!r)
        r = open_lanes(server, problem);
    if (r < 0) {
        problem_set(problem, r, "cannot start: %s", strerror(-r));
        server_free(server);
        return r;
    }
    *ret_server = server;
    return 0;
}

int server_run(struct server *server) {
    accept_next(server);
    loop_poll(server->loop, &server->signal, server->signal_fd, POLLIN, signalled);
    server_settled(server);
    return loop_run(server->loop);
}

/* Only of a server that never ran: a daemon that stops leaves the rest to the kernel, since workers
 * may be stuck in a file system that never answers. */
void server_free(struct server *server) {
    struct lane *lane;
    while ((lane = TAILQ_FIRST(&server->lanes)))
        lane_free(lane);
    if (server->capturers)
        loop_group_free(server->capturers);
    if (server->verifiers)
        loop_group_free(server->verifiers);
    if (server->encoders)
        loop_group_free(server->encoders);
    if (server->probers)
        loop_group_free(server->probers);
    if (server->names)
        loop_group_free(server->names);
    if (server->across)
        loop_group_free(server->across);
    trace_free(server->trace);
    devices_free(server->devices);
    pool_free(server->pool);
    free(server);
}
