/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace-json.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <time.h>

/*
 * What the format calls a process is one place here: the host's memory, or a tier; a thread is a rank of
 * a job in that place. Viewers expect spans of one thread to lie apart or within each other. Two
 * versions of a rank may be drained at the same time, so such a rank gets as many threads in that place
 * as it has spans at once: each span takes the first that is free.
 */

#define PROCESS_MEMORY 1
#define PROCESS_TIERS 2 /* the first: one for each name */

struct thread {
    unsigned process;
    uint16_t job;
    uint32_t rank;
    unsigned turn; /* 0: the first of its rank there */
    uint64_t busy_until_ns;
};

struct writer {
    FILE *out;
    const struct trace_input *input;
    uint64_t origin_ns;
    const struct trace_record **records; /* by their begin */
    size_t count;
    struct thread *threads;
    size_t thread_count, capacity;
    bool any; /* an event was written */
};

static const char *name_of(const struct trace_input *input, uint16_t number, char text[TRACE_NAME_SIZE]) {
    if (number >= input->name_count)
        return "?";
    snprintf(text, TRACE_NAME_SIZE, "%.*s", TRACE_NAME_SIZE - 1, input->names[number].text);
    return text;
}

static void print_string(FILE *out, const char *text) {
    json_t *string = json_string(text);
    if (!string) /* not UTF-8 */
        string = json_string("?");
    json_dumpf(string, out, JSON_ENCODE_ANY);
    json_decref(string);
}

static void print_us(FILE *out, uint64_t ns) { fprintf(out, "%" PRIu64 ".%03u", ns / 1000, (unsigned)(ns % 1000)); }

static void event_begin(struct writer *writer, const char *phase, unsigned process, size_t thread) {
    fprintf(writer->out, "%s\n{\"ph\":\"%s\",\"pid\":%u,\"tid\":%zu", writer->any ? "," : "", phase, process, thread);
    writer->any = true;
}

/* ---- threads ---- */

static unsigned process_of(const struct trace_record *record) {
    return record->tier == TRACE_NAME_NONE ? PROCESS_MEMORY : PROCESS_TIERS + record->tier;
}

static int thread_new(struct writer *writer, const struct thread *like, size_t *ret_number) {
    if (writer->thread_count == writer->capacity) {
        size_t capacity = writer->capacity ? 2 * writer->capacity : 16;
        struct thread *threads = realloc(writer->threads, capacity * sizeof *threads);
        if (!threads)
            return -ENOMEM;
        writer->threads = threads;
        writer->capacity = capacity;
    }
    *ret_number = writer->thread_count;
    writer->threads[writer->thread_count++] = *like;
    return 0;
}

/* Moments do not occupy their thread. */
static int thread_for(struct writer *writer, const struct trace_record *record, size_t *ret_number) {
    struct thread wanted = {.process = process_of(record), .job = record->job, .rank = record->rank};
    for (size_t i = 0; i < writer->thread_count; i++) {
        struct thread *thread = &writer->threads[i];
        if (thread->process != wanted.process || thread->job != wanted.job || thread->rank != wanted.rank)
            continue;
        if (record->begin_ns == record->end_ns || thread->busy_until_ns <= record->begin_ns) {
            thread->busy_until_ns = max_u64(thread->busy_until_ns, record->end_ns);
            *ret_number = i;
            return 0;
        }
        wanted.turn++;
    }
    wanted.busy_until_ns = record->end_ns;
    return thread_new(writer, &wanted, ret_number);
}

static void write_thread(struct writer *writer, size_t number) {
    const struct thread *thread = &writer->threads[number];
    char job[TRACE_NAME_SIZE], text[TRACE_NAME_SIZE + 64];
    if (thread->rank == TRACE_RANK_NONE)
        snprintf(text, sizeof text, "%s, all ranks", name_of(writer->input, thread->job, job));
    else
        snprintf(text, sizeof text, "%s rank %" PRIu32, name_of(writer->input, thread->job, job), thread->rank);
    event_begin(writer, "M", thread->process, number);
    fputs(",\"name\":\"thread_name\",\"args\":{\"name\":", writer->out);
    print_string(writer->out, text);
    fputs("}}", writer->out);
    event_begin(writer, "M", thread->process, number);
    fprintf(writer->out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
            (thread->rank == TRACE_RANK_NONE ? 0 : thread->rank + 1) * 8 + (unsigned)min_u64(thread->turn, 7));
}

static void write_process(struct writer *writer, unsigned process) {
    char name[TRACE_NAME_SIZE], text[TRACE_NAME_SIZE + 64] = "memory";
    if (process != PROCESS_MEMORY)
        snprintf(text, sizeof text, "tier %s", name_of(writer->input, (uint16_t)(process - PROCESS_TIERS), name));
    event_begin(writer, "M", process, 0);
    fputs(",\"name\":\"process_name\",\"args\":{\"name\":", writer->out);
    print_string(writer->out, text);
    fputs("}}", writer->out);
    event_begin(writer, "M", process, 0);
    fprintf(writer->out, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%u}}", process);
}

