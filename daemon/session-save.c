/* SPDX-License-Identifier: Apache-2.0 */
/* A session that saves: its shared areas, its registered set, admission, pushes. */
#include "daemon/session-state.h"

#include <errno.h>
#include <sys/mman.h>

#define PROBE_PATIENCE_MS 10000
#define MISSED_MAX 1024         /* the library remembers far fewer */
#define URGENT_WAIT_MS 86400000 /* an urgent save waits: its client's deadline ends that */

/* ---- areas and sets ---- */

void session_handle_area(struct session *session, uint32_t serial, const struct message_area *message) {
    struct server *server = session->server;
    struct problem problem = PROBLEM_NONE;
    int r = 0;
    if (message->area >= AREAS_MAX || session->areas[message->area])
        r = problem_set(&problem, -EINVAL, "area %u is in use, or over the limit of %d areas", message->area,
                        AREAS_MAX);
    if (!r && server->areas == AREAS_TOTAL_MAX)
        r = problem_set(&problem, -E2BIG, "%d areas of all clients together are the limit", AREAS_TOTAL_MAX);
    if (!r)
        r = area_new(message->area, session->incoming.fd, message->size, &session->areas[message->area], &problem);
    if (r < 0) {
        session_error(session, serial, session_code(r), &problem);
        return;
    }
    server->areas++;
    session_reply_ok(session, serial);
}

void session_drop_area(struct session *session, uint32_t number) {
    if (!session->areas[number])
        return;
    area_unref(STEAL(session->areas[number])); /* sets and captures hold their own references */
    session->server->areas--;
}

void session_handle_area_drop(struct session *session, uint32_t serial, const struct message_area_drop *message) {
    if (message->area < AREAS_MAX)
        session_drop_area(session, message->area);
    session_reply_ok(session, serial);
}

/* Some capture has not come back from the memory of this process. */
static bool is_stuck_in(struct server *server, int pid) {
    struct job *job;
    struct version *version;
    struct part *part;
    TAILQ_FOREACH(job, &server->jobs, link)
    TAILQ_FOREACH(version, &job->versions, link)
    TAILQ_FOREACH(part, &version->parts, link)
    if (part->stuck && part->state == PART_CAPTURING && part->source.peer->pid == pid)
        return true;
    return false;
}

struct registration {
    struct loop_op op;
    struct session *session;
    uint32_t serial;
    struct message_register message;
    void *table;
    struct area *areas[AREAS_MAX]; /* as they are now: the session may end meanwhile */
    struct device_memory **memories;
    uint32_t memory_count;
    struct set *set;
    uint32_t opened; /* of the set's devices */
    int result, probe, open;
    struct problem problem, probe_problem;
    struct loop_op patience; /* for the probe, which reads the client's memory: it may never come back */
    bool answered, over;
    int probed; /* the worker's */
    struct problem probed_problem;
};

static void register_run(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    struct session *session = registration->session;
    const struct message_register *message = &registration->message;
    const struct image_identity identity = {.job = session->job->name, .rank = session->rank, .world = session->world};
    const struct set_options options = {
        .number = message->set,
        .count = message->count,
        .push = message->flags & REGISTER_PUSH,
        .identity = &identity,
        .areas = registration->areas,
        .memories = registration->memories,
        .memory_count = registration->memory_count,
    };
    registration->result =
        set_new(registration->table, message->table_size, &options, &registration->set, &registration->problem);
    if (registration->result || !registration->set->has_private)
        return;
    registration->set->nonce_address = message->nonce_address;
    registration->set->nonce = message->nonce;
}

static void registration_free(struct registration *registration) {
    struct session *session = registration->session;
    if (registration->table)
        munmap(registration->table, registration->message.table_size);
    for (size_t i = 0; i < AREAS_MAX; i++)
        if (registration->areas[i])
            area_unref(registration->areas[i]);
    for (uint32_t i = 0; i < registration->memory_count; i++)
        if (registration->memories[i])
            device_memory_unref(registration->memories[i]);
    free(registration->memories);
    free(registration);
    session_unhold(session);
}

/* Nothing but its timer may still be on the way. */
static void registration_end(struct registration *registration) {
    registration->over = true;
    if (loop_op_busy(&registration->patience))
        loop_cancel(registration->session->server->loop, &registration->patience);
    else
        registration_free(registration);
}

