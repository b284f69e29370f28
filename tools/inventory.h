/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The versions of one job, over all roots: who has which, and how. */

#include "tiers/catalog.h"
#include "tools/roots.h"

struct inventory_version {
    struct version_id id;
    uint32_t present, complete, pinned; /* bit per root */
    struct complete_summary summary;    /* if complete somewhere */
    uint32_t parts;                     /* manifests of an incomplete one, in the root that has most */
};

struct inventory {
    const struct roots *roots;
    const char *job;
    struct catalog catalogs[ROOTS_MAX];
    struct inventory_version *versions; /* ascending */
    size_t count;
    size_t generation_count; /* over all roots */
};

/* An exit status, its sentence printed. A job that no root knows has neither versions nor generations. */
int inventory_load(const struct roots *roots, const char *job, struct inventory *ret_inventory) MUST_CHECK;
void inventory_free(struct inventory *inventory);
/* Finds GENERATION/STEP, STEP or "latest" (also NULL: the greatest complete one). */
int inventory_find(const struct inventory *inventory, const char *text,
                   const struct inventory_version **ret_version) MUST_CHECK;
/* Opens the roots and loads the job of ctl->words[0]; STATUS_ABSENT: no root knows it. */
int inventory_open(struct ctl *ctl, struct roots *ret_roots, struct inventory *ret_inventory) MUST_CHECK;
/* The run record of a generation, and when it was last touched; NULL: no root has it. */
const struct catalog_generation *inventory_generation(const struct inventory *inventory, uint64_t generation);
/* Reads the index from the nearest root that has it undamaged; warns of others. */
int inventory_complete(const struct inventory *inventory, const struct inventory_version *version,
                       struct complete *ret_complete) MUST_CHECK;
