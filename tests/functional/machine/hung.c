/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file system that stops answering (the server of a FUSE mount is stopped): its tier stands still, says so, and
 * holds what it was given; everybody else goes on, every call ends at its deadline, and when the server
 * goes on, everything that waited arrives and all memory comes back.
 */
#include "tests/functional/support.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#define WORDS (1 << 17) /* 1 MiB */
#define FUSE_TYPE 0x65735546
#define STUCK "tier_s = 1"

static uint64_t words[WORDS], others[WORDS];
static pid_t server;
static char mounted[4500];

/* Killing the server ends all requests that wait for it, of processes in uninterruptible sleep, too. */
static void server_end(void) {
    if (!server)
        return;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    umount2(mounted, MNT_DETACH);
    server = 0;
}

static bool is_mounted(void) {
    struct statfs status;
    int ended;
    if (waitpid(server, &ended, WNOHANG) == server) {
        server = 0;
        test_skip("FUSE file systems are not possible here");
    }
    return statfs(mounted, &status) == 0 && (uint32_t)status.f_type == FUSE_TYPE;
}

static void server_start(void) {
    const char *program = getenv("FUSE_PASSTHROUGH");
    fflush(NULL);
    server = fork();
    CHECK(server >= 0);
    if (server == 0) {
        if (!freopen(test_path("fuse.log"), "we", stderr))
            _exit(126);
        execl(program, "fuse-passthrough", test_path("source"), mounted, (char *)NULL);
        _exit(127);
    }
    EVENTUALLY(is_mounted());
}

static void mount_fuse(const char *directory) {
    if (!getenv("FUSE_PASSTHROUGH"))
        test_skip("libfuse3 was not there when this was built");
    mounts_begin();
    snprintf(mounted, sizeof mounted, "%s", test_path("%s", directory));
    CHECK(mkdir(mounted, 0755) == 0 && mkdir(test_path("source"), 0755) == 0);
    test_at_end(server_end);
    server_start();
}

static void hang(void) {
    int status;
    process_signal(server, SIGSTOP);
    CHECK(waitpid(server, &status, WUNTRACED) == server && WIFSTOPPED(status));
}

static void unhang(void) { process_signal(server, SIGCONT); }

static ckpt *open_protected(const char *job) { return words_open(job, words, WORDS); }

static void save(ckpt *c, uint64_t step, uint32_t level) {
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    words_fill(words, WORDS, step);
    save_durable(c, step, level);
}

static void check_step(ckpt *c, uint64_t step) { words_check_step(c, step, WORDS, step); }

static bool complains(unsigned tier, const char *about) {
    char key[32];
    snprintf(key, sizeof key, "tiers.%u.last_error", tier);
    char *error = status_text(key);
    bool found = strstr(error, about);
    free(error);
    return found;
}

static int64_t tier_number(unsigned tier, const char *what) {
    char key[64];
    snprintf(key, sizeof key, "tiers.%u.%s", tier, what);
    return status_number(key);
}

/* Nobody holds any memory but as a cache. */
static void memory_comes_back(void) {
    EVENTUALLY(status_number("pool.reserved") == 0);
    EVENTUALLY(status_number("pool.used") == status_number("pool.cached"));
}

static void all_is_well_again(unsigned tier) {
    EVENTUALLY(tier_number(tier, "stuck_workers") == 0);
    EVENTUALLY(tier_number(tier, "pending_parts") == 0);
    memory_comes_back();
}

static int open_within(const char *job, uint64_t timeout_ms, ckpt **ret_ckpt) {
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.open_timeout_ms = timeout_ms;
    return ckpt_open(job, &options, ret_ckpt);
}

/* It cannot open, and is told of the cause: in time, unless the machine is very busy. */
static bool refused(const char *job, const char *cause) {
    ckpt *c = NULL;
    CHECK(open_within(job, 500, &c) < 0);
    return strstr(ckpt_strerror_last(), cause);
}

