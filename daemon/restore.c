/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/restore.h"

#include "daemon/session.h"
#include "daemon/survey.h"
#include "proto/manifest.h"

#include <errno.h>

#define FETCH_TIMEOUT_MAX_MS UINT64_C(86400000)
#define PIN_EXPIRY_NS (600 * NANOSECONDS_PER_SECOND) /* should this daemon die; it renews them as long as it lives */
#define PIN_RENEW_NS (PIN_EXPIRY_NS / 3)
#define CHOICES_MAX 4 /* each lost to a sweep in the same moment */

struct lease {
    TAILQ_ENTRY(lease) link;
    uint32_t number, count;
    uint64_t bytes;
    struct pool_buffer *buffers[];
};
TAILQ_HEAD(lease_list, lease);

struct fetch {
    TAILQ_ENTRY(fetch) link;
    TAILQ_ENTRY(fetch) queue_link; /* in the server's queue, while `waiting` */
    struct restore *restore;
    struct holding *holding;
    uint32_t serial, first, count, left;
    uint64_t bytes; /* charged to the server's fetching once it has begun */
    bool waiting;
    struct loop_op timer;
    bool answered;
    struct holding_request requests[];
};
TAILQ_HEAD(fetch_list, fetch);

/* One part's chunks, brought in one after the other. */
struct prefetch {
    TAILQ_ENTRY(prefetch) link;
    struct restore *restore;
    uint32_t rank;
    struct holding_request request;
};
TAILQ_HEAD(prefetch_list, prefetch);

struct restore {
    uint32_t number;
    struct session *session; /* NULL once closed */
    struct server *server;
    struct job *job;
    struct version *version;
    struct version_id id;
    uint32_t world;
    uint64_t opened_ns, fetched; /* bytes */
    struct complete complete;    /* without its index */
    struct holding **holdings;   /* [world], made on demand */
    struct lease_list leases;
    struct fetch_list fetches;
    struct prefetch_list prefetches;
    uint32_t lease_count, fetch_count, next_lease;
    bool closed;

    /* Opening and closing. */
    struct survey survey;
    bool surveying;
    struct loop_op op; /* unpinning */
    uint32_t serial;
    struct message_restore_open request;
    bool resumes;
    struct version_id resume;
    int result;
    struct problem problem, warning;
    char *text;
    size_t text_size;
    uint64_t pin_nonce;
    uint32_t chosen_lane, pinned_lanes;
    struct loop_op renew, renew_timer;
};

uint32_t restore_number(const struct restore *restore) { return restore->number; }
uint32_t restore_leases(const struct restore *restore) { return restore->lease_count; }
uint32_t restore_fetches(const struct restore *restore) { return restore->fetch_count; }

static void pin_name(const struct restore *restore, char name[40]) {
    snprintf(name, 40, "restore-%016llx", (unsigned long long)restore->pin_nonce);
}

static void restore_free(struct restore *restore);

/* ---- opening, on a worker ---- */

/* Tries one version in every lane; 0 if its index and its files are good in one of them. */
static int try_version(struct restore *restore, struct version_id id, struct problem *problem) {
    struct job *job = restore->job;
    int result = TIER_E_ABSENT;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        if (!survey_enter(&restore->survey, i))
            continue;
        struct tier *tier = job->lanes[i]->tier;
        int r =
            catalog_check_parts(tier, job->name, id, &restore->complete, &restore->text, &restore->text_size, problem);
        if (r < 0)
            result = r;
        if (r)
            continue;
        restore->id = id;
        restore->world = restore->complete.summary.world;
        restore->chosen_lane = i;
        return 0;
    }
    return result;
}

static int compare_ids(const void *a, const void *b) {
    return -version_compare(*(const struct version_id *)a, *(const struct version_id *)b);
}

