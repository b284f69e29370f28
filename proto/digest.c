/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/digest.h"

#include "proto/digest-kernel.h"

#define XXH_STATIC_LINKING_ONLY /* a state on the stack */
#include <xxhash.h>

static const struct digest_kernel *digest_kernel(void) {
    size_t i = 0;
    while (!digest_kernels[i]->usable())
        i++;
    return digest_kernels[i];
}

void digest_leaf(const void *data, size_t length, struct digest *ret_digest) {
    digest_kernel()->leaf(data, length, ret_digest);
}

void digest_copy_leaf(void *destination, const void *source, size_t length, struct digest *ret_digest) {
    assert(length <= DIGEST_LEAF_SIZE);
    digest_kernel()->copy(destination, source, length, ret_digest);
}

void digest_fold(const struct digest *digests, size_t count, struct digest *ret_digest) {
    _Static_assert(sizeof *digests == DIGEST_SIZE, "an array of digests is their concatenation");
    assert(count >= 1);
    digest_leaf(digests, count * DIGEST_SIZE, ret_digest);
}

void digest_chunk(const void *data, size_t length, struct digest *ret_digest) {
    const struct digest_kernel *kernel = digest_kernel();
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    size_t at = 0;
    do {
        size_t leaf_length = min_u64(length - at, DIGEST_LEAF_SIZE);
        struct digest leaf;
        kernel->leaf((const uint8_t *)data + at, leaf_length, &leaf);
        XXH3_128bits_update(&state, leaf.bytes, sizeof leaf.bytes);
        at += leaf_length;
    } while (at < length);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    memcpy(ret_digest->bytes, canonical.digest, DIGEST_SIZE);
}

void digest_hex(const struct digest *digest, char ret_text[DIGEST_HEX_SIZE]) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < DIGEST_SIZE; i++) {
        ret_text[2 * i] = digits[digest->bytes[i] >> 4];
        ret_text[2 * i + 1] = digits[digest->bytes[i] & 15];
    }
    ret_text[2 * DIGEST_SIZE] = '\0';
}

/* A table of the digits' values plus one; what is no digit has 0. */
static const uint8_t hex_values[256] = {
    ['0'] = 1, ['1'] = 2,  ['2'] = 3,  ['3'] = 4,  ['4'] = 5,  ['5'] = 6,  ['6'] = 7,  ['7'] = 8,
    ['8'] = 9, ['9'] = 10, ['a'] = 11, ['b'] = 12, ['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16,
};

static int hex_value(char digit) { return hex_values[(unsigned char)digit] - 1; }

bool digest_from_hex(const char *text, size_t length, struct digest *ret_digest) {
    struct digest digest;
    if (length != 2 * DIGEST_SIZE)
        return false;
    for (size_t i = 0; i < DIGEST_SIZE; i++) {
        int high = hex_value(text[2 * i]), low = hex_value(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        digest.bytes[i] = (uint8_t)(high << 4 | low);
    }
    *ret_digest = digest;
    return true;
}
