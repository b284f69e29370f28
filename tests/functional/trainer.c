/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/trainer.h"

#include <sys/mman.h>

static void expect(struct trainer *trainer, uint16_t opcode) {
    uint16_t answer = peer_answer(&trainer->peer);
    if (answer != opcode)
        FAIL("answered with %s, not %s: %.*s", answer ? message_rule(answer)->name : "nothing",
             message_rule(opcode)->name, answer ? (int)trainer->peer.message.tail_length : 0,
             answer ? trainer->peer.message.tail : "");
}

static void ask(struct trainer *trainer, enum opcode opcode, const void *body, int fd, uint16_t answer) {
    CHECK(peer_send(&trainer->peer, opcode, body, NULL, 0, fd));
    expect(trainer, answer);
}

void trainer_open(struct trainer *trainer, const char *job) {
    *trainer = (struct trainer){.job = job};
    peer_connect(&trainer->peer);
    peer_open(&trainer->peer, job);
    trainer->page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, trainer->peer.packet.fd, 0);
    CHECK(trainer->page != MAP_FAILED);
}

void trainer_close(struct trainer *trainer) {
    ask(trainer, MESSAGE_CLOSE, &(struct message_empty){0}, -1, MESSAGE_OK);
    peer_close(&trainer->peer);
    munmap(trainer->page, 4096);
    shards_writer_deinit(&trainer->writer);
}

