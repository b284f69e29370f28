/* SPDX-License-Identifier: Apache-2.0 */
#pragma GCC target("avx2")
#include "proto/digest-x86.inc"

static bool usable(void) { return __builtin_cpu_supports("avx2"); }

extern const struct digest_kernel digest_kernel_avx2;
const struct digest_kernel digest_kernel_avx2 = {"avx2", usable, leaf, copy};
