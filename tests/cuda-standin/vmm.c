/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management: physical memory behind counted handles, reserved addresses, and mappings between them
 * that nobody may use until access is given. Handles travel as descriptors, which are memfds here and so are closed,
 * passed and kept like any other.
 */
#include "tests/cuda-standin/standin.h"

#include <fcntl.h>

struct vmm_handle {
    LIST_ENTRY(vmm_handle) link;
    CUmemGenericAllocationHandle number;
    struct memory *memory;
    CUmemAllocationProp properties;
    unsigned int references;
};

struct reservation {
    LIST_ENTRY(reservation) link;
    uint64_t base;
    size_t size;
};

static LIST_HEAD(, vmm_handle) handles = LIST_HEAD_INITIALIZER(handles);
static LIST_HEAD(, reservation) reservations = LIST_HEAD_INITIALIZER(reservations);
static uint64_t last_number = 0x7000;

unsigned int vmm_count(void) {
    unsigned int n = 0;
    struct vmm_handle *handle;
    LIST_FOREACH(handle, &handles, link) { n += handle->references > 0; }
    return n;
}

unsigned int vmm_count_reserved(void) {
    unsigned int n = 0;
    struct reservation *reservation;
    LIST_FOREACH(reservation, &reservations, link) { n++; }
    return n;
}

static bool whole(size_t size) { return size && size % GRANULARITY == 0; }

