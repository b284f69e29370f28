/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the tests of this room share: a directory that goes away, tiers of every kind, and parts
 * whose bytes follow from (step, rank), so that any reader can tell whether they are right. */

#include "tiers/catalog.h"
#include "tiers/claim.h"
#include "tiers/codec.h"
#include "tiers/commit.h"
#include "tiers/retention.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
/* clang-format on */

#define TEST_JOB "job/ä 1"
#define TEST_RUN "run-1"
#define TEST_CHUNK KIB(64)
#define TEST_SIZE (5 * TEST_CHUNK + 777)

struct sandbox {
    char path[64];
};
void sandbox_init(struct sandbox *sandbox);
void sandbox_deinit(struct sandbox *sandbox);
/* A path on disk: of a file of a version of TEST_JOB under <sandbox>/<tier>. */
void sandbox_file(const struct sandbox *sandbox, const char *tier, struct version_id version, const char *file,
                  char ret_path[512]);
/* Flips one bit of a file on disk. */
void flip_bit(const char *path, uint64_t offset);
uint64_t file_size(const char *path);

struct tier *new_posix(const struct sandbox *sandbox, const char *name);
struct tier *new_mem(const char *name);
/* A wrapper that never fires. */
struct tier *never_fails(struct tier *inner);
struct tier *fails(struct tier *inner, const char *fault);

/* The sentence must begin by naming this tier. */
void assert_names_tier(const struct problem *problem, const char *tier);
/* r must be 0; else the sentence is printed. */
void assert_fine(int r, const struct problem *problem);

struct part_plan {
    struct version_id version;
    uint32_t rank, world;
    enum codec codec;
    const char *run_id; /* NULL: TEST_RUN */
};
/* The bytes of the image, and a manifest for them with one global tensor "w" cut over the ranks. */
void plan_image(const struct part_plan *plan, char ret_image[TEST_SIZE]);
int commit_part(struct tier *tier, const struct part_plan *plan, uint64_t nonce, struct problem *problem);
int complete_version(struct tier *tier, struct version_id version, struct problem *problem);
/* Commits all parts and completes. */
void make_version(struct tier *tier, struct version_id version, uint32_t world);
/* Reads every chunk and compares with the bytes that must be there. 0, or the first error. */
int read_back(struct tier *tier, const struct part_plan *plan, struct problem *problem);

/* What most tests have: a tier in a sandbox. */
struct tier_fixture {
    struct sandbox sandbox;
    struct tier *tier;
};
struct tier_fixture *tier_fixture_new(void **state);
/* cmocka's teardown. */
int tier_fixture_free(void **state);
struct tier *tier_of(void **state);
