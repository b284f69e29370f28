/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/codec.h"

#include "tiers/tier.h"

#include <errno.h>
#include <limits.h>
#include <lz4.h>

/*
 * Encoded chunks lie at aligned offsets, so what counts is the length after rounding up: an encoding
 * that saves less than one block saves nothing on disk and costs a decode. LZ4 is therefore given
 * only the room that would be worth it and gives up by itself. The bytes up to the next block
 * boundary are zeroed: they are written too, and must not carry what was in the buffer before.
 */

#define SAMPLE_SIZE KIB(16)
#define SAMPLE_COUNT 4
#define LZ4_ACCELERATION 1

size_t codec_bound(size_t raw_length) {
    assert(raw_length <= LZ4_MAX_INPUT_SIZE);
    return align_up((size_t)LZ4_compressBound((int)raw_length), TIER_ALIGNMENT);
}

uint32_t codec_encode(enum codec codec, const void *raw, uint32_t raw_length, void *encoded) {
    assert(codec == CODEC_RAW || codec == CODEC_LZ4);
    if (codec == CODEC_RAW || raw_length <= TIER_ALIGNMENT || raw_length > LZ4_MAX_INPUT_SIZE)
        return raw_length;
    uint32_t room = (raw_length - 1) / TIER_ALIGNMENT * TIER_ALIGNMENT;
    int length = LZ4_compress_fast(raw, encoded, (int)raw_length, (int)room, LZ4_ACCELERATION);
    if (length <= 0)
        return raw_length;
    memset((char *)encoded + length, 0, align_up((uint64_t)length, TIER_ALIGNMENT) - (uint64_t)length);
    return (uint32_t)length;
}

int codec_decode(enum codec codec, const void *encoded, uint32_t stored_length, void *raw, uint32_t raw_length) {
    if (stored_length == raw_length) {
        memcpy(raw, encoded, raw_length);
        return 0;
    }
    if (codec != CODEC_LZ4 || stored_length > INT_MAX || raw_length > LZ4_MAX_INPUT_SIZE)
        return -EBADMSG;
    int length = LZ4_decompress_safe(encoded, raw, (int)stored_length, (int)raw_length);
    return length >= 0 && (uint32_t)length == raw_length ? 0 : -EBADMSG;
}

bool codec_worthwhile(const void *raw, uint32_t raw_length) {
    char encoded[LZ4_COMPRESSBOUND(SAMPLE_SIZE)];
    uint32_t samples = raw_length >= SAMPLE_COUNT * SAMPLE_SIZE ? SAMPLE_COUNT : 1;
    uint32_t size = (uint32_t)min_u64(raw_length, SAMPLE_SIZE);
    uint32_t distance = samples > 1 ? (raw_length - size) / (samples - 1) : 0;
    uint64_t sampled = 0, kept = 0;
    for (uint32_t i = 0; i < samples; i++) {
        const char *sample = (const char *)raw + (uint64_t)i * distance;
        int length = LZ4_compress_fast(sample, encoded, (int)size, sizeof encoded, LZ4_ACCELERATION);
        sampled += size;
        kept += length > 0 ? (uint64_t)length : size;
    }
    return kept * 10 <= sampled * 9 && sampled > 0;
}

bool codec_from_name(const char *name, enum codec *ret_codec) {
    for (enum codec codec = CODEC_RAW; codec <= CODEC_AUTO; codec++) {
        if (strcmp(name, codec_name(codec)) == 0) {
            *ret_codec = codec;
            return true;
        }
    }
    return false;
}

const char *codec_name(enum codec codec) {
    switch (codec) {
    case CODEC_RAW:
        return "raw";
    case CODEC_LZ4:
        return "lz4";
    case CODEC_AUTO:
        return "auto";
    }
    assert(!"no such codec");
    return NULL;
}
