/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A transfer is a stretch of one image on its way through a device's thread: into the arena (all of
 * the image, within the device), or into chunks in the host's pool (a piece); of a set on several
 * devices through one after the other. It holds everything that it reads and writes by itself, so
 * that its part may fail, and its device hang, without memory being used by two.
 */

#include "daemon/berth.h"
#include "daemon/source.h"
#include "proto/word.h"

#define TRANSFERS_MAX (FLIGHTS_MAX + 1) /* pieces of one image: under way, and being digested */

struct part;
struct transfer;

struct transfer_options {
    struct part *part;
    const struct source *source;
    struct word_map *word;
    bool store;            /* into the berth; else into the part's chunks [first, first + count) */
    bool second;           /* check mode: not into the chunks, but into memory of its own */
    uint32_t first, count; /* which have buffers */
    struct berth *berth;   /* NULL: none, the bytes come from the client's memory */
};

/* Begins it. Its end comes by part_transferred(), unless it is forgotten before. */
int transfer_new(const struct transfer_options *options, struct transfer **ret_transfer) MUST_CHECK;
/* The part is done with it, whatever it still does. */
void transfer_forget(struct transfer *transfer);
/* It is over, and well. */
bool transfer_landed(const struct transfer *transfer);
uint32_t transfer_first(const struct transfer *transfer);
uint32_t transfer_count(const struct transfer *transfer);
/* What a second reading has brought; it stays the transfer's. */
uint8_t *transfer_second(const struct transfer *transfer);
