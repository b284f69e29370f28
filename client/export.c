/* SPDX-License-Identifier: Apache-2.0 */
#include "client/export.h"

#include "client/clock.h"

#include <sys/random.h>

/*
 * What a pointer's attributes say decides how the daemon gets its memory: out of an exportable pool,
 * an allocation of cuMemAlloc, or physical allocations mapped into a range (PyTorch's expandable
 * segments), of which one shard may touch many. Handles are made when they are sent, and descriptors
 * closed right after.
 *
 * An allocation is known by its buffer id: memory that was given back and allocated again at the same
 * address is another one.
 */

static int grow(void **items, size_t *count, size_t size) {
    size_t wanted = *count ? *count * 2 : 16;
    uint8_t *grown = realloc(*items, wanted * size);
    if (!grown)
        return error_set(CKPT_E_MEMORY, "out of memory for %zu device allocations", wanted);
    memset(grown + *count * size, 0, (wanted - *count) * size);
    *items = grown;
    *count = wanted;
    return CKPT_OK;
}

static void export_free(struct export *export) {
    free(export->chunks);
    *export = (struct export){0};
}

void exports_deinit(struct exports *exports) {
    for (size_t i = 0; i < exports->count; i++)
        export_free(&exports->items[i]);
    free(exports->items);
    *exports = (struct exports){.devices = exports->devices};
}

void exports_begin(struct exports *exports) {
    for (size_t i = 0; i < exports->count; i++)
        exports->items[i].wanted = false;
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++)
        exports->pools[i].wanted = false;
}

/* ---- what a pointer lies in ---- */

static uint64_t buffer_id(const struct exports *exports, CUdeviceptr pointer) {
    unsigned long long id = 0;
    if (exports->devices->cuda.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer) != CUDA_SUCCESS)
        return 0;
    return id;
}

struct found {
    enum device_kind kind;
    CUdeviceptr base;
    uint64_t size;
    CUmemoryPool pool;
};

static bool is_mapped(const struct cuda *cuda, CUdeviceptr pointer, bool *ret_exportable) {
    CUmemGenericAllocationHandle handle;
    if (cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)pointer) != CUDA_SUCCESS)
        return false;
    CUmemAllocationProp properties;
    *ret_exportable = cuda->cuMemGetAllocationPropertiesFromHandle(&properties, handle) == CUDA_SUCCESS &&
                      (properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    (void)cuda->cuMemRelease(handle);
    return true;
}

