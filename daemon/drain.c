/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A try goes from the directories to the commit. What fails gives up its temporary and begins anew after a pause; what
 * an earlier daemon has committed stays. While something is with the tier, a watch looks whether it comes back.
 */
#include "daemon/drain-state.h"

#include <errno.h>

#define DRAIN_TRIES 4

/* ---- life ---- */

void drain_set_pending(struct drain *drain, uint64_t bytes) {
    drain->lane->pending_bytes += bytes - drain->pending;
    drain->pending = bytes;
}

static bool waits_for_tier(struct watch *watch) {
    const struct drain *drain = CONTAINER_OF(watch, struct drain, watch);
    uint32_t fetches = drain->fetching; /* from another one */
    return drain->in_flight > fetches || (drain->state != DRAIN_PAUSED && loop_op_busy(&drain->op));
}

static void trace_stuck(struct watch *watch) {
    part_trace(CONTAINER_OF(watch, struct drain, watch)->part, TRACE_STUCK, watch->lane, 0, true);
}

static void drain_free(struct watch *watch) {
    struct drain *drain = CONTAINER_OF(watch, struct drain, watch);
    struct lane *lane = drain->lane;
    if (drain->holding)
        holding_unref(drain->holding);
    for (uint32_t i = 0; i < lane->config.depth; i++) {
        free(drain->slots[i].room);
        free(drain->slots[i].decoded);
    }
    free(drain->slots);
    free(drain->table);
    free(drain);
    lane_unref(lane);
}

static const struct watch_ops watch_ops = {.waits = waits_for_tier, .stuck = trace_stuck, .ended = drain_free};

/* Takes the drain out of everything and frees it soon. What it meant for the part is the caller's. */
static void drain_end(struct drain *drain) {
    struct part *part = drain->part;
    struct lane *lane = drain->lane;
    assert(!drain->in_flight && !loop_op_busy(&drain->op));
    lane->urgent -= part_presses(part);
    drain_set_pending(drain, 0);
    lane->pending_parts--;
    if (drain->queued_active) {
        TAILQ_REMOVE(&lane->active, drain, link);
        lane->active_count--;
    } else {
        TAILQ_REMOVE(&lane->waiting, drain, link);
    }
    part->drains[drain->lane_index] = NULL;
    part->active_drains--;
    watch_end(&drain->watch);
}

static void drain_over(struct drain *drain) {
    struct part *part = drain->part;
    struct lane *lane = drain->lane;
    struct job *job = part->version->job;
    uint32_t index = drain->lane_index;
    drain_end(drain);
    job_ref(job); /* the part and its version may go below */
    part_drain_over(part, index);
    job_prune(job);
    job_unref(job);
    lane_pump(lane);
    server_settled(lane->server);
}

void drain_supersede(struct drain *drain) {
    struct part *part = drain->part;
    uint32_t index = drain->lane_index;
    drain_server(drain)->counters.parts_superseded++;
    part_trace(part, TRACE_SUPERSEDED, drain->lane, 0, true);
    drain_end(drain);
    part_drain_over(part, index);
}

int drain_new(struct part *part, uint32_t index) {
    struct lane *lane = part->version->job->lanes[index];
    if (part->version->lanes[index].superseded || part->version->doomed)
        return 0;
    struct drain *drain = calloc(1, sizeof *drain);
    if (!drain)
        return -ENOMEM;
    drain->slots = calloc(lane->config.depth, sizeof *drain->slots);
    drain->table = calloc(part->chunk_count, sizeof *drain->table);
    if (!drain->slots || !drain->table) {
        free(drain->slots);
        free(drain->table);
        free(drain);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < lane->config.depth; i++)
        drain->slots[i].drain = drain;
    drain->part = part;
    drain->lane = lane_ref(lane);
    drain->watch = (struct watch){.ops = &watch_ops, .lane = lane, .group = lane->group};
    drain->lane_index = index;
    part->drains[index] = drain;
    part->active_drains++;
    if (part->urgent)
        TAILQ_INSERT_HEAD(&lane->waiting, drain, link);
    else
        TAILQ_INSERT_TAIL(&lane->waiting, drain, link);
    drain_set_pending(drain, part->source.image_size);
    lane->pending_parts++;
    lane->urgent += part_presses(part);
    drain_enforce_backlog(lane, index, part);
    if (part->captured)
        lane_pump(lane);
    return 0;
}

