/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that survives being killed: it adds one to every element of an array, a hundred times,
 * and saves after each. Kill it and run it again: it goes on where the last complete version was.
 *
 *     cc hello.c $(pkg-config --cflags --libs libckpt) -o hello
 *     ./hello [job] [milliseconds per step]
 */
#include <ckpt.h>
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

/* The first step to do: after the one that the weights were restored from. */
static uint64_t resume(ckpt *c, float *weights) {
    ckpt_restore *restore;
    int result = ckpt_restore_open(c, NULL, &restore);
    check(result, "restore");
    if (result != CKPT_OK)
        return 0;
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    check(ckpt_restore_get_info(restore, &info), "info");
    uint64_t count = COUNT;
    struct ckpt_read read;
    CKPT_INIT(read);
    read.name = "weights";
    read.dtype = CKPT_F32;
    read.data = weights;
    read.dimensions = 1;
    read.shape = &count;
    result = ckpt_restore_read(restore, &read);
    check(result, "read");
    ckpt_restore_close(restore);
    if (result < 0)
        exit(1);
    return info.step + 1;
}

int main(int argc, char **argv) {
    long milliseconds = argc > 2 ? atol(argv[2]) : 100;
    struct timespec pause = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000};
    float *weights = calloc(COUNT, sizeof *weights);
    ckpt *c;
    int result = ckpt_open(argc > 1 ? argv[1] : "hello", NULL, &c);
    check(result, "open");
    if (result < 0 || !weights)
        return 1;
    uint64_t first = resume(c, weights);
    printf("first step %" PRIu64 ", weights[0] = %g\n", first, weights[0]);
    fflush(stdout);

    check(ckpt_protect_array(c, "weights", CKPT_F32, weights, COUNT), "protect");
    for (uint64_t step = first; step < STEPS; step++) {
        nanosleep(&pause, NULL); /* computing, which only reads the weights */
        check(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT), "fence");
        for (size_t i = 0; i < COUNT; i++)
            weights[i] += 1;
        check(ckpt_save(c, step, NULL), "save");
    }
    printf("done, weights[0] = %g\n", weights[0]);
    check(ckpt_close(c), "close");
    free(weights);
    return 0;
}
