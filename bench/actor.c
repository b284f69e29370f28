/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that uses libckpt and does what the benchmarks tell it: one command per line on stdin,
 * one line of JSON on stdout. It measures by itself, so that the pipe costs nothing; what it
 * measures, and in which order, is written in the benchmark's Python file.
 *
 * Times are in nanoseconds. The verbs stand in the table at the end.
 */
#include "memory.h"

#include <ckpt.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WORDS_MAX 8
#define NAME_SIZE 56
#define PING_BYTES 64 /* about what a save's message and its answer have */

struct actor {
    ckpt *ckpt;
    struct memory source, target;
    uint32_t rank;
    int ping_fd; /* of the process that answers; -1: none yet */
};

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static uint64_t number(const char *word) { return word ? strtoull(word, NULL, 10) : 0; }

static void fail(const char *what) {
    printf("{\"error\": \"%s: %s\"}\n", what, strerror(errno));
    fflush(stdout);
    exit(1);
}

/* Hands a positive result on; a negative one ends the program. */
static int check(int result, const char *what) {
    if (result >= 0)
        return result;
    printf("{\"error\": \"%s: %s: %s\"}\n", what, ckpt_strerror(result), ckpt_strerror_last());
    fflush(stdout);
    exit(1);
}

/* ---- a job ---- */

/* open JOB RANK WORLD RUN */
static void verb_open(struct actor *actor, char **words) {
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.rank = actor->rank = (uint32_t)number(words[2]);
    options.world = (uint32_t)number(words[3]);
    options.run_id = words[4];
    uint64_t start = now();
    check(ckpt_open(words[1], &options, &actor->ckpt), "open");
    printf("{\"open_ns\": %" PRIu64 "}\n", now() - start);
}

static void verb_close(struct actor *actor, char **words) {
    (void)words;
    check(ckpt_close(actor->ckpt), "close");
    actor->ckpt = NULL;
    puts("{}");
}

/* memory shared|private|untouched noise|compressible|nothing BYTES SHARDS: what will be saved. Shared memory needs an
 * open job. */
static void verb_memory(struct actor *actor, char **words) {
    size_t size = number(words[3]), count = number(words[4]);
    if (strcmp(words[1], "shared") == 0) {
        void *data = NULL;
        check(ckpt_alloc(actor->ckpt, size, &data), "alloc");
        actor->source = (struct memory){.data = data, .size = size, .count = count};
    } else if (strcmp(words[1], "untouched") == 0) {
        memory_reserve(&actor->source, size, count);
    } else {
        memory_new(&actor->source, size, count);
    }
    if (strcmp(words[2], "noise") == 0)
        memory_fill_noise(&actor->source);
    else if (strcmp(words[2], "nothing") == 0)
        memory_fill_nothing(&actor->source);
    else
        memory_fill_compressible(&actor->source);
    puts("{}");
}

/* Ranks have tensors of their own. */
static void shard_name(const struct actor *actor, size_t shard, char name[NAME_SIZE]) {
    snprintf(name, NAME_SIZE, "stage%u.layers.%zu.weight", actor->rank, shard);
}

static void verb_protect(struct actor *actor, char **words) {
    (void)words;
    uint64_t start = now();
    for (size_t shard = 0; shard < actor->source.count; shard++) {
        char name[NAME_SIZE];
        shard_name(actor, shard, name);
        const void *data = actor->source.data + memory_begin(&actor->source, shard);
        check(ckpt_protect_array(actor->ckpt, name, CKPT_U8, data, memory_length(&actor->source, shard)), "protect");
    }
    printf("{\"protect_ns\": %" PRIu64 "}\n", now() - start);
}

/* The work that protecting cannot do without: as many names, formatted and kept. */
static void verb_names(struct actor *actor, char **words) {
    (void)words;
    uint64_t start = now();
    char **names = calloc(actor->source.count, sizeof *names);
    for (size_t shard = 0; names && shard < actor->source.count; shard++) {
        char name[NAME_SIZE];
        shard_name(actor, shard, name);
        names[shard] = strdup(name);
    }
    printf("{\"names_ns\": %" PRIu64 "}\n", now() - start);
    for (size_t shard = 0; names && shard < actor->source.count; shard++)
        free(names[shard]);
    free(names);
}

/* ---- saving ---- */