static void write_names(struct writer *writer) {
    for (size_t i = 0; i < writer->thread_count; i++) {
        bool first = true;
        for (size_t k = 0; k < i && first; k++)
            first = writer->threads[k].process != writer->threads[i].process;
        if (first)
            write_process(writer, writer->threads[i].process);
        write_thread(writer, i);
    }
}

/* ---- events ---- */

static void write_record(struct writer *writer, const struct trace_record *record, size_t thread) {
    FILE *out = writer->out;
    const char *word = trace_kind_word(record->kind);
    bool failed = record->flags & TRACE_FAILED, moment = record->begin_ns == record->end_ns;
    char job[TRACE_NAME_SIZE];
    event_begin(writer, moment ? "i" : "X", process_of(record), thread);
    fprintf(out, ",\"name\":\"%s %" PRIu64 "/%" PRIu64 "%s\",\"cat\":\"%s\",\"ts\":", word, record->generation,
            record->step, failed && !moment ? " failed" : "", word);
    print_us(out, record->begin_ns - writer->origin_ns);
    if (moment) {
        fputs(",\"s\":\"t\"", out);
    } else {
        fputs(",\"dur\":", out);
        print_us(out, record->end_ns - record->begin_ns);
    }
    if (failed)
        fputs(",\"cname\":\"terrible\"", out);
    fputs(",\"args\":{\"job\":", out);
    print_string(out, name_of(writer->input, record->job, job));
    fprintf(out, ",\"generation\":%" PRIu64 ",\"step\":%" PRIu64, record->generation, record->step);
    if (record->rank != TRACE_RANK_NONE)
        fprintf(out, ",\"rank\":%" PRIu32, record->rank);
    if (record->bytes)
        fprintf(out, ",\"bytes\":%" PRIu64, record->bytes);
    fputs("}}", out);
}

static void write_pool(struct writer *writer, const struct trace_record *record) {
    event_begin(writer, "C", PROCESS_MEMORY, 0);
    fputs(",\"name\":\"pool\",\"ts\":", writer->out);
    print_us(writer->out, record->end_ns - writer->origin_ns);
    fprintf(writer->out, ",\"args\":{\"in use\":%" PRIu64 ",\"cached\":%" PRIu64 "}}",
            record->pool_used - min_u64(record->pool_cached, record->pool_used), record->pool_cached);
}

static int by_begin(const void *left, const void *right) {
    const struct trace_record *a = *(const struct trace_record *const *)left;
    const struct trace_record *b = *(const struct trace_record *const *)right;
    if (a->begin_ns != b->begin_ns)
        return a->begin_ns < b->begin_ns ? -1 : 1;
    return a < b ? -1 : 1;
}

static bool wanted(const struct trace_input *input, const struct trace_record *record, const char *job) {
    char name[TRACE_NAME_SIZE];
    if (!trace_kind_word(record->kind) || record->end_ns < record->begin_ns)
        return false; /* a later daemon's */
    return !job || strcmp(name_of(input, record->job, name), job) == 0;
}

static void write_head(const struct writer *writer) {
    uint64_t wall_ns = writer->input->wall_ns + writer->origin_ns;
    time_t seconds = (time_t)(wall_ns / NANOSECONDS_PER_SECOND);
    struct tm utc;
    char text[64] = "";
    if (gmtime_r(&seconds, &utc))
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    fprintf(writer->out,
            "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"time 0\":\"%s.%06" PRIu64 "Z\",\"forgotten\":%" PRIu64
            "},\n\"traceEvents\":[",
            text, wall_ns % NANOSECONDS_PER_SECOND / 1000, writer->input->forgotten);
}

int trace_json_write(FILE *out, const struct trace_input *input, const char *job) {
    struct writer writer = {.out = out, .input = input, .origin_ns = UINT64_MAX};
    CLEANUP(freep) const struct trace_record **records = writer.records = calloc(input->count + 1, sizeof *records);
    if (!records)
        return -ENOMEM;
    for (size_t i = 0; i < input->count; i++)
        if (wanted(input, &input->records[i], job)) {
            records[writer.count++] = &input->records[i];
            writer.origin_ns = min_u64(writer.origin_ns, input->records[i].begin_ns);
        }
    if (!writer.count)
        writer.origin_ns = 0;
    qsort(records, writer.count, sizeof *records, by_begin);
    write_head(&writer);
    int r = 0;
    for (size_t i = 0; i < writer.count && !r; i++) {
        size_t thread;
        r = thread_for(&writer, records[i], &thread);
        if (!r)
            write_record(&writer, records[i], thread);
    }
    write_names(&writer);
    for (size_t i = 0; i < input->count && !r; i++) /* these come in the order of their ends */
        if (wanted(input, &input->records[i], job))
            write_pool(&writer, &input->records[i]);
    fputs("\n]}\n", out);
    free(writer.threads);
    return r;
}
