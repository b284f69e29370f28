/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One copy (manifest and open data file) is in use at a time, from the shallowest lane that has not
 * failed. Requests that come while it is being opened wait in a queue. When a read of it fails, it is
 * given up once, whichever request notices first; the others find the next one.
 *
 * Whoever is in a tier is watched. If it does not come back, the opening, or the copy with all its reads, is left
 * behind with the memory that it may still write to, and those that wait go on elsewhere.
 */
#include "daemon/holding.h"

#include "daemon/watch.h"

#include <errno.h>

#define PAUSE_MS 500 /* between two looks whether a silent tier answers again */

/* A chunk's read, on a worker. */
struct reading {
    TAILQ_ENTRY(reading) link;
    struct loop_op op;
    struct copy *copy;
    struct holding_request *request; /* NULL: left behind */
    struct pool_buffer *buffer;
    uint32_t index;
    int result;
    struct problem problem;
};
TAILQ_HEAD(reading_list, reading);

struct copy {
    struct manifest manifest;
    struct tier_file file;
    uint32_t refs;
    uint32_t lane;
    struct job *job;
    struct holding *holding; /* whose copy it is; NULL: no more */
    struct reading_list readings;
    struct watch watch;
    struct loop_op close;
};

/* A copy is being opened. */
struct opener {
    struct holding *holding; /* which it keeps; NULL: left behind */
    struct job *job;
    uint32_t lane, rank;
    struct version_id version;
    struct digest image_digest;
    struct loop_op op;
    struct watch watch;
    struct manifest manifest;
    struct tier_file file;
    struct problem problem;
    int result;
};

struct queued {
    TAILQ_ENTRY(queued) link;
    struct holding_request *request;
};
TAILQ_HEAD(queued_list, queued);

struct holding {
    uint32_t refs;
    struct job *job;
    struct version_id version;
    uint32_t rank;
    struct digest image_digest;
    struct copy *copy;          /* in use; NULL: none yet */
    uint32_t next_lane;         /* to try when there is none */
    struct pool_buffer **slots; /* the cache of fetched chunks, once the copy is known */
    uint32_t slot_count;
    struct problem problem; /* why the last copy was given up */
    int last_error;

    struct opener *opener; /* one at a time; NULL: none */
    struct queued_list waiting;

    struct loop_op condemn;
    struct problem condemn_problem;
    uint32_t condemn_lane;
    struct catalog condemn_catalog; /* the job's files afterwards */
};

static void holding_start(struct holding_request *request);

int holding_new(struct job *job, struct version_id version, uint32_t rank, const struct digest *image_digest,
                struct holding **ret_holding) {
    struct holding *holding = calloc(1, sizeof *holding);
    if (!holding)
        return -ENOMEM;
    holding->refs = 1;
    holding->job = job_ref(job);
    holding->version = version;
    holding->rank = rank;
    holding->image_digest = *image_digest;
    TAILQ_INIT(&holding->waiting);
    *ret_holding = holding;
    return 0;
}

struct holding *holding_ref(struct holding *holding) {
    holding->refs++;
    return holding;
}

static struct lane *copy_lane(const struct copy *copy) { return copy->job->lanes[copy->lane]; }

static void close_run(struct loop_op *op) { (void)tier_close(&CONTAINER_OF(op, struct copy, close)->file); }

static void close_done(struct loop_op *op) { watch_end(&CONTAINER_OF(op, struct copy, close)->watch); }

/* Closing may hang, too. */
static void copy_unref(struct copy *copy) {
    if (--copy->refs == 0)
        loop_work(copy->job->server->loop, &copy->close, copy_lane(copy)->group, close_run, close_done);
}

static void copy_free(struct watch *watch) {
    struct copy *copy = CONTAINER_OF(watch, struct copy, watch);
    struct server *server = copy->job->server;
    manifest_deinit(&copy->manifest);
    job_unref(copy->job);
    free(copy);
    server_settled(server);
}

/* It is not the one in use any more. */
static void copy_let_go(struct holding *holding) {
    struct copy *copy = STEAL(holding->copy);
    copy->holding = NULL;
    copy_unref(copy);
}

void holding_unref(struct holding *holding) {
    if (--holding->refs)
        return;
    for (uint32_t i = 0; i < holding->slot_count; i++)
        if (holding->slots[i]) {
            pool_buffer_uncache(holding->slots[i]);
            pool_buffer_unref(holding->slots[i]);
        }
    free(holding->slots);
    if (holding->copy)
        copy_let_go(holding);
    job_unref(holding->job);
    free(holding);
}

