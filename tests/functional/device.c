/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of GPUs, on the wire: every way to share it, the device tier, and everything that fails. */
#include "tests/functional/trainer.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>

#define CHUNK MIB(2) /* of a range */

static void begin(const struct settings *settings, const char *standin) {
    configure(settings);
    gpu_settings(standin);
    daemon_start();
    gpu_begin();
}

/* The daemon has let go of everything, as if nobody had ever been there. */
static void finish(void) {
    daemon_let_go();
    gpu_end();
    daemon_stop_unused();
    gpu_check_mistakes();
}

static CUdeviceptr allocate(uint64_t words) {
    CUdeviceptr pointer;
    CU(gpu.cuMemAlloc_v2(&pointer, words * 8));
    return pointer;
}

/* One allocation with words in it, described, probed and made a shard. */
static CUdeviceptr add_legacy(struct trainer *trainer, uint64_t words) {
    CUdeviceptr pointer = allocate(words);
    uint32_t memory = trainer_legacy(trainer, pointer);
    if (!trainer_probe(trainer, memory, pointer, 0))
        FAIL("refused: %.*s", (int)trainer->peer.message.tail_length, trainer->peer.message.tail);
    trainer_shard(trainer, memory, 0, (struct gpu_shard){.memory = pointer, .words = words});
    return pointer;
}

static void legacy_memory(void) {
    struct trainer trainer;
    begin(&(struct settings){.device = "piece = 512K"}, "CONTEXT_MIB=24");
    trainer_open(&trainer, "legacy");
    CUdeviceptr first = allocate(1 << 18), second = allocate(1000);
    uint64_t *host = calloc(777, 8);
    uint32_t memory = trainer_legacy(&trainer, first), other = trainer_legacy(&trainer, second);
    CHECK(trainer_probe(&trainer, memory, first + 4096, 4096));
    uint64_t context_bytes = ((const struct message_device_probed *)trainer.peer.message.body)->context_bytes;
    CHECK(gpu_is_standin() ? context_bytes == MIB(24) : context_bytes > 0);
    CHECK(status_number("cuda.devices.0.context_bytes") == (int64_t)context_bytes);
    /* Pieces of one allocation, a strided one among them, and one in the host's memory between. */
    trainer_shard(&trainer, memory, 0, (struct gpu_shard){.memory = first, .words = 100001});
    trainer_shard(&trainer, UINT32_MAX, 0, (struct gpu_shard){.host = host, .words = 777});
    trainer_shard(&trainer, memory, 900000, (struct gpu_shard){.memory = first + 900000, .words = 500, .stride = 24});
    trainer_shard(&trainer, other, 8, (struct gpu_shard){.memory = second + 8, .words = 999});
    CHECK(trainer_register(&trainer) == 0);
    struct message_device_usage_is usage = trainer_usage(&trainer);
    CHECK(usage.contexts == 1 && usage.imports == 2 && usage.import_bytes == (1 << 21) + 8000);
    CHECK(usage.context_bytes == context_bytes && usage.arena_bytes == 0);
    for (uint64_t step = 1; step <= 5; step++)
        trainer_round(&trainer, step);
    CHECK(status_number("sessions.0.source.device") == 3 && status_number("sessions.0.source.private") == 1);
    CHECK(status_number("cuda.devices.0.pinned_bytes") > 0);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(first));
    CU(gpu.cuMemFree_v2(second));
    free(host);
    finish();
}

/* A training loop that writes right behind each fence; every version has the bytes of its step. */
static void many_saves(void) {
    enum { WORDS = 3000 };
    const uint64_t steps = FEWER(100);
    struct trainer trainer;
    struct gpu_shard *saved = calloc(steps, sizeof *saved);
    char keep[64];
    snprintf(keep, sizeof keep, "keep = %u\nbacklog = 1000", (unsigned)steps);
    begin(&(struct settings){.pool = "128M", .local = keep, .no_parallel = true, .device = "arena = 1M"},
          "DELAY_US=20 MEMORY_MIB=256");
    trainer_open(&trainer, "loop");
    CUdeviceptr pointer = add_legacy(&trainer, WORDS);
    CHECK(trainer_register(&trainer) == 0);
    for (uint64_t step = 0; step < steps; step++) {
        trainer_fill(&trainer, step);
        saved[step] = trainer.shards[0];
        trainer_save(&trainer, step, 0);
        CHECK(trainer_captured(&trainer) == CODE_OK);
    }
    trainer_fill(&trainer, steps);
    for (uint64_t step = 0; step < steps; step++) {
        trainer.shards[0] = saved[step];
        trainer_check(&trainer, step);
    }
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    free(saved);
    finish();
}

struct range {
    CUdeviceptr base;
    CUmemGenericAllocationHandle handles[8];
    uint32_t count, memory;
};

static void range_grow(struct trainer *trainer, struct range *range) {
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
    };
    const CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    uint64_t offset = range->count * CHUNK;
    CUmemGenericAllocationHandle *handle = &range->handles[range->count];
    unsigned long long id;
    CU(gpu.cuMemCreate(handle, CHUNK, &properties, 0));
    CU(gpu.cuMemMap(range->base + offset, CHUNK, 0, *handle, 0));
    CU(gpu.cuMemSetAccess(range->base + offset, CHUNK, &access, 1));
    CU(gpu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, range->base + offset));
    trainer_chunk(trainer, range->memory, offset, *handle, CHUNK, id);
    range->count++;
}

/* Like PyTorch's expandable segments: one range of addresses, which grows while it is in use. */
static void range_of_chunks(void) {
    struct trainer trainer;
    struct range range = {0};
    begin(&(struct settings){0}, "REOPEN=refuse");
    trainer_open(&trainer, "range");
    CU(gpu.cuMemAddressReserve(&range.base, ARRAY_SIZE(range.handles) * CHUNK, 0, 0, 0));
    range.memory = trainer_range(&trainer, 0, ARRAY_SIZE(range.handles) * CHUNK);
    for (int i = 0; i < 3; i++)
        range_grow(&trainer, &range);
    CHECK(trainer_probe(&trainer, range.memory, range.base + CHUNK, CHUNK));
    /* Across the seams of three chunks. */
    trainer_shard(&trainer, range.memory, 4096, (struct gpu_shard){.memory = range.base + 4096, .words = 5 << 17});
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    trainer_save(&trainer, 2, SAVE_HELD); /* holds the set as it is */
    range_grow(&trainer, &range);
    range_grow(&trainer, &range);
    CHECK(peer_send(&trainer.peer, MESSAGE_START, &(struct message_start){.counter = trainer.counter}, NULL, 0, -1));
    CHECK(trainer_captured(&trainer) == CODE_OK);
    trainer_shard(&trainer, range.memory, 3 * CHUNK + 8,
                  (struct gpu_shard){.memory = range.base + 3 * CHUNK + 8, .words = 2 * CHUNK / 8 - 1});
    CHECK(trainer_register(&trainer) == 0);
    CHECK(trainer_usage(&trainer).imports == 5);
    trainer_round(&trainer, 3);
    /* Nothing is mapped there. */
    trainer_shard(&trainer, range.memory, 5 * CHUNK - 8,
                  (struct gpu_shard){.memory = range.base + 5 * CHUNK - 8, .words = 2});
    int fd = wire_memfd("table", trainer.writer.data, trainer.writer.size);
    const struct message_register beyond = {.table_size = trainer.writer.size, .count = trainer.writer.count, .set = 9};
    CHECK(peer_send(&trainer.peer, MESSAGE_REGISTER, &beyond, NULL, 0, fd));
    CHECK(peer_error(&trainer.peer) == CODE_E_INVALID);
    close(fd);
    trainer_close(&trainer);
    daemon_let_go();
    for (uint32_t i = 0; i < range.count; i++) {
        CU(gpu.cuMemUnmap(range.base + i * CHUNK, CHUNK));
        CU(gpu.cuMemRelease(range.handles[i]));
    }
    CU(gpu.cuMemAddressFree(range.base, ARRAY_SIZE(range.handles) * CHUNK));
    finish();
}

