/* SPDX-License-Identifier: Apache-2.0 */
/* What may go goes, and nothing else; and it goes whole. */
#include "tests/unit/tiers/support.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Choosing, from catalogs written by hand: "2/30c" is generation 2, step 30, complete; p: pinned; d:
 * damaged. */

static struct catalog parse_catalog(const char *text) {
    struct catalog catalog = {.versions = calloc(32, sizeof *catalog.versions),
                              .generations = calloc(32, sizeof *catalog.generations)};
    assert_true(catalog.versions && catalog.generations);
    while (*text) {
        struct catalog_version *version = &catalog.versions[catalog.version_count++];
        char *end;
        version->id.generation = strtoull(text, &end, 10);
        assert_int_equal(*end, '/');
        version->id.step = strtoull(end + 1, &end, 10);
        for (; *end && *end != ' '; end++) {
            version->complete |= *end == 'c';
            version->pinned |= *end == 'p';
            version->damaged |= *end == 'd';
        }
        text = *end ? end + 1 : end;
    }
    return catalog;
}

static void add_run(struct catalog *catalog, uint64_t generation, uint64_t resume_generation, uint64_t resume_step) {
    catalog->generations[catalog->generation_count++] =
        (struct catalog_generation){.generation = generation,
                                    .has_run = true,
                                    .run = {.generation = generation,
                                            .resumes = resume_generation > 0,
                                            .resume_generation = resume_generation,
                                            .resume_step = resume_step}};
}

static void expect(const struct catalog *catalog, struct retention_policy policy, uint64_t current,
                   struct retention_known busy, const char *expected) {
    struct version_id *victims;
    size_t count;
    assert_int_equal(retention_choose(catalog, &policy, current, busy, &victims, &count), 0);
    char text[512] = "";
    for (size_t i = count; i-- > 0;)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%llu/%llu", text[0] ? " " : "",
                 (unsigned long long)victims[i].generation, (unsigned long long)victims[i].step);
    free(victims);
    assert_string_equal(text, expected);
}

static void test_choose(void **state) {
    static const struct {
        const char *catalog;
        uint32_t keep;
        uint64_t keep_every, current;
        const char *victims;
    } cases[] = {
        {"", 1, 0, 1, ""},
        {"1/10c", 1, 0, 1, ""},
        {"1/10c 1/20c", 1, 0, 1, "1/10"},
        {"1/10c 1/20c", 0, 0, 1, "1/10"},
        {"1/10c 1/20c 1/30c", 2, 0, 1, "1/10"},
        {"1/10c 1/20c 1/30c 1/40c", 1, 20, 1, "1/10 1/30"},
        {"1/10c 1/20cp 1/30c", 1, 0, 1, "1/10"},
        /* Nothing goes before the new one is complete. */
        {"1/10c 1/20", 1, 0, 1, ""},
        {"1/10 1/20", 1, 0, 1, ""},
        /* Incomplete ones: older than a complete one, or of a dead run. */
        {"1/10 1/20c 1/30", 1, 0, 1, "1/10"},
        {"1/10c 1/20 2/15", 1, 0, 2, "1/20"},
        {"1/10c 1/20 2/15 3/1", 1, 0, 2, "1/20"},
        {"1/10c 1/20", 1, 0, 0, "1/20"},
        {"1/10c 1/20p", 1, 0, 0, ""},
        /* A rollback takes effect with the first complete version of the new run. */
        {"1/10c 1/20c 2/15", 2, 0, 2, ""},
        {"1/10c 1/20c 2/15c", 1, 0, 2, "1/10 1/20"},
        /* Damaged ones may be repaired, until a newer one is complete. */
        {"1/10c 1/20d", 1, 0, 2, ""},
        {"1/10c 1/20d 2/20c", 1, 0, 2, "1/10 1/20"},
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct catalog catalog = parse_catalog(cases[i].catalog);
        struct retention_policy policy = {.keep = cases[i].keep, .keep_every = cases[i].keep_every};
        expect(&catalog, policy, cases[i].current, (struct retention_known){0}, cases[i].victims);
        catalog_deinit(&catalog);
    }
}

