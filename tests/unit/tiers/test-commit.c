/* SPDX-License-Identifier: Apache-2.0 */
/* A part is there whole or not at all: killed at every point, failed at every operation, damaged in
 * every file. */
#include "tests/unit/tiers/support.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

static const struct version_id version = {1, 20};
static const struct version_id older = {1, 10};

static int setup(void **state) {
    struct tier_fixture *fixture = tier_fixture_new(state);
    fixture->tier = new_posix(&fixture->sandbox, "t");
    return 0;
}

static void file_of(void **state, const char *file, char ret_path[512]) {
    sandbox_file(&((struct tier_fixture *)*state)->sandbox, "t", version, file, ret_path);
}

static bool is_complete(struct tier *tier, struct version_id id) {
    struct catalog catalog;
    struct problem problem = PROBLEM_NONE;
    assert_fine(catalog_scan(tier, TEST_JOB, &catalog, &problem), &problem);
    assert_int_equal(catalog.bad, 0);
    const struct catalog_version *found = catalog_find(&catalog, id);
    bool complete = found && found->complete;
    catalog_deinit(&catalog);
    return complete;
}

static void test_round_trip(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct part_plan plan = {.version = version, .rank = rank, .world = 3, .codec = rank == 1 ? CODEC_LZ4 : 0};
        assert_int_equal(complete_version(tier, version, &problem), COMMIT_E_INCOMPLETE);
        assert_fine(commit_part(tier, &plan, 1, &problem), &problem);
        assert_fine(read_back(tier, &plan, &problem), &problem);
        assert_fine(catalog_verify_part(tier, TEST_JOB, version, rank, &problem), &problem);
    }
    assert_false(is_complete(tier, version));
    assert_fine(complete_version(tier, version, &problem), &problem);
    assert_fine(complete_version(tier, version, &problem), &problem);
    assert_true(is_complete(tier, version));
    assert_fine(catalog_check(tier, TEST_JOB, version, &problem), &problem);
    struct complete complete;
    assert_fine(catalog_read_complete(tier, TEST_JOB, version, &complete, &problem), &problem);
    assert_int_equal(complete.summary.world, 3);
    assert_int_equal(complete.summary.bytes, 3 * TEST_SIZE);
    assert_int_equal(complete.pieces.count, 3);
    complete_deinit(&complete);

    char raw[512], encoded[512];
    file_of(state, "rank-00000.safetensors", raw);
    file_of(state, "rank-00001.chunks", encoded);
    assert_int_equal(file_size(raw), TEST_SIZE);
    assert_true(file_size(encoded) < TEST_SIZE);

    char **jobs;
    size_t count;
    assert_fine(catalog_jobs(tier, &jobs, &count, &problem), &problem);
    assert_int_equal(count, 1);
    assert_string_equal(jobs[0], TEST_JOB);
    free(jobs[0]);
    free(jobs);
}

static void test_not_there(void **state) {
    struct tier *tier = tier_of(state);
    struct catalog catalog;
    struct manifest manifest;
    struct complete complete;
    char *text;
    size_t size;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(catalog_scan(tier, TEST_JOB, &catalog, &problem), 0);
    assert_int_equal(catalog.version_count + catalog.generation_count, 0);
    catalog_deinit(&catalog);
    assert_int_equal(catalog_read_manifest(tier, TEST_JOB, version, 0, &manifest, &problem), TIER_E_ABSENT);
    assert_int_equal(catalog_read_complete(tier, TEST_JOB, version, &complete, &problem), TIER_E_ABSENT);
    assert_int_equal(catalog_read_complete_text(tier, TEST_JOB, version, &text, &size, &problem), TIER_E_ABSENT);
    assert_int_equal(catalog_check(tier, TEST_JOB, version, &problem), TIER_E_ABSENT);
    assert_int_equal(complete_version(tier, version, &problem), COMMIT_E_INCOMPLETE);
    assert_int_equal(catalog_scan(tier, "", &catalog, &problem), -EINVAL);
}

