/* SPDX-License-Identifier: Apache-2.0 */
/* Several ranks, each a process, make one version; any number of ranks read it. */
#include "tests/functional/support.h"

#include <stdlib.h>

#define ROWS 60
#define COLUMNS 35

/* What a rank of a world holds of "matrix", and what it does with it. */
struct rank {
    const char *job, *run_id;
    uint32_t rank, world;
    uint64_t step;
    enum { BY_ROWS, BY_COLUMNS, BY_RANGES } cut;
    int expected; /* of the wait for the version */
    const char *says;
};

static uint64_t cut_at(uint64_t size, uint32_t rank, uint32_t world) { return size * rank / world; }

/* The rank's piece of a matrix whose element (y, x) is y * COLUMNS + x + step * 10^6. */
static void protect_piece(ckpt *c, const struct rank *rank, uint64_t *elements) {
    uint64_t shape[2] = {ROWS, COLUMNS}, offset[2] = {0, 0}, extent[2] = {ROWS, COLUMNS};
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U64;
    shard.name = "matrix";
    shard.data = elements;
    shard.dimensions = 2;
    shard.shape = shape;
    if (rank->cut == BY_RANGES) {
        shard.range = 1;
        shard.start = cut_at(ROWS * COLUMNS, rank->rank, rank->world);
        shard.count = cut_at(ROWS * COLUMNS, rank->rank + 1, rank->world) - shard.start;
        for (uint64_t i = 0; i < shard.count; i++)
            elements[i] = shard.start + i + rank->step * 1000000;
    } else {
        unsigned d = rank->cut == BY_ROWS ? 0 : 1;
        offset[d] = cut_at(shape[d], rank->rank, rank->world);
        extent[d] = cut_at(shape[d], rank->rank + 1, rank->world) - offset[d];
        shard.offset = offset;
        shard.extent = extent;
        for (uint64_t y = 0; y < extent[0]; y++)
            for (uint64_t x = 0; x < extent[1]; x++)
                elements[y * extent[1] + x] = (offset[0] + y) * COLUMNS + offset[1] + x + rank->step * 1000000;
    }
    CHECK_OK(ckpt_protect(c, &shard, NULL));
}

