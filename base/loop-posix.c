/* SPDX-License-Identifier: Apache-2.0 */
#include "base/loop-posix.h"

/*
 * The loop on epoll and threads. File contents are read and written by the workers of the
 * operation's group, never through epoll, which cannot watch regular files. Sockets and polls are
 * watched, one record per descriptor: up to one operation that waits for input, one for output,
 * one poll.
 *
 * Every registration is one-shot and armed anew by the next operation. That makes two old traps
 * harmless. A descriptor may be closed while its file lives on in another process: epoll then
 * keeps reporting for a number that we have long given to something else, but a disarmed
 * registration is silent, and a late report only makes us try an operation that answers EAGAIN.
 * And nobody needs to tell us that a descriptor is closed: arming a number whose file is new
 * fails with ENOENT and is then an addition.
 *
 * A send is tried at once, since it nearly always succeeds; a receive waits for its event, since
 * at submission there is nearly never anything to be had.
 */

#include "base/reactor.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <sys/epoll.h>

#define POSIX_EVENTS_MAX 64
#define POSIX_WATCHES_MIN 64

#define POSIX_WATCHED REACTOR_STAGES

struct watch {
    struct loop_op *in;
    struct loop_op *out;
    struct loop_op *poll;
};

struct posix {
    struct reactor reactor;
    int epoll_fd;
    struct watch *watches; /* by descriptor */
    size_t watch_count;
};

static struct posix *posix_from_loop(struct loop *loop) {
    return CONTAINER_OF(reactor_from_loop(loop), struct posix, reactor);
}

static int64_t posix_result(ssize_t n) { return n < 0 ? -errno : n; }

static void posix_run_read(struct loop_op *op) {
    do
        op->result = posix_result(pread(op->fd, op->buffer, op->length, op->offset));
    while (op->result == -EINTR);
}

static void posix_run_write(struct loop_op *op) {
    do
        op->result = posix_result(pwrite(op->fd, op->buffer, op->length, op->offset));
    while (op->result == -EINTR);
}

static void posix_run_sync(struct loop_op *op) {
    do
        op->result = posix_result(fsync(op->fd));
    while (op->result == -EINTR);
}

