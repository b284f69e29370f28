/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams. Work is queued, and done later by one thread for each device, in the order that streams promise and no
 * other: the youngest piece of work that may run is next, so that it overtakes what it does not wait for. May run: the
 * head of a stream, unless it waits for an event; between the legacy stream (NULL) and streams made without
 * NON_BLOCKING, the order of submission. Before each copy the thread rests a little, so that who does not wait for the
 * end reads poison, and who changes the source too early sees the change in the copy.
 */
#include "tests/cuda-standin/standin.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

struct CUstream_st *stream_new(struct context *context, unsigned int flags) {
    struct CUstream_st *stream = calloc(1, sizeof(*stream));
    stream->context = context;
    stream->flags = flags;
    TAILQ_INIT(&stream->queue);
    LIST_INSERT_HEAD(&standin.streams, stream, link);
    return stream;
}

static struct CUstream_st *stream_of_thread(struct context *context) {
    struct CUstream_st *stream;
    LIST_FOREACH(stream, &standin.streams, link) {
        if (stream->context == context && stream->thread == gettid())
            return stream;
    }
    stream = stream_new(context, CU_STREAM_DEFAULT);
    stream->thread = gettid();
    return stream;
}

struct CUstream_st *stream_resolve(CUstream handle, struct context *context) {
    if (!handle || handle == CU_STREAM_LEGACY)
        return context->legacy;
    if (handle == CU_STREAM_PER_THREAD)
        return stream_of_thread(context);
    struct CUstream_st *stream;
    LIST_FOREACH(stream, &standin.streams, link) {
        if (stream == handle)
            return !stream->destroyed && stream->context == context ? stream : NULL;
    }
    return NULL;
}

/* A copy from a device to the host is queued, or has left the queue. */
static void record(const struct CUstream_st *stream, const struct operation *operation, int change) {
    static int queued[DEVICES_MAX];
    char line[128];
    if (!standin.settings.record || operation->kind != OPERATION_COPY || !operation->from.device ||
        operation->to.device)
        return;
    int device = stream->context->device;
    queued[device] += change;
    snprintf(line, sizeof(line), "%s %d %d\n", program_invocation_short_name, device, queued[device]);
    registry_append("copies", line);
}

void stream_submit(struct CUstream_st *stream, struct operation *operation) {
    operation->sequence = ++standin.sequence;
    record(stream, operation, 1);
    TAILQ_INSERT_TAIL(&stream->queue, operation, link);
    pthread_cond_broadcast(&standin.changed);
}

static bool side_uses(const struct side *side, const struct operation *operation, uint64_t base, size_t size) {
    if (!operation->height)
        return false;
    size_t span = (operation->height - 1) * side->pitch + operation->width;
    return side->address < base + size && base < side->address + span;
}

bool stream_uses(uint64_t base, size_t size) {
    struct CUstream_st *stream;
    struct operation *operation;
    LIST_FOREACH(stream, &standin.streams, link) {
        TAILQ_FOREACH(operation, &stream->queue, link) {
            if ((operation->kind == OPERATION_COPY && side_uses(&operation->from, operation, base, size)) ||
                ((operation->kind == OPERATION_COPY || operation->kind == OPERATION_SET ||
                  operation->kind == OPERATION_FREE) &&
                 side_uses(&operation->to, operation, base, size)))
                return true;
        }
    }
    return false;
}

void stream_settle(uint64_t base, size_t size) {
    while (stream_uses(base, size))
        pthread_cond_wait(&standin.changed, &standin.lock);
}

/* What has not begun is never done. */
static void stream_drop(struct CUstream_st *stream) {
    struct operation *operation, *next;
    for (operation = TAILQ_FIRST(&stream->queue); operation; operation = next) {
        next = TAILQ_NEXT(operation, link);
        if (stream->running && operation == TAILQ_FIRST(&stream->queue))
            continue;
        TAILQ_REMOVE(&stream->queue, operation, link);
        record(stream, operation, -1);
        free(operation);
    }
    pthread_cond_broadcast(&standin.changed);
}

void stream_end_context(struct context *context) {
    struct CUstream_st *stream;
    LIST_FOREACH(stream, &standin.streams, link) {
        if (stream->context != context)
            continue;
        stream_drop(stream);
        while (stream->running)
            pthread_cond_wait(&standin.changed, &standin.lock);
        stream->destroyed = true;
    }
}

/* Whether older work of streams that this one follows is left. */
static bool stream_must_wait(struct CUstream_st *stream, uint64_t sequence) {
    if (stream->flags & CU_STREAM_NON_BLOCKING)
        return false;
    struct CUstream_st *other, *legacy = stream->context->legacy;
    LIST_FOREACH(other, &standin.streams, link) {
        struct operation *first = TAILQ_FIRST(&other->queue);
        if (other != stream && other->context == stream->context && first && first->sequence < sequence &&
            (stream == legacy ? !(other->flags & CU_STREAM_NON_BLOCKING) : other == legacy))
            return true;
    }
    return false;
}

static struct CUstream_st *stream_next(int device) {
    struct CUstream_st *stream, *best = NULL;
    LIST_FOREACH(stream, &standin.streams, link) {
        struct operation *first = TAILQ_FIRST(&stream->queue);
        if (!first || stream->context->device != device || stream->running)
            continue;
        if (first->kind == OPERATION_WAIT && first->event->done < first->event_count)
            continue;
        if (stream_must_wait(stream, first->sequence))
            continue;
        if (!best || first->sequence > TAILQ_FIRST(&best->queue)->sequence)
            best = stream;
    }
    return best;
}

