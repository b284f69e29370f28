/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a daemon remembers of its recent work: the answer to TRACE is an array of these records, then
 * one of names. A span has a begin and an end; where both are equal the record tells of a moment.
 */

#include "base/util.h"

/* number, NAME, word for people */
#define TRACE_KINDS(KIND)                                                                                              \
    KIND(1, CAPTURE, "capture")       /* span: a save was accepted .. its last byte is in the pool */                  \
    KIND(2, WAIT, "wait for room")    /* span: a save had to wait before it was accepted or skipped */                 \
    KIND(3, SKIPPED, "skipped")       /* moment: the pool had no room in time */                                       \
    KIND(4, STALL, "stall")           /* span: a capture that is under way waited for room */                          \
    KIND(5, STUCK, "stuck")           /* moment: a worker does not come back from memory or from a tier */             \
    KIND(6, DRAIN, "drain")           /* span: a part's first byte goes to a tier .. its last has arrived there */     \
    KIND(7, COMMIT, "commit")         /* span: .. and is synced and named by a manifest */                             \
    KIND(8, COMPLETE, "complete")     /* moment: all parts of a version are committed in a tier */                     \
    KIND(9, SUPERSEDED, "superseded") /* moment: a part is not written to a tier, a newer one waits behind it */       \
    KIND(10, RESTORE, "restore")      /* span: a program has a version open for reading */

enum trace_kind {
#define KIND(number, name, word) TRACE_##name = number,
    TRACE_KINDS(KIND)
#undef KIND
};

enum { TRACE_FAILED = 1 << 0 };

#define TRACE_NAME_SIZE 256 /* with its NULs */
#define TRACE_NAMES_MAX 256
#define TRACE_NAME_NONE UINT16_MAX
#define TRACE_RANK_NONE UINT32_MAX

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"

struct trace_record {
    uint64_t begin_ns, end_ns; /* by the monotonic clock */
    uint64_t generation, step;
    uint64_t bytes;
    uint64_t pool_used, pool_cached; /* bytes, when the record was made */
    uint32_t rank;
    uint16_t kind;
    uint16_t flags;
    uint16_t job, tier; /* numbers of names, or TRACE_NAME_NONE */
    uint32_t reserved;
};

struct trace_name {
    char text[TRACE_NAME_SIZE];
};

#pragma GCC diagnostic pop

/* "capture"; NULL: no such kind. */
const char *trace_kind_word(uint16_t kind);
