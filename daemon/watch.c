/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/watch.h"

#include "daemon/drain.h"

#include <errno.h>

static void watch_elapsed(struct loop_op *op);

static uint64_t patience_ms(const struct watch *watch) { return watch->lane->server->config->tier_ms; }

static void look_later(struct watch *watch) {
    struct loop *loop = watch->lane->server->loop;
    watch->seen = watch->progress;
    loop_timer(loop, &watch->timer, loop_now(loop) + patience_ms(watch) * NANOSECONDS_PER_MS, watch_elapsed);
}

static void found_stuck(struct watch *watch) {
    struct lane *lane = watch->lane;
    watch->stuck = true;
    lane->stuck_workers++;
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -ETIMEDOUT, "tier %s: no answer from %s for %llu s; a worker is stuck there",
                lane->config.name, lane->tier->root, (unsigned long long)patience_ms(watch) / 1000);
    lane_error(lane, &problem);
    if (loop_group_relieve(watch->group) < 0)
        log_warning(lane->server->log, "tier %s stands still: all its workers are stuck", lane->config.name);
    watch->ops->stuck(watch);
}

static void watch_elapsed(struct loop_op *op) {
    struct watch *watch = CONTAINER_OF(op, struct watch, timer);
    if (watch->over) {
        if (watch->stuck)
            lane_pump(watch->lane);
        watch->ops->ended(watch);
        return;
    }
    if (watch->ops->waits(watch) && watch->seen == watch->progress && !watch->stuck) {
        found_stuck(watch);
    } else if (watch->seen != watch->progress && watch->stuck) {
        watch->stuck = false;
        watch->lane->stuck_workers--;
        lane_pump(watch->lane);
    }
    if (!watch->over)
        look_later(watch);
}

void watch_start(struct watch *watch) {
    watch->seen = watch->progress;
    if (!loop_op_busy(&watch->timer))
        look_later(watch);
}

void watch_end(struct watch *watch) {
    struct loop *loop = watch->lane->server->loop;
    watch->over = true;
    if (watch->stuck)
        watch->lane->stuck_workers--;
    if (loop_op_busy(&watch->timer))
        loop_cancel(loop, &watch->timer);
    else
        loop_post(loop, &watch->timer, 0, watch_elapsed);
}
