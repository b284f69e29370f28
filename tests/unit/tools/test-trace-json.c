/* SPDX-License-Identifier: Apache-2.0 */
/* The writer of traces: what comes out is JSON, in which nothing overlaps that a viewer would draw over each other. */
#include "tests/unit/tools/unit.h"
#include "tools/trace-json.h"

#include <errno.h>
#include <jansson.h>
#include <sys/random.h>

static const struct trace_name names[] = {{"job"}, {"local"}, {"a \"quoted\" \x01 name"}, {"\xff\xfe"}};

static json_t *written(const struct trace_record *records, size_t count, const char *job) {
    const struct trace_input input = {
        .records = records, .count = count, .names = names, .name_count = ARRAY_SIZE(names), .forgotten = 7};
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    assert_int_equal(trace_json_write(out, &input, job), 0);
    fclose(out);
    json_error_t error;
    json_t *trace = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (!trace)
        fail_msg("not JSON: %s in %s", error.text, text);
    free(text);
    return trace;
}

/* The events of this phase; the number of them. */
static size_t events(json_t *trace, const char *phase, json_t **ret_list) {
    size_t i;
    json_t *event, *list = json_array();
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event) {
        if (strcmp(json_string_value(json_object_get(event, "ph")), phase) == 0)
            json_array_append(list, event);
    }
    size_t count = json_array_size(list);
    if (ret_list)
        *ret_list = list;
    else
        json_decref(list);
    return count;
}

static double number(json_t *event, const char *key) { return json_number_value(json_object_get(event, key)); }

static const char *text_of(json_t *event, const char *key) { return json_string_value(json_object_get(event, key)); }

static void an_empty_trace_is_json(void **state) {
    json_t *trace = written(NULL, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(trace, "traceEvents")), 0);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(trace, "otherData"), "forgotten")), 7);
    json_decref(trace);
}

static void a_span_and_a_moment(void **state) {
    const struct trace_record records[] = {
        {.kind = TRACE_CAPTURE,
         .begin_ns = 1000000,
         .end_ns = 3500500,
         .generation = 2,
         .step = 9,
         .bytes = 4096,
         .rank = 3,
         .pool_used = 100,
         .pool_cached = 40,
         .tier = TRACE_NAME_NONE},
        {.kind = TRACE_DRAIN, .begin_ns = 2000000, .end_ns = 4000000, .flags = TRACE_FAILED, .rank = 3, .tier = 1},
        {.kind = TRACE_COMPLETE, .begin_ns = 5000000, .end_ns = 5000000, .rank = TRACE_RANK_NONE, .tier = 1},
    };
    json_t *trace = written(records, ARRAY_SIZE(records), NULL), *spans, *moments, *pool, *metadata;
    assert_int_equal(events(trace, "X", &spans), 2);
    json_t *capture = json_array_get(spans, 0), *drain = json_array_get(spans, 1);
    assert_string_equal(text_of(capture, "name"), "capture 2/9");
    assert_true(number(capture, "ts") == 0 && number(capture, "dur") == 2500.5);
    json_t *arguments = json_object_get(capture, "args");
    assert_string_equal(text_of(arguments, "job"), "job");
    assert_true(number(arguments, "rank") == 3 && number(arguments, "bytes") == 4096);
    assert_string_equal(text_of(drain, "name"), "drain 0/0 failed");
    assert_true(number(drain, "ts") == 1000 && number(drain, "pid") != number(capture, "pid"));
    assert_int_equal(events(trace, "i", &moments), 1);
    assert_true(number(json_array_get(moments, 0), "ts") == 4000);
    assert_int_equal(events(trace, "C", &pool), 3);
    arguments = json_object_get(json_array_get(pool, 0), "args");
    assert_true(number(arguments, "in use") == 60 && number(arguments, "cached") == 40);
    assert_int_equal(events(trace, "M", &metadata), 2 * (2 + 3)); /* two processes, three threads: name and order */
    json_decref(spans);
    json_decref(moments);
    json_decref(pool);
    json_decref(metadata);
    json_decref(trace);
}

