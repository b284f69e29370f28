/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Crews: jobs whose ranks are processes that save, ask what is durable, and look through everything
 * that is listed, while somebody kills them and the daemon. Together they are the model of what was
 * acknowledged: the newest version of each crew that was ever reported durable at a level. The bytes of
 * a version follow from crew, rank, generation and step, so whoever reads one knows what it must be.
 *
 * What a crew checks by itself, whenever it opens and in every round (crews_round()):
 *   - the newest version is not older than one that was reported durable;
 *   - the newest versions that are listed, and any of the others, are restored, and each byte of each
 *     rank is right.
 * crews_verify() checks all the files, without a daemon.
 */

#include "tests/functional/support.h"
#include "tiers/catalog.h"

enum { CREWS = 2, CREW_RANKS_MAX = 2 };

/* A version as one number that orders like versions: never 0. */
uint64_t crew_pack(struct version_id id);
struct version_id crew_unpack(uint64_t packed);

/* Before any process is started. */
void crews_init(void);
const char *crew_job(unsigned crew);
uint32_t crew_world(unsigned crew);
/* A new run of the crew; none is running. */
void crew_start(unsigned crew);
/* SIGKILL to all its ranks. */
void crew_kill(unsigned crew);
/* Its ranks close their handles and end by themselves. */
void crew_leave(unsigned crew);
/* Newest version (packed) that was reported durable at the level, or deeper; 0: none. */
uint64_t crew_durable(unsigned crew, uint32_t level);
/* How often any rank has looked through all versions, and how many it has compared. */
uint64_t crews_checks(void), crews_compared(void);
/* From now on they leave out each step that no daemon takes, instead of a few, and ask for nothing else. */
void crews_skip(bool skip);
/* A new round: every rank looks through all versions as soon as it can. */
void crews_round(void);
/* All ranks that run have looked through them in this round. */
bool crews_have_checked(void);
/* The running generation and next step of the crew, as far as rank 0 is. */
struct version_id crew_next(unsigned crew);
/* They are dead who were not killed: something was wrong, and they have said what. */
void crews_reap(void);

/* No daemon runs: every complete version in both tiers is whole, and what was reported durable at a level is there, or
 * newer. `except` (packed; 0: none) was damaged on purpose in the tier local. Returns how many versions it has read. */
unsigned crews_verify(struct tier *local, struct tier *parallel, uint64_t except);
/* Something that was reported durable is in neither tier, nor anything newer, or it cannot be looked for. */
bool crews_lost(struct tier *local, struct tier *parallel);