static void test_choose_resume_version(void **state) {
    struct retention_policy policy = {.keep = 1};
    struct retention_known none = {0};
    /* Run 2 went on from 10, because 20 is damaged, though it looks complete from here. */
    struct catalog catalog = parse_catalog("1/10c 1/20c 2/15");
    add_run(&catalog, 1, 0, 0);
    add_run(&catalog, 2, 1, 10);
    expect(&catalog, policy, 2, none, "");
    expect(&catalog, policy, 0, none, "2/15");
    catalog_deinit(&catalog);
    catalog = parse_catalog("1/10c 1/20c 2/15c");
    add_run(&catalog, 2, 1, 10);
    expect(&catalog, policy, 2, none, "1/10 1/20");
    catalog_deinit(&catalog);
    /* A daemon that still serves a dead run keeps what the new one needs. */
    catalog = parse_catalog("1/10c 1/20c 2/15c");
    add_run(&catalog, 2, 1, 10);
    add_run(&catalog, 3, 1, 20);
    expect(&catalog, policy, 2, none, "1/10");
    catalog_deinit(&catalog);
}

static void test_choose_busy(void **state) {
    struct version_id items[] = {{1, 10}, {1, 25}};
    struct catalog catalog = parse_catalog("1/10c 1/20c 1/25 1/30c");
    struct retention_policy policy = {.keep = 1};
    expect(&catalog, policy, 1, (struct retention_known){items, 2}, "1/20");
    catalog_deinit(&catalog);
}

/* Doing. */

static int setup(void **state) {
    const char *kind = *state;
    struct tier_fixture *fixture = tier_fixture_new(state);
    fixture->tier = kind && strcmp(kind, "mem") == 0 ? new_mem("t") : new_posix(&fixture->sandbox, "t");
    return 0;
}

static size_t count_entries(struct tier *tier, const char *start) {
    char job[256];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    struct tier_entries entries;
    assert_int_equal(tier_list(tier, job, &entries), 0);
    size_t count = 0;
    for (size_t i = 0; i < entries.count; i++)
        count += strncmp(entries.items[i].name, start, strlen(start)) == 0;
    tier_entries_deinit(&entries);
    return count;
}

static size_t count_versions(struct tier *tier) {
    struct catalog catalog;
    assert_int_equal(catalog_scan(tier, TEST_JOB, &catalog, NULL), 0);
    assert_int_equal(catalog.bad, 0);
    size_t count = catalog.version_count;
    catalog_deinit(&catalog);
    return count;
}

static uint32_t sweep(struct tier *tier, struct retention_policy policy, uint64_t nonce) {
    struct problem problem = PROBLEM_NONE;
    struct retention_swept swept = {0};
    int r = retention_sweep(tier, TEST_JOB, &policy, 1, (struct retention_known){0}, nonce, &swept, &problem);
    assert_fine(r, &problem);
    return swept.removed;
}

static void test_sweep_and_grace(void **state) {
    struct tier *tier = tier_of(state);
    struct retention_policy policy = {.keep = 1, .trash_grace_ms = 3600000};
    assert_int_equal(sweep(tier, policy, 1), 0); /* no such job */
    for (uint64_t step = 1; step <= 4; step++)
        make_version(tier, (struct version_id){1, step}, 2);
    assert_int_equal(sweep(tier, policy, 1), 3);
    assert_int_equal(count_versions(tier), 1);
    assert_int_equal(count_entries(tier, "trash-"), 3);
    assert_int_equal(sweep(tier, policy, 2), 0);
    assert_int_equal(count_entries(tier, "trash-"), 3);
    policy.trash_grace_ms = 0;
    assert_int_equal(sweep(tier, policy, 3), 0);
    assert_int_equal(count_entries(tier, "trash-"), 0);
    struct problem problem = PROBLEM_NONE;
    assert_fine(catalog_check(tier, TEST_JOB, (struct version_id){1, 4}, &problem), &problem);
}

/* The clock was set back since: the grace begins again, by today's clock, and ends. */
static void test_trash_of_the_future(void **state) {
    struct tier *tier = tier_of(state);
    struct retention_policy policy = {.keep = 1, .trash_grace_ms = 3600000};
    char job[256], trash[TIER_PATH_MAX], path[2 * TIER_PATH_MAX];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    for (uint64_t step = 1; step <= 2; step++)
        make_version(tier, (struct version_id){1, step}, 1);
    assert_int_equal(sweep(tier, policy, 7), 1);
    layout_trash(job, (struct version_id){1, 1}, 7, trash);
    snprintf(path, sizeof path, "%s/%s", tier->root, trash);
    struct tier_entry entry;
    int64_t now_ns;
    assert_int_equal(tier_now(tier, &now_ns), 0);
    struct timespec future = {.tv_sec = now_ns / (int64_t)NANOSECONDS_PER_SECOND + 100 * 24 * 3600};
    assert_int_equal(utimensat(AT_FDCWD, path, (struct timespec[]){future, future}, 0), 0);
    policy.trash_grace_ms = 0;
    sweep(tier, policy, 8);
    assert_int_equal(tier_stat(tier, trash, &entry), 0);
    assert_int_equal(tier_now(tier, &now_ns), 0);
    assert_true(entry.mtime_ns <= now_ns);
    sweep(tier, policy, 9);
    assert_int_equal(count_entries(tier, "trash-"), 0);
}

