/* SPDX-License-Identifier: Apache-2.0 */
/* A version holds the bytes of one moment: that of its save. */
#include "tests/functional/support.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#define WORDS 20000

/* Steps follow each other as fast as the fence allows; scalars and statistics change at once. */
static void many_steps_each_of_its_moment(void) {
    enum { STEPS = 40 };
    configure(&(struct settings){.local = "keep = 100\nbacklog = 100", .no_parallel = true});
    daemon_start();
    uint64_t *weights = malloc(WORDS * 8), *shared, statistics[16], scalar[2];
    ckpt *c = job_open("moment");
    CHECK_OK(ckpt_alloc(c, WORDS * 8, (void **)&shared));
    CHECK_OK(ckpt_protect_array(c, "weights", CKPT_U64, weights, WORDS));
    CHECK_OK(ckpt_protect_array(c, "shared", CKPT_U64, shared, WORDS));
    uint64_t count = ARRAY_SIZE(statistics);
    struct ckpt_shard eager;
    CKPT_INIT(eager);
    eager.dtype = CKPT_U64;
    eager.name = "statistics";
    eager.data = statistics;
    eager.dimensions = 1;
    eager.shape = &count;
    eager.flags = CKPT_EAGER;
    CHECK_OK(ckpt_protect(c, &eager, NULL));
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = scalar;
    options.state_size = sizeof scalar;
    for (uint64_t step = 0; step < STEPS; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(weights, WORDS, step);
        words_fill(shared, WORDS, step + 1000);
        words_fill(statistics, ARRAY_SIZE(statistics), step + 2000);
        words_fill(scalar, ARRAY_SIZE(scalar), step + 3000);
        CHECK_OK(ckpt_save(c, step, &options));
        memset(statistics, 0xee, sizeof statistics);
        memset(scalar, 0xee, sizeof scalar);
    }
    for (uint64_t step = 0; step < STEPS; step++) {
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
        ckpt_restore *r = restore_of(c, step);
        restore_words_check(r, "weights", WORDS, step);
        restore_words_check(r, "shared", WORDS, step + 1000);
        restore_words_check(r, "statistics", ARRAY_SIZE(statistics), step + 2000);
        const void *state;
        uint64_t size;
        CHECK_OK(ckpt_restore_state(r, 0, &state, &size));
        CHECK(size == sizeof scalar);
        words_check(state, ARRAY_SIZE(scalar), step + 3000);
        ckpt_restore_close(r);
    }
    CHECK_OK(ckpt_close(c));
    free(weights);
}

