/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the files of this format share: a sealed first line of JSON, which ends in the digest of its
 * own bytes, lines of JSON after it, and a fixed-width last line with the digest of all bytes
 * before it. Reading takes arbitrary bytes.
 */

#include "base/problem.h"
#include "proto/digest.h"
#include "proto/text.h"

#include <jansson.h>

#define LINES_NUMBER_MAX INT64_MAX /* the greatest number in a file */
#define LINES_LINE_MAX KIB(256)    /* the bound of a line after the first */

/* The line that began at text->data[start] is an object without its closing brace; appends the
 * digest of these bytes, the brace and a newline. */
void lines_seal(struct text *text, size_t start);
/* Appends the last line. */
void lines_finish(struct text *text);

/* Reads the sealed line at the start of data: checks digest, "format" and "version" (at most
 * `version`). *ret_length: bytes of the line, newline included. -EBADMSG: damaged; -ENOTSUP: written
 * by a newer ckptd. */
int lines_read_sealed(const char *data, size_t size, size_t line_max, const char *format, int version,
                      json_t **ret_object, size_t *ret_length, struct problem *problem) MUST_CHECK;
/* Checks that data ends in a last line with the digest of everything before it. *ret_size: the
 * bytes before that line. -EBADMSG. */
int lines_check_finish(const char *data, size_t size, const char *format, size_t *ret_size,
                       struct problem *problem) MUST_CHECK;
/* Cuts the next line off: *data and *size move behind its newline. False: there is none, or it is too long. */
bool lines_next(const char **data, size_t *size, const char **ret_line, size_t *ret_length);
/* One line as JSON; NULL: it is none. */
json_t *lines_parse(const char *line, size_t length);

/* The same without a tree, for lines of which there are many: takes apart what the writers below write, which has
 * neither white space nor escapes. False, and nothing is taken: the line has something else there, so lines_parse()
 * decides. */
struct lines_scan {
    const char *at, *end;
};
bool lines_scan_is(struct lines_scan *scan, const char *literal);
bool lines_scan_number(struct lines_scan *scan, uint64_t *ret_number);
/* `[1,2,...]`, at most `max` of them. */
bool lines_scan_numbers(struct lines_scan *scan, size_t max, uint64_t *ret_numbers, size_t *ret_count);
/* A quoted string, UTF-8 without control characters; it ends at the quote. */
bool lines_scan_text(struct lines_scan *scan, const char **ret_text, size_t *ret_length);
bool lines_scan_digest(struct lines_scan *scan, struct digest *ret_digest);

/* Fields of an object. False: absent, of another type, or out of bounds. */
bool lines_number(const json_t *value, uint64_t max, uint64_t *ret_number);
bool lines_field_number(const json_t *object, const char *key, uint64_t max, uint64_t *ret_number);
bool lines_field_u32(const json_t *object, const char *key, uint32_t *ret_number);
/* A string of less than `capacity` bytes, copied with its NUL. */
bool lines_field_text(const json_t *object, const char *key, char *ret_text, size_t capacity);
bool lines_digest(const json_t *value, struct digest *ret_digest);
bool lines_field_digest(const json_t *object, const char *key, struct digest *ret_digest);
/* Writing: `,"key":` and the value. */
void lines_add_number(struct text *text, const char *key, uint64_t number);
void lines_add_text(struct text *text, const char *key, const char *string);
void lines_add_digest(struct text *text, const char *key, const struct digest *digest);
