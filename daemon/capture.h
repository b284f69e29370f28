/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What capture workers do for a part: a job is a run of chunks, copied and digested leaf by leaf by one
 * or several workers, who move the client's word. One job of a part at a time; between jobs the
 * capture belongs to the control thread.
 */

#include "base/loop.h"
#include "base/problem.h"
#include "proto/digest.h"

#include <stdatomic.h>

#define CAPTURE_CHUNKS 4 /* of a job, per worker: a few ms, so that captures take turns */
#define CAPTURE_WORKERS_MAX 4
#define CAPTURE_JOB_MAX (CAPTURE_CHUNKS * CAPTURE_WORKERS_MAX)

struct part;

struct capture_worker {
    struct loop_op op;
    struct part *part;
    int result; /* 0, -ECANCELED (the word was moved), or the source's error */
    struct problem problem;
};

struct capture {
    struct capture_worker workers[CAPTURE_WORKERS_MAX];
    uint32_t at_work;       /* of them */
    uint32_t first, count;  /* chunks of the job */
    const uint8_t *pushed;  /* a pushed chunk lies here (in an area); NULL: read the source */
    uint8_t *second;        /* check mode: where what was in device memory has landed, or NULL */
    uint64_t watermark;     /* the word's, as we left it */
    int result;             /* of the job: as a worker's */
    struct problem problem; /* if it failed */
    bool header_made, checking;
    bool landed; /* what lies in device memory is in the chunks (or in `second`) already */
    void (*done)(struct part *part);

    /* The job's leaves, between its workers. */
    uint32_t leaf_count;
    struct digest *digests; /* [leaf_count] */
    atomic_bool *copied;    /* [leaf_count]: it is in the pool, its digest is taken */
    atomic_uint next;       /* nobody has begun it yet */
    atomic_uint moved;      /* the word is past those before */
    atomic_flag moving;     /* somebody is moving it */
    atomic_bool stopped;    /* a worker failed: the others need not go on */
};

/* Of a part whose chunks are counted. */
int capture_init(struct capture *capture, struct part *part, void (*done)(struct part *part)) MUST_CHECK;
void capture_deinit(struct capture *capture);

static inline bool capture_busy(const struct capture *capture) { return capture->at_work > 0; }

/* How many workers a job of this part can have now. */
uint32_t capture_workers(const struct part *part);
/* Captures chunks, whose buffers are there; then calls done, from the loop. */
void capture_start(struct part *part, uint32_t first, uint32_t count, uint32_t workers);
/* Check mode: reads chunks a second time and compares, the last one last; then calls done. What lies in device memory
 * has been read to `landed`; NULL: nothing does. */
void capture_check(struct part *part, uint32_t first, uint32_t count, uint8_t *landed);
