/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The tiers that a verb looks at, nearest first: those of --root; else those that the daemon has
 * (also the parallel roots that came with jobs); else, without a daemon, those of the
 * configuration and of CKPT_DIR. A root that does not exist is not made.
 */

#include "tiers/config.h"
#include "tiers/tier.h"
#include "tools/ckptctl.h"

#define ROOTS_MAX 16 /* one bit each in masks */

struct root {
    struct tier *tier;
    char job[MANIFEST_JOB_MAX]; /* only this job's; empty: any job's */
};

enum roots_source { ROOTS_GIVEN, ROOTS_DAEMON, ROOTS_CONFIG };

struct roots {
    struct root items[ROOTS_MAX];
    size_t count;
    enum roots_source source;
    json_t *status; /* ROOTS_DAEMON: what the daemon said */
};

/* `job`: only roots that may hold it; NULL: all. An exit status, its sentence printed. */
int roots_open(struct ctl *ctl, const char *job, struct roots *ret_roots) MUST_CHECK;
void roots_close(struct roots *roots);
/* "local", "parallel", or for --root the directory. */
const char *root_label(const struct roots *roots, size_t i);
