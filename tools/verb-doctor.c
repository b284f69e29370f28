/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `doctor`: is this machine fit for the service? One line per fact: ok, warn (it works, but slower
 * or with less) or fail, why, and what to do. What can be tried is tried, not looked up.
 */
#include "base/loop.h"
#include "base/memory.h"
#include "proto/wire.h"
#include "tools/daemon.h"
#include "tools/roots.h"
#include "tools/table.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#define FREE_PERCENT_LOW 10
#define POOL_LOW MIB(256)
#define MEMLOCK_GOOD MIB(64)

enum verdict { OK, WARN, FAIL };

struct doctor {
    struct ctl *ctl;
    json_t *lines; /* with --json */
    unsigned warnings, failures;
};

static void tell(struct doctor *doctor, enum verdict verdict, const char *name, const char *format, ...)
    PRINTF_LIKE(4, 5);
static void tell(struct doctor *doctor, enum verdict verdict, const char *name, const char *format, ...) {
    static const char *const verdicts[] = {"ok", "warn", "fail"};
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    doctor->warnings += verdict == WARN;
    doctor->failures += verdict == FAIL;
    if (doctor->lines) {
        json_array_append_new(doctor->lines,
                              json_pack("{s:s, s:s, s:s}", "verdict", verdicts[verdict], "check", name, "text", text));
        return;
    }
    printf("%-4s  %-12s ", verdicts[verdict], name);
    print_safe(stdout, text);
    putchar('\n');
}

/* ---- the kernel ---- */

static void check_kernel(struct doctor *doctor) {
    struct utsname name;
    uname(&name);
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd < 0)
        tell(doctor, FAIL, "kernel", "Linux %s cannot open pidfds (%s); 5.4 or later is needed", name.release,
             strerror(errno));
    else
        tell(doctor, OK, "kernel", "Linux %s, pidfds work", name.release);
    if (fd >= 0)
        close(fd);
}

static void check_uring(struct doctor *doctor) {
    struct loop *loop = NULL;
    int r = loop_new("uring", &loop);
    if (r == 0)
        tell(doctor, OK, "io_uring", "works");
    else
        tell(doctor, WARN, "io_uring",
             "is not possible (%s); the daemon uses epoll and threads, which cost more processor time per byte. Where "
             "it is forbidden: sysctl kernel.io_uring_disabled=0, or allow it in the container's seccomp profile",
             strerror(-r));
    loop_free(loop);
}

static int yama_scope(void) {
    CLEANUP(fclosep) FILE *file = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
    int scope = 0;
    if (file && fscanf(file, "%d", &scope) != 1)
        scope = 0;
    return scope;
}

/* One child reads the memory of another, as the daemon reads a job's: a parent would be allowed more. */
static int try_reading_a_sibling(void) {
    static volatile int secret = 0x5eed;
    int ready[2];
    if (pipe2(ready, 0) < 0)
        return -errno;
    pid_t read_from = fork();
    if (read_from == 0) {
        char byte;
        close(ready[1]);
        while (read(ready[0], &byte, 1) < 0 && errno == EINTR)
            continue;
        _exit(0);
    }
    pid_t reader = read_from > 0 ? fork() : -1;
    if (reader == 0) {
        int copy = 0;
        struct iovec local = {&copy, sizeof copy}, remote = {(void *)&secret, sizeof secret};
        ssize_t got = process_vm_readv(read_from, &local, 1, &remote, 1, 0);
        _exit(got == sizeof copy && copy == secret ? 0 : got < 0 ? errno : EIO);
    }
    int status = -1;
    if (reader > 0)
        waitpid(reader, &status, 0);
    close(ready[1]);
    close(ready[0]);
    if (read_from > 0)
        waitpid(read_from, NULL, 0);
    return WIFEXITED(status) ? -WEXITSTATUS(status) : -ECHILD;
}

static void check_ptrace(struct doctor *doctor) {
    int scope = yama_scope(), r = try_reading_a_sibling();
    if (r == 0)
        tell(doctor, OK, "ptrace", "one process may read another's memory (yama/ptrace_scope %d)", scope);
    else
        tell(doctor, WARN, "ptrace",
             "a process may not read another's memory: %s (yama/ptrace_scope %d); jobs push their bytes themselves, "
             "which costs them processor time. Memory from ckpt_alloc needs no such right; or sysctl "
             "kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE in the container",
             strerror(-r), scope);
}

