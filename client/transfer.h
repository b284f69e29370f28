/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Copies between host memory and devices, queued on streams: the rows of a strided piece out of a
 * device (transfer_gather), and into one through pinned memory (staging_scatter). One transfer is of
 * one thread.
 */

#include "client/device.h"
#include "client/pack.h"

#define STAGING_SLOTS 4
#define STAGING_SLOT_SIZE MIB(4)

struct transfer {
    const struct devices *devices;
    CUstream streams[DEVICES_MAX]; /* ours, made at the first use */
    CUevent events[DEVICES_MAX];   /* behind what was queued last */
    bool queued[DEVICES_MAX];
};

void transfer_deinit(struct transfer *transfer);
/* Our stream on a device: what is queued from now on comes after the last save's marks. */
int transfer_begin(struct transfer *transfer, int device) MUST_CHECK;
/* Queues the copy of elements [first, first + count) of a piece in device memory to packed host memory. */
int transfer_gather(struct transfer *transfer, int device, const struct pack_view *view, uint64_t first, uint64_t count,
                    void *to) MUST_CHECK;
/* Queues, on the caller's stream, a copy of the whole piece, packed, to other memory of its device. */
int transfer_pack(const struct devices *devices, int device, CUstream stream, const struct pack_view *view,
                  CUdeviceptr to) MUST_CHECK;
/* CKPT_OK: all that was queued is done. CKPT_PENDING: not yet. */
int transfer_poll(struct transfer *transfer) MUST_CHECK;

/* Pinned memory, through which bytes go to a device while the next are prepared. */
struct staging {
    struct transfer transfer;
    uint8_t *memory; /* STAGING_SLOTS slots, pinned */
    int device;      /* whose context pinned it */
    struct {
        CUevent event;
        int device; /* whose event that is */
        bool busy;
    } slots[STAGING_SLOTS];
    unsigned next;
};

void staging_deinit(struct staging *staging);
/* Copies packed host bytes into elements [first, first + count) of a piece in device memory, by way of `stream`, or of
 * one of ours if `own`. The bytes may change when it returns; they are on the device after the stream has come so far.
 */
int staging_scatter(struct staging *staging, int device, CUstream stream, bool own, const struct pack_view *view,
                    uint64_t first, uint64_t count, const void *from, uint64_t deadline) MUST_CHECK;
/* Waits until everything is on its device. */
int staging_settle(struct staging *staging, uint64_t deadline) MUST_CHECK;
