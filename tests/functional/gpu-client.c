/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in device memory, of every kind, from the program's side: saved, changed, restored. */
#include "tests/functional/support-cuda.h"

#define WORDS 100000
#define BYTES (WORDS * sizeof(uint64_t))

/* Nobody has made a mistake with the driver. */
static void finish(void) {
    daemon_stop();
    gpu_end();
    gpu_check_mistakes();
}

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
    /* Room for all of it: the disk may be slow. */
    struct settings settings = {.pool = "128M", .local = "keep = 1000\nbacklog = 1000", .no_parallel = true};
    configure(&settings);
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(kind, BYTES), statistics = gpu_alloc(kind, 4096);
    CLEANUP(freep) uint64_t *host = malloc(BYTES);
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
    finish();
}

/* A thousand versions, each of which must be that of its moment. (The other loop has fewer.) */
static void thousand_saves(void) {
    enum { COUNT = 3000 };
    const uint64_t saves = FEWER(strcmp(getenv("CKPTD_LOOP"), "posix") == 0 ? 100 : 1000);
    configure(&(struct settings){.local = "keep = 1000\nbacklog = 1000", .no_parallel = true});
    gpu_settings("DELAY_US=20");
    gpu_begin();
    daemon_start();
    struct gpu_memory legacy = gpu_alloc(GPU_LEGACY, COUNT * 8), mapped = gpu_alloc(GPU_MAPPED, COUNT * 8);
    ckpt *c = job_open("thousand");
    protect_words(c, "legacy", gpu_pointer(legacy.at), COUNT, 0);
    protect_words(c, "mapped", gpu_pointer(mapped.at), COUNT, 0);
    for (uint64_t step = 0; step < saves; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        gpu_words_fill(legacy.at, COUNT, step);
        gpu_words_fill(mapped.at, COUNT, step + saves);
        CHECK_OK(ckpt_save(c, step, NULL));
    }
    CHECK_OK(ckpt_wait(c, saves - 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    for (uint64_t step = 0; step < saves; step++) {
        EVENTUALLY(file_exists(test_path("local/thousand/1/%ju/complete.json", (uintmax_t)step)));
        /* Read as what it is, a safetensors file: a restore of each would take longer than the saves. */
        size_t size;
        CLEANUP(freep)
        char *file = file_read(test_path("local/thousand/1/%ju/rank-00000.safetensors", (uintmax_t)step), &size);
        uint64_t data;
        memcpy(&data, file, sizeof data);
        data += sizeof data;
        CHECK(data + 2 * COUNT * 8 <= size);
        words_check((uint64_t *)(file + data), COUNT, step);
        words_check((uint64_t *)(file + data) + COUNT, COUNT, step + saves);
    }
    CHECK_OK(ckpt_close(c));
    gpu_free(&legacy);
    gpu_free(&mapped);
    daemon_stop();
    gpu_end();
}

static void legacy_memory(void) { train(GPU_LEGACY, 40); }
static void mapped_memory(void) { train(GPU_MAPPED, 40); }
static void pooled_memory(void) { train(GPU_POOLED, 40); }
static void memory_that_cannot_be_shared(void) { train(GPU_CLOSED, 40); }

/* ---- order ---- */

/* The bytes come to the device by way of a stream, and are not there yet when the save is asked for. */
enum behind { BEHIND_STREAM, BEHIND_DEFAULT, BEHIND_STREAM_NO_CONTEXT };

static void save_behind(enum gpu_kind kind, enum behind behind) {
    bool default_stream = behind == BEHIND_DEFAULT;
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(kind, BYTES);
    gpu_words_fill(weights.at, WORDS, 1);
    CUstream stream = NULL;
    if (!default_stream)
        CU(gpu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    void *words = NULL;
    CU(gpu.cuMemHostAlloc(&words, BYTES, 0));
    words_fill(words, WORDS, 2);
    ckpt *c = job_open("order");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    save_captured(c, 0); /* everything is known; the next save has only to be ordered */
    struct ckpt_save_options options;
    CKPT_INIT(options);
    void *streams[] = {stream};
    options.streams = streams;
    options.stream_count = default_stream ? 0 : 1;
    for (unsigned i = 0; i < 40; i++) /* a long queue */
        CU(gpu.cuMemcpyHtoDAsync_v2(weights.at, words, BYTES, stream));
    if (behind == BEHIND_STREAM_NO_CONTEXT)
        CU(gpu.cuCtxSetCurrent(NULL));
    CHECK_OK(ckpt_save(c, 1, &options));
    gpu_use(0);
    CUresult busy = gpu.cuStreamQuery(stream);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK(!gpu_is_standin() || busy == CUDA_ERROR_NOT_READY); /* save did not wait for what is late there */
    CHECK(gpu.cuStreamQuery(stream) == CUDA_SUCCESS);
    CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r = restore_step(c, 1);
    restore_words_check(r, "weights", WORDS, 2);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    CU(gpu.cuMemFreeHost(words));
    if (stream)
        CU(gpu.cuStreamDestroy_v2(stream));
    gpu_free(&weights);
    finish();
}

static void save_behind_a_stream(void) {
    gpu_settings("DELAY_US=10000");
    save_behind(GPU_LEGACY, BEHIND_STREAM);
}
static void save_behind_the_default_stream(void) {
    gpu_settings("DELAY_US=10000");
    save_behind(GPU_MAPPED, BEHIND_DEFAULT);
}
static void push_behind_a_stream(void) {
    gpu_settings("DELAY_US=10000");
    save_behind(GPU_CLOSED, BEHIND_STREAM);
}
/* In a thread that the program has made for it, say. */
static void save_where_no_context_is_current(void) {
    gpu_settings("DELAY_US=10000");
    save_behind(GPU_LEGACY, BEHIND_STREAM_NO_CONTEXT);
}

/* ---- check mode ---- */

/* Writes to the memory between save and fence are found by the fence, also those that are only queued by then. How
 * late the first reading comes nobody knows: where it came after the writes there was nothing to find, and they last
 * longer the next time. */
static void changed_before_the_fence(enum gpu_kind kind, bool queued, const char *chunk) {
    configure(&(struct settings){.no_parallel = true, .chunk = chunk});
    gpu_settings("DELAY_US=2000");
    gpu_begin();
    daemon_start();
    struct gpu_memory memory = gpu_alloc(kind, BYTES), other = gpu_alloc(GPU_MAPPED, BYTES);
    CLEANUP(freep) uint64_t *host = calloc(WORDS, 8);
    const char *reason;
    void *words = NULL;
    CU(gpu.cuMemHostAlloc(&words, BYTES, 0));
    gpu_words_fill(memory.at, WORDS, 1);
    gpu_words_fill(other.at, WORDS, 2);
    ckpt *c = job_open("check");
    protect_words(c, "innocent", gpu_pointer(other.at), WORDS, 0);
    protect_words(c, "changed", gpu_pointer(memory.at), WORDS, 0);
    protect_words(c, "host", host, WORDS, 0);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.check = 1;
    int r = CKPT_OK;
    uint64_t step = 1, seed = 10;
    for (uint64_t change_ms = 50; r == CKPT_OK; change_ms *= 2) {
        CHECK(change_ms < 30000);
        CHECK_OK(ckpt_save(c, step, &options)); /* nothing changes */
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        CHECK(pushes(c, &reason) == (kind == GPU_CLOSED));
        CHECK_OK(ckpt_save(c, step + 1, &options));
        for (uint64_t end = now_ms() + change_ms; now_ms() < end;)
            if (queued)
                pause_ms(10);
            else
                gpu_words_fill(memory.at, WORDS, ++seed);
        words_fill(words, WORDS, ++seed);
        for (int i = 0; queued && i < 40; i++) /* the last one says what all of them have said */
            CU(gpu.cuMemcpyHtoDAsync_v2(memory.at, words, BYTES, NULL));
        r = ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
        step += 2;
    }
    CHECK_IS(CKPT_E_LOST, r);
    CHECK_SAYS("changed between save and fence");
    CHECK_SAYS("the memory of changed");
    CU(gpu.cuCtxSynchronize());
    gpu_words_fill(memory.at, WORDS, 3);
    CHECK_OK(ckpt_save(c, step, &options));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *restore = restore_step(c, step);
    restore_words_check(restore, "changed", WORDS, 3);
    restore_words_check(restore, "innocent", WORDS, 2);
    ckpt_restore_close(restore);
    /* Who dies or goes away before the fence keeps nobody waiting. */
    CHECK_OK(ckpt_save(c, step + 1, &options));
    daemon_kill();
    CHECK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT) < 0);
    daemon_start();
    EVENTUALLY(ckpt_save(c, step + 2, &options) == CKPT_OK); /* the old one's socket may outlive it for a moment */
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_save(c, step + 3, &options));
    CHECK_OK(ckpt_close(c));
    CU(gpu.cuMemFreeHost(words));
    gpu_free(&memory);
    gpu_free(&other);
    finish();
}

