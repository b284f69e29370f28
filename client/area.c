/* SPDX-License-Identifier: Apache-2.0 */
#include "client/area.h"

#include "client/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <uthash.h>

/*
 * A new area is as large as the request, or as an eighth of all areas so far if that is more: then
 * AREAS_MAX areas of growing size hold far more than any machine has, and at most an eighth is
 * unused. Within an area, holes are kept sorted by offset and taken first-fit. Memory comes zeroed
 * from the kernel; a hole that was used before is zeroed when it is handed out again.
 */

#define AREA_SIZE_MIN MIB(4)
#define AREA_SIZE_STEP_MAX GIB(1)
#define AREA_SIZE_MAX (UINT64_C(1) << 46)

struct area_hole {
    uint64_t offset, length;
    bool used_before;
};

struct area_block {
    void *pointer;
    uint64_t size, reserved; /* asked for; taken out of the area */
    uint32_t area;
    UT_hash_handle hh;
};

static void area_deinit(struct area *area) {
    if (area->map)
        munmap(area->map, area->size);
    if (area->fd >= 0)
        close(area->fd);
    free(area->holes);
    *area = (struct area){.fd = -1};
}

void areas_deinit(struct areas *areas) {
    struct area_block *block, *next;
    HASH_ITER(hh, areas->blocks, block, next) {
        HASH_DEL(areas->blocks, block);
        free(block);
    }
    for (uint32_t i = 0; i < areas->end; i++)
        area_deinit(&areas->items[i]);
    areas->end = 0;
    areas->total = 0;
}

void areas_close(struct areas *areas) {
    for (uint32_t i = 0; i < areas->end; i++)
        if (areas->items[i].map && areas->items[i].fd >= 0)
            close(steal_fd(&areas->items[i].fd));
}

/* holes[at] gets `hole`. The room was made by hole_reserve. */
static void hole_insert(struct area *area, size_t at, struct area_hole hole) {
    memmove(&area->holes[at + 1], &area->holes[at], (area->hole_count - at) * sizeof hole);
    area->holes[at] = hole;
    area->hole_count++;
}

static void hole_remove(struct area *area, size_t at) {
    area->hole_count--;
    memmove(&area->holes[at], &area->holes[at + 1], (area->hole_count - at) * sizeof area->holes[0]);
}

/* Called for each new block, since n blocks leave at most n + 2 holes: so freeing never needs memory. */
static int hole_reserve(struct area *area, size_t capacity) {
    if (capacity <= area->hole_capacity)
        return 0;
    size_t grown = max_u64(capacity, area->hole_capacity * 2);
    struct area_hole *holes = realloc(area->holes, grown * sizeof *holes);
    if (!holes)
        return -ENOMEM;
    area->holes = holes;
    area->hole_capacity = grown;
    return 0;
}

