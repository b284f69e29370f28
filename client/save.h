/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Saving and fencing, for the rest of the library; the functions of the API are in ckpt.h. */

#include "client/handle.h"

/* ckpt_fence without its checks of the handle. */
int save_fence(struct ckpt *c, uint64_t timeout_ms);
