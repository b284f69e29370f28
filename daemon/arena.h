/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The device tier: an arena of device memory in which images wait to be brought to the host. A save
 * that finds a place there is captured by copies within the device, some ten times faster than to
 * the host, and its fence returns; another copies to the host at once. Here are only the places of one
 * device; device.c has the memory, berth.c a save's places on all its devices, transfer.c the copies.
 */

#include "base/util.h"

#define ARENA_ALIGNMENT 4096
#define ARENA_PLACES_MAX 64 /* in one arena */

struct arena;

struct arena_place {
    uint64_t offset, size; /* size 0: none */
    uint32_t epoch;
};

int arena_new(struct arena **ret_arena) MUST_CHECK;
void arena_free(struct arena *arena);
/* The arena's memory is new (or gone, size 0): places in the old one are worth nothing. */
void arena_reset(struct arena *arena, uint64_t size);
/* False: no room. */
bool arena_take(struct arena *arena, uint64_t size, struct arena_place *ret_place);
void arena_give(struct arena *arena, struct arena_place *place);
uint64_t arena_used(const struct arena *arena);
