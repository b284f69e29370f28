/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/pin.h"

#include "tiers/retention.h"

#include <errno.h>
#include <inttypes.h>

/*
 * A pin keeps a version from being deleted: for good (an operator's), or until it expires (that of a
 * running restore or export, whose process may die without unpinning). The file holds the expiry in
 * nanoseconds since 1970 as one decimal line, 0 for never. It is compared with the file system's
 * clock, which is the one that all nodes share. When in doubt, a pin holds: also if it had expired
 * before it was made, which one flipped bit can do to the 0 that says never.
 */

#define PIN_NAME_MAX 128
#define PIN_FILE_MAX 32

static bool pin_name_is_good(const char *name) {
    size_t length = strlen(name);
    return length > 0 && length <= PIN_NAME_MAX &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == length;
}

static bool pin_expired(struct tier *tier, const char *path, int64_t now_ns) {
    CLEANUP(freep) char *text = NULL;
    size_t size;
    struct tier_entry entry;
    int r = tier_read_file(tier, path, PIN_FILE_MAX, &text, &size);
    if (r == 0)
        r = tier_stat(tier, path, &entry);
    if (r == TIER_E_ABSENT)
        return true;
    if (r || size < 2 || text[size - 1] != '\n')
        return false;
    text[size - 1] = '\0';
    uint64_t expiry_ns;
    if (!layout_parse_number(text, &expiry_ns))
        return false;
    return expiry_ns <= INT64_MAX && (int64_t)expiry_ns >= entry.mtime_ns && (int64_t)expiry_ns <= now_ns;
}

bool pin_holds(struct tier *tier, const char *directory, const struct tier_entries *entries) {
    int64_t now_ns = 0;
    for (size_t i = 0; i < entries->count; i++) {
        const char *name = entries->items[i].name;
        if (strncmp(name, "pin-", 4) != 0)
            continue;
        char path[TIER_PATH_MAX];
        if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path)
            return true;
        if (now_ns == 0 && tier_now(tier, &now_ns) < 0)
            return true;
        if (!pin_expired(tier, path, now_ns))
            return true;
    }
    return false;
}

static int pin_path(const char *job, struct version_id version, const char *name, char ret_path[TIER_PATH_MAX],
                    char ret_escaped[256], struct problem *problem) {
    char file[PIN_NAME_MAX + 8];
    if (!pin_name_is_good(name))
        return problem_set(problem, -EINVAL, "'%.200s' is no name for a pin: 1 to %d of A-Z a-z 0-9 . _ -", name,
                           PIN_NAME_MAX);
    int r = job_escape(job, ret_escaped, problem);
    if (r)
        return r;
    snprintf(file, sizeof file, "pin-%s", name);
    layout_file(ret_escaped, version, file, ret_path);
    return 0;
}

int retention_pin(struct tier *tier, const char *job, struct version_id version, const char *name, uint64_t expiry_ns,
                  uint64_t nonce, struct problem *problem) {
    char path[TIER_PATH_MAX], temporary[TIER_PATH_MAX], directory[TIER_PATH_MAX], escaped[256], text[PIN_FILE_MAX];
    int r = pin_path(job, version, name, path, escaped, problem);
    if (r)
        return r;
    layout_version(escaped, version, directory);
    layout_temporary(escaped, version, 0, nonce, "pin", temporary);
    struct tier_entry entry;
    r = tier_stat(tier, directory, &entry);
    if (r == TIER_E_ABSENT)
        return r;
    if (r)
        return tier_problem(problem, tier, r, "examine", directory);
    int length = snprintf(text, sizeof text, "%" PRIu64 "\n", (uint64_t)min_u64(expiry_ns, INT64_MAX));
    r = tier_publish(tier, path, temporary, text, (size_t)length, POINT_PIN_WRITTEN);
    if (r == -ENOENT) /* it went to the trash meanwhile */
        return TIER_E_ABSENT;
    return r ? tier_problem(problem, tier, r, "make the pin", path) : 0;
}

int retention_unpin(struct tier *tier, const char *job, struct version_id version, const char *name,
                    struct problem *problem) {
    char path[TIER_PATH_MAX], escaped[256];
    int r = pin_path(job, version, name, path, escaped, problem);
    if (r)
        return r;
    r = tier_unlink(tier, path);
    if (r == 0)
        point_reached(tier->hook, POINT_PIN_REMOVED);
    return r < 0 ? tier_problem(problem, tier, r, "remove the pin", path) : r;
}

int retention_pinned(struct tier *tier, const char *job, struct version_id version, bool *ret_pinned) {
    char directory[TIER_PATH_MAX], escaped[256];
    int r = job_escape(job, escaped, NULL);
    if (r)
        return r;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    layout_version(escaped, version, directory);
    r = tier_list(tier, directory, &entries);
    if (r)
        return r;
    *ret_pinned = pin_holds(tier, directory, &entries);
    return 0;
}
