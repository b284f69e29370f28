/* SPDX-License-Identifier: Apache-2.0 */
/* Faults to inject: what is read is what stands there, but for zeros before the number. */
#include "tests/fuzz/fuzz.h"
#include "tiers/tier.h"

#include <errno.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const kinds[] = {
        [TIER_FAULT_EIO] = "eio",     [TIER_FAULT_ENOSPC] = "enospc", [TIER_FAULT_EDQUOT] = "edquot",
        [TIER_FAULT_SHORT] = "short", [TIER_FAULT_FLIP] = "flip",
    };
    CLEANUP(freep) char *text = fuzz_string(data, size);
    struct tier_fault_options options;
    struct problem problem = PROBLEM_NONE;
    int r = tier_fault_parse(text, &options, &problem);
    assert(r == 0 || (r == -EINVAL && problem.text[0]));
    if (r < 0)
        return 0;
    char before[64], after[64];
    snprintf(before, sizeof before, "%s:", options.operation);
    snprintf(after, sizeof after, "%llu:%s%s", (unsigned long long)options.nth, kinds[options.kind],
             options.from_then_on ? "+" : "");
    size_t length = strlen(before);
    assert(options.nth > 0 && strncmp(text, before, length) == 0);
    assert(strcmp(text + length + strspn(text + length, "0"), after) == 0);
    return 0;
}
