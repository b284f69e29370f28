/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything that touches the driver is a job on the device's thread, in order: opens and copies come
 * before the close that the last unref submits. An import that was opened in a context which is gone
 * is gone with it; nobody finds it any more, and its close does nothing.
 *
 * A chunk's descriptor is closed as soon as it is imported, since it holds the memory by itself.
 */
#include "daemon/imports.h"

#include "daemon/server.h"

#include <errno.h>

struct import_pool {
    uint32_t refs;
    struct device *device;
    struct device_job close;
    bool opening; /* some job may have opened it */
    /* The device thread's. */
    int fd;
    CUmemoryPool pool;
    uint32_t generation; /* of the context in which it is open; 0: not open */
};

struct import {
    TAILQ_ENTRY(import) link;
    uint32_t refs; /* 0: it is being closed */
    struct device *device;
    int pid;
    uint64_t pid_start;
    uint64_t buffer_id, size;
    enum device_kind kind;
    uint8_t handle[DEVICE_HANDLE_SIZE];
    struct import_pool *pool;
    struct device_job close;
    bool opening; /* some job may have opened it */
    bool open;    /* some job has */
    bool failed;  /* none could */
    bool counted;
    /* The device thread's. */
    int fd;
    CUdeviceptr pointer;
    uint32_t generation;
};

/* ---- on the device's thread ---- */

static bool import_is_open(const struct import *import) {
    return import->generation && import->generation == import->device->own.facts.generation &&
           import->device->own.context;
}

static int pool_open(struct import_pool *pool, struct problem *problem) {
    struct device *device = pool->device;
    const struct cuda *cuda = device_cuda(device);
    if (pool->generation && pool->generation == device->own.facts.generation)
        return 0;
    if (pool->fd < 0)
        return problem_set(problem, -EIO, "the memory pool was lost with its context");
    CUresult result = cuda->cuMemPoolImportFromShareableHandle(&pool->pool, (void *)(intptr_t)pool->fd,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    close(pool->fd);
    pool->fd = -1;
    if (result != CUDA_SUCCESS)
        return device_result(device, result, problem, "cuMemPoolImportFromShareableHandle");
    pool->generation = device->own.facts.generation;
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->own.number},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return device_result(device, cuda->cuMemPoolSetAccess(pool->pool, &access, 1), problem, "cuMemPoolSetAccess");
}

static int open_pooled(struct import *import, struct problem *problem) {
    const struct cuda *cuda = device_cuda(import->device);
    CUmemPoolPtrExportData data;
    int r = pool_open(import->pool, problem);
    if (r < 0)
        return r;
    memcpy(&data, import->handle, sizeof data);
    return device_result(import->device, cuda->cuMemPoolImportPointer(&import->pointer, import->pool->pool, &data),
                         problem, "cuMemPoolImportPointer");
}

static int open_legacy(struct import *import, struct problem *problem) {
    const struct cuda *cuda = device_cuda(import->device);
    CUipcMemHandle handle;
    memcpy(&handle, import->handle, sizeof handle);
    return device_result(import->device,
                         cuda->cuIpcOpenMemHandle_v2(&import->pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                         problem, "cuIpcOpenMemHandle");
}

/* Some devices know no mapping that can only be read. */
static CUresult allow_access(struct import *import) {
    const struct cuda *cuda = device_cuda(import->device);
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = import->device->own.number},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    CUresult result = cuda->cuMemSetAccess(import->pointer, import->size, &access, 1);
    if (result != CUDA_ERROR_INVALID_VALUE && result != CUDA_ERROR_NOT_SUPPORTED)
        return result;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return cuda->cuMemSetAccess(import->pointer, import->size, &access, 1);
}

