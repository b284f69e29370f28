/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/manifest.h"
#include "proto/text.h"

#include <errno.h>

#define DIRECTORY_NAME_MAX 255

static bool is_plain(char byte, bool first) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9') ||
           byte == '_' || byte == '-' || (byte == '.' && !first);
}

int job_escape(const char *job, char ret_directory[256], struct problem *problem) {
    static const char digits[] = "0123456789ABCDEF";
    size_t length = strnlen(job, MANIFEST_JOB_MAX);
    if (length == 0)
        return problem_set(problem, -EINVAL, "the job's name is empty");
    if (length >= MANIFEST_JOB_MAX)
        return problem_set(problem, -EINVAL, "the job's name is longer than %d bytes", MANIFEST_JOB_MAX - 1);
    if (!text_is_utf8(job, length))
        return problem_set(problem, -EINVAL, "the job's name is not UTF-8");
    char directory[3 * MANIFEST_JOB_MAX];
    size_t at = 0;
    for (size_t i = 0; i < length; i++) {
        if (is_plain(job[i], i == 0)) {
            directory[at++] = job[i];
            continue;
        }
        directory[at++] = '%';
        directory[at++] = digits[(unsigned char)job[i] >> 4];
        directory[at++] = digits[(unsigned char)job[i] & 15];
    }
    if (at > DIRECTORY_NAME_MAX)
        return problem_set(problem, -EINVAL,
                           "the job's name needs %zu bytes as a directory name, %d are possible; characters other than "
                           "A-Z a-z 0-9 . _ - take three each",
                           at, DIRECTORY_NAME_MAX);
    memcpy(ret_directory, directory, at);
    ret_directory[at] = '\0';
    return 0;
}

static int hex_value(char digit) {
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'A' && digit <= 'F')
        return digit - 'A' + 10;
    return -1;
}

int job_unescape(const char *directory, char ret_job[MANIFEST_JOB_MAX]) {
    char job[MANIFEST_JOB_MAX], again[DIRECTORY_NAME_MAX + 1];
    size_t length = strnlen(directory, DIRECTORY_NAME_MAX + 1), to = 0;
    if (length > DIRECTORY_NAME_MAX)
        return -EINVAL;
    for (size_t i = 0; i < length; i++) {
        if (directory[i] != '%') {
            job[to++] = directory[i];
            continue;
        }
        int high = length - i > 2 ? hex_value(directory[i + 1]) : -1, low = high < 0 ? -1 : hex_value(directory[i + 2]);
        if (low < 0 || (high == 0 && low == 0))
            return -EINVAL;
        job[to++] = (char)(high << 4 | low);
        i += 2;
    }
    job[to] = '\0';
    /* One directory per job: what job_escape() does not write is no job's. */
    if (job_escape(job, again, NULL) < 0 || strcmp(again, directory) != 0)
        return -EINVAL;
    memcpy(ret_job, job, to + 1);
    return 0;
}
