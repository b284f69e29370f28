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
    bool (*waits)(struct watch *watch); /* is something with the tier? */
    void (*stuck)(struct watch *watch); /* it does not come back; the lane is silent from now on */
    void (*ended)(struct watch *watch); /* from the loop, after watch_end(): the owner may be freed */
};

/* Embedded in its owner, who counts the progress up. */
struct watch {
    const struct watch_ops *ops;
    struct lane *lane;
    struct loop_group *group; /* whose worker it is that gets stuck */
    uint64_t progress, seen;
    bool stuck, over;
    struct loop_op timer;
};

/* May have been started before. */
void watch_start(struct watch *watch);
/* Once, whether it was started or not. */
void watch_end(struct watch *watch);
