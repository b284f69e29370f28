/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/tiers/support.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sys/stat.h>

void sandbox_init(struct sandbox *sandbox) {
    const char *directory = getenv("TMPDIR");
    int length = snprintf(sandbox->path, sizeof sandbox->path, "%s/ckptd-tiers-XXXXXX", directory ? directory : "/tmp");
    assert_true(length < (int)sizeof sandbox->path);
    assert_non_null(mkdtemp(sandbox->path));
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk) {
    return remove(path);
}

void sandbox_deinit(struct sandbox *sandbox) {
    assert_int_equal(nftw(sandbox->path, remove_entry, 16, FTW_DEPTH | FTW_PHYS), 0);
}

void sandbox_file(const struct sandbox *sandbox, const char *tier, struct version_id version, const char *file,
                  char ret_path[512]) {
    char job[256], path[1024];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    layout_file(job, version, file, path);
    assert_true(snprintf(ret_path, 512, "%s/%s/%s", sandbox->path, tier, path) < 512);
}

void flip_bit(const char *path, uint64_t offset) {
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    char byte;
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
}

uint64_t file_size(const char *path) {
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    return (uint64_t)status.st_size;
}

struct tier *new_posix(const struct sandbox *sandbox, const char *name) {
    char root[128];
    snprintf(root, sizeof root, "%s/%s", sandbox->path, name);
    struct tier_posix_options options = {.name = name, .root = root, .level = LEVEL_LOCAL, .allow_network = true};
    struct tier *tier;
    struct problem problem = PROBLEM_NONE;
    assert_fine(tier_posix_new(&options, &tier, &problem), &problem);
    return tier;
}

struct tier *new_mem(const char *name) {
    struct tier *tier;
    assert_int_equal(tier_mem_new(name, LEVEL_LOCAL, &tier), 0);
    return tier;
}

struct tier *fails(struct tier *inner, const char *fault) {
    struct tier_fault_options options;
    struct problem problem = PROBLEM_NONE;
    struct tier *tier;
    assert_fine(tier_fault_parse(fault, &options, &problem), &problem);
    assert_int_equal(tier_fault_new(inner, &options, &tier), 0);
    return tier;
}

struct tier *never_fails(struct tier *inner) {
    return fails(inner, "any:999999999999:eio");
}

void assert_names_tier(const struct problem *problem, const char *tier) {
    char start[128];
    snprintf(start, sizeof start, "tier %s: ", tier);
    if (strncmp(problem->text, start, strlen(start)) != 0)
        fail_msg("'%s' does not begin with '%s'", problem->text, start);
}

void assert_fine(int r, const struct problem *problem) {
    if (r)
        fail_msg("%d: %s", r, problem_text(problem, r));
}

void plan_image(const struct part_plan *plan, char ret_image[TEST_SIZE]) {
    uint64_t state = plan->version.step * 1000003 + plan->rank * 7919 + 1;
    for (size_t i = 0; i < TEST_SIZE; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        /* The second chunk is noise, the others compress. */
        bool noise = i / TEST_CHUNK == 1;
        ret_image[i] = (char)(noise ? state >> 56 : (state >> 63) + plan->version.step + plan->rank);
    }
}

/* Encodes the image into `file`, as a drain would, and fills in the chunk table. */
static uint64_t encode(const struct part_plan *plan, const char *image, char *file, struct manifest_chunk *chunks) {
    uint64_t offset = 0, end = 0;
    char *encoded = malloc(codec_bound(TEST_CHUNK));
    assert_non_null(encoded);
    for (size_t i = 0; i * TEST_CHUNK < TEST_SIZE; i++) {
        const char *raw = image + i * TEST_CHUNK;
        uint32_t length = (uint32_t)min_u64(TEST_CHUNK, TEST_SIZE - i * TEST_CHUNK);
        uint32_t stored = codec_encode(plan->codec, raw, length, encoded);
        chunks[i] = (struct manifest_chunk){.offset = offset, .stored_length = stored, .raw_length = length};
        digest_chunk(raw, length, &chunks[i].digest);
        memcpy(file + offset, stored == length ? raw : encoded, stored);
        end = offset + stored;
        offset = align_up(end, TIER_ALIGNMENT);
    }
    free(encoded);
    return end;
}

