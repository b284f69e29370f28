/* SPDX-License-Identifier: Apache-2.0 */
/* What goes in comes out, and nothing hostile gets further than an error. */
#include "tests/unit/tiers/support.h"

#include <errno.h>

static uint64_t next_random(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

static void fill(char *data, size_t size, unsigned entropy_bits, uint64_t seed) {
    for (size_t i = 0; i < size; i++)
        data[i] = (char)(next_random(&seed) & ((1u << entropy_bits) - 1));
}

static void test_round_trip(void **state) {
    static const uint32_t sizes[] = {0, 1, 100, 4096, 4097, 8192, 65536, 1000001, 4194304};
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        for (unsigned entropy = 0; entropy <= 8; entropy += 2) {
            uint32_t size = sizes[i];
            char *raw = malloc(size + 1), *back = malloc(size + 1), *encoded = malloc(codec_bound(size));
            assert_true(raw && back && encoded);
            fill(raw, size, entropy, size + entropy);
            memset(encoded, 0xee, codec_bound(size));
            uint32_t stored = codec_encode(CODEC_LZ4, raw, size, encoded);
            if (stored == size) {
                assert_true(size <= 8192 || entropy >= 4); /* LZ4 finds repetitions, nothing else */
            } else {
                uint64_t padded = align_up(stored, TIER_ALIGNMENT);
                assert_true(padded < size);
                for (uint64_t k = stored; k < padded; k++)
                    assert_int_equal(encoded[k], 0);
                assert_int_equal(codec_decode(CODEC_LZ4, encoded, stored, back, size), 0);
                assert_memory_equal(back, raw, size);
                assert_int_equal(codec_decode(CODEC_RAW, encoded, stored, back, size), -EBADMSG);
                assert_int_equal(codec_decode(CODEC_LZ4, encoded, stored, back, size - 2), -EBADMSG);
                assert_int_equal(codec_decode(CODEC_LZ4, encoded, stored - 1, back, size), -EBADMSG);
            }
            assert_int_equal(codec_encode(CODEC_RAW, raw, size, encoded), size);
            assert_int_equal(codec_decode(CODEC_RAW, raw, size, back, size), 0);
            assert_memory_equal(back, raw, size);
            free(raw);
            free(back);
            free(encoded);
        }
    }
}

/* The buffers have exactly the sizes that are named, so that a sanitizer sees a step beyond. */
static void test_hostile(void **state) {
    uint64_t seed = 12345;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 20000; i++) {
        uint32_t raw_length = (uint32_t)(next_random(&seed) % 5000 + 1);
        uint32_t stored_length = (uint32_t)(next_random(&seed) % raw_length);
        char *encoded = malloc(stored_length + 1), *raw = malloc(raw_length);
        assert_true(encoded && raw);
        char *exact = encoded + 1; /* ends where the allocation ends */
        fill(exact, stored_length, 1 + i % 8, seed);
        int r = codec_decode(CODEC_LZ4, exact, stored_length, raw, raw_length);
        assert_true(r == 0 || r == -EBADMSG);
        free(encoded);
        free(raw);
    }
}

static void test_mutated(void **state) {
    enum { SIZE = 20000 };
    uint64_t seed = 99;
    print_message("seed %llu\n", (unsigned long long)seed);
    char *raw = malloc(SIZE), *back = malloc(SIZE), *encoded = malloc(codec_bound(SIZE));
    assert_true(raw && back && encoded);
    fill(raw, SIZE, 1, 7);
    uint32_t stored = codec_encode(CODEC_LZ4, raw, SIZE, encoded);
    assert_true(stored < SIZE);
    for (int i = 0; i < 20000; i++) {
        uint64_t at = next_random(&seed) % stored;
        char kept = encoded[at];
        encoded[at] = (char)next_random(&seed);
        int r = codec_decode(CODEC_LZ4, encoded, stored, back, SIZE);
        assert_true(r == 0 || r == -EBADMSG);
        encoded[at] = kept;
    }
    free(raw);
    free(back);
    free(encoded);
}

static void test_worthwhile(void **state) {
    static const uint32_t sizes[] = {5000, 65535, 65536, 4194304};
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        char *raw = malloc(sizes[i]);
        assert_non_null(raw);
        fill(raw, sizes[i], 8, 1);
        assert_false(codec_worthwhile(raw, sizes[i]));
        fill(raw, sizes[i], 1, 1);
        assert_true(codec_worthwhile(raw, sizes[i]));
        free(raw);
    }
    assert_false(codec_worthwhile("", 0));
}

static void test_names(void **state) {
    enum codec codec;
    assert_true(codec_from_name("raw", &codec) && codec == CODEC_RAW);
    assert_true(codec_from_name("lz4", &codec) && codec == CODEC_LZ4);
    assert_true(codec_from_name("auto", &codec) && codec == CODEC_AUTO);
    assert_false(codec_from_name("zstd", &codec));
    assert_string_equal(codec_name(CODEC_LZ4), "lz4");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_hostile), cmocka_unit_test(test_mutated),
        cmocka_unit_test(test_worthwhile), cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