static struct server *holding_server(struct holding *holding) { return holding->job->server; }

static void request_done(struct loop_op *op) {
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    struct holding *holding = request->holding;
    request->fn(request);
    holding_unref(holding);
}

/* Answers from the loop; `op` of the request must be free. */
static void request_answer(struct holding_request *request, int result) {
    request->result = result;
    if (result && request->buffer)
        pool_buffer_unref(STEAL(request->buffer));
    loop_post(holding_server(request->holding)->loop, &request->op, 0, request_done);
}

/* ---- opening a copy ---- */

static void open_run(struct loop_op *op) {
    struct opener *opener = CONTAINER_OF(op, struct opener, op);
    struct tier *tier = opener->job->lanes[opener->lane]->tier;
    char path[TIER_PATH_MAX];
    int r = catalog_read_manifest_chunks(tier, opener->job->name, opener->version, opener->rank, &opener->manifest,
                                         &opener->problem);
    if (!r && opener->manifest.summary.absent) { /* a step that was missed, and saved after all to fewer tiers */
        manifest_deinit(&opener->manifest);
        r = TIER_E_ABSENT;
    }
    if (!r && !digest_equal(&opener->manifest.summary.image_digest, &opener->image_digest)) {
        r = problem_set(&opener->problem, -EBADMSG,
                        "tier %s: the part of rank %u is not the one that the version's index describes", tier->name,
                        opener->rank);
        manifest_deinit(&opener->manifest);
    }
    if (!r) {
        layout_file(opener->job->directory, opener->version, opener->manifest.summary.data_file, path);
        r = tier_open(tier, path, &opener->file);
        if (r)
            manifest_deinit(&opener->manifest);
    }
    opener->result = r;
}

static bool copy_waits(struct watch *watch) { return !TAILQ_EMPTY(&CONTAINER_OF(watch, struct copy, watch)->readings); }

static void copy_stuck(struct watch *watch);

static const struct watch_ops copy_watch_ops = {.waits = copy_waits, .stuck = copy_stuck, .ended = copy_free};

/* What was opened is a copy from now on, or nobody's. 0 or -errno. */
static int copy_new(struct opener *opener, struct copy **ret_copy) {
    struct copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return -ENOMEM;
    struct lane *lane = opener->job->lanes[opener->lane];
    *copy = (struct copy){.manifest = opener->manifest,
                          .file = opener->file,
                          .refs = 1,
                          .lane = opener->lane,
                          .job = job_ref(opener->job),
                          .watch = {.ops = &copy_watch_ops, .lane = lane, .group = lane->group}};
    TAILQ_INIT(&copy->readings);
    *ret_copy = copy;
    return 0;
}

/* The holding has room for the chunks of this copy. */
static int holding_take(struct holding *holding, struct copy *copy) {
    size_t count = copy->manifest.chunk_count;
    if (!holding->slots) {
        holding->slots = calloc(count, sizeof(struct pool_buffer *));
        if (!holding->slots)
            return -ENOMEM;
        holding->slot_count = (uint32_t)count;
    }
    if (count != holding->slot_count)
        return -EBADMSG;
    holding->copy = copy;
    copy->holding = holding;
    watch_start(&copy->watch);
    return 0;
}

/* Those that waited for a copy go on. */
static void holding_resume(struct holding *holding) {
    struct queued_list ready = TAILQ_HEAD_INITIALIZER(ready);
    TAILQ_CONCAT(&ready, &holding->waiting, link);
    struct queued *queued;
    while ((queued = TAILQ_FIRST(&ready))) {
        TAILQ_REMOVE(&ready, queued, link);
        struct holding_request *request = queued->request;
        free(queued);
        holding_start(request);
    }
}

static void open_done(struct loop_op *op) {
    struct opener *opener = CONTAINER_OF(op, struct opener, op);
    struct holding *holding = opener->holding;
    struct lane *lane = opener->job->lanes[opener->lane];
    struct copy *copy = NULL;
    int r = opener->result;
    if (!r && (r = copy_new(opener, &copy)) < 0) {
        (void)tier_close(&opener->file);
        manifest_deinit(&opener->manifest);
    }
    if (!r && holding)
        r = holding_take(holding, copy);
    if (copy && (!holding || r))
        copy_unref(copy);
    if (holding) {
        holding->opener = NULL;
        if (r)
            holding->next_lane = opener->lane + 1;
        if (r < 0) { /* absent is no fault: the part was never there, or has not come yet */
            lane_error(lane, &opener->problem);
            lane->copies_bad += r == -EBADMSG;
            holding->problem = opener->problem;
            holding->last_error = r;
        }
        holding_resume(holding);
        holding_unref(STEAL(opener->holding));
    }
    watch_end(&opener->watch);
}

