/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One copy (manifest and open data file) is in use at a time, from the shallowest lane that has not
 * failed. Requests that come while it is being opened wait in a queue. When a read of it fails, it is
 * given up once, whichever request notices first; the others find the next one.
 */
#include "daemon/holding.h"

#include <errno.h>

struct copy {
    struct manifest manifest;
    struct tier_file file;
    uint32_t refs;
    uint32_t lane;
    struct holding *holding;
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

    /* Opening a copy (one at a time). */
    struct loop_op open;
    struct manifest open_manifest;
    struct tier_file open_file;
    struct problem open_problem;
    int open_result;
    uint32_t open_lane;
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

static void copy_unref(struct copy *copy) {
    if (--copy->refs)
        return;
    (void)tier_close(&copy->file);
    manifest_deinit(&copy->manifest);
    free(copy);
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
        copy_unref(holding->copy);
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
    struct holding *holding = CONTAINER_OF(op, struct holding, open);
    struct tier *tier = holding->job->lanes[holding->open_lane]->tier;
    char path[TIER_PATH_MAX];
    int r = catalog_read_manifest(tier, holding->job->name, holding->version, holding->rank, &holding->open_manifest,
                                  &holding->open_problem);
    if (!r && holding->open_manifest.summary.absent) { /* a step that was missed, and saved after all to fewer tiers */
        manifest_deinit(&holding->open_manifest);
        r = TIER_E_ABSENT;
    }
    if (!r && !digest_equal(&holding->open_manifest.summary.image_digest, &holding->image_digest)) {
        r = problem_set(&holding->open_problem, -EBADMSG,
                        "tier %s: the part of rank %u is not the one that the version's index describes", tier->name,
                        holding->rank);
        manifest_deinit(&holding->open_manifest);
    }
    if (!r) {
        layout_file(holding->job->directory, holding->version, holding->open_manifest.summary.data_file, path);
        r = tier_open(tier, path, &holding->open_file);
        if (r)
            manifest_deinit(&holding->open_manifest);
    }
    holding->open_result = r;
}

static void open_next(struct holding *holding);

static void open_done(struct loop_op *op) {
    struct holding *holding = CONTAINER_OF(op, struct holding, open);
    int r = holding->open_result;
    if (!r) {
        struct copy *copy = calloc(1, sizeof *copy);
        if (copy && !holding->slots) {
            holding->slots = calloc(holding->open_manifest.chunk_count, sizeof(struct pool_buffer *));
            holding->slot_count = holding->slots ? (uint32_t)holding->open_manifest.chunk_count : 0;
        }
        if (!copy || !holding->slots || holding->open_manifest.chunk_count != holding->slot_count) {
            (void)tier_close(&holding->open_file);
            manifest_deinit(&holding->open_manifest);
            free(copy);
            r = copy && holding->slots ? -EBADMSG : -ENOMEM;
        } else {
            *copy = (struct copy){.manifest = holding->open_manifest,
                                  .file = holding->open_file,
                                  .refs = 1,
                                  .lane = holding->open_lane,
                                  .holding = holding};
            holding->copy = copy;
        }
    }
    if (r) {
        if (r < 0) { /* absent is no fault: the part was never there, or has not come yet */
            lane_error(holding->job->lanes[holding->open_lane], &holding->open_problem);
            holding->job->lanes[holding->open_lane]->copies_bad += r == -EBADMSG;
            holding->problem = holding->open_problem;
            holding->last_error = r;
        }
        holding->next_lane = holding->open_lane + 1;
    }
    struct queued_list ready = TAILQ_HEAD_INITIALIZER(ready);
    TAILQ_CONCAT(&ready, &holding->waiting, link);
    struct queued *queued;
    while ((queued = TAILQ_FIRST(&ready))) {
        TAILQ_REMOVE(&ready, queued, link);
        struct holding_request *request = queued->request;
        free(queued);
        holding_start(request);
    }
    holding_unref(holding);
}

static void open_next(struct holding *holding) {
    holding_ref(holding);
    holding->open_lane = holding->next_lane;
    holding->open_problem = PROBLEM_NONE;
    struct lane *lane = holding->job->lanes[holding->open_lane];
    loop_work(holding_server(holding)->loop, &holding->open, lane->group, open_run, open_done);
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
        holding->copy = NULL;
        holding->next_lane = copy->lane + 1;
        assert(copy->refs > 1); /* the request that failed has one, too */
        copy->refs--;
    }
}

