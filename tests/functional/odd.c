/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What else a tier may hold, and how long: files of other programs and other times, clocks that jump, other
 * people's umask, versions that are pinned or being read, and a second daemon.
 */
#include "proto/digest.h"
#include "tests/functional/versions.h"
#include "tiers/catalog.h"
#include "tiers/layout.h"
#include "tiers/retention.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>

static void check_newest(ckpt *c, uint64_t step) {
    ckpt_restore *r = restore_step(c, step);
    restore_words_check(r, "words", WORDS, step);
    ckpt_restore_close(r);
}

/* ---- the user is told ---- */

struct rank {
    uint32_t rank;
    const char *run_id;
    _Atomic int *arrived;
};

static const char *tensor_of(uint32_t rank) { return rank ? "second" : "first"; }

static void meet(const struct rank *rank, int count) {
    ++*rank->arrived;
    EVENTUALLY(*rank->arrived >= count);
}

static void save_as_rank(void *argument) {
    const struct rank *rank = argument;
    ckpt *c = rank_open("told", rank->rank, 2, rank->run_id);
    CHECK_OK(ckpt_protect_array(c, tensor_of(rank->rank), CKPT_U64, words, WORDS));
    for (uint64_t step = 1; step <= 3; step++)
        save_words(c, step);
    meet(rank, 2);
    CHECK_OK(ckpt_close(c));
}

static void resume_as_rank(void *argument) {
    const struct rank *rank = argument;
    ckpt *c = rank_open("told", rank->rank, 2, rank->run_id);
    CHECK_SAYS("step 3 cannot be used");
    CHECK_SAYS("step 2 instead");
    CHECK_SAYS("/told/1/3/");
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.generation == 2 && info.resume_generation == 1 && info.resume_step == 2);
    ckpt_restore *r = restore_step(c, 2);
    restore_words_check(r, tensor_of(0), WORDS, 2);
    restore_words_check(r, tensor_of(1), WORDS, 2);
    ckpt_restore_close(r);
    meet(rank, 4);
    CHECK_OK(ckpt_close(c));
}

static void run_two_ranks(void (*fn)(void *argument), const char *run_id, _Atomic int *arrived) {
    struct rank ranks[2];
    pid_t pids[2];
    for (uint32_t i = 0; i < 2; i++) {
        ranks[i] = (struct rank){.rank = i, .run_id = run_id, .arrived = arrived};
        pids[i] = process_start(fn, &ranks[i]);
    }
    process_join(pids[0]);
    process_join(pids[1]);
}

static bool logged_for_rank(uint32_t rank) {
    char ending[32], *log = file_read(test_path("log"), NULL), *rest = log, *line;
    bool found = false;
    snprintf(ending, sizeof ending, " rank=%u", rank);
    while ((line = strsep(&rest, "\n")))
        found |= strstr(line, "step 3 cannot be used") && strstr(line, ending);
    free(log);
    return found;
}

/* The newest version is damaged in every tier: each rank is told which file it is and where the run goes on, the log
 * has it for each, and ckptctl finds it. */
static void every_rank_is_told(void) {
    configure(&(struct settings){.local = "keep = 10", .parallel = "keep = 10"});
    daemon_start();
    _Atomic int *arrived = shared_memory(sizeof *arrived);
    run_two_ranks(save_as_rank, "first", arrived);
    EVENTUALLY(files_ending("local", "complete.json") == 3);
    daemon_stop_unused();
    CHECK(truncate(test_path("local/told/1/3/rank-00001.safetensors"), 1000) == 0);
    CHECK(unlink(test_path("parallel/told/1/3/rank-00000.json")) == 0);
    daemon_start();
    run_two_ranks(resume_as_rank, "second", arrived);
    CHECK(logged_for_rank(0) && logged_for_rank(1));
    daemon_stop_unused();
    ctl(1, "verify told 1/3 --root '%s' --root '%s'", test_path("local"), test_path("parallel"));
    CHECK(ctl_said("out", "rank 1") && ctl_said("out", "rank 0") && ctl_said("err", "--repair"));
    ctl(0, "verify told 1/3 --repair --root '%s' --root '%s'", test_path("local"), test_path("parallel"));
}

