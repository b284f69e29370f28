/* SPDX-License-Identifier: Apache-2.0 */
/* What most tests say to the client library. */
#include "tests/functional/support.h"

#include <inttypes.h>
#include <stdlib.h>

ckpt *rank_open(const char *job, uint32_t rank, uint32_t world, const char *run_id) {
    struct ckpt_open_options options;
    ckpt *c = NULL;
    CKPT_INIT(options);
    options.rank = rank;
    options.world = world;
    options.run_id = run_id;
    CHECK_OK(ckpt_open(job, &options, &c));
    return c;
}

ckpt *job_open(const char *job) { return rank_open(job, 0, 1, NULL); }

ckpt *words_open(const char *job, const uint64_t *words, size_t count) {
    ckpt *c = job_open(job);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, count));
    return c;
}

void save_captured(ckpt *c, uint64_t step) {
    CHECK_OK(ckpt_save(c, step, NULL));
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
}

void save_durable(ckpt *c, uint64_t step, uint32_t level) {
    save_captured(c, step);
    CHECK_OK(ckpt_wait(c, step, level, CKPT_VERSION, PATIENCE_MS));
}

static uint64_t word_at(size_t i, uint64_t seed) { return (seed + 1) * 0x9e3779b97f4a7c15 + i; }

void words_fill(uint64_t *words, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++)
        words[i] = word_at(i, seed);
}

void words_check(const uint64_t *words, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++)
        if (words[i] != word_at(i, seed))
            FAIL("word %zu of %zu is %016" PRIx64 ", not %016" PRIx64 " (of %" PRIu64 ")", i, count, words[i],
                 word_at(i, seed), seed);
}

ckpt_restore *restore_step(ckpt *c, uint64_t step) {
    ckpt_restore *r = NULL;
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_open(c, NULL, &r));
    CHECK_OK(ckpt_restore_get_info(r, &info));
    if (info.step != step)
        FAIL("the newest version is of step %" PRIu64 ", not %" PRIu64, info.step, step);
    return r;
}

ckpt_restore *restore_of(ckpt *c, uint64_t step) {
    ckpt_restore *r = NULL;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_STEP;
    options.step = step;
    CHECK_OK(ckpt_restore_open(c, &options, &r));
    return r;
}

int restore_array(ckpt_restore *r, const char *name, uint32_t dtype, void *data, uint64_t count) {
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = dtype;
    read.name = name;
    read.data = data;
    read.dimensions = 1;
    read.shape = &count;
    return ckpt_restore_read(r, &read);
}

void restore_words_check(ckpt_restore *r, const char *name, size_t count, uint64_t seed) {
    uint64_t *words = malloc(count * sizeof *words + 1);
    CHECK(words);
    CHECK_OK(restore_array(r, name, CKPT_U64, words, count));
    words_check(words, count, seed);
    free(words);
}

void words_check_step(ckpt *c, uint64_t step, size_t count, uint64_t seed) {
    ckpt_restore *r = restore_of(c, step);
    restore_words_check(r, "words", count, seed);
    ckpt_restore_close(r);
}
