/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Opening: everything between a client's OPEN and our OPENED. The job's parallel root becomes a
 * lane; parts of the job's earlier run that are still on their way are finished; the run is joined
 * or claimed; leftovers of this rank are reaped; what is durable is learned from the tiers.
 */

#include "daemon/job.h"

struct opening;
struct session;

struct opening_request {
    uint32_t serial;
    uint32_t rank, world;
    uint32_t pid;
    uint64_t pid_start;
    uint64_t deadline_ms;
    char job[MANIFEST_JOB_MAX];
    char run_id[MANIFEST_RUN_ID_MAX];
    char directory[TIER_PATH_MAX];
};

/* What the session learns. */
struct opening_result {
    struct problem warning;
    bool has_tier_step; /* this rank has parts of this very run in tiers: a rank that joins again */
    uint64_t tier_step; /* the newest of them */
};

/* Ends in session_opened() or, after a session_error(), session_open_failed(). */
int opening_start(struct session *session, const struct opening_request *request) MUST_CHECK;
/* The session has ended: nothing is claimed for it any more. */
void opening_abandon(struct opening *opening);
