/* SPDX-License-Identifier: Apache-2.0 */
#include "client/pack.h"

#include "base/copy.h"

/*
 * Elements are walked row by row along the last dimension; where its stride is the element size, a
 * row is one memcpy. Both directions share the walk, which hands out rows.
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

struct pack_copy {
    uint8_t *packed;
    bool gather;
    unsigned element_size;
};

static void pack_row(struct pack_copy *copy, uint8_t *data, int64_t stride, uint64_t count) {
    size_t size = copy->element_size;
    if (stride == (int64_t)size) {
        if (copy->gather)
            memcpy(copy->packed, data, count * size);
        else
            copy_past_cache(data, copy->packed, count * size); /* restored: it is computed with later */
    } else {
        for (uint64_t i = 0; i < count; i++) {
            uint8_t *element = data + (int64_t)i * stride;
            if (copy->gather)
                memcpy(copy->packed + i * size, element, size);
            else
                memcpy(element, copy->packed + i * size, size);
        }
    }
    copy->packed += count * size;
}

static void pack_walk(const struct pack_view *view, uint64_t first, uint64_t count, struct pack_copy *copy) {
    const struct geometry *geometry = view->geometry;
    if (pack_is_contiguous(geometry, view->element_size, view->stride)) {
        pack_row(copy, view->data + first * view->element_size, view->element_size, count);
        return;
    }
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
        pack_row(copy, at, view->stride[last], row);
        count -= row;
        if (count == 0)
            break;
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
}

void pack_gather(void *destination, const struct pack_view *view, uint64_t first, uint64_t count) {
    struct pack_copy copy = {.packed = destination, .gather = true, .element_size = view->element_size};
    if (count > 0)
        pack_walk(view, first, count, &copy);
}

void pack_scatter(const struct pack_view *view, uint64_t first, uint64_t count, const void *source) {
    /* Only read from: `gather` is false. */
    struct pack_copy copy = {.packed = (uint8_t *)source, .gather = false, .element_size = view->element_size};
    if (count > 0)
        pack_walk(view, first, count, &copy);
}
