/* SPDX-License-Identifier: Apache-2.0 */
/* What a lane learns of its tier and of the encoder, and what `auto` makes of it. */
#include "daemon/lane.h"
#include "tests/unit/daemon/unit.h"

#define ROUNDS 200

/* So many of the rounds are encoded, if a chunk of 1 MiB takes so long to encode and to write, stored as that part. */
static unsigned encoded(struct lane *lane, uint64_t encode_ns, uint64_t write_ns, uint32_t stored) {
    unsigned count = 0;
    for (unsigned i = 0; i < ROUNDS; i++) {
        bool encodes = lane_gains(lane);
        count += encodes;
        if (!encodes) {
            lane_took(&lane->write_ns, write_ns, 1, MIB(1));
            continue;
        }
        if (stored < MIB(1))
            lane_took(&lane->encode_ns, encode_ns, 1, MIB(1));
        lane_shrank(lane, MIB(1), stored);
    }
    return count;
}

#define OTHER_WAY (ROUNDS / 32) /* tried in between */

static void a_slow_tier_gains(void **state) {
    struct lane lane = {0};
    assert_int_equal(encoded(&lane, 2000000, 5000000, MIB(1) / 3), ROUNDS - 1 - OTHER_WAY);
}

static void a_fast_tier_does_not(void **state) {
    struct lane lane = {0};
    assert_int_equal(encoded(&lane, 2000000, 700000, MIB(1) / 3), 1 + OTHER_WAY);
}

/* Noise: it is seen from samples, so nothing is known of the encoder's speed. */
static void what_does_not_shrink_does_not(void **state) {
    struct lane lane = {0};
    assert_int_equal(encoded(&lane, 0, 5000000, MIB(1)), 1 + OTHER_WAY);
}

/* Two in flight took as long each: the pair is what the tier does in that time. */
static void what_is_in_flight_together_shares_the_time(void **state) {
    uint64_t alone = 0, together = 0;
    lane_took(&alone, 1000000, 1, MIB(4));
    lane_took(&together, 4000000, 4, MIB(4));
    assert_int_equal(alone, 250000);
    assert_int_equal(together, alone);
}

static void it_learns_anew(void **state) {
    struct lane lane = {0};
    assert_int_equal(encoded(&lane, 2000000, 700000, MIB(1) / 3), 1 + OTHER_WAY);
    encoded(&lane, 2000000, 9000000, MIB(1) / 3); /* the tier has become slow */
    assert_true(encoded(&lane, 2000000, 9000000, MIB(1) / 3) >= ROUNDS - OTHER_WAY - 1);
}

/* A limited rate is the tier's speed; what encoding saves of it is there for other chunks. */
static void a_limit_is_a_slow_tier(void **state) {
    struct lane lane = {.config.rate_mib_s = 100, .rate_next_ns = NANOSECONDS_PER_SECOND};
    unsigned count = encoded(&lane, 2000000, 100000, MIB(1) / 2);
    assert_int_equal(count, ROUNDS - 1 - OTHER_WAY);
    assert_int_equal(lane.rate_next_ns, NANOSECONDS_PER_SECOND - count * UINT64_C(5000000));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_tier_gains),
        cmocka_unit_test(a_fast_tier_does_not),
        cmocka_unit_test(what_does_not_shrink_does_not),
        cmocka_unit_test(what_is_in_flight_together_shares_the_time),
        cmocka_unit_test(it_learns_anew),
        cmocka_unit_test(a_limit_is_a_slow_tier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
