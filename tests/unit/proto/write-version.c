/* SPDX-License-Identifier: Apache-2.0 */

/*
 * write-version DIRECTORY raw|lz4: writes a complete version of two ranks, with one of everything,
 * for readers that share no code with this one: check_version.py. A tensor's element e has the
 * bytes (e * 31 + j * 7 + sum of the name's bytes) & 255, those of BOOL and of rank-local tensors
 * as check_version.py says.
 */

#include "base/problem.h"
#include "proto/manifest.h"
#include "proto/pieces.h"

#include <err.h>
#include <fcntl.h>
#include <lz4.h>
#include <sys/stat.h>

#define CHUNK_SIZE KIB(64)
#define WORLD 2
#define STATE "{\"step\": 1200, \"loader\": \"\\u00e9\"}"

static void check(int r, const struct problem *problem) {
    if (r < 0)
        errx(1, "%s", problem_text(problem, r));
}

static struct geometry box(unsigned dims, const uint64_t *shape, const uint64_t *offset, const uint64_t *extent) {
    struct geometry geometry = {.dims = (uint8_t)dims};
    memcpy(geometry.shape, shape, dims * sizeof *shape);
    memcpy(geometry.offset, offset, dims * sizeof *offset);
    memcpy(geometry.extent, extent, dims * sizeof *extent);
    return geometry;
}

static struct geometry vector(uint64_t elements) {
    return (struct geometry){.dims = 1, .shape = {elements}, .extent = {elements}};
}

static void add(struct shards_writer *writer, const char *name, enum dtype dtype, uint32_t flags,
                struct geometry geometry) {
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {
        .name = name,
        .target = flags & SHARD_ALIAS ? "grid" : NULL,
        .dtype = dtype,
        .flags = flags,
        .area = SHARDS_AREA_PRIVATE,
        .contiguous = true,
        .replica_count = 1,
        .geometry = geometry,
    };
    check(shards_writer_add(writer, &shard, &problem), &problem);
}

static void protect(struct shards_writer *writer, uint32_t rank) {
    /* Whole tensors of every dtype, on one rank or the other. */
    for (uint32_t dtype = 1; dtype < DTYPE_MAX; dtype++) {
        char name[32];
        snprintf(name, sizeof name, "all.%s", dtype_name((enum dtype)dtype));
        if (dtype % WORLD == rank)
            add(writer, name, (enum dtype)dtype, 0,
                box(2, (uint64_t[]){3, dtype}, (uint64_t[]){0, 0}, (uint64_t[]){3, dtype}));
    }
    /* Columns of a matrix that spans chunks; a checkerboard; a flat range; a complex one in rows. */
    add(writer, "columns", DTYPE_F32, 0,
        box(2, (uint64_t[]){300, 200}, (uint64_t[]){0, rank * 100}, (uint64_t[]){300, 100}));
    for (uint64_t i = 0; i < 2; i++)
        add(writer, "grid", DTYPE_I16, 0,
            box(3, (uint64_t[]){10, 4, 6}, (uint64_t[]){i * 5, 0, (rank + i) % 2 * 3}, (uint64_t[]){5, 4, 3}));
    add(writer, "flat", DTYPE_F64, 0,
        (struct geometry){
            .is_range = true, .dims = 2, .shape = {77, 3}, .start = rank * 100, .count = rank ? 131 : 100});
    add(writer, "complex", DTYPE_C64, 0, box(1, (uint64_t[]){9}, (uint64_t[]){rank * 4}, (uint64_t[]){rank ? 5 : 4}));
    add(writer, "tied", DTYPE_I16, SHARD_ALIAS,
        box(3, (uint64_t[]){10, 4, 6}, (uint64_t[]){0, 0, 0}, (uint64_t[]){10, 4, 6}));
    add(writer, "rng", DTYPE_U64, SHARD_RANK_LOCAL, vector(5 + rank));
    if (rank == 1)
        return;
    add(writer, "scalar", DTYPE_F32, 0, (struct geometry){0});
    add(writer, "empty", DTYPE_F32, 0, vector(0));
    add(writer, "whole range", DTYPE_I32, 0,
        (struct geometry){.is_range = true, .dims = 2, .shape = {5, 7}, .count = 35});
    add(writer, "__metadata__", DTYPE_I8, 0, vector(3));
    add(writer, "%state", DTYPE_I8, 0, vector(4));
    add(writer, "a@b%40c/\"quoted\"\\\n\xc3\xa9\xf0\x9f\x98\x80", DTYPE_I8, 0, vector(5));
}

/* Element number `element` of the tensor, at `to`. */
static void element_write(const struct shard *shard, uint64_t element, uint8_t *to) {
    unsigned sum = 0;
    for (const char *at = shard->name; *at; at++)
        sum += (unsigned char)*at;
    for (unsigned j = 0; j < dtype_size(shard->dtype); j++)
        to[j] = (uint8_t)((element * 31 + j * 7 + sum) & (shard->dtype == DTYPE_BOOL ? 1 : 255));
}

struct fill {
    const struct shard *shard;
    uint8_t *to;
};

static int fill_run(void *context, uint64_t piece_offset, uint64_t tensor_offset, uint64_t count) {
    const struct fill *fill = context;
    unsigned size = dtype_size(fill->shard->dtype);
    for (uint64_t i = 0; i < count; i++)
        element_write(fill->shard, tensor_offset + i, fill->to + (piece_offset + i) * size);
    return 0;
}