static bool opener_waits(struct watch *watch) { return loop_op_busy(&CONTAINER_OF(watch, struct opener, watch)->op); }

static void opener_stuck(struct watch *watch) {
    struct opener *opener = CONTAINER_OF(watch, struct opener, watch);
    struct holding *holding = STEAL(opener->holding);
    if (!holding)
        return;
    holding->opener = NULL;
    holding_resume(holding); /* the lane is silent now */
    holding_unref(holding);
}

static void opener_free(struct watch *watch) {
    struct opener *opener = CONTAINER_OF(watch, struct opener, watch);
    job_unref(opener->job);
    free(opener);
}

static const struct watch_ops opener_watch_ops = {.waits = opener_waits, .stuck = opener_stuck, .ended = opener_free};

static int open_next(struct holding *holding) {
    struct opener *opener = calloc(1, sizeof *opener);
    if (!opener)
        return -ENOMEM;
    struct lane *lane = holding->job->lanes[holding->next_lane];
    *opener = (struct opener){.holding = holding_ref(holding),
                              .job = job_ref(holding->job),
                              .lane = holding->next_lane,
                              .rank = holding->rank,
                              .version = holding->version,
                              .image_digest = holding->image_digest,
                              .watch = {.ops = &opener_watch_ops, .lane = lane, .group = lane->group}};
    holding->opener = opener;
    watch_start(&opener->watch);
    loop_work(holding_server(holding)->loop, &opener->op, lane->group, open_run, open_done);
    return 0;
}

/* ---- a bad copy ---- */

static void condemn_run(struct loop_op *op) {
    struct holding *holding = CONTAINER_OF(op, struct holding, condemn);
    struct tier *tier = holding->job->lanes[holding->condemn_lane]->tier;
    op->result = catalog_condemn(tier, holding->job->name, holding->version, holding->rank, &holding->condemn_problem);
    if (op->result == 0)
        op->result = catalog_scan(tier, holding->job->name, &holding->condemn_catalog, &holding->condemn_problem);
}

static void condemn_done(struct loop_op *op) {
    struct holding *holding = CONTAINER_OF(op, struct holding, condemn);
    if (op->result < 0)
        lane_error(holding->job->lanes[holding->condemn_lane], &holding->condemn_problem);
    else
        holding->job->damage[holding->condemn_lane] = holding->condemn_catalog.damage;
    catalog_deinit(&holding->condemn_catalog);
    holding_unref(holding);
}

/* The copy that this request read from is bad (or its tier failed): the next one is tried. */
static void give_up_copy(struct holding *holding, struct copy *copy, int error, const struct problem *problem) {
    struct lane *lane = holding->job->lanes[copy->lane];
    holding->problem = *problem;
    holding->last_error = error;
    lane_error(lane, problem);
    if (error == -EBADMSG) {
        holding_server(holding)->counters.chunks_bad++;
        lane->chunks_bad++;
        lane->copies_bad += holding->copy == copy;
        if (!loop_op_busy(&holding->condemn)) {
            holding_ref(holding);
            holding->condemn_lane = copy->lane;
            holding->condemn_problem = PROBLEM_NONE;
            loop_work(holding_server(holding)->loop, &holding->condemn, lane->group, condemn_run, condemn_done);
        }
    }
    if (holding->copy == copy) {
        holding->next_lane = copy->lane + 1;
        assert(copy->refs > 1); /* the read that failed has one, too */
        copy_let_go(holding);
    }
}

/* Its reads stay with the tier, and with the memory that they may still write to; who wanted the chunks goes on. */
static void copy_stuck(struct watch *watch) {
    struct copy *copy = CONTAINER_OF(watch, struct copy, watch);
    struct reading *reading;
    if (copy->holding)
        copy_let_go(copy->holding); /* the lane is silent now: another one is next, or this when it answers again */
    TAILQ_FOREACH(reading, &copy->readings, link) {
        struct holding_request *request = STEAL(reading->request);
        if (!request)
            continue;
        request->buffer = NULL;
        holding_start(request);
    }
}

/* ---- one chunk ---- */

