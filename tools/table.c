/* SPDX-License-Identifier: Apache-2.0 */
/* Cells are kept as strings; widths are counted in code points when the table is printed. */
#include "tools/table.h"

#include <stdarg.h>
#include <time.h>

static void add(struct table *table, char *cell) {
    if (table->count == table->capacity) {
        table->capacity = table->capacity ? 2 * table->capacity : 64;
        table->cells = realloc(table->cells, table->capacity * sizeof *table->cells);
        assert(table->cells);
    }
    table->cells[table->count++] = cell;
}

void table_init(struct table *table, const char *heading) {
    *table = (struct table){0};
    for (;;) {
        if (*heading == '>') {
            table->right |= UINT32_C(1) << table->columns;
            heading++;
        }
        size_t length = strcspn(heading, "|");
        char *cell = strndup(heading, length);
        assert(cell && table->columns < TABLE_COLUMNS_MAX);
        add(table, cell);
        table->columns++;
        if (!heading[length])
            break;
        heading += length + 1;
    }
}

void table_deinit(struct table *table) {
    for (size_t i = 0; i < table->count; i++)
        free(table->cells[i]);
    free(table->cells);
    *table = (struct table){0};
}

void table_cell(struct table *table, const char *format, ...) {
    char *raw = NULL, *safe = NULL;
    size_t size;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&raw, format, arguments);
    va_end(arguments);
    assert(length >= 0);
    FILE *out = open_memstream(&safe, &size);
    assert(out);
    print_safe(out, raw);
    fclose(out);
    free(raw);
    add(table, safe);
}

static size_t width(const char *text) {
    size_t points = 0;
    for (; *text; text++)
        points += ((unsigned char)*text & 0xc0) != 0x80;
    return points;
}

void table_print(const struct table *table, FILE *out) {
    size_t widths[TABLE_COLUMNS_MAX] = {0};
    if (table->count == table->columns)
        return;
    assert(table->count % table->columns == 0);
    for (size_t i = 0; i < table->count; i++) {
        size_t column = i % table->columns, cell = width(table->cells[i]);
        if (cell > widths[column])
            widths[column] = cell;
    }
    size_t spaces = 0; /* owed, and printed only if something follows in the line */
    for (size_t i = 0; i < table->count; i++) {
        size_t column = i % table->columns, padding = widths[column] - width(table->cells[i]);
        bool right = table->right & UINT32_C(1) << column;
        spaces += right ? padding : 0;
        if (table->cells[i][0]) {
            fprintf(out, "%*s%s", (int)spaces, "", table->cells[i]);
            spaces = 0;
        }
        spaces += (right ? 0 : padding) + 2;
        if (column + 1 == table->columns) {
            fputc('\n', out);
            spaces = 0;
        }
    }
}

void print_safe(FILE *out, const char *text) {
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte < 0x20 || byte == 0x7f)
            fprintf(out, "\\x%02x", byte);
        else
            fputc(byte, out);
    }
}

const char *format_bytes(uint64_t bytes, char ret_text[FORMAT_MAX]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t unit = 0;
    double value = (double)bytes;
    for (; value >= 1023.95 && unit + 1 < ARRAY_SIZE(units); unit++)
        value /= 1024;
    snprintf(ret_text, FORMAT_MAX, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return ret_text;
}

const char *format_duration(uint64_t ms, char ret_text[FORMAT_MAX]) {
    uint64_t seconds = ms / 1000;
    if (ms < 10000)
        snprintf(ret_text, FORMAT_MAX, "%.1f s", (double)ms / 1000);
    else if (seconds < 120)
        snprintf(ret_text, FORMAT_MAX, "%llu s", (unsigned long long)seconds);
    else if (seconds < 2 * 3600)
        snprintf(ret_text, FORMAT_MAX, "%llu min", (unsigned long long)seconds / 60);
    else if (seconds < 48 * 3600)
        snprintf(ret_text, FORMAT_MAX, "%llu h", (unsigned long long)seconds / 3600);
    else
        snprintf(ret_text, FORMAT_MAX, "%llu d", (unsigned long long)seconds / 86400);
    return ret_text;
}

const char *format_age(uint64_t wall_ns, char ret_text[FORMAT_MAX]) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t now_ns = (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
    if (!wall_ns) {
        strcpy(ret_text, "-");
        return ret_text;
    }
    return format_duration(now_ns > wall_ns ? (now_ns - wall_ns) / NANOSECONDS_PER_MS : 0, ret_text);
}
