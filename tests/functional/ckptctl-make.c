/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes versions in a directory, without a daemon, for the tests of ckptctl:
 *
 *     ckptctl-make ROOT JOB GENERATION STEP [lz4] [only=RANK] [resumes=GENERATION/STEP]
 *
 * Two ranks. Element i of a tensor has the value i + STEP (modulo what its dtype can hold), so that
 * any reader can tell. `only` commits one rank's part and leaves the version incomplete.
 */
#include "proto/image.h"
#include "tiers/codec.h"
#include "tiers/commit.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <time.h>

#define WORLD 2
#define CHUNK_SIZE KIB(256)

struct recipe {
    struct tier *tier;
    const char *job;
    struct version_id version;
    enum codec codec;
};

static void die(int error, const struct problem *problem, const char *what) {
    fprintf(stderr, "ckptctl-make: %s: %s\n", what, problem_text(problem, error));
    exit(1);
}

/* ---- what a rank has ---- */

static struct shard shard(const char *name, enum dtype dtype, struct geometry geometry) {
    return (struct shard){.name = name,
                          .dtype = dtype,
                          .area = SHARDS_AREA_PRIVATE,
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = geometry};
}

static size_t list_shards(uint32_t rank, struct shard list[16]) {
    size_t count = 0;
    /* Rows, columns and flat ranges over the ranks. */
    list[count++] =
        shard("model/rows", DTYPE_F32,
              (struct geometry){.dims = 2, .shape = {64, 3000}, .offset = {32 * rank, 0}, .extent = {32, 3000}});
    list[count++] = shard(
        "model/columns", DTYPE_I32,
        (struct geometry){.dims = 2, .shape = {17, 50}, .offset = {0, 20 * rank}, .extent = {17, rank ? 30 : 20}});
    list[count++] = shard("optimizer/flat", DTYPE_F64,
                          (struct geometry){.is_range = true,
                                            .dims = 2,
                                            .shape = {301, 333},
                                            .start = rank ? 50001 : 0,
                                            .count = rank ? 301 * 333 - 50001 : 50001});
    list[count] = shard("model/tied", DTYPE_F32, list[0].geometry);
    list[count].flags = SHARD_ALIAS;
    list[count++].target = "model/rows";
    list[count] = shard("random", DTYPE_U8, (struct geometry){.dims = 1, .shape = {100}, .extent = {100}});
    list[count++].flags = SHARD_RANK_LOCAL;
    /* A scalar that both have: the second copy is not stored. */
    list[count] = shard("model/scalar", DTYPE_I64, (struct geometry){0});
    list[count].replica_count = 2;
    list[count++].replica_index = rank;
    if (rank == 0)
        list[count++] = shard("phase", DTYPE_C64, (struct geometry){.dims = 1, .shape = {5}, .extent = {5}});
    else
        list[count++] =
            shard("model/big", DTYPE_U16, (struct geometry){.dims = 1, .shape = {400000}, .extent = {400000}});
    return count;
}

static void write_element(enum dtype dtype, uint64_t value, void *to) {
    float single[2] = {(float)value, -(float)value};
    double twice = (double)value;
    switch (dtype_size(dtype)) {
    case 1:
        *(uint8_t *)to = (uint8_t)value;
        break;
    case 2:
        memcpy(to, &(uint16_t){(uint16_t)value}, 2);
        break;
    case 4:
        memcpy(to, dtype == DTYPE_F32 ? (const void *)single : (const void *)&(uint32_t){(uint32_t)value}, 4);
        break;
    case 8:
        memcpy(to,
               dtype == DTYPE_C64   ? (const void *)single
               : dtype == DTYPE_F64 ? (const void *)&twice
                                    : (const void *)&value,
               8);
        break;
    }
}

struct filling {
    char *data;
    enum dtype dtype;
    uint64_t step;
};

