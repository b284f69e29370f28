/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tier with whatever names and files, as everything that looks through it sees it: the catalog, the
 * claim of a run, retention, reaping, pins, completion. Nothing but documented results; a version that has
 * a pin which is not surely over stays.
 *
 * The input: for each entry one byte that says where, one that says which name, then its content up to an
 * empty line. Content with digests (run records, manifests, complete.json) is also sealed.
 */
#include "tests/fuzz/fuzz.h"
#include "tiers/catalog.h"
#include "tiers/claim.h"
#include "tiers/commit.h"
#include "tiers/retention.h"

#include <errno.h>

#define ENTRIES_MAX 24

static const char *const directories[] = {"job/1/1", "job/1/2", "job/2/1", "job/2", "job/1", "job", "job/trash-1-1-0"};
static const char *const names[] = {
    "complete.json",    "rank-00000.json",     "rank-00000.safetensors", "run", "run-ended", "pin-x",
    "rank-00000.0.tmp", "rank-00000.json.bad", "complete.json.bad"};

static void put(struct tier *tier, const char *directory, const char *name, const uint8_t *data, size_t size,
                bool sealed) {
    char path[TIER_PATH_MAX];
    size_t sealed_size;
    CLEANUP(freep) char *text = sealed ? fuzz_seal(data, size, &sealed_size) : NULL;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (tier_make_directories(tier, directory) == 0)
        (void)!tier_write_file(tier, path, sealed ? text : (const char *)data, sealed ? sealed_size : size);
}

/* A name that comes from the input, if it can be one. */
static bool own_name(const uint8_t *data, size_t size, char ret_name[64]) {
    size_t length = 0;
    while (length < size && length < 63 && data[length] > ' ' && data[length] != '/')
        length++;
    memcpy(ret_name, data, length);
    ret_name[length] = '\0';
    return length > 0 && ret_name[0] != '.';
}

static void grow(struct tier *tier, struct feed *feed) {
    for (unsigned i = 0; i < ENTRIES_MAX && feed->left > 2; i++) {
        unsigned where = (unsigned)feed_number(feed, 1), which = (unsigned)feed_number(feed, 1);
        const uint8_t *end = memmem(feed->at, feed->left, "\n\n", 2);
        size_t size = end ? (size_t)(end - feed->at) + 1 : feed->left;
        const char *directory = directories[where % ARRAY_SIZE(directories)];
        char own[64];
        bool named = which % (ARRAY_SIZE(names) + 1) == ARRAY_SIZE(names);
        if (!named || own_name(feed->at, size, own))
            put(tier, directory, named ? own : names[which % (ARRAY_SIZE(names) + 1)], feed->at, size, where & 0x80);
        size = min_u64(size + 1, feed->left);
        feed->at += size;
        feed->left -= size;
    }
}

static void scan(struct tier *tier) {
    CLEANUP(catalog_deinit) struct catalog catalog = {0};
    struct problem problem = PROBLEM_NONE;
    int r = catalog_scan(tier, "job", &catalog, &problem);
    assert(r == 0 && (catalog.bad > 0) == (catalog.first_bad.text[0] != '\0'));
    for (size_t i = 0; i < catalog.version_count; i++) {
        const struct catalog_version *version = &catalog.versions[i];
        struct complete complete = {0};
        struct problem why = PROBLEM_NONE;
        bool pinned = false;
        assert(i == 0 || version_compare(catalog.versions[i - 1].id, version->id) < 0);
        r = catalog_read_complete(tier, "job", version->id, &complete, &why);
        assert(r <= 0 || r == TIER_E_ABSENT);
        complete_deinit(&complete);
        r = commit_complete(tier, "job", version->id, 7, &why);
        assert(r <= 0 || r == COMMIT_E_INCOMPLETE || r == COMMIT_E_ABSENT);
        r = retention_pinned(tier, "job", version->id, &pinned);
        assert(r != 0 || pinned == version->pinned);
    }
}

static void claim(struct tier *tier) {
    const struct claim_request request = {.job = "job",
                                          .run_id = "run",
                                          .world = 1,
                                          .host = "host",
                                          .boot_id = "boot",
                                          .pid = 1,
                                          .nonce = 3,
                                          .decider = tier,
                                          .tiers = &tier,
                                          .tier_count = 1};
    struct claim_result result;
    struct problem problem = PROBLEM_NONE;
    bool retry;
    int r = claim_run(&request, &result, &retry, &problem);
    assert(r == 0 || r == CLAIM_E_HELD || r < 0);
    assert(r == 0 || problem.text[0]);
    if (r == 0)
        assert(strcmp(result.record.run_id, "run") == 0 && result.record.generation > 0);
}

static bool is_there(struct tier *tier, const char *path) {
    struct tier_entry entry;
    return tier_stat(tier, path, &entry) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    CLEANUP(tier_freep) struct tier *tier = NULL;
    struct feed feed = {data, size};
    struct problem problem = PROBLEM_NONE;
    const struct retention_policy policy = {.keep = 1};
    uint32_t count;
    struct retention_swept swept;
    int r = tier_mem_new("tree", LEVEL_LOCAL, &tier);
    assert(r == 0);
    grow(tier, &feed);
    scan(tier);
    claim(tier);
    put(tier, "job/1/1", "pin-for-good", (const uint8_t *)"0\n", 2, false);
    if (!is_there(tier, "job/1/1/pin-for-good")) /* something that is no directory is in its way */
        return 0;
    (void)!retention_reap(tier, "job", 3, 0, &count, &problem);
    (void)!retention_sweep(tier, "job", &policy, 3, (struct retention_known){0}, 5, &swept, &problem);
    assert(is_there(tier, "job/1/1/pin-for-good"));
    r = retention_remove(tier, "job", (struct version_id){1, 1}, 9, &problem);
    assert(r == -EBUSY && is_there(tier, "job/1/1/pin-for-good"));
    return 0;
}