static void check_finds_changed_memory(void) { changed_before_the_fence(GPU_LEGACY, false, NULL); }
static void check_of_a_push(void) { changed_before_the_fence(GPU_CLOSED, false, NULL); }
static void check_of_a_push_of_one_chunk(void) { changed_before_the_fence(GPU_CLOSED, false, "4M"); }

static void check_waits_for_what_is_queued(void) {
    gpu_need_standin();
    changed_before_the_fence(GPU_LEGACY, true, NULL);
}

/* A step may compute for long between its save and its fence: a push that waits for that is not given up as one whose
 * client is silent. */
static void checked_push_waits_for_its_fence(void) {
    configure(&(struct settings){.no_parallel = true, .deadlines = "capture_s = 1"});
    gpu_begin();
    daemon_start();
    struct gpu_memory memory = gpu_alloc(GPU_CLOSED, BYTES);
    gpu_words_fill(memory.at, WORDS, 1);
    ckpt *c = job_open("late");
    protect_words(c, "weights", gpu_pointer(memory.at), WORDS, 0);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.check = 1;
    CHECK_OK(ckpt_save(c, 1, &options));
    pause_ms(1500);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    gpu_free(&memory);
    finish();
}

/* What is eager may change after the save, however large it is. */
static void check_of_eager(enum gpu_kind kind) {
    enum { LARGE = MIB(17) / 8 };
    configure(&(struct settings){.no_parallel = true, .pool = "256M"});
    gpu_begin();
    daemon_start();
    struct gpu_memory small = gpu_alloc(GPU_LEGACY, BYTES), large = gpu_alloc(kind, LARGE * 8);
    CLEANUP(freep) uint64_t *host = malloc(LARGE * 8);
    ckpt *c = job_open("eager");
    protect_words(c, "small", gpu_pointer(small.at), WORDS, CKPT_EAGER);
    protect_words(c, "host", host, LARGE, CKPT_EAGER);
    protect_words(c, "large", gpu_pointer(large.at), LARGE, CKPT_EAGER);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.check = 1;
    for (uint64_t step = 1; step <= 3; step++) {
        gpu_words_fill(small.at, WORDS, step);
        words_fill(host, LARGE, step + 10);
        gpu_words_fill(large.at, LARGE, step + 20);
        CHECK_OK(ckpt_save(c, step, &options));
        gpu_words_fill(small.at, WORDS, 99);
        words_fill(host, LARGE, 99);
        gpu_words_fill(large.at, LARGE, 99);
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    }
    CHECK_OK(ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r = restore_step(c, 3);
    restore_words_check(r, "small", WORDS, 3);
    restore_words_check(r, "host", LARGE, 13);
    restore_words_check(r, "large", LARGE, 23);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    gpu_free(&small);
    gpu_free(&large);
    finish();
}

static void check_of_eager_memory(void) { check_of_eager(GPU_LEGACY); }
static void check_of_eager_memory_that_is_pushed(void) { check_of_eager(GPU_CLOSED); }

/* ---- shapes ---- */

enum { ROWS = 37, COLUMNS = 61, WIDE = 80 };

static void protect_view(ckpt *c, const char *name, CUdeviceptr at, const uint64_t *shape, const int64_t *stride) {
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U64;
    shard.name = name;
    shard.data = gpu_pointer(at);
    shard.dimensions = 2;
    shard.shape = shape;
    shard.stride = stride;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
}

static void check_view(ckpt_restore *r, const char *name, const uint64_t *words, int64_t row, int64_t column,
                       const struct gpu_memory *target) {
    uint64_t shape[] = {ROWS, COLUMNS}, offset[] = {3, 5}, extent[] = {ROWS - 3, COLUMNS - 6}, here[ROWS][COLUMNS];
    uint64_t box[ROWS][WIDE];
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U64;
    read.name = name;
    read.data = here;
    read.dimensions = 2;
    read.shape = shape;
    CHECK_OK(ckpt_restore_read(r, &read));
    /* A box of it, into every other column of device memory. */
    gpu_words_fill(target->at, ROWS * WIDE * 2, 99);
    int64_t stride[] = {WIDE * 16, 16};
    read.data = gpu_pointer(target->at);
    read.offset = offset;
    read.extent = extent;
    read.stride = stride;
    CHECK_OK(ckpt_restore_read(r, &read));
    CLEANUP(freep) uint64_t *wide = malloc(ROWS * WIDE * 16), *before = malloc(ROWS * WIDE * 16);
    gpu_read(target->at, wide, ROWS * WIDE * 16);
    words_fill(before, ROWS * WIDE * 2, 99);
    memset(box, 0, sizeof box);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < COLUMNS; j++)
            CHECK(here[i][j] == words[i * row + j * column]);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < 2 * WIDE; j++) {
            bool inside = i < ROWS - 3 && j % 2 == 0 && j / 2 < COLUMNS - 6;
            CHECK(wide[i * 2 * WIDE + j] ==
                  (inside ? words[(i + 3) * row + (j / 2 + 5) * column] : before[i * 2 * WIDE + j]));
        }
}

