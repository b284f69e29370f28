/* SPDX-License-Identifier: Apache-2.0 */
#include "base/map.h"

#include <errno.h>
#include <sys/mman.h>

/* Huge pages need an address that is a multiple of their size, and mmap chooses such a one only where the
 * administrator lets all shared memory have them. So a larger range is taken first, and cut to measure. */
void *map_file(int fd, size_t size, bool writable) {
    int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    if (size < MAP_HUGE_SIZE)
        return mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    size_t length = align_up(size, (size_t)sysconf(_SC_PAGESIZE));
    uint8_t *range = mmap(NULL, length + MAP_HUGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == MAP_FAILED)
        return MAP_FAILED;
    size_t before = (size_t)(-(uintptr_t)range & (MAP_HUGE_SIZE - 1));
    void *data = mmap(range + before, length, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (data == MAP_FAILED) {
        int error = errno;
        munmap(range, length + MAP_HUGE_SIZE);
        errno = error;
        return MAP_FAILED;
    }
    if (before)
        munmap(range, before);
    munmap(range + before + length, MAP_HUGE_SIZE - before);
    return data;
}
