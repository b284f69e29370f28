/* SPDX-License-Identifier: Apache-2.0 */
/* Images filled from shared areas and from private memory (our own process is the client), strided in
 * every way, against element by element copies. */
#include "daemon/source.h"
#include "tests/unit/daemon/random.h"
#include "tests/unit/daemon/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define MEMORY_SIZE MIB(4)
#define SHARDS_MAX 6

/* One memory, reachable as an area and by its address. */
struct fixture {
    uint8_t *memory;
    struct area *area;
    struct peer *peer;
};

static int setup(void **state) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    struct problem problem = PROBLEM_NONE;
    random_seed();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING), sockets[2];
    if (fd < 0 || fallocate(fd, 0, 0, MEMORY_SIZE) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        return -1;
    fixture->memory = mmap(NULL, MEMORY_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    for (size_t i = 0; i < MEMORY_SIZE; i++)
        fixture->memory[i] = (uint8_t)random_number(256);
    if (area_new(3, fd, MEMORY_SIZE, &fixture->area, &problem) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0 ||
        peer_new(sockets[0], geteuid(), &fixture->peer, &problem) < 0)
        return -1;
    close(fd);
    close(sockets[0]);
    close(sockets[1]);
    *state = fixture;
    return 0;
}

static int teardown(void **state) {
    struct fixture *fixture = *state;
    area_unref(fixture->area);
    peer_unref(fixture->peer);
    munmap(fixture->memory, MEMORY_SIZE);
    free(fixture);
    return 0;
}

/* A shard of random shape and strides that lies within the memory. */
static void random_shard(struct fixture *fixture, struct shard *shard, char name[16], unsigned number, int kind) {
    static const enum dtype dtypes[] = {DTYPE_U8, DTYPE_F16, DTYPE_F32, DTYPE_F64, DTYPE_C128};
    for (;;) {
        *shard = (struct shard){.name = name, .dtype = dtypes[random_number(ARRAY_SIZE(dtypes))], .replica_count = 1};
        shard->name_length = (uint32_t)snprintf(name, 16, "shard-%u", number);
        struct geometry *geometry = &shard->geometry;
        unsigned element = dtype_size(shard->dtype);
        geometry->dims = (uint8_t)random_number(6);
        for (unsigned d = 0; d < geometry->dims; d++) {
            uint64_t most = d + 1u == geometry->dims && random_number(2) ? 5000 : 12;
            geometry->extent[d] = random_number(8) ? 1 + random_number(most) : 1;
            geometry->offset[d] = random_number(3);
            geometry->shape[d] = geometry->extent[d] + geometry->offset[d];
            int64_t unit = random_number(4) ? element : 1;
            shard->stride[d] = ((int64_t)random_number(random_number(2) ? 8 : 5000) - 3) * unit;
        }
        if (random_number(3) == 0) { /* as most are: row-major, or nearly */
            int64_t stride = element;
            for (unsigned d = geometry->dims; d-- > 0; stride *= (int64_t)geometry->extent[d])
                shard->stride[d] = random_number(6) ? stride : stride + (int64_t)random_number(64);
        }
        shard->contiguous = random_number(5) == 0;
        int64_t low, high;
        shard_span(shard, &low, &high);
        if (high - low > (int64_t)MEMORY_SIZE || shard_bytes(shard) > MIB(2))
            continue;
        uint64_t place = (uint64_t)-low + random_number(MEMORY_SIZE - (uint64_t)(high - low) + 1);
        shard->area = kind == 0 ? 3 : SHARDS_AREA_PRIVATE;
        shard->address = kind == 0 ? place : (uintptr_t)fixture->memory + place;
        return;
    }
}

/* What the shard's bytes in the image must be, one element at a time. */
static uint8_t *expected_bytes(const struct fixture *fixture, const struct shard *shard) {
    uint64_t bytes = shard_bytes(shard), index[GEOMETRY_DIMS_MAX] = {0};
    unsigned element = dtype_size(shard->dtype), dims = shard->geometry.dims;
    const uint8_t *base = shard->area == SHARDS_AREA_PRIVATE ? (const uint8_t *)(uintptr_t)shard->address
                                                             : fixture->memory + shard->address;
    uint8_t *expected = malloc(bytes + 1);
    if (shard->contiguous) {
        memcpy(expected, base, bytes);
        return expected;
    }
    for (uint64_t at = 0; at < bytes; at += element) {
        int64_t offset = 0;
        for (unsigned d = 0; d < dims; d++)
            offset += (int64_t)index[d] * shard->stride[d];
        memcpy(expected + at, base + offset, element);
        for (unsigned d = dims; d-- > 0 && ++index[d] == shard->geometry.extent[d];)
            index[d] = 0;
    }
    return expected;
}

static struct set *make_set(struct fixture *fixture, const struct shard *shards, size_t count) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct set *set = NULL;
    struct area *areas[AREAS_MAX] = {[3] = fixture->area};
    for (size_t i = 0; i < count; i++)
        assert_int_equal(shards_writer_add(&writer, &shards[i], &problem), 0);
    const struct image_identity identity = {.job = "test", .world = 1};
    const struct set_options options = {.count = (uint32_t)count, .identity = &identity, .areas = areas};
    int r = set_new(writer.data, writer.size, &options, &set, &problem);
    if (r)
        fail_msg("%s", problem.text);
    shards_writer_deinit(&writer);
    return set;
}

