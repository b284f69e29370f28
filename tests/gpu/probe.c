/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What can only be known of a real driver and device, asked and printed: how a second open of a handle ends, what
 * a copy comes to whose exporter is killed, whether memory of others can be mapped for reading only, how fast memory is
 * pinned; then what ckptd does there: how fast a capture is beside a plain copy into pinned memory, and how long
 * save and fence keep the program.
 *
 *     gpu-probe [MIB]    of device memory for each measurement (1024); CKPT_SOCKET names the daemon
 *
 * It exits with 0 if everything could be asked, whatever the answers. On the stand-in driver of the tests the times
 * mean nothing, and it says so.
 */
#include "base/cuda.h"
#include "client/ckpt.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#define ROUNDS 5
#define PATTERN 0x5a

static struct cuda cuda;
static const char *unit_note = "";

static void must(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    struct problem problem = PROBLEM_NONE;
    cuda_problem(&cuda, result, &problem, what);
    fprintf(stderr, "gpu-probe: %s\n", problem.text);
    exit(1);
}
#define MUST(call) must(call, #call)

static void must_ckpt(int result, const char *what) {
    if (result >= 0)
        return;
    fprintf(stderr, "gpu-probe: %s: %s: %s\n", what, ckpt_strerror(result), ckpt_strerror_last());
    exit(1);
}
#define MUST_CKPT(call) must_ckpt(call, #call)

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

static const char *name_of(CUresult result) {
    const char *name = NULL;
    return cuda.cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "an unknown error";
}

static void driver_begin(void) {
    CUcontext context;
    cuda_init(&cuda, NULL);
    if (cuda.state != CUDA_READY) {
        fprintf(stderr, "gpu-probe: %s\n", problem_text(&cuda.problem, 0));
        exit(77);
    }
    MUST(cuda.cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuda.cuCtxSetCurrent(context));
}

static void driver_end(void) { MUST(cuda.cuDevicePrimaryCtxRelease_v2(0)); }

/* ---- two processes: this program once more, as the one that has the memory ---- */

struct offer {
    CUipcMemHandle handle;
    uint64_t size, mapped_size;
};

static void send_offer(int socket, const struct offer *offer, int fd) {
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec bytes = {.iov_base = (void *)(uintptr_t)offer, .iov_len = sizeof *offer};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(socket, &message, 0) != (ssize_t)sizeof *offer)
        exit(1);
}

static int receive_offer(int socket, struct offer *ret_offer) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec bytes = {.iov_base = ret_offer, .iov_len = sizeof *ret_offer};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd = -1;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *ret_offer || !CMSG_FIRSTHDR(&message)) {
        fprintf(stderr, "gpu-probe: the exporting process failed\n");
        exit(1);
    }
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* Offers an allocation and a mapped range, and waits to be told to end, or to be killed. */
static int export_memory(int socket, size_t size) {
    driver_begin();
    struct offer offer = {.size = size};
    CUdeviceptr memory, range;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t granularity;
    int fd = -1;
    MUST(cuda.cuMemAlloc_v2(&memory, size));
    MUST(cuda.cuMemsetD8_v2(memory, PATTERN, size));
    MUST(cuda.cuIpcGetMemHandle(&offer.handle, memory));
    MUST(cuda.cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    offer.mapped_size = granularity;
    MUST(cuda.cuMemCreate(&handle, granularity, &properties, 0));
    MUST(cuda.cuMemAddressReserve(&range, granularity, 0, 0, 0));
    MUST(cuda.cuMemMap(range, granularity, 0, handle, 0));
    MUST(cuda.cuMemSetAccess(range, granularity, &access, 1));
    MUST(cuda.cuMemsetD8_v2(range, PATTERN, granularity));
    MUST(cuda.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    MUST(cuda.cuCtxSynchronize());
    send_offer(socket, &offer, fd);
    char word;
    while (read(socket, &word, 1) < 0 && errno == EINTR)
        ;
    close(fd);
    MUST(cuda.cuMemUnmap(range, granularity));
    MUST(cuda.cuMemAddressFree(range, granularity));
    MUST(cuda.cuMemRelease(handle));
    MUST(cuda.cuMemFree_v2(memory));
    driver_end();
    return 0;
}

struct exporter {
    pid_t pid;
    int socket, fd;
    struct offer offer;
};

static struct exporter exporter_start(size_t size) {
    int sockets[2];
    char number[16], bytes[24];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) < 0)
        exit(1);
    snprintf(number, sizeof number, "%d", sockets[1]);
    snprintf(bytes, sizeof bytes, "%zu", size);
    struct exporter exporter = {.pid = fork(), .socket = sockets[0]};
    if (exporter.pid == 0) {
        close(sockets[0]);
        execl("/proc/self/exe", "gpu-probe", "--export", number, bytes, (char *)NULL);
        _exit(127);
    }
    close(sockets[1]);
    exporter.fd = receive_offer(exporter.socket, &exporter.offer);
    return exporter;
}

