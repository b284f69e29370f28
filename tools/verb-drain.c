/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `drain`: is everything where it shall be? With a daemon it asks, and with --wait asks until
 * nothing is pending. Without one it compares the tiers, and with --wait brings complete versions of
 * the nearest root that the deepest lacks there: every chunk verified, committed in the same order
 * as the daemon does.
 */
#include "tiers/commit.h"
#include "tools/daemon.h"
#include "tools/hold.h"
#include "tools/table.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <time.h>

#define POLL_MS 200
#define BAR_WIDTH 40

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / NANOSECONDS_PER_MS;
}

/* On a terminal: "[#####.....] 3.1 GiB to go", in place. */
static void draw(uint64_t pending, uint64_t most, bool last) {
    char bar[BAR_WIDTH + 1], bytes[FORMAT_MAX];
    if (!isatty(STDERR_FILENO))
        return;
    size_t done = most ? (size_t)((double)(most - pending) / (double)most * BAR_WIDTH) : BAR_WIDTH;
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', done);
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r[%s] %s to go\033[K%s", bar, format_bytes(pending, bytes), last ? "\n" : "");
}

static int report(struct ctl *ctl, uint64_t pending, uint64_t count, const char *unit) {
    char bytes[FORMAT_MAX];
    int status = count ? STATUS_BUSY : STATUS_OK;
    if (ctl->json) {
        int r = ctl_print_json(json_pack("{s:b, s:I, s:I}", "drained", count == 0, "pending_bytes", (json_int_t)pending,
                                         "pending", (json_int_t)count));
        return r == STATUS_OK ? status : r;
    }
    if (count)
        printf("%s to go (%" PRIu64 " %s)\n", format_bytes(pending, bytes), count, unit);
    else
        puts("drained");
    return status;
}

/* ---- with a daemon ---- */

/* What is pending, as the tiers and the versions in flight say. */
static void sum_pending(json_t *status, const char *job, uint64_t *ret_bytes, uint64_t *ret_parts) {
    size_t i;
    json_t *item;
    *ret_bytes = *ret_parts = 0;
    json_array_foreach(json_list(status, "tiers"), i, item) {
        const char *of = json_text(item, "job", "");
        if (job && of[0] && strcmp(of, job) != 0)
            continue;
        *ret_bytes += json_number(item, "pending_bytes");
        *ret_parts += json_number(item, "pending_parts");
    }
    json_array_foreach(json_list(status, "sessions"), i, item) {
        if (!job || strcmp(json_text(item, "job", ""), job) == 0)
            *ret_parts += json_flag(item, "capturing");
    }
}

static int drain_by_daemon(struct ctl *ctl, struct connection *connection) {
    const char *job = ctl->word_count ? ctl->words[0] : NULL;
    uint64_t deadline = ctl->timeout_ms ? now_ms() + ctl->timeout_ms : UINT64_MAX;
    uint64_t pending, parts, most = 0;
    for (;;) {
        json_t *status = NULL;
        struct problem problem = PROBLEM_NONE;
        int r = daemon_ask_status(connection, &status, &problem);
        if (r != 0)
            return daemon_fail(r, &problem);
        sum_pending(status, job, &pending, &parts);
        json_decref(status);
        most = max_u64(most, pending);
        if (!ctl->wait || (!pending && !parts) || now_ms() >= deadline)
            break;
        if (ctl_interrupted())
            return ctl_fail(STATUS_STORAGE, "interrupted");
        draw(pending, most, false);
        poll(NULL, 0, POLL_MS);
    }
    if (ctl->wait)
        draw(pending, most, true);
    return report(ctl, pending, parts ? parts : pending > 0, "parts");
}

/* ---- without ---- */

struct draining {
    struct ctl *ctl;
    const struct inventory *inventory;
    uint64_t pending, versions; /* missing in the deepest root */
};

static bool is_missing(const struct inventory *inventory, const struct inventory_version *version) {
    uint32_t deepest = 1u << (inventory->roots->count - 1);
    return version->complete && !(version->complete & deepest);
}

/* One part: not again if the deepest root has it, from whichever root has it undamaged. */
static int drain_part(struct draining *draining, struct version_id id, uint32_t rank) {
    const struct roots *roots = draining->inventory->roots;
    struct tier *to = roots->items[roots->count - 1].tier;
    CLEANUP(manifest_deinit) struct manifest there = {0};
    if (catalog_read_manifest(to, draining->inventory->job, id, rank, &there, NULL) == 0 && !there.summary.absent)
        return STATUS_OK;
    struct problem last = PROBLEM_NONE;
    int r = TIER_E_ABSENT;
    for (size_t i = 0; r != 0 && i + 1 < roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        r = catalog_repair_part(to, roots->items[i].tier, draining->inventory->job, id, rank, ctl_nonce(), &problem);
        if (r < 0)
            last = problem;
        if (r < 0 && r != -EBADMSG)
            break;
    }
    if (r == 0)
        return STATUS_OK;
    return ctl_fail(r == TIER_E_ABSENT ? STATUS_PROBLEM : ctl_status(r),
                    "rank %" PRIu32 " of %" PRIu64 "/%" PRIu64 ": %s", rank, id.generation, id.step,
                    r == TIER_E_ABSENT && !last.text[0] ? "no root has the part" : problem_text(&last, r));
}

static int drain_version(struct draining *draining, const struct inventory_version *version) {
    const struct inventory *inventory = draining->inventory;
    struct hold hold = {0};
    int status = STATUS_OK;
    hold_take(&hold, inventory, version);
    for (uint32_t rank = 0; status == STATUS_OK && rank < version->summary.world; rank++) {
        if (ctl_interrupted())
            status = ctl_fail(STATUS_STORAGE, "interrupted");
        else
            status = drain_part(draining, version->id, rank);
        hold_renew(&hold);
    }
    hold_release(&hold);
    if (status != STATUS_OK)
        return status;
    struct problem problem = PROBLEM_NONE;
    struct tier *to = inventory->roots->items[inventory->roots->count - 1].tier;
    int r = commit_complete(to, inventory->job, version->id, ctl_nonce(), &problem);
    if (r != 0)
        return ctl_fail(r < 0 ? ctl_status(r) : STATUS_PROBLEM, "%s",
                        r < 0 ? problem_text(&problem, r) : "parts are missing");
    return STATUS_OK;
}

static int drain_job(struct ctl *ctl, const struct roots *roots, const char *job, uint64_t *pending, uint64_t *count) {
    CLEANUP(inventory_free) struct inventory inventory = {0};
    int status = inventory_load(roots, job, &inventory);
    struct draining draining = {.ctl = ctl, .inventory = &inventory};
    if (status == STATUS_OK && ctl->word_count && !inventory.count && !inventory.generation_count)
        return ctl_fail(STATUS_ABSENT, "no root has a job \"%s\"", job);
    for (size_t i = 0; status == STATUS_OK && i < inventory.count; i++) {
        const struct inventory_version *version = &inventory.versions[i];
        if (!is_missing(&inventory, version))
            continue;
        if (ctl->wait) {
            status = drain_version(&draining, version);
            if (status == STATUS_OK && !ctl->json)
                printf("drained %s %" PRIu64 "/%" PRIu64 "\n", job, version->id.generation, version->id.step);
        } else {
            *pending += version->summary.bytes;
            ++*count;
        }
    }
    return status;
}

static int drain_by_hand(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    uint64_t pending = 0, count = 0;
    int status = roots_open(ctl, ctl->word_count ? ctl->words[0] : NULL, &roots);
    if (status != STATUS_OK)
        return status;
    if (roots.count < 2)
        return ctl_fail(STATUS_USAGE,
                        "there is one root only; draining needs a nearer and a deeper one (--root twice)");
    if (ctl->word_count) {
        status = drain_job(ctl, &roots, ctl->words[0], &pending, &count);
        return status == STATUS_OK ? report(ctl, pending, count, "versions") : status;
    }
    char **jobs = NULL;
    size_t job_count = 0;
    struct problem problem = PROBLEM_NONE;
    int r = catalog_jobs(roots.items[0].tier, &jobs, &job_count, &problem);
    if (r != 0)
        return ctl_fail(ctl_status(r), "%s", problem_text(&problem, r));
    for (size_t i = 0; i < job_count; i++) {
        if (status == STATUS_OK)
            status = drain_job(ctl, &roots, jobs[i], &pending, &count);
        free(jobs[i]);
    }
    free(jobs);
    return status == STATUS_OK ? report(ctl, pending, count, "versions") : status;
}

int verb_drain(struct ctl *ctl) {
    if (ctl->timeout_ms && !ctl->wait)
        return ctl_fail(STATUS_USAGE, "--timeout goes with --wait");
    if (ctl->root_count)
        return drain_by_hand(ctl);
    CLEANUP(connection_deinit) struct connection connection;
    struct problem problem = PROBLEM_NONE;
    int r = connection_init(&connection, ctl->socket, &problem);
    if (r == 0)
        return drain_by_daemon(ctl, &connection);
    return r == CONNECTION_E_ABSENT ? drain_by_hand(ctl) : daemon_fail(r, &problem);
}
