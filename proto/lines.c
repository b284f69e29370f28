/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/lines.h"

#include <errno.h>

#define LINES_DIGITS_MAX 19 /* of LINES_NUMBER_MAX */
#define SEAL_KEY ",\"digest\":\""
#define SEAL_SIZE (sizeof SEAL_KEY - 1 + 2 * DIGEST_SIZE + 3) /* with `"}` and newline */
#define FINISH_START "{\"digest\":\""
#define FINISH_SIZE (sizeof FINISH_START - 1 + 2 * DIGEST_SIZE + 3)

void lines_add_number(struct text *text, const char *key, uint64_t number) {
    text_add(text, ",");
    text_add_quoted(text, key, strlen(key));
    text_add(text, ":");
    text_add_number(text, number);
}

void lines_add_text(struct text *text, const char *key, const char *string) {
    text_add(text, ",");
    text_add_quoted(text, key, strlen(key));
    text_add(text, ":");
    text_add_quoted(text, string, strlen(string));
}

void lines_add_digest(struct text *text, const char *key, const struct digest *digest) {
    char hex[DIGEST_HEX_SIZE];
    digest_hex(digest, hex);
    lines_add_text(text, key, hex);
}

/* The digest of the bytes from `start` on, in hex. */
static void digest_of(const struct text *text, size_t start, char ret_hex[DIGEST_HEX_SIZE]) {
    struct digest digest;
    digest_leaf(text->data + start, text->length - start, &digest);
    digest_hex(&digest, ret_hex);
}

void lines_seal(struct text *text, size_t start) {
    char hex[DIGEST_HEX_SIZE];
    if (text->failed)
        return;
    digest_of(text, start, hex);
    text_add(text, SEAL_KEY);
    text_add(text, hex);
    text_add(text, "\"}\n");
}

void lines_finish(struct text *text) {
    char hex[DIGEST_HEX_SIZE];
    if (text->failed)
        return;
    digest_of(text, 0, hex);
    text_add(text, FINISH_START);
    text_add(text, hex);
    text_add(text, "\"}\n");
}

/* Does `end` (the tail of a line) say, between `before` and `"}\n`, the digest of these bytes? */
static bool digest_matches(const char *data, size_t size, const char *end, const char *before) {
    size_t length = strlen(before);
    struct digest said, is;
    if (memcmp(end, before, length) != 0 || memcmp(end + length + 2 * DIGEST_SIZE, "\"}\n", 3) != 0 ||
        !digest_from_hex(end + length, 2 * DIGEST_SIZE, &said))
        return false;
    digest_leaf(data, size, &is);
    return digest_equal(&said, &is);
}

int lines_read_sealed(const char *data, size_t size, size_t line_max, const char *format, int version,
                      json_t **ret_object, size_t *ret_length, struct problem *problem) {
    const char *newline = size ? memchr(data, '\n', min_u64(size, line_max)) : NULL;
    if (!newline)
        return problem_set(problem, -EBADMSG, "%s: the first line is cut off or too long", format);
    size_t length = (size_t)(newline - data) + 1;
    if (length < SEAL_SIZE || !digest_matches(data, length - SEAL_SIZE, data + length - SEAL_SIZE, SEAL_KEY))
        return problem_set(problem, -EBADMSG, "%s: the first line does not match its digest", format);
    json_auto_t *object = lines_parse(data, length - 1);
    char said[64];
    uint64_t said_version;
    if (!lines_field_text(object, "format", said, sizeof said) || strcmp(said, format) != 0 ||
        !lines_field_number(object, "version", LINES_NUMBER_MAX, &said_version) || said_version == 0)
        return problem_set(problem, -EBADMSG, "%s: the first line is not that of such a file", format);
    if (said_version > (uint64_t)version)
        return problem_set(problem, -ENOTSUP, "%s: written by a newer ckptd: version %llu of the format, known is %d",
                           format, (unsigned long long)said_version, version);
    *ret_object = STEAL(object);
    *ret_length = length;
    return 0;
}

int lines_check_finish(const char *data, size_t size, const char *format, size_t *ret_size, struct problem *problem) {
    if (size < FINISH_SIZE || !digest_matches(data, size - FINISH_SIZE, data + size - FINISH_SIZE, FINISH_START))
        return problem_set(problem, -EBADMSG, "%s: the file does not match the digest in its last line", format);
    *ret_size = size - FINISH_SIZE;
    return 0;
}