static void pooled_memory(void) {
    struct trainer trainer;
    CUmemoryPool pool;
    CUdeviceptr pointers[3];
    begin(&(struct settings){0}, "REOPEN=refuse");
    const CUmemPoolProps properties = {
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
        .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
    };
    CU(gpu.cuMemPoolCreate(&pool, &properties));
    trainer_open(&trainer, "pool");
    uint32_t number = trainer_pool(&trainer, pool);
    for (int i = 0; i < 3; i++) {
        CU(gpu.cuMemAllocFromPoolAsync(&pointers[i], 50000 * 8, pool, NULL));
        CU(gpu.cuCtxSynchronize());
        uint32_t memory = trainer_pooled(&trainer, number, pointers[i]);
        CHECK(trainer_probe(&trainer, memory, pointers[i], 0));
        trainer_shard(&trainer, memory, 0, (struct gpu_shard){.memory = pointers[i], .words = 50000});
    }
    CHECK(trainer_register(&trainer) == 0);
    for (uint64_t step = 1; step <= 3; step++)
        trainer_round(&trainer, step);
    trainer_close(&trainer);
    daemon_let_go();
    for (int i = 0; i < 3; i++)
        CU(gpu.cuMemFreeAsync(pointers[i], NULL));
    CU(gpu.cuCtxSynchronize());
    CU(gpu.cuMemPoolDestroy(pool));
    finish();
}

static void two_devices(void) {
    struct trainer trainer;
    CUdeviceptr pointers[2];
    begin(&(struct settings){.device = "piece = 256K"}, "DEVICES=2");
    gpu_need_devices(2);
    trainer_open(&trainer, "two");
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        pointers[i] = add_legacy(&trainer, 200000);
    }
    CHECK(trainer_register(&trainer) == 0);
    CHECK(trainer_usage(&trainer).contexts == 2);
    for (uint64_t step = 1; step <= 3; step++)
        trainer_round(&trainer, step);
    trainer_close(&trainer);
    EVENTUALLY(status_number("cuda.devices.1.in_use") == 0);
    daemon_let_go();
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        CU(gpu.cuMemFree_v2(pointers[i]));
    }
    finish();
}

/* The device always has the next copy at hand: while one is under way, whatever is done in the host with the one
 * before, a second is queued behind it, and never a third. Each piece is one copy here. */
static void two_copies_in_flight(void) {
    struct trainer trainer, other;
    unsigned most;
    gpu_need_standin();
    begin(&(struct settings){.device = "piece = 256K"}, "RECORD=1 DELAY_US=200");
    trainer_open(&trainer, "flight");
    trainer_open(&other, "flight-beside");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 18), beside = add_legacy(&other, 1 << 18);
    CHECK(trainer_register(&trainer) == 0 && trainer_register(&other) == 0);
    trainer_round(&trainer, 1);
    trainer_fill(&trainer, 2);
    gpu_fault("ckptd/run:3=hang");
    trainer_save(&trainer, 2, 0);
    EVENTUALLY(gpu_hangs());
    EVENTUALLY(gpu_queued_copies(0, &most) == 2);
    trainer_fill(&other, 2);
    trainer_save(&other, 2, 0); /* and not one for each of them */
    pause_ms(20);
    gpu_fault(NULL);
    gpu_unhang();
    CHECK(trainer_captured(&trainer) == CODE_OK && trainer_captured(&other) == CODE_OK);
    trainer_check(&trainer, 2);
    trainer_check(&other, 2);
    for (uint64_t step = 3; step < 6; step++)
        trainer_round(&trainer, step);
    CHECK(gpu_queued_copies(0, &most) == 0);
    CHECK(most == 2);
    trainer_close(&trainer);
    trainer_close(&other);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    CU(gpu.cuMemFree_v2(beside));
    finish();
}

/* A client gives up while copies are under way, and others want the room: what the copies write is nobody else's. */
static void given_up_in_flight(void) {
    struct trainer trainer, other;
    gpu_need_standin();
    begin(&(struct settings){.pool = "4M", .device = "piece = 256K"}, "RECORD=1 DELAY_US=0");
    trainer_open(&trainer, "gives-up");
    trainer_open(&other, "goes-on");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    uint64_t *host = calloc(1 << 18, 8);
    trainer_shard(&other, UINT32_MAX, 0, (struct gpu_shard){.host = host, .words = 1 << 18});
    CHECK(trainer_register(&trainer) == 0 && trainer_register(&other) == 0);
    trainer_round(&trainer, 1);
    gpu_fault("ckptd/run:1=hang");
    trainer_save(&trainer, 2, 0);
    EVENTUALLY(gpu_hangs());
    CHECK(word_revoke(trainer.page, trainer.counter, trainer.image_size));
    for (uint64_t step = 1; step < 6; step++)
        trainer_round(&other, step);
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_RELEASE, &(struct message_empty){0}, NULL, 0, -1));
    CHECK(trainer_captured(&trainer) != CODE_OK);
    trainer_round(&other, 6);
    struct pollfd answer = {.fd = trainer.peer.fd, .events = POLLIN};
    CHECK(poll(&answer, 1, 20) == 0); /* the copies need the memory */
    CHECK(status_number("cuda.devices.0.imports") == 1);
    gpu_fault(NULL);
    gpu_unhang();
    CHECK(peer_answer(&trainer.peer) == MESSAGE_OK); /* the memory is closed: it may be freed */
    CU(gpu.cuMemFree_v2(pointer));
    CHECK(status_number("counters.captures_failed") == 1);
    trainer_close(&trainer);
    trainer_close(&other);
    daemon_let_go();
    free(host);
    finish();
}

/* A capture that the client has given up, whose next piece waits for its turn: what it has open is closed before the
 * client is told that it is. */
static void released_between_two_pieces(void) {
    struct trainer trainer;
    begin(&(struct settings){.device = "piece = 256K\nrate_mib_s = 1"}, "DELAY_US=0");
    trainer_open(&trainer, "released");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    CHECK(trainer_register(&trainer) == 0);
    trainer_fill(&trainer, 1);
    trainer_save(&trainer, 1, 0);
    EVENTUALLY(word_watermark(word_load(trainer.page)) > 0);
    CHECK(word_revoke(trainer.page, trainer.counter, trainer.image_size));
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_RELEASE, &(struct message_empty){0}, NULL, 0, -1));
    CHECK(peer_answer(&trainer.peer) == MESSAGE_OK);
    CU(gpu.cuMemFree_v2(pointer));
    CHECK(status_number("cuda.devices.0.imports") == 0);
    CHECK(status_number("counters.captures_failed") == 1);
    trainer_close(&trainer);
    daemon_let_go();
    finish();
}

static void train_beside(void *argument) {
    struct trainer trainer;
    char job[16];
    gpu_begin();
    snprintf(job, sizeof job, "beside%d", *(const int *)argument);
    trainer_open(&trainer, job);
    CUdeviceptr pointer = add_legacy(&trainer, 100000); /* buffer ids are the same in both */
    CHECK(trainer_register(&trainer) == 0);
    for (uint64_t step = 1; step <= 10; step++)
        trainer_round(&trainer, step);
    trainer_release(&trainer);
    CU(gpu.cuMemFree_v2(pointer));
    trainer_close(&trainer);
    gpu_end();
}