static void names_are_escaped_or_replaced(void **state) {
    const struct trace_record records[] = {
        {.kind = TRACE_CAPTURE, .begin_ns = 1, .end_ns = 2, .job = 2, .tier = TRACE_NAME_NONE},
        {.kind = TRACE_CAPTURE, .begin_ns = 1, .end_ns = 2, .job = 3, .tier = TRACE_NAME_NONE},
        {.kind = TRACE_CAPTURE, .begin_ns = 1, .end_ns = 2, .job = 99, .tier = 200},
    };
    static const char *const expected[] = {"a \"quoted\" \x01 name", "?", "?"};
    json_t *trace = written(records, ARRAY_SIZE(records), NULL), *spans;
    assert_int_equal(events(trace, "X", &spans), 3);
    for (size_t i = 0; i < ARRAY_SIZE(expected); i++)
        assert_string_equal(text_of(json_object_get(json_array_get(spans, i), "args"), "job"), expected[i]);
    json_decref(spans);
    json_decref(trace);
}

static void one_job_only_and_no_unknown_kinds(void **state) {
    const struct trace_record records[] = {
        {.kind = TRACE_CAPTURE, .begin_ns = 5, .end_ns = 6, .tier = TRACE_NAME_NONE},
        {.kind = TRACE_CAPTURE, .begin_ns = 1, .end_ns = 2, .job = 1, .tier = TRACE_NAME_NONE},
        {.kind = 999, .begin_ns = 1, .end_ns = 2, .tier = TRACE_NAME_NONE},
        {.kind = TRACE_CAPTURE, .begin_ns = 9, .end_ns = 3, .tier = TRACE_NAME_NONE},
    };
    json_t *trace = written(records, ARRAY_SIZE(records), "job");
    assert_int_equal(events(trace, "X", NULL), 1);
    assert_int_equal(events(trace, "C", NULL), 1);
    json_decref(trace);
    trace = written(records, ARRAY_SIZE(records), "nobody");
    assert_int_equal(json_array_size(json_object_get(trace, "traceEvents")), 0);
    json_decref(trace);
}

/* Spans at random; those of one thread never overlap, and each is on a thread of its place and rank. */
static void spans_of_a_thread_do_not_overlap(void **state) {
    enum { COUNT = 300 };
    static struct trace_record records[COUNT];
    unsigned seed;
    assert_int_equal(getrandom(&seed, sizeof seed, 0), sizeof seed);
    print_message("seed %u\n", seed);
    for (size_t i = 0; i < COUNT; i++) {
        uint64_t begin_ns = 1 + (uint64_t)rand_r(&seed) % 10000;
        records[i] = (struct trace_record){.kind = TRACE_DRAIN,
                                           .begin_ns = begin_ns,
                                           .end_ns = begin_ns + 1 + (uint64_t)rand_r(&seed) % 300,
                                           .rank = (uint32_t)rand_r(&seed) % 3,
                                           .tier = rand_r(&seed) % 2 ? 1 : TRACE_NAME_NONE};
    }
    json_t *trace = written(records, COUNT, NULL), *spans;
    assert_int_equal(events(trace, "X", &spans), COUNT);
    for (size_t i = 0; i < COUNT; i++)
        for (size_t k = 0; k < i; k++) {
            json_t *a = json_array_get(spans, i), *b = json_array_get(spans, k);
            if (number(a, "tid") != number(b, "tid"))
                continue;
            assert_true(number(a, "pid") == number(b, "pid"));
            assert_true(number(json_object_get(a, "args"), "rank") == number(json_object_get(b, "args"), "rank"));
            double apart = 1e-6; /* numbers are decimal fractions of microseconds */
            assert_true(number(a, "ts") + number(a, "dur") <= number(b, "ts") + apart ||
                        number(b, "ts") + number(b, "dur") <= number(a, "ts") + apart);
        }
    json_decref(spans);
    json_decref(trace);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_trace_is_json),           cmocka_unit_test(a_span_and_a_moment),
        cmocka_unit_test(names_are_escaped_or_replaced),    cmocka_unit_test(one_job_only_and_no_unknown_kinds),
        cmocka_unit_test(spans_of_a_thread_do_not_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