/* Makes a pin, and waits until it has expired. */
static void pin_briefly(struct tier *tier, struct version_id version, const char *name) {
    struct problem problem = PROBLEM_NONE;
    int64_t now_ns, expiry_ns;
    assert_int_equal(tier_now(tier, &now_ns), 0);
    expiry_ns = now_ns + 20 * (int64_t)NANOSECONDS_PER_MS;
    assert_fine(retention_pin(tier, TEST_JOB, version, name, (uint64_t)expiry_ns, 1, &problem), &problem);
    while (now_ns <= expiry_ns)
        assert_int_equal(tier_now(tier, &now_ns), 0);
}

/* A bit of the 0 that says never: no pin expires before it was made. */
static void test_flipped_pin_holds(void **state) {
    struct tier *tier = tier_of(state);
    struct version_id version = {1, 1};
    char job[256], path[TIER_PATH_MAX];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    make_version(tier, version, 1);
    layout_file(job, version, "pin-keep", path);
    for (int byte = 0; byte < 2; byte++)
        for (int bit = 0; bit < 8; bit++) {
            char text[] = "0\n";
            bool pinned = false;
            text[byte] = (char)(text[byte] ^ 1 << bit);
            assert_int_equal(tier_write_file(tier, path, text, 2), 0);
            assert_int_equal(retention_pinned(tier, TEST_JOB, version, &pinned), 0);
            assert_true(pinned);
            assert_int_equal(tier_unlink(tier, path), 0);
        }
}

static void test_pins(void **state) {
    struct tier *tier = tier_of(state);
    struct version_id version = {1, 1}, newer = {1, 2};
    struct problem problem = PROBLEM_NONE;
    bool pinned;
    assert_int_equal(retention_pin(tier, TEST_JOB, version, "keep", 0, 1, &problem), TIER_E_ABSENT);
    assert_int_equal(retention_pinned(tier, TEST_JOB, version, &pinned), TIER_E_ABSENT);
    make_version(tier, version, 1);
    make_version(tier, newer, 1);
    assert_int_equal(retention_pinned(tier, TEST_JOB, version, &pinned), 0);
    assert_false(pinned);
    assert_fine(retention_pin(tier, TEST_JOB, version, "keep", 0, 1, &problem), &problem);
    assert_int_equal(retention_pinned(tier, TEST_JOB, version, &pinned), 0);
    assert_true(pinned);
    struct retention_policy policy = {.keep = 1};
    assert_int_equal(sweep(tier, policy, 1), 0);
    assert_int_equal(retention_remove(tier, TEST_JOB, version, 1, &problem), -EBUSY);
    assert_names_tier(&problem, "t");
    assert_int_equal(count_versions(tier), 2);
    /* A second one, expired, changes nothing; without the first the version may go. */
    problem = PROBLEM_NONE;
    pin_briefly(tier, version, "restore");
    assert_int_equal(sweep(tier, policy, 1), 0);
    assert_fine(retention_unpin(tier, TEST_JOB, version, "keep", &problem), &problem);
    assert_int_equal(retention_unpin(tier, TEST_JOB, version, "keep", &problem), TIER_E_ABSENT);
    int64_t now_ns;
    assert_int_equal(tier_now(tier, &now_ns), 0);
    uint64_t later_ns = (uint64_t)now_ns + 3600 * NANOSECONDS_PER_SECOND;
    assert_fine(retention_pin(tier, TEST_JOB, version, "export", later_ns, 1, &problem), &problem);
    assert_int_equal(sweep(tier, policy, 1), 0);
    pin_briefly(tier, version, "export");
    assert_int_equal(sweep(tier, policy, 1), 1);
    static const char *const bad[] = {"", "a/b", "a b", "ä"};
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        assert_int_equal(retention_pin(tier, TEST_JOB, newer, bad[i], 0, 1, NULL), -EINVAL);
}