/* The device's context is current. CKPT_NONE with the sentence. */
static int look_at(const struct cuda *cuda, CUdeviceptr pointer, struct found *ret_found) {
    CUmemoryPool pool = NULL;
    unsigned int legacy = 0, managed = 0;
    unsigned long long handle_types = 0;
    CUdeviceptr range_base = 0;
    size_t range_size = 0;
    CUpointer_attribute attributes[] = {
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,   CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,       CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *values[] = {&pool, &legacy, &managed, &handle_types, &range_base, &range_size};
    if (cuda->cuPointerGetAttributes(ARRAY_SIZE(attributes), attributes, values, pointer) != CUDA_SUCCESS)
        return error_set(CKPT_NONE, "the driver does not know the memory");
    if (managed)
        return error_set(CKPT_NONE, "managed memory cannot be opened by another process");
    struct found found = {.base = range_base, .size = range_size};
    bool exportable = false;
    if (pool) {
        found.kind = DEVICE_POOLED;
        found.pool = pool;
        if (!(handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
            return error_set(CKPT_NONE,
                             "the memory pool was not made exportable (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)");
    } else if (is_mapped(cuda, pointer, &exportable)) {
        found.kind = DEVICE_VMM;
        if (!exportable)
            return error_set(CKPT_NONE,
                             "the mapped memory was not made exportable (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)");
        *ret_found = found;
        return CKPT_OK; /* base and size are the range's */
    } else if (legacy) {
        found.kind = DEVICE_LEGACY;
    } else {
        return error_set(CKPT_NONE, "this kind of device memory cannot be opened by another process");
    }
    size_t size = 0;
    if (cuda->cuMemGetAddressRange_v2(&found.base, &size, pointer) != CUDA_SUCCESS)
        return error_set(CKPT_NONE, "the driver does not know the allocation");
    found.size = size;
    *ret_found = found;
    return CKPT_OK;
}

/* ---- the table ---- */

static int pool_place(struct exports *exports, int device, CUmemoryPool pool, uint32_t *ret_number) {
    uint32_t free = DEVICE_POOLS_MAX;
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++) {
        if (exports->pools[i].pool == pool && exports->pools[i].device == device) {
            exports->pools[i].wanted = true;
            *ret_number = i;
            return CKPT_OK;
        }
        if (!exports->pools[i].pool && free == DEVICE_POOLS_MAX)
            free = i;
    }
    if (free == DEVICE_POOLS_MAX)
        return error_set(CKPT_NONE, "there are more than %d memory pools (DEVICE_POOLS_MAX)", DEVICE_POOLS_MAX);
    exports->pools[free] = (struct export_pool){.pool = pool, .device = device, .wanted = true};
    *ret_number = free;
    return CKPT_OK;
}

static int item_new(struct exports *exports, size_t *ret_number) {
    size_t i = 0;
    while (i < exports->count && exports->items[i].kind)
        i++;
    if (i == DEVICE_MEMORIES_MAX)
        return error_set(CKPT_NONE, "there are more than %d device allocations (DEVICE_MEMORIES_MAX)",
                         DEVICE_MEMORIES_MAX);
    if (i == exports->count) {
        int r = grow((void **)&exports->items, &exports->count, sizeof *exports->items);
        if (r < 0)
            return r;
    }
    *ret_number = i;
    return CKPT_OK;
}

static bool covers(const struct export *export, int device, CUdeviceptr pointer, uint64_t size) {
    return export->kind && export->device == device && pointer >= export->base &&
           size <= export->base + export->size - pointer && pointer <= export->base + export->size;
}

/* Still the memory that was described? Ranges are looked at chunk by chunk. */
static bool is_current(const struct exports *exports, const struct export *export) {
    if (export->kind != DEVICE_VMM)
        return buffer_id(exports, export->base) == export->buffer_id;
    for (size_t i = 0; i < export->chunk_count; i++)
        if (buffer_id(exports, export->base + export->chunks[i].offset) != export->chunks[i].buffer_id)
            return false;
    return true;
}

bool exports_are_stale(const struct exports *exports) {
    for (size_t i = 0; i < exports->count; i++)
        if (exports->items[i].kind && exports->items[i].wanted && !is_current(exports, &exports->items[i]))
            return true;
    return false;
}

static struct export *item_find(struct exports *exports, int device, CUdeviceptr pointer, uint64_t size) {
    for (size_t n = 0; n < exports->count; n++) {
        size_t i = (exports->last + n) % exports->count;
        struct export *export = &exports->items[i];
        /* One that is wanted was looked at since exports_begin(). */
        if (covers(export, device, pointer, size) && (export->wanted || is_current(exports, export))) {
            exports->last = i;
            return export;
        }
    }
    return NULL;
}

/* The first chunk that ends behind `offset`. */
static size_t chunk_position(const struct export *export, uint64_t offset) {
    size_t i = 0;
    while (i < export->chunk_count && export->chunks[i].offset + export->chunks[i].size <= offset)
        i++;
    return i;
}

static int chunk_insert(struct export *export, size_t at, struct export_chunk chunk) {
    if (export->chunk_count == export->chunk_capacity) {
        int r = grow((void **)&export->chunks, &export->chunk_capacity, sizeof *export->chunks);
        if (r < 0)
            return r;
    }
    memmove(&export->chunks[at + 1], &export->chunks[at], (export->chunk_count - at) * sizeof chunk);
    export->chunks[at] = chunk;
    export->chunk_count++;
    return CKPT_OK;
}

/* Learns of the chunks that hold [offset, offset + size) of a range. */
static int chunks_cover(struct exports *exports, struct export *export, uint64_t offset, uint64_t size) {
    const struct cuda *cuda = &exports->devices->cuda;
    uint64_t at = offset, end = offset + size;
    while (at < end) {
        size_t position = chunk_position(export, at);
        const struct export_chunk *known = &export->chunks[position];
        if (position < export->chunk_count && known->offset <= at) {
            at = known->offset + known->size;
            continue;
        }
        CUdeviceptr base = 0;
        size_t length = 0;
        bool exportable = false;
        if (cuda->cuMemGetAddressRange_v2(&base, &length, export->base + at) != CUDA_SUCCESS ||
            !is_mapped(cuda, export->base + at, &exportable))
            return error_set(CKPT_NONE, "the driver does not know what is mapped at 0x%llx", export->base + at);
        if (!exportable)
            return error_set(CKPT_NONE,
                             "the mapped memory was not made exportable (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)");
        struct export_chunk chunk = {
            .offset = base - export->base, .size = length, .buffer_id = buffer_id(exports, base)};
        int r = chunk_insert(export, position, chunk);
        if (r < 0)
            return r;
        at = chunk.offset + chunk.size;
    }
    return CKPT_OK;
}

/* A new entry of the table. */
static int item_add(struct exports *exports, int device, CUdeviceptr pointer, struct export **ret_export) {
    struct found found = {0};
    size_t number = 0;
    uint32_t pool = 0;
    int r = look_at(&exports->devices->cuda, pointer, &found);
    if (r == CKPT_OK)
        r = item_new(exports, &number);
    if (r == CKPT_OK && found.kind == DEVICE_POOLED)
        r = pool_place(exports, device, found.pool, &pool);
    if (r != CKPT_OK)
        return r;
    exports->items[number] =
        (struct export){.kind = found.kind,
                        .device = device,
                        .base = found.base,
                        .size = found.size,
                        .pool = pool,
                        .buffer_id = found.kind == DEVICE_VMM ? 0 : buffer_id(exports, found.base)};
    exports->last = number;
    *ret_export = &exports->items[number];
    return CKPT_OK;
}

/* The device's context is current. */
static int place(struct exports *exports, int device, CUdeviceptr pointer, uint64_t size, struct export **ret_export) {
    struct export *export = item_find(exports, device, pointer, size);
    int r = export ? CKPT_OK : item_add(exports, device, pointer, &export);
    if (r != CKPT_OK)
        return r;
    if (!covers(export, device, pointer, size))
        return error_set(CKPT_NONE, "the tensor does not lie in one allocation");
    export->wanted = true;
    if (export->kind == DEVICE_POOLED)
        exports->pools[export->pool].wanted = true;
    *ret_export = export;
    return export->kind == DEVICE_VMM ? chunks_cover(exports, export, pointer - export->base, size) : CKPT_OK;
}

int exports_place(struct exports *exports, int device, const void *pointer, uint64_t size, uint32_t *ret_memory,
                  uint64_t *ret_offset) {
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)pointer;
    int r = device_enter(exports->devices, device);
    if (r < 0)
        return r;
    struct export *export = NULL;
    r = place(exports, device, address, size, &export);
    device_leave(exports->devices);
    if (r != CKPT_OK)
        return r;
    *ret_memory = (uint32_t)(export - exports->items);
    *ret_offset = address - export->base;
    return CKPT_OK;
}

/* ---- telling the daemon ---- */

/* The driver does not do what sharing needs: CKPT_NONE with its sentence. */
static int unless(const struct exports *exports, CUresult result, const char *what) {
    return devices_result(exports->devices, result, what) < 0 ? CKPT_NONE : CKPT_OK;
}

static int tell(struct link *link, enum opcode opcode, const void *body, int fd, uint64_t deadline) {
    return link_send(link, &(struct link_request){.opcode = opcode, .body = body, .fd = fd}, deadline, NULL);
}

static int announce_pool(struct exports *exports, uint32_t number, struct link *link, uint64_t deadline) {
    const struct export_pool *pool = &exports->pools[number];
    CLEANUP(closep) int fd = -1;
    CUresult result = exports->devices->cuda.cuMemPoolExportToShareableHandle(
        &fd, pool->pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    int r = unless(exports, result, "cuMemPoolExportToShareableHandle");
    if (r != CKPT_OK)
        return r;
    struct message_device_pool body = {.pool = number};
    memcpy(body.uuid, exports->devices->items[pool->device].uuid, sizeof body.uuid);
    return tell(link, MESSAGE_DEVICE_POOL, &body, fd, deadline);
}

/* The 64 bytes by which another process opens it. */
static int make_handle(const struct exports *exports, const struct export *export,
                       uint8_t ret_handle[DEVICE_HANDLE_SIZE]) {
    const struct cuda *cuda = &exports->devices->cuda;
    _Static_assert(sizeof(CUipcMemHandle) == DEVICE_HANDLE_SIZE && sizeof(CUmemPoolPtrExportData) == DEVICE_HANDLE_SIZE,
                   "handles of the driver");
    CUresult result = CUDA_SUCCESS;
    if (export->kind == DEVICE_LEGACY) {
        CUipcMemHandle handle;
        result = cuda->cuIpcGetMemHandle(&handle, export->base);
        if (result == CUDA_SUCCESS)
            memcpy(ret_handle, &handle, sizeof handle);
    } else if (export->kind == DEVICE_POOLED) {
        CUmemPoolPtrExportData data;
        result = cuda->cuMemPoolExportPointer(&data, export->base);
        if (result == CUDA_SUCCESS)
            memcpy(ret_handle, &data, sizeof data);
    }
    return unless(exports, result, "the driver does not export the memory");
}

static int announce_memory(struct exports *exports, size_t number, struct link *link, uint64_t deadline) {
    const struct export *export = &exports->items[number];
    struct message_device_memory body = {.memory = (uint32_t)number,
                                         .kind = export->kind,
                                         .size = export->size,
                                         .buffer_id = export->buffer_id,
                                         .pool = export->pool};
    memcpy(body.uuid, exports->devices->items[export->device].uuid, sizeof body.uuid);
    int r = make_handle(exports, export, body.handle);
    return r == CKPT_OK ? tell(link, MESSAGE_DEVICE_MEMORY, &body, -1, deadline) : r;
}

static int announce_chunk(struct exports *exports, size_t number, const struct export_chunk *chunk, struct link *link,
                          uint64_t deadline) {
    const struct cuda *cuda = &exports->devices->cuda;
    const struct export *export = &exports->items[number];
    CUmemGenericAllocationHandle handle;
    CLEANUP(closep) int fd = -1;
    CUresult result = cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)(export->base + chunk->offset));
    if (result == CUDA_SUCCESS) {
        result = cuda->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        (void)cuda->cuMemRelease(handle);
    }
    int r = unless(exports, result, "cuMemExportToShareableHandle");
    if (r != CKPT_OK)
        return r;
    struct message_device_chunk body = {
        .memory = (uint32_t)number, .offset = chunk->offset, .size = chunk->size, .buffer_id = chunk->buffer_id};
    return tell(link, MESSAGE_DEVICE_CHUNK, &body, fd, deadline);
}