static void views(enum gpu_kind kind) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory memory = gpu_alloc(kind, WIDE * WIDE * 8), target = gpu_alloc(GPU_LEGACY, ROWS * WIDE * 16);
    static uint64_t words[WIDE * WIDE];
    words_fill(words, WIDE * WIDE, 7);
    gpu_write(memory.at, words, sizeof words);
    uint64_t shape[] = {ROWS, COLUMNS};
    const int64_t cut[] = {WIDE * 8, 8}, turned[] = {8, WIDE * 8}, backward[] = {-WIDE * 8, -8};
    ckpt *c = job_open("views");
    protect_view(c, "cut", memory.at + 80, shape, cut);
    protect_view(c, "turned", memory.at, shape, turned);
    protect_view(c, "backward", memory.at + (WIDE * WIDE - 1) * 8, shape, backward);
    protect_words(c, "empty", NULL, 0, 0);
    save_durable(c, 0, CKPT_LOCAL);
    ckpt_restore *r = restore_step(c, 0);
    check_view(r, "cut", words + 10, WIDE, 1, &target);
    check_view(r, "turned", words, 1, WIDE, &target);
    check_view(r, "backward", words + WIDE * WIDE - 1, -WIDE, -1, &target);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    gpu_free(&memory);
    gpu_free(&target);
    finish();
}

