/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Starts a daemon on demand: detached from the program in every way that a program could notice or
 * suffer from. Two ranks that start one at once are harmless: the daemon locks its socket's
 * neighbour, and the second one leaves.
 */

#include "base/util.h"

struct starter {
    int pidfd; /* of the last daemon started; -1: none */
    unsigned starts;
    uint64_t last_start; /* monotonic ns */
};

#define STARTER_INIT ((struct starter){.pidfd = -1})

void starter_deinit(struct starter *starter);
/* Starts `program --on-demand --socket path`, unless the last one still runs or was started a moment
 * ago. CKPT_E_UNREACHABLE, with the sentence: it cannot be started, or those started did not stay. */
int starter_start(struct starter *starter, const char *program, const char *path) MUST_CHECK;
