/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/dtype.h"
#include "proto/geometry.h"
#include "tests/unit/proto/unit.h"

#include <errno.h>

#define ELEMENTS_MAX 4096
#define NOWHERE UINT32_MAX

static void test_dtypes(void **state) {
    static const struct {
        enum dtype dtype;
        unsigned size;
        const char *name, *stored;
    } expected[] = {
        {DTYPE_BOOL, 1, "BOOL", "BOOL"},
        {DTYPE_U8, 1, "U8", "U8"},
        {DTYPE_I8, 1, "I8", "I8"},
        {DTYPE_F8_E5M2, 1, "F8_E5M2", "F8_E5M2"},
        {DTYPE_F8_E4M3, 1, "F8_E4M3", "F8_E4M3"},
        {DTYPE_I16, 2, "I16", "I16"},
        {DTYPE_U16, 2, "U16", "U16"},
        {DTYPE_F16, 2, "F16", "F16"},
        {DTYPE_BF16, 2, "BF16", "BF16"},
        {DTYPE_I32, 4, "I32", "I32"},
        {DTYPE_U32, 4, "U32", "U32"},
        {DTYPE_F32, 4, "F32", "F32"},
        {DTYPE_I64, 8, "I64", "I64"},
        {DTYPE_U64, 8, "U64", "U64"},
        {DTYPE_F64, 8, "F64", "F64"},
        {DTYPE_C64, 8, "C64", "U8"},
        {DTYPE_C128, 16, "C128", "U8"},
    };
    assert_int_equal(ARRAY_SIZE(expected), DTYPE_MAX - 1);
    for (size_t i = 0; i < ARRAY_SIZE(expected); i++) {
        enum dtype dtype = expected[i].dtype;
        assert_int_equal(dtype, i + 1); /* codes go over the wire */
        assert_true(dtype_valid(dtype));
        assert_int_equal(dtype_size(dtype), expected[i].size);
        assert_string_equal(dtype_name(dtype), expected[i].name);
        assert_string_equal(dtype_stored_name(dtype), expected[i].stored);
        assert_int_equal(dtype_from_name(expected[i].name), dtype);
    }
    assert_false(dtype_valid(0));
    assert_false(dtype_valid(DTYPE_MAX));
    assert_false(dtype_valid(UINT32_MAX));
    assert_int_equal(dtype_from_name("F128"), DTYPE_INVALID);
    assert_int_equal(dtype_from_name(""), DTYPE_INVALID);
}

static void test_valid(void **state) {
    struct geometry scalar = {0};
    assert_true(geometry_valid(&scalar, 16));
    assert_int_equal(geometry_elements(&scalar), 1);
    assert_int_equal(geometry_tensor_elements(&scalar), 1);
    assert_true(geometry_is_whole(&scalar));

    struct geometry box = {.dims = 2, .shape = {4, 6}, .offset = {2, 0}, .extent = {2, 6}};
    assert_true(geometry_valid(&box, 4));
    assert_false(geometry_is_whole(&box));
    box.extent[0] = 3;
    assert_false(geometry_valid(&box, 4));
    box.extent[0] = UINT64_MAX; /* offset + extent wraps round */
    assert_false(geometry_valid(&box, 4));
    box = (struct geometry){.dims = 2, .shape = {4, 6}, .offset = {5, 0}};
    assert_false(geometry_valid(&box, 4));

    struct geometry range = {.is_range = true, .dims = 2, .shape = {4, 6}, .start = 20, .count = 4};
    assert_true(geometry_valid(&range, 4));
    range.count = 5;
    assert_false(geometry_valid(&range, 4));
    range.count = UINT64_MAX;
    assert_false(geometry_valid(&range, 4));
    range = (struct geometry){.is_range = true, .dims = 2, .shape = {4, 6}, .start = 0, .count = 24};
    assert_true(geometry_is_whole(&range));

    struct geometry large = {.is_range = true, .dims = 2, .shape = {UINT64_C(1) << 31, UINT64_C(1) << 31}};
    assert_true(geometry_valid(&large, 1));
    assert_false(geometry_valid(&large, 2));
    large.shape[0] = large.shape[1] = UINT64_MAX;
    assert_false(geometry_valid(&large, 1));
    /* Nothing in it, but its partial products would overflow. */
    struct geometry empty = {.dims = 3, .shape = {0, UINT64_C(1) << 40, UINT64_C(1) << 40}};
    assert_false(geometry_valid(&empty, 1));
    empty = (struct geometry){.dims = 2, .shape = {0, 5}, .extent = {0, 5}};
    assert_true(geometry_valid(&empty, 8));
    assert_true(geometry_is_whole(&empty));
    assert_int_equal(geometry_elements(&empty), 0);

    struct geometry deep = {.dims = GEOMETRY_DIMS_MAX + 1};
    assert_false(geometry_valid(&deep, 1));
}