static void absent_summary(uint32_t rank, uint32_t world, struct manifest_summary *summary) {
    *summary = (struct manifest_summary){.generation = version.generation,
                                         .step = version.step,
                                         .rank = rank,
                                         .world = world,
                                         .absent = true,
                                         .reason = "the trainer died"};
    strcpy(summary->job, TEST_JOB);
    strcpy(summary->run_id, TEST_RUN);
}

static void test_absent(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct manifest_summary summary;
    absent_summary(1, 3, &summary);
    struct part_plan plan = {.version = version, .rank = 0, .world = 3};
    assert_fine(commit_part(tier, &plan, 1, &problem), &problem);
    assert_fine(commit_absent(tier, TEST_JOB, version, &summary, 2, &problem), &problem);
    assert_fine(commit_absent(tier, TEST_JOB, version, &summary, 3, &problem), &problem);
    assert_int_equal(complete_version(tier, version, &problem), COMMIT_E_ABSENT);
    /* A retry replaces it; and what is committed stays. */
    plan.rank = 1;
    assert_fine(commit_part(tier, &plan, 4, &problem), &problem);
    assert_int_equal(complete_version(tier, version, &problem), COMMIT_E_INCOMPLETE);
    assert_fine(commit_absent(tier, TEST_JOB, version, &summary, 5, &problem), &problem);
    assert_fine(read_back(tier, &plan, &problem), &problem);
    assert_int_equal(commit_part(tier, &plan, 6, &problem), -EEXIST);
    assert_names_tier(&problem, "t");
    struct problem fresh = PROBLEM_NONE;
    assert_fine(read_back(tier, &plan, &fresh), &fresh);
}

static void test_disagreement(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct part_plan first = {.version = version, .rank = 0, .world = 2};
    struct part_plan second = {.version = version, .rank = 1, .world = 3};
    assert_fine(commit_part(tier, &first, 1, &problem), &problem);
    assert_fine(commit_part(tier, &second, 1, &problem), &problem);
    assert_int_equal(complete_version(tier, version, &problem), -EINVAL);
    assert_true(problem.text[0]);

    struct part_plan other_run = {.version = older, .rank = 1, .world = 2, .run_id = "run-2"};
    first.version = older;
    problem = PROBLEM_NONE;
    assert_fine(commit_part(tier, &first, 1, &problem), &problem);
    assert_fine(commit_part(tier, &other_run, 1, &problem), &problem);
    assert_int_equal(complete_version(tier, older, &problem), -EINVAL);
    assert_false(is_complete(tier, older));
}

static void test_abandon(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct commit commit;
    assert_fine(commit_begin(&commit, tier, TEST_JOB, version, 0, 1, 1000, &problem), &problem);
    struct tier_entry entry;
    assert_int_equal(tier_stat(tier, commit.temporary, &entry), 0);
    commit_abandon(&commit);
    commit_abandon(&commit);
    assert_int_equal(tier_stat(tier, commit.temporary, &entry), TIER_E_ABSENT);
}

/* A write that went missing leaves the file short. */
static void test_short_data(void **state) {
    struct tier *tier = new_mem("m");
    struct problem problem = PROBLEM_NONE;
    struct commit commit;
    assert_fine(commit_begin(&commit, tier, TEST_JOB, version, 0, 1, 0, &problem), &problem);
    struct manifest manifest = {.summary = {.generation = version.generation, .step = version.step, .world = 1}};
    struct digest digest = {0};
    struct manifest_chunk chunk = {.stored_length = 4096, .raw_length = 4096, .digest = digest};
    manifest.summary.image_size = manifest.summary.data_length = manifest.summary.chunk_size = 4096;
    strcpy(manifest.summary.job, TEST_JOB);
    strcpy(manifest.summary.run_id, TEST_RUN);
    manifest_data_name(0, CODEC_RAW, manifest.summary.data_file);
    digest_fold(&digest, 1, &manifest.summary.image_digest);
    manifest.chunks = &chunk;
    manifest.chunk_count = 1;
    assert_int_equal(commit_finish(&commit, &manifest, &problem), -EIO);
    assert_names_tier(&problem, "m");
    assert_non_null(strstr(problem.text, "shorter"));
    tier_free(tier);
}

