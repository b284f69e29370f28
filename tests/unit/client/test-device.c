/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the program has loaded a driver; and graphs: on a driver of a few lines, of which one stream is being
 * captured. */
#include "client/ckpt.h"
#include "client/device.h"
#include "client/errors.h"
#include "tests/unit/client/unit.h"

#include <dlfcn.h>

static unsigned searches;

/* Comes before the C library's, and counts how often a driver is looked for. */
__attribute__((__visibility__("default"))) void *dlopen(const char *name, int flags) {
    static void *(*others)(const char *, int);
    if (!others)
        others = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    searches += name && strcmp(name, CUDA_LIBRARY) == 0;
    return others(name, flags);
}

/* A search goes through directories; a program without a driver may protect a hundred thousand pieces. */
static void driver_that_is_loaded_late(void **state) {
    struct devices devices = {0};
    for (int i = 0; i < 1000; i++)
        assert_int_equal(devices_find(&devices, &devices), DEVICE_HOST);
    assert_int_equal(searches, 1);
    assert_int_equal(devices.cuda.state, CUDA_NO_DRIVER);
    setenv("CUDA_STANDIN_INIT", "34", 1);
    assert_non_null(dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL));
    assert_int_equal(devices_find(&devices, &devices), DEVICE_HOST);
    assert_int_equal(devices.cuda.state, CUDA_STUB);
    assert_int_equal(searches, 2);
}

static int context, captured, other; /* whose addresses stand for handles */
static CUstreamCaptureMode mode;
static unsigned entered, recorded;

static CUresult push(CUcontext pushed) {
    entered++;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *ret_popped) {
    entered--;
    return CUDA_SUCCESS;
}
static CUresult exchange(CUstreamCaptureMode *exchanged) {
    CUstreamCaptureMode before = mode;
    mode = *exchanged;
    *exchanged = before;
    return CUDA_SUCCESS;
}
static CUresult stream_context(CUstream stream, CUcontext *ret_context) {
    *ret_context = (CUcontext)(void *)&context;
    return CUDA_SUCCESS;
}
static CUresult which_device(CUdevice *ret_device) {
    *ret_device = 0;
    return CUDA_SUCCESS;
}
static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus *ret_status) {
    bool yes = stream == (CUstream)(void *)&captured;
    *ret_status = yes ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
/* The real one fails, and spoils the graph, in every thread that has not said that it may. */
static CUresult unsafe(void) {
    return entered && mode == CU_STREAM_CAPTURE_MODE_RELAXED ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
static CUresult event_create(CUevent *ret_event, unsigned int flags) {
    *ret_event = (CUevent)(void *)&other;
    return unsafe();
}
static CUresult event_record(CUevent event, CUstream stream) {
    recorded++;
    return unsafe();
}
static CUresult event_query(CUevent event) { return unsafe(); }

static struct devices devices_new(void) {
    struct devices devices = {.ready = true, .cuda = {.state = CUDA_READY}};
    devices.items[0] = (struct device){.known = true, .context = (CUcontext)(void *)&context};
    devices.cuda.cuCtxPushCurrent_v2 = push;
    devices.cuda.cuCtxPopCurrent_v2 = pop;
    devices.cuda.cuThreadExchangeStreamCaptureMode = exchange;
    devices.cuda.cuStreamGetCtx = stream_context;
    devices.cuda.cuCtxGetDevice = which_device;
    devices.cuda.cuStreamIsCapturing = is_capturing;
    devices.cuda.cuEventCreate = event_create;
    devices.cuda.cuEventRecord = event_record;
    devices.cuda.cuEventQuery = event_query;
    mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    entered = recorded = 0;
    return devices;
}

static void stream_that_is_captured(void **state) {
    struct devices devices = devices_new();
    const bool used[DEVICES_MAX] = {true};
    void *streams[] = {&other, &captured};
    assert_int_equal(devices_mark(&devices, streams, 2, used), CKPT_E_INVALID);
    assert_non_null(strstr(error_last(), "captured into a graph"));
    assert_int_equal(recorded, 1); /* the other one; nothing in the graph */
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert_int_equal(entered, 0);
}

static void others_are_captured(void **state) {
    struct devices devices = devices_new();
    const bool used[DEVICES_MAX] = {true};
    void *streams[] = {&other};
    assert_int_equal(devices_mark(&devices, streams, 1, used), CKPT_OK);
    assert_int_equal(devices_marks_over(&devices), CKPT_OK);
    assert_int_equal(device_enter(&devices, 0), CKPT_OK);
    assert_int_equal(devices_marks_over(&devices), CKPT_OK); /* within */
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
    device_leave(&devices);
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* the program's is what it was */
    assert_int_equal(entered, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(driver_that_is_loaded_late),
        cmocka_unit_test(stream_that_is_captured),
        cmocka_unit_test(others_are_captured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
