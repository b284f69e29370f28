/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The table of configuration keys; for config.c and config-keys.c only. One entry says everything
 * about a key: where its value lies, its kind and bounds, its default in the syntax of the file,
 * and its help. Parsing, the defaults and the commented example come from it.
 */

#include "tiers/config.h"

enum config_section {
    CONFIG_DAEMON,
    CONFIG_POOL,
    CONFIG_DEVICE,
    CONFIG_TIER,
    CONFIG_DEADLINES,
    CONFIG_SECTION_COUNT,
};

enum config_kind {
    CONFIG_NUMBER,  /* minimum .. maximum, in decimal; may be negative if the minimum is */
    CONFIG_CHUNK,   /* bytes with K, M, G, T: a multiple of a digest's leaf */
    CONFIG_SIZE,    /* bytes, or a percentage: config.pool_size and pool_percent */
    CONFIG_SECONDS, /* with up to three decimals; kept in ms; bounds in s */
    CONFIG_SWITCH,  /* yes, no */
    CONFIG_MODE,    /* octal permission bits, of which `minimum` must be set */
    CONFIG_LOOP,
    CONFIG_LOG_LEVEL,
    CONFIG_ROLE,
    CONFIG_CODEC,
    CONFIG_PROCESSORS, /* numbers and ranges, as config_processors() reads */
    CONFIG_FAULT,      /* as tier_fault_parse() reads */
    CONFIG_PATH,       /* absolute; %u, %U and %% are replaced */
};

struct config_key {
    enum config_section section;
    const char *name;
    enum config_kind kind;
    size_t offset, size; /* in struct config, or for a tier in struct config_tier */
    int64_t minimum, maximum;
    const char *fallback; /* the default, as it would stand in the file; NULL: computed, or none */
    const char *shown;    /* what the example shows where fallback is NULL */
    const char *help;
    bool required;
};

#define CONFIG_KEYS_MAX 64 /* so that one word of bits says which were seen */

extern const struct config_key config_keys[];
extern const size_t config_key_count;
extern const char *const config_section_names[CONFIG_SECTION_COUNT];

/* Puts a value where the key says (`base`: the struct config or config_tier). On failure the
 * problem has half a sentence that goes on after the key's name: "must be yes or no, but is ...". */
int config_key_set(const struct config_key *key, void *base, const char *text, struct problem *problem) MUST_CHECK;

/* Everything but tiers, at its default. */
void config_default(struct config *ret_config);
/* Versions kept where the file does not say. */
uint32_t config_keep_default(enum level level);
