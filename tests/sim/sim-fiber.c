/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibers: a stack each, switched by hand (sim-switch.h). Whoever waits says until when or for which descriptor;
 * sim_step() chooses who goes on. A fiber that is killed leaves everything as it is: that is what a
 * crash does.
 */
#include "tests/sim/sim-switch.h"
#include "tests/sim/sim.h"

#define STACK_SIZE KIB(512)

struct fiber {
    TAILQ_ENTRY(fiber) link;
    struct stack *stack;
    fiber_fn fn;
    void *argument;
    int owner;
    uint32_t pid;
    uint64_t wake_ns, hold_ns;
    int fd;
    bool readable, over;
};

static TAILQ_HEAD(fiber_list, fiber) fibers = TAILQ_HEAD_INITIALIZER(fibers);
static struct fiber_list spare = TAILQ_HEAD_INITIALIZER(spare);
static struct fiber *current;

static void fiber_main(void) {
    struct fiber *fiber = current;
    fiber->fn(fiber->argument);
    fiber->over = true;
    stack_leave(fiber->stack, stack_of_program());
}

static struct fiber *fiber_take(void) {
    struct fiber *fiber = TAILQ_FIRST(&spare);
    if (fiber) {
        TAILQ_REMOVE(&spare, fiber, link);
        return fiber;
    }
    fiber = calloc(1, sizeof *fiber);
    assert(fiber);
    fiber->stack = stack_new(STACK_SIZE);
    return fiber;
}

struct fiber *fiber_new(int owner, fiber_fn fn, void *argument) {
    struct fiber *fiber = fiber_take();
    fiber->fn = fn;
    fiber->argument = argument;
    fiber->owner = owner;
    fiber->pid = 0;
    fiber->wake_ns = fiber->hold_ns = 0;
    fiber->fd = -1;
    fiber->over = false;
    stack_prepare(fiber->stack, fiber_main);
    TAILQ_INSERT_TAIL(&fibers, fiber, link);
    return fiber;
}

void fiber_set_pid(struct fiber *fiber, uint32_t pid) { fiber->pid = pid; }
uint32_t fiber_pid(const struct fiber *fiber) { return fiber->pid; }
uint32_t fiber_pid_now(void) { return current ? current->pid : 0; }
bool fiber_inside(void) { return current != NULL; }

bool fiber_wait(uint64_t until_ns, int fd) {
    struct fiber *fiber = current;
    if (!fiber)
        return false;
    int node = sim.node;
    fiber->wake_ns = until_ns;
    fiber->fd = fd;
    stack_switch(fiber->stack, stack_of_program());
    sim.node = node;
    return fiber->readable;
}

void fiber_pause(void) { fiber_wait(0, -1); }

void fiber_wake(struct fiber *fiber) { fiber->wake_ns = 0; }
void fiber_hold(struct fiber *fiber, uint64_t until_ns) { fiber->hold_ns = until_ns; }

static void fiber_recycle(struct fiber *fiber) {
    TAILQ_REMOVE(&fibers, fiber, link);
    TAILQ_INSERT_HEAD(&spare, fiber, link);
}

void fiber_kill(struct fiber *fiber) {
    assert(fiber != current);
    if (!fiber->over)
        fiber_recycle(fiber);
    fiber->over = true;
}

void fiber_kill_owned(int owner) {
    struct fiber *fiber, *next;
    for (fiber = TAILQ_FIRST(&fibers); fiber; fiber = next) {
        next = TAILQ_NEXT(fiber, link);
        if (fiber->owner == owner && fiber != current)
            fiber_kill(fiber);
    }
}

struct fiber *fiber_next(struct fiber *after) {
    return after ? TAILQ_NEXT(after, link) : TAILQ_FIRST(&fibers);
}
int fiber_fd(const struct fiber *fiber) { return fiber->hold_ns > sim.now_ns ? -1 : fiber->fd; }
uint64_t fiber_wake_ns(const struct fiber *fiber) { return max_u64(fiber->wake_ns, fiber->hold_ns); }

void fiber_run(struct fiber *fiber, bool readable) {
    fiber->readable = readable;
    current = fiber;
    sim.node = fiber->owner;
    stack_switch(stack_of_program(), fiber->stack);
    current = NULL;
    sim.node = SIM_OUTSIDE;
    if (fiber->over)
        fiber_recycle(fiber);
}
