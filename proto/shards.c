/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/shards.h"

#include "proto/messages.h"
#include "proto/text.h"

#include <errno.h>

/*
 * A record is a fixed head, then numbers, then the names:
 *
 *   head | shape[dims] | box: offset[dims] extent[dims], unless whole; range: start count
 *        | stride[dims], of a range stride[1], unless contiguous | name NUL | target NUL | zeros to 8
 *
 * A shard is valid in the same sense on both sides: shard_check() is what the writer applies to the
 * caller's struct and the parser to what it decoded, after it has checked that the record holds
 * what its head says.
 */

struct record {
    uint32_t size; /* of the whole record, a multiple of 8 */
    uint32_t name_length, target_length;
    uint16_t flags;  /* enum shard_flags */
    uint16_t layout; /* enum record_layout */
    uint16_t dtype, dims;
    uint32_t area;
    uint32_t replica_index, replica_count;
    uint64_t address;
};
_Static_assert(sizeof(struct record) == 40, "no padding");

enum record_layout {
    RECORD_RANGE = 1 << 0,
    RECORD_WHOLE = 1 << 1, /* a box that is all of its tensor: offset and extent are left out */
    RECORD_CONTIGUOUS = 1 << 2,
};

#define RECORD_LAYOUTS (RECORD_RANGE | RECORD_WHOLE | RECORD_CONTIGUOUS)
#define SHARD_FLAGS (SHARD_RANK_LOCAL | SHARD_EAGER | SHARD_ALIAS)
#define SHARD_ADDRESS_MAX INT64_MAX

struct shards {
    uint8_t *data;
    size_t size;
    uint32_t *index; /* [count] where each record begins, in units of 8 bytes */
    uint32_t count;
};

static unsigned record_numbers(const struct record *record) {
    unsigned numbers = record->dims;
    if (record->layout & RECORD_RANGE)
        numbers += 2;
    else if (!(record->layout & RECORD_WHOLE))
        numbers += 2 * record->dims;
    if (!(record->layout & RECORD_CONTIGUOUS))
        numbers += record->layout & RECORD_RANGE ? 1 : record->dims;
    return numbers;
}

static uint64_t record_size(const struct record *record) {
    return align_up(sizeof *record + record_numbers(record) * sizeof(uint64_t) + record->name_length + 1 +
                        record->target_length + 1,
                    8);
}

/* False: the span does not fit into 63 bits. */
static bool span(const struct shard *shard, int64_t *ret_low, int64_t *ret_high) {
    const struct geometry *geometry = &shard->geometry;
    uint64_t elements = geometry_elements(geometry);
    int64_t size = dtype_size(shard->dtype), low = 0, high = 0;
    if (elements == 0) {
        *ret_low = *ret_high = 0;
        return true;
    }
    if (shard->contiguous) {
        *ret_low = 0;
        *ret_high = (int64_t)elements * size;
        return true;
    }
    unsigned steps = geometry->is_range ? 1 : geometry->dims;
    for (unsigned i = 0; i < steps; i++) {
        int64_t count = (int64_t)(geometry->is_range ? geometry->count : geometry->extent[i]), reach;
        if (__builtin_mul_overflow(count - 1, shard->stride[i], &reach) ||
            __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high))
            return false;
    }
    if (__builtin_add_overflow(high, size, &high))
        return false;
    *ret_low = low;
    *ret_high = high;
    return true;
}

static int name_check(const char *what, const char *name, size_t length, struct problem *problem) {
    if (length == 0)
        return problem_set(problem, -EINVAL, "a tensor's %s is empty", what);
    if (length > SHARDS_NAME_MAX)
        return problem_set(problem, -E2BIG,
                           "a tensor's %s of %zu bytes is over the limit of %d (SHARDS_NAME_MAX): %.64s...", what,
                           length, SHARDS_NAME_MAX, name);
    if (!text_is_utf8(name, length))
        return problem_set(problem, -EINVAL, "a tensor's %s is not UTF-8", what);
    return 0;
}

