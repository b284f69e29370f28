/* SPDX-License-Identifier: Apache-2.0 */
#include "base/problem.h"

#include <stdarg.h>

int problem_set(struct problem *problem, int code, const char *format, ...) {
    if (!problem)
        return code;
    problem->code = code;
    if (problem->text[0])
        return code;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(problem->text, sizeof problem->text, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof problem->text) {
        /* Cut before a UTF-8 sequence rather than inside it. */
        size_t end = sizeof problem->text - 1;
        while (end > 0 && ((unsigned char)problem->text[end - 1] & 0xc0) == 0x80)
            end--;
        if (end > 0 && (unsigned char)problem->text[end - 1] >= 0xc0)
            end--;
        problem->text[end] = '\0';
    }
    return code;
}

const char *problem_text(const struct problem *problem, int code) {
    if (problem && problem->text[0])
        return problem->text;
    return strerror(code < 0 ? -code : code);
}
