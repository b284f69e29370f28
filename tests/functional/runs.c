/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of a job follow each other: who may have it, where they resume, what is damaged. */
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <signal.h>
#include <stdlib.h>

#define WORDS 200000

static uint64_t words[WORDS];

static ckpt *open_protected(const char *job) { return words_open(job, words, WORDS); }

static void save_words(ckpt *c, uint64_t step, uint64_t seed, uint32_t level) {
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    words_fill(words, WORDS, seed);
    save_durable(c, step, level);
}

static void check_newest(ckpt *c, uint64_t step, uint64_t seed) {
    ckpt_restore *r = restore_step(c, step);
    restore_words_check(r, "words", WORDS, seed);
    ckpt_restore_close(r);
}

static void no_version(void) {
    daemon_start();
    ckpt *c = open_protected("fresh");
    ckpt_restore *r = NULL;
    CHECK_IS(CKPT_NONE, ckpt_restore_open(c, NULL, &r));
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_STEP;
    options.step = 4;
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_restore_open(c, &options, &r));
    options.which = CKPT_RESTORE_EXACT;
    options.generation = 1;
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_restore_open(c, &options, &r));
    CHECK(!r);
    struct ckpt_version_entry *versions;
    size_t count = 1;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    CHECK(count == 0);
    ckpt_versions_free(versions);
    CHECK_OK(ckpt_close(c));
}

static void wait_everywhere(ckpt *c, uint64_t step, int expected) {
    for (uint32_t level = CKPT_CAPTURED; level <= CKPT_GLOBAL; level++) {
        CHECK_IS(expected, ckpt_test(c, step, level, CKPT_PART));
        CHECK_IS(expected, ckpt_wait(c, step, level, CKPT_VERSION, PATIENCE_MS));
    }
}

/* Steps that the daemon remembers no more, and those of a daemon before it: what their files say is the answer. */
static void what_is_forgotten_is_looked_up(void) {
    enum { STEPS = 270, KEPT = 50 }; /* 256 are remembered */
    configure(&(struct settings){.local = "keep = 1000\nbacklog = 1000\nworkers = 16",
                                 .parallel = "keep = 50\nbacklog = 1000\nworkers = 16\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = rank_open("forgotten", 0, 1, "run");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, 8));
    for (uint64_t step = 1; step <= STEPS; step++)
        save_captured(c, step);
    EVENTUALLY(files_ending("local", "complete.json") == STEPS && files_ending("parallel", "complete.json") == KEPT);
    CHECK_OK(ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_OK(ckpt_test(c, 3, CKPT_LOCAL, CKPT_PART));
    CHECK_OK(ckpt_test(c, 3, CKPT_CAPTURED, CKPT_PART));
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_wait(c, 3, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS)); /* not any more */
    CHECK_SAYS("step 3");
    CHECK_IS(CKPT_E_NOT_FOUND, ckpt_test(c, 3, CKPT_GLOBAL, CKPT_PART));
    wait_everywhere(c, STEPS + 1, CKPT_E_NOT_FOUND);
    ckpt_restore *r = restore_of(c, 2); /* now it is known, but not what became of its save */
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore_close(r);
    daemon_kill();
    daemon_start();
    EVENTUALLY(ckpt_test(c, STEPS - KEPT / 2, CKPT_GLOBAL, CKPT_PART) == CKPT_OK); /* once it has connected again */
    wait_everywhere(c, STEPS - KEPT / 2, CKPT_OK);
    CHECK_OK(ckpt_test(c, 1, CKPT_LOCAL, CKPT_PART));
    wait_everywhere(c, 0, CKPT_E_NOT_FOUND);
    CHECK_OK(ckpt_close(c));
}

/* A copy that is damaged is no answer. */
static void what_is_forgotten_and_damaged(void) {
    configure(&(struct settings){.no_parallel = true});
    daemon_start();
    ckpt *c = rank_open("damaged", 0, 1, "run");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, 8));
    save_durable(c, 1, CKPT_LOCAL);
    save_durable(c, 2, CKPT_LOCAL); /* the newest one is remembered in any case */
    daemon_kill();
    daemon_start();
    EVENTUALLY(ckpt_test(c, 1, CKPT_LOCAL, CKPT_VERSION) == CKPT_OK); /* once it has connected again */
    file_flip(test_path("local/damaged/1/1/complete.json"), 20);
    CHECK_OK(ckpt_test(c, 1, CKPT_LOCAL, CKPT_PART));
    CHECK_IS(CKPT_E_DAMAGED, ckpt_test(c, 1, CKPT_LOCAL, CKPT_VERSION));
    CHECK_SAYS("complete.json");
    file_flip(test_path("local/damaged/1/1/rank-00000.json"), 20);
    CHECK_IS(CKPT_E_DAMAGED, ckpt_wait(c, 1, CKPT_LOCAL, CKPT_PART, PATIENCE_MS));
    CHECK_SAYS("rank-00000.json");
    CHECK_OK(ckpt_close(c));
}

