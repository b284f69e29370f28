/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The system that libckpt runs on, in simulated processes: clock, sleep, poll, the way to the daemon,
 * random numbers. The linker puts these functions before the real ones (see meson.build); in a fiber
 * that is a process (fiber_set_pid()) they wait in simulated time, elsewhere they are the real ones. So
 * the library's own code runs, its blocking driver included, except its push thread.
 *
 * And the daemon's way into such a process's memory, piece by piece, for as long as it lives.
 */
#include "client/link.h"
#include "tests/sim/sim.h"

#include <errno.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <time.h>

int __real_clock_gettime(clockid_t clock, struct timespec *time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *time);
int __real_nanosleep(const struct timespec *time, struct timespec *rest);
int __wrap_nanosleep(const struct timespec *time, struct timespec *rest);
int __real_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
pid_t __real_getpid(void);
pid_t __wrap_getpid(void);
ssize_t __real_getrandom(void *buffer, size_t size, unsigned flags);
ssize_t __wrap_getrandom(void *buffer, size_t size, unsigned flags);
int __real_link_connect(struct link *link);
int __wrap_link_connect(struct link *link);
ssize_t __real_process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count,
                                const struct iovec *remote, unsigned long remote_count, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count,
                                const struct iovec *remote, unsigned long remote_count, unsigned long flags);
ssize_t __real_pread64(int fd, void *buffer, size_t size, off_t offset);
ssize_t __wrap_pread64(int fd, void *buffer, size_t size, off_t offset);

/* ---- time ---- */

static uint64_t nanoseconds(const struct timespec *time) {
    return (uint64_t)time->tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)time->tv_nsec;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
    if (!fiber_pid_now())
        return __real_clock_gettime(clock, time);
    *time = (struct timespec){.tv_sec = (time_t)(sim.now_ns / NANOSECONDS_PER_SECOND),
                              .tv_nsec = (long)(sim.now_ns % NANOSECONDS_PER_SECOND)};
    return 0;
}

int __wrap_nanosleep(const struct timespec *time, struct timespec *rest) {
    if (!fiber_pid_now())
        return __real_nanosleep(time, rest);
    fiber_wait(sim.now_ns + nanoseconds(time), -1);
    return 0;
}

int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    static const struct timespec at_once;
    if (!fiber_pid_now())
        return __real_ppoll(fds, count, timeout, mask);
    assert(count == 1 && timeout);
    uint64_t until_ns = sim.now_ns + nanoseconds(timeout);
    for (;;) {
        int r = __real_ppoll(fds, count, &at_once, NULL);
        if (r || sim.now_ns >= until_ns)
            return r;
        bool to_read = fds->events & POLLIN;
        fiber_wait(to_read ? until_ns : min_u64(until_ns, sim.now_ns + NANOSECONDS_PER_MS), to_read ? fds->fd : -1);
    }
}

/* ---- who it is, and what it reaches ---- */

pid_t __wrap_getpid(void) {
    uint32_t pid = fiber_pid_now();
    return pid ? (pid_t)pid : __real_getpid();
}

ssize_t __wrap_getrandom(void *buffer, size_t size, unsigned flags) {
    if (!fiber_pid_now())
        return __real_getrandom(buffer, size, flags);
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)buffer)[i] = (uint8_t)sim_random();
    return (ssize_t)size;
}

int __wrap_link_connect(struct link *link) {
    uint32_t pid = fiber_pid_now();
    if (!pid)
        return __real_link_connect(link);
    int fd = kernel_connect(pid);
    if (fd < 0)
        return fd;
    link->fd = fd;
    link->complaint = 0;
    return 0;
}

/* ---- its memory ---- */

/* As another process sees it: whatever lies there, allocated or not. */
__attribute__((no_sanitize("address", "thread"))) static void look(uint8_t *to, const uint8_t *from, size_t size) {
    for (size_t i = 0; i < size; i++)
        to[i] = ((const volatile uint8_t *)from)[i];
}

/* Others come between the pieces; the process may die there. */
static ssize_t read_memory(uint32_t pid, void *to, const void *from, size_t size) {
    size_t half = sim_below(size + 1);
    if (!kernel_process_alive(pid))
        return 0;
    look(to, from, half);
    fiber_wait(sim.now_ns + sim_below(20000), -1);
    if (!kernel_process_alive(pid))
        return (ssize_t)half;
    look((uint8_t *)to + half, (const uint8_t *)from + half, size - half);
    return (ssize_t)size;
}

ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count,
                                const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    if (!kernel_is_simulated((uint32_t)pid))
        return __real_process_vm_readv(pid, local, local_count, remote, remote_count, flags);
    assert(local_count == remote_count);
    ssize_t got = 0;
    for (unsigned long i = 0; i < local_count; i++) {
        ssize_t piece = read_memory((uint32_t)pid, local[i].iov_base, remote[i].iov_base, local[i].iov_len);
        got += piece;
        if ((size_t)piece < local[i].iov_len)
            break;
    }
    if (got)
        return got;
    errno = ESRCH;
    return -1;
}

ssize_t __wrap_pread64(int fd, void *buffer, size_t size, off_t offset) {
    uint32_t pid = kernel_memory_of(fd);
    if (!pid)
        return __real_pread64(fd, buffer, size, offset);
    return read_memory(pid, buffer, (const void *)(uintptr_t)offset, size);
}
