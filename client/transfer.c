/* SPDX-License-Identifier: Apache-2.0 */
#include "client/transfer.h"

#include "client/await.h"
#include "client/errors.h"

/*
 * A row without holes is one copy, a row with a stride one copy of a plane whose lines are single
 * elements; only where a stride is negative, or smaller than an element, or beyond what the driver
 * takes for a pitch, each element is copied by itself.
 *
 * Nothing here waits inside the driver: an event is asked again and again, so that every wait keeps
 * its deadline whatever the device does.
 */

#define TRANSFER_PITCH_MAX INT64_C(0x7fffffff)

/* ---- rows ---- */

enum direction { TO_HOST, TO_DEVICE, WITHIN_DEVICE };

/* A strided piece in device memory, and packed bytes that are its rows one after the other. */
struct rows {
    const struct cuda *cuda;
    CUstream stream;
    size_t element_size;
    enum direction direction;
    uint8_t *packed; /* an address of the device if WITHIN_DEVICE */
};

static CUdeviceptr device_address(const uint8_t *pointer) { return (CUdeviceptr)(uintptr_t)pointer; }

static CUresult copy_line(const struct rows *rows, uint8_t *strided, uint8_t *packed, size_t size) {
    switch (rows->direction) {
    case TO_HOST:
        return rows->cuda->cuMemcpyDtoHAsync_v2(packed, device_address(strided), size, rows->stream);
    case TO_DEVICE:
        return rows->cuda->cuMemcpyHtoDAsync_v2(device_address(strided), packed, size, rows->stream);
    case WITHIN_DEVICE:
        return rows->cuda->cuMemcpyDtoDAsync_v2(device_address(packed), device_address(strided), size, rows->stream);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy_plane(const struct rows *rows, uint8_t *strided, int64_t stride, uint8_t *packed, uint64_t count) {
    CUDA_MEMCPY2D copy = {.WidthInBytes = rows->element_size, .Height = count};
    if (rows->direction == TO_DEVICE) {
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = packed;
        copy.srcPitch = rows->element_size;
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = device_address(strided);
        copy.dstPitch = (size_t)stride;
    } else {
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = device_address(strided);
        copy.srcPitch = (size_t)stride;
        copy.dstMemoryType = rows->direction == TO_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        copy.dstHost = packed;
        copy.dstDevice = device_address(packed);
        copy.dstPitch = rows->element_size;
    }
    return rows->cuda->cuMemcpy2DAsync_v2(&copy, rows->stream);
}

static int queue_row(void *context, uint8_t *data, int64_t stride, uint64_t count, uint64_t packed) {
    const struct rows *rows = context;
    uint8_t *at = rows->packed + packed;
    size_t size = rows->element_size;
    if (stride == (int64_t)size)
        return (int)copy_line(rows, data, at, count * size);
    if (stride > (int64_t)size && stride <= TRANSFER_PITCH_MAX && count > 1)
        return (int)copy_plane(rows, data, stride, at, count);
    CUresult result = CUDA_SUCCESS;
    for (uint64_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = copy_line(rows, data + (int64_t)i * stride, at + i * size, size);
    return (int)result;
}

/* ---- streams of ours ---- */

/* The device's context is current. */
static int stream_make(struct transfer *transfer, int device) {
    const struct cuda *cuda = &transfer->devices->cuda;
    CUresult result = CUDA_SUCCESS;
    if (!transfer->streams[device])
        result = cuda->cuStreamCreate(&transfer->streams[device], CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS && !transfer->events[device])
        result = cuda->cuEventCreate(&transfer->events[device], CU_EVENT_DISABLE_TIMING);
    return devices_result(transfer->devices, result, "no stream on the device");
}

void transfer_deinit(struct transfer *transfer) {
    for (int device = 0; device < DEVICES_MAX; device++) {
        if ((!transfer->streams[device] && !transfer->events[device]) || device_enter(transfer->devices, device) < 0)
            continue;
        const struct cuda *cuda = &transfer->devices->cuda;
        if (transfer->events[device])
            (void)cuda->cuEventDestroy_v2(transfer->events[device]);
        if (transfer->streams[device])
            (void)cuda->cuStreamDestroy_v2(transfer->streams[device]);
        device_leave(transfer->devices);
    }
    *transfer = (struct transfer){.devices = transfer->devices};
}

int transfer_begin(struct transfer *transfer, int device) {
    const struct devices *devices = transfer->devices;
    int r = device_enter(devices, device);
    if (r < 0)
        return r;
    r = stream_make(transfer, device);
    for (uint32_t i = 0; i < devices->mark_count && r == CKPT_OK; i++)
        r = devices_result(devices,
                           devices->cuda.cuStreamWaitEvent(transfer->streams[device], devices->marks[i].event, 0),
                           "cuStreamWaitEvent");
    device_leave(devices);
    return r;
}

int transfer_gather(struct transfer *transfer, int device, const struct pack_view *view, uint64_t first, uint64_t count,
                    void *to) {
    const struct devices *devices = transfer->devices;
    int r = device_enter(devices, device);
    if (r < 0)
        return r;
    struct rows rows = {.cuda = &devices->cuda,
                        .stream = transfer->streams[device],
                        .element_size = view->element_size,
                        .direction = TO_HOST,
                        .packed = to};
    CUresult result = (CUresult)pack_rows(view, first, count, queue_row, &rows);
    if (result == CUDA_SUCCESS)
        result = devices->cuda.cuEventRecord(transfer->events[device], transfer->streams[device]);
    transfer->queued[device] = true;
    device_leave(devices);
    return devices_result(devices, result, "copying out of device memory");
}

int transfer_pack(const struct devices *devices, int device, CUstream stream, const struct pack_view *view,
                  CUdeviceptr to) {
    int r = device_enter(devices, device);
    if (r < 0)
        return r;
    struct rows rows = {.cuda = &devices->cuda,
                        .stream = stream,
                        .element_size = view->element_size,
                        .direction = WITHIN_DEVICE,
                        .packed = (uint8_t *)(uintptr_t)to};
    CUresult result = (CUresult)pack_rows(view, 0, geometry_elements(view->geometry), queue_row, &rows);
    device_leave(devices);
    return devices_result(devices, result, "copying an eager tensor within its device");
}

static int event_poll(const struct devices *devices, int device, CUevent event) {
    int r = device_enter(devices, device);
    if (r < 0)
        return r;
    CUresult result = devices->cuda.cuEventQuery(event);
    device_leave(devices);
    return result == CUDA_ERROR_NOT_READY ? CKPT_PENDING : devices_result(devices, result, "copying device memory");
}

int transfer_poll(struct transfer *transfer) {
    for (int device = 0; device < DEVICES_MAX; device++) {
        if (!transfer->queued[device])
            continue;
        int r = event_poll(transfer->devices, device, transfer->events[device]);
        if (r != CKPT_OK)
            return r;
        transfer->queued[device] = false;
    }
    return CKPT_OK;
}

/* ---- staging ---- */

struct slot_asked {
    const struct staging *staging;
    unsigned slot;
};

static int ask_slot(void *context) {
    const struct slot_asked *asked = context;
    return event_poll(asked->staging->transfer.devices, asked->staging->slots[asked->slot].device,
                      asked->staging->slots[asked->slot].event);
}

static int slot_wait(struct staging *staging, unsigned slot, uint64_t deadline) {
    if (!staging->slots[slot].busy)
        return CKPT_OK;
    struct slot_asked asked = {.staging = staging, .slot = slot};
    int r = await(ask_slot, &asked, deadline, "the device did not take the restored bytes in time");
    if (r == CKPT_OK)
        staging->slots[slot].busy = false;
    return r;
}

static void slot_drop_event(struct staging *staging, unsigned slot) {
    const struct devices *devices = staging->transfer.devices;
    if (!staging->slots[slot].event || device_enter(devices, staging->slots[slot].device) < 0)
        return;
    (void)devices->cuda.cuEventDestroy_v2(staging->slots[slot].event);
    device_leave(devices);
    staging->slots[slot].event = NULL;
}

/* The device's context is current; the slot's event then is one of its. */
static int slot_take(struct staging *staging, unsigned slot, int device) {
    const struct devices *devices = staging->transfer.devices;
    if (!staging->memory) {
        void *memory = NULL;
        int r = devices_result(
            devices, devices->cuda.cuMemHostAlloc(&memory, STAGING_SLOTS * STAGING_SLOT_SIZE, CU_MEMHOSTALLOC_PORTABLE),
            "no pinned memory");
        if (r < 0)
            return r;
        staging->memory = memory;
        staging->device = device;
    }
    if (staging->slots[slot].event && staging->slots[slot].device == device)
        return CKPT_OK;
    slot_drop_event(staging, slot);
    staging->slots[slot].device = device;
    return devices_result(devices, devices->cuda.cuEventCreate(&staging->slots[slot].event, CU_EVENT_DISABLE_TIMING),
                          "cuEventCreate");
}

/* At most a slot's worth. */
static int scatter_piece(struct staging *staging, int device, CUstream stream, const struct pack_view *view,
                         uint64_t first, uint64_t count, const uint8_t *from) {
    const struct cuda *cuda = &staging->transfer.devices->cuda;
    unsigned slot = staging->next++ % STAGING_SLOTS;
    int r = slot_take(staging, slot, device);
    if (r < 0)
        return r;
    uint8_t *memory = staging->memory + slot * STAGING_SLOT_SIZE;
    memcpy(memory, from, count * view->element_size);
    struct rows rows = {
        .cuda = cuda, .stream = stream, .element_size = view->element_size, .direction = TO_DEVICE, .packed = memory};
    CUresult result = (CUresult)pack_rows(view, first, count, queue_row, &rows);
    staging->slots[slot].busy = true; /* whatever was queued reads the slot */
    CUresult recorded = cuda->cuEventRecord(staging->slots[slot].event, stream);
    return devices_result(staging->transfer.devices, result == CUDA_SUCCESS ? recorded : result,
                          "copying into device memory");
}

int staging_scatter(struct staging *staging, int device, CUstream stream, bool own, const struct pack_view *view,
                    uint64_t first, uint64_t count, const void *from, uint64_t deadline) {
    const struct devices *devices = staging->transfer.devices;
    const uint8_t *at = from;
    uint64_t most = STAGING_SLOT_SIZE / view->element_size;
    while (count > 0) {
        uint64_t piece = min_u64(count, most);
        int r = slot_wait(staging, staging->next % STAGING_SLOTS, deadline);
        if (r == CKPT_OK)
            r = device_enter(devices, device);
        if (r < 0)
            return r;
        if (own)
            r = stream_make(&staging->transfer, device);
        if (r == CKPT_OK)
            r = scatter_piece(staging, device, own ? staging->transfer.streams[device] : stream, view, first, piece,
                              at);
        device_leave(devices);
        if (r < 0)
            return r;
        first += piece;
        count -= piece;
        at += piece * view->element_size;
    }
    return CKPT_OK;
}

int staging_settle(struct staging *staging, uint64_t deadline) {
    for (unsigned slot = 0; slot < STAGING_SLOTS; slot++) {
        int r = slot_wait(staging, slot, deadline);
        if (r < 0)
            return r;
    }
    return CKPT_OK;
}

void staging_deinit(struct staging *staging) {
    for (unsigned slot = 0; slot < STAGING_SLOTS; slot++)
        slot_drop_event(staging, slot);
    const struct devices *devices = staging->transfer.devices;
    if (staging->memory && device_enter(devices, staging->device) == CKPT_OK) {
        (void)devices->cuda.cuMemFreeHost(staging->memory); /* waits for what still reads it */
        device_leave(devices);
    }
    transfer_deinit(&staging->transfer);
    *staging = (struct staging){.transfer = {.devices = devices}};
}
