/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The CUDA driver, if this machine has one: libcuda.so.1 by dlopen, so that the same program runs
 * with and without it. Nothing here knows of checkpoints, and nothing is ever closed: a driver that
 * was initialized stays so until the process ends.
 *
 * Every function of cuda-abi.def is a member by its exported name: cuda->cuMemAlloc_v2(...). They may
 * be called only where the state is CUDA_READY.
 */

#include "base/cuda-abi.h"
#include "base/problem.h"

#define CUDA_LIBRARY "libcuda.so.1"
#define CUDA_API_VERSION 12000 /* of all functions that we ask the driver for, 12.0: the oldest driver that will do */

enum cuda_state {
    CUDA_NO_DRIVER, /* there is no such library, or (cuda_init_loaded) nobody has loaded it */
    CUDA_STUB,      /* the library is the toolkit's, to link against (error 34) */
    CUDA_NO_DEVICE, /* a driver without a device (error 100) */
    CUDA_UNFIT,     /* too old, or it cannot be initialized */
    CUDA_READY,
};

struct cuda {
    enum cuda_state state;
    struct problem problem; /* why it is not ready */
    int version;            /* of the driver, such as 12040 */
#define CUDA_FUNCTION(name, arguments) name##_fn *name;
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION
};

/* Loads and initializes the driver (blocking: seconds on some machines). NULL: CUDA_LIBRARY. */
void cuda_init(struct cuda *cuda, const char *library);
/* The same, for a library in somebody else's program: only if that has loaded the driver already. */
void cuda_init_loaded(struct cuda *cuda, const char *library);
/* How often this process has loaded a library; never 0. Where nobody has loaded the driver, cuda_init_loaded() searches
 * directories for it: it need be called again only after this number has changed. */
uint64_t cuda_loads(void);

/* "ready", "no driver", ... */
const char *cuda_state_name(enum cuda_state state);

/* Sets the problem to "WHAT: NAME (NUMBER), SENTENCE" and returns a negative errno. Of CUDA_SUCCESS: 0. */
int cuda_problem(const struct cuda *cuda, CUresult result, struct problem *problem, const char *what);
/* The context is lost with everything in it: each further call answers the same. */
bool cuda_is_sticky(CUresult result);
