/* SPDX-License-Identifier: Apache-2.0 */
/* One decision per run, whoever asks, however many at once, and whatever the last run left behind. */
#include "tests/unit/tiers/support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

struct fixture {
    struct sandbox sandbox;
    struct tier *tiers[2]; /* local; parallel, which decides */
    char host[256], boot_id[40];
    uint64_t start;
};

static int setup(void **state) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    sandbox_init(&fixture->sandbox);
    fixture->tiers[0] = new_posix(&fixture->sandbox, "local");
    fixture->tiers[1] = new_posix(&fixture->sandbox, "parallel");
    assert_int_equal(claim_host(fixture->host, fixture->boot_id), 0);
    assert_int_equal(claim_pid_start((uint32_t)getpid(), &fixture->start), 0);
    *state = fixture;
    return 0;
}

static int teardown(void **state) {
    struct fixture *fixture = *state;
    tier_free(fixture->tiers[0]);
    tier_free(fixture->tiers[1]);
    sandbox_deinit(&fixture->sandbox);
    free(fixture);
    return 0;
}

static struct claim_request request_of(const struct fixture *fixture, const char *run_id) {
    return (struct claim_request){
        .job = TEST_JOB,
        .run_id = run_id,
        .world = 2,
        .host = fixture->host,
        .boot_id = fixture->boot_id,
        .pid = (uint32_t)getpid(),
        .pid_start = fixture->start,
        .nonce = 42,
        .decider = fixture->tiers[1],
        .tiers = fixture->tiers,
        .tier_count = 2,
    };
}

static struct claim_result claim_fine(const struct claim_request *request) {
    struct claim_result result;
    bool retry;
    struct problem problem = PROBLEM_NONE;
    assert_fine(claim_run(request, &result, &retry, &problem), &problem);
    return result;
}

static void claim_path(const struct fixture *fixture, uint64_t generation, const char *file, char ret_path[512]) {
    char job[256];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    assert_true(snprintf(ret_path, 512, "%s/parallel/%s/%llu/%s", fixture->sandbox.path, job,
                         (unsigned long long)generation, file) < 512);
}

/* Sets the heartbeat back. */
static void silence(const struct fixture *fixture, uint64_t generation, int seconds) {
    char path[512];
    struct timespec times[2];
    claim_path(fixture, generation, "run", path);
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void test_fresh_and_join(void **state) {
    struct claim_request request = request_of(*state, "one");
    struct claim_result first = claim_fine(&request), second = claim_fine(&request);
    assert_int_equal(first.record.generation, 1);
    assert_false(first.record.resumes);
    assert_false(first.joined);
    assert_true(second.joined);
    assert_memory_equal(&first.record, &second.record, sizeof first.record);
    assert_string_equal(first.record.job, TEST_JOB);
    assert_int_equal(first.record.world, 2);
    char path[512];
    claim_path(*state, 1, "run.000000000000002a.tmp", path);
    assert_int_equal(access(path, F_OK), -1);
}

static void test_held_here(void **state) {
    struct claim_request request = request_of(*state, "one");
    claim_fine(&request);
    request.run_id = "two";
    struct claim_result result;
    struct problem problem = PROBLEM_NONE;
    bool retry = true;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    assert_false(retry);
    char pid[32];
    snprintf(pid, sizeof pid, "process %d", getpid());
    assert_non_null(strstr(problem.text, pid));
    assert_non_null(strstr(problem.text, "'one'"));
    assert_non_null(strstr(problem.text, ((struct fixture *)*state)->host));
}

static void test_held_elsewhere(void **state) {
    struct claim_request request = request_of(*state, "one");
    request.host = "another-host";
    claim_fine(&request);
    request = request_of(*state, "two");
    struct claim_result result;
    bool retry = false;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    assert_true(retry);
    silence(*state, 1, CLAIM_LAPSE_MS / 1000 - 5);
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    silence(*state, 1, CLAIM_LAPSE_MS / 1000 + 1);
    assert_int_equal(claim_touch(request.decider, TEST_JOB, 1), 0);
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    silence(*state, 1, CLAIM_LAPSE_MS / 1000 + 1);
    assert_int_equal(claim_fine(&request).record.generation, 2);
}

static void *linger(void *argument) { return (void *)(intptr_t)pause(); }

static void test_process_that_lost_its_first_thread(void **state) {
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, linger, NULL) != 0 || write(ready[1], "", 1) != 1)
            _exit(1);
        syscall(SYS_exit, 0); /* of this thread only */
    }
    char byte;
    uint64_t start;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    for (int i = 0; i < 1000; i++) /* before and after the thread is gone */
        assert_int_equal(claim_pid_start((uint32_t)pid, &start), 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    close(ready[0]);
    close(ready[1]);
}

