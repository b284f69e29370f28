/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Deadlines: monotonic nanoseconds. */

#include "base/util.h"
#include "client/ckpt.h"

#include <time.h>

static inline uint64_t clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
}

/* A timeout of the API in ms: 0 means default_ms, CKPT_NO_WAIT means none. */
static inline uint64_t clock_timeout_ms(uint64_t timeout_ms, uint64_t default_ms) {
    if (timeout_ms == CKPT_NO_WAIT)
        return 0;
    return timeout_ms == CKPT_DEFAULT_TIMEOUT ? default_ms : timeout_ms;
}

/* So many ms from now; very long ones never come. */
static inline uint64_t clock_deadline(uint64_t milliseconds) {
    uint64_t nanoseconds, deadline;
    if (mul_overflows(milliseconds, NANOSECONDS_PER_MS, &nanoseconds) ||
        add_overflows(clock_now(), nanoseconds, &deadline))
        return UINT64_MAX;
    return deadline;
}

/* Whole ms until the deadline, rounded up; 0 when it has passed. At most INT32_MAX, for poll(2). */
static inline int clock_left_ms(uint64_t deadline) {
    uint64_t now = clock_now();
    if (now >= deadline)
        return 0;
    uint64_t left = (deadline - now - 1) / NANOSECONDS_PER_MS + 1;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}