/* Every complete version of every lane, newest first, without repetitions. */
static int all_versions(struct restore *restore, struct version_id **ret_ids, size_t *ret_count) {
    struct job *job = restore->job;
    CLEANUP(freep) struct version_id *ids = NULL;
    size_t count = 0;
    int failed = 0;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        struct catalog catalog;
        if (!survey_enter(&restore->survey, i)) {
            failed = lane_silent_problem(job->lanes[i], &restore->problem);
            continue;
        }
        int r = catalog_scan(job->lanes[i]->tier, job->name, &catalog, &restore->problem);
        if (r < 0) {
            failed = r;
            continue;
        }
        struct version_id *more = realloc(ids, (count + catalog.version_count + 1) * sizeof *ids);
        if (more) {
            ids = more;
            for (size_t v = 0; v < catalog.version_count; v++)
                if (catalog.versions[v].complete || catalog.versions[v].unreadable)
                    ids[count++] = catalog.versions[v].id;
        }
        catalog_deinit(&catalog);
        if (!more)
            return problem_set(&restore->problem, -ENOMEM, "out of memory");
    }
    if (!count && failed)
        return failed;
    if (count)
        qsort(ids, count, sizeof *ids, compare_ids);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (!kept || version_compare(ids[kept - 1], ids[i]) != 0)
            ids[kept++] = ids[i];
    *ret_ids = STEAL(ids);
    *ret_count = kept;
    return 0;
}

static int choose_latest(struct restore *restore) {
    CLEANUP(freep) struct version_id *ids = NULL;
    size_t count = 0;
    int r = all_versions(restore, &ids, &count);
    if (r < 0)
        return r;
    bool by_step = restore->request.which == RESTORE_STEP;
    bool seen = false;
    for (size_t i = 0; i < count; i++) {
        if (by_step && ids[i].step != restore->request.step)
            continue;
        struct problem problem = PROBLEM_NONE;
        r = try_version(restore, ids[i], &problem);
        if (r == 0)
            return 0;
        if (!seen)
            problem_set(&restore->warning, r, "version %llu/%llu was passed over: %s",
                        (unsigned long long)ids[i].generation, (unsigned long long)ids[i].step, problem.text);
        seen = true;
    }
    if (seen)
        return problem_set(&restore->problem, -ENODATA, "versions of job %s exist, but none is usable; %s",
                           restore->job->name, restore->warning.text);
    if (by_step)
        return problem_set(&restore->problem, -ENOENT, "job %s has no complete version of step %llu",
                           restore->job->name, (unsigned long long)restore->request.step);
    return 1; /* none */
}

static int choose(struct restore *restore) {
    struct version_id id = {restore->request.generation, restore->request.step};
    if (restore->request.which == RESTORE_RESUME) {
        if (!restore->resumes)
            return 1;
        id = restore->resume;
    } else if (restore->request.which != RESTORE_EXACT) {
        return choose_latest(restore);
    }
    int r = try_version(restore, id, &restore->problem);
    if (r == TIER_E_ABSENT && restore->request.which == RESTORE_RESUME)
        return problem_set(
            &restore->problem, -ENOENT,
            "job %s goes on from version %llu/%llu, as was decided on %s, but no tier of this node has it: "
            "start this rank where it is, or copy it to where all nodes see it with ckptctl drain --wait",
            restore->job->name, (unsigned long long)id.generation, (unsigned long long)id.step, restore->job->run.host);
    if (r == TIER_E_ABSENT)
        return problem_set(&restore->problem, -ENOENT, "job %s has no complete version %llu/%llu", restore->job->name,
                           (unsigned long long)id.generation, (unsigned long long)id.step);
    return r;
}

static void unpin_lanes(struct restore *restore) {
    char name[40];
    pin_name(restore, name);
    for (uint32_t i = 0; i < restore->job->lane_count; i++) {
        struct problem ignored = PROBLEM_NONE; /* it expires by itself */
        if (restore->pinned_lanes & 1u << i)
            (void)!retention_unpin(restore->job->lanes[i]->tier, restore->job->name, restore->id, name, &ignored);
    }
    restore->pinned_lanes = 0;
}

/* Daemons of other nodes, others of this one and `ckptctl rm` keep their hands off what is read here. The
 * expiry is reckoned by the clock that it will be compared with: ours may be another, or be set. False: the
 * copy that was chosen is there no more. */