/* Killed. */

struct killer {
    enum point point;
};

static void kill_there(void *context, enum point point) {
    if (((struct killer *)context)->point == point)
        kill(getpid(), SIGKILL);
}

/* Commits and completes in a child that dies at the point. */
static void die_at(struct tier *tier, const struct part_plan *plan, enum point point) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct killer killer = {point};
        tier->hook = (struct point_hook){kill_there, &killer};
        if (commit_part(tier, plan, 77, NULL) == 0 && commit_complete(tier, TEST_JOB, plan->version, 77, NULL) == 0)
            _exit(0);
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void test_killed(void **state, enum codec codec) {
    struct tier *tier = tier_of(state);
    tier->capabilities |= TIER_SHARED;
    for (enum point point = 0; point <= POINT_COMPLETE_PUBLISHED; point++) {
        struct part_plan plan = {.version = {1, 100 + point}, .rank = 0, .world = 1, .codec = codec};
        struct problem problem = PROBLEM_NONE;
        die_at(tier, &plan, point);
        bool complete = is_complete(tier, plan.version);
        assert_int_equal(complete, point >= POINT_COMPLETE_LINKED);
        int r = catalog_check(tier, TEST_JOB, plan.version, &problem);
        assert_int_equal(r, complete ? 0 : TIER_E_ABSENT);
        /* The manifest is there or not; if it is, every byte is. */
        r = read_back(tier, &plan, &problem);
        assert_int_equal(r, point >= POINT_MANIFEST_RENAMED ? 0 : TIER_E_ABSENT);

        /* Another process goes on where this one died. */
        uint32_t reaped;
        assert_fine(retention_reap(tier, TEST_JOB, 1, 0, &reaped, &problem), &problem);
        bool left = point == POINT_MANIFEST_WRITTEN || (point >= POINT_DATA_CREATED && point < POINT_DATA_RENAMED);
        assert_int_equal(reaped, left);
        if (r == TIER_E_ABSENT)
            assert_fine(commit_part(tier, &plan, 78, &problem), &problem);
        assert_fine(complete_version(tier, plan.version, &problem), &problem);
        assert_fine(read_back(tier, &plan, &problem), &problem);
        assert_fine(catalog_check(tier, TEST_JOB, plan.version, &problem), &problem);
        /* Anybody may have been about to publish; in a later run nobody is any more. */
        assert_fine(retention_reap(tier, TEST_JOB, 2, 0, &reaped, &problem), &problem);
        assert_int_equal(reaped, point == POINT_COMPLETE_WRITTEN || point == POINT_COMPLETE_LINKED);
    }
}

static void test_killed_raw(void **state) { test_killed(state, CODEC_RAW); }

static void test_killed_lz4(void **state) { test_killed(state, CODEC_LZ4); }

static void test_point_names(void **state) {
    for (enum point point = 0; point < POINT_COUNT; point++) {
        assert_true(point_name(point)[0]);
        for (enum point other = 0; other < point; other++)
            assert_string_not_equal(point_name(point), point_name(other));
    }
}

/* Failed: the nth operation of any name, n upward until nothing fires. */

static int whole_life(struct tier *tier, const struct part_plan *plan, struct problem *problem) {
    int r = commit_part(tier, plan, 5, problem);
    if (r == 0)
        r = complete_version(tier, plan->version, problem);
    if (r == 0)
        r = catalog_check(tier, TEST_JOB, plan->version, problem);
    if (r == 0)
        r = read_back(tier, plan, problem);
    return r;
}

