/* SPDX-License-Identifier: Apache-2.0 */
/* What every tier must do, whatever it is made of; and what only some do. */
#include "tests/unit/tiers/support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>

static struct tier *delayed(struct tier *inner) {
    struct tier *tier;
    assert_int_equal(tier_delay_new(inner, 1, &tier), 0);
    return tier;
}

static int setup(void **state) {
    const char *kind = *state;
    struct tier_fixture *fixture = tier_fixture_new(state);
    struct tier *tier = strstr(kind, "posix") ? new_posix(&fixture->sandbox, "t") : new_mem("t");
    if (strstr(kind, "fault"))
        tier = never_fails(tier);
    if (strstr(kind, "delay"))
        tier = delayed(tier);
    fixture->tier = tier;
    return 0;
}

static void write_file(struct tier *tier, const char *path, const char *text) {
    assert_int_equal(tier_write_file(tier, path, text, strlen(text)), 0);
}

static void assert_text(struct tier *tier, const char *path, const char *text) {
    CLEANUP(freep) char *data = NULL;
    size_t size;
    assert_int_equal(tier_read_file(tier, path, 1000, &data, &size), 0);
    assert_int_equal(size, strlen(text));
    assert_string_equal(data, text);
}

static void test_file_life(void **state) {
    struct tier *tier = tier_of(state);
    enum { SIZE = 3 * 1024 * 1024 + 123 };
    size_t padded = align_up(SIZE, TIER_ALIGNMENT);
    CLEANUP(freep) char *data = aligned_alloc(TIER_ALIGNMENT, padded);
    CLEANUP(freep) char *back = aligned_alloc(TIER_ALIGNMENT, padded);
    assert_true(data && back);
    for (size_t i = 0; i < padded; i++)
        data[i] = (char)(i * 31 + i / 4096);
    struct tier_file file;
    uint64_t length;
    assert_int_equal(tier_create(tier, "f", padded, &file), 0);
    assert_int_equal(tier_write(&file, data + MIB(1), padded - MIB(1), MIB(1)), 0);
    assert_int_equal(tier_write(&file, data, MIB(1), 0), 0);
    assert_int_equal(tier_write(&file, data + 17, 5, 17), 0);
    assert_int_equal(tier_truncate(&file, SIZE), 0);
    assert_int_equal(tier_sync(&file), 0);
    assert_int_equal(tier_length(&file, &length), 0);
    assert_int_equal(length, SIZE);
    assert_int_equal(tier_close(&file), 0);

    size_t got;
    assert_int_equal(tier_open(tier, "f", &file), 0);
    assert_int_equal(tier_read(&file, back, padded, 0, &got), 0);
    assert_int_equal(got, SIZE);
    assert_memory_equal(back, data, SIZE);
    assert_int_equal(tier_read(&file, back, 100, SIZE - 10, &got), 0);
    assert_int_equal(got, 10);
    assert_memory_equal(back, data + SIZE - 10, 10);
    assert_int_equal(tier_read(&file, back, 100, SIZE + 5000, &got), 0);
    assert_int_equal(got, 0);
    assert_int_equal(tier_unlink(tier, "f"), 0);
    assert_int_equal(tier_read(&file, back, 4096, 4096, &got), 0);
    assert_int_equal(got, 4096);
    assert_memory_equal(back, data + 4096, 4096);
    assert_int_equal(tier_close(&file), 0);
}