/* Reads the image in pieces like the daemon's (whole leaves, but any leaf size here) and compares. */
static void check_image(struct fixture *fixture, const struct shard *shards, size_t count, bool forked) {
    struct set *set = make_set(fixture, shards, count);
    struct problem problem = PROBLEM_NONE;
    uint64_t state_length = random_number(2) ? 0 : 1 + random_number(5000);
    struct source source = {
        .set = set,
        .peer = fixture->peer,
        .state_area = state_length ? fixture->area : NULL,
        .state_offset = 1000,
        .state_length = state_length,
        .image_size = image_size(&set->layout, state_length),
        .header = malloc(set->layout.data_start),
        .forked = forked,
    };
    image_header(&set->layout, state_length, source.header);
    uint8_t *image = malloc(source.image_size), *looked = malloc(source.image_size);
    memset(image, 0xee, source.image_size);
    uint64_t leaf = 4096u << random_number(7);
    for (uint64_t at = 0; at < source.image_size; at += leaf) {
        uint64_t length = min_u64(leaf, source.image_size - at);
        int r = source_fill(&source, at, length, image + at, &problem);
        if (r)
            fail_msg("%s", problem.text);
        const uint8_t *bytes = source_look(&source, at, length);
        if (bytes)
            assert_memory_equal(bytes, image + at, length);
    }
    assert_memory_equal(image, source.header, set->layout.data_start);
    for (size_t i = 0; i < count; i++) {
        uint8_t *expected = expected_bytes(fixture, &shards[i]);
        assert_memory_equal(image + set->layout.shard_offset[i], expected, shard_bytes(&shards[i]));
        free(expected);
    }
    if (state_length)
        assert_memory_equal(image + set->layout.state_offset, fixture->memory + 1000, state_length);
    free(image);
    free(looked);
    free(source.header);
    set_unref(set);
}

static void random_images(struct fixture *fixture, int kind, bool forked, int rounds) {
    for (int round = 0; round < rounds; round++) {
        struct shard shards[SHARDS_MAX];
        char names[SHARDS_MAX][16];
        size_t count = 1 + random_number(SHARDS_MAX);
        for (size_t i = 0; i < count; i++)
            random_shard(fixture, &shards[i], names[i], (unsigned)i, kind == 2 ? (int)random_number(2) : kind);
        check_image(fixture, shards, count, forked);
    }
}

static void shared_memory(void **state) { random_images(*state, 0, false, 400); }
static void private_memory(void **state) { random_images(*state, 1, false, 400); }
static void private_memory_of_a_forker(void **state) { random_images(*state, 1, true, 150); }
static void both_in_one_image(void **state) { random_images(*state, 2, false, 200); }

