/* SPDX-License-Identifier: Apache-2.0 */
#pragma GCC target("avx512f,avx2")
#include "proto/digest-x86.inc"

static bool usable(void) { return __builtin_cpu_supports("avx512f"); }

extern const struct digest_kernel digest_kernel_avx512;
const struct digest_kernel digest_kernel_avx512 = {"avx512", usable, leaf, copy};
