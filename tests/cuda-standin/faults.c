/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failures on demand, from CUDA_STANDIN_FAULTS and from the file `faults` of the directory, which a test may write or
 * replace at any time. Words, separated by white space or commas:
 *
 *     [PROGRAM/]NAME:N[+]=CODE[!]    the Nth call of NAME (N+: and all later ones) in processes of PROGRAM fails with
 *                                    CODE; with ! the context stays broken. NAME is a function as the library exports
 *                                    it, or `run`: the Nth piece of work that a stream runs. CODE `hang`: it hangs
 *                                    until the directory has a file `release`.
 *
 * Calls are counted from the moment at which a word was read.
 */
#include "tests/cuda-standin/standin.h"

#include <errno.h>
#include <sys/stat.h>
#include <time.h>

enum { FAULTS_MAX = 32, FAULT_TEXT_MAX = 4096 };

struct fault {
    char name[64];
    uint64_t at, calls;
    int code;
    bool onward, sticky;
};

static struct {
    struct fault faults[FAULTS_MAX];
    size_t n, n_environment;
    struct stat seen;
} table;

static void fault_add(char *word) {
    struct fault fault = {0};
    char *slash = strchr(word, '/'), *colon = strchr(word, ':');
    if (slash) {
        *slash = 0;
        if (strcmp(word, program_invocation_short_name))
            return;
        word = slash + 1;
    }
    char *end = NULL;
    if (colon) {
        snprintf(fault.name, sizeof(fault.name), "%.*s", (int)(colon - word), word);
        fault.at = strtoull(colon + 1, &end, 10);
        fault.onward = *end == '+';
        end += fault.onward;
    }
    if (!end || *end != '=' || fault.at == 0 || table.n == FAULTS_MAX) {
        report_mistake("the test asks for a fault that is none, or one too many: %s", word);
        return;
    }
    end++;
    if (strncmp(end, "hang", 4) == 0)
        fault.code = FAULT_HANG;
    else
        fault.code = strtol(end, &end, 10);
    fault.sticky = fault.code != FAULT_HANG && *end == '!';
    table.faults[table.n++] = fault;
}

static void faults_parse(char *text) {
    char *rest = NULL;
    for (char *word = strtok_r(text, " \t\n,", &rest); word; word = strtok_r(NULL, " \t\n,", &rest))
        fault_add(word);
}

void faults_read(void) {
    const char *environment = getenv("CUDA_STANDIN_FAULTS");
    if (environment) {
        CLEANUP(freep) char *text = strdup(environment);
        faults_parse(text);
    }
    table.n_environment = table.n;
}

static void faults_follow_file(void) {
    char path[4096], text[FAULT_TEXT_MAX];
    struct stat now;
    snprintf(path, sizeof(path), "%s/faults", standin.settings.directory);
    if (stat(path, &now) < 0)
        memset(&now, 0, sizeof(now));
    if (now.st_ino == table.seen.st_ino && now.st_size == table.seen.st_size &&
        now.st_mtim.tv_sec == table.seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == table.seen.st_mtim.tv_nsec)
        return;
    table.seen = now;
    table.n = table.n_environment;
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    if (!file)
        return;
    text[fread(text, 1, sizeof(text) - 1, file)] = 0;
    faults_parse(text);
}

int faults_take(const char *name, bool *ret_sticky) {
    faults_follow_file();
    *ret_sticky = false;
    int code = 0;
    for (size_t i = 0; i < table.n; i++) {
        struct fault *fault = &table.faults[i];
        if (strcmp(fault->name, name))
            continue;
        fault->calls++;
        if (!code && (fault->calls == fault->at || (fault->onward && fault->calls > fault->at))) {
            code = fault->code;
            *ret_sticky = fault->sticky;
        }
    }
    return code;
}

void faults_hang(void) {
    pthread_mutex_unlock(&standin.lock);
    registry_say("hung");
    while (!registry_has("release")) {
        struct timespec pause = {.tv_nsec = NANOSECONDS_PER_MS};
        nanosleep(&pause, NULL);
    }
    pthread_mutex_lock(&standin.lock);
}