/* ---- one chunk ---- */

static void read_run(struct loop_op *op) {
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    struct copy *copy = request->copy;
    const struct manifest_chunk *chunk = &copy->manifest.chunks[request->index];
    void *decoded = NULL;
    if (chunk->stored_length != chunk->raw_length && posix_memalign(&decoded, TIER_ALIGNMENT, request->buffer->size)) {
        request->result = problem_set(&request->problem, -ENOMEM, "out of memory to decode a chunk");
        return;
    }
    request->result = catalog_read_chunk(&copy->file, &copy->manifest, request->index, request->buffer->data, decoded,
                                         &request->problem);
    if (!request->result)
        memset(request->buffer->data + request->length, 0, align_up(request->length, POOL_PAGE) - request->length);
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
    struct holding_request *request = CONTAINER_OF(op, struct holding_request, op);
    struct holding *holding = request->holding;
    struct copy *copy = STEAL(request->copy);
    if (request->result) {
        pool_buffer_unref(STEAL(request->buffer));
        give_up_copy(holding, copy, request->result, &request->problem);
        copy_unref(copy);
        request->problem = PROBLEM_NONE;
        holding_start(request);
        return;
    }
    copy_unref(copy);
    holding_server(holding)->counters.chunks_fetched++;
    keep_in_cache(holding, request);
    request_answer(request, 0);
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

static void holding_start(struct holding_request *request) {
    struct holding *holding = request->holding;
    if (start_from_memory(request))
        return;
    if (!holding->copy) {
        while (holding->next_lane < holding->job->lane_count &&
               lane_silent(holding->job->lanes[holding->next_lane])) { /* perhaps a deeper one has it */
            holding->problem = PROBLEM_NONE;
            holding->last_error = lane_silent_problem(holding->job->lanes[holding->next_lane++], &holding->problem);
        }
        if (holding->next_lane == holding->job->lane_count) {
            int error = holding->last_error ? holding->last_error : -ENOENT;
            request->problem = holding->problem;
            holding->next_lane = 0; /* a tier that failed may answer the next time */
            request_answer(request, problem_set(&request->problem, error, "no tier has a good copy of rank %u's part",
                                                holding->rank));
            return;
        }
        struct queued *queued = malloc(sizeof *queued);
        if (!queued) {
            request_answer(request, problem_set(&request->problem, -ENOMEM, "out of memory"));
            return;
        }
        queued->request = request;
        TAILQ_INSERT_TAIL(&holding->waiting, queued, link);
        if (!loop_op_busy(&holding->open))
            open_next(holding);
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
    if (r) {
        request_answer(request, problem_set(&request->problem, r, "out of memory"));
        return;
    }
    request->copy = holding->copy;
    request->copy->refs++;
    loop_work(holding_server(holding)->loop, &request->op, holding->job->lanes[holding->copy->lane]->group, read_run,
              read_done);
}

void holding_get(struct holding *holding, struct holding_request *request) {
    request->holding = holding_ref(holding);
    request->buffer = NULL;
    request->problem = PROBLEM_NONE;
    request->result = 0;
    request->copy = NULL;
    request->from_memory = false;
    request->waiter = (struct pool_waiter){.fn = room_came};
    request->op = LOOP_OP_INIT;
    holding_start(request);
}

void holding_cancel(struct holding_request *request) {
    if (!request->waiter.queued)
        return;
    pool_unwait(holding_server(request->holding)->pool, &request->waiter);
    request_answer(request, problem_set(&request->problem, -ECANCELED, "the fetch was given up"));
}