static uint64_t buffer_id(CUdeviceptr pointer) {
    unsigned long long id;
    CU(gpu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
    return id;
}

/* Makes the context current in which the memory is. */
static void enter(CUdeviceptr pointer) {
    CUcontext context;
    CU(gpu.cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
    if (context) /* of a range: any will do */
        CU(gpu.cuCtxSetCurrent(context));
}

static void uuid_of(CUdeviceptr pointer, uint8_t ret_uuid[DEVICE_UUID_SIZE]) {
    int ordinal;
    CUuuid uuid;
    CU(gpu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    CU(gpu.cuDeviceGetUuid_v2(&uuid, ordinal));
    memcpy(ret_uuid, uuid.bytes, DEVICE_UUID_SIZE);
}

uint32_t trainer_legacy(struct trainer *trainer, CUdeviceptr pointer) {
    CUdeviceptr base;
    size_t size;
    CUipcMemHandle handle;
    enter(pointer);
    CU(gpu.cuMemGetAddressRange_v2(&base, &size, pointer));
    CU(gpu.cuIpcGetMemHandle(&handle, base));
    struct message_device_memory memory = {
        .memory = trainer->memories, .kind = DEVICE_LEGACY, .size = size, .buffer_id = buffer_id(base)};
    uuid_of(pointer, memory.uuid);
    memcpy(memory.handle, &handle, sizeof handle);
    ask(trainer, MESSAGE_DEVICE_MEMORY, &memory, -1, MESSAGE_OK);
    return trainer->memories++;
}

uint32_t trainer_range(struct trainer *trainer, int device, uint64_t size) {
    struct message_device_memory memory = {.memory = trainer->memories, .kind = DEVICE_VMM, .size = size};
    CUuuid uuid;
    CU(gpu.cuDeviceGetUuid_v2(&uuid, device));
    memcpy(memory.uuid, uuid.bytes, DEVICE_UUID_SIZE);
    ask(trainer, MESSAGE_DEVICE_MEMORY, &memory, -1, MESSAGE_OK);
    return trainer->memories++;
}

void trainer_chunk(struct trainer *trainer, uint32_t memory, uint64_t offset, CUmemGenericAllocationHandle handle,
                   uint64_t size, uint64_t id) {
    int fd = -1;
    CU(gpu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    const struct message_device_chunk chunk = {.memory = memory, .offset = offset, .size = size, .buffer_id = id};
    ask(trainer, MESSAGE_DEVICE_CHUNK, &chunk, fd, MESSAGE_OK);
    close(fd);
}

uint32_t trainer_pool(struct trainer *trainer, CUmemoryPool pool) {
    struct message_device_pool message = {.pool = 0};
    int fd = -1;
    CUuuid uuid;
    CU(gpu.cuDeviceGetUuid_v2(&uuid, 0));
    memcpy(message.uuid, uuid.bytes, DEVICE_UUID_SIZE);
    CU(gpu.cuMemPoolExportToShareableHandle(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    ask(trainer, MESSAGE_DEVICE_POOL, &message, fd, MESSAGE_OK);
    close(fd);
    return 0;
}

uint32_t trainer_pooled(struct trainer *trainer, uint32_t pool, CUdeviceptr pointer) {
    CUdeviceptr base;
    size_t size;
    CUmemPoolPtrExportData data;
    CU(gpu.cuMemGetAddressRange_v2(&base, &size, pointer));
    CU(gpu.cuMemPoolExportPointer(&data, pointer));
    struct message_device_memory memory = {.memory = trainer->memories,
                                           .kind = DEVICE_POOLED,
                                           .size = size,
                                           .buffer_id = buffer_id(pointer),
                                           .pool = pool};
    uuid_of(pointer, memory.uuid);
    memcpy(memory.handle, &data, sizeof data);
    ask(trainer, MESSAGE_DEVICE_MEMORY, &memory, -1, MESSAGE_OK);
    return trainer->memories++;
}

bool trainer_probe(struct trainer *trainer, uint32_t memory, CUdeviceptr pointer, uint64_t offset) {
    enter(pointer);
    struct message_device_probe probe = {
        .memory = memory, .offset = offset, .nonce = random_number(UINT64_MAX), .free_bytes = gpu_free_bytes()};
    CU(gpu.cuMemcpyHtoD_v2(pointer, &probe.nonce, sizeof probe.nonce));
    ask(trainer, MESSAGE_DEVICE_PROBE, &probe, -1, MESSAGE_DEVICE_PROBED);
    const struct message_device_probed *probed = trainer->peer.message.body;
    CHECK(probed->memory == memory);
    return !(probed->flags & DEVICE_PROBED_REFUSED);
}

void trainer_shard(struct trainer *trainer, uint32_t memory, uint64_t offset, struct gpu_shard shard) {
    char name[8];
    struct problem problem = PROBLEM_NONE;
    CHECK(trainer->shard_count < GPU_SHARDS_MAX);
    snprintf(name, sizeof name, "w%u", trainer->shard_count);
    const struct shard record = {
        .name = name,
        .dtype = DTYPE_U64,
        .area = shard.memory ? SHARDS_AREA_DEVICE + memory : SHARDS_AREA_PRIVATE,
        .address = shard.memory ? offset : (uint64_t)(uintptr_t)shard.host,
        .contiguous = !shard.stride,
        .stride = {(int64_t)shard.stride},
        .replica_count = 1,
        .geometry = {.dims = 1, .shape = {shard.words}, .extent = {shard.words}},
    };
    if (shards_writer_add(&trainer->writer, &record, &problem) < 0)
        FAIL("%s", problem.text);
    trainer->shards[trainer->shard_count++] = shard;
}

uint32_t trainer_register(struct trainer *trainer) {
    trainer->nonce = random_number(UINT64_MAX) | 1;
    int fd = wire_memfd("table", trainer->writer.data, trainer->writer.size);
    CHECK(fd >= 0);
    const struct message_register message = {.table_size = trainer->writer.size,
                                             .count = trainer->writer.count,
                                             .set = ++trainer->set,
                                             .nonce_address = (uint64_t)(uintptr_t)&trainer->nonce,
                                             .nonce = trainer->nonce};
    ask(trainer, MESSAGE_REGISTER, &message, fd, MESSAGE_REGISTERED);
    close(fd);
    return ((const struct message_registered *)trainer->peer.message.body)->flags;
}

void trainer_fill(struct trainer *trainer, uint64_t seed) {
    for (uint32_t i = 0; i < trainer->shard_count; i++) {
        struct gpu_shard *shard = &trainer->shards[i];
        uint64_t *words = malloc(shard->words * 8);
        CHECK(words);
        shard->seed = seed * GPU_SHARDS_MAX + i;
        words_fill(words, shard->words, shard->seed);
        if (shard->memory)
            enter(shard->memory);
        for (uint64_t k = 0; shard->memory && shard->stride && k < shard->words; k++)
            CU(gpu.cuMemcpyHtoD_v2(shard->memory + k * shard->stride, &words[k], 8));
        if (shard->memory && !shard->stride)
            CU(gpu.cuMemcpyHtoD_v2(shard->memory, words, shard->words * 8));
        if (!shard->memory)
            memcpy(shard->host, words, shard->words * 8);
        free(words);
        CU(gpu.cuCtxSynchronize());
    }
}

void trainer_save(struct trainer *trainer, uint64_t step, uint32_t flags) {
    word_begin(trainer->page, ++trainer->counter);
    const struct message_save save = {.step = step,
                                      .set = trainer->set,
                                      .counter = trainer->counter,
                                      .flags = flags,
                                      .busy_deadline_ms = PATIENCE_MS};
    ask(trainer, MESSAGE_SAVE, &save, -1, MESSAGE_SAVED);
    const struct message_saved *saved = trainer->peer.message.body;
    CHECK(saved->result == CODE_OK);
    trainer->image_size = saved->image_size;
}

int trainer_captured(struct trainer *trainer) {
    for (;;) {
        CHECK(peer_receive(&trainer->peer));
        const struct message_captured *captured = trainer->peer.message.body;
        if (trainer->peer.message.opcode != MESSAGE_CAPTURED || captured->counter != trainer->counter)
            continue;
        bool complete = word_load(trainer->page) == word_make(trainer->counter, trainer->image_size);
        CHECK(complete == (captured->result == CODE_OK));
        return captured->result;
    }
}

static char *local_file(const char *job, uint64_t step) {
    for (uint64_t generation = 8; generation; generation--) { /* in the parallel tier it may have come first */
        const char *path = test_path("parallel/%s/%llu/%llu/rank-00000.safetensors", job,
                                     (unsigned long long)generation, (unsigned long long)step);
        size_t size;
        if (file_exists(path))
            return file_read(path, &size);
        path = test_path("local/%s/%llu/%llu/rank-00000.safetensors", job, (unsigned long long)generation,
                         (unsigned long long)step);
        if (file_exists(path))
            return file_read(path, &size);
    }
    FAIL("there is no file of step %llu", (unsigned long long)step);
}

void trainer_check(struct trainer *trainer, uint64_t step) {
    const struct message_wait wait = {
        .step = step, .level = LEVEL_LOCAL, .scope = WAIT_VERSION, .timeout_ms = PATIENCE_MS};
    ask(trainer, MESSAGE_WAIT, &wait, -1, MESSAGE_WAITED);
    CHECK(((const struct message_waited *)trainer->peer.message.body)->result == CODE_OK);
    struct shards *shards;
    struct image_layout layout;
    struct problem problem = PROBLEM_NONE;
    const struct image_identity identity = {.job = trainer->job, .world = 1};
    CHECK(shards_parse(trainer->writer.data, trainer->writer.size, trainer->writer.count, &shards, &problem) == 0);
    CHECK(image_layout(shards, &identity, &layout, &problem) == 0);
    char *file = local_file(trainer->job, step), *header = malloc(layout.data_start);
    image_header(&layout, 0, header);
    CHECK(memcmp(file, header, layout.data_start) == 0);
    free(header);
    for (uint32_t i = 0; i < trainer->shard_count; i++)
        words_check((const uint64_t *)(file + layout.shard_offset[i]), trainer->shards[i].words,
                    trainer->shards[i].seed);
    free(file);
    image_layout_deinit(&layout);
    shards_free(shards);
}

void trainer_round(struct trainer *trainer, uint64_t step) {
    trainer_fill(trainer, step);
    trainer_save(trainer, step, 0);
    CHECK(trainer_captured(trainer) == CODE_OK);
    struct gpu_shard now[GPU_SHARDS_MAX];
    memcpy(now, trainer->shards, sizeof now);
    trainer_fill(trainer, UINT32_MAX); /* the capture must not read these */
    memcpy(trainer->shards, now, sizeof now);
    trainer_check(trainer, step);
}

void trainer_release(struct trainer *trainer) {
    ask(trainer, MESSAGE_DEVICE_RELEASE, &(struct message_empty){0}, -1, MESSAGE_OK);
    trainer->memories = 0;
}

struct message_device_usage_is trainer_usage(struct trainer *trainer) {
    ask(trainer, MESSAGE_DEVICE_USAGE, &(struct message_empty){0}, -1, MESSAGE_DEVICE_USAGE_IS);
    return *(const struct message_device_usage_is *)trainer->peer.message.body;
}

void daemon_let_go(void) {
    EVENTUALLY(status_number("cuda.devices.0.in_use") == 0);
    CHECK(status_number("cuda.devices.0.imports") == 0);
}
