/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mistakes are said on stderr and written to the file `mistakes` of the directory when they happen, one a line. At exit
 * what the process still has is a mistake as well (CUDA_STANDIN_LEAKS), and a process that made any fails.
 */
#include "tests/cuda-standin/standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>

void report_mistake(const char *format, ...) {
    char text[512], line[640], path[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    int length = snprintf(line, sizeof(line), "%s[%d]: %s\n", program_invocation_short_name, (int)getpid(), text);
    fprintf(stderr, "cuda-standin: %s", line);
    standin.n_mistakes++;
    if (!standin.settings.directory)
        return;
    snprintf(path, sizeof(path), "%s/mistakes", standin.settings.directory);
    CLEANUP(closep) int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, line, length) != length)
        fprintf(stderr, "cuda-standin: %s: %m\n", path);
}

struct tally {
    unsigned int contexts, allocated, imported, mapped, pooled, registered, host, streams, events;
};

static void tally_count(struct tally *tally, const struct context *only) {
    struct context *context;
    LIST_FOREACH(context, &standin.contexts, link) {
        tally->contexts += !context->destroyed && !context->error && !only;
    }
    struct range *range;
    LIST_FOREACH(range, &standin.ranges, link) {
        if ((only && range->context != only) || (range->context && range->context->error))
            continue;
        tally->allocated += range->kind == RANGE_ALLOCATED;
        tally->imported += range->kind == RANGE_IMPORTED || range->kind == RANGE_POOL_IMPORTED;
        tally->mapped += range->kind == RANGE_MAPPED;
        tally->pooled += range->kind == RANGE_POOLED;
        tally->registered += range->kind == RANGE_HOST_REGISTERED;
        tally->host += range->kind == RANGE_HOST_ALLOCATED;
    }
    CUstream stream;
    LIST_FOREACH(stream, &standin.streams, link) {
        tally->streams += !stream->destroyed && !stream->context->error && stream != stream->context->legacy &&
                          !stream->thread && (!only || stream->context == only);
    }
    CUevent event;
    LIST_FOREACH(event, &standin.events, link) {
        tally->events += !event->destroyed && !event->context->error && (!only || event->context == only);
    }
}

static void report_left(const char *when, unsigned int n, const char *what) {
    if (n)
        report_mistake("%s: %u %s left", when, n, what);
}

static void tally_report(const struct tally *tally, const char *when) {
    report_left(when, tally->contexts, "contexts");
    report_left(when, tally->allocated, "allocations");
    report_left(when, tally->imported, "imported allocations");
    report_left(when, tally->mapped, "mappings");
    report_left(when, tally->pooled, "allocations from pools");
    report_left(when, tally->registered, "registered pieces of host memory");
    report_left(when, tally->host, "pieces of pinned host memory");
    report_left(when, tally->streams, "streams");
    report_left(when, tally->events, "events");
}

void report_context_ends(struct context *context) {
    if (standin.settings.leaks == LEAKS_IGNORE)
        return;
    struct tally tally = {0};
    tally_count(&tally, context);
    tally_report(&tally, "a context ends");
}

/* on_exit() knows the status, a destructor comes after all that programs and libraries do at exit. */
static int exit_status;
static void exit_note(int status, void *unused) { exit_status = status; }

__attribute__((__destructor__)) static void exit_report(void) {
    if (standin.forked || !standin.initialized)
        return;
    pthread_mutex_lock(&standin.lock);
    if (standin.settings.leaks != LEAKS_IGNORE) {
        struct tally tally = {0};
        tally_count(&tally, NULL);
        tally_report(&tally, "exit");
        report_left("exit", vmm_count(), "handles of physical memory");
        report_left("exit", vmm_count_reserved(), "reservations of addresses");
        report_left("exit", pool_count(), "pools");
    }
    bool fails = standin.n_mistakes && standin.settings.leaks == LEAKS_FAIL && exit_status == 0;
    pthread_mutex_unlock(&standin.lock);
    if (fails) {
        fflush(NULL);
        _exit(EXIT_MISTAKES);
    }
}

void report_start(void) { on_exit(exit_note, NULL); }
