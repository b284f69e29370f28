/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node: a daemon, made as main() makes it, and the disk beside it. A daemon that dies leaves its
 * memory to nobody: the process of the simulator ends with its seed.
 */
#include "daemon/lane.h"
#include "tests/sim/sim.h"

#include <dirent.h>
#include <errno.h>
#include <sys/eventfd.h>

struct node nodes[SIM_NODES_MAX];
int node_count;
struct disk *parallel;

static int open_tier(const struct config_tier *config, struct tier **ret_tier, struct problem *problem) {
    (void)problem;
    struct node *node = &nodes[sim.node];
    *ret_tier =
        sim_tier_new(config->level == LEVEL_LOCAL ? node->local : parallel, config->name, config->level, node->number);
    return 0;
}

static void vary_tier(struct config_tier *tier) {
    tier->codec = (enum codec)sim_below(3);
    tier->depth = 1 + (uint32_t)sim_below(4);
    tier->workers = 1 + (uint32_t)sim_below(4);
    tier->keep = 1 + (uint32_t)sim_below(3);
    tier->backlog = 1 + (uint32_t)sim_below(6);
    tier->trash_grace_ms = sim_chance(1, 2) ? 60000 : 500;
}

void node_init(int number, bool has_local) {
    static const char *const names[SIM_NODES_MAX] = {"local-0", "local-1"};
    struct node *node = &nodes[number];
    struct config *config = &node->config;
    *node = (struct node){.number = number, .clock_ns = number * 700 * (int64_t)NANOSECONDS_PER_MS};
    *config = (struct config){
        .capture_threads = 1 + (uint32_t)sim_below(2),
        .codec_threads = 1,
        .stop_grace_ms = 30000,
        .idle_exit_ms = 600000,
        .pool_size = SIM_CHUNK * (4 + sim_below(50)),
        .chunk_size = SIM_CHUNK,
        .settle_ms = 30000,
        .takeover_ms = 60000,
        .tier_ms = 60000,
        .capture_ms = 60000,
    };
    if (has_local) {
        node->local = disk_new(names[number], false);
        config_tier_default("local", names[number], LEVEL_LOCAL, &config->tiers[config->tier_count++]);
    }
    config_tier_default("parallel", "parallel", LEVEL_GLOBAL, &config->tiers[config->tier_count++]);
    for (size_t i = 0; i < config->tier_count; i++)
        vary_tier(&config->tiers[i]);
    log_init(&node->log, STDERR_FILENO, sim.verbose ? LOG_LEVEL_DEBUG : (enum log_level)0);
}

static void gone(struct node *node) {
    node->up = false;
    fiber_kill_owned(node->number);
    sim_loop_drop(node->loop);
    sim_tier_forget_node(node->number);
}

static void run(void *argument) {
    struct node *node = argument;
    int r = server_run(node->server);
    SIM_CHECK(r == 0, "the loop does not break", "server_run of node %d: %s", node->number, strerror(-r));
    sim_note("node %d: the daemon has stopped", node->number);
    gone(node);
}

void node_start(int number) {
    struct node *node = &nodes[number];
    struct problem problem = PROBLEM_NONE;
    int before = sim.node;
    if (node->up)
        return;
    node->loop = sim_loop_new(number);
    node->signal_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const struct server_options options = {
        .socket_path = "", .listen_fd = -1, .signal_fd = node->signal_fd, .open_tier = open_tier};
    sim.node = number;
    int r = server_new(node->loop, &node->config, &node->log, &options, &node->server, &problem);
    sim.node = before;
    SIM_CHECK(r == 0, "a daemon starts", "node %d: %s", number, problem.text);
    node->up = true;
    sim_loop_set_runner(node->loop, fiber_new(number, run, node));
    sim_note("node %d: a daemon starts", number);
}

void node_kill(int number) {
    if (!nodes[number].up)
        return;
    sim_note("node %d: the daemon is killed", number);
    gone(&nodes[number]);
}

