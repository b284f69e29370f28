/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operator: starts runs of the job one after the other, as a launcher does, and breaks what may
 * be broken meanwhile: kills daemons and trainers, cuts the power of nodes or of everything, takes a
 * node's disk away, sends SIGTERM. The last run has good weather, and must succeed in everything.
 */
#include "tests/sim/sim.h"

#define RUNS_MAX 5

static struct trainer *trainers[SIM_RANKS_MAX];
static struct trainer_options options; /* of the run's ranks */
static uint32_t world;
static bool over;

static void pause_ms(uint64_t ms) { fiber_wait(sim.now_ns + ms * NANOSECONDS_PER_MS, -1); }

bool operator_over(void) { return over; }

static bool run_over(void) {
    for (uint32_t i = 0; i < world; i++)
        if (!trainer_over(trainers[i]))
            return false;
    return true;
}

static bool run_broken(void) {
    for (uint32_t i = 0; i < world; i++)
        if (trainer_over(trainers[i]) && trainer_failed(trainers[i]))
            return true;
    return false;
}

static void kill_trainers(int node) {
    for (uint32_t i = 0; i < world; i++)
        if (node == SIM_OUTSIDE || (int)i % node_count == node)
            trainer_kill(trainers[i]);
}

static void start_all_nodes(void) {
    for (int i = 0; i < node_count; i++)
        node_start(i);
}

static void lose_power(int node) {
    kill_trainers(node);
    node_power(node);
}

static void blackout(void) {
    sim_note("everything loses power");
    for (int i = 0; i < node_count; i++)
        lose_power(i);
    disk_crash(parallel, UINT32_MAX);
}

static void lose_disk(int node) {
    if (!nodes[node].local)
        return;
    sim_note("node %d: its disk is lost", node);
    sim.upsets++;
    nodes[node].local = disk_new(disk_name(nodes[node].local), false);
    model_disk_lost(node);
}

static void terminate(int node) {
    if (!nodes[node].up)
        return;
    node_terminate(node);
    for (int i = 0; i < 2000 && nodes[node].up; i++)
        pause_ms(50);
    SIM_CHECK(!nodes[node].up, "a daemon stops within its grace", "node %d", node);
}

/* One rank is started again, in the same run: as `srun --kill-on-bad-exit=0` and a supervisor do. */
static void restart_rank(uint32_t rank) {
    trainer_kill(trainers[rank]);
    if (trainer_closing(trainers[rank]))
        return;
    pause_ms(sim_below(500));
    options.rank = rank;
    options.node = (int)rank % node_count;
    trainers[rank] = trainer_start(&options);
}

/* For seconds or minutes, and then it is as before. */
static void trouble_a_disk(int node) {
    struct disk *disk = nodes[node].local && sim_chance(1, 2) ? nodes[node].local : parallel;
    enum disk_trouble trouble = (enum disk_trouble)(1 + sim_below(DISK_TROUBLES - 1));
    disk_make_trouble(disk, trouble, sim.now_ns + sim_below(UINT64_C(1) << sim_below(18)) * NANOSECONDS_PER_MS);
}

/* Clocks of nodes go where they like; that of a file server is set right by seconds, or loses hours. */
static void jump_a_clock(int node) {
    int64_t second = (int64_t)NANOSECONDS_PER_SECOND, seconds = (int64_t)sim_below(UINT64_C(1) << sim_below(18));
    bool back = sim_chance(1, 2);
    if (sim_chance(1, 2)) {
        nodes[node].clock_ns += back ? -seconds * second : seconds * second;
        sim_note("node %d: its clock jumps %s by %lld s", node, back ? "back" : "ahead", (long long)seconds);
        return;
    }
    seconds = back ? -(seconds % 10) : seconds;
    disk_clock_jump(parallel, seconds * second);
    sim_note("disk parallel: its clock jumps by %lld s", (long long)seconds);
}

static void break_something(void) {
    int node = (int)sim_below((uint64_t)node_count);
    uint64_t what = sim_below(13);
    if (what < 4) {
        node_kill(node);
    } else if (what < 6) {
        lose_power(node);
        if (sim_chance(1, 4))
            lose_disk(node);
    } else if (what < 7) {
        blackout();
    } else if (what < 8) {
        terminate(node);
    } else if (what < 9) {
        trainer_kill(trainers[sim_below(world)]);
    } else if (what < 10) {
        trouble_a_disk(node);
    } else if (what < 11) {
        trainer_hang(trainers[sim_below(world)], sim.now_ns + sim_below(100) * NANOSECONDS_PER_SECOND);
    } else if (what < 12) {
        if (sim.weather.clock_jumps)
            jump_a_clock(node);
    } else {
        restart_rank((uint32_t)sim_below(world));
    }
    model_check_tiers();
    if (sim_chance(1, 2))
        pause_ms(sim_below(4000));
    start_all_nodes();
}

static void start_run(int number, bool quiet, uint64_t size, uint32_t last_world) {
    static char names[RUNS_MAX][16];
    snprintf(names[number], sizeof names[number], "run-%d", number);
    world = sim_chance(1, 2) && last_world ? last_world : 1 + (uint32_t)sim_below(SIM_RANKS_MAX);
    options = (struct trainer_options){
        .run_id = names[number], .world = world, .steps = 1 + (uint32_t)sim_below(8), .size = size, .quiet = quiet};
    model_launch(world);
    for (uint32_t i = 0; i < world; i++) {
        options.rank = i;
        options.node = (int)i % node_count;
        options.library = sim_chance(3, 4);
        trainers[i] = trainer_start(&options);
    }
}

/* By the clock, or by events: what happens in the few ms around a save is most of it. */
static void look_on(void) {
    uint64_t until = sim.steps + sim_below(600);
    if (sim_chance(1, 2))
        pause_ms(1 + sim_below(UINT64_C(1) << sim_below(13)));
    else
        while (sim.steps < until && !run_over())
            fiber_pause();
}

static void run_one(int number, bool quiet, uint64_t size) {
    start_run(number, quiet, size, world);
    while (!run_over()) {
        look_on();
        if (run_over())
            break;
        if (!quiet && sim.weather.crashes && sim_chance(1, 2))
            break_something();
        if (run_broken() && sim_chance(1, 3))
            kill_trainers(SIM_OUTSIDE); /* a launcher ends the others */
    }
    model_check_tiers();
}

static void operate(void *argument) {
    (void)argument;
    int runs = 1 + (int)sim_below(RUNS_MAX - 1);
    uint64_t size = 500 + sim_below(UINT64_C(1) << (9 + sim_below(9)));
    start_all_nodes();
    for (int i = 0; i < runs; i++) {
        run_one(i, false, size);
        pause_ms(sim_below(sim_chance(1, 2) ? 100 : 100000));
    }
    sim_note("the faults end");
    sim.weather = (struct sim_weather){0};
    disk_make_trouble(parallel, DISK_WELL, sim.now_ns);
    for (int i = 0; i < node_count; i++)
        if (nodes[i].local)
            disk_make_trouble(nodes[i].local, DISK_WELL, sim.now_ns);
    start_all_nodes();
    pause_ms(400000); /* what stalled comes to its end */
    int descriptors = nodes_descriptors();
    run_one(runs, true, size);
    pause_ms(400000);
    for (int i = 0; i < node_count; i++)
        node_check_idle(i);
    SIM_CHECK(nodes_descriptors() == descriptors, "descriptors balance when idle", "there were %d, and now %d",
              descriptors, nodes_descriptors());
    model_check_tiers();
    over = true;
}

void operator_start(void) { fiber_new(SIM_OUTSIDE, operate, NULL); }