static int fill_run(void *context, uint64_t piece_offset, uint64_t tensor_offset, uint64_t count) {
    struct filling *filling = context;
    for (uint64_t i = 0; i < count; i++)
        write_element(filling->dtype, tensor_offset + i + filling->step,
                      filling->data + (piece_offset + i) * dtype_size(filling->dtype));
    return 0;
}

static void fill(const struct shard *piece, uint64_t step, char *data) {
    struct filling filling = {data, piece->dtype, step};
    struct geometry whole = {.dims = piece->geometry.dims};
    memcpy(whole.shape, piece->geometry.shape, sizeof whole.shape);
    memcpy(whole.extent, piece->geometry.shape, sizeof whole.extent);
    geometry_intersect(&piece->geometry, &whole, fill_run, &filling);
}

/* ---- a part ---- */

static void write_chunks(struct commit *commit, const struct recipe *recipe, const char *image,
                         struct manifest *manifest) {
    uint64_t size = manifest->summary.image_size, offset = 0;
    struct digest *digests = calloc(manifest->chunk_count, sizeof *digests);
    char *block = aligned_alloc(TIER_ALIGNMENT, codec_bound(CHUNK_SIZE));
    bool encoded = false;
    for (size_t i = 0; i < manifest->chunk_count; i++) {
        struct manifest_chunk *chunk = &manifest->chunks[i];
        const char *raw = image + i * CHUNK_SIZE;
        chunk->raw_length = (uint32_t)min_u64(CHUNK_SIZE, size - i * CHUNK_SIZE);
        chunk->stored_length = codec_encode(recipe->codec, raw, chunk->raw_length, block);
        chunk->offset = offset;
        digest_chunk(raw, chunk->raw_length, &digests[i]);
        chunk->digest = digests[i];
        if (chunk->stored_length == chunk->raw_length)
            memcpy(block, raw, chunk->raw_length);
        else
            encoded = true;
        uint64_t stored = align_up(chunk->stored_length, TIER_ALIGNMENT);
        memset(block + chunk->stored_length, 0, stored - chunk->stored_length);
        int r = tier_write(&commit->file, block, stored, offset);
        if (r != 0)
            die(r, NULL, "write");
        manifest->summary.data_length = offset + chunk->stored_length;
        offset += stored;
    }
    digest_fold(digests, manifest->chunk_count, &manifest->summary.image_digest);
    manifest->summary.codec = encoded ? recipe->codec : CODEC_RAW;
    manifest_data_name(manifest->summary.rank, manifest->summary.codec, manifest->summary.data_file);
    free(block);
    free(digests);
}

