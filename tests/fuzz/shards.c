/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shard tables: 4 bytes for the count, then the table. The same bytes also say what shards to build one
 * of, as a client would: what the client may add, the daemon can read.
 *
 * A table that is read keeps its bounds and gives, built again, the same shards. If they can be laid
 * out: the image's header is a JSON object without duplicate keys whose tensors follow each other
 * without holes, each shard is found at every byte it has, and the lines of its pieces can be read.
 */
#include "proto/image.h"
#include "proto/messages.h"
#include "proto/pieces.h"
#include "proto/word.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>
#include <jansson.h>

#define BUILT_MAX 12
#define STATE_LENGTH 100
#define HEADER_CHECKED_MAX MIB(1)

static void check_same(const struct shard *a, const struct shard *b) {
    const struct geometry *one = &a->geometry, *other = &b->geometry;
    size_t per_dim = one->dims * sizeof one->shape[0];
    assert(strcmp(a->name, b->name) == 0 && a->name_length == b->name_length && a->name_length == strlen(a->name));
    assert(!a->target == !b->target && (!a->target || strcmp(a->target, b->target) == 0));
    assert(a->dtype == b->dtype && a->flags == b->flags && a->area == b->area && a->address == b->address);
    assert(a->replica_index == b->replica_index && a->replica_count == b->replica_count);
    assert(a->contiguous == b->contiguous && one->is_range == other->is_range && one->dims == other->dims);
    assert(memcmp(one->shape, other->shape, per_dim) == 0);
    if (one->is_range)
        assert(one->start == other->start && one->count == other->count);
    else
        assert(memcmp(one->offset, other->offset, per_dim) == 0 && memcmp(one->extent, other->extent, per_dim) == 0);
    if (!a->contiguous)
        assert(memcmp(a->stride, b->stride, one->is_range ? sizeof a->stride[0] : per_dim) == 0);
}

static void check_bounds(const struct shard *shard) {
    int64_t low, high;
    assert(shard->area == SHARDS_AREA_PRIVATE || shard->area < AREAS_MAX ||
           (shards_area_is_device(shard->area) && shard->area - SHARDS_AREA_DEVICE < DEVICE_MEMORIES_MAX));
    assert(shard->geometry.dims <= GEOMETRY_DIMS_MAX && shard->replica_index < shard->replica_count);
    shard_span(shard, &low, &high);
    assert(low <= 0 && high >= 0 && shard->address <= INT64_MAX && (int64_t)shard->address >= -low);
    assert((int64_t)shard->address <= INT64_MAX - high);
    uint64_t bytes = geometry_elements(&shard->geometry) * dtype_size(shard->dtype);
    assert(!shard->contiguous || (low == 0 && (uint64_t)high == bytes));
}

static void check_header(const struct image_layout *layout) {
    if (layout->data_start > HEADER_CHECKED_MAX)
        return;
    CLEANUP(freep) char *header = malloc(layout->data_start);
    uint64_t length, end = 0;
    image_header(layout, STATE_LENGTH, header);
    memcpy(&length, header, sizeof length);
    assert(length + sizeof length == layout->data_start && layout->data_start % IMAGE_ALIGNMENT == 0);
    json_auto_t *object = json_loadb(header + sizeof length, length, JSON_REJECT_DUPLICATES, NULL);
    assert(json_is_object(object));
    const char *key;
    json_t *entry;
    json_object_foreach(object, key, entry) {
        if (strcmp(key, "__metadata__") == 0)
            continue;
        json_t *offsets = json_object_get(entry, "data_offsets");
        assert((uint64_t)json_integer_value(json_array_get(offsets, 0)) == end);
        assert((uint64_t)json_integer_value(json_array_get(offsets, 1)) >= end);
        end = (uint64_t)json_integer_value(json_array_get(offsets, 1));
    }
    assert(layout->data_start + end == image_size(layout, STATE_LENGTH));
}

static void check_places(const struct shards *shards, const struct image_layout *layout) {
    uint64_t end = layout->data_start;
    for (uint32_t i = 0; i < layout->ordered_count; i++) {
        struct shard shard;
        uint32_t number = layout->order[i];
        assert(number < shards_count(shards));
        shards_get(shards, number, &shard);
        assert(layout->shard_offset[number] == end && end % dtype_size(shard.dtype) == 0 && shard_bytes(&shard) > 0);
        assert(image_find(layout, shards, end) == i);
        end += shard_bytes(&shard);
        assert(image_find(layout, shards, end - 1) == i);
    }
    assert(end == layout->state_offset && end <= WORD_IMAGE_MAX);
    assert(image_find(layout, shards, end) == layout->ordered_count);
}

static void check_pieces(const struct shards *shards, const struct image_layout *layout) {
    CLEANUP(pieces_deinit) struct pieces pieces = {0};
    int r = pieces_from_layout(shards, layout, 3, STATE_LENGTH, &pieces);
    assert(r == 0);
    for (size_t i = 0; i < pieces.count; i++) {
        CLEANUP(text_deinit) struct text line = TEXT_NONE, again = TEXT_NONE;
        CLEANUP(piece_deinit) struct piece piece = {0};
        struct problem problem = PROBLEM_NONE;
        piece_write(&pieces.items[i], true, &line);
        r = piece_read(line.data, line.length - 1, NULL, &piece, &problem);
        assert(r == 0);
        piece_write(&piece, true, &again);
        assert(again.length == line.length && memcmp(again.data, line.data, line.length) == 0);
        assert(piece_bytes(&piece) <= layout->state_offset - (piece.target ? 0 : piece.image_offset));
    }
}

