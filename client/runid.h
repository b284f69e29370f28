/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which launch of the job this process belongs to. */

#include "base/util.h"
#include "proto/manifest.h"

/* The option if given, else CKPT_RUN_ID, else the PMIx namespace, else Slurm's job, step and restart
 * count; else one is drawn if world is 1. CKPT_E_INVALID: none, or too long. */
int runid_find(const char *option, uint32_t world, char ret_run_id[MANIFEST_RUN_ID_MAX]) MUST_CHECK;
