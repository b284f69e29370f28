/* SPDX-License-Identifier: Apache-2.0 */
/* The names of errors. */
#include "tests/cuda-standin/standin.h"

static const struct {
    CUresult error;
    const char *name, *text;
} errors[] = {
#define E(name, text)                                                                                                  \
    { name, #name, text }
    E(CUDA_SUCCESS, "no error"),
    E(CUDA_ERROR_INVALID_VALUE, "an argument is wrong"),
    E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    E(CUDA_ERROR_NOT_INITIALIZED, "the driver is not initialized"),
    E(CUDA_ERROR_STUB_LIBRARY, "the library is a stub"),
    E(CUDA_ERROR_DEVICE_UNAVAILABLE, "the device is busy or unavailable"),
    E(CUDA_ERROR_NO_DEVICE, "there is no device"),
    E(CUDA_ERROR_INVALID_DEVICE, "there is no such device"),
    E(CUDA_ERROR_INVALID_CONTEXT, "no context is current, or not one that can do this"),
    E(CUDA_ERROR_ALREADY_MAPPED, "already mapped"),
    E(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "the devices cannot reach each other"),
    E(CUDA_ERROR_OPERATING_SYSTEM, "a call of the operating system failed"),
    E(CUDA_ERROR_INVALID_HANDLE, "the handle is of nothing"),
    E(CUDA_ERROR_NOT_FOUND, "not found"),
    E(CUDA_ERROR_NOT_READY, "not done yet"),
    E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal address was accessed"),
    E(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "the primary context is there already"),
    E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the context was destroyed"),
    E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the memory is registered already"),
    E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "the memory is not registered"),
    E(CUDA_ERROR_LAUNCH_FAILED, "work on the device failed"),
    E(CUDA_ERROR_NOT_PERMITTED, "not permitted"),
    E(CUDA_ERROR_NOT_SUPPORTED, "not supported"),
    E(CUDA_ERROR_SYSTEM_NOT_READY, "the system is not ready"),
    E(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "driver and library differ"),
    E(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef E
};

CUresult cuGetErrorName(CUresult error, const char **ret_name) {
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
        if (errors[i].error == error) {
            *ret_name = errors[i].name;
            return CUDA_SUCCESS;
        }
    }
    *ret_name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **ret_text) {
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
        if (errors[i].error == error) {
            *ret_text = errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    *ret_text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
