/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory pools. A pool is one memfd, as large as the device and mostly never touched, and allocations are pieces of
 * it. It is exported as a descriptor, and each piece as 64 bytes more; an importer must have the pool first, and must
 * free its pieces before their owner does.
 */
#include "tests/cuda-standin/standin.h"

#include <fcntl.h>

enum { PIECE_ALIGNMENT = 512 };

struct CUmemPoolHandle_st {
    LIST_ENTRY(CUmemPoolHandle_st) link;
    struct memory *memory;
    uint64_t base;
    size_t filled; /* places are not used twice */
    unsigned int access[DEVICES_MAX];
    bool imported, is_default, destroyed;
    unsigned int pieces;
};

struct piece {
    uint64_t pool_id, charge, offset, size, check;
};

static LIST_HEAD(, CUmemPoolHandle_st) pools = LIST_HEAD_INITIALIZER(pools);
static CUmemoryPool defaults[DEVICES_MAX];

unsigned int pool_count(void) {
    unsigned int n = 0;
    CUmemoryPool pool;
    LIST_FOREACH(pool, &pools, link) { n += !pool->destroyed && !pool->is_default; }
    return n;
}

static CUmemoryPool pool_find(CUmemoryPool handle) {
    CUmemoryPool pool;
    LIST_FOREACH(pool, &pools, link) {
        if (pool == handle)
            return pool->destroyed ? NULL : pool;
    }
    return NULL;
}