/* More spans than one system call takes. */
static void very_many_small_shards(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 5000 };
    struct shard *shards = calloc(COUNT, sizeof *shards);
    char(*names)[16] = calloc(COUNT, sizeof *names);
    for (unsigned i = 0; i < COUNT; i++) {
        shards[i] = (struct shard){
            .name = names[i],
            .name_length = (uint32_t)snprintf(names[i], sizeof names[i], "small-%u", i),
            .dtype = DTYPE_U32,
            .contiguous = true,
            .replica_count = 1,
            .area = i % 700 == 699 ? 3 : SHARDS_AREA_PRIVATE,
            .geometry = {.dims = 1, .shape = {1}, .extent = {1}},
        };
        uint64_t place = random_number(MEMORY_SIZE - 4);
        shards[i].address = shards[i].area == 3 ? place : (uintptr_t)fixture->memory + place;
    }
    check_image(fixture, shards, COUNT, false);
    free(names);
    free(shards);
}

/* Memory that is not there is an error that names the tensor, never a signal, and never silence. */
static void missing_memory_is_named(void **state) {
    struct fixture *fixture = *state;
    struct problem problem = PROBLEM_NONE;
    const uint64_t nowhere = 4096; /* the kernel keeps the lowest addresses free */
    for (int forked = 0; forked <= 1; forked++)
        for (int contiguous = 0; contiguous <= 1; contiguous++) {
            struct shard shard = {.name = "the lost one",
                                  .name_length = 12,
                                  .dtype = DTYPE_U8,
                                  .contiguous = contiguous,
                                  .stride = {2},
                                  .replica_count = 1,
                                  .area = SHARDS_AREA_PRIVATE,
                                  .address = nowhere,
                                  .geometry = {.dims = 1, .shape = {KIB(500)}, .extent = {KIB(500)}}};
            struct set *set = make_set(fixture, &shard, 1);
            struct source source = {
                .set = set, .peer = fixture->peer, .image_size = image_size(&set->layout, 0), .forked = forked};
            uint8_t *bytes = malloc(KIB(500));
            problem = PROBLEM_NONE;
            assert_true(source_fill(&source, set->layout.data_start, KIB(500), bytes, &problem) < 0);
            assert_non_null(strstr(problem.text, "the lost one"));
            free(bytes);
            set_unref(set);
        }
}

static void shards_outside_of_their_area_are_refused(void **state) {
    struct fixture *fixture = *state;
    struct area *areas[AREAS_MAX] = {[3] = fixture->area};
    const struct image_identity identity = {.job = "test", .world = 1};
    const struct set_options options = {.count = 1, .identity = &identity, .areas = areas};
    static const struct {
        uint32_t area;
        uint64_t address, count;
        int64_t stride;
    } wrong[] = {
        {3, MEMORY_SIZE, 1, 1}, {3, MEMORY_SIZE - 9, 10, 1},
        {3, 0, 2, -1},          {3, 8, 10, -1},
        {3, UINT64_MAX, 1, 1},  {4, 0, 1, 1},
        {3, 0, 2, MEMORY_SIZE}, {3, INT64_MAX, 2, INT64_MAX / 2},
        {AREAS_MAX, 0, 1, 1},
    };
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct shard shard = {.name = "wrong",
                              .name_length = 5,
                              .dtype = DTYPE_U8,
                              .stride = {wrong[i].stride},
                              .replica_count = 1,
                              .area = wrong[i].area,
                              .address = wrong[i].address,
                              .geometry = {.dims = 1, .shape = {wrong[i].count}, .extent = {wrong[i].count}}};
        struct shards_writer writer = {0};
        struct problem problem = PROBLEM_NONE;
        struct set *set = NULL;
        if (shards_writer_add(&writer, &shard, &problem) == 0) /* a span that overflows goes no further */
            assert_true(set_new(writer.data, writer.size, &options, &set, &problem) < 0);
        assert_null(set);
        shards_writer_deinit(&writer);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_memory),
        cmocka_unit_test(private_memory),
        cmocka_unit_test(private_memory_of_a_forker),
        cmocka_unit_test(both_in_one_image),
        cmocka_unit_test(very_many_small_shards),
        cmocka_unit_test(missing_memory_is_named),
        cmocka_unit_test(shards_outside_of_their_area_are_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
