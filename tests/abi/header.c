/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled, not run: ckpt.h alone, as a user's program includes it, twice. */
#include <ckpt.h>

int use(ckpt *c, const float *weights);

int use(ckpt *c, const float *weights) {
    struct ckpt_save_options options;
    struct ckpt_shard shard;
    CKPT_INIT(options);
    CKPT_INIT(shard);
    options.to = CKPT_LOCAL;
    shard.data = weights;
    if (ckpt_protect(c, &shard, NULL) != CKPT_OK || ckpt_save(c, UINT64_C(1), &options) < 0)
        return 1;
    return ckpt_fence(c, CKPT_DEFAULT_TIMEOUT) == CKPT_E_TIMEOUT;
}
