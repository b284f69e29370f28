/* SPDX-License-Identifier: Apache-2.0 */
/* Places in the device tier's arena: one by one, and many at random against a map of its pages. */
#include "daemon/arena.h"
#include "tests/unit/daemon/unit.h"

#include <stdlib.h>
#include <sys/random.h>

#define PAGE ARENA_ALIGNMENT

static int setup(void **state) {
    struct arena *arena;
    if (arena_new(&arena) < 0)
        return -1;
    *state = arena;
    return 0;
}

static int teardown(void **state) {
    arena_free(*state);
    return 0;
}

static struct arena_place take(struct arena *arena, uint64_t size) {
    struct arena_place place = {0};
    assert_true(arena_take(arena, size, &place));
    return place;
}

static void refuse(struct arena *arena, uint64_t size) {
    const struct arena_place before = {.offset = 1, .size = 2, .epoch = 3};
    struct arena_place place = before;
    uint64_t used = arena_used(arena);
    assert_false(arena_take(arena, size, &place));
    assert_memory_equal(&place, &before, sizeof place);
    assert_int_equal(arena_used(arena), used);
}

/* As long as the device has no arena. */
static void nothing_to_give(void **state) {
    refuse(*state, 1);
    arena_reset(*state, 0);
    refuse(*state, 1);
    assert_int_equal(arena_used(*state), 0);
}

static void whole_pages(void **state) {
    arena_reset(*state, 4 * PAGE);
    struct arena_place first = take(*state, 1), second = take(*state, PAGE + 1);
    assert_int_equal(first.offset, 0);
    assert_int_equal(first.size, PAGE);
    assert_int_equal(second.offset, PAGE);
    assert_int_equal(second.size, 2 * PAGE);
    assert_int_equal(arena_used(*state), 3 * PAGE);
}

static void sizes_that_never_fit(void **state) {
    arena_reset(*state, 4 * PAGE + PAGE / 2); /* the half page is nobody's */
    refuse(*state, 0);
    refuse(*state, 4 * PAGE + 1);
    refuse(*state, UINT64_MAX);
    refuse(*state, UINT64_MAX - PAGE);
    refuse(*state, (uint64_t)1 << 63);
    struct arena_place all = take(*state, 4 * PAGE);
    assert_int_equal(all.offset, 0);
    refuse(*state, 1);
}

static void full_and_again(void **state) {
    arena_reset(*state, 3 * PAGE);
    struct arena_place places[3];
    for (size_t i = 0; i < ARRAY_SIZE(places); i++)
        places[i] = take(*state, PAGE);
    refuse(*state, 1);
    arena_give(*state, &places[1]);
    assert_int_equal(places[1].size, 0);
    assert_int_equal(arena_used(*state), 2 * PAGE);
    refuse(*state, PAGE + 1);
    places[1] = take(*state, PAGE);
    assert_int_equal(places[1].offset, PAGE);
    refuse(*state, 1);
}

/* Half is free, and yet no two pages in a row; what is freed beside a gap becomes one with it. */
static void fragments(void **state) {
    arena_reset(*state, 8 * PAGE);
    struct arena_place places[8];
    for (size_t i = 0; i < ARRAY_SIZE(places); i++)
        places[i] = take(*state, PAGE);
    for (size_t i = 0; i < ARRAY_SIZE(places); i += 2)
        arena_give(*state, &places[i]);
    assert_int_equal(arena_used(*state), 4 * PAGE);
    refuse(*state, 2 * PAGE);
    arena_give(*state, &places[3]); /* the gaps before and behind it: 2, 3, 4 */
    refuse(*state, 4 * PAGE);
    struct arena_place wide = take(*state, 3 * PAGE);
    assert_int_equal(wide.offset, 2 * PAGE);
    arena_give(*state, &places[7]); /* at the end: 6, 7 */
    wide = take(*state, 2 * PAGE);
    assert_int_equal(wide.offset, 6 * PAGE);
    arena_give(*state, &places[1]); /* at the beginning: 0, 1 */
    wide = take(*state, 2 * PAGE);
    assert_int_equal(wide.offset, 0);
    assert_int_equal(arena_used(*state), 8 * PAGE);
}

/* Three saves, as a loop has them there, given back in each order: the whole of it can be taken again. */
static void given_back_in_any_order(void **state) {
    static const unsigned orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    arena_reset(*state, 6 * PAGE);
    for (size_t i = 0; i < ARRAY_SIZE(orders); i++) {
        struct arena_place places[3] = {take(*state, PAGE), take(*state, 2 * PAGE), take(*state, 3 * PAGE)};
        uint64_t used = 6 * PAGE;
        for (unsigned k = 0; k < 3; k++) {
            used -= places[orders[i][k]].size;
            arena_give(*state, &places[orders[i][k]]);
            assert_int_equal(arena_used(*state), used);
        }
        struct arena_place all = take(*state, 6 * PAGE);
        arena_give(*state, &all);
    }
}

