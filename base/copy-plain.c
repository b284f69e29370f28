/* SPDX-License-Identifier: Apache-2.0 */
#include "base/copy.h"

void copy_past_cache(void *destination, const void *source, size_t length) { memcpy(destination, source, length); }
