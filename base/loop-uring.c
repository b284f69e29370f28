/* SPDX-License-Identifier: Apache-2.0 */
#include "base/loop-uring.h"

/*
 * The loop on io_uring: one ring, one system call per turn, which submits everything since the last
 * turn and waits. An operation in flight is in one of these places:
 *
 *     submit -> queue -> kernel -> ready (the reactor's) -> callback
 *                          |  ^
 *                       cancels        (still in the kernel, to be cancelled with the next turn)
 *
 * The queue makes submission infallible: if the submission ring is full, what is left waits for the
 * next turn, which is then immediate. The completion ring cannot lose anything (NODROP).
 *
 * An accept is a poll, then accept4(): kernels up to 5.17 answer EAGAIN to an accept on a
 * non-blocking socket instead of waiting. A receive or send that reports EAGAIN all the same is
 * polled for likewise, then submitted again. A socket operation whose `events` are set is one whose
 * poll is under way.
 *
 * Kernels before 5.13 are left to the other loop: the wakeup from the workers is a multishot poll,
 * which needs no read and no new submission when it fires.
 *
 * Worker threads of the kernel. Buffered and network file systems make io_uring use threads, which
 * all rings of a process share and whose number is by default four per CPU: a file system that hangs
 * would use them up for all others. So the bound is raised; the tiers bound what they have in flight.
 */

#include "base/reactor.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>

#define URING_ENTRIES 256
#define URING_KERNEL_THREADS_MAX 512
#define URING_LENGTH_MAX 0x7ffff000u /* what Linux transfers at most in one call */
#define URING_INLINE_MAX KIB(64)
#define URING_STUCK_NS NANOSECONDS_PER_SECOND

/* RSRC_TAGS came with 5.13, as did multishot polls, which have no feature bit. */
#define URING_FEATURES                                                                                                 \
    (IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_FAST_POLL | IORING_FEAT_EXT_ARG |                    \
     IORING_FEAT_RSRC_TAGS)

/* user_data of what is not an operation; no operation has such an address. */
enum { URING_IGNORE, URING_WAKE };

enum uring_stage {
    URING_QUEUED = REACTOR_STAGES,
    URING_KERNEL,
    URING_CANCELLING, /* in the kernel and on the list of cancels */
    URING_LOST,       /* in the kernel, written off with its group */
};

struct uring {
    struct reactor reactor;
    struct io_uring ring;
    struct loop_queue queue;
    struct loop_queue cancels;
    struct loop_queue files; /* file I/O in the kernel */
    bool wake_armed;
    int broken; /* negative errno: why no wakeup can be had */
};

static struct uring *uring_from_loop(struct loop *loop) {
    return CONTAINER_OF(reactor_from_loop(loop), struct uring, reactor);
}

static bool uring_is_file(const struct loop_op *op) {
    return op->kind == LOOP_READ || op->kind == LOOP_WRITE || op->kind == LOOP_SYNC;
}

static void uring_enqueue(struct uring *uring, struct loop_op *op) {
    op->stage = URING_QUEUED;
    TAILQ_INSERT_TAIL(&uring->queue, op, link);
}

static void uring_submit(struct loop *loop, struct loop_op *op) {
    struct uring *uring = uring_from_loop(loop);
    if (reactor_submit(&uring->reactor, op))
        return;
    if (op->kind == LOOP_SEND) {
        /* At once: whoever waits for an answer need not wait for the end of this turn. */
        ssize_t sent = sendmsg(op->fd, op->message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0 || (errno != EAGAIN && errno != EINTR)) {
            reactor_complete(&uring->reactor, op, sent >= 0 ? sent : -errno);
            return;
        }
    }
    if (op->kind != LOOP_POLL)
        op->events = op->kind == LOOP_ACCEPT ? POLLIN : 0;
    uring_enqueue(uring, op);
}

