/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The state of a trainer. */

#include "proto/image.h"
#include "proto/wire.h"
#include "proto/word.h"
#include "tests/sim/sim.h"

#define SEGMENTS_KEPT 4
#define LOCAL_SIZE 100
#define STATE_SIZE 3000

struct trainer {
    struct trainer_options options;
    struct fiber *fiber; /* NULL: over */
    bool failed, restored, closing;
    uint32_t pid;
    int fd;
    uint32_t serial;
    struct wire_packet packet;
    struct wire_message message;
    int segments[SEGMENTS_KEPT];

    uint8_t *area;
    size_t area_size;
    uint64_t size; /* of its piece of the tensor */
    int area_fd;
    struct shards_writer table;
    struct shards *shards;
    struct image_layout layout;

    struct word_page *word;
    uint64_t generation;
    bool resumes;
    struct version_id resume;
    uint32_t set;
    uint16_t counter;
    bool accepted;
};
