/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in device memory, of every kind, from the program's side: saved, changed, restored. */
#include "tests/functional/support-cuda.h"

#define WORDS 100000
#define BYTES (WORDS * sizeof(uint64_t))

static void protect_words(ckpt *c, const char *name, const void *data, uint64_t count, uint32_t flags) {
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U64;
    shard.name = name;
    shard.data = data;
    shard.dimensions = 1;
    shard.shape = &count;
    shard.flags = flags;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
}

static bool pushes(ckpt *c, const char **ret_reason) {
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    *ret_reason = info.push_reason;
    return info.push;
}

static void restore_to_device(ckpt_restore *r, const char *name, CUdeviceptr at, CUstream stream, bool on_stream) {
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U64;
    read.name = name;
    read.data = gpu_pointer(at);
    read.dimensions = 1;
    read.stream = stream;
    read.on_stream = on_stream;
    CHECK_OK(ckpt_restore_read(r, &read));
}

/* Saves follow each other as fast as the fence allows; memory changes right after it, eager tensors after the save. */
static void train(enum gpu_kind kind, unsigned steps) {
    struct settings settings = {.local = "keep = 1000\nbacklog = 1000", .no_parallel = true};
    configure(&settings);
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(kind, BYTES), statistics = gpu_alloc(kind, 4096);
    uint64_t *host = malloc(BYTES);
    CLEANUP(freep) uint64_t *host_owner = host;
    ckpt *c = job_open("devices");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    protect_words(c, "host", host, WORDS, 0);
    protect_words(c, "statistics", gpu_pointer(statistics.at + 64), 32, CKPT_EAGER);
    for (unsigned step = 0; step < steps; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        gpu_words_fill(weights.at, WORDS, step);
        gpu_words_fill(statistics.at + 64, 32, step + 1000);
        words_fill(host, WORDS, step + 2000);
        CHECK_OK(ckpt_save(c, step, NULL));
        gpu_words_fill(statistics.at, 512, step + 5000);
    }
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    const char *reason;
    CHECK(pushes(c, &reason) == (kind == GPU_CLOSED));
    if (kind == GPU_CLOSED)
        CHECK(strstr(reason, "not made exportable"));

    struct gpu_memory copy = gpu_alloc(GPU_LEGACY, BYTES);
    for (unsigned step = 0; step < steps; step += 1 + step / 8) {
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        ckpt_restore *r = restore_of(c, step);
        restore_words_check(r, "weights", WORDS, step);
        restore_words_check(r, "statistics", 32, step + 1000);
        restore_words_check(r, "host", WORDS, step + 2000);
        restore_to_device(r, "weights", copy.at, NULL, false);
        gpu_words_check(copy.at, WORDS, step);
        ckpt_restore_close(r);
    }
    CHECK_OK(ckpt_close(c));
    gpu_free(&copy);
    gpu_free(&weights);
    gpu_free(&statistics);
    daemon_stop();
    gpu_end();
}

static void memory_that_cannot_be_shared(void) { train(GPU_CLOSED, 40); }

static const struct test tests[] = {
    TEST(memory_that_cannot_be_shared),
};

int main(int argc, char **argv) { return tests_run(tests, ARRAY_SIZE(tests), argc, argv); }
