/* SPDX-License-Identifier: Apache-2.0 */
/*
 * With AddressSanitizer, which wants to know the bounds of the stack that code runs on, and keeps apart
 * from it what it watches for use after return. A run ends without giving its memory back (daemons that
 * were killed leave all of it), so leaks are not looked for.
 */
#include "base/util.h"
#include "tests/sim/sim-switch.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <ucontext.h>

struct stack {
    const void *memory; /* of the program's: learnt when it is left */
    size_t size;
    ucontext_t context;
    void *apart;
};

int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return 1; }

static struct stack program;
static struct stack *came_from;
static void (*entry_now)(void);

struct stack *stack_of_program(void) {
    return &program;
}

struct stack *stack_new(size_t size) {
    struct stack *stack = calloc(1, sizeof *stack);
    assert(stack);
    stack->size = size;
    stack->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    assert(stack->memory != MAP_FAILED);
    return stack;
}

/* Whoever arrives on a stack says so; whom it came from has told its bounds by that. */
static void arrived(void *apart) { __sanitizer_finish_switch_fiber(apart, &came_from->memory, &came_from->size); }

static void begin(void) {
    arrived(NULL);
    entry_now();
    abort();
}

void stack_prepare(struct stack *stack, void (*entry)(void)) {
    entry_now = entry; /* there is one for all */
    __asan_unpoison_memory_region(stack->memory, stack->size);
    stack->apart = NULL;
    getcontext(&stack->context);
    stack->context.uc_stack.ss_sp = (void *)(uintptr_t)stack->memory;
    stack->context.uc_stack.ss_size = stack->size;
    stack->context.uc_link = NULL;
    makecontext(&stack->context, begin, 0);
}

void stack_switch(struct stack *from, struct stack *to) {
    came_from = from;
    __sanitizer_start_switch_fiber(&from->apart, to->memory, to->size);
    swapcontext(&from->context, &to->context);
    arrived(from->apart);
}

void stack_leave(struct stack *from, struct stack *to) {
    came_from = from;
    __sanitizer_start_switch_fiber(NULL, to->memory, to->size);
    swapcontext(&from->context, &to->context);
    abort();
}