static void test_dead_process(void **state) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        pause();
        _exit(0);
    }
    struct claim_request request = request_of(*state, "one");
    request.pid = (uint32_t)pid;
    assert_int_equal(claim_pid_start(request.pid, &request.pid_start), 0);
    claim_fine(&request);
    struct claim_request other = request_of(*state, "two");
    struct claim_result result;
    bool retry;
    assert_int_equal(claim_run(&other, &result, &retry, NULL), CLAIM_E_HELD);

    uint64_t start;
    siginfo_t info;
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    assert_int_equal(claim_pid_start(request.pid, &start), -ESRCH); /* a zombie */
    assert_true(claim_fine(&request).joined);                       /* other ranks of the same launch */
    assert_int_equal(claim_fine(&other).record.generation, 2);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(claim_pid_start(request.pid, &start), -ESRCH);
}

static void test_reused_pid(void **state) {
    struct claim_request request = request_of(*state, "one");
    request.pid_start--;
    claim_fine(&request);
    struct claim_request other = request_of(*state, "two");
    assert_int_equal(claim_fine(&other).record.generation, 2);
}

static void test_ended(void **state) {
    struct claim_request request = request_of(*state, "one");
    struct tier *decider = request.decider;
    claim_fine(&request);
    assert_int_equal(claim_end(decider, TEST_JOB, 1), 0);
    assert_int_equal(claim_end(decider, TEST_JOB, 1), 0);
    struct claim_result again = claim_fine(&request);
    assert_false(again.joined);
    assert_int_equal(again.record.generation, 2);
    assert_int_equal(claim_end(decider, TEST_JOB, 2), 0);
    request.run_id = "two";
    assert_int_equal(claim_fine(&request).record.generation, 3);
    assert_int_equal(claim_touch(decider, TEST_JOB, 3), 0);
    assert_int_equal(claim_touch(decider, TEST_JOB, 4), TIER_E_ABSENT);
}

static void test_abandoned(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    struct claim_result result;
    struct problem problem = PROBLEM_NONE;
    bool retry;
    atomic_bool abandoned = true;
    request.abandoned = &abandoned;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), -ECANCELED);
    request.abandoned = NULL;
    request.run_id = "two";
    assert_int_equal(claim_fine(&request).record.generation, 1); /* nothing is in the way */
}

/* Resuming. */

static void test_resume_newest(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    claim_fine(&request);
    make_version(fixture->tiers[1], (struct version_id){1, 10}, 2);
    make_version(fixture->tiers[0], (struct version_id){1, 20}, 2);
    /* Not complete: it does not count. */
    struct part_plan plan = {.version = {1, 30}, .world = 2};
    assert_int_equal(commit_part(fixture->tiers[0], &plan, 1, NULL), 0);
    assert_int_equal(claim_end(request.decider, TEST_JOB, 1), 0);
    request.run_id = "two";
    struct claim_result result = claim_fine(&request);
    assert_int_equal(result.record.generation, 2);
    assert_true(result.record.resumes);
    assert_int_equal(result.record.resume_generation, 1);
    assert_int_equal(result.record.resume_step, 20);
    assert_int_equal(result.warning.code, 0);
}

