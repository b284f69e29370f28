/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same as hello.c, in the memory of a GPU: each step changes an array there, and saves it. Kill
 * it and run it again: it goes on where the last complete version was. Nothing is copied to the host
 * by the program; the daemon opens the memory and copies out of it.
 *
 *     cc gpu.c $(pkg-config --cflags --libs libckpt) -I $CUDA_HOME/include -lcuda -o gpu
 *     ./gpu [job] [milliseconds per step]
 */
#include <ckpt.h>
#include <cuda.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define COUNT 1000000
#define STEPS 100

static void check(int result, const char *what) {
    if (result >= 0)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, ckpt_strerror(result), ckpt_strerror_last());
    if (result != CKPT_E_UNREACHABLE && result != CKPT_E_LOST && result != CKPT_E_TIMEOUT)
        exit(1); /* a daemon that went away is no reason to stop computing */
}

static void check_cuda(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: CUDA error %d\n", what, (int)result);
    exit(1);
}

/* The first step to do: after the one that the weights were restored from, straight into the device. */
static uint64_t resume(ckpt *c, CUdeviceptr weights, CUstream stream) {
    ckpt_restore *restore;
    int result = ckpt_restore_open(c, NULL, &restore);
    check(result, "restore");
    if (result != CKPT_OK)
        return 0;
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    check(ckpt_restore_get_info(restore, &info), "info");
    struct ckpt_read read;
    CKPT_INIT(read);
    read.name = "weights";
    read.dtype = CKPT_U8;
    read.data = (void *)(uintptr_t)weights;
    read.dimensions = 1;
    read.stream = stream; /* what is queued there from now on sees the restored bytes */
    read.on_stream = 1;
    result = ckpt_restore_read(restore, &read);
    check(result, "read");
    ckpt_restore_close(restore);
    if (result < 0)
        exit(1);
    return info.step + 1;
}

static unsigned first_weight(CUdeviceptr weights, CUstream stream) {
    unsigned char byte;
    check_cuda(cuMemcpyDtoHAsync(&byte, weights, 1, stream), "copy");
    check_cuda(cuStreamSynchronize(stream), "synchronize");
    return byte;
}

int main(int argc, char **argv) {
    long milliseconds = argc > 2 ? atol(argv[2]) : 100;
    struct timespec pause = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000};
    CUcontext context;
    CUstream stream;
    CUdeviceptr weights;
    check_cuda(cuInit(0), "no CUDA device can be used here");
    check_cuda(cuDevicePrimaryCtxRetain(&context, 0), "context");
    check_cuda(cuCtxSetCurrent(context), "context");
    check_cuda(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "stream");
    check_cuda(cuMemAlloc(&weights, COUNT), "memory");
    check_cuda(cuMemsetD8Async(weights, 0, COUNT, stream), "fill");
    ckpt *c;
    int result = ckpt_open(argc > 1 ? argv[1] : "gpu", NULL, &c);
    check(result, "open");
    if (result < 0)
        return 1;
    uint64_t first = resume(c, weights, stream);
    printf("first step %" PRIu64 ", weights[0] = %u\n", first, first_weight(weights, stream));
    fflush(stdout);

    check(ckpt_protect_array(c, "weights", CKPT_U8, (void *)(uintptr_t)weights, COUNT), "protect");
    struct ckpt_save_options options;
    void *streams[] = {stream};
    CKPT_INIT(options);
    options.streams = streams; /* the save comes after what is queued there, and waits for it elsewhere */
    options.stream_count = 1;
    for (uint64_t step = first; step < STEPS; step++) {
        nanosleep(&pause, NULL); /* computing, which only reads the weights */
        check(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT), "fence");
        check_cuda(cuMemsetD8Async(weights, (unsigned char)(step + 1), COUNT, stream), "the step's change");
        check(ckpt_save(c, step, &options), "save");
    }
    printf("done, weights[0] = %u\n", first_weight(weights, stream));
    check(ckpt_close(c), "close"); /* the daemon has closed the memory: it may be freed */
    check_cuda(cuMemFree(weights), "free");
    check_cuda(cuStreamDestroy(stream), "stream");
    check_cuda(cuDevicePrimaryCtxRelease(0), "context");
    return 0;
}