static void two_trainers(void) {
    static const int which[] = {1, 2};
    configure(&(struct settings){0});
    gpu_settings("");
    daemon_start();
    pid_t first = process_start(train_beside, (void *)&which[0]),
          second = process_start(train_beside, (void *)&which[1]);
    process_join(first);
    process_join(second);
    daemon_let_go();
    daemon_stop_unused();
    gpu_check_mistakes();
}

/* Fences return when the image is in the arena; it drains to the host behind them, more slowly. */
static void device_tier(void) {
    enum { WORDS = 1 << 17, SAVES = 3 };
    struct trainer trainer;
    begin(&(struct settings){.device = "arena = 4M\nrate_mib_s = 2\npiece = 256K"}, "MEMORY_MIB=256");
    trainer_open(&trainer, "arena");
    CUdeviceptr pointer = add_legacy(&trainer, WORDS);
    uint64_t *host = calloc(5000, 8);
    CUdeviceptr strided = allocate(3000);
    uint32_t memory = trainer_legacy(&trainer, strided);
    trainer_shard(&trainer, memory, 0, (struct gpu_shard){.memory = strided, .words = 100, .stride = 16});
    trainer_shard(&trainer, UINT32_MAX, 0, (struct gpu_shard){.host = host, .words = 5000});
    CHECK(trainer_register(&trainer) == 0);
    CHECK(trainer_usage(&trainer).arena_bytes == MIB(4));
    struct gpu_shard saved[SAVES][GPU_SHARDS_MAX];
    int64_t most = 0;
    for (uint64_t step = 1; step <= SAVES; step++) {
        trainer_fill(&trainer, step);
        memcpy(saved[step - 1], trainer.shards, sizeof trainer.shards);
        trainer_save(&trainer, step, 0);
        CHECK(trainer_captured(&trainer) == CODE_OK);
        int64_t used = status_number("cuda.devices.0.arena_used");
        most = used > most ? used : most;
    }
    CHECK(most > 2 * WORDS * 8); /* several wait there */
    trainer_fill(&trainer, 99);
    for (uint64_t step = 1; step <= SAVES; step++) {
        memcpy(trainer.shards, saved[step - 1], sizeof trainer.shards);
        trainer_check(&trainer, step);
    }
    EVENTUALLY(status_number("cuda.devices.0.arena_used") == 0);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    CU(gpu.cuMemFree_v2(strided));
    free(host);
    finish();
}

