/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/layout.h"

#include "proto/manifest.h"

#include <inttypes.h>

/*
 * Names only. What these functions accept is exactly what they (and manifest_file_name) produce:
 * a directory "007" or "rank-7.json" is not ours, so that two names never mean the same thing.
 */

int version_compare(struct version_id a, struct version_id b) {
    if (a.generation != b.generation)
        return a.generation < b.generation ? -1 : 1;
    if (a.step != b.step)
        return a.step < b.step ? -1 : 1;
    return 0;
}

void layout_generation(const char *job, uint64_t generation, char ret_path[1024]) {
    snprintf(ret_path, 1024, "%s/%" PRIu64, job, generation);
}

void layout_version(const char *job, struct version_id version, char ret_path[1024]) {
    snprintf(ret_path, 1024, "%s/%" PRIu64 "/%" PRIu64, job, version.generation, version.step);
}

void layout_file(const char *job, struct version_id version, const char *file, char ret_path[1024]) {
    snprintf(ret_path, 1024, "%s/%" PRIu64 "/%" PRIu64 "/%s", job, version.generation, version.step, file);
}

void layout_temporary(const char *job, struct version_id version, uint32_t rank, uint64_t nonce, const char *what,
                      char ret_path[1024]) {
    char name[96];
    snprintf(name, sizeof name, "rank-%05" PRIu32 ".%016" PRIx64 ".%s.tmp", rank, nonce, what);
    layout_file(job, version, name, ret_path);
}

void layout_trash(const char *job, struct version_id version, uint64_t nonce, char ret_path[1024]) {
    snprintf(ret_path, 1024, "%s/trash-%" PRIu64 "-%" PRIu64 "-%016" PRIx64, job, version.generation, version.step,
             nonce);
}

/* Reads decimal digits from *at on, as layout_parse_number() does, and moves *at behind them. */
static bool parse_digits(const char **at, uint64_t *ret_number) {
    const char *digit = *at;
    uint64_t number = 0;
    if (*digit == '0' && digit[1] >= '0' && digit[1] <= '9')
        return false;
    for (; *digit >= '0' && *digit <= '9'; digit++) {
        if (mul_overflows(number, 10, &number) || add_overflows(number, (uint64_t)(*digit - '0'), &number))
            return false;
    }
    if (digit == *at || number > INT64_MAX)
        return false;
    *at = digit;
    *ret_number = number;
    return true;
}

bool layout_parse_number(const char *name, uint64_t *ret_number) {
    uint64_t number;
    if (!parse_digits(&name, &number) || *name)
        return false;
    *ret_number = number;
    return true;
}

bool layout_parse_trash(const char *name, struct version_id *ret_version) {
    struct version_id version;
    if (strncmp(name, "trash-", 6) != 0)
        return false;
    name += 6;
    if (!parse_digits(&name, &version.generation) || *name++ != '-')
        return false;
    if (!parse_digits(&name, &version.step) || *name++ != '-')
        return false;
    if (strlen(name) != 16 || strspn(name, "0123456789abcdef") != 16)
        return false;
    *ret_version = version;
    return true;
}

/* "rank-NNNNN." with at least five digits and no more zeros than needed; moves *at behind it. */
static bool parse_rank(const char **at, uint32_t *ret_rank) {
    const char *name = *at;
    if (strncmp(name, "rank-", 5) != 0)
        return false;
    name += 5;
    size_t digits = strspn(name, "0123456789");
    if (digits < 5 || digits > 10 || (digits > 5 && name[0] == '0') || name[digits] != '.')
        return false;
    uint64_t rank = strtoull(name, NULL, 10);
    if (rank > UINT32_MAX)
        return false;
    *at = name + digits + 1;
    *ret_rank = (uint32_t)rank;
    return true;
}

bool layout_parse_manifest(const char *name, uint32_t *ret_rank) {
    uint32_t rank;
    if (!parse_rank(&name, &rank) || strcmp(name, "json") != 0)
        return false;
    *ret_rank = rank;
    return true;
}

bool layout_parse_temporary(const char *name, uint32_t *ret_rank) {
    uint32_t rank;
    if (!parse_rank(&name, &rank))
        return false;
    size_t length = strlen(name);
    if (length <= 4 || strcmp(name + length - 4, ".tmp") != 0)
        return false;
    *ret_rank = rank;
    return true;
}