/* Whatever happened, a tier that works again shows the part whole or not at all. */
static void assert_not_torn(struct tier *tier, const struct part_plan *plan, bool may_lie) {
    struct problem problem = PROBLEM_NONE;
    int r = read_back(tier, plan, &problem);
    if (r < 0 && !may_lie)
        fail_msg("torn: %s", problem.text);
    assert_true(r == 0 || r == TIER_E_ABSENT || (may_lie && r == -EBADMSG));
}

static unsigned fail_everywhere(struct sandbox *sandbox, const char *kind, const char *lasting, enum codec codec) {
    bool lies = strcmp(kind, "short") == 0 || strcmp(kind, "flip") == 0;
    for (unsigned n = 1;; n++) {
        char fault[64], name[32];
        snprintf(fault, sizeof fault, "any:%u:%s%s", n, kind, lasting);
        snprintf(name, sizeof name, "f%u%s%s%d", n, kind, lasting[0] ? "-" : "", codec);
        struct tier *tier = fails(sandbox ? new_posix(sandbox, name) : new_mem(name), fault);
        struct part_plan plan = {.version = version, .rank = 0, .world = 1, .codec = codec};
        struct problem problem = PROBLEM_NONE;
        int r = whole_life(tier, &plan, &problem);
        if (r) {
            if (r > 0)
                fail_msg("%s: result %d", fault, r);
            assert_names_tier(&problem, name);
        }
        bool fired = tier_fault_fired(tier) > 0;
        tier_free(tier);
        if (sandbox) {
            tier = new_posix(sandbox, name);
            assert_not_torn(tier, &plan, lies);
            tier_free(tier);
        }
        if (!fired) {
            assert_int_equal(r, 0);
            return n;
        }
        assert_true(n < 1000);
    }
}

static void test_fail_everywhere(void **state) {
    static const char *const kinds[] = {"eio", "enospc", "edquot", "short", "flip"};
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        for (enum codec codec = CODEC_RAW; codec <= CODEC_LZ4; codec++) {
            unsigned once = fail_everywhere(NULL, kinds[i], "", codec);
            unsigned lasting = fail_everywhere(NULL, kinds[i], "+", codec);
            assert_int_equal(once, lasting);
            assert_true(once > 5);
        }
    }
}

static void test_fail_everywhere_posix(void **state) {
    struct tier_fixture *fixture = *state;
    fail_everywhere(&fixture->sandbox, "eio", "", CODEC_RAW);
    fail_everywhere(&fixture->sandbox, "flip", "", CODEC_LZ4);
}

/* Damaged: one bit anywhere. */

static void expect_damage(void **state, const char *file, uint64_t offset, bool found_by_check) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct part_plan plan = {.version = version, .rank = 0, .world = 2};
    char path[512];
    file_of(state, file, path);
    flip_bit(path, offset);
    int r = catalog_check(tier, TEST_JOB, version, &problem);
    if (r == 0) {
        assert_false(found_by_check);
        r = read_back(tier, &plan, &problem);
        if (r == 0)
            fail_msg("%s: bit %llu was flipped and nobody noticed", file, (unsigned long long)offset);
    }
    if (r != -EBADMSG && r != -ENOTSUP)
        fail_msg("%s, bit at %llu: %d %s", file, (unsigned long long)offset, r, problem.text);
    assert_names_tier(&problem, "t");
    flip_bit(path, offset);
    struct problem fresh = PROBLEM_NONE;
    assert_fine(catalog_check(tier, TEST_JOB, version, &fresh), &fresh);
}

/* Who waits for another daemon to complete a version must not take a damaged complete.json for a good one. */
static void test_completed_by_another(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(commit_completed(tier, TEST_JOB, version, &problem), COMMIT_E_INCOMPLETE);
    make_version(tier, version, 2);
    assert_int_equal(commit_completed(tier, TEST_JOB, version, &problem), 0);
    char path[512];
    file_of(state, "complete.json", path);
    for (uint64_t offset = 0; offset < file_size(path); offset += 7) {
        flip_bit(path, offset);
        assert_int_equal(commit_completed(tier, TEST_JOB, version, &problem), COMMIT_E_INCOMPLETE);
        flip_bit(path, offset);
    }
    assert_int_equal(commit_completed(tier, TEST_JOB, version, &problem), 0);
    assert_string_equal(problem.text, "");
}