static bool pin_lanes(struct restore *restore) {
    char name[40];
    bool there = true;
    pin_name(restore, name);
    for (uint32_t i = 0; i < restore->job->lane_count; i++) {
        struct tier *tier = restore->job->lanes[i]->tier;
        struct problem ignored = PROBLEM_NONE; /* without a pin it can be read, too */
        int64_t now_ns;
        if (!survey_enter(&restore->survey, i))
            continue;
        int r = tier_now(tier, &now_ns);
        if (r == 0)
            r = retention_pin(tier, restore->job->name, restore->id, name, (uint64_t)now_ns + PIN_EXPIRY_NS,
                              restore->pin_nonce, &ignored);
        if (r == 0)
            restore->pinned_lanes |= 1u << i;
        if (r == TIER_E_ABSENT && i == restore->chosen_lane)
            there = false;
    }
    return there;
}

/* What a tier that does not answer may hold can be newer, or what was asked for. */
static void mind_the_silent(struct restore *restore) {
    struct problem silence = PROBLEM_NONE;
    for (uint32_t i = 0; i < restore->job->lane_count; i++)
        if (restore->survey.silent & 1u << i)
            lane_silent_problem(restore->job->lanes[i], &silence);
    if (!restore->result)
        problem_set(&restore->warning, 0, "%s; it was not looked at", silence.text);
    else if (restore->result == 1 || restore->result == -ENOENT) {
        restore->problem = silence;
        restore->result = silence.code;
    }
}

static void open_run(struct survey *survey) {
    struct restore *restore = CONTAINER_OF(survey, struct restore, survey);
    for (int i = 0; i < CHOICES_MAX; i++) {
        restore->result = choose(restore);
        if (survey->silent)
            mind_the_silent(restore);
        if (restore->result || pin_lanes(restore))
            return;
        /* It went to the trash between the choice and the pin: a newer one is complete, so choose again. */
        unpin_lanes(restore);
        complete_deinit(&restore->complete);
        free(STEAL(restore->text));
    }
    restore->result = problem_set(&restore->problem, -ENOENT,
                                  "job %s: each version that was chosen went to the trash before it could be pinned; "
                                  "try again, or keep more versions",
                                  restore->job->name);
}

static void renew_start(struct restore *restore);

static void renew_run(struct loop_op *op) { (void)pin_lanes(CONTAINER_OF(op, struct restore, renew)); }

static void renew_done(struct loop_op *op) {
    struct restore *restore = CONTAINER_OF(op, struct restore, renew);
    if (restore->closed)
        restore_free(restore);
    else
        renew_start(restore);
}

static void renew_elapsed(struct loop_op *op) {
    struct restore *restore = CONTAINER_OF(op, struct restore, renew_timer);
    if (restore->closed)
        restore_free(restore);
    else
        loop_work(restore->server->loop, &restore->renew, restore->server->across, renew_run, renew_done);
}

static void renew_start(struct restore *restore) {
    struct loop *loop = restore->server->loop;
    loop_timer(loop, &restore->renew_timer, loop_now(loop) + PIN_RENEW_NS, renew_elapsed);
}

static void open_done(struct survey *survey) {
    struct restore *restore = CONTAINER_OF(survey, struct restore, survey);
    struct session *session = restore->session;
    int r = restore->result;
    restore->closed = restore->closed || session_gone(session);
    session_restore_opening(session, false);
    if (!restore->closed && r == 0) {
        restore->holdings = calloc(restore->world, sizeof(struct holding *));
        restore->version = job_version(restore->job, restore->id, restore->world);
        if (restore->version)
            restore->version->busy++; /* retention keeps off */
        if (!restore->holdings || !restore->version)
            r = problem_set(&restore->problem, -ENOMEM, "out of memory");
    }
    CLEANUP(closep) int fd = -1;
    if (!restore->closed && r >= 0) {
        fd = wire_memfd("ckptd-index", restore->text ? restore->text : "", restore->text_size);
        if (fd < 0)
            r = problem_set(&restore->problem, fd, "cannot make a memfd: %s", strerror(-fd));
    }
    free(STEAL(restore->text));
    if (restore->closed) {
        restore_free(restore);
        return;
    }
    if (restore->warning.text[0])
        log_warning(restore->server->log, "%s job=%s", restore->warning.text, restore->job->name);
    if (r < 0) {
        session_error(session, restore->serial, session_code(r), &restore->problem);
        restore_close(restore);
        return;
    }
    struct message_restore_opened opened = {
        .generation = restore->id.generation,
        .step = restore->id.step,
        .index_size = restore->text_size,
        .result = r ? CODE_NONE : CODE_OK,
        .restore = restore->number,
    };
    session_reply(session, MESSAGE_RESTORE_OPENED, restore->serial, &opened, restore->warning.text,
                  strlen(restore->warning.text), fd);
    if (r || session_gone(session)) { /* the answer itself may have ended it */
        restore_close(restore);
        return;
    }
    renew_start(restore);
    session_restore_opened(session, restore);
}