/* Where each element of the tensor lies in the piece's storage: what the code under test must agree with. */
static void storage_map(const struct geometry *piece, uint32_t map[ELEMENTS_MAX]) {
    uint64_t total = geometry_tensor_elements(piece);
    assert_true(total <= ELEMENTS_MAX);
    uint32_t next = 0;
    for (uint64_t element = 0; element < total; element++) {
        bool inside = true;
        if (piece->is_range) {
            inside = element >= piece->start && element - piece->start < piece->count;
        } else {
            uint64_t rest = element;
            for (unsigned i = piece->dims; i-- > 0;) {
                uint64_t index = rest % piece->shape[i];
                rest /= piece->shape[i];
                inside = inside && index >= piece->offset[i] && index - piece->offset[i] < piece->extent[i];
            }
        }
        map[element] = inside ? next++ : NOWHERE;
    }
    assert_int_equal(next, geometry_elements(piece));
}

static struct geometry random_piece(struct random *random, const struct geometry *tensor) {
    struct geometry piece = *tensor;
    uint64_t total = geometry_tensor_elements(tensor);
    piece.is_range = random_below(random, 2);
    if (piece.is_range) {
        piece.start = random_below(random, total + 1);
        piece.count = random_below(random, total - piece.start + 1);
        return piece;
    }
    for (unsigned i = 0; i < piece.dims; i++) {
        bool all = random_below(random, 3) == 0;
        piece.offset[i] = all ? 0 : random_below(random, piece.shape[i] + 1);
        piece.extent[i] = all ? piece.shape[i] : random_below(random, piece.shape[i] - piece.offset[i] + 1);
    }
    return piece;
}

static struct geometry random_tensor(struct random *random) {
    struct geometry tensor = {.dims = (uint8_t)random_below(random, 6)};
    for (unsigned i = 0; i < tensor.dims; i++)
        tensor.shape[i] = random_below(random, 20) ? 1 + random_below(random, 5) : 0;
    return tensor;
}

struct check {
    uint32_t b_of[ELEMENTS_MAX]; /* [element of a's storage]: that of b's, as the runs told */
    uint64_t elements, runs;
    uint64_t last_a, last_b;
    bool mergeable;
};

static int check_run(void *context, uint64_t a, uint64_t b, uint64_t count) {
    struct check *check = context;
    assert_true(count > 0);
    if (check->runs) {
        assert_true(a >= check->last_a); /* ascending, and never twice */
        check->mergeable = check->mergeable || (a == check->last_a && b == check->last_b);
    }
    for (uint64_t i = 0; i < count; i++) {
        assert_int_equal(check->b_of[a + i], NOWHERE);
        check->b_of[a + i] = (uint32_t)(b + i);
    }
    check->elements += count;
    check->runs++;
    check->last_a = a + count;
    check->last_b = b + count;
    return 0;
}

static void test_intersect_against_brute_force(void **state) {
    static uint32_t a_map[ELEMENTS_MAX], b_map[ELEMENTS_MAX];
    static struct check check;
    struct random random = random_seeded("intersect");
    for (unsigned round = 0; round < 20000; round++) {
        struct geometry tensor = random_tensor(&random);
        struct geometry a = random_piece(&random, &tensor), b = random_piece(&random, &tensor);
        assert_true(geometry_valid(&a, 8) && geometry_valid(&b, 8));
        storage_map(&a, a_map);
        storage_map(&b, b_map);
        memset(&check, 0, sizeof check);
        memset(check.b_of, 0xff, sizeof check.b_of);
        assert_int_equal(geometry_intersect(&a, &b, check_run, &check), 0);
        uint64_t shared = 0, total = geometry_tensor_elements(&tensor);
        for (uint64_t element = 0; element < total; element++) {
            if (a_map[element] == NOWHERE || b_map[element] == NOWHERE)
                continue;
            shared++;
            assert_int_equal(check.b_of[a_map[element]], b_map[element]);
        }
        assert_int_equal(check.elements, shared);
        assert_false(check.mergeable);
        assert_int_equal(geometry_overlap(&a, &b), shared > 0);
        assert_int_equal(geometry_overlap(&b, &a), shared > 0);
    }
}

