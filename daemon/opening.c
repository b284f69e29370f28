/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   lane (work: open the tier) --> settle (timer) --> claim (work) --> opened
 *                                     ^                 |      |
 *                                     +--- held, retry -+      +--> release (work), where nobody waits any more
 */
#include "daemon/opening.h"

#include "daemon/session.h"
#include "daemon/survey.h"
#include "tiers/claim.h"

#include <errno.h>
#include <stdatomic.h>

#define LEFTOVERS_MAX 4 /* versions per tier that an opening tries to complete */
#define SETTLE_LOOK_MS 20
#define HELD_RETRY_MS 200
#define EXPIRY_MARGIN_MS 1000
#define IMPATIENT_MS 200
#define DYING_MS 3000 /* a process that was just killed takes a moment to give its memory back */

struct opening {
    TAILQ_ENTRY(opening) link; /* the job's, while the claim is at work */
    struct session *session;
    struct server *server;
    struct job *job;
    struct opening_request request;
    struct loop_op op;    /* the lane, or a pause */
    struct survey survey; /* the claim */
    uint64_t deadline_ns, settle_ns, dying_ns;

    struct config_tier lane_config;
    struct tier *tier;
    int result;
    bool retry, reap;
    atomic_bool abandoned; /* the session has ended: a worker reads it */
    uint64_t nonce;
    struct problem problem;
    struct claim_result claim;
    struct opening_result opened;
    struct lane *lane; /* keeps a lane that came with the job until the job has it */
    struct catalog catalogs[LANES_MAX];

    struct loop_op expiry; /* a tier may not answer: the client gets its answer in time all the same */
    bool answered, over;
};

static void opening_free(struct opening *opening) {
    struct session *session = opening->session;
    free(opening);
    session_unhold(session);
}

/* What is in flight goes on, and is cleared away when it comes back. */
static void opening_expired(struct loop_op *op) {
    struct opening *opening = CONTAINER_OF(op, struct opening, expiry);
    if (opening->over) {
        opening_free(opening);
        return;
    }
    struct problem problem = PROBLEM_NONE;
    struct job *job = opening->job;
    uint32_t silent = job ? job_silent_lanes(job) : 0;
    for (uint32_t i = 0; i < LANES_MAX; i++)
        if (silent & 1u << i)
            lane_silent_problem(job->lanes[i], &problem);
    const struct tier *at = opening->survey.at;
    problem_set(&problem, -ETIMEDOUT, "%s did not answer in time: is its file system hanging?",
                at    ? at->root
                : job ? job->lanes[job->decider]->tier->root
                      : opening->lane_config.path);
    opening->answered = true;
    opening_abandon(opening);
    session_error(opening->session, opening->request.serial, CODE_E_TIMEOUT, &problem);
    session_open_failed(opening->session);
}

static bool nobody_waits(const struct opening *opening) {
    return opening->answered || session_hung_up(opening->session);
}

static void opening_end(struct opening *opening, enum code code) {
    struct session *session = opening->session;
    if (code != CODE_OK && !opening->answered) {
        session_error(session, opening->request.serial, code, &opening->problem);
        session_open_failed(session);
    }
    session_set_opening(session, NULL);
    if (opening->job)
        job_unref(opening->job);
    if (opening->lane)
        lane_unref(opening->lane);
    struct server *server = opening->server;
    for (uint32_t i = 0; i < LANES_MAX; i++)
        catalog_deinit(&opening->catalogs[i]);
    opening->over = true;
    if (loop_op_busy(&opening->expiry))
        loop_cancel(server->loop, &opening->expiry);
    else
        opening_free(opening);
    server_settled(server);
}

static void settle(struct opening *opening);

/* ---- claim ---- */

/* A version may have all its parts and yet not be declared complete: the daemons that would have done
 * it died, or left. The newest ones get their chance before the choice. */
