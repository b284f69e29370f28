/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planted bugs: does the simulator find what it is there for? Each is named on the command line; a
 * test looks for it. Those of disks stand where disks are made (sim_bug() in sim-disk.c and
 * sim-tier.c), that of a trainer in sim-trainer.c; those of the daemon are here, in functions that
 * the linker puts before the daemon's own.
 *
 *   sync            a file's sync does nothing
 *   directory-sync  nor does the sync of a version's directory
 *   parent-sync     nor that of the directories above
 *   link            link(2) replaces the name that is there
 *   rename          a rename makes a copy that nobody has synced
 *   listing         a shared directory's newest name is sometimes missing from its listing
 *   short-write     a write stores half and says all
 *   early-change    a trainer changes its memory before its fence has ended
 *   torn-capture    a capture leaves a part of its chunk as it was, and digests that
 *   lost-room       a reservation of the pool is not given back
 *   lost-news       waiting clients are not told of a change
 */
#include "daemon/session.h"
#include "tests/sim/sim.h"

void __real_pool_release(struct pool *pool, uint64_t bytes);
void __wrap_pool_release(struct pool *pool, uint64_t bytes);
void __real_session_job_changed(struct session *session);
void __wrap_session_job_changed(struct session *session);

void __wrap_pool_release(struct pool *pool, uint64_t bytes) {
    if (!sim_bug("lost-room") || !sim_chance(1, 20))
        __real_pool_release(pool, bytes);
}

void __wrap_session_job_changed(struct session *session) {
    if (!sim_bug("lost-news") || !sim_chance(1, 4))
        __real_session_job_changed(session);
}
