/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that only the client has mapped: read across processes, without its help. */
#include "daemon/source.h"

static int private_read(const struct source *source, uint32_t area, const struct source_span *spans, size_t count) {
    struct iovec local[SOURCE_SPANS_MAX], remote[SOURCE_SPANS_MAX];
    assert(area == SHARDS_AREA_PRIVATE && count <= SOURCE_SPANS_MAX);
    for (size_t i = 0; i < count; i++) {
        local[i] = (struct iovec){.iov_base = spans[i].destination, .iov_len = spans[i].length};
        remote[i] = (struct iovec){.iov_base = (void *)(uintptr_t)spans[i].address, .iov_len = spans[i].length};
    }
    return peer_read(source->peer, local, remote, count, source->forked);
}

static const uint8_t *private_look(const struct source *source, uint32_t area, uint64_t address, size_t length) {
    (void)source, (void)area, (void)address, (void)length;
    return NULL;
}

const struct source_memory source_private = {.name = "private", .read = private_read, .look = private_look};