static void make_part(const struct recipe *recipe, uint32_t rank) {
    struct problem problem = PROBLEM_NONE;
    struct shard list[16];
    struct shards_writer writer = {0};
    struct shards *shards;
    struct image_layout layout;
    size_t count = list_shards(rank, list);
    int r = 0;
    for (size_t i = 0; r == 0 && i < count; i++)
        r = shards_writer_add(&writer, &list[i], &problem);
    if (r == 0)
        r = shards_parse(writer.data, writer.size, writer.count, &shards, &problem);
    struct image_identity identity = {recipe->job, rank, WORLD};
    if (r == 0)
        r = image_layout(shards, &identity, &layout, &problem);
    if (r != 0)
        die(r, &problem, "layout");

    char state[64];
    int state_length =
        snprintf(state, sizeof state, "state of rank %" PRIu32 " at %" PRIu64, rank, recipe->version.step);
    uint64_t size = image_size(&layout, (uint64_t)state_length);
    char *image = calloc(1, align_up(size, CHUNK_SIZE));
    image_header(&layout, (uint64_t)state_length, image);
    for (size_t i = 0; i < count; i++) {
        if (layout.shard_offset[i] != UINT64_MAX)
            fill(&list[i], recipe->version.step, image + layout.shard_offset[i]);
    }
    memcpy(image + layout.state_offset, state, (size_t)state_length);

    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct manifest manifest = {
        .summary = {.generation = recipe->version.generation,
                    .step = recipe->version.step,
                    .rank = rank,
                    .world = WORLD,
                    .image_size = size,
                    .chunk_size = CHUNK_SIZE,
                    .created_ns = (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND},
        .chunk_count = (size + CHUNK_SIZE - 1) / CHUNK_SIZE,
    };
    snprintf(manifest.summary.job, sizeof manifest.summary.job, "%s", recipe->job);
    snprintf(manifest.summary.run_id, sizeof manifest.summary.run_id, "run-%" PRIu64, recipe->version.generation);
    manifest.chunks = calloc(manifest.chunk_count, sizeof *manifest.chunks);
    r = pieces_from_layout(shards, &layout, rank, (uint64_t)state_length, &manifest.pieces);
    if (r != 0)
        die(r, NULL, "pieces");

    struct commit commit;
    r = commit_begin(&commit, recipe->tier, recipe->job, recipe->version, rank, rank + 1, size, &problem);
    if (r != 0)
        die(r, &problem, "begin");
    write_chunks(&commit, recipe, image, &manifest);
    r = commit_finish(&commit, &manifest, &problem);
    if (r != 0)
        die(r, &problem, "finish");
    manifest_deinit(&manifest);
    free(image);
    image_layout_deinit(&layout);
    shards_free(shards);
    shards_writer_deinit(&writer);
}

static void make_run(const struct recipe *recipe, const char *resumes) {
    struct run_record record = {.generation = recipe->version.generation, .pid = (uint32_t)getpid(), .world = WORLD};
    char path[1024], temporary[1100], job[256], *text = NULL;
    size_t size = 0;
    snprintf(record.job, sizeof record.job, "%s", recipe->job);
    snprintf(record.run_id, sizeof record.run_id, "run-%" PRIu64, record.generation);
    strcpy(record.host, "testhost");
    strcpy(record.boot_id, "00000000-0000-0000-0000-000000000000");
    record.resumes =
        resumes && sscanf(resumes, "%" SCNu64 "/%" SCNu64, &record.resume_generation, &record.resume_step) == 2;
    if (job_escape(recipe->job, job, NULL) < 0 || run_record_write(&record, &text, &size) < 0)
        die(-EINVAL, NULL, "run record");
    layout_generation(job, record.generation, path);
    if (tier_make_directories(recipe->tier, path) < 0)
        die(-EIO, NULL, "directories");
    strcat(path, "/run");
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (tier_publish_once(recipe->tier, path, temporary, text, size, POINT_COMPLETE_WRITTEN) < 0)
        die(-EIO, NULL, "run file");
    free(text);
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fputs("usage: ckptctl-make ROOT JOB GENERATION STEP [lz4] [only=RANK] [resumes=G/S]\n", stderr);
        return 2;
    }
    struct recipe recipe = {.job = argv[2], .version = {strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10)}};
    const char *resumes = NULL;
    int only = -1;
    for (int i = 5; i < argc; i++) {
        if (strcmp(argv[i], "lz4") == 0)
            recipe.codec = CODEC_LZ4;
        else if (strncmp(argv[i], "only=", 5) == 0)
            only = atoi(argv[i] + 5);
        else if (strncmp(argv[i], "resumes=", 8) == 0)
            resumes = argv[i] + 8;
    }
    struct problem problem = PROBLEM_NONE;
    struct tier_posix_options options = {.name = "made", .root = argv[1], .level = LEVEL_LOCAL, .allow_network = true};
    int r = tier_posix_new(&options, &recipe.tier, &problem);
    if (r != 0)
        die(r, &problem, "tier");
    make_run(&recipe, resumes);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        if (only < 0 || only == (int)rank)
            make_part(&recipe, rank);
    }
    r = only < 0 ? commit_complete(recipe.tier, recipe.job, recipe.version, 1, &problem) : 0;
    if (r != 0)
        die(r, &problem, "complete");
    tier_free(recipe.tier);
    return 0;
}