static void same_step_twice(void) {
    daemon_start();
    ckpt *c = open_protected("twice");
    save_words(c, 5, 5, CKPT_GLOBAL);
    words_fill(words, WORDS, 99);
    CHECK_IS(CKPT_ALREADY, ckpt_save(c, 5, NULL));
    CHECK_IS(CKPT_E_INVALID, ckpt_save(c, 4, NULL));
    CHECK_OK(ckpt_close(c));
    c = open_protected("twice");
    check_newest(c, 5, 5);
    CHECK_OK(ckpt_close(c));
}

/* A run that goes back to an older step overtakes the steps it has given up, not at once but with its
 * first version. */
static void older_step_then_forward(void) {
    configure(&(struct settings){.local = "keep = 10", .parallel = "keep = 10"});
    daemon_start();
    ckpt *c = open_protected("back");
    for (uint64_t step = 1; step <= 5; step++)
        save_words(c, step, step, CKPT_GLOBAL);
    CHECK_OK(ckpt_close(c));

    c = open_protected("back");
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.generation == 2 && info.resumes && info.resume_generation == 1 && info.resume_step == 5);
    words_check_step(c, 2, WORDS, 2);
    save_words(c, 3, 103, CKPT_GLOBAL);
    check_newest(c, 3, 103); /* after the first save: the greatest now */
    save_words(c, 4, 104, CKPT_GLOBAL);
    CHECK_OK(ckpt_close(c));

    c = open_protected("back");
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.resume_generation == 2 && info.resume_step == 4);
    check_newest(c, 4, 104);
    ckpt_restore *r = NULL;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_EXACT;
    options.generation = 1;
    options.step = 4;
    CHECK_OK(ckpt_restore_open(c, &options, &r));
    restore_words_check(r, "words", WORDS, 4);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void hold_job(void *argument) {
    _Atomic int *state = argument;
    ckpt *c = rank_open("held", 0, 1, "the-holder");
    *state = 1;
    while (*state == 1)
        pause_ms(1);
    CHECK_OK(ckpt_close(c));
}

static void hang_up_while_it_opens(const char *job, uint32_t rank, uint32_t world) {
    struct peer peer;
    peer_connect(&peer);
    peer_ask_open(&peer, job, rank, world);
    EVENTUALLY(file_exists(test_path("parallel/%s", job))); /* in the middle of the claim */
    peer_close(&peer);
    EVENTUALLY(file_exists(test_path("parallel/%s/1/run", job)));
}

static uint64_t generation_of(ckpt *c) {
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    return info.generation;
}

/* Who claims a run and hangs up before it is told is not in it, though its process lives on; and nobody else can be,
 * where the run has one rank only. Where it has more, another may have joined. */
static void claimer_hangs_up(void) {
    configure(&(struct settings){.no_local = true, .parallel = "delay_ms = 20"});
    daemon_start();
    hang_up_while_it_opens("alone", 0, 1);
    ckpt *c = job_open("alone");
    CHECK(generation_of(c) == 2 && file_exists(test_path("parallel/alone/1/run-ended")));
    CHECK_OK(ckpt_close(c));
    hang_up_while_it_opens("pair", 0, 2);
    c = rank_open("pair", 1, 2, "peer");
    ckpt *first = rank_open("pair", 0, 2, "peer");
    CHECK(generation_of(c) == 1 && generation_of(first) == 1);
    CHECK_OK(ckpt_close(c));
    CHECK_OK(ckpt_close(first));
}

