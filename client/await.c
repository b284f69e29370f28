/* SPDX-License-Identifier: Apache-2.0 */
#include "client/await.h"

#include "client/clock.h"
#include "client/errors.h"

/*
 * What a device does, it tells nobody: a driver's own waits have no deadline, so the library looks. Soon at first,
 * since most copies are short; then seldom, for those that are not.
 */

#define AWAIT_PAUSE_MIN_NS 5000
#define AWAIT_PAUSE_MAX_NS 200000

int await(int (*ask)(void *context), void *context, uint64_t deadline, const char *late) {
    uint64_t pause_ns = AWAIT_PAUSE_MIN_NS;
    for (;;) {
        int r = ask(context);
        if (r != CKPT_PENDING)
            return r;
        if (clock_now() >= deadline)
            return error_set(CKPT_E_TIMEOUT, "%s", late);
        struct timespec pause = {.tv_nsec = (long)pause_ns};
        nanosleep(&pause, NULL);
        pause_ns = min_u64(2 * pause_ns, AWAIT_PAUSE_MAX_NS);
    }
}
