/* SPDX-License-Identifier: Apache-2.0 */
/* What a session asks: waits for a level, the newest durable version, the list of versions, status. */
#include "daemon/session-state.h"
#include "daemon/status.h"

#include <errno.h>

static void wait_over(struct loop_op *op) {
    struct wait *wait = CONTAINER_OF(op, struct wait, timer);
    struct session *session = wait->session;
    if (!wait->answered && !session->ended)
        session_reply(session, MESSAGE_WAITED, wait->serial, &(struct message_waited){.result = CODE_PENDING}, NULL, 0,
                      -1);
    TAILQ_REMOVE(&session->waits, wait, link);
    session->wait_count--;
    free(wait);
    session_unhold(session);
}

/* True if there is an answer other than "not yet". */
static bool wait_answer(struct session *session, uint32_t serial, const struct message_wait *message, bool last) {
    struct problem problem = PROBLEM_NONE;
    struct version_id id = {session->job->run.generation, message->step};
    int result =
        job_level_reached(session->job, id, session->rank, message->level, message->scope == WAIT_VERSION, &problem);
    if (result == CODE_PENDING && !last)
        return false;
    session_reply(session, MESSAGE_WAITED, serial, &(struct message_waited){.result = result}, problem.text,
                  strlen(problem.text), -1);
    return true;
}

void session_handle_wait(struct session *session, uint32_t serial, const struct message_wait *message) {
    struct problem problem = PROBLEM_NONE;
    if (message->level < LEVEL_CAPTURED || message->level > LEVEL_GLOBAL || message->scope > WAIT_VERSION) {
        problem_set(&problem, -EINVAL, "level %u or scope %u does not exist", message->level, message->scope);
        session_error(session, serial, CODE_E_INVALID, &problem);
        return;
    }
    if (wait_answer(session, serial, message, !message->timeout_ms))
        return;
    struct wait *wait = session->wait_count < WAITS_MAX ? calloc(1, sizeof *wait) : NULL;
    if (!wait) {
        problem_set(&problem, -EBUSY, "%d waits at a time are the limit", WAITS_MAX);
        session_error(session, serial, CODE_E_LIMIT, &problem);
        return;
    }
    wait->session = session;
    wait->serial = serial;
    wait->message = *message;
    TAILQ_INSERT_TAIL(&session->waits, wait, link);
    session->wait_count++;
    session_hold(session);
    uint64_t wait_ms = min_u64(message->timeout_ms, UINT64_C(1000) * 86400 * 365);
    loop_timer(session->server->loop, &wait->timer, loop_now(session->server->loop) + wait_ms * NANOSECONDS_PER_MS,
               wait_over);
}

void session_job_changed(struct session *session) {
    struct wait *wait;
    TAILQ_FOREACH(wait, &session->waits, link)
    if (!wait->answered && wait_answer(session, wait->serial, &wait->message, false)) {
        wait->answered = true;
        loop_cancel(session->server->loop, &wait->timer);
    }
}

void session_handle_last_durable(struct session *session, uint32_t serial, const struct message_last_durable *message) {
    struct job *job = session->job;
    struct message_durable durable = {0};
    uint64_t now = loop_wall(session->server->loop);
    enum level level = max_u64(message->level, LEVEL_CAPTURED);
    if (level < LEVEL_COUNT) {
        const struct job_durable *known = &job->durable[max_u64(level, LEVEL_LOCAL)];
        durable = (struct message_durable){.generation = known->id.generation,
                                           .step = known->id.step,
                                           .age_ms = (now - min_u64(now, known->since_wall_ns)) / NANOSECONDS_PER_MS,
                                           .found = known->found};
    }
    struct version *version = level == LEVEL_CAPTURED ? TAILQ_LAST(&job->versions, version_list) : NULL;
    while (version && version->captured < version->world)
        version = TAILQ_PREV(version, version_list, link);
    if (version &&
        (!durable.found || version_compare(version->id, (struct version_id){durable.generation, durable.step}) > 0))
        durable = (struct message_durable){.generation = version->id.generation,
                                           .step = version->id.step,
                                           .age_ms = (now - min_u64(now, version->created_ns)) / NANOSECONDS_PER_MS,
                                           .found = 1};
    session_reply(session, MESSAGE_DURABLE, serial, &durable, NULL, 0, -1);
}

struct listing {
    struct loop_op op;
    struct session *session;
    uint32_t serial;
    struct version_record *records;
    size_t count;
    int result;
    struct problem problem;
    uint32_t silent; /* lanes that do not answer */
};

static int compare_records(const void *a, const void *b) {
    const struct version_record *x = a, *y = b;
    return -version_compare((struct version_id){x->generation, x->step}, (struct version_id){y->generation, y->step});
}

