/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of recent events: it forgets the oldest, counts them, and has a bound on names. */
#include "daemon/trace.h"
#include "tests/unit/daemon/unit.h"

static struct loop *loop;
static struct pool *pool;

static int setup(void **state) {
    int r = loop_new("posix", &loop);
    return r < 0 ? r : pool_new(loop, MIB(1), false, &pool);
}

static int teardown(void **state) {
    pool_free(pool);
    loop_free(loop);
    return 0;
}

static void the_oldest_are_forgotten(void **state) {
    enum { CAPACITY = 8 };
    struct trace *trace;
    assert_int_equal(trace_new(loop, pool, CAPACITY, &trace), 0);
    for (uint64_t added = 0; added <= 3 * CAPACITY; added++) {
        struct trace_text text;
        assert_int_equal(trace_copy(trace, &text), 0);
        uint64_t kept = min_u64(added, CAPACITY);
        const struct trace_record *records = text.data;
        assert_int_equal(text.records, kept);
        assert_int_equal(text.forgotten, added - kept);
        for (uint64_t i = 0; i < kept; i++)
            assert_int_equal(records[i].step, added - kept + i);
        free(text.data);
        trace_add(trace, &(struct trace_record){.kind = TRACE_CAPTURE, .step = added, .begin_ns = 1});
    }
    trace_free(trace);
}

static void spans_end_now_and_moments_last_no_time(void **state) {
    struct trace *trace;
    struct trace_text text;
    struct pool_buffer *buffer;
    uint64_t before = loop_now(loop);
    assert_int_equal(trace_new(loop, pool, 4, &trace), 0);
    assert_int_equal(pool_alloc(pool, POOL_PAGE, &buffer), 0);
    trace_add(trace, &(struct trace_record){.kind = TRACE_DRAIN, .begin_ns = before, .rank = 3});
    trace_add(trace, &(struct trace_record){.kind = TRACE_SKIPPED});
    assert_int_equal(trace_copy(trace, &text), 0);
    const struct trace_record *records = text.data;
    assert_true(records[0].begin_ns == before && records[0].end_ns >= before);
    assert_true(records[1].begin_ns == records[1].end_ns && records[1].end_ns >= records[0].end_ns);
    assert_int_equal(records[0].pool_used, POOL_PAGE);
    assert_int_equal(records[0].rank, 3);
    free(text.data);
    pool_buffer_unref(buffer);
    trace_free(trace);
}

static void names_are_numbered_once_and_bounded(void **state) {
    struct trace *trace;
    struct trace_text text;
    char name[32], longest[2 * TRACE_NAME_SIZE];
    assert_int_equal(trace_new(loop, pool, 4, &trace), 0);
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(trace_name(trace, longest), 0);
    for (unsigned i = 1; i < TRACE_NAMES_MAX - 1; i++) {
        snprintf(name, sizeof name, "job-%u", i);
        assert_int_equal(trace_name(trace, name), i);
        assert_int_equal(trace_name(trace, name), i);
    }
    for (unsigned i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "one more %u", i);
        assert_int_equal(trace_name(trace, name), TRACE_NAMES_MAX - 1);
    }
    assert_int_equal(trace_copy(trace, &text), 0);
    assert_int_equal(text.records, 0);
    assert_int_equal(text.names, TRACE_NAMES_MAX);
    assert_int_equal(text.size, TRACE_NAMES_MAX * sizeof(struct trace_name));
    const struct trace_name *names = text.data;
    assert_int_equal(strlen(names[0].text), TRACE_NAME_SIZE - 1);
    assert_string_equal(names[5].text, "job-5");
    assert_string_equal(names[TRACE_NAMES_MAX - 1].text, "(others)");
    free(text.data);
    trace_free(trace);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oldest_are_forgotten),
        cmocka_unit_test(spans_end_now_and_moments_last_no_time),
        cmocka_unit_test(names_are_numbered_once_and_bounded),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
