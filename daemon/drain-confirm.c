/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A chunk is digested again after it was written (decoded, if it is encoded), which also tells of bytes that changed
 * while they were being written. What went bad in memory since the capture is not committed: the next try takes the
 * chunk from a tier that has it, or the part fails.
 */
#include "daemon/drain-state.h"
#include "tiers/codec.h"

#include <errno.h>

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

int drain_bad_in_memory(const struct drain *drain, uint32_t index, struct problem *problem) {
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
    int r = drain_bad_in_memory(drain, slot->index, &problem);
    slot_over(slot);
    drain_error(drain, r, &problem);
}

static void confirm_done(struct loop_op *op) {
    struct slot *slot = CONTAINER_OF(op, struct slot, op);
    if (slot->good || slot->drain->state == DRAIN_ABANDONING)
        slot_confirmed(slot);
    else
        slot_bad(slot);
}

void slot_confirm(struct slot *slot) {
    const struct drain *drain = slot->drain;
    /* Raw ones not behind what is encoded for other lanes. */
    loop_work(drain_server(drain)->loop, &slot->op, slot->encoded ? drain_server(drain)->encoders : drain->lane->group,
              confirm_run, confirm_done);
}
