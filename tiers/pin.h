/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pins, as scans and retention look at them; made and removed by retention_pin() and its like. */

#include "tiers/tier.h"

/* True if one of the pins among `entries`, a listing of `directory`, has not expired. A pin that
 * cannot be read counts as one that has not. Blocking. */
bool pin_holds(struct tier *tier, const char *directory, const struct tier_entries *entries);
