/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/lane.h"

#include "daemon/drain.h"

#include <errno.h>
#include <sys/stat.h>

#define LANE_EXTRA_WORKERS 4 /* replacements for stuck ones, before the lane stands still */

/* The default tier lies in a directory of ours in /var/tmp, where anybody may have been first. */
static int make_default_parent(const char *path, struct problem *problem) {
    char parent[64];
    snprintf(parent, sizeof parent, "/var/tmp/ckptd-%u", (unsigned)geteuid());
    size_t length = strlen(parent);
    if (strncmp(path, parent, length) != 0 || path[length] != '/')
        return 0;
    struct stat status;
    if ((mkdir(parent, 0700) < 0 && errno != EEXIST) || lstat(parent, &status) < 0)
        return problem_set(problem, -errno, "cannot make %s: %s", parent, strerror(errno));
    if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & 022))
        return problem_set(
            problem, -EPERM,
            "%s must be a directory of uid %u that nobody else can write to: remove it, or name a tier in "
            "ckptd.conf",
            parent, (unsigned)geteuid());
    return 0;
}

int lane_open_tier(const struct config_tier *config, struct tier **ret_tier, struct problem *problem) {
    CLEANUP(tier_freep) struct tier *tier = NULL;
    struct tier_posix_options options = {
        .name = config->name,
        .root = config->path,
        .level = config->level,
        .allow_network = config->allow_network || config->level != LEVEL_LOCAL,
        .buffered = config->buffered,
        .directory_mode = config->directory_mode,
        .file_mode = config->file_mode,
    };
    int r = make_default_parent(config->path, problem);
    if (r == 0)
        r = tier_posix_new(&options, &tier, problem);
    if (r < 0)
        return r;
    if (config->fault[0]) {
        struct tier_fault_options fault;
        struct tier *wrapped = NULL;
        r = tier_fault_parse(config->fault, &fault, problem);
        if (!r)
            r = tier_fault_new(tier, &fault, &wrapped);
        if (r < 0)
            return problem_set(problem, r, "tier %s: cannot inject faults: %s", config->name, strerror(-r));
        tier = wrapped;
    }
    if (config->delay_ms) {
        struct tier *wrapped = NULL;
        r = tier_delay_new(tier, config->delay_ms, &wrapped);
        if (r < 0)
            return problem_set(problem, r, "tier %s: cannot delay: %s", config->name, strerror(-r));
        tier = wrapped;
    }
    *ret_tier = STEAL(tier);
    return 0;
}

int lane_new(struct server *server, const struct config_tier *config, struct tier *tier, bool from_job,
             struct lane **ret_lane) {
    struct lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return -ENOMEM;
    int r =
        loop_group_new(server->loop, config->name, config->workers, config->workers + LANE_EXTRA_WORKERS, &lane->group);
    if (r < 0) {
        free(lane);
        return r;
    }
    lane->server = server;
    lane->config = *config;
    lane->tier = tier;
    tier->hook = server->point_hook;
    lane->refs = 1;
    lane->from_job = from_job;
    lane->trace_name = trace_name(server->trace, config->name);
    TAILQ_INIT(&lane->waiting);
    TAILQ_INIT(&lane->active);
    TAILQ_INSERT_TAIL(&server->lanes, lane, link);
    if (config->level == LEVEL_GLOBAL && !(tier->capabilities & TIER_SHARED))
        log_warning(server->log,
                    "tier %s: %s is not on a shared file system: GLOBAL versions there do not survive this node",
                    config->name, config->path);
    *ret_lane = lane;
    return 0;
}

struct lane *lane_find(struct server *server, const char *root) {
    struct lane *lane;
    TAILQ_FOREACH(lane, &server->lanes, link)
    if (strcmp(lane->tier->root, root) == 0)
        return lane;
    return NULL;
}

struct lane *lane_ref(struct lane *lane) {
    lane->refs++;
    return lane;
}

void lane_unref(struct lane *lane) {
    if (--lane->refs == 0)
        lane_free(lane);
}