static void exporter_end(struct exporter *exporter, bool killed) {
    if (killed)
        kill(exporter->pid, SIGKILL);
    close(exporter->socket);
    close(exporter->fd);
    int status;
    waitpid(exporter->pid, &status, 0);
}

static bool is_pattern(const uint8_t *bytes, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (bytes[i] != PATTERN)
            return false;
    return true;
}

static void second_open(void) {
    struct exporter exporter = exporter_start(MIB(4));
    CUdeviceptr first, second = 0;
    MUST(cuda.cuIpcOpenMemHandle_v2(&first, exporter.offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CUresult result = cuda.cuIpcOpenMemHandle_v2(&second, exporter.offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    printf("second open of a legacy handle in one process: %s%s\n", name_of(result),
           result != CUDA_SUCCESS ? ""
           : second == first      ? ", the same address"
                                  : ", another address");
    MUST(cuda.cuIpcCloseMemHandle(first));
    if (result == CUDA_SUCCESS)
        printf("  closing it after the first was closed: %s\n", name_of(cuda.cuIpcCloseMemHandle(second)));
    exporter_end(&exporter, false);
}

static void read_only_import(void) {
    struct exporter exporter = exporter_start(MIB(2));
    size_t size = exporter.offer.mapped_size;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr range;
    MUST(cuda.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)exporter.fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    MUST(cuda.cuMemAddressReserve(&range, size, 0, 0, 0));
    MUST(cuda.cuMemMap(range, size, 0, handle, 0));
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    CUresult result = cuda.cuMemSetAccess(range, size, &access, 1);
    printf("mapping imported memory for reading only: %s\n", name_of(result));
    if (result == CUDA_SUCCESS) {
        uint8_t *bytes = malloc(size);
        result = cuda.cuMemcpyDtoH_v2(bytes, range, size);
        printf("  reading it: %s, %s\n", name_of(result), is_pattern(bytes, size) ? "the right bytes" : "WRONG BYTES");
        free(bytes);
    }
    MUST(cuda.cuMemUnmap(range, size));
    MUST(cuda.cuMemAddressFree(range, size));
    MUST(cuda.cuMemRelease(handle));
    exporter_end(&exporter, false);
}

static void exporter_killed(size_t size) {
    size_t before = 0, during = 0, after = 0, total;
    MUST(cuda.cuMemGetInfo_v2(&before, &total));
    struct exporter exporter = exporter_start(size);
    CUdeviceptr memory;
    CUstream stream;
    void *host;
    MUST(cuda.cuMemHostAlloc(&host, size, 0));
    MUST(cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuda.cuIpcOpenMemHandle_v2(&memory, exporter.offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    memset(host, 0, size);
    MUST(cuda.cuMemcpyDtoHAsync_v2(host, memory, size, stream));
    exporter_end(&exporter, true);
    CUresult result = cuda.cuStreamSynchronize(stream);
    printf("exporter killed in the middle of a copy: %s, %s\n", name_of(result),
           is_pattern(host, size) ? "the right bytes" : "other bytes");
    result = cuda.cuMemcpyDtoHAsync_v2(host, memory, size, stream);
    if (result == CUDA_SUCCESS)
        result = cuda.cuStreamSynchronize(stream);
    printf("  a copy begun after its death: %s, %s\n", name_of(result),
           is_pattern(host, size) ? "the right bytes" : "other bytes");
    MUST(cuda.cuMemGetInfo_v2(&during, &total));
    result = cuda.cuIpcCloseMemHandle(memory);
    MUST(cuda.cuMemGetInfo_v2(&after, &total));
    printf("  closing its memory: %s; it was held until then: %s\n", name_of(result), after > during ? "yes" : "no");
    MUST(cuda.cuStreamDestroy_v2(stream));
    MUST(cuda.cuMemFreeHost(host));
}

/* ---- times ---- */

static void pin_rate(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    memset(memory, 0, size);
    double from = now_s();
    CUresult result = cuda.cuMemHostRegister_v2(memory, size, CU_MEMHOSTREGISTER_PORTABLE);
    double taken = now_s() - from;
    printf("pinning %zu MiB that are present: %s, %.2f GiB/s%s\n", size >> 20, name_of(result),
           (double)size / (double)GIB(1) / taken, unit_note);
    if (result == CUDA_SUCCESS)
        MUST(cuda.cuMemHostUnregister(memory));
    munmap(memory, size);
}

/* The same bytes: a plain copy into pinned memory, then a save of them, in turns. */
static void capture_rate(size_t size) {
    CUdeviceptr memory;
    CUstream stream;
    void *host;
    ckpt *c;
    MUST(cuda.cuMemAlloc_v2(&memory, size));
    MUST(cuda.cuMemsetD8_v2(memory, PATTERN, size));
    MUST(cuda.cuMemHostAlloc(&host, size, 0));
    MUST(cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuda.cuCtxSynchronize());
    MUST_CKPT(ckpt_open("gpu-probe", NULL, &c));
    MUST_CKPT(ckpt_protect_array(c, "memory", CKPT_U8, (void *)(uintptr_t)memory, size));
    struct ckpt_device_usage usage;
    CKPT_INIT(usage);
    MUST_CKPT(ckpt_device_usage(c, &usage));
    double plain[ROUNDS], capture[ROUNDS], save[ROUNDS], fence[ROUNDS];
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.to = CKPT_CAPTURED;
    options.urgent = 1;
    for (int i = -1; i < ROUNDS; i++) { /* the first round warms up */
        double from = now_s();
        MUST(cuda.cuMemcpyDtoHAsync_v2(host, memory, size, stream));
        MUST(cuda.cuStreamSynchronize(stream));
        double copied = now_s();
        MUST_CKPT(ckpt_save(c, (uint64_t)(i + 1), &options));
        double saved = now_s();
        MUST_CKPT(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        double fenced = now_s();
        MUST_CKPT(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        if (i < 0)
            continue;
        plain[i] = copied - from;
        save[i] = saved - copied;
        capture[i] = fenced - copied;
        fence[i] = now_s() - fenced;
    }
    struct ckpt_info info;
    CKPT_INIT(info);
    MUST_CKPT(ckpt_get_info(c, &info));
    double gib = (double)size / (double)GIB(1), copy = median(plain, ROUNDS), taken = median(capture, ROUNDS);
    printf("who copies: %s%s\n", info.push ? "the library (push): " : "the daemon", info.push ? info.push_reason : "");
    printf("device memory that the daemon takes: %.0f MiB for contexts, %.0f MiB held open\n",
           (double)usage.context_bytes / (double)MIB(1), (double)usage.import_bytes / (double)MIB(1));
    printf("plain copy into pinned memory: %.2f GiB/s%s\n", gib / copy, unit_note);
    printf("capture, from save to the fence's end: %.2f GiB/s, ratio to the plain copy %.2f%s\n", gib / taken,
           copy / taken, unit_note);
    printf("blocked: %.1f us in save, %.2f us in a fence after the capture%s\n", median(save, ROUNDS) * 1e6,
           median(fence, ROUNDS) * 1e6, unit_note);
    MUST_CKPT(ckpt_close(c));
    MUST(cuda.cuStreamDestroy_v2(stream));
    MUST(cuda.cuMemFreeHost(host));
    MUST(cuda.cuMemFree_v2(memory));
}

static void describe_devices(void) {
    int count = 0;
    MUST(cuda.cuDeviceGetCount(&count));
    for (int i = 0; i < count; i++) {
        char name[96] = "";
        size_t bytes = 0;
        MUST(cuda.cuDeviceGetName(name, sizeof name, i));
        MUST(cuda.cuDeviceTotalMem_v2(&bytes, i));
        printf("device %d: %s, %zu MiB; driver %d.%d\n", i, name, bytes >> 20, cuda.version / 1000,
               cuda.version % 1000 / 10);
        if (strstr(name, "stand-in"))
            unit_note = " (meaningless: the stand-in driver)";
    }
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "--export") == 0)
        return export_memory(atoi(argv[2]), strtoull(argv[3], NULL, 10));
    size_t size = MIB(argc > 1 ? strtoull(argv[1], NULL, 10) : 1024);
    if (size == 0) {
        fprintf(stderr, "usage: gpu-probe [MIB]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    driver_begin();
    describe_devices();
    second_open();
    read_only_import();
    exporter_killed(size);
    pin_rate(size);
    capture_rate(size);
    driver_end();
    return 0;
}
