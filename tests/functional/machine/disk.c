/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Disks as they are: full, over their quota, read-only, gone, too slow. Each time the program and the other
 * tier go on, the status tells the cause, and when the cause is gone the daemon uses the tier again by itself.
 */
#include "tests/functional/machine/loop-mount.h"
#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define WORDS (3 << 17) /* 3 MiB */

static uint64_t words[WORDS];

static ckpt *open_protected(const char *job) { return words_open(job, words, WORDS); }

static void save_global(ckpt *c, uint64_t step) {
    words_fill(words, WORDS, step);
    save_durable(c, step, CKPT_GLOBAL);
}

static bool local_complains(const char *about) {
    char *error = status_text("tiers.0.last_error");
    bool found = strstr(error, "tier local") && strstr(error, about);
    free(error);
    return found;
}

static bool in_tier(const char *tier, const char *job, unsigned step) {
    return file_exists(test_path("%s/%s/1/%u/complete.json", tier, job, step));
}

/* The local tier fails in that way: steps 2 and 3 become GLOBAL without it. */
static void goes_on_without_local(ckpt *c, const char *job, const char *about) {
    for (unsigned step = 2; step <= 3; step++) {
        save_global(c, step);
        CHECK(!in_tier("local", job, step));
    }
    EVENTUALLY(local_complains(about));
    CHECK(status_number("tiers.0.errors") > 0 && status_number("tiers.1.errors") == 0);
}

