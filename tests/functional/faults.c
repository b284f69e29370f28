/* SPDX-License-Identifier: Apache-2.0 */
/* Tiers that fail, and a daemon that dies at each point of a commit. */
#include "tests/functional/support.h"
#include "tiers/point.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#define WORDS 100000

static uint64_t words[WORDS];

static ckpt *open_protected(const char *job) { return words_open(job, words, WORDS); }

static void save_words(ckpt *c, uint64_t step) {
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    words_fill(words, WORDS, step);
    save_captured(c, step);
}

static void check_newest(ckpt *c, uint64_t step) {
    ckpt_restore *r = restore_step(c, step);
    restore_words_check(r, "words", WORDS, step);
    ckpt_restore_close(r);
}

/* Errors that pass are got over: the part is written anew under another name. */
static void one_error_is_retried(void) {
    static const char *const faults[] = {"write:2:eio",   "sync:1:eio",   "rename:1:eio", "write:1:enospc",
                                         "write:3:short", "create:1:eio", "sync:2:eio",   "rename:2:eio"};
    for (size_t i = 0; i < ARRAY_SIZE(faults); i++) {
        char local[64], job[16];
        snprintf(local, sizeof local, "fault = %s", faults[i]);
        snprintf(job, sizeof job, "retry-%zu", i);
        configure(&(struct settings){.local = local, .no_parallel = true});
        daemon_start();
        ckpt *c = NULL;
        EVENTUALLY(ckpt_open(job, NULL, &c) == CKPT_OK); /* the claim may be what fails */
        CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
        save_words(c, 1);
        CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
        check_newest(c, 1);
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
        EVENTUALLY(files_ending("local", ".tmp") == 0);
    }
}

/* A full disk: the job goes on, the wait and the status say which tier it is, the other tier has it all. */
static void full_disk(void) {
    configure(&(struct settings){.local = "fault = write:4:enospc+"});
    daemon_start();
    ckpt *c = open_protected("full");
    for (uint64_t step = 1; step <= 3; step++) {
        save_words(c, step);
        CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    }
    CHECK_OK(ckpt_wait(c, 3, CKPT_LOCAL, CKPT_PART, PATIENCE_MS)); /* GLOBAL is more than LOCAL */
    char *error = status_text("tiers.0.last_error");
    CHECK(strstr(error, "local") && strstr(error, "No space"));
    free(error);
    CHECK(status_number("tiers.0.errors") > 0);
    check_newest(c, 3);
    CHECK_OK(ckpt_close(c));
}

/* No tier works: nothing becomes durable, and everybody is told; the program is not harmed. */
static void every_write_fails(void) {
    configure(&(struct settings){.local = "fault = write:2:eio+", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("lost");
    save_words(c, 1);
    CHECK_IS(CKPT_E_IO, ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_SAYS("local");
    CHECK_OK(ckpt_save(c, 2, NULL));
    CHECK_SAYS("step 1");
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r;
    CHECK_IS(CKPT_NONE, ckpt_restore_open(c, NULL, &r));
    EVENTUALLY(status_number("counters.parts_failed") == 2);
    EVENTUALLY(status_number("pool.reserved") == 0);
    EVENTUALLY(files_ending("local", ".tmp") == 0);
    CHECK_OK(ckpt_close(c));
}

/* Every write stores half of what it was asked to: the last block is never whole, and the drain gives up. */
static void every_write_is_short(void) {
    configure(&(struct settings){.local = "fault = write:2:short+", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("short");
    save_words(c, 1);
    CHECK_IS(CKPT_E_IO, ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_SAYS("tier local: cannot write");
    CHECK_OK(ckpt_close(c));
}

/* A tier that flips bits on the way to the disk: the digest finds it, the next tier has the right ones. */
static void flipped_bits_are_never_restored(void) {
    configure(&(struct settings){.local = "fault = read:1:flip+\nkeep = 10"});
    daemon_start();
    ckpt *c = open_protected("flips");
    save_words(c, 1);
    CHECK_OK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    EVENTUALLY(daemon_logged("digest")); /* when it reads what it has written, to complete the version */
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    daemon_start();
    c = open_protected("flips");
    check_newest(c, 1);
    CHECK_OK(ckpt_close(c));
}

/* At each point of the commit, in the first version and in a later one, the daemon dies. Whatever is
 * listed afterwards restores byte for byte, and the program goes on. */
static void crash_at_every_commit_point(void) {
    allow_on_demand();
    configure(&(struct settings){.local = "keep = 100", .parallel = "keep = 100"});
    for (enum point point = 0; point <= POINT_COMPLETE_PUBLISHED; point++)
        for (unsigned nth = 1; nth <= 3; nth += 2) {
            char where[64], job[64];
            snprintf(where, sizeof where, "%s:%u", point_name(point), nth);
            snprintf(job, sizeof job, "crash-%d-%u", point, nth);
            unlink(test_path("sock"));
            daemon_start_with("CKPTD_CRASH_AT", where);
            ckpt *c = open_protected(job);
            uint64_t step = 1;
            int saved = CKPT_OK;
            for (; step <= 3 && saved == CKPT_OK; step++) {
                words_fill(words, WORDS, step);
                saved = ckpt_save(c, step, NULL);
                if (saved == CKPT_OK && ckpt_fence(c, CKPT_DEFAULT_TIMEOUT) == CKPT_OK)
                    ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS);
            }
            int status = daemon_gone();
            if (!WIFSIGNALED(status))
                FAIL("the daemon did not die at %s", where);
            CHECK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT) <= 0);
            words_fill(words, WORDS, ++step);
            EVENTUALLY(ckpt_save(c, step, NULL) == CKPT_OK); /* which starts the next daemon */
            CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
            CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
            struct ckpt_version_entry *versions;
            size_t count;
            CHECK_OK(ckpt_versions(c, &versions, &count));
            CHECK(count > 0 && versions[0].step == step);
            for (size_t i = 0; i < count; i++) {
                ckpt_restore *r = restore_of(c, versions[i].step);
                restore_words_check(r, "words", WORDS, versions[i].step);
                ckpt_restore_close(r);
            }
            ckpt_versions_free(versions);
            EVENTUALLY(files_ending("local", ".tmp") == 0); /* GLOBAL may come before LOCAL */
            CHECK_OK(ckpt_close(c));
            daemon_stop();
        }
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(one_error_is_retried),
        TEST(full_disk),
        TEST(every_write_fails),
        TEST(every_write_is_short),
        TEST(flipped_bits_are_never_restored),
        TEST(crash_at_every_commit_point),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
