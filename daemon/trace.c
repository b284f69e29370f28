/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring is written in place and read only when somebody asks; what is older than its size is
 * forgotten, and counted. Spans are recorded at their end: one record each, and none that lacks its
 * other half when the ring has gone round. So what is under way when somebody asks is not told, only
 * what holds it up (STUCK).
 *
 * The memory is reserved at the start and touched as it is used: an idle daemon does not pay for it.
 */
#include "daemon/trace.h"

#include <errno.h>

struct trace {
    struct loop *loop;
    struct pool *pool;
    uint64_t added;
    size_t capacity;
    char *names[TRACE_NAMES_MAX];
    uint32_t name_count;
    struct trace_record records[];
};

int trace_new(struct loop *loop, struct pool *pool, size_t records, struct trace **ret_trace) {
    struct trace *trace = calloc(1, sizeof *trace + records * sizeof trace->records[0]);
    if (!trace)
        return -ENOMEM;
    trace->loop = loop;
    trace->pool = pool;
    trace->capacity = records;
    *ret_trace = trace;
    return 0;
}

void trace_free(struct trace *trace) {
    if (!trace)
        return;
    for (uint32_t i = 0; i < trace->name_count; i++)
        free(trace->names[i]);
    free(trace);
}

uint16_t trace_name(struct trace *trace, const char *text) {
    for (uint32_t i = 0; i < trace->name_count; i++)
        if (strcmp(trace->names[i], text) == 0)
            return (uint16_t)i;
    if (trace->name_count == TRACE_NAMES_MAX)
        return TRACE_NAMES_MAX - 1;
    const char *kept = trace->name_count == TRACE_NAMES_MAX - 1 ? "(others)" : text;
    char *name = strndup(kept, TRACE_NAME_SIZE - 1);
    if (!name)
        return TRACE_NAME_NONE;
    trace->names[trace->name_count] = name;
    return (uint16_t)trace->name_count++;
}

void trace_add(struct trace *trace, const struct trace_record *record) {
    struct trace_record *place = &trace->records[trace->added++ % trace->capacity];
    struct pool_usage usage;
    pool_get_usage(trace->pool, &usage);
    *place = *record;
    place->end_ns = loop_now(trace->loop);
    if (!place->begin_ns)
        place->begin_ns = place->end_ns;
    place->pool_used = usage.used;
    place->pool_cached = usage.cached;
}

int trace_copy(const struct trace *trace, struct trace_text *ret_text) {
    size_t count = min_u64(trace->added, trace->capacity), oldest = (trace->added - count) % trace->capacity;
    size_t before_end = min_u64(count, trace->capacity - oldest);
    struct trace_text text = {
        .size = count * sizeof(struct trace_record) + trace->name_count * sizeof(struct trace_name),
        .records = (uint32_t)count,
        .names = trace->name_count,
        .forgotten = trace->added - count,
    };
    struct trace_record *records = text.data = calloc(1, text.size + 1);
    if (!records)
        return -ENOMEM;
    memcpy(records, trace->records + oldest, before_end * sizeof *records);
    memcpy(records + before_end, trace->records, (count - before_end) * sizeof *records);
    struct trace_name *names = (struct trace_name *)(records + count);
    for (uint32_t i = 0; i < trace->name_count; i++)
        strcpy(names[i].text, trace->names[i]);
    *ret_text = text;
    return 0;
}
