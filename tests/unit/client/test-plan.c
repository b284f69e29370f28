/* SPDX-License-Identifier: Apache-2.0 */
/* Targets that are made present before their chunks come. */
#include "client/plan.h"
#include "tests/unit/client/unit.h"

#include <sys/mman.h>

#define PAGES 1024
#define MARGIN 3 /* pages before and behind the targets */

static size_t page;

static uint8_t *memory_new(void) {
    page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *memory = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(madvise(memory, PAGES * page, MADV_NOHUGEPAGE), 0);
    return memory;
}

static size_t present(const uint8_t *memory, size_t first, size_t end) {
    unsigned char pages[PAGES];
    size_t count = 0;
    assert_int_equal(mincore((void *)(uintptr_t)memory, PAGES * page, pages), 0);
    for (size_t i = first; i < end; i++)
        count += pages[i] & 1;
    return count;
}

/* Elements of 4 bytes from the middle of a page on, to that of another. */
static void prepare(struct plan_target target, uint8_t *memory) {
    target.element_size = 4;
    target.data = memory + MARGIN * page + page / 2;
    struct plan_copy copies[] = {
        {.element = 0, .count = PAGES / 2 * page / 4},
        {.element = PAGES / 2 * page / 4, .count = (PAGES / 2 - 2 * MARGIN) * page / 4},
    };
    struct plan plan = {.targets = &target, .copies = copies, .count = 2};
    plan_prepare(&plan, &(struct plan_window){.copy_count = 2});
}

static void whole_pages_become_present(void **state) {
    uint8_t *memory = memory_new();
    if (madvise(memory, page, MADV_POPULATE_WRITE) < 0)
        skip(); /* Linux before 5.14 */
    memset(memory + 100 * page, 0x5a, page);
    prepare((struct plan_target){0}, memory);
    assert_int_equal(present(memory, 0, MARGIN + 1), 1); /* the one with which it was tried */
    /* But for the page in which two copies meet. */
    assert_int_equal(present(memory, MARGIN + 1, PAGES - MARGIN), PAGES - 2 * MARGIN - 2);
    assert_int_equal(present(memory, PAGES - MARGIN, PAGES), 0);
    for (size_t i = 0; i < page; i++)
        assert_int_equal(memory[100 * page + i], 0x5a); /* and hold what they held */
    assert_int_equal(memory[99 * page], 0);
    munmap(memory, PAGES * page);
}

static void others_are_left_alone(void **state) {
    uint8_t *memory = memory_new();
    const int64_t stride[] = {8};
    prepare((struct plan_target){.stride = stride}, memory);
    prepare((struct plan_target){.on_device = true}, memory);
    assert_int_equal(present(memory, 0, PAGES), 0);
    assert_int_equal(mprotect(memory, PAGES * page, PROT_READ), 0);
    prepare((struct plan_target){0}, memory); /* which is not to be written to: no reason to fail, here */
    assert_int_equal(present(memory, 0, PAGES), 0);
    munmap(memory, PAGES * page);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_pages_become_present),
        cmocka_unit_test(others_are_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