/* An image that finds no room in the arena is copied to the host at once. */
static void device_tier_full(void) {
    struct trainer trainer;
    begin(&(struct settings){.device = "arena = 512K"}, "MEMORY_MIB=256");
    trainer_open(&trainer, "full");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* Tensors of two devices by turns in the image, strided ones and the host's among them; the arenas have room for this
 * many images of them. Pieces are smaller than tensors, and reach over their seams. */
enum { SPREAD_WORDS = 40000, SPREAD_TURNS = 6 };

struct spread_trainer {
    struct trainer trainer;
    CUdeviceptr pointers[2][2];
    uint64_t host[5000];
};

static void spread_shards(struct spread_trainer *spread) {
    struct trainer *trainer = &spread->trainer;
    for (uint32_t i = 0; i < SPREAD_TURNS; i++) {
        uint32_t which = i % 2;
        uint64_t from = i / 2 * SPREAD_WORDS * 8;
        trainer_shard(trainer, 2 * which, from,
                      (struct gpu_shard){.memory = spread->pointers[which][0] + from, .words = SPREAD_WORDS - i});
        if (i == 2)
            trainer_shard(trainer, UINT32_MAX, 0, (struct gpu_shard){.host = spread->host, .words = 5000});
        if (i >= 2 && i <= 4)
            trainer_shard(trainer, 2 * which + 1, i * 8,
                          (struct gpu_shard){.memory = spread->pointers[which][1] + i * 8, .words = 50, .stride = 40});
    }
    CHECK(trainer_register(trainer) == 0);
}

static void spread_open(struct spread_trainer *spread, const char *job) {
    gpu_need_devices(2);
    *spread = (struct spread_trainer){0};
    trainer_open(&spread->trainer, job);
    for (int device = 0; device < 2; device++) {
        gpu_use(device);
        spread->pointers[device][0] = allocate(SPREAD_TURNS / 2 * SPREAD_WORDS);
        spread->pointers[device][1] = allocate(3000);
        (void)trainer_legacy(&spread->trainer, spread->pointers[device][0]);
        (void)trainer_legacy(&spread->trainer, spread->pointers[device][1]);
    }
    spread_shards(spread);
}

static void spread_close(struct spread_trainer *spread) {
    trainer_close(&spread->trainer);
    EVENTUALLY(status_number("cuda.devices.1.in_use") == 0);
    daemon_let_go();
    for (int device = 0; device < 2; device++) {
        gpu_use(device);
        CU(gpu.cuMemFree_v2(spread->pointers[device][0]));
        CU(gpu.cuMemFree_v2(spread->pointers[device][1]));
    }
}

static void arenas_expect_empty(void) {
    EVENTUALLY(status_number("cuda.devices.0.arena_used") == 0);
    EVENTUALLY(status_number("cuda.devices.1.arena_used") == 0);
}

/* Each device's bytes wait in its own arena, and nothing lies in both. */
static void device_tier_of_two_devices(void) {
    enum { SAVES = 3 };
    static struct spread_trainer spread;
    struct trainer *trainer = &spread.trainer;
    begin(&(struct settings){.device = "arena = 4M\nrate_mib_s = 1\npiece = 512K"}, "DEVICES=2 MEMORY_MIB=256");
    spread_open(&spread, "spread");
    CHECK(trainer_usage(trainer).arena_bytes == MIB(8));
    struct gpu_shard saved[SAVES][GPU_SHARDS_MAX];
    int64_t most[2] = {0};
    for (uint64_t step = 1; step <= SAVES; step++) {
        trainer_fill(trainer, step);
        memcpy(saved[step - 1], trainer->shards, sizeof trainer->shards);
        trainer_save(trainer, step, 0);
        CHECK(trainer_captured(trainer) == CODE_OK);
        int64_t used[2] = {status_number("cuda.devices.0.arena_used"), status_number("cuda.devices.1.arena_used")};
        for (int device = 0; device < 2; device++)
            most[device] = used[device] > most[device] ? used[device] : most[device];
    }
    trainer_fill(trainer, 99);
    const int64_t half = SPREAD_TURNS / 2 * SPREAD_WORDS * 8;
    for (int device = 0; device < 2; device++)
        CHECK(most[device] > 2 * half && most[device] < SAVES * half + (int64_t)MIB(1)); /* several wait there */
    for (uint64_t step = 1; step <= SAVES; step++) {
        memcpy(trainer->shards, saved[step - 1], sizeof trainer->shards);
        trainer_check(trainer, step);
    }
    arenas_expect_empty();
    spread_close(&spread);
    finish();
}

static void save_and_stay(void *argument) {
    static struct spread_trainer spread;
    _Atomic uint32_t *captured = argument;
    gpu_begin();
    spread_open(&spread, "orphan");
    trainer_fill(&spread.trainer, 1);
    trainer_save(&spread.trainer, 1, 0);
    CHECK(trainer_captured(&spread.trainer) == CODE_OK);
    *captured = 1;
    for (;;)
        pause();
}

/* What is in the arenas, where it stays for a second, is the daemon's: the program is killed, and its version is as
 * good as any. */
static void device_tier_survives_the_trainer(void) {
    static struct spread_trainer spread;
    _Atomic uint32_t *captured = shared_memory(sizeof *captured);
    gpu_need_standin(); /* this process needs the devices after the other one */
    configure(&(struct settings){.device = "arena = 4M\nrate_mib_s = 1\npiece = 512K"});
    gpu_settings("DEVICES=2 MEMORY_MIB=256");
    daemon_start();
    pid_t trainer = process_start(save_and_stay, captured);
    EVENTUALLY(*captured);
    process_kill(trainer);
    gpu_begin();
    spread_open(&spread, "orphan");
    for (uint32_t i = 0; i < spread.trainer.shard_count; i++)
        spread.trainer.shards[i].seed = GPU_SHARDS_MAX + i; /* as it was filled for step 1 */
    trainer_check(&spread.trainer, 1);
    arenas_expect_empty();
    spread_close(&spread);
    finish();
}

/* All or none: no room on the second device, then none is taken on the first. */
static void device_tier_full_on_one(void) {
    static struct spread_trainer spread;
    struct trainer other;
    gpu_need_standin();
    begin(&(struct settings){.device = "arena = 1M\npiece = 512K"}, "DEVICES=2 MEMORY_MIB=256");
    spread_open(&spread, "both");
    gpu_use(1);
    trainer_open(&other, "full");
    CUdeviceptr pointer = allocate(1 << 16);
    trainer_shard(&other, trainer_legacy(&other, pointer), 0, (struct gpu_shard){.memory = pointer, .words = 1 << 16});
    CHECK(trainer_register(&other) == 0);
    trainer_fill(&other, 1);
    trainer_fill(&spread.trainer, 1);
    gpu_fault("ckptd/cuMemcpyDtoHAsync_v2:1=hang"); /* it stays in the arena */
    trainer_save(&other, 1, 0);
    CHECK(trainer_captured(&other) == CODE_OK);
    EVENTUALLY(gpu_hangs());
    trainer_save(&spread.trainer, 1, 0);
    CHECK(status_number("cuda.devices.0.arena_used") == 0);
    CHECK(status_number("cuda.devices.1.arena_used") > 1 << 19);
    gpu_unhang();
    CHECK(trainer_captured(&spread.trainer) == CODE_OK);
    struct gpu_shard saved[GPU_SHARDS_MAX];
    memcpy(saved, spread.trainer.shards, sizeof saved);
    trainer_fill(&spread.trainer, 99);
    memcpy(spread.trainer.shards, saved, sizeof saved);
    trainer_check(&spread.trainer, 1);
    trainer_check(&other, 1);
    gpu_fault(NULL);
    trainer_round(&spread.trainer, 2);
    arenas_expect_empty();
    trainer_close(&other);
    spread_close(&spread);
    gpu_use(1);
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static bool has_version(const char *job, uint64_t step) {
    return file_exists(test_path("local/%s/1/%llu/rank-00000.safetensors", job, (unsigned long long)step));
}

/* The context of one device is lost when both have everything: what was still there is lost, and not read out of the
 * arena of a new context; the room on the other device comes back. */
static void device_tier_lost_on_one(void) {
    static struct spread_trainer spread;
    struct gpu_shard saved[4][GPU_SHARDS_MAX];
    struct trainer *trainer = &spread.trainer;
    gpu_need_standin();
    begin(&(struct settings){.device = "arena = 4M\nrate_mib_s = 1\npiece = 512K"},
          "DEVICES=2 MEMORY_MIB=256 LEAKS=report");
    spread_open(&spread, "lost");
    trainer_round(trainer, 1);
    for (uint64_t step = 2; step <= 3; step++) {
        trainer_fill(trainer, step);
        memcpy(saved[step], trainer->shards, sizeof trainer->shards);
        trainer_save(trainer, step, 0);
        CHECK(trainer_captured(trainer) == CODE_OK);
    }
    gpu_fault("ckptd/cuMemcpyDtoHAsync_v2:1=700!");
    EVENTUALLY(daemon_logged("a save was given up"));
    gpu_fault(NULL);
    arenas_expect_empty();
    EVENTUALLY(status_number("tiers.0.pending_bytes") == 0);
    for (uint64_t step = 2; step <= 3; step++)
        if (has_version("lost", step)) {
            memcpy(trainer->shards, saved[step], sizeof trainer->shards);
            trainer_check(trainer, step);
        }
    CHECK(!has_version("lost", 2) || !has_version("lost", 3));
    trainer_release(trainer);
    trainer->shard_count = trainer->writer.count = 0;
    trainer->writer.size = 0;
    for (int device = 0; device < 2; device++)
        for (int i = 0; i < 2; i++)
            (void)trainer_legacy(trainer, spread.pointers[device][i]);
    spread_shards(&spread);
    trainer_round(trainer, 4);
    spread_close(&spread);
    gpu_end();
}

/* Nothing is read before START; a client that ends before it has no such version. */
static void held_save(void) {
    struct trainer trainer;
    begin(&(struct settings){0}, "DELAY_US=0");
    trainer_open(&trainer, "held");
    CUdeviceptr pointer = add_legacy(&trainer, 10000);
    CHECK(trainer_register(&trainer) == 0);
    trainer_save(&trainer, 1, SAVE_HELD);
    trainer_fill(&trainer, 1); /* what was queued before the save */
    CHECK(word_load(trainer.page) == word_make(trainer.counter, 0));
    CHECK(peer_send(&trainer.peer, MESSAGE_START, &(struct message_start){.counter = trainer.counter}, NULL, 0, -1));
    CHECK(trainer_captured(&trainer) == CODE_OK);
    trainer_check(&trainer, 1);
    trainer_save(&trainer, 2, SAVE_HELD);
    trainer_close(&trainer);
    EVENTUALLY(daemon_logged("the client ended before it had started its save"));
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static void quiet(void) {
    struct trainer trainer;
    begin(&(struct settings){0}, "DELAY_US=0");
    trainer_open(&trainer, "quiet");
    CUdeviceptr pointer = add_legacy(&trainer, 10000);
    CHECK(trainer_register(&trainer) == 0);
    trainer_fill(&trainer, 1);
    word_quiet(trainer.page, true);
    CHECK(!word_copying(trainer.page));
    uint64_t begin_ms = now_ms();
    trainer_save(&trainer, 1, 0);
    CHECK(trainer_captured(&trainer) == CODE_OK); /* not for ever: it forgets the end */
    CHECK(now_ms() - begin_ms >= WORD_QUIET_NS / NANOSECONDS_PER_MS);
    word_quiet(trainer.page, false);
    trainer_check(&trainer, 1);
    word_quiet(trainer.page, true);
    trainer_save(&trainer, 2, 0);
    trainer_fill(&trainer, 2);
    word_quiet(trainer.page, false);
    CHECK(trainer_captured(&trainer) == CODE_OK);
    trainer_check(&trainer, 2);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static void fence(struct trainer *trainer) {
    const struct message_fence body = {.counter = trainer->counter};
    CHECK(peer_send(&trainer->peer, MESSAGE_FENCE, &body, NULL, 0, -1));
}

/* Check mode: what changes between the first reading and the fence is found and named, whatever lies around it in the
 * image; what does not change counts. `second`: a device for half of it. */
static void checked(const struct settings *settings, int second) {
    enum { WORDS = 200000, CHANGED = 100000, CHUNK_SIZE = KIB(256) };
    static uint64_t host[777];
    struct trainer trainer;
    begin(settings, "DELAY_US=0 DEVICES=2 MEMORY_MIB=256");
    gpu_need_devices(second + 1);
    trainer_open(&trainer, "checked");
    CUdeviceptr strided = allocate(3000), innocent = add_legacy(&trainer, WORDS);
    trainer_shard(&trainer, UINT32_MAX, 0, (struct gpu_shard){.host = host, .words = ARRAY_SIZE(host)});
    trainer_shard(&trainer, trainer_legacy(&trainer, strided), 0,
                  (struct gpu_shard){.memory = strided, .words = 1000, .stride = 24});
    gpu_use(second);
    CUdeviceptr changed = add_legacy(&trainer, WORDS); /* "w3" */
    CHECK(trainer_register(&trainer) == 0);
    for (uint64_t step = 1; step <= 6; step += 2) {
        trainer_fill(&trainer, step);
        trainer_save(&trainer, step, SAVE_CHECK);
        fence(&trainer);
        CHECK(trainer_captured(&trainer) == CODE_OK);
        trainer_check(&trainer, step);
        trainer_save(&trainer, step + 1, SAVE_CHECK);
        uint64_t all_but_one = (trainer.image_size - 1) / CHUNK_SIZE * CHUNK_SIZE, word = 0;
        EVENTUALLY(word_watermark(word_load(trainer.page)) >= all_but_one);
        gpu_write(changed + CHANGED * 8, &word, sizeof word);
        CHECK(word_watermark(word_load(trainer.page)) < trainer.image_size); /* it waits for the fence */
        fence(&trainer);
        CHECK(trainer_captured(&trainer) == CODE_E_LOST);
        CLEANUP(freep) char *why = strndup(trainer.peer.message.tail, trainer.peer.message.tail_length);
        if (!strstr(why, "the memory of w3 changed between save and fence"))
            FAIL("%s", why);
    }
    CHECK(status_number("counters.captures_failed") == 3);
    trainer_close(&trainer);
    daemon_let_go();
    EVENTUALLY(!second || status_number("cuda.devices.1.in_use") == 0);
    CHECK(!files_ending("local/checked/1/2", ".safetensors") && !files_ending("local/checked/1/6", ".safetensors"));
    CU(gpu.cuMemFree_v2(changed));
    gpu_use(0);
    CU(gpu.cuMemFree_v2(innocent));
    CU(gpu.cuMemFree_v2(strided));
    finish();
}

static void check_mode(void) { checked(&(struct settings){.device = "piece = 512K"}, 0); }
static void check_mode_with_an_arena(void) { checked(&(struct settings){.device = "arena = 8M"}, 0); }
static void check_mode_through_a_window(void) { checked(&(struct settings){.pool = "2M"}, 0); }
static void check_mode_on_two_devices(void) { checked(&(struct settings){.device = "piece = 256K"}, 1); }

/* empty_cache(): the memory goes back to the driver, and other memory comes at the same address. */
static void released_and_described_anew(void) {
    struct trainer trainer;
    begin(&(struct settings){0}, "DELAY_US=0");
    trainer_open(&trainer, "release");
    uint64_t before = gpu_free_bytes();
    CUdeviceptr pointer = add_legacy(&trainer, 100000);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    for (uint64_t step = 2; step < 5; step++) {
        trainer_release(&trainer);
        CHECK(trainer_usage(&trainer).imports == 0);
        CU(gpu.cuMemFree_v2(pointer));
        CHECK(!gpu_is_standin() || gpu_free_bytes() == before); /* a real device may have other users */
        trainer.shard_count = trainer.writer.count = 0;
        trainer.writer.size = 0;
        CUdeviceptr again = add_legacy(&trainer, 100000);
        CHECK(!gpu_is_standin() || again == pointer); /* it gives addresses back at once */
        pointer = again;
        CHECK(trainer_register(&trainer) == 0);
        trainer_round(&trainer, step);
    }
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* What is described anew before the old description goes stays open; the stand-in refuses to open twice. */
static void described_twice(void) {
    struct trainer trainer;
    begin(&(struct settings){0}, "REOPEN=refuse");
    trainer_open(&trainer, "twice");
    CUdeviceptr pointer = add_legacy(&trainer, 1000);
    CHECK(trainer_register(&trainer) == 0);
    uint32_t again = trainer_legacy(&trainer, pointer);
    CHECK(trainer_probe(&trainer, again, pointer, 0));
    CHECK(trainer_usage(&trainer).imports == 1);
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_DROP, &(struct message_device_drop){.number = 0}, NULL, 0, -1));
    CHECK(peer_answer(&trainer.peer) == MESSAGE_OK);
    trainer_round(&trainer, 1); /* the set has it still */
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* What trainers and the test that kills them know of each other. */
struct killing {
    _Atomic uint32_t step; /* of the last save */
    _Atomic uint64_t free_bytes;
    _Atomic bool there, over; /* the bystander is; is no longer needed */
};

enum { KILLED_WORDS = 1 << 17 };

static void train_for_ever(void *argument) {
    struct trainer trainer;
    struct killing *killing = argument;
    gpu_begin();
    trainer_open(&trainer, "killed");
    add_legacy(&trainer, KILLED_WORDS);
    CHECK(trainer_register(&trainer) == 0);
    for (;;) {
        trainer_fill(&trainer, killing->step + 1);
        trainer_save(&trainer, ++killing->step, 0);
        CHECK(trainer_captured(&trainer) == CODE_OK);
    }
}

static void look_at_memory(void *argument) {
    struct killing *killing = argument;
    gpu_begin();
    killing->free_bytes = gpu_free_bytes();
    gpu_end();
}

/* As a process sees it that has nothing on the device. A real one may have other users. */
static bool free_bytes_are(struct killing *killing, uint64_t expected) {
    process_join(process_start(look_at_memory, killing));
    return killing->free_bytes == expected || !gpu_is_standin();
}

/* Of the version in whose capture its trainer died there is everything or nothing; the ones before it are there. */
static bool was_completed(const struct killing *killing) {
    ckpt *c = job_open("killed");
    ckpt_restore *r;
    struct ckpt_restore_options options;
    struct ckpt_restore_info info;
    CKPT_INIT(options);
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_open(c, &options, &r));
    CHECK_OK(ckpt_restore_get_info(r, &info));
    bool completed = info.step == killing->step;
    CHECK(completed || info.step == killing->step - 1);
    restore_words_check(r, "w0", KILLED_WORDS, info.step * GPU_SHARDS_MAX);
    ckpt_restore_close(r);
    options.which = CKPT_RESTORE_STEP;
    options.step = killing->step;
    if (!completed)
        CHECK_IS(CKPT_E_NOT_FOUND, ckpt_restore_open(c, &options, &r));
    CHECK_OK(ckpt_close(c));
    return completed;
}

/* At some moment of a capture: the daemon lets go of everything, the memory is free again, and the next one is served.
 */
static void trainer_killed(void) {
    struct killing *killing = shared_memory(sizeof *killing);
    configure(&(struct settings){.device = "piece = 256K"});
    gpu_settings("DELAY_US=2000");
    daemon_start();
    (void)free_bytes_are(killing, 0);
    uint64_t free_bytes = killing->free_bytes;
    for (int round = 0; round < 4; round++) {
        uint32_t from = killing->step;
        pid_t trainer = process_start(train_for_ever, killing);
        EVENTUALLY(killing->step >= from + 2);
        pause_ms((unsigned)random_number(10));
        process_kill(trainer);
        daemon_let_go();
        EVENTUALLY(free_bytes_are(killing, free_bytes));
        (void)was_completed(killing);
    }
    daemon_stop_unused();
    gpu_check_mistakes();
}

static void stand_by(void *argument) {
    struct trainer trainer;
    struct killing *killing = argument;
    gpu_begin();
    trainer_open(&trainer, "bystander");
    CUdeviceptr pointer = add_legacy(&trainer, 1000);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    killing->there = true;
    EVENTUALLY(killing->over);
    trainer_round(&trainer, 2);
    trainer_close(&trainer);
    EVENTUALLY(status_number("cuda.devices.0.imports") == 0);
    CU(gpu.cuMemFree_v2(pointer));
    gpu_end();
}

/* While a copy out of its memory is under way: the driver keeps the memory for the daemon, which gives it back when the
 * copy has ended. The version is dropped. Who else uses the device sees nothing of it. */
static void trainer_killed_in_a_copy(void) {
    struct killing *killing = shared_memory(sizeof *killing);
    gpu_need_standin();
    configure(&(struct settings){.device = "piece = 256K"});
    gpu_settings("DELAY_US=0");
    daemon_start();
    pid_t bystander = process_start(stand_by, killing);
    EVENTUALLY(killing->there);
    (void)free_bytes_are(killing, 0);
    uint64_t free_bytes = killing->free_bytes;
    pid_t trainer = process_start(train_for_ever, killing);
    EVENTUALLY(killing->step >= 2);
    gpu_fault("ckptd/run:3=hang");
    int64_t failed = status_number("counters.captures_failed");
    EVENTUALLY(gpu_hangs());
    process_kill(trainer);
    EVENTUALLY(status_number("counters.captures_failed") == failed + 1);
    CHECK(status_number("cuda.devices.0.imports") == 2);
    CHECK(free_bytes_are(killing, free_bytes - KILLED_WORDS * 8));
    gpu_fault(NULL);
    gpu_unhang();
    EVENTUALLY(status_number("cuda.devices.0.imports") == 1);
    EVENTUALLY(free_bytes_are(killing, free_bytes));
    CHECK(!was_completed(killing));
    killing->over = true;
    process_join(bystander);
    daemon_let_go();
    daemon_stop_unused();
    gpu_check_mistakes();
}

static void daemon_killed(void) {
    struct trainer trainer;
    begin(&(struct settings){.device = "piece = 256K"}, "DELAY_US=50000");
    trainer_open(&trainer, "unharmed");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    CHECK(trainer_register(&trainer) == 0);
    trainer_fill(&trainer, 1);
    uint64_t before = gpu_free_bytes();
    trainer_save(&trainer, 1, 0);
    daemon_kill();
    uint64_t word;
    CU(gpu.cuMemcpyDtoH_v2(&word, pointer, sizeof word)); /* the context is well */
    peer_expect_end(&trainer.peer);
    peer_close(&trainer.peer);
    shards_writer_deinit(&trainer.writer);
    EVENTUALLY(gpu_free_bytes() > before); /* what the daemon took is back */
    daemon_start();
    trainer_open(&trainer, "unharmed");
    trainer_shard(&trainer, trainer_legacy(&trainer, pointer), 0,
                  (struct gpu_shard){.memory = pointer, .words = 1 << 17});
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 2);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* Each of these makes the probe say no, with the reason; then nothing is left. */
static void refused_probes(void) {
    static const struct {
        const char *fault, *says;
    } refusals[] = {
        {"ckptd/cuDevicePrimaryCtxRetain:1=2", "out of memory"},
        {"ckptd/cuStreamCreate:1=2", "cannot make a stream"},
        {"ckptd/cuIpcOpenMemHandle_v2:1=2", "cuIpcOpenMemHandle"},
        {"ckptd/cuIpcOpenMemHandle_v2:1=1", "cuIpcOpenMemHandle"},
        {"ckptd/cuMemcpyDtoHAsync_v2:1=1", "cuMemcpyDtoHAsync"},
        {"ckptd/run:1=700", "700"},
    };
    gpu_need_standin();
    begin(&(struct settings){0}, "LEAKS=report");
    CUdeviceptr pointer = allocate(1000);
    for (size_t i = 0; i < ARRAY_SIZE(refusals); i++) {
        struct trainer trainer;
        trainer_open(&trainer, "refused");
        uint32_t memory = trainer_legacy(&trainer, pointer);
        gpu_fault(refusals[i].fault);
        if (trainer_probe(&trainer, memory, pointer, 0))
            FAIL("not refused: %s", refusals[i].fault);
        CLEANUP(freep) char *why = strndup(trainer.peer.message.tail, trainer.peer.message.tail_length);
        CLEANUP(freep) char *reason = status_text("sessions.0.source.push_reason");
        if (!strstr(why, refusals[i].says) || !strstr(reason, refusals[i].says))
            FAIL("%s: %s (%s)", refusals[i].fault, why, reason);
        CHECK(daemon_logged("device memory cannot be read, the client must push"));
        gpu_fault(NULL);
        trainer_release(&trainer);
        daemon_let_go();
        memory = trainer_legacy(&trainer, pointer); /* afterwards it works */
        CHECK(trainer_probe(&trainer, memory, pointer, 0));
        trainer_close(&trainer);
        daemon_let_go();
    }
    CU(gpu.cuMemFree_v2(pointer));
    gpu_end();
}

/* The nonce says that what is read is what the client wrote. */
static void wrong_nonce(void) {
    struct trainer trainer;
    begin(&(struct settings){0}, "DELAY_US=0");
    trainer_open(&trainer, "nonce");
    CUdeviceptr pointer = allocate(1000);
    uint32_t memory = trainer_legacy(&trainer, pointer);
    CHECK(!trainer_probe(&trainer, memory, pointer + 8, 0));
    CHECK(memmem(trainer.peer.message.tail, trainer.peer.message.tail_length, "not what the client wrote", 25));
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static void no_driver(const char *setting, const char *says) {
    struct trainer trainer;
    const struct message_device_memory described = {.kind = DEVICE_LEGACY, .size = 4096, .uuid = "0123456789abcde"};
    configure(&(struct settings){0});
    gpu_settings(setting);
    daemon_start();
    trainer_open(&trainer, "none");
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_MEMORY, &described, NULL, 0, -1));
    CHECK(peer_answer(&trainer.peer) == MESSAGE_OK);
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_PROBE, &(struct message_device_probe){0}, NULL, 0, -1));
    CHECK(peer_answer(&trainer.peer) == MESSAGE_DEVICE_PROBED);
    CHECK(((const struct message_device_probed *)trainer.peer.message.body)->flags == DEVICE_PROBED_REFUSED);
    CLEANUP(freep) char *why = strndup(trainer.peer.message.tail, trainer.peer.message.tail_length);
    if (!strstr(why, says))
        FAIL("%s: %s", setting, why);
    trainer_close(&trainer);
    daemon_stop_unused();
}

