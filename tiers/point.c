/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/point.h"

#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

/*
 * The names, and the one hook that a program may have: to die. It writes where before it does, with one
 * write(2), so that a test can count which points it has tried.
 */

static const char *const names[POINT_COUNT] = {
    [POINT_DIRECTORIES_MADE] = "directories-made",
    [POINT_DATA_CREATED] = "data-created",
    [POINT_DATA_WRITTEN] = "data-written",
    [POINT_DATA_SYNCED] = "data-synced",
    [POINT_LENGTH_COMPARED] = "length-compared",
    [POINT_DATA_RENAMED] = "data-renamed",
    [POINT_DATA_DIRECTORY_SYNCED] = "data-directory-synced",
    [POINT_MANIFEST_WRITTEN] = "manifest-written",
    [POINT_MANIFEST_RENAMED] = "manifest-renamed",
    [POINT_MANIFEST_DIRECTORY_SYNCED] = "manifest-directory-synced",
    [POINT_COMPLETE_WRITTEN] = "complete-written",
    [POINT_COMPLETE_LINKED] = "complete-linked",
    [POINT_COMPLETE_UNLINKED] = "complete-unlinked",
    [POINT_COMPLETE_PUBLISHED] = "complete-published",
    [POINT_ABSENT_WRITTEN] = "absent-written",
    [POINT_ABSENT_LINKED] = "absent-linked",
    [POINT_ABSENT_UNLINKED] = "absent-unlinked",
    [POINT_ABSENT_PUBLISHED] = "absent-published",
    [POINT_RUN_DIRECTORY_MADE] = "run-directory-made",
    [POINT_RUN_WRITTEN] = "run-written",
    [POINT_RUN_LINKED] = "run-linked",
    [POINT_RUN_UNLINKED] = "run-unlinked",
    [POINT_RUN_PUBLISHED] = "run-published",
    [POINT_RUN_END_WRITTEN] = "run-end-written",
    [POINT_RUN_ENDED] = "run-ended",
    [POINT_TEMPORARY_REAPED] = "temporary-reaped",
    [POINT_TRASH_TOUCHED] = "trash-touched",
    [POINT_TRASH_RENAMED] = "trash-renamed",
    [POINT_TRASH_SYNCED] = "trash-synced",
    [POINT_TRASH_PUT_BACK] = "trash-put-back",
    [POINT_TRASH_COMPLETE_REMOVED] = "trash-complete-removed",
    [POINT_TRASH_MANIFESTS_REMOVED] = "trash-manifests-removed",
    [POINT_TRASH_FILE_REMOVED] = "trash-file-removed",
    [POINT_TRASH_DIRECTORY_REMOVED] = "trash-directory-removed",
    [POINT_PIN_WRITTEN] = "pin-written",
    [POINT_PIN_RENAMED] = "pin-renamed",
    [POINT_PIN_PUBLISHED] = "pin-published",
    [POINT_PIN_REMOVED] = "pin-removed",
    [POINT_MANIFEST_SET_ASIDE] = "manifest-set-aside",
    [POINT_COMPLETE_SET_ASIDE] = "complete-set-aside",
    [POINT_REPAIR_COPIED] = "repair-copied",
    [POINT_COMPLETE_CONDEMNED] = "complete-condemned",
    [POINT_MANIFEST_CONDEMNED] = "manifest-condemned",
    [POINT_CONDEMNED] = "condemned",
};

const char *point_name(enum point point) {
    assert(point < POINT_COUNT);
    return names[point];
}

static void crash_here(void *context, enum point point) {
    static _Atomic unsigned long reached;
    const char *where = context, *name = point_name(point);
    size_t length = strcspn(where, ":");
    bool any = length == 3 && strncmp(where, "any", 3) == 0;
    if (!any && (strlen(name) != length || strncmp(where, name, length) != 0))
        return;
    unsigned long nth = where[length] ? strtoul(where + length + 1, NULL, 10) : 1;
    if (atomic_fetch_add(&reached, 1) + 1 < nth)
        return;
    char line[64];
    int size = snprintf(line, sizeof line, "crash at %s\n", name);
    (void)!write(STDERR_FILENO, line, (size_t)size);
    kill(getpid(), SIGKILL);
}

struct point_hook point_hook_from_environment(void) {
    char *where = getenv("CKPTD_CRASH_AT");
    return where && *where ? (struct point_hook){crash_here, where} : (struct point_hook){0};
}