static void read_run(struct loop_op *op) {
    struct reading *reading = CONTAINER_OF(op, struct reading, op);
    struct copy *copy = reading->copy;
    const struct manifest_chunk *chunk = &copy->manifest.chunks[reading->index];
    uint8_t *data = reading->buffer->data;
    void *decoded = NULL;
    if (chunk->stored_length != chunk->raw_length && posix_memalign(&decoded, TIER_ALIGNMENT, reading->buffer->size)) {
        reading->result = problem_set(&reading->problem, -ENOMEM, "out of memory to decode a chunk");
        return;
    }
    reading->result =
        catalog_read_chunk(&copy->file, &copy->manifest, reading->index, data, decoded, &reading->problem);
    if (!reading->result)
        memset(data + chunk->raw_length, 0, align_up(chunk->raw_length, POOL_PAGE) - chunk->raw_length);
    free(decoded);
}

static void keep_in_cache(struct holding *holding, struct holding_request *request) {
    struct pool_buffer **slot = &holding->slots[request->index];
    if (*slot)
        return;
    *slot = pool_buffer_ref(request->buffer);
    pool_buffer_cache(*slot, slot);
}

static void read_done(struct loop_op *op) {
    struct reading *reading = CONTAINER_OF(op, struct reading, op);
    struct copy *copy = reading->copy;
    struct holding_request *request = reading->request;
    TAILQ_REMOVE(&copy->readings, reading, link);
    copy->watch.progress++;
    if (!request) {
        pool_buffer_unref(reading->buffer);
    } else if (reading->result) {
        request->buffer = NULL;
        pool_buffer_unref(reading->buffer);
        give_up_copy(request->holding, copy, reading->result, &reading->problem);
        holding_start(request);
    } else {
        holding_server(request->holding)->counters.chunks_fetched++;
        keep_in_cache(request->holding, request);
        request_answer(request, 0);
    }
    free(reading);
    copy_unref(copy);
}

static int read_start(struct holding_request *request) {
    struct copy *copy = request->holding->copy;
    struct reading *reading = calloc(1, sizeof *reading);
    if (!reading)
        return -ENOMEM;
    *reading = (struct reading){.copy = copy, .request = request, .buffer = request->buffer, .index = request->index};
    if (TAILQ_EMPTY(&copy->readings))
        copy->watch.progress++;
    TAILQ_INSERT_TAIL(&copy->readings, reading, link);
    copy->refs++;
    loop_work(copy->job->server->loop, &reading->op, copy_lane(copy)->group, read_run, read_done);
    return 0;
}

static void room_came(struct pool_waiter *waiter) {
    holding_start(CONTAINER_OF(waiter, struct holding_request, waiter));
}

static void verify_run(struct loop_op *op) {
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    struct digest digest;
    digest_chunk(request->buffer->data, request->length, &digest);
    request->result = digest_equal(&digest, &request->digest) ? 0 : -EBADMSG;
}

static void verify_done(struct loop_op *op) {
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    struct holding *holding = request->holding;
    if (!request->result) {
        request_answer(request, 0);
        return;
    }
    struct server *server = holding_server(holding);
    server->counters.chunks_bad++;
    log_error(server->log, "a chunk went bad in memory: job=%s step=%llu rank=%u chunk=%u", holding->job->name,
              (unsigned long long)holding->version.step, holding->rank, request->index);
    struct version *version = job_find_version(holding->job, holding->version);
    struct part *part = version ? version_find_part(version, holding->rank) : NULL;
    if (part && request->index < part->chunk_count && part->chunks[request->index].buffer == request->buffer &&
        request->buffer->slot) {
        pool_buffer_uncache(request->buffer);
        pool_buffer_unref(STEAL(part->chunks[request->index].buffer));
    } else if (holding->slots && holding->slots[request->index] == request->buffer) {
        pool_buffer_uncache(request->buffer);
        pool_buffer_unref(STEAL(holding->slots[request->index]));
    }
    pool_buffer_unref(STEAL(request->buffer));
    request->from_memory = true; /* and not again */
    holding_start(request);
}

