/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The states of segments are under a lock, the driver's slow calls are not. While a thread registers a
 * segment, others that need it wait for it, but not for ever, since it may be that its device hangs: then they
 * copy to the memory as it is. Nobody waits for one that he does not need.
 *
 * Memory must not be given back to the driver while a copy engine writes to it, and the engines of all
 * devices do, whoever registered it. So a context that is to go first keeps new copies from being queued,
 * for as long as those under way take to land: they come back a little later. Where one does not land (a
 * device hangs) the context stays, and is tried again; one device that hangs costs others no captures.
 */
#include "daemon/pins.h"

#include "daemon/pool.h"
#include "daemon/server.h"

#include <errno.h>
#include <pthread.h>

#define DROP_PATIENCE_NS (NANOSECONDS_PER_SECOND / 2) /* two pieces take a few ms */
#define CLAIM_PATIENCE_NS NANOSECONDS_PER_SECOND
#define CLAIM_PATIENCE_PART 4 /* at most, of the device's deadline: who waits is not to be taken for one that hangs */
#define IDLE_NS (5 * NANOSECONDS_PER_MS)

enum pin_state { PIN_NONE, PIN_IN_WORK, PIN_DONE, PIN_FAILED };

struct pins {
    pthread_mutex_t mutex;
    uint32_t uses, drops; /* pieces under way; contexts that are about to go */
    struct {
        enum pin_state state;
        const struct device *device; /* in whose context */
        uint64_t size;
    } segments[POOL_SEGMENTS_MAX];
};

int pins_new(struct pins **ret_pins) {
    struct pins *pins = calloc(1, sizeof *pins);
    if (!pins)
        return -ENOMEM;
    pthread_mutex_init(&pins->mutex, NULL);
    *ret_pins = pins;
    return 0;
}

void pins_free(struct pins *pins) {
    if (!pins)
        return;
    pthread_mutex_destroy(&pins->mutex);
    free(pins);
}

/* ---- on a device's thread ---- */

bool pins_use(struct pins *pins) {
    pthread_mutex_lock(&pins->mutex);
    bool allowed = !pins->drops;
    pins->uses += allowed;
    pthread_mutex_unlock(&pins->mutex);
    return allowed;
}

void pins_unuse(struct pins *pins) {
    pthread_mutex_lock(&pins->mutex);
    assert(pins->uses);
    pins->uses--;
    pthread_mutex_unlock(&pins->mutex);
}

/* True: the caller is to register it. False: that is done, has failed, or takes another one too long. */
static bool claim(struct pins *pins, const struct device *device, uint32_t segment) {
    uint64_t deadline_ns = device->server->config->device_ms * NANOSECONDS_PER_MS;
    uint64_t until_ns = device_now() + min_u64(CLAIM_PATIENCE_NS, deadline_ns / CLAIM_PATIENCE_PART);
    for (uint32_t looks = 0;; looks++) {
        pthread_mutex_lock(&pins->mutex);
        enum pin_state state = pins->segments[segment].state;
        if (state == PIN_NONE) {
            pins->segments[segment].state = PIN_IN_WORK;
            pins->segments[segment].device = device;
        } else if (state == PIN_IN_WORK && device_now() > until_ns) {
            state = pins->segments[segment].state = PIN_FAILED; /* until it comes back after all */
        }
        pthread_mutex_unlock(&pins->mutex);
        if (state != PIN_IN_WORK)
            return state == PIN_NONE;
        device_pause(looks);
    }
}

static void settle(struct pins *pins, uint32_t segment, enum pin_state state, uint64_t size) {
    pthread_mutex_lock(&pins->mutex);
    pins->segments[segment].state = state;
    pins->segments[segment].size = size;
    pthread_mutex_unlock(&pins->mutex);
}

void pins_make(struct device *device, uint32_t segment, void *data, uint64_t size) {
    struct pins *pins = device->pins;
    if (!device->server->config->device_pin || !claim(pins, device, segment))
        return;
    CUresult result = device_cuda(device)->cuMemHostRegister_v2(data, size, CU_MEMHOSTREGISTER_PORTABLE);
    settle(pins, segment, result == CUDA_SUCCESS ? PIN_DONE : PIN_FAILED, size);
    if (result == CUDA_SUCCESS) {
        device->own.facts.pinned_bytes += size;
        return;
    }
    if (result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) /* in a context that was spoiled: as good */
        return;
    struct problem problem = PROBLEM_NONE;
    device_result(device, result, &problem, "cuMemHostRegister");
    log_warning(device->server->log, "a segment of the pool stays unpinned, copies are slower: %s device=%s",
                problem.text, device->own.facts.text);
}

