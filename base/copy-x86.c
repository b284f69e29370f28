/* SPDX-License-Identifier: Apache-2.0 */
/* SSE2 is part of every x86-64; wider stores are no faster here: memory is the bound. */
#include "base/copy.h"

#include <emmintrin.h>

#define LINE 64
#define WORTHWHILE KIB(64) /* below, the destination may well be used while it is in cache */
#define AHEAD 1024         /* bytes that the source is prefetched ahead */

void copy_past_cache(void *destination, const void *source, size_t length) {
    uint8_t *to = destination;
    const uint8_t *from = source;
    if (length < WORTHWHILE) {
        memcpy(to, from, length);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    memcpy(to, from, head);
    to += head;
    from += head;
    length -= head;
    for (; length >= LINE; length -= LINE, to += LINE, from += LINE) {
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    _mm_sfence(); /* whoever is told of the copy sees it */
    memcpy(to, from, length);
}