static void second_run_is_refused(void) {
    configure(&(struct settings){.deadlines = "settle_s = 0.3"});
    daemon_start();
    _Atomic int *state = shared_memory(sizeof *state);
    pid_t holder = process_start(hold_job, (void *)state);
    EVENTUALLY(*state == 1);
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.run_id = "the-other";
    options.open_timeout_ms = 5000;
    ckpt *c = NULL;
    CHECK_IS(CKPT_E_HELD, ckpt_open("held", &options, &c));
    CHECK_SAYS("the-holder");
    char pid[16];
    snprintf(pid, sizeof pid, "%d", holder);
    CHECK_SAYS(pid);
    /* The same rank of the same run, from another process. */
    options.run_id = "the-holder";
    CHECK_IS(CKPT_E_HELD, ckpt_open("held", &options, &c));
    CHECK_OK(ckpt_open("another job", NULL, &c));
    CHECK_OK(ckpt_close(c));
    *state = 2;
    process_join(holder);
    options.run_id = "the-other";
    CHECK_OK(ckpt_open("held", &options, &c));
    CHECK_OK(ckpt_close(c));
    /* One that is killed does not hold it either. */
    *state = 0;
    holder = process_start(hold_job, (void *)state);
    EVENTUALLY(*state == 1);
    process_kill(holder);
    CHECK_OK(ckpt_open("held", &options, &c));
    CHECK_OK(ckpt_close(c));
}

struct part_of_run {
    const char *run_id;
    uint32_t rank;
    uint64_t seed;
    _Atomic int *saved;
};

static void save_one_part(void *argument) {
    const struct part_of_run *part = argument;
    ckpt *c = rank_open("mixed", part->rank, 2, part->run_id);
    CHECK_OK(ckpt_protect_array(c, part->rank ? "second" : "first", CKPT_U64, words, WORDS));
    words_fill(words, WORDS, part->seed);
    save_captured(c, 1);
    CHECK_OK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_PART, PATIENCE_MS));
    ++*part->saved;
    for (;;)
        pause_ms(1000);
}

/* The first run leaves a part of rank 0, the second one of rank 1, both of step 1: no version. */
static void parts_of_two_runs_never_mix(void) {
    daemon_start();
    struct part_of_run part = {.run_id = "first", .rank = 0, .seed = 1, .saved = shared_memory(4)};
    for (uint32_t i = 0; i < 2; i++) {
        part.run_id = i ? "second" : "first";
        part.rank = i;
        part.seed = i + 1;
        pid_t pid = process_start(save_one_part, &part);
        EVENTUALLY(*part.saved == (int)i + 1);
        process_kill(pid);
    }
    ckpt *c = rank_open("mixed", 0, 2, "third");
    ckpt_restore *r;
    CHECK_IS(CKPT_NONE, ckpt_restore_open(c, NULL, &r));
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.generation == 3 && !info.resumes);
    CHECK_OK(ckpt_close(c));
    CHECK(files_ending("parallel", "complete.json") == 0);
}

/* Three versions, in both tiers, and the daemon restarted, so that nothing is in memory. */
static void three_versions(const char *job) {
    configure(&(struct settings){.local = "keep = 10", .parallel = "keep = 10"});
    daemon_start();
    ckpt *c = open_protected(job);
    for (uint64_t step = 1; step <= 3; step++)
        save_words(c, step, step, CKPT_GLOBAL);
    EVENTUALLY(files_ending("local", "complete.json") == 3); /* GLOBAL may come before LOCAL */
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
}

static const char *data_file(const char *tier, const char *job, unsigned step) {
    return test_path("%s/%s/1/%u/rank-00000.safetensors", tier, job, step);
}

static void bit_flip_is_repaired_from_the_next_tier(void) {
    three_versions("flipped");
    file_flip(data_file("local", "flipped", 3), 700000);
    daemon_start();
    ckpt *c = open_protected("flipped");
    check_newest(c, 3, 3);
    CHECK(status_number("counters.chunks_bad") == 1);
    EVENTUALLY(file_exists(test_path("local/flipped/1/3/rank-00000.json.bad")));
    CHECK_OK(ckpt_close(c));
}