static int64_t posix_try_once(struct loop_op *op) {
    switch (op->kind) {
    case LOOP_ACCEPT:
        return posix_result(accept4(op->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
    case LOOP_RECV:
        return posix_result(recvmsg(op->fd, op->message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT));
    case LOOP_SEND:
        return posix_result(sendmsg(op->fd, op->message, MSG_NOSIGNAL | MSG_DONTWAIT));
    case LOOP_POLL: {
        /* Asked again rather than taken from epoll: the report may be about a file that had this
         * number before. */
        struct pollfd pollfd = {.fd = op->fd, .events = op->events};
        int64_t r = posix_result(poll(&pollfd, 1, 0));
        if (r < 0)
            return r;
        return r > 0 ? pollfd.revents : -EAGAIN;
    }
    default:
        abort();
    }
}

static int64_t posix_try(struct loop_op *op) {
    int64_t r;
    do
        r = posix_try_once(op);
    while (r == -EINTR);
    return r;
}

static struct loop_op **watch_slot(struct watch *watch, enum loop_kind kind) {
    switch (kind) {
    case LOOP_ACCEPT:
    case LOOP_RECV:
        return &watch->in;
    case LOOP_SEND:
        return &watch->out;
    case LOOP_POLL:
        return &watch->poll;
    default:
        abort();
    }
}

static uint32_t watch_events(const struct watch *watch) {
    return (watch->in ? EPOLLIN : 0) | (watch->out ? EPOLLOUT : 0) | (watch->poll ? watch->poll->events : 0);
}

static bool watch_empty(const struct watch *watch) { return !watch->in && !watch->out && !watch->poll; }

static int posix_arm(struct posix *posix, int fd) {
    struct epoll_event event = {.events = watch_events(&posix->watches[fd]) | EPOLLONESHOT, .data.fd = fd};
    if (epoll_ctl(posix->epoll_fd, EPOLL_CTL_MOD, fd, &event) == 0)
        return 0;
    if (errno != ENOENT)
        return -errno;
    return epoll_ctl(posix->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static int posix_reserve(struct posix *posix, int fd) {
    if (fd < 0)
        return -EBADF;
    if (fd < posix->watch_count)
        return 0;
    size_t count = max_u64(POSIX_WATCHES_MIN, posix->watch_count);
    while (count <= fd)
        count *= 2;
    struct watch *watches = reallocarray(posix->watches, count, sizeof *watches);
    if (!watches)
        return -ENOMEM;
    memset(watches + posix->watch_count, 0, (count - posix->watch_count) * sizeof *watches);
    posix->watches = watches;
    posix->watch_count = count;
    return 0;
}

static void posix_watch(struct posix *posix, struct loop_op *op) {
    int r = posix_reserve(posix, op->fd);
    if (r == 0) {
        struct loop_op **slot = watch_slot(&posix->watches[op->fd], op->kind);
        assert(!*slot);
        *slot = op;
        op->stage = POSIX_WATCHED;
        r = posix_arm(posix, op->fd);
        if (r < 0)
            *slot = NULL;
    }
    if (r < 0)
        reactor_complete(&posix->reactor, op, r);
}

static void posix_submit(struct loop *loop, struct loop_op *op) {
    struct posix *posix = posix_from_loop(loop);
    if (reactor_submit(&posix->reactor, op))
        return;
    switch (op->kind) {
    case LOOP_READ:
        op->run = posix_run_read;
        reactor_submit_work(&posix->reactor, op);
        return;
    case LOOP_WRITE:
        op->run = posix_run_write;
        reactor_submit_work(&posix->reactor, op);
        return;
    case LOOP_SYNC:
        op->run = posix_run_sync;
        reactor_submit_work(&posix->reactor, op);
        return;
    case LOOP_SEND: {
        int64_t r = posix_try(op);
        if (r != -EAGAIN)
            reactor_complete(&posix->reactor, op, r);
        else
            posix_watch(posix, op);
        return;
    }
    default:
        posix_watch(posix, op);
    }
}

static void posix_cancel(struct loop *loop, struct loop_op *op) {
    struct posix *posix = posix_from_loop(loop);
    if (reactor_cancel(&posix->reactor, op))
        return;
    struct watch *watch = &posix->watches[op->fd];
    *watch_slot(watch, op->kind) = NULL;
    /* If this fails, the registration stays armed for one event too many, which nobody awaits. */
    if (watch_empty(watch))
        (void)epoll_ctl(posix->epoll_fd, EPOLL_CTL_DEL, op->fd, NULL);
    else
        (void)posix_arm(posix, op->fd);
    reactor_complete(&posix->reactor, op, -ECANCELED);
}

static void posix_try_slot(struct posix *posix, struct loop_op **slot) {
    struct loop_op *op = *slot;
    if (!op)
        return;
    int64_t r = posix_try(op);
    if (r == -EAGAIN)
        return;
    *slot = NULL;
    reactor_complete(&posix->reactor, op, r);
}

static void posix_fail_slot(struct posix *posix, struct loop_op **slot, int error) {
    struct loop_op *op = *slot;
    if (!op)
        return;
    *slot = NULL;
    reactor_complete(&posix->reactor, op, error);
}

static void posix_handle(struct posix *posix, const struct epoll_event *event) {
    if (event->data.fd == workers_wake_fd(posix->reactor.workers))
        return;
    struct watch *watch = &posix->watches[event->data.fd];
    uint32_t failed = event->events & (EPOLLERR | EPOLLHUP);
    if (failed || event->events & EPOLLIN)
        posix_try_slot(posix, &watch->in);
    if (failed || event->events & EPOLLOUT)
        posix_try_slot(posix, &watch->out);
    posix_try_slot(posix, &watch->poll);
    if (watch_empty(watch))
        return;
    int r = posix_arm(posix, event->data.fd);
    if (r < 0) {
        posix_fail_slot(posix, &watch->in, r);
        posix_fail_slot(posix, &watch->out, r);
        posix_fail_slot(posix, &watch->poll, r);
    }
}

/* epoll counts in ms: rounded up, since a timer that is early would make the loop spin. */
static int posix_timeout_ms(uint64_t timeout_ns) {
    if (timeout_ns == REACTOR_FOREVER)
        return -1;
    uint64_t timeout_ms = timeout_ns / NANOSECONDS_PER_MS + (timeout_ns % NANOSECONDS_PER_MS != 0);
    return min_u64(timeout_ms, INT_MAX);
}

static int posix_wait(struct reactor *reactor, uint64_t timeout_ns) {
    struct posix *posix = CONTAINER_OF(reactor, struct posix, reactor);
    struct epoll_event events[POSIX_EVENTS_MAX];
    int n = epoll_wait(posix->epoll_fd, events, POSIX_EVENTS_MAX, posix_timeout_ms(timeout_ns));
    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n; i++)
        posix_handle(posix, &events[i]);
    return 0;
}

static void posix_free(struct loop *loop) {
    struct posix *posix = posix_from_loop(loop);
    reactor_deinit(&posix->reactor);
    close(posix->epoll_fd);
    free(posix->watches);
    free(posix);
}

static const struct loop_ops posix_ops = {
    .name = "posix",
    .submit = posix_submit,
    .cancel = posix_cancel,
    .run = reactor_run,
    .stop = reactor_stop,
    .free = posix_free,
    .now = reactor_now,
    .wall = reactor_wall,
    .random = reactor_random,
    .group_new = reactor_group_new,
    .group_relieve = reactor_group_relieve,
    .group_free = reactor_group_free,
};

int loop_posix_new(struct loop **ret_loop) {
    CLEANUP(closep) int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        return -errno;
    CLEANUP(freep) struct posix *posix = calloc(1, sizeof *posix);
    if (!posix)
        return -ENOMEM;
    int r = reactor_init(&posix->reactor, &posix_ops, posix_wait);
    if (r < 0)
        return r;
    int wake_fd = workers_wake_fd(posix->reactor.workers);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = wake_fd};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) < 0) {
        r = -errno;
        reactor_deinit(&posix->reactor);
        return r;
    }
    posix->epoll_fd = steal_fd(&epoll_fd);
    *ret_loop = &STEAL(posix)->reactor.loop;
    return 0;
}
