/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies and fills. What an address is decides, as with the real driver: pinned host memory is copied behind the
 * caller's back; with other host memory the call returns when the copy is done; a span that only partly is one pinned
 * piece is refused, and so is device memory that the stream's device may not access. The destination is filled with
 * poison at once, or when the copy begins if older work has still to do with it.
 */
#include "tests/cuda-standin/standin.h"

/* Where the bytes are, and in *ret_length how many lie there; NULL if the memory has gone since. */
static char *side_resolve(const struct side *side, uint64_t address, size_t *ret_length) {
    if (!side->device) {
        *ret_length = SIZE_MAX;
        return (char *)address;
    }
    struct range *range = range_find(address);
    if (!range)
        return NULL;
    *ret_length = range->size - (address - range->base);
    if (range_on_host(range))
        return (char *)address;
    return range->memory->bytes + range->offset + (address - range->base);
}

static char *side_resolve_locked(const struct side *side, uint64_t address, size_t *ret_length) {
    pthread_mutex_lock(&standin.lock);
    char *bytes = side_resolve(side, address, ret_length);
    pthread_mutex_unlock(&standin.lock);
    return bytes;
}

static CUresult side_fill(const struct side *to, size_t width, size_t height, unsigned char value,
                          char *(*resolve)(const struct side *, uint64_t, size_t *)) {
    for (size_t row = 0; row < height; row++) {
        for (size_t done = 0, length; done < width; done += length) {
            char *bytes = resolve(to, to->address + row * to->pitch + done, &length);
            if (!bytes)
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            length = min_u64(length, width - done);
            memset(bytes, value, length);
        }
    }
    return CUDA_SUCCESS;
}

CUresult copy_run(const struct operation *operation) {
    const struct side *from = &operation->from, *to = &operation->to;
    CUresult error = CUDA_SUCCESS;
    if (operation->kind == OPERATION_SET)
        return side_fill(to, operation->width, operation->height, operation->value, side_resolve_locked);
    if (operation->poison_late)
        error = side_fill(to, operation->width, operation->height, POISON_PENDING, side_resolve_locked);
    for (size_t row = 0; row < operation->height && !error; row++) {
        for (size_t done = 0, length = 0, to_length; done < operation->width; done += length) {
            const char *source = side_resolve_locked(from, from->address + row * from->pitch + done, &length);
            char *destination = side_resolve_locked(to, to->address + row * to->pitch + done, &to_length);
            if (!source || !destination)
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            length = min_u64(min_u64(length, to_length), operation->width - done);
            memmove(destination, source, length);
        }
    }
    return error;
}

/* Whether all of the span is device memory that the device may access like this. */
static bool device_span_is_good(uint64_t address, size_t span, int device, unsigned int access) {
    while (span) {
        struct range *range = range_find(address);
        if (!range)
            return false;
        if (range_on_host(range)) {
            if (!(range->flags & CU_MEMHOSTREGISTER_DEVICEMAP))
                return false;
        } else if ((range->access[device] & access) != access) {
            return false;
        }
        size_t length = min_u64(range->size - (address - range->base), span);
        address += length;
        span -= length;
    }
    return true;
}

/* Sets *ret_pinned. */
static CUresult host_span_check(uint64_t address, size_t span, struct context *context, bool written,
                                bool *ret_pinned) {
    struct range *range = range_find(address);
    *ret_pinned = false;
    if (!range)
        return range_overlaps(address, span) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (!range_on_host(range) || span > range->size - (address - range->base))
        return CUDA_ERROR_INVALID_VALUE;
    if (written && (range->flags & CU_MEMHOSTREGISTER_READ_ONLY))
        return CUDA_ERROR_INVALID_VALUE;
    *ret_pinned = range->context == context || (range->flags & CU_MEMHOSTREGISTER_PORTABLE);
    return CUDA_SUCCESS;
}

