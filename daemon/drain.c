/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks are written in the order of capture, each in a slot of the drain; the lane bounds how many
 * are in flight over all its drains. Several are encoded at a time, as many as there are threads for
 * it. In the file chunks follow each other in their order, so an encoded one gets its place when its
 * length is known and all before it have theirs.
 *
 * A chunk is digested again after it was written (decoded, if it is encoded), which also tells of bytes
 * that changed while they were being written. What went bad in memory since the capture is not
 * committed: the next try takes the chunk from a tier that has it, or the part fails.
 *
 * A drain keeps a watch while something is in flight: no progress for the configured time means a
 * stuck worker. It is left alone with its buffers (it may come back), and the lane gets another.
 */
#include "daemon/drain.h"

#include "daemon/holding.h"
#include "tiers/codec.h"

#include <errno.h>

#define DRAIN_TRIES 4
#define WRITE_STALLS_MAX 4
#define DRAIN_ACTIVE_MIN 2 /* drains of one lane at a time, at least */

enum drain_state { DRAIN_WAITING, DRAIN_BEGINNING, DRAIN_WRITING, DRAIN_FINISHING, DRAIN_ABANDONING, DRAIN_PAUSED };

struct slot {
    struct drain *drain;
    bool used;
    uint32_t index;
    struct pool_buffer *buffer;
    uint8_t *encoded; /* NULL: raw from the buffer; else `room` */
    uint8_t *room;    /* for an encoded chunk; kept from chunk to chunk, first touches are slow */
    uint8_t *decoded; /* to compare it with what it was; kept, too */
    bool good;        /* what was written is what was captured */
    uint32_t stored_length;
    bool tried;            /* to encode it: `auto` may have seen that it is not worth it */
    bool ready;            /* its stored length is known, it waits for its place */
    uint64_t submitted_ns; /* to the encoders, or to the tier */
    uint64_t offset;
    uint64_t length, done; /* to be written, padded; written */
    unsigned stalls;       /* writes in a row that brought it no block further */
    struct loop_op op;
    struct holding_request fetch;
};

struct drain {
    TAILQ_ENTRY(drain) link;
    struct part *part;
    struct lane *lane;
    uint32_t lane_index;
    enum drain_state state;
    uint64_t begun_ns;  /* this try; from FINISHING on: the commit */
    bool queued_active; /* in lane->active, not lane->waiting */
    uint32_t tries;
    struct commit commit;
    struct manifest_chunk *table;
    uint32_t next, placed, written, in_flight;
    uint64_t file_end;
    uint32_t encoding;
    bool fetching, encoded_any;
    struct slot *slots;
    struct holding *holding; /* for chunks that left memory */
    struct loop_op op;       /* begin, finish, abandon, or the pause */
    struct loop_op watch;
    uint64_t pending; /* bytes not written yet */
    uint64_t progress, watched;
    bool stuck, over;
    int result;
    struct problem problem;
};

static struct server *drain_server(struct drain *drain) { return drain->lane->server; }
static void drain_write(struct drain *drain);

static uint32_t active_limit(const struct lane *lane) {
    return lane->config.workers > DRAIN_ACTIVE_MIN ? lane->config.workers : DRAIN_ACTIVE_MIN;
}

/* ---- watch ---- */

static void watch_elapsed(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, watch);
    struct lane *lane = drain->lane;
    if (op->result < 0 || drain->over) /* drain_freed waits for this */
        return;
    bool waits_for_tier = drain->in_flight || (drain->state != DRAIN_PAUSED && loop_op_busy(&drain->op));
    if (waits_for_tier && drain->watched == drain->progress && !drain->stuck) {
        drain->stuck = true;
        lane->stuck_workers++;
        part_trace(drain->part, TRACE_STUCK, lane, 0, true);
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, -ETIMEDOUT, "tier %s: no answer from %s for %llu s; a worker is stuck there",
                    lane->config.name, lane->tier->root,
                    (unsigned long long)drain_server(drain)->config->tier_ms / 1000);
        lane_error(lane, &problem);
        if (loop_group_relieve(lane->group) < 0)
            log_warning(drain_server(drain)->log, "tier %s stands still: all its workers are stuck", lane->config.name);
    } else if (drain->watched != drain->progress && drain->stuck) {
        drain->stuck = false;
        lane->stuck_workers--;
        lane_pump(lane);
    }
    drain->watched = drain->progress;
    loop_timer(drain_server(drain)->loop, &drain->watch,
               loop_now(drain_server(drain)->loop) + drain_server(drain)->config->tier_ms * NANOSECONDS_PER_MS,
               watch_elapsed);
}

