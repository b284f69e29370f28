/* SPDX-License-Identifier: Apache-2.0 */
/* Too little memory, slow tiers, how deep a version goes, and how long it stays. */
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <stdlib.h>

#define MIB_WORDS (1 << 17)

static uint64_t *protect_words(ckpt *c, size_t count) {
    uint64_t *words = calloc(count, 8);
    CHECK(words);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, count));
    return words;
}

static int save_with(ckpt *c, uint64_t step, uint32_t to, bool urgent, uint64_t busy_timeout_ms) {
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.to = to;
    options.urgent = urgent;
    options.busy_timeout_ms = busy_timeout_ms;
    return ckpt_save(c, step, &options);
}

static void busy_pool_skips_then_recovers(void) {
    enum { COUNT = 3 * MIB_WORDS };
    configure(&(struct settings){.pool = "4M", .local = "delay_ms = 50\ndepth = 1", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("busy");
    uint64_t *words = protect_words(c, COUNT);
    words_fill(words, COUNT, 1);
    save_captured(c, 1);
    uint64_t begin = now_ms();
    CHECK_IS(CKPT_SKIPPED, save_with(c, 2, 0, false, CKPT_NO_WAIT));
    CHECK(now_ms() - begin < 1500);
    words_fill(words, COUNT, 3); /* nothing of it is being read */
    begin = now_ms();
    CHECK_IS(CKPT_SKIPPED, save_with(c, 3, 0, false, 300));
    CHECK(now_ms() - begin >= 300);
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.skipped == 2 && info.saves == 1);
    CHECK(peer_trace_count(TRACE_SKIPPED, 2) == 1 && peer_trace_count(TRACE_SKIPPED, 3) == 1);
    CHECK(peer_trace_count(TRACE_WAIT, 3) == 1 && peer_trace_count(TRACE_CAPTURE, 3) == 0);
    EVENTUALLY(save_with(c, 3, 0, false, 1000) == CKPT_OK); /* a skipped step may be tried again */
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r = restore_step(c, 3);
    restore_words_check(r, "words", COUNT, 3);
    ckpt_restore_close(r);
    r = restore_of(c, 1);
    restore_words_check(r, "words", COUNT, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
}

static void urgent_waits(void) {
    enum { COUNT = 3 * MIB_WORDS };
    configure(&(struct settings){.pool = "4M", .local = "delay_ms = 30\ndepth = 1", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("urgent");
    uint64_t *words = protect_words(c, COUNT);
    words_fill(words, COUNT, 1);
    save_captured(c, 1);
    CHECK_IS(CKPT_SKIPPED, save_with(c, 2, 0, false, CKPT_NO_WAIT));
    CHECK_OK(save_with(c, 2, 0, true, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* An image of many times the pool goes through it, into both tiers, and comes back through it. */
static void image_larger_than_the_pool(void) {
    enum { COUNT = 60 * MIB_WORDS };
    configure(&(struct settings){.pool = "4M"});
    daemon_start();
    ckpt *c = job_open("window");
    uint64_t *words = protect_words(c, COUNT);
    for (uint64_t step = 1; step <= 2; step++) {
        words_fill(words, COUNT, step);
        save_captured(c, step);
        memset(words, 0xee, COUNT * 8ul);
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    }
    ckpt_restore *r = restore_step(c, 2);
    restore_words_check(r, "words", COUNT, 2);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    EVENTUALLY(files_ending("local", "complete.json") == 2 && files_ending("parallel", "complete.json") == 2);
    free(words);
}

/* The capture fills the pool at once, and then goes on as the tier makes room. */
static void a_window_stalls(void) {
    enum { COUNT = 2 * MIB_WORDS };
    configure(&(struct settings){.pool = "1M", .local = "delay_ms = 20\ndepth = 1", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("stall");
    uint64_t *words = protect_words(c, COUNT);
    words_fill(words, COUNT, 1);
    save_durable(c, 1, CKPT_LOCAL);
    CHECK(peer_trace_count(TRACE_STALL, 1) > 0 && peer_trace_count(TRACE_CAPTURE, 1) == 1);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* The slow tier gets what it can; versions in between are left out, the last one is not. */
static void backlog_supersedes(void) {
    enum { COUNT = 1000, STEPS = 20 };
    configure(&(struct settings){.local = "backlog = 100",
                                 .parallel = "delay_ms = 10\nbacklog = 2\nworkers = 1\nkeep = 100"});
    daemon_start();
    ckpt *c = job_open("backlog");
    uint64_t *words = protect_words(c, COUNT);
    for (uint64_t step = 1; step <= STEPS; step++) {
        words_fill(words, COUNT, step);
        save_captured(c, step);
    }
    unsigned skipped = 0, reached = 0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        int r = ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT);
        CHECK(r == CKPT_OK || r == CKPT_SKIPPED);
        skipped += r == CKPT_SKIPPED;
        reached += r == CKPT_OK;
        if (step == STEPS)
            CHECK_OK(r);
    }
    CHECK(skipped > 0 && reached > 1);
    CHECK(status_number("counters.parts_superseded") == skipped);
    ckpt_restore *r = restore_step(c, STEPS);
    restore_words_check(r, "words", COUNT, STEPS);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
}

static unsigned levels_of(ckpt *c, uint64_t step) {
    struct ckpt_version_entry *versions;
    size_t count;
    unsigned levels = 0;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    for (size_t i = 0; i < count; i++) {
        if (i)
            CHECK(versions[i].step < versions[i - 1].step);
        if (versions[i].step == step) {
            levels = versions[i].levels;
            CHECK(versions[i].world == 1 && versions[i].generation == 1 && versions[i].bytes > 0);
        }
    }
    ckpt_versions_free(versions);
    return levels;
}

static void cadence_of_levels(void) {
    configure(&(struct settings){.local = "keep = 10", .parallel = "keep = 10"});
    daemon_start();
    ckpt *c = job_open("levels");
    uint64_t *words = protect_words(c, 1000);
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.levels == (1 << CKPT_CAPTURED | 1 << CKPT_LOCAL | 1 << CKPT_GLOBAL));
    CHECK_OK(save_with(c, 1, CKPT_LOCAL, false, 0));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_IS(CKPT_SKIPPED, ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_IS(CKPT_SKIPPED, ckpt_test(c, 1, CKPT_GLOBAL, CKPT_PART));
    save_durable(c, 2, CKPT_GLOBAL);
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(save_with(c, 3, CKPT_CAPTURED, false, 0));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 3, CKPT_CAPTURED, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_IS(CKPT_SKIPPED, ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(save_with(c, 4, CKPT_LOCAL, false, 0));
    CHECK_OK(ckpt_wait(c, 4, CKPT_LOCAL, CKPT_PART, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 4, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK(levels_of(c, 1) == 1 << CKPT_LOCAL);
    CHECK(levels_of(c, 2) == (1 << CKPT_LOCAL | 1 << CKPT_GLOBAL));
    CHECK(levels_of(c, 4) == 1 << CKPT_LOCAL);
    struct ckpt_durable durable;
    CKPT_INIT(durable);
    CHECK_OK(ckpt_last_durable(c, CKPT_LOCAL, &durable));
    CHECK(durable.step == 4 && durable.generation == 1 && durable.age_ms < 60000);
    CHECK_OK(ckpt_last_durable(c, CKPT_GLOBAL, &durable));
    CHECK(durable.step == 2);
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_wait(c, 77, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK(!file_exists(test_path("parallel/levels/1/1")) && !file_exists(test_path("parallel/levels/1/4")));
    CHECK_OK(ckpt_close(c));
    /* What a later daemon finds in the tiers. */
    daemon_stop_unused();
    daemon_start();
    c = job_open("levels");
    CHECK_OK(ckpt_last_durable(c, CKPT_LOCAL, &durable));
    CHECK(durable.step == 4);
    CHECK_OK(ckpt_last_durable(c, CKPT_GLOBAL, &durable));
    CHECK(durable.step == 2);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* `keep` versions stay; one that is being restored stays as long as it is. */
static void retention(void) {
    enum { COUNT = 2 * MIB_WORDS };
    configure(&(struct settings){
        .pool = "5M", .local = "keep = 2\ntrash_grace_s = 0", .parallel = "keep = 3\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = job_open("keep");
    uint64_t *words = protect_words(c, COUNT);
    for (uint64_t step = 1; step <= 2; step++) {
        words_fill(words, COUNT, step);
        save_durable(c, step, CKPT_GLOBAL);
    }
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r = restore_of(c, 1);
    for (uint64_t step = 3; step <= 8; step++) {
        words_fill(words, COUNT, step);
        EVENTUALLY(ckpt_save(c, step, NULL) != CKPT_SKIPPED);
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    }
    EVENTUALLY(files_ending("local", "complete.json") == 3);
    restore_words_check(r, "words", COUNT, 1);
    ckpt_restore_close(r);
    words_fill(words, COUNT, 9);
    EVENTUALLY(ckpt_save(c, 9, NULL) != CKPT_SKIPPED);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 9, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    EVENTUALLY(files_ending("local", "complete.json") == 2);
    EVENTUALLY(files_ending("parallel", "complete.json") == 3);
    EVENTUALLY(levels_of(c, 9) && levels_of(c, 8) == (1 << CKPT_LOCAL | 1 << CKPT_GLOBAL));
    EVENTUALLY(levels_of(c, 7) == 1 << CKPT_GLOBAL && levels_of(c, 6) == 0 && levels_of(c, 1) == 0);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* Bytes that compress, bytes that do not, and both in one image, through every codec. */
static void codecs(void) {
    static const struct { const char *local, *parallel; } pairs[] = {{"raw", "lz4"}, {"lz4", "auto"}, {"auto", "raw"}};
    enum { COUNT = 3 * MIB_WORDS };
    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        char local[64], parallel[64];
        snprintf(local, sizeof local, "codec = %s", pairs[i].local);
        snprintf(parallel, sizeof parallel, "codec = %s", pairs[i].parallel);
        configure(&(struct settings){.local = local, .parallel = parallel});
        daemon_start();
        ckpt *c = job_open("codec");
        uint64_t *words = protect_words(c, COUNT), *noise = malloc(COUNT * 8ul), *restored = malloc(COUNT * 8ul);
        words_fill(words, COUNT, i);
        memset(words + COUNT / 2, 0, COUNT * 4ul);
        for (size_t k = 0; k < COUNT; k++)
            noise[k] = random_number(UINT64_MAX);
        CHECK_OK(ckpt_protect_array(c, "noise", CKPT_U64, noise, COUNT));
        save_durable(c, i + 1, CKPT_GLOBAL);
        CHECK_OK(ckpt_wait(c, i + 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
        for (int without_local = 0; without_local <= 1; without_local++) {
            configure(&(struct settings){.local = local, .parallel = parallel, .no_local = without_local});
            daemon_start();
            c = job_open("codec");
            ckpt_restore *r = restore_step(c, i + 1);
            CHECK_OK(restore_array(r, "words", CKPT_U64, restored, COUNT));
            CHECK(memcmp(words, restored, COUNT * 8ul) == 0);
            CHECK_OK(restore_array(r, "noise", CKPT_U64, restored, COUNT));
            CHECK(memcmp(noise, restored, COUNT * 8ul) == 0);
            ckpt_restore_close(r);
            CHECK_OK(ckpt_close(c));
            daemon_stop_unused();
        }
        free(words);
        free(noise);
        free(restored);
    }
    CHECK(files_ending("parallel", ".chunks") >= 1 && files_ending("parallel", ".safetensors") >= 1);
}

/* A raw part is a safetensors file to a reader that shares no code with us. */
static void raw_part_is_a_safetensors_file(void) {
    daemon_start();
    ckpt *c = job_open("file");
    uint64_t words[1000];
    words_fill(words, 1000, 1);
    CHECK_OK(ckpt_protect_array(c, "layer/0 weight", CKPT_U64, words, 1000));
    float halves[7] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f};
    CHECK_OK(ckpt_protect_array(c, "halves", CKPT_F32, halves, 7));
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "step one";
    options.state_size = 8;
    CHECK_OK(ckpt_save(c, 1, &options));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_close(c));
    char command[8192];
    snprintf(command, sizeof command, "python3 '%s/safetensors-check.py' '%s'", getenv("FUNCTIONAL_TESTS"),
             test_path("parallel/file/1/1/rank-00000.safetensors"));
    CHECK(system(command) == 0);
}

/* A tier's rate is that of the bytes that are written, not of those that they stand for. */
static void rate_is_that_of_encoded_bytes(void) {
    enum { BYTES = 64 << 20, RATE_MIB_S = 8 };
    char tier[64];
    snprintf(tier, sizeof tier, "codec = lz4\nrate_mib_s = %d", RATE_MIB_S);
    configure(&(struct settings){.pool = "128M", .chunk = "1M", .local = tier, .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("rate");
    uint64_t *words = calloc(BYTES / 8, 8);
    for (size_t at = 0; at < BYTES / 8; at += 2048) /* a quarter remains */
        words_fill(words + at, 512, at);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, BYTES / 8));
    uint64_t begin = now_ms();
    save_durable(c, 1, CKPT_LOCAL);
    uint64_t took = now_ms() - begin;
    if (took > (BYTES >> 20) * 1000 / RATE_MIB_S / 2)
        FAIL("%llu ms: as if they had been written as they are", (unsigned long long)took);
    CHECK_OK(ckpt_close(c));
    free(words);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(busy_pool_skips_then_recovers),
        TEST(urgent_waits),
        TEST(image_larger_than_the_pool),
        TEST(a_window_stalls),
        TEST(backlog_supersedes),
        TEST(cadence_of_levels),
        TEST(retention),
        TEST(codecs),
        TEST(raw_part_is_a_safetensors_file),
        TEST(rate_is_that_of_encoded_bytes),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