/* A pin that a scan did not see is seen in the trash. */
static void test_pinned_in_trash(void **state) {
    struct tier *tier = tier_of(state);
    struct version_id version = {1, 1}, newer = {1, 2};
    make_version(tier, version, 1);
    make_version(tier, newer, 1);
    char job[256], from[1024], to[1024];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    assert_int_equal(retention_pin(tier, TEST_JOB, version, "keep", 0, 1, NULL), 0);
    layout_version(job, version, from);
    layout_trash(job, version, 5, to);
    assert_int_equal(tier_rename(tier, from, to), 0);
    struct retention_policy policy = {.keep = 1};
    sweep(tier, policy, 6);
    assert_int_equal(count_entries(tier, "trash-"), 0);
    struct problem problem = PROBLEM_NONE;
    assert_fine(catalog_check(tier, TEST_JOB, version, &problem), &problem);
}

static void test_remove(void **state) {
    struct tier *tier = tier_of(state);
    struct version_id version = {1, 1};
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(retention_remove(tier, TEST_JOB, version, 1, &problem), TIER_E_ABSENT);
    make_version(tier, version, 2);
    assert_fine(retention_remove(tier, TEST_JOB, version, 1, &problem), &problem);
    assert_int_equal(count_versions(tier), 0);
    assert_int_equal(count_entries(tier, "trash-"), 0);
}

static void test_reap(void **state) {
    struct tier *tier = tier_of(state);
    char job[256], path[1100];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    for (uint64_t generation = 1; generation <= 3; generation++) {
        make_version(tier, (struct version_id){generation, 1}, 1);
        for (uint32_t rank = 0; rank < 3; rank++) {
            layout_temporary(job, (struct version_id){generation, 1}, rank, rank, "data", path);
            assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
        }
        snprintf(path, sizeof path, "%s/%llu/run.0000000000000001.tmp", job, (unsigned long long)generation);
        assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
    }
    uint32_t reaped;
    struct problem problem = PROBLEM_NONE;
    assert_fine(retention_reap(tier, TEST_JOB, 2, 1, &reaped, &problem), &problem);
    assert_int_equal(reaped, 3 + 1 + 1); /* all of generation 1 and its run, rank 1 of generation 2 */
    assert_fine(retention_reap(tier, TEST_JOB, 2, 1, &reaped, &problem), &problem);
    assert_int_equal(reaped, 0);
    for (uint64_t generation = 1; generation <= 3; generation++)
        assert_fine(catalog_check(tier, TEST_JOB, (struct version_id){generation, 1}, &problem), &problem);
}

/* Anybody pins a version, or publishes that it is complete, and does so under the name of rank 0. */
static void test_reap_spares_others(void **state) {
    struct tier *tier = tier_of(state);
    tier->capabilities |= TIER_SHARED;
    static const char *const kinds[] = {"complete", "pin"};
    char job[256], paths[2][2][1024];
    struct tier_entry entry;
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    for (uint64_t generation = 1; generation <= 2; generation++) {
        make_version(tier, (struct version_id){generation, 1}, 1);
        for (size_t kind = 0; kind < 2; kind++) {
            char *path = paths[generation - 1][kind];
            layout_temporary(job, (struct version_id){generation, 1}, 0, 7, kinds[kind], path);
            assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
        }
    }
    uint32_t reaped;
    struct problem problem = PROBLEM_NONE;
    assert_fine(retention_reap(tier, TEST_JOB, 2, 0, &reaped, &problem), &problem);
    assert_int_equal(reaped, 1);
    assert_int_equal(tier_stat(tier, paths[0][0], &entry), TIER_E_ABSENT); /* of a dead run */
    assert_int_equal(tier_stat(tier, paths[0][1], &entry), 0);             /* this run may read that version */
    assert_int_equal(tier_stat(tier, paths[1][0], &entry), 0);
    assert_int_equal(tier_stat(tier, paths[1][1], &entry), 0);
}

/* In a tier of this node alone, nobody else writes under that name. */
static void test_reap_of_a_node(void **state) {
    struct tier *tier = tier_of(state);
    static const char *const kinds[] = {"complete", "pin"};
    char job[256], path[1024];
    tier->capabilities &= ~(unsigned)TIER_SHARED;
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    make_version(tier, (struct version_id){1, 1}, 1);
    for (size_t kind = 0; kind < 2; kind++) {
        layout_temporary(job, (struct version_id){1, 1}, 0, 7, kinds[kind], path);
        assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
    }
    uint32_t reaped;
    struct problem problem = PROBLEM_NONE;
    assert_fine(retention_reap(tier, TEST_JOB, 1, 1, &reaped, &problem), &problem);
    assert_int_equal(reaped, 0);
    assert_fine(retention_reap(tier, TEST_JOB, 1, 0, &reaped, &problem), &problem);
    assert_int_equal(reaped, 2);
}

