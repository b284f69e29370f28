/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The programs' log: one line per fact, `level message key=value...` on a descriptor (stderr, or
 * the on-demand daemon's log file; under systemd with <N> priority prefixes). Libraries return
 * errors; programs log them, once. A log is a value that its owner passes on: no globals. Any
 * thread may write; a line is one write(2).
 */

#include "base/util.h"

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARNING = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

struct log {
    int fd;
    enum log_level level; /* lines less severe than this are not written */
    bool priorities;      /* prefix lines with <N> for the journal, no time stamp */
};

void log_init(struct log *log, int fd, enum log_level level);

#define log_error(log, ...) log_write(log, LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(log, ...) log_write(log, LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_info(log, ...) log_write(log, LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(log, ...) log_write(log, LOG_LEVEL_DEBUG, __VA_ARGS__)

/* Control characters in the formatted line are escaped, so that a hostile name cannot forge lines. */
void log_write(const struct log *log, enum log_level level, const char *format, ...) PRINTF_LIKE(3, 4);
