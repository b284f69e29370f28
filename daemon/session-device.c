/* SPDX-License-Identifier: Apache-2.0 */
/* A session that has device memory: its descriptions, probes, and letting go. */
#include "daemon/session-state.h"

#include <errno.h>

#define MEMORIES_FIRST 64 /* room of the table when it is first needed */

static struct device_memory *find_memory(struct session *session, uint32_t number) {
    return number < session->memory_room ? session->memories[number] : NULL;
}

/* Room for this number. */
static int memories_grow(struct session *session, uint32_t number) {
    uint32_t room = session->memory_room ? session->memory_room : MEMORIES_FIRST;
    if (number < session->memory_room)
        return 0;
    while (room <= number)
        room *= 2;
    struct device_memory **memories = realloc(session->memories, room * sizeof *memories);
    if (!memories)
        return -ENOMEM;
    memset(memories + session->memory_room, 0, (room - session->memory_room) * sizeof *memories);
    session->memories = memories;
    session->memory_room = room;
    return 0;
}

static void drop_memory(struct session *session, uint32_t number) {
    struct device_memory *memory = STEAL(session->memories[number]);
    if (memory->kind == DEVICE_VMM)
        session->chunk_count -= memory->count;
    device_memory_unref(memory);
}

void session_drop_devices(struct session *session) {
    for (uint32_t i = 0; i < session->memory_room; i++)
        if (session->memories[i])
            drop_memory(session, i);
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++)
        if (session->device_pools[i])
            import_pool_unref(STEAL(session->device_pools[i]));
}

static int usable(struct session *session, struct problem *problem) {
    return session->server->config->device_use
               ? 0
               : problem_set(problem, -EPERM, "the daemon is configured to use no device (use = no in [device])");
}

static int handle_pool(struct session *session, const struct message_device_pool *message, struct problem *problem) {
    struct device *device;
    if (message->pool >= DEVICE_POOLS_MAX || session->device_pools[message->pool])
        return problem_set(problem, -EINVAL, "device pool %u is in use, or over the limit of %d", message->pool,
                           DEVICE_POOLS_MAX);
    int r = usable(session, problem);
    if (!r)
        r = devices_get(session->server->devices, message->uuid, &device, problem);
    if (r < 0)
        return r;
    r = import_pool_new(device, steal_fd(&session->incoming.fd), &session->device_pools[message->pool]);
    return r < 0 ? problem_set(problem, r, "out of memory") : 0;
}

static int handle_memory(struct session *session, const struct message_device_memory *message,
                         struct problem *problem) {
    struct device *device;
    if (message->memory >= DEVICE_MEMORIES_MAX || find_memory(session, message->memory))
        return problem_set(problem, -EINVAL, "device memory %u is in use, or over the limit of %d", message->memory,
                           DEVICE_MEMORIES_MAX);
    if (message->kind < DEVICE_LEGACY || message->kind > DEVICE_POOLED || !message->size || message->size > INT64_MAX)
        return problem_set(problem, -EINVAL, "device memory %u: kind %u of %llu bytes does not exist", message->memory,
                           message->kind, (unsigned long long)message->size);
    int r = usable(session, problem);
    if (!r)
        r = devices_get(session->server->devices, message->uuid, &device, problem);
    if (r < 0)
        return r;
    struct import_pool *pool = NULL;
    if (message->kind == DEVICE_POOLED) {
        pool = message->pool < DEVICE_POOLS_MAX ? session->device_pools[message->pool] : NULL;
        if (!pool || import_pool_device(pool) != device)
            return problem_set(problem, -EINVAL, "device memory %u: there is no pool %u on its device", message->memory,
                               message->pool);
    }
    r = memories_grow(session, message->memory);
    if (r < 0)
        return problem_set(problem, r, "out of memory");
    return device_memory_new(device, session->peer, message, pool, &session->memories[message->memory], problem);
}

static int handle_chunk(struct session *session, const struct message_device_chunk *message, struct problem *problem) {
    if (!find_memory(session, message->memory))
        return problem_set(problem, -EINVAL, "there is no device memory %u", message->memory);
    if (session->chunk_count == DEVICE_CHUNKS_MAX)
        return problem_set(problem, -E2BIG, "%d chunks of device memory are the limit", DEVICE_CHUNKS_MAX);
    int r = device_memory_add(&session->memories[message->memory], session->peer, message,
                              steal_fd(&session->incoming.fd), problem);
    if (!r)
        session->chunk_count++;
    return r;
}