/* ---- errors ---- */

static void pause_elapsed(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    struct lane *lane = drain->lane;
    if (part_pointless(drain->part)) {
        drain_over(drain);
        return;
    }
    if (drain->holding) /* look at all tiers again */
        holding_unref(STEAL(drain->holding));
    drain->next = drain->placed = drain->written = 0;
    drain->file_end = 0;
    drain->encoded_any = false;
    drain->state = DRAIN_WAITING;
    drain_set_pending(drain, drain->part->source.image_size);
    TAILQ_REMOVE(&lane->active, drain, link);
    lane->active_count--;
    drain->queued_active = false;
    TAILQ_INSERT_HEAD(&lane->waiting, drain, link);
    lane_pump(lane);
}

/* The try is over and nothing is in flight. */
static void try_over(struct drain *drain) {
    struct part *part = drain->part;
    struct server *server = drain_server(drain);
    if (part_pointless(part)) {
        drain_over(drain);
        return;
    }
    bool bytes_left = !(part->windowed && !part->durable && drain->written);
    if (drain->problem.code == -EBADMSG && !part->durable && part->active_drains == 1)
        bytes_left = false; /* nobody will have them */
    if (drain->tries < DRAIN_TRIES && bytes_left) {
        static const uint64_t pauses_ms[DRAIN_TRIES] = {0, 200, 1000, 4000};
        drain->state = DRAIN_PAUSED;
        loop_timer(server->loop, &drain->op, loop_now(server->loop) + pauses_ms[drain->tries] * NANOSECONDS_PER_MS,
                   pause_elapsed);
        return;
    }
    server->counters.parts_failed++;
    version_failed(part->version, drain->lane_index, &drain->problem);
    drain_over(drain);
}

static void abandon_run(struct loop_op *op) { commit_abandon(&CONTAINER_OF(op, struct drain, op)->commit); }
static void abandon_done(struct loop_op *op) { try_over(CONTAINER_OF(op, struct drain, op)); }

void drain_give_up(struct drain *drain) {
    drain->state = DRAIN_ABANDONING;
    for (uint32_t i = 0; i < drain->lane->config.depth; i++) {
        struct slot *slot = &drain->slots[i];
        if (slot->ready)
            slot_over(slot);
        else if (slot->used && !slot->buffer)
            holding_cancel(&slot->fetch);
    }
    if (drain->in_flight || loop_op_busy(&drain->op))
        return;
    if (drain->commit.open)
        loop_work(drain_server(drain)->loop, &drain->op, drain->lane->group, abandon_run, abandon_done);
    else
        try_over(drain);
}

static void drain_there_already(struct drain *drain);

void drain_error(struct drain *drain, int error, const struct problem *problem) {
    if (error == -EEXIST) {
        drain_there_already(drain);
        return;
    }
    part_trace(drain->part, drain->state == DRAIN_FINISHING ? TRACE_COMMIT : TRACE_DRAIN, drain->lane, drain->begun_ns,
               true);
    drain->tries++;
    drain->problem = *problem;
    lane_error(drain->lane, problem);
    if (error == -ENOSPC || error == -EDQUOT)
        job_sweep(drain->part->version->job, drain->lane_index);
    drain_give_up(drain);
}

/* ---- begin ---- */

static void begin_run(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    struct part *part = drain->part;
    drain->problem = PROBLEM_NONE;
    drain->result = commit_begin(&drain->commit, drain->lane->tier, part->version->job->name, part->version->id,
                                 part->rank, drain->commit.nonce, part->source.image_size, &drain->problem);
}

static void begin_done(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    drain->watch.progress++;
    lane_tell_remade(drain->lane);
    if (drain->result < 0) {
        struct problem problem = drain->problem;
        drain->commit.open = false;
        drain_error(drain, drain->result, &problem);
        return;
    }
    drain->state = DRAIN_WRITING;
    drain_advance(drain);
}

