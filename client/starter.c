/* SPDX-License-Identifier: Apache-2.0 */
#include "client/starter.h"

#include "client/clock.h"
#include "client/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/*
 * fork(2) is out of the question: it would run the program's atfork handlers and un-share its
 * copy-on-write pages. A child that shares memory and suspends its parent until it execs (as vfork
 * does) costs nothing. Its exit signal is 0, so that no SIGCHLD reaches the program and no wait(2) of
 * the program reaps it. That child makes the daemon as its own child and ends, so the daemon belongs
 * to init, and no zombie is left.
 *
 * As long as the memory is shared, no handler of the program's may run in the child: all signals are
 * blocked before, and set to their defaults in the child before they are unblocked.
 */

#define STARTER_STACK_SIZE KIB(256)
#define STARTER_STARTS_MAX 3
#define STARTER_INTERVAL_NS (500 * NANOSECONDS_PER_MS)
#define STARTER_PATIENCE_NS (10 * NANOSECONDS_PER_SECOND)

void starter_deinit(struct starter *starter) {
    if (starter->pidfd >= 0)
        close(steal_fd(&starter->pidfd));
}

/* The directory of the socket: made if need be, and nobody else's. */
static int check_directory(const char *path) {
    char copy[128];
    if (path[0] != '/' || strlen(path) >= sizeof copy)
        return error_set(CKPT_E_INVALID, "cannot start a daemon: the socket's path %s is not absolute, or too long",
                         path);
    strcpy(copy, path);
    const char *directory = dirname(copy);
    if (mkdir(directory, 0700) < 0 && errno != EEXIST)
        return error_set(CKPT_E_UNREACHABLE, "cannot start a daemon: mkdir %s: %m", directory);
    struct stat status;
    if (lstat(directory, &status) < 0)
        return error_set(CKPT_E_UNREACHABLE, "cannot start a daemon: %s: %m", directory);
    if (!S_ISDIR(status.st_mode))
        return error_set(CKPT_E_DENIED, "cannot start a daemon: %s is not a directory (or a symbolic link)", directory);
    if (status.st_uid != geteuid())
        return error_set(CKPT_E_DENIED, "cannot start a daemon: %s belongs to uid %u, not to us", directory,
                         (unsigned)status.st_uid);
    if (status.st_mode & (S_IWGRP | S_IWOTH))
        return error_set(CKPT_E_DENIED, "cannot start a daemon: others may write to %s; make its mode 0700", directory);
    return CKPT_OK;
}

struct launch {
    const char *program, *path;
    uint8_t *daemon_stack; /* its top */
    pid_t daemon;          /* -1: could not be made */
    int error;             /* errno of exec; 0: it runs */
};

/* Functions that never return on a stack of their own leave a sanitizer's notes about it wrong. */
#define BARE __attribute__((no_sanitize("address"))) __attribute__((no_sanitize("thread")))

BARE static void default_signals(void) {
    struct sigaction action = {.sa_handler = SIG_DFL};
    for (int number = 1; number < NSIG; number++)
        sigaction(number, &action, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

BARE static int run_daemon(void *argument) {
    struct launch *launch = argument;
    setsid();
    default_signals();
    int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3 && null >= 0; fd++)
        dup2(null, fd);
    close_range(3, ~0u, 0);
    char *arguments[] = {(char *)launch->program, (char *)"--on-demand", (char *)"--socket", (char *)launch->path,
                         NULL};
    execvp(launch->program, arguments);
    launch->error = errno;
    _exit(127);
}

BARE static int run_between(void *argument) {
    struct launch *launch = argument;
    launch->daemon = clone(run_daemon, launch->daemon_stack, CLONE_VM | CLONE_VFORK | SIGCHLD, launch);
    if (launch->daemon < 0)
        launch->error = errno;
    _exit(0);
}

static int launch_daemon(struct launch *launch) {
    uint8_t *stacks =
        mmap(NULL, 2 * STARTER_STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stacks == MAP_FAILED)
        return -errno;
    launch->daemon_stack = stacks + 2 * STARTER_STACK_SIZE;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pid_t between = clone(run_between, stacks + STARTER_STACK_SIZE, CLONE_VM | CLONE_VFORK, launch);
    int error = between < 0 ? errno : launch->error;
    if (between >= 0)
        while (waitpid(between, NULL, __WCLONE) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    munmap(stacks, 2 * STARTER_STACK_SIZE);
    return -error;
}

static bool last_one_runs(const struct starter *starter) {
    struct pollfd pollfd = {.fd = starter->pidfd, .events = POLLIN};
    return starter->pidfd >= 0 && poll(&pollfd, 1, 0) == 0;
}

int starter_start(struct starter *starter, const char *program, const char *path) {
    uint64_t now = clock_now();
    if (last_one_runs(starter))
        return CKPT_OK;
    if (starter->starts > 0 && now - starter->last_start < STARTER_INTERVAL_NS)
        return CKPT_OK;
    if (starter->starts >= STARTER_STARTS_MAX) {
        if (now - starter->last_start < STARTER_PATIENCE_NS)
            return CKPT_OK;
        starter->starts = 0;
        return error_set(
            CKPT_E_UNREACHABLE,
            "%s was started %d times for %s and did not stay; run `%s --on-demand --socket %s` by hand, or "
            "read its log, to learn why",
            program, STARTER_STARTS_MAX, path, program, path);
    }
    int r = check_directory(path);
    if (r < 0)
        return r;
    starter_deinit(starter);
    struct launch launch = {.program = program, .path = path};
    r = launch_daemon(&launch);
    if (r < 0) {
        errno = -r;
        return error_set(CKPT_E_UNREACHABLE,
                         "no daemon answers at %s, and %s cannot be started: %m; set CKPTD_PROGRAM to its path", path,
                         program);
    }
    starter->starts++;
    starter->last_start = now;
    starter->pidfd = (int)syscall(SYS_pidfd_open, launch.daemon, 0);
    return CKPT_OK;
}