static int handle_drop(struct session *session, const struct message_device_drop *message, struct problem *problem) {
    uint32_t number = message->number;
    if (message->flags & DEVICE_DROP_POOL) {
        if (number >= DEVICE_POOLS_MAX || !session->device_pools[number])
            return problem_set(problem, -EINVAL, "there is no device pool %u", number);
        import_pool_unref(STEAL(session->device_pools[number]));
        return 0;
    }
    if (!find_memory(session, number))
        return problem_set(problem, -EINVAL, "there is no device memory %u", number);
    drop_memory(session, number);
    return 0;
}

/* ---- what takes long: the session reads on when it is over ---- */

static void resume(struct session *session) {
    session->suspended = false;
    session_receive_next(session);
    session_unhold(session);
}

static void suspend(struct session *session) {
    session->suspended = true;
    session_hold(session);
}

void session_device_refused(struct session *session, const struct problem *problem) {
    session->push_reason = *problem;
    log_warning(session->server->log, "device memory cannot be read, the client must push: %s job=%s rank=%u",
                problem->text, session->job->name, session->rank);
}

struct probing {
    struct session *session;
    uint32_t serial;
    uint32_t memory;
};

static void probe_over(struct import_open *open, int result, const struct problem *problem) {
    CLEANUP(freep) struct probing *probing = open->context;
    struct session *session = probing->session;
    const char *why = result < 0 ? problem->text : "";
    struct message_device_probed probed = {
        .memory = probing->memory,
        .flags = result < 0 ? DEVICE_PROBED_REFUSED : 0,
        .context_bytes = open->job.device->facts.context_bytes,
    };
    if (result < 0 && !session->ended)
        session_device_refused(session, problem);
    session_reply(session, MESSAGE_DEVICE_PROBED, probing->serial, &probed, why, strlen(why), -1);
    resume(session);
}

static int handle_probe(struct session *session, uint32_t serial, const struct message_device_probe *message,
                        struct problem *problem) {
    struct device_memory *memory = find_memory(session, message->memory);
    if (!memory || message->offset > memory->size || memory->size - message->offset < sizeof message->nonce ||
        !device_memory_covers(memory, message->offset, sizeof message->nonce))
        return problem_set(problem, -EINVAL, "a nonce at %llu does not lie in device memory %u",
                           (unsigned long long)message->offset, message->memory);
    struct probing *probing = malloc(sizeof *probing);
    if (!probing)
        return problem_set(problem, -ENOMEM, "out of memory");
    *probing = (struct probing){.session = session, .serial = serial, .memory = message->memory};
    int r = imports_open(memory->device, &memory, 1, message, probe_over, probing, problem);
    if (r < 0)
        free(probing);
    else
        suspend(session);
    return r;
}

/* Behind all closes a job on each device that is busy, and again, since the last close is followed by
 * that of the context: when those have come back, all is given back. A capture that the client has given up has things
 * open until it has noticed, and its copies are over: that is waited for before. */
#define LET_GO_ROUNDS 2
#define LET_GO_LOOK_NS NANOSECONDS_PER_MS

struct letting_go {
    struct session *session;
    uint32_t serial;
    struct set *set; /* of what is waited for; NULL: nothing */
    struct loop_op timer;
    uint32_t waiting, rounds;
};

struct barrier {
    struct device_job job;
    struct letting_go *letting_go;
};

static void let_go_round(struct letting_go *letting_go);

static void let_go(struct letting_go *letting_go) {
    struct session *session = letting_go->session;
    if (--letting_go->waiting)
        return;
    if (++letting_go->rounds < LET_GO_ROUNDS) {
        let_go_round(letting_go);
        return;
    }
    session_reply_ok(session, letting_go->serial);
    resume(session);
    if (letting_go->set)
        set_unref(letting_go->set);
    free(letting_go);
}

