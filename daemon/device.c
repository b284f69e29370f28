/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's thread is a loop group of one: jobs come back through the loop like any other work.
 * Nothing on that thread has a deadline of its own. A watch on the control thread sees that a job has
 * been running for too long, whatever it hangs in, a call of the driver or a copy whose event never
 * comes; it abandons this job and those behind it, except what is owed to the driver. The memory that they may still
 * write to is theirs until they come back, if ever, so nobody else gets it.
 */
#include "daemon/device.h"

#include "daemon/arena.h"
#include "daemon/flight.h"
#include "daemon/pins.h"
#include "daemon/pool.h"
#include "daemon/server.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#define WATCHES_PER_DEADLINE 4
#define SPINS 200 /* looks at an event before the thread sleeps between them */
#define SPIN_SLEEP_NS 20000
#define CLOSE_AGAIN_NS NANOSECONDS_PER_SECOND

struct devices {
    struct server *server;
    struct device *list[DEVICES_MAX];
    uint32_t count;
    struct pins *pins;
    pthread_mutex_t mutex; /* the driver is loaded by whichever device thread comes first */
    _Atomic bool loaded;
    struct cuda cuda;
};

/* ---- on the device's thread ---- */

uint64_t device_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
}

void device_pause(uint32_t looks) {
    if (looks >= SPINS)
        nanosleep(&(struct timespec){.tv_nsec = SPIN_SLEEP_NS}, NULL);
}

const struct cuda *device_cuda(const struct device *device) { return &device->devices->cuda; }

static int driver_load(struct devices *devices, struct problem *problem) {
    pthread_mutex_lock(&devices->mutex);
    if (!devices->loaded) {
        cuda_init(&devices->cuda, NULL);
        devices->loaded = true;
    }
    pthread_mutex_unlock(&devices->mutex);
    return devices->cuda.state == CUDA_READY ? 0 : problem_set(problem, -ENODEV, "%s", devices->cuda.problem.text);
}