/* What only this node has is for runs that may all be here again. */
static void test_resume_grown(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    request.world = 2;
    claim_fine(&request);
    make_version(fixture->tiers[1], (struct version_id){1, 10}, 2);
    make_version(fixture->tiers[0], (struct version_id){1, 20}, 2);
    assert_int_equal(claim_end(request.decider, TEST_JOB, 1), 0);
    request.run_id = "two";
    request.world = 3;
    struct claim_result result = claim_fine(&request);
    assert_int_equal(result.record.resume_step, 10);
    assert_non_null(strstr(result.warning.text, "step 20 cannot be used"));
    assert_non_null(strstr(result.warning.text, "this node only"));
    assert_int_equal(claim_end(request.decider, TEST_JOB, 2), 0);
    request.run_id = "three";
    request.world = 2;
    result = claim_fine(&request);
    assert_int_equal(result.record.resume_step, 20);
    assert_int_equal(result.warning.code, 0);
}

/* But nobody starts afresh because of that. */
static void test_resume_grown_nothing_else(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    make_version(fixture->tiers[0], (struct version_id){1, 20}, 2);
    request.world = 3;
    struct claim_result result = claim_fine(&request);
    assert_true(result.record.resumes);
    assert_int_equal(result.record.resume_step, 20);
}

static void test_only_incomplete_is_fresh(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    claim_fine(&request);
    struct part_plan plan = {.version = {1, 30}, .world = 2};
    assert_int_equal(commit_part(fixture->tiers[0], &plan, 1, NULL), 0);
    assert_int_equal(claim_end(request.decider, TEST_JOB, 1), 0);
    assert_false(claim_fine(&request).record.resumes);
}

static void damage(const struct fixture *fixture, const char *tier, struct version_id version, const char *file) {
    char path[512];
    sandbox_file(&fixture->sandbox, tier, version, file, path);
    flip_bit(path, 20);
}

static void test_damaged_passed_over(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    struct version_id old = {1, 10}, middle = {1, 20}, newest = {1, 30};
    make_version(fixture->tiers[1], old, 2);
    make_version(fixture->tiers[1], middle, 2);
    make_version(fixture->tiers[0], middle, 2);
    make_version(fixture->tiers[1], newest, 2);
    char path[512];
    sandbox_file(&fixture->sandbox, "parallel", newest, "rank-00001.safetensors", path);
    assert_int_equal(truncate(path, 100), 0);
    damage(fixture, "local", middle, "rank-00000.json");
    struct claim_result result = claim_fine(&request);
    assert_int_equal(result.record.generation, 2); /* somebody deleted the run file of 1 */
    assert_int_equal(result.record.resume_step, 20);
    assert_true(result.warning.code < 0);
    assert_non_null(strstr(result.warning.text, "step 30"));
    assert_non_null(strstr(result.warning.text, path));
    assert_non_null(strstr(result.warning.text, "step 20"));
}

/* Who joins is told what the run passed over, as long as it is there; not of what came later. */
static void test_joining_rank_is_told(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    struct version_id old = {1, 10}, newest = {1, 30}, late = {1, 40};
    make_version(fixture->tiers[1], old, 2);
    make_version(fixture->tiers[1], newest, 2);
    damage(fixture, "parallel", newest, "complete.json");
    struct claim_result result = claim_fine(&request);
    assert_true(result.warning.code < 0);
    make_version(fixture->tiers[1], late, 2);
    make_version(fixture->tiers[1], (struct version_id){2, 11}, 2);
    damage(fixture, "parallel", (struct version_id){2, 11}, "complete.json");
    assert_true(claim_fine(&request).joined);
    for (int told = 1; told >= 0; told--) {
        struct catalog catalogs[2];
        struct problem warning = PROBLEM_NONE, problem = PROBLEM_NONE;
        for (size_t i = 0; i < 2; i++)
            assert_fine(catalog_scan(fixture->tiers[i], TEST_JOB, &catalogs[i], &problem), &problem);
        claim_passed_over(&request, catalogs, &result.record, &warning);
        assert_string_equal(warning.text, told ? result.warning.text : "");
        catalog_deinit(&catalogs[0]);
        catalog_deinit(&catalogs[1]);
        assert_fine(retention_remove(fixture->tiers[1], TEST_JOB, told ? newest : late, 1, &problem), &problem);
    }
}

