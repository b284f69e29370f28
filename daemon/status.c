/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/status.h"

#include "daemon/arena.h"
#include "daemon/session.h"
#include "tiers/codec.h"

#include <errno.h>
#include <jansson.h>

static const char *level_name(enum level level) {
    static const char *const names[LEVEL_COUNT] = {"NONE", "CAPTURED", "LOCAL", "PARTNER", "GLOBAL"};
    return names[level];
}

static json_t *number(uint64_t value) { return json_integer((json_int_t)min_u64(value, INT64_MAX)); }

static json_t *version_text(uint64_t generation, uint64_t step) {
    return json_sprintf("%llu/%llu", (unsigned long long)generation, (unsigned long long)step);
}

static json_t *pool_json(struct server *server) {
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:i}", "limit", number(usage.limit), "allocated",
                     number(usage.allocated), "used", number(usage.used), "cached", number(usage.cached), "reserved",
                     number(usage.reserved - server->admissions), "segments", (int)usage.segments);
}

static json_t *capabilities_json(unsigned capabilities) {
    static const struct {
        unsigned bit;
        const char *name;
    } names[] = {
        {TIER_ATOMIC_RENAME, "ATOMIC_RENAME"},
        {TIER_LINK, "LINK"},
        {TIER_DIRECT, "DIRECT"},
        {TIER_SHARED, "SHARED"},
        {TIER_SURVIVES_REBOOT, "SURVIVES_REBOOT"},
        {TIER_PREALLOCATE, "PREALLOCATE"},
    };
    json_t *list = json_array();
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (capabilities & names[i].bit)
            json_array_append_new(list, json_string(names[i].name));
    return list;
}

/* What was found damaged there: by this daemon, and, by whomever, in the jobs that it knows. */
static json_t *damage_json(struct lane *lane) {
    struct catalog_damage damage = {0};
    struct job *job;
    TAILQ_FOREACH(job, &lane->server->jobs, link)
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (job->lanes[i] == lane) {
            damage.set_aside += job->damage[i].set_aside;
            damage.repaired += job->damage[i].repaired;
        }
    return json_pack("{s:o, s:o, s:o, s:o}", "chunks_bad", number(lane->chunks_bad), "copies_bad",
                     number(lane->copies_bad), "set_aside", number(damage.set_aside), "repaired",
                     number(damage.repaired));
}

static json_t *lane_json(struct lane *lane) {
    struct tier *tier = lane->tier;
    return json_pack("{s:s, s:s, s:s, s:s, s:b, s:s, s:o, s:o, s:o, s:i, s:o, s:o, s:s, s:i, s:o, s:o, s:o}", "name",
                     tier->name, "level", level_name(tier->level), "kind", tier->ops->kind, "root", tier->root,
                     "from_job", lane->from_job, "codec", codec_name(lane->config.codec), "bytes_written",
                     number(tier->counters.bytes_written), "bytes_read", number(tier->counters.bytes_read),
                     "pending_bytes", number(lane->pending_bytes), "pending_parts", (int)lane->pending_parts,
                     "superseded", number(lane->superseded), "errors", number(lane->errors), "last_error",
                     lane->last_error.text, "stuck_workers", (int)lane->stuck_workers, "capabilities",
                     capabilities_json(tier->capabilities), "damage", damage_json(lane), "faults_fired",
                     number(tier_fault_fired(tier)));
}

static json_t *session_json(const struct session_info *info) {
    const struct run_record *run = &info->job->run;
    json_t *source =
        json_pack("{s:i, s:i, s:i, s:b, s:s}", "shared", info->set ? (int)info->set->shared_count : 0, "private",
                  info->set ? (int)info->set->private_count : 0, "device",
                  info->set ? (int)info->set->device_shards : 0, "push", info->push, "push_reason", info->push_reason);
    return json_pack("{s:o, s:i, s:s, s:s, s:i, s:i, s:o, s:o, s:o, s:o, s:i, s:o, s:o, s:o, s:b}", "session",
                     json_sprintf("%016llx", (unsigned long long)info->number), "pid", info->pid, "job",
                     info->job->name, "run_id", run->run_id, "rank", (int)info->rank, "world", (int)info->world,
                     "generation", number(run->generation), "resumes",
                     run->resumes ? version_text(run->resume_generation, run->resume_step) : json_null(), "source",
                     source, "set_bytes", number(info->set ? image_size(&info->set->layout, 0) : 0), "shards",
                     info->set ? (int)shards_count(info->set->shards) : 0, "last_step",
                     info->has_step ? number(info->last_step) : json_null(), "saves", number(info->saves), "skipped",
                     number(info->skipped), "capturing", info->capturing);
}