static void test_bit_flips(void **state) {
    make_version(tier_of(state), version, 2);
    static const char *const files[] = {"complete.json", "rank-00000.json", "rank-00000.safetensors"};
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        char path[512];
        file_of(state, files[i], path);
        uint64_t size = file_size(path), step = i == 2 ? 4093 : 1;
        for (uint64_t offset = 0; offset < size; offset += step)
            expect_damage(state, files[i], offset, i == 0);
        expect_damage(state, files[i], size - 1, i == 0);
    }
}

static void test_bit_flips_encoded(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct part_plan plan = {.version = version, .rank = 0, .world = 1, .codec = CODEC_LZ4};
    assert_fine(commit_part(tier, &plan, 1, &problem), &problem);
    struct manifest manifest;
    assert_fine(catalog_read_manifest(tier, TEST_JOB, version, 0, &manifest, &problem), &problem);
    char path[512];
    file_of(state, "rank-00000.chunks", path);
    unsigned noticed = 0, harmless = 0;
    for (size_t i = 0; i < manifest.chunk_count; i++) {
        for (uint32_t at = 0; at < manifest.chunks[i].stored_length; at += 997) {
            flip_bit(path, manifest.chunks[i].offset + at);
            problem = PROBLEM_NONE;
            int r = read_back(tier, &plan, &problem);
            assert_int_equal(catalog_verify_part(tier, TEST_JOB, version, 0, NULL), r);
            /* A flipped match offset may point to the same bytes; read_back() has compared them. */
            if (r == 0) {
                harmless++;
            } else {
                noticed++;
                assert_int_equal(r, -EBADMSG);
                assert_names_tier(&problem, "t");
            }
            flip_bit(path, manifest.chunks[i].offset + at);
        }
    }
    assert_true(noticed > 4 * harmless);
    manifest_deinit(&manifest);
    problem = PROBLEM_NONE;
    assert_fine(read_back(tier, &plan, &problem), &problem);
}

static void test_lost_data(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct manifest manifest;
    char path[512];
    make_version(tier, version, 2);
    file_of(state, "rank-00001.safetensors", path);
    assert_int_equal(truncate(path, 1000), 0);
    assert_int_equal(catalog_check(tier, TEST_JOB, version, &problem), -EBADMSG);
    assert_non_null(strstr(problem.text, path));
    assert_int_equal(catalog_read_manifest(tier, TEST_JOB, version, 1, &manifest, NULL), -EBADMSG);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(catalog_check(tier, TEST_JOB, version, NULL), -EBADMSG);
    assert_int_equal(catalog_read_manifest(tier, TEST_JOB, version, 1, &manifest, NULL), -EBADMSG);
    file_of(state, "complete.json", path);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(complete_version(tier, version, NULL), COMMIT_E_INCOMPLETE);
}

/* A version that lies in the directory of another is bad, whatever its files say. */
static void test_moved(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *tier = fixture->tier;
    make_version(tier, version, 1);
    char from[512], to[512];
    sandbox_file(&fixture->sandbox, "t", version, "", from);
    sandbox_file(&fixture->sandbox, "t", (struct version_id){1, 21}, "", to);
    assert_int_equal(rename(from, to), 0);
    struct catalog catalog;
    assert_int_equal(catalog_scan(tier, TEST_JOB, &catalog, NULL), 0);
    assert_int_equal(catalog.version_count, 1);
    assert_false(catalog.versions[0].complete);
    assert_true(catalog.versions[0].damaged);
    assert_int_equal(catalog.bad, 1);
    assert_names_tier(&catalog.first_bad, "t");
    catalog_deinit(&catalog);
    struct version_id moved = {1, 21};
    struct manifest manifest;
    assert_int_equal(catalog_check(tier, TEST_JOB, moved, NULL), -EBADMSG);
    assert_int_equal(catalog_read_manifest(tier, TEST_JOB, moved, 0, &manifest, NULL), -EBADMSG);
}