static uint8_t *image_new(const struct shards *shards, const struct image_layout *layout, uint64_t size) {
    uint8_t *image = calloc(1, size);
    image_header(layout, sizeof STATE - 1, image);
    for (uint32_t i = 0; i < layout->ordered_count; i++) {
        struct shard shard;
        shards_get(shards, layout->order[i], &shard);
        struct geometry all = {.is_range = true, .dims = shard.geometry.dims};
        memcpy(all.shape, shard.geometry.shape, sizeof all.shape);
        all.count = geometry_tensor_elements(&all);
        struct fill fill = {&shard, image + layout->shard_offset[layout->order[i]]};
        geometry_intersect(&shard.geometry, &all, fill_run, &fill);
    }
    memcpy(image + layout->state_offset, STATE, sizeof STATE - 1);
    return image;
}

static void file_write(int directory, const char *name, const void *data, size_t size) {
    CLEANUP(closep) int fd = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        err(1, "%s", name);
}

/* The data file, encoded chunk by chunk where that pays. */
static void data_write(int directory, struct manifest *manifest, const uint8_t *image) {
    struct manifest_summary *summary = &manifest->summary;
    bool encode = summary->codec == CODEC_LZ4;
    size_t count = manifest->chunk_count;
    CLEANUP(freep) uint8_t *file = calloc(count, CHUNK_SIZE);
    CLEANUP(freep) struct digest *digests = calloc(count, sizeof *digests);
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        struct manifest_chunk *chunk = &manifest->chunks[i];
        const uint8_t *raw = image + i * CHUNK_SIZE;
        uint32_t length = (uint32_t)min_u64(summary->image_size - i * CHUNK_SIZE, CHUNK_SIZE);
        *chunk = (struct manifest_chunk){
            .offset = encode ? align_up(end, 4096) : i * CHUNK_SIZE, .stored_length = length, .raw_length = length};
        int encoded =
            encode ? LZ4_compress_default((const char *)raw, (char *)file + chunk->offset, (int)length, (int)length - 1)
                   : 0;
        if (encoded > 0)
            chunk->stored_length = (uint32_t)encoded;
        else
            memcpy(file + chunk->offset, raw, length);
        digest_chunk(raw, length, &chunk->digest);
        digests[i] = chunk->digest;
        end = chunk->offset + chunk->stored_length;
    }
    digest_fold(digests, count, &summary->image_digest);
    summary->data_length = end;
    file_write(directory, summary->data_file, file, end);
}

static struct manifest part_write(int directory, uint32_t rank, enum codec codec) {
    struct problem problem = PROBLEM_NONE;
    struct shards_writer writer = {0};
    struct shards *shards;
    struct image_layout layout;
    struct image_identity identity = {.job = "interchange", .rank = rank, .world = WORLD};
    protect(&writer, rank);
    check(shards_parse(writer.data, writer.size, writer.count, &shards, &problem), &problem);
    check(image_layout(shards, &identity, &layout, &problem), &problem);
    struct manifest manifest = {.summary = {.job = "interchange", .run_id = "r", .generation = 1, .step = 1200}};
    struct manifest_summary *summary = &manifest.summary;
    summary->rank = rank;
    summary->world = WORLD;
    summary->codec = codec;
    summary->chunk_size = CHUNK_SIZE;
    summary->created_ns = UINT64_C(1700000000000000000);
    summary->image_size = image_size(&layout, sizeof STATE - 1);
    manifest_data_name(rank, codec, summary->data_file);
    manifest.chunk_count = (summary->image_size + CHUNK_SIZE - 1) / CHUNK_SIZE;
    manifest.chunks = calloc(manifest.chunk_count, sizeof *manifest.chunks);
    CLEANUP(freep) uint8_t *image = image_new(shards, &layout, summary->image_size);
    data_write(directory, &manifest, image);
    check(pieces_from_layout(shards, &layout, rank, sizeof STATE - 1, &manifest.pieces), NULL);

    CLEANUP(freep) char *text = NULL;
    char name[32];
    size_t length;
    check(manifest_write(&manifest, &text, &length), NULL);
    manifest_file_name(rank, name);
    file_write(directory, name, text, length);
    image_layout_deinit(&layout);
    shards_free(shards);
    shards_writer_deinit(&writer);
    return manifest;
}

int main(int argc, char **argv) {
    if (argc != 3)
        errx(2, "usage: write-version DIRECTORY raw|lz4");
    enum codec codec = strcmp(argv[2], "lz4") == 0 ? CODEC_LZ4 : CODEC_RAW;
    CLEANUP(closep) int directory = -1;
    if (mkdir(argv[1], 0777) < 0 || (directory = open(argv[1], O_DIRECTORY | O_CLOEXEC)) < 0)
        err(1, "%s", argv[1]);
    struct manifest manifests[WORLD];
    for (uint32_t rank = 0; rank < WORLD; rank++)
        manifests[rank] = part_write(directory, rank, codec);
    struct problem problem = PROBLEM_NONE;
    struct complete complete;
    check(complete_build(manifests, WORLD, &complete, &problem), &problem);
    CLEANUP(freep) char *text = NULL;
    size_t length;
    check(complete_write(&complete, &text, &length), NULL);
    file_write(directory, "complete.json", text, length);
    complete_deinit(&complete);
    for (uint32_t rank = 0; rank < WORLD; rank++)
        manifest_deinit(&manifests[rank]);
}
