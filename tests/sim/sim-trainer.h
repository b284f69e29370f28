/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The state of a trainer, of both kinds: one that speaks the protocol itself, one that uses libckpt. */

#include "client/ckpt.h"
#include "proto/image.h"
#include "proto/wire.h"
#include "proto/word.h"
#include "tests/sim/sim.h"

#define SEGMENTS_KEPT 4
#define LOCAL_SIZE 100
#define STATE_SIZE 3000

/* ---- what a rank's image must be: sim-image.c ---- */

struct sim_image {
    struct shards_writer table;
    struct shards *shards;
    struct image_layout layout;
    uint64_t size; /* of its row */
};

struct sim_state {
    const uint8_t *row, *own, *inline_bytes;
    uint64_t inline_length;
};

void sim_image_init(struct sim_image *image, uint32_t rank, uint32_t world, uint64_t size);
void sim_image_deinit(struct sim_image *image);
/* The caller frees. */
uint8_t *sim_image_make(const struct sim_image *image, const struct sim_state *state, uint64_t *ret_size);
/* Bytes that no other nonce gives. */
void sim_image_fill(uint8_t *bytes, size_t size, uint64_t nonce);

/* ---- trainers ---- */

struct trainer {
    struct trainer_options options;
    struct fiber *fiber; /* NULL: over */
    bool failed, restored, closing;
    uint32_t pid;
    uint64_t held_ns; /* it hung until then */
    struct sim_image image;

    /* Of one that speaks the protocol. */
    int fd;
    uint32_t serial;
    struct wire_packet packet;
    struct wire_message message;
    int segments[SEGMENTS_KEPT];
    uint8_t *area;
    size_t area_size;
    int area_fd;
    struct word_page *word;
    uint64_t generation;
    bool resumes;
    struct version_id resume;
    uint32_t set;
    uint16_t counter;
    bool accepted;

    /* Of one that uses libckpt. */
    ckpt *ckpt;
    uint8_t *row, *own, *inline_bytes;
    uint64_t row_id;
};

/* The life of one that uses libckpt: sim-program.c. */
void program_live(void *trainer);
