/* SPDX-License-Identifier: Apache-2.0 */
/* How daemons and programs end in order, and memory that the daemon may not read. */
#include "tests/functional/support.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#define WORDS 100000

/* SIGTERM: what is captured becomes LOCAL first; the slow parallel tier is not waited for. */
static void sigterm_drains_to_local(void) {
    configure(&(struct settings){.local = "delay_ms = 20", .parallel = "delay_ms = 400\ndepth = 1"});
    daemon_start();
    ckpt *c = job_open("stopped");
    uint64_t *words = malloc(WORDS * 8);
    words_fill(words, WORDS, 1);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    save_captured(c, 1);
    CHECK_IS(CKPT_PENDING, ckpt_test(c, 1, CKPT_LOCAL, CKPT_PART));
    process_signal(daemon_pid(), SIGTERM);
    EVENTUALLY(daemon_logged("stopping"));
    int status = daemon_gone();
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(file_exists(test_path("local/stopped/1/1/rank-00000.json")));
    CHECK(!file_exists(test_path("sock")));
    CHECK(ckpt_save(c, 2, NULL) < 0);
    configure(&(struct settings){0});
    daemon_start();
    EVENTUALLY(ckpt_save(c, 3, NULL) == CKPT_OK);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 3, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    c = job_open("stopped");
    ckpt_restore *r = restore_of(c, 3);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* While it stops it takes no new run and no new save, and says so. */
static void stopping_daemon_refuses(void) {
    configure(&(struct settings){.local = "delay_ms = 100\ndepth = 1", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("late"), *other = NULL;
    uint64_t *words = calloc(WORDS, 8);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    save_captured(c, 1);
    process_signal(daemon_pid(), SIGTERM);
    EVENTUALLY(daemon_logged("stopping"));
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.open_timeout_ms = 300;
    int opened = ckpt_open("other", &options, &other);
    CHECK(opened == CKPT_E_STOPPING || opened == CKPT_E_TIMEOUT); /* it tries until its deadline */
    CHECK_IS(CKPT_E_STOPPING, ckpt_save(c, 2, NULL));
    int status = daemon_gone();
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(file_exists(test_path("local/late/1/1/rank-00000.json")));
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* A file system that never gets done: the grace ends the wait; a second signal at once. */
static void stop_has_a_grace(void) {
    for (int twice = 0; twice <= 1; twice++) {
        configure(&(struct settings){.daemon = twice ? "stop_grace_s = 600" : "stop_grace_s = 0.5",
                                     .local = "delay_ms = 600000",
                                     .no_parallel = true});
        daemon_start();
        pid_t pid = daemon_pid();
        ckpt *c = NULL;
        struct ckpt_open_options options;
        CKPT_INIT(options);
        options.open_timeout_ms = 300;
        CHECK(ckpt_open("hung", &options, &c) < 0); /* the claim hangs in the tier, the call does not */
        process_signal(pid, SIGTERM);
        EVENTUALLY(daemon_logged("stopping"));
        if (twice)
            process_signal(pid, SIGTERM);
        int status = daemon_gone();
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* Close fences, so that the memory may go; the version goes on to storage without the program. */
static void close_without_fence(void) {
    daemon_start();
    uint64_t *words = malloc(WORDS * 8);
    for (uint64_t step = 1; step <= 5; step++) {
        ckpt *c = job_open("closer");
        words_fill(words, WORDS, step);
        CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
        CHECK_OK(ckpt_save(c, step, NULL));
        CHECK_OK(ckpt_close(c));
        memset(words, 0xee, WORDS * 8);
        c = job_open("closer"); /* finishes what the daemon still holds before it decides */
        ckpt_restore *r = restore_step(c, step);
        restore_words_check(r, "words", WORDS, step);
        ckpt_restore_close(r);
        CHECK_OK(ckpt_close(c));
    }
    CHECK_OK(ckpt_close(NULL));
    free(words);
}

static void idle_daemon_on_demand_ends(void) {
    configure(&(struct settings){.daemon = "idle_exit_s = 0.5"});
    allow_on_demand();
    ckpt *c = job_open("idle");
    uint64_t *words = malloc(WORDS * 8);
    words_fill(words, WORDS, 1);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    pid_t first = daemon_pid();
    CHECK(first > 0);
    pause_ms(1000); /* longer than the idle time: a client that is connected keeps it */
    save_captured(c, 1);
    CHECK(daemon_pid() == first);
    CHECK_OK(ckpt_close(c));
    EVENTUALLY(daemons_on_demand() == 0);
    CHECK(!file_exists(test_path("sock")));
    c = job_open("idle");
    CHECK(daemon_pid() != first);
    ckpt_restore *r = restore_step(c, 1);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    EVENTUALLY(daemons_on_demand() == 0);
    free(words);
}

/* Everything by way of the library's own thread: the same bytes. */
static void push_gives_the_same_bytes(void) {
    enum { ROWS = 300, COLUMNS = 700 };
    setenv("CKPT_FORCE_PUSH", "1", 1);
    configure(&(struct settings){.local = "keep = 100\nbacklog = 100", .no_parallel = true});
    daemon_start();
    uint64_t *words = malloc(WORDS * 8), shape[2] = {COLUMNS, ROWS};
    uint32_t *matrix = malloc(ROWS * COLUMNS * 4), *restored = malloc(ROWS * COLUMNS * 4), counter = 0;
    int64_t transposed[2] = {4, COLUMNS * 4};
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
        matrix[i] = i;
    ckpt *c = job_open("push");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U32;
    shard.name = "transposed";
    shard.data = matrix;
    shard.dimensions = 2;
    shard.shape = shape;
    shard.stride = transposed;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    uint64_t one = 1;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U32;
    shard.name = "counter";
    shard.data = &counter;
    shard.dimensions = 1;
    shard.shape = &one;
    shard.flags = CKPT_EAGER;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "inline";
    options.state_size = 6;
    enum { STEPS = 10 };
    for (uint64_t step = 1; step <= STEPS; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        counter = (uint32_t)step;
        CHECK_OK(ckpt_save(c, step, &options));
        counter = 99;
    }
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.push == 1);
    for (uint64_t step = 1; step <= STEPS; step++) {
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        ckpt_restore *r = restore_of(c, step);
        restore_words_check(r, "words", WORDS, step);
        uint32_t count;
        CHECK_OK(restore_array(r, "counter", CKPT_U32, &count, 1));
        CHECK(count == step);
        struct ckpt_read read;
        CKPT_INIT(read);
        read.dtype = CKPT_U32;
        read.name = "transposed";
        read.data = restored;
        read.dimensions = 2;
        CHECK_OK(ckpt_restore_read(r, &read));
        for (uint32_t y = 0; y < COLUMNS; y++)
            for (uint32_t x = 0; x < ROWS; x++)
                CHECK(restored[y * ROWS + x] == x * COLUMNS + y);
        const void *state;
        uint64_t size;
        CHECK_OK(ckpt_restore_state(r, 0, &state, &size));
        CHECK(size == 6 && memcmp(state, "inline", 6) == 0);
        ckpt_restore_close(r);
    }
    CHECK_OK(ckpt_close(c));
    free(words);
    free(matrix);
    free(restored);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(sigterm_drains_to_local), TEST(stopping_daemon_refuses),    TEST(stop_has_a_grace),
        TEST(close_without_fence),     TEST(idle_daemon_on_demand_ends), TEST(push_gives_the_same_bytes),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