static void complete_leftovers(struct opening *opening) {
    struct job *job = opening->job;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        (void)survey_enter(&opening->survey, i); /* none is left out, in all that follows */
        struct catalog catalog;
        struct problem ignored = PROBLEM_NONE; /* the claim meets the same tier and reports */
        if (catalog_scan_newest(job->lanes[i]->tier, job->name, LEFTOVERS_MAX, &catalog, &ignored) < 0)
            continue;
        for (size_t v = catalog.version_count; v-- > 0;)
            if (!catalog.versions[v].complete && !catalog.versions[v].damaged)
                (void)!commit_complete(job->lanes[i]->tier, job->name, catalog.versions[v].id, opening->nonce,
                                       &ignored);
        catalog_deinit(&catalog);
    }
}

/* A rank that joins its run again must not save steps anew that tiers have from it. */
static void find_tier_step(struct opening *opening) {
    struct job *job = opening->job;
    char name[32], path[TIER_PATH_MAX];
    manifest_file_name(opening->request.rank, name);
    for (uint32_t i = 0; i < job->lane_count; i++) {
        (void)survey_enter(&opening->survey, i);
        struct tier_entries entries = {0};
        layout_generation(job->directory, opening->claim.record.generation, path);
        if (tier_list_names(job->lanes[i]->tier, path, &entries) != 0)
            continue;
        for (size_t e = 0; e < entries.count; e++) {
            struct tier_entry ignored;
            struct version_id id = {.generation = opening->claim.record.generation};
            if (!layout_parse_number(entries.items[e].name, &id.step) ||
                (opening->opened.has_tier_step && id.step <= opening->opened.tier_step))
                continue;
            layout_file(job->directory, id, name, path);
            if (tier_stat(job->lanes[i]->tier, path, &ignored) != 0)
                continue;
            opening->opened.has_tier_step = true;
            opening->opened.tier_step = id.step;
        }
        tier_entries_deinit(&entries);
    }
}

static void claim_work(struct survey *survey) {
    struct opening *opening = CONTAINER_OF(survey, struct opening, survey);
    struct job *job = opening->job;
    struct tier *tiers[LANES_MAX];
    for (uint32_t i = 0; i < job->lane_count; i++)
        tiers[i] = job->lanes[i]->tier;
    const struct claim_request request = {
        .job = job->name,
        .run_id = opening->request.run_id,
        .world = opening->request.world,
        .host = opening->server->host,
        .boot_id = opening->server->boot_id,
        .pid = opening->request.pid,
        .pid_start = opening->request.pid_start,
        .nonce = opening->nonce,
        .abandoned = &opening->abandoned,
        .at = &survey->at,
        .decider = tiers[job->decider],
        .tiers = tiers,
        .tier_count = job->lane_count,
    };
    complete_leftovers(opening);
    opening->problem = PROBLEM_NONE;
    opening->claim.warning = PROBLEM_NONE;
    opening->result = claim_run(&request, &opening->claim, &opening->retry, &opening->problem);
    if (opening->result)
        return;
    if (opening->claim.joined)
        find_tier_step(opening);
    for (uint32_t i = 0; i < job->lane_count; i++) {
        (void)survey_enter(survey, i);
        uint32_t reaped;
        struct problem ignored =
            PROBLEM_NONE; /* a leftover that stays does no harm; a scan that fails is tried again later */
        if (opening->reap)
            (void)!retention_reap(tiers[i], job->name, opening->claim.record.generation, opening->request.rank, &reaped,
                                  &ignored);
        if (catalog_scan(tiers[i], job->name, &opening->catalogs[i], &ignored) < 0)
            opening->catalogs[i] = (struct catalog){0};
    }
    if (opening->claim.joined)
        claim_passed_over(&request, opening->catalogs, &opening->claim.record, &opening->claim.warning);
}

