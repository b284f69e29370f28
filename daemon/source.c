/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contiguous shards are gathered as spans and read many at a time. A strided shard is packed run by
 * run: a run is a stretch of elements along the innermost dimensions whose memory span fits a
 * bounded scratch buffer, read at once and packed from there; one system call per element would
 * crawl.
 */
#include "daemon/source.h"

#include <errno.h>

#define STRIDED_SCRATCH KIB(256)

/* Spans of one memory, waiting to be read together. */
struct gather {
    const struct source *source;
    const struct source_memory *memory;
    uint32_t area;
    size_t count;
    struct source_span spans[SOURCE_SPANS_MAX];
};

static const struct source_memory *memory_of(const struct shard *shard) {
    if (shard->area == SHARDS_AREA_PRIVATE)
        return &source_private;
    return shards_area_is_device(shard->area) ? &source_cuda : &source_shared;
}

/* Where the bytes are looked at right after they were read. */
static const struct source_memory *packed_memory_of(const struct shard *shard) {
    const struct source_memory *memory = memory_of(shard);
    return memory == &source_cuda ? &source_cuda_waiting : memory;
}

static bool reaches(const struct source *source, const struct shard *shard) {
    bool on_device = shards_area_is_device(shard->area);
    if (source->reach == SOURCE_HOST || !on_device)
        return source->reach == SOURCE_HOST && !on_device;
    if (source->set->memories[shard->area - SHARDS_AREA_DEVICE]->device != source->device)
        return false;
    return source->reach == SOURCE_DEVICE || (source->reach == SOURCE_DEVICE_CONTIGUOUS) == shard->contiguous;
}

static int gather_flush(struct gather *gather) {
    size_t count = gather->count;
    gather->count = 0;
    return count ? gather->memory->read(gather->source, gather->area, gather->spans, count) : 0;
}

static int gather_add(struct gather *gather, const struct shard *shard, uint64_t address, size_t length,
                      uint8_t *destination) {
    const struct source_memory *memory = memory_of(shard);
    if (gather->count == SOURCE_SPANS_MAX ||
        (gather->count && (gather->memory != memory || gather->area != shard->area))) {
        int r = gather_flush(gather);
        if (r < 0)
            return r;
    }
    gather->memory = memory;
    gather->area = shard->area;
    gather->spans[gather->count++] =
        (struct source_span){.destination = destination, .address = address, .length = length};
    return 0;
}

/* A strided shard with its trivial dimensions removed. */
struct strided {
    unsigned dims;
    unsigned element;
    uint64_t extent[GEOMETRY_DIMS_MAX];
    int64_t stride[GEOMETRY_DIMS_MAX];
};

static void strided_init(struct strided *strided, const struct shard *shard) {
    const struct geometry *geometry = &shard->geometry;
    strided->dims = 0;
    strided->element = dtype_size(shard->dtype);
    if (geometry->is_range) {
        strided->extent[0] = geometry->count;
        strided->stride[0] = shard->stride[0];
        strided->dims = 1;
        return;
    }
    for (unsigned d = 0; d < geometry->dims; d++) {
        if (geometry->extent[d] == 1)
            continue;
        unsigned last = strided->dims;
        if (last && strided->stride[last - 1] == shard->stride[d] * (int64_t)geometry->extent[d]) {
            /* Continues the dimension outside of it: one longer dimension. */
            strided->extent[last - 1] *= geometry->extent[d];
            strided->stride[last - 1] = shard->stride[d];
            continue;
        }
        strided->extent[strided->dims] = geometry->extent[d];
        strided->stride[strided->dims++] = shard->stride[d];
    }
}