static void views_of_device_memory(void) { views(GPU_LEGACY); }
static void views_that_are_pushed(void) { views(GPU_CLOSED); }

/* ---- memory that comes and goes ---- */

static struct ckpt_device_usage usage(ckpt *c) {
    struct ckpt_device_usage usage;
    CKPT_INIT(usage);
    CHECK_OK(ckpt_device_usage(c, &usage));
    return usage;
}

static void check_saved(ckpt *c, uint64_t step, const char *name, size_t count, uint64_t seed) {
    save_durable(c, step, CKPT_LOCAL);
    ckpt_restore *r = restore_step(c, step);
    restore_words_check(r, name, count, seed);
    ckpt_restore_close(r);
}

/* As torch.cuda.empty_cache() does it: what was open is closed first, and the same addresses come back as other memory.
 */
static void memory_is_given_back(void) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory kept = gpu_alloc(GPU_LEGACY, BYTES), weights = gpu_alloc(GPU_LEGACY, BYTES);
    gpu_words_fill(kept.at, WORDS, 1);
    gpu_words_fill(weights.at, WORDS, 2);
    ckpt *c = job_open("given-back");
    protect_words(c, "kept", gpu_pointer(kept.at), WORDS, 0);
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    struct ckpt_device_usage before = usage(c);
    CHECK(before.contexts == 1 && before.imports == 2 && before.context_bytes > 0 && before.import_bytes >= 2 * BYTES);
    check_saved(c, 0, "weights", WORDS, 2);
    CHECK_OK(ckpt_release_imports(c));
    CUdeviceptr address = weights.at;
    gpu_free(&weights);
    weights = gpu_alloc(GPU_LEGACY, BYTES);
    CHECK(!gpu_is_standin() || weights.at == address);
    gpu_words_fill(weights.at, WORDS, 3);
    check_saved(c, 1, "weights", WORDS, 3);
    CHECK(usage(c).imports == 2);
    /* Unprotected memory may be freed at once. */
    CHECK_OK(ckpt_unprotect_all(c));
    gpu_free(&weights);
    protect_words(c, "kept", gpu_pointer(kept.at), WORDS, 0);
    check_saved(c, 2, "kept", WORDS, 1);
    CHECK(usage(c).imports == 1);
    CHECK_OK(ckpt_close(c));
    gpu_free(&kept);
    finish();
}

