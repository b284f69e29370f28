/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests. Hexadecimal is read exactly if it is 32 lower-case digits, and written again the same. A
 * chunk's digest is the fold of its leaves', and copying makes the same copy and digest.
 */
#include "proto/digest.h"

#include "tests/fuzz/fuzz.h"

static bool is_hex(const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (!(data[i] >= '0' && data[i] <= '9') && !(data[i] >= 'a' && data[i] <= 'f'))
            return false;
    return size == 2 * DIGEST_SIZE;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct digest digest, copied, chunk, fold;
    char hex[DIGEST_HEX_SIZE];
    bool is = digest_from_hex((const char *)data, size, &digest);
    assert(is == is_hex(data, size));
    if (is) {
        digest_hex(&digest, hex);
        assert(memcmp(hex, data, size) == 0);
    }
    size_t length = min_u64(size, DIGEST_LEAF_SIZE);
    CLEANUP(freep) uint8_t *copy = malloc(length);
    digest_leaf(data, length, &digest);
    digest_copy_leaf(copy, data, length, &copied);
    assert(digest_equal(&digest, &copied) && (!length || memcmp(copy, data, length) == 0));
    digest_chunk(data, length, &chunk);
    digest_fold(&digest, 1, &fold);
    assert(digest_equal(&chunk, &fold));
    return 0;
}
