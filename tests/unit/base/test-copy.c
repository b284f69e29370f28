/* SPDX-License-Identifier: Apache-2.0 */
#include "base/copy.h"
#include "unit.h"

/* Every alignment of both ends around the length from which stores go past the cache. */
static void every_alignment(void **state) {
    enum { SIZE = 66 << 10, ROOM = SIZE + 512 };
    uint8_t *source = malloc(ROOM), *destination = malloc(ROOM), *expected = malloc(ROOM);
    (void)state;
    for (size_t i = 0; i < ROOM; i++)
        source[i] = (uint8_t)(i * 31 + (i >> 8));
    for (size_t from = 0; from < 65; from += 13)
        for (size_t to = 0; to < 65; to++)
            for (size_t length = SIZE - 2200; length < SIZE; length += 701) {
                memset(destination, 0xee, ROOM);
                memset(expected, 0xee, ROOM);
                copy_past_cache(destination + to, source + from, length);
                memcpy(expected + to, source + from, length);
                assert_memory_equal(destination, expected, ROOM);
            }
    copy_past_cache(destination, source, 0);
    copy_past_cache(destination, source, 1);
    assert_int_equal(destination[0], source[0]);
    free(source);
    free(destination);
    free(expected);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_alignment)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
