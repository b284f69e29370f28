/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's socket: taken from the service manager, or made, with a lock beside it that says
 * that a daemon serves it. Directories are made 0700 and must be ours.
 */

#include "base/problem.h"

struct listener {
    int fd, lock_fd;
    char path[108];
    bool inherited; /* the service manager owns the socket */
};

enum { LISTENER_E_SERVED = 1 }; /* another daemon holds the lock */

/* Takes the socket that the service manager passed, if any; else makes `path` (NULL: the first of the
 * search order that may be made). */
int listener_init(struct listener *listener, const char *path, struct problem *problem) MUST_CHECK;
/* Removes socket and lock, if they are ours. */
void listener_deinit(struct listener *listener);