static void sleep_until(uint64_t when) {
    struct timespec time = {.tv_sec = (time_t)(when / UINT64_C(1000000000)),
                            .tv_nsec = (long)(when % UINT64_C(1000000000))};
    while (when && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
        continue;
}

/* Computing, so to speak: the processor does not fall asleep. */
static void spin_until(uint64_t when) {
    while (now() < when)
        continue;
}

/* save STEP LEVEL-TO LEVEL-TO-WAIT-FOR [AT]: all times since the save began. Levels are numbers; 0 waits for none. */
static void verb_save(struct actor *actor, char **words) {
    struct ckpt_save_options options;
    CKPT_INIT(options);
    uint64_t step = number(words[1]);
    uint32_t level = (uint32_t)number(words[3]);
    options.to = (uint32_t)number(words[2]);
    sleep_until(number(words[4]));
    uint64_t start = now();
    int result = check(ckpt_save(actor->ckpt, step, &options), "save");
    uint64_t accepted = now();
    check(ckpt_fence(actor->ckpt, CKPT_DEFAULT_TIMEOUT), "fence");
    uint64_t captured = now(), durable = captured;
    if (result == CKPT_OK && level) {
        check(ckpt_wait(actor->ckpt, step, level, CKPT_PART, CKPT_DEFAULT_TIMEOUT), "wait");
        durable = now();
    }
    printf("{\"result\": %d, \"start\": %" PRIu64 ", \"save_ns\": %" PRIu64 ", \"captured_ns\": %" PRIu64
           ", \"durable_ns\": %" PRIu64 "}\n",
           result, start, accepted - start, captured - start, durable - start);
}

/* wait STEP LEVEL */
static void verb_wait(struct actor *actor, char **words) {
    check(ckpt_wait(actor->ckpt, number(words[1]), (uint32_t)number(words[2]), CKPT_VERSION, CKPT_DEFAULT_TIMEOUT),
          "wait");
    printf("{\"now\": %" PRIu64 "}\n", now());
}

/* steps FIRST COUNT: saves that many small versions, each durable before the next. */
static void verb_steps(struct actor *actor, char **words) {
    uint64_t first = number(words[1]), end = first + number(words[2]);
    for (uint64_t step = first; step < end; step++) {
        check(ckpt_save(actor->ckpt, step, NULL), "save");
        check(ckpt_fence(actor->ckpt, CKPT_DEFAULT_TIMEOUT), "fence");
        check(ckpt_wait(actor->ckpt, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT), "wait");
    }
    puts("{}");
}

/* An empty function that the compiler may not see through. */
static __attribute__((noinline)) int nothing(const void *pointer, uint64_t timeout_ms) {
    __asm__ volatile("" : : "r"(pointer), "r"(timeout_ms) : "memory");
    return 0;
}

/*
 * fence STEP COUNT: a save, time for its capture to end, then one fence (the one that finds the end)
 * between two calls that a system call trace shows, and COUNT more in a loop.
 */
static void verb_fence(struct actor *actor, char **words) {
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.to = CKPT_CAPTURED;
    uint64_t count = number(words[2]);
    check(ckpt_save(actor->ckpt, number(words[1]), &options), "save");
    spin_until(now() + 5000000);

    syscall(SYS_getppid);
    uint64_t start = now();
    int result = ckpt_fence(actor->ckpt, CKPT_DEFAULT_TIMEOUT);
    uint64_t first = now() - start;
    syscall(SYS_getppid);
    check(result, "fence");

    start = now();
    uint64_t clock = now() - start;
    start = now();
    for (uint64_t i = 0; i < count; i++)
        check(ckpt_fence(actor->ckpt, CKPT_DEFAULT_TIMEOUT), "fence");
    uint64_t fences = now() - start;
    start = now();
    for (uint64_t i = 0; i < count; i++)
        nothing(actor->ckpt, i);
    uint64_t calls = now() - start;
    printf("{\"first_ns\": %" PRIu64 ", \"clock_ns\": %" PRIu64 ", \"fence_ns\": %.3f, \"call_ns\": %.3f}\n", first,
           clock, (double)fences / (double)count, (double)calls / (double)count);
}

/* ---- restoring ---- */

/* target BYTES SHARDS [untouched]: memory to restore (or copy) into. */
static void verb_target(struct actor *actor, char **words) {
    memory_free(&actor->target);
    if (words[3])
        memory_reserve(&actor->target, number(words[1]), number(words[2]));
    else
        memory_new(&actor->target, number(words[1]), number(words[2]));
    puts("{}");
}

/* restore SHARDS: the latest version's first so many, each to its place in the target. */
static void verb_restore(struct actor *actor, char **words) {
    size_t count = number(words[1]);
    struct ckpt_read *reads = calloc(count, sizeof *reads);
    char(*names)[NAME_SIZE] = calloc(count, sizeof *names);
    if (!reads || !names)
        fail("restore");
    for (size_t shard = 0; shard < count; shard++) {
        shard_name(actor, shard, names[shard]);
        CKPT_INIT(reads[shard]);
        reads[shard].dtype = CKPT_U8;
        reads[shard].name = names[shard];
        reads[shard].data = actor->target.data + memory_begin(&actor->target, shard);
        reads[shard].dimensions = 1;
    }
    ckpt_restore *restore = NULL;
    uint64_t start = now();
    if (check(ckpt_restore_open(actor->ckpt, NULL, &restore), "restore") != CKPT_OK) {
        puts("{\"error\": \"there is no version to restore\"}");
        exit(1);
    }
    uint64_t opened = now();
    check(ckpt_restore_read_many(restore, reads, count), "read");
    uint64_t end = now();
    ckpt_restore_close(restore);
    size_t wrong = memory_find_wrong(&actor->target, 0, count);
    free(reads);
    free(names);
    if (wrong != SIZE_MAX) {
        printf("{\"error\": \"shard %zu came back wrong\"}\n", wrong);
        exit(1);
    }
    printf("{\"open_ns\": %" PRIu64 ", \"restore_ns\": %" PRIu64 "}\n", opened - start, end - start);
}

/* ---- what is compared with ---- */

/* copy: one memcpy of the source into the target. */
static void verb_copy(struct actor *actor, char **words) {
    (void)words;
    uint64_t start = now();
    memcpy(actor->target.data, actor->source.data, actor->source.size);
    __asm__ volatile("" : : "r"(actor->target.data) : "memory");
    printf("{\"copy_ns\": %" PRIu64 "}\n", now() - start);
}

static void answer_pings(int fd) {
    char bytes[PING_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (recv(fd, bytes, sizeof bytes, 0) > 0)
        if (send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) < 0)
            break;
    _exit(0);
}

/* pinger: starts the process that answers pings. A fork: not from a process whose captures are measured. */
static void verb_pinger(struct actor *actor, char **words) {
    (void)words;
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        fail("socketpair");
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        close(fds[0]);
        answer_pings(fds[1]);
    }
    close(fds[1]);
    actor->ping_fd = fds[0];
    puts("{}");
}

