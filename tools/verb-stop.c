/* SPDX-License-Identifier: Apache-2.0 */
/* `stop` and `config`. */
#include "proto/messages.h"
#include "tiers/codec.h"
#include "tiers/config.h"
#include "tools/daemon.h"
#include "tools/table.h"

#include <errno.h>
#include <inttypes.h>

int verb_stop(struct ctl *ctl) {
    CLEANUP(connection_deinit) struct connection connection;
    struct problem problem = PROBLEM_NONE;
    int r = connection_init(&connection, ctl->socket, &problem);
    if (r != 0)
        return daemon_fail(r, &problem);
    struct message_stop stop = {.mode = ctl->now ? STOP_NOW : STOP_DRAIN};
    struct wire_packet packet = {.fd = -1};
    struct wire_message answer;
    r = connection_ask(&connection, MESSAGE_STOP, &stop, MESSAGE_OK, &packet, &answer, &problem);
    if (r < 0 && !(ctl->now && r == -ECONNRESET))
        return daemon_fail(r, &problem);
    if (ctl->json)
        return ctl_print_json(json_pack("{s:I, s:b}", "pid", (json_int_t)connection.daemon_pid, "drain", !ctl->now));
    printf("the daemon (pid %" PRIu32 ") is ending%s\n", connection.daemon_pid,
           ctl->now ? "" : ", as soon as all is drained to the local level");
    return STATUS_OK;
}

static const char *role(enum level level) { return level == LEVEL_LOCAL ? "local" : "parallel"; }

static int print_config_json(const struct config *config) {
    json_t *tiers = json_array();
    for (size_t i = 0; i < config->tier_count; i++) {
        const struct config_tier *tier = &config->tiers[i];
        json_array_append_new(tiers, json_pack("{s:s, s:s, s:s, s:s, s:I}", "name", tier->name, "role",
                                               role(tier->level), "path", tier->path, "codec", codec_name(tier->codec),
                                               "keep", (json_int_t)tier->keep));
    }
    return ctl_print_json(json_pack("{s:s, s:s, s:I, s:I, s:I, s:o}", "file", config->file, "loop", config->loop,
                                    "pool_bytes", (json_int_t)config->pool_size, "pool_percent",
                                    (json_int_t)config->pool_percent, "chunk_size", (json_int_t)config->chunk_size,
                                    "tiers", tiers));
}

int verb_config(struct ctl *ctl) {
    if (ctl->example)
        return config_example(stdout) == 0 ? STATUS_OK : ctl_fail(STATUS_STORAGE, "cannot write to stdout");
    struct config config;
    struct problem problem = PROBLEM_NONE;
    char bytes[FORMAT_MAX];
    int r = config_load(ctl->config, &config, &problem);
    if (r < 0)
        return ctl_fail(STATUS_USAGE, "%s", problem_text(&problem, r));
    if (ctl->json)
        return print_config_json(&config);
    printf("file: %s\n", config.file[0] ? config.file : "none, these are the defaults");
    if (config.pool_size)
        printf("pool: %s", format_bytes(config.pool_size, bytes));
    else
        printf("pool: %" PRIu32 "%% of what is available", config.pool_percent);
    printf(", chunks of %s\n", format_bytes(config.chunk_size, bytes));
    for (size_t i = 0; i < config.tier_count; i++)
        printf("tier %s: %s, %s, codec %s, keeps %" PRIu32 "\n", config.tiers[i].name, role(config.tiers[i].level),
               config.tiers[i].path, codec_name(config.tiers[i].codec), config.tiers[i].keep);
    return STATUS_OK;
}
