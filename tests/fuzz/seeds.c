/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz-seeds DIRECTORY: writes those inputs of the corpus that are no text: packets, shard tables,
 * encoded chunks, pieces. The rest was written by hand, or by tests/unit/proto/write-version.
 */
#include "proto/shards.h"
#include "proto/wire.h"
#include "tiers/codec.h"

#include <err.h>
#include <fcntl.h>
#include <sys/stat.h>

static const char *root;

static void write_seed(const char *target, const char *name, const void *prefix, size_t prefix_size, const void *data,
                       size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, target);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s/%s", root, target, name);
    CLEANUP(closep) int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, prefix, prefix_size) != (ssize_t)prefix_size || write(fd, data, size) != (ssize_t)size)
        err(1, "%s", path);
}

/* ---- messages ---- */

static void write_message(enum opcode opcode, const void *body, const char *tail) {
    static struct wire_packet packet;
    const struct message_rule *rule = message_rule((uint16_t)opcode);
    uint8_t descriptors = (uint8_t)rule->descriptors;
    wire_pack(&packet, opcode, 7, body, tail, strlen(tail), descriptors ? 0 : -1);
    write_seed("messages", rule->name, &descriptors, 1, packet.data, packet.size);
}

static void write_messages(void) {
    static const uint8_t ones[64] = {1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1};
    static const struct message_open open = {
        .rank = 1, .world = 4, .pid = 77, .job_length = 3, .run_id_length = 1, .directory_length = 4};
#define MESSAGE(number, name, type, direction, states, descriptors, tail)                                              \
    write_message(MESSAGE_##name, MESSAGE_##name == MESSAGE_OPEN ? (const void *)&open : ones,                         \
                  MESSAGE_##name == MESSAGE_OPEN ? "jobr/dir"                                                          \
                  : (tail)                       ? "sixteen bytes..."                                                  \
                                                 : "");
#include "proto/messages.def"
#undef MESSAGE
}

/* ---- shard tables ---- */

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

static void write_table(const char *name, const struct shard *shards, size_t count) {
    struct shards_writer writer = {0};
    for (size_t i = 0; i < count; i++) {
        struct problem problem = PROBLEM_NONE;
        struct shard shard = shards[i];
        if (!shard.replica_count)
            shard.replica_count = 1;
        if (shards_writer_add(&writer, &shard, &problem) < 0)
            errx(1, "%s: %s", name, problem.text);
    }
    uint32_t written = (uint32_t)count;
    write_seed("shards", name, &written, sizeof written, writer.data, writer.size);
    shards_writer_deinit(&writer);
}