static void check_layout(const struct shards *shards) {
    CLEANUP(image_layout_deinit) struct image_layout layout = {0};
    struct image_identity identity = {.job = "job", .rank = 3, .world = 4};
    struct problem problem = PROBLEM_NONE;
    int r = image_layout(shards, &identity, &layout, &problem);
    assert((r == 0) == !problem.text[0] && r <= 0);
    if (r < 0)
        return;
    check_header(&layout);
    check_places(shards, &layout);
    check_pieces(shards, &layout);
}

/* The shards of a table, added again to one that is read again. */
static void check_table(const void *data, size_t size, uint32_t count, bool must) {
    CLEANUP(shards_freep) struct shards *shards = NULL, *again = NULL;
    CLEANUP(shards_writer_deinit) struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct shard shard, same;
    int r = shards_parse(data, size, count, &shards, &problem);
    assert((r == 0 || r == -EINVAL || r == -E2BIG) && (r == 0) == !problem.text[0] && (r == 0 || !must));
    if (r < 0)
        return;
    assert(shards_count(shards) == count);
    for (uint32_t i = 0; i < count; i++) {
        shards_get(shards, i, &shard);
        check_bounds(&shard);
        r = shards_writer_add(&writer, &shard, &problem);
        assert(r == 0);
    }
    r = shards_parse(writer.data, writer.size, writer.count, &again, &problem);
    assert(r == 0);
    for (uint32_t i = 0; i < count; i++) {
        shards_get(shards, i, &shard);
        shards_get(again, i, &same);
        check_same(&shard, &same);
    }
    check_layout(shards);
}

/* Small numbers mostly, so that pieces meet; large ones at times. */
static uint64_t feed_extent(struct feed *feed) {
    uint64_t small = feed_number(feed, 1);
    return small < 0xf0 ? small % 5 : feed_number(feed, 8);
}

static void build_shard(struct feed *feed, struct shard *ret_shard) {
    static const char *const names[] = {"a",       "b",      "a@0+1",          "__metadata__",
                                        "%rank/a", "%state", "%5F_metadata__", "\n\"\\"};
    struct shard shard = {
        .name = names[feed_below(feed, ARRAY_SIZE(names))],
        .dtype = (enum dtype)feed_below(feed, DTYPE_MAX + 1),
        .flags = (uint32_t)feed_below(feed, 16) & (uint32_t)feed_number(feed, 1),
        .area = feed_below(feed, 2) ? SHARDS_AREA_PRIVATE : (uint32_t)feed_number(feed, 2),
        .contiguous = feed_below(feed, 4),
        .replica_count = 1,
        .geometry = {.dims = (uint8_t)feed_below(feed, 4)},
    };
    struct geometry *geometry = &shard.geometry;
    if (shard.flags & SHARD_ALIAS)
        shard.target = names[feed_below(feed, ARRAY_SIZE(names))];
    if (feed_below(feed, 8) == 0) {
        shard.replica_count = (uint32_t)feed_number(feed, 1);
        shard.replica_index = (uint32_t)feed_number(feed, 1);
    }
    geometry->is_range = feed_below(feed, 4) == 0;
    if (geometry->is_range) {
        geometry->start = feed_extent(feed);
        geometry->count = feed_extent(feed);
    }
    bool whole = feed_below(feed, 2);
    for (unsigned i = 0; i < geometry->dims; i++) {
        geometry->shape[i] = feed_extent(feed);
        geometry->offset[i] = whole || geometry->is_range ? 0 : feed_extent(feed);
        geometry->extent[i] = whole ? geometry->shape[i] : geometry->is_range ? 0 : feed_extent(feed);
    }
    for (unsigned i = 0; !shard.contiguous && i < max_u64(geometry->dims, 1); i++)
        shard.stride[i] = (int64_t)feed_extent(feed);
    shard.address = feed_extent(feed);
    *ret_shard = shard;
}

static void check_built(const uint8_t *data, size_t size) {
    CLEANUP(shards_writer_deinit) struct shards_writer writer = {0};
    struct feed feed = {data, size};
    for (unsigned i = 0; i < BUILT_MAX && feed.left; i++) {
        struct problem problem = PROBLEM_NONE;
        struct shard shard;
        build_shard(&feed, &shard);
        int r = shards_writer_add(&writer, &shard, &problem);
        assert((r == 0 || r == -EINVAL || r == -E2BIG) && (r == 0) == !problem.text[0]);
    }
    check_table(writer.data, writer.size, writer.count, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct feed feed = {data, size};
    uint32_t count = (uint32_t)feed_number(&feed, 4);
    check_table(feed.at, feed.left, count, false);
    check_built(data, size);
    return 0;
}
