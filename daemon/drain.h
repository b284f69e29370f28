/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A drain moves one part into one lane:
 *
 *   WAITING --> BEGINNING (work: directories, temporary) --> WRITING (chunks through the loop, several
 *   in flight, in the order of capture) --> FINISHING (work: commit_finish) --> over
 *
 * It starts with the first captured chunk, and finishes only if the capture did. After an error it
 * starts again under a new name, a few times with pauses, then it fails and says so.
 */

#include "daemon/part.h"

struct drain;

/* Queues a drain of the part into its job's lane `index`. */
int drain_new(struct part *part, uint32_t index) MUST_CHECK;
/* The part has more captured chunks, or its capture ended (either way). */
void drain_advance(struct drain *drain);
/* Its part is urgent: the others wait for it from now on, or no more. */
void drain_press(struct drain *drain, bool presses);
/* Starts what may start in this lane, and continues what waits for it. */
void lane_pump(struct lane *lane);
