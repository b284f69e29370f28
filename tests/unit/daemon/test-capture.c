/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Captures of private memory (our own process is the client) by one and by several workers: the image and
 * its digests are right, the word only ever moves to bytes that are in the pool, and a capture that fails
 * or is revoked in the middle ends without having moved it further.
 */
#include "daemon/part.h"
#include "tests/unit/daemon/unit.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define CHUNK_SIZE MIB(1)
#define BYTES (9 * MIB(1) + 12345)

struct fixture {
    struct config config;
    struct server server;
    struct peer *peer;
    uint8_t *memory; /* BYTES, a page that cannot be read behind them */
    struct set *set;
    struct part part;
    struct word_map *word;
    unsigned jobs, rounds; /* done; to be done at most */
};

static void make_memory(struct fixture *fixture) {
    size_t size = align_up(BYTES, POOL_PAGE);
    fixture->memory = mmap(NULL, size + POOL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(fixture->memory != MAP_FAILED);
    assert_int_equal(mprotect(fixture->memory + size, POOL_PAGE, PROT_NONE), 0);
    for (size_t at = 0; at < BYTES; at++) /* no two leaves are alike */
        fixture->memory[at] = (uint8_t)(at * 2654435761u >> 13);
}

/* `extra`: so many bytes more than can be read. */
static void make_set(struct fixture *fixture, uint64_t extra) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct area *areas[AREAS_MAX] = {0};
    const struct shard shard = {.name = "memory",
                                .name_length = 6,
                                .dtype = DTYPE_U8,
                                .contiguous = true,
                                .replica_count = 1,
                                .area = SHARDS_AREA_PRIVATE,
                                .address = (uintptr_t)fixture->memory,
                                .geometry = {.dims = 1, .shape = {BYTES + extra}, .extent = {BYTES + extra}}};
    const struct image_identity identity = {.job = "test", .world = 1};
    const struct set_options options = {.count = 1, .identity = &identity, .areas = areas};
    assert_int_equal(shards_writer_add(&writer, &shard, &problem), 0);
    assert_int_equal(set_new(writer.data, writer.size, &options, &fixture->set, &problem), 0);
    shards_writer_deinit(&writer);
    static const uint64_t nonce = 0x1234;
    fixture->set->nonce_address = (uintptr_t)&nonce;
    fixture->set->nonce = nonce;
}

static void next_job(struct part *part);

static void make_part(struct fixture *fixture) {
    struct part *part = &fixture->part;
    uint64_t size = image_size(&fixture->set->layout, 0);
    *part = (struct part){.server = &fixture->server, .word = fixture->word, .counter = 7, .chunk_size = CHUNK_SIZE};
    part->source = (struct source){.set = fixture->set, .peer = fixture->peer, .image_size = size};
    part->source.header = malloc(fixture->set->layout.data_start);
    part->chunk_count = (uint32_t)((size + CHUNK_SIZE - 1) / CHUNK_SIZE);
    part->chunks = calloc(part->chunk_count, sizeof *part->chunks);
    for (uint32_t i = 0; i < part->chunk_count; i++) {
        part->chunks[i].length = (uint32_t)min_u64(CHUNK_SIZE, size - (uint64_t)i * CHUNK_SIZE);
        assert_int_equal(pool_alloc(fixture->server.pool, CHUNK_SIZE, &part->chunks[i].buffer), 0);
        memset(part->chunks[i].buffer->data, 0xee, CHUNK_SIZE);
    }
    assert_int_equal(capture_init(&part->capture, part, next_job), 0);
    word_begin(fixture->word->page, part->counter);
}

