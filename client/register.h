/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Telling the daemon what is protected, when that has changed or the daemon is a new one. */

#include "client/handle.h"

/* The session is up and no capture runs. Afterwards a SAVE with so much inline state can be sent:
 * areas announced, set registered, buffers large enough, missed steps told. */
int register_ensure(struct ckpt *c, uint64_t state_size) MUST_CHECK;
