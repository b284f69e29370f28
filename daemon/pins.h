/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What of the pool is registered with the driver ("pinned"), so that copies run at full speed and behind the
 * back of who queues them. One registration for each segment, made in some device's context and of use to
 * all; it is undone before that context goes, when no device has a copy under way to or from the pool.
 *
 * To register is slow, and holds up others in the driver. So a device that is in use and has nothing to do
 * registers what the pool has prefaulted, a segment at a time; what a capture needs before that, it
 * registers by itself.
 */

#include "daemon/device.h"

struct pins;

int pins_new(struct pins **ret_pins) MUST_CHECK;
void pins_free(struct pins *pins);

/* ---- on a device's thread, in its context ---- */

/* Copies between the device and the pool are about to be queued. False: not now, a context is about to go. */
bool pins_use(struct pins *pins) MUST_CHECK;
/* They are over. */
void pins_unuse(struct pins *pins);
/* Registers a segment, if nobody has; where that fails copies are slower, no more. */
void pins_make(struct device *device, uint32_t segment, void *data, uint64_t size);
/* Before the context goes. False: it must stay for now, copies of others are under way. */
bool pins_drop(struct device *device) MUST_CHECK;
/* The context is spoiled, and all that was registered in it gone. */
void pins_forget(struct device *device);

/* ---- on the control thread ---- */

/* Perhaps there is something to pin, or time for it. */
void pins_look(struct device *device);
/* Registrations were undone: what was pinned for all may not be any more. */
void pins_look_again(struct devices *devices);
