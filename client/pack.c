/* SPDX-License-Identifier: Apache-2.0 */
#include "client/pack.h"

#include "base/copy.h"

/*
 * Elements are walked row by row along the last dimension; where its stride is the element size, a
 * row is one memcpy. Everything that copies shares the walk, which hands out rows.
 */

static unsigned pack_dims(const struct geometry *geometry) { return geometry->is_range ? 1 : geometry->dims; }

static uint64_t pack_extent(const struct geometry *geometry, unsigned dimension) {
    return geometry->is_range ? geometry->count : geometry->extent[dimension];
}

void pack_strides(const struct geometry *geometry, unsigned element_size, int64_t *ret_stride) {
    int64_t step = element_size;
    for (unsigned i = pack_dims(geometry); i-- > 0;) {
        ret_stride[i] = step;
        step *= (int64_t)pack_extent(geometry, i);
    }
}

bool pack_is_contiguous(const struct geometry *geometry, unsigned element_size, const int64_t *stride) {
    if (!stride || geometry_elements(geometry) == 0)
        return true;
    int64_t step = element_size;
    for (unsigned i = pack_dims(geometry); i-- > 0;) {
        uint64_t extent = pack_extent(geometry, i);
        if (extent > 1 && stride[i] != step)
            return false;
        step *= (int64_t)extent;
    }
    return true;
}

struct pack_walk {
    const struct pack_view *view;
    pack_row_fn row;
    void *context;
    uint64_t packed;
};

static int walk_row(struct pack_walk *walk, uint8_t *data, int64_t stride, uint64_t count) {
    int r = walk->row(walk->context, data, stride, count, walk->packed);
    walk->packed += count * walk->view->element_size;
    return r;
}

static int walk_strided(struct pack_walk *walk, uint64_t first, uint64_t count) {
    const struct pack_view *view = walk->view;
    const struct geometry *geometry = view->geometry;
    unsigned last = pack_dims(geometry) - 1; /* a scalar is contiguous */
    uint64_t index[GEOMETRY_DIMS_MAX], rest = first;
    uint8_t *at = view->data;
    for (unsigned i = last + 1; i-- > 0;) {
        index[i] = rest % pack_extent(geometry, i);
        rest /= pack_extent(geometry, i);
        at += (int64_t)index[i] * view->stride[i];
    }
    while (count > 0) {
        uint64_t row = min_u64(count, pack_extent(geometry, last) - index[last]);
        int r = walk_row(walk, at, view->stride[last], row);
        count -= row;
        if (r != 0 || count == 0)
            return r;
        at -= (int64_t)index[last] * view->stride[last];
        index[last] = 0;
        for (unsigned i = last; i-- > 0;) {
            at += view->stride[i];
            if (++index[i] < pack_extent(geometry, i))
                break;
            at -= (int64_t)index[i] * view->stride[i];
            index[i] = 0;
        }
    }
    return 0;
}

int pack_rows(const struct pack_view *view, uint64_t first, uint64_t count, pack_row_fn row, void *context) {
    struct pack_walk walk = {.view = view, .row = row, .context = context};
    if (count == 0)
        return 0;
    if (pack_is_contiguous(view->geometry, view->element_size, view->stride))
        return walk_row(&walk, view->data + first * view->element_size, view->element_size, count);
    return walk_strided(&walk, first, count);
}

struct pack_copy {
    uint8_t *packed;
    size_t element_size;
};

static int gather_row(void *context, uint8_t *data, int64_t stride, uint64_t count, uint64_t packed) {
    const struct pack_copy *copy = context;
    size_t size = copy->element_size;
    uint8_t *to = copy->packed + packed;
    if (stride == (int64_t)size)
        memcpy(to, data, count * size);
    else
        for (uint64_t i = 0; i < count; i++)
            memcpy(to + i * size, data + (int64_t)i * stride, size);
    return 0;
}

static int scatter_row(void *context, uint8_t *data, int64_t stride, uint64_t count, uint64_t packed) {
    const struct pack_copy *copy = context;
    size_t size = copy->element_size;
    const uint8_t *from = copy->packed + packed;
    if (stride == (int64_t)size)
        copy_past_cache(data, from, count * size); /* restored: it is computed with later */
    else
        for (uint64_t i = 0; i < count; i++)
            memcpy(data + (int64_t)i * stride, from + i * size, size);
    return 0;
}

void pack_gather(void *destination, const struct pack_view *view, uint64_t first, uint64_t count) {
    struct pack_copy copy = {.packed = destination, .element_size = view->element_size};
    pack_rows(view, first, count, gather_row, &copy);
}

void pack_scatter(const struct pack_view *view, uint64_t first, uint64_t count, const void *source) {
    struct pack_copy copy = {.packed = (uint8_t *)source, .element_size = view->element_size}; /* only read from */
    pack_rows(view, first, count, scatter_row, &copy);
}