/* An expandable segment: more memory is mapped behind what is there, at the addresses that follow. */
static void range_grows_in_place(void) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory range = gpu_alloc(GPU_MAPPED, MIB(4));
    size_t first = MIB(3) / 8, second = MIB(6) / 8; /* the second begins in the first's last allocation */
    ckpt *c = job_open("grows");
    gpu_words_fill(range.at, first, 1);
    protect_words(c, "first", gpu_pointer(range.at), first, 0);
    check_saved(c, 0, "first", first, 1);
    gpu_grow(&range, MIB(10));
    gpu_words_fill(range.at + MIB(3), second, 2);
    protect_words(c, "second", gpu_pointer(range.at + MIB(3)), second, 0);
    check_saved(c, 1, "second", second, 2);
    check_saved(c, 2, "first", first, 1);
    CHECK_OK(ckpt_close(c));
    gpu_free(&range);
    finish();
}

/* ---- quiet ---- */

static void quiet(enum gpu_kind kind) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(kind, BYTES);
    gpu_words_fill(weights.at, WORDS, 1);
    ckpt *c = job_open("quiet");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    save_captured(c, 0);
    CHECK_OK(ckpt_quiet(c, CKPT_QUIET_BEGIN));
    CHECK_OK(ckpt_save(c, 1, NULL));
    uint64_t from = now_ms();
    while (now_ms() < from + 300)
        CHECK_IS(CKPT_PENDING, ckpt_test(c, 1, CKPT_CAPTURED, CKPT_PART));
    CHECK_OK(ckpt_quiet(c, CKPT_QUIET_END));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    /* Who forgets the end is waited for, but not for ever. */
    CHECK_OK(ckpt_quiet(c, CKPT_QUIET_BEGIN));
    CHECK_OK(ckpt_save(c, 2, NULL));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    gpu_free(&weights);
    finish();
}

static void quiet_daemon(void) { quiet(GPU_LEGACY); }
static void quiet_push(void) { quiet(GPU_CLOSED); }

/* ---- several ---- */

