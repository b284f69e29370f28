/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The sentence behind ckpt_strerror_last(): one per thread. */

#include "base/problem.h"
#include "client/ckpt.h"

/* Keeps the sentence for this thread (cut to fit) and returns code, which is a CKPT_... */
int error_set(int code, const char *format, ...) PRINTF_LIKE(2, 3);
/* The same from a function of proto or base, which returned a negative errno and maybe a problem;
 * `what` begins the sentence. Returns the CKPT_E_... that fits. */
int error_from(int code, const struct problem *problem, const char *what);
void error_clear(void);
/* The sentence of this thread; stays the thread's. */
const char *error_last(void);
/* "CKPT_E_TIMEOUT"; "CKPT_E_UNKNOWN" for what is not a result. */
const char *error_name(int code);
/* Whether a number from the daemon is a negative result of the API. */
bool error_known(int code);