static CUresult pool_new(struct memory *memory, CUmemoryPool *ret_pool) {
    uint64_t base;
    CUresult error = address_reserve(memory->size, GRANULARITY, 0, &base);
    if (error) {
        memory_unref(memory);
        return error;
    }
    CUmemoryPool pool = calloc(1, sizeof(*pool));
    pool->memory = memory;
    pool->base = base;
    pool->access[memory->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    LIST_INSERT_HEAD(&pools, pool, link);
    *ret_pool = pool;
    return CUDA_SUCCESS;
}

static CUresult pool_create(int device, unsigned int handle_types, CUmemoryPool *ret_pool) {
    struct memory *memory;
    CUresult error = memory_new(device, standin.settings.device_memory, false, &memory);
    if (error)
        return error;
    memory->handle_types = handle_types;
    return pool_new(memory, ret_pool);
}

CUresult cuMemPoolCreate(CUmemoryPool *ret_pool, const CUmemPoolProps *p) {
    ENTER(NEEDS_INIT);
    if (p->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || p->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        p->location.id < 0 || p->location.id >= standin.n_visible ||
        (p->handleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    return pool_create(standin.visible[p->location.id], p->handleTypes, ret_pool);
}

static CUresult pool_default(int device, CUmemoryPool *ret_pool) {
    CUresult error = defaults[device] ? CUDA_SUCCESS : pool_create(device, 0, &defaults[device]);
    if (error)
        return error;
    defaults[device]->is_default = true;
    *ret_pool = defaults[device];
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *ret_pool, CUdevice device) {
    ENTER(NEEDS_INIT);
    if (device < 0 || device >= standin.n_visible)
        return CUDA_ERROR_INVALID_DEVICE;
    return pool_default(standin.visible[device], ret_pool);
}

static void pool_end_if_done(CUmemoryPool pool) {
    if (!pool->destroyed || pool->pieces)
        return;
    address_release(pool->base, pool->memory->size);
    memory_unref(pool->memory);
    LIST_REMOVE(pool, link);
    free(pool);
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    ENTER(NEEDS_INIT);
    CUmemoryPool pool = pool_find(handle);
    if (!pool || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    pool->destroyed = true; /* it stays as long as pieces of it are allocated */
    pool_end_if_done(pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t n) {
    ENTER(NEEDS_INIT);
    CUmemoryPool pool = pool_find(handle);
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n; i++) {
        if (access[i].location.id < 0 || access[i].location.id >= standin.n_visible)
            return CUDA_ERROR_INVALID_DEVICE;
        pool->access[standin.visible[access[i].location.id]] = access[i].flags;
        struct range *range;
        LIST_FOREACH(range, &standin.ranges, link) {
            if (range->pool == pool)
                range->access[standin.visible[access[i].location.id]] = access[i].flags;
        }
    }
    return CUDA_SUCCESS;
}

static struct range *piece_range(enum range_kind kind, CUmemoryPool pool, const struct piece *piece,
                                 struct context *context) {
    struct range *range = range_new(kind, pool->base + piece->offset, piece->size, context);
    range->memory = pool->memory;
    range->memory->references++;
    range->offset = piece->offset;
    range->pool = pool;
    range->charge = piece->charge;
    memcpy(range->access, pool->access, sizeof(range->access));
    pool->pieces++;
    return range;
}

void pool_range_gone(struct range *range) {
    if (range->kind == RANGE_POOLED && registry_others_hold(range->charge)) {
        report_mistake("%#lx was freed while another process has it open", (unsigned long)range->base);
        memset(range->memory->bytes + range->offset, POISON_FREED, range->size);
    }
    registry_uncharge(range->charge);
    range->pool->pieces--;
    pool_end_if_done(range->pool);
}

static CUresult piece_allocate(CUmemoryPool pool, size_t size, struct context *context, CUdeviceptr *ret_pointer) {
    if (!pool || pool->imported || !size)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > pool->memory->size - pool->filled)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece piece = {.charge = registry_random(), .offset = pool->filled, .size = size};
    CUresult error = registry_charge(pool->memory->device, piece.charge, size);
    if (error)
        return error;
    pool->filled = min_u64(align_up(pool->filled + size, PIECE_ALIGNMENT), pool->memory->size);
    struct range *range = piece_range(RANGE_POOLED, pool, &piece, context);
    memset(range->memory->bytes + range->offset, POISON_NEW, size);
    *ret_pointer = range->base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ret_pointer, size_t size, CUmemoryPool pool, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    if (!stream_resolve(stream, call.context))
        return CUDA_ERROR_INVALID_HANDLE;
    return piece_allocate(pool_find(pool), size, call.context, ret_pointer);
}

CUresult cuMemAllocAsync(CUdeviceptr *ret_pointer, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    if (!stream_resolve(stream, call.context))
        return CUDA_ERROR_INVALID_HANDLE;
    CUmemoryPool pool;
    CUresult error = pool_default(call.context->device, &pool);
    return error ? error : piece_allocate(pool, size, call.context, ret_pointer);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    struct CUstream_st *it = stream_resolve(stream, call.context);
    struct range *range = range_find(pointer);
    if (!it)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!range || range->base != pointer || (range->kind != RANGE_POOLED && range->kind != RANGE_POOL_IMPORTED)) {
        report_mistake("cuMemFreeAsync of %#llx, which is not allocated from a pool", pointer);
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct operation *operation = calloc(1, sizeof(*operation));
    operation->kind = OPERATION_FREE;
    operation->to.address = pointer;
    operation->width = range->size;
    operation->height = 1;
    stream_submit(it, operation);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportToShareableHandle(void *ret_shareable, CUmemoryPool handle, CUmemAllocationHandleType type,
                                          unsigned long long flags) {
    ENTER(NEEDS_INIT);
    CUmemoryPool pool = pool_find(handle);
    if (!pool || pool->imported || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(pool->memory->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl(pool->memory->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(ret_shareable, &fd, sizeof(fd));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *ret_pool, void *shareable, CUmemAllocationHandleType type,
                                            unsigned long long flags) {
    ENTER(NEEDS_INIT);
    if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory;
    CUresult error = memory_import((int)(intptr_t)shareable, false, &memory);
    if (!error)
        error = pool_new(memory, ret_pool);
    if (!error)
        (*ret_pool)->imported = true;
    return error;
}

static uint64_t piece_check(const struct piece *piece) {
    return (piece->pool_id ^ piece->charge ^ piece->offset * 31 ^ piece->size * 63) * 0x9e3779b97f4a7c15 + 1;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *ret_data, CUdeviceptr pointer) {
    ENTER(NEEDS_INIT);
    struct range *range = range_find(pointer);
    if (!range || range->kind != RANGE_POOLED || range->base != pointer || !range->memory->handle_types)
        return CUDA_ERROR_INVALID_VALUE;
    struct piece piece = {
        .pool_id = range->memory->id, .charge = range->charge, .offset = range->offset, .size = range->size};
    piece.check = piece_check(&piece);
    memset(ret_data, 0, sizeof(*ret_data));
    memcpy(ret_data->reserved, &piece, sizeof(piece));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *ret_pointer, CUmemoryPool handle, CUmemPoolPtrExportData *data) {
    ENTER(NEEDS_INIT);
    struct piece piece;
    CUmemoryPool pool = pool_find(handle);
    memcpy(&piece, data->reserved, sizeof(piece));
    if (!pool || !pool->imported || piece.check != piece_check(&piece) || piece.pool_id != pool->memory->id)
        return CUDA_ERROR_INVALID_VALUE;
    if (range_find(pool->base + piece.offset))
        return CUDA_ERROR_ALREADY_MAPPED;
    registry_charge(pool->memory->device, piece.charge, piece.size);
    *ret_pointer = piece_range(RANGE_POOL_IMPORTED, pool, &piece, NULL)->base;
    return CUDA_SUCCESS;
}
