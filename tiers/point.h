/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Fault points: the named moments between two operations on names, in which a crash must do no harm.
 * Code that changes what stands in a tier says point_reached(tier->hook, POINT_...) after each step;
 * whoever set the hook of the tier may then die there.
 *
 *     CKPTD_CRASH_AT=<point>[:n]    at the nth time this point is reached, by SIGKILL
 *     CKPTD_CRASH_AT=any[:n]        at the nth point, whichever it is
 *
 * Both ckptd and ckptctl obey the variable and say on stderr where they die.
 */

#include "base/util.h"

enum point {
    /* A part, in the order of commit.c. */
    POINT_DIRECTORIES_MADE,
    POINT_DATA_CREATED,
    POINT_DATA_WRITTEN,
    POINT_DATA_SYNCED,
    POINT_LENGTH_COMPARED,
    POINT_DATA_RENAMED,
    POINT_DATA_DIRECTORY_SYNCED,
    POINT_MANIFEST_WRITTEN, /* and synced */
    POINT_MANIFEST_RENAMED,
    POINT_MANIFEST_DIRECTORY_SYNCED,
    /* complete.json, as tier_publish_once() does it; so are the next two. */
    POINT_COMPLETE_WRITTEN,
    POINT_COMPLETE_LINKED,
    POINT_COMPLETE_UNLINKED,
    POINT_COMPLETE_PUBLISHED,
    /* The manifest of a part that does not exist. */
    POINT_ABSENT_WRITTEN,
    POINT_ABSENT_LINKED,
    POINT_ABSENT_UNLINKED,
    POINT_ABSENT_PUBLISHED,
    /* The record of a run: claimed, and ended. */
    POINT_RUN_DIRECTORY_MADE,
    POINT_RUN_WRITTEN,
    POINT_RUN_LINKED,
    POINT_RUN_UNLINKED,
    POINT_RUN_PUBLISHED,
    POINT_RUN_END_WRITTEN,
    POINT_RUN_ENDED,
    /* Left-over temporaries. */
    POINT_TEMPORARY_REAPED,
    /* A version goes: to the trash, and out of it. */
    POINT_TRASH_TOUCHED,
    POINT_TRASH_RENAMED,
    POINT_TRASH_SYNCED,
    POINT_TRASH_PUT_BACK,
    POINT_TRASH_COMPLETE_REMOVED,
    POINT_TRASH_MANIFESTS_REMOVED,
    POINT_TRASH_FILE_REMOVED,
    POINT_TRASH_DIRECTORY_REMOVED,
    /* Pins. */
    POINT_PIN_WRITTEN,
    POINT_PIN_RENAMED,
    POINT_PIN_PUBLISHED,
    POINT_PIN_REMOVED,
    /* What cannot be read is set aside, and replaced by a good copy. */
    POINT_MANIFEST_SET_ASIDE,
    POINT_COMPLETE_SET_ASIDE,
    POINT_REPAIR_COPIED,
    POINT_COMPLETE_CONDEMNED,
    POINT_MANIFEST_CONDEMNED,
    POINT_CONDEMNED,
    POINT_COUNT,
};
const char *point_name(enum point point);

struct point_hook {
    void (*reached)(void *context, enum point point); /* on the thread that reached it; NULL: nobody listens */
    void *context;
};
static inline void point_reached(struct point_hook hook, enum point point) {
    if (hook.reached)
        hook.reached(hook.context, point);
}

/* What CKPTD_CRASH_AT says, or a hook that does nothing. */
struct point_hook point_hook_from_environment(void);
