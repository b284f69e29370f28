/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sim: the daemon's control plane, and libckpt in its clients, in a world that comes from a seed.
 *
 *   sim --seed N [--verbose]          one run; a failure tells the invariant and the last events
 *   sim --from N --count M            many, each in a process of its own
 *   sim --replay --seed N             twice, and the events must be the same
 *   sim --minutes M                   from a random seed on, until the time is over
 *   sim --bug NAME --count M          must fail within M seeds: the simulator finds what is planted
 *
 * Faults that must be survived, in any order and any number:
 *
 *   daemons      are killed at any moment (files stay as they are), or told to stop
 *   nodes        lose power at any moment: what they had not synced is kept, dropped, torn at a sector
 *                (a block, where the tier has TIER_DIRECT) or garbage; names not synced are there or
 *                not; a tier without TIER_SURVIVES_REBOOT is empty afterwards. Or they lose their disk
 *   everything   loses power at once, the parallel tier too
 *   tiers        fail an operation (EIO, ENOSPC), also after they have done it; a retried rename answers
 *                ENOENT though it happened; one operation, or all for a while, are slow by a thousand, or
 *                stall; for minutes a disk is full, fails altogether or hangs, and comes back; a read
 *                brings other bytes than were written, where another copy is
 *   shared tiers show other nodes' entries late, or names that are gone, until the node changes the
 *                directory itself or syncs it (caches of network file systems)
 *   trainers     die, also leaving a child that holds their socket; hang; give fences up and change their
 *                memory; come back to a new daemon, or as a new process of the same run; miss steps; are
 *                followed by a run of another world size
 *   clocks       of nodes jump by days, that of the parallel tier ahead by days and back by seconds
 *
 * What no program can survive is not drawn: lies of a sync that said it had succeeded, other bytes in
 * the last copy, the clock of a file server set back by more than a heartbeat may be old.
 *
 * What must hold then, after every event that can tell:
 *
 *   - what was reported durable at a level is kept by every crash that this level survives, byte for
 *     byte, until something newer is complete there
 *   - what is committed, listed as complete, or read, has the bytes of the moment of the save, and no
 *     save that was given up is among it; memory is read piece by piece, so that early changes show
 *   - all ranks of a run get the same decision, and it is not older than what was reported GLOBAL
 *   - nobody removes what somebody writes; a tier is given up after its tries, not before
 *   - requests are answered by their deadlines, and calls of the library end by theirs; when idle, nothing is reserved,
 * open or in flight, and descriptors are as many as before
 *   - once faults end, everything becomes GLOBAL
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#define NOTES_KEPT 60
#define NOTE_SIZE 200
#define STEPS_MAX 4000000

struct sim sim = {.node = SIM_OUTSIDE, .bug = ""};
static char notes[NOTES_KEPT][NOTE_SIZE];
static uint64_t note_count;

/* ---- chance ---- */

static uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }

