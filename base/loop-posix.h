/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The loop for kernels and containers without io_uring; for loop_new() only. */

#include "base/loop.h"

int loop_posix_new(struct loop **ret_loop) MUST_CHECK;