/* ---- another time, another program ---- */

/* Makes a manifest or an index say another format version, under digests that fit. */
static void set_format_version(const char *path, char digit) {
    size_t size, hex = 2 * DIGEST_SIZE, seal = strlen(",\"digest\":\"") + hex + strlen("\"}\n");
    size_t finish = strlen("{\"digest\":\"") + hex + strlen("\"}\n");
    char *text = file_read(path, &size), *at = strstr(text, "\"version\":"), digest_text[DIGEST_HEX_SIZE];
    struct digest digest;
    CHECK(at && size > finish);
    at[strlen("\"version\":")] = digit;
    size_t line = (size_t)(strchr(text, '\n') - text) + 1;
    digest_leaf(text, line - seal, &digest);
    digest_hex(&digest, digest_text);
    memcpy(text + line - hex - 3, digest_text, hex);
    digest_leaf(text, size - finish, &digest);
    digest_hex(&digest, digest_text);
    memcpy(text + size - hex - 3, digest_text, hex);
    file_write(path, text, size);
    free(text);
}

/* The newest version was written by a newer ckptd: it is not used, said to be so, and not touched by anybody. */
static void future_format_is_left_alone(void) {
    static const char *const roots[] = {"local", "parallel"}, *const files[] = {"rank-00000.json", "complete.json"};
    make_versions("future", 3, "");
    for (size_t i = 0; i < 4; i++)
        set_format_version(test_path("%s/future/1/3/%s", roots[i / 2], files[i % 2]), '9');
    configure(&(struct settings){.local = "keep = 1\ntrash_grace_s = 0", .parallel = "keep = 1\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = job_open("future");
    CHECK_SAYS("newer ckptd");
    CHECK_SAYS("step 2 instead");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    check_newest(c, 2);
    for (uint64_t step = 3; step <= 5; step++)
        save_words(c, step);
    EVENTUALLY(!file_exists(test_path("local/future/1/2")) && !file_exists(test_path("parallel/future/1/2")));
    EVENTUALLY(files_ending("local", "complete.json") == 2 && files_ending("parallel", "complete.json") == 2);
    check_newest(c, 5);
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    for (int repair = 0; repair < 2; repair++) {
        ctl(1, "verify future 1/3 %s --root '%s' --root '%s'", repair ? "--repair" : "", test_path("local"),
            test_path("parallel"));
        CHECK(ctl_said("out", "newer ckptd") && ctl_said("err", "only its ckptctl"));
    }
    /* Said to be of today's version again, it is whole. */
    for (size_t i = 0; i < 4; i++)
        set_format_version(test_path("%s/future/1/3/%s", roots[i / 2], files[i % 2]), '1');
    ctl(0, "verify future 1/3 --root '%s' --root '%s'", test_path("local"), test_path("parallel"));
    CHECK(files_ending("local", ".bad") == 0 && files_ending("parallel", ".bad") == 0);
}

static void set_time(const char *path, time_t seconds) {
    struct timespec both[2] = {{.tv_sec = seconds}, {.tv_sec = seconds}};
    if (utimensat(AT_FDCWD, path, both, AT_SYMLINK_NOFOLLOW) < 0)
        FAIL("%s: %s", path, strerror(errno));
}

static time_t walk_time;

static int set_walked_time(const char *path, const struct stat *status, int kind, struct FTW *place) {
    set_time(path, walk_time);
    return 0;
}

/* Newest is a number, not a time: the oldest version's files are from the future, the newest one's from 1970. */
static void swapped_times_mean_nothing(void) {
    make_versions("times", 4, "");
    for (unsigned step = 1; step <= 4; step++) {
        walk_time = step == 1 ? time(NULL) + 400 * 24 * 3600 : step == 4 ? 1000 : time(NULL) - step * 1000;
        nftw(test_path("local/times/1/%u", step), set_walked_time, 16, FTW_PHYS | FTW_DEPTH);
        nftw(test_path("parallel/times/1/%u", step), set_walked_time, 16, FTW_PHYS | FTW_DEPTH);
    }
    configure(&(struct settings){.local = "keep = 2\ntrash_grace_s = 0", .parallel = "keep = 2\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = open_protected("times");
    check_newest(c, 4);
    save_words(c, 5);
    EVENTUALLY(!file_exists(test_path("local/times/1/1")) && !file_exists(test_path("local/times/1/3")));
    EVENTUALLY(!file_exists(test_path("parallel/times/1/1")) && !file_exists(test_path("parallel/times/1/3")));
    EVENTUALLY(files_ending("local", "complete.json") == 2 && files_ending("parallel", "complete.json") == 2);
    check_newest(c, 5);
    CHECK_OK(ckpt_close(c));
}

enum { SOMEBODY = 12345 };

static int give_away(const char *path, const struct stat *status, int kind, struct FTW *place) {
    return lchown(path, SOMEBODY, SOMEBODY);
}

/* From root, to whom nothing is unreadable, to somebody else, if he may run the programs. */
static void become_somebody(void) {
    if (geteuid() != 0 || seteuid(SOMEBODY) < 0)
        return;
    bool may_run = faccessat(AT_FDCWD, getenv("CKPTD"), X_OK, AT_EACCESS) == 0 &&
                   faccessat(AT_FDCWD, getenv("CKPTCTL"), X_OK, AT_EACCESS) == 0;
    CHECK(seteuid(0) == 0);
    if (!may_run)
        return;
    nftw(test_path("."), give_away, 16, FTW_PHYS);
    CHECK(setgid(SOMEBODY) == 0 && setuid(SOMEBODY) == 0);
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0); /* that the daemon reads our memory, as before */
}

/* Left-overs go; what is not ours stays, does not disturb, and is told. */
static void strange_files(void) {
    static const char *const left[] = {"1/2/rank-00000.00000000000000aa.data.tmp",
                                       "1/2/rank-00000.00000000000000aa.json.tmp", "1/run.00000000000000aa.tmp"};
    become_somebody();
    make_versions("strange", 2, "");
    for (size_t i = 0; i < ARRAY_SIZE(left); i++)
        file_write(test_path("parallel/strange/%s", left[i]), "half", 4);
    CHECK(mkdir(test_path("parallel/strange/notes"), 0) == 0);
    CHECK(mkdir(test_path("parallel/strange/1/2/old"), 0) == 0);
    CHECK(mkdir(test_path("parallel/strange/1/5"), 0) == 0); /* which might be a version */
    CHECK(mkdir(test_path("parallel/somebody"), 0) == 0);    /* unreadable, but for root */
    CHECK(mkdir(test_path("parallel/strange/trash-1-70-00000000000000aa"), 0) == 0);
    CHECK(mkdir(test_path("parallel/strange/trash-1-71-00000000000000aa"), 0777) == 0);
    CHECK(symlink("nowhere", test_path("parallel/strange/7")) == 0);
    CHECK(mkfifo(test_path("parallel/strange/1/pipe"), 0600) == 0);
    file_write(test_path("parallel/README"), "mine", 4);
    file_write(test_path("parallel/strange/1/2/core"), "dump", 4);
    configure(&(struct settings){.local = "keep = 9\ntrash_grace_s = 0", .parallel = "keep = 9\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = job_open("strange");
    if (geteuid() != 0) {
        CHECK_SAYS("step 5 cannot be used");
        CHECK_SAYS("step 2 instead");
    }
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    check_newest(c, 2);
    EVENTUALLY(files_ending("parallel", ".tmp") == 0);
    CHECK(daemon_logged("could not be understood"));
    save_words(c, 3);
    EVENTUALLY(!file_exists(test_path("parallel/strange/trash-1-71-00000000000000aa")));
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    ctl(0, "ls strange --root '%s'", test_path("parallel"));
    CHECK(ctl_said("err", "cannot be read"));
    ctl(geteuid() == 0 ? 0 : 1, "verify strange --all --root '%s'", test_path("parallel"));
    CHECK(file_exists(test_path("parallel/README")) && file_exists(test_path("parallel/strange/1/pipe")));
    CHECK(file_exists(test_path("parallel/strange/notes")) && file_exists(test_path("parallel/strange/1/2/core")));
}

/* ---- clocks ---- */

static void shift_clocks(int64_t *shifts, int64_t wall, int64_t monotonic) {
    shifts[0] = wall;
    shifts[1] = monotonic;
}

static unsigned count_pins(const char *directory, char *ret_text, size_t size) {
    DIR *names = opendir(directory);
    unsigned count = 0;
    for (struct dirent *entry; names && (entry = readdir(names));)
        if (strncmp(entry->d_name, "pin-restore-", 12) == 0 && !strchr(entry->d_name, '~')) {
            char path[5000];
            snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
            FILE *file = fopen(path, "re");
            size_t length = file ? fread(ret_text, 1, size - 1, file) : 0;
            ret_text[length] = '\0';
            if (file)
                fclose(file);
            count++;
        }
    if (names)
        closedir(names);
    return count;
}

/* The daemon's clock is days behind, then ahead, and back: nothing depends on it but what it says of ages. Pins are
 * reckoned by the file system's clock, and renewed. */
static void clock_that_jumps(void) {
    enum { DAY = 24 * 3600 };
    const char *preload = getenv("CKPTD_CLOCK");
    if (!preload)
        FAIL("CKPTD_CLOCK does not name the library that shifts clocks");
    int fd = open(test_path("clock"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 16) == 0);
    int64_t *shifts = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(shifts != MAP_FAILED);
    close(fd);
    shift_clocks(shifts, -3 * DAY, 0);
    setenv("CKPTD_TEST_CLOCK", test_path("clock"), 1);
    configure(&(struct settings){.local = "keep = 2\ntrash_grace_s = 0", .parallel = "keep = 2\ntrash_grace_s = 0"});
    const char *options = getenv("ASAN_OPTIONS");
    char with[512];
    snprintf(with, sizeof with, "%s:verify_asan_link_order=0", options ? options : "");
    setenv("ASAN_OPTIONS", with, 1);
    daemon_start_with("LD_PRELOAD", preload);
    ckpt *c = open_protected("jump");
    save_words(c, 1);
    ckpt_restore *r = restore_of(c, 1);
    char first[64], later[64];
    bool pinned = false;
    struct tier_posix_options root = {.name = "parallel", .root = test_path("parallel"), .level = LEVEL_GLOBAL};
    struct tier *tier = NULL;
    CHECK(tier_posix_new(&root, &tier, NULL) == 0);
    CHECK(retention_pinned(tier, "jump", (struct version_id){1, 1}, &pinned) == 0 && pinned);
    CHECK(count_pins(test_path("local/jump/1/1"), later, sizeof later) == 1);
    CHECK(count_pins(test_path("parallel/jump/1/1"), first, sizeof first) == 1);
    static const int64_t jumps[] = {DAY, -DAY, 400 * DAY, 0};
    for (size_t i = 0; i < ARRAY_SIZE(jumps); i++) {
        shift_clocks(shifts, jumps[i], 0);
        save_words(c, 2 + i);
    }
    shift_clocks(shifts, 0, 300); /* the time of a renewal has come */
    EVENTUALLY(status_number("uptime_s") >= 300 &&
               count_pins(test_path("parallel/jump/1/1"), later, sizeof later) == 1 && strcmp(first, later) != 0);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    EVENTUALLY(count_pins(test_path("parallel/jump/1/1"), later, sizeof later) == 0);
    save_words(c, 6);
    EVENTUALLY(files_ending("local", "complete.json") == 2 && files_ending("parallel", "complete.json") == 2);
    struct ckpt_durable durable;
    CKPT_INIT(durable);
    CHECK_OK(ckpt_last_durable(c, CKPT_GLOBAL, &durable));
    CHECK(durable.step == 6);
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    tier_free(tier);
    munmap(shifts, 16);
    daemon_start();
    c = open_protected("jump");
    check_newest(c, 6);
    CHECK_OK(ckpt_close(c));
}

/* ---- whose files they are ---- */

static mode_t expected_mask;
static gid_t expected_group;
static unsigned seen_files, seen_directories;

static int check_mode(const char *path, const struct stat *status, int kind, struct FTW *place) {
    mode_t mode = status->st_mode & 07777, wanted = 0666 & ~expected_mask;
    if (place->level == 0)
        return 0;
    if (S_ISDIR(status->st_mode))
        wanted = (0777 & ~expected_mask) | S_ISGID;
    if (mode != wanted || status->st_gid != expected_group)
        FAIL("%s has mode %o and group %u, not %o and %u", path, mode, (unsigned)status->st_gid, wanted,
             (unsigned)expected_group);
    *(S_ISDIR(status->st_mode) ? &seen_directories : &seen_files) += 1;
    return 0;
}

/* A project directory hands its group down, and the umask of who starts the daemon says what the group may. */
static void umask_and_group(void) {
    static const mode_t masks[] = {002, 027, 077};
    expected_group = geteuid() == 0 ? 12345 : getegid();
    for (size_t i = 0; i < ARRAY_SIZE(masks); i++) {
        char job[16];
        snprintf(job, sizeof job, "mode-%zu", i);
        expected_mask = masks[i];
        for (int k = 0; k < 2; k++) {
            const char *project = test_path(k ? "parallel" : "local");
            CHECK(i > 0 || (mkdir(project, 0777) == 0 && chown(project, (uid_t)-1, expected_group) == 0));
            CHECK(chmod(project, 02775) == 0);
        }
        umask(masks[i]);
        daemon_start();
        ckpt *c = open_protected(job);
        save_words(c, 1);
        save_words(c, 2);
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
        const char *damaged = test_path("local/%s/1/2/rank-00000.safetensors", job);
        file_flip(damaged, 70000);
        ctl(0, "pin %s 1/1 --root '%s'", job, test_path("parallel"));
        ctl(0, "verify %s 1/2 --repair --root '%s' --root '%s'", job, test_path("local"), test_path("parallel"));
        umask(0);
        seen_files = seen_directories = 0;
        for (int k = 0; k < 2; k++)
            CHECK(nftw(test_path("%s/%s", k ? "parallel" : "local", job), check_mode, 16, FTW_PHYS) == 0);
        CHECK(seen_directories == 6 && seen_files > 12);
        umask(022);
    }
}

/* ---- how long they stay ---- */

/* Files that have no name any more and that the daemon holds all the same; memfds never had one. */
static unsigned deleted_files(void) {
    unsigned count = 0;
    const char *path = test_path("%s", "");
    char directory[64], target[PATH_MAX];
    snprintf(directory, sizeof directory, "/proc/%d/fd", daemon_pid());
    DIR *descriptors = opendir(directory);
    CHECK(descriptors);
    for (struct dirent *entry; (entry = readdir(descriptors));) {
        ssize_t length = readlinkat(dirfd(descriptors), entry->d_name, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        count += strncmp(target, path, strlen(path)) == 0 && strstr(target, " (deleted)");
    }
    closedir(descriptors);
    return count;
}

/* Retention, a copy given up, a repair under an open restore: the space of what is deleted is given back. */
static void no_descriptor_on_deleted_files(void) {
    make_versions("space", 3, "");
    file_flip(test_path("local/space/1/3/rank-00000.safetensors"), 70000);
    configure(&(struct settings){.local = "keep = 1\ntrash_grace_s = 0", .parallel = "keep = 1\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = open_protected("space");
    ckpt_restore *r = restore_step(c, 3);
    restore_words_check(r, "words", WORDS, 3);
    EVENTUALLY(file_exists(test_path("local/space/1/3/rank-00000.json.bad")));
    ctl(0, "verify space 1/3 --repair");
    restore_words_check(r, "words", WORDS, 3);
    ckpt_restore_close(r);
    EVENTUALLY(deleted_files() == 0);
    for (uint64_t step = 4; step <= 9; step++) {
        save_words(c, step);
        check_newest(c, step);
    }
    EVENTUALLY(files_ending("local", "complete.json") == 1 && files_ending("parallel", "complete.json") == 1);
    EVENTUALLY(deleted_files() == 0);
    CHECK(status_number("tiers.0.damage.set_aside") == 0); /* it went with its version */
    CHECK_OK(ckpt_close(c));
    EVENTUALLY(deleted_files() == 0);
}

/* What an operator pinned and what is being restored stays, in both tiers, also against `rm`. */
static void pinned_and_restored_stay(void) {
    configure(&(struct settings){
        .pool = "2M", .local = "keep = 1\ntrash_grace_s = 0", .parallel = "keep = 1\ntrash_grace_s = 0"});
    daemon_start();
    ckpt *c = open_protected("stay");
    save_words(c, 1);
    CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    EVENTUALLY(file_exists(test_path("local/stay/1/1/complete.json")));
    ctl(0, "pin stay 1/1");
    save_words(c, 2);
    EVENTUALLY(file_exists(test_path("local/stay/1/2/complete.json")));
    ckpt_restore *r = restore_of(c, 2);
    ctl(6, "rm stay 1/1");
    ctl(6, "rm stay 1/2 --force");
    CHECK(ctl_said("err", "pinned"));
    for (uint64_t step = 3; step <= 8; step++)
        save_words(c, step);
    EVENTUALLY(files_ending("local", "complete.json") == 3 && files_ending("parallel", "complete.json") == 3);
    restore_words_check(r, "words", WORDS, 2);
    ckpt_restore *pinned = restore_of(c, 1);
    restore_words_check(pinned, "words", WORDS, 1);
    ckpt_restore_close(pinned);
    ckpt_restore_close(r);
    EVENTUALLY(files_ending("local", "complete.json") == 2 && files_ending("parallel", "complete.json") == 2);
    ctl(0, "unpin stay 1/1");
    save_words(c, 9);
    EVENTUALLY(files_ending("local", "complete.json") == 1 && files_ending("parallel", "complete.json") == 1);
    check_newest(c, 9);
    CHECK_OK(ckpt_close(c));
}

/* As long as no newer version can become complete in a tier, the old one stays there. */
static void the_old_stays_until_the_new_is_complete(void) {
    configure(&(struct settings){
        .local = "keep = 1\ntrash_grace_s = 0",
        .parallel = "keep = 1\ntrash_grace_s = 0\nfault = link:3:eio+"}); /* after the run, and step 1 */
    daemon_start();
    ckpt *c = open_protected("old");
    save_words(c, 1);
    for (uint64_t step = 2; step <= 5; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        save_durable(c, step, CKPT_LOCAL);
        CHECK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_PART, PATIENCE_MS) == CKPT_OK);
        CHECK(file_exists(test_path("parallel/old/1/1/complete.json")));
    }
    CHECK(files_ending("parallel", "complete.json") == 1);
    CHECK_OK(ckpt_close(c));
    EVENTUALLY(file_exists(test_path("parallel/old/1/run-ended"))); /* else we, who live, hold the job */
    daemon_kill();
    configure(&(struct settings){.no_local = true});
    daemon_start();
    c = open_protected("old");
    ckpt_restore *r = NULL;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_STEP;
    options.step = 1;
    CHECK_OK(ckpt_restore_open(c, &options, &r));
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* ---- two daemons ---- */

static pid_t other_daemon_start(void) {
    char text[2048];
    snprintf(text, sizeof text,
             "[daemon]\nlog_level = debug\n[pool]\nsize = 16M\nchunk_size = 256K\nprefault = no\n"
             "[tier local]\nrole = local\npath = %s\nkeep = 1\ntrash_grace_s = 0\n"
             "[tier parallel]\nrole = parallel\npath = %s\nkeep = 1\ntrash_grace_s = 0\n",
             test_path("local"), test_path("parallel"));
    file_write(test_path("other.conf"), text, strlen(text));
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int log = open(test_path("other.log"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log >= 0 && dup2(log, 2) >= 0)
            execl(getenv("CKPTD"), "ckptd", "--config", test_path("other.conf"), "--socket", test_path("other"),
                  (char *)NULL);
        _exit(127);
    }
    EVENTUALLY(file_exists(test_path("other")));
    return pid;
}

#define PAIR_STEPS 20

struct pair {
    _Atomic int arrived;
    _Atomic uint64_t complete; /* rank 0 knows of it */
};

static struct pair *pair;

/* One rank of a run whose ranks are served by two daemons. Rank 0 keeps step 3 open, to the end. */
static void save_in_pair(void *argument) {
    uint32_t rank = *(const uint32_t *)argument;
    if (rank)
        setenv("CKPT_SOCKET", test_path("other"), 1);
    ckpt *c = rank_open("pair", rank, 2, "pair");
    ckpt_restore *r = NULL;
    CHECK_OK(ckpt_protect_array(c, tensor_of(rank), CKPT_U64, words, WORDS));
    for (uint64_t step = 1; step <= PAIR_STEPS; step++) {
        save_words(c, step);
        if (rank == 0 && step == 3)
            r = restore_of(c, 3);
        pair->arrived++;
        EVENTUALLY(pair->arrived >= 2 * (int)step); /* so that both know version 3 before it may go */
        if (rank == 0)
            pair->complete = step;
    }
    if (r) {
        restore_words_check(r, tensor_of(0), WORDS, 3);
        restore_words_check(r, tensor_of(1), WORDS, 3);
        ckpt_restore_close(r);
    }
    CHECK_OK(ckpt_close(c));
}

/* Two daemons, one user, the same two roots: both sweep them while an operator pins and unpins. What is pinned, what is
 * being restored and the newest version stay; all that stays is whole. */
static void two_daemons_on_the_same_roots(void) {
    configure(&(struct settings){
        .pool = "16M", .local = "keep = 1\ntrash_grace_s = 0", .parallel = "keep = 1\ntrash_grace_s = 0"});
    daemon_start();
    pid_t other = other_daemon_start();
    pair = shared_memory(sizeof *pair);
    static const uint32_t ranks[] = {0, 1};
    pid_t pids[2];
    for (int i = 0; i < 2; i++)
        pids[i] = process_start(save_in_pair, (void *)&ranks[i]);
    uint64_t pinned = 0;
    unsigned tries = 0;
    while (pair->complete < PAIR_STEPS) {
        char arguments[600];
        uint64_t step = pair->complete;
        snprintf(arguments, sizeof arguments, "%s pair 1/%llu --root '%s'", tries % 2 ? "unpin" : "pin",
                 (unsigned long long)(tries % 2 ? pinned : step), test_path("parallel"));
        if (step < 4 || (tries % 2 && !pinned)) {
            pause_ms(1);
            tries += tries % 2;
            continue;
        }
        if (pinned && step > PAIR_STEPS * 2 / 3)
            break; /* this pin stays */
        int status = run_ctl(arguments);
        CHECK(status == 0 || status == 3); /* it may be gone */
        if (!(tries % 2))
            pinned = status == 0 ? step : 0;
        else
            pinned = 0;
        tries++;
        if (tries % 2 && !pinned)
            tries--;
    }
    process_join(pids[0]);
    process_join(pids[1]);
    CHECK(pinned == 0 || file_exists(test_path("parallel/pair/1/%llu/complete.json", (unsigned long long)pinned)));
    CHECK(file_exists(test_path("parallel/pair/1/%d/complete.json", PAIR_STEPS)));
    ctl(0, "verify pair --all --root '%s'", test_path("parallel"));
    process_signal(other, SIGTERM);
    process_join(other);
    char *log = file_read(test_path("other.log"), NULL);
    CHECK(!strstr(log, "Sanitizer") && !strstr(log, "runtime error"));
    free(log);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(every_rank_is_told),
        TEST(future_format_is_left_alone),
        TEST(swapped_times_mean_nothing),
        TEST(strange_files),
        TEST(clock_that_jumps),
        TEST(umask_and_group),
        TEST(no_descriptor_on_deleted_files),
        TEST(pinned_and_restored_stay),
        TEST(the_old_stays_until_the_new_is_complete),
        TEST(two_daemons_on_the_same_roots),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
