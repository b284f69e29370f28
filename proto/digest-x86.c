/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline (SSE2), and the table. */
#define XXH_INLINE_ALL
#include "proto/digest-kernel.h"

#include <immintrin.h>
#include <xxhash.h>

typedef __m128i lanes;

static inline lanes lanes_load(const uint8_t *from) { return _mm_loadu_si128((const void *)from); }
static inline void lanes_store(uint8_t *to, lanes value) { _mm_storeu_si128((void *)to, value); }
static inline void lanes_stream(uint8_t *to, lanes value) { _mm_stream_si128((void *)to, value); }
static inline lanes lanes_set(uint32_t number) { return _mm_set1_epi32((int)number); }
static inline lanes lanes_xor(lanes a, lanes b) { return _mm_xor_si128(a, b); }
static inline lanes lanes_add(lanes a, lanes b) { return _mm_add_epi64(a, b); }
static inline lanes lanes_multiply(lanes a, lanes b) { return _mm_mul_epu32(a, b); }
#define lanes_shift_right(value, bits) _mm_srli_epi64(value, bits)
#define lanes_shift_left(value, bits) _mm_slli_epi64(value, bits)
#define lanes_shuffle(value, order) _mm_shuffle_epi32(value, order)

#include "proto/digest-x86.inc"

static bool usable(void) { return true; }

static const struct digest_kernel digest_kernel_sse2 = {"sse2", usable, leaf, copy};
extern const struct digest_kernel digest_kernel_avx2, digest_kernel_avx512;

const struct digest_kernel *const digest_kernels[] = {
    &digest_kernel_avx512,
    &digest_kernel_avx2,
    &digest_kernel_sse2,
    NULL,
};