static void test_results(void **state) {
    struct tier *tier = tier_of(state);
    struct tier_file file;
    struct tier_entry entry;
    struct tier_entries entries;
    assert_int_equal(tier_open(tier, "no", &file), TIER_E_ABSENT);
    assert_int_equal(tier_open(tier, "no/no", &file), TIER_E_ABSENT);
    assert_int_equal(tier_create(tier, "no/no", 0, &file), -ENOENT);
    assert_int_equal(tier_make_directory(tier, "no/no"), -ENOENT);
    assert_int_equal(tier_stat(tier, "no", &entry), TIER_E_ABSENT);
    assert_int_equal(tier_list(tier, "no", &entries), TIER_E_ABSENT);
    assert_int_equal(tier_unlink(tier, "no"), TIER_E_ABSENT);
    assert_int_equal(tier_remove_directory(tier, "no"), TIER_E_ABSENT);
    assert_int_equal(tier_rename(tier, "no", "other"), TIER_E_ABSENT);
    assert_int_equal(tier_link(tier, "no", "other"), TIER_E_ABSENT);
    assert_int_equal(tier_touch(tier, "no"), TIER_E_ABSENT);
    assert_int_equal(tier_sync_directory(tier, "no"), -ENOENT);
    assert_int_equal(tier_make_directory(tier, "d"), 0);
    assert_int_equal(tier_make_directory(tier, "d"), TIER_E_EXISTS);
    assert_int_equal(tier_open(tier, "d", &file), -EISDIR);
    assert_int_equal(tier_unlink(tier, "d"), -EISDIR);
    write_file(tier, "f", "x");
    assert_int_equal(tier_create(tier, "f", 0, &file), -EEXIST);
    assert_int_equal(tier_remove_directory(tier, "f"), -ENOTDIR);
    assert_int_equal(tier_list(tier, "f", &entries), -ENOTDIR);
    assert_true(atomic_load(&tier->counters.errors) >= 7);
}

static void test_names(void **state) {
    struct tier *tier = tier_of(state);
    assert_int_equal(tier_make_directories(tier, "a/b/c"), 0);
    assert_int_equal(tier_make_directories(tier, "a/b/c"), 0);
    write_file(tier, "a/b/one", "one");
    write_file(tier, "a/b/two", "two");
    assert_int_equal(tier_rename(tier, "a/b/one", "a/b/two"), 0);
    assert_text(tier, "a/b/two", "one");
    write_file(tier, "a/b/three", "three");
    assert_int_equal(tier_link(tier, "a/b/three", "a/b/two"), TIER_E_EXISTS);
    assert_int_equal(tier_link(tier, "a/b/three", "a/b/four"), 0);
    assert_int_equal(tier_unlink(tier, "a/b/three"), 0);
    assert_text(tier, "a/b/four", "three");
    assert_int_equal(tier_remove_directory(tier, "a/b"), -ENOTEMPTY);
    assert_int_equal(tier_sync_directory(tier, ""), 0);
    assert_int_equal(tier_sync_directory(tier, "a/b"), 0);

    struct tier_entries entries;
    assert_int_equal(tier_list(tier, "a/b", &entries), 0);
    assert_int_equal(entries.count, 3);
    assert_string_equal(entries.items[0].name, "c");
    assert_true(entries.items[0].is_directory);
    assert_string_equal(entries.items[1].name, "four");
    assert_false(entries.items[1].is_directory);
    assert_int_equal(entries.items[1].size, 5);
    assert_string_equal(entries.items[2].name, "two");
    tier_entries_deinit(&entries);
    assert_int_equal(tier_list_names(tier, "a/b", &entries), 0);
    assert_int_equal(entries.count, 3);
    assert_string_equal(entries.items[0].name, "c");
    assert_true(entries.items[0].is_directory);
    assert_string_equal(entries.items[1].name, "four");
    assert_false(entries.items[1].is_directory);
    assert_int_equal(entries.items[1].size, 0);
    assert_int_equal(entries.items[1].mtime_ns, 0);
    tier_entries_deinit(&entries);
    assert_int_equal(tier_list_names(tier, "no", &entries), TIER_E_ABSENT);

    assert_int_equal(tier_rename(tier, "a/b", "moved"), 0);
    assert_text(tier, "moved/four", "three");
    assert_int_equal(tier_list(tier, "a", &entries), 0);
    assert_int_equal(entries.count, 0);
    tier_entries_deinit(&entries);
    assert_int_equal(tier_make_directory(tier, "a/x"), 0);
    assert_int_equal(tier_rename(tier, "a/x", "moved"), -ENOTEMPTY);
    assert_int_equal(tier_rename(tier, "moved", "a/x"), 0);
    assert_text(tier, "a/x/two", "one");
}

