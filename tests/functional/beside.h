/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a test does beside a client that behaves well: that one saves, waits for LOCAL, restores and
 * compares every byte, round after round, before, during and after.
 */

#include "tests/functional/support.h"

/* Starts a daemon as configured, and the good client; runs `attack`; both must still be there then. */
void beside_a_good_client(const struct settings *settings, void (*attack)(void));
/* From within an attack: waits until the good client has done two more rounds. */
void good_client_goes_on(void);
