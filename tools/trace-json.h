/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes what a daemon remembers in the Chrome trace-event format, which Perfetto, chrome://tracing and
 * speedscope read. Times are microseconds since the first record; what time of day that was stands in
 * otherData.
 */

#include "proto/trace.h"

struct trace_input {
    const struct trace_record *records;
    size_t count;
    const struct trace_name *names;
    size_t name_count;
    uint64_t forgotten, wall_ns; /* as in message_trace_is */
};

/* Only of this job, or (NULL) of all. -ENOMEM; output errors are left to whoever closes the file. */
int trace_json_write(FILE *out, const struct trace_input *input, const char *job) MUST_CHECK;
