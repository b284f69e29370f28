/* SPDX-License-Identifier: Apache-2.0 */
/*
 * complete.json, as it is and with digests that match: summary, parts, all of it.
 *
 * Who reads more reads less, too; pieces lie in parts that are there; what is read, written again, reads
 * and writes the same. White space between its tokens changes nothing.
 */
#include "proto/manifest.h"
#include "proto/pieces.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>

static void check_bounds(const struct complete *complete) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < complete->summary.world; i++) {
        const struct complete_part *part = &complete->parts[i];
        assert(part->rank == i && part->chunk_size > 0 && part->state_offset <= part->image_size);
        assert(part->state_length <= part->image_size - part->state_offset);
        bytes += part->image_size;
    }
    assert(bytes == complete->summary.bytes);
    for (size_t i = 0; i < complete->pieces.count; i++) {
        const struct piece *piece = &complete->pieces.items[i];
        assert(piece->rank < complete->summary.world);
        assert(geometry_valid(&piece->geometry, dtype_size(piece->dtype)));
        uint64_t image_size = complete->parts[piece->rank].image_size;
        assert(piece->image_offset <= image_size && piece_bytes(piece) <= image_size - piece->image_offset);
        assert(i == 0 || piece_compare(piece - 1, piece) <= 0);
    }
}

static void check_same(const struct complete *a, const struct complete *b) {
    const struct complete_summary *one = &a->summary, *other = &b->summary;
    assert(strcmp(one->job, other->job) == 0 && strcmp(one->run_id, other->run_id) == 0);
    assert(one->generation == other->generation && one->step == other->step && one->world == other->world);
    assert(one->bytes == other->bytes && one->tensors == other->tensors && one->created_ns == other->created_ns);
    for (uint32_t i = 0; i < one->world; i++) {
        const struct complete_part *part = &a->parts[i], *same = &b->parts[i];
        assert(part->image_size == same->image_size && digest_equal(&part->image_digest, &same->image_digest));
        assert(part->chunk_size == same->chunk_size && part->state_offset == same->state_offset);
        assert(part->state_length == same->state_length);
    }
    assert(a->pieces.count == b->pieces.count);
    for (size_t i = 0; i < a->pieces.count; i++)
        assert(piece_compare(&a->pieces.items[i], &b->pieces.items[i]) == 0);
}

static void check_again(const struct complete *complete) {
    CLEANUP(freep) char *text = NULL, *again = NULL;
    CLEANUP(complete_deinit) struct complete same = {0};
    size_t length, again_length;
    int r = complete_write(complete, &text, &length);
    assert(r == 0 || r == -E2BIG); /* escapes may be longer than they were */
    if (r < 0)
        return;
    r = complete_read(text, length, &same, NULL);
    assert(r == 0);
    check_same(complete, &same);
    r = complete_write(&same, &again, &again_length);
    assert(r == 0 && again_length == length && memcmp(text, again, length) == 0);
}

static void check(const char *data, size_t size) {
    CLEANUP(complete_deinit) struct complete complete = {0}, parts = {0};
    struct complete_summary summary;
    struct problem problem = PROBLEM_NONE;
    int summary_result = complete_read_summary(data, min_u64(size, MANIFEST_LINE_MAX), &summary, NULL);
    int parts_result = complete_read_parts(data, size, &parts, NULL);
    int r = complete_read(data, size, &complete, &problem);
    assert((r == 0 || r == -EBADMSG || r == -ENOTSUP) && (r == 0) == !problem.text[0]);
    assert(r < 0 || parts_result == 0);
    assert(parts_result < 0 || summary_result == 0);
    if (parts_result == 0)
        check_bounds(&parts);
    if (r < 0)
        return;
    check_bounds(&complete);
    check_again(&complete);
}

static void check_two_ways(const char *data, size_t size) {
    CLEANUP(complete_deinit) struct complete one = {0}, other = {0};
    CLEANUP(freep) char *text = NULL, *same = NULL;
    size_t spaced_size, length = 0, same_length = 0;
    CLEANUP(freep) char *spaced = fuzz_spaced(data, size, &spaced_size);
    int r = complete_read(data, size, &one, NULL), s = complete_read(spaced, spaced_size, &other, NULL);
    assert(r == s);
    if (r < 0)
        return;
    r = complete_write(&one, &text, &length);
    s = complete_write(&other, &same, &same_length);
    assert(r == s && length == same_length && (r < 0 || memcmp(text, same, length) == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t sealed_size;
    CLEANUP(freep) char *sealed = fuzz_seal(data, size, &sealed_size);
    check((const char *)data, size);
    check(sealed, sealed_size);
    check_two_ways(sealed, sealed_size);
    return 0;
}