static void test_none_usable(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    struct version_id first = {1, 10}, second = {1, 20}, third = {1, 30};
    make_version(fixture->tiers[1], first, 2);
    make_version(fixture->tiers[1], second, 2);
    make_version(fixture->tiers[0], third, 2);
    damage(fixture, "parallel", first, "complete.json");
    damage(fixture, "parallel", second, "rank-00000.json");
    assert_int_equal(catalog_condemn(fixture->tiers[0], TEST_JOB, third, 0, NULL), 0);
    struct claim_result result;
    bool retry;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), -ENODATA);
    assert_non_null(strstr(problem.text, "none is usable"));
    assert_non_null(strstr(problem.text, "step 30"));
}

/* What a crash leaves between the directory and the link is claimed as it stands. */
static void test_unclaimed_directory(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    char job[256], path[300];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    snprintf(path, sizeof path, "%s/7", job);
    assert_int_equal(tier_make_directories(request.decider, path), 0);
    snprintf(path, sizeof path, "%s/7/run.0000000000000001.tmp", job);
    assert_int_equal(tier_write_file(request.decider, path, "{", 1), 0);
    assert_int_equal(claim_fine(&request).record.generation, 7);
    assert_true(claim_fine(&request).joined);
}

static void test_exceeds_every_tier(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    make_version(fixture->tiers[0], (struct version_id){9, 1}, 1);
    struct claim_result result = claim_fine(&request);
    assert_int_equal(result.record.generation, 10);
    assert_int_equal(result.record.resume_generation, 9);
}

/* A heartbeat from a future that the clock was set back from does not hold the job until it has come. */
static void test_heartbeat_of_the_future(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    request.host = "elsewhere";
    claim_fine(&request);
    request = request_of(fixture, "two");
    silence(fixture, 1, -100 * 24 * 3600);
    struct claim_result result;
    bool retry = false;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    assert_true(retry);
    char path[512];
    struct stat status;
    struct timespec now;
    claim_path(fixture, 1, "run", path);
    assert_int_equal(stat(path, &status), 0);
    clock_gettime(CLOCK_REALTIME, &now);
    assert_true(status.st_mtime <= now.tv_sec);
    silence(fixture, 1, CLAIM_LAPSE_MS / 1000 + 1);
    assert_int_equal(claim_fine(&request).record.generation, 2);
}

/* A run file that cannot be read belongs to somebody: alive until it is silent. */
static void test_damaged_run_file(void **state) {
    struct fixture *fixture = *state;
    struct claim_request request = request_of(fixture, "one");
    claim_fine(&request);
    char path[512];
    claim_path(fixture, 1, "run", path);
    flip_bit(path, 0);
    struct claim_result result;
    bool retry = false;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(claim_run(&request, &result, &retry, &problem), CLAIM_E_HELD);
    assert_true(retry);
    assert_non_null(strstr(problem.text, path));
    silence(fixture, 1, CLAIM_LAPSE_MS / 1000 + 1);
    assert_int_equal(claim_fine(&request).record.generation, 2);
}

static void test_failing_tier(void **state) {
    struct fixture *fixture = *state;
    for (unsigned n = 1;; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "any:%u:eio", n);
        struct tier *decider = fails(new_mem("decider"), fault);
        struct claim_request request = request_of(fixture, "one");
        struct claim_result result;
        bool retry;
        struct problem problem = PROBLEM_NONE;
        request.decider = decider;
        request.tiers = &decider;
        request.tier_count = 1;
        int r = claim_run(&request, &result, &retry, &problem);
        if (r)
            assert_names_tier(&problem, "decider");
        bool fired = tier_fault_fired(decider) > 0;
        if (fired) {
            problem = PROBLEM_NONE;
            if (r) /* a program that tries again draws another id: its first try must not hold the job */
                request.run_id = "two";
            assert_fine(claim_run(&request, &result, &retry, &problem), &problem);
            assert_true(result.record.generation == 1);
        }
        tier_free(decider);
        if (!fired) {
            assert_int_equal(r, 0);
            break;
        }
    }
}

/* Races. Each contender starts when all are ready, and writes down what it was told. */

enum { CONTENDERS = 12, ROUNDS = 8 };

struct told {
    int result;
    uint64_t generation;
    bool joined, resumes;
    uint64_t step;
};

