/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A disk that loses what was not flushed. A small FUSE server, in a process of its own, shows one file: the image
 * of the disk, on which a loop device and a file system stand. It keeps the writes since the last flush apart. When
 * the power goes, some of them are lost, by chance: all, any subset, also torn between sectors; what had been
 * flushed stays.
 *
 *     crash_disk_start   an image with an empty file system; not mounted
 *     crash_disk_mount   loop device, file system
 *     crash_disk_arm     the power goes at the nth request from now on
 *     crash_disk_is_out  it went: no request is answered any more
 *       ...              now whoever uses the file system is killed (he cannot end yet)
 *     crash_disk_thaw    requests are answered again, and forgotten: so that everybody can let go
 *     crash_disk_restart unmounts; from now on the disk holds what the power left
 */

#include "tests/functional/support.h"

/* In a mount namespace of our own. Skips the test where the machine lacks something. `lies`: the disk answers
 * flushes and does not do them. */
void crash_disk_start(bool lies);
/* False if the file system cannot be mounted (any more). */
bool crash_disk_mount(const char *options);
void crash_disk_arm(uint64_t requests);
bool crash_disk_is_out(void);
void crash_disk_thaw(void);
void crash_disk_restart(void);
/* Where it is mounted. */
const char *crash_disk_path(void);
/* Requests, flushes, and writes that were dropped or torn. */
void crash_disk_counts(uint64_t ret_counts[3]);
/* Unmounts and ends the server. */
void crash_disk_stop(void);