static void register_answer(struct registration *registration) {
    struct session *session = registration->session;
    struct set *set = STEAL(registration->set);
    if (session->ended) {
        if (set)
            set_unref(set);
    } else if (registration->result < 0) {
        session_error(session, registration->serial, session_code(registration->result), &registration->problem);
    } else {
        struct message_registered registered = {.set = set->number, .image_size = image_size(&set->layout, 0)};
        const char *why = "";
        if (registration->probe < 0) {
            registered.flags = REGISTERED_PRIVATE_REFUSED;
            why = registration->probe_problem.text;
            session->push_reason = registration->probe_problem;
            log_warning(session->server->log, "private memory cannot be read, the client must push: %s job=%s rank=%u",
                        why, session->job->name, session->rank);
        } else if (registration->open < 0) {
            registered.flags = REGISTERED_DEVICE_REFUSED;
            why = registration->probe_problem.text;
            session_device_refused(session, &registration->probe_problem);
        }
        if (registered.flags) {
            set_unref(set);
        } else {
            session_inadmissible(session);
            session_drop_set(session);
            session->set = set;
            if (set->device_count && !set->push) { /* memory that is there is pinned before it is needed */
                set->expected = registered.image_size;
                pool_expect(session->server->pool, set->expected);
            }
        }
        session_reply(session, MESSAGE_REGISTERED, registration->serial, &registered, why, strlen(why), -1);
    }
    registration->answered = true;
    session->suspended = false;
    session_receive_next(session);
}

static void register_over(struct registration *registration) {
    register_answer(registration);
    registration_end(registration);
}

static void register_open_next(struct registration *registration);

static void register_opened(struct import_open *open, int result, const struct problem *problem) {
    struct registration *registration = open->context;
    registration->open = result;
    if (result < 0)
        registration->probe_problem = *problem;
    register_open_next(registration);
}

/* Opens the set's memories, on one device after the other. */
static void register_open_next(struct registration *registration) {
    struct set *set = registration->set;
    if (registration->session->ended || registration->result < 0 || registration->probe < 0 || registration->open < 0 ||
        registration->opened == set->device_count) {
        register_over(registration);
        return;
    }
    registration->result = imports_open(set->devices[registration->opened++], set->memories, set->memory_count, NULL,
                                        register_opened, registration, &registration->problem);
    if (registration->result < 0) {
        set_unref(STEAL(registration->set));
        register_over(registration);
    }
}

/* A page that never comes (of a file on a dead server, say): the client is told to push, the worker is
 * left to it and replaced. */
static void probe_elapsed(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, patience);
    struct session *session = registration->session;
    if (registration->over) {
        registration_free(registration);
        return;
    }
    if (!loop_op_busy(&registration->op)) /* the probe was faster; devices are being opened */
        return;
    registration->probe = problem_set(&registration->probe_problem, -ETIMEDOUT,
                                      "the memory of process %d does not answer", session->peer->pid);
    (void)loop_group_relieve(session->server->probers);
    register_answer(registration);
}

static void probe_run(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    const struct message_register *message = &registration->message;
    registration->probed =
        peer_probe(registration->session->peer, message->nonce_address, message->nonce, &registration->probed_problem);
}

static void probe_done(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    if (registration->answered) {
        registration_end(registration);
        return;
    }
    registration->probe = registration->probed;
    registration->probe_problem = registration->probed_problem;
    register_open_next(registration);
}

static void probe_start(struct registration *registration) {
    struct session *session = registration->session;
    struct server *server = session->server;
    if (is_stuck_in(server, session->peer->pid)) {
        registration->probe = problem_set(&registration->probe_problem, -EBUSY,
                                          "a worker is stuck in the memory of process %d", session->peer->pid);
        register_open_next(registration);
        return;
    }
    uint64_t patience_ms = min_u64(PROBE_PATIENCE_MS, server->config->capture_ms);
    loop_timer(server->loop, &registration->patience, loop_now(server->loop) + patience_ms * NANOSECONDS_PER_MS,
               probe_elapsed);
    loop_work(server->loop, &registration->op, server->probers, probe_run, probe_done);
}

static void register_done(struct loop_op *op) {
    struct registration *registration = CONTAINER_OF(op, struct registration, op);
    if (!registration->session->ended && !registration->result && registration->set->has_private)
        probe_start(registration);
    else
        register_open_next(registration);
}