static void write_tables(void) {
    const struct shard vectors[] = {
        {.name = "w", .dtype = DTYPE_F32, .area = 1, .address = 4096, .contiguous = true, .geometry = vector(6)},
        {.name = "b", .dtype = DTYPE_BF16, .area = SHARDS_AREA_PRIVATE, .contiguous = true, .geometry = vector(3)},
        {.name = "empty", .dtype = DTYPE_F64, .contiguous = true, .geometry = vector(0)},
        {.name = "scalar", .dtype = DTYPE_C64, .contiguous = true},
    };
    const struct shard places[] = {
        {.name = "w@%",
         .dtype = DTYPE_I16,
         .contiguous = true,
         .geometry = box(2, (uint64_t[]){4, 6}, (uint64_t[]){0, 0}, (uint64_t[]){2, 6})},
        {.name = "w@%",
         .dtype = DTYPE_I16,
         .address = 1000,
         .stride = {-24, 4},
         .geometry = box(2, (uint64_t[]){4, 6}, (uint64_t[]){2, 0}, (uint64_t[]){2, 3})},
        {.name = "flat",
         .dtype = DTYPE_F64,
         .contiguous = true,
         .geometry = {.is_range = true, .dims = 2, .shape = {7, 3}, .start = 5, .count = 9}},
        {.name = "flat",
         .dtype = DTYPE_F64,
         .stride = {16},
         .geometry = {.is_range = true, .dims = 2, .shape = {7, 3}, .start = 14, .count = 7}},
    };
    const struct shard kinds[] = {
        {.name = "w", .dtype = DTYPE_F32, .contiguous = true, .geometry = vector(6)},
        {.name = "tied",
         .target = "w",
         .dtype = DTYPE_F32,
         .flags = SHARD_ALIAS,
         .contiguous = true,
         .geometry = vector(6)},
        {.name = "rng", .dtype = DTYPE_U64, .flags = SHARD_RANK_LOCAL, .contiguous = true, .geometry = vector(2)},
        {.name = "count", .dtype = DTYPE_I64, .flags = SHARD_EAGER, .area = 2, .contiguous = true},
        {.name = "copy",
         .dtype = DTYPE_U8,
         .replica_index = 1,
         .replica_count = 2,
         .contiguous = true,
         .geometry = vector(5)},
        {.name = "__metadata__", .dtype = DTYPE_BOOL, .contiguous = true, .geometry = vector(1)},
    };
    const struct shard edges[] = {
        {.name = "high", .dtype = DTYPE_U8, .address = INT64_MAX - 6, .contiguous = true, .geometry = vector(6)},
        {.name = "low", .dtype = DTYPE_U8, .address = 5, .stride = {-1}, .geometry = vector(6)},
        {.name = "large",
         .dtype = DTYPE_U8,
         .contiguous = true,
         .geometry =
             {.is_range = true, .dims = 1, .shape = {UINT64_C(1) << 62}, .start = (UINT64_C(1) << 62) - 1, .count = 1}},
    };
    write_table("none", NULL, 0);
    write_table("edges", edges, ARRAY_SIZE(edges));
    write_table("vectors", vectors, ARRAY_SIZE(vectors));
    write_table("places", places, ARRAY_SIZE(places));
    write_table("kinds", kinds, ARRAY_SIZE(kinds));
}

/* ---- chunks and pieces ---- */

static void write_chunk(const char *name, const uint8_t *raw, uint32_t length) {
    CLEANUP(freep) uint8_t *encoded = malloc(codec_bound(length));
    uint32_t stored = codec_encode(CODEC_LZ4, raw, length, encoded);
    uint8_t prefix[4] = {1, (uint8_t)length, (uint8_t)(length >> 8), (uint8_t)(length >> 16)};
    write_seed("codec", name, prefix, sizeof prefix, stored == length ? raw : encoded, stored);
}

static void write_chunks(void) {
    static uint8_t raw[20000];
    write_chunk("zeros", raw, sizeof raw);
    for (size_t i = 0; i < sizeof raw; i++)
        raw[i] = (uint8_t)(i * i >> 7 & 15);
    write_chunk("repeats", raw, 12288);
    write_chunk("short", raw, 100);
}

static void write_geometries(void) {
    /* dimensions, shape; then pieces: 0 and start, count of 2 bytes each, or not 0 and offset + 7 extent. */
    static const uint8_t rows[] = {2, 4, 3, 1, 14, 21, 1, 16, 21}, ranges[] = {2, 4, 3, 0, 0, 0, 5, 0, 0, 5, 0, 7, 0},
                         mixed[] = {3, 2, 3, 4, 1, 7, 21, 28, 0, 12, 0, 12, 0}, scalar[] = {0, 1, 0, 0, 0, 1, 0};
    write_seed("geometry", "rows", NULL, 0, rows, sizeof rows);
    write_seed("geometry", "ranges", NULL, 0, ranges, sizeof ranges);
    write_seed("geometry", "mixed", NULL, 0, mixed, sizeof mixed);
    write_seed("geometry", "scalar", NULL, 0, scalar, sizeof scalar);
}

int main(int argc, char **argv) {
    if (argc != 2)
        errx(2, "usage: fuzz-seeds DIRECTORY");
    root = argv[1];
    write_messages();
    write_tables();
    write_chunks();
    write_geometries();
}