/* Nobody begins a copy from now on, and those under way have landed. False: they do not. */
static bool await_copies(struct pins *pins) {
    uint64_t until_ns = device_now() + DROP_PATIENCE_NS;
    for (uint32_t looks = 0;; looks++) {
        pthread_mutex_lock(&pins->mutex);
        uint32_t uses = pins->uses;
        pthread_mutex_unlock(&pins->mutex);
        if (!uses || device_now() > until_ns)
            return !uses;
        device_pause(looks);
    }
}

static void drops_add(struct pins *pins, int change) {
    pthread_mutex_lock(&pins->mutex);
    pins->drops += (uint32_t)change;
    pthread_mutex_unlock(&pins->mutex);
}

/* Meanwhile nobody else touches those of this device. */
static void forget(struct device *device, bool unregister) {
    struct pins *pins = device->pins;
    for (uint32_t i = 0; i < POOL_SEGMENTS_MAX; i++) {
        pthread_mutex_lock(&pins->mutex);
        enum pin_state state = pins->segments[i].device == device ? pins->segments[i].state : PIN_NONE;
        pthread_mutex_unlock(&pins->mutex);
        if (state == PIN_NONE)
            continue;
        if (state == PIN_DONE && unregister)
            (void)device_cuda(device)->cuMemHostUnregister(pool_segment_data(device->server->pool, i));
        settle(pins, i, PIN_NONE, 0);
    }
    device->own.facts.pinned_bytes = 0;
}

bool pins_drop(struct device *device) {
    struct pins *pins = device->pins;
    bool alone = true;
    drops_add(pins, 1);
    if (device->own.facts.pinned_bytes)
        alone = await_copies(pins);
    if (alone)
        forget(device, true);
    drops_add(pins, -1);
    return alone;
}

void pins_forget(struct device *device) { forget(device, false); }

static void pin_run(struct device_job *job) {
    struct device *device = job->device;
    if (!device->own.context)
        return;
    (void)device_cuda(device)->cuCtxPushCurrent_v2(device->own.context);
    pins_make(device, device->pinning.segment, device->pinning.data, device->pinning.size);
    if (device->own.context)
        (void)device_cuda(device)->cuCtxPopCurrent_v2(NULL);
}

/* ---- on the control thread ---- */

static void pin_done(struct device_job *job, int result, const struct problem *problem) {
    (void)result, (void)problem;
    job->device->pinning.at_work = false;
}

static void pin_free(struct device_job *job) { (void)job; }

static bool something_left(const struct device *device) {
    return device->server->config->device_pin && device->facts.context && !device->stuck && !device->pinning.at_work &&
           device->pinning.next < pool_prefaulted(device->server->pool);
}

static void idle_elapsed(struct loop_op *op) {
    struct device *device = CONTAINER_OF(op, struct device, pinning.timer);
    struct pool *pool = device->server->pool;
    if (!something_left(device))
        return;
    if (!TAILQ_EMPTY(&device->jobs) || device->transfers) { /* a capture does not wait for it */
        pins_look(device);
        return;
    }
    device->pinning.segment = device->pinning.next++;
    device->pinning.data = pool_segment_data(pool, device->pinning.segment);
    device->pinning.size = pool_segment_size(pool, device->pinning.segment);
    device->pinning.at_work = true;
    device->pinning.job = (struct device_job){.run = pin_run, .done = pin_done, .free = pin_free};
    device_submit(device, &device->pinning.job);
}

void pins_look(struct device *device) {
    struct loop *loop = device->server->loop;
    if (something_left(device) && !loop_op_busy(&device->pinning.timer))
        loop_timer(loop, &device->pinning.timer, loop_now(loop) + IDLE_NS, idle_elapsed);
}

void pins_look_again(struct devices *devices) {
    struct device *device = NULL;
    while ((device = devices_next(devices, device))) {
        device->pinning.next = 0;
        pins_look(device);
    }
}
