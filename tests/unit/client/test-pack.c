/* SPDX-License-Identifier: Apache-2.0 */
#include "client/pack.h"
#include "tests/unit/client/unit.h"

#include <time.h>

static void contiguity(void **state) {
    struct geometry box = {.dims = 3, .shape = {9, 9, 9}, .extent = {2, 1, 4}};
    int64_t stride[3];
    pack_strides(&box, 8, stride);
    assert_int_equal(stride[0], 32);
    assert_int_equal(stride[2], 8);
    assert_true(pack_is_contiguous(&box, 8, stride));
    stride[1] = -77; /* of no account: there is one */
    assert_true(pack_is_contiguous(&box, 8, stride));
    stride[0] = 40;
    assert_false(pack_is_contiguous(&box, 8, stride));
    box.extent[0] = 0;
    assert_true(pack_is_contiguous(&box, 8, stride));
    assert_true(pack_is_contiguous(&box, 8, NULL));
    struct geometry scalar = {.dims = 0};
    assert_true(pack_is_contiguous(&scalar, 8, stride));
}

/* Any view, any part of it: gathering gives what indexing gives, and scattering is its inverse. */
static void random_views(void **state) {
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srandom(seed);
    static const unsigned sizes[] = {1, 2, 4, 8, 16};
    for (unsigned round = 0; round < 3000; round++) {
        unsigned size = sizes[random() % 5];
        struct geometry geometry = {.dims = (uint8_t)(random() % 5), .is_range = random() % 4 == 0};
        uint64_t elements = 1;
        int64_t stride[GEOMETRY_DIMS_MAX], low = 0;
        unsigned steps = geometry.is_range ? 1 : geometry.dims;
        if (geometry.is_range)
            elements = geometry.count = 1 + (uint64_t)random() % 20;
        for (unsigned i = 0; !geometry.is_range && i < geometry.dims; i++) {
            geometry.shape[i] = geometry.extent[i] = 1 + (uint64_t)random() % 4;
            elements *= geometry.extent[i];
        }
        /* Distinct places: strides of a larger row-major array, some of them backwards. */
        int64_t step = size * (1 + random() % 3);
        for (unsigned i = steps; i-- > 0;) {
            int64_t extent = (int64_t)(geometry.is_range ? geometry.count : geometry.extent[i]);
            stride[i] = random() % 3 ? step : -step;
            if (stride[i] < 0)
                low += stride[i] * (extent - 1);
            step *= extent + random() % 2;
        }
        CLEANUP(freep) uint8_t *memory = calloc(1, (size_t)step * 2 + 64);
        for (int64_t i = 0; i < step * 2 + 64; i++)
            memory[i] = (uint8_t)random();
        struct pack_view view = {.geometry = &geometry, .stride = stride, .data = memory - low, .element_size = size};
        uint64_t first = (uint64_t)random() % elements, count = (uint64_t)random() % (elements - first + 1);
        CLEANUP(freep) uint8_t *packed = malloc(count * size + 1);
        pack_gather(packed, &view, first, count);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t rest = first + i;
            uint8_t *at = view.data;
            for (unsigned d = steps; d-- > 0;) {
                uint64_t extent = geometry.is_range ? geometry.count : geometry.extent[d];
                at += (int64_t)(rest % extent) * stride[d];
                rest /= extent;
            }
            assert_memory_equal(at, packed + i * size, size);
            memset(at, 0, size);
        }
        pack_scatter(&view, first, count, packed);
        CLEANUP(freep) uint8_t *again = malloc(count * size + 1);
        pack_gather(again, &view, first, count);
        assert_memory_equal(again, packed, count * size);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(contiguity), cmocka_unit_test(random_views)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
