/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"
#include "tests/unit/client/fixture.h"

#include <sys/wait.h>

/* Conversations in which nothing goes wrong. */

static float weights[100000];

static void saving(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    void *shared;
    assert_result(ckpt_alloc(c, 1000, &shared), CKPT_OK);
    memset(shared, 7, 1000);
    for (size_t i = 0; i < ARRAY_SIZE(weights); i++)
        weights[i] = (float)i;
    assert_result(ckpt_protect_array(c, "weights", CKPT_F32, weights, ARRAY_SIZE(weights)), CKPT_OK);
    assert_result(ckpt_protect_array(c, "shared", CKPT_U8, shared, 1000), CKPT_OK);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "some state";
    options.state_size = 10;
    assert_result(ckpt_save(c, 1, &options), CKPT_OK);
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    uint64_t size;
    const uint8_t *image = fake_image(fixture->fake, &size);
    struct ckpt_info info = fixture_info(fixture);
    assert_int_equal(size, info.image_size);
    assert_memory_equal(image + 4096, weights, sizeof weights);
    assert_memory_equal(image + 4096 + sizeof weights, shared, 1000);
    assert_memory_equal(image + size - 10, "some state", 10);
    assert_result(ckpt_save(c, 1, NULL), CKPT_ALREADY);
    assert_result(ckpt_save(c, 0, NULL), CKPT_E_INVALID);
    for (uint64_t step = 2; step < 20; step++)
        assert_result(ckpt_save(c, step, NULL), CKPT_OK);
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_REGISTER), 1);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_SAVE), 19);
    info = fixture_info(fixture);
    assert_int_equal(info.saves, 19);
    assert_int_equal(info.lost, 0);
    assert_int_equal(info.connected, 1);
}

static void the_set_changes(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    uint64_t shape = 10, id;
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F32;
    shard.name = "a";
    shard.data = weights;
    shard.dimensions = 1;
    shard.shape = &shape;
    assert_result(ckpt_save(c, 1, NULL), CKPT_OK); /* nothing is protected: that is allowed */
    assert_result(ckpt_protect(c, &shard, &id), CKPT_OK);
    assert_result(ckpt_fence_shard(c, id, 0), CKPT_OK); /* has no part in the running save */
    assert_result(ckpt_save(c, 2, NULL), CKPT_OK);
    assert_result(ckpt_fence_shard(c, id, 0), CKPT_OK);
    assert_result(ckpt_unprotect(c, id), CKPT_OK);
    assert_result(ckpt_unprotect(c, id), CKPT_E_NOT_FOUND);
    assert_result(ckpt_fence_shard(c, id, 0), CKPT_E_NOT_FOUND);
    assert_result(ckpt_save(c, 3, NULL), CKPT_OK);
    assert_result(ckpt_save(c, 4, NULL), CKPT_OK);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_REGISTER), 3);
}

/* Nothing on a device is protected: the daemon has nothing to close, and keeps the set. */
static void host_memory_stays_registered(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    assert_result(ckpt_protect_array(c, "weights", CKPT_F32, weights, ARRAY_SIZE(weights)), CKPT_OK);
    for (uint64_t step = 1; step <= 3; step++) {
        assert_result(ckpt_save(c, step, NULL), CKPT_OK);
        assert_result(ckpt_release_imports(c), CKPT_OK);
    }
    assert_int_equal(fake_count(fixture->fake, MESSAGE_REGISTER), 1);
}

static void areas_come_and_go(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    void *one, *two;
    assert_result(ckpt_alloc(c, MIB(5), &one), CKPT_OK);
    assert_result(ckpt_alloc(c, MIB(6), &two), CKPT_OK);
    assert_result(ckpt_protect_array(c, "one", CKPT_U8, one, MIB(5)), CKPT_OK);
    assert_result(ckpt_protect_array(c, "two", CKPT_U8, two, MIB(6)), CKPT_OK);
    assert_result(ckpt_save(c, 1, NULL), CKPT_OK);
    assert_int_equal(fake_count(fixture->fake, MESSAGE_AREA), 2);
    assert_result(ckpt_free(c, one), CKPT_OK); /* fences and unprotects */
    assert_result(ckpt_free(c, one), CKPT_E_INVALID);
    assert_result(ckpt_save(c, 2, NULL), CKPT_OK);
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    assert_result(ckpt_test(c, 2, CKPT_LOCAL, CKPT_PART), CKPT_PENDING); /* what was sent before is handled */
    assert_int_equal(fake_count(fixture->fake, MESSAGE_AREA_DROP), 1);
    struct ckpt_info info = fixture_info(fixture);
    assert_in_range(info.image_size, MIB(6), MIB(6) + 8192);
}

static void eager_shards(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    static uint8_t large[MIB(17)];
    uint64_t shape = 100, large_shape = sizeof large;
    int64_t stride = 8;
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = CKPT_F32;
    shard.name = "counter";
    shard.data = weights;
    shard.dimensions = 1;
    shard.shape = &shape;
    shard.stride = &stride;
    shard.flags = CKPT_EAGER | CKPT_RANK_LOCAL;
    assert_result(ckpt_protect(c, &shard, NULL), CKPT_OK);
    fixture->knobs->hold = true;
    for (size_t i = 0; i < 200; i++)
        weights[i] = (float)i;
    assert_result(ckpt_save(c, 1, NULL), CKPT_OK);
    memset(weights, 0, sizeof weights); /* not yet captured, and of no account */
    fixture->knobs->hold = false;
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    uint64_t size;
    const float *image = (const float *)(const void *)(fake_image(fixture->fake, &size) + 4096);
    for (size_t i = 0; i < 100; i++)
        assert_true(image[i] == (float)(2 * i));

    shard.name = "large";
    shard.dtype = CKPT_U8;
    shard.data = large;
    shard.shape = &large_shape;
    shard.stride = NULL;
    assert_result(ckpt_protect(c, &shard, NULL), CKPT_OK);
    memset(large, 3, sizeof large);
    assert_result(ckpt_save(c, 2, NULL), CKPT_OK);
    memset(large, 4, sizeof large); /* save has waited for it */
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    assert_int_equal(fake_image(fixture->fake, &size)[size - 1], 3);
}

