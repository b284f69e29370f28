/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One line of JSON per piece, in manifests and in complete.json. FORMAT.md has the fields.
 */

#include "base/problem.h"
#include "proto/image.h"
#include "proto/text.h"

/* Appends the line, newline included. A manifest leaves the rank out: it has only one. */
void piece_write(const struct piece *piece, bool with_rank, struct text *text);
/* Reads one line (without its newline). `rank` is that of a manifest; NULL: the line has it.
 * -EBADMSG with the reason. The strings are the caller's to free. */
int piece_read(const char *line, size_t length, const uint32_t *rank, struct piece *ret_piece,
               struct problem *problem) MUST_CHECK;
void piece_deinit(struct piece *piece);

/* Bytes of the piece in its part; 0 for an alias. */
uint64_t piece_bytes(const struct piece *piece);
/* Of two pieces with bytes of one part or several: sorted by name, global before rank-local, rank, offset. */
int piece_compare(const struct piece *a, const struct piece *b);

/* What a key of the image or a piece's line says about where the piece lies: appends
 * `,"box":[[offset],[extent]]` or `,"range":[start,count]`, and nothing for a whole box. */
void piece_write_place(const struct geometry *geometry, struct text *text);