static int open_chunk(struct import *import, struct problem *problem) {
    struct device *device = import->device;
    const struct cuda *cuda = device_cuda(device);
    CUmemGenericAllocationHandle handle;
    if (import->fd < 0)
        return problem_set(problem, -EIO, "a chunk was lost with its context");
    CUresult result = cuda->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)import->fd,
                                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(import->fd);
    import->fd = -1;
    if (result != CUDA_SUCCESS)
        return device_result(device, result, problem, "cuMemImportFromShareableHandle");
    const char *what = "cuMemAddressReserve";
    result = cuda->cuMemAddressReserve(&import->pointer, import->size, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        what = "cuMemMap";
        result = cuda->cuMemMap(import->pointer, import->size, 0, handle, 0);
        if (result == CUDA_SUCCESS) {
            what = "cuMemSetAccess";
            result = allow_access(import);
            if (result != CUDA_SUCCESS)
                (void)cuda->cuMemUnmap(import->pointer, import->size);
        }
        if (result != CUDA_SUCCESS)
            (void)cuda->cuMemAddressFree(import->pointer, import->size);
    }
    (void)cuda->cuMemRelease(handle); /* the mapping holds it */
    return device_result(device, result, problem, what);
}

static int import_open(struct import *import, struct problem *problem) {
    int r = 0;
    if (import_is_open(import))
        return 0;
    switch (import->kind) {
    case DEVICE_LEGACY:
        r = open_legacy(import, problem);
        break;
    case DEVICE_VMM:
        r = open_chunk(import, problem);
        break;
    case DEVICE_POOLED:
        r = open_pooled(import, problem);
        break;
    }
    if (!r)
        import->generation = import->device->own.facts.generation;
    return r;
}

static void import_close_run(struct device_job *job) {
    struct import *import = CONTAINER_OF(job, struct import, close);
    const struct cuda *cuda = device_cuda(import->device);
    struct problem problem = PROBLEM_NONE;
    CUresult result = CUDA_SUCCESS;
    if (!import_is_open(import))
        return;
    import->generation = 0;
    (void)cuda->cuCtxPushCurrent_v2(import->device->own.context);
    switch (import->kind) {
    case DEVICE_LEGACY:
        result = cuda->cuIpcCloseMemHandle(import->pointer);
        break;
    case DEVICE_VMM:
        result = cuda->cuMemUnmap(import->pointer, import->size);
        if (result == CUDA_SUCCESS)
            result = cuda->cuMemAddressFree(import->pointer, import->size);
        break;
    case DEVICE_POOLED:
        result = cuda->cuMemFree_v2(import->pointer);
        break;
    }
    job->result = device_result(import->device, result, &problem, "an allocation cannot be closed");
    job->problem = problem;
    if (import->device->own.context)
        (void)cuda->cuCtxPopCurrent_v2(NULL);
}

static void pool_close_run(struct device_job *job) {
    struct import_pool *pool = CONTAINER_OF(job, struct import_pool, close);
    struct device *device = pool->device;
    const struct cuda *cuda = device_cuda(device);
    if (!pool->generation || pool->generation != device->own.facts.generation || !device->own.context)
        return;
    (void)cuda->cuCtxPushCurrent_v2(device->own.context);
    job->result = device_result(device, cuda->cuMemPoolDestroy(pool->pool), &job->problem, "cuMemPoolDestroy");
    if (device->own.context)
        (void)cuda->cuCtxPopCurrent_v2(NULL);
}

