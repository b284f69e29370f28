/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A pin that a running verb holds on a version in every root that has it. It expires by itself
 * should the process die, and is renewed while it lives.
 */

#include "tools/inventory.h"

#define HOLD_EXPIRY_S 600

struct hold {
    const struct inventory *inventory;
    const struct inventory_version *version;
    char name[64];
    uint32_t held; /* bit per root */
    uint64_t renew_ns;
};

/* A root that cannot be pinned (read-only, say) is warned of. */
void hold_take(struct hold *hold, const struct inventory *inventory, const struct inventory_version *version);
/* Call it often. */
void hold_renew(struct hold *hold);
void hold_release(struct hold *hold);
