/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks: 1 byte for the codec, 3 for the raw length, then bytes. Decoding hostile ones stays within
 * both buffers and gives either all of the chunk or an error; what is encoded decodes to the same.
 */
#include "tiers/codec.h"

#include "tests/fuzz/fuzz.h"

#include <errno.h>

#define RAW_MAX KIB(256)

static void check_decode(enum codec codec, const uint8_t *encoded, uint32_t stored_length, uint32_t raw_length) {
    CLEANUP(freep) uint8_t *raw = calloc(1, raw_length), *again = malloc(raw_length);
    assert(raw && again); /* also of no bytes */
    memset(again, 0xff, raw_length);
    int r = codec_decode(codec, encoded, stored_length, raw, raw_length);
    assert(r == 0 || r == -EBADMSG);
    assert(codec_decode(codec, encoded, stored_length, again, raw_length) == r);
    assert(r < 0 || memcmp(raw, again, raw_length) == 0); /* nothing is left as it was */
    if (stored_length == raw_length)
        assert(r == 0 && memcmp(raw, encoded, raw_length) == 0);
    else
        assert(r < 0 || codec == CODEC_LZ4);
}

static void check_encode(enum codec codec, const uint8_t *raw, uint32_t length) {
    CLEANUP(freep) uint8_t *encoded = malloc(codec_bound(length)), *again = malloc(length);
    uint32_t stored = codec_encode(codec, raw, length, encoded);
    assert(stored <= length && (stored == length || codec == CODEC_LZ4));
    int r = codec_decode(codec, stored == length ? raw : encoded, stored, again, length);
    assert(r == 0 && memcmp(again, raw, length) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct feed feed = {data, size};
    enum codec codec = feed_below(&feed, 4) ? CODEC_LZ4 : CODEC_RAW;
    uint32_t raw_length = (uint32_t)(feed_number(&feed, 3) % (RAW_MAX + 1));
    if (feed.left == 0)
        return 0;
    check_decode(codec, feed.at, (uint32_t)feed.left, raw_length);
    check_decode(CODEC_RAW, feed.at, (uint32_t)feed.left, (uint32_t)feed.left);
    check_encode(codec, feed.at, (uint32_t)feed.left);
    return 0;
}
