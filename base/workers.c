/* SPDX-License-Identifier: Apache-2.0 */
#include "base/workers.h"

/*
 * One mutex guards all groups of a loop: jobs take milliseconds, the critical sections some
 * nanoseconds. Each group has its own queue, condition and threads, so a group whose threads all
 * hang in a dead file system holds up nobody else.
 *
 * Wakeups are made only where somebody sleeps. A worker looks at its queue before it sleeps, and
 * a new operation makes a thread only if there are fewer sleepers than operations to begin. The
 * loop says when it goes to sleep (workers_sleep), and the first operation that finishes after
 * that writes the eventfd; those that finish while the loop is awake or already woken do not.
 *
 * Queues are not bounded here: an operation is memory of its owner, who bounds how many it has.
 *
 * A stuck worker. A thread in uninterruptible sleep can be neither cancelled nor joined, and when
 * the server comes back, hours later, it returns from its system call and reaches for its group.
 * So whoever frees the group of such a thread leaves the group's memory, the mutex and the
 * eventfd behind for good, marks the group abandoned, and the thread, if it ever returns, sees the
 * mark and ends without touching its operation again.
 */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>

#define WORKERS_NAME_MAX 16 /* what pthread_setname_np takes, with the zero */
#define WORKERS_STUCK_SECONDS 1

struct workers {
    pthread_mutex_t mutex;
    struct loop_queue finished;
    bool sleeping; /* the loop sleeps, and nobody has woken it yet */
    int wake_fd;
    unsigned groups;
    bool abandoned; /* by now, or once: some thread may still come back to this memory */
};

struct group;

struct worker {
    struct group *group;
    pthread_t thread;
    bool busy;
    bool ended;
    bool detached;
};

struct group {
    struct loop_group head;
    struct workers *workers;
    char name[WORKERS_NAME_MAX];
    pthread_cond_t work;  /* something is queued, or the group closes */
    pthread_cond_t ended; /* a thread is about to end */
    struct loop_queue queue;
    unsigned queued;
    unsigned sleepers;
    unsigned allowed;
    unsigned max_threads;
    unsigned started;
    unsigned ended_count;
    bool closing;
    bool abandoned;
    struct worker threads[];
};

static struct group *group_from_head(struct loop_group *head) { return CONTAINER_OF(head, struct group, head); }

int workers_new(struct workers **ret_workers) {
    CLEANUP(freep) struct workers *workers = calloc(1, sizeof *workers);
    if (!workers)
        return -ENOMEM;
    /* Blocking, since io_uring would answer EAGAIN at once; writes of 1 never fill it. */
    workers->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (workers->wake_fd < 0)
        return -errno;
    pthread_mutex_init(&workers->mutex, NULL);
    TAILQ_INIT(&workers->finished);
    *ret_workers = STEAL(workers);
    return 0;
}

void workers_free(struct workers *workers) {
    if (!workers)
        return;
    assert(workers->groups == 0);
    if (workers->abandoned)
        return;
    close(workers->wake_fd);
    pthread_mutex_destroy(&workers->mutex);
    free(workers);
}

int workers_wake_fd(const struct workers *workers) { return workers->wake_fd; }

bool workers_sleep(struct workers *workers) {
    pthread_mutex_lock(&workers->mutex);
    workers->sleeping = TAILQ_EMPTY(&workers->finished);
    bool sleeping = workers->sleeping;
    pthread_mutex_unlock(&workers->mutex);
    return sleeping;
}

void workers_collect(struct workers *workers, struct loop_queue *finished) {
    pthread_mutex_lock(&workers->mutex);
    workers->sleeping = false;
    TAILQ_CONCAT(finished, &workers->finished, link);
    pthread_mutex_unlock(&workers->mutex);
}

static struct loop_op *group_next(struct group *group) {
    while (TAILQ_EMPTY(&group->queue) && !group->closing) {
        group->sleepers++;
        pthread_cond_wait(&group->work, &group->workers->mutex);
        group->sleepers--;
    }
    struct loop_op *op = TAILQ_FIRST(&group->queue);
    if (op) {
        TAILQ_REMOVE(&group->queue, op, link);
        group->queued--;
        op->begun = true;
    }
    return op;
}

