/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Codecs of chunks. An encoded chunk that would not be shorter (after rounding up to
 * TIER_ALIGNMENT) is stored raw: stored length = raw length means not encoded.
 */

#include "base/problem.h"
#include "proto/manifest.h"

/* Bytes of scratch that codec_encode may need for a chunk of this size, a multiple of TIER_ALIGNMENT. */
size_t codec_bound(size_t raw_length);
/* Encodes into `encoded` (codec_bound bytes). Returns the stored length; == raw_length: keep the raw bytes. */
uint32_t codec_encode(enum codec codec, const void *raw, uint32_t raw_length, void *encoded);
/* Decodes hostile input into exactly raw_length bytes; -EBADMSG. */
int codec_decode(enum codec codec, const void *encoded, uint32_t stored_length, void *raw,
                 uint32_t raw_length) MUST_CHECK;
/* For `auto`: does a sample of this chunk compress by at least a tenth? Bounded work (64 KiB or so). */
bool codec_worthwhile(const void *raw, uint32_t raw_length);
/* "raw", "lz4", "auto"; false: no such codec. */
bool codec_from_name(const char *name, enum codec *ret_codec);
const char *codec_name(enum codec codec);