static void test_clock(void **state) {
    struct tier *tier = tier_of(state);
    int64_t before, after;
    struct tier_entry entry, touched;
    assert_int_equal(tier_now(tier, &before), 0);
    write_file(tier, "f", "x");
    assert_int_equal(tier_stat(tier, "f", &entry), 0);
    assert_int_equal(tier_touch(tier, "f"), 0);
    assert_int_equal(tier_stat(tier, "f", &touched), 0);
    assert_int_equal(tier_now(tier, &after), 0);
    assert_true(before <= entry.mtime_ns && entry.mtime_ns <= touched.mtime_ns && touched.mtime_ns <= after);
    assert_int_equal(tier_make_directory(tier, "d"), 0);
    assert_int_equal(tier_touch(tier, "d"), 0);
    assert_text(tier, "f", "x");
}

static void test_publish(void **state) {
    struct tier *tier = tier_of(state);
    struct tier_entry entry;
    assert_int_equal(tier_make_directories(tier, "d"), 0);
    assert_int_equal(tier_publish(tier, "d/f", "d/f.tmp", "one", 3, POINT_PIN_WRITTEN), 0);
    assert_int_equal(tier_publish(tier, "d/f", "d/f.tmp", "two", 3, POINT_PIN_WRITTEN), 0);
    assert_text(tier, "d/f", "two");
    assert_int_equal(tier_publish_once(tier, "d/f", "d/f.tmp", "three", 5, POINT_RUN_WRITTEN), TIER_E_EXISTS);
    assert_int_equal(tier_publish_once(tier, "d/g", "d/f.tmp", "three", 5, POINT_RUN_WRITTEN), 0);
    assert_text(tier, "d/f", "two");
    assert_text(tier, "d/g", "three");
    assert_int_equal(tier_stat(tier, "d/f.tmp", &entry), TIER_E_ABSENT);
    assert_int_equal(tier_publish(tier, "e/f", "e/f.tmp", "one", 3, POINT_PIN_WRITTEN), -ENOENT);
    CLEANUP(freep) char *data = NULL;
    size_t size;
    assert_int_equal(tier_read_file(tier, "d/g", 2, &data, &size), 0);
    assert_int_equal(size, 2);
    assert_string_equal(data, "th");
    write_file(tier, "empty", "");
    assert_text(tier, "empty", "");
}

static void test_space_and_counters(void **state) {
    struct tier *tier = tier_of(state);
    uint64_t free_bytes, total;
    assert_int_equal(tier_space(tier, &free_bytes, &total), 0);
    assert_true(free_bytes <= total && total > 0);
    write_file(tier, "f", "12345");
    assert_text(tier, "f", "12345");
    assert_int_equal(atomic_load(&tier->counters.bytes_written), 5);
    assert_int_equal(atomic_load(&tier->counters.bytes_read), 5);
    assert_int_equal(atomic_load(&tier->counters.writes), 1);
    assert_int_equal(atomic_load(&tier->counters.syncs), 1);
    assert_int_equal(atomic_load(&tier->counters.errors), 0);
}

/* Chunks in flight through the loop. */
struct transfer {
    struct loop_op op;
    unsigned *pending;
};

static void transferred(struct loop_op *op) { --*CONTAINER_OF(op, struct transfer, op)->pending; }

