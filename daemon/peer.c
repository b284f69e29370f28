/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/peer.h"

#include "tiers/claim.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

static int open_pidfd(int socket_fd, int pid) {
    int pidfd = -1;
    socklen_t length = sizeof pidfd;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0)
        return pidfd;
    /* Before Linux 6.5 there is a window in which the pid may have been reused; the nonce closes it
     * for memory, and a wrong pidfd only delays the notice of a death until the socket's end. */
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

int peer_new(int socket_fd, uid_t uid, struct peer **ret_peer, struct problem *problem) {
    struct ucred credentials;
    socklen_t length = sizeof credentials;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0)
        return problem_set(problem, -errno, "cannot read the client's credentials: %s", strerror(errno));
    if (credentials.uid != uid)
        return problem_set(problem, -EACCES, "uid %u may not use the daemon of uid %u", credentials.uid, uid);
    struct peer *peer = calloc(1, sizeof *peer);
    if (!peer)
        return problem_set(problem, -ENOMEM, "out of memory");
    peer->refs = 1;
    peer->pid = credentials.pid;
    peer->pidfd = open_pidfd(socket_fd, credentials.pid);
    if (peer->pidfd >= 0)
        (void)fcntl(peer->pidfd, F_SETFD, FD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", credentials.pid);
    peer->mem_fd = credentials.pid > 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (peer->mem_fd < 0)
        peer->mem_errno = credentials.pid > 0 ? errno : ESRCH;
    if (credentials.pid <= 0 || claim_pid_start((uint32_t)credentials.pid, &peer->pid_start) < 0)
        peer->pid_start = 0;
    *ret_peer = peer;
    return 0;
}

struct peer *peer_ref(struct peer *peer) {
    peer->refs++;
    return peer;
}

void peer_unref(struct peer *peer) {
    if (--peer->refs)
        return;
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    if (peer->mem_fd >= 0)
        close(peer->mem_fd);
    free(peer);
}

bool peer_alive(const struct peer *peer) {
    if (peer->pidfd < 0)
        return true;
    struct pollfd poll_fd = {.fd = peer->pidfd, .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 0;
}

static int read_by_file(const struct peer *peer, const struct iovec *local, const struct iovec *remote, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t done = 0; done < local[i].iov_len;) {
            /* Addresses of the upper half do not occur in a process; off_t is signed. */
            ssize_t got = pread(peer->mem_fd, (char *)local[i].iov_base + done, local[i].iov_len - done,
                                (off_t)((uintptr_t)remote[i].iov_base + done));
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                return errno == EIO ? -EFAULT : -errno;
            if (got == 0)
                return -ESRCH; /* the address space is gone: exit or exec */
            done += (size_t)got;
        }
    return 0;
}

int peer_read(const struct peer *peer, const struct iovec *local, const struct iovec *remote, size_t count,
              bool by_file) {
    if (by_file)
        return read_by_file(peer, local, remote, count);
    size_t wanted = 0;
    for (size_t i = 0; i < count; i++)
        wanted += local[i].iov_len;
    ssize_t got = process_vm_readv(peer->pid, local, count, remote, count, 0);
    if (got < 0)
        return -errno;
    return (size_t)got == wanted ? 0 : -EFAULT;
}

int peer_probe(const struct peer *peer, uint64_t nonce_address, uint64_t nonce, struct problem *problem) {
    if (peer->pidfd < 0)
        return problem_set(problem, -ENOSYS, "no pidfd for the client (another pid namespace, or Linux before 5.3)");
    if (peer->mem_fd < 0)
        return problem_set(problem, -peer->mem_errno,
                           "cannot open /proc/%d/mem: %s (see kernel.yama.ptrace_scope, containers' seccomp rules)",
                           peer->pid, strerror(peer->mem_errno));
    for (int by_file = 0; by_file < 2; by_file++) {
        uint64_t seen = 0;
        struct iovec local = {.iov_base = &seen, .iov_len = sizeof seen};
        struct iovec remote = {.iov_base = (void *)(uintptr_t)nonce_address, .iov_len = sizeof seen};
        int r = peer_read(peer, &local, &remote, 1, by_file);
        if (r < 0)
            return problem_set(problem, r,
                               "cannot read the memory of process %d: %s (see kernel.yama.ptrace_scope, "
                               "containers' seccomp rules)",
                               peer->pid, strerror(-r));
        if (seen != nonce)
            return problem_set(problem, -ESRCH, "process %d is not the one that its socket says (pid namespaces?)",
                               peer->pid);
    }
    return 0;
}

bool peer_memory_valid(const struct peer *peer, uint64_t nonce_address, uint64_t nonce) {
    uint64_t seen = 0;
    return peer_alive(peer) && pread(peer->mem_fd, &seen, sizeof seen, (off_t)nonce_address) == (ssize_t)sizeof seen &&
           seen == nonce;
}
