/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The io_uring loop; for loop_new() only. -EOPNOTSUPP: not built in, or the kernel forbids it. */

#include "base/loop.h"

int loop_uring_new(struct loop **ret_loop) MUST_CHECK;