static void run_transfers(struct tier *tier, const char *loop_kind) {
    enum { COUNT = 9, LAST = 1000 };
    struct loop *loop;
    struct loop_group *group;
    if (loop_new(loop_kind, &loop) == -EOPNOTSUPP)
        return;
    assert_int_equal(loop_group_new(loop, "tier", 2, 4, &group), 0);
    char path[16];
    snprintf(path, sizeof path, "f-%s", loop_kind);
    CLEANUP(freep) char *data = aligned_alloc(TIER_ALIGNMENT, COUNT * MIB(1));
    CLEANUP(freep) char *back = aligned_alloc(TIER_ALIGNMENT, COUNT * MIB(1));
    assert_true(data && back);
    for (size_t i = 0; i < COUNT * MIB(1); i++)
        data[i] = (char)(i * 13 + i / 4096);
    struct transfer transfers[COUNT] = {0};
    unsigned pending = COUNT;
    struct tier_file file;
    assert_int_equal(tier_create(tier, path, COUNT * MIB(1), &file), 0);
    for (size_t i = 0; i < COUNT; i++) {
        transfers[i].pending = &pending;
        size_t size = i == COUNT - 1 ? LAST : MIB(1);
        tier_submit_write(&file, loop, group, &transfers[i].op, data + i * MIB(1), size, i * MIB(1), transferred);
        assert_true(loop_op_busy(&transfers[i].op));
        loop_cancel(loop, &transfers[i].op); /* file I/O runs to its end */
    }
    assert_int_equal(pending, COUNT);
    assert_int_equal(loop_run(loop), 0);
    assert_int_equal(pending, 0);
    for (size_t i = 0; i < COUNT; i++)
        assert_int_equal(transfers[i].op.result, i == COUNT - 1 ? LAST : MIB(1));
    assert_int_equal(tier_truncate(&file, (COUNT - 1) * MIB(1) + LAST), 0);
    assert_int_equal(tier_sync(&file), 0);
    assert_int_equal(tier_close(&file), 0);

    assert_int_equal(tier_open(tier, path, &file), 0);
    pending = COUNT;
    for (size_t i = 0; i < COUNT; i++)
        tier_submit_read(&file, loop, group, &transfers[i].op, back + i * MIB(1), MIB(1), i * MIB(1), transferred);
    assert_int_equal(loop_run(loop), 0);
    assert_int_equal(pending, 0);
    assert_int_equal(transfers[COUNT - 1].op.result, LAST);
    assert_memory_equal(back, data, (COUNT - 1) * MIB(1) + LAST);
    assert_int_equal(tier_close(&file), 0);
    loop_group_free(group);
    loop_free(loop);
}

static void test_submit(void **state) {
    run_transfers(tier_of(state), "posix");
    run_transfers(tier_of(state), "uring");
}

/* Several workers use one tier at once. */
static void *work_alone(void *argument) {
    struct tier *tier = argument;
    static _Atomic unsigned next;
    unsigned number = atomic_fetch_add(&next, 1);
    char directory[32], path[48];
    snprintf(directory, sizeof directory, "shared/%u", number);
    for (int i = 0; i < 20; i++) {
        snprintf(path, sizeof path, "%s/%d", directory, i);
        CLEANUP(freep) char *data = NULL;
        size_t size;
        if (tier_make_directories(tier, directory) || tier_write_file(tier, path, directory, strlen(directory)) ||
            tier_read_file(tier, path, 100, &data, &size) || strcmp(data, directory) != 0)
            return argument;
    }
    return NULL;
}

static void test_threads(void **state) {
    pthread_t threads[4];
    for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work_alone, tier_of(state)), 0);
    for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
        void *failed;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
}

/* The door: mistakes of a caller end the program. */
static void do_leave_root(struct tier *tier) { (void)tier_unlink(tier, "a/../../b"); }
static void do_absolute(struct tier *tier) { (void)tier_unlink(tier, "/etc/passwd"); }
static void do_empty_component(struct tier *tier) { (void)tier_unlink(tier, "a//b"); }
static void do_dot(struct tier *tier) { (void)tier_unlink(tier, "./a"); }
static void do_unlink_root(struct tier *tier) { (void)tier_unlink(tier, ""); }

