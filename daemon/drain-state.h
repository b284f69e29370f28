/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the files of a drain share: drain.c (its life: begin, tries, finish), drain-turn.c (which drain of a lane goes
 * on when), drain-write.c (chunks on their way into the tier) and drain-confirm.c (what was written is what was
 * captured). Nobody else includes this.
 */

#include "daemon/drain.h"
#include "daemon/holding.h"
#include "daemon/watch.h"

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
    struct watch watch;
    uint64_t pending; /* bytes not written yet */
    int result;
    struct problem problem;
};

static inline struct server *drain_server(const struct drain *drain) { return drain->lane->server; }

/* Out of the lane's queue of those that wait. */
void drain_begin(struct drain *drain);
/* Starts as many chunks as are captured and allowed. */
void drain_write(struct drain *drain);
/* Left out: a newer version waits behind it. */
void drain_supersede(struct drain *drain);
/* This part came into the lane: too many may wait now. */
void drain_enforce_backlog(struct lane *lane, uint32_t index, struct part *arrived);
/* What the lane still has to do for this drain. */
void drain_set_pending(struct drain *drain, uint64_t bytes);
/* The try failed. */
void drain_error(struct drain *drain, int error, const struct problem *problem);
/* Ends the try as soon as nothing is in flight; the temporary goes first. */
void drain_give_up(struct drain *drain);

/* It is in flight no more. */
void slot_over(struct slot *slot);
/* All its bytes are written: ends in slot_confirmed(), or in an error. */
void slot_confirm(struct slot *slot);
void slot_confirmed(struct slot *slot);
/* -EBADMSG, and the sentence. */
int drain_bad_in_memory(const struct drain *drain, uint32_t index, struct problem *problem);