static void toolkit_stub(void) {
    gpu_need_standin();
    no_driver("INIT=34", "stub");
}

static void no_device(void) {
    gpu_need_standin();
    no_driver("INIT=100", "sees no device");
}

static void other_device(void) { no_driver("DEVICES=1", "the daemon sees no device 30313233-"); }

/* Which devices the daemon sees, and which this process; the machine has two MIG instances and a card that is whole. */
static void begin_seeing(const char *daemon, const char *program) {
    gpu_need_standin();
    configure(&(struct settings){0});
    gpu_settings("MIG=2 DEVICES=3");
    daemon_start_with("CUDA_VISIBLE_DEVICES", daemon);
    setenv("CUDA_VISIBLE_DEVICES", program, 1);
    gpu_begin();
}

static void served_on(const char *daemon, const char *program, const char *name) {
    struct trainer trainer;
    begin_seeing(daemon, program);
    trainer_open(&trainer, "served");
    CUdeviceptr pointer = add_legacy(&trainer, 100000);
    CHECK(trainer_register(&trainer) == 0);
    for (uint64_t step = 1; step <= 3; step++)
        trainer_round(&trainer, step);
    CLEANUP(freep) char *text = status_text("cuda.devices.0.device");
    if (strcmp(text, name) != 0)
        FAIL("the device is called %s", text);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static void refused_on(const char *daemon, const char *program, const char *says) {
    struct trainer trainer;
    begin_seeing(daemon, program);
    trainer_open(&trainer, "refused");
    CUdeviceptr pointer = allocate(1000);
    CHECK(!trainer_probe(&trainer, trainer_legacy(&trainer, pointer), pointer, 0));
    CLEANUP(freep) char *why = strndup(trainer.peer.message.tail, trainer.peer.message.tail_length);
    if (!strstr(why, says))
        FAIL("daemon with %s, program with %s: %s", daemon, program, why);
    CHECK(daemon_logged(says));
    CHECK(trainer_usage(&trainer).contexts == 0);
    trainer_close(&trainer);
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

#define UUID_HEAD "c5737461-6e64-2d69-6e20-67707520"

/* By the UUID: the numbers are others'. */
static void mig_instance(void) { served_on("MIG-" UUID_HEAD "6d01", "1,0", "MIG-" UUID_HEAD "6d01"); }

static void whole_device_beside_mig(void) { served_on("2", "GPU-" UUID_HEAD "6702", "GPU-" UUID_HEAD "6702"); }

/* Device 0 of both, and yet not the same one: nothing is read there. */
static void other_mig_instance(void) {
    refused_on("0", "1",
               "the daemon sees no device " UUID_HEAD "6d01, but MIG-" UUID_HEAD
               "6d00 (a process that sees a MIG instance sees no other device: CUDA_VISIBLE_DEVICES says which)");
}

static void mig_instance_hides_whole_devices(void) {
    refused_on("0,1,2", "2", "no device " UUID_HEAD "6702, but MIG-" UUID_HEAD "6d00");
}

static void whole_device_hides_mig_instances(void) {
    refused_on("2", "0",
               "no device " UUID_HEAD "6d00, but GPU-" UUID_HEAD "6702 (CUDA_VISIBLE_DEVICES, or another container?)");
}

/* A device that was found, and could not be used, is not taken for the next one that is asked for. */
static void other_device_after_a_refusal(void) {
    struct trainer trainer;
    gpu_need_standin();
    begin(&(struct settings){0}, "DEVICES=2 LEAKS=report");
    CUdeviceptr refused = allocate(1000);
    gpu_fault("ckptd/cuDevicePrimaryCtxRetain:1=2");
    trainer_open(&trainer, "refused");
    CHECK(!trainer_probe(&trainer, trainer_legacy(&trainer, refused), refused, 0));
    trainer_close(&trainer);
    gpu_fault(NULL);
    gpu_use(1);
    trainer_open(&trainer, "served");
    CUdeviceptr pointer = add_legacy(&trainer, 1000);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    gpu_use(0);
    CU(gpu.cuMemFree_v2(refused));
    gpu_end();
}

static void exclusive_device(void) {
    struct trainer trainer;
    gpu_need_standin();
    configure(&(struct settings){0});
    gpu_settings("COMPUTE_MODE=3");
    daemon_start();
    gpu_begin();
    trainer_open(&trainer, "exclusive");
    CUdeviceptr pointer = allocate(1000);
    CHECK(!trainer_probe(&trainer, trainer_legacy(&trainer, pointer), pointer, 0));
    CHECK(memmem(trainer.peer.message.tail, trainer.peer.message.tail_length, "compute mode 3", 14));
    trainer_close(&trainer);
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

static void devices_not_wanted(void) {
    struct trainer trainer;
    const struct message_device_memory described = {.kind = DEVICE_LEGACY, .size = 4096};
    configure(&(struct settings){.device = "use = no"});
    daemon_start();
    trainer_open(&trainer, "unwanted");
    CHECK(peer_send(&trainer.peer, MESSAGE_DEVICE_MEMORY, &described, NULL, 0, -1));
    CHECK(peer_error(&trainer.peer) == CODE_E_DENIED);
    trainer_close(&trainer);
}

/* Memory that cannot be pinned is copied to all the same. */
static void unpinned_pool(void) {
    struct trainer trainer;
    gpu_need_standin();
    begin(&(struct settings){0}, "FAULTS=ckptd/cuMemHostRegister_v2:1+=2");
    trainer_open(&trainer, "unpinned");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    CHECK(status_number("cuda.devices.0.pinned_bytes") == 0);
    CHECK(daemon_logged("stays unpinned"));
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* What the pool has prefaulted is pinned as soon as the device is in use: no capture pays for it. In the next context
 * again. */
static void pinned_before_the_first_save(void) {
    struct trainer trainer;
    gpu_need_standin();
    begin(&(struct settings){.prefault = true}, "REGISTER_MS=20");
    CUdeviceptr pointer = allocate(1 << 17);
    for (uint64_t round = 0; round < 2; round++) {
        trainer_open(&trainer, "pinned");
        uint32_t memory = trainer_legacy(&trainer, pointer);
        CHECK(trainer_probe(&trainer, memory, pointer, 0));
        EVENTUALLY(status_number("cuda.devices.0.pinned_bytes") == MIB(64));
        trainer_shard(&trainer, memory, 0, (struct gpu_shard){.memory = pointer, .words = 1 << 17});
        CHECK(trainer_register(&trainer) == 0);
        gpu_fault("ckptd/cuMemHostRegister_v2:1+=2");
        trainer_round(&trainer, 1);
        gpu_fault(NULL);
        CHECK(!daemon_logged("stays unpinned"));
        trainer_close(&trainer);
        daemon_let_go();
        EVENTUALLY(status_number("cuda.devices.0.pinned_bytes") == 0);
    }
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* As much as the sets in device memory need is there, and pinned, before they are saved. */
static void pinned_as_much_as_is_registered(void) {
    enum { WORDS = MIB(160) / 8 };
    struct trainer trainers[2];
    CUdeviceptr pointers[2];
    gpu_need_standin();
    begin(&(struct settings){.pool = "600M", .prefault = true}, "DELAY_US=0");
    for (int i = 0; i < 2; i++) {
        trainer_open(&trainers[i], i ? "one" : "other");
        pointers[i] = add_legacy(&trainers[i], WORDS);
        CHECK(trainer_register(&trainers[i]) == 0);
        EVENTUALLY(status_number("cuda.devices.0.pinned_bytes") == (i ? MIB(512) : MIB(256)));
    }
    trainer_round(&trainers[0], 1);
    for (int i = 0; i < 2; i++)
        trainer_close(&trainers[i]);
    daemon_let_go();
    for (int i = 0; i < 2; i++)
        CU(gpu.cuMemFree_v2(pointers[i]));
    finish();
}

/* A device pins for all. When its last user goes, it neither takes the memory from under another's copies nor waits for
 * them for ever: it comes back to it. Then the other one pins for itself. */
static void pinned_for_another(void) {
    struct trainer first, second;
    CUdeviceptr pointers[2];
    gpu_need_standin();
    begin(&(struct settings){.device = "piece = 256K"}, "DEVICES=2");
    trainer_open(&first, "first");
    pointers[0] = add_legacy(&first, 1 << 17);
    CHECK(trainer_register(&first) == 0);
    trainer_round(&first, 1);
    gpu_use(1);
    trainer_open(&second, "second");
    pointers[1] = add_legacy(&second, 1 << 17);
    CHECK(trainer_register(&second) == 0);
    trainer_round(&second, 1);
    CHECK(status_number("cuda.devices.0.pinned_bytes") > 0 && status_number("cuda.devices.1.pinned_bytes") == 0);
    trainer_fill(&second, 2);
    gpu_fault("ckptd/run:3=hang");
    trainer_save(&second, 2, 0);
    EVENTUALLY(gpu_hangs());
    trainer_close(&first);
    EVENTUALLY(status_number("cuda.devices.0.imports") == 0);
    pause_ms(700); /* longer than it waits in one go */
    CHECK(status_number("cuda.devices.0.pinned_bytes") > 0);
    gpu_fault(NULL);
    gpu_unhang();
    CHECK(trainer_captured(&second) == CODE_OK);
    trainer_check(&second, 2);
    daemon_let_go();
    trainer_round(&second, 3);
    CHECK(status_number("cuda.devices.0.pinned_bytes") == 0 && status_number("cuda.devices.1.pinned_bytes") > 0);
    trainer_close(&second);
    EVENTUALLY(status_number("cuda.devices.1.in_use") == 0);
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        CU(gpu.cuMemFree_v2(pointers[i]));
    }
    finish();
}

/* A sticky error costs this capture and the context; what is described anew works in a new one. */
static void spoiled_context(const char *device) {
    struct trainer trainer;
    gpu_need_standin();
    begin(&(struct settings){.device = device}, "LEAKS=report");
    trainer_open(&trainer, "spoiled");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 17);
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 1);
    gpu_fault("ckptd/run:1=700");
    trainer_fill(&trainer, 2);
    trainer_save(&trainer, 2, 0);
    CHECK(trainer_captured(&trainer) < 0);
    gpu_fault(NULL);
    trainer_save(&trainer, 3, 0); /* the set is of the context that is gone */
    CHECK(trainer_captured(&trainer) < 0);
    trainer_release(&trainer);
    trainer.shard_count = trainer.writer.count = 0;
    trainer.writer.size = 0;
    trainer_shard(&trainer, trainer_legacy(&trainer, pointer), 0,
                  (struct gpu_shard){.memory = pointer, .words = 1 << 17});
    CHECK(trainer_register(&trainer) == 0);
    trainer_round(&trainer, 4);
    trainer_close(&trainer);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    gpu_end();
}

static void sticky_error(void) { spoiled_context("piece = 256K"); }
static void sticky_error_in_the_arena(void) { spoiled_context("arena = 4M"); }

/* A copy that never ends: its device is left alone, another goes on; when it answers, so is it. */
static void device_gets_stuck(const char *fault) {
    struct trainer stuck, other;
    CUdeviceptr pointers[2];
    gpu_need_standin();
    begin(&(struct settings){.device = "piece = 256K", .deadlines = "device_s = 1"}, "DEVICES=2 LEAKS=report");
    trainer_open(&stuck, "stuck");
    pointers[0] = add_legacy(&stuck, 1 << 16);
    CHECK(trainer_register(&stuck) == 0);
    gpu_use(1);
    trainer_open(&other, "other");
    pointers[1] = add_legacy(&other, 1 << 16);
    CHECK(trainer_register(&other) == 0);
    trainer_round(&other, 1);
    gpu_fault(fault);
    trainer_save(&stuck, 1, 0);
    CHECK(trainer_captured(&stuck) == CODE_E_TIMEOUT || word_watermark(word_load(stuck.page)) == WORD_FAILED);
    CHECK(daemon_logged("is stuck"));
    CHECK(status_number("cuda.devices.0.stuck") == 1);
    gpu_fault(NULL);
    trainer_round(&other, 2);
    CHECK(!trainer_probe(&stuck, 0, pointers[0], 0)); /* refused at once */
    gpu_unhang();
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 0);
    CHECK(trainer_probe(&stuck, 0, pointers[0], 0));
    CHECK(trainer_register(&stuck) == 0);
    trainer_round(&stuck, 2);
    trainer_close(&stuck);
    trainer_close(&other);
    daemon_let_go();
    EVENTUALLY(status_number("cuda.devices.1.in_use") == 0);
    CU(gpu.cuMemFree_v2(pointers[1]));
    gpu_use(0);
    CU(gpu.cuMemFree_v2(pointers[0]));
    gpu_end();
    daemon_stop_unused();
}

/* A device that is stuck while its last user goes has lost nothing of what it is to give back. */
static void left_while_stuck(void) {
    struct trainer trainer;
    gpu_need_standin();
    begin(&(struct settings){.prefault = true, .device = "arena = 1M", .deadlines = "device_s = 1"}, "LEAKS=report");
    gpu_fault("ckptd/cuMemHostRegister_v2:1=hang");
    trainer_open(&trainer, "left");
    CUdeviceptr pointer = add_legacy(&trainer, 1 << 16);
    EVENTUALLY(gpu_hangs());
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 1);
    trainer_close(&trainer);
    EVENTUALLY(daemon_logged("has disconnected"));
    CHECK(status_number("cuda.devices.0.imports") == 1);
    gpu_fault(NULL);
    gpu_unhang();
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 0);
    daemon_let_go();
    CU(gpu.cuMemFree_v2(pointer));
    finish();
}