static json_t *sessions_json(struct server *server) {
    json_t *list = json_array();
    struct session *session = NULL;
    while ((session = session_next(server, session))) {
        struct session_info info;
        session_get_info(session, &info);
        if (info.job)
            json_array_append_new(list, session_json(&info));
    }
    return list;
}

static json_t *device_json(const struct device *device) {
    uint32_t imports;
    uint64_t bytes;
    imports_of(device, &imports, &bytes);
    return json_pack("{s:s, s:s, s:b, s:b, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:s}", "device", device->facts.text,
                     "name", device->facts.name, "in_use", device->facts.context, "stuck", device->stuck,
                     "context_bytes", number(device->facts.context_bytes), "imports", (int)imports, "import_bytes",
                     number(bytes), "arena_size", number(device->facts.arena_size), "arena_used",
                     number(arena_used(device->arena)), "pinned_bytes", number(device->facts.pinned_bytes),
                     "copied_bytes", number(device->facts.copied_bytes), "last_error", device->problem.text);
}

static json_t *cuda_json(struct server *server) {
    const char *reason, *state = devices_state(server->devices, &reason);
    json_t *list = json_array();
    struct device *device = NULL;
    while ((device = devices_next(server->devices, device)))
        json_array_append_new(list, device_json(device));
    return json_pack("{s:s, s:s, s:o}", "driver", state, "reason", reason, "devices", list);
}

/* Complete in some lane of at least this level? */
static bool complete_at(struct version *version, enum level level) {
    for (uint32_t i = 0; i < version->job->lane_count; i++)
        if (version->lanes[i].complete && version->job->lanes[i]->config.level >= level)
            return true;
    return false;
}

static json_t *versions_json(struct server *server) {
    json_t *list = json_array();
    struct job *job;
    struct version *version;
    TAILQ_FOREACH(job, &server->jobs, link)
    TAILQ_FOREACH(version, &job->versions, link) {
        if (TAILQ_EMPTY(&version->parts))
            continue;
        json_t *levels = json_pack("{s:b, s:b, s:b}", "CAPTURED", version->captured >= version->world, "LOCAL",
                                   complete_at(version, LEVEL_LOCAL), "GLOBAL", complete_at(version, LEVEL_GLOBAL));
        json_array_append_new(list, json_pack("{s:s, s:o, s:o, s:i, s:i, s:o}", "job", job->name, "generation",
                                              number(version->id.generation), "step", number(version->id.step),
                                              "parts_captured", (int)version->captured, "world", (int)version->world,
                                              "levels", levels));
    }
    return list;
}

int status_text(struct server *server, char **ret_text) {
    json_t *lanes = json_array();
    struct lane *lane;
    TAILQ_FOREACH(lane, &server->lanes, link)
    json_array_append_new(lanes, lane_json(lane));
    json_t *counters = json_object();
#define COUNTER(name, help) json_object_set_new(counters, #name, number(server->counters.name));
    SERVER_COUNTERS(COUNTER)
#undef COUNTER
    json_t *status =
        json_pack("{s:s, s:i, s:i, s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "version", CKPTD_VERSION,
                  "pid", (int)getpid(), "uid", (int)server->uid, "socket", server->socket_path, "config",
                  server->config->file, "loop", loop_name(server->loop), "stopping", server->stopping, "uptime_s",
                  number((loop_now(server->loop) - server->started_ns) / NANOSECONDS_PER_SECOND), "pool",
                  pool_json(server), "cuda", cuda_json(server), "tiers", lanes, "sessions", sessions_json(server),
                  "versions", versions_json(server), "counters", counters);
    if (!status)
        return -ENOMEM;
    *ret_text = json_dumps(status, JSON_COMPACT);
    json_decref(status);
    return *ret_text ? 0 : -ENOMEM;
}