/* Down to the newest complete one, by number and not by name, and no further than was asked for. */
static void test_newest(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    struct catalog catalog;
    assert_int_equal(catalog_scan_newest(tier, TEST_JOB, 9, &catalog, &problem), 0);
    assert_int_equal(catalog.version_count, 0); /* there is no such job yet */
    static const struct version_id complete[] = {{1, 7}, {2, 9}, {2, 10}}, incomplete[] = {{2, 100}, {10, 1}, {10, 20}};
    for (size_t i = 0; i < ARRAY_SIZE(complete); i++)
        make_version(tier, complete[i], 1);
    for (size_t i = 0; i < ARRAY_SIZE(incomplete); i++) {
        struct part_plan plan = {.version = incomplete[i], .world = 2};
        assert_fine(commit_part(tier, &plan, 1, &problem), &problem);
    }
    static const struct version_id found[] = {{2, 10}, {2, 100}, {10, 1}, {10, 20}};
    for (uint32_t max = 1; max < 6; max++) {
        uint32_t count = (uint32_t)min_u64(max, ARRAY_SIZE(found));
        assert_fine(catalog_scan_newest(tier, TEST_JOB, max, &catalog, &problem), &problem);
        assert_int_equal(catalog.version_count, count);
        for (uint32_t i = 0; i < count; i++) {
            struct version_id id = found[ARRAY_SIZE(found) - count + i];
            assert_int_equal(version_compare(catalog.versions[i].id, id), 0);
            assert_int_equal(catalog.versions[i].complete, id.step == 10);
        }
        catalog_deinit(&catalog);
    }
}

static void test_strangers(void **state) {
    struct tier *tier = tier_of(state);
    make_version(tier, version, 1);
    char job[256], path[600];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    static const char *const files[] = {"README", "1/notes", "007"};
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        snprintf(path, sizeof path, "%s/%s", job, files[i]);
        assert_int_equal(tier_write_file(tier, path, "x", 1), 0);
    }
    assert_int_equal(tier_make_directories(tier, "lost+found"), 0);
    struct catalog catalog;
    assert_int_equal(catalog_scan(tier, TEST_JOB, &catalog, NULL), 0);
    assert_int_equal(catalog.bad, 3);
    assert_int_equal(catalog.version_count, 1);
    assert_true(catalog.versions[0].complete);
    assert_int_equal(catalog.generation_count, 1);
    catalog_deinit(&catalog);
    assert_int_equal(catalog_scan_runs(tier, TEST_JOB, &catalog, NULL), 0);
    assert_int_equal(catalog.generation_count, 1);
    assert_int_equal(catalog.version_count, 0); /* who holds it is all that was asked */
    catalog_deinit(&catalog);
}

