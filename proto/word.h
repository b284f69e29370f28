/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The capture word: how capture is atomic against the fence. One 64-bit word per client handle, in
 * a page that the daemon made (a sealed memfd) and both sides map.
 *
 *   63            48 47                                             0
 *   +---------------+-----------------------------------------------+
 *   | save counter  | watermark: contiguous captured bytes           |
 *   +---------------+-----------------------------------------------+
 *
 * The client stores (counter, 0) before it sends SAVE. The daemon advances the watermark by
 * compare-and-swap after each copied piece; the last advance, to the image's size, comes after it
 * has checked that the client's process still lives: watermark == image size *is* CAPTURED, and
 * only a part that reached it is ever committed. The client moves the watermark to REVOKED before a
 * fence, unprotect or close reports a timeout; the daemon moves it to FAILED when a source cannot
 * be read. Each is final for that counter, so exactly one of captured, revoked, failed is true.
 *
 * Beside it lies the admission: how large an image the daemon has kept room for, so that a save that
 * fits need not wait for an answer. The client takes it before such a save, the daemon takes it back
 * when others need the room; whoever exchanges it for 0 has it. It is a hint: a save that has taken one
 * is admitted like any other, only with better prospects.
 *
 * Orders: the daemon's advance releases (what it read is read before the client sees the
 * watermark); the client's load acquires, so that writes to its tensors come after.
 */

#include "base/util.h"

#include <stdatomic.h>

#define WORD_WATERMARK_BITS 48
#define WORD_WATERMARK_MASK ((UINT64_C(1) << WORD_WATERMARK_BITS) - 1)
#define WORD_REVOKED WORD_WATERMARK_MASK
#define WORD_FAILED (WORD_WATERMARK_MASK - 1)
#define WORD_IMAGE_MAX (UINT64_C(1) << 47) /* an image larger than this is refused: 128 TiB */

/* What the page holds. The rest of the page is zero. */
struct word_page {
    _Atomic uint64_t word;
    _Atomic uint32_t quiet;     /* the client: no copies out of device memory now, please */
    _Atomic uint32_t copying;   /* the daemon: such a copy is under way */
    _Atomic uint64_t admission; /* bytes of an image; 0: none */
};

static inline uint64_t word_make(uint16_t counter, uint64_t watermark) {
    return (uint64_t)counter << WORD_WATERMARK_BITS | watermark;
}
static inline uint16_t word_counter(uint64_t word) { return (uint16_t)(word >> WORD_WATERMARK_BITS); }
static inline uint64_t word_watermark(uint64_t word) { return word & WORD_WATERMARK_MASK; }

static inline uint64_t word_load(const struct word_page *page) {
    return atomic_load_explicit(&((struct word_page *)page)->word, memory_order_acquire);
}

/* Client: begin a save. */
static inline void word_begin(struct word_page *page, uint16_t counter) {
    atomic_store_explicit(&page->word, word_make(counter, 0), memory_order_release);
}

/* Daemon: from one watermark to the next (or to WORD_FAILED). False: revoked, or another save. */
static inline bool word_advance(struct word_page *page, uint16_t counter, uint64_t from, uint64_t to) {
    uint64_t expected = word_make(counter, from);
    return atomic_compare_exchange_strong_explicit(&page->word, &expected, word_make(counter, to), memory_order_acq_rel,
                                                   memory_order_acquire);
}

/* Client: give up this capture. True: it is revoked (or had failed); false: it was captured after all. */
static inline bool word_revoke(struct word_page *page, uint16_t counter, uint64_t image_size) {
    uint64_t current = word_load(page);
    for (;;) {
        if (word_counter(current) != counter)
            return true;
        if (word_watermark(current) == image_size)
            return false;
        if (word_watermark(current) >= WORD_FAILED)
            return true;
        if (atomic_compare_exchange_weak_explicit(&page->word, &current, word_make(counter, WORD_REVOKED),
                                                  memory_order_acq_rel, memory_order_acquire))
            return true;
    }
}

/* Daemon: room for an image of so many bytes is kept. */
static inline void word_admit(struct word_page *page, uint64_t bytes) {
    atomic_store_explicit(&page->admission, bytes, memory_order_release);
}
/* Daemon: takes that back. False: the client was faster, its save is on the way. */
static inline bool word_withdraw(struct word_page *page) {
    return atomic_exchange_explicit(&page->admission, 0, memory_order_acq_rel) != 0;
}
/* Client: takes it for an image of so many bytes. False: it must ask. */
static inline bool word_take_admission(struct word_page *page, uint64_t bytes) {
    uint64_t admission = atomic_load_explicit(&page->admission, memory_order_acquire);
    return admission >= bytes && admission > 0 &&
           atomic_compare_exchange_strong_explicit(&page->admission, &admission, 0, memory_order_acq_rel,
                                                   memory_order_acquire);
}

/*
 * Quiet: a trainer keeps the daemon's copies out of device memory away from its collectives. Each
 * side first says what it does and then looks at the other's word, in one total order: so either
 * the daemon sees that it must not begin, or the client sees that a copy is under way and waits for
 * its end, which is at most two pieces away. The daemon does not stay quiet for ever: WORD_QUIET_NS
 * after it first saw the word it goes on, so that a client that forgets the end still gets its saves.
 */
#define WORD_QUIET_NS (2 * NANOSECONDS_PER_SECOND)

static inline void word_quiet(struct word_page *page, bool quiet) {
    atomic_store_explicit(&page->quiet, quiet, memory_order_seq_cst);
}
/* Client, after word_quiet(page, true): may its collective begin? */
static inline bool word_copying(const struct word_page *page) {
    return atomic_load_explicit(&((struct word_page *)page)->copying, memory_order_seq_cst) > 0;
}
/* Daemon: before it begins a piece, and after its end; several devices may copy for one client.
 * False: quiet, nothing was begun. `anyway`: the client has been quiet for too long. */
static inline bool word_copy_begin(struct word_page *page, bool anyway) {
    atomic_fetch_add_explicit(&page->copying, 1, memory_order_seq_cst);
    if (anyway || !atomic_load_explicit(&page->quiet, memory_order_seq_cst))
        return true;
    atomic_fetch_sub_explicit(&page->copying, 1, memory_order_seq_cst);
    return false;
}
static inline void word_copy_end(struct word_page *page) {
    atomic_fetch_sub_explicit(&page->copying, 1, memory_order_seq_cst);
}