static void pack(uint8_t *destination, const uint8_t *from, int64_t stride, uint64_t count, unsigned element) {
    if (stride == (int64_t)element) {
        memcpy(destination, from, count * element);
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        memcpy(destination + i * element, from + (int64_t)i * stride, element);
}

/* Packs `count` elements that lie `stride` apart, from `address` on. */
static int pack_run(const struct source *source, const struct shard *shard, int64_t stride, unsigned element,
                    uint64_t address, uint64_t count, uint8_t *destination, uint8_t *scratch) {
    const struct source_memory *memory = packed_memory_of(shard);
    uint64_t step = (uint64_t)(stride < 0 ? -stride : stride);
    while (count) {
        uint64_t fits = step ? 1 + (STRIDED_SCRATCH - element) / step : count;
        uint64_t now = min_u64(count, max_u64(fits, 1));
        uint64_t span = (now - 1) * step + element;
        uint64_t low = stride < 0 ? address - (now - 1) * step : address;
        const uint8_t *bytes = memory->look(source, shard->area, low, span);
        if (!bytes) {
            struct source_span one = {.destination = scratch, .address = low, .length = span};
            int r = memory->read(source, shard->area, &one, 1);
            if (r < 0)
                return r;
            bytes = scratch;
        }
        pack(destination, bytes + (address - low), stride, now, element);
        address += (uint64_t)((int64_t)now * stride);
        destination += now * element;
        count -= now;
    }
    return 0;
}

/* Several innermost rows at once, when all of them span little memory: one read, then packing. */
static int pack_block(const struct source *source, const struct shard *shard, const struct strided *strided,
                      uint64_t address, uint64_t rows, uint8_t *destination, uint8_t *scratch, int64_t low,
                      int64_t high) {
    unsigned inner = strided->dims - 1;
    struct source_span one = {
        .destination = scratch, .address = address + (uint64_t)low, .length = (size_t)(high - low)};
    int r = packed_memory_of(shard)->read(source, shard->area, &one, 1);
    if (r < 0)
        return r;
    for (uint64_t row = 0; row < rows; row++)
        pack(destination + row * strided->extent[inner] * strided->element,
             scratch - low + (int64_t)row * strided->stride[inner - 1], strided->stride[inner], strided->extent[inner],
             strided->element);
    return 0;
}

/* The span of `rows` innermost rows, relative to the first element. */
static void block_span(const struct strided *strided, uint64_t rows, int64_t *ret_low, int64_t *ret_high) {
    unsigned inner = strided->dims - 1;
    int64_t across = (int64_t)(strided->extent[inner] - 1) * strided->stride[inner];
    int64_t down = (int64_t)(rows - 1) * strided->stride[inner - 1];
    *ret_low = (across < 0 ? across : 0) + (down < 0 ? down : 0);
    *ret_high = (across > 0 ? across : 0) + (down > 0 ? down : 0) + strided->element;
}

/* How many innermost rows, from `index` on, can be read in one go: their span fits the scratch. */
static uint64_t block_rows(const struct strided *strided, const struct shard *shard, const uint64_t *index,
                           uint64_t left) {
    unsigned inner = strided->dims - 1;
    if (strided->dims < 2 || index[inner] || memory_of(shard) == &source_shared)
        return 0;
    uint64_t rows = min_u64(strided->extent[inner - 1] - index[inner - 1], left / strided->extent[inner]);
    while (rows > 1) {
        int64_t low, high;
        block_span(strided, rows, &low, &high);
        if ((uint64_t)(high - low) <= STRIDED_SCRATCH)
            break;
        rows /= 2;
    }
    return rows > 1 ? rows : 0;
}

/* Elements [first, first + count) of a strided shard, in row-major order. */
static int fill_strided(const struct source *source, const struct shard *shard, uint64_t first, uint64_t count,
                        uint8_t *destination) {
    struct strided strided;
    strided_init(&strided, shard);
    CLEANUP(freep) uint8_t *scratch = malloc(STRIDED_SCRATCH);
    if (!scratch)
        return -ENOMEM;
    if (strided.dims == 0) /* one element */
        return pack_run(source, shard, 0, strided.element, shard->address, count, destination, scratch);
    uint64_t index[GEOMETRY_DIMS_MAX] = {0};
    uint64_t address = shard->address, rest = first;
    for (unsigned d = strided.dims; d-- > 0;) {
        index[d] = rest % strided.extent[d];
        rest /= strided.extent[d];
        address += (uint64_t)((int64_t)index[d] * strided.stride[d]);
    }
    unsigned inner = strided.dims - 1;
    while (count) {
        uint64_t rows = block_rows(&strided, shard, index, count), now;
        int r;
        unsigned moved;
        if (rows) {
            int64_t low, high;
            block_span(&strided, rows, &low, &high);
            r = pack_block(source, shard, &strided, address, rows, destination, scratch, low, high);
            now = rows * strided.extent[inner];
            moved = inner - 1;
            index[moved] += rows;
            address += (uint64_t)((int64_t)rows * strided.stride[moved]);
        } else {
            now = min_u64(count, strided.extent[inner] - index[inner]);
            r = pack_run(source, shard, strided.stride[inner], strided.element, address, now, destination, scratch);
            moved = inner;
            index[moved] += now;
            address += (uint64_t)((int64_t)now * strided.stride[moved]);
        }
        if (r < 0)
            return r;
        destination += now * strided.element;
        count -= now;
        for (unsigned d = moved; d > 0 && index[d] == strided.extent[d]; d--) { /* carry */
            address -= (uint64_t)((int64_t)strided.extent[d] * strided.stride[d]);
            index[d] = 0;
            index[d - 1]++;
            address += (uint64_t)strided.stride[d - 1];
        }
    }
    return 0;
}

static int fill_shard(struct gather *gather, const struct shard *shard, uint64_t from, size_t length,
                      uint8_t *destination) {
    if (shard->contiguous)
        return gather_add(gather, shard, shard->address + from, length, destination);
    unsigned element = dtype_size(shard->dtype);
    assert(from % element == 0 && length % element == 0);
    int r = gather_flush(gather);
    return r < 0 ? r : fill_strided(gather->source, shard, from / element, length / element, destination);
}

int source_fill(const struct source *source, uint64_t offset, size_t length, uint8_t *destination,
                struct problem *problem) {
    const struct image_layout *layout = &source->set->layout;
    struct gather gather = {.source = source};
    struct shard shard = {.name = "its header"};
    uint64_t end = offset + length;
    int r = 0;
    assert(end <= source->image_size);
    if (offset < layout->data_start) {
        size_t now = (size_t)min_u64(length, layout->data_start - offset);
        if (source->reach == SOURCE_HOST)
            memcpy(destination, source->header + offset, now);
        offset += now;
        destination += now;
    }
    uint32_t at = offset < end ? image_find(layout, source->set->shards, offset) : layout->ordered_count;
    for (; r >= 0 && offset < end && at < layout->ordered_count; at++) {
        shards_get(source->set->shards, layout->order[at], &shard);
        uint64_t start = layout->shard_offset[layout->order[at]];
        assert(offset >= start);
        size_t now = (size_t)min_u64(end - offset, start + shard_bytes(&shard) - offset);
        if (reaches(source, &shard))
            r = fill_shard(&gather, &shard, offset - start, now, destination);
        offset += now;
        destination += now;
    }
    if (r >= 0)
        r = gather_flush(&gather);
    if (r < 0 && source->cuda_problem && source->cuda_problem->code)
        return r;
    if (r < 0)
        return problem_set(problem, r, "cannot read the memory of %.200s (or of a neighbour in its chunk): %s",
                           shard.name, strerror(-r));
    if (offset < end && source->reach == SOURCE_HOST)
        memcpy(destination, source->state_area->data + source->state_offset + (offset - layout->state_offset),
               end - offset);
    return 0;
}

const uint8_t *source_look(const struct source *source, uint64_t offset, size_t length) {
    const struct image_layout *layout = &source->set->layout;
    if (offset < layout->data_start || offset + length > layout->state_offset)
        return NULL;
    uint32_t at = image_find(layout, source->set->shards, offset);
    if (at == layout->ordered_count)
        return NULL;
    struct shard shard;
    shards_get(source->set->shards, layout->order[at], &shard);
    uint64_t start = layout->shard_offset[layout->order[at]];
    if (shards_area_is_device(shard.area) || !shard.contiguous || offset + length > start + shard_bytes(&shard))
        return NULL;
    return memory_of(&shard)->look(source, shard.area, shard.address + (offset - start), length);
}

bool source_mixed(const struct source *source, uint64_t offset, size_t length) {
    const struct image_layout *layout = &source->set->layout;
    uint64_t end = offset + length;
    if (offset < layout->data_start || end > layout->state_offset)
        return true;
    struct shard shard;
    for (uint32_t at = image_find(layout, source->set->shards, offset); offset < end; at++) {
        shards_get(source->set->shards, layout->order[at], &shard);
        if (!shards_area_is_device(shard.area) || !shard.contiguous)
            return true;
        offset = layout->shard_offset[layout->order[at]] + shard_bytes(&shard);
    }
    return false;
}

bool source_valid(const struct source *source) {
    const struct set *set = source->set;
    /* What a process had on a device is anybody's once it has ended. */
    if (set->device_count && !peer_alive(source->peer))
        return false;
    return !set->has_private || peer_memory_valid(source->peer, set->nonce_address, set->nonce);
}
