/* SPDX-License-Identifier: Apache-2.0 */
#include "client/plan.h"

#include "client/errors.h"

#include <sys/mman.h>

/*
 * A box that cuts across the rows of a huge tensor makes a copy per row; so that a plan never needs
 * memory without bound, a full one is executed and begun anew. Copies come in ascending order within
 * a piece, so little is fetched twice.
 */

#define PREPARED_MIN KIB(256) /* for a smaller stretch the call is not worth it */
#define PREPARED_PAGES 512    /* at a time */

void plan_deinit(struct plan *plan) {
    free(plan->copies);
    plan->copies = NULL;
    plan->count = plan->capacity = 0;
}

uint32_t plan_chunk_size(const struct plan *plan, uint32_t rank) {
    return plan->index->complete.parts[rank].chunk_size;
}

uint64_t plan_chunk_length(const struct plan *plan, uint32_t rank, uint32_t chunk) {
    uint64_t size = plan_chunk_size(plan, rank), begin = chunk * size;
    uint64_t image_size = plan->index->complete.parts[rank].image_size;
    return begin >= image_size ? 0 : min_u64(size, image_size - begin);
}

static int push_copy(struct plan *plan, const struct plan_copy *copy) {
    if (plan->count == plan->limit) {
        int r = plan->full(plan->context, plan);
        if (r < 0)
            return r;
        plan->count = 0;
    }
    if (plan->count == plan->capacity) {
        size_t capacity = min_u64(plan->limit, max_u64(256, plan->capacity * 2));
        struct plan_copy *copies = realloc(plan->copies, capacity * sizeof *copies);
        if (!copies)
            return error_set(CKPT_E_MEMORY, "out of memory for reading %zu pieces", capacity);
        plan->copies = copies;
        plan->capacity = capacity;
    }
    plan->copies[plan->count++] = *copy;
    return CKPT_OK;
}

/* Cuts at chunk boundaries, on which whole elements lie. */
static int add_run(struct plan *plan, struct plan_copy run, unsigned element_size) {
    uint64_t chunk_size = plan_chunk_size(plan, run.rank);
    while (run.count > 0) {
        uint64_t left = chunk_size - run.image_offset % chunk_size;
        struct plan_copy copy = run;
        copy.count = min_u64(run.count, left / element_size);
        int r = push_copy(plan, &copy);
        if (r < 0)
            return r;
        run.image_offset += copy.count * element_size;
        run.element += copy.count;
        run.count -= copy.count;
    }
    return CKPT_OK;
}

struct walk {
    struct plan *plan;
    const struct piece *piece;
    uint32_t target;
    uint64_t found; /* elements */
};

static int on_run(void *context, uint64_t piece_element, uint64_t target_element, uint64_t count) {
    struct walk *walk = context;
    unsigned element_size = dtype_size(walk->piece->dtype);
    struct plan_copy run = {
        .image_offset = walk->piece->image_offset + piece_element * element_size,
        .element = target_element,
        .count = count,
        .rank = walk->piece->rank,
        .target = walk->target,
    };
    walk->found += count;
    return add_run(walk->plan, run, element_size);
}

int plan_add(struct plan *plan, const struct index_tensor *tensor, uint32_t target) {
    const struct geometry *wanted = &plan->targets[target].geometry;
    struct walk walk = {.plan = plan, .target = target};
    for (size_t i = 0; i < tensor->count; i++) {
        walk.piece = &plan->index->complete.pieces.items[tensor->first + i];
        int r = geometry_intersect(&walk.piece->geometry, wanted, on_run, &walk);
        if (r < 0)
            return r;
    }
    if (walk.found != geometry_elements(wanted))
        return error_set(CKPT_E_DAMAGED, "tensor %s: the stored pieces hold %ju of the %ju elements to read",
                         tensor->name, (uintmax_t)walk.found, (uintmax_t)geometry_elements(wanted));
    return CKPT_OK;
}

int plan_add_bytes(struct plan *plan, uint32_t rank, uint64_t image_offset, uint64_t length, uint32_t target) {
    struct plan_copy run = {.image_offset = image_offset, .count = length, .rank = rank, .target = target};
    return add_run(plan, run, 1);
}

static int compare(const void *left, const void *right) {
    const struct plan_copy *a = left, *b = right;
    if (a->rank != b->rank)
        return a->rank < b->rank ? -1 : 1;
    if (a->image_offset != b->image_offset)
        return a->image_offset < b->image_offset ? -1 : 1;
    return 0;
}

void plan_sort(struct plan *plan) {
    if (plan->count > 1)
        qsort(plan->copies, plan->count, sizeof *plan->copies, compare);
}

bool plan_next(const struct plan *plan, size_t *at, uint32_t chunks_max, struct plan_window *ret_window) {
    if (*at >= plan->count)
        return false;
    const struct plan_copy *copy = &plan->copies[*at];
    uint64_t chunk_size = plan_chunk_size(plan, copy->rank);
    struct plan_window window = {
        .rank = copy->rank, .first = (uint32_t)(copy->image_offset / chunk_size), .count = 1, .first_copy = *at};
    size_t end = *at + 1;
    for (; end < plan->count && plan->copies[end].rank == window.rank; end++) {
        uint64_t chunk = plan->copies[end].image_offset / chunk_size;
        if (chunk > window.first + window.count || chunk - window.first >= chunks_max)
            break;
        window.count = (uint32_t)(chunk - window.first) + 1;
    }
    window.copy_count = end - *at;
    *at = end;
    *ret_window = window;
    return true;
}

/* Looking costs little where all are present; making them so once more costs as much as a quarter of the faults. */
static void make_present(uintptr_t begin, uintptr_t end, uintptr_t page) {
    unsigned char present[PREPARED_PAGES];
    while (begin < end) {
        size_t length = min_u64(end - begin, PREPARED_PAGES * page), pages = length / page, first = 0;
        if (mincore((void *)begin, length, present) == 0)
            while (first < pages && present[first] & 1)
                first++;
        if (first < pages)
            (void)madvise((void *)begin, length, MADV_POPULATE_WRITE); /* an older kernel cannot: faults, then */
        begin += length;
    }
}

void plan_prepare(const struct plan *plan, const struct plan_window *window) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < window->copy_count; i++) {
        const struct plan_copy *copy = &plan->copies[window->first_copy + i];
        const struct plan_target *target = &plan->targets[copy->target];
        uint64_t length = copy->count * target->element_size;
        if (target->on_device || target->stride || length < PREPARED_MIN)
            continue;
        uintptr_t first = (uintptr_t)target->data + copy->element * target->element_size;
        uintptr_t begin = align_up(first, page), end = (first + length) / page * page;
        make_present(begin, end, page);
    }
}

int plan_execute(const struct plan *plan, const struct plan_copy *copy, const uint8_t *data) {
    const struct plan_target *target = &plan->targets[copy->target];
    struct pack_view view = {.geometry = &target->geometry,
                             .stride = target->stride,
                             .data = target->data,
                             .element_size = target->element_size};
    const uint8_t *from = data + copy->image_offset % plan_chunk_size(plan, copy->rank);
    if (target->on_device)
        return staging_scatter(plan->staging, target->device, target->stream, !target->on_stream, &view, copy->element,
                               copy->count, from, plan->deadline);
    pack_scatter(&view, copy->element, copy->count, from);
    return CKPT_OK;
}
