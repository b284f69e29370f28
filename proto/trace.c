/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/trace.h"

_Static_assert(sizeof(struct trace_record) == 72, "wire layout of trace_record");
_Static_assert(sizeof(struct trace_name) == TRACE_NAME_SIZE, "wire layout of trace_name");

const char *trace_kind_word(uint16_t kind) {
    static const char *const words[] = {
#define KIND(number, name, word) [number] = word,
        TRACE_KINDS(KIND)
#undef KIND
    };
    return kind < ARRAY_SIZE(words) ? words[kind] : NULL;
}
