/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/text.h"

#include <errno.h>

bool text_reserve(struct text *text, size_t more) {
    if (text->failed)
        return false;
    if (more < text->capacity - text->length)
        return true;
    size_t capacity = text->capacity ? text->capacity : 256;
    while (capacity - text->length <= more) {
        if (capacity > SIZE_MAX / 2) {
            text->failed = true;
            return false;
        }
        capacity *= 2;
    }
    char *data = realloc(text->data, capacity);
    if (!data) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->capacity = capacity;
    return true;
}

void text_add_number(struct text *text, uint64_t number) {
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    text_append(text, digits + at, sizeof digits - at);
}

void text_add_numbers(struct text *text, const uint64_t *numbers, size_t count) {
    text_add(text, "[");
    for (size_t i = 0; i < count; i++) {
        if (i)
            text_add(text, ",");
        text_add_number(text, numbers[i]);
    }
    text_add(text, "]");
}

void text_add_quoted(struct text *text, const char *string, size_t length) {
    text_add(text, "\"");
    size_t plain = 0; /* where the run of bytes that need no escape began */
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)string[i];
        if (byte >= 0x20 && byte != '"' && byte != '\\')
            continue;
        text_append(text, string + plain, i - plain);
        plain = i + 1;
        if (byte < 0x20) {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)byte);
            text_append(text, escape, 6);
        } else {
            text_append(text, (char[2]){'\\', (char)byte}, 2);
        }
    }
    text_append(text, string + plain, length - plain);
    text_add(text, "\"");
}

int text_take(struct text *text, char **ret_data, size_t *ret_length) {
    if (!text_reserve(text, 1)) {
        text_deinit(text);
        return -ENOMEM;
    }
    text->data[text->length] = '\0';
    *ret_length = text->length;
    *ret_data = STEAL(text->data);
    *text = TEXT_NONE;
    return 0;
}

void text_deinit(struct text *text) {
    free(text->data);
    *text = TEXT_NONE;
}

bool text_is_utf8(const char *string, size_t length) {
    const unsigned char *at = (const unsigned char *)string, *end = at + length;
    while (at < end) {
        uint64_t eight;
        if (end - at >= (ptrdiff_t)sizeof eight) {
            memcpy(&eight, at, sizeof eight);
            if (!(eight & UINT64_C(0x8080808080808080))) { /* ASCII, as most names are */
                at += sizeof eight;
                continue;
            }
        }
        unsigned char lead = *at++;
        if (lead < 0x80)
            continue;
        size_t more;
        unsigned char low = 0x80, high = 0xbf; /* what the second byte may be */
        if (lead >= 0xc2 && lead <= 0xdf) {
            more = 1;
        } else if (lead >= 0xe0 && lead <= 0xef) {
            more = 2;
            if (lead == 0xe0)
                low = 0xa0;
            if (lead == 0xed)
                high = 0x9f;
        } else if (lead >= 0xf0 && lead <= 0xf4) {
            more = 3;
            if (lead == 0xf0)
                low = 0x90;
            if (lead == 0xf4)
                high = 0x8f;
        } else {
            return false;
        }
        if ((size_t)(end - at) < more || *at < low || *at > high)
            return false;
        for (size_t i = 1; i < more; i++)
            if ((at[i] & 0xc0) != 0x80)
                return false;
        at += more;
    }
    return true;
}