static void note_catalogs(struct opening *opening) {
    struct job *job = opening->job;
    for (uint32_t i = 0; i < job->lane_count; i++) {
        const struct catalog *catalog = &opening->catalogs[i];
        for (size_t v = catalog->version_count; v-- > 0;)
            if (catalog->versions[v].complete) {
                job_note_durable(job, job->lanes[i]->config.level, catalog->versions[v].id,
                                 catalog->versions[v].summary.created_ns);
                break;
            }
        job->damage[i] = catalog->damage;
        if (catalog->bad)
            log_warning(opening->server->log, "%llu entries could not be understood, the first: %s job=%s tier=%s",
                        (unsigned long long)catalog->bad, catalog->first_bad.text, job->name,
                        job->lanes[i]->config.name);
    }
}

/* ---- release ---- */

/* A run of one rank, begun for a client that has left: nobody is in it, and its process, which may live on, would hold
 * the job for a while. In a run of several ranks others may be, here or on other nodes; and who joins one again, after
 * a daemon's death perhaps, has left nothing but this daemon. */
static bool nobody_is_in(const struct opening *opening) {
    const struct claim_result *claim = &opening->claim;
    return opening->result == 0 && !claim->joined && claim->record.world == 1 && !opening->job->sessions;
}

static void release_run(struct survey *survey) {
    struct opening *opening = CONTAINER_OF(survey, struct opening, survey);
    struct job *job = opening->job;
    (void)survey_enter(survey, job->decider);
    opening->result = claim_end(job->lanes[job->decider]->tier, job->name, opening->claim.record.generation);
}

static void release_done(struct survey *survey) {
    struct opening *opening = CONTAINER_OF(survey, struct opening, survey);
    struct job *job = opening->job;
    struct problem problem = PROBLEM_NONE;
    TAILQ_REMOVE(&job->openings, opening, link);
    if (opening->result < 0) {
        problem_set(&problem, opening->result, "cannot mark a run of job %s as ended whose client has left: %s",
                    job->name, strerror(-opening->result));
        lane_error(job->lanes[job->decider], &problem);
    }
    opening_end(opening, CODE_E_UNREACHABLE);
}

static const struct survey_ops release_ops = {.run = release_run, .free = release_done};

/* ---- after the claim ---- */

static void retry_elapsed(struct loop_op *op) { settle(CONTAINER_OF(op, struct opening, op)); }

static void retry_in(struct opening *opening, uint64_t ms) {
    loop_timer(opening->server->loop, &opening->op, loop_now(opening->server->loop) + ms * NANOSECONDS_PER_MS,
               retry_elapsed);
}

static void claim_done(struct survey *survey) {
    struct opening *opening = CONTAINER_OF(survey, struct opening, survey);
    struct server *server = opening->server;
    if (nobody_waits(opening) && nobody_is_in(opening)) {
        survey_start(survey, &release_ops, opening->job);
        return;
    }
    TAILQ_REMOVE(&opening->job->openings, opening, link);
    if (nobody_waits(opening)) {
        opening_end(opening, CODE_E_UNREACHABLE);
        return;
    }
    if (opening->result == CLAIM_E_HELD) {
        uint64_t next = loop_now(server->loop) + HELD_RETRY_MS * NANOSECONDS_PER_MS;
        if (next < opening->deadline_ns && (opening->retry || next < opening->dying_ns))
            retry_in(opening, HELD_RETRY_MS);
        else
            opening_end(opening, CODE_E_HELD);
        return;
    }
    if (opening->result < 0) {
        problem_set(&opening->problem, opening->result, "cannot join or claim the run: %s", strerror(-opening->result));
        lane_error(opening->job->lanes[opening->job->decider], &opening->problem);
        opening_end(opening, session_code(opening->result));
        return;
    }
    if (opening->claim.record.world != opening->request.world) {
        problem_set(&opening->problem, -EINVAL, "run %s of job %s has %u ranks, this rank says %u",
                    opening->request.run_id, opening->request.job, opening->claim.record.world, opening->request.world);
        opening_end(opening, CODE_E_CONFLICT);
        return;
    }
    note_catalogs(opening);
    if (opening->claim.warning.text[0])
        log_warning(server->log, "%s job=%s rank=%u", opening->claim.warning.text, opening->job->name,
                    opening->request.rank);
    job_joined(opening->job, &opening->claim.record);
    opening->opened.warning = opening->claim.warning;
    enum code code =
        session_opened(opening->session, &opening->request, opening->job, &opening->opened, &opening->problem);
    opening_end(opening, code);
}