void drain_begin(struct drain *drain) {
    struct lane *lane = drain->lane;
    TAILQ_REMOVE(&lane->waiting, drain, link);
    TAILQ_INSERT_TAIL(&lane->active, drain, link);
    lane->active_count++;
    drain->queued_active = true;
    drain->state = DRAIN_BEGINNING;
    drain->begun_ns = loop_now(lane->server->loop);
    drain->commit.nonce = server_nonce(lane->server);
    watch_start(&drain->watch);
    loop_work(lane->server->loop, &drain->op, lane->group, begin_run, begin_done);
}

/* ---- finish ---- */

static int build_manifest(struct drain *drain, struct manifest *manifest) {
    struct part *part = drain->part;
    struct manifest_summary *summary = &manifest->summary;
    const struct source *source = &part->source;
    enum codec codec = drain->encoded_any ? CODEC_LZ4 : CODEC_RAW;
    snprintf(summary->job, sizeof summary->job, "%s", part->version->job->name);
    snprintf(summary->run_id, sizeof summary->run_id, "%s", part->run_id);
    summary->generation = part->version->id.generation;
    summary->step = part->version->id.step;
    summary->rank = part->rank;
    summary->world = part->world;
    summary->image_size = source->image_size;
    manifest_data_name(part->rank, codec, summary->data_file);
    const struct manifest_chunk *last = &drain->table[part->chunk_count - 1];
    summary->data_length = codec == CODEC_RAW ? source->image_size : last->offset + last->stored_length;
    summary->chunk_size = part->chunk_size;
    summary->codec = codec;
    summary->created_ns = part->created_wall_ns;
    summary->image_digest = part->image_digest;
    manifest->chunks = drain->table;
    manifest->chunk_count = part->chunk_count;
    return pieces_from_layout(source->set->shards, &source->set->layout, part->rank, source->state_length,
                              &manifest->pieces);
}

static void finish_run(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    struct manifest manifest = {0};
    drain->problem = PROBLEM_NONE;
    int r = build_manifest(drain, &manifest);
    if (r < 0)
        problem_set(&drain->problem, r, "cannot describe the part: %s", strerror(-r));
    else
        r = commit_finish(&drain->commit, &manifest, &drain->problem);
    pieces_deinit(&manifest.pieces);
    drain->result = r;
}

/* The version stays where a callback of ours still needs it. */
static void drain_over_with(struct drain *drain, void (*then)(struct version *version, uint32_t lane)) {
    struct version *version = drain->part->version;
    uint32_t index = drain->lane_index;
    version->busy++;
    drain_over(drain);
    version->busy--;
    then(version, index);
}

/* A part of this rank and step was committed before this daemon began (a rank that repeats what the
 * run has done): a committed part is never replaced. */
static void drain_there_already(struct drain *drain) {
    log_warning(drain_server(drain)->log,
                "the tier has this part from before, it stays: job=%s step=%llu rank=%u tier=%s",
                drain->part->version->job->name, (unsigned long long)drain->part->version->id.step, drain->part->rank,
                drain->lane->config.name);
    part_there_already(drain->part, drain->lane_index);
    drain_over_with(drain, version_there_already);
}

static void finish_done(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    struct part *part = drain->part;
    drain->watch.progress++;
    if (drain->result < 0) {
        struct problem problem = drain->problem;
        drain_error(drain, drain->result, &problem);
        return;
    }
    drain_server(drain)->counters.parts_committed++;
    part_trace(part, TRACE_COMMIT, drain->lane, drain->begun_ns, false);
    part_committed(part, drain->lane_index);
    drain_over_with(drain, version_committed);
}

void drain_advance(struct drain *drain) {
    struct part *part = drain->part;
    if (part_pointless(part)) {
        if (drain->state == DRAIN_WAITING)
            drain_over(drain);
        else if (drain->state == DRAIN_WRITING)
            drain_give_up(drain);
        return; /* the other states come by themselves */
    }
    if (drain->state == DRAIN_WAITING) {
        lane_pump(drain->lane);
        return;
    }
    if (drain->state != DRAIN_WRITING)
        return;
    if (drain->written == part->chunk_count && part->state == PART_CAPTURED) {
        part_trace(part, TRACE_DRAIN, drain->lane, drain->begun_ns, false);
        drain->begun_ns = loop_now(drain_server(drain)->loop);
        drain->state = DRAIN_FINISHING;
        loop_work(drain_server(drain)->loop, &drain->op, drain->lane->group, finish_run, finish_done);
        return;
    }
    drain_write(drain);
}