void session_handle_register(struct session *session, uint32_t serial, const struct message_register *message) {
    struct problem problem = PROBLEM_NONE;
    void *table = NULL;
    int r = 0;
    if (message->table_size > SHARDS_TABLE_MAX || message->count > SHARDS_COUNT_MAX)
        r = problem_set(&problem, -E2BIG, "a set of %u shards in %llu bytes is over the limit (%d shards, %llu bytes)",
                        message->count, (unsigned long long)message->table_size, SHARDS_COUNT_MAX,
                        (unsigned long long)SHARDS_TABLE_MAX);
    if (!r && message->table_size) /* of a set without shards there is nothing to map */
        r = wire_map(session->incoming.fd, message->table_size, true, &table, &problem);
    struct registration *registration = r ? NULL : calloc(1, sizeof *registration);
    struct device_memory **memories = session->memory_room ? calloc(session->memory_room, sizeof *memories) : NULL;
    if (!r && (!registration || (session->memory_room && !memories))) {
        if (table)
            munmap(table, message->table_size);
        free(registration);
        r = problem_set(&problem, -ENOMEM, "out of memory");
    }
    if (r < 0) {
        free(memories);
        session_error(session, serial, session_code(r), &problem);
        return;
    }
    registration->session = session;
    registration->serial = serial;
    registration->message = *message;
    registration->table = table;
    for (size_t i = 0; i < AREAS_MAX; i++)
        registration->areas[i] = session->areas[i] ? area_ref(session->areas[i]) : NULL;
    registration->memories = memories;
    registration->memory_count = session->memory_room;
    for (uint32_t i = 0; i < session->memory_room; i++)
        memories[i] = session->memories[i] ? device_memory_ref(session->memories[i]) : NULL;
    session->suspended = true;
    session_hold(session);
    loop_work(session->server->loop, &registration->op, session->server->names, register_run, register_done);
}

/* ---- saves ---- */

void session_captured(struct session *session, struct part *part) {
    if (session->part == part)
        session->part = NULL;
    sessions_admit(session->server);
    bool good = part_is_captured(part);
    struct message_captured captured = {
        .step = part->version->id.step,
        .result = good ? CODE_OK : CODE_E_LOST,
        .counter = part->counter,
    };
    session_reply(session, MESSAGE_CAPTURED, 0, &captured, part->problem.text, good ? 0 : strlen(part->problem.text),
                  -1);
    if (session->save.active)
        session_save_try(session);
}

void session_pushed(struct session *session, uint64_t image_offset, int32_t result) {
    if (!session->pusher)
        return;
    struct message_pushed pushed = {.image_offset = image_offset, .result = result};
    session_reply(session->pusher, MESSAGE_PUSHED, 0, &pushed, NULL, 0, -1);
}

/* What went wrong with earlier versions is told once to each session, with an answer. */
static const char *take_report(struct session *session) {
    if (session->report_number == session->job->report_number || session->save.message.flags & SAVE_ADMITTED)
        return "";
    session->report_number = session->job->report_number;
    return session->job->report.text;
}

static void save_trace(struct session *session, enum trace_kind kind, uint64_t begin_ns) {
    trace_add(session->server->trace, &(struct trace_record){.kind = kind,
                                                             .begin_ns = begin_ns,
                                                             .generation = session->job->run.generation,
                                                             .step = session->save.message.step,
                                                             .rank = session->rank,
                                                             .job = session->job->trace_name,
                                                             .tier = TRACE_NAME_NONE});
}

/* It waits no more; the answer comes next. */
static void save_over(struct session *session) {
    struct pending_save *save = &session->save;
    if (save->waits_since_ns)
        save_trace(session, TRACE_WAIT, save->waits_since_ns);
    save->waits_since_ns = 0;
    pool_unwait(session->server->pool, &save->waiter);
    loop_cancel(session->server->loop, &save->timer);
    save->active = false;
}

/* The step of this rank cannot be complete. */
static void step_absent(struct session *session, uint64_t step, const char *why) {
    struct version *version =
        job_version(session->job, (struct version_id){session->job->run.generation, step}, session->world);
    if (version && version->world == session->world && !version_find_part(version, session->rank))
        version_absent(version, session->rank, why);
}

/* The client has not waited for the answer: to it, this save is a capture that failed. Who was not admitted could make
 * as many steps absent as it likes. */
static void save_lost(struct session *session, const char *why) {
    const struct message_save *message = &session->save.message;
    (void)word_advance(session->word->page, message->counter, 0, WORD_FAILED);
    struct message_captured captured = {.step = message->step, .result = CODE_E_LOST, .counter = message->counter};
    if (session->save.admitted)
        step_absent(session, message->step, why);
    session_reply(session, MESSAGE_CAPTURED, 0, &captured, why, strlen(why), -1);
}

