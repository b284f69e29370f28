/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A part: one rank's contribution to one version, from the accepted save until its bytes have left
 * memory. Its capture runs chunk by chunk on capture workers, at most one job at a time, and
 * advances the client's word; its drains start with the first captured chunk.
 *
 *   CAPTURING --(last word advance)--> CAPTURED --(first durable commit)--> cached
 *       \--(revoked, source gone)--> FAILED
 *
 * Shards in device memory come by transfers, at most TRANSFERS_MAX at a time and in order, into the
 * chunks' buffers; the capture workers then add what lies in host memory, and digest. With a place in
 * the arena of each of its devices, a transfer stores the whole image there first: then the part is
 * `secured`, the client's word complete, and what follows is between the arenas and the host. In check mode, which
 * needs the client's memory to the end, no place is sought; the second reading comes by transfers, too.
 *
 * The part holds its pool reservation until it is durable in one lane, or failed in all. An image
 * larger than the pool is `windowed`: a chunk's memory goes as soon as its first lane has written it.
 */

#include "daemon/capture.h"
#include "daemon/job.h"
#include "daemon/transfer.h"

enum part_state { PART_CAPTURING, PART_CAPTURED, PART_FAILED };

/* The word page of one handle; captures outlive the session. */
struct word_map {
    _Atomic uint32_t refs;
    int fd; /* to be given to the client */
    struct word_page *page;
};
int word_map_new(struct word_map **ret_map) MUST_CHECK;
struct word_map *word_map_ref(struct word_map *map);
void word_map_unref(struct word_map *map);

struct chunk {
    struct pool_buffer *buffer; /* NULL: not captured yet, or gone from memory */
    bool bad;                   /* the bytes in memory are not those of the capture any more */
    struct digest digest;
    uint32_t length;
};

struct part {
    TAILQ_ENTRY(part) link;
    struct version *version;
    struct server *server;
    struct session *session; /* NULL once the client has gone */
    uint32_t rank, world;
    char run_id[MANIFEST_RUN_ID_MAX];
    enum part_state state;
    struct source source;
    struct word_map *word;
    uint16_t counter;
    uint64_t created_wall_ns;
    uint64_t begun_ns, stalled_ns; /* its capture; since when that waits for room, or 0 */
    uint32_t chunk_size, chunk_count;
    struct chunk *chunks;
    uint32_t captured; /* contiguous chunks */
    uint32_t checked;  /* check mode: those of them that were read a second time */
    uint64_t reserved; /* of the pool; 0 once released */
    bool windowed, urgent, push;
    struct transfer *transfers[TRANSFERS_MAX]; /* in order; NULL after the last */
    uint32_t transferring;                     /* chunks that transfers have or had, in this reading */
    struct berth *berth;                       /* its room in the device tier; NULL: none */
    bool secured;                              /* the whole image is in the device tier: captured, to the client */
    bool held;                                 /* until the client's START: what it queued before the save still runs */
    bool late;                                 /* pushed in check mode: its end comes with the client's fence */
    bool check, fenced; /* check mode: the last advance waits for the fence, then for a second reading */
    struct capture capture;
    struct pool_waiter waiter;
    struct loop_op look;    /* while the capture sleeps or is under way: has it been revoked, is a worker stuck? */
    uint32_t looked_chunks; /* captured and checked, by then */
    uint64_t progress_ns;   /* when it was seen to go on */
    bool stuck;
    bool stalled;               /* its client has not let it go on since the last look: others do not wait for it */
    struct digest image_digest; /* once CAPTURED */
    bool foreign;               /* a tier had another part of this rank and step: these bytes are not the version's */
    struct area *push_area;
    struct problem condemned;        /* why the capture is to end as soon as its worker returns */
    struct problem problem;          /* FAILED */
    struct drain *drains[LANES_MAX]; /* NULL: not wanted, or over */
    uint32_t active_drains;
    uint32_t committed_lanes; /* bit per lane */
    uint32_t wanted_lanes;
    bool durable; /* in some lane */
};

struct part_options {
    struct session *session;
    uint32_t rank;
    struct word_map *word;
    uint16_t counter;
    struct set *set;
    struct peer *peer;
    struct area *state_area;
    uint64_t state_offset, state_length;
    bool urgent, forked, check, held;
    enum level to; /* LEVEL_NONE: all */
};

/* What an image of this size takes of the pool: whole chunks, so that what was admitted also finds its places. */
uint64_t part_room(const struct server *server, uint64_t image_size);
/* Reserves so much of the pool, if that leaves fetches theirs. `windowed`: for an image larger than the pool. */
bool part_reserve(struct server *server, uint64_t bytes, bool windowed) MUST_CHECK;

/* Admitted: makes the part. PART_E_BUSY: no room in the pool now; nothing was made. */
enum { PART_E_BUSY = 1 };
int part_new(struct version *version, const struct part_options *options, struct part **ret_part,
             struct problem *problem) MUST_CHECK;
/* Begins the capture: after the client has got its answer, which must not wait for a worker. */
void part_begin(struct part *part);
/* Only when nothing is in flight: not capturing, no drains. */
void part_free(struct part *part);
/* Its bytes are of no use to any tier: the capture failed, or another part of this rank and step was there before. */
bool part_pointless(const struct part *part);
/* Nothing is in flight any more, in capture or drains. */
bool part_idle(const struct part *part);

/* Other drains are to wait for this part's. */
bool part_presses(const struct part *part);
/* Continues the capture (after room came, a push, ...). */
void part_capture_next(struct part *part);
/* The next chunk, pushed by the client. -EPROTO: not the one that is due. The answer goes through session_pushed(). */
int part_push(struct part *part, struct area *area, uint64_t area_offset, uint64_t image_offset,
              uint32_t length) MUST_CHECK;
/* What the client had queued before a held save is over. */
void part_start(struct part *part);
/* The client waits in its fence (check mode): the second reading may begin. */
void part_fence(struct part *part);
/* Its client has given this capture up. */
bool part_given_up(const struct part *part);
/* The client gave this capture up; if nothing is in flight it ends here and now. True: it has ended. */
bool part_revoked(struct part *part);
/* The push connection is gone, the client is not: the capture ends, and the client is told. */
void part_push_lost(struct part *part);
/* The client is gone: a pushed capture cannot go on; others do, as long as their source can be read. */
void part_session_gone(struct part *part);

/* Notes what happened to it, in this tier of its job's or (NULL) in none. */
void part_trace(const struct part *part, enum trace_kind kind, const struct lane *lane, uint64_t begin_ns, bool failed);

/* From its transfers: one is over. */
void part_transferred(struct part *part, struct transfer *transfer, int result, const struct problem *problem);
/* Captured, as the client sees it: the last advance of its word was made. */
static inline bool part_is_captured(const struct part *part) {
    return part->state == PART_CAPTURED || (part->state == PART_CAPTURING && part->secured);
}

/* From drains. */
void part_committed(struct part *part, uint32_t lane);
/* The lane has a part of this rank and step from before: ours is dropped, that one counts. */
void part_there_already(struct part *part, uint32_t lane);
void part_chunk_written(struct part *part, uint32_t index);
void part_drain_over(struct part *part, uint32_t lane); /* whatever its result */
