/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/messages.h"

/* messages.def says N, G, O, A, ANY, C and D. */
enum {
    N = MESSAGE_STATE_N,
    G = MESSAGE_STATE_G,
    O = MESSAGE_STATE_O,
    A = MESSAGE_STATE_A,
    ANY = N | G | O | A,
};
enum { D = false, C = true };

/* The bodies' sizes never change: a program built long ago talks to this one. (That none has
 * padding, messages.h demands of the compiler.) */
#define BODY(type, size) _Static_assert(sizeof(struct type) == (size) && (size) % 8 == 0, "wire layout of " #type)
BODY(message_head, 16);
BODY(message_empty, 8);
BODY(message_hello, 16);
BODY(message_hello_ok, 16);
BODY(message_error, 8);
BODY(message_open, 32);
BODY(message_opened, 40);
BODY(message_attach, 8);
BODY(message_area, 16);
BODY(message_area_drop, 8);
BODY(message_register, 40);
BODY(message_registered, 16);
BODY(message_save, 56);
BODY(message_saved, 16);
BODY(message_captured, 16);
BODY(message_push, 32);
BODY(message_pushed, 16);
BODY(message_missed, 8);
BODY(message_fence, 8);
BODY(message_start, 8);
BODY(message_wait, 24);
BODY(message_restore_open, 32);
BODY(message_restore_opened, 32);
BODY(message_restore_close, 8);
BODY(message_fetch, 24);
BODY(message_fetched, 8);
BODY(chunk_place, 16);
BODY(message_segment, 16);
BODY(message_release, 8);
BODY(message_prefetch, 8);
BODY(message_status_is, 8);
BODY(message_stop, 8);
BODY(message_trace_is, 32);
BODY(message_device_pool, 24);
BODY(message_device_memory, 112);
BODY(message_device_chunk, 32);
BODY(message_device_drop, 8);
BODY(message_device_probe, 32);
BODY(message_device_probed, 16);
BODY(message_device_usage_is, 32);

/* The largest packets fit. */
#define MESSAGE(number, name, type, direction, states, descriptors, tail)                                              \
    _Static_assert(sizeof(struct message_head) + sizeof(struct type) + (tail) <= MESSAGE_SIZE_MAX, #name);             \
    _Static_assert((descriptors) <= MESSAGE_FDS_MAX, #name);
#include "proto/messages.def"
#undef MESSAGE
_Static_assert(FETCH_CHUNKS_MAX * sizeof(struct chunk_place) <= 4096, "the tail of FETCHED");

#define MESSAGE(number, name, type, direction, states, descriptors, tail)                                              \
    [number] = {#name, direction, states, sizeof(struct type), descriptors, tail},
static const struct message_rule rules[] = {
#include "proto/messages.def"
};
#undef MESSAGE

const struct message_rule *message_rule(uint16_t opcode) {
    return opcode < ARRAY_SIZE(rules) && rules[opcode].name ? &rules[opcode] : NULL;
}
