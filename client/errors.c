/* SPDX-License-Identifier: Apache-2.0 */
#include "client/errors.h"

#include "proto/codes.h"

#include <errno.h>
#include <stdarg.h>

/*
 * A program asks for the sentence right after the call that failed, on the thread that made it; so
 * one buffer per thread is enough, and no handle is needed (opening one may be what failed).
 *
 * Wire codes and results of the API are the same numbers; the assertions below keep them so.
 */

#define ERROR_TEXT_MAX 1024

#define RESULTS(each)                                                                                                  \
    each(OK) each(SKIPPED) each(ALREADY) each(NONE) each(PENDING) each(E_INVALID) each(E_MEMORY) each(E_UNREACHABLE)   \
        each(E_TIMEOUT) each(E_PROTOCOL) each(E_VERSION) each(E_LIMIT) each(E_DENIED) each(E_HELD) each(E_IO)          \
            each(E_DAMAGED) each(E_NOT_FOUND) each(E_EXISTS) each(E_BUG) each(E_FORKED) each(E_LOST) each(E_CONFLICT)  \
                each(E_STOPPING) each(E_MISMATCH)

#define SAME(name) _Static_assert((int)CKPT_##name == (int)CODE_##name, #name);
RESULTS(SAME)
_Static_assert((int)CKPT_CAPTURED == (int)LEVEL_CAPTURED && (int)CKPT_LOCAL == (int)LEVEL_LOCAL &&
                   (int)CKPT_PARTNER == (int)LEVEL_PARTNER && (int)CKPT_GLOBAL == (int)LEVEL_GLOBAL,
               "levels");

static _Thread_local char error_text[ERROR_TEXT_MAX];

int error_set(int code, const char *format, ...) {
    char text[ERROR_TEXT_MAX]; /* an argument may be the last sentence itself */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(error_text, text, sizeof text);
    return code;
}

static int result_from_errno(int code) {
    switch (-code) {
    case EINVAL:
    case EILSEQ:
        return CKPT_E_INVALID;
    case ENOMEM:
    case ENOSPC:
        return CKPT_E_MEMORY;
    case E2BIG:
    case EFBIG:
    case EOVERFLOW:
    case ENAMETOOLONG:
    case EMFILE:
    case ENFILE:
        return CKPT_E_LIMIT;
    case EPROTO:
        return CKPT_E_PROTOCOL;
    case EBADMSG:
        return CKPT_E_DAMAGED;
    case ENOTSUP:
        return CKPT_E_VERSION;
    case EPERM:
    case EACCES:
        return CKPT_E_DENIED;
    case EEXIST:
        return CKPT_E_EXISTS;
    case ENOENT:
        return CKPT_E_NOT_FOUND;
    default:
        return CKPT_E_IO;
    }
}

int error_from(int code, const struct problem *problem, const char *what) {
    return error_set(result_from_errno(code), "%s: %s", what, problem_text(problem, code));
}

void error_clear(void) { error_text[0] = '\0'; }

const char *error_last(void) { return error_text; }

const char *error_name(int code) {
    switch (code) {
#define NAME(name)                                                                                                     \
    case CKPT_##name:                                                                                                  \
        return "CKPT_" #name;
        RESULTS(NAME)
    default:
        return "CKPT_E_UNKNOWN";
    }
}

bool error_known(int code) { return code < 0 && code >= CKPT_E_MISMATCH; }

const char *ckpt_strerror(int result) { return error_name(result); }

const char *ckpt_strerror_last(void) { return error_last(); }