static int stop_with_seven(void *context, uint64_t a, uint64_t b, uint64_t count) {
    ++*(unsigned *)context;
    return 7;
}

static void test_intersect_stops(void **state) {
    struct geometry a = {.dims = 2, .shape = {8, 8}, .offset = {0, 0}, .extent = {8, 4}};
    struct geometry b = {.dims = 2, .shape = {8, 8}, .offset = {0, 2}, .extent = {8, 6}};
    struct geometry c = {.dims = 2, .shape = {8, 8}, .is_range = true, .start = 0, .count = 64};
    unsigned calls = 0;
    assert_int_equal(geometry_intersect(&a, &b, stop_with_seven, &calls), 7);
    assert_int_equal(geometry_intersect(&a, &c, stop_with_seven, &calls), 7);
    assert_int_equal(geometry_intersect(&c, &c, stop_with_seven, &calls), 7);
    assert_int_equal(calls, 3);
}

/* The number of runs, not of elements, is what it costs: this one would take forever otherwise. */
static void test_intersect_large(void **state) {
    struct geometry whole = {.dims = 2, .shape = {1 << 20, 1 << 20}, .extent = {1 << 20, 1 << 20}};
    struct geometry row = whole, range = whole;
    row.offset[0] = 77;
    row.extent[0] = 1;
    range.is_range = true;
    range.start = UINT64_C(1) << 39;
    range.count = 1 << 22;
    unsigned calls = 0;
    assert_int_equal(geometry_intersect(&whole, &row, stop_with_seven, &calls), 7);
    struct geometry columns = {.dims = 2, .shape = {1 << 20, 1 << 20}, .offset = {0, 512}, .extent = {1 << 20, 1}};
    /* Four rows of the range meet the column, far into it. */
    assert_int_equal(geometry_intersect(&columns, &range, stop_with_seven, &calls), 7);
    assert_true(geometry_overlap(&columns, &range));
    range.count = 512;
    assert_false(geometry_overlap(&columns, &range));
}

static int partition(const struct geometry *pieces, size_t count, size_t *a, size_t *b) {
    CLEANUP(freep) const struct geometry **pointers = calloc(max_u64(count, 1), sizeof *pointers);
    for (size_t i = 0; i < count; i++)
        pointers[i] = &pieces[i];
    return geometry_partition(pointers, count, a, b);
}

