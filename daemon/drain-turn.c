/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which drains of a lane go on: a few at a time, in order; urgent ones before all others; of one job not more versions
 * than the backlog allows wait for their turn.
 */
#include "daemon/drain-state.h"

#define DRAIN_ACTIVE_MIN 2 /* drains of one lane at a time, at least */

static uint32_t active_limit(const struct lane *lane) {
    return lane->config.workers > DRAIN_ACTIVE_MIN ? lane->config.workers : DRAIN_ACTIVE_MIN;
}

static bool only_waiting(struct version *version, uint32_t lane_index) {
    struct part *part;
    TAILQ_FOREACH(part, &version->parts, link) {
        struct drain *drain = part->drains[lane_index];
        if ((part->committed_lanes & 1u << lane_index) || part->windowed || (drain && drain->state != DRAIN_WAITING))
            return false;
    }
    return true;
}

static bool waits(struct version *version, uint32_t lane_index, bool *ret_urgent) {
    struct part *part;
    bool found = false;
    TAILQ_FOREACH(part, &version->parts, link)
    if (part->drains[lane_index] && part->drains[lane_index]->state == DRAIN_WAITING) {
        found = true;
        *ret_urgent = *ret_urgent || part->urgent;
    }
    return found;
}

/* More versions of one job wait than allowed: the oldest that has not begun goes, all its parts together.
 * Not the newest, though a slower rank's part of an older one may come after it. */
void drain_enforce_backlog(struct lane *lane, uint32_t index, struct part *arrived) {
    uint32_t versions = 0;
    struct version *version, *newest = NULL, *victim = NULL;
    TAILQ_FOREACH(version, &arrived->version->job->versions, link) {
        bool urgent = false;
        if (!waits(version, index, &urgent))
            continue;
        versions++;
        newest = version;
        if (!victim && version != arrived->version && !urgent && only_waiting(version, index))
            victim = version;
    }
    if (versions <= lane->config.backlog || !victim || victim == newest)
        return;
    struct part *part;
    version_superseded(victim, index);
    TAILQ_FOREACH(part, &victim->parts, link)
    if (part->drains[index])
        drain_supersede(part->drains[index]);
}

void drain_press(struct drain *drain, bool presses) {
    drain->lane->urgent += presses ? 1 : -1u;
    lane_pump(drain->lane);
}

/* Parts that are durable elsewhere may have left memory: reading them back takes room, which the others'
 * drains make. So these do not wait for the turns of those. Nor does anybody for one whose client does
 * nothing: it may never go on. */
static bool has_turn(const struct drain *drain) {
    const struct lane *lane = drain->lane;
    const struct drain *other;
    uint32_t before = 0;
    TAILQ_FOREACH(other, &lane->active, link)
    before += (drain->part->durable || !other->part->durable) && !other->part->stalled;
    return before < active_limit(lane);
}

/* An urgent drain begins whatever else is active: those that are write nothing as long as it waits. */
static bool may_begin(const struct drain *drain) {
    bool room = has_turn(drain) || drain->part->urgent;
    return room && !lane_silent(drain->lane) && drain->part->captured && !part_pointless(drain->part);
}

void lane_pump(struct lane *lane) {
    struct drain *drain, *next;
    for (drain = TAILQ_FIRST(&lane->waiting); drain; drain = next) {
        next = TAILQ_NEXT(drain, link);
        if (may_begin(drain))
            drain_begin(drain);
    }
    TAILQ_FOREACH(drain, &lane->active, link)
    if (drain->state == DRAIN_WRITING)
        drain_write(drain);
}
