/* SPDX-License-Identifier: Apache-2.0 */
#define XXH_INLINE_ALL
#include "proto/digest-kernel.h"

#include <immintrin.h>
#include <xxhash.h>

typedef __m256i lanes;

static inline lanes lanes_load(const uint8_t *from) { return _mm256_loadu_si256((const void *)from); }
static inline void lanes_store(uint8_t *to, lanes value) { _mm256_storeu_si256((void *)to, value); }
static inline void lanes_stream(uint8_t *to, lanes value) { _mm256_stream_si256((void *)to, value); }
static inline lanes lanes_set(uint32_t number) { return _mm256_set1_epi32((int)number); }
static inline lanes lanes_xor(lanes a, lanes b) { return _mm256_xor_si256(a, b); }
static inline lanes lanes_add(lanes a, lanes b) { return _mm256_add_epi64(a, b); }
static inline lanes lanes_multiply(lanes a, lanes b) { return _mm256_mul_epu32(a, b); }
#define lanes_shift_right(value, bits) _mm256_srli_epi64(value, bits)
#define lanes_shift_left(value, bits) _mm256_slli_epi64(value, bits)
#define lanes_shuffle(value, order) _mm256_shuffle_epi32(value, order)

#include "proto/digest-x86.inc"

static bool usable(void) { return __builtin_cpu_supports("avx2"); }

extern const struct digest_kernel digest_kernel_avx2;
const struct digest_kernel digest_kernel_avx2 = {"avx2", usable, leaf, copy};