static void barrier_run(struct device_job *job) { (void)job; }
static void barrier_done(struct device_job *job, int result, const struct problem *problem) {
    (void)result, (void)problem;
    let_go(CONTAINER_OF(job, struct barrier, job)->letting_go);
}
static void barrier_free(struct device_job *job) { free(CONTAINER_OF(job, struct barrier, job)); }

static void let_go_round(struct letting_go *letting_go) {
    struct device *device = NULL;
    letting_go->waiting = 1; /* until the end of this function */
    while ((device = devices_next(letting_go->session->server->devices, device))) {
        struct barrier *barrier = TAILQ_EMPTY(&device->jobs) ? NULL : calloc(1, sizeof *barrier);
        if (!barrier)
            continue;
        letting_go->waiting++;
        barrier->letting_go = letting_go;
        barrier->job =
            (struct device_job){.last = true, .run = barrier_run, .done = barrier_done, .free = barrier_free};
        device_submit(device, &barrier->job);
    }
    let_go(letting_go);
}

/* What a stuck device holds is not waited for. */
static bool is_in_use(const struct letting_go *letting_go) {
    const struct set *set = letting_go->set;
    if (!set || letting_go->session->ended)
        return false;
    for (uint32_t i = 0; i < set->device_count; i++)
        if (set->devices[i]->stuck)
            return false;
    return set->users > 0;
}

static void let_go_look(struct loop_op *op) {
    struct letting_go *letting_go = CONTAINER_OF(op, struct letting_go, timer);
    struct session *session = letting_go->session;
    struct loop *loop = session->server->loop;
    if (session->part)
        (void)part_revoked(session->part);
    if (is_in_use(letting_go))
        loop_timer(loop, &letting_go->timer, loop_now(loop) + LET_GO_LOOK_NS, let_go_look);
    else
        let_go_round(letting_go);
}

static int handle_release(struct session *session, uint32_t serial, struct problem *problem) {
    struct part *part = session->part;
    struct set *set = part ? part->source.set : session->set;
    struct letting_go *letting_go = calloc(1, sizeof *letting_go);
    if (!letting_go)
        return problem_set(problem, -ENOMEM, "out of memory");
    letting_go->session = session;
    letting_go->serial = serial;
    letting_go->set = set && (!part || part_given_up(part)) ? set_ref(set) : NULL;
    session_drop_set(session);
    session_drop_devices(session);
    suspend(session);
    let_go_look(&letting_go->timer);
    return 0;
}

static void handle_usage(struct session *session, uint32_t serial) {
    struct message_device_usage_is usage = {0};
    struct device *device = NULL;
    while ((device = devices_next(session->server->devices, device))) {
        usage.contexts += device->facts.context;
        usage.context_bytes += device->facts.context_bytes;
        usage.arena_bytes += device->facts.arena_size;
    }
    imports_count(session->memories, session->memory_room, &usage.imports, &usage.import_bytes);
    session_reply(session, MESSAGE_DEVICE_USAGE_IS, serial, &usage, NULL, 0, -1);
}

void session_handle_device(struct session *session, const struct wire_message *message) {
    struct problem problem = PROBLEM_NONE;
    const void *body = message->body;
    bool answered = false;
    int r = 0;
    switch ((enum opcode)message->opcode) {
    case MESSAGE_DEVICE_POOL:
        r = handle_pool(session, body, &problem);
        break;
    case MESSAGE_DEVICE_MEMORY:
        r = handle_memory(session, body, &problem);
        break;
    case MESSAGE_DEVICE_CHUNK:
        r = handle_chunk(session, body, &problem);
        break;
    case MESSAGE_DEVICE_DROP:
        r = handle_drop(session, body, &problem);
        break;
    case MESSAGE_DEVICE_PROBE:
        r = handle_probe(session, message->serial, body, &problem);
        answered = true;
        break;
    case MESSAGE_DEVICE_RELEASE:
        r = handle_release(session, message->serial, &problem);
        answered = true;
        break;
    default: /* MESSAGE_DEVICE_USAGE */
        handle_usage(session, message->serial);
        answered = true;
        break;
    }
    if (r < 0)
        session_error(session, message->serial, session_code(r), &problem);
    else if (!answered)
        session_reply_ok(session, message->serial);
}