/* A device that hangs while it pins for all: another copies to the memory as it is. */
static void stuck_while_pinning(void) {
    struct trainer stuck, other;
    CUdeviceptr pointers[2];
    gpu_need_standin();
    begin(&(struct settings){.deadlines = "device_s = 2"}, "DEVICES=2 LEAKS=report");
    trainer_open(&stuck, "stuck");
    pointers[0] = add_legacy(&stuck, 1 << 16);
    CHECK(trainer_register(&stuck) == 0);
    gpu_use(1);
    trainer_open(&other, "other");
    pointers[1] = add_legacy(&other, 1 << 16);
    CHECK(trainer_register(&other) == 0);
    gpu_fault("ckptd/cuMemHostRegister_v2:1=hang");
    trainer_save(&stuck, 1, 0);
    EVENTUALLY(gpu_hangs());
    trainer_round(&other, 1);
    CHECK(trainer_captured(&stuck) < 0);
    trainer_round(&other, 2);
    CHECK(status_number("cuda.devices.0.stuck") == 1 && status_number("cuda.devices.1.stuck") == 0);
    gpu_fault(NULL);
    gpu_unhang();
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 0);
    trainer_round(&stuck, 2);
    trainer_close(&stuck);
    trainer_close(&other);
    daemon_let_go();
    EVENTUALLY(status_number("cuda.devices.1.in_use") == 0);
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        CU(gpu.cuMemFree_v2(pointers[i]));
    }
    gpu_end();
    daemon_stop_unused();
}