/* The device's context is current. */
static int announce_item(struct exports *exports, size_t number, struct link *link, uint64_t deadline) {
    struct export *export = &exports->items[number];
    int r = CKPT_OK;
    if (export->kind == DEVICE_POOLED && !exports->pools[export->pool].announced) {
        r = announce_pool(exports, export->pool, link, deadline);
        exports->pools[export->pool].announced = r == CKPT_OK;
    }
    if (r == CKPT_OK && !export->announced) {
        r = announce_memory(exports, number, link, deadline);
        export->announced = r == CKPT_OK;
    }
    for (size_t i = 0; i < export->chunk_count && r == CKPT_OK; i++) {
        if (export->chunks[i].announced)
            continue;
        r = announce_chunk(exports, number, &export->chunks[i], link, deadline);
        export->chunks[i].announced = r == CKPT_OK;
    }
    return r;
}

/* ---- the probe ---- */

/* A small memory of the same kind as the program's, made for a moment: the program's own may be changing. */
struct probe {
    CUdeviceptr base;
    size_t size;
    CUmemGenericAllocationHandle handle; /* DEVICE_VMM */
    bool reserved, created, mapped;
    CUstream stream; /* DEVICE_POOLED */
};

static CUresult probe_make_mapped(const struct exports *exports, const struct export *like, struct probe *probe) {
    const struct cuda *cuda = &exports->devices->cuda;
    CUmemAllocationProp properties;
    CUmemGenericAllocationHandle theirs;
    CUresult result =
        cuda->cuMemRetainAllocationHandle(&theirs, (void *)(uintptr_t)(like->base + like->chunks[0].offset));
    if (result == CUDA_SUCCESS) {
        result = cuda->cuMemGetAllocationPropertiesFromHandle(&properties, theirs);
        (void)cuda->cuMemRelease(theirs);
    }
    if (result == CUDA_SUCCESS)
        result = cuda->cuMemGetAllocationGranularity(&probe->size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result == CUDA_SUCCESS)
        result = cuda->cuMemCreate(&probe->handle, probe->size, &properties, 0);
    if (result == CUDA_SUCCESS) {
        probe->created = true;
        result = cuda->cuMemAddressReserve(&probe->base, probe->size, 0, 0, 0);
    }
    if (result == CUDA_SUCCESS) {
        probe->reserved = true;
        result = cuda->cuMemMap(probe->base, probe->size, 0, probe->handle, 0);
    }
    if (result == CUDA_SUCCESS) {
        probe->mapped = true;
        CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        result = cuda->cuMemSetAccess(probe->base, probe->size, &access, 1);
    }
    return result;
}

