/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What people read: aligned columns, sizes and ages. A table is filled cell by cell, row after
 * row, its first row being the heading. Control characters in cells are escaped: names come from
 * files that anybody may have written.
 */

#include "base/util.h"

#define TABLE_COLUMNS_MAX 12

struct table {
    size_t columns;
    uint32_t right; /* bit per column: flush right */
    char **cells;
    size_t count, capacity;
};

/* `heading`: names separated by '|', '>' before one makes its column flush right. */
void table_init(struct table *table, const char *heading);
void table_deinit(struct table *table);
void table_cell(struct table *table, const char *format, ...) PRINTF_LIKE(2, 3);
/* Prints with two spaces between columns; nothing if there is only the heading. */
void table_print(const struct table *table, FILE *out);

/* Prints a name with control characters as \xNN. */
void print_safe(FILE *out, const char *text);

#define FORMAT_MAX 32
/* "1.5 GiB"; "3 min". They return their buffer. */
const char *format_bytes(uint64_t bytes, char ret_text[FORMAT_MAX]);
const char *format_duration(uint64_t ms, char ret_text[FORMAT_MAX]);
/* How long ago a wall-clock time was; "-" for 0. */
const char *format_age(uint64_t wall_ns, char ret_text[FORMAT_MAX]);
