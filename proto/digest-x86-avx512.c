/* SPDX-License-Identifier: Apache-2.0 */
#define XXH_INLINE_ALL
#include "proto/digest-kernel.h"

#include <immintrin.h>
#include <xxhash.h>

typedef __m512i lanes;

static inline lanes lanes_load(const uint8_t *from) { return _mm512_loadu_si512((const void *)from); }
static inline void lanes_store(uint8_t *to, lanes value) { _mm512_storeu_si512((void *)to, value); }
static inline void lanes_stream(uint8_t *to, lanes value) { _mm512_stream_si512((void *)to, value); }
static inline lanes lanes_set(uint32_t number) { return _mm512_set1_epi32((int)number); }
static inline lanes lanes_xor(lanes a, lanes b) { return _mm512_xor_si512(a, b); }
static inline lanes lanes_add(lanes a, lanes b) { return _mm512_add_epi64(a, b); }
static inline lanes lanes_multiply(lanes a, lanes b) { return _mm512_mul_epu32(a, b); }
#define lanes_shift_right(value, bits) _mm512_srli_epi64(value, bits)
#define lanes_shift_left(value, bits) _mm512_slli_epi64(value, bits)
#define lanes_shuffle(value, order) _mm512_shuffle_epi32(value, order)

#include "proto/digest-x86.inc"

static bool usable(void) { return __builtin_cpu_supports("avx512f"); }

extern const struct digest_kernel digest_kernel_avx512;
const struct digest_kernel digest_kernel_avx512 = {"avx512", usable, leaf, copy};