static void one_bit_in_both_tiers_is_an_error(void) {
    three_versions("worse");
    file_flip(data_file("local", "worse", 3), 700000);
    file_flip(data_file("parallel", "worse", 3), 700000);
    daemon_start();
    ckpt *c = open_protected("worse");
    ckpt_restore *r = restore_step(c, 3);
    uint64_t *restored = malloc(sizeof words);
    CHECK_IS(CKPT_E_DAMAGED, restore_array(r, "words", CKPT_U64, restored, WORDS));
    CHECK_SAYS("tensor words");
    CHECK_SAYS("rank-00000.safetensors");
    ckpt_restore_close(r);
    r = restore_of(c, 2);
    restore_words_check(r, "words", WORDS, 2);
    ckpt_restore_close(r);
    free(restored);
    CHECK_OK(ckpt_close(c));
}

static void damaged_newest_falls_back_with_a_warning(void) {
    three_versions("fallback");
    CHECK(truncate(data_file("local", "fallback", 3), 1000) == 0);
    CHECK(unlink(data_file("parallel", "fallback", 3)) == 0);
    daemon_start();
    ckpt *c = NULL;
    CHECK_OK(ckpt_open("fallback", NULL, &c));
    CHECK_SAYS("step 3");
    CHECK_SAYS("step 2");
    check_newest(c, 2, 2);
    CHECK_OK(ckpt_close(c));
}

static void none_usable_is_an_error(void) {
    three_versions("ruined");
    for (unsigned step = 1; step <= 3; step++) {
        CHECK(truncate(data_file("local", "ruined", step), 1000) == 0);
        size_t size;
        const char *manifest = test_path("parallel/ruined/1/%u/rank-00000.json", step);
        char *text = file_read(manifest, &size);
        text[size / 2] ^= 1;
        file_write(manifest, text, size);
        free(text);
        CHECK(unlink(data_file("parallel", "ruined", step)) == 0);
    }
    daemon_start();
    ckpt *c = NULL;
    CHECK_IS(CKPT_E_DAMAGED, ckpt_open("ruined", NULL, &c));
    CHECK_SAYS("ruined");
    CHECK(!c);
    c = job_open("not ruined");
    CHECK_OK(ckpt_close(c));
}

/* What lies in the tier, whole or torn, is never trusted: every file of the newest version in turn is
 * filled with rubbish; the job goes on from some version with right bytes, or is told. */
static void rubbish_in_every_file(void) {
    static const char *const files[] = {"rank-00000.safetensors", "rank-00000.json", "complete.json"};
    configure(&(struct settings){.local = "keep = 100", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("rubbish");
    save_words(c, 1, 1, CKPT_LOCAL);
    CHECK_OK(ckpt_close(c));
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        struct ckpt_info info;
        CKPT_INIT(info);
        c = open_protected("rubbish");
        CHECK_OK(ckpt_get_info(c, &info));
        CHECK(info.resumes);
        check_newest(c, info.resume_step, info.resume_step);
        uint64_t step = info.resume_step + 1;
        save_words(c, step, step, CKPT_LOCAL);
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
        uint8_t rubbish[5000];
        for (size_t k = 0; k < sizeof rubbish; k++)
            rubbish[k] = (uint8_t)random_number(256);
        file_write(test_path("local/rubbish/%llu/%llu/%s", (unsigned long long)info.generation,
                             (unsigned long long)step, files[i]),
                   rubbish, random_number(sizeof rubbish));
        daemon_start();
    }
    c = open_protected("rubbish");
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    check_newest(c, info.resume_step, info.resume_step);
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(no_version),
        TEST(what_is_forgotten_is_looked_up),
        TEST(what_is_forgotten_and_damaged),
        TEST(same_step_twice),
        TEST(older_step_then_forward),
        TEST(claimer_hangs_up),
        TEST(second_run_is_refused),
        TEST(parts_of_two_runs_never_mix),
        TEST(bit_flip_is_repaired_from_the_next_tier),
        TEST(one_bit_in_both_tiers_is_an_error),
        TEST(damaged_newest_falls_back_with_a_warning),
        TEST(none_usable_is_an_error),
        TEST(rubbish_in_every_file),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
