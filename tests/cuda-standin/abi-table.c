/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled twice: with base/cuda-abi.h, and with the toolkit's cuda.h (ABI_TOOLKIT), which declare the same names and
 * cannot meet in one file. Each time it writes down what the names stand for; test-abi.c compares. With cuda.h the
 * compiler also checks the type of every function.
 */
#if ABI_TOOLKIT
#include <cuda.h>
#endif

#include "base/cuda-abi.h"
#include "tests/cuda-standin/abi-table.h"

#if ABI_TOOLKIT
const int abi_toolkit_version = CUDA_VERSION;
#if CUDA_VERSION >= 13000
/* The header names it no longer, though the driver still has it. */
CUresult cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice);
#endif
#define CUDA_FUNCTION(name, arguments)                                                                                 \
    _Static_assert(__builtin_types_compatible_p(name##_fn, __typeof__(name)), #name " has another type");
#include "base/cuda-abi.def"
#define TABLE abi_toolkit
#else
#define TABLE abi_ours
#endif

#define V(name) {#name, (unsigned long long)(name)},
#define T(type) {#type, sizeof(type)},
#define M(type, member)                                                                                                \
    {#type "." #member, (unsigned long long)offsetof(type, member) << 32 | sizeof(((type *)NULL)->member)},

const struct abi_entry TABLE[] = {
#include "tests/cuda-standin/abi-table.def"
    {NULL, 0},
};
