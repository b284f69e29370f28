/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces of a small tensor, against counting one element at a time: which are valid, what each has,
 * what two share (every element once, in runs as long as can be), whether all cover the tensor.
 */
#include "proto/geometry.h"

#include "tests/fuzz/fuzz.h"

#define DIMS_MAX 4
#define EXTENT_MAX 5
#define ELEMENTS_MAX 625
#define PIECES_MAX 6

static void read_piece(struct feed *feed, const struct geometry *tensor, struct geometry *ret_piece) {
    struct geometry piece = *tensor;
    piece.is_range = feed_below(feed, 4) == 0;
    piece.start = feed_number(feed, piece.is_range ? 2 : 0) % (ELEMENTS_MAX + 2);
    piece.count = feed_number(feed, piece.is_range ? 2 : 0) % (ELEMENTS_MAX + 2);
    for (unsigned i = 0; !piece.is_range && i < piece.dims; i++) {
        uint64_t both = feed_number(feed, 1);
        piece.offset[i] = both % (EXTENT_MAX + 2);
        piece.extent[i] = both / (EXTENT_MAX + 2) % (EXTENT_MAX + 2);
    }
    *ret_piece = piece;
}

static bool is_valid(const struct geometry *piece) {
    uint64_t elements = geometry_tensor_elements(piece);
    if (piece->is_range)
        return piece->start + piece->count <= elements;
    for (unsigned i = 0; i < piece->dims; i++)
        if (piece->offset[i] + piece->extent[i] > piece->shape[i])
            return false;
    return true;
}

struct runs {
    const struct geometry *a, *b;
    uint64_t shared, a_end, b_end;
    bool any;
};

static int on_run(void *context, uint64_t a_offset, uint64_t b_offset, uint64_t count) {
    struct runs *runs = context;
    assert(count > 0 && a_offset + count <= geometry_elements(runs->a));
    assert(b_offset + count <= geometry_elements(runs->b));
    assert(!runs->any || a_offset >= runs->a_end || runs->a->is_range || runs->b->is_range);
    assert(!runs->any || a_offset != runs->a_end || b_offset != runs->b_end);
    for (uint64_t i = 0; i < count; i++)
        assert(fuzz_linear(runs->a, a_offset + i) == fuzz_linear(runs->b, b_offset + i));
    runs->any = true;
    runs->shared += count;
    runs->a_end = a_offset + count;
    runs->b_end = b_offset + count;
    return 0;
}

static void check_pair(const struct geometry *a, const struct geometry *b, uint64_t elements) {
    struct runs runs = {.a = a, .b = b};
    uint64_t shared = 0, place;
    for (uint64_t i = 0; i < elements; i++)
        shared += fuzz_locate(a, i, &place) && fuzz_locate(b, i, &place);
    int r = geometry_intersect(a, b, on_run, &runs);
    assert(r == 0 && runs.shared == shared && geometry_overlap(a, b) == (shared > 0));
}

static void check_partition(const struct geometry *pieces, size_t count, uint64_t elements) {
    const struct geometry *pointers[PIECES_MAX];
    uint64_t place;
    unsigned least = count ? UINT32_MAX : 0, most = 0;
    for (size_t k = 0; k < count; k++)
        pointers[k] = &pieces[k];
    for (uint64_t i = 0; i < elements; i++) {
        unsigned times = 0;
        for (size_t k = 0; k < count; k++)
            times += fuzz_locate(&pieces[k], i, &place);
        least = times < least ? times : least;
        most = times > most ? times : most;
    }
    size_t a, b;
    int r = geometry_partition(pointers, count, &a, &b);
    assert(r == (most > 1 ? GEOMETRY_E_OVERLAP : least == 0 ? GEOMETRY_E_GAP : 0));
    if (r == GEOMETRY_E_OVERLAP)
        assert(a < b && b < count && geometry_overlap(&pieces[a], &pieces[b]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct feed feed = {data, size};
    struct geometry tensor = {.dims = (uint8_t)feed_below(&feed, DIMS_MAX + 1)}, pieces[PIECES_MAX];
    for (unsigned i = 0; i < tensor.dims; i++)
        tensor.shape[i] = feed_below(&feed, EXTENT_MAX + 1);
    uint64_t elements = geometry_tensor_elements(&tensor), place;
    size_t count = 0;
    while (feed.left && count < PIECES_MAX) {
        struct geometry *piece = &pieces[count];
        read_piece(&feed, &tensor, piece);
        bool valid = geometry_valid(piece, 8);
        assert(valid == is_valid(piece));
        if (!valid)
            continue;
        uint64_t has = 0;
        for (uint64_t i = 0; i < elements; i++)
            if (fuzz_locate(piece, i, &place)) {
                assert(fuzz_linear(piece, place) == i);
                has++;
            }
        assert(has == geometry_elements(piece));
        assert(!geometry_is_whole(piece) || has == elements);
        count++;
    }
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < count; k++)
            check_pair(&pieces[i], &pieces[k], elements);
    check_partition(pieces, count, elements);
    return 0;
}