static int area_new(struct areas *areas, uint64_t size, uint32_t *ret_area) {
    uint32_t number = 0;
    while (number < areas->end && areas->items[number].map)
        number++;
    if (number == AREAS_MAX)
        return error_set(CKPT_E_LIMIT, "cannot allocate %ju bytes: %d shared areas are in use (AREAS_MAX)",
                         (uintmax_t)size, AREAS_MAX);

    CLEANUP(closep) int fd = memfd_create("ckpt-area", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return error_set(CKPT_E_MEMORY, "cannot allocate %ju bytes: memfd_create: %m", (uintmax_t)size);
    int r;
    do
        r = fallocate(fd, 0, 0, (off_t)size);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return error_set(CKPT_E_MEMORY, "cannot allocate %ju bytes of shared memory: %m", (uintmax_t)size);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        return error_set(CKPT_E_MEMORY, "cannot seal %ju bytes of shared memory: %m", (uintmax_t)size);
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (map == MAP_FAILED)
        return error_set(CKPT_E_MEMORY, "cannot map %ju bytes of shared memory: %m", (uintmax_t)size);

    struct area *area = &areas->items[number];
    *area = (struct area){.fd = steal_fd(&fd), .map = map, .size = size};
    if (hole_reserve(area, 2) < 0) {
        area_deinit(area);
        return error_set(CKPT_E_MEMORY, "out of memory for a shared area's bookkeeping");
    }
    hole_insert(area, 0, (struct area_hole){.offset = 0, .length = size});
    areas->end = number == areas->end ? number + 1 : areas->end;
    areas->total += size;
    *ret_area = number;
    return CKPT_OK;
}

static bool area_take(struct area *area, uint64_t length, uint64_t *ret_offset, bool *ret_used_before) {
    if (!area->map || area->size - area->used < length)
        return false;
    for (size_t i = 0; i < area->hole_count; i++) {
        struct area_hole *hole = &area->holes[i];
        if (hole->length < length)
            continue;
        *ret_offset = hole->offset;
        *ret_used_before = hole->used_before;
        hole->offset += length;
        hole->length -= length;
        if (hole->length == 0)
            hole_remove(area, i);
        area->used += length;
        return true;
    }
    return false;
}

static void area_give(struct area *area, uint64_t offset, uint64_t length) {
    size_t at = 0;
    while (at < area->hole_count && area->holes[at].offset < offset)
        at++;
    area->used -= length;
    struct area_hole *before = at > 0 ? &area->holes[at - 1] : NULL;
    struct area_hole *after = at < area->hole_count ? &area->holes[at] : NULL;
    /* A hole that was never used stays apart: it needs no zeroing. */
    bool joins_before = before && before->used_before && before->offset + before->length == offset;
    bool joins_after = after && after->used_before && after->offset == offset + length;
    if (joins_before && joins_after) {
        before->length += length + after->length;
        hole_remove(area, at);
    } else if (joins_before) {
        before->length += length;
    } else if (joins_after) {
        after->offset = offset;
        after->length += length;
    } else {
        hole_insert(area, at, (struct area_hole){.offset = offset, .length = length, .used_before = true});
    }
    if (area->used == 0) {
        area->holes[0] = (struct area_hole){.offset = 0, .length = area->size, .used_before = true};
        area->hole_count = 1;
    }
}

int areas_alloc(struct areas *areas, uint64_t size, void **ret_pointer) {
    if (size > AREA_SIZE_MAX)
        return error_set(CKPT_E_LIMIT, "cannot allocate %ju bytes: more than %ju at once", (uintmax_t)size,
                         (uintmax_t)AREA_SIZE_MAX);
    uint64_t length = align_up(max_u64(size, 1), AREA_ALIGNMENT), offset = 0;
    bool used_before = false;
    struct area_block *block = malloc(sizeof *block);
    if (!block)
        return error_set(CKPT_E_MEMORY, "out of memory");

    /* The newest area is the likeliest to have room. */
    uint32_t number = areas->end;
    while (number > 0 && !area_take(&areas->items[number - 1], length, &offset, &used_before))
        number--;
    if (number > 0) {
        number--;
    } else {
        uint64_t step = min_u64(max_u64(areas->total / 8, AREA_SIZE_MIN), AREA_SIZE_STEP_MAX);
        int r = area_new(areas, align_up(max_u64(length, step), 4096), &number);
        if (r < 0) {
            free(block);
            return r;
        }
        area_take(&areas->items[number], length, &offset, &used_before);
    }

    struct area *area = &areas->items[number];
    if (hole_reserve(area, area->blocks + 3) < 0) {
        area_give(area, offset, length);
        free(block);
        return error_set(CKPT_E_MEMORY, "out of memory for a shared area's bookkeeping");
    }
    *block = (struct area_block){.pointer = area->map + offset, .size = size, .reserved = length, .area = number};
    if (used_before)
        memset(block->pointer, 0, length);
    area->blocks++;
    HASH_ADD_PTR(areas->blocks, pointer, block);
    *ret_pointer = block->pointer;
    return CKPT_OK;
}

static struct area_block *areas_block(const struct areas *areas, const void *pointer) {
    struct area_block *block;
    HASH_FIND_PTR(areas->blocks, &pointer, block);
    return block;
}

bool areas_free(struct areas *areas, void *pointer) {
    struct area_block *block = areas_block(areas, pointer);
    if (!block)
        return false;
    struct area *area = &areas->items[block->area];
    area_give(area, (uint64_t)((uint8_t *)pointer - area->map), block->reserved);
    area->blocks--;
    HASH_DEL(areas->blocks, block);
    free(block);
    return true;
}

bool areas_has(const struct areas *areas, const void *pointer) { return areas_block(areas, pointer); }

uint64_t areas_size(const struct areas *areas, const void *pointer) {
    const struct area_block *block = areas_block(areas, pointer);
    return block ? block->size : 0;
}

bool areas_find(const struct areas *areas, const void *pointer, uint64_t size, uint32_t *ret_area,
                uint64_t *ret_offset) {
    uintptr_t address = (uintptr_t)pointer;
    for (uint32_t i = 0; i < areas->end; i++) {
        const struct area *area = &areas->items[i];
        if (!area->map)
            continue;
        uintptr_t base = (uintptr_t)area->map;
        if (address >= base && address - base <= area->size && size <= area->size - (address - base)) {
            *ret_area = i;
            *ret_offset = address - base;
            return true;
        }
    }
    return false;
}

void areas_trim(struct areas *areas, void (*dropped)(void *context, uint32_t area), void *context) {
    for (uint32_t i = 0; i < areas->end; i++) {
        struct area *area = &areas->items[i];
        if (!area->map || area->used > 0)
            continue;
        if (area->announced)
            dropped(context, i);
        areas->total -= area->size;
        area_deinit(area);
    }
    while (areas->end > 0 && !areas->items[areas->end - 1].map)
        areas->end--;
}

void areas_forget_announced(struct areas *areas) {
    for (uint32_t i = 0; i < areas->end; i++)
        areas->items[i].announced = false;
}