static void uring_cancel(struct loop *loop, struct loop_op *op) {
    struct uring *uring = uring_from_loop(loop);
    if (reactor_cancel(&uring->reactor, op) || uring_is_file(op))
        return;
    if (op->stage == URING_QUEUED) {
        TAILQ_REMOVE(&uring->queue, op, link);
        reactor_complete(&uring->reactor, op, -ECANCELED);
    } else if (op->stage == URING_KERNEL) {
        op->stage = URING_CANCELLING;
        TAILQ_INSERT_TAIL(&uring->cancels, op, link);
    }
}

/* What the page cache can answer, io_uring does at once, on this thread: some hundred microseconds
 * of copying for one chunk, while clients wait. Large buffered I/O goes to the kernel's threads. */
static bool uring_wants_thread(const struct loop_op *op) {
    if (op->length <= URING_INLINE_MAX)
        return false;
    int flags = fcntl(op->fd, F_GETFL);
    return flags >= 0 && !(flags & O_DIRECT);
}

static void uring_prepare(struct io_uring_sqe *sqe, struct loop_op *op) {
    unsigned length = min_u64(op->length, URING_LENGTH_MAX);
    switch (op->kind) {
    case LOOP_READ:
        io_uring_prep_read(sqe, op->fd, op->buffer, length, op->offset);
        if (uring_wants_thread(op))
            sqe->flags |= IOSQE_ASYNC;
        break;
    case LOOP_WRITE:
        io_uring_prep_write(sqe, op->fd, op->buffer, length, op->offset);
        if (uring_wants_thread(op))
            sqe->flags |= IOSQE_ASYNC;
        break;
    case LOOP_SYNC:
        io_uring_prep_fsync(sqe, op->fd, 0);
        break;
    case LOOP_RECV:
        if (op->events)
            io_uring_prep_poll_add(sqe, op->fd, op->events);
        else
            io_uring_prep_recvmsg(sqe, op->fd, op->message, MSG_CMSG_CLOEXEC);
        break;
    case LOOP_SEND:
        if (op->events)
            io_uring_prep_poll_add(sqe, op->fd, op->events);
        else
            io_uring_prep_sendmsg(sqe, op->fd, op->message, MSG_NOSIGNAL);
        break;
    case LOOP_ACCEPT:
    case LOOP_POLL:
        io_uring_prep_poll_add(sqe, op->fd, op->events);
        break;
    default:
        abort();
    }
    io_uring_sqe_set_data(sqe, op);
}

/* Fills the submission ring. Cancels go first: what they name is in the kernel, or before them in
 * the ring, and cannot have become a new operation at the same address yet. */
static void uring_fill(struct uring *uring) {
    struct io_uring_sqe *sqe;
    struct loop_op *op;
    if (!uring->wake_armed && (sqe = io_uring_get_sqe(&uring->ring))) {
        io_uring_prep_poll_multishot(sqe, workers_wake_fd(uring->reactor.workers), POLLIN);
        io_uring_sqe_set_data64(sqe, URING_WAKE);
        uring->wake_armed = true;
    }
    while ((op = TAILQ_FIRST(&uring->cancels)) && (sqe = io_uring_get_sqe(&uring->ring))) {
        TAILQ_REMOVE(&uring->cancels, op, link);
        op->stage = URING_KERNEL;
        io_uring_prep_cancel(sqe, op, 0);
        io_uring_sqe_set_data64(sqe, URING_IGNORE);
    }
    while ((op = TAILQ_FIRST(&uring->queue)) && (sqe = io_uring_get_sqe(&uring->ring))) {
        TAILQ_REMOVE(&uring->queue, op, link);
        op->stage = URING_KERNEL;
        if (uring_is_file(op))
            TAILQ_INSERT_TAIL(&uring->files, op, link);
        uring_prepare(sqe, op);
    }
}

static int64_t uring_accept(int fd) {
    int accepted;
    do
        accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (accepted < 0 && errno == EINTR);
    return accepted < 0 ? -errno : accepted;
}