/* Another one takes its place, without the tier that does not answer. */
static void open_left(struct survey *survey) {
    struct restore *restore = CONTAINER_OF(survey, struct restore, survey);
    struct session *session = restore->session;
    session_restore_opening(session, false);
    restore->closed = true;
    if (session_gone(session))
        return;
    int r = restore_open(session, restore->serial, restore->number, &restore->request);
    if (r < 0)
        session_error(session, restore->serial, session_code(r), NULL);
}

static void open_free(struct survey *survey) {
    struct restore *restore = CONTAINER_OF(survey, struct restore, survey);
    restore->surveying = false;
    if (restore->closed)
        restore_free(restore);
}

static const struct survey_ops open_ops = {.run = open_run, .done = open_done, .left = open_left, .free = open_free};

int restore_open(struct session *session, uint32_t serial, uint32_t number,
                 const struct message_restore_open *request) {
    struct restore *restore = calloc(1, sizeof *restore);
    if (!restore)
        return -ENOMEM;
    restore->number = number;
    restore->session = session;
    restore->server = session_server(session);
    restore->job = job_ref(session_job(session));
    restore->serial = serial;
    restore->request = *request;
    restore->resumes = restore->job->run.resumes;
    restore->resume = (struct version_id){restore->job->run.resume_generation, restore->job->run.resume_step};
    restore->pin_nonce = server_nonce(restore->server);
    restore->opened_ns = loop_now(restore->server->loop);
    TAILQ_INIT(&restore->leases);
    TAILQ_INIT(&restore->fetches);
    TAILQ_INIT(&restore->prefetches);
    session_hold(session);
    session_restore_opening(session, true);
    restore->surveying = true;
    survey_start(&restore->survey, &open_ops, restore->job);
    return 0;
}

/* ---- fetching ---- */

static int holding_of(struct restore *restore, uint32_t rank, struct holding **ret_holding) {
    if (rank >= restore->world)
        return -EINVAL;
    if (!restore->holdings[rank]) {
        int r = holding_new(restore->job, restore->id, rank, &restore->complete.parts[rank].image_digest,
                            &restore->holdings[rank]);
        if (r < 0)
            return r;
    }
    *ret_holding = restore->holdings[rank];
    return 0;
}

static void chunk_came(struct holding_request *request);

static void fetches_begin(struct server *server);

static void room_came(struct pool_waiter *waiter) { fetches_begin(CONTAINER_OF(waiter, struct server, fetch_waiter)); }

/* What is fetched or leased stays below half of the pool, all clients together: fetches that wait
 * for each other's memory would wait for ever, and captures need the other half. Nor is it what was
 * promised to captures that are under way, for these would wait for the fetch and it for them. */
static bool has_room(struct server *server, const struct fetch *fetch) {
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    if (server->fetching && server->fetching + fetch->bytes > usage.limit / 2)
        return false;
    for (;;) {
        uint64_t promised = usage.reserved - server->windowed;
        if (!promised || promised + server->fetching + fetch->bytes <= usage.limit)
            return true;
        if (!sessions_withdraw_one(server))
            return false;
        pool_get_usage(server->pool, &usage);
    }
}

