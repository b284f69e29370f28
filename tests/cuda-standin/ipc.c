/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy handles: 64 bytes that mean an entry in the registry, and nothing to anyone else. They name a whole
 * allocation, wherever in it the pointer points. The importer reaches the memfd through the exporter's /proc entry, so
 * a handle ends with its process; what is open by then stays open.
 */
#include "tests/cuda-standin/standin.h"

#include <fcntl.h>
#include <sys/stat.h>

enum { HANDLE_PARTS = 8, HANDLE_NAME_PART = 3 };

/* 64 bytes that all depend on the name, so that a damaged handle is none. */
static void handle_make(const uint64_t name[2], CUipcMemHandle *ret_handle) {
    uint64_t parts[HANDLE_PARTS], state = name[0] ^ 0x9e3779b97f4a7c15;
    for (int i = 0; i < HANDLE_PARTS; i++) {
        state = (state ^ (state >> 29)) * 0xbf58476d1ce4e5b9 + name[1];
        parts[i] = state;
    }
    parts[HANDLE_NAME_PART] = name[0];
    parts[HANDLE_NAME_PART + 1] = name[1];
    memcpy(ret_handle->reserved, parts, sizeof(parts));
}

static bool handle_read(const CUipcMemHandle *handle, char ret_name[33]) {
    uint64_t name[2];
    CUipcMemHandle again;
    memcpy(name, handle->reserved + HANDLE_NAME_PART * sizeof(uint64_t), sizeof(name));
    handle_make(name, &again);
    snprintf(ret_name, 33, "%016lx%016lx", (unsigned long)name[0], (unsigned long)name[1]);
    return memcmp(&again, handle, sizeof(again)) == 0;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *ret_handle, CUdeviceptr pointer) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find(pointer);
    if (!range || range->kind != RANGE_ALLOCATED)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t name[2] = {range->memory->id, range->base};
    handle_make(name, ret_handle);
    if (range->handle[0])
        return CUDA_SUCCESS;
    char text[33];
    handle_read(ret_handle, text);
    struct stat attributes;
    fstat(range->memory->fd, &attributes);
    struct registry_export export = {.pid = getpid(),
                                     .fd = range->memory->fd,
                                     .device = range->memory->device,
                                     .inode = attributes.st_ino,
                                     .memory_id = range->memory->id,
                                     .base = range->base,
                                     .size = range->size};
    if (registry_export_write(text, &export) < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(range->handle, text, sizeof(text));
    return CUDA_SUCCESS;
}

/* Its owner frees it: gone for new importers; those that have it open find poison. */
void ipc_forget(struct range *range) {
    if (range->handle[0])
        registry_export_remove(range->handle);
    if (!registry_others_hold(range->memory->id))
        return;
    report_mistake("%#lx was freed while another process has it open", (unsigned long)range->base);
    memset(range->memory->bytes, POISON_FREED, range->size);
}

static struct range *import_find(uint64_t memory_id) {
    struct range *range;
    LIST_FOREACH(range, &standin.ranges, link) {
        if (range->kind == RANGE_IMPORTED && range->memory->id == memory_id)
            return range;
    }
    return NULL;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags) {
    ENTER(NEEDS_CONTEXT);
    char name[33];
    struct registry_export export;
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (!handle_read(&handle, name) || registry_export_read(name, &export) < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (export.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    struct range *range = import_find(export.memory_id);
    if (range && range->context == call.context) {
        if (standin.settings.reopen_refused)
            return CUDA_ERROR_ALREADY_MAPPED;
        range->references++;
        *ret_pointer = range->base;
        return CUDA_SUCCESS;
    }
    if (export.device != call.context->device)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;

    char path[64];
    struct stat attributes;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)export.pid, export.fd);
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &attributes) < 0 || attributes.st_ino != export.inode)
        return CUDA_ERROR_INVALID_HANDLE; /* the exporter is gone */
    struct memory *memory;
    registry_driver_lock();
    CUresult error = memory_import(fd, true, &memory);
    registry_driver_unlock();
    if (error)
        return error;
    uint64_t base;
    error = address_reserve(align_up(export.size, PAGE), PAGE, export.base, &base);
    if (error) {
        memory_unref(memory);
        return error;
    }
    range = range_new(RANGE_IMPORTED, base, export.size, call.context);
    range->memory = memory;
    *ret_pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER(NEEDS_CONTEXT);
    struct range *range = range_find_base(pointer, RANGE_IMPORTED);
    if (!range || range->context != call.context) {
        report_mistake("cuIpcCloseMemHandle of %#llx, which %s", pointer,
                       range ? "another context has open" : "is not the start of an open one");
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (--range->references)
        return CUDA_SUCCESS;
    if (stream_uses(range->base, range->size))
        report_mistake("%#llx is closed while copies use it", pointer);
    range_end(range);
    return CUDA_SUCCESS;
}