static void rest(const struct operation *operation) {
    uint64_t nanoseconds = standin.settings.copy_delay_us * 1000;
    if (standin.settings.bandwidth_mib_s)
        nanoseconds +=
            operation->width * operation->height * NANOSECONDS_PER_SECOND / MIB(1) / standin.settings.bandwidth_mib_s;
    struct timespec pause = {.tv_sec = nanoseconds / NANOSECONDS_PER_SECOND,
                             .tv_nsec = nanoseconds % NANOSECONDS_PER_SECOND};
    if (nanoseconds)
        nanosleep(&pause, NULL);
}

/* Comes and goes with the lock, and does without it what takes time. */
static CUresult operation_run(struct operation *operation) {
    CUresult error = CUDA_SUCCESS;
    struct range *range;
    switch (operation->kind) {
    case OPERATION_COPY:
    case OPERATION_SET:
        pthread_mutex_unlock(&standin.lock);
        rest(operation);
        error = copy_run(operation);
        pthread_mutex_lock(&standin.lock);
        break;
    case OPERATION_HOST:
        pthread_mutex_unlock(&standin.lock);
        operation->function(operation->user_data);
        pthread_mutex_lock(&standin.lock);
        break;
    case OPERATION_RECORD:
        operation->event->done = max_u64(operation->event->done, operation->event_count);
        break;
    case OPERATION_FREE:
        range = range_find(operation->to.address);
        operation->height = 0; /* it uses the memory no longer */
        if (range && stream_uses(range->base, range->size))
            report_mistake("%#lx is freed in one stream while another copies", (unsigned long)range->base);
        if (range)
            range_end_now(range);
        break;
    case OPERATION_WAIT:
        break;
    }
    return error;
}

static void *device_thread(void *argument) {
    int device = (int)(intptr_t)argument;
    pthread_mutex_lock(&standin.lock);
    for (;;) {
        struct CUstream_st *stream = stream_next(device);
        if (!stream) {
            pthread_cond_wait(&standin.changed, &standin.lock);
            continue;
        }
        struct operation *operation = TAILQ_FIRST(&stream->queue);
        stream->running = true;
        bool sticky;
        int fault = faults_take("run", &sticky);
        if (fault == FAULT_HANG)
            faults_hang();
        if (fault > 0)
            stream->context->error = fault;
        if (!stream->context->error && !stream->context->destroyed)
            stream->context->error = operation_run(operation);
        TAILQ_REMOVE(&stream->queue, operation, link);
        record(stream, operation, -1);
        stream->running = false;
        free(operation);
        if (stream->context->error)
            stream_drop(stream);
        pthread_cond_broadcast(&standin.changed);
    }
    return NULL;
}

void stream_start_device(int device) {
    static bool started[DEVICES_MAX];
    if (started[device])
        return;
    started[device] = true;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, device_thread, (void *)(intptr_t)device) == 0)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

CUresult stream_wait_empty(struct CUstream_st *stream) {
    while (!TAILQ_EMPTY(&stream->queue) && !stream->context->error)
        pthread_cond_wait(&standin.changed, &standin.lock);
    return stream->context->error;
}

CUresult cuStreamCreateWithPriority(CUstream *ret_stream, unsigned int flags, int priority) {
    ENTER(NEEDS_CONTEXT);
    if (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_stream = stream_new(call.context, flags);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *ret_stream, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    if (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_stream = stream_new(call.context, flags);
    return CUDA_SUCCESS;
}

#define ENTER_STREAM(handle)                                                                                           \
    ENTER(NEEDS_CONTEXT);                                                                                              \
    struct CUstream_st *it = stream_resolve(handle, call.context);                                                     \
    if (!it)                                                                                                           \
        return CUDA_ERROR_INVALID_HANDLE;

CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER_STREAM(stream);
    if (it == call.context->legacy || it->thread)
        return CUDA_ERROR_INVALID_HANDLE;
    it->destroyed = true; /* what is queued is still done */
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER_STREAM(stream);
    return stream_wait_empty(it);
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER_STREAM(stream);
    return TAILQ_EMPTY(&it->queue) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ret_context) {
    ENTER(NEEDS_CONTEXT);
    if (stream_resolve(stream, call.context)) {
        *ret_context = context_handle(call.context);
        return CUDA_SUCCESS;
    }
    struct CUstream_st *it;
    LIST_FOREACH(it, &standin.streams, link) {
        if (it == stream && !it->destroyed) {
            *ret_context = context_handle(it->context);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *ret_status) {
    ENTER_STREAM(stream);
    *ret_status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static __thread CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    ENTER(NEEDS_INIT);
    CUstreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    ENTER_STREAM(stream);
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    struct operation *operation = calloc(1, sizeof(*operation));
    operation->kind = OPERATION_HOST;
    operation->function = function;
    operation->user_data = user_data;
    stream_submit(it, operation);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER(NEEDS_CONTEXT);
    struct CUstream_st *stream;
    LIST_FOREACH(stream, &standin.streams, link) {
        if (stream->context == call.context)
            stream_wait_empty(stream);
    }
    return call.context->error;
}
