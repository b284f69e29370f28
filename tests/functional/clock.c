/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a daemon by tests: its wall clock and its monotonic clock are ahead (or behind) by the two
 * numbers of seconds that the file CKPTD_TEST_CLOCK holds, whenever somebody writes them there.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t *volatile shifts;

static const int64_t *map_shifts(void) {
    static const int64_t none[2];
    const char *path = getenv("CKPTD_TEST_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *map = fd >= 0 ? mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    return map == MAP_FAILED ? none : map;
}

__attribute__((visibility("default"))) int clock_gettime(clockid_t id, struct timespec *ret_time) {
    int r = (int)syscall(SYS_clock_gettime, id, ret_time);
    if (!shifts)
        shifts = map_shifts();
    if (r == 0 && id == CLOCK_REALTIME)
        ret_time->tv_sec += shifts[0];
    else if (r == 0 && id == CLOCK_MONOTONIC)
        ret_time->tv_sec += shifts[1];
    return r;
}
