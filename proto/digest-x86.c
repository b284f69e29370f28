/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline (SSE2), and the table. */
#include "proto/digest-x86.inc"

static bool usable(void) { return true; }

static const struct digest_kernel digest_kernel_sse2 = {"sse2", usable, leaf, copy};
extern const struct digest_kernel digest_kernel_avx2, digest_kernel_avx512;

const struct digest_kernel *const digest_kernels[] = {
    &digest_kernel_avx512,
    &digest_kernel_avx2,
    &digest_kernel_sse2,
    NULL,
};
