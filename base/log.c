/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

/*
 * A line is put together on the stack and leaves in one write(2), so that lines of several threads
 * never mix and a log call allocates nothing. What cannot be written is lost: the log must never
 * be the reason why the service stops. errno survives, since logging sits in error paths.
 */

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>

#define LOG_MESSAGE_MAX 2048
#define LOG_PREFIX_MAX 64
#define LOG_ESCAPE_LENGTH 4 /* \xNN */

/* systemd names the journal's socket by device and inode; a descriptor that was redirected since
 * is an ordinary one. */
static bool log_is_journal(int fd) {
    const char *stream = getenv("JOURNAL_STREAM");
    if (!stream)
        return false;
    uint64_t device, inode;
    struct stat status;
    if (sscanf(stream, "%" SCNu64 ":%" SCNu64, &device, &inode) != 2 || fstat(fd, &status) < 0)
        return false;
    return status.st_dev == device && status.st_ino == inode;
}

void log_init(struct log *log, int fd, enum log_level level) {
    *log = (struct log){.fd = fd, .level = level, .priorities = log_is_journal(fd)};
}

static const char *log_level_name(enum log_level level) {
    switch (level) {
    case LOG_LEVEL_ERROR:
        return "error";
    case LOG_LEVEL_WARNING:
        return "warning";
    case LOG_LEVEL_INFO:
        return "info";
    case LOG_LEVEL_DEBUG:
        return "debug";
    }
    return "unknown";
}

static size_t log_prefix(const struct log *log, enum log_level level, char *line) {
    if (log->priorities)
        return snprintf(line, LOG_PREFIX_MAX, "<%d>%s ", (int)level, log_level_name(level));
    struct timespec now;
    struct tm calendar;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &calendar);
    size_t length = strftime(line, LOG_PREFIX_MAX, "%Y-%m-%dT%H:%M:%S", &calendar);
    return length + snprintf(line + length, LOG_PREFIX_MAX - length, ".%03ldZ %s ", now.tv_nsec / 1000000,
                             log_level_name(level));
}

/* C0, DEL, and the C1 controls as UTF-8 writes them (c2 80 to c2 9f): terminals obey those too. */
static bool log_is_control(const unsigned char *text) {
    return text[0] < 0x20 || text[0] == 0x7f || (text[0] == 0xc2 && text[1] >= 0x80 && text[1] <= 0x9f);
}

static size_t log_escape(const char *message, char *line) {
    size_t length = 0;
    for (const unsigned char *text = (const unsigned char *)message; *text; text++) {
        if (!log_is_control(text))
            line[length++] = *text;
        else if (*text == '\n')
            length += sprintf(line + length, "\\n");
        else
            length += sprintf(line + length, "\\x%02x", *text);
    }
    return length;
}

void log_write(const struct log *log, enum log_level level, const char *format, ...) {
    if (level > log->level)
        return;
    int saved_errno = errno;

    char message[LOG_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    int full = vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (full < 0)
        message[0] = '\0';
    else if (full >= (int)sizeof message)
        strcpy(message + sizeof message - sizeof "...", "...");

    /* One byte more than the worst line: sprintf ends its last escape with a zero. */
    char line[LOG_PREFIX_MAX + LOG_MESSAGE_MAX * LOG_ESCAPE_LENGTH + 2];
    size_t length = log_prefix(log, level, line);
    length += log_escape(message, line + length);
    line[length++] = '\n';

    ssize_t written;
    do
        written = write(log->fd, line, length);
    while (written < 0 && errno == EINTR);
    errno = saved_errno;
}
