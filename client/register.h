/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Telling the daemon what is protected, when that has changed or the daemon is a new one. */

#include "client/handle.h"

/* The session is up and no capture runs. Afterwards a SAVE with so much inline state can be sent:
 * areas announced, set registered, buffers large enough, missed steps told. */
int register_ensure(struct ckpt *c, uint64_t state_size) MUST_CHECK;
/* The daemon closes all device memory that it was told of, so that it can be freed. No capture runs. */
int register_release_devices(struct ckpt *c) MUST_CHECK;
/* Frees the buffers in device memory. */
void register_free_eager(struct ckpt *c);
