/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A survey looks at a job's tiers, one after the other, on a worker; any of them may never answer. It leaves out
 * those that are known to be silent. If one does not answer, that lane is silent from then on, and the survey is left
 * behind: what it has found so far is nobody's.
 */

#include "daemon/job.h"
#include "daemon/watch.h"

#include <stdatomic.h>

struct survey;
struct survey_ops {
    void (*run)(struct survey *survey);  /* on the worker */
    void (*done)(struct survey *survey); /* it has run to its end. May be NULL */
    void (*left)(struct survey *survey); /* it has not: done() will not come. NULL: it is waited for all the same */
    void (*free)(struct survey *survey); /* nothing of it is in flight any more */
};

/* Embedded in its owner, with all that run() reads or writes. */
struct survey {
    const struct survey_ops *ops;
    struct job *job; /* kept */
    uint32_t silent; /* a bit for each lane that is left out */
    atomic_bool abandoned;
    _Atomic(struct tier *) at; /* the one that it looks at; run() may set it */
    uint64_t answers;          /* of that tier, to anybody */
    struct loop_op op;
    struct watch watch;
};

void survey_start(struct survey *survey, const struct survey_ops *ops, struct job *job);
/* From run(), before it looks at a lane. False: that is left out. */
bool survey_enter(struct survey *survey, uint32_t lane);
