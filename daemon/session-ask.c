/* SPDX-License-Identifier: Apache-2.0 */
/* What a session asks: the newest durable version, the list of versions, status, the trace. */
#include "daemon/session-state.h"
#include "daemon/status.h"
#include "daemon/survey.h"

#include <errno.h>

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
    struct survey survey;
    struct session *session; /* NULL: another one lists for it */
    uint32_t serial;
    struct version_record *records;
    size_t count;
    int result;
    struct problem problem;
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

static void list_run(struct survey *survey) {
    struct listing *listing = CONTAINER_OF(survey, struct listing, survey);
    struct job *job = survey->job;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        int r = survey_enter(survey, i) ? list_tier(listing, job->lanes[i], job->name)
                                        : lane_silent_problem(job->lanes[i], &listing->problem);
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

static void list_over(struct session *session) {
    session->suspended = false;
    session_receive_next(session);
    session_unhold(session);
}

static void list_done(struct survey *survey) {
    struct listing *listing = CONTAINER_OF(survey, struct listing, survey);
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
    list_over(session);
}

static void list_left(struct survey *survey);

static void list_free(struct survey *survey) {
    struct listing *listing = CONTAINER_OF(survey, struct listing, survey);
    free(listing->records);
    free(listing);
}

static const struct survey_ops list_ops = {.run = list_run, .done = list_done, .left = list_left, .free = list_free};

/* The session is suspended and held. */
static void list_start(struct session *session, uint32_t serial) {
    struct listing *listing = calloc(1, sizeof *listing);
    if (!listing) {
        session_error(session, serial, CODE_E_MEMORY, NULL);
        list_over(session);
        return;
    }
    listing->session = session;
    listing->serial = serial;
    survey_start(&listing->survey, &list_ops, session->job);
}

/* Again, without the tier that does not answer. */
static void list_left(struct survey *survey) {
    struct listing *listing = CONTAINER_OF(survey, struct listing, survey);
    list_start(STEAL(listing->session), listing->serial);
}

void session_handle_versions(struct session *session, uint32_t serial) {
    session->suspended = true;
    session_hold(session);
    list_start(session, serial);
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
