/* SPDX-License-Identifier: Apache-2.0 */
#include "client/set.h"

#include "client/errors.h"
#include "client/pack.h"

#include <errno.h>

/*
 * A piece costs one allocation, and so does a tensor; 100,000 of them are protected in well under a
 * second. The pieces of one tensor that are stored are kept sorted by where they begin in the
 * tensor, and a new one is compared with those whose hulls it meets: with the usual partitions, at
 * most two.
 *
 * A tensor's key is "G" or "L" (rank-local) and its name, so both kinds may use the same names.
 */

#define SET_HEADER_ENTRY_MIN 40 /* bytes of JSON that a tensor costs beside its name, at least */

static void tensor_free(struct set_tensor *tensor) {
    free(tensor->key);
    free(tensor->target);
    free(tensor->stored);
    free(tensor);
}

static void tensor_drop(struct set *set, struct set_tensor *tensor) {
    HASH_DEL(set->tensors, tensor);
    tensor_free(tensor);
}

void set_clear(struct set *set) {
    for (size_t i = 0; i < set->count; i++)
        free(set->shards[i]);
    set->count = set->used = 0;
    struct set_tensor *tensor, *next;
    HASH_ITER(hh, set->tensors, tensor, next) tensor_drop(set, tensor);
    set->alias_count = 0;
    set->header_bytes = 0;
    set->on_devices = 0;
    set->changed = true;
}

void set_deinit(struct set *set) {
    set_clear(set);
    free(set->shards);
    free(set->aliases);
    *set = (struct set){0};
}

static unsigned key_hash(const char *key, size_t length) {
    unsigned hash;
    HASH_VALUE(key, length, hash);
    return hash;
}

static struct set_tensor *find_hashed(const struct set *set, const char *key, size_t length, unsigned hash) {
    struct set_tensor *tensor;
    HASH_FIND_BYHASHVALUE(hh, set->tensors, key, length, hash, tensor);
    return tensor;
}

struct set_tensor *set_find_tensor(const struct set *set, const char *key) {
    size_t length = strlen(key);
    return find_hashed(set, key, length, key_hash(key, length));
}

static char *key_new(const char *name, bool rank_local) {
    size_t length = strlen(name);
    char *key = malloc(length + 2);
    if (key) {
        key[0] = rank_local ? 'L' : 'G';
        memcpy(key + 1, name, length + 1);
    }
    return key;
}

const char *set_name(const struct set_shard *shard) { return shard->tensor->key + 1; }

enum dtype set_dtype(const struct set_shard *shard) { return shard->tensor->dtype; }

void set_geometry(const struct set_shard *shard, struct geometry *ret_geometry) {
    unsigned dims = shard->tensor->dims;
    *ret_geometry = (struct geometry){.is_range = shard->is_range, .dims = (uint8_t)dims};
    memcpy(ret_geometry->shape, shard->tensor->shape, dims * sizeof(uint64_t));
    if (shard->is_range) {
        ret_geometry->start = shard->numbers[0];
        ret_geometry->count = shard->numbers[1];
    } else {
        memcpy(ret_geometry->offset, shard->numbers, dims * sizeof(uint64_t));
        memcpy(ret_geometry->extent, shard->numbers + dims, dims * sizeof(uint64_t));
    }
}

const int64_t *set_stride(const struct set_shard *shard) {
    if (shard->contiguous)
        return NULL;
    return (const int64_t *)(shard->numbers + (shard->is_range ? 2 : 2 * shard->tensor->dims));
}

bool set_is_stored(const struct set_shard *shard) { return shard->replica_index == 0; }

bool set_is_copied(const struct set_shard *shard) {
    return (shard->flags & SHARD_EAGER) && set_is_stored(shard) && shard->bytes <= SET_EAGER_COPY_MAX;
}