static void save_answer(struct session *session, int result, uint64_t image_size, const char *tail) {
    struct message_saved saved = {.result = result, .image_size = image_size};
    save_over(session);
    if (!(session->save.message.flags & SAVE_ADMITTED))
        session_reply(session, MESSAGE_SAVED, session->save.serial, &saved, tail, strlen(tail), -1);
    else if (result != CODE_OK)
        save_lost(session, result == CODE_ALREADY ? "the step was saved before" : tail);
    session->suspended = false;
    session_receive_next(session);
}

static void save_refuse(struct session *session, enum code code, const struct problem *problem) {
    save_over(session);
    if (session->save.message.flags & SAVE_ADMITTED)
        save_lost(session, problem->text);
    else
        session_error(session, session->save.serial, code, problem);
    session->suspended = false;
    session_receive_next(session);
}

static void save_skip(struct session *session) {
    struct version_id id = {session->job->run.generation, session->save.message.step};
    struct version *version = job_find_version(session->job, id);
    session->skipped++;
    session->server->counters.saves_skipped++;
    save_trace(session, TRACE_SKIPPED, 0);
    if (version && !session->save.admitted)
        version_absent(version, session->rank, "skipped: no room in the pool");
    save_answer(session, CODE_SKIPPED, 0,
                "no room in the pool: the tiers are slower than the saves, or the pool is small");
}

static void save_timer_start(struct session *session);

/* Also after a cancellation: by then the next save may be waiting, for which it starts again. */
static void save_timer_elapsed(struct loop_op *op) {
    struct session *session = CONTAINER_OF(op, struct session, save.timer);
    if (session->save.active && !session->ended) {
        if (loop_now(session->server->loop) >= session->save.deadline_ns)
            save_skip(session);
        else
            save_timer_start(session);
    }
    session_unhold(session);
}

static void save_timer_start(struct session *session) {
    if (loop_op_busy(&session->save.timer))
        return;
    session_hold(session);
    loop_timer(session->server->loop, &session->save.timer, session->save.deadline_ns, save_timer_elapsed);
}

static void save_room(struct pool_waiter *waiter) {
    session_save_try(CONTAINER_OF(waiter, struct session, save.waiter));
}

static int check_save(struct session *session, const struct message_save *message, struct area **ret_state_area,
                      struct problem *problem) {
    if (!session->set || session->set->number != message->set)
        return problem_set(problem, -EINVAL, "set %u is not registered", message->set);
    if (message->to > LEVEL_GLOBAL)
        return problem_set(problem, -EINVAL, "level %u does not exist", message->to);
    if (session->has_step && message->step < session->last_step && message->step > session->tier_step)
        return problem_set(problem, -EINVAL, "step %llu comes after step %llu: steps increase within a run",
                           (unsigned long long)message->step, (unsigned long long)session->last_step);
    if (message->step > INT64_MAX)
        return problem_set(problem, -EINVAL, "step %llu is over the limit of 2^63-1",
                           (unsigned long long)message->step);
    if (session->set->has_private && is_stuck_in(session->server, session->peer->pid))
        return problem_set(problem, -EFAULT,
                           "a worker is stuck in the memory of process %d: nothing more is read there",
                           session->peer->pid);
    if (session->set->push && !session->pusher)
        return problem_set(problem, -EINVAL, "the set is to be pushed, but no push connection is attached");
    *ret_state_area = NULL;
    if (!message->state_length || session->set->push)
        return message->state_length > IMAGE_STATE_MAX
                   ? problem_set(problem, -E2BIG, "inline state of %llu bytes is over the limit of %llu bytes",
                                 (unsigned long long)message->state_length, (unsigned long long)IMAGE_STATE_MAX)
                   : 0;
    struct area *area = message->state_area < AREAS_MAX ? session->areas[message->state_area] : NULL;
    if (!area || message->state_length > IMAGE_STATE_MAX || message->state_offset > area->size ||
        message->state_length > area->size - message->state_offset)
        return problem_set(problem, -EINVAL, "the inline state (%llu bytes) does not lie in a shared area",
                           (unsigned long long)message->state_length);
    *ret_state_area = area;
    return 0;
}