static bool is_there(struct tier *tier, const char *path) {
    char job[256], whole[300];
    struct tier_entry entry;
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    snprintf(whole, sizeof whole, "%s/%s", job, path);
    return tier_stat(tier, whole, &entry) == 0;
}

/* Directories of dead runs go with their last version; what is not ours stays, and the greatest stays. */
static void test_prune(void **state) {
    struct tier *tier = tier_of(state);
    char job[256], path[300];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    for (unsigned generation = 1; generation <= 5; generation++) {
        snprintf(path, sizeof path, "%s/%u", job, generation);
        assert_int_equal(tier_make_directories(tier, path), 0);
        snprintf(path, sizeof path, "%s/%u/run", job, generation);
        assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
        snprintf(path, sizeof path, "%s/%u/run-ended", job, generation);
        assert_int_equal(tier_write_file(tier, path, "", 0), 0);
    }
    make_version(tier, (struct version_id){2, 1}, 1);
    snprintf(path, sizeof path, "%s/3/notes", job);
    assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
    struct retention_policy policy = {.keep = 1};
    struct retention_swept swept;
    struct problem problem = PROBLEM_NONE;
    struct retention_known none = {0};
    assert_fine(retention_sweep(tier, TEST_JOB, &policy, 4, none, 1, &swept, &problem), &problem);
    assert_false(is_there(tier, "1"));
    assert_true(is_there(tier, "2/run") && is_there(tier, "3/run") && is_there(tier, "4/run"));
    assert_fine(retention_sweep(tier, TEST_JOB, &policy, 9, none, 1, &swept, &problem), &problem);
    assert_true(is_there(tier, "2/run") && is_there(tier, "3/run") && is_there(tier, "5/run"));
    assert_false(is_there(tier, "4"));
}

/* Every operation fails once: nothing that must stay goes, and the next sweep finishes. */
static void test_fail_everywhere(void **state) {
    for (unsigned n = 1;; n++) {
        struct sandbox sandbox;
        sandbox_init(&sandbox);
        struct tier *tier = new_posix(&sandbox, "t");
        for (uint64_t step = 1; step <= 3; step++)
            make_version(tier, (struct version_id){1, step}, 1);
        tier_free(tier);
        char fault[32];
        snprintf(fault, sizeof fault, "any:%u:eio", n);
        tier = fails(new_posix(&sandbox, "t"), fault);
        struct retention_policy policy = {.keep = 1};
        struct problem problem = PROBLEM_NONE;
        struct retention_swept swept;
        int r = retention_sweep(tier, TEST_JOB, &policy, 1, (struct retention_known){0}, 1, &swept, &problem);
        if (r)
            assert_names_tier(&problem, "t");
        bool fired = tier_fault_fired(tier) > 0;
        tier_free(tier);
        tier = new_posix(&sandbox, "t");
        problem = PROBLEM_NONE;
        assert_fine(catalog_check(tier, TEST_JOB, (struct version_id){1, 3}, &problem), &problem);
        sweep(tier, policy, 2);
        sweep(tier, policy, 3);
        assert_int_equal(count_versions(tier), 1);
        assert_int_equal(count_entries(tier, "trash-"), 0);
        tier_free(tier);
        sandbox_deinit(&sandbox);
        if (!fired) {
            assert_int_equal(r, 0);
            break;
        }
    }
}

