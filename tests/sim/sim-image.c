/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of a rank, and what its image must be: a row of a tensor that all ranks have together, a
 * tensor of its own, and inline state. Made from the format's own functions, apart from clients and
 * daemons.
 */
#include "tests/sim/sim-trainer.h"

void sim_image_init(struct sim_image *image, uint32_t rank, uint32_t world, uint64_t size) {
    struct problem problem = PROBLEM_NONE;
    const struct shard shards[] = {
        {.name = "w",
         .name_length = 1,
         .dtype = DTYPE_U8,
         .contiguous = true,
         .replica_count = 1,
         .geometry = {.dims = 2, .shape = {world, size}, .offset = {rank, 0}, .extent = {1, size}}},
        {.name = "rng",
         .name_length = 3,
         .dtype = DTYPE_U8,
         .flags = SHARD_RANK_LOCAL,
         .address = size,
         .contiguous = true,
         .replica_count = 1,
         .geometry = {.dims = 1, .shape = {LOCAL_SIZE}, .extent = {LOCAL_SIZE}}},
    };
    *image = (struct sim_image){.size = size};
    for (size_t i = 0; i < ARRAY_SIZE(shards); i++)
        if (shards_writer_add(&image->table, &shards[i], &problem) != 0)
            abort();
    const struct image_identity identity = {.job = SIM_JOB, .rank = rank, .world = world};
    if (shards_parse(image->table.data, image->table.size, image->table.count, &image->shards, &problem) != 0 ||
        image_layout(image->shards, &identity, &image->layout, &problem) != 0)
        abort();
}

void sim_image_deinit(struct sim_image *image) {
    image_layout_deinit(&image->layout);
    shards_free(image->shards);
    shards_writer_deinit(&image->table);
}

uint8_t *sim_image_make(const struct sim_image *image, const struct sim_state *state, uint64_t *ret_size) {
    uint64_t size = image_size(&image->layout, state->inline_length);
    uint8_t *bytes = calloc(1, size);
    assert(bytes);
    image_header(&image->layout, state->inline_length, bytes);
    memcpy(bytes + image->layout.shard_offset[0], state->row, image->size);
    memcpy(bytes + image->layout.shard_offset[1], state->own, LOCAL_SIZE);
    if (state->inline_length)
        memcpy(bytes + image->layout.state_offset, state->inline_bytes, state->inline_length);
    *ret_size = size;
    return bytes;
}

void sim_image_fill(uint8_t *bytes, size_t size, uint64_t nonce) {
    uint64_t value = nonce;
    for (size_t i = 0; i < size; i++) {
        value = value * UINT64_C(6364136223846793005) + 1442695040888963407;
        bytes[i] = (uint8_t)(value >> 56);
    }
}