static void do_write_after_sync(struct tier *tier) {
    struct tier_file file;
    (void)tier_create(tier, "f", 0, &file);
    (void)tier_sync(&file);
    (void)tier_write(&file, "x", 1, 0);
}

static void do_write_for_reading(struct tier *tier) {
    struct tier_file file;
    (void)tier_write_file(tier, "f", "x", 1);
    (void)tier_open(tier, "f", &file);
    (void)tier_write(&file, "x", 1, 0);
}

static void do_close_twice(struct tier *tier) {
    struct tier_file file;
    (void)tier_create(tier, "f", 0, &file);
    (void)tier_close(&file);
    (void)tier_close(&file);
}

static void do_beyond_the_end_of_numbers(struct tier *tier) {
    struct tier_file file;
    (void)tier_create(tier, "f", 0, &file);
    (void)tier_write(&file, "x", 1, UINT64_MAX);
}

static void do_sync_again_after_failure(struct tier *tier) {
    struct tier *failing = fails(tier, "sync:1:eio");
    struct tier_file file;
    (void)tier_create(failing, "f", 0, &file);
    (void)tier_sync(&file);
    (void)tier_sync(&file);
}

static void assert_aborts(struct tier *tier, void (*mistake)(struct tier *)) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        mistake(tier);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void test_door(void **state) {
    struct tier *tier = new_mem("door");
    assert_aborts(tier, do_leave_root);
    assert_aborts(tier, do_absolute);
    assert_aborts(tier, do_empty_component);
    assert_aborts(tier, do_dot);
    assert_aborts(tier, do_unlink_root);
    assert_aborts(tier, do_write_after_sync);
    assert_aborts(tier, do_write_for_reading);
    assert_aborts(tier, do_close_twice);
    assert_aborts(tier, do_beyond_the_end_of_numbers);
    assert_aborts(tier, do_sync_again_after_failure);
    tier_free(tier);
}

