/* SPDX-License-Identifier: Apache-2.0 */
/* Trainers and daemons are killed and stopped at random moments; each side goes on with what it has. */
#include "tests/functional/support.h"

#include <signal.h>
#include <stdlib.h>

#define WORDS 100000

struct progress {
    _Atomic uint64_t captured; /* the newest step whose fence has returned, plus 1 */
    _Atomic uint64_t restored; /* step that the last trainer began after, plus 1 */
    _Atomic int go_on;
};

struct trainer {
    struct progress *progress;
    bool shared, forks;
};

/* Resumes, checks what it resumes from, and saves until it is killed. */
static void train(void *argument) {
    const struct trainer *trainer = argument;
    struct progress *progress = trainer->progress;
    uint64_t *words, step = 0;
    ckpt *c = job_open("trainer");
    if (trainer->shared)
        CHECK_OK(ckpt_alloc(c, WORDS * 8, (void **)&words));
    else
        words = malloc(WORDS * 8);
    ckpt_restore *r;
    int found = ckpt_restore_open(c, NULL, &r);
    if (found == CKPT_OK) {
        struct ckpt_restore_info info;
        CKPT_INIT(info);
        CHECK_OK(ckpt_restore_get_info(r, &info));
        restore_words_check(r, "words", WORDS, info.step);
        ckpt_restore_close(r);
        step = info.step + 1;
    } else {
        CHECK_IS(CKPT_NONE, found);
    }
    progress->restored = step;
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    if (trainer->forks) { /* workers inherit everything and outlive us for a while */
        for (int i = 0; i < 3; i++)
            if (fork() == 0) {
                for (unsigned k = 0; k < 300; k++)
                    pause_ms(10);
                _exit(0);
            }
    }
    for (;; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        if (step)
            progress->captured = step;
        words_fill(words, WORDS, step);
        int saved = ckpt_save(c, step, NULL);
        if (saved == CKPT_SKIPPED)
            step--;
        else
            CHECK_OK(saved);
    }
}

static void kill_trainers(bool shared, bool forks) {
    enum { ROUNDS = 8 };
    daemon_start();
    struct progress *progress = shared_memory(sizeof *progress);
    struct trainer trainer = {.progress = progress, .shared = shared, .forks = forks};
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t before = progress->captured;
        pid_t pid = process_start(train, &trainer);
        EVENTUALLY(progress->captured > before + 2);
        pause_ms((unsigned)random_number(100));
        process_kill(pid);
        /* Whoever opens next gets at least what was captured, unless newer ones stand in line before it. */
        ckpt *c = job_open("trainer");
        struct ckpt_info info;
        CKPT_INIT(info);
        CHECK_OK(ckpt_get_info(c, &info));
        CHECK(info.resumes);
        if (info.resume_step + 1 < progress->captured)
            FAIL("resumes at step %llu, but step %llu was captured", (unsigned long long)info.resume_step,
                 (unsigned long long)progress->captured - 1);
        ckpt_restore *r = restore_step(c, info.resume_step);
        restore_words_check(r, "words", WORDS, info.resume_step);
        ckpt_restore_close(r);
        CHECK_OK(ckpt_close(c));
    }
    EVENTUALLY(files_ending("local", ".tmp") == 0);
}

static void trainer_with_private_memory(void) { kill_trainers(false, false); }
static void trainer_with_shared_memory(void) { kill_trainers(true, false); }
static void trainer_with_forked_workers(void) {
    kill_trainers(false, true);
    for (int i = 0; i < 3 * 8; i++) /* the orphans are ours now */
        process_join(-1);
}

/* One save of much shared memory, killed right after the daemon accepted it. */
static void save_and_wait_for_death(void *argument) {
    struct progress *progress = argument;
    enum { COUNT = 16 << 20 };
    uint64_t *words;
    ckpt *c = job_open("accepted");
    CHECK_OK(ckpt_alloc(c, COUNT * 8, (void **)&words));
    words_fill(words, COUNT, 5);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, COUNT));
    CHECK_OK(ckpt_save(c, 5, NULL));
    progress->captured = 1;
    for (;;)
        pause_ms(1000);
}

static void accepted_save_of_shared_memory_completes(void) {
    configure(&(struct settings){.pool = "256M", .no_parallel = true});
    daemon_start();
    struct progress *progress = shared_memory(sizeof *progress);
    pid_t pid = process_start(save_and_wait_for_death, progress);
    while (!progress->captured)
        ;
    process_kill(pid);
    ckpt *c = job_open("accepted");
    ckpt_restore *r = restore_step(c, 5);
    restore_words_check(r, "words", 16 << 20, 5);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* Private memory goes with its process: what was not captured must not come to be. */
static void save_private_and_die(void *argument) {
    struct progress *progress = argument;
    enum { COUNT = 8 << 20 };
    ckpt *c = job_open("torn");
    uint64_t *words = malloc(COUNT * 8);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, COUNT));
    uint64_t step = progress->go_on;
    words_fill(words, COUNT, step);
    CHECK_OK(ckpt_save(c, step, NULL));
    kill(getpid(), SIGKILL);
}

static void death_in_the_middle_of_a_private_capture(void) {
    configure(&(struct settings){.pool = "256M", .no_parallel = true});
    daemon_start();
    struct progress *progress = shared_memory(sizeof *progress);
    for (int round = 1; round <= 10; round++) {
        progress->go_on = round;
        pid_t pid = process_start(save_private_and_die, progress);
        EVENTUALLY(kill(pid, 0) == 0);
        process_gone(pid);
        ckpt *c = job_open("torn");
        ckpt_restore *r;
        int found = ckpt_restore_open(c, NULL, &r);
        if (found != CKPT_NONE) {
            struct ckpt_restore_info info;
            CKPT_INIT(info);
            CHECK_OK(found);
            CHECK_OK(ckpt_restore_get_info(r, &info));
            restore_words_check(r, "words", 8 << 20, info.step);
            ckpt_restore_close(r);
        }
        CHECK_OK(ckpt_close(c));
    }
}