void lane_free(struct lane *lane) {
    assert(!loop_op_busy(&lane->rate_timer));
    TAILQ_REMOVE(&lane->server->lanes, lane, link);
    loop_group_free(lane->group);
    tier_free(lane->tier);
    free(lane);
}

void lane_error(struct lane *lane, const struct problem *problem) {
    lane->errors++;
    lane->last_error = *problem;
    log_error(lane->server->log, "%s tier=%s", problem_text(problem, problem->code), lane->config.name);
}

bool lane_silent(const struct lane *lane) { return lane->stuck_workers > 0; }

int lane_silent_problem(const struct lane *lane, struct problem *problem) {
    return problem_set(problem, -ETIMEDOUT,
                       "tier %s: %s does not answer: see to its file system; what waits for it goes on by itself then",
                       lane->config.name, lane->tier->root);
}

void lane_tell_remade(struct lane *lane) {
    uint64_t remade = lane->tier->counters.remade;
    if (lane->remade == remade)
        return;
    struct problem problem = PROBLEM_NONE;
    lane->remade = remade;
    problem_set(&problem, -ENOENT, "tier %s: the directory %s was removed with the checkpoints in it; it was made anew",
                lane->config.name, lane->tier->root);
    lane_error(lane, &problem);
}

static void rate_elapsed(struct loop_op *op) {
    struct lane *lane = CONTAINER_OF(op, struct lane, rate_timer);
    bool goes_on = op->result == 0 || lane->rate_sooner;
    lane->rate_sooner = false;
    if (goes_on)
        lane_pump(lane);
    lane_unref(lane);
}

bool lane_rate_allows(struct lane *lane, uint64_t bytes) {
    if (!lane->config.rate_mib_s)
        return true;
    uint64_t now = loop_now(lane->server->loop);
    if (now < lane->rate_next_ns) {
        if (!loop_op_busy(&lane->rate_timer)) {
            lane_ref(lane);
            loop_timer(lane->server->loop, &lane->rate_timer, lane->rate_next_ns, rate_elapsed);
        }
        return false;
    }
    lane->rate_next_ns = now + bytes * NANOSECONDS_PER_SECOND / MIB(lane->config.rate_mib_s);
    return true;
}

#define GAINS_LOOK_EVERY 32 /* then the other way is tried: tiers and bytes change */
#define MEAN_WEIGHT 8
#define PPM 1000000

static void mean_add(uint64_t *mean, uint64_t value) {
    *mean = *mean ? (*mean * (MEAN_WEIGHT - 1) + value) / MEAN_WEIGHT : value;
}

void lane_took(uint64_t *mean_ns, uint64_t took_ns, uint32_t together, uint64_t bytes) {
    uint64_t per_mib = took_ns * (double)MIB(1) / ((double)max_u64(together, 1) * max_u64(bytes, 1));
    mean_add(mean_ns, max_u64(per_mib, 1));
}

void lane_shrank(struct lane *lane, uint32_t raw, uint32_t stored) {
    mean_add(&lane->stored_ppm, max_u64(stored * (uint64_t)PPM / max_u64(raw, 1), 1));
    if (!lane->config.rate_mib_s || raw == stored)
        return;
    lane->rate_next_ns -= /* it was counted with all its bytes */
        min_u64(lane->rate_next_ns, (raw - stored) * NANOSECONDS_PER_SECOND / MIB(lane->config.rate_mib_s));
    if (loop_op_busy(&lane->rate_timer)) {
        lane->rate_sooner = true;
        loop_cancel(lane->server->loop, &lane->rate_timer);
    }
}

/* Encoding and writing overlap, so the slower of both counts. The tier's speed is learnt first, then the encoder's. */
bool lane_gains(struct lane *lane) {
    if (!lane->write_ns || !lane->stored_ppm)
        return lane->write_ns > 0;
    uint64_t write_ns = lane->write_ns;
    if (lane->config.rate_mib_s)
        write_ns = max_u64(write_ns, NANOSECONDS_PER_SECOND / lane->config.rate_mib_s);
    bool gains = max_u64(lane->encode_ns, write_ns * lane->stored_ppm / PPM) < write_ns;
    return ++lane->asked % GAINS_LOOK_EVERY == 0 ? !gains : gains;
}