static void test_posix_strangers(void **state) {
    struct sandbox sandbox;
    sandbox_init(&sandbox);
    struct tier *tier = new_posix(&sandbox, "t");
    char path[128];
    struct tier_file file;
    struct tier_entries entries;
    snprintf(path, sizeof path, "%s/t/fifo", sandbox.path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(tier_open(tier, "fifo", &file), -EBADMSG);
    write_file(tier, "f", "x");
    assert_int_equal(tier_open(tier, "f", &file), 0);
    assert_false(fcntl(file.fd, F_GETFL) & O_NONBLOCK);
    assert_int_equal(tier_close(&file), 0);
    snprintf(path, sizeof path, "%s/t/link", sandbox.path);
    assert_int_equal(symlink("/etc/passwd", path), 0);
    assert_int_equal(tier_open(tier, "link", &file), -ELOOP);
    snprintf(path, sizeof path, "%s/t/directory-link", sandbox.path);
    assert_int_equal(symlink("/etc", path), 0);
    assert_true(tier_list(tier, "directory-link", &entries) < 0);
    assert_true(tier_list_names(tier, "directory-link", &entries) < 0);
    tier_free(tier);
    sandbox_deinit(&sandbox);
}

/* A write that stored less than it said. */
static void test_small_file_is_measured(void **state) {
    (void)state;
    struct tier *tier = fails(new_mem("m"), "write:1:short");
    assert_int_equal(tier_write_file(tier, "f", "twelve bytes", 12), -EIO);
    struct tier_entry entry;
    assert_int_equal(tier_stat(tier, "f", &entry), TIER_E_ABSENT);
    tier_free(tier);
}

static void test_posix_new(void **state) {
    struct sandbox sandbox;
    sandbox_init(&sandbox);
    struct tier *tier;
    struct tier_posix_options options = {.name = "local", .level = LEVEL_LOCAL, .allow_network = true};
    char root[128];
    static const char *const bad_roots[] = {"relative", "", "/", "/tmp/"};
    for (size_t i = 0; i < ARRAY_SIZE(bad_roots); i++) {
        struct problem problem = PROBLEM_NONE;
        options.root = bad_roots[i];
        assert_int_equal(tier_posix_new(&options, &tier, &problem), -EINVAL);
        assert_names_tier(&problem, "local");
    }
    options.root = root;
    struct problem problem = PROBLEM_NONE;
    snprintf(root, sizeof root, "%s/no/root", sandbox.path);
    assert_int_equal(tier_posix_new(&options, &tier, &problem), -ENOENT);
    assert_names_tier(&problem, "local");
    assert_non_null(strstr(problem.text, root));

    snprintf(root, sizeof root, "%s/root", sandbox.path);
    assert_int_equal(tier_posix_new(&options, &tier, NULL), 0);
    struct tier_entries entries;
    assert_int_equal(tier_list(tier, "", &entries), 0);
    assert_int_equal(entries.count, 0); /* the probe cleaned up */
    tier_entries_deinit(&entries);
    assert_true(tier->capabilities & TIER_LINK && tier->capabilities & TIER_ATOMIC_RENAME);
    tier_free(tier);
    options.buffered = true;
    assert_int_equal(tier_posix_new(&options, &tier, NULL), 0);
    assert_false(tier->capabilities & TIER_DIRECT);
    tier_free(tier);
    sandbox_deinit(&sandbox);
}

/* A root that was removed is made again with the first directory below it, if its parent is there. */
static void test_posix_removed(void **state) {
    struct sandbox sandbox;
    sandbox_init(&sandbox);
    struct tier *tier;
    char parent[128], root[140];
    snprintf(parent, sizeof parent, "%s/disk", sandbox.path);
    snprintf(root, sizeof root, "%s/root", parent);
    struct tier_posix_options options = {.name = "local", .root = root, .level = LEVEL_LOCAL, .allow_network = true};
    assert_int_equal(mkdir(parent, 0700), 0);
    assert_int_equal(tier_posix_new(&options, &tier, NULL), 0);
    assert_int_equal(tier_make_directory(tier, "no/no"), -ENOENT);
    assert_int_equal(tier->counters.remade, 0);
    assert_int_equal(rmdir(root) + rmdir(parent), 0);
    assert_int_equal(tier_make_directories(tier, "a/b"), -ENOENT);
    assert_int_equal(mkdir(parent, 0700), 0);
    assert_int_equal(tier_make_directories(tier, "a/b"), 0);
    assert_int_equal(tier->counters.remade, 1);
    assert_int_equal(tier_write_file(tier, "a/b/f", "x", 1), 0);
    snprintf(root, sizeof root, "%s/root/a/b/f", parent);
    assert_int_equal(access(root, F_OK), 0);
    tier_free(tier);
    sandbox_deinit(&sandbox);
}

static void test_posix_full(void **state) {
    struct sandbox sandbox;
    sandbox_init(&sandbox);
    struct tier *tier = new_posix(&sandbox, "t");
    uint64_t free_bytes, total;
    struct tier_file file;
    struct tier_entry entry;
    assert_int_equal(tier_space(tier, &free_bytes, &total), 0);
    int r = tier_create(tier, "f", align_up(total + GIB(1), TIER_ALIGNMENT), &file);
    assert_true(r == -ENOSPC || r == -EFBIG);
    assert_int_equal(tier_stat(tier, "f", &entry), TIER_E_ABSENT);
    tier_free(tier);
    sandbox_deinit(&sandbox);
}

static void test_fault_parse(void **state) {
    struct tier_fault_options options;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(tier_fault_parse("write:3:eio", &options, &problem), 0);
    assert_string_equal(options.operation, "write");
    assert_int_equal(options.kind, TIER_FAULT_EIO);
    assert_int_equal(options.nth, 3);
    assert_false(options.from_then_on);
    assert_int_equal(tier_fault_parse("any:7:enospc+", &options, &problem), 0);
    assert_int_equal(options.kind, TIER_FAULT_ENOSPC);
    assert_true(options.from_then_on);
    static const char *const bad[] = {
        "",          "write",        "write:",         "write:0:eio",   "write:x:eio", "write:1", "write:1:",
        "write:1:x", "write:1:eio-", "write:1:eio++",  "wrote:1:eio",   ":1:eio",      "::",      "write:-1:eio",
        "w:1:eio",   "sync:1:short", "write:1:eio:no", "rename:1:flip", "write: 1:eio"};
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        problem = PROBLEM_NONE;
        assert_int_equal(tier_fault_parse(bad[i], &options, &problem), -EINVAL);
        assert_true(problem.text[0]);
    }
}

