/* SPDX-License-Identifier: Apache-2.0 */
/* Shared areas: the client's memfds, mapped by us. What lies in them outlives the client. */
#include "daemon/source.h"

static const uint8_t *shared_look(const struct source *source, uint32_t area, uint64_t address, size_t length) {
    assert(address + length <= source->set->areas[area]->size);
    return source->set->areas[area]->data + address;
}

static int shared_read(const struct source *source, uint32_t area, const struct source_span *spans, size_t count) {
    for (size_t i = 0; i < count; i++)
        memcpy(spans[i].destination, shared_look(source, area, spans[i].address, spans[i].length), spans[i].length);
    return 0;
}

const struct source_memory source_shared = {.name = "shared", .read = shared_read, .look = shared_look};
