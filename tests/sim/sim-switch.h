/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * From one stack to another. One of sim-switch-*.c is built in: sanitizers keep a shadow of the stack
 * that code runs on, and must be told of each change.
 */

#include <stddef.h>

struct stack;

/* The stack that the program began on. */
struct stack *stack_of_program(void);
struct stack *stack_new(size_t size);
/* Makes it (anew) one whose first switch calls `entry`, which never returns. Frames of before are gone. */
void stack_prepare(struct stack *stack, void (*entry)(void));
/* `from` is the stack that this runs on. Returns when somebody switches back. */
void stack_switch(struct stack *from, struct stack *to);
/* The same, for good: `from` has ended. */
void stack_leave(struct stack *from, struct stack *to);