/* Gives a finished operation to the loop; lets go of the mutex for the time of a wakeup. */
static void workers_finish(struct workers *workers, struct loop_op *op) {
    TAILQ_INSERT_TAIL(&workers->finished, op, link);
    if (!workers->sleeping)
        return;
    workers->sleeping = false;
    pthread_mutex_unlock(&workers->mutex);
    ssize_t written = write(workers->wake_fd, &(uint64_t){1}, sizeof(uint64_t));
    assert(written == sizeof(uint64_t));
    pthread_mutex_lock(&workers->mutex);
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct group *group = worker->group;
    struct workers *workers = group->workers;

    pthread_setname_np(pthread_self(), group->name);
    /* Bulk work: it may use a processor that is free, but not keep a thread waiting that has just
     * been woken, such as the client whose answer was sent a moment before. */
    struct sched_param batch = {0};
    (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &batch);
    pthread_mutex_lock(&workers->mutex);
    struct loop_op *op;
    while (!group->abandoned && (op = group_next(group))) {
        worker->busy = true;
        pthread_mutex_unlock(&workers->mutex);
        op->run(op);
        pthread_mutex_lock(&workers->mutex);
        worker->busy = false;
        if (!group->abandoned)
            workers_finish(workers, op);
    }
    worker->ended = true;
    group->ended_count++;
    pthread_cond_signal(&group->ended);
    pthread_mutex_unlock(&workers->mutex);
    return NULL;
}

/* Signals are the main thread's business (signalfd): a worker blocks all of them. */
static int group_start_thread(struct group *group) {
    struct worker *worker = &group->threads[group->started];
    worker->group = group;
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    if (error)
        return -error;
    group->started++;
    return 0;
}

/* With what is queued: one more thread, if the sleeping ones do not suffice and the bound allows. */
static int group_grow(struct group *group) {
    if (group->queued <= group->sleepers || group->started >= group->allowed)
        return 0;
    int r = group_start_thread(group);
    return group->started > 0 ? 0 : r;
}

int workers_group_new(struct workers *workers, struct loop *loop, const char *name, unsigned threads,
                      unsigned max_threads, struct loop_group **ret_group) {
    struct group *group = calloc(1, sizeof *group + max_threads * sizeof group->threads[0]);
    if (!group)
        return -ENOMEM;
    group->head.loop = loop;
    group->workers = workers;
    group->allowed = threads;
    group->max_threads = max_threads;
    snprintf(group->name, sizeof group->name, "%.*s", WORKERS_NAME_MAX - 1, name);
    TAILQ_INIT(&group->queue);
    pthread_cond_init(&group->work, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&group->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    workers->groups++;
    *ret_group = &group->head;
    return 0;
}

int workers_group_relieve(struct loop_group *head) {
    struct group *group = group_from_head(head);
    if (group->allowed >= group->max_threads)
        return -EBUSY;
    group->allowed++;
    pthread_mutex_lock(&group->workers->mutex);
    int r = group_grow(group);
    pthread_mutex_unlock(&group->workers->mutex);
    return r;
}

/* Waits for the threads to end, within reason. */
static void group_wait_ended(struct group *group) {
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += WORKERS_STUCK_SECONDS;
    int error = 0;
    while (group->ended_count < group->started && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&group->ended, &group->workers->mutex, &deadline);
}

unsigned workers_group_free(struct loop_group *head, struct loop_queue *unbegun) {
    struct group *group = group_from_head(head);
    struct workers *workers = group->workers;
    unsigned lost = 0;

    pthread_mutex_lock(&workers->mutex);
    TAILQ_CONCAT(unbegun, &group->queue, link);
    group->queued = 0;
    group->closing = true;
    pthread_cond_broadcast(&group->work);
    group_wait_ended(group);
    for (unsigned i = 0; i < group->started; i++) {
        struct worker *worker = &group->threads[i];
        if (worker->ended)
            continue;
        group->abandoned = true;
        worker->detached = true;
        if (worker->busy)
            lost++;
        pthread_detach(worker->thread);
    }
    bool abandoned = group->abandoned;
    pthread_mutex_unlock(&workers->mutex);

    for (unsigned i = 0; i < group->started; i++)
        if (!group->threads[i].detached)
            pthread_join(group->threads[i].thread, NULL);
    workers->groups--;
    if (abandoned) {
        workers->abandoned = true;
        return lost;
    }
    pthread_cond_destroy(&group->work);
    pthread_cond_destroy(&group->ended);
    free(group);
    return 0;
}

int workers_submit(struct loop_op *op) {
    struct group *group = group_from_head(op->group);
    struct workers *workers = group->workers;

    pthread_mutex_lock(&workers->mutex);
    TAILQ_INSERT_TAIL(&group->queue, op, link);
    group->queued++;
    bool wake = group->sleepers > 0;
    int r = group_grow(group);
    if (r < 0) {
        TAILQ_REMOVE(&group->queue, op, link);
        group->queued--;
    }
    pthread_mutex_unlock(&workers->mutex);
    if (wake)
        pthread_cond_signal(&group->work);
    return r;
}

bool workers_withdraw(struct loop_op *op) {
    struct group *group = group_from_head(op->group);
    struct workers *workers = group->workers;

    pthread_mutex_lock(&workers->mutex);
    bool withdrawn = !op->begun;
    if (withdrawn) {
        TAILQ_REMOVE(&group->queue, op, link);
        group->queued--;
    }
    pthread_mutex_unlock(&workers->mutex);
    return withdrawn;
}