/* The daemon is killed again and again while a trainer saves; each call returns in time, and the library
 * starts the next daemon by itself. */
static void daemon_killed_at_random(void) {
    enum { ROUNDS = 8 };
    allow_on_demand();
    configure(&(struct settings){.daemon = "idle_exit_s = 600", .local = "keep = 3", .no_parallel = true});
    uint64_t *words = malloc(WORDS * 8), step = 0, kept = 0;
    ckpt *c = job_open("survivor");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t end = now_ms() + random_number(80);
        do {
            ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
            words_fill(words, WORDS, ++step);
            ckpt_save(c, step, NULL);
        } while (now_ms() < end);
        pid_t before = daemon_pid();
        CHECK(before > 0);
        daemon_kill();
        uint64_t begin = now_ms();
        ckpt_fence(c, 5000);
        CHECK(now_ms() - begin < 6000);
        begin = now_ms();
        int saved;
        do {
            ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
            words_fill(words, WORDS, ++step);
            saved = ckpt_save(c, step, NULL);
            CHECK(saved == CKPT_OK || saved == CKPT_E_UNREACHABLE || saved == CKPT_E_TIMEOUT || saved == CKPT_SKIPPED);
            if (saved == CKPT_OK)
                saved = ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
            CHECK(saved != CKPT_E_TIMEOUT);
        } while (saved != CKPT_OK && now_ms() - begin < PATIENCE_MS);
        CHECK_OK(saved);
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
        CHECK(daemon_pid() != before);
        kept = step;
        EVENTUALLY(files_ending("local", ".tmp") == 0); /* leftovers were reaped when the rank came back */
    }
    CHECK_OK(ckpt_close(c));
    c = job_open("survivor");
    ckpt_restore *r = restore_step(c, kept);
    restore_words_check(r, "words", WORDS, kept);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(words);
}

/* A daemon that stands still: no call outlives its deadline by much, the program's bytes are its own. */
static void daemon_that_stands_still(void) {
    daemon_start();
    uint64_t *words = malloc(WORDS * 8);
    ckpt *c = job_open("patient");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    words_fill(words, WORDS, 1);
    save_durable(c, 1, CKPT_GLOBAL);
    process_signal(daemon_pid(), SIGSTOP);
    uint64_t begin = now_ms();
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.busy_timeout_ms = 100;
    CHECK_OK(ckpt_save(c, 2, &options)); /* room was kept for it */
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_fence(c, 200));
    CHECK(ckpt_save(c, 3, &options) < 0);
    CHECK(ckpt_fence(c, 200) <= 0);
    words_fill(words, WORDS, 3);
    CHECK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, 200) < 0);
    CHECK(ckpt_test(c, 1, CKPT_GLOBAL, CKPT_VERSION) < 0);
    if (now_ms() - begin > 30000)
        FAIL("the calls took %llu ms", (unsigned long long)(now_ms() - begin));
    process_signal(daemon_pid(), SIGCONT);
    EVENTUALLY(ckpt_save(c, 4, NULL) == CKPT_OK);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 4, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore *r = restore_step(c, 4);
    restore_words_check(r, "words", WORDS, 3);
    ckpt_restore_close(r);
    struct ckpt_version_entry *versions;
    size_t count;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    for (size_t i = 0; i < count; i++)
        CHECK(versions[i].step != 2 && versions[i].step != 3);
    ckpt_versions_free(versions);
    CHECK_OK(ckpt_close(c));
    free(words);
}

struct starters {
    _Atomic int ready, go;
    uint32_t count;
};
struct start {
    struct starters *starters;
    uint32_t rank;
};

static void open_at_once(void *argument) {
    const struct start *start = argument;
    start->starters->ready++;
    while (!start->starters->go)
        ;
    uint64_t word = start->rank;
    char name[16];
    ckpt *c = rank_open("together", start->rank, start->starters->count, "run");
    snprintf(name, sizeof name, "rank %u", start->rank);
    CHECK_OK(ckpt_protect_array(c, name, CKPT_U64, &word, 1));
    save_captured(c, 1);
    CHECK_OK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_OK(ckpt_close(c));
}

/* All start the daemon; one daemon serves them all. */
static void start_together(uint32_t count) {
    allow_on_demand();
    struct starters *starters = shared_memory(sizeof *starters);
    struct start starts[10];
    pid_t pids[10];
    starters->count = count;
    for (uint32_t i = 0; i < count; i++) {
        starts[i] = (struct start){starters, i};
        pids[i] = process_start(open_at_once, &starts[i]);
    }
    EVENTUALLY(starters->ready == (int)count);
    starters->go = 1;
    for (uint32_t i = 0; i < count; i++)
        process_join(pids[i]);
    EVENTUALLY(daemons_on_demand() == 1);
}

static void two_ranks_start_the_daemon(void) { start_together(2); }
static void ten_ranks_start_the_daemon(void) { start_together(10); }

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(trainer_with_private_memory),
        TEST(trainer_with_shared_memory),
        TEST(trainer_with_forked_workers),
        TEST(accepted_save_of_shared_memory_completes),
        TEST(death_in_the_middle_of_a_private_capture),
        TEST(daemon_killed_at_random),
        TEST(daemon_that_stands_still),
        TEST(two_ranks_start_the_daemon),
        TEST(ten_ranks_start_the_daemon),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