static void two_devices(void) {
    configure(&(struct settings){.no_parallel = true});
    gpu_settings("DEVICES=2");
    gpu_begin();
    gpu_need_devices(2);
    daemon_start();
    struct gpu_memory memory[2];
    ckpt *c = job_open("two");
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        memory[i] = gpu_alloc(i ? GPU_MAPPED : GPU_LEGACY, BYTES);
        gpu_words_fill(memory[i].at, WORDS, (uint64_t)i);
        protect_words(c, i ? "second" : "first", gpu_pointer(memory[i].at), WORDS, 0);
    }
    CHECK(usage(c).contexts == 2);
    save_durable(c, 0, CKPT_LOCAL);
    ckpt_restore *r = restore_step(c, 0);
    restore_words_check(r, "first", WORDS, 0);
    restore_words_check(r, "second", WORDS, 1);
    for (int i = 0; i < 2; i++) /* to the other device */
        restore_to_device(r, i ? "first" : "second", memory[i].at, NULL, false);
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        gpu_words_check(memory[i].at, WORDS, (uint64_t)!i);
    }
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    for (int i = 0; i < 2; i++) {
        gpu_use(i);
        gpu_free(&memory[i]);
    }
    finish();
}

static void train_one_of_two(void *argument) {
    uint32_t rank = (uint32_t)(uintptr_t)argument;
    gpu_begin();
    struct gpu_memory weights = gpu_alloc(rank ? GPU_POOLED : GPU_LEGACY, BYTES);
    ckpt *c = rank_open("shared-device", rank, 2, "run");
    char name[16];
    snprintf(name, sizeof name, "weights-%u", rank);
    protect_words(c, name, gpu_pointer(weights.at), WORDS, 0);
    for (uint64_t step = 0; step < 20; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        gpu_words_fill(weights.at, WORDS, 100 * rank + step);
        CHECK_OK(ckpt_save(c, step, NULL));
    }
    CHECK_OK(ckpt_wait(c, 19, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    gpu_free(&weights);
    gpu_end();
}

static void two_trainers_on_one_device(void) {
    configure(&(struct settings){.no_parallel = true});
    gpu_settings("DEVICES=1");
    daemon_start();
    for (uintptr_t rank = 0; rank < 2; rank++)
        process_start(train_one_of_two, (void *)rank);
    process_join(-1);
    process_join(-1);
    ckpt *c = job_open("shared-device");
    ckpt_restore *r = restore_step(c, 19);
    restore_words_check(r, "weights-0", WORDS, 19);
    restore_words_check(r, "weights-1", WORDS, 119);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    daemon_stop();
    gpu_check_mistakes();
}

static void restore_behind_a_stream(void) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(GPU_LEGACY, BYTES);
    gpu_words_fill(weights.at, WORDS, 5);
    CUstream stream;
    CU(gpu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    ckpt *c = job_open("stream");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    save_durable(c, 0, CKPT_LOCAL);
    CU(gpu.cuMemsetD8Async(weights.at, 0, BYTES, stream));
    ckpt_restore *r = restore_step(c, 0);
    restore_to_device(r, "weights", weights.at, stream, true);
    CU(gpu.cuStreamSynchronize(stream));
    gpu_words_check(weights.at, WORDS, 5);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    CU(gpu.cuStreamDestroy_v2(stream));
    gpu_free(&weights);
    finish();
}

/* ---- what fails ---- */

/* The daemon may not have the device: the library copies, says why, and all is as ever. */
static void must_push(const char *variable, const char *value, const char *says) {
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start_with(variable, value);
    struct gpu_memory weights = gpu_alloc(GPU_LEGACY, BYTES);
    gpu_words_fill(weights.at, WORDS, 1);
    ckpt *c = job_open("pushed");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    check_saved(c, 0, "weights", WORDS, 1);
    const char *reason;
    CHECK(pushes(c, &reason));
    CLEANUP(freep) char *told = status_text("sessions.0.source.push_reason");
    if (!strstr(reason, says) || !strstr(told, says))
        FAIL("the program is told \"%s\", the operator \"%s\"", reason, told);
    gpu_words_fill(weights.at, WORDS, 2);
    check_saved(c, 1, "weights", WORDS, 2);
    CHECK_OK(ckpt_close(c));
    gpu_free(&weights);
    finish();
}

static void daemon_without_a_driver(void) {
    gpu_need_standin(); /* a real one is found without this variable, too */
    must_push("LD_LIBRARY_PATH", "", "libcuda.so.1");
}

static void daemon_with_the_stub(void) {
    gpu_need_standin();
    must_push("CUDA_STANDIN_INIT", "34", "stub");
}

static void daemon_without_a_device(void) { must_push("CUDA_VISIBLE_DEVICES", "", "device"); }

static void exclusive_device(void) {
    gpu_need_standin();
    gpu_settings("COMPUTE_MODE=3");
    must_push(NULL, NULL, "compute mode 3");
}

/* A process sees one MIG instance, or whole cards: the daemon what the program sees, or another. */
static void mig_instance_of_the_program(void) {
    gpu_need_standin();
    gpu_settings("MIG=2 DEVICES=2");
    train(GPU_LEGACY, 4);
}

static void mig_instance_of_others(void) {
    gpu_need_standin();
    gpu_settings("MIG=2 DEVICES=2");
    must_push("CUDA_VISIBLE_DEVICES", "1", "but MIG-c5737461-6e64-2d69-6e20-677075206d01");
}

static void whole_device_for_a_mig_instance(void) {
    gpu_need_standin();
    gpu_settings("MIG=1 DEVICES=2");
    must_push("CUDA_VISIBLE_DEVICES", "1", "but GPU-c5737461-6e64-2d69-6e20-677075206701");
}

static void mig_instance_for_a_whole_device(void) {
    gpu_need_standin();
    gpu_settings("MIG=1 DEVICES=2");
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    must_push("CUDA_VISIBLE_DEVICES", "0,1", "a process that sees a MIG instance sees no other device");
}

/* The daemon dies while the program's memory is on its way to it, by whichever way; the next one has the next save. */
static void daemon_dies(enum gpu_kind kind, bool held) {
    gpu_settings("DELAY_US=5000");
    configure(&(struct settings){.no_parallel = true, .chunk = "256K"});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(kind, BYTES);
    CUstream stream;
    void *words = NULL;
    CU(gpu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU(gpu.cuMemHostAlloc(&words, BYTES, 0));
    words_fill(words, WORDS, 2);
    gpu_words_fill(weights.at, WORDS, 1);
    ckpt *c = job_open("orphan");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    save_captured(c, 0);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    void *streams[] = {stream};
    options.streams = streams;
    options.stream_count = 1;
    for (int i = 0; held && i < 40; i++) /* a long queue, behind which the daemon dies before the save begins */
        CU(gpu.cuMemcpyHtoDAsync_v2(weights.at, words, BYTES, stream));
    CHECK_OK(ckpt_save(c, 1, &options));
    daemon_kill();
    int fenced = ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
    CHECK(fenced == CKPT_E_LOST || fenced == CKPT_E_UNREACHABLE || (fenced == CKPT_OK && !gpu_is_standin()));
    CU(gpu.cuStreamSynchronize(stream)); /* the context is well */
    gpu_words_check(weights.at, WORDS, held ? 2 : 1);
    daemon_start();
    gpu_words_fill(weights.at, WORDS, 3);
    check_saved(c, 2, "weights", WORDS, 3);
    CHECK_OK(ckpt_close(c));
    CU(gpu.cuMemFreeHost(words));
    CU(gpu.cuStreamDestroy_v2(stream));
    gpu_free(&weights);
    finish();
}

static void daemon_dies_in_a_capture(void) { daemon_dies(GPU_LEGACY, false); }
static void daemon_dies_in_a_push(void) { daemon_dies(GPU_CLOSED, false); }
static void daemon_dies_in_a_held_save(void) { daemon_dies(GPU_MAPPED, true); }

/* The program's context is spoiled: its saves fail with the driver's sentence, what it saved before stays. */
static void program_spoils_its_context(void) {
    gpu_need_standin();
    gpu_settings("LEAKS=report");
    configure(&(struct settings){.no_parallel = true});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(GPU_LEGACY, BYTES);
    gpu_words_fill(weights.at, WORDS, 1);
    ckpt *c = job_open("spoiled");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    check_saved(c, 0, "weights", WORDS, 1);
    gpu_fault("functional-gpu-client/run:1=700");
    CHECK(gpu.cuMemsetD8_v2(weights.at, 0, BYTES) != CUDA_SUCCESS || gpu.cuCtxSynchronize() != CUDA_SUCCESS);
    gpu_fault(NULL);
    int r = ckpt_save(c, 1, NULL);
    CHECK_IS(CKPT_E_LOST, r == CKPT_OK ? ckpt_fence(c, CKPT_DEFAULT_TIMEOUT) : r);
    CHECK_SAYS("700");
    ckpt_restore *restore = restore_step(c, 0);
    restore_words_check(restore, "weights", WORDS, 1);
    ckpt_restore_close(restore);
    (void)ckpt_close(c);
    daemon_stop();
}

/* A fence that gives up on a stuck device: the version never exists, and the program goes on. */
static void fence_of_a_stuck_device(void) {
    gpu_need_standin();
    gpu_settings("LEAKS=report");
    configure(&(struct settings){.no_parallel = true, .deadlines = "device_s = 1"});
    gpu_begin();
    daemon_start();
    struct gpu_memory weights = gpu_alloc(GPU_LEGACY, BYTES);
    gpu_words_fill(weights.at, WORDS, 1);
    ckpt *c = job_open("stuck");
    protect_words(c, "weights", gpu_pointer(weights.at), WORDS, 0);
    check_saved(c, 0, "weights", WORDS, 1);
    gpu_fault("ckptd/cuMemcpyDtoHAsync_v2:1=hang");
    CHECK_OK(ckpt_save(c, 1, NULL));
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_fence(c, 200));
    gpu_words_fill(weights.at, WORDS, 2); /* the memory is the program's again */
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 1);
    gpu_fault(NULL);
    gpu_unhang();
    EVENTUALLY(status_number("cuda.devices.0.stuck") == 0);
    check_saved(c, 2, "weights", WORDS, 2);
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_STEP;
    options.step = 1;
    ckpt_restore *none;
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_restore_open(c, &options, &none));
    CHECK_OK(ckpt_close(c));
    gpu_free(&weights);
    daemon_stop();
    gpu_end();
}

