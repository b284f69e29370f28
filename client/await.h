/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/util.h"

/* Asks again and again, with pauses, as long as the answer is CKPT_PENDING; any other is the result. CKPT_E_TIMEOUT
 * with the sentence `late`: the deadline has passed. */
int await(int (*ask)(void *context), void *context, uint64_t deadline, const char *late) MUST_CHECK;
