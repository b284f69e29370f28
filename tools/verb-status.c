/* SPDX-License-Identifier: Apache-2.0 */
/* `status`: what the daemon says of itself, for people; --json gives it unchanged. */
#include "tools/daemon.h"
#include "tools/table.h"

#include <inttypes.h>

/* The daemon's words are safe to print only when escaped: paths and names in them are anybody's. */
static void print_between(const char *before, const char *text, const char *after) {
    fputs(before, stdout);
    print_safe(stdout, text);
    fputs(after, stdout);
}

static void print_head(json_t *status) {
    char uptime[FORMAT_MAX];
    print_between("ckptd ", json_text(status, "version", "?"), "");
    printf(", pid %" PRIu64 ", uid %" PRIu64 ", up %s", json_number(status, "pid"), json_number(status, "uid"),
           format_duration(json_number(status, "uptime_s") * 1000, uptime));
    print_between(", loop ", json_text(status, "loop", "?"), "\n");
    print_between("socket ", json_text(status, "socket", "?"), "\n");
    if (json_flag(status, "stopping"))
        puts("it is ending: it drains to the local level, and takes no new jobs");
    const char *config = json_text(status, "config", "");
    print_between("config ", config[0] ? config : "none, the defaults", "\n");
}

static void print_pool(json_t *status) {
    json_t *pool = json_object_get(status, "pool");
    char limit[FORMAT_MAX], allocated[FORMAT_MAX], used[FORMAT_MAX], cached[FORMAT_MAX];
    if (!pool)
        return;
    printf("pool %s used, %s cached, %s allocated in %" PRIu64 " segments, limit %s\n",
           format_bytes(json_number(pool, "used"), used), format_bytes(json_number(pool, "cached"), cached),
           format_bytes(json_number(pool, "allocated"), allocated), json_number(pool, "segments"),
           format_bytes(json_number(pool, "limit"), limit));
}

/* One line for each tier that has some: what the daemon met, and what lies there set aside. */
static void print_damage(json_t *tier) {
    json_t *damage = json_object_get(tier, "damage");
    uint64_t chunks = json_number(damage, "chunks_bad"), copies = json_number(damage, "copies_bad");
    uint64_t aside = json_number(damage, "set_aside"), repaired = json_number(damage, "repaired");
    if (!chunks && !copies && !aside)
        return;
    print_between("tier ", json_text(tier, "name", "?"), ", damage: ");
    printf("%" PRIu64 " chunk%s with a wrong digest, %" PRIu64 " cop%s given up; %" PRIu64 " set aside, %" PRIu64
           " of them repaired\n",
           chunks, chunks == 1 ? "" : "s", copies, copies == 1 ? "y" : "ies", aside, repaired);
}

static void print_tiers(json_t *status) {
    CLEANUP(table_deinit) struct table table = {0};
    size_t i;
    json_t *tier;
    table_init(&table, "TIER|LEVEL|>PENDING|>PARTS|>WRITTEN|>READ|>ERRORS|>STUCK|>FREE|CODEC|ROOT");
    json_array_foreach(json_list(status, "tiers"), i, tier) {
        char text[FORMAT_MAX];
        table_cell(&table, "%s", json_text(tier, "name", "?"));
        table_cell(&table, "%s", json_text(tier, "level", "?"));
        table_cell(&table, "%s", format_bytes(json_number(tier, "pending_bytes"), text));
        table_cell(&table, "%" PRIu64, json_number(tier, "pending_parts"));
        table_cell(&table, "%s", format_bytes(json_number(tier, "bytes_written"), text));
        table_cell(&table, "%s", format_bytes(json_number(tier, "bytes_read"), text));
        table_cell(&table, "%" PRIu64, json_number(tier, "errors"));
        table_cell(&table, "%" PRIu64, json_number(tier, "stuck_workers"));
        table_cell(&table, "%s", json_object_get(tier, "free") ? format_bytes(json_number(tier, "free"), text) : "-");
        table_cell(&table, "%s", json_text(tier, "codec", "?"));
        table_cell(&table, "%s", json_text(tier, "root", ""));
    }
    if (i)
        putchar('\n');
    table_print(&table, stdout);
    json_array_foreach(json_list(status, "tiers"), i, tier) {
        const char *error = json_text(tier, "last_error", "");
        if (error[0]) {
            print_between("tier ", json_text(tier, "name", "?"), ", last error: ");
            print_between("", error, "\n");
        }
        print_damage(tier);
    }
}

/* Only where a job has described GPU memory. */
static void print_devices(json_t *status) {
    CLEANUP(table_deinit) struct table table = {0};
    size_t i;
    json_t *device, *cuda = json_object_get(status, "cuda"), *devices = json_list(cuda, "devices");
    static const char *const sizes[] = {"context_bytes", "import_bytes", "arena_size", "arena_used", "copied_bytes"};
    if (!json_array_size(devices))
        return;
    printf("\nGPUs: ");
    print_between("", json_text(cuda, "driver", "?"), json_text(cuda, "reason", "")[0] ? ": " : "\n");
    if (json_text(cuda, "reason", "")[0])
        print_between("", json_text(cuda, "reason", ""), "\n");
    table_init(&table, "DEVICE|NAME|>CONTEXT|>IMPORTED|>ARENA|>USED|>COPIED|");
    json_array_foreach(devices, i, device) {
        table_cell(&table, "%s", json_text(device, "device", "?"));
        table_cell(&table, "%s", json_text(device, "name", ""));
        for (size_t k = 0; k < ARRAY_SIZE(sizes); k++) {
            char text[FORMAT_MAX];
            table_cell(&table, "%s", format_bytes(json_number(device, sizes[k]), text));
        }
        table_cell(&table, "%s", json_flag(device, "stuck") ? "stuck" : json_flag(device, "in_use") ? "in use" : "");
    }
    table_print(&table, stdout);
    json_array_foreach(devices, i, device) {
        const char *error = json_text(device, "last_error", "");
        if (error[0]) {
            print_between("", json_text(device, "device", "?"), ", last error: ");
            print_between("", error, "\n");
        }
    }
}

