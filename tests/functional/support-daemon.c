/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon of a test: its configuration, its life, its status. */
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

static pid_t foreground; /* of daemon_start; 0: none */
static bool killed;      /* the last one: it could not tidy up */
static uid_t user;       /* whose daemon it is to be; 0: ours */

void configure(const struct settings *settings) {
    char text[4096];
    int length =
        snprintf(text, sizeof text, "[daemon]\nlog_level = %s\n%s\n[pool]\nsize = %s\nchunk_size = %s\nprefault = %s\n",
                 settings->log_level ? settings->log_level : "debug", settings->daemon ? settings->daemon : "",
                 settings->pool ? settings->pool : "64M", settings->chunk ? settings->chunk : "256K",
                 settings->prefault ? "yes" : "no");
    if (settings->device)
        length += snprintf(text + length, sizeof text - (size_t)length, "[device]\n%s\n", settings->device);
    if (!settings->no_local)
        length += snprintf(text + length, sizeof text - (size_t)length, "[tier local]\nrole = local\npath = %s\n%s\n",
                           test_path("local"), settings->local ? settings->local : "");
    if (!settings->no_parallel)
        length +=
            snprintf(text + length, sizeof text - (size_t)length, "[tier parallel]\nrole = parallel\npath = %s\n%s\n",
                     test_path("parallel"), settings->parallel ? settings->parallel : "");
    if (settings->deadlines)
        length += snprintf(text + length, sizeof text - (size_t)length, "[deadlines]\n%s\n", settings->deadlines);
    CHECK(length < (int)sizeof text);
    file_write(test_path("ckptd.conf"), text, (size_t)length);
}

static const char *program(void) {
    const char *path = getenv("CKPTD");
    if (!path)
        FAIL("CKPTD does not name the daemon's program");
    return path;
}

void daemon_user(uid_t uid) { user = uid; }

static void run_daemon(void) {
    int log = open(test_path("log"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const char *const arguments[] = {"ckptd", "--config", test_path("ckptd.conf"), "--socket", test_path("sock"), NULL};
    if (log < 0 || dup2(log, 2) < 0)
        _exit(127);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (user) {
        int file = open(program(), O_RDONLY); /* that user may have no way to it */
        become_user(user);
        fexecve(file, (char *const *)arguments, environ);
    } else {
        execv(program(), (char *const *)arguments);
    }
    _exit(127);
}

static bool answers(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", test_path("sock"));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool connected = connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    if (!connected && foreground && waitpid(foreground, NULL, WNOHANG) == foreground) {
        foreground = 0;
        FAIL("the daemon did not start");
    }
    return connected;
}

void daemon_start(void) { daemon_start_with(NULL, NULL); }

void daemon_start_with(const char *name, const char *value) {
    daemon_launch_with(name, value);
    EVENTUALLY(answers());
}

void daemon_launch_with(const char *name, const char *value) {
    CHECK(!foreground);
    fflush(NULL);
    foreground = fork();
    CHECK(foreground >= 0);
    if (foreground == 0) {
        if (name)
            setenv(name, value, 1);
        run_daemon();
    }
}

/* Our children named ckptd that we did not start; *ret_pid (one of them) stays as it is if there is none. Those that
 * found another daemon serving have ended: they are only waited for. */
static unsigned on_demand(pid_t *ret_pid) {
    DIR *processes = opendir("/proc");
    unsigned found = 0;
    for (struct dirent *entry; processes && (entry = readdir(processes));) {
        char path[300], state;
        int pid = atoi(entry->d_name), parent;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        FILE *file = pid && pid != foreground ? fopen(path, "re") : NULL;
        bool ours = file && fscanf(file, "%*d (ckptd) %c %d", &state, &parent) == 2 && parent == getpid();
        if (file)
            fclose(file);
        if (ours && state == 'Z') {
            waitpid(pid, NULL, 0);
        } else if (ours) {
            *ret_pid = pid;
            found++;
        }
    }
    if (processes)
        closedir(processes);
    return found;
}

unsigned daemons_on_demand(void) {
    pid_t pid;
    return on_demand(&pid);
}

pid_t daemon_pid(void) {
    pid_t pid = foreground;
    if (!foreground)
        on_demand(&pid);
    return pid;
}

static int gone(pid_t pid) {
    int status = 0;
    uint64_t end = now_ms() + PATIENCE_MS;
    while (waitpid(pid, &status, WNOHANG) != pid) {
        if (now_ms() > end)
            FAIL("the daemon does not end");
        pause_ms(2);
    }
    if (pid == foreground)
        foreground = 0;
    killed = !WIFEXITED(status);
    return status;
}

bool daemon_was_killed(void) { return killed; }

int daemon_gone(void) {
    CHECK(foreground);
    return gone(foreground);
}

int daemon_end(int signal_number) {
    pid_t pid = daemon_pid();
    process_signal(pid, signal_number);
    return gone(pid);
}

void daemon_stop(void) {
    int status = daemon_end(SIGTERM);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("the daemon ended with status 0x%x", status);
}

static json_t *status_at(const char *path, json_t **ret_root) {
    char *text = peer_status();
    json_error_t error;
    json_t *at = *ret_root = json_loads(text, 0, &error);
    if (!at)
        FAIL("the status is no JSON: %s", error.text);
    free(text);
    char copy[256], *rest;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *key = strtok_r(copy, ".", &rest); key && at; key = strtok_r(NULL, ".", &rest))
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(key)) : json_object_get(at, key);
    return at;
}

static size_t sessions(void) {
    json_t *root, *at = status_at("sessions", &root);
    size_t count = json_array_size(at);
    json_decref(root);
    return count;
}

void daemon_stop_unused(void) {
    EVENTUALLY(sessions() == 0);
    daemon_stop();
}

void daemon_kill(void) { daemon_end(SIGKILL); }

void allow_on_demand(void) { setenv("CKPTD_PROGRAM", program(), 1); }

bool daemon_logged(const char *words) {
    char *log = file_read(test_path("log"), NULL);
    bool found = strstr(log, words);
    free(log);
    return found;
}

int64_t status_number(const char *path) {
    json_t *root, *at = status_at(path, &root);
    if (!json_is_integer(at) && !json_is_boolean(at))
        FAIL("the status has no number %s", path);
    int64_t number = json_is_boolean(at) ? json_is_true(at) : json_integer_value(at);
    json_decref(root);
    return number;
}

char *status_text(const char *path) {
    json_t *root, *at = status_at(path, &root);
    if (!json_is_string(at))
        FAIL("the status has no text %s", path);
    char *text = strdup(json_string_value(at));
    json_decref(root);
    return text;
}

uint64_t daemon_proc(const char *key) {
    char path[64], line[256], name[64];
    snprintf(path, sizeof path, "/proc/%d/status", daemon_pid());
    FILE *file = fopen(path, "re");
    unsigned long long number;
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%63[^:]: %llu", name, &number) == 2 && strcmp(name, key) == 0) {
            fclose(file);
            return number;
        }
    FAIL("%s has no %s", path, key);
}

unsigned daemon_descriptors(void) {
    char path[64];
    unsigned count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", daemon_pid());
    DIR *entries = opendir(path);
    CHECK(entries);
    for (struct dirent *entry; (entry = readdir(entries));)
        count += entry->d_name[0] != '.';
    closedir(entries);
    return count;
}
