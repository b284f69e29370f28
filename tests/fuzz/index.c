/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the client makes of a complete.json with digests that match: its index, and plans of reads of
 * boxes and ranges out of its tensors, drawn from a seed that is the input's digest.
 *
 * Every tensor is found by its name. A plan's copies stay in their images, chunks and targets, its
 * windows hold their chunks and no more than allowed; carried out on chunks of exactly their length, it
 * brings bytes that some piece has at that place.
 */
#include "client/index.h"

#include "client/ckpt.h"
#include "client/errors.h"
#include "client/plan.h"
#include "tests/fuzz/fuzz.h"

#define CHUNKS_MAX 3
#define COPIES_MAX 200
#define ELEMENTS_MAX 1000
#define CHUNK_EXECUTED_MAX KIB(64)

static uint64_t draw(uint64_t *seed, uint64_t bound) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return bound ? (*seed >> 33 | *seed << 31) % bound : 0;
}

static uint8_t byte_at(uint32_t rank, uint64_t image_offset) {
    return (uint8_t)(image_offset * 7 + (image_offset >> 8) * 13 + rank * 31 + 1);
}

static void check_copy(const struct plan *plan, const struct plan_copy *copy) {
    const struct complete_part *part = &plan->index->complete.parts[copy->rank];
    const struct plan_target *target = &plan->targets[copy->target];
    uint64_t elements = geometry_elements(&target->geometry), bytes = copy->count * target->element_size;
    assert(copy->rank < plan->index->complete.summary.world && copy->count > 0);
    assert(copy->element <= elements && copy->count <= elements - copy->element);
    assert(copy->image_offset <= part->image_size && bytes <= part->image_size - copy->image_offset);
    assert(copy->image_offset / part->chunk_size == (copy->image_offset + bytes - 1) / part->chunk_size);
}

/* As if the chunk had come. */
static void execute(const struct plan *plan, const struct plan_copy *copy, uint64_t chunk) {
    uint64_t length = plan_chunk_length(plan, copy->rank, (uint32_t)chunk);
    uint64_t start = chunk * plan_chunk_size(plan, copy->rank);
    if (length > CHUNK_EXECUTED_MAX || !plan->targets[copy->target].data)
        return;
    CLEANUP(freep) uint8_t *data = malloc(length);
    for (uint64_t i = 0; i < length; i++)
        data[i] = byte_at(copy->rank, start + i);
    assert(plan_execute(plan, copy, data) == CKPT_OK);
}

static int finish(void *context, struct plan *plan) {
    size_t at = 0, copy = 0;
    struct plan_window window;
    plan_sort(plan);
    while (plan_next(plan, &at, CHUNKS_MAX, &window)) {
        assert(window.first_copy == copy && window.count >= 1 && window.count <= CHUNKS_MAX && window.copy_count);
        for (; copy < window.first_copy + window.copy_count; copy++) {
            check_copy(plan, &plan->copies[copy]);
            uint64_t chunk = plan->copies[copy].image_offset / plan_chunk_size(plan, window.rank);
            assert(plan->copies[copy].rank == window.rank);
            assert(chunk >= window.first && chunk - window.first < window.count);
            execute(plan, &plan->copies[copy], chunk);
        }
    }
    assert(copy == plan->count);
    /* A huge tensor has no end of copies. */
    return context ? CKPT_OK : CKPT_E_LIMIT;
}

static bool has_bytes(const struct index *index, const struct index_tensor *tensor, uint64_t linear,
                      const uint8_t *bytes) {
    unsigned size = dtype_size(tensor->dtype);
    for (size_t i = 0; i < tensor->count; i++) {
        const struct piece *piece = &index->complete.pieces.items[tensor->first + i];
        uint64_t element;
        if (!fuzz_locate(&piece->geometry, linear, &element))
            continue;
        unsigned k = 0;
        while (k < size && bytes[k] == byte_at(piece->rank, piece->image_offset + element * size + k))
            k++;
        if (k == size)
            return true;
    }
    return false;
}