static void contend(const struct fixture *fixture, bool same_run, int start_fd, unsigned number, struct told *told) {
    char run_id[32];
    snprintf(run_id, sizeof run_id, same_run ? "same" : "run-%u", number);
    struct claim_request request = request_of(fixture, run_id);
    request.nonce = number + 1;
    request.pid = (uint32_t)getpid();
    struct claim_result result;
    bool retry;
    char byte;
    struct problem problem = PROBLEM_NONE;
    if (claim_pid_start(request.pid, &request.pid_start) < 0 || read(start_fd, &byte, 1) != 0)
        _exit(1);
    told->result = claim_run(&request, &result, &retry, &problem);
    if (told->result == 0) {
        told->generation = result.record.generation;
        told->joined = result.joined;
        told->resumes = result.record.resumes;
        told->step = result.record.resume_step;
    }
    pause(); /* alive until all have been told */
}

static void race(struct fixture *fixture, bool same_run, struct told *told) {
    int start[2];
    pid_t pids[CONTENDERS];
    assert_int_equal(pipe(start), 0);
    memset(told, 0, CONTENDERS * sizeof *told);
    for (unsigned i = 0; i < CONTENDERS; i++) {
        told[i].result = INT32_MAX;
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            close(start[1]);
            contend(fixture, same_run, start[0], i, &told[i]);
            _exit(0);
        }
    }
    close(start[0]);
    close(start[1]);
    for (unsigned i = 0; i < CONTENDERS; i++) {
        while (__atomic_load_n(&told[i].result, __ATOMIC_ACQUIRE) == INT32_MAX)
            sched_yield();
    }
    for (unsigned i = 0; i < CONTENDERS; i++) {
        assert_int_equal(kill(pids[i], SIGKILL), 0);
        assert_int_equal(waitpid(pids[i], NULL, 0), pids[i]);
    }
}

static void test_race(void **state) {
    struct fixture *fixture = *state;
    struct told *told =
        mmap(NULL, CONTENDERS * sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(told != MAP_FAILED);
    uint64_t generation = 0;
    for (unsigned round = 0; round < ROUNDS; round++) {
        bool same_run = round % 2;
        if (round == 3)
            make_version(fixture->tiers[1], (struct version_id){generation, 5}, 1);
        race(fixture, same_run, told);
        unsigned won = 0, joined = 0, held = 0;
        for (unsigned i = 0; i < CONTENDERS; i++) {
            if (told[i].result == CLAIM_E_HELD) {
                held++;
                continue;
            }
            assert_int_equal(told[i].result, 0);
            assert_int_equal(told[i].generation, generation + 1);
            assert_int_equal(told[i].resumes, round >= 3);
            won += !told[i].joined;
            joined += told[i].joined;
        }
        assert_int_equal(won, 1);
        assert_int_equal(joined, same_run ? CONTENDERS - 1 : 0);
        assert_int_equal(held, same_run ? 0 : CONTENDERS - 1);
        generation++;
        /* The next run of the same id is another run only if this one has ended. */
        if (same_run)
            assert_int_equal(claim_end(fixture->tiers[1], TEST_JOB, generation), 0);
    }
    munmap(told, CONTENDERS * sizeof *told);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fresh_and_join, setup, teardown),
        cmocka_unit_test_setup_teardown(test_held_here, setup, teardown),
        cmocka_unit_test_setup_teardown(test_held_elsewhere, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dead_process, setup, teardown),
        cmocka_unit_test(test_process_that_lost_its_first_thread),
        cmocka_unit_test_setup_teardown(test_reused_pid, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ended, setup, teardown),
        cmocka_unit_test_setup_teardown(test_abandoned, setup, teardown),
        cmocka_unit_test_setup_teardown(test_resume_newest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_resume_grown, setup, teardown),
        cmocka_unit_test_setup_teardown(test_resume_grown_nothing_else, setup, teardown),
        cmocka_unit_test_setup_teardown(test_only_incomplete_is_fresh, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_passed_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_joining_rank_is_told, setup, teardown),
        cmocka_unit_test_setup_teardown(test_none_usable, setup, teardown),
        cmocka_unit_test_setup_teardown(test_heartbeat_of_the_future, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unclaimed_directory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_exceeds_every_tier, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_run_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failing_tier, setup, teardown),
        cmocka_unit_test_setup_teardown(test_race, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
