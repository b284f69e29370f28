/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/support-cuda.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define DEVICES 8
#define PIECE MIB(2)
#define RANGE MIB(64) /* reserved for memory that grows */

struct cuda gpu;
static int device_count;
static CUcontext contexts[DEVICES];

static void make_directory(void) {
    const char *directory = test_path("cuda");
    CHECK(mkdir(directory, 0700) == 0 || errno == EEXIST);
    setenv("CUDA_STANDIN_DIR", directory, 1);
}

/* ---- which driver ---- */

static bool device_is_standin(void) {
    char name[64];
    return gpu.cuDeviceGetName(name, sizeof name, 0) == CUDA_SUCCESS && strstr(name, "stand-in");
}

/* In a process of its own, which never comes back. */
static _Noreturn void look(void) {
    make_directory();
    cuda_init(&gpu, NULL);
    _exit(gpu.state == CUDA_READY && device_is_standin());
}

bool gpu_is_standin(void) {
    static bool looked, found;
    if (gpu.state == CUDA_READY)
        return device_is_standin();
    if (!looked) {
        int status;
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            look();
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        found = WEXITSTATUS(status);
        looked = true;
    }
    return found;
}

void gpu_need_standin(void) {
    if (!gpu_is_standin())
        test_skip("only the stand-in driver fails, or is late, when it is told to");
}

/* ---- settings ---- */

void gpu_settings(const char *words) {
    make_directory();
    CLEANUP(freep) char *text = strdup(words);
    for (char *rest = NULL, *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char name[128];
        char *equals = strchr(word, '=');
        snprintf(name, sizeof name, "CUDA_STANDIN_%.*s", (int)(equals - word), word);
        setenv(name, equals + 1, 1);
    }
}

void gpu_fault(const char *text) {
    file_write(test_path("cuda/faults.new"), text ? text : "", text ? strlen(text) : 0);
    CHECK(rename(test_path("cuda/faults.new"), test_path("cuda/faults")) == 0);
}

bool gpu_hangs(void) { return file_exists(test_path("cuda/hung")); }

void gpu_unhang(void) { file_write(test_path("cuda/release"), "", 0); }

void gpu_check_mistakes(void) {
    if (file_exists(test_path("cuda/mistakes")))
        FAIL("the stand-in says: %s", file_read(test_path("cuda/mistakes"), &(size_t){0}));
}

/* ---- this process ---- */

void gpu_use(int device) {
    if (!contexts[device])
        CU(gpu.cuDevicePrimaryCtxRetain(&contexts[device], device));
    CU(gpu.cuCtxSetCurrent(contexts[device]));
}

void gpu_begin(void) {
    make_directory();
    cuda_init(&gpu, NULL);
    if (gpu.state != CUDA_READY)
        test_skip("%s", problem_text(&gpu.problem, 0));
    CU(gpu.cuDeviceGetCount(&device_count));
    gpu_use(0);
}

void gpu_need_devices(int count) {
    if (device_count < count)
        test_skip("there are %d devices, not %d", device_count, count);
}

void gpu_end(void) {
    CU(gpu.cuCtxSetCurrent(NULL));
    for (int device = 0; device < DEVICES; device++)
        if (contexts[device])
            CU(gpu.cuDevicePrimaryCtxRelease_v2(device));
}

unsigned gpu_queued_copies(int device, unsigned *ret_most) {
    FILE *file = fopen(test_path("cuda/copies"), "re");
    char program[32];
    int there;
    unsigned now, last = 0;
    *ret_most = 0;
    while (file && fscanf(file, "%31s %d %u", program, &there, &now) == 3) {
        if (there != device || strcmp(program, "ckptd") != 0)
            continue;
        last = now;
        *ret_most = now > *ret_most ? now : *ret_most;
    }
    if (file)
        fclose(file);
    return last;
}

uint64_t gpu_free_bytes(void) {
    size_t free_bytes, total;
    CU(gpu.cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes;
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
    CU(gpu.cuMemCreate(&handle, memory->piece, &wanted, 0));
    CU(gpu.cuMemMap(memory->at + offset, memory->piece, 0, handle, 0));
    CU(gpu.cuMemRelease(handle));
    CU(gpu.cuMemSetAccess(memory->at + offset, memory->piece, &access, 1));
}

void gpu_grow(struct gpu_memory *memory, size_t size) {
    for (; memory->size < size; memory->size += memory->piece)
        map_piece(memory, memory->size);
}

static void alloc_pooled(struct gpu_memory *memory) {
    CUmemPoolProps wanted = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                             .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = memory->device}};
    CU(gpu.cuMemPoolCreate(&memory->pool, &wanted));
    CU(gpu.cuMemAllocFromPoolAsync(&memory->at, memory->size, memory->pool, NULL));
    CU(gpu.cuStreamSynchronize(NULL));
}

struct gpu_memory gpu_alloc(enum gpu_kind kind, size_t size) {
    struct gpu_memory memory = {.kind = kind, .size = size};
    CU(gpu.cuCtxGetDevice(&memory.device));
    switch (kind) {
    case GPU_LEGACY:
        CU(gpu.cuMemAlloc_v2(&memory.at, size));
        break;
    case GPU_POOLED:
        alloc_pooled(&memory);
        break;
    default:
        memory.size = 0;
        memory.piece = PIECE;
        memory.reserved = RANGE;
        CU(gpu.cuMemAddressReserve(&memory.at, memory.reserved, 0, 0, 0));
        gpu_grow(&memory, size);
        break;
    }
    return memory;
}

void gpu_free(struct gpu_memory *memory) {
    switch (memory->kind) {
    case GPU_LEGACY:
        CU(gpu.cuMemFree_v2(memory->at));
        break;
    case GPU_POOLED:
        CU(gpu.cuMemFreeAsync(memory->at, NULL));
        CU(gpu.cuStreamSynchronize(NULL));
        CU(gpu.cuMemPoolDestroy(memory->pool));
        break;
    default:
        CU(gpu.cuMemUnmap(memory->at, memory->size));
        CU(gpu.cuMemAddressFree(memory->at, memory->reserved));
        break;
    }
    *memory = (struct gpu_memory){0};
}

/* ---- bytes ---- */

void gpu_write(CUdeviceptr at, const void *data, size_t size) { CU(gpu.cuMemcpyHtoD_v2(at, data, size)); }

void gpu_read(CUdeviceptr at, void *data, size_t size) { CU(gpu.cuMemcpyDtoH_v2(data, at, size)); }

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