static void test_partition_against_brute_force(void **state) {
    static uint32_t map[ELEMENTS_MAX];
    static uint8_t times[ELEMENTS_MAX];
    struct random random = random_seeded("partition");
    unsigned seen[3] = {0};
    for (unsigned round = 0; round < 20000; round++) {
        struct geometry tensor = random_tensor(&random), pieces[40];
        size_t count = 0, a = 99, b = 99;
        /* Half of the time a true partition (by cutting pieces in two), perhaps spoilt; else random pieces. */
        if (random_below(&random, 2)) {
            pieces[count] = tensor;
            memcpy(pieces[count].extent, tensor.shape, sizeof tensor.shape);
            pieces[count].is_range = random_below(&random, 4) == 0;
            pieces[count].count = geometry_tensor_elements(&tensor);
            count++;
            for (unsigned cuts = (unsigned)random_below(&random, 30); cuts > 0; cuts--) {
                struct geometry *piece = &pieces[random_below(&random, count)], *rest = &pieces[count];
                if (piece->is_range) {
                    uint64_t first = random_below(&random, piece->count + 1);
                    *rest = *piece;
                    rest->start += first;
                    rest->count -= first;
                    piece->count = first;
                } else if (tensor.dims) {
                    unsigned axis = (unsigned)random_below(&random, tensor.dims);
                    uint64_t first = random_below(&random, piece->extent[axis] + 1);
                    *rest = *piece;
                    rest->offset[axis] += first;
                    rest->extent[axis] -= first;
                    piece->extent[axis] = first;
                } else {
                    continue;
                }
                count++;
            }
            if (random_below(&random, 3) == 0)
                pieces[random_below(&random, count)] = random_piece(&random, &tensor);
        } else {
            size_t wanted = 1 + random_below(&random, 5);
            while (count < wanted)
                pieces[count++] = random_piece(&random, &tensor);
        }
        memset(times, 0, sizeof times);
        for (size_t i = 0; i < count; i++) {
            storage_map(&pieces[i], map);
            for (uint64_t element = 0; element < geometry_tensor_elements(&tensor); element++)
                times[element] += map[element] != NOWHERE;
        }
        int expected = 0;
        for (uint64_t element = 0; element < geometry_tensor_elements(&tensor); element++) {
            if (times[element] > 1)
                expected = GEOMETRY_E_OVERLAP;
            else if (times[element] == 0 && expected == 0)
                expected = GEOMETRY_E_GAP;
        }
        assert_int_equal(partition(pieces, count, &a, &b), expected);
        seen[expected]++;
        if (expected == GEOMETRY_E_OVERLAP) {
            assert_true(a < count && b < count && a != b);
            assert_true(geometry_overlap(&pieces[a], &pieces[b]));
        }
    }
    assert_true(seen[0] > 100 && seen[1] > 100 && seen[2] > 100);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The partitions of tensor, expert and data parallelism, with 65536 pieces: far from quadratic. */
static void test_partition_scales(void **state) {
    enum { SIDE = 256, COUNT = SIDE * SIDE };
    struct geometry *pieces = calloc(COUNT, sizeof *pieces);
    size_t a, b;
    double start = seconds();
    for (unsigned kind = 0; kind < 4; kind++) {
        for (unsigned i = 0; i < COUNT; i++) {
            /* Shuffled, as ranks are. */
            uint64_t at = (i * UINT64_C(40503)) % COUNT;
            switch (kind) {
            case 0: /* rows */
                pieces[i] = (struct geometry){.dims = 2, .shape = {COUNT, 4}, .offset = {at, 0}, .extent = {1, 4}};
                break;
            case 1: /* columns */
                pieces[i] = (struct geometry){.dims = 2, .shape = {4, COUNT}, .offset = {0, at}, .extent = {4, 1}};
                break;
            case 2: /* a grid */
                pieces[i] = (struct geometry){.dims = 3,
                                              .shape = {SIDE * 3, 2, SIDE * 5},
                                              .offset = {at / SIDE * 3, 0, at % SIDE * 5},
                                              .extent = {3, 2, 5}};
                break;
            case 3: /* flat */
                pieces[i] =
                    (struct geometry){.is_range = true, .dims = 1, .shape = {COUNT * 7}, .start = at * 7, .count = 7};
                break;
            }
        }
        assert_int_equal(partition(pieces, COUNT, &a, &b), 0);
        assert_int_equal(partition(pieces, COUNT - 1, &a, &b), GEOMETRY_E_GAP);
        pieces[COUNT / 3] = pieces[COUNT / 2];
        assert_int_equal(partition(pieces, COUNT, &a, &b), GEOMETRY_E_OVERLAP);
        assert_int_equal(a, COUNT / 3);
        assert_int_equal(b, COUNT / 2);
    }
    print_message("12 partitions of %d pieces: %.2f s\n", COUNT, seconds() - start);
    assert_true(seconds() - start < 20); /* quadratic would be 10^10 comparisons each */
    free(pieces);
}

static void test_partition_of_little(void **state) {
    size_t a, b;
    struct geometry scalar[2] = {{0}, {0}}, empty = {.dims = 1};
    assert_int_equal(partition(scalar, 0, &a, &b), GEOMETRY_E_GAP);
    assert_int_equal(partition(scalar, 1, &a, &b), 0);
    assert_int_equal(partition(scalar, 2, &a, &b), GEOMETRY_E_OVERLAP);
    assert_int_equal(partition(&empty, 1, &a, &b), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_valid),
        cmocka_unit_test(test_intersect_against_brute_force),
        cmocka_unit_test(test_intersect_stops),
        cmocka_unit_test(test_intersect_large),
        cmocka_unit_test(test_partition_against_brute_force),
        cmocka_unit_test(test_partition_scales),
        cmocka_unit_test(test_partition_of_little),
    };
    return cmocka_run_group_tests_name("geometry", tests, NULL, NULL);
}