static uint64_t mixed(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* xoshiro256**, seeded by splitmix64: both public domain. */
uint64_t sim_random(void) {
    uint64_t *s = sim.random, result = rotated(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotated(s[3], 45);
    return result;
}

uint64_t sim_below(uint64_t bound) { return bound > 1 ? sim_random() % bound : 0; }
bool sim_chance(uint32_t of, uint32_t in) { return sim_below(in) < of; }
bool sim_bug(const char *name) { return strcmp(sim.bug, name) == 0; }

/* ---- events ---- */

static void digest_add(const void *data, size_t size) {
    for (size_t i = 0; i < size; i++)
        sim.digest = (sim.digest ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
}

void sim_note(const char *format, ...) {
    char *note = notes[note_count++ % NOTES_KEPT];
    int length = snprintf(note, NOTE_SIZE, "%12.6f ", (double)sim.now_ns / 1e9);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(note + length, NOTE_SIZE - (size_t)length, format, arguments);
    va_end(arguments);
    digest_add(note, strlen(note));
    digest_add(&sim.steps, sizeof sim.steps);
    if (sim.verbose)
        fprintf(stderr, "%s\n", note);
}

void sim_fail(const char *invariant, const char *format, ...) {
    uint64_t first = note_count > NOTES_KEPT ? note_count - NOTES_KEPT : 0;
    for (uint64_t i = first; i < note_count; i++)
        fprintf(stderr, "%s\n", notes[i % NOTES_KEPT]);
    for (int i = 0; i < node_count; i++)
        node_describe(i);
    fprintf(stderr, "seed %llu, step %llu%s%s\nbroken: %s\n", (unsigned long long)sim.seed,
            (unsigned long long)sim.steps, *sim.bug ? ", planted " : "", sim.bug, invariant);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\nagain: sim --seed %llu --verbose\n", (unsigned long long)sim.seed);
    _exit(1);
}

/* ---- one run ---- */

static void draw_weather(void) {
    static const uint32_t rates[] = {0, 0, 10, 60, 200};
    sim.weather = (struct sim_weather){
        .eio = rates[sim_below(ARRAY_SIZE(rates))],
        .enospc = rates[sim_below(ARRAY_SIZE(rates))],
        .slow = rates[sim_below(ARRAY_SIZE(rates))],
        .stall = sim_chance(1, 4) ? 3 : 0,
        .rot = sim_chance(1, 3) ? 2000 : 0,
        .late_ms = sim_chance(1, 3) ? UINT64_C(1) << sim_below(16) : 0,
        .crashes = sim_chance(5, 6),
        .clock_jumps = sim_chance(1, 3),
    };
}

static void run_seed(uint64_t seed) {
    uint64_t state = seed;
    sim.seed = seed;
    for (size_t i = 0; i < ARRAY_SIZE(sim.random); i++)
        sim.random[i] = mixed(&state);
    sim.now_ns = NANOSECONDS_PER_SECOND;
    sim.wall_ns = UINT64_C(1800000000) * NANOSECONDS_PER_SECOND;
    draw_weather();
    node_count = 1 + (int)sim_below(SIM_NODES_MAX);
    parallel = disk_new("parallel", true);
    bool has_local = sim_chance(5, 6);
    for (int i = 0; i < node_count; i++)
        node_init(i, has_local);
    operator_start();
    while (!operator_over()) {
        SIM_CHECK(sim_step(), "something goes on until the end", "nothing will happen any more");
        for (int i = 0; i < node_count; i++)
            node_check(i);
        SIM_CHECK(sim.steps < STEPS_MAX, "a run ends", "it goes on and on");
    }
    digest_add(sim.random, sizeof sim.random);
}

/* ---- many ---- */

/* In a process of its own, since it leaves daemons behind. The exit status; *ret_digest if it is 0. */
static int run_apart(uint64_t seed, bool quiet, uint64_t *ret_digest) {
    int pair[2];
    if (pipe(pair) < 0)
        return -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (quiet && !freopen("/dev/null", "w", stderr))
            _exit(1);
        run_seed(seed);
        _exit(write(pair[1], &sim.digest, sizeof sim.digest) == sizeof sim.digest ? 0 : 1);
    }
    close(pair[1]);
    if (read(pair[0], ret_digest, sizeof *ret_digest) != sizeof *ret_digest)
        *ret_digest = 0;
    close(pair[0]);
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFSIGNALED(status) && !quiet)
        fprintf(stderr, "seed %llu: signal %d\n", (unsigned long long)seed, WTERMSIG(status));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static int run_many(uint64_t from, uint64_t count, uint64_t minutes) {
    uint64_t digest, failed = 0, done = 0;
    time_t until = time(NULL) + (time_t)minutes * 60;
    for (; minutes ? time(NULL) < until : done < count; done++)
        failed += run_apart(from + done, false, &digest) != 0;
    printf("%llu seeds from %llu on: %llu failed\n", (unsigned long long)done, (unsigned long long)from,
           (unsigned long long)failed);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int run_bug(uint64_t from, uint64_t count) {
    uint64_t digest;
    for (uint64_t i = 0; i < count; i++)
        if (run_apart(from + i, !sim.verbose, &digest) != 0) {
            printf("planted %s: found by seed %llu\n", sim.bug, (unsigned long long)(from + i));
            return EXIT_SUCCESS;
        }
    printf("planted %s: not found in %llu seeds\n", sim.bug, (unsigned long long)count);
    return EXIT_FAILURE;
}

static int run_twice(uint64_t seed) {
    uint64_t first, second;
    int r = run_apart(seed, false, &first), again = run_apart(seed, false, &second);
    printf("seed %llu: %016llx and %016llx\n", (unsigned long long)seed, (unsigned long long)first,
           (unsigned long long)second);
    return r || again || first != second ? EXIT_FAILURE : EXIT_SUCCESS;
}

static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int usage(void) {
    fprintf(stderr, "usage: sim [--seed N] [--from N --count M] [--minutes M] [--replay] [--bug NAME] [--verbose]\n");
    return 2;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},  {"from", required_argument, NULL, 'f'},
        {"count", required_argument, NULL, 'c'}, {"minutes", required_argument, NULL, 'm'},
        {"bug", required_argument, NULL, 'b'},   {"replay", no_argument, NULL, 'r'},
        {"verbose", no_argument, NULL, 'v'},     {0},
    };
    uint64_t seed = 0, count = 0, minutes = 0;
    bool replay = false;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;)
        switch (option) {
        case 's':
        case 'f':
            seed = strtoull(optarg, NULL, 0);
            break;
        case 'c':
            count = strtoull(optarg, NULL, 0);
            break;
        case 'm':
            minutes = strtoull(optarg, NULL, 0);
            seed = (uint64_t)time(NULL) * 1000003 % 1000000000;
            break;
        case 'b':
            sim.bug = optarg;
            break;
        case 'r':
            replay = true;
            break;
        case 'v':
            sim.verbose = true;
            break;
        default:
            return usage();
        }
    raise_descriptor_limit();
    clearenv(); /* libckpt looks there */
    if (replay)
        return run_twice(seed);
    if (*sim.bug)
        return run_bug(seed, max_u64(count, 1));
    if (count || minutes)
        return run_many(seed, count, minutes);
    run_seed(seed);
    printf("seed %llu: %llu steps, %.3f s, digest %016llx\n", (unsigned long long)seed, (unsigned long long)sim.steps,
           (double)sim.now_ns / 1e9, (unsigned long long)sim.digest);
    return EXIT_SUCCESS;
}
