/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The runner: a process per test, and what must be gone after it. The runner and every test are
 * subreapers, so a daemon that was started on demand (or a process that a test forgot) ends up as
 * our child and is found.
 */
#include "tests/functional/support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

enum { EXIT_SKIP = 77 };
#define TEST_SECONDS 240

static pid_t owner; /* the test's process: others only say what failed and end */
static char directory[64];
static void (*at_end)(void);
static uint64_t random_state;

uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void pause_ms(unsigned ms) {
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

uint64_t random_number(uint64_t below) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % below;
}

/* ---- files ---- */

const char *test_path(const char *format, ...) {
    static char paths[16][4400];
    static unsigned next;
    char *path = paths[next++ % ARRAY_SIZE(paths)];
    int length = snprintf(path, sizeof paths[0], "%s/", directory);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path + length, sizeof paths[0] - (size_t)length, format, arguments);
    va_end(arguments);
    return path;
}

bool file_exists(const char *path) { return access(path, F_OK) == 0; }

char *file_read(const char *path, size_t *ret_size) {
    FILE *file = fopen(path, "re");
    if (!file)
        FAIL("%s: %s", path, strerror(errno));
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(size + 1);
    CHECK(text && fread(text, 1, size, file) == size);
    fclose(file);
    text[size] = '\0';
    if (ret_size)
        *ret_size = size;
    return text;
}

void file_write(const char *path, const void *data, size_t size) {
    FILE *file = fopen(path, "we");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file))
        FAIL("%s: %s", path, strerror(errno));
}

void file_flip(const char *path, off_t offset) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    if (fd < 0 || pread(fd, &byte, 1, offset) != 1)
        FAIL("%s: %s", path, strerror(errno));
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, offset) == 1 && fsync(fd) == 0);
    close(fd);
}

static const char *wanted_suffix;
static unsigned found_files;

static int count_file(const char *path, const struct stat *status, int kind, struct FTW *place) {
    size_t length = strlen(path), suffix = strlen(wanted_suffix);
    (void)status;
    (void)place;
    found_files += kind == FTW_F && length >= suffix && strcmp(path + length - suffix, wanted_suffix) == 0;
    return 0;
}

unsigned files_ending(const char *below, const char *suffix) {
    wanted_suffix = suffix;
    found_files = 0;
    nftw(test_path("%s", below), count_file, 16, FTW_PHYS);
    return found_files;
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status;
    (void)kind;
    (void)place;
    if (remove(path) == 0)
        return 0;
    /* What is mounted there is this test's. */
    return errno == EBUSY && umount2(path, MNT_DETACH) == 0 ? remove(path) : -1;
}

/* ---- the machine ---- */

void mounts_begin(void) {
    CHECK(getpid() == owner);
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        test_skip("mounts of its own are not allowed here: %s", strerror(errno));
}

void mount_memory(const char *below, const char *options) {
    const char *path = test_path("%s", below);
    if ((mkdir(path, 0755) < 0 && errno != EEXIST) || mount("tmpfs", path, "tmpfs", 0, options) < 0)
        test_skip("a file system in memory (%s) is not possible here: %s", options, strerror(errno));
}

/* ---- processes ---- */

/* The first child that still runs or was not waited for; 0: none. */
static pid_t any_child(char name[32]) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)syscall(SYS_gettid));
    FILE *file = fopen(path, "re");
    int pid = 0;
    if (file && fscanf(file, "%d", &pid) != 1)
        pid = 0;
    if (file)
        fclose(file);
    if (!pid)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    file = fopen(path, "re");
    snprintf(name, 32, "?");
    if (file && fgets(name, 32, file))
        name[strcspn(name, "\n")] = '\0';
    if (file)
        fclose(file);
    return pid;
}

/* Kills children and whom they leave to us, one after the other. */
static void kill_children(void) {
    char name[32];
    for (pid_t pid; (pid = any_child(name));) {
        kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
}

pid_t process_start(void (*fn)(void *argument), void *argument) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fn(argument);
    fflush(NULL);
    _exit(EXIT_SUCCESS);
}