/* ping: how long sending it takes, and until the answer. */
static void verb_ping(struct actor *actor, char **words) {
    (void)words;
    char bytes[PING_BYTES] = {0};
    uint64_t start = now();
    ssize_t sent = send(actor->ping_fd, bytes, sizeof bytes, 0);
    uint64_t send_ns = now() - start;
    if (sent < 0 || recv(actor->ping_fd, bytes, sizeof bytes, 0) < 0)
        fail("ping");
    printf("{\"send_ns\": %" PRIu64 ", \"ping_ns\": %" PRIu64 "}\n", send_ns, now() - start);
}

/* fork: a child that shares all pages until the actor ends. */
static void verb_fork(struct actor *actor, char **words) {
    (void)actor, (void)words;
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    printf("{\"child\": %d}\n", child);
}

/* ---- commands ---- */

static const struct {
    const char *name;
    void (*run)(struct actor *actor, char **words);
    unsigned arguments;
} verbs[] = {
    {"open", verb_open, 4},     {"close", verb_close, 0},   {"memory", verb_memory, 4},   {"protect", verb_protect, 0},
    {"names", verb_names, 0},   {"save", verb_save, 3},     {"wait", verb_wait, 2},       {"steps", verb_steps, 2},
    {"fence", verb_fence, 2},   {"target", verb_target, 2}, {"restore", verb_restore, 1}, {"copy", verb_copy, 0},
    {"pinger", verb_pinger, 0}, {"ping", verb_ping, 0},     {"fork", verb_fork, 0},
};

static void obey(struct actor *actor, char *line) {
    char *words[WORDS_MAX + 1] = {0}, *rest = line;
    unsigned count = 0;
    while (count < WORDS_MAX && (words[count] = strtok_r(rest, " \n", &rest)))
        count++;
    for (size_t i = 0; count && i < sizeof verbs / sizeof verbs[0]; i++)
        if (strcmp(words[0], verbs[i].name) == 0 && count > verbs[i].arguments) {
            verbs[i].run(actor, words);
            return;
        }
    printf("{\"error\": \"no such command, or too few words: %s\"}\n", words[0] ? words[0] : "");
}

int main(void) {
    struct actor actor = {.ping_fd = -1};
    char line[512];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (fgets(line, sizeof line, stdin)) {
        obey(&actor, line);
        fflush(stdout);
    }
    ckpt_close(actor.ckpt);
    return 0;
}