static int check(const struct shard *shard, size_t name_length, struct problem *problem) {
    const struct geometry *geometry = &shard->geometry;
    const char *name = shard->name;
    int r = name_check("name", name, name_length, problem);
    if (r < 0)
        return r;
    if (shard->flags & ~(uint32_t)SHARD_FLAGS)
        return problem_set(problem, -EINVAL, "tensor %s: unknown flags 0x%x", name, shard->flags);
    if (shard->flags & SHARD_ALIAS) {
        if (!shard->target)
            return problem_set(problem, -EINVAL, "tensor %s: an alias without a target", name);
        r = name_check("alias target", shard->target, strlen(shard->target), problem);
        if (r < 0)
            return r;
        if (strcmp(name, shard->target) == 0)
            return problem_set(problem, -EINVAL, "tensor %s: an alias of itself", name);
    } else if (shard->target) {
        return problem_set(problem, -EINVAL, "tensor %s: a target, but not an alias", name);
    }
    if (!dtype_valid(shard->dtype))
        return problem_set(problem, -EINVAL, "tensor %s: no such dtype: %u", name, (unsigned)shard->dtype);
    if (geometry->dims > GEOMETRY_DIMS_MAX)
        return problem_set(problem, -E2BIG, "tensor %s: %u dimensions are over the limit of %d", name, geometry->dims,
                           GEOMETRY_DIMS_MAX);
    if (!geometry_valid(geometry, dtype_size(shard->dtype)))
        return problem_set(problem, -EINVAL,
                           "tensor %s: the piece does not lie in the global shape, or the shape overflows", name);
    if (shard->replica_count == 0 || shard->replica_index >= shard->replica_count)
        return problem_set(problem, -EINVAL, "tensor %s: replica %u of %u", name, shard->replica_index,
                           shard->replica_count);
    if (shards_area_is_device(shard->area)) {
        if (shard->area - SHARDS_AREA_DEVICE >= DEVICE_MEMORIES_MAX)
            return problem_set(problem, -EINVAL,
                               "tensor %s: device memory %u is over the limit of %d (DEVICE_MEMORIES_MAX)", name,
                               shard->area - SHARDS_AREA_DEVICE, DEVICE_MEMORIES_MAX);
    } else if (shard->area != SHARDS_AREA_PRIVATE && shard->area >= AREAS_MAX)
        return problem_set(problem, -EINVAL, "tensor %s: area %u is over the limit of %d (AREAS_MAX)", name,
                           shard->area, AREAS_MAX);
    int64_t low, high;
    if (!span(shard, &low, &high))
        return problem_set(problem, -EINVAL, "tensor %s: the strides overflow", name);
    if (shard->address > SHARD_ADDRESS_MAX || (int64_t)shard->address + low < 0 ||
        high > SHARD_ADDRESS_MAX - (int64_t)shard->address)
        return problem_set(problem, -EINVAL, "tensor %s: the strides leave the address space", name);
    return 0;
}

static size_t name_length(const struct shard *shard) { return strnlen(shard->name, SHARDS_NAME_MAX + 1); }

int shard_check(const struct shard *shard, struct problem *problem) {
    return check(shard, name_length(shard), problem);
}

static bool is_whole_box(const struct geometry *geometry) { return !geometry->is_range && geometry_is_whole(geometry); }

int shards_writer_add(struct shards_writer *writer, const struct shard *shard, struct problem *problem) {
    const struct geometry *geometry = &shard->geometry;
    size_t length = name_length(shard);
    int r = check(shard, length, problem);
    if (r < 0)
        return r;
    if (writer->count >= SHARDS_COUNT_MAX)
        return problem_set(problem, -E2BIG, "tensor %s: more than %d shards in one set (SHARDS_COUNT_MAX)", shard->name,
                           SHARDS_COUNT_MAX);

    struct record record = {
        .name_length = (uint32_t)length,
        .target_length = shard->target ? (uint32_t)strlen(shard->target) : 0,
        .flags = (uint16_t)shard->flags,
        .layout = (uint16_t)((geometry->is_range ? RECORD_RANGE : 0) | (is_whole_box(geometry) ? RECORD_WHOLE : 0) |
                             (shard->contiguous ? RECORD_CONTIGUOUS : 0)),
        .dtype = (uint16_t)shard->dtype,
        .dims = geometry->dims,
        .area = shard->area,
        .replica_index = shard->replica_index,
        .replica_count = shard->replica_count,
        .address = shard->address,
    };
    record.size = (uint32_t)record_size(&record);
    if (writer->size + record.size > SHARDS_TABLE_MAX)
        return problem_set(problem, -E2BIG,
                           "tensor %s: the shard table is over the limit of %llu bytes (SHARDS_TABLE_MAX)", shard->name,
                           (unsigned long long)SHARDS_TABLE_MAX);
    if (writer->capacity - writer->size < record.size) {
        size_t capacity = max_u64(writer->capacity * 2, max_u64(KIB(64), writer->size + record.size));
        uint8_t *data = realloc(writer->data, capacity);
        if (!data)
            return problem_set(problem, -ENOMEM, "out of memory for a shard table of %zu bytes", capacity);
        writer->data = data;
        writer->capacity = capacity;
    }

    uint8_t *at = writer->data + writer->size;
    memset(at, 0, record.size);
    memcpy(at, &record, sizeof record);
    at += sizeof record;
    size_t per_dim = geometry->dims * sizeof(uint64_t);
    at = mempcpy(at, geometry->shape, per_dim);
    if (geometry->is_range) {
        at = mempcpy(at, &geometry->start, sizeof geometry->start);
        at = mempcpy(at, &geometry->count, sizeof geometry->count);
    } else if (!(record.layout & RECORD_WHOLE)) {
        at = mempcpy(at, geometry->offset, per_dim);
        at = mempcpy(at, geometry->extent, per_dim);
    }
    if (!shard->contiguous)
        at = mempcpy(at, shard->stride, geometry->is_range ? sizeof shard->stride[0] : per_dim);
    memcpy(at, shard->name, record.name_length);
    if (shard->target)
        memcpy(at + record.name_length + 1, shard->target, record.target_length);
    writer->size += record.size;
    writer->count++;
    return 0;
}