static CUresult side_check(const struct side *side, const struct operation *operation, struct context *context,
                           bool written, bool *ret_pinned) {
    size_t span = (operation->height - 1) * side->pitch + operation->width;
    *ret_pinned = true;
    if (!side->device)
        return host_span_check(side->address, span, context, written, ret_pinned);
    return device_span_is_good(side->address, span, context->device,
                               written ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

/* Takes what `plan` says. Not `asynchronous`, or with pageable memory: returns when it is done. */
static CUresult submit(struct context *context, CUstream handle, const struct operation *plan, bool asynchronous) {
    struct CUstream_st *stream = stream_resolve(handle, context);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!plan->width || !plan->height)
        return CUDA_SUCCESS;
    bool from_pinned = true, to_pinned;
    CUresult error = side_check(&plan->to, plan, context, true, &to_pinned);
    if (!error && plan->kind == OPERATION_COPY)
        error = side_check(&plan->from, plan, context, false, &from_pinned);
    if (error)
        return error;

    struct operation *operation = malloc(sizeof(*operation));
    *operation = *plan;
    if (plan->kind == OPERATION_COPY) {
        size_t span = (plan->height - 1) * plan->to.pitch + plan->width;
        size_t from_span = (plan->height - 1) * plan->from.pitch + plan->width;
        bool onto_itself =
            plan->from.address < plan->to.address + span && plan->to.address < plan->from.address + from_span;
        operation->poison_late = !onto_itself && stream_uses(plan->to.address, span);
        if (!onto_itself && !operation->poison_late)
            side_fill(&operation->to, operation->width, operation->height, POISON_PENDING, side_resolve);
    }
    stream_submit(stream, operation);
    return asynchronous && from_pinned && to_pinned ? CUDA_SUCCESS : stream_wait_empty(stream);
}

static CUresult copy(struct context *context, CUstream stream, struct side from, struct side to, size_t size,
                     bool asynchronous) {
    struct operation plan = {.kind = OPERATION_COPY, .from = from, .to = to, .width = size, .height = 1};
    return submit(context, stream, &plan, asynchronous);
}

static struct side on_host(const void *memory) { return (struct side){.address = (uint64_t)memory}; }
static struct side on_device(CUdeviceptr pointer) { return (struct side){.address = pointer, .device = true}; }

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, NULL, on_host(from), on_device(to), size, false);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, NULL, on_device(from), on_host(to), size, false);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, NULL, on_device(from), on_device(to), size, false);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, stream, on_host(from), on_device(to), size, true);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, stream, on_device(from), on_host(to), size, true);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    return copy(call.context, stream, on_device(from), on_device(to), size, true);
}

static CUresult fill(struct context *context, CUstream stream, CUdeviceptr to, unsigned char value, size_t size,
                     bool asynchronous) {
    struct operation plan = {.kind = OPERATION_SET, .to = on_device(to), .width = size, .height = 1, .value = value};
    return submit(context, stream, &plan, asynchronous);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
    ENTER(NEEDS_CONTEXT);
    return fill(call.context, NULL, to, value, size, false);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    return fill(call.context, stream, to, value, size, true);
}

static bool side_of(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch,
                    struct side *ret_side) {
    struct range *range = type == CU_MEMORYTYPE_UNIFIED ? range_find(device) : NULL;
    if (type == CU_MEMORYTYPE_HOST)
        *ret_side = on_host(host);
    else if (type == CU_MEMORYTYPE_DEVICE || (range && !range_on_host(range)))
        *ret_side = on_device(device);
    else if (type == CU_MEMORYTYPE_UNIFIED)
        *ret_side = on_host((const void *)device);
    else
        return false;
    ret_side->address += y * pitch + x;
    ret_side->pitch = pitch;
    return true;
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    struct operation plan = {.kind = OPERATION_COPY, .width = c->WidthInBytes, .height = c->Height};
    size_t from_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes + c->srcXInBytes;
    size_t to_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes + c->dstXInBytes;
    if (from_pitch < c->srcXInBytes + c->WidthInBytes || to_pitch < c->dstXInBytes + c->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!side_of(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcXInBytes, c->srcY, from_pitch, &plan.from) ||
        !side_of(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstXInBytes, c->dstY, to_pitch, &plan.to))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(call.context, stream, &plan, true);
}
