/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A problem is an error with its sentence: what went wrong, with which file or limit, and what to
 * do. Functions whose failure a person will read take `struct problem *problem` as their last
 * input (NULL allowed) and return its code, so that
 *
 *     return problem_set(problem, -ENOSPC, "tier %s: no space left in %s; free some, or ...", ...);
 *
 * reads as one step. The first sentence stays: setting a problem that is already set only keeps
 * the code.
 */

#include "base/util.h"

#define PROBLEM_TEXT_MAX 512

struct problem {
    int code;
    char text[PROBLEM_TEXT_MAX];
};

#define PROBLEM_NONE ((struct problem){0})

/* Stores code and sentence (cut to fit, at a character boundary). Returns code. */
int problem_set(struct problem *problem, int code, const char *format, ...) PRINTF_LIKE(3, 4);

/* The sentence, or strerror of code where none was set. The pointer lives as long as the problem. */
const char *problem_text(const struct problem *problem, int code);