/* Those for which there is no room wait, in order, until leases are released, captures are durable, or
 * their deadlines pass. */
static void fetches_begin(struct server *server) {
    struct fetch *fetch;
    while ((fetch = TAILQ_FIRST(&server->fetches))) {
        if (!has_room(server, fetch)) {
            server->fetch_waiter.fn = room_came;
            pool_wait(server->pool, &server->fetch_waiter);
            return;
        }
        TAILQ_REMOVE(&server->fetches, fetch, queue_link);
        fetch->waiting = false;
        server->fetching += fetch->bytes;
        for (uint32_t i = 0; i < fetch->count; i++) {
            fetch->requests[i].tag = i;
            fetch->requests[i].index = fetch->first + i;
            fetch->requests[i].fn = chunk_came;
            holding_get(fetch->holding, &fetch->requests[i]);
        }
    }
}

static void fetching_less(struct server *server, uint64_t bytes) {
    server->fetching -= bytes;
    pool_release(server->pool, 0); /* saves may wait for just this */
    fetches_begin(server);
}

static void lease_drop(struct restore *restore, struct lease *lease) {
    for (uint32_t i = 0; i < lease->count; i++)
        pool_buffer_unref(lease->buffers[i]);
    fetching_less(restore->server, lease->bytes);
    TAILQ_REMOVE(&restore->leases, lease, link);
    restore->lease_count--;
    free(lease);
}

static void fetch_drop(struct fetch *fetch) {
    for (uint32_t i = 0; i < fetch->count; i++)
        if (fetch->requests[i].buffer)
            pool_buffer_unref(fetch->requests[i].buffer);
    fetching_less(fetch->restore->server, fetch->bytes);
}

static void fetch_refuse(struct fetch *fetch, enum code code, const struct problem *problem) {
    if (!fetch->answered && !fetch->restore->closed)
        session_error(fetch->restore->session, fetch->serial, code, problem);
    fetch->answered = true;
}

/* All chunks are there, or have failed. */
static void fetch_answer(struct fetch *fetch) {
    struct restore *restore = fetch->restore;
    struct session *session = restore->session;
    for (uint32_t i = 0; i < fetch->count; i++)
        if (fetch->requests[i].result) {
            fetch_refuse(fetch, session_code(fetch->requests[i].result), &fetch->requests[i].problem);
            break;
        }
    struct lease *lease = malloc(sizeof *lease + fetch->count * sizeof lease->buffers[0]);
    if (!lease)
        fetch_refuse(fetch, CODE_E_MEMORY, NULL);
    struct chunk_place places[FETCH_CHUNKS_MAX];
    for (uint32_t i = 0; !fetch->answered && !restore->closed && i < fetch->count; i++) {
        struct pool_buffer *buffer = lease->buffers[i] = fetch->requests[i].buffer;
        places[i] = (struct chunk_place){
            .segment = pool_buffer_segment(buffer), .length = fetch->requests[i].length, .offset = buffer->offset};
        session_send_segment(session, places[i].segment);
    }
    if (fetch->answered || restore->closed) { /* sending may have ended the session, too */
        fetch_drop(fetch);
        free(lease);
        return;
    }
    lease->count = fetch->count;
    lease->bytes = fetch->bytes;
    restore->fetched += fetch->bytes;
    lease->number = (restore->number << 20) + ++restore->next_lease % (1u << 20);
    TAILQ_INSERT_TAIL(&restore->leases, lease, link);
    restore->lease_count++;
    struct message_fetched fetched = {.lease = lease->number, .count = fetch->count};
    session_reply(session, MESSAGE_FETCHED, fetch->serial, &fetched, places, fetch->count * sizeof places[0], -1);
}

/* Nothing of it is in flight any more. */
static void fetch_over(struct fetch *fetch) {
    struct restore *restore = fetch->restore;
    if (fetch->left || loop_op_busy(&fetch->timer))
        return;
    TAILQ_REMOVE(&restore->fetches, fetch, link);
    restore->fetch_count--;
    free(fetch);
    if (restore->closed)
        restore_free(restore);
}