/* A fault hits what it names, once or from then on; and submitted operations as well. */
static void test_fault_fires(void **state) {
    struct tier *tier = fails(new_mem("t"), "write:2:enospc");
    assert_int_equal(tier_write_file(tier, "a", "a", 1), 0);
    assert_int_equal(tier_write_file(tier, "b", "b", 1), -ENOSPC);
    assert_int_equal(tier_write_file(tier, "b", "b", 1), 0);
    assert_int_equal(tier_fault_fired(tier), 1);
    tier_free(tier);
    tier = fails(new_mem("t"), "sync:2:edquot+");
    assert_int_equal(tier_write_file(tier, "a", "a", 1), 0);
    assert_int_equal(tier_write_file(tier, "b", "b", 1), -EDQUOT);
    assert_int_equal(tier_write_file(tier, "c", "c", 1), -EDQUOT);
    assert_int_equal(tier_fault_fired(tier), 2);
    tier_free(tier);
}

static int64_t submit_once(const char *fault, bool write) {
    struct tier *tier = fails(new_mem("t"), fault);
    struct loop *loop;
    struct loop_group *group;
    assert_int_equal(loop_new("posix", &loop), 0);
    assert_int_equal(loop_group_new(loop, "tier", 1, 1, &group), 0);
    unsigned pending = 1;
    struct transfer transfer = {.pending = &pending};
    char data[1000] = {0};
    struct tier_file file;
    if (!write)
        assert_int_equal(tier_write_file(tier, "f", data, sizeof data), 0);
    assert_int_equal(write ? tier_create(tier, "f", 0, &file) : tier_open(tier, "f", &file), 0);
    if (write)
        tier_submit_write(&file, loop, group, &transfer.op, data, sizeof data, 0, transferred);
    else
        tier_submit_read(&file, loop, group, &transfer.op, data, sizeof data, 0, transferred);
    assert_int_equal(loop_run(loop), 0);
    assert_int_equal(pending, 0);
    int64_t flipped = 0;
    for (size_t i = 0; i < sizeof data; i++)
        flipped += data[i] != 0;
    assert_int_equal(tier_close(&file), 0);
    loop_group_free(group);
    loop_free(loop);
    tier_free(tier);
    return transfer.op.result * (flipped ? 10 : 1);
}

static void test_fault_submit(void **state) {
    assert_int_equal(submit_once("write:1:eio", true), -EIO);
    assert_int_equal(submit_once("write:1:short", true), 500);
    assert_int_equal(submit_once("write:1:flip", true), 1000);
    assert_int_equal(submit_once("write:2:eio", true), 1000);
    assert_int_equal(submit_once("read:1:enospc", false), -ENOSPC);
    assert_int_equal(submit_once("read:1:short", false), 500);
    assert_int_equal(submit_once("read:1:flip", false), 10000);
}

