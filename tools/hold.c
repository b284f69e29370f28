/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hold.h"

#include "tiers/retention.h"

#include <inttypes.h>
#include <time.h>

static uint64_t wall_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
}

static void pin(struct hold *hold, size_t root) {
    struct tier *tier = hold->inventory->roots->items[root].tier;
    struct problem problem = PROBLEM_NONE;
    int64_t now_ns;
    int r = tier_now(tier, &now_ns);
    if (r == 0) {
        uint64_t expiry = (uint64_t)now_ns + HOLD_EXPIRY_S * NANOSECONDS_PER_SECOND;
        r = retention_pin(tier, hold->inventory->job, hold->version->id, hold->name, expiry, ctl_nonce(), &problem);
    }
    if (r == 0)
        hold->held |= 1u << root;
    else
        ctl_warn("%s: the version cannot be pinned, it may go while it is read: %s",
                 root_label(hold->inventory->roots, root), r < 0 ? problem_text(&problem, r) : "it is going");
}

static void pin_all(struct hold *hold) {
    for (size_t i = 0; i < hold->inventory->roots->count; i++) {
        if (hold->version->present & 1u << i)
            pin(hold, i);
    }
    hold->renew_ns = wall_ns() + HOLD_EXPIRY_S / 3 * NANOSECONDS_PER_SECOND;
}

void hold_take(struct hold *hold, const struct inventory *inventory, const struct inventory_version *version) {
    *hold = (struct hold){.inventory = inventory, .version = version};
    snprintf(hold->name, sizeof hold->name, "ckptctl-%016" PRIx64, ctl_nonce());
    pin_all(hold);
}

void hold_renew(struct hold *hold) {
    if (wall_ns() >= hold->renew_ns)
        pin_all(hold);
}

void hold_release(struct hold *hold) {
    for (size_t i = 0; hold->inventory && i < hold->inventory->roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (!(hold->held & 1u << i))
            continue;
        int r = retention_unpin(hold->inventory->roots->items[i].tier, hold->inventory->job, hold->version->id,
                                hold->name, &problem);
        if (r < 0)
            ctl_warn("%s; the pin expires by itself", problem_text(&problem, r));
    }
    hold->held = 0;
}
