/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events: points in streams. As with the real driver, one that was never recorded counts as done, so that to wait for
 * it is no wait at all; here that is a mistake besides.
 */
#include "tests/cuda-standin/standin.h"

static struct CUevent_st *event_find(CUevent handle) {
    struct CUevent_st *event;
    LIST_FOREACH(event, &standin.events, link) {
        if (event == handle)
            return event->destroyed ? NULL : event;
    }
    return NULL;
}

#define ENTER_EVENT(event)                                                                                             \
    ENTER(NEEDS_CONTEXT);                                                                                              \
    if (!event_find(event)) {                                                                                          \
        report_mistake("%s of an event that is destroyed or was never one", __func__);                                 \
        return CUDA_ERROR_INVALID_HANDLE;                                                                              \
    }

#define MUST_BE_RECORDED(event)                                                                                        \
    if (!(event)->submitted)                                                                                           \
        report_mistake("%s of an event that was never recorded", __func__);

CUresult cuEventCreate(CUevent *ret_event, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    const unsigned int known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if ((flags & ~known) || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    struct CUevent_st *event = calloc(1, sizeof(*event));
    event->context = call.context;
    event->flags = flags;
    LIST_INSERT_HEAD(&standin.events, event, link);
    *ret_event = event;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER_EVENT(event);
    event->destroyed = true;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_EVENT(event);
    struct CUstream_st *it = stream_resolve(stream, call.context);
    if (!it || event->context != call.context)
        return CUDA_ERROR_INVALID_HANDLE;
    struct operation *operation = calloc(1, sizeof(*operation));
    operation->kind = OPERATION_RECORD;
    operation->event = event;
    operation->event_count = ++event->submitted;
    stream_submit(it, operation);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    ENTER_EVENT(event);
    MUST_BE_RECORDED(event);
    if (event->context->error)
        return event->context->error;
    return event->done >= event->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER_EVENT(event);
    MUST_BE_RECORDED(event);
    uint64_t count = event->submitted;
    while (event->done < count && !event->context->error && !event->context->destroyed)
        pthread_cond_wait(&standin.changed, &standin.lock);
    return event->context->error;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER_EVENT(event);
    MUST_BE_RECORDED(event);
    struct CUstream_st *it = stream_resolve(stream, call.context);
    if (!it)
        return CUDA_ERROR_INVALID_HANDLE;
    struct operation *operation = calloc(1, sizeof(*operation));
    operation->kind = OPERATION_WAIT;
    operation->event = event;
    operation->event_count = event->submitted;
    stream_submit(it, operation);
    return CUDA_SUCCESS;
}