/* Tries to admit the save that waits. */
void session_save_try(struct session *session) {
    struct pending_save *save = &session->save;
    const struct message_save *message = &save->message;
    struct job *job = session->job;
    struct problem problem = PROBLEM_NONE;
    /* The client has given the last capture up, but it is still ours: session_captured tries again. */
    if (session->part) {
        save->active = false; /* not from within */
        bool over = part_revoked(session->part);
        save->active = true;
        if (!over)
            return;
    }
    struct area *state_area;
    int r = check_save(session, message, &state_area, &problem);
    if (r < 0) {
        save_refuse(session, session_code(r), &problem);
        return;
    }
    struct version_id id = {job->run.generation, message->step};
    struct version *version = job_version(job, id, session->world);
    if (version && version->world != session->world) {
        problem_set(&problem, -EEXIST,
                    "step %llu of this run was saved by %u ranks, you say %u: was its record deleted?",
                    (unsigned long long)message->step, version->world, session->world);
        save_refuse(session, CODE_E_CONFLICT, &problem);
        return;
    }
    struct part *before = version ? version_find_part(version, session->rank) : NULL;
    bool already = before ? before->state != PART_FAILED
                          : (session->has_step && message->step == session->last_step) ||
                                (session->has_tier_step && message->step <= session->tier_step);
    if (already) {
        save_answer(session, CODE_ALREADY, 0, take_report(session));
        return;
    }
    const struct part_options options = {
        .session = session,
        .rank = session->rank,
        .word = session->word,
        .counter = message->counter,
        .set = session->set,
        .peer = session->peer,
        .state_area = state_area,
        .state_offset = message->state_offset,
        .state_length = message->state_length,
        .urgent = message->flags & SAVE_URGENT,
        .forked = message->forks > 0,
        .check = message->flags & SAVE_CHECK,
        .held = message->flags & SAVE_HELD,
        .to = message->to,
    };
    struct part *part;
    r = version ? part_new(version, &options, &part, &problem) : problem_set(&problem, -ENOMEM, "out of memory");
    if (r == PART_E_BUSY) {
        pool_wait(session->server->pool, &save->waiter);
        return;
    }
    if (r < 0) {
        save_refuse(session, session_code(r), &problem);
        return;
    }
    session->part = part->state == PART_CAPTURING ? part : NULL;
    session->has_step = true;
    session->last_step = message->step;
    session->saves++;
    session->server->counters.saves_accepted++;
    session->admissible = part->push || part->windowed ? 0 : part->source.image_size;
    save_answer(session, CODE_OK, part->source.image_size, take_report(session));
    part_begin(part);
}

void session_handle_save(struct session *session, uint32_t serial, const struct message_save *message) {
    struct pending_save *save = &session->save;
    struct server *server = session->server;
    session_withdraw(session); /* taken, or it is asked */
    if (server->stopping && !(message->flags & SAVE_ADMITTED)) {
        struct problem problem = PROBLEM_NONE;
        problem_set(&problem, -ESHUTDOWN, "the daemon is stopping");
        session_error(session, serial, CODE_E_STOPPING, &problem);
        return;
    }
    save->active = true;
    save->admitted = session->admitted && message->flags & SAVE_ADMITTED;
    session->admitted = false;
    save->serial = serial;
    save->message = *message;
    save->waiter = (struct pool_waiter){.fn = save_room};
    session->suspended = true;
    uint64_t wait_ms =
        message->flags & SAVE_URGENT ? URGENT_WAIT_MS : min_u64(message->busy_deadline_ms, URGENT_WAIT_MS);
    save->deadline_ns = loop_now(server->loop) + wait_ms * NANOSECONDS_PER_MS;
    session_save_try(session);
    if (save->active) {
        save->waits_since_ns = loop_now(server->loop);
        save_timer_start(session);
    }
}

void session_handle_push(struct session *session, const struct message_push *message) {
    struct session *owner = session->push_of;
    struct part *part = owner ? owner->part : NULL;
    struct area *area = owner && message->area < AREAS_MAX ? owner->areas[message->area] : NULL;
    struct message_pushed pushed = {.image_offset = message->image_offset};
    if (!part || part->counter != message->counter || !area)
        pushed.result = CODE_E_LOST;
    else if (part_push(part, area, message->area_offset, message->image_offset, message->length) < 0)
        pushed.result = CODE_E_INVALID;
    if (pushed.result)
        session_reply(session, MESSAGE_PUSHED, 0, &pushed, NULL, 0, -1);
}

void session_handle_start(struct session *session, const struct message_start *message) {
    struct session *owner = session->open ? session : session->push_of;
    if (owner && owner->part && owner->part->counter == message->counter)
        part_start(owner->part);
}

void session_handle_missed(struct session *session, uint32_t serial, const struct message_missed *message) {
    struct problem problem = PROBLEM_NONE;
    if (session->missed == MISSED_MAX || message->step > INT64_MAX) {
        problem_set(&problem, -E2BIG, "%d missed steps are the limit of a session", MISSED_MAX);
        session_error(session, serial, CODE_E_LIMIT, &problem);
        return;
    }
    session->missed++;
    step_absent(session, message->step, "saved while no daemon could be reached");
    session_reply_ok(session, serial);
}