static void test_condemn_and_repair(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *bad = fixture->tier, *good = new_posix(&fixture->sandbox, "good");
    struct problem problem = PROBLEM_NONE;
    char path[512];
    make_version(bad, version, 2);
    make_version(good, version, 2);
    file_of(state, "rank-00001.safetensors", path);
    flip_bit(path, 4096 * 3 + 5);
    assert_int_equal(catalog_verify_part(bad, TEST_JOB, version, 1, &problem), -EBADMSG);
    assert_non_null(strstr(problem.text, path));
    problem = PROBLEM_NONE;
    assert_fine(catalog_condemn(bad, TEST_JOB, version, 1, &problem), &problem);
    assert_fine(catalog_condemn(bad, TEST_JOB, version, 1, &problem), &problem);
    assert_int_equal(catalog_check(bad, TEST_JOB, version, &problem), TIER_E_ABSENT);
    assert_int_equal(complete_version(bad, version, &problem), COMMIT_E_INCOMPLETE);
    struct catalog catalog;
    assert_fine(catalog_scan(bad, TEST_JOB, &catalog, &problem), &problem);
    assert_true(catalog.versions[0].damaged && !catalog.versions[0].complete);
    catalog_deinit(&catalog);

    assert_fine(catalog_repair_part(bad, good, TEST_JOB, version, 1, 9, &problem), &problem);
    struct part_plan plan = {.version = version, .rank = 1, .world = 2};
    assert_fine(read_back(bad, &plan, &problem), &problem);
    assert_fine(catalog_check(bad, TEST_JOB, version, &problem), &problem);
    char *ours, *theirs;
    size_t size, other_size;
    assert_fine(catalog_read_complete_text(bad, TEST_JOB, version, &ours, &size, &problem), &problem);
    assert_fine(catalog_read_complete_text(good, TEST_JOB, version, &theirs, &other_size, &problem), &problem);
    assert_int_equal(size, other_size);
    assert_memory_equal(ours, theirs, size);
    free(ours);
    free(theirs);

    /* Also one that nobody condemned yet; and from a copy that is bad itself nothing is taken. */
    flip_bit(path, 4096 * 3 + 5);
    assert_fine(catalog_repair_part(bad, good, TEST_JOB, version, 1, 10, &problem), &problem);
    assert_fine(read_back(bad, &plan, &problem), &problem);
    sandbox_file(&fixture->sandbox, "good", version, "rank-00000.safetensors", path);
    flip_bit(path, 1);
    problem = PROBLEM_NONE;
    assert_int_equal(catalog_repair_part(bad, good, TEST_JOB, version, 0, 11, &problem), -EBADMSG);
    assert_names_tier(&problem, "good");
    problem = PROBLEM_NONE;
    assert_fine(catalog_check(bad, TEST_JOB, version, &problem), &problem);
    plan.rank = 0;
    assert_fine(read_back(bad, &plan, &problem), &problem);
    tier_free(good);
}

static void test_repair_encoded(void **state) {
    struct tier_fixture *fixture = *state;
    struct tier *bad = fixture->tier, *good = new_mem("good");
    struct problem problem = PROBLEM_NONE;
    struct part_plan plan = {.version = version, .rank = 0, .world = 1};
    assert_fine(commit_part(bad, &plan, 1, &problem), &problem);
    plan.codec = CODEC_LZ4;
    assert_fine(commit_part(good, &plan, 1, &problem), &problem);
    assert_fine(catalog_repair_part(bad, good, TEST_JOB, version, 0, 9, &problem), &problem);
    assert_fine(read_back(bad, &plan, &problem), &problem);
    assert_fine(catalog_check(bad, TEST_JOB, version, &problem), &problem);
    tier_free(good);
}

/* A damaged complete.json is set aside and made anew, the same. */
static void test_complete_again(void **state) {
    struct tier *tier = tier_of(state);
    struct problem problem = PROBLEM_NONE;
    char path[512];
    make_version(tier, version, 2);
    file_of(state, "complete.json", path);
    flip_bit(path, 30);
    assert_fine(complete_version(tier, version, &problem), &problem);
    assert_fine(catalog_check(tier, TEST_JOB, version, &problem), &problem);
    assert_true(is_complete(tier, version));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_not_there, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_absent, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_disagreement, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_abandon, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_short_data, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_killed_raw, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_killed_lz4, setup, tier_fixture_free),
        cmocka_unit_test(test_point_names),
        cmocka_unit_test(test_fail_everywhere),
        cmocka_unit_test_setup_teardown(test_fail_everywhere_posix, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_completed_by_another, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_bit_flips, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_bit_flips_encoded, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_lost_data, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_moved, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_newest, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_strangers, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_condemn_and_repair, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_repair_encoded, setup, tier_fixture_free),
        cmocka_unit_test_setup_teardown(test_complete_again, setup, tier_fixture_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
