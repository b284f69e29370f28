/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A trainer with memory of GPUs (support-cuda.h), which tells the daemon of it by itself, without the
 * library: so it can say what the library never would, and knows what is answered.
 */

#include "proto/image.h"
#include "proto/word.h"
#include "tests/functional/peer.h"
#include "tests/functional/support-cuda.h"

#define GPU_SHARDS_MAX 32

struct gpu_shard {
    CUdeviceptr memory; /* 0: the client's own */
    void *host;
    uint64_t words;
    uint64_t stride; /* bytes from word to word; 0: contiguous */
    uint64_t seed;   /* what words_fill() gave it last */
};

struct trainer {
    struct peer peer;
    struct word_page *page;
    uint16_t counter;
    uint64_t image_size;
    uint32_t memories, set;
    uint64_t nonce; /* of the last registration: it is looked at as long as there are captures */
    struct shards_writer writer;
    struct gpu_shard shards[GPU_SHARDS_MAX];
    uint32_t shard_count;
    const char *job;
};

void trainer_open(struct trainer *trainer, const char *job);
void trainer_close(struct trainer *trainer);
/* Describes memory; the number that shards say. */
uint32_t trainer_legacy(struct trainer *trainer, CUdeviceptr pointer);
uint32_t trainer_range(struct trainer *trainer, int device, uint64_t size);
void trainer_chunk(struct trainer *trainer, uint32_t memory, uint64_t offset, CUmemGenericAllocationHandle handle,
                   uint64_t size, uint64_t buffer_id);
uint32_t trainer_pool(struct trainer *trainer, CUmemoryPool pool);
uint32_t trainer_pooled(struct trainer *trainer, uint32_t pool, CUdeviceptr pointer);
/* Whether the daemon reads what is at `pointer`; false: it says why, in peer.message.tail. */
bool trainer_probe(struct trainer *trainer, uint32_t memory, CUdeviceptr pointer, uint64_t offset);
/* A shard "w0", "w1", ... of U64 words in device memory (or in ours, if `memory` is UINT32_MAX). */
void trainer_shard(struct trainer *trainer, uint32_t memory, uint64_t offset, struct gpu_shard shard);
/* Registers them. Flags of REGISTERED. */
uint32_t trainer_register(struct trainer *trainer);
/* New words in every shard. */
void trainer_fill(struct trainer *trainer, uint64_t seed);
/* Accepted; the capture runs. */
void trainer_save(struct trainer *trainer, uint64_t step, uint32_t flags);
/* The result of CAPTURED. */
int trainer_captured(struct trainer *trainer);
/* LOCAL; each shard's bytes in the file are those of the last fill. */
void trainer_check(struct trainer *trainer, uint64_t step);
/* Save, capture, new words over the old ones, then check. */
void trainer_round(struct trainer *trainer, uint64_t step);
void trainer_release(struct trainer *trainer);
struct message_device_usage_is trainer_usage(struct trainer *trainer);
/* Nobody has a context of the daemon's, or memory that it opened, any more. */
void daemon_let_go(void);
