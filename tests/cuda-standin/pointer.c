/* SPDX-License-Identifier: Apache-2.0 */
/* What is at an address. */
#include "tests/cuda-standin/standin.h"

CUresult cuMemGetAddressRange_v2(CUdeviceptr *ret_base, size_t *ret_size, CUdeviceptr pointer) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find(pointer);
    if (!range || range_on_host(range))
        return CUDA_ERROR_NOT_FOUND;
    if (ret_base)
        *ret_base = range->base;
    if (ret_size)
        *ret_size = range->size;
    return CUDA_SUCCESS;
}

#define PUT(type, value)                                                                                               \
    do {                                                                                                               \
        type it = (type)(value);                                                                                       \
        memcpy(ret_value, &it, sizeof(it));                                                                            \
        return CUDA_SUCCESS;                                                                                           \
    } while (0)

static int range_ordinal(const struct range *range) {
    int device = range->memory ? range->memory->device : range->context->device;
    for (int ordinal = 0; ordinal < standin.n_visible; ordinal++) {
        if (standin.visible[ordinal] == device)
            return ordinal;
    }
    return -2;
}

/* Without a range everything is zero. */
static CUresult attribute_get(void *ret_value, CUpointer_attribute attribute, CUdeviceptr pointer,
                              struct range *range) {
    bool host = range && range_on_host(range);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        PUT(CUcontext, range ? context_handle(range->context) : NULL);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        PUT(unsigned int, !range ? 0 : host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        PUT(CUdeviceptr, range ? pointer : 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        PUT(uint64_t, host ? pointer : 0);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        PUT(unsigned int, 0);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        PUT(unsigned long long, range ? range->buffer_id : 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        PUT(int, range ? range_ordinal(range) : -2);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        PUT(unsigned int, range && range->kind == RANGE_ALLOCATED);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        PUT(CUdeviceptr, range ? range->base : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        PUT(size_t, range ? range->size : 0);
    case CU_POINTER_ATTRIBUTE_MAPPED:
        PUT(unsigned int, range != NULL);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        PUT(uint64_t, range && range->memory ? range->memory->handle_types : 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        PUT(unsigned int, !range                   ? 0
                          : host || range->context ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                   : range->access[range->memory->device]);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        PUT(CUmemoryPool, range ? range->pool : NULL);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        PUT(unsigned long long, range && range->memory ? range->memory->id : 0);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *ret_value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER(NEEDS_INIT);
    struct range *range = range_find(pointer);
    return range ? attribute_get(ret_value, attribute, pointer, range) : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike the one for a single attribute, this answers for any address. */
CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attributes, void **ret_values,
                                CUdeviceptr pointer) {
    ENTER(NEEDS_INIT);
    struct range *range = range_find(pointer);
    for (unsigned int i = 0; i < n; i++) {
        CUresult error = attribute_get(ret_values[i], attributes[i], pointer, range);
        if (error)
            return error;
    }
    return CUDA_SUCCESS;
}