bool lines_next(const char **data, size_t *size, const char **ret_line, size_t *ret_length) {
    const char *newline = *size ? memchr(*data, '\n', min_u64(*size, LINES_LINE_MAX)) : NULL;
    if (!newline)
        return false;
    *ret_line = *data;
    *ret_length = (size_t)(newline - *data);
    *size -= *ret_length + 1;
    *data = newline + 1;
    return true;
}

json_t *lines_parse(const char *line, size_t length) { return json_loadb(line, length, JSON_REJECT_DUPLICATES, NULL); }

bool lines_scan_is(struct lines_scan *scan, const char *literal) {
    size_t length = strlen(literal);
    if ((size_t)(scan->end - scan->at) < length || memcmp(scan->at, literal, length) != 0)
        return false;
    scan->at += length;
    return true;
}

bool lines_scan_number(struct lines_scan *scan, uint64_t *ret_number) {
    const char *at = scan->at;
    uint64_t number = 0;
    while (at < scan->end && *at >= '0' && *at <= '9' && at - scan->at < LINES_DIGITS_MAX)
        number = number * 10 + (uint64_t)(*at++ - '0');
    if (at == scan->at || number > LINES_NUMBER_MAX || (*scan->at == '0' && at - scan->at > 1))
        return false;
    if (at < scan->end && *at != ',' && *at != ']' && *at != '}') /* more digits, or no integer */
        return false;
    scan->at = at;
    *ret_number = number;
    return true;
}

bool lines_scan_numbers(struct lines_scan *scan, size_t max, uint64_t *ret_numbers, size_t *ret_count) {
    struct lines_scan ahead = *scan;
    size_t count = 0;
    if (!lines_scan_is(&ahead, "["))
        return false;
    if (!lines_scan_is(&ahead, "]"))
        do {
            if (count == max || !lines_scan_number(&ahead, &ret_numbers[count++]))
                return false;
        } while (lines_scan_is(&ahead, ","));
    if (count && !lines_scan_is(&ahead, "]"))
        return false;
    *scan = ahead;
    *ret_count = count;
    return true;
}

bool lines_scan_text(struct lines_scan *scan, const char **ret_text, size_t *ret_length) {
    if (scan->at == scan->end || *scan->at != '"')
        return false;
    const char *text = scan->at + 1, *at = text;
    while (at < scan->end && *at != '"' && *at != '\\' && (unsigned char)*at >= 0x20)
        at++;
    if (at == scan->end || *at != '"' || !text_is_utf8(text, (size_t)(at - text)))
        return false;
    scan->at = at + 1;
    *ret_text = text;
    *ret_length = (size_t)(at - text);
    return true;
}

bool lines_scan_digest(struct lines_scan *scan, struct digest *ret_digest) {
    struct lines_scan ahead = *scan;
    const char *text;
    size_t length;
    if (!lines_scan_text(&ahead, &text, &length) || !digest_from_hex(text, length, ret_digest))
        return false;
    *scan = ahead;
    return true;
}

bool lines_number(const json_t *value, uint64_t max, uint64_t *ret_number) {
    if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > max)
        return false;
    *ret_number = (uint64_t)json_integer_value(value);
    return true;
}

bool lines_field_number(const json_t *object, const char *key, uint64_t max, uint64_t *ret_number) {
    return lines_number(json_object_get(object, key), max, ret_number);
}

bool lines_field_u32(const json_t *object, const char *key, uint32_t *ret_number) {
    uint64_t number;
    if (!lines_field_number(object, key, UINT32_MAX, &number))
        return false;
    *ret_number = (uint32_t)number;
    return true;
}

bool lines_field_text(const json_t *object, const char *key, char *ret_text, size_t capacity) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value) || json_string_length(value) >= capacity)
        return false;
    memcpy(ret_text, json_string_value(value), json_string_length(value) + 1);
    return true;
}

bool lines_digest(const json_t *value, struct digest *ret_digest) {
    return json_is_string(value) && digest_from_hex(json_string_value(value), json_string_length(value), ret_digest);
}

bool lines_field_digest(const json_t *object, const char *key, struct digest *ret_digest) {
    return lines_digest(json_object_get(object, key), ret_digest);
}
