/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The third kind of loop. Where the real ones ask the kernel what has happened, this one asks the
 * seed what happens next: of all callbacks that are due, packets that have arrived, workers that
 * could go on and trainers that are awake, one is chosen, and if there is none, the clock moves to
 * the next timer. What a loop promises is kept: completions are called in the order in which they
 * were reaped, timers never early, one callback per submission, work that has begun runs to its end.
 *
 * Sockets are real socket pairs within the process, since descriptors travel through them.
 */
#include "base/timers.h"
#include "tests/sim/sim.h"

#include <errno.h>
#include <poll.h>

#define CANDIDATES_MAX 1024
#define PENDING_MAX 64
#define STEP_NS 20000 /* an event takes up to this long */

enum stage { STAGE_READY, STAGE_TIMED, STAGE_QUEUED, STAGE_RUNNING, STAGE_WAITING };

struct sim_group {
    struct loop_group group;
    TAILQ_ENTRY(sim_group) link;
    struct loop_queue queue;
    unsigned running, threads, max_threads;
};

struct sim_loop {
    struct loop loop;
    TAILQ_ENTRY(sim_loop) link;
    int node;
    struct loop_queue ready, waiting;
    struct timers timers;
    TAILQ_HEAD(, sim_group) groups;
    struct fiber *runner;
    bool stopping;
    int connections[PENDING_MAX]; /* not accepted yet */
    size_t connection_count;
};

static bool descriptors_changed = true;
static TAILQ_HEAD(sim_loop_list, sim_loop) loops = TAILQ_HEAD_INITIALIZER(loops);

static struct sim_loop *from_loop(struct loop *loop) { return CONTAINER_OF(loop, struct sim_loop, loop); }

static void complete(struct sim_loop *loop, struct loop_op *op, int64_t result) {
    op->result = result;
    op->stage = STAGE_READY;
    TAILQ_INSERT_TAIL(&loop->ready, op, link);
}

/* ---- workers ---- */

static void group_pump(struct sim_loop *loop, struct sim_group *group);

static void work_main(void *argument) {
    struct loop_op *op = argument;
    struct sim_loop *loop = from_loop(op->loop);
    struct sim_group *group = CONTAINER_OF(op->group, struct sim_group, group);
    if (op->kind == LOOP_WORK)
        op->run(op);
    else
        sim_tier_file_io(op);
    group->running--;
    complete(loop, op, op->result);
    group_pump(loop, group);
}

static void group_pump(struct sim_loop *loop, struct sim_group *group) {
    struct loop_op *op;
    while (group->running < group->threads && (op = TAILQ_FIRST(&group->queue))) {
        TAILQ_REMOVE(&group->queue, op, link);
        op->stage = STAGE_RUNNING;
        group->running++;
        fiber_new(loop->node, work_main, op);
    }
}

static int sim_group_new(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                         struct loop_group **ret_group) {
    struct sim_group *group = calloc(1, sizeof *group);
    if (!group)
        return -ENOMEM;
    group->group.loop = loop;
    group->threads = threads;
    group->max_threads = max_threads;
    TAILQ_INIT(&group->queue);
    TAILQ_INSERT_TAIL(&from_loop(loop)->groups, group, link);
    *ret_group = &group->group;
    return 0;
}

static int sim_group_relieve(struct loop_group *loop_group) {
    struct sim_group *group = CONTAINER_OF(loop_group, struct sim_group, group);
    if (group->threads == group->max_threads)
        return -EBUSY;
    group->threads++;
    group_pump(from_loop(loop_group->loop), group);
    return 0;
}

static void sim_group_free(struct loop_group *loop_group) {
    struct sim_group *group = CONTAINER_OF(loop_group, struct sim_group, group);
    assert(!group->running && TAILQ_EMPTY(&group->queue));
    TAILQ_REMOVE(&from_loop(loop_group->loop)->groups, group, link);
    free(group);
}

/* ---- sockets ---- */

static int64_t result_of(ssize_t n) { return n < 0 ? -errno : n; }

static int64_t try(struct sim_loop *loop, struct loop_op *op) {
    switch (op->kind) {
    case LOOP_ACCEPT: {
        if (!loop->connection_count)
            return -EAGAIN;
        int fd = loop->connections[0];
        memmove(loop->connections, loop->connections + 1, --loop->connection_count * sizeof fd);
        return fd;
    }
    case LOOP_RECV:
        return result_of(recvmsg(op->fd, op->message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT));
    case LOOP_SEND:
        return result_of(sendmsg(op->fd, op->message, MSG_NOSIGNAL | MSG_DONTWAIT));
    case LOOP_POLL: {
        struct pollfd pollfd = {.fd = op->fd, .events = (short)op->events};
        return poll(&pollfd, 1, 0) > 0 ? pollfd.revents : -EAGAIN;
    }
    default:
        abort();
    }
}