void shards_writer_deinit(struct shards_writer *writer) {
    free(writer->data);
    *writer = (struct shards_writer){0};
}

/* The record holds what its head says: shards_parse() has checked it. */
static void record_decode(const uint8_t *at, struct shard *ret_shard) {
    struct record record;
    memcpy(&record, at, sizeof record);
    at += sizeof record;
    ret_shard->name_length = record.name_length;
    ret_shard->dtype = (enum dtype)record.dtype;
    ret_shard->flags = record.flags;
    ret_shard->area = record.area;
    ret_shard->address = record.address;
    ret_shard->replica_index = record.replica_index;
    ret_shard->replica_count = record.replica_count;
    ret_shard->contiguous = record.layout & RECORD_CONTIGUOUS;

    struct geometry *geometry = &ret_shard->geometry;
    memset(geometry, 0, sizeof *geometry);
    geometry->is_range = record.layout & RECORD_RANGE;
    geometry->dims = (uint8_t)record.dims;
    size_t per_dim = record.dims * sizeof(uint64_t);
    memcpy(geometry->shape, at, per_dim);
    at += per_dim;
    if (geometry->is_range) {
        memcpy(&geometry->start, at, sizeof geometry->start);
        memcpy(&geometry->count, at + sizeof geometry->start, sizeof geometry->count);
        at += sizeof geometry->start + sizeof geometry->count;
    } else if (record.layout & RECORD_WHOLE) {
        memcpy(geometry->extent, geometry->shape, per_dim);
    } else {
        memcpy(geometry->offset, at, per_dim);
        memcpy(geometry->extent, at + per_dim, per_dim);
        at += 2 * per_dim;
    }
    memset(ret_shard->stride, 0, sizeof ret_shard->stride);
    if (!ret_shard->contiguous) {
        size_t strides = geometry->is_range ? sizeof ret_shard->stride[0] : per_dim;
        memcpy(ret_shard->stride, at, strides);
        at += strides;
    }
    ret_shard->name = (const char *)at;
    ret_shard->target = record.flags & SHARD_ALIAS ? (const char *)at + record.name_length + 1 : NULL;
}

/* One record at `at`, of which `left` bytes are in the table. */
static int record_check(const uint8_t *at, uint64_t left, uint32_t i, struct problem *problem) {
    struct record record;
    if (left < sizeof record)
        return problem_set(problem, -EINVAL, "shard table: record %u is cut off", i);
    memcpy(&record, at, sizeof record);
    if (record.dims > GEOMETRY_DIMS_MAX || record.name_length > SHARDS_NAME_MAX ||
        record.target_length > SHARDS_NAME_MAX || record.layout & ~RECORD_LAYOUTS ||
        (record.layout & (RECORD_RANGE | RECORD_WHOLE)) == (RECORD_RANGE | RECORD_WHOLE) ||
        (record.target_length > 0) != ((record.flags & SHARD_ALIAS) != 0))
        return problem_set(problem, -EINVAL, "shard table: record %u contradicts itself", i);
    if (record.size != record_size(&record) || record.size > left)
        return problem_set(problem, -EINVAL, "shard table: record %u has the wrong size", i);
    const char *name = (const char *)at + sizeof record + record_numbers(&record) * sizeof(uint64_t);
    const char *target = name + record.name_length + 1;
    if (strnlen(name, record.name_length + 1) != record.name_length ||
        strnlen(target, record.target_length + 1) != record.target_length)
        return problem_set(problem, -EINVAL, "shard table: a name in record %u has a NUL in it, or none after it", i);
    struct shard shard;
    record_decode(at, &shard);
    return check(&shard, record.name_length, problem);
}

