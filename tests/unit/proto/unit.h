/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * cmocka wants these headers before its own. Random tests draw from a seed that is printed, and
 * may be given as SEED in the environment to see a failure again.
 */

#include "base/problem.h"
#include "base/util.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <cmocka.h>
/* clang-format on */

struct random {
    uint64_t state;
};

static inline struct random random_seeded(const char *test) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const char *given = getenv("SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 20;
    print_message("%s: SEED=%llu\n", test, (unsigned long long)seed);
    return (struct random){seed};
}

/* splitmix64 */
static inline uint64_t random_next(struct random *random) {
    uint64_t z = random->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline uint64_t random_below(struct random *random, uint64_t bound) { return random_next(random) % bound; }

/* Changes a few bytes, cuts the end off, or repeats a stretch. Returns the new size, at most `capacity`. */
static inline size_t random_mutate(struct random *random, uint8_t *data, size_t size, size_t capacity) {
    unsigned changes = 1 + (unsigned)random_below(random, 4);
    while (changes--) {
        size_t at = size ? random_below(random, size) : 0;
        switch (random_below(random, 6)) {
        case 0:
            size = at;
            break;
        case 1:
            if (size) {
                size_t length = random_below(random, size - at) + 1;
                if (size + length <= capacity) {
                    memmove(data + at + length, data + at, size - at);
                    size += length;
                }
            }
            break;
        case 2:
            if (size)
                data[at] ^= (uint8_t)(1 << random_below(random, 8));
            break;
        case 3:
            if (size)
                data[at] = (uint8_t[]){0, 1, 0x7f, 0x80, 0xff, '"', '[', '9'}[random_below(random, 8)];
            break;
        case 4: /* a hostile number where numbers may be */
            if (size - at / 8 * 8 >= 8)
                memcpy(data + at / 8 * 8,
                       &(uint64_t){(uint64_t[]){0, 1, UINT64_MAX, INT64_MAX, UINT64_C(1) << 63, UINT32_MAX,
                                                UINT64_C(1) << 62, random_next(random)}[random_below(random, 8)]},
                       8);
            break;
        case 5:
            if (size)
                data[at] = (uint8_t)random_next(random);
            break;
        }
    }
    return size;
}