/* What a completion of the kernel means for its operation; -EINTR and -EAGAIN: submit it again. */
static int64_t uring_result(struct loop_op *op, int64_t result) {
    switch (op->kind) {
    case LOOP_ACCEPT:
        return result < 0 ? result : uring_accept(op->fd);
    case LOOP_RECV:
    case LOOP_SEND:
        if (op->events && result >= 0) {
            op->events = 0;
            return -EINTR;
        }
        if (result == -EAGAIN)
            op->events = op->kind == LOOP_RECV ? POLLIN : POLLOUT;
        return result;
    default:
        return result;
    }
}

static void uring_handle(struct uring *uring, const struct io_uring_cqe *cqe) {
    if (cqe->user_data == URING_WAKE) {
        if (!(cqe->flags & IORING_CQE_F_MORE))
            uring->wake_armed = false;
        if (cqe->res < 0)
            uring->broken = cqe->res;
        return;
    }
    if (cqe->user_data == URING_IGNORE)
        return;
    struct loop_op *op = io_uring_cqe_get_data(cqe);
    if (op->stage == URING_LOST)
        return;
    if (op->stage == URING_CANCELLING)
        TAILQ_REMOVE(&uring->cancels, op, link);
    if (uring_is_file(op))
        TAILQ_REMOVE(&uring->files, op, link);
    int64_t r = uring_result(op, cqe->res);
    if (r != -EAGAIN && r != -EINTR)
        reactor_complete(&uring->reactor, op, r);
    else if (op->cancelled && !uring_is_file(op))
        reactor_complete(&uring->reactor, op, -ECANCELED);
    else
        uring_enqueue(uring, op);
}

static void uring_reap(struct uring *uring) {
    struct io_uring_cqe *cqe;
    unsigned head, count = 0;
    io_uring_for_each_cqe(&uring->ring, head, cqe) {
        uring_handle(uring, cqe);
        count++;
    }
    io_uring_cq_advance(&uring->ring, count);
}

/* A timeout is no news; a signal, a shortage of memory or completions that must be reaped first
 * leave what was not submitted in the ring, for the next turn. */
static bool uring_is_passing(int error) {
    return error == -ETIME || error == -EINTR || error == -EAGAIN || error == -EBUSY;
}

static int uring_wait(struct reactor *reactor, uint64_t timeout_ns) {
    struct uring *uring = CONTAINER_OF(reactor, struct uring, reactor);
    uring_fill(uring);
    int r;
    if (timeout_ns == 0 || !TAILQ_EMPTY(&uring->queue) || !TAILQ_EMPTY(&uring->cancels)) {
        r = io_uring_submit_and_get_events(&uring->ring);
    } else {
        struct io_uring_cqe *cqe;
        struct __kernel_timespec timeout = {
            .tv_sec = timeout_ns / NANOSECONDS_PER_SECOND,
            .tv_nsec = timeout_ns % NANOSECONDS_PER_SECOND,
        };
        r = io_uring_submit_and_wait_timeout(&uring->ring, &cqe, 1, timeout_ns == REACTOR_FOREVER ? NULL : &timeout,
                                             NULL);
    }
    if (r < 0 && !uring_is_passing(r))
        return r;
    uring_reap(uring);
    return uring->broken;
}

/* What the last callbacks submitted does not wait for the next run: it may be a farewell. */
static int uring_run(struct loop *loop) {
    struct uring *uring = uring_from_loop(loop);
    int r = reactor_run(loop);
    if (r == 0 && (!TAILQ_EMPTY(&uring->queue) || !TAILQ_EMPTY(&uring->cancels)))
        r = uring_wait(&uring->reactor, 0);
    return r;
}

static bool uring_has_files(struct uring *uring, struct loop_group *group) {
    struct loop_op *op;
    TAILQ_FOREACH(op, &uring->files, link)
    if (op->group == group)
        return true;
    return false;
}

