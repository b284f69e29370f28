/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/* Mounts the file system in this file on a loop device, which goes with the mount. False, with errno, if it cannot be
 * mounted; skips the test where no loop device can be had. */
bool loop_mount(const char *image, const char *directory, const char *type, const char *options);