/* What the program said, as a record of the table, which is all zeros before; the pointers stay the program's. */
static int shard_from_options(const struct ckpt_shard *given, struct shard *shard) {
    const char *name = given->name;
    if (!name)
        return error_set(CKPT_E_INVALID, "protect: the name is NULL");
    if (given->dimensions > GEOMETRY_DIMS_MAX)
        return error_set(CKPT_E_LIMIT, "protect %s: %u dimensions; at most %d are allowed", name, given->dimensions,
                         GEOMETRY_DIMS_MAX);
    if (given->dimensions > 0 && !given->shape)
        return error_set(CKPT_E_INVALID, "protect %s: %u dimensions, but shape is NULL", name, given->dimensions);
    if (given->flags & ~(uint32_t)(CKPT_RANK_LOCAL | CKPT_EAGER))
        return error_set(CKPT_E_INVALID, "protect %s: unknown flags 0x%x", name, given->flags);
    if (given->range > 1)
        return error_set(CKPT_E_INVALID, "protect %s: range is %u; it must be 0 or 1", name, given->range);
    if (!dtype_valid(given->dtype))
        return error_set(CKPT_E_INVALID, "protect %s: there is no dtype %u", name, given->dtype);

    shard->name = name;
    shard->dtype = (enum dtype)given->dtype;
    shard->flags =
        (given->flags & CKPT_RANK_LOCAL ? SHARD_RANK_LOCAL : 0) | (given->flags & CKPT_EAGER ? SHARD_EAGER : 0);
    shard->area = SHARDS_AREA_PRIVATE;
    shard->address = (uintptr_t)given->data;
    shard->replica_index = given->replica_index;
    shard->replica_count = given->replica_count ? given->replica_count : 1;
    struct geometry *geometry = &shard->geometry;
    geometry->dims = (uint8_t)given->dimensions;
    size_t bytes = given->dimensions * sizeof(uint64_t);
    if (bytes > 0)
        memcpy(geometry->shape, given->shape, bytes);
    if (given->range) {
        if (given->offset || given->extent)
            return error_set(CKPT_E_INVALID, "protect %s: a range has no offset and extent", name);
        geometry->is_range = true;
        geometry->start = given->start;
        geometry->count = given->count;
    } else {
        if (given->start || given->count)
            return error_set(CKPT_E_INVALID, "protect %s: start and count are set, but range is 0", name);
        if (given->offset)
            memcpy(geometry->offset, given->offset, bytes);
        memcpy(geometry->extent, given->extent ? given->extent : geometry->shape, bytes);
        if (given->offset && !given->extent)
            for (unsigned i = 0; i < given->dimensions; i++)
                if (geometry->offset[i] > 0)
                    return error_set(CKPT_E_INVALID, "protect %s: an offset needs an extent", name);
    }
    if (!geometry_valid(geometry, dtype_size(shard->dtype)))
        return error_set(CKPT_E_INVALID, "protect %s: the piece leaves the global shape, or the shape overflows", name);
    shard->contiguous = pack_is_contiguous(geometry, dtype_size(shard->dtype), given->stride);
    if (!shard->contiguous)
        memcpy(shard->stride, given->stride, geometry->is_range ? sizeof given->stride[0] : bytes);
    if (!given->data && geometry_elements(geometry) > 0)
        return error_set(CKPT_E_INVALID, "protect %s: data is NULL", name);
    return CKPT_OK;
}

static int tensor_get(struct set *set, const struct shard *shard, struct set_tensor **ret_tensor, bool *ret_new) {
    CLEANUP(freep) char *key = key_new(shard->name, shard->flags & SHARD_RANK_LOCAL);
    if (!key)
        return error_set(CKPT_E_MEMORY, "protect %s: out of memory", shard->name);
    const struct geometry *geometry = &shard->geometry;
    size_t length = strlen(key);
    unsigned hash = key_hash(key, length);
    struct set_tensor *tensor = find_hashed(set, key, length, hash);
    if (tensor) {
        if (tensor->target)
            return error_set(CKPT_E_EXISTS, "protect %s: that name is an alias of %s", shard->name, tensor->target + 1);
        if (tensor->dtype != shard->dtype)
            return error_set(CKPT_E_MISMATCH, "protect %s: dtype %s, but its other pieces have %s", shard->name,
                             dtype_name(shard->dtype), dtype_name(tensor->dtype));
        if (tensor->dims != geometry->dims ||
            memcmp(tensor->shape, geometry->shape, geometry->dims * sizeof(uint64_t)) != 0)
            return error_set(CKPT_E_MISMATCH, "protect %s: its other pieces have another global shape", shard->name);
        *ret_tensor = tensor;
        *ret_new = false;
        return CKPT_OK;
    }
    tensor = calloc(1, sizeof *tensor + geometry->dims * sizeof(uint64_t));
    if (!tensor)
        return error_set(CKPT_E_MEMORY, "protect %s: out of memory", shard->name);
    tensor->key = STEAL(key);
    tensor->dtype = shard->dtype;
    tensor->dims = geometry->dims;
    memcpy(tensor->shape, geometry->shape, geometry->dims * sizeof(uint64_t));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, set->tensors, tensor->key, length, hash, tensor);
    *ret_tensor = tensor;
    *ret_new = true;
    return CKPT_OK;
}

