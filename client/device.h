/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The GPUs of this process, as one handle sees them. The library never loads the CUDA driver: if the
 * program has not, no memory of it lies on a device. A device is a small number, as the driver counts
 * in this process; what the daemon is told is its UUID.
 *
 * Every call into the driver happens with the device's context pushed (device_enter), and leaves the
 * program's own current context as it was; no graph that the program captures meanwhile is disturbed.
 */

#include "base/cuda.h"
#include "base/util.h"

#define DEVICES_MAX 64
#define DEVICE_MARKS_MAX 64
#define DEVICE_HOST (-1)

struct device {
    bool known;    /* the rest is set; from then on it does not change */
    bool retained; /* the context is the device's primary one, and held */
    CUcontext context;
    uint8_t uuid[sizeof(CUuuid)];
};

/* An event behind work of the program that a save comes after. */
struct device_mark {
    int device;
    CUevent event;
};

struct devices {
    struct cuda cuda;
    bool ready;     /* the driver is there and works */
    uint64_t loads; /* cuda_loads() when it was last looked for */
    struct device items[DEVICES_MAX];
    struct device_mark marks[DEVICE_MARKS_MAX]; /* made as they are needed, and used again */
    uint32_t mark_count;                        /* of the last save */
};

void devices_deinit(struct devices *devices);
/* Looks for a driver that the program has loaded meanwhile. */
bool devices_ready(struct devices *devices);

/* The device whose memory this is, or DEVICE_HOST. Managed memory counts as a device's. */
int devices_find(struct devices *devices, const void *pointer);

/* CKPT_OK, or CKPT_E_LOST with the driver's sentence; `what` begins it. */
int devices_result(const struct devices *devices, CUresult result, const char *what) MUST_CHECK;
int device_enter(const struct devices *devices, int device) MUST_CHECK;
void device_leave(const struct devices *devices);

/* The first of the streams on each device (DEVICES_MAX); NULL, the default stream, where none is. */
int devices_streams(struct devices *devices, void *const *streams, uint32_t stream_count, void **ret_first) MUST_CHECK;
/* Records a mark behind what is queued on each of the streams, and, on each device of `used` (DEVICES_MAX) that has
 * none of them, on its default stream. CKPT_E_INVALID: a stream that is being captured into a graph. */
int devices_mark(struct devices *devices, void *const *streams, uint32_t stream_count, const bool *used) MUST_CHECK;
/* CKPT_OK: all that they mark is over. CKPT_PENDING: not yet. CKPT_E_LOST. Any thread. */
int devices_marks_over(const struct devices *devices) MUST_CHECK;
/* Waits for what is queued now on the default streams of the devices of `used` (DEVICES_MAX), at most until the
 * deadline; what fails there, others will be told of. */
void devices_await_defaults(struct devices *devices, const bool *used, uint64_t deadline);
