/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/geometry.h"

#include <errno.h>

/*
 * A box is walked as runs: its trailing dimensions that span the whole of what they lie in are
 * folded into one stretch of consecutive elements. Two boxes are compared dimension by dimension; a
 * box and a range meet in the row-major order of the global tensor, where the box's runs ascend, so
 * the first one that matters is found by bisection.
 *
 * geometry_valid() bounds the product of max(1, shape[i]), so that no partial product overflows,
 * not even in a tensor without elements.
 */

#define GEOMETRY_BYTES_MAX (UINT64_C(1) << 62)

bool geometry_valid(const struct geometry *piece, unsigned element_size) {
    if (piece->dims > GEOMETRY_DIMS_MAX || element_size == 0)
        return false;
    uint64_t bytes = element_size, elements = 1;
    for (unsigned i = 0; i < piece->dims; i++) {
        if (mul_overflows(bytes, max_u64(piece->shape[i], 1), &bytes) || bytes > GEOMETRY_BYTES_MAX)
            return false;
        elements *= piece->shape[i];
    }
    if (piece->is_range)
        return piece->start <= elements && piece->count <= elements - piece->start;
    for (unsigned i = 0; i < piece->dims; i++)
        if (piece->offset[i] > piece->shape[i] || piece->extent[i] > piece->shape[i] - piece->offset[i])
            return false;
    return true;
}

static uint64_t product(const uint64_t *factors, unsigned count) {
    uint64_t result = 1;
    for (unsigned i = 0; i < count; i++)
        result *= factors[i];
    return result;
}

uint64_t geometry_elements(const struct geometry *piece) {
    return piece->is_range ? piece->count : product(piece->extent, piece->dims);
}

uint64_t geometry_tensor_elements(const struct geometry *piece) { return product(piece->shape, piece->dims); }

bool geometry_is_whole(const struct geometry *piece) {
    if (piece->is_range)
        return piece->start == 0 && piece->count == geometry_tensor_elements(piece);
    for (unsigned i = 0; i < piece->dims; i++)
        if (piece->extent[i] != piece->shape[i])
            return false;
    return true;
}

/* The runs of a non-empty box in the global tensor: `outer` leading dimensions are stepped through,
 * the rest is one stretch. */
struct runs {
    const struct geometry *box;
    unsigned outer;
    uint64_t length, count;
    uint64_t stride[GEOMETRY_DIMS_MAX]; /* of the global tensor, in elements */
    uint64_t first;                     /* global index of the first run's first element */
};

static void runs_init(struct runs *runs, const struct geometry *box) {
    *runs = (struct runs){.box = box, .length = 1, .count = 1};
    uint64_t stride = 1;
    for (unsigned i = box->dims; i-- > 0;) {
        runs->stride[i] = stride;
        stride *= box->shape[i];
        runs->first += box->offset[i] * runs->stride[i];
    }
    unsigned inner = box->dims;
    while (inner > 0) {
        inner--;
        runs->length *= box->extent[inner];
        if (box->extent[inner] != box->shape[inner])
            break;
    }
    runs->outer = inner;
    for (unsigned i = 0; i < inner; i++)
        runs->count *= box->extent[i];
}

/* The global index where run number `index` starts. */
static uint64_t runs_start(const struct runs *runs, uint64_t index) {
    uint64_t start = runs->first;
    for (unsigned i = runs->outer; i-- > 0;) {
        start += index % runs->box->extent[i] * runs->stride[i];
        index /= runs->box->extent[i];
    }
    return start;
}

static int intersect_ranges(const struct geometry *a, const struct geometry *b, geometry_run_fn each, void *context) {
    uint64_t low = max_u64(a->start, b->start), high = min_u64(a->start + a->count, b->start + b->count);
    return low < high ? each(context, low - a->start, low - b->start, high - low) : 0;
}