static int shards_new(uint32_t count, struct shards **ret_shards, struct problem *problem) {
    CLEANUP(shards_freep) struct shards *shards = calloc(1, sizeof *shards);
    if (!shards || !(shards->index = malloc(max_u64(count, 1) * sizeof *shards->index)))
        return problem_set(problem, -ENOMEM, "out of memory for a table of %u shards", count);
    *ret_shards = STEAL(shards);
    return 0;
}

/* The next record begins at `at`. Returns where it ends. */
static uint64_t index_add(struct shards *shards, uint64_t at) {
    uint32_t record_bytes;
    memcpy(&record_bytes, shards->data + at + offsetof(struct record, size), sizeof record_bytes);
    shards->index[shards->count++] = (uint32_t)(at / 8);
    return at + record_bytes;
}

int shards_parse(const void *data, size_t size, uint32_t count, struct shards **ret_shards, struct problem *problem) {
    if (count > SHARDS_COUNT_MAX || size > SHARDS_TABLE_MAX)
        return problem_set(problem, -E2BIG, "shard table: %u shards in %zu bytes are over the limit of %d in %llu",
                           count, size, SHARDS_COUNT_MAX, (unsigned long long)SHARDS_TABLE_MAX);
    if (count > size / sizeof(struct record))
        return problem_set(problem, -EINVAL, "shard table: no room for %u records in %zu bytes", count, size);

    CLEANUP(shards_freep) struct shards *shards = NULL;
    int r = shards_new(count, &shards, problem);
    if (r < 0)
        return r;
    /* A copy: the peer cannot change what was checked, and its memfd need not stay mapped. */
    shards->data = malloc(max_u64(size, 1));
    if (!shards->data)
        return problem_set(problem, -ENOMEM, "out of memory for a shard table of %zu bytes", size);
    shards->size = size;
    if (size)
        memcpy(shards->data, data, size);
    uint64_t at = 0;
    while (shards->count < count) {
        r = record_check(shards->data + at, size - at, shards->count, problem);
        if (r < 0)
            return r;
        at = index_add(shards, at);
    }
    if (at != size)
        return problem_set(problem, -EINVAL, "shard table: %llu bytes follow the last record",
                           (unsigned long long)(size - at));
    *ret_shards = STEAL(shards);
    return 0;
}

int shards_consume(struct shards_writer *writer, struct shards **ret_shards, struct problem *problem) {
    struct shards *shards;
    int r = shards_new(writer->count, &shards, problem);
    if (r < 0)
        return r;
    shards->data = writer->data;
    shards->size = writer->size;
    for (uint64_t at = 0; shards->count < writer->count;)
        at = index_add(shards, at);
    *writer = (struct shards_writer){0};
    *ret_shards = shards;
    return 0;
}

void shards_free(struct shards *shards) {
    if (!shards)
        return;
    free(shards->data);
    free(shards->index);
    free(shards);
}

void shards_freep(struct shards **shards) { shards_free(*shards); }

uint32_t shards_count(const struct shards *shards) { return shards->count; }

const void *shards_table(const struct shards *shards, size_t *ret_size) {
    *ret_size = shards->size;
    return shards->data;
}

void shards_get(const struct shards *shards, uint32_t i, struct shard *ret_shard) {
    assert(i < shards->count);
    record_decode(shards->data + (uint64_t)shards->index[i] * 8, ret_shard);
}

uint64_t shard_bytes(const struct shard *shard) {
    if (shard->flags & SHARD_ALIAS || shard->replica_index > 0)
        return 0;
    return geometry_elements(&shard->geometry) * dtype_size(shard->dtype);
}

void shard_span(const struct shard *shard, int64_t *ret_low, int64_t *ret_high) {
    bool fits = span(shard, ret_low, ret_high);
    assert(fits);
}
