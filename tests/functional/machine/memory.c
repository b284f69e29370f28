/* SPDX-License-Identifier: Apache-2.0 */
/* Little memory: a control group with a limit, a small /dev/shm. */
#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define GROUP_MIB 192
#define IMAGE_WORDS (40 << 17) /* 40 MiB */

static char group[600], parent[500];

static bool group_write(const char *directory, const char *name, const char *text) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return written;
}

/* The number behind a key, or (NULL) the first one, of a file of the group; `otherwise` if it is not there. */
static uint64_t group_number(const char *name, const char *key, uint64_t otherwise) {
    char path[700], line[128], found[64];
    unsigned long long number = otherwise;
    snprintf(path, sizeof path, "%s/%s", group, name);
    FILE *file = fopen(path, "re");
    CHECK(file);
    while (fgets(line, sizeof line, file)) {
        if (!key && sscanf(line, "%llu", &number) == 1)
            break;
        if (key && sscanf(line, "%63s %llu", found, &number) == 2 && strcmp(found, key) == 0)
            break;
        number = otherwise;
    }
    fclose(file);
    return number;
}

/* Its processes are ours: they end, or go back where they came from. */
static void group_leave(void) {
    char path[700];
    if (!*group)
        return;
    group_write(parent, "cgroup.procs", "0");
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    FILE *file = fopen(path, "re");
    for (int pid; file && fscanf(file, "%d", &pid) == 1;) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    if (file)
        fclose(file);
    while (rmdir(group) < 0 && errno == EBUSY)
        pause_ms(2);
    *group = '\0';
}

/* This process, and all that it starts from now on, in a group with a limit below the present one. */
static void group_enter(void) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[400], leaf[400] = "";
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *at = strstr(line, ":memory:");
        if (at)
            snprintf(leaf, sizeof leaf, "%s", at + strlen(":memory:"));
    }
    if (file)
        fclose(file);
    snprintf(parent, sizeof parent, "/sys/fs/cgroup/memory%s", strcmp(leaf, "/") ? leaf : "");
    if (!*leaf || !file_exists(parent))
        test_skip("there is no memory controller of cgroup v1 at %s", parent);
    snprintf(group, sizeof group, "%s/ckptd-test-%d", parent, getpid());
    if (mkdir(group, 0755) < 0) {
        *group = '\0';
        test_skip("a control group cannot be made in %s: %s", parent, strerror(errno));
    }
    test_at_end(group_leave);
    char limit[32];
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)MIB(GROUP_MIB));
    CHECK(group_write(group, "memory.limit_in_bytes", limit));
    CHECK(group_write(group, "cgroup.procs", "0"));
}

/* As many cached pages as the group may have: they are charged to it, and anybody's for the asking. */
static void fill_cache(void) {
    static uint8_t bytes[1 << 20];
    int fd = open(test_path("cached"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    for (int i = 0; i < GROUP_MIB; i++)
        CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes);
    CHECK(fsync(fd) == 0);
    close(fd);
}

/* The trainer's memory, the daemon's pool and the page cache of the drains share the limit; all live. */
static void limited_group(void) {
    if (!MEMORY_TELLS)
        test_skip("a sanitizer's own memory does not fit into the group");
    group_enter();
    fill_cache();
    uint64_t cached = group_number("memory.usage_in_bytes", NULL, 0);
    if (cached < MIB(GROUP_MIB) / 2 + MIB(GROUP_MIB) / 8)
        FAIL("only %llu MiB of %d are cached", (unsigned long long)(cached >> 20), GROUP_MIB);
    configure(&(struct settings){.pool = "25%",
                                 .chunk = "1M",
                                 .local = "buffered = yes\ntrash_grace_s = 0",
                                 .parallel = "buffered = yes\ntrash_grace_s = 0"});
    daemon_start();
    uint64_t pool = (uint64_t)status_number("pool.limit");
    if (pool > MIB(GROUP_MIB) / 4 || pool < MIB(GROUP_MIB) / 8)
        FAIL("the pool of a group of %d MiB, most of it cached files, is %llu MiB", GROUP_MIB,
             (unsigned long long)(pool >> 20));
    uint64_t *words = malloc(IMAGE_WORDS * 8ul);
    CHECK(words);
    ckpt *c = job_open("limited");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, IMAGE_WORDS));
    for (uint64_t step = 1; step <= 5; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, IMAGE_WORDS, step);
        int r;
        do
            r = ckpt_save(c, step, NULL);
        while (r == CKPT_SKIPPED);
        CHECK_OK(r);
    }
    CHECK_OK(ckpt_wait(c, 5, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore *r = restore_step(c, 5);
    memset(words, 0, IMAGE_WORDS * 8ul);
    CHECK_OK(restore_array(r, "words", CKPT_U64, words, IMAGE_WORDS));
    words_check(words, IMAGE_WORDS, 5);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    CHECK(kill(daemon_pid(), 0) == 0);
    CHECK(group_number("memory.max_usage_in_bytes", NULL, 0) > MIB(GROUP_MIB) / 2);
    CHECK(group_number("memory.oom_control", "under_oom", 1) == 0);
    CHECK(group_number("memory.oom_control", "oom_kill", 0) == 0);
    free(words);
}

/* Neither the pool nor the memory of ckpt_alloc lies in /dev/shm: containers often have 64 MiB of it. */
static void small_dev_shm(void) {
    enum { WORDS = 80 << 17 };
    mounts_begin();
    if (mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m") < 0)
        test_skip("/dev/shm cannot be mounted over: %s", strerror(errno));
    configure(&(struct settings){.pool = "128M", .chunk = "4M", .no_parallel = true});
    daemon_start();
    uint64_t *words;
    ckpt *c = job_open("shm");
    CHECK_OK(ckpt_alloc(c, WORDS * 8ul, (void **)&words));
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    words_fill(words, WORDS, 1);
    save_durable(c, 1, CKPT_LOCAL);
    CHECK(status_number("pool.allocated") > MIB(64));
    ckpt_restore *r = restore_step(c, 1);
    restore_words_check(r, "words", WORDS, 1);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {TEST(limited_group), TEST(small_dev_shm)};
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
