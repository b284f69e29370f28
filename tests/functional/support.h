/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Tests through the real daemon, real sockets and real files. A program is a table of tests;
 * tests_run() gives each a process of its own with an empty directory, a configuration, and the
 * environment that the client library reads. Afterwards nothing may be left: no process, socket,
 * directory or shared memory. Nothing sleeps for an event: EVENTUALLY() looks until a deadline.
 *
 * A failed check ends the process that made it; the test's own process then shows the daemon's log.
 * The environment says which daemon (CKPTD), which loop (CKPTD_LOOP) and what else (CKPTCTL).
 */

#include "base/util.h"
#include "client/ckpt.h"

#include <stdarg.h>
#include <sys/types.h>

struct test {
    const char *name;
    void (*run)(void);
};
#define TEST(function)                                                                                                 \
    { #function, function }

/* The exit status of main: 0, 1, or 77 if every test was skipped. Arguments choose tests by name. */
int tests_run(const struct test *tests, size_t count, int argc, char **argv);

_Noreturn void test_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void test_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Called once, at the test's end however it ends, before its processes are killed. Children inherit none. */
void test_at_end(void (*fn)(void));

#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            FAIL("%s", #condition);                                                                                    \
    } while (0)
/* A result of the client library. */
#define CHECK_IS(expected, call)                                                                                       \
    do {                                                                                                               \
        int result_ = (call), expected_ = (expected);                                                                  \
        if (result_ != expected_)                                                                                      \
            FAIL("%s: %s, not %s: %s", #call, ckpt_strerror(result_), ckpt_strerror(expected_), ckpt_strerror_last()); \
    } while (0)
#define CHECK_OK(call) CHECK_IS(CKPT_OK, call)
/* The last sentence of the client library has these words. */
#define CHECK_SAYS(words)                                                                                              \
    do {                                                                                                               \
        if (!strstr(ckpt_strerror_last(), words))                                                                      \
            FAIL("\"%s\" is not in: %s", words, ckpt_strerror_last());                                                 \
    } while (0)
#define EVENTUALLY(condition)                                                                                          \
    do {                                                                                                               \
        uint64_t end_ = now_ms() + PATIENCE_MS;                                                                        \
        while (!(condition)) {                                                                                         \
            if (now_ms() > end_)                                                                                       \
                FAIL("not within %d ms: %s", PATIENCE_MS, #condition);                                                 \
            pause_ms(2);                                                                                               \
        }                                                                                                              \
    } while (0)

#define PATIENCE_MS 40000

uint64_t now_ms(void);
void pause_ms(unsigned ms);
/* Printed with every failure: a run can be repeated with TEST_SEED. */
uint64_t random_number(uint64_t below);

/* ---- files ---- */

/* A path inside the test's directory; valid for the next 15 calls. */
const char *test_path(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool file_exists(const char *path);
/* The whole file and a NUL after it; fails if it cannot be read. */
char *file_read(const char *path, size_t *ret_size);
void file_write(const char *path, const void *data, size_t size);
/* Changes one byte in place. */
void file_flip(const char *path, off_t offset);
/* How many files below `directory` (of the test's) have names that end so. */
unsigned files_ending(const char *directory, const char *suffix);

/* ---- the machine ---- */

/* From now on what is mounted is seen by this test and its children only, and gone with them; skips the test
 * where that is not allowed. */
void mounts_begin(void);
/* A file system in memory at this directory of the test's, made with it; skips where that is not allowed. */
void mount_memory(const char *directory, const char *options);

/* ---- the daemon ---- */

struct settings {
    const char *pool, *chunk, *log_level;                       /* 64M, 256K, debug */
    const char *daemon, *device, *local, *parallel, *deadlines; /* more lines of these sections */
    bool no_local, no_parallel, prefault;
};
/* Writes the configuration; every test begins with that of all zeros. */
void configure(const struct settings *settings);

/* In the foreground, as our child. Returns when it answers. */
void daemon_start(void);
/* With one more environment variable. */
void daemon_start_with(const char *name, const char *value);
/* The same, but returns at once: it may die before it answers. */
void daemon_launch_with(const char *name, const char *value);
/* Sanitizers keep freed memory: there, the daemon's size tells nothing. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEMORY_TELLS false
#define FEWER(rounds) ((rounds) / 20) /* and are slow */
#else
#define MEMORY_TELLS true
#define FEWER(rounds) (rounds)
#endif

/* Daemons that are started from now on run as this user. */
void daemon_user(uid_t uid);
/* Of daemon_start, or the one that was started on demand; 0: none. */
pid_t daemon_pid(void);
/* Sends the signal and waits for the end. Returns the wait status. */
int daemon_end(int signal_number);
/* How many that were started on demand are running. */
unsigned daemons_on_demand(void);
/* Waits until it has ended by itself. Returns the wait status. */
int daemon_gone(void);
/* SIGTERM; it must exit with 0. */
void daemon_stop(void);
/* The same, after it has read the goodbyes of all clients. */
void daemon_stop_unused(void);
/* SIGKILL. What it leaves in the file system, the next one must cope with. */
void daemon_kill(void);
/* The last one did not end by itself. */
bool daemon_was_killed(void);
/* From now on the library may start daemons by itself. */
void allow_on_demand(void);
/* Number (or 0 and 1) at a path such as "counters.saves_accepted", or "tiers.0.errors", of the daemon's status; text
 * likewise (the caller frees). */
int64_t status_number(const char *path);
char *status_text(const char *path);
/* A number of the daemon's /proc/PID/status, such as "RssAnon" (in KiB); the descriptors it has open. */
uint64_t daemon_proc(const char *key);
unsigned daemon_descriptors(void);
/* The log so far has these words. */
bool daemon_logged(const char *words);

/* ---- processes ---- */

/* The calling process, forked from a test, is this user from now on, and the daemon may still read it. */
void become_user(uid_t uid);
/* A forked process that runs fn and exits with 0; it dies with the test. */
pid_t process_start(void (*fn)(void *argument), void *argument);
void process_signal(pid_t pid, int signal_number);
void process_kill(pid_t pid);
/* Waits for the end (-1: of any child); it must have exited with 0. */
void process_join(pid_t pid);
/* Waits for the end, whatever it is. */
void process_gone(pid_t pid);
/* Memory that forked processes share with us, zeroed. */
void *shared_memory(size_t size);

/* ---- saving and restoring ---- */

ckpt *job_open(const char *job);
/* Fails unless it gives `expected`; NULL if that is not CKPT_OK. */
ckpt *rank_open(const char *job, uint32_t rank, uint32_t world, const char *run_id);
/* Opens the job, with the array protected as "words". */
ckpt *words_open(const char *job, const uint64_t *words, size_t count);
/* Accepted, and captured. */
void save_captured(ckpt *c, uint64_t step);
/* Accepted, captured, and complete at the level. */
void save_durable(ckpt *c, uint64_t step, uint32_t level);
/* Words that only this seed gives. */
void words_fill(uint64_t *words, size_t count, uint64_t seed);
/* Fails at the first wrong one. */
void words_check(const uint64_t *words, size_t count, uint64_t seed);
/* Opens the newest version, which must be of this step. */
ckpt_restore *restore_step(ckpt *c, uint64_t step);
/* Opens one step, whatever its generation. */
ckpt_restore *restore_of(ckpt *c, uint64_t step);
/* Reads a one-dimensional tensor of `count` elements, whole. */
int restore_array(ckpt_restore *r, const char *name, uint32_t dtype, void *data, uint64_t count);
/* The tensor of U64 words holds what words_fill(seed) gives. */
void restore_words_check(ckpt_restore *r, const char *name, size_t count, uint64_t seed);
/* So does "words" of the step's version. */
void words_check_step(ckpt *c, uint64_t step, size_t count, uint64_t seed);
