/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinned host memory. To register is slow in reality, and holds up every process in the driver:
 * CUDA_STANDIN_REGISTER_MS makes it so here. Without PORTABLE it counts as pinned only in the context that did it.
 */
#include "tests/cuda-standin/standin.h"

#include <errno.h>
#include <sys/mman.h>
#include <time.h>

/* Whether all of it is mapped. */
static bool memory_is_there(uint64_t base, size_t size) {
    uint64_t page = sysconf(_SC_PAGESIZE), from = base & ~(page - 1), to = align_up(base + size, page);
    CLEANUP(freep) unsigned char *resident = malloc((to - from) / page);
    return mincore((void *)from, to - from, resident) == 0;
}

CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    uint64_t base = (uint64_t)memory;
    const unsigned int known =
        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
    if (!memory || !size || (flags & ~known))
        return CUDA_ERROR_INVALID_VALUE;
    struct range *range = range_find(base);
    if (range_overlaps(base, size))
        return range && !range_on_host(range) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!memory_is_there(base, size))
        return CUDA_ERROR_INVALID_VALUE;

    if (standin.settings.register_delay_ms) {
        registry_driver_lock();
        struct timespec pause = {.tv_sec = standin.settings.register_delay_ms / 1000,
                                 .tv_nsec = standin.settings.register_delay_ms % 1000 * NANOSECONDS_PER_MS};
        nanosleep(&pause, NULL);
        registry_driver_unlock();
    }
    range = range_new(RANGE_HOST_REGISTERED, base, size, call.context);
    range->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *memory) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find_base((uint64_t)memory, RANGE_HOST_REGISTERED);
    if (!range)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (!memory_is_there(range->base, range->size))
        report_mistake("%p was unmapped while it was registered", memory);
    if (stream_uses(range->base, range->size))
        report_mistake("%p is unregistered while copies use it", memory);
    range_end(range);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **ret_memory, size_t size, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    if (!size)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct range *range = range_new(RANGE_HOST_ALLOCATED, (uint64_t)memory, size, call.context);
    range->flags =
        flags | CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP; /* as unified addressing has it */
    *ret_memory = memory;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *memory) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find_base((uint64_t)memory, RANGE_HOST_ALLOCATED);
    if (!range) {
        report_mistake("cuMemFreeHost of %p, which is not allocated", memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream_uses(range->base, range->size))
        report_mistake("%p is freed while copies use it", memory);
    range_end(range);
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *ret_pointer, void *memory, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find((uint64_t)memory);
    if (flags || !range || !range_on_host(range) || !(range->flags & CU_MEMHOSTREGISTER_DEVICEMAP))
        return CUDA_ERROR_INVALID_VALUE;
    *ret_pointer = (uint64_t)memory;
    return CUDA_SUCCESS;
}
