/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the daemon did lately, for `ckptctl trace`: a ring of fixed size. A record costs a look at the
 * clock and a few stores; nothing is allocated after trace_new(), except a name that is new.
 */

#include "base/loop.h"
#include "daemon/pool.h"
#include "proto/trace.h"

#define TRACE_RECORDS 16384 /* the last so many; a version of one rank in two tiers makes five */

struct trace;

/* `records`: how many are remembered. The pool's use is noted with each. */
int trace_new(struct loop *loop, struct pool *pool, size_t records, struct trace **ret_trace) MUST_CHECK;
void trace_free(struct trace *trace);

/* The number of a job's or a tier's name. When there are too many, the last one stands for the rest. */
uint16_t trace_name(struct trace *trace, const char *text);

/* A span that ends now; end_ns and the pool's use are filled in. begin_ns 0: a moment. */
void trace_add(struct trace *trace, const struct trace_record *record);

/* Everything that is remembered, oldest first, then the names: as TRACE_IS brings it. */
struct trace_text {
    void *data;
    size_t size;
    uint32_t records, names;
    uint64_t forgotten;
};
int trace_copy(const struct trace *trace, struct trace_text *ret_text) MUST_CHECK;
