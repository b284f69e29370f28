/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In builds with -Db_coverage=true only: counters are written when a program ends by exit(), and ours
 * often end otherwise. The daemon leaves by _exit(), and tests kill it, or it itself at a crash point,
 * by SIGKILL. So the linker hands us both calls (--wrap), and the counters are written before.
 *
 * Of another process: a thread of the daemon waits to be asked by SIGRTMAX, writes them, and then takes
 * another name, which whoever is about to kill it looks for. Were they written in the signal's handler,
 * it could interrupt malloc.
 */
#include "base/util.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define ASKABLE "coverage"
#define WRITTEN "coverage-kept"
#define PATIENCE_MS 5000

void __gcov_dump(void);
void __gcov_reset(void);

_Noreturn void __real__exit(int status);
int __real_kill(pid_t pid, int signal_number);
_Noreturn void __wrap__exit(int status);
int __wrap_kill(pid_t pid, int signal_number);

static int asked[2] = {-1, -1};

static void ask(int signal_number) {
    int error = errno;
    (void)!write(asked[1], "", 1);
    errno = error;
}

static void *serve(void *unused) {
    char byte;
    prctl(PR_SET_NAME, ASKABLE);
    while (read(asked[0], &byte, 1) == 1) {
        __gcov_dump();
        __gcov_reset();
        prctl(PR_SET_NAME, WRITTEN);
    }
    return unused;
}

__attribute__((constructor)) static void begin(void) {
    sigset_t all, before;
    pthread_t thread;
    if (strcmp(program_invocation_short_name, "ckptd") != 0 || pipe2(asked, O_CLOEXEC) < 0)
        return;
    /* Out of the way of tests that count descriptors, and of the closing that a daemon on demand begins with. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct sigaction action = {.sa_handler = ask, .sa_flags = SA_RESTART};
    if (pthread_create(&thread, NULL, serve, NULL) == 0)
        sigaction(SIGRTMAX, &action, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Has that process a thread of this name? */
static bool has_thread(pid_t pid, const char *name) {
    char path[64 + NAME_MAX], comm[32];
    struct dirent *entry;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    while (tasks && !found && (entry = readdir(tasks))) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/comm", (int)pid, entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file)
            continue;
        if (fgets(comm, sizeof comm, file)) {
            comm[strcspn(comm, "\n")] = '\0';
            found = strcmp(comm, name) == 0;
        }
        fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

_Noreturn void __wrap__exit(int status) {
    __gcov_dump();
    __real__exit(status);
}

int __wrap_kill(pid_t pid, int signal_number) {
    if (signal_number != SIGKILL || pid <= 0)
        return __real_kill(pid, signal_number);
    if (pid == getpid()) {
        __gcov_dump();
    } else if (has_thread(pid, ASKABLE) && __real_kill(pid, SIGRTMAX) == 0) {
        for (int waited = 0; waited < PATIENCE_MS && !has_thread(pid, WRITTEN); waited++)
            usleep(1000);
    }
    return __real_kill(pid, signal_number);
}
