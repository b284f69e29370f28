/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckptd.conf. Values keep the bounds that ckptd.conf(5) names, and comments change nothing: with one
 * before and one after, the same is read, or the same refused, one line later.
 */
#include "tiers/config.h"

#include "tests/fuzz/fuzz.h"
#include "tiers/tier.h"

#include <errno.h>

static void check_tier(const struct config_tier *tier) {
    struct tier_fault_options options;
    assert(tier->level == LEVEL_LOCAL || tier->level == LEVEL_GLOBAL);
    assert(strnlen(tier->name, sizeof tier->name) < sizeof tier->name && tier->name[0]);
    assert(strnlen(tier->path, sizeof tier->path) < sizeof tier->path && tier->path[0] == '/');
    assert(strnlen(tier->fault, sizeof tier->fault) < sizeof tier->fault);
    assert(tier->depth >= 1 && tier->depth <= 256 && tier->workers >= 1 && tier->keep >= 1);
    assert(tier->backlog >= 1 && tier->backlog <= 1000 && tier->delay_ms <= 600000);
    assert((tier->file_mode & ~(mode_t)0777) == 0 && (tier->directory_mode & ~(mode_t)0777) == 0);
    if (tier->fault[0]) {
        int r = tier_fault_parse(tier->fault, &options, NULL);
        assert(r == 0);
    }
}

static void check_bounds(const struct config *config) {
    assert(config->chunk_size >= KIB(256) && config->chunk_size <= MIB(64) && config->chunk_size % KIB(256) == 0);
    assert(config->pool_size ? config->pool_size >= 2 * (uint64_t)config->chunk_size
                             : config->pool_percent >= 1 && config->pool_percent <= 90);
    assert(config->capture_threads >= 1 && config->codec_threads >= 1 && config->nice >= -20 && config->nice <= 19);
    assert(config->tier_ms >= 1000 && config->capture_ms >= 1000);
    assert(config->tier_count >= 1 && config->tier_count <= CONFIG_TIERS_MAX);
    for (size_t i = 0; i < config->tier_count; i++) {
        check_tier(&config->tiers[i]);
        assert(i == 0 || config->tiers[i - 1].level < config->tiers[i].level);
    }
}

static void check_same(const struct config *a, const struct config *b) {
    assert(strcmp(a->loop, b->loop) == 0 && a->log_level == b->log_level && strcmp(a->log_file, b->log_file) == 0);
    assert(a->pool_size == b->pool_size && a->pool_percent == b->pool_percent && a->chunk_size == b->chunk_size);
    assert(a->stop_grace_ms == b->stop_grace_ms && a->idle_exit_ms == b->idle_exit_ms && a->tier_ms == b->tier_ms);
    assert(a->capture_ms == b->capture_ms);
    assert(a->settle_ms == b->settle_ms && a->takeover_ms == b->takeover_ms && a->tier_count == b->tier_count);
    for (size_t i = 0; i < a->tier_count; i++)
        assert(strcmp(a->tiers[i].name, b->tiers[i].name) == 0 && strcmp(a->tiers[i].path, b->tiers[i].path) == 0 &&
               a->tiers[i].codec == b->tiers[i].codec && a->tiers[i].keep == b->tiers[i].keep);
}

/* "f:LINE: why" one line later. */
static void check_same_refusal(const char *first, const char *later) {
    char *after_first, *after_later;
    unsigned long line = strtoul(first + 2, &after_first, 10), later_line = strtoul(later + 2, &after_later, 10);
    if (after_first == first + 2) /* about the whole file */
        assert(strcmp(first, later) == 0);
    else
        assert(later_line == line + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    CLEANUP(freep) char *text = fuzz_string(data, size), *commented = NULL;
    struct config config, same;
    struct problem problem = PROBLEM_NONE, same_problem = PROBLEM_NONE;
    int r = asprintf(&commented, "# before\n%s\n; after", text);
    assert(r >= 0);
    r = config_parse(text, "f", &config, &problem);
    int same_result = config_parse(commented, "f", &same, &same_problem);
    assert((r == 0 || r == -EINVAL) && r == same_result);
    if (r == 0) {
        check_bounds(&config);
        check_same(&config, &same);
    } else {
        assert(strncmp(problem.text, "f:", 2) == 0);
        check_same_refusal(problem.text, same_problem.text);
    }
    return 0;
}
