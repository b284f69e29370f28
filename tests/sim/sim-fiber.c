/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibers: a stack each, switched by hand. Whoever waits says until when or for which descriptor;
 * sim_step() chooses who goes on. A fiber that is killed leaves everything as it is: that is what a
 * crash does.
 */
#include "tests/sim/sim.h"

#include <sys/mman.h>
#include <ucontext.h>

#define STACK_SIZE KIB(512)

struct fiber {
    TAILQ_ENTRY(fiber) link;
    ucontext_t context;
    void *stack;
    fiber_fn fn;
    void *argument;
    int owner;
    uint64_t wake_ns;
    int fd;
    bool readable, over;
};

static TAILQ_HEAD(fiber_list, fiber) fibers = TAILQ_HEAD_INITIALIZER(fibers);
static struct fiber_list spare = TAILQ_HEAD_INITIALIZER(spare);
static struct fiber *current;
static ucontext_t scheduler;

static void fiber_main(void) {
    struct fiber *fiber = current;
    fiber->fn(fiber->argument);
    fiber->over = true;
    swapcontext(&fiber->context, &scheduler);
    abort();
}

static struct fiber *fiber_take(void) {
    struct fiber *fiber = TAILQ_FIRST(&spare);
    if (fiber) {
        TAILQ_REMOVE(&spare, fiber, link);
        return fiber;
    }
    fiber = calloc(1, sizeof *fiber);
    assert(fiber);
    fiber->stack = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    assert(fiber->stack != MAP_FAILED);
    return fiber;
}

/* Apart, since getcontext() may return twice in the eyes of a compiler. */
static void fiber_prepare(struct fiber *fiber) {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_SIZE;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, fiber_main, 0);
}

struct fiber *fiber_new(int owner, fiber_fn fn, void *argument) {
    struct fiber *fiber = fiber_take();
    fiber->fn = fn;
    fiber->argument = argument;
    fiber->owner = owner;
    fiber->wake_ns = 0;
    fiber->fd = -1;
    fiber->over = false;
    fiber_prepare(fiber);
    TAILQ_INSERT_TAIL(&fibers, fiber, link);
    return fiber;
}

bool fiber_inside(void) { return current != NULL; }

bool fiber_wait(uint64_t until_ns, int fd) {
    struct fiber *fiber = current;
    if (!fiber)
        return false;
    int node = sim.node;
    fiber->wake_ns = until_ns;
    fiber->fd = fd;
    swapcontext(&fiber->context, &scheduler);
    sim.node = node;
    return fiber->readable;
}

void fiber_pause(void) { fiber_wait(0, -1); }

void fiber_wake(struct fiber *fiber) { fiber->wake_ns = 0; }

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
int fiber_fd(const struct fiber *fiber) { return fiber->fd; }
uint64_t fiber_wake_ns(const struct fiber *fiber) { return fiber->wake_ns; }

void fiber_run(struct fiber *fiber, bool readable) {
    fiber->readable = readable;
    current = fiber;
    sim.node = fiber->owner;
    swapcontext(&scheduler, &fiber->context);
    current = NULL;
    sim.node = SIM_OUTSIDE;
    if (fiber->over)
        fiber_recycle(fiber);
}