static void chunk_came(struct holding_request *request) {
    struct fetch *fetch = CONTAINER_OF(request - request->tag, struct fetch, requests[0]);
    if (--fetch->left)
        return;
    fetch_answer(fetch);
    loop_cancel(fetch->restore->server->loop, &fetch->timer);
    fetch_over(fetch);
}

static void fetch_cancel(struct fetch *fetch) {
    if (fetch->waiting) {
        TAILQ_REMOVE(&fetch->restore->server->fetches, fetch, queue_link);
        fetch->waiting = false;
        fetch->left = 0; /* none has begun */
        fetches_begin(fetch->restore->server);
        return;
    }
    for (uint32_t i = 0; i < fetch->count; i++)
        holding_cancel(&fetch->requests[i]);
}

static void fetch_elapsed(struct loop_op *op) {
    struct fetch *fetch = CONTAINER_OF(op, struct fetch, timer);
    if (op->result == 0 && fetch->left) {
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, -ETIMEDOUT, "the chunks did not come in time: a tier is slow, or the pool is full");
        fetch_refuse(fetch, CODE_E_TIMEOUT, &problem);
        fetch_cancel(fetch);
    }
    fetch_over(fetch);
}

int restore_fetch(struct restore *restore, uint32_t serial, const struct message_fetch *request,
                  struct problem *problem) {
    struct server *server = restore->server;
    struct holding *holding;
    if (!request->count || request->count > FETCH_CHUNKS_MAX || request->first > UINT32_MAX - request->count)
        return problem_set(problem, -EINVAL, "a fetch asks for 1 to %d chunks", FETCH_CHUNKS_MAX);
    int r = holding_of(restore, request->rank, &holding);
    if (r < 0)
        return problem_set(problem, r, "version %llu/%llu has no part of rank %u",
                           (unsigned long long)restore->id.generation, (unsigned long long)restore->id.step,
                           request->rank);
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    uint64_t bytes = request->count * (uint64_t)restore->complete.parts[request->rank].chunk_size;
    if (bytes > usage.limit / 2 && request->count > 1)
        return problem_set(problem, -E2BIG, "a fetch of %u chunks is more than half of the pool: ask for fewer",
                           request->count);
    struct fetch *fetch = calloc(1, sizeof *fetch + request->count * sizeof fetch->requests[0]);
    if (!fetch)
        return problem_set(problem, -ENOMEM, "out of memory");
    fetch->restore = restore;
    fetch->holding = holding;
    fetch->serial = serial;
    fetch->bytes = bytes;
    fetch->first = request->first;
    fetch->count = fetch->left = request->count;
    TAILQ_INSERT_TAIL(&restore->fetches, fetch, link);
    restore->fetch_count++;
    loop_timer(server->loop, &fetch->timer,
               loop_now(server->loop) + min_u64(request->timeout_ms, FETCH_TIMEOUT_MAX_MS) * NANOSECONDS_PER_MS,
               fetch_elapsed);
    fetch->waiting = true;
    TAILQ_INSERT_TAIL(&server->fetches, fetch, queue_link);
    fetches_begin(server);
    return 0;
}

bool restore_release(struct restore *restore, uint32_t number) {
    struct lease *lease;
    TAILQ_FOREACH(lease, &restore->leases, link)
    if (lease->number == number) {
        lease_drop(restore, lease);
        return true;
    }
    return false;
}

/* ---- prefetching ---- */

static void prefetch_over(struct prefetch *prefetch) {
    struct restore *restore = prefetch->restore;
    TAILQ_REMOVE(&restore->prefetches, prefetch, link);
    free(prefetch);
    if (restore->closed)
        restore_free(restore);
}

static void prefetched(struct holding_request *request) {
    struct prefetch *prefetch = CONTAINER_OF(request, struct prefetch, request);
    struct restore *restore = prefetch->restore;
    if (request->buffer)
        pool_buffer_unref(request->buffer);
    struct pool_usage usage;
    pool_get_usage(restore->server->pool, &usage);
    /* Ends with the part, with an error (a reader will see it), or when it would push others out. */
    bool room = usage.used + 2 * (uint64_t)restore->server->config->chunk_size < usage.limit;
    if (request->result || restore->closed || !room) {
        prefetch_over(prefetch);
        return;
    }
    request->index++;
    holding_get(restore->holdings[prefetch->rank], request);
}

