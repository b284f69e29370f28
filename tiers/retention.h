/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Which versions of a job may go, and how they go. A copy is deleted only after a newer version is
 * complete in the same tier; a run's resume version only after that run's first complete one;
 * incomplete versions older than a complete one, and those of dead generations, are trash.
 * Deletion renames the directory to trash, looks inside for pins, renames back if there are any,
 * and unlinks after a grace period. Blocking.
 */

#include "tiers/catalog.h"

struct retention_policy {
    uint32_t keep;           /* newest complete versions to keep, >= 1 */
    uint64_t keep_every;     /* also keep versions whose step is a multiple; 0: none */
    uint64_t trash_grace_ms; /* between the rename and the unlinking */
};

/* What the caller knows and the tier's files do not say. `busy`: versions that this daemon still
 * works on, and, for a tier that holds no run files (all but the deciding one), the version that the
 * current run resumed from: never touched. `elsewhere`: versions complete in a deeper tier. The tier
 * of one node may never hold all parts of a version; here they count as complete ones. */
struct retention_known {
    const struct version_id *busy;
    size_t busy_count;
    const struct version_id *elsewhere;
    size_t elsewhere_count;
};

/* Chooses, from a scan: pure. `current` is the running generation (0: none is running), whose
 * incomplete versions newer than its newest complete one are live. *ret_victims is allocated. */
int retention_choose(const struct catalog *catalog, const struct retention_policy *policy, uint64_t current,
                     struct retention_known known, struct version_id **ret_victims, size_t *ret_count) MUST_CHECK;

struct retention_swept {
    uint32_t removed;             /* versions renamed to trash */
    struct catalog_damage damage; /* what the scan saw */
};

/* Scan, choose, rename to trash, and empty trash directories older than the grace (by the file
 * system's clock; from now on, if that was set back meanwhile); directories of generations older
 * than `current` that hold no version any more go too. */
int retention_sweep(struct tier *tier, const char *job, const struct retention_policy *policy, uint64_t current,
                    struct retention_known known, uint64_t nonce, struct retention_swept *ret_swept,
                    struct problem *problem) MUST_CHECK;

/* Removes one version now (ckptctl rm): -EBUSY if pinned. */
int retention_remove(struct tier *tier, const char *job, struct version_id version, uint64_t nonce,
                     struct problem *problem) MUST_CHECK;

/* Unlinks temporaries of this rank in all versions of generations <= `generation` (the daemon that
 * serves the rank calls it at open), and of all ranks in generations < `generation`. */
int retention_reap(struct tier *tier, const char *job, uint64_t generation, uint32_t rank, uint32_t *ret_reaped,
                   struct problem *problem) MUST_CHECK;

/* A pin is the file pin-<name> in the version; `expiry_ns` by the file system's clock (tier_now), 0: until unpinned.
 * Names are 1 to 128 of [A-Za-z0-9._-]. Pinning again changes the expiry. TIER_E_ABSENT: no such version, or pin. */
int retention_pin(struct tier *tier, const char *job, struct version_id version, const char *name, uint64_t expiry_ns,
                  uint64_t nonce, struct problem *problem) MUST_CHECK;
int retention_unpin(struct tier *tier, const char *job, struct version_id version, const char *name,
                    struct problem *problem) MUST_CHECK;
/* True if any pin that has not expired is in the version. */
int retention_pinned(struct tier *tier, const char *job, struct version_id version, bool *ret_pinned) MUST_CHECK;