static void uuid_text(const uint8_t *uuid, const char *kind, char ret_text[DEVICE_TEXT_SIZE]) {
    char *at = ret_text + sprintf(ret_text, "%s-", kind);
    for (int i = 0; i < DEVICE_UUID_SIZE; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

/* The UUID of a MIG instance is that of no card; only the name says which it is. */
static bool is_instance(const char *name) { return strstr(name, " MIG ") != NULL; }

static CUresult look_at(const struct cuda *cuda, int ordinal, CUdevice *ret_number, CUuuid *ret_uuid,
                        char ret_name[DEVICE_NAME_MAX]) {
    CUresult result = cuda->cuDeviceGet(ret_number, ordinal);
    if (result == CUDA_SUCCESS)
        result = cuda->cuDeviceGetUuid_v2(ret_uuid, *ret_number);
    if (result == CUDA_SUCCESS && cuda->cuDeviceGetName(ret_name, DEVICE_NAME_MAX, *ret_number) != CUDA_SUCCESS)
        ret_name[0] = '\0';
    return result;
}

static int device_find(struct device *device, struct problem *problem) {
    const struct cuda *cuda = device_cuda(device);
    int count = 0;
    bool instances = false;
    char name[DEVICE_NAME_MAX], seen[DEVICE_TEXT_SIZE] = "none";
    CUresult result = cuda->cuDeviceGetCount(&count);
    for (int i = 0; result == CUDA_SUCCESS && i < count; i++) {
        CUdevice number;
        CUuuid uuid;
        result = look_at(cuda, i, &number, &uuid, name);
        if (result != CUDA_SUCCESS)
            continue;
        instances = is_instance(name);
        uuid_text((const uint8_t *)uuid.bytes, instances ? "MIG" : "GPU", seen);
        if (memcmp(uuid.bytes, device->uuid, sizeof uuid.bytes) != 0)
            continue;
        device->own.number = number;
        memcpy(device->own.facts.name, name, sizeof name);
        memcpy(device->own.facts.text, seen, sizeof seen);
        device->own.found = true;
        return 0;
    }
    if (result != CUDA_SUCCESS)
        return cuda_problem(cuda, result, problem, "cannot look at the devices");
    const char *wanted = device->own.facts.text + strlen("GPU-"); /* or an instance: who knows */
    return problem_set(
        problem, -ENODEV, "the daemon sees no device %s, but %s%s (%s)", wanted, seen, count > 1 ? " and others" : "",
        instances ? "a process that sees a MIG instance sees no other device: CUDA_VISIBLE_DEVICES says which"
                  : "CUDA_VISIBLE_DEVICES, or another container?");
}

static int check_mode(struct device *device, struct problem *problem) {
    const struct cuda *cuda = device_cuda(device);
    int mode = CU_COMPUTEMODE_DEFAULT;
    CUresult result = cuda->cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device->own.number);
    if (result != CUDA_SUCCESS)
        return cuda_problem(cuda, result, problem, "cannot read the compute mode");
    if (mode != CU_COMPUTEMODE_DEFAULT)
        return problem_set(problem, -EBUSY, "device %s has compute mode %d, which lets no second process use it",
                           device->own.facts.text, mode);
    return 0;
}

/* Everything in it goes with it: imports, the arena; registrations before. */
static void context_drop(struct device *device, bool spoiled) {
    const struct cuda *cuda = device_cuda(device);
    if (!device->own.context)
        return;
    if (spoiled) { /* every call fails */
        pins_forget(device);
    } else {
        if (device->own.facts.arena)
            (void)cuda->cuMemFree_v2(device->own.facts.arena);
        flights_close(device);
        (void)cuda->cuEventDestroy_v2(device->own.event);
        (void)cuda->cuStreamDestroy_v2(device->own.stream);
    }
    (void)cuda->cuCtxPopCurrent_v2(NULL);
    (void)cuda->cuDevicePrimaryCtxRelease_v2(device->own.number);
    device->own.context = NULL;
    device->own.facts.context = false;
    device->own.facts.context_bytes = 0;
    device->own.facts.arena = 0;
    device->own.facts.arena_size = 0;
}

static void arena_make(struct device *device) {
    const struct cuda *cuda = device_cuda(device);
    uint64_t size = device->server->config->arena_size;
    struct problem problem = PROBLEM_NONE;
    if (!size)
        return;
    CUresult result = cuda->cuMemAlloc_v2(&device->own.facts.arena, size);
    if (result == CUDA_SUCCESS) {
        device->own.facts.arena_size = size;
        return;
    }
    device->own.facts.arena = 0;
    cuda_problem(cuda, result, &problem, "cuMemAlloc");
    log_warning(device->server->log, "no arena of %llu MiB on device %s: %s", (unsigned long long)(size >> 20),
                device->own.facts.text, problem.text);
}

/* Leaves the context current. */
static int context_make(struct device *device, struct problem *problem) {
    const struct cuda *cuda = device_cuda(device);
    int r = device->own.found ? 0 : device_find(device, problem);
    if (!r)
        r = check_mode(device, problem);
    if (r < 0)
        return r;
    CUcontext context;
    CUresult result = cuda->cuDevicePrimaryCtxRetain(&context, device->own.number);
    if (result != CUDA_SUCCESS)
        return cuda_problem(cuda, result, problem, "cannot make a context (cuDevicePrimaryCtxRetain)");
    result = cuda->cuCtxPushCurrent_v2(context);
    if (result == CUDA_SUCCESS) {
        result = cuda->cuStreamCreate(&device->own.stream, CU_STREAM_NON_BLOCKING);
        if (result == CUDA_SUCCESS)
            result = cuda->cuEventCreate(&device->own.event, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS)
            result = flights_open(device);
        if (result != CUDA_SUCCESS)
            (void)cuda->cuCtxPopCurrent_v2(NULL);
    }
    if (result != CUDA_SUCCESS) {
        (void)cuda->cuDevicePrimaryCtxRelease_v2(device->own.number);
        return cuda_problem(cuda, result, problem, "cannot make a stream");
    }
    device->own.context = context;
    device->own.facts.context = true;
    device->own.facts.generation++;
    device->own.unmeasured = true;
    device->own.facts.context_bytes = device->own.context_cost;
    arena_make(device);
    return 0;
}

int device_result(struct device *device, CUresult result, struct problem *problem, const char *what) {
    int r = cuda_problem(device_cuda(device), result, problem, what);
    if (cuda_is_sticky(result))
        context_drop(device, true);
    return r;
}

int device_wait(struct device *device, struct problem *problem) {
    const struct cuda *cuda = device_cuda(device);
    CUresult result = cuda->cuEventRecord(device->own.event, device->own.stream);
    for (uint32_t looks = 0; result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY; looks++) {
        result = cuda->cuEventQuery(device->own.event);
        if (result == CUDA_SUCCESS)
            return 0;
        if (result == CUDA_ERROR_NOT_READY)
            device_pause(looks);
    }
    return device_result(device, result, problem, "a copy out of device memory");
}

uint64_t device_pace(struct device *device, uint64_t bytes) {
    uint64_t rate = device->server->config->device_rate_mib_s, now = device_now();
    if (rate && device->own.next_ns > now)
        return device->own.next_ns - now;
    if (rate)
        device->own.next_ns = now + bytes * NANOSECONDS_PER_SECOND / MIB(rate);
    device->own.facts.copied_bytes += bytes;
    return 0;
}

void device_measure(struct device *device, uint64_t free_before) {
    size_t free_now, total;
    uint64_t arena = device->own.facts.arena_size;
    bool known = device->own.unmeasured && free_before &&
                 device_cuda(device)->cuMemGetInfo_v2(&free_now, &total) == CUDA_SUCCESS;
    if (known && free_before > free_now + arena)
        device->own.facts.context_bytes = device->own.context_cost = free_before - free_now - arena;
    device->own.unmeasured = false;
}

static void job_run(struct loop_op *op) {
    struct device_job *job = CONTAINER_OF(op, struct device_job, op);
    struct device *device = job->device;
    if (!job->flying && !job->last)
        device->waiting--;
    if (job->abandoned && !job->flying)
        return;
    job->running = true;
    job->result = 0;
    job->problem = PROBLEM_NONE;
    if (job->flying) {
        if (device->own.context && device_cuda(device)->cuCtxPushCurrent_v2(device->own.context) != CUDA_SUCCESS)
            context_drop(device, true); /* with all that was under way in it */
    } else if (job->needs_context) {
        job->result = driver_load(device->devices, &job->problem);
        if (!job->result && device->own.context)
            job->result = device_result(device, device_cuda(device)->cuCtxPushCurrent_v2(device->own.context),
                                        &job->problem, "cuCtxPushCurrent");
        else if (!job->result)
            job->result = context_make(device, &job->problem);
    }
    if (!job->result)
        job->run(job);
    if (device->own.context && job->needs_context)
        (void)device_cuda(device)->cuCtxPopCurrent_v2(NULL);
    job->facts = device->own.facts;
}

/* ---- on the control thread ---- */

static void watch_start(struct device *device);

static void abandon(struct device *device, struct device_job *job) {
    struct problem problem = PROBLEM_NONE;
    job->abandoned = true;
    job->done(job, problem_set(&problem, -ETIMEDOUT, "device %s does not answer", device->facts.text), &problem);
}

static void watch_elapsed(struct loop_op *op) {
    struct device *device = CONTAINER_OF(op, struct device, watch);
    struct server *server = device->server;
    uint64_t now = loop_now(server->loop);
    struct device_job *job = TAILQ_FIRST(&device->jobs);
    if (!job || device->stuck)
        return;
    if (job != device->watched || !job->running) {
        device->watched = job;
        device->watched_since_ns = now;
    } else if (now - device->watched_since_ns >= server->config->device_ms * NANOSECONDS_PER_MS) {
        device->stuck = true;
        problem_set(&device->problem, -ETIMEDOUT, "it has not answered for %llu ms: its jobs are abandoned",
                    (unsigned long long)server->config->device_ms);
        log_error(server->log, "device %s is stuck: %s", device->facts.text, device->problem.text);
        TAILQ_FOREACH(job, &device->jobs, link)
        if (!job->abandoned && !job->owed)
            abandon(device, job);
        return;
    }
    watch_start(device);
}

static void watch_start(struct device *device) {
    if (!loop_op_busy(&device->watch) && !TAILQ_EMPTY(&device->jobs) && !device->stuck)
        loop_timer(device->server->loop, &device->watch,
                   loop_now(device->server->loop) +
                       device->server->config->device_ms * NANOSECONDS_PER_MS / WATCHES_PER_DEADLINE,
                   watch_elapsed);
}

static void job_over(struct device_job *job) {
    if (!loop_op_busy(&job->op) && !job->waiting)
        job->free(job);
}

/* The arena is the context's: it comes and goes with it, but never while somebody has a place in it,
 * unless the context was spoiled. */
static void take_facts(struct device *device, const struct device_job *job) {
    uint32_t generation = device->facts.generation;
    device->facts = job->facts;
    if (device->facts.generation != generation)
        device->pinning.next = 0;
    pins_look(device);
    if (device->facts.generation != generation || !device->facts.arena)
        arena_reset(device->arena, device->facts.arena ? device->facts.arena_size : 0);
}

static void put_to_work(struct device *device, struct device_job *job);

/* One that was overtaken while its copies were under way. */
static bool has_older(const struct device *device, const struct device_job *than) {
    const struct device_job *job;
    TAILQ_FOREACH(job, &device->jobs, link)
    if (job->number < than->number)
        return true;
    return false;
}

static void job_done(struct loop_op *op) {
    struct device_job *job = CONTAINER_OF(op, struct device_job, op);
    struct device *device = job->device;
    TAILQ_REMOVE(&device->jobs, job, link);
    job->running = false;
    if (job->flying || (job->last && !job->abandoned && has_older(device, job))) {
        put_to_work(device, job);
        return;
    }
    if (device->stuck && TAILQ_EMPTY(&device->jobs)) {
        device->stuck = false;
        log_info(device->server->log, "device %s answers again", device->facts.text);
    }
    if (job->abandoned) {
        job->free(job);
        return;
    }
    take_facts(device, job);
    job->done(job, job->result, &job->problem);
    job_over(job);
}

static void put_to_work(struct device *device, struct device_job *job) {
    TAILQ_INSERT_TAIL(&device->jobs, job, link);
    loop_work(device->server->loop, &job->op, device->group, job_run, job_done);
    watch_start(device);
}

static void refused(struct loop_op *op) {
    struct device_job *job = CONTAINER_OF(op, struct device_job, op);
    abandon(job->device, job);
    job_over(job);
}

void device_submit(struct device *device, struct device_job *job) {
    job->device = device;
    job->running = job->abandoned = job->flying = false;
    if (device->watched == job)
        device->watched = NULL;
    if (device->stuck && !job->owed) {
        loop_post(device->server->loop, &job->op, 0, refused);
        return;
    }
    job->number = ++device->submitted;
    if (!job->last)
        device->waiting++;
    put_to_work(device, job);
}

static void later_elapsed(struct loop_op *op) {
    struct device_job *job = CONTAINER_OF(op, struct device_job, timer);
    job->waiting = false;
    device_submit(job->device, job);
}

void device_submit_later(struct device_job *job, uint64_t after_ns) {
    struct loop *loop = job->device->server->loop;
    job->waiting = true;
    loop_timer(loop, &job->timer, loop_now(loop) + after_ns, later_elapsed);
}

void device_use(struct device *device) { device->users++; }

struct closing {
    struct device_job job;
};

static void close_run(struct device_job *job) {
    struct device *device = job->device;
    if (!device->own.context || device->users) /* what they have opened is in it */
        return;
    (void)device_cuda(device)->cuCtxPushCurrent_v2(device->own.context);
    if (pins_drop(device)) {
        context_drop(device, false);
        return;
    }
    (void)device_cuda(device)->cuCtxPopCurrent_v2(NULL);
    job->result = -EAGAIN;
}

static void close_done(struct device_job *job, int result, const struct problem *problem) {
    (void)problem;
    if (result == -EAGAIN)
        device_submit_later(job, CLOSE_AGAIN_NS);
    else
        pins_look_again(job->device->devices);
}

static void close_free(struct device_job *job) { free(CONTAINER_OF(job, struct closing, job)); }

void device_unuse(struct device *device) {
    assert(device->users);
    if (--device->users)
        return;
    struct closing *closing = calloc(1, sizeof *closing);
    if (!closing) /* the context stays until the next last user goes */
        return;
    closing->job = (struct device_job){.owed = true, .run = close_run, .done = close_done, .free = close_free};
    device_submit(device, &closing->job);
}

void device_report(struct device *device, const struct problem *problem, const char *what) {
    device->problem = *problem;
    log_warning(device->server->log, "%s: %s device=%s", what, problem->text, device->facts.text);
}

/* ---- the list ---- */

static void pool_grew(void *context) {
    struct devices *devices = context;
    for (uint32_t i = 0; i < devices->count; i++)
        pins_look(devices->list[i]);
}

int devices_new(struct server *server, struct devices **ret_devices) {
    struct devices *devices = calloc(1, sizeof *devices);
    if (!devices)
        return -ENOMEM;
    devices->server = server;
    pthread_mutex_init(&devices->mutex, NULL);
    int r = pins_new(&devices->pins);
    if (r < 0) {
        devices_free(devices);
        return r;
    }
    pool_on_prefault(server->pool, pool_grew, devices);
    *ret_devices = devices;
    return 0;
}

void devices_free(struct devices *devices) {
    if (!devices)
        return;
    assert(!devices->count);
    pins_free(devices->pins);
    pthread_mutex_destroy(&devices->mutex);
    free(devices);
}

static void name_device(struct device *device, const uint8_t *uuid) {
    memcpy(device->uuid, uuid, DEVICE_UUID_SIZE);
    device->own.found = false; /* what was, is another */
    device->facts = (struct device_facts){0};
    uuid_text(uuid, "GPU", device->facts.text);
    device->own.facts = device->facts;
}

static int device_new(struct devices *devices, struct device **ret_device) {
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return -ENOMEM;
    device->devices = devices;
    device->server = devices->server;
    device->pins = devices->pins;
    int r = arena_new(&device->arena);
    if (!r)
        r = loop_group_new(device->server->loop, "device", 1, 1, &device->group);
    if (r < 0) {
        arena_free(device->arena);
        free(device);
        return r;
    }
    TAILQ_INIT(&device->jobs);
    TAILQ_INIT(&device->imports);
    *ret_device = device;
    return 0;
}

int devices_get(struct devices *devices, const uint8_t uuid[DEVICE_UUID_SIZE], struct device **ret_device,
                struct problem *problem) {
    struct device *idle = NULL; /* one that nobody has found and nobody uses: perhaps it never existed */
    for (uint32_t i = 0; i < devices->count; i++) {
        struct device *device = devices->list[i];
        if (memcmp(device->uuid, uuid, DEVICE_UUID_SIZE) == 0) {
            *ret_device = device;
            return 0;
        }
        if (!device->users && TAILQ_EMPTY(&device->jobs) && !device->facts.generation)
            idle = device;
    }
    if (!idle) {
        if (devices->count == DEVICES_MAX)
            return problem_set(problem, -E2BIG, "%d devices are the limit", DEVICES_MAX);
        int r = device_new(devices, &idle);
        if (r < 0)
            return problem_set(problem, r, "cannot start a thread for a device: %s", strerror(-r));
        devices->list[devices->count++] = idle;
    }
    idle->problem = PROBLEM_NONE;
    name_device(idle, uuid);
    *ret_device = idle;
    return 0;
}

struct device *devices_next(struct devices *devices, const struct device *after) {
    uint32_t i = 0;
    while (after && i < devices->count && devices->list[i++] != after)
        ;
    return i < devices->count ? devices->list[i] : NULL;
}

const char *devices_state(struct devices *devices, const char **ret_reason) {
    *ret_reason = "";
    if (!devices->loaded)
        return "not used yet";
    *ret_reason = devices->cuda.problem.text;
    return cuda_state_name(devices->cuda.state);
}