static void stuck_in_a_call(void) { device_gets_stuck("ckptd/cuMemcpyDtoHAsync_v2:1=hang"); }
static void stuck_in_a_copy(void) { device_gets_stuck("ckptd/run:1=hang"); }

int main(int argc, char **argv) {
    static const struct test tests[] = {
        TEST(legacy_memory),
        TEST(many_saves),
        TEST(range_of_chunks),
        TEST(pooled_memory),
        TEST(two_devices),
        TEST(two_trainers),
        TEST(two_copies_in_flight),
        TEST(given_up_in_flight),
        TEST(released_between_two_pieces),
        TEST(device_tier),
        TEST(device_tier_full),
        TEST(device_tier_of_two_devices),
        TEST(device_tier_survives_the_trainer),
        TEST(device_tier_full_on_one),
        TEST(device_tier_lost_on_one),
        TEST(held_save),
        TEST(quiet),
        TEST(check_mode),
        TEST(check_mode_with_an_arena),
        TEST(check_mode_through_a_window),
        TEST(check_mode_on_two_devices),
        TEST(released_and_described_anew),
        TEST(described_twice),
        TEST(trainer_killed),
        TEST(trainer_killed_in_a_copy),
        TEST(daemon_killed),
        TEST(refused_probes),
        TEST(wrong_nonce),
        TEST(toolkit_stub),
        TEST(no_device),
        TEST(other_device),
        TEST(other_device_after_a_refusal),
        TEST(mig_instance),
        TEST(whole_device_beside_mig),
        TEST(other_mig_instance),
        TEST(mig_instance_hides_whole_devices),
        TEST(whole_device_hides_mig_instances),
        TEST(exclusive_device),
        TEST(devices_not_wanted),
        TEST(unpinned_pool),
        TEST(pinned_before_the_first_save),
        TEST(pinned_as_much_as_is_registered),
        TEST(pinned_for_another),
        TEST(sticky_error),
        TEST(sticky_error_in_the_arena),
        TEST(stuck_in_a_call),
        TEST(stuck_in_a_copy),
        TEST(left_while_stuck),
        TEST(stuck_while_pinning),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