static int intersect_boxes(const struct geometry *a, const struct geometry *b, geometry_run_fn each, void *context) {
    unsigned dims = a->dims;
    uint64_t extent[GEOMETRY_DIMS_MAX], a_stride[GEOMETRY_DIMS_MAX], b_stride[GEOMETRY_DIMS_MAX];
    uint64_t a_offset = 0, b_offset = 0, a_step = 1, b_step = 1;
    for (unsigned i = dims; i-- > 0;) {
        uint64_t low = max_u64(a->offset[i], b->offset[i]);
        uint64_t high = min_u64(a->offset[i] + a->extent[i], b->offset[i] + b->extent[i]);
        if (low >= high)
            return 0;
        extent[i] = high - low;
        a_stride[i] = a_step;
        b_stride[i] = b_step;
        a_offset += (low - a->offset[i]) * a_step;
        b_offset += (low - b->offset[i]) * b_step;
        a_step *= a->extent[i];
        b_step *= b->extent[i];
    }

    unsigned outer = dims;
    uint64_t length = 1;
    while (outer > 0) {
        outer--;
        length *= extent[outer];
        if (extent[outer] != a->extent[outer] || extent[outer] != b->extent[outer])
            break;
    }

    uint64_t index[GEOMETRY_DIMS_MAX] = {0};
    for (;;) {
        int r = each(context, a_offset, b_offset, length);
        if (r)
            return r;
        unsigned i = outer;
        for (; i > 0; i--) {
            a_offset += a_stride[i - 1];
            b_offset += b_stride[i - 1];
            if (++index[i - 1] < extent[i - 1])
                break;
            index[i - 1] = 0;
            a_offset -= a_stride[i - 1] * extent[i - 1];
            b_offset -= b_stride[i - 1] * extent[i - 1];
        }
        if (i == 0)
            return 0;
    }
}

static int intersect_range_box(const struct geometry *range, const struct geometry *box, bool range_is_a,
                               geometry_run_fn each, void *context) {
    if (geometry_elements(range) == 0 || geometry_elements(box) == 0)
        return 0;
    struct runs runs;
    runs_init(&runs, box);

    /* The first run that ends after the range's start. */
    uint64_t low = 0, high = runs.count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (runs_start(&runs, middle) + runs.length > range->start)
            high = middle;
        else
            low = middle + 1;
    }

    uint64_t range_end = range->start + range->count;
    for (uint64_t i = low; i < runs.count; i++) {
        uint64_t run = runs_start(&runs, i);
        if (run >= range_end)
            break;
        uint64_t from = max_u64(run, range->start), to = min_u64(run + runs.length, range_end);
        uint64_t range_offset = from - range->start, box_offset = i * runs.length + (from - run);
        int r = range_is_a ? each(context, range_offset, box_offset, to - from)
                           : each(context, box_offset, range_offset, to - from);
        if (r)
            return r;
    }
    return 0;
}

int geometry_intersect(const struct geometry *a, const struct geometry *b, geometry_run_fn each, void *context) {
    assert(a->dims == b->dims && memcmp(a->shape, b->shape, a->dims * sizeof a->shape[0]) == 0);
    if (a->is_range && b->is_range)
        return intersect_ranges(a, b, each, context);
    if (a->is_range)
        return intersect_range_box(a, b, true, each, context);
    if (b->is_range)
        return intersect_range_box(b, a, false, each, context);
    return intersect_boxes(a, b, each, context);
}

static int stop_at_first(void *context, uint64_t a_offset, uint64_t b_offset, uint64_t count) { return 1; }

bool geometry_overlap(const struct geometry *a, const struct geometry *b) {
    return geometry_intersect(a, b, stop_at_first, NULL) != 0;
}

/*
 * Partition: does no pair overlap, and do the elements add up? Pieces are split along one axis
 * after the other into groups whose intervals touch no other group's; only pieces that no axis
 * separates are compared in pairs. Rows, columns, grids of any dimension and ranges fall apart at
 * once, in O(n log n). The axes are the tensor's dimensions and, first, the row-major order, the
 * only one on which ranges have a place.
 */
#define AXIS_LINEAR 0

struct sweep {
    const struct geometry *const *pieces;
    uint64_t (*hull)[2]; /* [piece]: its first and one past its last element in row-major order */
    unsigned axes;       /* 1, or 1 + dims where all pieces are boxes */
    unsigned axis;       /* the one being sorted along */
    size_t a, b;         /* the overlap that was found */
};

