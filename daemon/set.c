/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/set.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

int area_new(uint32_t number, int fd, uint64_t size, struct area **ret_area, struct problem *problem) {
    struct statfs file_system;
    struct stat status;
    if (fstat(fd, &status) < 0 || fstatfs(fd, &file_system) < 0)
        return problem_set(problem, -errno, "area %u: cannot look at its descriptor: %s", number, strerror(errno));
    int seals = fcntl(fd, F_GET_SEALS);
    if (!S_ISREG(status.st_mode) || seals < 0)
        return problem_set(problem, -EINVAL, "area %u is not a memfd: take memory from ckpt_alloc", number);
    if (file_system.f_type == HUGETLBFS_MAGIC)
        return problem_set(problem, -EINVAL, "area %u lies on hugetlbfs, which may run out under the reader", number);
    if (!(seals & F_SEAL_SHRINK))
        return problem_set(problem, -EINVAL, "area %u is not sealed against shrinking (F_SEAL_SHRINK)", number);
    if (!size || (uint64_t)status.st_size < size)
        return problem_set(problem, -EINVAL, "area %u has %lld bytes, its message says %llu", number,
                           (long long)status.st_size, (unsigned long long)size);
    if ((uint64_t)status.st_blocks * 512 < size)
        return problem_set(problem, -EINVAL, "area %u is sparse (%llu of %llu bytes are there): allocate it whole",
                           number, (unsigned long long)status.st_blocks * 512, (unsigned long long)size);
    struct area *area = calloc(1, sizeof *area);
    if (!area)
        return problem_set(problem, -ENOMEM, "out of memory");
    void *data = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        int error = errno;
        free(area);
        return problem_set(problem, -error, "area %u: cannot map %llu bytes: %s", number, (unsigned long long)size,
                           strerror(error));
    }
    *area = (struct area){.refs = 1, .number = number, .size = size, .data = data};
    *ret_area = area;
    return 0;
}

struct area *area_ref(struct area *area) {
    area->refs++;
    return area;
}

void area_unref(struct area *area) {
    if (--area->refs)
        return;
    munmap((void *)area->data, area->size);
    free(area);
}

static bool has_device(const struct set *set, const struct device *device) {
    for (uint32_t i = 0; i < set->device_count; i++)
        if (set->devices[i] == device)
            return true;
    return false;
}

static int check_device_place(struct set *set, uint32_t i, const struct shard *shard, const struct set_options *options,
                              struct problem *problem) {
    int64_t low, high;
    shard_span(shard, &low, &high);
    uint32_t number = shard->area - SHARDS_AREA_DEVICE;
    struct device_memory *memory = number < options->memory_count ? options->memories[number] : NULL;
    if (!memory)
        return problem_set(problem, -EINVAL, "shard %u (%.200s) names device memory %u, which was not given", i,
                           shard->name, number);
    uint64_t from = (uint64_t)((int64_t)shard->address + low); /* shards.c has seen that it does not overflow */
    if (from > memory->size || (uint64_t)(high - low) > memory->size - from ||
        !device_memory_covers(memory, from, (uint64_t)(high - low)))
        return problem_set(problem, -EINVAL, "shard %u (%.200s) reaches outside its device memory", i, shard->name);
    if (!set->memories) {
        set->memories = calloc(options->memory_count, sizeof *set->memories);
        if (!set->memories)
            return problem_set(problem, -ENOMEM, "out of memory");
        set->memory_count = options->memory_count;
    }
    if (!set->memories[number])
        set->memories[number] = device_memory_ref(memory);
    if (!has_device(set, memory->device))
        set->devices[set->device_count++] = memory->device;
    set->device_shards++;
    return 0;
}

/* Every byte that a shard touches lies in its area (or, for private memory, in the lower half of
 * the address space: a wild pointer there fails when it is read). */
static int check_place(struct set *set, uint32_t i, const struct shard *shard, const struct set_options *options,
                       struct problem *problem) {
    int64_t low, high;
    shard_span(shard, &low, &high);
    if (low == high)
        return 0;
    if (shards_area_is_device(shard->area))
        return check_device_place(set, i, shard, options, problem);
    uint64_t limit = (uint64_t)INT64_MAX;
    if (shard->area != SHARDS_AREA_PRIVATE) {
        struct area *area = shard->area < AREAS_MAX ? options->areas[shard->area] : NULL;
        if (!area)
            return problem_set(problem, -EINVAL, "shard %u (%.200s) names area %u, which was not given", i, shard->name,
                               shard->area);
        limit = area->size;
        if (!set->areas[shard->area])
            set->areas[shard->area] = area_ref(area);
        set->shared_count++;
    } else {
        set->has_private = true;
        set->private_count++;
    }
    if (shard->address > limit || (low < 0 && (uint64_t)-low > shard->address) ||
        (uint64_t)high > limit - shard->address)
        return problem_set(problem, -EINVAL, "shard %u (%.200s) reaches outside its memory", i, shard->name);
    return 0;
}

int set_new(const void *table, size_t size, const struct set_options *options, struct set **ret_set,
            struct problem *problem) {
    CLEANUP(set_unrefp) struct set *set = calloc(1, sizeof *set);
    if (!set)
        return problem_set(problem, -ENOMEM, "out of memory");
    set->refs = set->users = 1;
    set->number = options->number;
    set->push = options->push;
    int r = shards_parse(table, size, options->count, &set->shards, problem);
    if (r < 0)
        return r;
    for (uint32_t i = 0; !set->push && i < options->count; i++) {
        struct shard shard;
        shards_get(set->shards, i, &shard);
        if (shard_bytes(&shard) && (r = check_place(set, i, &shard, options, problem)) < 0)
            return r;
    }
    r = image_layout(set->shards, options->identity, &set->layout, problem);
    if (r < 0)
        return r;
    if (set->device_count && (r = spread_new(set, &set->spread)) < 0)
        return problem_set(problem, r, "out of memory");
    *ret_set = STEAL(set);
    return 0;
}

static void drop_areas(struct set *set) {
    for (size_t i = 0; i < AREAS_MAX; i++)
        if (set->areas[i])
            area_unref(STEAL(set->areas[i]));
    for (uint32_t i = 0; i < set->memory_count; i++)
        if (set->memories[i])
            device_memory_unref(STEAL(set->memories[i]));
}

void set_use(struct set *set) {
    assert(set->users);
    set->users++;
}

void set_unuse(struct set *set) {
    assert(set->users);
    if (--set->users == 0)
        drop_areas(set);
}

struct set *set_ref(struct set *set) {
    set->refs++;
    return set;
}

void set_unref(struct set *set) {
    if (--set->refs)
        return;
    drop_areas(set);
    image_layout_deinit(&set->layout);
    shards_free(set->shards);
    spread_free(set->spread);
    free(set->memories);
    free(set);
}

void set_unrefp(struct set **set) {
    if (*set)
        set_unref(*set);
}