static void check_memfd(struct doctor *doctor) {
    CLEANUP(closep) int fd = wire_memfd("ckptctl-doctor", "x", 1);
    if (fd < 0)
        tell(doctor, FAIL, "memfd", "sealed memory cannot be made: %s", strerror(-fd));
    else
        tell(doctor, OK, "memfd", "sealed memory works");
}

static void check_shm(struct doctor *doctor) {
    struct statvfs space;
    char bytes[FORMAT_MAX];
    if (statvfs("/dev/shm", &space) < 0)
        tell(doctor, WARN, "/dev/shm", "is not there (%s); the daemon does not need it, MPI libraries do",
             strerror(errno));
    else
        tell(doctor, OK, "/dev/shm", "%s free; the daemon does not use it",
             format_bytes((uint64_t)space.f_bavail * space.f_frsize, bytes));
}

static void check_memlock(struct doctor *doctor) {
    struct rlimit limit;
    char bytes[FORMAT_MAX];
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= MEMLOCK_GOOD)
        tell(doctor, OK, "memlock", "%s",
             limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur, bytes));
    else
        tell(doctor, WARN, "memlock",
             "only %s may be locked; the daemon works with unregistered buffers. LimitMEMLOCK=infinity in the unit, or "
             "ulimit -l unlimited, makes transfers cheaper",
             format_bytes(limit.rlim_cur, bytes));
}

/* ---- memory ---- */

static void check_pool(struct doctor *doctor, const struct config *config) {
    struct memory memory;
    memory_look(&memory);
    char machine[FORMAT_MAX], group[FORMAT_MAX], pool[FORMAT_MAX];
    uint64_t available = min_u64(memory.available, memory.group_left);
    uint64_t size = config->pool_size ? config->pool_size : available / 100 * config->pool_percent;
    format_bytes(memory.available, machine);
    format_bytes(size, pool);
    if (memory.group_left == UINT64_MAX)
        strcpy(group, "no limit");
    else
        format_bytes(memory.group_left, group);
    if (size > available)
        tell(doctor, FAIL, "pool",
             "%s are configured, but %s are available, in the control group (%s): %s; set a "
             "smaller [pool] size, or a percentage",
             pool, machine, memory.group_kind, group);
    else if (size < POOL_LOW)
        tell(doctor, WARN, "pool",
             "only %s (available: %s; control group, %s: %s); larger images go through it as a window, and saves are "
             "skipped more often",
             pool, machine, memory.group_kind, group);
    else
        tell(doctor, OK, "pool", "%s of %s available (control group, %s: %s)", pool, machine, memory.group_kind, group);
}

/* ---- places ---- */

static void check_tier(struct doctor *doctor, const char *name, const char *path, enum level level, bool allow_network,
                       bool exists) {
    char label[80], real[PATH_MAX], free_text[FORMAT_MAX], total_text[FORMAT_MAX];
    snprintf(label, sizeof label, "tier %s", name);
    if (!exists || !realpath(path, real)) {
        tell(doctor, WARN, label, "%s is not there; the daemon makes it if its parent directory exists", path);
        return;
    }
    struct tier_posix_options options = {.name = name, .root = real, .level = level, .allow_network = allow_network};
    struct problem problem = PROBLEM_NONE;
    CLEANUP(tier_freep) struct tier *tier = NULL;
    int r = tier_posix_new(&options, &tier, &problem);
    if (r < 0) {
        tell(doctor, FAIL, label, "%s", problem_text(&problem, r));
        return;
    }
    uint64_t free_bytes = 0, total = 0;
    r = tier_space(tier, &free_bytes, &total);
    format_bytes(free_bytes, free_text);
    format_bytes(total, total_text);
    if (r < 0)
        tell(doctor, FAIL, label, "%s: %s", real, strerror(-r));
    else if (free_bytes < total / 100 * FREE_PERCENT_LOW)
        tell(doctor, WARN, label, "%s: %s of %s free; make room, or set a smaller keep", real, free_text, total_text);
    else if (level == LEVEL_GLOBAL && !(tier->capabilities & TIER_SHARED))
        tell(doctor, WARN, label, "%s is no network file system: other nodes may not see it", real);
    else if (!(tier->capabilities & TIER_DIRECT))
        tell(doctor, WARN, label, "%s: %s of %s free, but O_DIRECT does not work: writes go through the page cache",
             real, free_text, total_text);
    else
        tell(doctor, OK, label, "%s: %s of %s free, O_DIRECT works%s", real, free_text, total_text,
             tier->capabilities & TIER_PREALLOCATE ? ", preallocation too" : "");
}

