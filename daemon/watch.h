/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A watch looks whether a tier still answers somebody. No progress for the configured time, while something is with
 * the tier, means a worker that is stuck there: it is left alone with its buffers (it may come back), and the lane
 * gets another. Until there is progress again, or the watch ends, the lane counts as silent.
 */

#include "daemon/lane.h"

struct watch;
struct watch_ops {
    bool (*waits)(const struct watch *watch); /* is something with the tier? */
    void (*stuck)(const struct watch *watch); /* it does not come back */
};

/* Embedded in its owner, who counts the progress up. */
struct watch {
    const struct watch_ops *ops;
    struct lane *lane;
    uint64_t progress, seen;
    bool stuck, over;
    struct loop_op timer; /* when it is busy after watch_end(), it ends soon */
};

/* May have been started before. */
void watch_start(struct watch *watch);
void watch_end(struct watch *watch);