static void sweep_interval(const struct sweep *sweep, size_t piece, uint64_t *ret_low, uint64_t *ret_high) {
    if (sweep->axis == AXIS_LINEAR) {
        *ret_low = sweep->hull[piece][0];
        *ret_high = sweep->hull[piece][1];
    } else {
        const struct geometry *box = sweep->pieces[piece];
        *ret_low = box->offset[sweep->axis - 1];
        *ret_high = *ret_low + box->extent[sweep->axis - 1];
    }
}

static int sweep_compare(const void *left, const void *right, void *context) {
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    uint64_t a_low, a_high, b_low, b_high;
    sweep_interval(context, a, &a_low, &a_high);
    sweep_interval(context, b, &b_low, &b_high);
    if (a_low != b_low)
        return a_low < b_low ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* The length of the group that begins at items[0], which are sorted along the current axis. */
static size_t sweep_group(const struct sweep *sweep, const size_t *items, size_t count) {
    uint64_t low, high, reach;
    sweep_interval(sweep, items[0], &low, &reach);
    size_t length = 1;
    for (; length < count; length++) {
        sweep_interval(sweep, items[length], &low, &high);
        if (low >= reach)
            break;
        reach = max_u64(reach, high);
    }
    return length;
}

static bool sweep_pairs(struct sweep *sweep, const size_t *items, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t j = i + 1; j < count; j++)
            if (geometry_overlap(sweep->pieces[items[i]], sweep->pieces[items[j]])) {
                sweep->a = min_u64(items[i], items[j]);
                sweep->b = max_u64(items[i], items[j]);
                return true;
            }
    return false;
}

/* True: an overlap. `fruitless` axes before this one did not split these items. Recurses into all
 * groups but the largest, so never deeper than log2(count). */
static bool sweep_overlap(struct sweep *sweep, size_t *items, size_t count, unsigned axis, unsigned fruitless) {
    while (count > 1) {
        if (fruitless == sweep->axes)
            return sweep_pairs(sweep, items, count);
        sweep->axis = axis;
        qsort_r(items, count, sizeof *items, sweep_compare, sweep);
        unsigned next = (axis + 1) % sweep->axes;
        size_t largest = 0, largest_length = 0;
        for (size_t at = 0, length; at < count; at += length) {
            length = sweep_group(sweep, items + at, count - at);
            if (length > largest_length) {
                largest = at;
                largest_length = length;
            }
        }
        fruitless = largest_length == count ? fruitless + 1 : 1;
        for (size_t at = 0, length; at < count; at += length) {
            sweep->axis = axis; /* the recursion moved it */
            length = sweep_group(sweep, items + at, count - at);
            if (at != largest && sweep_overlap(sweep, items + at, length, next, 1))
                return true;
        }
        items += largest;
        count = largest_length;
        axis = next;
    }
    return false;
}

int geometry_partition(const struct geometry *const *pieces, size_t count, size_t *ret_a, size_t *ret_b) {
    if (count == 0)
        return GEOMETRY_E_GAP;
    CLEANUP(freep) size_t *items = calloc(count, sizeof *items);
    CLEANUP(freep) uint64_t(*hull)[2] = calloc(count, sizeof *hull);
    if (!items || !hull)
        return -ENOMEM;

    struct sweep sweep = {.pieces = pieces, .hull = hull, .axes = 1u + pieces[0]->dims};
    size_t used = 0;
    uint64_t total = geometry_tensor_elements(pieces[0]), sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t elements = geometry_elements(pieces[i]);
        if (elements == 0)
            continue;
        items[used++] = i;
        if (add_overflows(sum, elements, &sum))
            sum = UINT64_MAX; /* far more than the tensor has: the sweep finds an overlap */
        if (pieces[i]->is_range) {
            sweep.axes = 1;
            hull[i][0] = pieces[i]->start;
            hull[i][1] = pieces[i]->start + elements;
        } else {
            struct runs runs;
            runs_init(&runs, pieces[i]);
            hull[i][0] = runs.first;
            hull[i][1] = runs_start(&runs, runs.count - 1) + runs.length;
        }
    }
    if (sweep_overlap(&sweep, items, used, AXIS_LINEAR, 0)) {
        *ret_a = sweep.a;
        *ret_b = sweep.b;
        return GEOMETRY_E_OVERLAP;
    }
    return sum == total ? 0 : GEOMETRY_E_GAP;
}
