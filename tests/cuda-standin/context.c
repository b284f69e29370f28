/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts. Each thread has a stack of them and none at first. The primary one of a device is counted; when it or any
 * other goes, all that was made in it goes too, which is noted as a leak: who made it should have ended it. A context
 * takes device memory; an error that is sticky stays with it to its end.
 */
#include "tests/cuda-standin/standin.h"

static __thread struct {
    struct context *contexts[STACK_MAX];
    int depth;
} stack;

struct context *context_current(void) {
    return stack.depth ? stack.contexts[stack.depth - 1] : NULL;
}

struct context *context_find(CUcontext handle) {
    struct context *context;
    LIST_FOREACH(context, &standin.contexts, link) {
        if (context_handle(context) == handle)
            return context;
    }
    return NULL;
}

static CUresult context_new(CUdevice ordinal, unsigned int flags, struct context **ret_context) {
    if (standin.settings.compute_mode == CU_COMPUTEMODE_PROHIBITED)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    int device = standin.visible[ordinal];
    bool alone = standin.settings.compute_mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS;
    uint64_t charge;
    registry_driver_lock();
    CUresult error = registry_charge_context(device, alone, &charge);
    registry_driver_unlock();
    if (error)
        return error;

    struct context *context = calloc(1, sizeof(*context));
    *context =
        (struct context){.ordinal = ordinal, .device = device, .flags = flags, .references = 1, .charge = charge};
    LIST_INSERT_HEAD(&standin.contexts, context, link);
    context->legacy = stream_new(context, CU_STREAM_DEFAULT);
    stream_start_device(device);
    *ret_context = context;
    return CUDA_SUCCESS;
}

static void context_end(struct context *context) {
    if (!context->error)
        report_context_ends(context);
    context->destroyed = true;
    stream_end_context(context);
    struct range *range, *next;
    for (range = LIST_FIRST(&standin.ranges); range; range = next) {
        next = LIST_NEXT(range, link);
        if (range->context == context)
            range_end(range);
    }
    CUevent event;
    LIST_FOREACH(event, &standin.events, link) {
        if (event->context == context)
            event->destroyed = true;
    }
    registry_uncharge(context->charge);
}

#define DEVICE_MUST_BE(device)                                                                                         \
    if ((device) < 0 || (device) >= standin.n_visible)                                                                 \
        return CUDA_ERROR_INVALID_DEVICE;

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret_context, CUdevice device) {
    ENTER(NEEDS_INIT);
    DEVICE_MUST_BE(device);
    struct context *context = standin.primary[standin.visible[device]];
    if (context) {
        context->references++;
    } else {
        CUresult error = context_new(device, 0, &context);
        if (error)
            return error;
        context->primary = true;
        standin.primary[standin.visible[device]] = context;
    }
    *ret_context = context_handle(context);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(NEEDS_INIT);
    DEVICE_MUST_BE(device);
    struct context *context = standin.primary[standin.visible[device]];
    if (!context) {
        report_mistake("the primary context of device %d was released more often than retained", device);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--context->references == 0) {
        standin.primary[standin.visible[device]] = NULL;
        context_end(context);
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *ret_flags, int *ret_active) {
    ENTER(NEEDS_INIT);
    DEVICE_MUST_BE(device);
    struct context *context = standin.primary[standin.visible[device]];
    *ret_flags = context ? context->flags : 0;
    *ret_active = context != NULL;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    ENTER(NEEDS_INIT);
    DEVICE_MUST_BE(device);
    return standin.primary[standin.visible[device]] ? CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE : CUDA_SUCCESS;
}

static CUresult stack_push(struct context *context) {
    if (stack.depth == STACK_MAX) {
        report_mistake("a thread pushed %d contexts and did not pop them", STACK_MAX);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stack.contexts[stack.depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *ret_context, unsigned int flags, CUdevice device) {
    ENTER(NEEDS_INIT);
    DEVICE_MUST_BE(device);
    struct context *context;
    CUresult error = context_new(device, flags, &context);
    if (error)
        return error;
    *ret_context = context_handle(context);
    return stack_push(context);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    ENTER(NEEDS_INIT);
    struct context *context = context_find(handle);
    if (!context || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->destroyed)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (context_current() == context)
        stack.depth--;
    context_end(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
    ENTER(NEEDS_INIT);
    struct context *context = context_find(handle);
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return context->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : stack_push(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *ret_context) {
    ENTER(NEEDS_INIT);
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    struct context *context = stack.contexts[--stack.depth];
    if (ret_context)
        *ret_context = context_handle(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext handle) {
    ENTER(NEEDS_INIT);
    struct context *context = context_find(handle);
    if (handle && (!context || context->destroyed))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.depth)
        stack.depth--;
    return context ? stack_push(context) : CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ret_context) {
    ENTER(NEEDS_INIT);
    *ret_context = context_handle(call.context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *ret_device) {
    ENTER(NEEDS_CONTEXT);
    *ret_device = call.context->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *ret_least, int *ret_greatest) {
    ENTER(NEEDS_CONTEXT);
    if (ret_least)
        *ret_least = 0;
    if (ret_greatest)
        *ret_greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *ret_free, size_t *ret_total) {
    ENTER(NEEDS_CONTEXT);
    size_t used = registry_used(call.context->device);
    *ret_total = standin.settings.device_memory;
    *ret_free = used < *ret_total ? *ret_total - used : 0;
    return CUDA_SUCCESS;
}