static CUresult probe_make(const struct exports *exports, const struct export *like, struct probe *probe) {
    const struct cuda *cuda = &exports->devices->cuda;
    probe->size = sizeof(uint64_t);
    if (like->kind == DEVICE_VMM)
        return probe_make_mapped(exports, like, probe);
    if (like->kind == DEVICE_LEGACY)
        return cuda->cuMemAlloc_v2(&probe->base, probe->size);
    CUresult result = cuda->cuStreamCreate(&probe->stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result =
            cuda->cuMemAllocFromPoolAsync(&probe->base, probe->size, exports->pools[like->pool].pool, probe->stream);
    return result == CUDA_SUCCESS ? cuda->cuStreamSynchronize(probe->stream) : result;
}

static void probe_free(const struct exports *exports, enum device_kind kind, struct probe *probe) {
    const struct cuda *cuda = &exports->devices->cuda;
    if (kind == DEVICE_LEGACY && probe->base)
        (void)cuda->cuMemFree_v2(probe->base);
    if (kind == DEVICE_POOLED && probe->base)
        (void)cuda->cuMemFreeAsync(probe->base, probe->stream);
    if (probe->stream) {
        (void)cuda->cuStreamSynchronize(probe->stream);
        (void)cuda->cuStreamDestroy_v2(probe->stream);
    }
    if (probe->mapped)
        (void)cuda->cuMemUnmap(probe->base, probe->size);
    if (probe->reserved)
        (void)cuda->cuMemAddressFree(probe->base, probe->size);
    if (probe->created)
        (void)cuda->cuMemRelease(probe->handle);
}

static int probe_ask(const struct exports *exports, size_t number, uint64_t nonce, struct link *link,
                     uint64_t deadline) {
    size_t free_bytes = 0, total;
    if (exports->devices->cuda.cuMemGetInfo_v2(&free_bytes, &total) != CUDA_SUCCESS)
        free_bytes = 0;
    struct message_device_probe body = {.memory = (uint32_t)number, .nonce = nonce, .free_bytes = free_bytes};
    int r = link_call(link, &(struct link_request){.opcode = MESSAGE_DEVICE_PROBE, .body = &body, .fd = -1},
                      MESSAGE_DEVICE_PROBED, deadline);
    if (r < 0)
        return r;
    const struct message_device_probed *probed = link->message.body;
    if (!(probed->flags & DEVICE_PROBED_REFUSED))
        return CKPT_OK;
    return error_set(CKPT_NONE, "%.*s", (int)link->message.tail_length, link->message.tail);
}

/* Describes the probe as a memory of its own, asks, and has it closed: only then it may be freed. */
static int probe_describe(struct exports *exports, const struct export *like, const struct probe *probe, uint64_t nonce,
                          struct link *link, uint64_t deadline) {
    struct export *export = NULL;
    int r = place(exports, like->device, probe->base, sizeof nonce, &export);
    if (r != CKPT_OK)
        return r;
    size_t number = (size_t)(export - exports->items);
    export->wanted = false;
    r = announce_item(exports, number, link, deadline);
    if (r == CKPT_OK)
        r = probe_ask(exports, number, nonce, link, deadline);
    if (!link_is_up(link))
        return r;
    int released = exports_release(exports, link, deadline);
    export_free(&exports->items[number]);
    return released < 0 ? released : r;
}

/* The device's context is current. */
static int probe_kind(struct exports *exports, size_t like_number, struct link *link, uint64_t deadline) {
    const struct export like = exports->items[like_number]; /* the table may move */
    uint64_t nonce;
    if (getrandom(&nonce, sizeof nonce, GRND_NONBLOCK) != sizeof nonce)
        nonce = clock_now() ^ (uintptr_t)exports;
    struct probe probe = {0};
    CUresult result = probe_make(exports, &like, &probe);
    if (result == CUDA_SUCCESS)
        result = exports->devices->cuda.cuMemcpyHtoD_v2(probe.base, &nonce, sizeof nonce);
    int r = unless(exports, result, "no device memory for a trial");
    if (r == CKPT_OK)
        r = probe_describe(exports, &like, &probe, nonce, link, deadline);
    probe_free(exports, like.kind, &probe);
    return r;
}

/* Does `work` with each memory that is wanted, its device's context current. */
static int for_each_wanted(struct exports *exports, struct link *link, uint64_t deadline,
                           int (*work)(struct exports *exports, size_t number, struct link *link, uint64_t deadline)) {
    int r = CKPT_OK;
    for (size_t i = 0; i < exports->count && r == CKPT_OK; i++) {
        if (!exports->items[i].kind || !exports->items[i].wanted)
            continue;
        r = device_enter(exports->devices, exports->items[i].device);
        if (r < 0)
            return r;
        r = work(exports, i, link, deadline);
        device_leave(exports->devices);
    }
    return r;
}

static int probe_once(struct exports *exports, size_t number, struct link *link, uint64_t deadline) {
    const struct export *export = &exports->items[number];
    bool *probed = &exports->probed[export->device][export->kind];
    if (*probed)
        return CKPT_OK;
    *probed = true;
    return probe_kind(exports, number, link, deadline);
}

int exports_announce(struct exports *exports, struct link *link, uint64_t deadline) {
    int r = for_each_wanted(exports, link, deadline, probe_once);
    return r == CKPT_OK ? for_each_wanted(exports, link, deadline, announce_item) : r;
}

int exports_trim(struct exports *exports, struct link *link, uint64_t deadline) {
    for (size_t i = 0; i < exports->count; i++) {
        struct export *export = &exports->items[i];
        if (!export->kind || export->wanted)
            continue;
        struct message_device_drop body = {.number = (uint32_t)i};
        int r = export->announced ? tell(link, MESSAGE_DEVICE_DROP, &body, -1, deadline) : CKPT_OK;
        if (r < 0)
            return r;
        export_free(export);
    }
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++) {
        struct export_pool *pool = &exports->pools[i];
        if (!pool->pool || pool->wanted)
            continue;
        struct message_device_drop body = {.number = i, .flags = DEVICE_DROP_POOL};
        int r = pool->announced ? tell(link, MESSAGE_DEVICE_DROP, &body, -1, deadline) : CKPT_OK;
        if (r < 0)
            return r;
        *pool = (struct export_pool){0};
    }
    return CKPT_OK;
}

bool exports_told(const struct exports *exports) {
    for (size_t i = 0; i < exports->count; i++)
        if (exports->items[i].announced)
            return true;
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++)
        if (exports->pools[i].announced)
            return true;
    return false;
}

static void forget_announced(struct exports *exports) {
    for (size_t i = 0; i < exports->count; i++) {
        exports->items[i].announced = false;
        for (size_t j = 0; j < exports->items[i].chunk_count; j++)
            exports->items[i].chunks[j].announced = false;
    }
    for (uint32_t i = 0; i < DEVICE_POOLS_MAX; i++)
        exports->pools[i].announced = false;
}

int exports_release(struct exports *exports, struct link *link, uint64_t deadline) {
    if (!exports_told(exports))
        return CKPT_OK;
    forget_announced(exports);
    struct message_empty body = {0};
    return link_call(link, &(struct link_request){.opcode = MESSAGE_DEVICE_RELEASE, .body = &body, .fd = -1},
                     MESSAGE_OK, deadline);
}

void exports_forget(struct exports *exports) {
    forget_announced(exports);
    memset(exports->probed, 0, sizeof exports->probed);
}