/* The cause is gone: step 4 reaches the local tier, and nothing is left of what failed. */
static void uses_local_again(ckpt *c, const char *job) {
    save_global(c, 4);
    EVENTUALLY(in_tier("local", job, 4));
    EVENTUALLY(files_ending("local", ".tmp") == 0);
    EVENTUALLY(status_number("pool.reserved") == 0);
    ckpt_restore *r = restore_step(c, 4);
    restore_words_check(r, "words", WORDS, 4);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* Leaves no room for an image. */
static void fill_local(void) {
    static uint8_t bytes[1 << 20];
    int fd = open(test_path("local/filler"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ssize_t written;
    CHECK(fd >= 0);
    do
        written = write(fd, bytes, sizeof bytes);
    while (written > 0);
    CHECK(written < 0 && (errno == ENOSPC || errno == EDQUOT));
    close(fd);
}

static void full(void) {
    mounts_begin();
    mount_memory("local", "size=10m");
    daemon_start();
    ckpt *c = open_protected("full");
    save_global(c, 1);
    EVENTUALLY(in_tier("local", "full", 1));
    fill_local();
    goes_on_without_local(c, "full", "No space left on device");
    CHECK(local_complains("free some space"));
    CHECK(unlink(test_path("local/filler")) == 0);
    uses_local_again(c, "full");
}

/* The same where there is no other tier: the save that failed is tried again, and is written when there is room. */
static void full_and_no_other(void) {
    mounts_begin();
    mount_memory("local", "size=10m");
    configure(&(struct settings){.local = "trash_grace_s = 0", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("alone");
    words_fill(words, WORDS, 1);
    save_durable(c, 1, CKPT_LOCAL);
    fill_local();
    words_fill(words, WORDS, 2);
    save_captured(c, 2);
    EVENTUALLY(local_complains("No space left on device"));
    CHECK(unlink(test_path("local/filler")) == 0);
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore *r = restore_step(c, 2);
    restore_words_check(r, "words", WORDS, 2);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void read_only(void) {
    mounts_begin();
    mount_memory("local", "size=30m");
    configure(&(struct settings){.local = "trash_grace_s = 0"});
    daemon_start();
    ckpt *c = open_protected("read-only");
    save_global(c, 1);
    EVENTUALLY(in_tier("local", "read-only", 1));
    EVENTUALLY(mount(NULL, test_path("local"), NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0); /* once no file is open */
    goes_on_without_local(c, "read-only", "mounted read-only");
    CHECK(mount(NULL, test_path("local"), NULL, MS_REMOUNT, NULL) == 0);
    uses_local_again(c, "read-only");
}

/* A user of whom the directory is taken away; root would not notice. */
static void save_as_another(void *argument) {
    _Atomic int *stage = argument;
    become_user(12345);
    ckpt *c = open_protected("denied");
    save_global(c, 1);
    *stage = 1;
    while (*stage != 2)
        pause_ms(2);
    goes_on_without_local(c, "denied", "Permission denied");
    CHECK(local_complains("owner and mode"));
    *stage = 3;
    while (*stage != 4)
        pause_ms(2);
    uses_local_again(c, "denied");
}

static void permission_lost(void) {
    if (geteuid() != 0)
        test_skip("only root can become another user");
    CHECK(chown(test_path("."), 12345, 12345) == 0);
    daemon_user(12345);
    daemon_start();
    _Atomic int *stage = shared_memory(sizeof *stage);
    pid_t pid = process_start(save_as_another, (void *)stage);
    EVENTUALLY(*stage == 1 && in_tier("local", "denied", 1));
    CHECK(chmod(test_path("local"), 0500) == 0 && chmod(test_path("local/denied/1"), 0500) == 0);
    *stage = 2;
    EVENTUALLY(*stage == 3);
    CHECK(chmod(test_path("local"), 0700) == 0 && chmod(test_path("local/denied/1"), 0700) == 0);
    *stage = 4;
    process_join(pid);
}

static void remove_tree(const char *directory) {
    char command[4500];
    snprintf(command, sizeof command, "rm -rf '%s'", test_path("%s", directory));
    CHECK(system(command) == 0);
}

/* Somebody tidied up: the daemon makes the directory again, as at its start. */
static void directory_removed(void) {
    daemon_start();
    ckpt *c = open_protected("removed");
    save_global(c, 1);
    EVENTUALLY(in_tier("local", "removed", 1));
    EVENTUALLY(status_number("tiers.0.pending_parts") == 0);
    remove_tree("local");
    save_global(c, 2);
    EVENTUALLY(in_tier("local", "removed", 2));
    CHECK(local_complains("was removed"));
    remove_tree("parallel");
    save_global(c, 3);
    EVENTUALLY(in_tier("local", "removed", 3));
    uses_local_again(c, "removed");
    daemon_stop_unused();
    daemon_start(); /* which finds its way without the file that said whose run it was */
    c = open_protected("removed");
    ckpt_restore *r = restore_step(c, 4);
    restore_words_check(r, "words", WORDS, 4);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* Also its parent is gone, as with a disk that is not mounted: nothing is made in its place until it is back. */
static void parent_removed(void) {
    CHECK(mkdir(test_path("disk"), 0755) == 0);
    char local[4500]; /* at the end of the other tier's section */
    snprintf(local, sizeof local, "[tier local]\nrole = local\npath = %s", test_path("disk/local"));
    configure(&(struct settings){.no_local = true, .parallel = local});
    daemon_start();
    ckpt *c = open_protected("parent");
    save_global(c, 1);
    EVENTUALLY(in_tier("disk/local", "parent", 1));
    remove_tree("disk");
    save_global(c, 2);
    EVENTUALLY(local_complains("was the directory removed, or its file system unmounted"));
    CHECK(!file_exists(test_path("disk")));
    CHECK(mkdir(test_path("disk"), 0755) == 0);
    save_global(c, 3);
    EVENTUALLY(in_tier("disk/local", "parent", 3));
    CHECK_OK(ckpt_close(c));
}

/* ---- quota ---- */

/* A quota group of btrfs binds everybody, root too, and needs nothing of the kernel's quota formats. */
static void mount_with_quota(const char *directory, uint64_t limit) {
    char command[4500];
    snprintf(command, sizeof command, "truncate -s 512M '%s' && mkfs.btrfs -q '%s' >'%s' 2>&1", test_path("image"),
             test_path("image"), test_path("mkfs.log"));
    if (system(command) != 0)
        test_skip("mkfs.btrfs is not there, or fails");
    CHECK(mkdir(test_path("%s", directory), 0755) == 0);
    if (!loop_mount(test_path("image"), test_path("%s", directory), "btrfs", NULL))
        test_skip("btrfs cannot be mounted here: %s", strerror(errno));
    int root = open(test_path("%s", directory), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct btrfs_ioctl_quota_ctl_args enable = {.cmd = BTRFS_QUOTA_CTL_ENABLE};
    struct btrfs_ioctl_qgroup_limit_args bound = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = limit}};
    CHECK(root >= 0);
    if (ioctl(root, BTRFS_IOC_QUOTA_CTL, &enable) < 0)
        test_skip("btrfs has no quota here: %s", strerror(errno));
    EVENTUALLY(ioctl(root, BTRFS_IOC_QGROUP_LIMIT, &bound) == 0);
    close(root);
}

static void quota(void) {
    mounts_begin();
    mount_with_quota("local", 12 << 20);
    configure(&(struct settings){.local = "trash_grace_s = 0"});
    daemon_start();
    ckpt *c = open_protected("quota");
    save_global(c, 1);
    EVENTUALLY(in_tier("local", "quota", 1));
    fill_local();
    goes_on_without_local(c, "quota", "Disk quota exceeded");
    CHECK(local_complains("quota is used up"));
    EVENTUALLY(unlink(test_path("local/filler")) == 0);
    uses_local_again(c, "quota");
}

/* The same answer from a tier that is told to give it, for machines without such a disk. */
static void quota_injected(void) {
    configure(&(struct settings){.local = "fault = write:4:edquot+"});
    daemon_start();
    ckpt *c = open_protected("injected");
    save_global(c, 1);
    goes_on_without_local(c, "injected", "Disk quota exceeded");
    CHECK_OK(ckpt_close(c));
}

/* ---- slow ---- */

/* Saves come faster than the tier takes them: some are skipped and counted, the memory stays what it is. */
static void slower_than_the_saves(void) {
    enum { SAVES = 300, POOL = 8 << 20 };
    configure(
        &(struct settings){.pool = "8M", .local = "delay_ms = 2\ndepth = 1\ntrash_grace_s = 0", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("slow");
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.busy_timeout_ms = CKPT_NO_WAIT;
    unsigned skipped = 0;
    uint64_t accepted = 0, before = 0;
    for (unsigned step = 1; step <= SAVES; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        int r = ckpt_save(c, step, &options);
        CHECK(r == CKPT_OK || r == CKPT_SKIPPED);
        skipped += r == CKPT_SKIPPED;
        if (r == CKPT_OK)
            accepted = step;
        if (step == SAVES / 3)
            before = daemon_proc("RssAnon");
        CHECK(step % 10 || (status_number("pool.allocated") <= POOL && status_number("pool.reserved") <= POOL));
    }
    uint64_t after = daemon_proc("RssAnon");
    CHECK(skipped > 0 && skipped < SAVES);
    CHECK(status_number("counters.saves_skipped") == skipped);
    if (MEMORY_TELLS && after > before + 1024)
        FAIL("the daemon grew from %llu to %llu KiB", (unsigned long long)before, (unsigned long long)after);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, accepted, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore *r = restore_step(c, accepted);
    restore_words_check(r, "words", WORDS, accepted);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(full),
        TEST(full_and_no_other),
        TEST(read_only),
        TEST(permission_lost),
        TEST(directory_removed),
        TEST(parent_removed),
        TEST(quota),
        TEST(quota_injected),
        TEST(slower_than_the_saves),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