static bool is_prefetching(struct restore *restore, uint32_t rank) {
    struct prefetch *prefetch;
    TAILQ_FOREACH(prefetch, &restore->prefetches, link)
    if (prefetch->rank == rank)
        return true;
    return false;
}

int restore_prefetch(struct restore *restore, uint32_t rank, struct problem *problem) {
    if (rank != UINT32_MAX && rank >= restore->world)
        return problem_set(problem, -EINVAL, "the version was written by %u ranks, there is no rank %u", restore->world,
                           rank);
    for (uint32_t i = 0; i < restore->world; i++) {
        struct holding *holding;
        if ((rank != UINT32_MAX && i != rank) || is_prefetching(restore, i))
            continue;
        struct prefetch *prefetch = calloc(1, sizeof *prefetch);
        if (!prefetch || holding_of(restore, i, &holding) < 0) {
            free(prefetch);
            return problem_set(problem, -ENOMEM, "out of memory");
        }
        prefetch->restore = restore;
        prefetch->rank = i;
        prefetch->request.fn = prefetched;
        TAILQ_INSERT_TAIL(&restore->prefetches, prefetch, link);
        holding_get(holding, &prefetch->request);
    }
    return 0;
}

/* ---- closing ---- */

static void unpin_run(struct loop_op *op) { unpin_lanes(CONTAINER_OF(op, struct restore, op)); }

static void unpin_done(struct loop_op *op) { restore_free(CONTAINER_OF(op, struct restore, op)); }

/* Goes on where it must wait: for fetches, prefetches, the opening, the pins. */
static void restore_free(struct restore *restore) {
    if (!TAILQ_EMPTY(&restore->fetches) || !TAILQ_EMPTY(&restore->prefetches) || restore->surveying ||
        loop_op_busy(&restore->op) || loop_op_busy(&restore->renew) || loop_op_busy(&restore->renew_timer))
        return;
    if (restore->pinned_lanes) {
        loop_work(restore->server->loop, &restore->op, restore->server->across, unpin_run, unpin_done);
        return;
    }
    for (uint32_t i = 0; restore->holdings && i < restore->world; i++)
        if (restore->holdings[i])
            holding_unref(restore->holdings[i]);
    free(restore->holdings);
    free(restore->text);
    complete_deinit(&restore->complete);
    if (restore->version)
        restore->version->busy--;
    struct server *server = restore->server;
    struct job *job = restore->job;
    struct session *session = restore->session;
    free(restore);
    job_prune(job);
    job_unref(job);
    session_unhold(session);
    server_settled(server);
}

static void restore_trace(const struct restore *restore) {
    trace_add(restore->server->trace, &(struct trace_record){.kind = TRACE_RESTORE,
                                                             .begin_ns = restore->opened_ns,
                                                             .generation = restore->id.generation,
                                                             .step = restore->id.step,
                                                             .bytes = restore->fetched,
                                                             .rank = session_rank(restore->session),
                                                             .flags = restore->result < 0 ? TRACE_FAILED : 0,
                                                             .job = restore->job->trace_name,
                                                             .tier = TRACE_NAME_NONE});
}

void restore_close(struct restore *restore) {
    struct lease *lease;
    if (restore->version || restore->result < 0)
        restore_trace(restore);
    restore->closed = true;
    loop_cancel(restore->server->loop, &restore->renew_timer);
    struct fetch *fetch;
    TAILQ_FOREACH(fetch, &restore->fetches, link) {
        loop_cancel(restore->server->loop, &fetch->timer);
        fetch_cancel(fetch);
    }
    while ((lease = TAILQ_FIRST(&restore->leases)))
        lease_drop(restore, lease);
    struct prefetch *prefetch;
    TAILQ_FOREACH(prefetch, &restore->prefetches, link)
    holding_cancel(&prefetch->request);
    restore_free(restore);
}
