/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of jobs and of the files below them. Escaping and unescaping are each other's inverse: every
 * directory is at most one job's. A file's name that is understood is the one that would be written.
 */
#include "proto/manifest.h"
#include "tests/fuzz/fuzz.h"
#include "tiers/layout.h"

#include <errno.h>

static void check_job(const char *name) {
    char directory[256], job[MANIFEST_JOB_MAX];
    struct problem problem = PROBLEM_NONE;
    int r = job_escape(name, directory, &problem);
    assert(r == 0 || (r == -EINVAL && problem.text[0]));
    if (r == 0) {
        assert(directory[0] && directory[0] != '.' && !strchr(directory, '/'));
        r = job_unescape(directory, job);
        assert(r == 0 && strcmp(job, name) == 0);
    }
    r = job_unescape(name, job);
    assert(r == 0 || r == -EINVAL);
    if (r == 0) {
        r = job_escape(job, directory, NULL);
        assert(r == 0 && strcmp(directory, name) == 0);
    }
}

static void check_layout(const char *name) {
    char written[1024], expected[1024];
    struct version_id version;
    uint64_t number;
    uint32_t rank;
    if (layout_parse_number(name, &number)) {
        snprintf(written, sizeof written, "%llu", (unsigned long long)number);
        assert(strcmp(written, name) == 0 && number <= INT64_MAX);
    }
    if (layout_parse_manifest(name, &rank)) {
        manifest_file_name(rank, written);
        assert(strcmp(written, name) == 0);
    }
    if (layout_parse_temporary(name, &rank)) {
        int length = snprintf(written, sizeof written, "rank-%05u.", rank);
        assert(strncmp(written, name, (size_t)length) == 0);
    }
    if (layout_parse_trash(name, &version)) {
        uint64_t nonce = strtoull(strrchr(name, '-') + 1, NULL, 16);
        layout_trash("job", version, nonce, written);
        snprintf(expected, sizeof expected, "job/%s", name);
        assert(strcmp(written, expected) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    CLEANUP(freep) char *name = fuzz_string(data, size);
    check_job(name);
    check_layout(name);
    return 0;
}