static void print_sessions(json_t *status) {
    CLEANUP(table_deinit) struct table table = {0};
    size_t i;
    json_t *session;
    table_init(&table, "JOB|>RANK|>PID|>GENERATION|RESUMED FROM|>SET|>SHARDS|>LAST STEP|>SAVES|>SKIPPED|SOURCE|");
    json_array_foreach(json_list(status, "sessions"), i, session) {
        json_t *source = json_object_get(session, "source");
        char text[FORMAT_MAX];
        table_cell(&table, "%s", json_text(session, "job", "?"));
        table_cell(&table, "%" PRIu64 "/%" PRIu64, json_number(session, "rank"), json_number(session, "world"));
        table_cell(&table, "%" PRIu64, json_number(session, "pid"));
        table_cell(&table, "%" PRIu64, json_number(session, "generation"));
        table_cell(&table, "%s", json_text(session, "resumes", "-"));
        table_cell(&table, "%s", format_bytes(json_number(session, "set_bytes"), text));
        table_cell(&table, "%" PRIu64, json_number(session, "shards"));
        if (json_is_integer(json_object_get(session, "last_step")))
            table_cell(&table, "%" PRIu64, json_number(session, "last_step"));
        else
            table_cell(&table, "-");
        table_cell(&table, "%" PRIu64, json_number(session, "saves"));
        table_cell(&table, "%" PRIu64, json_number(session, "skipped"));
        table_cell(&table, "%s",
                   json_flag(source, "push")        ? "push"
                   : json_number(source, "device")  ? "device"
                   : json_number(source, "private") ? "private"
                   : json_number(source, "shared")  ? "shared"
                                                    : "-");
        table_cell(&table, "%s", json_flag(session, "capturing") ? "capturing" : "");
    }
    if (i)
        putchar('\n');
    table_print(&table, stdout);
    json_array_foreach(json_list(status, "sessions"), i, session) {
        json_t *source = json_object_get(session, "source");
        if (json_flag(source, "push")) {
            printf("rank %" PRIu64, json_number(session, "rank"));
            print_between(" of ", json_text(session, "job", "?"), " pushes: ");
            print_between("", json_text(source, "push_reason", "the daemon does not say why"), "\n");
        }
    }
}

static void print_versions(json_t *status) {
    CLEANUP(table_deinit) struct table table = {0};
    size_t i;
    json_t *version;
    table_init(&table, "IN FLIGHT|>VERSION|>CAPTURED|REACHED");
    json_array_foreach(json_list(status, "versions"), i, version) {
        static const char *const levels[] = {"CAPTURED", "LOCAL", "PARTNER", "GLOBAL"};
        json_t *reached = json_object_get(version, "levels");
        char text[64] = "-";
        size_t used = 0;
        for (size_t k = 0; k < ARRAY_SIZE(levels); k++) {
            json_t *value = json_object_get(reached, levels[k]);
            if (value && !json_is_null(value) && !json_is_false(value) && used < sizeof text)
                used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", used ? " " : "", levels[k]);
        }
        table_cell(&table, "%s", json_text(version, "job", "?"));
        table_cell(&table, "%" PRIu64 "/%" PRIu64, json_number(version, "generation"), json_number(version, "step"));
        table_cell(&table, "%" PRIu64 "/%" PRIu64, json_number(version, "parts_captured"),
                   json_number(version, "world"));
        table_cell(&table, "%s", text);
    }
    if (i)
        putchar('\n');
    table_print(&table, stdout);
}

static void print_counters(json_t *status) {
    CLEANUP(table_deinit) struct table table = {0};
    const char *name;
    json_t *value;
    table_init(&table, "COUNTER|>VALUE");
    json_object_foreach(json_object_get(status, "counters"), name, value) {
        if (json_integer_value(value) == 0)
            continue;
        table_cell(&table, "%s", name);
        table_cell(&table, "%lld", (long long)json_integer_value(value));
    }
    if (table.count > table.columns)
        putchar('\n');
    table_print(&table, stdout);
}

int verb_status(struct ctl *ctl) {
    json_t *status = NULL;
    struct problem problem = PROBLEM_NONE;
    int r = daemon_status(ctl, &status, &problem);
    if (r != 0)
        return daemon_fail(r, &problem);
    if (ctl->json)
        return ctl_print_json(status);
    print_head(status);
    print_pool(status);
    print_tiers(status);
    print_devices(status);
    print_sessions(status);
    print_versions(status);
    print_counters(status);
    json_decref(status);
    return STATUS_OK;
}
