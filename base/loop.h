/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The loop is the only way in which a control plane meets time and the world: sockets, file
 * contents, timers, clocks, randomness, and work on other threads. There are two real ones
 * (loop-uring.c; loop-posix.c, epoll and threads, where io_uring is off) and room for a simulated
 * one: all of them are a `struct loop` with a table of operations.
 *
 * An operation is a `struct loop_op` embedded in its owner. The owner submits it and must keep it
 * (and its buffer) alive until its callback has run; there is exactly one callback per submission.
 * Callbacks run from loop_run() on the thread that runs the loop, never from inside a submit.
 * Completions are first reaped into a queue, then called, so a callback may submit, cancel, or
 * free the object in which its own operation lies.
 *
 * All functions are for the loop's own thread, except where said.
 */

#include "base/util.h"

#include <sys/queue.h>
#include <sys/socket.h>

struct loop;
struct loop_op;
struct loop_group;

typedef void (*loop_fn)(struct loop_op *op);

enum loop_kind {
    LOOP_IDLE, /* not in flight: may be submitted, or freed */
    LOOP_READ,
    LOOP_WRITE,
    LOOP_SYNC,
    LOOP_ACCEPT,
    LOOP_RECV,
    LOOP_SEND,
    LOOP_POLL,
    LOOP_TIMER,
    LOOP_WORK,
    LOOP_POST,
};

struct loop_op {
    int64_t result; /* valid in the callback: bytes, a new descriptor, poll events, or negative errno */
    loop_fn fn;     /* who is told */

    /* From here on the loop's own. */
    enum loop_kind kind;
    struct loop *loop;
    struct loop_group *group;
    TAILQ_ENTRY(loop_op) link;
    int fd;
    uint32_t events;
    int stage;      /* where it is; each kind of loop has its own stages */
    bool cancelled; /* loop_cancel() was called */
    bool begun;     /* a worker has taken it */
    void *buffer;
    size_t length;
    uint64_t offset;   /* file offset, or a timer's deadline in ns */
    uint64_t order;    /* timers: equal deadlines expire in order of submission */
    size_t heap_index; /* timers */
    struct msghdr *message;
    loop_fn run; /* LOOP_WORK: what the worker does */
};

TAILQ_HEAD(loop_queue, loop_op);

#define LOOP_OP_INIT ((struct loop_op){0})

struct loop_ops {
    const char *name; /* "uring", "posix", ... */
    void (*submit)(struct loop *loop, struct loop_op *op);
    void (*cancel)(struct loop *loop, struct loop_op *op);
    int (*run)(struct loop *loop);
    void (*stop)(struct loop *loop);
    void (*free)(struct loop *loop);
    uint64_t (*now)(struct loop *loop);
    uint64_t (*wall)(struct loop *loop);
    uint64_t (*random)(struct loop *loop);
    int (*group_new)(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                     struct loop_group **ret_group);
    int (*group_relieve)(struct loop_group *group);
    void (*group_free)(struct loop_group *group);
};

struct loop {
    const struct loop_ops *ops;
};

struct loop_group {
    struct loop *loop;
};

/* Makes a loop: "uring", "posix", or "auto" (uring where the kernel allows it, else posix).
 * -EOPNOTSUPP: this kind is not possible here; -EINVAL: no such kind. */
int loop_new(const char *kind, struct loop **ret_loop) MUST_CHECK;
/* Nothing may be in flight, except work that is stuck: see loop_group_free. */
void loop_free(struct loop *loop);
void loop_freep(struct loop **loop);
const char *loop_name(struct loop *loop);

/* Runs until loop_stop() is called from a callback, or until nothing is in flight any more (an
 * idle loop does not wake up: there is no tick). Negative errno: the loop itself broke. */
int loop_run(struct loop *loop) MUST_CHECK;
void loop_stop(struct loop *loop);

/* Monotonic time in ns; wall-clock time in ns since 1970; 64 random bits. */
uint64_t loop_now(struct loop *loop);
uint64_t loop_wall(struct loop *loop);
uint64_t loop_random(struct loop *loop);

/* A named, bounded set of worker threads with a queue. One per tier: a hung file system stalls
 * only its own group. Threads are made when first needed, up to `threads`. -EINVAL unless
 * 1 <= threads <= max_threads <= LOOP_GROUP_THREADS_MAX. */
#define LOOP_GROUP_THREADS_MAX 256

int loop_group_new(struct loop *loop, const char *name, unsigned threads, unsigned max_threads,
                   struct loop_group **ret_group) MUST_CHECK;
/* One worker is stuck in the kernel: allow one more thread, up to max_threads. -EBUSY: the bound is reached. */
int loop_group_relieve(struct loop_group *group);
/* Joins the workers; what they had not begun calls back with -ECANCELED. A worker that is stuck is
 * left behind after one second (the process is about to end): its operation stays busy, never calls
 * back, is no longer waited for by loop_run(), and must not be freed. */
void loop_group_free(struct loop_group *group);

/* File contents. `group` says which workers do it where the loop needs threads for files. Short
 * counts are possible and are the caller's to continue. */
void loop_read(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, void *buffer, size_t length,
               uint64_t offset, loop_fn fn);
void loop_write(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, const void *buffer,
                size_t length, uint64_t offset, loop_fn fn);
void loop_sync(struct loop *loop, struct loop_op *op, struct loop_group *group, int fd, loop_fn fn);

/* Sockets; all descriptors must be non-blocking, and stay open until the callback. At a time, one
 * descriptor may have one accept or recv, one send, and one poll in flight. accept yields a new
 * close-on-exec, non-blocking descriptor as result. The msghdr and what it points to stay the
 * caller's and alive; received descriptors are close-on-exec. A peer that is gone is -EPIPE,
 * -ECONNRESET or 0, never a signal. */
void loop_accept(struct loop *loop, struct loop_op *op, int fd, loop_fn fn);
void loop_recv(struct loop *loop, struct loop_op *op, int fd, struct msghdr *message, loop_fn fn);
void loop_send(struct loop *loop, struct loop_op *op, int fd, struct msghdr *message, loop_fn fn);
/* Waits until any of `events` (POLLIN, ...) holds; result is the events seen. For pidfds, signalfds. */
void loop_poll(struct loop *loop, struct loop_op *op, int fd, uint32_t events, loop_fn fn);

/* Calls back with result 0 once loop_now() >= deadline. */
void loop_timer(struct loop *loop, struct loop_op *op, uint64_t deadline_ns, loop_fn fn);

/* Runs `run` on a worker of the group (it may set op->result and read what its owner made
 * immutable; it may not call the loop), then `fn` on the loop's thread. */
void loop_work(struct loop *loop, struct loop_op *op, struct loop_group *group, loop_fn run, loop_fn fn);

/* Calls back from the loop, soon, with this result. For wrappers that answer instead of the disk. */
void loop_post(struct loop *loop, struct loop_op *op, int64_t result, loop_fn fn);

/* Asks for an operation to end early. Its callback still runs, once: with -ECANCELED, or with its
 * result if it was faster. Work that has begun and file I/O run to their end. Cancelling an
 * operation that is not in flight does nothing. */
void loop_cancel(struct loop *loop, struct loop_op *op);

static inline bool loop_op_busy(const struct loop_op *op) { return op->kind != LOOP_IDLE; }