/* Who waits for the claim is told at the deadline, by opening_expired(). */
static const struct survey_ops claim_ops = {.run = claim_work, .free = claim_done};

/* ---- settle ---- */

/* A live session of another run here: no need to ask the tiers. */
static struct session *other_run(struct opening *opening) {
    struct session *session = NULL;
    while ((session = session_next(opening->server, session))) {
        struct job *job = session_job(session);
        if (job && strcmp(job->name, opening->job->name) == 0 && strcmp(job->run.run_id, opening->request.run_id) != 0)
            return session;
    }
    return NULL;
}

/* Something of this rank is being written: its part, or that it has none. */
static bool version_active(const struct version *version, uint32_t rank) {
    const struct part *part;
    TAILQ_FOREACH(part, &version->parts, link)
    if (part->rank == rank && !part_idle(part))
        return true;
    return version->absences > 0;
}

static bool rank_active(struct opening *opening) {
    struct job *job;
    struct version *version;
    TAILQ_FOREACH(job, &opening->server->jobs, link)
    if (strcmp(job->name, opening->job->name) == 0)
        TAILQ_FOREACH(version, &job->versions, link)
    if (version_active(version, opening->request.rank))
        return true;
    return false;
}

/* A process of this rank was here before us, and its opening, which nobody waits for any more, is not over:
 * it would take our temporaries for those that its own predecessor had left. */
static bool rank_opens(const struct opening *opening) {
    const struct opening *other;
    TAILQ_FOREACH(other, &opening->job->openings, link)
    if (other->request.rank == opening->request.rank)
        return true;
    return false;
}

static void settle(struct opening *opening) {
    struct server *server = opening->server;
    uint64_t now = loop_now(server->loop);
    if (nobody_waits(opening)) {
        opening_end(opening, CODE_E_UNREACHABLE);
        return;
    }
    struct session *other = other_run(opening);
    if (other) {
        struct session_info info;
        session_get_info(other, &info);
        if (now + SETTLE_LOOK_MS * NANOSECONDS_PER_MS < opening->deadline_ns && now < opening->settle_ns) {
            retry_in(opening, SETTLE_LOOK_MS);
            return;
        }
        problem_set(&opening->problem, -EBUSY,
                    "job %s is held by a live run: run id %s, rank %u, process %d on this host; end it, or use another "
                    "job name",
                    opening->request.job, info.job->run.run_id, info.rank, info.pid);
        opening_end(opening, CODE_E_HELD);
        return;
    }
    bool same_run = strcmp(opening->job->run.run_id, opening->request.run_id) == 0;
    if (!same_run && job_unsettled(opening->job) && now < opening->settle_ns && now < opening->deadline_ns) {
        retry_in(opening, SETTLE_LOOK_MS);
        return;
    }
    if (job_silent_lanes(opening->job)) { /* it would be stuck there, too */
        retry_in(opening, HELD_RETRY_MS);
        return;
    }
    if (rank_opens(opening)) {
        if (now < opening->deadline_ns) {
            retry_in(opening, SETTLE_LOOK_MS);
            return;
        }
        problem_set(&opening->problem, -ETIMEDOUT,
                    "job %s: an earlier process of rank %u began to open it, and tier %s has not answered yet",
                    opening->request.job, opening->request.rank,
                    opening->job->lanes[opening->job->decider]->config.name);
        opening_end(opening, CODE_E_TIMEOUT);
        return;
    }
    opening->nonce = server_nonce(server);
    opening->reap = !rank_active(opening);
    TAILQ_INSERT_TAIL(&opening->job->openings, opening, link);
    survey_start(&opening->survey, &claim_ops, opening->job);
}