void become_user(uid_t uid) {
    CHECK(getpid() != owner);
    CHECK(setgroups(0, NULL) == 0 && setgid(uid) == 0 && setuid(uid) == 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* both were reset */
    prctl(PR_SET_DUMPABLE, 1);
}

void process_signal(pid_t pid, int signal_number) { CHECK(pid > 0 && kill(pid, signal_number) == 0); }

static int process_wait(pid_t pid) {
    uint64_t end = now_ms() + 4 * PATIENCE_MS;
    for (int status;;) {
        pid_t ended = waitpid(pid, &status, WNOHANG);
        if (ended > 0)
            return status;
        CHECK(ended == 0);
        if (now_ms() > end)
            FAIL("process %d does not end", pid);
        pause_ms(2);
    }
}

void process_kill(pid_t pid) {
    process_signal(pid, SIGKILL);
    process_wait(pid);
}

void process_join(pid_t pid) {
    int status = process_wait(pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("process %d ended with status 0x%x", pid, status);
}

void process_gone(pid_t pid) { process_wait(pid); }

void *shared_memory(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* ---- a test's end ---- */

/* Less those who only asked for the status. */
static void show_log(const char *name) {
    char line[1024];
    FILE *file = fopen(test_path("%s", name), "re");
    if (!file)
        return;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    fseek(file, size > 30000 ? size - 30000 : 0, SEEK_SET);
    fprintf(stderr, "---- the daemon's %s ----\n", name);
    while (fgets(line, sizeof line, file))
        if (!strstr(line, "has disconnected") || !strstr(line, "job=-"))
            fputs(line, stderr);
    fprintf(stderr, "--------------------------\n");
    fclose(file);
}

void test_at_end(void (*fn)(void)) {
    CHECK(!at_end && getpid() == owner);
    at_end = fn;
}

static void end_begins(void) {
    void (*fn)(void) = STEAL(at_end);
    if (fn)
        fn();
}

static int show_temporary(const char *path, const struct stat *status, int kind, struct FTW *place) {
    size_t length = strlen(path);
    (void)place;
    if (kind == FTW_F && length > 4 && strcmp(path + length - 4, ".tmp") == 0)
        fprintf(stderr, "temporary: %s, %lld bytes\n", path, (long long)status->st_size);
    return 0;
}

static void leave_nothing(void) {
    end_begins();
    kill_children();
    nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

void test_fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    char text[2048];
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s\n", file, line, text);
    fflush(NULL);
    if (getpid() == owner) {
        show_log("log");
        show_log("sock.log"); /* of daemons on demand */
        end_begins();         /* or the directory itself might hang */
        nftw(directory, show_temporary, 16, FTW_PHYS);
        leave_nothing();
    }
    _exit(EXIT_FAILURE);
}

void test_skip(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(NULL);
    if (getpid() == owner)
        leave_nothing();
    _exit(EXIT_SKIP);
}

/* A sanitizer in the daemon has only its log to speak through. */
static void check_log(void) {
    static const char *const bad[] = {"Sanitizer", "runtime error:", "Assertion"};
    for (size_t i = 0; file_exists(test_path("log")) && i < ARRAY_SIZE(bad); i++)
        if (daemon_logged(bad[i]))
            FAIL("the daemon's log has \"%s\"", bad[i]);
}

/* Shared memory that somebody made by name; other programs' directories there are not our business. */
static void check_shared_memory(void) {
    DIR *names = opendir("/dev/shm");
    for (struct dirent *entry; names && (entry = readdir(names));)
        if (entry->d_type == DT_REG && strstr(entry->d_name, "ckpt"))
            FAIL("/dev/shm/%s is left", entry->d_name);
    if (names)
        closedir(names);
}

static void run_test(const struct test *test) {
    char name[32];
    owner = getpid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    strcpy(directory, "/var/tmp/ckptd-test-XXXXXX");
    CHECK(mkdtemp(directory));
    setenv("CKPT_SOCKET", test_path("sock"), 1);
    setenv("CKPTD_CONFIG", test_path("ckptd.conf"), 1);
    static const char *const foreign[] = {"CKPTD_PROGRAM", "CKPT_DIR",        "CKPT_RUN_ID",    "PMIX_NAMESPACE",
                                          "SLURM_STEP_ID", "CKPT_FORCE_PUSH", "CKPTD_CRASH_AT", "XDG_RUNTIME_DIR"};
    for (size_t i = 0; i < ARRAY_SIZE(foreign); i++)
        unsetenv(foreign[i]);
    configure(&(struct settings){0});
    test->run();
    if (daemon_pid())
        daemon_stop();
    end_begins();
    pid_t left = any_child(name);
    if (left)
        FAIL("process %d (%s) is left", left, name);
    if (!daemon_was_killed() && file_exists(test_path("sock")))
        FAIL("the socket is left");
    check_log();
    check_shared_memory();
    if (nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS) < 0)
        FAIL("%s cannot be removed: %s", directory, strerror(errno));
    fflush(NULL);
    exit(EXIT_SUCCESS); /* a leak check, if there is one, is part of the test */
}

/* The wait status of the test's process. */
static int wait_for_test(pid_t pid) {
    uint64_t end = now_ms() + TEST_SECONDS * 1000;
    for (int status;;) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
        if (now_ms() > end) {
            fprintf(stderr, "it did not end within %d s\n", TEST_SECONDS);
            kill(pid, SIGABRT);
            waitpid(pid, &status, 0);
            return status;
        }
        pause_ms(2);
    }
}

static int verdict(const char *name, int status) {
    char left[32];
    pid_t pid = any_child(left);
    bool skipped = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIP;
    bool failed = !skipped && (!WIFEXITED(status) || WEXITSTATUS(status) != 0);
    if (pid && !failed) {
        fprintf(stderr, "process %d (%s) is left\n", pid, left);
        failed = true;
    }
    kill_children();
    if (failed && WIFSIGNALED(status))
        fprintf(stderr, "ended by signal %d\n", WTERMSIG(status));
    fflush(NULL);
    printf("[ %s ] %s\n", failed ? " FAILED " : skipped ? " SKIPPED" : "      OK", name);
    return failed ? EXIT_FAILURE : skipped ? EXIT_SKIP : EXIT_SUCCESS;
}

static bool chosen(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc < 2;
}

static void seed_random(void) {
    const char *seed = getenv("TEST_SEED");
    if (seed)
        random_state = strtoull(seed, NULL, 0);
    else if (getrandom(&random_state, sizeof random_state, 0) != sizeof random_state)
        random_state = now_ms();
    printf("TEST_SEED=0x%llx CKPTD_LOOP=%s\n", (unsigned long long)random_state, getenv("CKPTD_LOOP"));
}

static bool loop_is_available(void) {
    const char *kind = getenv("CKPTD_LOOP");
    uint8_t parameters[256] = {0};
    if (!kind || strcmp(kind, "uring") != 0)
        return true;
    long fd = syscall(SYS_io_uring_setup, 4, parameters);
    if (fd < 0) {
        printf("io_uring is not available here: %s\n", strerror(errno));
        return false;
    }
    close((int)fd);
    return true;
}

int tests_run(const struct test *tests, size_t count, int argc, char **argv) {
    size_t skipped = 0, ran = 0;
    bool failed = false;
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed_random();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (!loop_is_available())
        return EXIT_SKIP;
    for (size_t i = 0; i < count; i++) {
        if (!chosen(tests[i].name, argc, argv))
            continue;
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(NULL);
        uint64_t begin = now_ms();
        random_number(2); /* each test has numbers of its own */
        pid_t pid = fork();
        if (pid == 0)
            run_test(&tests[i]);
        int result = pid < 0 ? EXIT_FAILURE : verdict(tests[i].name, wait_for_test(pid));
        printf("             %llu ms\n", (unsigned long long)(now_ms() - begin));
        failed = failed || result == EXIT_FAILURE;
        skipped += result == EXIT_SKIP;
        ran++;
    }
    return failed ? EXIT_FAILURE : ran && skipped == ran ? EXIT_SKIP : EXIT_SUCCESS;
}