static void options_travel(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.to = CKPT_LOCAL;
    options.urgent = 1;
    options.check = 1;
    assert_result(ckpt_save(c, 1, &options), CKPT_OK);
    struct message_save save = fake_last_save(fixture->fake);
    assert_int_equal(save.to, LEVEL_LOCAL);
    assert_int_equal(save.flags, SAVE_URGENT | SAVE_CHECK);
    assert_int_equal(save.busy_deadline_ms, 60000);
    assert_int_equal(save.forks, 0);
    options.to = 7;
    assert_result(ckpt_save(c, 2, &options), CKPT_E_INVALID);
    options.to = 0;
    options.state_size = 5;
    assert_result(ckpt_save(c, 2, &options), CKPT_E_INVALID);
    options.size = 3;
    assert_result(ckpt_save(c, 2, &options), CKPT_E_INVALID);
    fixture->knobs->save_result = CODE_SKIPPED;
    assert_result(ckpt_save(c, 2, NULL), CKPT_SKIPPED);
    fixture->knobs->save_result = CODE_OK;
    assert_result(ckpt_save(c, 2, NULL), CKPT_OK);
    assert_int_equal(fixture_info(fixture).skipped, 1);
}

static void questions(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    struct ckpt_durable durable;
    CKPT_INIT(durable);
    struct ckpt_version_entry *versions;
    size_t count;
    assert_result(ckpt_last_durable(c, CKPT_LOCAL, &durable), CKPT_NONE);
    assert_result(ckpt_versions(c, &versions, &count), CKPT_OK);
    assert_int_equal(count, 0);
    ckpt_versions_free(versions);
    assert_result(ckpt_save(c, 9, NULL), CKPT_OK);
    assert_result(ckpt_fence(c, 0), CKPT_OK);
    assert_result(ckpt_wait(c, 9, CKPT_LOCAL, CKPT_VERSION, 0), CKPT_OK);
    assert_result(ckpt_test(c, 9, CKPT_LOCAL, CKPT_VERSION), CKPT_PENDING);
    assert_result(ckpt_wait(c, 9, CKPT_LOCAL, CKPT_VERSION, CKPT_NO_WAIT), CKPT_E_TIMEOUT);
    assert_result(ckpt_wait(c, 9, 9, CKPT_VERSION, 0), CKPT_E_INVALID);
    assert_result(ckpt_last_durable(c, CKPT_LOCAL, &durable), CKPT_OK);
    assert_int_equal(durable.step, 9);
    assert_result(ckpt_versions(c, &versions, &count), CKPT_OK);
    assert_int_equal(count, 1);
    assert_int_equal(versions[0].step, 9);
    ckpt_versions_free(versions);
}

static void forking(void **state) {
    struct fixture *fixture = *state;
    ckpt *c = fixture->c;
    void *shared;
    assert_result(ckpt_alloc(c, 100, &shared), CKPT_OK);
    memset(shared, 1, 100);
    assert_result(ckpt_save(c, 1, NULL), CKPT_OK);
    pid_t child = fork();
    if (child == 0) {
        bool right = ckpt_save(c, 2, NULL) == CKPT_E_FORKED && ckpt_fence(c, 0) == CKPT_E_FORKED &&
                     ckpt_protect_array(c, "x", CKPT_F32, weights, 1) == CKPT_E_FORKED &&
                     ((uint8_t *)shared)[99] == 1 && ckpt_close(c) == CKPT_E_FORKED;
        _exit(right ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_result(ckpt_save(c, 2, NULL), CKPT_OK);
    assert_int_equal(fake_last_save(fixture->fake).forks, 1);
}

static void a_long_run(void **state) {
    struct fixture *fixture = *state;
    assert_result(ckpt_protect_array(fixture->c, "w", CKPT_F32, weights, 10), CKPT_OK);
    for (uint64_t step = 1; step <= 70000; step += 1 + (step % 7 == 0)) {
        if (step % 1000 == 1) /* all of it for some; the rest only wraps the counter */
            assert_result(ckpt_fence(fixture->c, 0), CKPT_OK);
        fixture->knobs->save_result = step % 1000 ? CODE_SKIPPED : CODE_OK;
        assert_result(ckpt_save(fixture->c, step, NULL), step % 1000 ? CKPT_SKIPPED : CKPT_OK);
    }
}

static void no_handle(void **state) {
    struct fixture *fixture = *state;
    assert_int_equal(ckpt_save(NULL, 1, NULL), CKPT_E_INVALID);
    assert_int_equal(ckpt_close(NULL), CKPT_OK);
    ckpt *other;
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.socket = fake_path(fixture->fake);
    options.rank = 1;
    assert_int_equal(ckpt_open("job", &options, &other), CKPT_E_INVALID);
    assert_int_equal(ckpt_open("", NULL, &other), CKPT_E_INVALID);
    options.rank = 0;
    options.flags = 1;
    assert_int_equal(ckpt_open("job", &options, &other), CKPT_E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        fixture_test(saving),
        fixture_test(the_set_changes),
        fixture_test(host_memory_stays_registered),
        fixture_test(areas_come_and_go),
        fixture_test(eager_shards),
        fixture_test(options_travel),
        fixture_test(questions),
        fixture_test(forking),
        fixture_test(a_long_run),
        fixture_test(no_handle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