static bool is_there(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static void check_tiers(struct doctor *doctor, const struct config *config) {
    for (size_t i = 0; i < doctor->ctl->root_count; i++) {
        const char *root = doctor->ctl->roots[i];
        char name[32];
        snprintf(name, sizeof name, "root%zu", i + 1);
        if (is_there(root))
            check_tier(doctor, name, root, i == 0 ? LEVEL_LOCAL : LEVEL_GLOBAL, i > 0, true);
        else
            tell(doctor, FAIL, name, "%s: no such directory", root);
    }
    for (size_t i = 0; !doctor->ctl->root_count && i < config->tier_count; i++) {
        const struct config_tier *tier = &config->tiers[i];
        check_tier(doctor, tier->name, tier->path, tier->level, tier->allow_network, is_there(tier->path));
    }
}

/* The directory of the socket, or the nearest one above it that exists. */
static void check_socket(struct doctor *doctor) {
    char path[108] = "", directory[PATH_MAX];
    bool on_demand = false;
    struct problem problem = PROBLEM_NONE;
    int r = 0;
    if (doctor->ctl->socket)
        snprintf(path, sizeof path, "%s", doctor->ctl->socket);
    else
        r = wire_socket_path(path, &on_demand, &problem);
    if (r < 0) {
        tell(doctor, FAIL, "socket", "%s", problem_text(&problem, r));
        return;
    }
    snprintf(directory, sizeof directory, "%s", path);
    struct stat status;
    char *at = dirname(directory);
    bool made = stat(at, &status) == 0;
    for (int i = 0; !made && i < 2; i++) { /* ckptd makes <runtime directory>/ckptd */
        at = dirname(at);
        if (stat(at, &status) == 0)
            break;
    }
    struct stat socket;
    if (made && status.st_uid == 0 && geteuid() != 0 && stat(path, &socket) == 0 && socket.st_uid == geteuid()) {
        tell(doctor, OK, "socket", "%s, made by the system's service manager", path);
        return;
    }
    if (made && (status.st_uid != geteuid() || (status.st_mode & 022)))
        tell(doctor, FAIL, "socket", "%s must be yours and writable to nobody else (it belongs to uid %u, mode %04o)",
             at, (unsigned)status.st_uid, (unsigned)status.st_mode & 07777);
    else if (access(at, W_OK | X_OK) < 0)
        tell(doctor, FAIL, "socket", "%s: %s; set CKPT_SOCKET or XDG_RUNTIME_DIR", at, strerror(errno));
    else
        tell(doctor, OK, "socket", "%s%s", path, on_demand ? ", a daemon is started on demand" : "");
}

static void check_daemon(struct doctor *doctor) {
    json_t *status = NULL;
    struct problem problem = PROBLEM_NONE;
    int r = daemon_status(doctor->ctl, &status, &problem);
    if (r == 0)
        tell(doctor, OK, "daemon", "ckptd %s, pid %" PRIu64 ", loop %s", json_text(status, "version", "?"),
             json_number(status, "pid"), json_text(status, "loop", "?"));
    else if (r == CONNECTION_E_ABSENT)
        tell(doctor, OK, "daemon", "%s", problem_text(&problem, r));
    else
        tell(doctor, FAIL, "daemon", "%s", problem_text(&problem, r));
    json_decref(status);
}

int verb_doctor(struct ctl *ctl) {
    struct doctor doctor = {.ctl = ctl, .lines = ctl->json ? json_array() : NULL};
    struct config config;
    struct problem problem = PROBLEM_NONE;
    check_kernel(&doctor);
    check_uring(&doctor);
    check_ptrace(&doctor);
    check_memfd(&doctor);
    check_shm(&doctor);
    check_memlock(&doctor);
    int r = config_load(ctl->config, &config, &problem);
    if (r < 0) {
        tell(&doctor, FAIL, "config", "%s", problem_text(&problem, r));
    } else {
        tell(&doctor, OK, "config", "%s", config.file[0] ? config.file : "none, these are the defaults");
        check_pool(&doctor, &config);
        check_tiers(&doctor, &config);
    }
    check_socket(&doctor);
    check_daemon(&doctor);
    int status = doctor.failures ? STATUS_PROBLEM : STATUS_OK;
    if (!doctor.lines)
        return status;
    int printed = ctl_print_json(json_pack("{s:i, s:i, s:o}", "failures", (int)doctor.failures, "warnings",
                                           (int)doctor.warnings, "checks", doctor.lines));
    return printed == STATUS_OK ? status : printed;
}
