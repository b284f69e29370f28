/* SPDX-License-Identifier: Apache-2.0 */
/*
 * First fit over the places in use, which are few: one for each save that is being brought to the
 * host. A reset begins a new epoch; what is given back of an older one is ignored.
 */
#include "daemon/arena.h"

#include <errno.h>

struct arena {
    uint64_t size, used;
    uint32_t epoch;
    uint32_t count;
    struct {
        uint64_t offset, size;
    } places[ARENA_PLACES_MAX]; /* ascending */
};

int arena_new(struct arena **ret_arena) {
    struct arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return -ENOMEM;
    *ret_arena = arena;
    return 0;
}

void arena_free(struct arena *arena) { free(arena); }

void arena_reset(struct arena *arena, uint64_t size) {
    *arena = (struct arena){.size = size, .epoch = arena->epoch + 1};
}

bool arena_take(struct arena *arena, uint64_t size, struct arena_place *ret_place) {
    uint64_t offset = 0;
    uint32_t at = 0;
    size = align_up(size, ARENA_ALIGNMENT);
    if (!size || size > arena->size || arena->count == ARENA_PLACES_MAX)
        return false;
    for (; at < arena->count && arena->places[at].offset - offset < size; at++)
        offset = arena->places[at].offset + arena->places[at].size;
    if (arena->size - offset < size)
        return false;
    memmove(&arena->places[at + 1], &arena->places[at], (arena->count - at) * sizeof arena->places[0]);
    arena->places[at].offset = offset;
    arena->places[at].size = size;
    arena->count++;
    arena->used += size;
    *ret_place = (struct arena_place){.offset = offset, .size = size, .epoch = arena->epoch};
    return true;
}

void arena_give(struct arena *arena, struct arena_place *place) {
    uint64_t offset = place->offset, size = place->size;
    bool ours = size && place->epoch == arena->epoch;
    *place = (struct arena_place){0};
    for (uint32_t i = 0; ours && i < arena->count; i++)
        if (arena->places[i].offset == offset) {
            arena->used -= size;
            arena->count--;
            memmove(&arena->places[i], &arena->places[i + 1], (arena->count - i) * sizeof arena->places[0]);
            return;
        }
    assert(!ours);
}

uint64_t arena_used(const struct arena *arena) { return arena->used; }