static bool properties_are_good(const CUmemAllocationProp *p) {
    return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p->location.id >= 0 && p->location.id < standin.n_visible &&
           !(p->requestedHandleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static struct vmm_handle *handle_find(CUmemGenericAllocationHandle number) {
    struct vmm_handle *handle;
    LIST_FOREACH(handle, &handles, link) {
        if (handle->number == number && handle->references)
            return handle;
    }
    return NULL;
}

static struct vmm_handle *handle_new(struct memory *memory, const CUmemAllocationProp *properties) {
    struct vmm_handle *handle = calloc(1, sizeof(*handle));
    *handle =
        (struct vmm_handle){.number = ++last_number, .memory = memory, .properties = *properties, .references = 1};
    LIST_INSERT_HEAD(&handles, handle, link);
    return handle;
}

CUresult cuMemGetAllocationGranularity(size_t *ret_granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    ENTER(NEEDS_INIT);
    if (!properties_are_good(properties))
        return CUDA_ERROR_INVALID_VALUE;
    *ret_granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *ret_handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    ENTER(NEEDS_INIT);
    if (!properties_are_good(properties) || !whole(size) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory;
    registry_driver_lock();
    CUresult error = memory_new(standin.visible[properties->location.id], size, true, &memory);
    registry_driver_unlock();
    if (error)
        return error;
    memory->handle_types = properties->requestedHandleTypes;
    *ret_handle = handle_new(memory, properties)->number;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
    ENTER(NEEDS_INIT);
    struct vmm_handle *handle = handle_find(number);
    if (!handle) {
        report_mistake("cuMemRelease of %#llx, which is released or was never one", number);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (--handle->references == 0) {
        LIST_REMOVE(handle, link);
        memory_unref(handle->memory);
        free(handle);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *ret_handle, void *memory) {
    ENTER(NEEDS_INIT);
    struct range *range = range_find((uint64_t)memory);
    if (!range || range->kind != RANGE_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    struct vmm_handle *handle;
    LIST_FOREACH(handle, &handles, link) {
        if (handle->memory == range->memory) {
            handle->references++;
            *ret_handle = handle->number;
            return CUDA_SUCCESS;
        }
    }
    int ordinal = 0;
    while (ordinal < standin.n_visible && standin.visible[ordinal] != range->memory->device)
        ordinal++;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = range->memory->handle_types,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
    range->memory->references++;
    *ret_handle = handle_new(range->memory, &properties)->number;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *ret_properties,
                                                CUmemGenericAllocationHandle number) {
    ENTER(NEEDS_INIT);
    struct vmm_handle *handle = handle_find(number);
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_properties = handle->properties;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *ret_shareable, CUmemGenericAllocationHandle number,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(NEEDS_INIT);
    struct vmm_handle *handle = handle_find(number);
    if (!handle || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(handle->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl(handle->memory->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(ret_shareable, &fd, sizeof(fd));
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret_handle, void *shareable,
                                        CUmemAllocationHandleType type) {
    ENTER(NEEDS_INIT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory;
    registry_driver_lock();
    CUresult error = memory_import((int)(intptr_t)shareable, true, &memory);
    registry_driver_unlock();
    if (error)
        return error;
    int ordinal = 0;
    while (ordinal < standin.n_visible && standin.visible[ordinal] != memory->device)
        ordinal++;
    if (ordinal == standin.n_visible) {
        memory_unref(memory);
        return CUDA_ERROR_INVALID_DEVICE;
    }
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
    *ret_handle = handle_new(memory, &properties)->number;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ret_pointer, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    ENTER(NEEDS_INIT);
    if (!whole(size) || flags || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t base;
    CUresult error = address_reserve(size, max_u64(alignment, GRANULARITY), 0, &base);
    if (error)
        return error;
    struct reservation *reservation = calloc(1, sizeof(*reservation));
    reservation->base = base;
    reservation->size = size;
    LIST_INSERT_HEAD(&reservations, reservation, link);
    *ret_pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    ENTER(NEEDS_INIT);
    struct reservation *reservation;
    LIST_FOREACH(reservation, &reservations, link) {
        if (reservation->base == pointer && reservation->size == size)
            break;
    }
    if (!reservation || range_overlaps(pointer, size)) {
        report_mistake("cuMemAddressFree of %#llx, which is %s", pointer,
                       reservation ? "still mapped" : "not reserved like this");
        return CUDA_ERROR_INVALID_VALUE;
    }
    LIST_REMOVE(reservation, link);
    free(reservation);
    address_release(pointer, size);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle number,
                  unsigned long long flags) {
    ENTER(NEEDS_INIT);
    struct vmm_handle *handle = handle_find(number);
    if (!handle || offset || flags || !whole(size) || pointer % GRANULARITY || size > handle->memory->size)
        return CUDA_ERROR_INVALID_VALUE;
    struct reservation *reservation;
    LIST_FOREACH(reservation, &reservations, link) {
        if (pointer >= reservation->base && pointer + size <= reservation->base + reservation->size)
            break;
    }
    if (!reservation || range_overlaps(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    struct range *range = range_new(RANGE_MAPPED, pointer, size, NULL);
    range->memory = handle->memory;
    range->memory->references++;
    return CUDA_SUCCESS;
}

/* Calls `each` for the mappings that make up exactly these addresses; false, and no call, if none do. */
static bool mappings_each(uint64_t base, size_t size, void (*each)(struct range *, const void *),
                          const void *argument) {
    for (uint64_t at = base; at < base + size;) {
        struct range *range = range_find(at);
        if (!range || range->kind != RANGE_MAPPED || range->base != at || range->size > base + size - at)
            return false;
        at += range->size;
    }
    for (uint64_t at = base; at < base + size;) {
        struct range *range = range_find(at);
        at += range->size;
        each(range, argument);
    }
    return size > 0;
}

static void mapping_end(struct range *range, const void *argument) {
    if (stream_uses(range->base, range->size))
        report_mistake("%#lx is unmapped while copies use it", (unsigned long)range->base);
    range_end(range);
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    ENTER(NEEDS_INIT);
    return mappings_each(pointer, size, mapping_end, NULL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void mapping_access(struct range *range, const void *argument) {
    const CUmemAccessDesc *access = argument;
    range->access[standin.visible[access->location.id]] = access->flags;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t n) {
    ENTER(NEEDS_INIT);
    for (size_t i = 0; i < n; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[i].location.id < 0 ||
            access[i].location.id >= standin.n_visible)
            return CUDA_ERROR_INVALID_VALUE;
        if (!mappings_each(pointer, size, mapping_access, &access[i]))
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *ret_flags, const CUmemLocation *location, CUdeviceptr pointer) {
    ENTER(NEEDS_INIT);
    struct range *range = range_find(pointer);
    if (!range || range->kind != RANGE_MAPPED || location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 ||
        location->id >= standin.n_visible)
        return CUDA_ERROR_INVALID_VALUE;
    *ret_flags = range->access[standin.visible[location->id]];
    return CUDA_SUCCESS;
}
