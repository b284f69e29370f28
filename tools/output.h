/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A file being written: under a temporary name beside the final one, whole before it is renamed. Its
 * space is allocated first, so that a full file system is an error at the start and not a SIGBUS in
 * the middle.
 */

#include "base/util.h"

#include <limits.h>

struct output {
    char path[PATH_MAX];
    char temporary[PATH_MAX];
    int fd;
    char *data; /* the file, mapped */
    size_t size;
};

#define OUTPUT_NONE ((struct output){.fd = -1})

/* An exit status, its sentence printed. */
int output_begin(struct output *output, const char *path, uint64_t size) MUST_CHECK;
/* Synced, renamed, the directory synced. On failure nothing is left. */
int output_finish(struct output *output) MUST_CHECK;
/* Also after output_finish: gives up what is not finished. */
void output_abandon(struct output *output);
