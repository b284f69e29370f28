/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A fuzz target is one function that must bear any bytes: it asserts what its comment promises, and
 * the sanitizers see the rest. replay.c runs it in every build; libFuzzer, where the option `fuzz`
 * is enabled, searches for inputs that reach more of the code.
 */

#include "base/util.h"
#include "proto/geometry.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An input that is read number by number, little-endian; zeros follow its end. */
struct feed {
    const uint8_t *at;
    size_t left;
};

static inline uint64_t feed_number(struct feed *feed, unsigned bytes) {
    uint64_t number = 0;
    size_t have = min_u64(bytes, feed->left);
    if (have)
        memcpy(&number, feed->at, have);
    feed->at += have;
    feed->left -= have;
    return number;
}

static inline uint64_t feed_below(struct feed *feed, uint64_t bound) { return feed_number(feed, 1) % bound; }

/* The bytes with a NUL after them; exactly so much memory, so that AddressSanitizer sees the end. */
static inline char *fuzz_string(const uint8_t *data, size_t size) {
    char *string = malloc(size + 1);
    assert(string);
    if (size)
        memcpy(string, data, size);
    string[size] = '\0';
    return string;
}

/*
 * manifests, complete.json and run records are refused if their digests do not match, which no
 * mutation survives. fuzz_seal() makes them match again, so that the parsers behind are reached: the
 * first line gets its digest, the file its last line, and a manifest the image digest that is the fold
 * of its chunks' digests. The caller frees.
 */
char *fuzz_seal(const uint8_t *data, size_t size, size_t *ret_size);
/* The same with a blank before each line but the first and the last. Lines as we write them are taken apart as such;
 * these are parsed as any JSON. Both must come to the same. */
char *fuzz_spaced(const char *sealed, size_t size, size_t *ret_size);

/* Geometry by counting, one element at a time: what the library's shortcuts are compared with. */
/* The row-major index in the tensor of the piece's element number `element`. */
uint64_t fuzz_linear(const struct geometry *piece, uint64_t element);
/* The reverse. False: the piece does not have it. */
bool fuzz_locate(const struct geometry *piece, uint64_t linear, uint64_t *ret_element);