static void parallel_hangs(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.local = "keep = 20", .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job"), *other = open_protected("other"), *late = NULL;
    save(c, 1, CKPT_GLOBAL);
    save(other, 1, CKPT_GLOBAL);
    hang();
    for (uint64_t step = 2; step <= 8; step++) {
        save(c, step, CKPT_LOCAL);
        save(other, step, CKPT_LOCAL);
    }
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_wait(c, 8, CKPT_GLOBAL, CKPT_VERSION, 100));
    EVENTUALLY(tier_number(1, "stuck_workers") > 0 && complains(1, "a worker is stuck there"));
    check_step(c, 8);
    check_step(c, 3);
    CHECK(tier_number(0, "stuck_workers") == 0 && tier_number(0, "errors") == 0);
    /* Who decides about runs does not answer: nobody can begin one, and is told so. */
    uint64_t begin = now_ms();
    CHECK(open_within("late", 100, &late) < 0);
    CHECK(now_ms() - begin < 10000);
    EVENTUALLY(refused("late", "tier parallel"));
    save(c, 9, CKPT_LOCAL);
    unhang();
    CHECK_OK(ckpt_wait(c, 9, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_OK(ckpt_wait(other, 8, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    all_is_well_again(1);
    EVENTUALLY(open_within("late", 10000, &late) == CKPT_OK);
    check_step(c, 9);
    CHECK_OK(ckpt_close(c));
    CHECK_OK(ckpt_close(other));
    CHECK_OK(ckpt_close(late));
}

/* More saves than the pool could hold, were it not for the tier that still works. */
static void local_hangs(void) {
    mount_fuse("local");
    configure(&(struct settings){.pool = "8M", .local = "allow_network = yes", .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job"), *late = NULL;
    save(c, 1, CKPT_GLOBAL);
    EVENTUALLY(tier_number(0, "pending_parts") == 0);
    hang();
    for (uint64_t step = 2; step <= 30; step++)
        save(c, step, CKPT_GLOBAL);
    EVENTUALLY(tier_number(0, "stuck_workers") > 0 && complains(0, "a worker is stuck there"));
    check_step(c, 30);
    CHECK(tier_number(1, "errors") == 0);
    /* What begins now looks at every tier first. None of these takes a worker of the other tier. */
    for (int i = 0; i < 6; i++)
        CHECK(open_within("late", 50, &late) < 0);
    EVENTUALLY(refused("late", "tier local"));
    save(c, 31, CKPT_GLOBAL);
    unhang();
    all_is_well_again(0);
    save(c, 32, CKPT_GLOBAL);
    EVENTUALLY(file_exists(test_path("source/job/1/32/complete.json")));
    EVENTUALLY(open_within("late", 10000, &late) == CKPT_OK);
    CHECK_OK(ckpt_close(late));
    CHECK_OK(ckpt_close(c));
}

/* A version that is complete in all tiers, and in no memory: of a daemon before this one. */
static ckpt *from_the_files(void) {
    daemon_start();
    ckpt *c = open_protected("job");
    CHECK_OK(ckpt_protect_array(c, "others", CKPT_U64, others, WORDS));
    words_fill(others, WORDS, 100);
    save(c, 1, CKPT_GLOBAL);
    EVENTUALLY(tier_number(0, "pending_parts") == 0);
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    daemon_start();
    return open_protected("job");
}

/* Nothing is written meanwhile: it is the reading that finds it out. The first read had opened the copy; the second
 * restore has to. */
static void reading_hangs(void) {
    mount_fuse("local");
    configure(&(struct settings){.local = "allow_network = yes", .deadlines = STUCK});
    ckpt *c = from_the_files();
    ckpt_restore *r = restore_of(c, 1), *second = restore_of(c, 1);
    restore_words_check(r, "others", WORDS, 100);
    hang();
    restore_words_check(r, "words", WORDS, 1);
    CHECK(tier_number(0, "stuck_workers") == 1 && complains(0, "a worker is stuck there"));
    restore_words_check(second, "words", WORDS, 1);
    CHECK(status_number("counters.chunks_bad") == 0 && tier_number(1, "errors") == 0);
    ckpt_restore_close(r);
    unhang();
    all_is_well_again(0);
    restore_words_check(second, "others", WORDS, 100);
    ckpt_restore_close(second);
    CHECK_OK(ckpt_close(c));
}

/* The same for the first read of a version. */
static void reading_begins_and_hangs(void) {
    mount_fuse("local");
    configure(&(struct settings){.local = "allow_network = yes", .deadlines = STUCK});
    ckpt *c = from_the_files();
    ckpt_restore *r = restore_of(c, 1);
    hang();
    restore_words_check(r, "words", WORDS, 1);
    CHECK(tier_number(0, "stuck_workers") == 1 && complains(0, "a worker is stuck there"));
    ckpt_restore_close(r);
    unhang();
    all_is_well_again(0);
    CHECK_OK(ckpt_close(c));
}

/* No other tier has it: the error says which one should. */
static void reading_the_only_copy_hangs(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.no_local = true, .deadlines = STUCK});
    ckpt *c = from_the_files();
    ckpt_restore *r = restore_of(c, 1);
    hang();
    CHECK_IS(CKPT_E_TIMEOUT, restore_array(r, "words", CKPT_U64, words, WORDS));
    CHECK_SAYS("tier parallel");
    unhang();
    all_is_well_again(0);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* The version is chosen among those of the tier that answers. */
static void restore_opens_and_hangs(void) {
    mount_fuse("local");
    configure(&(struct settings){.local = "allow_network = yes", .deadlines = STUCK});
    ckpt *c = from_the_files();
    hang();
    ckpt_restore *r = restore_of(c, 1);
    CHECK(tier_number(0, "stuck_workers") == 1 && complains(0, "a worker is stuck there"));
    CHECK(daemon_logged("it was not looked at"));
    restore_words_check(r, "words", WORDS, 1);
    unhang();
    all_is_well_again(0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void restore_of_the_only_tier_hangs(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.no_local = true, .deadlines = STUCK});
    ckpt *c = from_the_files();
    ckpt_restore *r = NULL;
    hang();
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_restore_open(c, NULL, &r));
    CHECK_SAYS("tier parallel");
    unhang();
    all_is_well_again(0);
    r = restore_step(c, 1);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* A daemon that has nothing in memory is asked, first of all `first`. */
static void ask_without_local(void (*first)(ckpt *c)) {
    mount_fuse("local");
    configure(&(struct settings){.local = "allow_network = yes", .deadlines = STUCK});
    daemon_start();
    ckpt *c = rank_open("job", 0, 1, "run");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    save(c, 1, CKPT_GLOBAL);
    save(c, 2, CKPT_GLOBAL);
    EVENTUALLY(tier_number(0, "pending_parts") == 0);
    daemon_kill();
    daemon_start();
    EVENTUALLY(ckpt_test(c, 1, CKPT_GLOBAL, CKPT_VERSION) == CKPT_OK); /* once it has connected again */
    hang();
    first(c);
    CHECK(tier_number(0, "stuck_workers") == 1 && complains(0, "a worker is stuck there"));
    unhang();
    all_is_well_again(0);
    CHECK_OK(ckpt_close(c));
}

static void ask_for_a_level(ckpt *c) { CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS)); }

static void ask_for_versions(ckpt *c) {
    struct ckpt_version_entry *versions;
    size_t count;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    CHECK(count == 2 && versions[0].levels == 1u << CKPT_GLOBAL);
    ckpt_versions_free(versions);
}

static void waiting_hangs(void) { ask_without_local(ask_for_a_level); }

static void listing_hangs(void) { ask_without_local(ask_for_versions); }

/* Each tier is looked at when a run begins: it cannot, and is told which one it is. */
static void opening_hangs(void) {
    mount_fuse("local");
    configure(&(struct settings){.local = "allow_network = yes", .deadlines = STUCK});
    ckpt *c = from_the_files(), *late = NULL;
    hang();
    CHECK(open_within("late", 800, &late) < 0); /* less than it takes to find out */
    CHECK_SAYS(test_path("local"));
    EVENTUALLY(tier_number(0, "stuck_workers") == 1 && complains(0, "a worker is stuck there"));
    EVENTUALLY(refused("later", "tier local"));
    ckpt_restore *r = restore_of(c, 1);
    restore_words_check(r, "others", WORDS, 100);
    ckpt_restore_close(r);
    unhang();
    all_is_well_again(0);
    EVENTUALLY(open_within("late", 10000, &late) == CKPT_OK);
    CHECK_OK(ckpt_close(late));
    CHECK_OK(ckpt_close(c));
}

/* What has left memory is to go on to the other tier, and the one that has it does not answer: that is waited for, and
 * nobody says it of the other tier. */
static void source_of_a_drain_hangs(void) {
    enum { STEPS = 12 };
    mount_fuse("local");
    configure(&(struct settings){.pool = "4M",
                                 .local = "allow_network = yes\nkeep = 100",
                                 .parallel = "rate_mib_s = 4\nbacklog = 100",
                                 .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job");
    for (uint64_t step = 1; step <= STEPS; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        EVENTUALLY(ckpt_save(c, step, NULL) == CKPT_OK);
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    }
    CHECK(tier_number(1, "pending_parts") > 4); /* more than memory has room for */
    hang();
    EVENTUALLY(tier_number(0, "stuck_workers") > 0);
    uint64_t waits = 1; /* some are still in memory */
    while (waits <= STEPS && ckpt_wait(c, waits, CKPT_GLOBAL, CKPT_VERSION, 7000) == CKPT_OK)
        waits++;
    CHECK(waits <= STEPS && ckpt_test(c, waits, CKPT_GLOBAL, CKPT_VERSION) == CKPT_PENDING);
    CHECK(tier_number(1, "stuck_workers") == 0 && tier_number(1, "errors") == 0);
    unhang();
    for (uint64_t step = 1; step <= STEPS; step++)
        CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    CHECK(status_number("counters.parts_failed") == 0);
    all_is_well_again(0);
    CHECK_OK(ckpt_close(c));
}

/* Where there is no other tier, saves are skipped at their deadline once the pool is full. */
static void only_tier_hangs(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.pool = "4M", .no_local = true, .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job");
    save(c, 1, CKPT_GLOBAL);
    hang();
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.busy_timeout_ms = 50;
    unsigned skipped = 0;
    uint64_t newest = 1;
    for (uint64_t step = 2; step <= 10; step++) {
        uint64_t begin = now_ms();
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        int r = ckpt_save(c, step, &options);
        CHECK(r == CKPT_OK || r == CKPT_SKIPPED);
        CHECK(now_ms() - begin < 10000);
        skipped += r == CKPT_SKIPPED;
        newest = r == CKPT_OK ? step : newest;
    }
    CHECK(skipped > 0 && newest > 1);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    EVENTUALLY(tier_number(0, "stuck_workers") > 0);
    CHECK(status_number("pool.reserved") > 0);
    unhang();
    CHECK_OK(ckpt_wait(c, newest, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    all_is_well_again(0);
    check_step(c, newest);
    save(c, 11, CKPT_GLOBAL);
    CHECK_OK(ckpt_close(c));
}

/* Directories that come with jobs hang, more of them than there are workers for names. */
static void directories_of_jobs_hang(void) {
    enum { COUNT = 12 };
    mount_fuse("scratch");
    configure(&(struct settings){.no_parallel = true, .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job"), *late = NULL;
    save(c, 1, CKPT_LOCAL);
    hang();
    for (int i = 0; i < COUNT; i++) {
        setenv("CKPT_DIR", test_path("scratch/%d", i), 1);
        CHECK(open_within("scratch", 20, &late) < 0);
    }
    unsetenv("CKPT_DIR");
    ckpt *second = open_protected("second"); /* with a registration */
    save(second, 1, CKPT_LOCAL);
    save(c, 2, CKPT_LOCAL);
    check_step(second, 1);
    unhang();
    setenv("CKPT_DIR", test_path("scratch/0"), 1);
    EVENTUALLY(open_within("scratch", 10000, &late) == CKPT_OK);
    CHECK_OK(ckpt_close(c));
    CHECK_OK(ckpt_close(second));
    CHECK_OK(ckpt_close(late));
}

/* The server dies and the file system is mounted again: the tier is found again. */
static void mounted_again(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.local = "keep = 20", .deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job");
    save(c, 1, CKPT_GLOBAL);
    server_end();
    save(c, 2, CKPT_LOCAL);
    EVENTUALLY(complains(1, "tier parallel"));
    server_start();
    save(c, 3, CKPT_GLOBAL);
    check_step(c, 3);
    CHECK_OK(ckpt_close(c));
}

/* A daemon that is killed leaves nobody behind who waits for the file system for ever. */
static void killed_while_it_hangs(void) {
    mount_fuse("parallel");
    configure(&(struct settings){.deadlines = STUCK});
    daemon_start();
    ckpt *c = open_protected("job");
    save(c, 1, CKPT_GLOBAL);
    hang();
    save(c, 2, CKPT_LOCAL);
    EVENTUALLY(tier_number(1, "stuck_workers") > 0);
    process_signal(daemon_pid(), SIGTERM); /* all is LOCAL: it need not wait */
    EVENTUALLY(daemon_logged("stopped: everything captured is LOCAL"));
    server_end();
    daemon_gone();
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(parallel_hangs),
        TEST(local_hangs),
        TEST(reading_hangs),
        TEST(reading_begins_and_hangs),
        TEST(reading_the_only_copy_hangs),
        TEST(restore_opens_and_hangs),
        TEST(restore_of_the_only_tier_hangs),
        TEST(waiting_hangs),
        TEST(listing_hangs),
        TEST(opening_hangs),
        TEST(source_of_a_drain_hangs),
        TEST(only_tier_hangs),
        TEST(directories_of_jobs_hang),
        TEST(mounted_again),
        TEST(killed_while_it_hangs),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