static const struct test tests[] = {
    TEST(thousand_saves),
    TEST(legacy_memory),
    TEST(mapped_memory),
    TEST(pooled_memory),
    TEST(memory_that_cannot_be_shared),
    TEST(save_behind_a_stream),
    TEST(save_behind_the_default_stream),
    TEST(push_behind_a_stream),
    TEST(save_where_no_context_is_current),
    TEST(check_finds_changed_memory),
    TEST(check_waits_for_what_is_queued),
    TEST(check_of_eager_memory),
    TEST(check_of_eager_memory_that_is_pushed),
    TEST(check_of_a_push),
    TEST(check_of_a_push_of_one_chunk),
    TEST(checked_push_waits_for_its_fence),
    TEST(views_of_device_memory),
    TEST(views_that_are_pushed),
    TEST(memory_is_given_back),
    TEST(range_grows_in_place),
    TEST(quiet_daemon),
    TEST(quiet_push),
    TEST(two_devices),
    TEST(two_trainers_on_one_device),
    TEST(restore_behind_a_stream),
    TEST(daemon_without_a_driver),
    TEST(daemon_with_the_stub),
    TEST(daemon_without_a_device),
    TEST(exclusive_device),
    TEST(mig_instance_of_the_program),
    TEST(mig_instance_of_others),
    TEST(whole_device_for_a_mig_instance),
    TEST(mig_instance_for_a_whole_device),
    TEST(daemon_dies_in_a_capture),
    TEST(daemon_dies_in_a_push),
    TEST(daemon_dies_in_a_held_save),
    TEST(program_spoils_its_context),
    TEST(fence_of_a_stuck_device),
};

int main(int argc, char **argv) { return tests_run(tests, ARRAY_SIZE(tests), argc, argv); }
