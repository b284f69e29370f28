/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/lines.h"
#include "proto/manifest.h"
#include "tests/fuzz/fuzz.h"

#define SEAL_KEY ",\"digest\":\""
#define SEAL_SIZE (sizeof SEAL_KEY - 1 + 2 * DIGEST_SIZE + 2) /* with `"}` */
#define FINISH_KEY "{\"digest\":\""
#define IMAGE_KEY "\"image_digest\":\""

/* The fold of the digests at the ends of lines like [offset,length,"digest"]. False: there are none. */
static bool fold_chunks(const char *lines, size_t size, struct digest *ret_fold) {
    CLEANUP(freep) struct digest *digests = malloc((size / (2 * DIGEST_SIZE) + 1) * sizeof *digests);
    size_t count = 0, length;
    const char *line;
    assert(digests);
    while (lines_next(&lines, &size, &line, &length))
        if (length > 2 * DIGEST_SIZE + 2 && line[0] == '[' &&
            digest_from_hex(line + length - 2 - 2 * DIGEST_SIZE, 2 * DIGEST_SIZE, &digests[count]))
            count++;
    if (count)
        digest_fold(digests, count, ret_fold);
    return count > 0;
}

char *fuzz_seal(const uint8_t *data, size_t size, size_t *ret_size) {
    const char *start = (const char *)data, *newline = size ? memchr(start, '\n', size) : NULL;
    size_t first = newline ? (size_t)(newline - start) : size;
    const char *rest = newline ? newline + 1 : start + size;
    size_t rest_size = size - (size_t)(rest - start);

    if (first >= SEAL_SIZE && memcmp(start + first - SEAL_SIZE, SEAL_KEY, sizeof SEAL_KEY - 1) == 0)
        first -= SEAL_SIZE;
    else if (first && start[first - 1] == '}')
        first--;
    if (rest_size >= MANIFEST_TAIL_SIZE &&
        memcmp(rest + rest_size - MANIFEST_TAIL_SIZE, FINISH_KEY, sizeof FINISH_KEY - 1) == 0)
        rest_size -= MANIFEST_TAIL_SIZE;

    struct text text = TEXT_NONE;
    text_append(&text, start, first);
    struct digest fold;
    char *image = first ? memmem(text.data, first, IMAGE_KEY, sizeof IMAGE_KEY - 1) : NULL;
    if (image && text.data + first - image >= (ptrdiff_t)(sizeof IMAGE_KEY + 2 * DIGEST_SIZE) &&
        fold_chunks(rest, rest_size, &fold)) {
        char hex[DIGEST_HEX_SIZE];
        digest_hex(&fold, hex);
        memcpy(image + sizeof IMAGE_KEY - 1, hex, sizeof hex - 1);
    }
    lines_seal(&text, 0);
    /* A run record has one line only. */
    if (rest != start + size) {
        text_append(&text, rest, rest_size);
        lines_finish(&text);
    }
    char *sealed;
    int r = text_take(&text, &sealed, ret_size);
    assert(r == 0);
    return sealed;
}

char *fuzz_spaced(const char *sealed, size_t size, size_t *ret_size) {
    const char *newline = memchr(sealed, '\n', size);
    size_t end = newline + 1 < sealed + size ? size - MANIFEST_TAIL_SIZE : size;
    struct text text = TEXT_NONE;
    for (size_t i = 0; i < size; i++) {
        text_append(&text, &sealed[i], 1);
        if (sealed[i] == '\n' && i + 1 < end)
            text_add(&text, " ");
    }
    char *spaced = fuzz_seal((const uint8_t *)text.data, text.length, ret_size);
    text_deinit(&text);
    return spaced;
}

uint64_t fuzz_linear(const struct geometry *piece, uint64_t element) {
    if (piece->is_range)
        return piece->start + element;
    uint64_t linear = 0, step = 1;
    for (unsigned i = piece->dims; i-- > 0;) {
        linear += (piece->offset[i] + element % piece->extent[i]) * step;
        element /= piece->extent[i];
        step *= piece->shape[i];
    }
    return linear;
}

bool fuzz_locate(const struct geometry *piece, uint64_t linear, uint64_t *ret_element) {
    if (piece->is_range) {
        *ret_element = linear - piece->start;
        return linear >= piece->start && linear - piece->start < piece->count;
    }
    uint64_t element = 0, step = 1;
    for (unsigned i = piece->dims; i-- > 0;) {
        uint64_t place = linear % piece->shape[i];
        linear /= piece->shape[i];
        if (place < piece->offset[i] || place - piece->offset[i] >= piece->extent[i])
            return false;
        element += (place - piece->offset[i]) * step;
        step *= piece->extent[i];
    }
    *ret_element = element;
    return true;
}
