/* SPDX-License-Identifier: Apache-2.0 */
#include "client/device.h"

#include "client/await.h"
#include "client/errors.h"

/*
 * The context of a device is that of the first pointer that was seen in it; memory that belongs to no
 * context (mapped ranges, pools) is reached through the primary one.
 */

bool devices_ready(struct devices *devices) {
    if (devices->ready || devices->cuda.state != CUDA_NO_DRIVER)
        return devices->ready;
    uint64_t loads = cuda_loads();
    if (loads != devices->loads) {
        devices->loads = loads;
        cuda_init_loaded(&devices->cuda, NULL);
        devices->ready = devices->cuda.state == CUDA_READY;
    }
    return devices->ready;
}

int devices_result(const struct devices *devices, CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return CKPT_OK;
    struct problem problem = PROBLEM_NONE;
    int r = cuda_problem(&devices->cuda, result, &problem, what);
    return error_set(CKPT_E_LOST, "%s", problem_text(&problem, r));
}

/* While some thread of the program captures a graph, a call that might disturb a capture is refused in all threads that
 * have not said otherwise, and spoils the graph. Ours touch nothing of the program's streams, so we say so, for as
 * long as we are inside. */
static __thread struct {
    unsigned depth;
    CUstreamCaptureMode theirs;
} inside;

static int context_enter(const struct devices *devices, CUcontext context) {
    int r = devices_result(devices, devices->cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
    if (r < 0 || inside.depth++ > 0)
        return r;
    inside.theirs = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)devices->cuda.cuThreadExchangeStreamCaptureMode(&inside.theirs);
    return CKPT_OK;
}

int device_enter(const struct devices *devices, int device) {
    return context_enter(devices, devices->items[device].context);
}

void device_leave(const struct devices *devices) {
    CUcontext context;
    if (--inside.depth == 0)
        (void)devices->cuda.cuThreadExchangeStreamCaptureMode(&inside.theirs);
    (void)devices->cuda.cuCtxPopCurrent_v2(&context);
}

static void device_meet(struct devices *devices, int device, CUcontext context) {
    const struct cuda *cuda = &devices->cuda;
    CUdevice handle;
    CUuuid uuid;
    if (cuda->cuDeviceGet(&handle, device) != CUDA_SUCCESS || cuda->cuDeviceGetUuid_v2(&uuid, handle) != CUDA_SUCCESS)
        return;
    bool retained = !context;
    if (retained && cuda->cuDevicePrimaryCtxRetain(&context, handle) != CUDA_SUCCESS)
        return;
    struct device *item = &devices->items[device];
    *item = (struct device){.known = true, .retained = retained, .context = context};
    memcpy(item->uuid, &uuid, sizeof uuid);
}

int devices_find(struct devices *devices, const void *pointer) {
    if (!devices_ready(devices))
        return DEVICE_HOST;
    unsigned int type = 0, managed = 0;
    int device = DEVICE_HOST;
    CUcontext context = NULL;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT};
    void *values[] = {&type, &managed, &device, &context};
    CUresult result = devices->cuda.cuPointerGetAttributes(ARRAY_SIZE(attributes), attributes, values,
                                                           (CUdeviceptr)(uintptr_t)pointer);
    if (result != CUDA_SUCCESS || (type != CU_MEMORYTYPE_DEVICE && !managed) || device < 0 || device >= DEVICES_MAX)
        return DEVICE_HOST;
    if (!devices->items[device].known)
        device_meet(devices, device, context);
    return devices->items[device].known ? device : DEVICE_HOST;
}

/* ---- marks ---- */

static void mark_drop(const struct devices *devices, const struct device_mark *mark) {
    if (!mark->event || device_enter(devices, mark->device) < 0)
        return;
    (void)devices->cuda.cuEventDestroy_v2(mark->event);
    device_leave(devices);
}