static void uring_withdraw_files(struct uring *uring, struct loop_group *group) {
    struct loop_op *op = TAILQ_FIRST(&uring->queue);
    while (op) {
        struct loop_op *next = TAILQ_NEXT(op, link);
        if (uring_is_file(op) && op->group == group) {
            TAILQ_REMOVE(&uring->queue, op, link);
            reactor_complete(&uring->reactor, op, -ECANCELED);
        }
        op = next;
    }
}

static void uring_lose_files(struct uring *uring, struct loop_group *group) {
    struct loop_op *op = TAILQ_FIRST(&uring->files);
    while (op) {
        struct loop_op *next = TAILQ_NEXT(op, link);
        if (op->group == group) {
            TAILQ_REMOVE(&uring->files, op, link);
            op->stage = URING_LOST;
            reactor_abandon(&uring->reactor);
        }
        op = next;
    }
}

/* To its users a group does file I/O, whoever really does it: what is stuck in the kernel is given
 * up after a second, as a stuck worker is. */
static void uring_group_free(struct loop_group *group) {
    struct uring *uring = uring_from_loop(group->loop);
    uint64_t deadline_ns = reactor_now(group->loop) + URING_STUCK_NS;
    uring_withdraw_files(uring, group);
    int r = 0;
    while (r == 0 && uring_has_files(uring, group)) {
        uint64_t now = reactor_now(group->loop);
        if (now >= deadline_ns)
            break;
        r = uring_wait(&uring->reactor, deadline_ns - now);
        uring_withdraw_files(uring, group);
    }
    uring_lose_files(uring, group);
    reactor_group_free(group);
}

static void uring_free(struct loop *loop) {
    struct uring *uring = uring_from_loop(loop);
    io_uring_queue_exit(&uring->ring);
    reactor_deinit(&uring->reactor);
    free(uring);
}

static const struct loop_ops uring_ops = {
    .name = "uring",
    .submit = uring_submit,
    .cancel = uring_cancel,
    .run = uring_run,
    .stop = reactor_stop,
    .free = uring_free,
    .now = reactor_now,
    .wall = reactor_wall,
    .random = reactor_random,
    .group_new = reactor_group_new,
    .group_relieve = reactor_group_relieve,
    .group_free = uring_group_free,
};

/* Not possible here: no such system call, forbidden (seccomp, io_uring_disabled), an older kernel,
 * or one that charges rings to a small RLIMIT_MEMLOCK. The rest, such as too many open files, would
 * hit the other loop as well. */
static int uring_setup_error(int error) {
    switch (error) {
    case -ENOSYS:
    case -EPERM:
    case -EACCES:
    case -EINVAL:
    case -ENOMEM:
        return -EOPNOTSUPP;
    default:
        return error;
    }
}

static int uring_setup(struct io_uring *ring) {
    /* Completions need not interrupt us: we come by every turn. Known since 5.19. */
    int r = io_uring_queue_init(URING_ENTRIES, ring, IORING_SETUP_COOP_TASKRUN);
    if (r == -EINVAL)
        r = io_uring_queue_init(URING_ENTRIES, ring, 0);
    if (r < 0)
        return uring_setup_error(r);
    if ((ring->features & URING_FEATURES) != URING_FEATURES) {
        io_uring_queue_exit(ring);
        return -EOPNOTSUPP;
    }
    /* Only a better bound: 5.15 and later. */
    (void)io_uring_register_iowq_max_workers(ring, (unsigned[2]){URING_KERNEL_THREADS_MAX, 0});
    return 0;
}

int loop_uring_new(struct loop **ret_loop) {
    CLEANUP(freep) struct uring *uring = calloc(1, sizeof *uring);
    if (!uring)
        return -ENOMEM;
    TAILQ_INIT(&uring->queue);
    TAILQ_INIT(&uring->cancels);
    TAILQ_INIT(&uring->files);
    int r = reactor_init(&uring->reactor, &uring_ops, uring_wait);
    if (r < 0)
        return r;
    r = uring_setup(&uring->ring);
    if (r < 0) {
        reactor_deinit(&uring->reactor);
        return r;
    }
    *ret_loop = &STEAL(uring)->reactor.loop;
    return 0;
}