/* In memory? Then only its digest is checked again. */
static bool start_from_memory(struct holding_request *request) {
    struct holding *holding = request->holding;
    if (request->from_memory)
        return false;
    struct version *version = job_find_version(holding->job, holding->version);
    struct part *part = version ? version_find_part(version, holding->rank) : NULL;
    struct pool_buffer *buffer = NULL;
    bool same = part && part->state == PART_CAPTURED && !part->foreign &&
                digest_equal(&part->image_digest, &holding->image_digest);
    if (same && request->index < part->chunk_count && !part->chunks[request->index].bad) {
        buffer = part->chunks[request->index].buffer;
        request->digest = part->chunks[request->index].digest;
        request->length = part->chunks[request->index].length;
    }
    if (!buffer && holding->copy && request->index < holding->slot_count) {
        buffer = holding->slots[request->index];
        request->digest = holding->copy->manifest.chunks[request->index].digest;
        request->length = holding->copy->manifest.chunks[request->index].raw_length;
    }
    if (!buffer)
        return false;
    pool_buffer_touch(buffer);
    request->buffer = pool_buffer_ref(buffer);
    struct server *server = holding_server(holding);
    loop_work(server->loop, &request->op, server->verifiers, verify_run, verify_done);
    return true;
}

static void pause_over(struct loop_op *op) {
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    request->pausing = false;
    holding_start(request);
}

/* No lane is left to be tried. */
static void exhausted(struct holding_request *request) {
    struct holding *holding = request->holding;
    struct loop *loop = holding_server(holding)->loop;
    holding->next_lane = 0; /* a tier that failed may answer the next time */
    if (request->patient && job_silent_lanes(holding->job)) {
        request->pausing = true;
        loop_timer(loop, &request->op, loop_now(loop) + PAUSE_MS * NANOSECONDS_PER_MS, pause_over);
        return;
    }
    int error = holding->last_error ? holding->last_error : -ENOENT;
    request->problem = holding->problem;
    request_answer(request,
                   problem_set(&request->problem, error, "no tier has a good copy of rank %u's part", holding->rank));
}

/* A copy is wanted: opens the next one, unless somebody does. */
static void wait_for_copy(struct holding_request *request) {
    struct holding *holding = request->holding;
    const struct job *job = holding->job;
    while (!holding->opener && holding->next_lane < job->lane_count && lane_silent(job->lanes[holding->next_lane])) {
        holding->problem = PROBLEM_NONE; /* perhaps a deeper one has it */
        holding->last_error = lane_silent_problem(job->lanes[holding->next_lane++], &holding->problem);
    }
    if (!holding->opener && holding->next_lane == job->lane_count) {
        exhausted(request);
        return;
    }
    struct queued *queued = malloc(sizeof *queued);
    if (!queued || (!holding->opener && open_next(holding) < 0)) {
        free(queued);
        request_answer(request, problem_set(&request->problem, -ENOMEM, "out of memory"));
        return;
    }
    queued->request = request;
    TAILQ_INSERT_TAIL(&holding->waiting, queued, link);
}

static void holding_start(struct holding_request *request) {
    struct holding *holding = request->holding;
    if (start_from_memory(request))
        return;
    if (!holding->copy) {
        wait_for_copy(request);
        return;
    }
    if (request->index >= holding->slot_count) {
        request_answer(request, problem_set(&request->problem, -EINVAL, "rank %u's part has %u chunks, not %u",
                                            holding->rank, holding->slot_count, request->index + 1));
        return;
    }
    const struct manifest *manifest = &holding->copy->manifest;
    request->length = manifest->chunks[request->index].raw_length;
    /* Whole places, as in captures. */
    uint32_t size = manifest->chunk_count > 1 ? manifest->summary.chunk_size : request->length;
    int r = pool_alloc(holding_server(holding)->pool, size, &request->buffer);
    if (r == POOL_E_FULL) {
        pool_wait(holding_server(holding)->pool, &request->waiter);
        return;
    }
    if (!r)
        r = read_start(request);
    if (r)
        request_answer(request, problem_set(&request->problem, r, "out of memory"));
}

void holding_get(struct holding *holding, struct holding_request *request) {
    request->holding = holding_ref(holding);
    request->buffer = NULL;
    request->problem = PROBLEM_NONE;
    request->result = 0;
    request->from_memory = request->pausing = false;
    request->waiter = (struct pool_waiter){.fn = room_came};
    request->op = LOOP_OP_INIT;
    holding_start(request);
}

void holding_cancel(struct holding_request *request) {
    request->patient = false;
    if (request->pausing)
        loop_cancel(holding_server(request->holding)->loop, &request->op);
    if (!request->waiter.queued)
        return;
    pool_unwait(holding_server(request->holding)->pool, &request->waiter);
    request_answer(request, problem_set(&request->problem, -ECANCELED, "the fetch was given up"));
}