static void watch_start(struct drain *drain) {
    drain->watched = drain->progress;
    if (!loop_op_busy(&drain->watch))
        loop_timer(drain_server(drain)->loop, &drain->watch,
                   loop_now(drain_server(drain)->loop) + drain_server(drain)->config->tier_ms * NANOSECONDS_PER_MS,
                   watch_elapsed);
}

/* ---- life ---- */

/* What the lane still has to do for this drain. */
static void set_pending(struct drain *drain, uint64_t bytes) {
    drain->lane->pending_bytes += bytes - drain->pending;
    drain->pending = bytes;
}

static void drain_freed(struct loop_op *op) {
    struct drain *drain = CONTAINER_OF(op, struct drain, op);
    if (loop_op_busy(&drain->watch)) { /* its cancellation is on the way; look again after it */
        loop_post(drain_server(drain)->loop, &drain->op, 0, drain_freed);
        return;
    }
    struct lane *lane = drain->lane;
    if (drain->holding)
        holding_unref(drain->holding);
    for (uint32_t i = 0; i < lane->config.depth; i++)
        free(drain->slots[i].room), free(drain->slots[i].decoded);
    free(drain->slots);
    free(drain->table);
    free(drain);
    lane_unref(lane);
}

/* Takes the drain out of everything and frees it soon. What it meant for the part is the caller's. */
static void drain_end(struct drain *drain) {
    struct part *part = drain->part;
    struct lane *lane = drain->lane;
    assert(!drain->in_flight && !loop_op_busy(&drain->op));
    drain->over = true;
    lane->urgent -= part_presses(part);
    set_pending(drain, 0);
    lane->pending_parts--;
    if (drain->stuck)
        lane->stuck_workers--;
    if (drain->queued_active) {
        TAILQ_REMOVE(&lane->active, drain, link);
        lane->active_count--;
    } else {
        TAILQ_REMOVE(&lane->waiting, drain, link);
    }
    part->drains[drain->lane_index] = NULL;
    part->active_drains--;
    loop_cancel(drain_server(drain)->loop, &drain->watch);
    loop_post(drain_server(drain)->loop, &drain->op, 0, drain_freed);
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

/* Left out: a newer version waits behind it. */
static void drain_supersede(struct drain *drain) {
    struct part *part = drain->part;
    uint32_t index = drain->lane_index;
    drain_server(drain)->counters.parts_superseded++;
    part_trace(part, TRACE_SUPERSEDED, drain->lane, 0, true);
    drain_end(drain);
    part_drain_over(part, index);
}

static bool only_waiting(struct version *version, uint32_t lane_index) {
    struct part *part;
    TAILQ_FOREACH(part, &version->parts, link) {
        struct drain *drain = part->drains[lane_index];
        if ((part->committed_lanes & 1u << lane_index) || part->windowed || (drain && drain->state != DRAIN_WAITING))
            return false;
    }
    return true;
}

static bool waits(struct version *version, uint32_t lane_index, bool *ret_urgent) {
    struct part *part;
    bool found = false;
    TAILQ_FOREACH(part, &version->parts, link)
    if (part->drains[lane_index] && part->drains[lane_index]->state == DRAIN_WAITING) {
        found = true;
        *ret_urgent = *ret_urgent || part->urgent;
    }
    return found;
}

/* More versions of one job wait than allowed: the oldest that has not begun goes, all its parts together.
 * Not the newest, though a slower rank's part of an older one may come after it. */
static void enforce_backlog(struct lane *lane, uint32_t index, struct part *arrived) {
    uint32_t versions = 0;
    struct version *version, *newest = NULL, *victim = NULL;
    TAILQ_FOREACH(version, &arrived->version->job->versions, link) {
        bool urgent = false;
        if (!waits(version, index, &urgent))
            continue;
        versions++;
        newest = version;
        if (!victim && version != arrived->version && !urgent && only_waiting(version, index))
            victim = version;
    }
    if (versions <= lane->config.backlog || !victim || victim == newest)
        return;
    struct part *part;
    version_superseded(victim, index);
    TAILQ_FOREACH(part, &victim->parts, link)
    if (part->drains[index])
        drain_supersede(part->drains[index]);
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
    drain->lane_index = index;
    part->drains[index] = drain;
    part->active_drains++;
    if (part->urgent)
        TAILQ_INSERT_HEAD(&lane->waiting, drain, link);
    else
        TAILQ_INSERT_TAIL(&lane->waiting, drain, link);
    set_pending(drain, part->source.image_size);
    lane->pending_parts++;
    lane->urgent += part_presses(part);
    enforce_backlog(lane, index, part);
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
    set_pending(drain, drain->part->source.image_size);
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

static void slot_over(struct slot *slot);

/* Ends the try as soon as nothing is in flight; the temporary goes first. */
static void drain_give_up(struct drain *drain) {
    drain->state = DRAIN_ABANDONING;
    for (uint32_t i = 0; i < drain->lane->config.depth; i++)
        if (drain->slots[i].ready)
            slot_over(&drain->slots[i]);
    if (drain->in_flight || loop_op_busy(&drain->op))
        return;
    if (drain->commit.open)
        loop_work(drain_server(drain)->loop, &drain->op, drain->lane->group, abandon_run, abandon_done);
    else
        try_over(drain);
}

static void drain_there_already(struct drain *drain);

static void drain_error(struct drain *drain, int error, const struct problem *problem) {
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
    drain->progress++;
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

static void drain_begin(struct drain *drain) {
    struct lane *lane = drain->lane;
    TAILQ_REMOVE(&lane->waiting, drain, link);
    TAILQ_INSERT_TAIL(&lane->active, drain, link);
    lane->active_count++;
    drain->queued_active = true;
    drain->state = DRAIN_BEGINNING;
    drain->begun_ns = loop_now(lane->server->loop);
    drain->commit.nonce = server_nonce(lane->server);
    watch_start(drain);
    loop_work(lane->server->loop, &drain->op, lane->group, begin_run, begin_done);
}

void drain_press(struct drain *drain, bool presses) {
    drain->lane->urgent += presses ? 1 : -1u;
    lane_pump(drain->lane);
}

/* Parts that are durable elsewhere may have left memory: reading them back takes room, which the others'
 * drains make. So these do not wait for the turns of those. Nor does anybody for one whose client does
 * nothing: it may never go on. */
static bool has_turn(const struct drain *drain) {
    const struct lane *lane = drain->lane;
    const struct drain *other;
    uint32_t before = 0;
    TAILQ_FOREACH(other, &lane->active, link)
    before += (drain->part->durable || !other->part->durable) && !other->part->stalled;
    return before < active_limit(lane);
}

/* An urgent drain begins whatever else is active: those that are write nothing as long as it waits. */
static bool may_begin(const struct drain *drain) {
    bool room = has_turn(drain) || drain->part->urgent;
    return room && !lane_silent(drain->lane) && drain->part->captured && !part_pointless(drain->part);
}

void lane_pump(struct lane *lane) {
    struct drain *drain, *next;
    for (drain = TAILQ_FIRST(&lane->waiting); drain; drain = next) {
        next = TAILQ_NEXT(drain, link);
        if (may_begin(drain))
            drain_begin(drain);
    }
    TAILQ_FOREACH(drain, &lane->active, link)
    if (drain->state == DRAIN_WRITING)
        drain_write(drain);
}

/* ---- write ---- */

static void slot_submit(struct slot *slot);

static void slot_over(struct slot *slot) {
    struct drain *drain = slot->drain;
    pool_buffer_unref(STEAL(slot->buffer));
    slot->encoded = NULL;
    slot->used = slot->ready = false;
    drain->in_flight--;
    drain->lane->writes--;
    drain->progress++;
}

static void slot_failed(struct slot *slot, int error) {
    struct drain *drain = slot->drain;
    struct problem problem = PROBLEM_NONE;
    char path[TIER_PATH_MAX * 2];
    tier_path_text(drain->lane->tier, drain->commit.temporary, path);
    problem_set(&problem, error, "tier %s: cannot write %s: %s", drain->lane->config.name, path, strerror(-error));
    slot_over(slot);
    if (drain->state == DRAIN_ABANDONING)
        drain_give_up(drain);
    else
        drain_error(drain, error, &problem);
}

/* What its speed tells of the lane's: not that of an image's short end, which takes its time all the same. */
static bool slot_tells(const struct slot *slot) {
    const struct part *part = slot->drain->part;
    return part->chunk_count == 1 || part->chunks[slot->index].length >= part->chunk_size / 2;
}

static void confirm_run(struct loop_op *op);
static void confirm_done(struct loop_op *op);

static void slot_written(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    struct drain *drain = slot->drain;
    if (op->result <= 0) {
        drain->lane->writing--;
        slot_failed(slot, op->result < 0 ? (int)op->result : -EIO);
        return;
    }
    uint64_t before = slot->done;
    slot->done += (uint64_t)op->result;
    if (slot->done < slot->length) {
        slot->done &= ~(uint64_t)(TIER_ALIGNMENT - 1); /* keep to whole blocks */
        slot->stalls = slot->done > before ? 0 : slot->stalls + 1;
        if (slot->stalls < WRITE_STALLS_MAX) { /* as a rule the next one says what is wrong */
            slot_submit(slot);
        } else {
            drain->lane->writing--;
            slot_failed(slot, -EIO);
        }
        return;
    }
    /* Encoded ones come as the encoder makes them: they do not tell how fast the tier can be. */
    if (!slot->encoded && slot_tells(slot))
        lane_took(&drain->lane->write_ns, loop_now(drain_server(drain)->loop) - slot->submitted_ns,
                  drain->lane->writing, slot->length);
    drain->lane->writing--;
    /* Raw ones not behind what is encoded for other lanes. */
    loop_work(drain_server(drain)->loop, &slot->op, slot->encoded ? drain_server(drain)->encoders : drain->lane->group,
              confirm_run, confirm_done);
}

/* On a worker: are these still the bytes of the capture? */
static void confirm_run(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    const struct chunk *chunk = &slot->drain->part->chunks[slot->index];
    const uint8_t *data = slot->buffer->data;
    struct digest digest;
    slot->good = true;
    if (slot->encoded) {
        size_t room = align_up(slot->drain->part->chunks[0].length, TIER_ALIGNMENT); /* none is longer */
        if (!slot->decoded && !(slot->decoded = aligned_alloc(TIER_ALIGNMENT, room)))
            return; /* readers check it, too */
        data = slot->decoded;
        slot->good = codec_decode(CODEC_LZ4, slot->encoded, slot->stored_length, slot->decoded, chunk->length) == 0;
    }
    if (slot->good) {
        digest_chunk(data, chunk->length, &digest);
        slot->good = digest_equal(&digest, &chunk->digest);
    }
}

static int bad_in_memory(const struct drain *drain, uint32_t index, struct problem *problem) {
    const struct part *part = drain->part;
    return problem_set(problem, -EBADMSG,
                       "a chunk went bad in memory after its capture: job %s, step %llu, rank %u, chunk %u of %u; have "
                       "the memory of this node tested",
                       part->version->job->name, (unsigned long long)part->version->id.step, part->rank, index,
                       part->chunk_count);
}

static void slot_bad(struct slot *slot) {
    struct drain *drain = slot->drain;
    struct problem problem = PROBLEM_NONE;
    struct chunk *chunk = &drain->part->chunks[slot->index];
    if (!chunk->bad) /* else another drain has counted it */
        drain_server(drain)->counters.chunks_bad++;
    chunk->bad = true;
    int r = bad_in_memory(drain, slot->index, &problem);
    slot_over(slot);
    drain_error(drain, r, &problem);
}

static void confirm_done(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    struct drain *drain = slot->drain;
    if (!slot->good && drain->state != DRAIN_ABANDONING) {
        slot_bad(slot);
        return;
    }
    const struct chunk *chunk = &drain->part->chunks[slot->index];
    drain->table[slot->index] = (struct manifest_chunk){.offset = slot->offset,
                                                        .stored_length = slot->stored_length,
                                                        .raw_length = chunk->length,
                                                        .digest = chunk->digest};
    uint32_t index = slot->index;
    slot_over(slot);
    if (drain->state == DRAIN_ABANDONING) {
        drain_give_up(drain);
        return;
    }
    drain->written++;
    set_pending(drain, drain->pending - chunk->length);
    part_chunk_written(drain->part, index);
    drain_advance(drain);
    if (drain->lane->active_count > 1)
        lane_pump(drain->lane);
}

static void slot_submit(struct slot *slot) {
    struct drain *drain = slot->drain;
    const uint8_t *data = slot->encoded ? slot->encoded : slot->buffer->data;
    tier_submit_write(&drain->commit.file, drain_server(drain)->loop, drain->lane->group, &slot->op, data + slot->done,
                      slot->length - slot->done, slot->offset + slot->done, slot_written);
}

/* Gives places in the file to those whose turn it is. */
static void place_ready(struct drain *drain) {
    bool found = true;
    while (found) {
        found = false;
        for (uint32_t i = 0; i < drain->lane->config.depth; i++) {
            struct slot *slot = &drain->slots[i];
            if (!slot->ready || slot->index != drain->placed)
                continue;
            slot->ready = false;
            slot->offset = drain->file_end;
            slot->length = align_up(slot->stored_length, TIER_ALIGNMENT);
            slot->done = 0;
            slot->stalls = 0;
            slot->submitted_ns = loop_now(drain_server(drain)->loop);
            drain->file_end += slot->length;
            drain->placed++;
            drain->lane->writing++;
            slot_submit(slot);
            found = true;
        }
    }
}

/* Its stored length is known. */
static void slot_ready(struct slot *slot) {
    slot->ready = true;
    place_ready(slot->drain);
}

static void encode_run(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    struct drain *drain = slot->drain;
    uint32_t raw = drain->part->chunks[slot->index].length;
    const uint8_t *data = slot->buffer->data;
    slot->stored_length = raw;
    if (drain->lane->config.codec == CODEC_AUTO && !codec_worthwhile(data, raw))
        return;
    size_t room = codec_bound(drain->part->chunks[0].length); /* none is longer */
    if (!slot->room && !(slot->room = aligned_alloc(TIER_ALIGNMENT, room)))
        return; /* raw is always right */
    slot->tried = true;
    slot->stored_length = codec_encode(CODEC_LZ4, data, raw, slot->room);
    if (slot->stored_length == raw)
        return;
    memset(slot->room + slot->stored_length, 0, align_up(slot->stored_length, TIER_ALIGNMENT) - slot->stored_length);
    slot->encoded = slot->room;
}

static void encode_done(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    struct drain *drain = slot->drain;
    struct lane *lane = drain->lane;
    struct server *server = drain_server(drain);
    uint32_t raw = drain->part->chunks[slot->index].length;
    if (slot->tried && slot_tells(slot))
        lane_took(&lane->encode_ns, loop_now(server->loop) - slot->submitted_ns, server->encoding, raw);
    lane_shrank(lane, raw, slot->stored_length);
    server->encoding--;
    drain->encoding--;
    if (drain->state == DRAIN_ABANDONING) {
        slot_over(slot);
        drain_give_up(drain);
        return;
    }
    drain->encoded_any = drain->encoded_any || slot->encoded;
    slot_ready(slot);
    drain_write(drain);
}

/* The slot has its bytes: encode, or write as they are. */
static void slot_start(struct slot *slot) {
    struct drain *drain = slot->drain;
    struct lane *lane = drain->lane;
    struct server *server = drain_server(drain);
    if (lane->config.codec == CODEC_RAW || (lane->config.codec == CODEC_AUTO && !lane_gains(lane))) {
        slot->stored_length = drain->part->chunks[slot->index].length;
        slot_ready(slot);
        return;
    }
    drain->encoding++;
    server->encoding++;
    slot->tried = false;
    slot->submitted_ns = loop_now(server->loop);
    loop_work(server->loop, &slot->op, server->encoders, encode_run, encode_done);
}

static void slot_fetched(struct holding_request *request) {
    struct slot *slot = CONTAINER_OF(request, struct slot, fetch);
    struct drain *drain = slot->drain;
    slot->buffer = request->buffer;
    drain->fetching = false;
    if (request->result) {
        drain->in_flight--;
        slot->used = false;
        int result = request->result;
        struct problem problem = request->problem;
        if (drain->part->chunks[slot->index].bad) { /* which is why it was asked for */
            problem = PROBLEM_NONE;
            result = bad_in_memory(drain, slot->index, &problem);
        }
        if (drain->state == DRAIN_ABANDONING)
            drain_give_up(drain);
        else
            drain_error(drain, result, &problem);
        return;
    }
    drain->lane->writes++;
    if (drain->state == DRAIN_ABANDONING) {
        slot_over(slot);
        drain_give_up(drain);
        return;
    }
    slot_start(slot);
    drain_write(drain);
}

static struct slot *free_slot(struct drain *drain) {
    for (uint32_t i = 0; i < drain->lane->config.depth; i++)
        if (!drain->slots[i].used)
            return &drain->slots[i];
    return NULL;
}

/* Starts as many chunks as are captured and allowed. One is fetched at a time: those behind it wait for
 * their places, and would only take memory. */
static void drain_write(struct drain *drain) {
    struct part *part = drain->part;
    struct lane *lane = drain->lane;
    while (drain->state == DRAIN_WRITING && !drain->fetching && drain->next < part->captured &&
           lane->writes < lane->config.depth && drain->encoding < drain_server(drain)->config->codec_threads) {
        struct slot *slot = free_slot(drain);
        bool yields = lane->urgent && !part->urgent;
        if (!slot || yields || (!part->urgent && !lane_rate_allows(lane, part->chunks[drain->next].length)))
            return;
        bool in_memory = part->chunks[drain->next].buffer && !part->chunks[drain->next].bad;
        if (!in_memory && !drain->holding &&
            holding_new(part->version->job, part->version->id, part->rank, &part->image_digest, &drain->holding) < 0) {
            struct problem problem = PROBLEM_NONE;
            drain_error(drain, problem_set(&problem, -ENOMEM, "out of memory"), &problem);
            return;
        }
        slot->used = true;
        slot->index = drain->next++;
        slot->op = LOOP_OP_INIT;
        drain->in_flight++;
        drain->fetching = !in_memory;
        if (in_memory) {
            lane->writes++;
            slot->buffer = pool_buffer_ref(part->chunks[slot->index].buffer);
            slot_start(slot);
        } else { /* it counts as a write when it has come: it may wait for memory that another drain's writes free */
            slot->fetch = (struct holding_request){.index = slot->index, .fn = slot_fetched};
            holding_get(drain->holding, &slot->fetch);
        }
    }
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
    drain->progress++;
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
