/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `ckptctl export` plans for a complete.json with digests that match: the header is a JSON object
 * without duplicate keys, its tensors lie in the file one after the other, and every piece in its tensor
 * and in a part that is there.
 */
#include "tools/merge.h"

#include "proto/pieces.h"
#include "tests/fuzz/fuzz.h"

/* In place of ckptctl.c. */
int ctl_fail(enum status status, const char *format, ...) { return (int)status; }

static void check_header(const struct merge *merge) {
    uint64_t length, end = 0;
    memcpy(&length, merge->header, sizeof length);
    assert(length + sizeof length == merge->header_length);
    json_auto_t *object = json_loadb(merge->header + sizeof length, length, JSON_REJECT_DUPLICATES, NULL);
    assert(json_is_object(object) && json_object_size(object) == merge->tensor_count + 1);
    for (size_t i = 0; i < merge->tensor_count; i++) {
        const struct merge_tensor *tensor = &merge->tensors[i];
        json_t *offsets = json_object_get(json_object_get(object, tensor->key), "data_offsets");
        assert((uint64_t)json_integer_value(json_array_get(offsets, 0)) == end);
        assert(tensor->offset == merge->header_length + end);
        assert(tensor->bytes <= merge->size - tensor->offset);
        end += tensor->bytes;
        assert((uint64_t)json_integer_value(json_array_get(offsets, 1)) == end);
    }
    assert(merge->size == merge->header_length + end);
}

static void check_pieces(const struct complete *complete, const struct merge *merge) {
    for (size_t i = 0; i < merge->piece_count; i++) {
        const struct merge_piece *piece = &merge->pieces[i];
        assert(piece->rank < complete->summary.world && piece->tensor < merge->tensor_count);
        const struct merge_tensor *tensor = &merge->tensors[piece->tensor];
        const struct complete_part *part = &complete->parts[piece->rank];
        uint64_t bytes = piece->piece ? piece_bytes(piece->piece) : tensor->bytes;
        assert(piece->image_offset <= part->image_size && bytes <= part->image_size - piece->image_offset);
        if (piece->piece)
            assert(piece->piece->dtype == tensor->dtype && piece->piece->geometry.dims == tensor->geometry.dims &&
                   memcmp(piece->piece->geometry.shape, tensor->geometry.shape, sizeof tensor->geometry.shape) == 0);
    }
}

static void check(const struct complete *complete, const struct merge_options *options) {
    CLEANUP(merge_deinit) struct merge merge = {0};
    int status = merge_plan(complete, options, &merge);
    assert(status == STATUS_OK || status == STATUS_ABSENT || status == STATUS_PROBLEM);
    if (status != STATUS_OK)
        return;
    check_header(&merge);
    check_pieces(complete, &merge);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t sealed_size;
    CLEANUP(freep) char *sealed = fuzz_seal(data, size, &sealed_size);
    CLEANUP(complete_deinit) struct complete complete = {0};
    if (complete_read(sealed, sealed_size, &complete, NULL) < 0)
        return 0;
    check(&complete, &(struct merge_options){.prefix = ""});
    check(&complete, &(struct merge_options){.globs = (const char *[]){"a*"}, .glob_count = 1, .prefix = ""});
    check(&complete, &(struct merge_options){.model = true, .prefix = "a"});
    return 0;
}