void node_power(int number) {
    sim_note("node %d: power is lost", number);
    if (nodes[number].up)
        gone(&nodes[number]);
    kernel_reboot(number);
    if (nodes[number].local) {
        disk_crash(nodes[number].local, UINT32_MAX);
        if (!(disk_capabilities(nodes[number].local) & TIER_SURVIVES_REBOOT))
            model_disk_lost(number);
    }
    disk_crash(parallel, 1u << number);
}

void node_terminate(int number) {
    sim_note("node %d: SIGTERM", number);
    sim_descriptors_changed();
    (void)!write(nodes[number].signal_fd, &(uint64_t){1}, 8);
}

void node_check(int number) {
    const struct node *node = &nodes[number];
    struct pool_usage usage;
    if (!node->up)
        return;
    pool_get_usage(node->server->pool, &usage);
    bool bounded = usage.reserved <= usage.limit && usage.allocated <= usage.limit && usage.used <= usage.allocated &&
                   usage.cached <= usage.used && node->server->windowed <= usage.reserved;
    SIM_CHECK(bounded, "the pool keeps its bounds", "node %d: %llu bytes reserved, %llu used, %llu cached", number,
              (unsigned long long)usage.reserved, (unsigned long long)usage.used, (unsigned long long)usage.cached);
}

static void check_lane(int number, const struct lane *lane) {
    bool idle = TAILQ_EMPTY(&lane->waiting) && TAILQ_EMPTY(&lane->active) && !lane->active_count && !lane->writes &&
                !lane->urgent && !lane->pending_bytes && !lane->pending_parts && !lane->stuck_workers;
    SIM_CHECK(idle, "counts balance when idle",
              "node %d tier %s: active %u, writes %u, urgent %u, pending %llu bytes in %u parts, stuck %u", number,
              lane->config.name, lane->active_count, lane->writes, lane->urgent,
              (unsigned long long)lane->pending_bytes, lane->pending_parts, lane->stuck_workers);
}

void node_check_idle(int number) {
    struct node *node = &nodes[number];
    struct server *server = node->server;
    struct pool_usage usage;
    struct lane *lane;
    if (!node->up)
        return;
    pool_get_usage(server->pool, &usage);
    SIM_CHECK(!usage.reserved && usage.used == usage.cached, "the pool balances when idle",
              "node %d: %llu bytes reserved, %llu used, %llu cached", number, (unsigned long long)usage.reserved,
              (unsigned long long)usage.used, (unsigned long long)usage.cached);
    SIM_CHECK(!server->fetching && !server->windowed && TAILQ_EMPTY(&server->fetches), "counts balance when idle",
              "node %d: %llu bytes in fetches and leases", number, (unsigned long long)server->fetching);
    SIM_CHECK(!server->session_count, "counts balance when idle", "node %d: %u sessions", number,
              server->session_count);
    TAILQ_FOREACH(lane, &server->lanes, link)
    check_lane(number, lane);
    SIM_CHECK(!sim_tier_open_files(number), "counts balance when idle", "node %d: %u files are open", number,
              sim_tier_open_files(number));
    sim_loop_check_idle(node->loop);
}

int nodes_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    assert(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    for (int i = 0; i < node_count; i++)
        if (nodes[i].up) {
            struct pool_usage usage;
            pool_get_usage(nodes[i].server->pool, &usage);
            count -= (int)usage.segments;
        }
    return count;
}

void node_describe(int number) {
    const struct node *node = &nodes[number];
    struct lane *lane;
    struct pool_usage usage;
    if (!node->up)
        return;
    pool_get_usage(node->server->pool, &usage);
    fprintf(stderr, "node %d: %u sessions; of %llu bytes %llu reserved, %llu used, %llu cached, %llu in fetches\n",
            number, node->server->session_count, (unsigned long long)usage.limit, (unsigned long long)usage.reserved,
            (unsigned long long)usage.used, (unsigned long long)usage.cached,
            (unsigned long long)node->server->fetching);
    TAILQ_FOREACH(lane, &node->server->lanes, link)
    fprintf(stderr, "node %d tier %s: %u parts pending, %u active, %u writes, %u urgent, %u stuck\n", number,
            lane->config.name, lane->pending_parts, lane->active_count, lane->writes, lane->urgent,
            lane->stuck_workers);
}