/* The first and one past the last element in the tensor's row-major order. */
static void hull(const struct geometry *geometry, uint64_t *ret_low, uint64_t *ret_high) {
    *ret_low = *ret_high = 0;
    if (geometry_elements(geometry) == 0)
        return;
    if (geometry->is_range) {
        *ret_low = geometry->start;
        *ret_high = geometry->start + geometry->count;
        return;
    }
    uint64_t low = 0, last = 0, step = 1;
    for (unsigned i = geometry->dims; i-- > 0;) {
        low += geometry->offset[i] * step;
        last += (geometry->offset[i] + geometry->extent[i] - 1) * step;
        step *= geometry->shape[i];
    }
    *ret_low = low;
    *ret_high = last + 1;
}

/* The first stored piece that begins at or after `low`. */
static size_t stored_position(const struct set_tensor *tensor, uint64_t low) {
    size_t first = 0, end = tensor->stored_count;
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (tensor->stored[middle]->low < low)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static const struct set_shard *stored_overlap(const struct set_tensor *tensor, const struct geometry *geometry,
                                              uint64_t low, uint64_t high) {
    for (size_t i = stored_position(tensor, high); i-- > 0;) {
        const struct set_shard *other = tensor->stored[i];
        if (other->low + tensor->longest <= low)
            return NULL;
        if (other->high <= low)
            continue;
        struct geometry theirs;
        set_geometry(other, &theirs);
        if (geometry_overlap(geometry, &theirs))
            return other;
    }
    return NULL;
}

static int stored_insert(struct set_tensor *tensor, struct set_shard *shard) {
    if (tensor->stored_count == tensor->stored_capacity) {
        size_t capacity = tensor->stored_capacity ? tensor->stored_capacity * 2 : 1;
        struct set_shard **stored = realloc(tensor->stored, capacity * sizeof(struct set_shard *));
        if (!stored)
            return -ENOMEM;
        tensor->stored = stored;
        tensor->stored_capacity = capacity;
    }
    size_t at = stored_position(tensor, shard->low);
    memmove(&tensor->stored[at + 1], &tensor->stored[at], (tensor->stored_count - at) * sizeof(struct set_shard *));
    tensor->stored[at] = shard;
    tensor->stored_count++;
    tensor->longest = max_u64(tensor->longest, shard->high - shard->low);
    return 0;
}

static void stored_remove(struct set_tensor *tensor, const struct set_shard *shard) {
    for (size_t i = stored_position(tensor, shard->low); i < tensor->stored_count; i++)
        if (tensor->stored[i] == shard) {
            tensor->stored_count--;
            memmove(&tensor->stored[i], &tensor->stored[i + 1],
                    (tensor->stored_count - i) * sizeof(struct set_shard *));
            return;
        }
}

static struct set_shard *shard_new(const struct shard *record, int device, struct set_tensor *tensor) {
    const struct geometry *geometry = &record->geometry;
    unsigned dims = geometry->dims, numbers = geometry->is_range ? 3 : 3 * dims;
    struct set_shard *shard = calloc(1, sizeof *shard + numbers * sizeof(uint64_t));
    if (!shard)
        return NULL;
    shard->tensor = tensor;
    shard->data = (const void *)(uintptr_t)record->address;
    shard->bytes = geometry_elements(geometry) * dtype_size(record->dtype);
    shard->flags = record->flags;
    shard->replica_index = record->replica_index;
    shard->replica_count = record->replica_count;
    shard->index = SET_INDEX_NONE;
    shard->device = (int8_t)(shard->bytes > 0 ? device : DEVICE_HOST);
    shard->is_range = geometry->is_range;
    shard->contiguous = record->contiguous;
    hull(geometry, &shard->low, &shard->high);
    if (geometry->is_range) {
        shard->numbers[0] = geometry->start;
        shard->numbers[1] = geometry->count;
        memcpy(&shard->numbers[2], record->stride, sizeof(int64_t));
    } else {
        memcpy(shard->numbers, geometry->offset, dims * sizeof(uint64_t));
        memcpy(shard->numbers + dims, geometry->extent, dims * sizeof(uint64_t));
        memcpy(shard->numbers + 2 * dims, record->stride, dims * sizeof(int64_t));
    }
    return shard;
}

static int shards_reserve(struct set *set) {
    if (set->count < set->capacity)
        return 0;
    size_t capacity = set->capacity ? set->capacity * 2 : 64;
    struct set_shard **shards = realloc(set->shards, capacity * sizeof(struct set_shard *));
    if (!shards)
        return -ENOMEM;
    set->shards = shards;
    set->capacity = capacity;
    return 0;
}

static uint64_t header_cost(const struct set_tensor *tensor) { return strlen(tensor->key) - 1 + SET_HEADER_ENTRY_MIN; }

/* Puts the piece into its tensor, if it overlaps none there. */
static int tensor_add(struct set_tensor *tensor, struct set_shard *shard, const struct geometry *geometry) {
    if (set_is_stored(shard) && shard->bytes > 0) {
        if (stored_overlap(tensor, geometry, shard->low, shard->high))
            return error_set(CKPT_E_EXISTS, "protect %s: the piece overlaps one that is protected already",
                             set_name(shard));
        if (stored_insert(tensor, shard) < 0)
            return error_set(CKPT_E_MEMORY, "protect %s: out of memory", set_name(shard));
    } else if (set_is_stored(shard)) {
        if (tensor->has_empty)
            return error_set(CKPT_E_EXISTS, "protect %s: a piece without elements is protected already",
                             set_name(shard));
        tensor->has_empty = true;
    }
    tensor->pieces++;
    return CKPT_OK;
}

int set_add(struct set *set, const struct ckpt_shard *given, int device, uint64_t *ret_id) {
    struct shard record;
    memset(&record, 0, sizeof record);
    int r = shard_from_options(given, &record);
    if (r < 0)
        return r;
    /* What the table refuses is refused here. */
    struct problem problem = PROBLEM_NONE;
    r = shard_check(&record, &problem);
    if (r < 0)
        return error_from(r, &problem, "protect");
    if (set->used >= SHARDS_COUNT_MAX)
        return error_set(CKPT_E_LIMIT, "protect %s: %d pieces are protected (SHARDS_COUNT_MAX)", record.name,
                         SHARDS_COUNT_MAX);
    if (shards_reserve(set) < 0)
        return error_set(CKPT_E_MEMORY, "protect %s: out of memory", record.name);

    struct set_tensor *tensor = NULL;
    bool new_tensor = false;
    r = tensor_get(set, &record, &tensor, &new_tensor);
    if (r < 0)
        return r;
    struct set_shard *shard = shard_new(&record, device, tensor);
    if (!shard)
        r = error_set(CKPT_E_MEMORY, "protect %s: out of memory", record.name);
    else if (set_is_stored(shard) && set->header_bytes + header_cost(tensor) > IMAGE_HEADER_MAX)
        r = error_set(CKPT_E_LIMIT, "protect %s: the names of all tensors need more than %d bytes (IMAGE_HEADER_MAX)",
                      record.name, IMAGE_HEADER_MAX);
    else
        r = tensor_add(tensor, shard, &record.geometry);
    if (r < 0) {
        free(shard);
        if (new_tensor)
            tensor_drop(set, tensor);
        return r;
    }
    if (set_is_stored(shard))
        set->header_bytes += header_cost(tensor);
    shard->id = ++set->next_id;
    set->shards[set->count++] = shard;
    set->used++;
    set->on_devices += shard->device != DEVICE_HOST;
    set->changed = true;
    *ret_id = shard->id;
    return CKPT_OK;
}

void set_alias_shard(const char *alias, const struct set_tensor *target, struct shard *ret_shard) {
    *ret_shard = (struct shard){
        .name = alias,
        .target = target->key + 1,
        .dtype = target->dtype,
        .flags = SHARD_ALIAS | (set_tensor_is_local(target) ? SHARD_RANK_LOCAL : 0),
        .area = SHARDS_AREA_PRIVATE,
        .contiguous = true,
        .replica_count = 1,
    };
    ret_shard->geometry.dims = target->dims;
    memcpy(ret_shard->geometry.shape, target->shape, target->dims * sizeof(uint64_t));
    memcpy(ret_shard->geometry.extent, target->shape, target->dims * sizeof(uint64_t));
}

int set_alias(struct set *set, const char *alias, const char *name) {
    if (!alias || !name)
        return error_set(CKPT_E_INVALID, "alias: a name is NULL");
    struct set_tensor *target = NULL;
    CLEANUP(freep) char *target_key = NULL;
    for (int local = 0; local < 2 && !target; local++) {
        free(target_key);
        target_key = key_new(name, local);
        if (!target_key)
            return error_set(CKPT_E_MEMORY, "alias %s: out of memory", alias);
        target = set_find_tensor(set, target_key);
    }
    if (!target)
        return error_set(CKPT_E_NOT_FOUND, "alias %s: no tensor %s is protected", alias, name);
    if (target->target) {
        free(target_key);
        target_key = strdup(target->target);
        target = target_key ? set_find_tensor(set, target_key) : NULL;
        if (!target)
            return error_set(CKPT_E_NOT_FOUND, "alias %s: the tensor behind %s is protected no longer", alias, name);
    }

    struct shard record;
    set_alias_shard(alias, target, &record);
    struct problem problem = PROBLEM_NONE;
    int r = shard_check(&record, &problem);
    if (r < 0)
        return error_from(r, &problem, "alias");
    CLEANUP(freep) char *key = key_new(alias, set_tensor_is_local(target));
    if (!key)
        return error_set(CKPT_E_MEMORY, "alias %s: out of memory", alias);
    if (set_find_tensor(set, key))
        return error_set(CKPT_E_EXISTS, "alias %s: that name is taken", alias);
    if (set->alias_count == set->alias_capacity) {
        size_t capacity = set->alias_capacity ? set->alias_capacity * 2 : 16;
        struct set_tensor **aliases = realloc(set->aliases, capacity * sizeof(struct set_tensor *));
        if (!aliases)
            return error_set(CKPT_E_MEMORY, "alias %s: out of memory", alias);
        set->aliases = aliases;
        set->alias_capacity = capacity;
    }
    struct set_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor)
        return error_set(CKPT_E_MEMORY, "alias %s: out of memory", alias);
    tensor->key = STEAL(key);
    tensor->target = STEAL(target_key);
    HASH_ADD_KEYPTR(hh, set->tensors, tensor->key, strlen(tensor->key), tensor);
    set->aliases[set->alias_count++] = tensor;
    set->changed = true;
    return CKPT_OK;
}