static int list_tier(struct listing *listing, struct lane *lane, const char *directory) {
    struct catalog catalog;
    int r = catalog_scan(lane->tier, directory, &catalog, &listing->problem);
    if (r < 0)
        return r;
    struct version_record *records =
        realloc(listing->records, (listing->count + catalog.version_count + 1) * sizeof *records);
    if (records)
        listing->records = records;
    for (size_t i = 0; records && i < catalog.version_count; i++)
        if (catalog.versions[i].complete)
            records[listing->count++] = (struct version_record){
                .generation = catalog.versions[i].id.generation,
                .step = catalog.versions[i].id.step,
                .bytes = catalog.versions[i].summary.bytes,
                .created_ns = catalog.versions[i].summary.created_ns,
                .world = catalog.versions[i].summary.world,
                .levels = 1u << lane->config.level,
                .flags = catalog.versions[i].pinned ? VERSION_PINNED : 0,
            };
    catalog_deinit(&catalog);
    return records ? 0 : -ENOMEM;
}

static void list_run(struct loop_op *op) {
    struct listing *listing = CONTAINER_OF(op, struct listing, op);
    struct job *job = listing->session->job;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        int r = listing->silent & 1u << i ? lane_silent_problem(job->lanes[i], &listing->problem)
                                          : list_tier(listing, job->lanes[i], job->name);
        if (r < 0)
            listing->result = r;
    }
    if (listing->count)
        qsort(listing->records, listing->count, sizeof *listing->records, compare_records);
    size_t kept = 0;
    for (size_t i = 0; i < listing->count; i++) {
        struct version_record *last = kept ? &listing->records[kept - 1] : NULL;
        if (last && compare_records(last, &listing->records[i]) == 0) {
            last->levels |= listing->records[i].levels;
            last->flags |= listing->records[i].flags;
        } else {
            listing->records[kept++] = listing->records[i];
        }
    }
    if (kept) /* what could be read is an answer */
        listing->result = 0;
    listing->count = kept;
}

static void list_done(struct loop_op *op) {
    struct listing *listing = CONTAINER_OF(op, struct listing, op);
    struct session *session = listing->session;
    size_t size = listing->count * sizeof *listing->records;
    CLEANUP(closep) int fd = -1;
    if (listing->result >= 0) {
        fd = wire_memfd("ckptd-versions", listing->records ? (void *)listing->records : "", size);
        if (fd < 0)
            listing->result = problem_set(&listing->problem, fd, "cannot make a memfd: %s", strerror(-fd));
    }
    struct message_versions_are versions = {.size = size, .count = (uint32_t)listing->count};
    if (listing->result < 0)
        session_error(session, listing->serial, session_code(listing->result), &listing->problem);
    else
        session_reply(session, MESSAGE_VERSIONS_ARE, listing->serial, &versions, NULL, 0, fd);
    free(listing->records);
    free(listing);
    session->suspended = false;
    session_receive_next(session);
    session_unhold(session);
}

void session_handle_versions(struct session *session, uint32_t serial) {
    struct listing *listing = calloc(1, sizeof *listing);
    if (!listing) {
        session_error(session, serial, CODE_E_MEMORY, NULL);
        return;
    }
    listing->session = session;
    listing->serial = serial;
    session->suspended = true;
    session_hold(session);
    listing->silent = job_silent_lanes(session->job);
    loop_work(session->server->loop, &listing->op, session->server->across, list_run, list_done);
}

void session_handle_status(struct session *session, uint32_t serial) {
    CLEANUP(freep) char *text = NULL;
    CLEANUP(closep) int fd = -1;
    int r = status_text(session->server, &text);
    if (r >= 0)
        r = fd = wire_memfd("ckptd-status", text, strlen(text));
    if (r < 0)
        session_error(session, serial, session_code(r), NULL);
    else
        session_reply(session, MESSAGE_STATUS_IS, serial, &(struct message_status_is){.size = strlen(text)}, NULL, 0,
                      fd);
}

void session_handle_trace(struct session *session, uint32_t serial) {
    struct loop *loop = session->server->loop;
    struct trace_text text = {0};
    CLEANUP(closep) int fd = -1;
    int r = trace_copy(session->server->trace, &text);
    if (r >= 0)
        r = fd = wire_memfd("ckptd-trace", text.data, text.size);
    free(text.data);
    if (r < 0) {
        session_error(session, serial, session_code(r), NULL);
        return;
    }
    struct message_trace_is trace = {
        .size = text.size,
        .forgotten = text.forgotten,
        .wall_ns = loop_wall(loop) - loop_now(loop),
        .records = text.records,
        .names = text.names,
    };
    session_reply(session, MESSAGE_TRACE_IS, serial, &trace, NULL, 0, fd);
}