static void plan_manifest(const struct part_plan *plan, struct manifest_chunk *chunks, size_t count,
                          uint64_t data_length, struct piece *piece, struct manifest *manifest) {
    *piece = (struct piece){
        .name = (char *)"w",
        .dtype = DTYPE_U8,
        .rank = plan->rank,
        .geometry = {.dims = 1, .shape = {1000 * plan->world}, .offset = {1000 * plan->rank}, .extent = {1000}},
    };
    *manifest = (struct manifest){
        .summary = {.generation = plan->version.generation,
                    .step = plan->version.step,
                    .rank = plan->rank,
                    .world = plan->world,
                    .image_size = TEST_SIZE,
                    .data_length = data_length,
                    .chunk_size = TEST_CHUNK,
                    .codec = plan->codec,
                    .created_ns = 1000 + plan->version.step},
        .chunks = chunks,
        .chunk_count = count,
        .pieces = {.items = piece, .count = 1},
    };
    strcpy(manifest->summary.job, TEST_JOB);
    strcpy(manifest->summary.run_id, plan->run_id ? plan->run_id : TEST_RUN);
    manifest_data_name(plan->rank, plan->codec, manifest->summary.data_file);
    struct digest digests[16];
    assert_true(count <= ARRAY_SIZE(digests));
    for (size_t i = 0; i < count; i++)
        digests[i] = chunks[i].digest;
    digest_fold(digests, count, &manifest->summary.image_digest);
}

int commit_part(struct tier *tier, const struct part_plan *plan, uint64_t nonce, struct problem *problem) {
    size_t room = align_up(TEST_SIZE, TIER_ALIGNMENT) + 16 * TIER_ALIGNMENT;
    CLEANUP(freep) char *image = malloc(TEST_SIZE);
    CLEANUP(freep) char *file = aligned_alloc(TIER_ALIGNMENT, room);
    assert_true(image && file);
    memset(file, 0, room);
    struct manifest_chunk chunks[16];
    struct piece piece;
    struct manifest manifest;
    plan_image(plan, image);
    uint64_t length = encode(plan, image, file, chunks);
    plan_manifest(plan, chunks, (TEST_SIZE + TEST_CHUNK - 1) / TEST_CHUNK, length, &piece, &manifest);

    struct commit commit;
    int r = commit_begin(&commit, tier, TEST_JOB, plan->version, plan->rank, nonce, TEST_SIZE, problem);
    if (r)
        return r;
    r = tier_write(&commit.file, file, align_up(length, TIER_ALIGNMENT), 0);
    if (r) {
        tier_problem(problem, tier, r, "write", commit.temporary);
        commit_abandon(&commit);
        return r;
    }
    return commit_finish(&commit, &manifest, problem);
}

int complete_version(struct tier *tier, struct version_id version, struct problem *problem) {
    return commit_complete(tier, TEST_JOB, version, 99, problem);
}

void make_version(struct tier *tier, struct version_id version, uint32_t world) {
    struct problem problem = PROBLEM_NONE;
    for (uint32_t rank = 0; rank < world; rank++) {
        struct part_plan plan = {.version = version, .rank = rank, .world = world};
        assert_fine(commit_part(tier, &plan, rank + 1, &problem), &problem);
    }
    assert_fine(complete_version(tier, version, &problem), &problem);
}

int read_back(struct tier *tier, const struct part_plan *plan, struct problem *problem) {
    CLEANUP(manifest_deinit) struct manifest manifest = {0};
    int r = catalog_read_manifest(tier, TEST_JOB, plan->version, plan->rank, &manifest, problem);
    if (r)
        return r;
    char job[256], path[TIER_PATH_MAX];
    assert_int_equal(job_escape(TEST_JOB, job, NULL), 0);
    layout_file(job, plan->version, manifest.summary.data_file, path);
    struct tier_file file;
    r = tier_open(tier, path, &file);
    if (r)
        return tier_problem(problem, tier, r, "open", path);
    CLEANUP(freep) char *image = malloc(TEST_SIZE);
    CLEANUP(freep) char *data = aligned_alloc(TIER_ALIGNMENT, TEST_CHUNK);
    CLEANUP(freep) char *scratch = aligned_alloc(TIER_ALIGNMENT, TEST_CHUNK);
    assert_true(image && data && scratch);
    plan_image(plan, image);
    for (uint32_t i = 0; r == 0 && i < manifest.chunk_count; i++) {
        r = catalog_read_chunk(&file, &manifest, i, data, scratch, problem);
        if (r == 0)
            assert_memory_equal(data, image + (uint64_t)i * TEST_CHUNK, manifest.chunks[i].raw_length);
    }
    int closed = tier_close(&file);
    if (closed && r == 0)
        r = tier_problem(problem, tier, closed, "close", path);
    return r;
}

struct tier_fixture *tier_fixture_new(void **state) {
    struct tier_fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    sandbox_init(&fixture->sandbox);
    *state = fixture;
    return fixture;
}

int tier_fixture_free(void **state) {
    struct tier_fixture *fixture = *state;
    tier_free(fixture->tier);
    sandbox_deinit(&fixture->sandbox);
    free(fixture);
    return 0;
}

struct tier *tier_of(void **state) {
    return ((struct tier_fixture *)*state)->tier;
}