static size_t shards_position(const struct set *set, uint64_t id) {
    /* Ids ascend and holes are few: a hole before the wanted id only makes the search start later. */
    size_t first = 0, end = set->count;
    while (first < end) {
        size_t middle = first + (end - first) / 2, probe = middle;
        while (probe < end && !set->shards[probe])
            probe++;
        if (probe == end)
            end = middle;
        else if (set->shards[probe]->id < id)
            first = probe + 1;
        else if (set->shards[probe]->id == id)
            return probe;
        else
            end = middle;
    }
    return set->count;
}

struct set_shard *set_find(const struct set *set, uint64_t id) {
    size_t at = shards_position(set, id);
    return at < set->count ? set->shards[at] : NULL;
}

static void shards_compact(struct set *set) {
    size_t kept = 0;
    for (size_t i = 0; i < set->count; i++)
        if (set->shards[i])
            set->shards[kept++] = set->shards[i];
    set->count = kept;
}

void set_remove(struct set *set, struct set_shard *shard) {
    struct set_tensor *tensor = shard->tensor;
    set->shards[shards_position(set, shard->id)] = NULL;
    set->used--;
    set->on_devices -= shard->device != DEVICE_HOST;
    if (set_is_stored(shard)) {
        set->header_bytes -= header_cost(tensor);
        if (shard->bytes > 0)
            stored_remove(tensor, shard);
        else
            tensor->has_empty = false;
    }
    if (--tensor->pieces == 0)
        tensor_drop(set, tensor);
    free(shard);
    if (set->used < set->count / 2)
        shards_compact(set);
    set->changed = true;
}

/* The lowest and one past the highest byte that the piece touches, relative to its data. */
static void span(const struct set_shard *shard, int64_t *ret_low, int64_t *ret_high) {
    struct shard record = {.dtype = set_dtype(shard), .contiguous = shard->contiguous, .replica_count = 1};
    set_geometry(shard, &record.geometry);
    if (!shard->contiguous)
        memcpy(record.stride, set_stride(shard), (shard->is_range ? 1 : shard->tensor->dims) * sizeof record.stride[0]);
    shard_span(&record, ret_low, ret_high);
}

struct set_shard *set_next_in(const struct set *set, const struct set_shard *shard, const void *data, uint64_t size) {
    uintptr_t from = (uintptr_t)data, to = from + size;
    for (size_t i = shard ? shards_position(set, shard->id) + 1 : 0; i < set->count; i++) {
        if (!set->shards[i])
            continue;
        int64_t low, high;
        span(set->shards[i], &low, &high);
        uintptr_t base = (uintptr_t)set->shards[i]->data;
        if (base + (uintptr_t)low < to && base + (uintptr_t)high > from)
            return set->shards[i];
    }
    return NULL;
}