static void write_piece(void *argument) {
    const struct rank *rank = argument;
    uint64_t elements[ROWS * COLUMNS], own[4];
    ckpt *c = rank_open(rank->job, rank->rank, rank->world, rank->run_id);
    protect_piece(c, rank, elements);
    words_fill(own, ARRAY_SIZE(own), rank->rank);
    uint64_t count = ARRAY_SIZE(own);
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U64;
    shard.name = "random state";
    shard.data = own;
    shard.dimensions = 1;
    shard.shape = &count;
    shard.flags = CKPT_RANK_LOCAL;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    char state[32];
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = state;
    options.state_size = (uint64_t)snprintf(state, sizeof state, "state of %u", rank->rank);
    CHECK_OK(ckpt_save(c, rank->step, &options));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_IS(rank->expected, ckpt_wait(c, rank->step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    if (rank->says)
        CHECK_SAYS(rank->says);
    CHECK_OK(ckpt_close(c));
}

static void write_version(const char *job, const char *run_id, uint64_t step, uint32_t world, int cut) {
    pid_t pids[8];
    struct rank ranks[8];
    for (uint32_t i = 0; i < world; i++) {
        ranks[i] = (struct rank){.job = job, .run_id = run_id, .rank = i, .world = world, .step = step, .cut = cut};
        pids[i] = process_start(write_piece, &ranks[i]);
    }
    for (uint32_t i = 0; i < world; i++)
        process_join(pids[i]);
}

/* Reads what it would hold in its own world, whoever wrote it. */
static void read_piece(void *argument) {
    const struct rank *rank = argument;
    uint64_t elements[ROWS * COLUMNS];
    ckpt *c = rank_open(rank->job, rank->rank, rank->world, rank->run_id);
    ckpt_restore *r = restore_step(c, rank->step);
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U64;
    read.name = "matrix";
    read.data = elements;
    read.dimensions = 2;
    for (int cut = BY_ROWS; cut <= BY_RANGES; cut++) {
        uint64_t offset[2] = {0, 0}, extent[2] = {ROWS, COLUMNS};
        memset(elements, 0xee, sizeof elements);
        if (cut == BY_RANGES) {
            read.range = 1;
            read.start = cut_at(ROWS * COLUMNS, rank->rank, rank->world);
            read.count = cut_at(ROWS * COLUMNS, rank->rank + 1, rank->world) - read.start;
            CHECK_OK(ckpt_restore_read(r, &read));
            for (uint64_t i = 0; i < read.count; i++)
                CHECK(elements[i] == read.start + i + rank->step * 1000000);
            continue;
        }
        unsigned d = cut == BY_ROWS ? 0 : 1;
        offset[d] = cut_at(d ? COLUMNS : ROWS, rank->rank, rank->world);
        extent[d] = cut_at(d ? COLUMNS : ROWS, rank->rank + 1, rank->world) - offset[d];
        read.range = 0;
        read.offset = offset;
        read.extent = extent;
        CHECK_OK(ckpt_restore_read(r, &read));
        for (uint64_t y = 0; y < extent[0]; y++)
            for (uint64_t x = 0; x < extent[1]; x++)
                CHECK(elements[y * extent[1] + x] == (offset[0] + y) * COLUMNS + offset[1] + x + rank->step * 1000000);
        read.offset = read.extent = NULL;
    }
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void read_version(const char *job, const char *run_id, uint64_t step, uint32_t world) {
    pid_t pids[8];
    struct rank ranks[8];
    for (uint32_t i = 0; i < world; i++) {
        ranks[i] = (struct rank){.job = job, .run_id = run_id, .rank = i, .world = world, .step = step};
        pids[i] = process_start(read_piece, &ranks[i]);
    }
    for (uint32_t i = 0; i < world; i++)
        process_join(pids[i]);
}

static void other_numbers_of_ranks(void) {
    static const struct { uint32_t from, to; } worlds[] = {{2, 1}, {1, 3}, {4, 2}, {3, 5}};
    daemon_start();
    char job[32], run_id[32];
    for (size_t i = 0; i < ARRAY_SIZE(worlds); i++)
        for (int cut = BY_ROWS; cut <= BY_RANGES; cut++) {
            snprintf(job, sizeof job, "reshape-%zu-%d", i, cut);
            write_version(job, "writing", 7, worlds[i].from, cut);
            snprintf(run_id, sizeof run_id, "reading");
            read_version(job, run_id, 7, worlds[i].to);
        }
}

/* The tensors of one rank only, and every rank's state, for a reader in a smaller world. */
static void rank_local_tensors_and_states(void) {
    daemon_start();
    write_version("local", "first", 1, 3, BY_ROWS);
    ckpt *c = job_open("local");
    ckpt_restore *r = restore_step(c, 1);
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_get_info(r, &info));
    CHECK(info.world == 3 && info.tensors == 4);
    for (uint32_t rank = 0; rank < 3; rank++) {
        uint64_t words[4];
        struct ckpt_read read;
        CKPT_INIT(read);
        read.dtype = CKPT_U64;
        read.name = "random state";
        read.data = words;
        read.dimensions = 1;
        read.flags = CKPT_RANK_LOCAL;
        read.rank = rank;
        CHECK_OK(ckpt_restore_read(r, &read));
        words_check(words, 4, rank);
        const void *state;
        uint64_t size;
        char expected[32];
        CHECK_OK(ckpt_restore_state(r, rank, &state, &size));
        CHECK(size == (uint64_t)snprintf(expected, sizeof expected, "state of %u", rank) &&
              memcmp(state, expected, size) == 0);
    }
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static bool listed(ckpt *c, uint64_t step) {
    struct ckpt_version_entry *versions;
    size_t count;
    bool found = false;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    for (size_t i = 0; i < count; i++)
        found = found || versions[i].step == step;
    ckpt_versions_free(versions);
    return found;
}

static void complete_only_with_every_part(void) {
    daemon_start();
    uint64_t elements[ROWS * COLUMNS];
    struct rank first = {.rank = 0, .world = 2, .step = 3};
    ckpt *c = rank_open("both", 0, 2, "run");
    protect_piece(c, &first, elements);
    save_captured(c, 3);
    CHECK_OK(ckpt_wait(c, 3, CKPT_GLOBAL, CKPT_PART, PATIENCE_MS));
    CHECK_IS(CKPT_PENDING, ckpt_test(c, 3, CKPT_GLOBAL, CKPT_VERSION));
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, 200));
    CHECK(!listed(c, 3));
    struct ckpt_durable durable;
    CKPT_INIT(durable);
    CHECK_IS(CKPT_NONE, ckpt_last_durable(c, CKPT_LOCAL, &durable));
    struct rank second = {.job = "both", .run_id = "run", .rank = 1, .world = 2, .step = 3};
    process_join(process_start(write_piece, &second));
    CHECK_OK(ckpt_wait(c, 3, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
    CHECK(listed(c, 3));
    CHECK_OK(ckpt_last_durable(c, CKPT_GLOBAL, &durable));
    CHECK(durable.step == 3);
    CHECK_OK(ckpt_close(c));
}

/* A vector of 100, of which two ranks hold [0, first) and [second, 100). */
struct halves {
    uint32_t rank;
    uint64_t first, second;
    uint32_t replicas;
    int expected;
    const char *says;
};

static void write_half(void *argument) {
    const struct halves *halves = argument;
    uint64_t words[100], shape = 100, offset = halves->rank ? halves->second : 0,
                         extent = halves->rank ? 100 - halves->second : halves->first;
    words_fill(words, 100, halves->replicas ? 0 : halves->rank);
    char run_id[64];
    snprintf(run_id, sizeof run_id, "%llu-%llu-%u", (unsigned long long)halves->first,
             (unsigned long long)halves->second, halves->replicas);
    ckpt *c = rank_open("halves", halves->rank, 2, run_id);
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_U64;
    shard.name = "vector";
    shard.data = words;
    shard.dimensions = 1;
    shard.shape = &shape;
    shard.offset = &offset;
    shard.extent = &extent;
    shard.replica_index = halves->replicas ? halves->rank : 0;
    shard.replica_count = halves->replicas;
    CHECK_OK(ckpt_protect(c, &shard, NULL));
    save_captured(c, 1);
    int r = ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS);
    CHECK_IS(halves->expected, r);
    if (r < 0) {
        CHECK_SAYS("vector");
        CHECK_SAYS(halves->says);
        int saved = ckpt_save(c, 2, NULL);
        CHECK(saved == CKPT_OK);
        CHECK_SAYS("vector");
    }
    CHECK_OK(ckpt_close(c));
}

static void write_halves(uint64_t first, uint64_t second, uint32_t replicas, int expected, const char *says) {
    struct halves halves[2];
    pid_t pids[2];
    for (uint32_t i = 0; i < 2; i++) {
        halves[i] = (struct halves){i, first, second, replicas, expected, says};
        pids[i] = process_start(write_half, &halves[i]);
    }
    process_join(pids[0]);
    process_join(pids[1]);
}

static void overlaps_and_gaps_are_named(void) {
    daemon_start();
    write_halves(60, 40, 0, CKPT_E_CONFLICT, "overlap");
    write_halves(100, 0, 0, CKPT_E_CONFLICT, "overlap");
    write_halves(40, 60, 0, CKPT_E_CONFLICT, "gap");
    ckpt *c = job_open("halves");
    ckpt_restore *r;
    CHECK_IS(CKPT_NONE, ckpt_restore_open(c, NULL, &r));
    CHECK_OK(ckpt_close(c));
}

/* Declared replicas are stored once. */
static void replicas(void) {
    daemon_start();
    write_halves(100, 0, 2, CKPT_OK, NULL);
    ckpt *c = job_open("halves");
    ckpt_restore *r = restore_step(c, 1);
    restore_words_check(r, "vector", 100, 0);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    size_t size;
    free(file_read(test_path("parallel/halves/1/1/rank-00001.safetensors"), &size));
    CHECK(size <= 4096 + 100);
}

/* One rank never saves the odd steps: those versions never are, and what others stored for them goes. */
static void parts_without_a_version_do_not_pile_up(void) {
    configure(&(struct settings){.local = "keep = 2\ntrash_grace_s = 0", .no_parallel = true});
    daemon_start();
    uint64_t words[2][1000];
    ckpt *c[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        c[rank] = rank_open("lazy", rank, 2, "run");
        CHECK_OK(ckpt_protect_array(c[rank], rank ? "second" : "first", CKPT_U64, words[rank], 1000));
    }
    for (uint64_t step = 1; step <= 20; step++)
        for (uint32_t rank = 0; rank < 2; rank++) {
            if (rank == 1 && step % 2)
                continue;
            words_fill(words[rank], 1000, step + rank * 100);
            save_captured(c[rank], step);
            CHECK_OK(ckpt_wait(c[rank], step, CKPT_LOCAL, CKPT_PART, PATIENCE_MS));
        }
    CHECK_OK(ckpt_wait(c[0], 20, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    for (uint64_t step = 1; step <= 19; step += 2)
        CHECK(!listed(c[0], step));
    CHECK(listed(c[0], 18) && listed(c[0], 20));
    EVENTUALLY(files_ending("local", "complete.json") == 2);
    EVENTUALLY(files_ending("local", ".safetensors") <= 5); /* two versions, and at most one odd step between */
    CHECK_OK(ckpt_close(c[1]));
    CHECK_OK(ckpt_close(c[0]));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(other_numbers_of_ranks),
        TEST(rank_local_tensors_and_states),
        TEST(complete_only_with_every_part),
        TEST(overlaps_and_gaps_are_named),
        TEST(replicas),
        TEST(parts_without_a_version_do_not_pile_up),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