/* Several daemons sweep at once. */
static void test_two_daemons(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *tier = fixture->tier;
    for (int round = 0; round < 5; round++) {
        for (uint64_t step = 1; step <= 6; step++)
            make_version(tier, (struct version_id){(uint64_t)round + 1, step}, 1);
        pid_t pids[4];
        for (size_t i = 0; i < ARRAY_SIZE(pids); i++) {
            pids[i] = fork();
            assert_true(pids[i] >= 0);
            if (pids[i] == 0) {
                struct retention_policy policy = {.keep = 2};
                struct retention_swept swept;
                struct problem problem = PROBLEM_NONE;
                int r = 0;
                for (int k = 0; r == 0 && k < 3; k++)
                    r = retention_sweep(tier, TEST_JOB, &policy, (uint64_t)round + 1, (struct retention_known){0},
                                        i * 16 + (uint64_t)k, &swept, &problem);
                if (r)
                    print_error("%s\n", problem.text);
                _exit(r != 0);
            }
        }
        for (size_t i = 0; i < ARRAY_SIZE(pids); i++) {
            int status;
            assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
            assert_int_equal(status, 0);
        }
        struct retention_policy policy = {.keep = 2};
        sweep(tier, policy, 999);
        assert_int_equal(count_versions(tier), 2);
        assert_int_equal(count_entries(tier, "trash-"), 0);
        for (uint64_t step = 5; step <= 6; step++) {
            struct problem problem = PROBLEM_NONE;
            struct version_id version = {(uint64_t)round + 1, step};
            assert_fine(catalog_check(tier, TEST_JOB, version, &problem), &problem);
        }
    }
}

/* Between two looks of a check, somebody removes the version that it looks at: it is gone, not damaged. */
static const struct tier_ops *real_ops;

static int remove_then_list(void *self, const char *path, struct tier_entries *ret_entries) {
    struct tier_ops ops = *real_ops;
    struct tier twin = {.name = "m", .capabilities = TIER_LINK | TIER_ATOMIC_RENAME, .ops = &ops, .self = self};
    struct problem problem = PROBLEM_NONE;
    assert_fine(retention_remove(&twin, TEST_JOB, (struct version_id){1, 1}, 7, &problem), &problem);
    return real_ops->list(self, path, ret_entries);
}

static int list_then_remove(void *self, const char *path, struct tier_entries *ret_entries) {
    int r = real_ops->list(self, path, ret_entries);
    struct tier_entries ignored = {0};
    assert_int_equal(remove_then_list(self, path, &ignored), TIER_E_ABSENT);
    return r;
}

static int remove_then_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    struct tier_entries ignored = {0};
    if (strstr(path, "rank-00001.safetensors"))
        assert_int_equal(remove_then_list(self, path, &ignored), TIER_E_ABSENT);
    return real_ops->stat(self, path, ret_entry);
}

static void test_removed_while_read(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *tier = fixture->tier;
    struct tier_ops ops = *tier->ops;
    struct manifest manifest;
    struct problem problem = PROBLEM_NONE;
    real_ops = tier->ops;
    make_version(tier, (struct version_id){1, 1}, 2);
    ops.stat = remove_then_stat;
    tier->ops = &ops;
    assert_int_equal(catalog_read_manifest(tier, TEST_JOB, (struct version_id){1, 1}, 1, &manifest, &problem),
                     TIER_E_ABSENT);
    assert_string_equal(problem.text, "");
    tier->ops = real_ops;
}

static void test_removed_while_checked(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *tier = fixture->tier;
    struct tier_ops ops = *tier->ops;
    real_ops = tier->ops;
    int (*const lists[])(void *, const char *, struct tier_entries *) = {remove_then_list, list_then_remove};
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        struct problem problem = PROBLEM_NONE;
        make_version(tier, (struct version_id){1, 1}, 2);
        ops.list = lists[i];
        tier->ops = &ops;
        assert_int_equal(catalog_check(tier, TEST_JOB, (struct version_id){1, 1}, &problem), TIER_E_ABSENT);
        assert_string_equal(problem.text, "");
        tier->ops = real_ops;
    }
}

#define BOTH(test)                                                                                                     \
    {#test ": posix", test, setup, tier_fixture_free, (void *)"posix"}, {                                              \
#test ": mem", test, setup, tier_fixture_free, (void *)"mem"                                                   \
    }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choose),
        cmocka_unit_test(test_choose_resume_version),
        cmocka_unit_test(test_choose_busy),
        BOTH(test_sweep_and_grace),
        cmocka_unit_test_setup_teardown(test_trash_of_the_future, setup, tier_fixture_free),
        BOTH(test_pins),
        BOTH(test_flipped_pin_holds),
        BOTH(test_pinned_in_trash),
        BOTH(test_remove),
        BOTH(test_reap),
        BOTH(test_reap_spares_others),
        BOTH(test_reap_of_a_node),
        BOTH(test_prune),
        BOTH(test_removed_while_checked),
        BOTH(test_removed_while_read),
        cmocka_unit_test(test_fail_everywhere),
        cmocka_unit_test_setup_teardown(test_two_daemons, setup, tier_fixture_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
