/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The nth operation of a tier fails, for every n until nothing fires any more, over opening a job, a save, its
 * drains, and restoring it: with each error, once or from then on, in either tier. What the program is told is
 * success, or an error that names the tier and the cause; and a version that was reported durable is there for
 * the next daemon, whose tiers are well, byte for byte.
 *
 * One daemon per n, and one that is well for all of a series. Every NTH_STRIDEth n is tried, from a random one on;
 * 1: all of them.
 */
#include "tests/functional/support.h"

#include <inttypes.h>
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STRIDE = 100, LASTING_STRIDE = 1000 };
#else
enum { STRIDE = 12, LASTING_STRIDE = 60 };
#endif
enum { WORDS = 60000, NTH_MAX = 4000, LASTING_MS = 1500 };

static const char *const causes[][2] = {{"eio", "Input/output error"},
                                        {"enospc", "No space left on device"},
                                        {"edquot", "quota"},
                                        {"short", NULL},
                                        {"flip", NULL}};

static struct attempt { /* told by its process */
    char job[64];
    const char *tier;
    size_t cause;
    uint64_t fired;
    bool lasting;
    bool local, global; /* the version was reported durable */
    bool restored;
} * attempts;
static uint64_t words[WORDS];

/* Success, or the tier's name and the cause. */
static bool told(const struct attempt *attempt, int result, const char *what) {
    if (result >= 0)
        return result == CKPT_OK;
    const char *cause = causes[attempt->cause][1];
    /* Who waits for what cannot come about is told by the status why. */
    CLEANUP(freep)
    char *sentence = result == CKPT_E_TIMEOUT ? status_text(strcmp(attempt->tier, "local") == 0 ? "tiers.0.last_error"
                                                                                                : "tiers.1.last_error")
                                              : strdup(ckpt_strerror_last());
    if (!strstr(sentence, attempt->tier) || (cause && !strstr(sentence, cause)))
        FAIL("%s of %s (%s, %s): %s, which does not name them", what, attempt->job, attempt->tier,
             causes[attempt->cause][0], sentence);
    return false;
}

/* True if it was restored, and then each byte is right. */
static bool restore(const struct attempt *attempt, ckpt *c) {
    ckpt_restore *r;
    int opened = ckpt_restore_open(c, NULL, &r);
    if (!told(attempt, opened, "opening the version"))
        return false;
    memset(words, 0, sizeof words);
    bool read = told(attempt, restore_array(r, "words", CKPT_U64, words, WORDS), "reading");
    if (read)
        words_check(words, WORDS, 1);
    ckpt_restore_close(r);
    return read;
}

static ckpt *try_open(const struct attempt *attempt) {
    ckpt *c = NULL;
    for (int tries = 0; tries < 3; tries++) /* the claim may be what fails */
        if (told(attempt, ckpt_open(attempt->job, NULL, &c), "opening the job"))
            return c;
    return NULL;
}

static void save_and_restore(void *argument) {
    struct attempt *attempt = argument;
    ckpt *c = try_open(attempt);
    if (c) {
        uint64_t patience_ms = attempt->lasting || !causes[attempt->cause][1] ? LASTING_MS : PATIENCE_MS;
        words_fill(words, WORDS, 1);
        CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
        save_captured(c, 1);
        attempt->local = told(attempt, ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, patience_ms), "LOCAL");
        attempt->global = told(attempt, ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, patience_ms), "GLOBAL");
        attempt->restored = restore(attempt, c);
        CHECK_OK(ckpt_close(c));
    }
    attempt->fired =
        (uint64_t)status_number(strcmp(attempt->tier, "local") == 0 ? "tiers.0.faults_fired" : "tiers.1.faults_fired");
}

/* A daemon whose tiers are well, and another process. What a tier has lied about may be damaged; it is found. */
static void restore_what_was_durable(void *argument) {
    struct attempt *attempt = argument;
    bool lied = !causes[attempt->cause][1], durable = !lied && (attempt->local || attempt->global);
    ckpt *c = NULL;
    int opened = ckpt_open(attempt->job, NULL, &c);
    if (opened == CKPT_E_DAMAGED && !durable)
        return;
    CHECK_IS(CKPT_OK, opened);
    if (!restore(attempt, c) && durable)
        FAIL("%s was reported durable (%s%s), but nothing can be restored", attempt->job, attempt->local ? "LOCAL" : "",
             attempt->global ? " GLOBAL" : "");
    CHECK_OK(ckpt_close(c));
}

static void fail_nth(struct attempt *attempt, unsigned n, const char *lasting) {
    char fault[64];
    snprintf(fault, sizeof fault, "fault = any:%u:%s%s", n, causes[attempt->cause][0], lasting);
    bool local = strcmp(attempt->tier, "local") == 0;
    configure(&(struct settings){.log_level = "info",
                                 .local = local ? fault : NULL,
                                 .parallel = local ? NULL : fault,
                                 .deadlines = "settle_s = 1"});
    daemon_start();
    process_join(process_start(save_and_restore, attempt));
    daemon_kill();
}

/* How many n fired. */
static unsigned series(const char *tier, size_t cause, const char *lasting, unsigned stride) {
    static unsigned number;
    unsigned count = 0, fired = 0;
    number++;
    for (unsigned n = 1 + (unsigned)random_number(stride);; n += stride) {
        struct attempt *attempt = &attempts[count++];
        CHECK(count < NTH_MAX);
        *attempt = (struct attempt){.tier = tier, .cause = cause, .lasting = *lasting};
        snprintf(attempt->job, sizeof attempt->job, "job %u/%u", number, n);
        fail_nth(attempt, n, lasting);
        if (!attempt->fired)
            break;
        fired++;
    }
    struct attempt *last = &attempts[count - 1];
    CHECK(last->local && last->global && last->restored); /* nothing fired: nothing may have failed */
    configure(&(struct settings){.log_level = "info"});
    daemon_start();
    for (unsigned i = 0; i < count; i++)
        process_join(process_start(restore_what_was_durable, &attempts[i]));
    daemon_stop_unused();
    return fired;
}

static void every_nth(const char *lasting) {
    const char *given = getenv("NTH_STRIDE");
    unsigned stride = given ? (unsigned)strtoul(given, NULL, 10) : *lasting ? LASTING_STRIDE : STRIDE, fired = 0;
    attempts = shared_memory(NTH_MAX * sizeof *attempts);
    for (size_t cause = 0; cause < ARRAY_SIZE(causes); cause++) {
        unsigned some = causes[cause][1] ? stride : (stride + 3) / 4; /* reads and writes are fewer */
        fired += series("local", cause, lasting, some);
        fired += series("parallel", cause, lasting, some);
    }
    printf("             %u times the nth operation failed\n", fired);
}

static void once(void) { every_nth(""); }
static void from_then_on(void) { every_nth("+"); }

/* The same with a tier that is slow as well: nothing depends on how long an operation takes. */
static void slow(void) {
    configure(&(struct settings){.local = "delay_ms = 3", .parallel = "delay_ms = 7\nfault = write:2:eio"});
    attempts = shared_memory(sizeof *attempts);
    *attempts = (struct attempt){.tier = "parallel", .job = "slow"};
    daemon_start();
    ckpt *c = try_open(attempts);
    CHECK(c);
    words_fill(words, WORDS, 1);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    save_durable(c, 1, CKPT_GLOBAL);
    CHECK(restore(attempts, c));
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {TEST(once), TEST(from_then_on), TEST(slow)};
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
