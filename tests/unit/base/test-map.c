/* SPDX-License-Identifier: Apache-2.0 */
#include "base/map.h"
#include "unit.h"

#include <sys/mman.h>

/* How much of the address space is mapped, in pages. */
static unsigned long mapped(void) {
    unsigned long pages = 0;
    CLEANUP(fclosep) FILE *file = fopen("/proc/self/statm", "re");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu", &pages), 1);
    return pages;
}

/* Large ones lie where a huge page can; all are whole, and what was taken to find such a place is given back. */
static void every_size(void **state) {
    static const size_t sizes[] = {1, 4096, MIB(2) - 1, MIB(2), MIB(2) + 1, MIB(2) * 3, MIB(7) + 12345, MIB(16)};
    (void)state;
    free(malloc(1));
    (void)mapped();
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        size_t size = sizes[i];
        CLEANUP(closep) int fd = memfd_create("map", MFD_CLOEXEC);
        assert_true(fd >= 0);
        assert_int_equal(ftruncate(fd, (off_t)size), 0);
        unsigned long before = mapped();
        uint8_t *written = map_file(fd, size, true);
        assert_ptr_not_equal(written, MAP_FAILED);
        uint8_t *read = map_file(fd, size, false);
        assert_ptr_not_equal(read, MAP_FAILED);
        assert_int_equal(mapped() - before, 2 * ((size + 4095) / 4096));
        if (size >= MAP_HUGE_SIZE) {
            assert_int_equal((uintptr_t)written % MAP_HUGE_SIZE, 0);
            assert_int_equal((uintptr_t)read % MAP_HUGE_SIZE, 0);
        }
        memset(written, (int)i + 1, size);
        for (size_t at = 0; at < size; at++)
            if (read[at] != i + 1)
                fail_msg("byte %zu of %zu is not what was written", at, size);
        munmap(written, size);
        munmap(read, size);
        assert_int_equal(mapped(), before);
    }
}

static void what_cannot_be_mapped(void **state) {
    (void)state;
    assert_ptr_equal(map_file(-1, 4096, false), MAP_FAILED);
    unsigned long before = mapped();
    assert_ptr_equal(map_file(-1, MIB(4), false), MAP_FAILED);
    assert_int_equal(mapped(), before);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_size), cmocka_unit_test(what_cannot_be_mapped)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
