/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

/* Numbers by chance, each test program its own; what it prints is what TEST_SEED repeats. */
static uint64_t random_state;

static inline void random_seed(void) {
    const char *seed = getenv("TEST_SEED");
    if (seed)
        random_state = strtoull(seed, NULL, 0);
    else if (getrandom(&random_state, sizeof random_state, 0) != sizeof random_state)
        abort();
    printf("TEST_SEED=0x%llx\n", (unsigned long long)random_state);
}

static inline uint64_t random_number(uint64_t below) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % below;
}
