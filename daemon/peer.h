/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The process at the other end of a socket, and reading its memory. The pidfd is the authority on
 * its death (forked children keep sockets open). /proc/PID/mem, opened once, is the authority on
 * its address space: after an exec it reads nothing, while process_vm_readv by pid would read the
 * new program. Shared by a session and the captures that outlive it; used from workers read-only.
 */

#include "base/problem.h"

#include <sys/uio.h>

struct peer {
    _Atomic uint32_t refs;
    int pid;
    int pidfd;  /* -1: the kernel gave none: then nothing private is read */
    int mem_fd; /* -1: not allowed; mem_errno says why */
    int mem_errno;
    uint64_t pid_start;
};

/* From the socket's credentials. -EACCES with a sentence: another uid. */
int peer_new(int socket_fd, uid_t uid, struct peer **ret_peer, struct problem *problem) MUST_CHECK;
struct peer *peer_ref(struct peer *peer);
void peer_unref(struct peer *peer);

/* False once the process has ended. */
bool peer_alive(const struct peer *peer);
/* Reads the nonce back both ways. 0, or negative errno with the reason and the remedy. */
int peer_probe(const struct peer *peer, uint64_t nonce_address, uint64_t nonce, struct problem *problem) MUST_CHECK;
/* The process lives and its memory is still the probed one. */
bool peer_memory_valid(const struct peer *peer, uint64_t nonce_address, uint64_t nonce);

/* Fills `local` (local_count pieces) from `remote`; all of it, or negative errno. `by_file`: through
 * /proc/PID/mem, because the client has forked and process_vm_readv would un-share its pages. */
int peer_read(const struct peer *peer, const struct iovec *local, const struct iovec *remote, size_t count,
              bool by_file) MUST_CHECK;
