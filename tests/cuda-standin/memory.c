/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory: bytes in a memfd, which the driver maps for itself. What a program gets is an address in a mapping
 * without access, as the host cannot reach a device either; ranges lead from such addresses to the bytes. Addresses
 * that were freed come back soon, as with the real driver: a number that names the memory for good is the buffer id.
 */
#include "tests/cuda-standin/standin.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* The name of the memfd says what it is, so that a descriptor alone can be imported. */
static const char memory_name[] = "/memfd:cuda-standin:";

CUresult memory_new(int device, size_t size, bool charged, struct memory **ret_memory) {
    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){
        .id = registry_random(), .device = device, .size = size, .references = 1, .charged = charged, .fd = -1};
    CUresult error = charged ? registry_charge(device, memory->id, size) : CUDA_SUCCESS;
    if (error) {
        free(memory);
        return error;
    }
    char name[128];
    snprintf(name, sizeof(name), "cuda-standin:%016lx:%d", (unsigned long)memory->id, device);
    memory->fd = memfd_create(name, MFD_CLOEXEC);
    if (memory->fd >= 0 && ftruncate(memory->fd, size) == 0)
        memory->bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (!memory->bytes || memory->bytes == MAP_FAILED) {
        memory->bytes = NULL;
        memory_unref(memory);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (charged) /* that of pools is mostly never used */
        memset(memory->bytes, POISON_NEW, size);
    *ret_memory = memory;
    return CUDA_SUCCESS;
}

CUresult memory_import(int fd, bool charged, struct memory **ret_memory) {
    char path[64], name[128] = "";
    unsigned long id;
    int device;
    struct stat attributes;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof(name) - 1) < 0 || strncmp(name, memory_name, sizeof(memory_name) - 1) ||
        sscanf(name + sizeof(memory_name) - 1, "%lx:%d", &id, &device) != 2 || fstat(fd, &attributes) < 0)
        return CUDA_ERROR_INVALID_VALUE;

    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){.id = id,
                              .device = device,
                              .size = attributes.st_size,
                              .references = 1,
                              .imported = true,
                              .handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    memory->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    memory->bytes = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory->bytes == MAP_FAILED) {
        memory->bytes = NULL;
        memory_unref(memory);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    /* It is there already, and so always has room. */
    memory->charged = charged && registry_charge(device, memory->id, memory->size) == CUDA_SUCCESS;
    *ret_memory = memory;
    return CUDA_SUCCESS;
}

void memory_unref(struct memory *memory) {
    if (--memory->references)
        return;
    if (memory->charged)
        registry_uncharge(memory->id);
    if (memory->bytes)
        munmap(memory->bytes, memory->size);
    if (memory->fd >= 0)
        close(memory->fd);
    free(memory);
}

static const int reserve_flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/* What was released last is taken again first. */
static struct {
    uint64_t base;
    size_t size;
} released;

CUresult address_reserve(size_t size, size_t alignment, uint64_t avoid, uint64_t *ret_base) {
    void *refused = NULL;
    uint64_t last =
        released.size == size && released.base % alignment == 0 && released.base != avoid ? released.base : 0;
    released.size = 0;
    if (last) {
        void *again = mmap((void *)last, size, PROT_NONE, reserve_flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (again == (void *)last) {
            *ret_base = last;
            return CUDA_SUCCESS;
        }
        if (again != MAP_FAILED) /* by a kernel that takes it for a wish */
            munmap(again, size);
    }
    for (;;) {
        size_t whole = size + alignment;
        char *start = mmap(NULL, whole, PROT_NONE, reserve_flags, -1, 0);
        if (start == MAP_FAILED)
            break;
        uint64_t base = align_up((uint64_t)start, alignment);
        if (base == avoid && !refused) {
            refused = start;
            continue;
        }
        if (base > (uint64_t)start)
            munmap(start, base - (uint64_t)start);
        munmap((char *)base + size, (uint64_t)start + whole - base - size);
        if (refused)
            munmap(refused, whole);
        *ret_base = base;
        return CUDA_SUCCESS;
    }
    if (refused)
        munmap(refused, size + alignment);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void address_release(uint64_t base, size_t size) {
    munmap((void *)base, size);
    released.base = base;
    released.size = size;
}

struct range *range_new(enum range_kind kind, uint64_t base, size_t size, struct context *context) {
    struct range *range = calloc(1, sizeof(*range));
    *range = (struct range){.kind = kind,
                            .base = base,
                            .size = size,
                            .context = context,
                            .references = 1,
                            .buffer_id = standin.buffer_id++};
    if (context && !range_on_host(range))
        range->access[context->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    LIST_INSERT_HEAD(&standin.ranges, range, link);
    return range;
}

void range_free(struct range *range) {
    LIST_REMOVE(range, link);
    if (range->memory)
        memory_unref(range->memory);
    free(range);
}

struct range *range_find(uint64_t address) {
    struct range *range;
    LIST_FOREACH(range, &standin.ranges, link) {
        if (address >= range->base && address - range->base < range->size)
            return range;
    }
    return NULL;
}

struct range *range_find_base(uint64_t base, enum range_kind kind) {
    struct range *range = range_find(base);
    return range && range->base == base && range->kind == kind ? range : NULL;
}

bool range_overlaps(uint64_t base, size_t size) {
    struct range *range;
    LIST_FOREACH(range, &standin.ranges, link) {
        if (base < range->base + range->size && range->base < base + size)
            return true;
    }
    return false;
}

void range_end(struct range *range) {
    stream_settle(range->base, range->size);
    range_end_now(range);
}

void range_end_now(struct range *range) {
    uint64_t base = range->base;
    size_t size = range->size;
    switch (range->kind) {
    case RANGE_ALLOCATED:
        ipc_forget(range);
        range_free(range);
        address_release(base, align_up(size, PAGE));
        break;
    case RANGE_IMPORTED:
        range_free(range);
        address_release(base, align_up(size, PAGE));
        break;
    case RANGE_POOLED:
    case RANGE_POOL_IMPORTED:
        pool_range_gone(range);
        range_free(range);
        break;
    case RANGE_HOST_ALLOCATED:
        range_free(range);
        munmap((void *)base, size);
        break;
    case RANGE_MAPPED:
    case RANGE_HOST_REGISTERED:
        range_free(range);
        break;
    }
}

CUresult cuMemAlloc_v2(CUdeviceptr *ret_pointer, size_t size) {
    ENTER(NEEDS_CONTEXT);
    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory;
    uint64_t base;
    registry_driver_lock();
    CUresult error = memory_new(call.context->device, size, true, &memory);
    registry_driver_unlock();
    if (error)
        return error;
    error = address_reserve(align_up(size, PAGE), PAGE, 0, &base);
    if (error) {
        memory_unref(memory);
        return error;
    }
    struct range *range = range_new(RANGE_ALLOCATED, base, size, call.context);
    range->memory = memory;
    *ret_pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER(NEEDS_CONTEXT);
    if (!pointer)
        return CUDA_SUCCESS;
    struct range *range = range_find(pointer);
    if (!range || range->base != pointer ||
        (range->kind != RANGE_ALLOCATED && range->kind != RANGE_POOLED && range->kind != RANGE_POOL_IMPORTED)) {
        report_mistake("cuMemFree of %#llx, which is %s", pointer,
                       !range                          ? "not allocated"
                       : range->base != pointer        ? "not the start of an allocation"
                       : range->kind == RANGE_IMPORTED ? "imported, and must be closed"
                                                       : "no allocation");
        return CUDA_ERROR_INVALID_VALUE;
    }
    range_end(range);
    return CUDA_SUCCESS;
}
