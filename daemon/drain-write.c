/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks are written in the order of capture, each in a slot of the drain; the lane bounds how many are in flight over
 * all its drains. Several are encoded at a time, as many as there are threads for it. In the file chunks follow each
 * other in their order, so an encoded one gets its place when its length is known and all before it have theirs.
 */
#include "daemon/drain-state.h"
#include "tiers/codec.h"

#include <errno.h>

#define WRITE_STALLS_MAX 4

static void slot_submit(struct slot *slot);

void slot_over(struct slot *slot) {
    struct drain *drain = slot->drain;
    pool_buffer_unref(STEAL(slot->buffer));
    slot->encoded = NULL;
    slot->used = slot->ready = false;
    drain->in_flight--;
    drain->lane->writes--;
    drain->watch.progress++;
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
    slot_confirm(slot);
}

void slot_confirmed(struct slot *slot) {
    struct drain *drain = slot->drain;
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
    drain_set_pending(drain, drain->pending - chunk->length);
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
            result = drain_bad_in_memory(drain, slot->index, &problem);
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

/* One is fetched at a time: those behind it wait for their places, and would only take memory. */
void drain_write(struct drain *drain) {
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
            slot->fetch = (struct holding_request){.index = slot->index, .patient = true, .fn = slot_fetched};
            holding_get(drain->holding, &slot->fetch);
        }
    }
}
