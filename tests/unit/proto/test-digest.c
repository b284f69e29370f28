/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/digest-kernel.h"
#include "tests/unit/proto/unit.h"

/* Computed by the Python package xxhash 4.1.0 (XXH 0.8.4): xxh3_128_digest(pattern(n)).hex(), with
 * pattern(n) = bytes((i * 7 + (i >> 8) * 13 + 3) & 255 for i in range(n)). The lengths are those
 * where XXH3 changes its way of working, and those of a leaf. */
static const struct {
    size_t length;
    const char *hex;
} leaves[] =
    {
        {0, "99aa06d3014798d86001c324468d497f"},      {1, "22bbb76b211a39ba13e608bc156defed"},
        {15, "68f75783c1d1a650c30b29715d7282a3"},     {16, "ce0b9647ab24f88460d75c5e47d40a24"},
        {17, "bfd327edcc2fbd12eeed7654312a26d7"},     {128, "1b1962a096bac78bc580008b6c92ac53"},
        {129, "293e4968c4619023bd91ce7ace4d385b"},    {240, "ad46c1021b076bc704e0b5f034bee80b"},
        {241, "ac6c3492c3d6b45d8beadd3a8874fe17"},    {1024, "ed4745f2bc58bc68a6f1a01606138456"},
        {1025, "4d589146d3f9b41cecd2bad8e8ceb864"},   {4096, "c92b3f1b949bed7bd9d53865f3518d6b"},
        {262143, "94410cebaa7e93ac7c1c4ebf45f5c742"}, {262144, "5745aa17b122e6107446f2140b9a59a7"},
},
  /* xxh3_128 over the concatenated xxh3_128_digest() of slices of 262144 bytes. */
    chunks[] = {
        {0, "88dffc9e4422ed4caabe9acf44c07a05"},       {1, "a31c3ef27874fae2f2c08395e3befff5"},
        {262144, "1bdee807d406d1c5cf4c5a8e2d3ca4e1"},  {262145, "4e8551e21706a1a87481baea797a9207"},
        {1048581, "3e067b7147cc2e0b2737a1515af7f453"},
};

static uint8_t *pattern(size_t length) {
    uint8_t *data = malloc(max_u64(length, 1));
    for (size_t i = 0; i < length; i++)
        data[i] = (uint8_t)(i * 7 + (i >> 8) * 13 + 3);
    return data;
}

static void assert_hex(const struct digest *digest, const char *hex) {
    char text[DIGEST_HEX_SIZE];
    digest_hex(digest, text);
    assert_string_equal(text, hex);
}

static void test_leaves_and_chunks(void **state) {
    for (size_t i = 0; i < ARRAY_SIZE(leaves); i++) {
        CLEANUP(freep) uint8_t *data = pattern(leaves[i].length);
        struct digest digest;
        digest_leaf(data, leaves[i].length, &digest);
        assert_hex(&digest, leaves[i].hex);
    }
    for (size_t i = 0; i < ARRAY_SIZE(chunks); i++) {
        CLEANUP(freep) uint8_t *data = pattern(chunks[i].length);
        struct digest digest;
        digest_chunk(data, chunks[i].length, &digest);
        assert_hex(&digest, chunks[i].hex);
    }
}

static void test_fold_is_how_leaves_make_a_chunk(void **state) {
    CLEANUP(freep) uint8_t *data = pattern(1048581);
    struct digest parts[5], digest;
    for (size_t i = 0; i < 5; i++)
        digest_leaf(data + i * DIGEST_LEAF_SIZE, min_u64(DIGEST_LEAF_SIZE, 1048581 - i * DIGEST_LEAF_SIZE), &parts[i]);
    digest_fold(parts, 5, &digest);
    assert_hex(&digest, "3e067b7147cc2e0b2737a1515af7f453");
}

/* Every instruction set that this processor has gives the same digests and copies the same bytes,
 * wherever source and destination lie. */
static void test_every_kernel(void **state) {
    CLEANUP(freep) uint8_t *source = pattern(DIGEST_LEAF_SIZE + 128);
    CLEANUP(freep) uint8_t *destination = malloc(DIGEST_LEAF_SIZE + 256);
    struct random random = random_seeded("kernels");
    for (size_t k = 0; digest_kernels[k]; k++) {
        const struct digest_kernel *kernel = digest_kernels[k];
        if (!kernel->usable()) {
            print_message("kernel %s: not on this processor\n", kernel->name);
            continue;
        }
        print_message("kernel %s\n", kernel->name);
        for (size_t i = 0; i < ARRAY_SIZE(leaves); i++) {
            struct digest leaf, copy;
            kernel->leaf(source, leaves[i].length, &leaf);
            assert_hex(&leaf, leaves[i].hex);
            kernel->copy(destination, source, leaves[i].length, &copy);
            assert_hex(&copy, leaves[i].hex);
        }
        for (unsigned i = 0; i < 300; i++) {
            size_t from = random_below(&random, 128), to = 64 + random_below(&random, 128);
            size_t length = random_below(&random, i % 3 ? 10000 : DIGEST_LEAF_SIZE + 1);
            struct digest expected, digest;
            memset(destination, 0xa5, DIGEST_LEAF_SIZE + 256);
            kernel->leaf(source + from, length, &expected);
            kernel->copy(destination + to, source + from, length, &digest);
            assert_true(digest_equal(&expected, &digest));
            assert_memory_equal(destination + to, source + from, length);
            for (size_t j = 0; j < 64; j++) {
                assert_int_equal(destination[to - 1 - j], 0xa5);
                assert_int_equal(destination[to + length + j], 0xa5);
            }
        }
    }
}

static void test_copy_leaf(void **state) {
    CLEANUP(freep) uint8_t *source = pattern(DIGEST_LEAF_SIZE);
    CLEANUP(freep) uint8_t *destination = malloc(DIGEST_LEAF_SIZE);
    struct digest digest;
    digest_copy_leaf(destination, source, DIGEST_LEAF_SIZE, &digest);
    assert_hex(&digest, "5745aa17b122e6107446f2140b9a59a7");
    assert_memory_equal(source, destination, DIGEST_LEAF_SIZE);
}

static void test_hex(void **state) {
    static const char hex[] = "0123456789abcdef00ff10efcdab9876";
    struct digest digest, untouched = {{42}};
    assert_true(digest_from_hex(hex, 32, &digest));
    assert_hex(&digest, hex);
    assert_int_equal(digest.bytes[0], 0x01);
    assert_int_equal(digest.bytes[15], 0x76);
    assert_false(digest_from_hex(hex, 31, &untouched));
    assert_false(digest_from_hex("0123456789ABCDEF00ff10efcdab9876", 32, &untouched));
    assert_false(digest_from_hex("0123456789abcdeg00ff10efcdab9876", 32, &untouched));
    assert_int_equal(untouched.bytes[0], 42);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_leaves_and_chunks),
        cmocka_unit_test(test_fold_is_how_leaves_make_a_chunk),
        cmocka_unit_test(test_every_kernel),
        cmocka_unit_test(test_copy_leaf),
        cmocka_unit_test(test_hex),
    };
    return cmocka_run_group_tests_name("digest", tests, NULL, NULL);
}
