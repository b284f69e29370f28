/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Copies under way. A flight is what one job has queued on its device's stream; the job leaves the device's
 * thread meanwhile, so that the next one can queue its own behind it: while a copy engine works on one
 * flight it has the next at hand, and never more than FLIGHTS_MAX. They land in the order of their departure.
 *
 * All on the device's thread, in its context.
 */

#include "daemon/device.h"

enum { FLIGHT_E_AWAY = 1 };

/* Waits until there is room for one more. */
int flight_room(struct device *device, struct problem *problem) MUST_CHECK;
/* What was queued on the stream since the last one began is a flight. */
int flight_begin(struct device *device, struct flight *ret_flight, struct problem *problem) MUST_CHECK;
/* Waits until it has landed. FLIGHT_E_AWAY: not yet, and other jobs want the thread. */
int flight_await(struct device *device, const struct flight *flight, struct problem *problem) MUST_CHECK;

/* The context is new; is about to go. */
CUresult flights_open(struct device *device) MUST_CHECK;
void flights_close(struct device *device);