static void setup(struct fixture *fixture, uint32_t threads, uint64_t extra) {
    int sockets[2];
    struct problem problem = PROBLEM_NONE;
    *fixture = (struct fixture){.config.capture_threads = threads, .rounds = UINT32_MAX};
    fixture->server.config = &fixture->config;
    assert_int_equal(loop_new("posix", &fixture->server.loop), 0);
    assert_int_equal(loop_group_new(fixture->server.loop, "capture", threads, threads, &fixture->server.capturers), 0);
    assert_int_equal(pool_new(fixture->server.loop, 2 * BYTES, false, &fixture->server.pool), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    assert_int_equal(peer_new(sockets[0], geteuid(), &fixture->peer, &problem), 0);
    close(sockets[0]);
    close(sockets[1]);
    assert_int_equal(word_map_new(&fixture->word), 0);
    make_memory(fixture);
    make_set(fixture, extra);
    make_part(fixture);
}

static void teardown(struct fixture *fixture) {
    struct part *part = &fixture->part;
    for (uint32_t i = 0; i < part->chunk_count; i++)
        pool_buffer_unref(part->chunks[i].buffer);
    free(part->chunks);
    free(part->source.header);
    capture_deinit(&part->capture);
    word_map_unref(fixture->word);
    set_unref(fixture->set);
    peer_unref(fixture->peer);
    munmap(fixture->memory, align_up(BYTES, POOL_PAGE) + POOL_PAGE);
    loop_group_free(fixture->server.capturers);
    pool_free(fixture->server.pool);
    loop_free(fixture->server.loop);
}

/* As part.c does, but with all buffers there from the beginning. */
static void next_job(struct part *part) {
    struct fixture *fixture = CONTAINER_OF(part, struct fixture, part);
    struct capture *capture = &part->capture;
    assert_int_equal(fixture->server.capturing, 0);
    part->captured += capture->result ? 0 : capture->count;
    if (capture->result || part->captured == part->chunk_count || ++fixture->jobs == fixture->rounds)
        return;
    uint32_t workers = capture_workers(part);
    capture_start(part, part->captured, (uint32_t)min_u64(CAPTURE_CHUNKS * workers, part->chunk_count - part->captured),
                  workers);
}

static void capture(struct fixture *fixture) {
    next_job(&fixture->part);
    assert_int_equal(loop_run(fixture->server.loop), 0);
}

static uint64_t watermark(const struct fixture *fixture) { return word_watermark(word_load(fixture->word->page)); }

/* Bytes [from, until) of the image, header left out, are in the pool. */
static bool in_pool(const struct fixture *fixture, uint64_t from, uint64_t until) {
    uint64_t begin = fixture->set->layout.data_start;
    for (uint64_t at = max_u64(from, begin), length; at < until; at += length) {
        length = min_u64(until - at, CHUNK_SIZE - at % CHUNK_SIZE);
        const uint8_t *data = fixture->part.chunks[at / CHUNK_SIZE].buffer->data;
        if (memcmp(data + at % CHUNK_SIZE, fixture->memory + (at - begin), length) != 0)
            return false;
    }
    return true;
}

static void check_digests(const struct fixture *fixture) {
    for (uint32_t i = 0; i < fixture->part.chunk_count; i++) {
        const struct chunk *chunk = &fixture->part.chunks[i];
        struct digest digest;
        digest_chunk(chunk->buffer->data, chunk->length, &digest);
        assert_true(digest_equal(&digest, &chunk->digest));
        for (size_t at = chunk->length; at < align_up(chunk->length, POOL_PAGE); at++)
            assert_int_equal(chunk->buffer->data[at], 0);
    }
}

/* Looks at the word all the time, as a client's fence may: it only grows, and what it says is so. */
struct watcher {
    const struct fixture *fixture;
    atomic_bool stop;
    uint64_t wrong;
};

static void *watch(void *argument) {
    struct watcher *watcher = argument;
    const struct fixture *fixture = watcher->fixture;
    uint64_t begin = fixture->set->layout.data_start, before = begin;
    while (!atomic_load(&watcher->stop)) {
        uint64_t now = watermark(fixture);
        watcher->wrong += now != 0 && now < before && before != begin;
        for (uint64_t at = before; at < now; at++)
            watcher->wrong +=
                fixture->part.chunks[at / CHUNK_SIZE].buffer->data[at % CHUNK_SIZE] != fixture->memory[at - begin];
        before = max_u64(before, now);
    }
    return NULL;
}

static void images_are_whole(void **state) {
    for (uint32_t threads = 1; threads <= 4; threads++)
        for (int round = 0; round < 2; round++) {
            struct fixture fixture;
            setup(&fixture, threads, 0);
            struct watcher watcher = {.fixture = &fixture};
            pthread_t thread;
            assert_int_equal(pthread_create(&thread, NULL, watch, &watcher), 0);
            capture(&fixture);
            atomic_store(&watcher.stop, true);
            pthread_join(thread, NULL);
            assert_int_equal(watcher.wrong, 0);
            assert_int_equal(fixture.part.capture.result, 0);
            assert_int_equal(watermark(&fixture), fixture.part.source.image_size);
            assert_true(in_pool(&fixture, 0, fixture.part.source.image_size));
            check_digests(&fixture);
            teardown(&fixture);
        }
}

/* The last page cannot be read: the error names the tensor, the word stays before it, and the part is not captured. */
static void memory_that_is_not_there(void **state) {
    for (uint32_t threads = 1; threads <= 4; threads++) {
        struct fixture fixture;
        setup(&fixture, threads, POOL_PAGE);
        capture(&fixture);
        assert_int_equal(fixture.part.capture.result, -EFAULT);
        assert_non_null(strstr(fixture.part.capture.problem.text, "memory"));
        assert_true(watermark(&fixture) < fixture.part.source.image_size);
        assert_true(in_pool(&fixture, 0, watermark(&fixture)));
        teardown(&fixture);
    }
}

static void a_revoked_capture_ends(void **state) {
    for (uint32_t threads = 1; threads <= 4; threads++) {
        struct fixture fixture;
        setup(&fixture, threads, 0);
        fixture.rounds = 2; /* the header's job, one with all workers */
        capture(&fixture);
        assert_int_equal(fixture.part.capture.result, 0);
        assert_true(watermark(&fixture) > 0 && watermark(&fixture) < fixture.part.source.image_size);
        assert_true(word_revoke(fixture.word->page, 7, fixture.part.source.image_size));
        fixture.rounds = UINT32_MAX;
        fixture.part.capture.count = 0; /* counted already */
        capture(&fixture);
        assert_int_equal(fixture.part.capture.result, -ECANCELED);
        assert_int_equal(watermark(&fixture), WORD_REVOKED);
        teardown(&fixture);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(images_are_whole),
        cmocka_unit_test(memory_that_is_not_there),
        cmocka_unit_test(a_revoked_capture_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
