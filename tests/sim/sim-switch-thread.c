/* SPDX-License-Identifier: Apache-2.0 */
/*
 * With ThreadSanitizer, for which each stack is a thread of its own that runs when it is told so. There
 * is one real thread, and each switch orders what was before it against what comes after; so races are
 * not what this finds, but locks that are held or taken wrongly across a switch are.
 */
#include "base/util.h"
#include "tests/sim/sim-switch.h"

#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>
#include <ucontext.h>

struct stack {
    void *memory;
    size_t size;
    ucontext_t context;
    void *thread;
};

struct stack *stack_of_program(void) {
    static struct stack program;
    if (!program.thread)
        program.thread = __tsan_get_current_fiber();
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

void stack_prepare(struct stack *stack, void (*entry)(void)) {
    if (stack->thread)
        __tsan_destroy_fiber(stack->thread);
    stack->thread = __tsan_create_fiber(0);
    getcontext(&stack->context);
    stack->context.uc_stack.ss_sp = stack->memory;
    stack->context.uc_stack.ss_size = stack->size;
    stack->context.uc_link = NULL;
    makecontext(&stack->context, entry, 0);
}

void stack_switch(struct stack *from, struct stack *to) {
    __tsan_switch_to_fiber(to->thread, 0);
    swapcontext(&from->context, &to->context);
}

void stack_leave(struct stack *from, struct stack *to) { stack_switch(from, to); }