static short events_of(const struct loop_op *op) {
    return op->kind == LOOP_SEND ? POLLOUT : op->kind == LOOP_POLL ? (short)op->events : POLLIN;
}

/* ---- the table ---- */

static void sim_submit(struct loop *base, struct loop_op *op) {
    struct sim_loop *loop = from_loop(base);
    switch (op->kind) {
    case LOOP_POST:
        complete(loop, op, op->result);
        return;
    case LOOP_TIMER:
        op->stage = STAGE_TIMED;
        if (timers_add(&loop->timers, op) < 0)
            abort();
        return;
    case LOOP_WORK:
    case LOOP_READ:
    case LOOP_WRITE:
    case LOOP_SYNC: {
        struct sim_group *group = CONTAINER_OF(op->group, struct sim_group, group);
        op->stage = STAGE_QUEUED;
        TAILQ_INSERT_TAIL(&group->queue, op, link);
        group_pump(loop, group);
        return;
    }
    default:
        op->stage = STAGE_WAITING;
        TAILQ_INSERT_TAIL(&loop->waiting, op, link);
    }
}

static void sim_cancel(struct loop *base, struct loop_op *op) {
    struct sim_loop *loop = from_loop(base);
    if (op->stage == STAGE_TIMED)
        timers_remove(&loop->timers, op);
    else if (op->stage == STAGE_WAITING)
        TAILQ_REMOVE(&loop->waiting, op, link);
    else if (op->stage == STAGE_QUEUED && op->kind == LOOP_WORK)
        TAILQ_REMOVE(&CONTAINER_OF(op->group, struct sim_group, group)->queue, op, link);
    else
        return;
    complete(loop, op, -ECANCELED);
}

static int sim_run(struct loop *base) {
    struct sim_loop *loop = from_loop(base);
    while (!loop->stopping)
        fiber_wait(UINT64_MAX, -1);
    return 0;
}

static void sim_stop(struct loop *base) {
    struct sim_loop *loop = from_loop(base);
    loop->stopping = true;
    fiber_wake(loop->runner);
}

static void sim_free(struct loop *base) { (void)base; }
static uint64_t sim_now(struct loop *base) {
    (void)base;
    return sim.now_ns;
}
static uint64_t sim_wall(struct loop *base) {
    return sim.wall_ns + sim.now_ns + (uint64_t)nodes[from_loop(base)->node].clock_ns;
}
static uint64_t sim_loop_random(struct loop *base) {
    (void)base;
    return sim_random();
}

static const struct loop_ops sim_ops = {
    .name = "sim",
    .submit = sim_submit,
    .cancel = sim_cancel,
    .run = sim_run,
    .stop = sim_stop,
    .free = sim_free,
    .now = sim_now,
    .wall = sim_wall,
    .random = sim_loop_random,
    .group_new = sim_group_new,
    .group_relieve = sim_group_relieve,
    .group_free = sim_group_free,
};

struct loop *sim_loop_new(int node) {
    struct sim_loop *loop = calloc(1, sizeof *loop);
    assert(loop);
    loop->loop.ops = &sim_ops;
    loop->node = node;
    TAILQ_INIT(&loop->ready);
    TAILQ_INIT(&loop->waiting);
    TAILQ_INIT(&loop->groups);
    TAILQ_INSERT_TAIL(&loops, loop, link);
    return &loop->loop;
}

void sim_loop_check_idle(struct loop *base) {
    struct sim_loop *loop = from_loop(base);
    struct sim_group *group;
    SIM_CHECK(TAILQ_EMPTY(&loop->ready), "counts balance when idle", "node %d: callbacks are due", loop->node);
    TAILQ_FOREACH(group, &loop->groups, link)
    SIM_CHECK(!group->running && TAILQ_EMPTY(&group->queue), "counts balance when idle",
              "node %d: %u workers of a group run", loop->node, group->running);
}

void sim_loop_set_runner(struct loop *loop, struct fiber *runner) { from_loop(loop)->runner = runner; }

void sim_loop_drop(struct loop *base) {
    struct sim_loop *loop = from_loop(base);
    kernel_close_sockets(loop->node);
    TAILQ_REMOVE(&loops, loop, link);
}

