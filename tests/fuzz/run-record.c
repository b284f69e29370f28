/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `run` file of a generation, as it is and with a digest that matches: what is read, written again,
 * reads and writes the same.
 */
#include "proto/manifest.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>

static void check_same(const struct run_record *a, const struct run_record *b) {
    assert(strcmp(a->job, b->job) == 0 && strcmp(a->run_id, b->run_id) == 0 && strcmp(a->host, b->host) == 0);
    assert(strcmp(a->boot_id, b->boot_id) == 0 && a->generation == b->generation && a->world == b->world);
    assert(a->resumes == b->resumes && a->resume_generation == b->resume_generation);
    assert(a->resume_step == b->resume_step && a->pid == b->pid && a->pid_start == b->pid_start);
}

static void check(const char *data, size_t size) {
    CLEANUP(freep) char *text = NULL, *again = NULL;
    struct run_record record, same;
    struct problem problem = PROBLEM_NONE;
    size_t length, again_length;
    int r = run_record_read(data, size, &record, &problem);
    assert((r == 0 || r == -EBADMSG || r == -ENOTSUP) && (r == 0) == !problem.text[0]);
    if (r == 0)
        r = run_record_write(&record, &text, &length);
    if (r < 0)
        return;
    r = run_record_read(text, length, &same, NULL);
    assert(r == 0);
    check_same(&record, &same);
    r = run_record_write(&same, &again, &again_length);
    assert(r == 0 && again_length == length && memcmp(text, again, length) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *newline = size ? memchr(data, '\n', size) : NULL;
    size_t sealed_size;
    CLEANUP(freep) char *sealed = fuzz_seal(data, newline ? (size_t)(newline - data) : size, &sealed_size);
    check((const char *)data, size);
    check(sealed, sealed_size);
    return 0;
}