/* Pieces may overlap where others leave a gap; then the count of elements is right, and some are unread. */
static bool is_covered_once(const struct index *index, const struct index_tensor *tensor, uint64_t linear) {
    unsigned times = 0;
    uint64_t element;
    for (size_t i = 0; i < tensor->count; i++)
        times += fuzz_locate(&index->complete.pieces.items[tensor->first + i].geometry, linear, &element);
    return times == 1;
}

static bool parts_are_small(const struct index *index) {
    for (uint32_t i = 0; i < index->complete.summary.world; i++)
        if (index->complete.parts[i].chunk_size > CHUNK_EXECUTED_MAX)
            return false;
    return true;
}

static void check_read(const struct index *index, const struct index_tensor *tensor, const struct geometry *wanted) {
    unsigned size = dtype_size(tensor->dtype);
    uint64_t elements = geometry_elements(wanted);
    bool small = elements <= ELEMENTS_MAX;
    CLEANUP(freep) uint8_t *data = small ? malloc(elements * size) : NULL;
    struct plan_target target = {.geometry = *wanted, .data = data, .element_size = size};
    CLEANUP(plan_deinit)
    struct plan plan = {
        .index = index, .targets = &target, .limit = COPIES_MAX, .full = finish, .context = small ? &target : NULL};
    int r = plan_add(&plan, tensor, 0);
    assert(r == CKPT_OK || r == CKPT_E_DAMAGED || r == CKPT_E_LIMIT);
    if (r != CKPT_OK)
        return;
    finish(&plan, &plan);
    for (uint64_t i = 0; small && parts_are_small(index) && i < elements; i++) {
        uint64_t linear = fuzz_linear(wanted, i);
        assert(!is_covered_once(index, tensor, linear) || has_bytes(index, tensor, linear, data + i * size));
    }
}

static void draw_reads(const struct index *index, const struct index_tensor *tensor, uint64_t *seed) {
    const struct geometry *form = tensor->form;
    struct geometry whole = {.dims = form->dims}, box, range;
    memcpy(whole.shape, form->shape, sizeof whole.shape);
    memcpy(whole.extent, form->shape, sizeof whole.extent);
    check_read(index, tensor, &whole);
    box = range = whole;
    uint64_t elements = geometry_tensor_elements(&whole);
    for (unsigned i = 0; i < box.dims; i++) {
        box.offset[i] = draw(seed, box.shape[i]);
        box.extent[i] = draw(seed, min_u64(box.shape[i] - box.offset[i], 12) + 1);
    }
    check_read(index, tensor, &box);
    range.is_range = true;
    range.start = draw(seed, elements);
    range.count = draw(seed, min_u64(elements - range.start, ELEMENTS_MAX) + 1);
    check_read(index, tensor, &range);
}

static void check_index(const struct index *index, uint64_t seed) {
    for (size_t i = 0; i < index->count; i++) {
        const struct index_tensor *tensor = &index->tensors[i], *stored = index_resolve(index, tensor);
        struct ckpt_tensor described;
        assert(index_find(index, tensor->name, tensor->rank_local, tensor->rank) == tensor);
        index_describe(index, tensor, &described);
        assert(strcmp(described.name, tensor->name) == 0 && described.dimensions <= GEOMETRY_DIMS_MAX);
        assert(stored && !stored->alias_of); /* complete_read() has looked for the targets */
        draw_reads(index, stored, &seed);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t sealed_size;
    CLEANUP(freep) char *sealed = fuzz_seal(data, size, &sealed_size);
    CLEANUP(index_deinit) struct index index = {0};
    struct digest digest;
    uint64_t seed;
    int r = index_read(sealed, sealed_size, &index);
    assert(r == CKPT_OK || r == CKPT_E_DAMAGED || r == CKPT_E_VERSION);
    digest_leaf(data, size, &digest);
    memcpy(&seed, digest.bytes, sizeof seed);
    if (r == CKPT_OK)
        check_index(&index, seed);
    return 0;
}