static void none_is_given_back(void **state) {
    struct arena_place none = {0};
    arena_reset(*state, PAGE);
    arena_give(*state, &none);
    struct arena_place place = take(*state, PAGE);
    arena_give(*state, &place);
    arena_give(*state, &place); /* it is none by now */
    assert_int_equal(arena_used(*state), 0);
}

/* What is given back of an arena that is gone does not free the place of another in the new one. */
static void epochs(void **state) {
    arena_reset(*state, 2 * PAGE);
    struct arena_place old = take(*state, PAGE), older = take(*state, PAGE);
    arena_reset(*state, 0);
    assert_int_equal(arena_used(*state), 0);
    arena_give(*state, &older);
    arena_reset(*state, PAGE);
    struct arena_place new = take(*state, PAGE);
    assert_int_equal(new.offset, old.offset);
    arena_give(*state, &old);
    assert_int_equal(old.size, 0);
    assert_int_equal(arena_used(*state), PAGE);
    refuse(*state, 1);
    arena_give(*state, &new);
    assert_int_equal(arena_used(*state), 0);
}

static void as_many_places_as_there_may_be(void **state) {
    struct arena_place places[ARENA_PLACES_MAX];
    arena_reset(*state, 2 * ARENA_PLACES_MAX * PAGE);
    for (size_t i = 0; i < ARENA_PLACES_MAX; i++)
        places[i] = take(*state, PAGE);
    refuse(*state, PAGE);
    arena_give(*state, &places[0]);
    places[0] = take(*state, PAGE);
    assert_int_equal(places[0].offset, 0);
    refuse(*state, PAGE);
    for (size_t i = ARENA_PLACES_MAX; i--;)
        arena_give(*state, &places[i]);
    assert_int_equal(arena_used(*state), 0);
}

/* Pages of a real arena, each with the number of its owner; a place is refused only if there is no gap. */
static void many_at_random(void **state) {
    enum { PAGES = 100, ROUNDS = 20000 };
    uint8_t owner[PAGES] = {0};
    struct arena_place places[ARENA_PLACES_MAX] = {0};
    unsigned int seed;
    const char *given = getenv("TEST_SEED");
    seed = given ? (unsigned)strtoul(given, NULL, 0) : 0;
    if (!given && getrandom(&seed, sizeof seed, 0) != sizeof seed)
        fail();
    print_message("TEST_SEED=%u\n", seed);
    arena_reset(*state, PAGES * PAGE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned which = (unsigned)rand_r(&seed) % ARENA_PLACES_MAX;
        struct arena_place *place = &places[which];
        if (place->size) {
            for (uint64_t page = place->offset / PAGE; page < (place->offset + place->size) / PAGE; page++)
                owner[page] = 0;
            arena_give(*state, place);
            continue;
        }
        uint64_t pages = 1 + (unsigned)rand_r(&seed) % (rand_r(&seed) % 4 ? 4 : 40);
        uint64_t gap = 0, widest = 0, used = 0;
        for (unsigned page = 0; page < PAGES; page++) {
            gap = owner[page] ? 0 : gap + 1;
            widest = max_u64(widest, gap);
            used += owner[page] != 0;
        }
        assert_int_equal(arena_used(*state), used * PAGE);
        bool taken = arena_take(*state, pages * PAGE, place);
        assert_int_equal(taken, pages <= widest);
        for (uint64_t page = place->offset / PAGE; taken && page < place->offset / PAGE + pages; page++) {
            assert_true(page < PAGES);
            assert_int_equal(owner[page], 0);
            owner[page] = (uint8_t)(which + 1);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(nothing_to_give, setup, teardown),
        cmocka_unit_test_setup_teardown(whole_pages, setup, teardown),
        cmocka_unit_test_setup_teardown(sizes_that_never_fit, setup, teardown),
        cmocka_unit_test_setup_teardown(full_and_again, setup, teardown),
        cmocka_unit_test_setup_teardown(fragments, setup, teardown),
        cmocka_unit_test_setup_teardown(given_back_in_any_order, setup, teardown),
        cmocka_unit_test_setup_teardown(none_is_given_back, setup, teardown),
        cmocka_unit_test_setup_teardown(epochs, setup, teardown),
        cmocka_unit_test_setup_teardown(as_many_places_as_there_may_be, setup, teardown),
        cmocka_unit_test_setup_teardown(many_at_random, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