static int mark_make(struct devices *devices, struct device_mark *mark, int device) {
    const struct cuda *cuda = &devices->cuda;
    if (mark->event && mark->device == device)
        return CKPT_OK;
    mark_drop(devices, mark);
    *mark = (struct device_mark){.device = device};
    return devices_result(devices, cuda->cuEventCreate(&mark->event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

/* The device's context is current. */
static int mark_record(struct devices *devices, int device, CUstream stream) {
    const struct cuda *cuda = &devices->cuda;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    if (devices->mark_count == DEVICE_MARKS_MAX)
        return error_set(CKPT_E_LIMIT, "save: more than %d streams (DEVICE_MARKS_MAX)", DEVICE_MARKS_MAX);
    int r = devices_result(devices, cuda->cuStreamIsCapturing(stream, &capture), "cuStreamIsCapturing");
    if (r == CKPT_OK && capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return error_set(CKPT_E_INVALID,
                         "save: the stream is being captured into a graph; save outside of the capture");
    struct device_mark *mark = &devices->marks[devices->mark_count];
    if (r == CKPT_OK)
        r = mark_make(devices, mark, device);
    if (r == CKPT_OK)
        r = devices_result(devices, cuda->cuEventRecord(mark->event, stream), "cuEventRecord");
    if (r == CKPT_OK)
        devices->mark_count++;
    return r;
}

/* The driver answers only where some context is current. A thread that has none, which may be one that the program has
 * made for the call, asks in that of a known device. */
static int stream_context(struct devices *devices, CUstream stream, CUcontext *ret_context) {
    const struct cuda *cuda = &devices->cuda;
    CUresult result = cuda->cuStreamGetCtx(stream, ret_context);
    for (int device = 0; result == CUDA_ERROR_INVALID_CONTEXT && device < DEVICES_MAX; device++) {
        if (!devices->items[device].known || device_enter(devices, device) < 0)
            continue;
        result = cuda->cuStreamGetCtx(stream, ret_context);
        device_leave(devices);
    }
    return devices_result(devices, result, "save: a stream of no context");
}

/* Whose stream that is; its context becomes current. */
static int stream_enter(struct devices *devices, CUstream stream, int *ret_device) {
    const struct cuda *cuda = &devices->cuda;
    CUcontext context = NULL;
    CUdevice device;
    int r = stream_context(devices, stream, &context);
    if (r == CKPT_OK)
        r = context_enter(devices, context);
    if (r < 0)
        return r;
    r = devices_result(devices, cuda->cuCtxGetDevice(&device), "cuCtxGetDevice");
    if (r < 0) {
        device_leave(devices);
        return r;
    }
    if (device >= DEVICES_MAX || !devices->items[device].known) {
        device_leave(devices);
        *ret_device = DEVICE_HOST;
        return CKPT_OK;
    }
    *ret_device = device;
    return CKPT_OK;
}

static bool is_default(CUstream stream) { return !stream || stream == CU_STREAM_LEGACY; }

int devices_streams(struct devices *devices, void *const *streams, uint32_t stream_count, void **ret_first) {
    memset(ret_first, 0, DEVICES_MAX * sizeof *ret_first);
    for (uint32_t i = stream_count; i-- > 0;) {
        int device = DEVICE_HOST;
        int r = is_default(streams[i]) ? CKPT_OK : stream_enter(devices, streams[i], &device);
        if (r < 0)
            return r;
        if (device == DEVICE_HOST)
            continue;
        device_leave(devices);
        ret_first[device] = streams[i];
    }
    return CKPT_OK;
}

int devices_mark(struct devices *devices, void *const *streams, uint32_t stream_count, const bool *used) {
    bool marked[DEVICES_MAX] = {false}, defaults = false;
    devices->mark_count = 0;
    for (uint32_t i = 0; i < stream_count; i++) {
        CUstream stream = streams[i];
        int device = DEVICE_HOST;
        defaults |= is_default(stream);
        int r = is_default(stream) ? CKPT_OK : stream_enter(devices, stream, &device);
        if (r == CKPT_OK && device != DEVICE_HOST) { /* on another device nothing is protected */
            r = mark_record(devices, device, stream);
            device_leave(devices);
            marked[device] = true;
        }
        if (r < 0)
            return r;
    }
    for (int device = 0; device < DEVICES_MAX; device++) {
        if (!used[device] || (marked[device] && !defaults))
            continue;
        int r = device_enter(devices, device);
        if (r < 0)
            return r;
        r = mark_record(devices, device, NULL);
        device_leave(devices);
        if (r < 0)
            return r;
    }
    return CKPT_OK;
}

int devices_marks_over(const struct devices *devices) {
    for (uint32_t i = 0; i < devices->mark_count; i++) {
        int r = device_enter(devices, devices->marks[i].device);
        if (r < 0)
            return r;
        CUresult result = devices->cuda.cuEventQuery(devices->marks[i].event);
        device_leave(devices);
        if (result == CUDA_ERROR_NOT_READY)
            return CKPT_PENDING;
        if (result != CUDA_SUCCESS)
            return devices_result(devices, result, "the work that the save comes after");
    }
    return CKPT_OK;
}

struct event_asked {
    const struct cuda *cuda;
    CUevent event;
};

static int ask_event(void *context) {
    const struct event_asked *asked = context;
    return asked->cuda->cuEventQuery(asked->event) == CUDA_ERROR_NOT_READY ? CKPT_PENDING : CKPT_OK;
}

/* The device's context is current. */
static void await_default(const struct cuda *cuda, uint64_t deadline) {
    struct event_asked asked = {.cuda = cuda};
    CUstreamCaptureStatus capture;
    if (cuda->cuStreamIsCapturing(NULL, &capture) != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE ||
        cuda->cuEventCreate(&asked.event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return;
    if (cuda->cuEventRecord(asked.event, NULL) == CUDA_SUCCESS)
        (void)!await(ask_event, &asked, deadline, "what is queued on the default stream did not end in time");
    (void)cuda->cuEventDestroy_v2(asked.event);
}

void devices_await_defaults(struct devices *devices, const bool *used, uint64_t deadline) {
    for (int device = 0; device < DEVICES_MAX; device++)
        if (used[device] && device_enter(devices, device) == CKPT_OK) {
            await_default(&devices->cuda, deadline);
            device_leave(devices);
        }
}

void devices_deinit(struct devices *devices) {
    if (!devices->ready)
        return;
    for (uint32_t i = 0; i < DEVICE_MARKS_MAX; i++)
        mark_drop(devices, &devices->marks[i]);
    for (int device = 0; device < DEVICES_MAX; device++) {
        CUdevice handle;
        if (devices->items[device].retained && devices->cuda.cuDeviceGet(&handle, device) == CUDA_SUCCESS)
            (void)devices->cuda.cuDevicePrimaryCtxRelease_v2(handle);
    }
    *devices = (struct devices){0};
}
