/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Without sanitizers: a stack is entered by setcontext(3) and from then on by longjmp(3), which makes
 * no system call for the signal mask; a run is some hundred thousand switches. The checks of
 * _FORTIFY_SOURCE take a jump to another stack for an error.
 */
#undef _FORTIFY_SOURCE
#include "base/util.h"
#include "tests/sim/sim-switch.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

struct stack {
    void *memory;
    size_t size;
    ucontext_t context;
    jmp_buf place;
    bool entered;
};

struct stack *stack_of_program(void) {
    static struct stack program = {.entered = true};
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
    getcontext(&stack->context);
    stack->context.uc_stack.ss_sp = stack->memory;
    stack->context.uc_stack.ss_size = stack->size;
    stack->context.uc_link = NULL;
    makecontext(&stack->context, entry, 0);
    stack->entered = false;
}

static _Noreturn void enter(struct stack *to) {
    if (to->entered)
        _longjmp(to->place, 1);
    to->entered = true;
    setcontext(&to->context);
    abort();
}

void stack_switch(struct stack *from, struct stack *to) {
    if (_setjmp(from->place) == 0)
        enter(to);
}

void stack_leave(struct stack *from, struct stack *to) {
    (void)from;
    enter(to);
}
