/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One decision per run: which generation a rank belongs to, and which version its run resumes
 * from. The decision is the file <job>/<generation>/run, made by temporary file and link(2) in the
 * deciding tier (the deepest shared one, else the only one). Blocking.
 */

#include "proto/manifest.h"
#include "tiers/catalog.h"

#include <stdatomic.h>

#define CLAIM_TOUCH_INTERVAL_MS 10000
#define CLAIM_LAPSE_MS 60000 /* a holder not touched for so long is dead, by the file system's clock */

struct claim_request {
    const char *job; /* unescaped */
    const char *run_id;
    uint32_t world;
    const char *host, *boot_id;
    uint32_t pid; /* the claiming process, and its start time */
    uint64_t pid_start;
    uint64_t nonce;
    const atomic_bool *abandoned; /* nobody waits for the answer any more: nothing is claimed. NULL: somebody does */
    _Atomic(struct tier *) *at;   /* the tier that it is in stands there; NULL: nobody wants to know */
    struct tier *decider;
    struct tier *const *tiers; /* all tiers, in order of preference for reading; holds decider */
    size_t tier_count;
};

struct claim_result {
    struct run_record record;
    bool joined;            /* somebody of the same run was first */
    struct problem warning; /* set if a newer version was passed over because it is damaged */
};

/*
 * 0: *ret_result is the decision. CLAIM_E_HELD: another live run holds the job; the problem names
 * the holder (host, pid, run id), and *ret_retry is true if it may lapse (a remote or stale
 * heartbeat), false if its process is alive here. -ENODATA: versions exist but none is usable
 * (never a silent fresh start). Other negative errno: the tier, in problem.
 *
 * Reads the greatest generation; holder alive and same run id -> joins; alive with another id ->
 * HELD; dead or none -> claims the next, starting over if it loses the link. The version to resume
 * from is the greatest that is complete in some tier and passes catalog_check there. A holder is
 * alive if its run file was touched within CLAIM_LAPSE_MS, unless host and boot id are ours and the
 * pid with that start time is gone; the same run id always joins. A time stamp from a future that the
 * file system's clock was set back from says nothing: it is made the present one, and lapses from there.
 */
enum { CLAIM_E_HELD = 1 };
int claim_run(const struct claim_request *request, struct claim_result *ret_result, bool *ret_retry,
              struct problem *problem) MUST_CHECK;
/* For a rank that joined: what the claim passed over, if that is still to be seen. `catalogs`: a scan of each
 * tier. *ret_warning as in claim_result. */
void claim_passed_over(const struct claim_request *request, struct catalog *catalogs, const struct run_record *record,
                       struct problem *ret_warning);
/* The heartbeat. TIER_E_ABSENT: the file is gone. */
int claim_touch(struct tier *decider, const char *job, uint64_t generation);
/* The run ended well: the next claim need not wait for the heartbeat to lapse. Marks the record's
 * holder as gone by an empty sibling file `run-ended`. */
int claim_end(struct tier *decider, const char *job, uint64_t generation);

/* Field 22 of /proc/PID/stat. -ESRCH: no such process, or only its zombie. */
int claim_pid_start(uint32_t pid, uint64_t *ret_start);
/* This host's name and boot id. */
int claim_host(char ret_host[256], char ret_boot_id[40]);