/* ---- lane ---- */

static void have_lane(struct opening *opening) {
    int r =
        job_get(opening->server, opening->request.job, opening->request.directory, &opening->job, &opening->problem);
    if (r < 0)
        opening_end(opening, session_code(r));
    else
        settle(opening);
}

static void lane_work(struct loop_op *op) {
    struct opening *opening = CONTAINER_OF(op, struct opening, op);
    opening->result = opening->server->open_tier(&opening->lane_config, &opening->tier, &opening->problem);
}

static unsigned job_lanes(struct server *server) {
    struct lane *lane;
    unsigned count = 0;
    TAILQ_FOREACH(lane, &server->lanes, link)
    count += lane->from_job;
    return count;
}

static void lane_done(struct loop_op *op) {
    struct opening *opening = CONTAINER_OF(op, struct opening, op);
    if (opening->result < 0) {
        opening_end(opening, session_code(opening->result));
        return;
    }
    snprintf(opening->request.directory, sizeof opening->request.directory, "%s", opening->tier->root);
    if (lane_find(opening->server, opening->tier->root)) { /* another rank was faster */
        tier_free(opening->tier);
    } else if (job_lanes(opening->server) == JOB_LANES_MAX) {
        tier_free(opening->tier);
        int r = problem_set(&opening->problem, -E2BIG, "%d directories of jobs (CKPT_DIR) at a time are the limit",
                            JOB_LANES_MAX);
        opening_end(opening, session_code(r));
        return;
    } else {
        int r = lane_new(opening->server, &opening->lane_config, opening->tier, true, &opening->lane);
        if (r < 0) {
            tier_free(opening->tier);
            problem_set(&opening->problem, r, "cannot start workers for %s: %s", opening->lane_config.path,
                        strerror(-r));
            opening_end(opening, session_code(r));
            return;
        }
    }
    have_lane(opening);
}

/* Before the client's deadline, so that it hears why. One that hardly waits comes back to ask again. */
static uint64_t expiry_ms(uint64_t deadline_ms) {
    return deadline_ms < IMPATIENT_MS ? deadline_ms + EXPIRY_MARGIN_MS
                                      : deadline_ms - min_u64(deadline_ms / 4, EXPIRY_MARGIN_MS);
}

void opening_abandon(struct opening *opening) {
    atomic_store_explicit(&opening->abandoned, true, memory_order_relaxed);
}

int opening_start(struct session *session, const struct opening_request *request) {
    struct opening *opening = calloc(1, sizeof *opening);
    if (!opening)
        return -ENOMEM;
    struct server *server = session_server(session);
    uint64_t now = loop_now(server->loop);
    opening->session = session;
    opening->server = server;
    opening->request = *request;
    uint64_t expiry_ns = now + expiry_ms(request->deadline_ms) * NANOSECONDS_PER_MS;
    opening->deadline_ns = min_u64(now + request->deadline_ms * NANOSECONDS_PER_MS, expiry_ns);
    opening->dying_ns = now + DYING_MS * NANOSECONDS_PER_MS;
    opening->settle_ns = now + server->config->settle_ms * NANOSECONDS_PER_MS;
    session_hold(session);
    session_set_opening(session, opening);
    loop_timer(server->loop, &opening->expiry, expiry_ns, opening_expired);
    if (!*request->directory || lane_find(server, request->directory)) {
        have_lane(opening);
        return 0;
    }
    config_tier_default("parallel", request->directory, LEVEL_GLOBAL, &opening->lane_config);
    loop_work(server->loop, &opening->op, server->across, lane_work, lane_done);
    return 0;
}