int sim_loop_connect(struct loop *base, uint32_t pid) {
    struct sim_loop *loop = from_loop(base);
    int pair[2];
    if (loop->connection_count == PENDING_MAX ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0)
        return -ECONNREFUSED;
    kernel_socket(loop->node, pair[0], pid);
    loop->connections[loop->connection_count++] = pair[0];
    return pair[1];
}

/* ---- what happens next ---- */

void sim_descriptors_changed(void) { descriptors_changed = true; }

struct candidate {
    struct sim_loop *loop; /* NULL: a fiber */
    struct loop_op *op;    /* a packet has come for it; NULL: the next callback of the loop */
    struct fiber *fiber;
    bool readable;
};

struct choice {
    struct candidate items[CANDIDATES_MAX];
    struct pollfd pollfds[CANDIDATES_MAX];
    struct candidate waiting[CANDIDATES_MAX];
    size_t count, poll_count;
};

static void add(struct choice *choice, struct candidate candidate) {
    assert(choice->count < CANDIDATES_MAX);
    choice->items[choice->count++] = candidate;
}

static void add_waiting(struct choice *choice, int fd, short events, struct candidate candidate) {
    assert(choice->poll_count < CANDIDATES_MAX);
    choice->pollfds[choice->poll_count] = (struct pollfd){.fd = fd, .events = events};
    choice->waiting[choice->poll_count++] = candidate;
}

static void look_at_loop(struct choice *choice, struct sim_loop *loop, uint64_t *next_ns) {
    struct loop_op *op;
    while ((op = timers_first(&loop->timers)) && op->offset <= sim.now_ns) {
        timers_remove(&loop->timers, op);
        complete(loop, op, 0);
    }
    if (op)
        *next_ns = min_u64(*next_ns, op->offset);
    if (loop->stopping)
        return;
    if (!TAILQ_EMPTY(&loop->ready))
        add(choice, (struct candidate){.loop = loop});
    TAILQ_FOREACH(op, &loop->waiting, link)
    if (op->kind != LOOP_ACCEPT)
        add_waiting(choice, op->fd, events_of(op), (struct candidate){.loop = loop, .op = op});
    else if (loop->connection_count)
        add(choice, (struct candidate){.loop = loop, .op = op});
}

static void look_at_descriptors(struct choice *choice) {
    descriptors_changed = choice->poll_count && poll(choice->pollfds, choice->poll_count, 0) > 0;
    for (size_t i = 0; descriptors_changed && i < choice->poll_count; i++)
        if (choice->pollfds[i].revents)
            add(choice, choice->waiting[i]);
}

static void look(struct choice *choice, uint64_t *next_ns) {
    struct sim_loop *loop;
    choice->count = choice->poll_count = 0;
    *next_ns = UINT64_MAX;
    TAILQ_FOREACH(loop, &loops, link)
    look_at_loop(choice, loop, next_ns);
    for (struct fiber *fiber = fiber_next(NULL); fiber; fiber = fiber_next(fiber)) {
        uint64_t wake_ns = fiber_wake_ns(fiber);
        if (wake_ns <= sim.now_ns)
            add(choice, (struct candidate){.fiber = fiber});
        else
            *next_ns = min_u64(*next_ns, wake_ns);
        if (wake_ns > sim.now_ns && fiber_fd(fiber) >= 0)
            add_waiting(choice, fiber_fd(fiber), POLLIN, (struct candidate){.fiber = fiber, .readable = true});
    }
    if (descriptors_changed || !choice->count)
        look_at_descriptors(choice);
}

static void go(struct candidate chosen) {
    struct sim_loop *loop = chosen.loop;
    if (chosen.fiber) {
        descriptors_changed |= fiber_pid(chosen.fiber) != 0;
        fiber_run(chosen.fiber, chosen.readable);
        return;
    }
    sim.node = loop->node;
    descriptors_changed = true;
    if (chosen.op) {
        int64_t r = try(loop, chosen.op);
        if (r != -EAGAIN) {
            TAILQ_REMOVE(&loop->waiting, chosen.op, link);
            complete(loop, chosen.op, r);
        }
    } else {
        struct loop_op *op = TAILQ_FIRST(&loop->ready);
        TAILQ_REMOVE(&loop->ready, op, link);
        op->kind = LOOP_IDLE;
        op->fn(op);
    }
    sim.node = SIM_OUTSIDE;
}

bool sim_step(void) {
    static struct choice choice;
    uint64_t next_ns;
    look(&choice, &next_ns);
    if (!choice.count) {
        if (next_ns == UINT64_MAX)
            return false;
        sim.now_ns = next_ns;
        return true;
    }
    sim.steps++;
    go(choice.items[sim_below(choice.count)]);
    sim.now_ns += sim_below(STEP_NS);
    return true;
}
