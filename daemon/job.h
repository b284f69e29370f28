/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job as this daemon serves it: the run that it has joined, its lanes, and the versions that are
 * on their way or still in memory. A version becomes complete in a lane when every rank's part is
 * committed there; completing, the heartbeat and retention are this file's work.
 */

#include "daemon/lane.h"
#include "proto/manifest.h"
#include "tiers/layout.h"
#include "tiers/retention.h"

#define JOB_VERSIONS_WITH_PARTS 4 /* finished ones whose parts (cached bytes) are kept */
#define JOB_VERSIONS_MAX 256      /* records kept for late questions */

TAILQ_HEAD(part_list, part);
TAILQ_HEAD(version_list, version);

/* What became of a version in one lane. */
struct version_lane {
    struct version *version;
    uint32_t lane;
    uint32_t committed; /* parts, of this daemon's */
    bool wanted;        /* some part goes there */
    bool complete, failed, superseded;
    struct problem *problem;    /* why it failed; NULL: no memory to say */
    uint64_t retry_ns;          /* backoff of looking for other nodes' parts */
    uint64_t first_ns;          /* when the first part was committed */
    struct loop_op op;          /* completing (work) */
    struct loop_op timer;       /* looking again */
    struct problem *op_problem; /* while `op` is busy */
    uint64_t op_nonce;
    bool op_publish;
};

struct version {
    TAILQ_ENTRY(version) link;
    struct job *job;
    struct version_id id;
    uint32_t world;
    struct part_list parts;
    uint32_t captured; /* parts */
    bool doomed;       /* a part is absent: it cannot be complete, unless that rank's save is retried */
    uint64_t created_ns;
    uint32_t busy;               /* operations in flight that use it, restores that read it */
    uint32_t absences;           /* of these, manifests of absent parts that are being written */
    struct version_lane lanes[]; /* the job's: many versions are kept, and they are most of one */
};

/* Retention in one lane of a job: at most one at a time. */
struct sweep {
    struct job *job;
    uint32_t lane;
    struct loop_op op, timer, revisit;
    uint32_t spared;     /* old versions that were left only because they were busy */
    uint64_t revisit_ns; /* how long to leave them alone */
    bool again;
    struct version_id *ids; /* busy ones, then those complete elsewhere */
    struct retention_known known;
    struct retention_swept swept;
    uint64_t nonce, generation;
    struct retention_policy policy;
    struct problem problem;
};

struct job_durable {
    bool found;
    struct version_id id;
    uint64_t since_wall_ns;
};

struct job {
    TAILQ_ENTRY(job) link;
    struct server *server;
    uint32_t refs; /* sessions, versions' operations, opens */
    char name[MANIFEST_JOB_MAX];
    char directory[256];               /* the name escaped: for layout_...() only */
    char parallel_root[TIER_PATH_MAX]; /* CKPT_DIR, or empty */
    uint16_t trace_name;
    struct lane *lanes[LANES_MAX]; /* shallow first */
    uint32_t lane_count;
    uint32_t decider; /* index of the lane whose run file decides */

    TAILQ_HEAD(, opening) openings; /* those whose claims are at work */
    struct run_record run;          /* generation 0: none joined yet */
    uint32_t sessions;              /* open ones */
    uint8_t *closed_ranks;          /* bitmap over the run's ranks: said goodbye here */
    uint32_t closed_count;
    struct version_list versions; /* ascending */
    uint32_t version_count;
    struct job_durable durable[LEVEL_COUNT];
    uint64_t complete_generation[LANES_MAX]; /* the greatest that has a complete version there, as seen by us */
    struct problem report;                   /* the last failure that a save should mention */
    uint64_t report_number;

    struct loop_op heartbeat_timer, heartbeat;
    uint64_t heartbeat_generation; /* of the work in flight */
    bool end_due;                  /* the run is to be marked as ended once the heartbeat's work is over */
    struct sweep sweeps[LANES_MAX];
    struct catalog_damage damage[LANES_MAX]; /* as the last scan saw it */
};

/* The job of this name and parallel root, made if it is new. One more reference. */
int job_get(struct server *server, const char *name, const char *parallel_root, struct job **ret_job,
            struct problem *problem) MUST_CHECK;
struct job *job_ref(struct job *job);
void job_unref(struct job *job);

/* After a claim: this is the run now (older runs' versions drain on). */
void job_joined(struct job *job, const struct run_record *record);
/* Sessions come and go; the first starts the heartbeat, `orderly` counts a goodbye. */
void job_session_opened(struct job *job);
void job_session_closed(struct job *job, uint32_t rank, bool orderly);

/* The version of this id, made if it is new (NULL: out of memory). */
struct version *job_version(struct job *job, struct version_id id, uint32_t world);
struct version *job_find_version(struct job *job, struct version_id id);
struct part *version_find_part(struct version *version, uint32_t rank);

/* Something is in flight that uses it, or somebody reads it. */
bool version_busy(struct version *version);

/* A part's capture ended; a part was committed in a lane; a part failed or was left out there. */
void version_captured(struct version *version);
void version_committed(struct version *version, uint32_t lane);
/* The tier has a part of this rank and step already, from before this daemon: that one counts. */
void version_there_already(struct version *version, uint32_t lane);
void version_failed(struct version *version, uint32_t lane, const struct problem *problem);
void version_superseded(struct version *version, uint32_t lane);
/* The save of this rank yielded no part: other ranks' parts must not wait or pile up. */
void version_absent(struct version *version, uint32_t rank, const char *reason);

/* Is this version (or this rank's part of it) at least at the level? CODE_OK, CODE_PENDING,
 * CODE_SKIPPED (never), or CODE_E_... with the problem; CODE_E_NOT_FOUND: what is in memory does not tell. */
int job_level_reached(struct job *job, struct version_id id, uint32_t rank, enum level level, bool whole_version,
                      struct problem *problem);
/* Notes that a version is complete at a level (from a scan, or now). */
void job_note_durable(struct job *job, enum level level, struct version_id id, uint64_t wall_ns);
/* Anything captured of this job that is not yet durable anywhere? */
bool job_unsettled(struct job *job);
/* A version of this daemon's waits for other nodes' parts, or is being completed? */
bool job_completing(struct job *job);
/* The word that its run is over is being written. */
bool job_ending(struct job *job);
/* A bit for each lane that stands still. */
uint32_t job_silent_lanes(const struct job *job);
/* Runs retention in a lane, now or after the sweep that runs. */
void job_sweep(struct job *job, uint32_t lane);
/* Drops finished versions beyond the bounds, and their cached bytes. */
void job_prune(struct job *job);