/* A piece may change as soon as its own fence says so, while later ones are still being read. */
static void fence_of_one_piece(void) {
    enum { PIECES = 8, COUNT = 1 << 20 };
    configure(&(struct settings){.pool = "512M", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("pieces");
    uint64_t *pieces[PIECES], ids[PIECES], count = COUNT;
    char name[16];
    for (unsigned i = 0; i < PIECES; i++) {
        pieces[i] = malloc(COUNT * 8);
        words_fill(pieces[i], COUNT, i);
        snprintf(name, sizeof name, "piece-%u", i);
        struct ckpt_shard shard;
        CKPT_INIT(shard);
        shard.dtype = CKPT_U64;
        shard.name = name;
        shard.data = pieces[i];
        shard.dimensions = 1;
        shard.shape = &count;
        CHECK_OK(ckpt_protect(c, &shard, &ids[i]));
    }
    CHECK_OK(ckpt_save(c, 1, NULL));
    for (unsigned i = 0; i < PIECES; i++) {
        CHECK_OK(ckpt_fence_shard(c, ids[i], CKPT_DEFAULT_TIMEOUT));
        memset(pieces[i], 0xee, COUNT * 8);
    }
    CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    ckpt_restore *r = restore_step(c, 1);
    for (unsigned i = 0; i < PIECES; i++) {
        snprintf(name, sizeof name, "piece-%u", i);
        restore_words_check(r, name, COUNT, i);
        free(pieces[i]);
    }
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

/* The daemon is stopped while it reads; the fence times out, the program writes; when the daemon goes
 * on, that version must not come to be. */
static void revoked_version_is_never_committed(void) {
    enum { BYTES = 192 << 20 };
    configure(&(struct settings){.pool = "256M", .no_parallel = true});
    daemon_start();
    ckpt *c = job_open("revoked");
    size_t words = BYTES / 8;
    uint64_t *tensor = malloc(BYTES);
    words_fill(tensor, words, 1);
    CHECK_OK(ckpt_protect_array(c, "tensor", CKPT_U64, tensor, words));
    unsigned caught = 0;
    uint64_t step = 1;
    for (; step <= 20 && !caught; step++) {
        CHECK_OK(ckpt_save(c, step, NULL));
        pause_ms((unsigned)random_number(20));
        process_signal(daemon_pid(), SIGSTOP);
        if (ckpt_fence(c, 50) == CKPT_E_TIMEOUT) {
            caught++;
            words_fill(tensor, words, 1000 + step); /* allowed: it was revoked */
        }
        process_signal(daemon_pid(), SIGCONT);
        if (caught)
            CHECK_IS(CKPT_E_LOST, ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
        else
            CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    }
    if (!caught)
        FAIL("the daemon was never stopped in mid-capture");
    uint64_t revoked = step - 1;
    words_fill(tensor, words, 5);
    save_durable(c, step, CKPT_LOCAL);
    struct ckpt_version_entry *versions;
    size_t count;
    CHECK_OK(ckpt_versions(c, &versions, &count));
    for (size_t i = 0; i < count; i++)
        CHECK(versions[i].step != revoked);
    ckpt_versions_free(versions);
    CHECK(!file_exists(test_path("local/revoked/1/%llu/rank-00000.json", (unsigned long long)revoked)));
    ckpt_restore *r = restore_step(c, step);
    restore_words_check(r, "tensor", words, 5);
    ckpt_restore_close(r);
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.lost == 1);
    CHECK_OK(ckpt_close(c));
    free(tensor);
}

/* A program that does not wait for its fence is found out, if it asks to be. */
static void check_finds_a_changed_tensor(void) {
    configure(&(struct settings){.pool = "256M"}); /* what has left the pool cannot be compared */
    daemon_start();
    ckpt *c = job_open("check");
    enum { BYTES = 64 << 20 };
    size_t words = BYTES / 8;
    uint64_t *tensor = malloc(BYTES);
    words_fill(tensor, words, 1);
    CHECK_OK(ckpt_protect_array(c, "innocent", CKPT_U64, tensor, words / 2));
    CHECK_OK(ckpt_protect_array(c, "changed", CKPT_U64, tensor + words / 2, words / 2));
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.check = 1;
    CHECK_OK(ckpt_save(c, 1, &options));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 1, CKPT_GLOBAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    /* It changes as long as the first reading lasts, and beyond; where the machine is so busy that the reading
     * came only afterwards, there was nothing to find: once more, and longer. */
    int r = CKPT_OK;
    uint64_t step = 1;
    for (uint64_t change_ms = 100; r == CKPT_OK; change_ms *= 2) {
        CHECK(change_ms < 60000);
        CHECK_OK(ckpt_save(c, ++step, &options));
        for (uint64_t end = now_ms() + change_ms; now_ms() < end;)
            tensor[words - 1]++;
        r = ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);
    }
    CHECK_IS(CKPT_E_LOST, r);
    CHECK_SAYS("changed");
    CHECK_OK(ckpt_close(c));
    c = job_open("check");
    ckpt_restore_close(restore_step(c, step - 1));
    CHECK_OK(ckpt_close(c));
    free(tensor);
}

/* Memory that the program gives back before the capture is over: the version is lost, nothing else. */
static void unmapped_tensor_is_lost(void) {
    daemon_start();
    ckpt *c = job_open("unmapped");
    enum { BYTES = 16 << 20 };
    void *tensor = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *kept = calloc(WORDS, 8);
    CHECK_OK(ckpt_protect_array(c, "kept", CKPT_U64, kept, WORDS));
    CHECK_OK(ckpt_protect_array(c, "gone", CKPT_U64, tensor, BYTES / 8));
    munmap(tensor, BYTES);
    CHECK_OK(ckpt_save(c, 1, NULL));
    CHECK_IS(CKPT_E_LOST, ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_SAYS("gone");
    CHECK_IS(CKPT_E_LOST, ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    CHECK_OK(ckpt_unprotect_all(c));
    words_fill(kept, WORDS, 2);
    CHECK_OK(ckpt_protect_array(c, "kept", CKPT_U64, kept, WORDS));
    save_durable(c, 2, CKPT_GLOBAL);
    ckpt_restore *r = restore_step(c, 2);
    restore_words_check(r, "kept", WORDS, 2);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    free(kept);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(many_steps_each_of_its_moment), TEST(fence_of_one_piece),      TEST(revoked_version_is_never_committed),
        TEST(check_finds_a_changed_tensor),  TEST(unmapped_tensor_is_lost),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
