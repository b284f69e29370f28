/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where things lie in a tier, relative to its root. Here, and only here, `job` is the escaped
 * directory name; everywhere else in this room it is the job's name, and job_escape() is called
 * inside.
 *
 *   <job>/<generation>/run
 *   <job>/<generation>/<step>/rank-00000.safetensors   (or .chunks)
 *   <job>/<generation>/<step>/rank-00000.json
 *   <job>/<generation>/<step>/complete.json
 *   <job>/<generation>/<step>/pin-<name>
 *   <job>/<generation>/<step>/rank-00000.<nonce>.<what>.tmp   not committed yet
 *   <job>/<generation>/<step>/<file>.bad               condemned
 *   <job>/<generation>/run-ended                       that run is over
 *   <job>/trash-<generation>-<step>-<nonce>            being deleted
 */

#include "base/util.h"

struct version_id {
    uint64_t generation, step;
};

/* <0, 0, >0: by generation, then step. */
int version_compare(struct version_id a, struct version_id b);

void layout_generation(const char *job, uint64_t generation, char ret_path[1024]);
void layout_version(const char *job, struct version_id version, char ret_path[1024]);
void layout_file(const char *job, struct version_id version, const char *file, char ret_path[1024]);
/* A temporary: "rank-NNNNN.<nonce, 16 hex digits>.<what>.tmp" in the version. */
void layout_temporary(const char *job, struct version_id version, uint32_t rank, uint64_t nonce, const char *what,
                      char ret_path[1024]);
void layout_trash(const char *job, struct version_id version, uint64_t nonce, char ret_path[1024]);
/* Plain decimal without leading zeros, below 2^63. False: not a number of ours. */
bool layout_parse_number(const char *name, uint64_t *ret_number);
/* "rank-NNNNN.json": true and the rank. */
bool layout_parse_manifest(const char *name, uint32_t *ret_rank);
/* "rank-NNNNN.*.tmp": true and the rank. */
bool layout_parse_temporary(const char *name, uint32_t *ret_rank);
/* "trash-<generation>-<step>-<nonce>": true and the version that it was. */
bool layout_parse_trash(const char *name, struct version_id *ret_version);
