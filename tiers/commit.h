/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Commit: how a part comes to exist in a tier. One function, in the order that must hold:
 *
 *   data written to a temporary name (by the drain, before) -> synced -> length compared -> renamed
 *   -> directory synced -> manifest written to a temporary name, synced -> renamed -> directory
 *   synced -> only then reported
 *
 * The directories above were made and synced before the data was created (commit_begin). Each
 * arrow is a named fault point (point.h). After any sync or close error nothing is retried in place: the
 * caller rewrites under a new name. A file named by a manifest is never opened for writing.
 *
 * A part that is committed stays as it is: a second commit of the same rank is refused (-EEXIST),
 * for between its two renames the old manifest would name the new data. Only an `absent` manifest
 * is replaced (a skipped save that was retried), and one that cannot be read is set aside as .bad.
 */

#include "proto/manifest.h"
#include "tiers/layout.h"
#include "tiers/tier.h"

struct commit {
    struct tier *tier;
    char job[256]; /* escaped: the directory's name */
    struct version_id version;
    uint32_t rank;
    uint64_t nonce; /* makes temporary names unique */
    char temporary[TIER_PATH_MAX];
    struct tier_file file; /* open for writing from commit_begin to commit_finish */
    bool open;
};

/* Makes the version's directories durable and creates the temporary data file (preallocated to
 * `size`, rounded up). Blocking. On failure nothing is left. */
int commit_begin(struct commit *commit, struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                 uint64_t nonce, uint64_t size, struct problem *problem) MUST_CHECK;
/* All bytes are written: truncates to the manifest's data_length, then the order above. Blocking.
 * On failure the temporary is unlinked where possible and the commit is over. */
int commit_finish(struct commit *commit, const struct manifest *manifest, struct problem *problem) MUST_CHECK;
/* Gives up: closes and unlinks the temporary. Blocking. */
void commit_abandon(struct commit *commit);

/* Commits a manifest that says `absent` (no data file). Blocking; idempotent: a manifest that is
 * there, absent or not, stays. */
int commit_absent(struct tier *tier, const char *job, struct version_id version, const struct manifest_summary *summary,
                  uint64_t nonce, struct problem *problem) MUST_CHECK;

/* Lists the version; if every rank's manifest is there with its data file at full length, none
 * absent, builds complete.json and publishes it once. 0: complete (also if it was before);
 * COMMIT_E_INCOMPLETE: parts are missing; COMMIT_E_ABSENT: a part is declared absent (the version
 * is trash); -EINVAL: overlap, gap or disagreement, in problem; -EBADMSG: a manifest is damaged;
 * other negative errno: the tier. Reads little while parts are missing, so it may be called often. */
enum { COMMIT_E_INCOMPLETE = 1, COMMIT_E_ABSENT = 2 };
int commit_complete(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                    struct problem *problem) MUST_CHECK;
/* Has somebody else completed it? 0, with the same promise: what was found is good and will stay;
 * COMMIT_E_INCOMPLETE; negative errno. Blocking. */
int commit_completed(struct tier *tier, const char *job, struct version_id version, struct problem *problem) MUST_CHECK;
