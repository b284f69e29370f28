/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* An opened version; the functions are those of ckpt.h. */

#include "client/handle.h"
#include "client/index.h"

struct ckpt_restore {
    LIST_ENTRY(ckpt_restore) link; /* the handle's restores */
    struct ckpt *c;                /* NULL: the handle was closed */
    uint32_t epoch, number;        /* the daemon's name for it, in that epoch of the session */
    uint64_t generation, step;
    uint64_t timeout_ms;
    struct index index;
    struct restore_block *blocks; /* what lives as long as the restore */
};

/* The handle closes: its restores are of no use any more, but still the program's to close. */
void restore_orphan(struct ckpt *c);
