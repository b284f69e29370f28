/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A growing text, and JSON written into it piece by piece: headers and manifests of a million
 * tensors are never held as a tree. Running out of memory is remembered, and told once at the end.
 */

#include "base/util.h"

struct text {
    char *data;
    size_t length, capacity;
    bool failed;
};

#define TEXT_NONE ((struct text){0})

/* Room for `more` bytes and a NUL. False: there is none. */
bool text_reserve(struct text *text, size_t more);

/* Here, and not in text.c: what most appends add is a few bytes whose number the compiler knows. */
static inline void text_append(struct text *text, const void *data, size_t length) {
    if (length >= text->capacity - text->length && !text_reserve(text, length))
        return;
    if (length)
        memcpy(text->data + text->length, data, length);
    text->length += length;
}

static inline void text_add(struct text *text, const char *string) { text_append(text, string, strlen(string)); }

void text_add_number(struct text *text, uint64_t number);
/* A JSON array of numbers. */
void text_add_numbers(struct text *text, const uint64_t *numbers, size_t count);
/* A quoted JSON string; the bytes are UTF-8. */
void text_add_quoted(struct text *text, const char *string, size_t length);
/* Gives the bytes (and a NUL that is not counted) to the caller. -ENOMEM if any append failed. */
int text_take(struct text *text, char **ret_data, size_t *ret_length) MUST_CHECK;
void text_deinit(struct text *text);

/* Well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool text_is_utf8(const char *string, size_t length);
