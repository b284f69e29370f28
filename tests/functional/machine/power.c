/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The power goes, again and again, on a disk that loses what was not flushed (crash-disk.h), while crews
 * (crew.h) save through two tiers on it. When it is back, the file system has recovered as it can; all
 * complete versions must be whole, what was reported durable must be there, or newer, and the crews go on from
 * it and compare every byte. TORTURE_SECONDS is how long.
 */
#include "tests/functional/crew.h"
#include "tests/functional/machine/crash-disk.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SECONDS = 2 };
#else
enum { SECONDS = 5 };
#endif
enum { REQUESTS = 1500, LIES_MAX = 40 };

static unsigned cuts, verified;

static void write_configuration(void) {
    static const char *const codecs[] = {"raw", "lz4", "auto"};
    char text[9000];
    int length = snprintf(text, sizeof text,
                          "[pool]\nsize = 32M\nchunk_size = 256K\nprefault = no\n"
                          "[tier local]\nrole = local\npath = %s/local\ncodec = %s\ntrash_grace_s = 0\n"
                          "[tier parallel]\nrole = parallel\npath = %s/parallel\ncodec = %s\ntrash_grace_s = 0\n",
                          crash_disk_path(), codecs[random_number(3)], crash_disk_path(), codecs[random_number(3)]);
    file_write(test_path("ckptd.conf"), text, (size_t)length);
}

/* NULL: not even its root is left, which a disk that lies may come to. */
static struct tier *open_tier(const char *name, enum level level, bool must) {
    char root[4400];
    struct tier *tier;
    struct problem problem = PROBLEM_NONE;
    snprintf(root, sizeof root, "%s/%s", crash_disk_path(), name);
    const struct tier_posix_options options = {.name = name, .root = root, .level = level};
    int r = tier_posix_new(&options, &tier, &problem);
    if (r < 0 && must)
        FAIL("%s", problem_text(&problem, r));
    return r < 0 ? NULL : tier;
}

/* Everybody works until the power goes, and is killed before anybody could be told of what comes after. */
static void live_and_cut(void) {
    crash_disk_arm(1 + random_number(REQUESTS));
    daemon_launch_with("CKPTD_CRASH_AT", "");
    crews_round();
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_start(crew);
    EVENTUALLY((crews_reap(), crash_disk_is_out()));
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_kill(crew);
    process_signal(daemon_pid(), SIGKILL);
    crash_disk_thaw();
    daemon_gone();
    crash_disk_restart();
    cuts++;
}

static const char *any_mount_options(void) { return random_number(2) ? "" : "data=writeback"; }

static bool mount_and_verify(bool must) {
    bool mounted = crash_disk_mount(any_mount_options());
    if (!mounted && must)
        FAIL("the file system cannot be mounted any more");
    if (!mounted)
        return false;
    CLEANUP(tier_freep) struct tier *local = open_tier("local", LEVEL_LOCAL, must);
    CLEANUP(tier_freep) struct tier *parallel = open_tier("parallel", LEVEL_GLOBAL, must);
    if (!local || !parallel)
        return false;
    bool kept = must || !crews_lost(local, parallel);
    if (must)
        verified += crews_verify(local, parallel, 0);
    return kept;
}

static void report(void) {
    uint64_t counts[3];
    crash_disk_counts(counts);
    printf("             %u times the power went; %" PRIu64 " writes and flushes, %" PRIu64 " flushes, %" PRIu64
           " writes lost; %u versions verified, %" PRIu64 " restored and compared\n",
           cuts, counts[0], counts[1], counts[2], verified, crews_compared());
}

static void the_power_goes(void) {
    const char *seconds = getenv("TORTURE_SECONDS");
    uint64_t end_ms = now_ms() + (seconds ? strtoull(seconds, NULL, 10) : SECONDS) * 1000;
    crash_disk_start(false);
    write_configuration();
    crews_init();
    if (!crash_disk_mount(""))
        test_skip("ext4 cannot be mounted here");
    do {
        live_and_cut();
        mount_and_verify(true);
    } while (now_ms() < end_ms);
    daemon_start();
    crews_round();
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_start(crew);
    EVENTUALLY(crews_have_checked());
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_leave(crew);
    daemon_stop();
    report();
    crash_disk_stop();
}

/* The test of the test: a disk that lies about flushes loses what was reported, and that is found. */
static void a_disk_that_lies_is_found_out(void) {
    crash_disk_start(true);
    write_configuration();
    crews_init();
    bool kept = crash_disk_mount("");
    if (!kept)
        test_skip("ext4 cannot be mounted here");
    while (kept && cuts < LIES_MAX) {
        live_and_cut();
        kept = mount_and_verify(false);
    }
    report();
    CHECK(!kept);
    crash_disk_stop();
}

int main(int argc, char **argv) {
    const struct test tests[] = {TEST(the_power_goes), TEST(a_disk_that_lies_is_found_out)};
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
