/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/support-cuda.h"

#include <sys/stat.h>

#define DEVICES 8
#define PIECE MIB(2)
#define RANGE MIB(64) /* reserved for memory that grows */

struct cuda gpu;
static CUcontext contexts[DEVICES];
static bool prepared;

void gpu_setting(const char *name, const char *value) {
    char full[64];
    snprintf(full, sizeof full, "CUDA_STANDIN_%s", name);
    setenv(full, value, 1);
}

void gpu_prepare(void) {
    if (prepared)
        return;
    prepared = true;
    const char *directory = test_path("cuda");
    mkdir(directory, 0700);
    gpu_setting("DIR", directory);
}

void gpu_use(int device) {
    if (!contexts[device])
        GPU_OK(gpu.cuDevicePrimaryCtxRetain(&contexts[device], device));
    GPU_OK(gpu.cuCtxSetCurrent(contexts[device]));
}

void gpu_begin(void) {
    gpu_prepare();
    cuda_init(&gpu, NULL);
    if (gpu.state != CUDA_READY)
        test_skip("%s", problem_text(&gpu.problem, 0));
    gpu_use(0);
}

void gpu_end(void) {
    for (int device = 0; device < DEVICES; device++)
        if (contexts[device])
            GPU_OK(gpu.cuDevicePrimaryCtxRelease_v2(device));
    const char *mistakes = test_path("cuda/mistakes");
    if (file_exists(mistakes)) {
        size_t size;
        FAIL("%s", file_read(mistakes, &size));
    }
}

/* ---- memory ---- */

static CUmemAllocationProp properties(enum gpu_kind kind, int device) {
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = kind == GPU_MAPPED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                                                            : CU_MEM_HANDLE_TYPE_NONE,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
}

static void map_piece(const struct gpu_memory *memory, size_t offset) {
    CUmemAllocationProp wanted = properties(memory->kind, memory->device);
    CUmemAccessDesc access = {.location = wanted.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    GPU_OK(gpu.cuMemCreate(&handle, memory->piece, &wanted, 0));
    GPU_OK(gpu.cuMemMap(memory->at + offset, memory->piece, 0, handle, 0));
    GPU_OK(gpu.cuMemRelease(handle));
    GPU_OK(gpu.cuMemSetAccess(memory->at + offset, memory->piece, &access, 1));
}

void gpu_grow(struct gpu_memory *memory, size_t size) {
    for (; memory->size < size; memory->size += memory->piece)
        map_piece(memory, memory->size);
}

static void alloc_pooled(struct gpu_memory *memory) {
    CUmemPoolProps wanted = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                             .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = memory->device}};
    GPU_OK(gpu.cuMemPoolCreate(&memory->pool, &wanted));
    GPU_OK(gpu.cuMemAllocFromPoolAsync(&memory->at, memory->size, memory->pool, NULL));
    GPU_OK(gpu.cuStreamSynchronize(NULL));
}

struct gpu_memory gpu_alloc(enum gpu_kind kind, size_t size) {
    struct gpu_memory memory = {.kind = kind, .size = size};
    GPU_OK(gpu.cuCtxGetDevice(&memory.device));
    switch (kind) {
    case GPU_LEGACY:
        GPU_OK(gpu.cuMemAlloc_v2(&memory.at, size));
        break;
    case GPU_POOLED:
        alloc_pooled(&memory);
        break;
    default:
        memory.size = 0;
        memory.piece = PIECE;
        memory.reserved = RANGE;
        GPU_OK(gpu.cuMemAddressReserve(&memory.at, memory.reserved, 0, 0, 0));
        gpu_grow(&memory, size);
        break;
    }
    return memory;
}

void gpu_free(struct gpu_memory *memory) {
    switch (memory->kind) {
    case GPU_LEGACY:
        GPU_OK(gpu.cuMemFree_v2(memory->at));
        break;
    case GPU_POOLED:
        GPU_OK(gpu.cuMemFreeAsync(memory->at, NULL));
        GPU_OK(gpu.cuStreamSynchronize(NULL));
        GPU_OK(gpu.cuMemPoolDestroy(memory->pool));
        break;
    default:
        GPU_OK(gpu.cuMemUnmap(memory->at, memory->size));
        GPU_OK(gpu.cuMemAddressFree(memory->at, memory->reserved));
        break;
    }
    *memory = (struct gpu_memory){0};
}

/* ---- bytes ---- */

void gpu_write(CUdeviceptr at, const void *data, size_t size) { GPU_OK(gpu.cuMemcpyHtoD_v2(at, data, size)); }

void gpu_read(CUdeviceptr at, void *data, size_t size) { GPU_OK(gpu.cuMemcpyDtoH_v2(data, at, size)); }

void gpu_words_fill(CUdeviceptr at, size_t count, uint64_t seed) {
    CLEANUP(freep) uint64_t *words = malloc(count * sizeof *words);
    words_fill(words, count, seed);
    gpu_write(at, words, count * sizeof *words);
}

void gpu_words_check(CUdeviceptr at, size_t count, uint64_t seed) {
    CLEANUP(freep) uint64_t *words = malloc(count * sizeof *words);
    gpu_read(at, words, count * sizeof *words);
    words_check(words, count, seed);
}
