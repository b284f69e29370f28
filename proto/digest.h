/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Digests, always over raw (unencoded) bytes. A chunk is cut into leaves of 256 KiB (the last may
 * be shorter); each leaf has its XXH3-128 (seed 0); the chunk's digest is XXH3-128 over the
 * concatenated canonical (big-endian) leaf digests, also for one leaf. An image's digest is the
 * same function over its chunk digests. Written as lowercase hex of the canonical form.
 */

#include "base/util.h"

#define DIGEST_SIZE 16
#define DIGEST_HEX_SIZE 33 /* with the final NUL */
#define DIGEST_LEAF_SIZE KIB(256)

struct digest {
    uint8_t bytes[DIGEST_SIZE]; /* canonical */
};

static inline bool digest_equal(const struct digest *a, const struct digest *b) {
    return memcmp(a->bytes, b->bytes, DIGEST_SIZE) == 0;
}

/* The digest of a whole chunk in memory. */
void digest_chunk(const void *data, size_t length, struct digest *ret_digest);

/* The digest of a sequence of digests: leaves to a chunk, chunks to an image. count >= 1. */
void digest_fold(const struct digest *digests, size_t count, struct digest *ret_digest);

/* Plain XXH3-128 of bytes, as used for one leaf, and for the text of manifests. */
void digest_leaf(const void *data, size_t length, struct digest *ret_digest);

/* Copies a leaf (length <= DIGEST_LEAF_SIZE) and digests it while it is in cache. */
void digest_copy_leaf(void *destination, const void *source, size_t length, struct digest *ret_digest);

/* Writes 32 lowercase hex digits and a NUL. */
void digest_hex(const struct digest *digest, char ret_text[DIGEST_HEX_SIZE]);
/* Reads exactly 32 lowercase hex digits at text (which need not be NUL-terminated). False: not hex. */
bool digest_from_hex(const char *text, size_t length, struct digest *ret_digest);