int device_memory_find(const struct device_memory *memory, uint64_t offset, CUdeviceptr *ret_pointer,
                       uint64_t *ret_length) {
    uint32_t low = 0, high = memory->count;
    while (low < high) { /* the first extent that ends after it */
        uint32_t middle = (low + high) / 2;
        if (memory->extents[middle].offset + memory->extents[middle].size <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    const struct device_extent *extent = &memory->extents[low];
    assert(low < memory->count && extent->offset <= offset);
    if (!import_is_open(extent->import))
        return -EIO;
    *ret_pointer = extent->import->pointer + (offset - extent->offset);
    *ret_length = extent->size - (offset - extent->offset);
    return 0;
}

static int probe(struct import_open *open) {
    struct device *device = open->job.device;
    uint64_t seen = 0, length;
    CUdeviceptr pointer;
    int r = device_memory_find(open->probed, open->offset, &pointer, &length);
    if (r < 0)
        return problem_set(&open->job.problem, r, "the memory is not open");
    if (length < sizeof seen)
        return problem_set(&open->job.problem, -EINVAL, "the nonce does not lie in one allocation");
    r = device_result(device,
                      device_cuda(device)->cuMemcpyDtoHAsync_v2(&seen, pointer, sizeof seen, device->own.stream),
                      &open->job.problem, "cuMemcpyDtoHAsync");
    if (!r)
        r = device_wait(device, &open->job.problem);
    if (!r && seen != open->nonce)
        r = problem_set(&open->job.problem, -ESRCH, "device %s: what was read back is not what the client wrote there",
                        device->own.facts.text);
    return r;
}

static void open_run(struct device_job *job) {
    struct import_open *open = CONTAINER_OF(job, struct import_open, job);
    device_measure(job->device, open->free_bytes);
    for (uint32_t i = 0; !job->result && i < open->count; i++)
        job->result = import_open(open->imports[i], &job->problem);
    if (!job->result && open->probed)
        job->result = probe(open);
}

/* ---- on the control thread ---- */

static void import_free(struct device_job *job) {
    struct import *import = CONTAINER_OF(job, struct import, close);
    struct device *device = import->device;
    TAILQ_REMOVE(&device->imports, import, link);
    if (import->fd >= 0)
        close(import->fd);
    if (import->pool)
        import_pool_unref(import->pool);
    free(import);
    device_unuse(device);
}

static void close_done(struct device_job *job, int result, const struct problem *problem) {
    if (result < 0)
        device_report(job->device, problem, "memory of a client stays open");
}

static void import_unref(struct import *import) {
    if (--import->refs)
        return;
    import->close = (struct device_job){
        .device = import->device, .owed = true, .run = import_close_run, .done = close_done, .free = import_free};
    if (import->opening)
        device_submit(import->device, &import->close);
    else
        import_free(&import->close);
}

static void import_pool_free(struct device_job *job) {
    struct import_pool *pool = CONTAINER_OF(job, struct import_pool, close);
    struct device *device = pool->device;
    if (pool->fd >= 0)
        close(pool->fd);
    free(pool);
    device_unuse(device);
}

int import_pool_new(struct device *device, int fd, struct import_pool **ret_pool) {
    struct import_pool *pool = calloc(1, sizeof *pool);
    if (!pool) {
        close(fd);
        return -ENOMEM;
    }
    *pool = (struct import_pool){.refs = 1, .device = device, .fd = fd};
    device_use(device);
    *ret_pool = pool;
    return 0;
}

struct import_pool *import_pool_ref(struct import_pool *pool) {
    pool->refs++;
    return pool;
}

void import_pool_unref(struct import_pool *pool) {
    if (--pool->refs)
        return;
    pool->close = (struct device_job){
        .device = pool->device, .owed = true, .run = pool_close_run, .done = close_done, .free = import_pool_free};
    if (pool->opening)
        device_submit(pool->device, &pool->close);
    else
        import_pool_free(&pool->close);
}

const struct device *import_pool_device(const struct import_pool *pool) { return pool->device; }

static struct import *import_find(struct device *device, const struct import *key) {
    struct import *import;
    TAILQ_FOREACH(import, &device->imports, link)
    if (import->refs && import->pid == key->pid && import->pid_start == key->pid_start &&
        import->buffer_id == key->buffer_id && import->size == key->size && import->kind == key->kind &&
        !import->failed && (!import->open || (device->facts.context && import->generation == device->facts.generation)))
        return import;
    return NULL;
}

/* Takes fd over. */
static int import_get(struct device *device, const struct peer *peer, const struct import *key, int fd,
                      struct import **ret_import) {
    struct import wanted = *key;
    wanted.pid = peer->pid;
    wanted.pid_start = peer->pid_start;
    struct import *import = import_find(device, &wanted);
    if (import) {
        if (fd >= 0)
            close(fd);
        import->refs++;
        *ret_import = import;
        return 0;
    }
    import = malloc(sizeof *import);
    if (!import) {
        if (fd >= 0)
            close(fd);
        return -ENOMEM;
    }
    *import = wanted;
    import->refs = 1;
    import->device = device;
    import->fd = fd;
    if (import->pool)
        import_pool_ref(import->pool);
    device_use(device);
    TAILQ_INSERT_TAIL(&device->imports, import, link);
    *ret_import = import;
    return 0;
}

/* ---- descriptions ---- */

int device_memory_new(struct device *device, const struct peer *peer, const struct message_device_memory *message,
                      struct import_pool *pool, struct device_memory **ret_memory, struct problem *problem) {
    bool range = message->kind == DEVICE_VMM;
    struct device_memory *memory = calloc(1, sizeof *memory);
    struct device_extent *extents = range ? NULL : calloc(1, sizeof *extents);
    int r = !memory || (!range && !extents) ? -ENOMEM : 0;
    if (!r && !range) {
        struct import key = {
            .kind = (enum device_kind)message->kind,
            .buffer_id = message->buffer_id,
            .size = message->size,
            .pool = pool,
        };
        memcpy(key.handle, message->handle, sizeof key.handle);
        extents->size = message->size;
        r = import_get(device, peer, &key, -1, &extents->import);
    }
    if (r < 0) {
        free(extents);
        free(memory);
        return problem_set(problem, r, "out of memory");
    }
    *memory = (struct device_memory){
        .refs = 1,
        .number = message->memory,
        .kind = (enum device_kind)message->kind,
        .device = device,
        .size = message->size,
        .count = range ? 0 : 1,
        .extents = extents,
    };
    device_use(device);
    *ret_memory = memory;
    return 0;
}

static void memory_free(struct device_memory *memory) {
    struct device *device = memory->device;
    for (uint32_t i = 0; i < memory->count; i++)
        import_unref(memory->extents[i].import);
    free(memory->extents);
    free(memory);
    device_unuse(device);
}

int device_memory_add(struct device_memory **memory, const struct peer *peer,
                      const struct message_device_chunk *message, int fd, struct problem *problem) {
    struct device_memory *before = *memory;
    const struct device_extent *last = before->count ? &before->extents[before->count - 1] : NULL;
    struct import *import;
    if (before->kind != DEVICE_VMM || !message->size || message->offset > before->size ||
        message->size > before->size - message->offset || (last && message->offset < last->offset + last->size)) {
        close(fd);
        return problem_set(problem, -EINVAL, "a chunk of %llu bytes at %llu does not fit into device memory %u",
                           (unsigned long long)message->size, (unsigned long long)message->offset, message->memory);
    }
    const struct import key = {.kind = DEVICE_VMM, .buffer_id = message->buffer_id, .size = message->size};
    int r = import_get(before->device, peer, &key, fd, &import);
    if (r < 0)
        return problem_set(problem, r, "out of memory");
    const struct device_extent extent = {.offset = message->offset, .size = message->size, .import = import};
    /* Room for a power of two: it grows when the count reaches one. */
    bool shared = before->refs > 1, full = (before->count & (before->count - 1)) == 0;
    struct device_extent *extents = before->extents;
    if (shared || full) {
        uint32_t room = 1;
        while (room < before->count + 1)
            room *= 2;
        extents = malloc(room * sizeof *extents);
        struct device_memory *copy = extents && shared ? malloc(sizeof *copy) : NULL;
        if (!extents || (shared && !copy)) {
            free(extents);
            import_unref(import);
            return problem_set(problem, -ENOMEM, "out of memory");
        }
        if (before->count)
            memcpy(extents, before->extents, before->count * sizeof *extents);
        if (shared) {
            memcpy(copy, before, sizeof *copy);
            copy->refs = 1;
            device_use(copy->device);
            for (uint32_t i = 0; i < copy->count; i++)
                extents[i].import->refs++;
            copy->extents = extents;
            *memory = copy;
            device_memory_unref(before);
        } else {
            free(before->extents);
            before->extents = extents;
        }
    }
    (*memory)->extents[(*memory)->count++] = extent;
    return 0;
}

struct device_memory *device_memory_ref(struct device_memory *memory) {
    memory->refs++;
    return memory;
}

void device_memory_unref(struct device_memory *memory) {
    if (--memory->refs == 0)
        memory_free(memory);
}

bool device_memory_covers(const struct device_memory *memory, uint64_t offset, uint64_t size) {
    uint64_t end = offset + size;
    for (uint32_t i = 0; i < memory->count && offset < end; i++) {
        const struct device_extent *extent = &memory->extents[i];
        if (extent->offset + extent->size <= offset)
            continue;
        if (extent->offset > offset)
            return false;
        offset = extent->offset + extent->size;
    }
    return offset >= end;
}

/* ---- opening ---- */

static void open_done(struct device_job *job, int result, const struct problem *problem) {
    struct import_open *open = CONTAINER_OF(job, struct import_open, job);
    for (uint32_t i = 0; i < open->count; i++) {
        open->imports[i]->open = open->imports[i]->open || !result;
        open->imports[i]->failed = !open->imports[i]->open;
    }
    if (result < 0)
        device_report(job->device, problem, "device memory cannot be opened");
    open->over(open, result, problem);
}

static void open_free(struct device_job *job) {
    struct import_open *open = CONTAINER_OF(job, struct import_open, job);
    for (uint32_t i = 0; i < open->count; i++)
        import_unref(open->imports[i]);
    if (open->probed)
        device_memory_unref(open->probed);
    free(open);
}

int imports_open(struct device *device, struct device_memory *const *memories, uint32_t count,
                 const struct message_device_probe *message,
                 void (*over)(struct import_open *, int, const struct problem *), void *context,
                 struct problem *problem) {
    size_t extents = 0;
    for (uint32_t i = 0; i < count; i++)
        if (memories[i] && memories[i]->device == device)
            extents += memories[i]->count;
    struct import_open *open = calloc(1, sizeof *open + extents * sizeof open->imports[0]);
    if (!open)
        return problem_set(problem, -ENOMEM, "out of memory");
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; memories[i] && memories[i]->device == device && j < memories[i]->count; j++) {
            struct import *import = memories[i]->extents[j].import;
            import->refs++;
            import->opening = true;
            if (import->pool)
                import->pool->opening = true;
            open->imports[open->count++] = import;
        }
    if (message) {
        open->probed = device_memory_ref(memories[0]);
        open->offset = message->offset;
        open->nonce = message->nonce;
        open->free_bytes = message->free_bytes;
    }
    open->over = over;
    open->context = context;
    open->job = (struct device_job){.needs_context = true, .run = open_run, .done = open_done, .free = open_free};
    device_submit(device, &open->job);
    return 0;
}

/* ---- counting ---- */

void imports_count(struct device_memory *const *memories, uint32_t count, uint32_t *ret_imports, uint64_t *ret_bytes) {
    *ret_imports = 0;
    *ret_bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; memories[i] && j < memories[i]->count; j++)
            memories[i]->extents[j].import->counted = false;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; memories[i] && j < memories[i]->count; j++) {
            struct import *import = memories[i]->extents[j].import;
            if (!import->open || import->counted)
                continue;
            import->counted = true;
            ++*ret_imports;
            *ret_bytes += import->size;
        }
}

void imports_of(const struct device *device, uint32_t *ret_imports, uint64_t *ret_bytes) {
    const struct import *import;
    *ret_imports = 0;
    *ret_bytes = 0;
    TAILQ_FOREACH(import, &device->imports, link)
    if (import->open) {
        ++*ret_imports;
        *ret_bytes += import->size;
    }
}