static void test_layout(void **state) {
    uint64_t number;
    uint32_t rank;
    struct version_id version;
    assert_true(layout_parse_number("0", &number) && number == 0);
    assert_true(layout_parse_number("9223372036854775807", &number) && number == INT64_MAX);
    static const char *const no_numbers[] = {
        "", "00", "01", "-1", "1 ", "+1", "9223372036854775808", "99999999999999999999", "1x"};
    for (size_t i = 0; i < ARRAY_SIZE(no_numbers); i++)
        assert_false(layout_parse_number(no_numbers[i], &number));
    assert_true(layout_parse_manifest("rank-00007.json", &rank) && rank == 7);
    assert_true(layout_parse_manifest("rank-100000.json", &rank) && rank == 100000);
    static const char *const no_manifests[] = {"rank-7.json",       "rank-000007.json",       "rank-00007.json.bad",
                                               "rank-00007.jso",    "rank-99999999999.json",  "rank-4294967296.json",
                                               "rank-00007.a.json", "rank-00007.aa.json.tmp", "complete.json"};
    for (size_t i = 0; i < ARRAY_SIZE(no_manifests); i++)
        assert_false(layout_parse_manifest(no_manifests[i], &rank));
    char path[1024];
    layout_temporary("j", (struct version_id){1, 2}, 70000, 0xabc, "data", path);
    assert_string_equal(path, "j/1/2/rank-70000.0000000000000abc.data.tmp");
    assert_true(layout_parse_temporary(strrchr(path, '/') + 1, &rank) && rank == 70000);
    assert_false(layout_parse_temporary("rank-00001.tmp", &rank));
    assert_false(layout_parse_temporary("rank-00001.json", &rank));
    layout_trash("j", (struct version_id){1, 2}, 0xabc, path);
    assert_true(layout_parse_trash(path + 2, &version) && version.generation == 1 && version.step == 2);
    assert_false(layout_parse_trash("trash-1-2-", &version));
    assert_false(layout_parse_trash("trash-1-2-0000000000000abcd", &version));
    assert_false(layout_parse_trash("trash-x-2-0000000000000abc", &version));
}

static void test_problem_sentence(void **state) {
    struct tier *tier = new_mem("local");
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(tier_problem(&problem, tier, TIER_E_ABSENT, "read", "a/b"), -ENOENT);
    assert_string_equal(problem.text, "tier local: cannot read a/b: No such file or directory");
    char path[1000];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    problem = PROBLEM_NONE;
    assert_int_equal(tier_problem(&problem, tier, -ENOSPC, "sync", path), -ENOSPC);
    assert_non_null(strstr(problem.text, "No space left on device; free"));
    tier_free(tier);
}

#define CONFORMANCE(kind)                                                                                              \
    {"file life: " kind, test_file_life, setup, tier_fixture_free, (void *)kind},                                      \
        {"results: " kind, test_results, setup, tier_fixture_free, (void *)kind},                                      \
        {"names: " kind, test_names, setup, tier_fixture_free, (void *)kind},                                          \
        {"clock: " kind, test_clock, setup, tier_fixture_free, (void *)kind},                                          \
        {"publish: " kind, test_publish, setup, tier_fixture_free, (void *)kind},                                      \
        {"space and counters: " kind, test_space_and_counters, setup, tier_fixture_free, (void *)kind},                \
        {"submit: " kind, test_submit, setup, tier_fixture_free, (void *)kind}, {                                      \
        "threads: " kind, test_threads, setup, tier_fixture_free, (void *)kind                                         \
    }

int main(void) {
    const struct CMUnitTest tests[] = {
        CONFORMANCE("posix"),
        CONFORMANCE("mem"),
        CONFORMANCE("fault around posix"),
        CONFORMANCE("fault around mem"),
        CONFORMANCE("delay around posix"),
        CONFORMANCE("delay and fault around mem"),
        cmocka_unit_test(test_door),
        cmocka_unit_test(test_posix_strangers),
        cmocka_unit_test(test_small_file_is_measured),
        cmocka_unit_test(test_posix_new),
        cmocka_unit_test(test_posix_removed),
        cmocka_unit_test(test_posix_full),
        cmocka_unit_test(test_fault_parse),
        cmocka_unit_test(test_fault_fires),
        cmocka_unit_test(test_fault_submit),
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_problem_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
