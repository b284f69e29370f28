/* SPDX-License-Identifier: Apache-2.0 */
#include "base/loop.h"
#include "tests/unit/base/unit.h"

/*
 * Every test runs on every kind of loop that is possible here. Tests wait for events, never for
 * time to pass, except the few whose subject is that nothing happens.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#define MANY 10000
#define FAR_NS (3600 * NANOSECONDS_PER_SECOND)

struct fixture {
    struct loop *loop;
    struct loop_group *group;
};

static int setup(void **state) {
    const char *kind = *state;
    struct fixture *fixture = calloc(1, sizeof *fixture);
    if (loop_new(kind, &fixture->loop) < 0 || loop_group_new(fixture->loop, "test", 2, 4, &fixture->group) < 0)
        return -1;
    *state = fixture;
    return 0;
}

static int teardown(void **state) {
    struct fixture *fixture = *state;
    loop_group_free(fixture->group);
    loop_free(fixture->loop);
    free(fixture);
    return 0;
}

/* An operation that remembers how often, and as which, it was called back. */
struct probe {
    struct loop_op op;
    unsigned calls;
    unsigned turn; /* counted over all probes */
    int64_t result;
};

static unsigned turns;

static void probe_done(struct loop_op *op) {
    struct probe *probe = CONTAINER_OF(op, struct probe, op);
    assert_false(loop_op_busy(op));
    probe->calls++;
    probe->turn = ++turns;
    probe->result = op->result;
}

static void probe_done_stop(struct loop_op *op) {
    probe_done(op);
    loop_stop(op->loop);
}

static void assert_called(const struct probe *probe, int64_t result) {
    assert_int_equal(probe->calls, 1);
    assert_int_equal(probe->result, result);
}

static void run(struct loop *loop) { assert_int_equal(loop_run(loop), 0); }

static void make_pair(int type, int ret_fds[2]) {
    assert_int_equal(socketpair(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ret_fds), 0);
}

static void close_pair(const int fds[2]) {
    close(fds[0]);
    close(fds[1]);
}

/* A message of one buffer, with room for one descriptor. */
struct packet {
    struct msghdr header;
    struct iovec vector;
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr alignment;
    } control;
    char buffer[64];
};

static struct msghdr *packet_to_receive(struct packet *packet) {
    *packet = (struct packet){0};
    packet->vector = (struct iovec){packet->buffer, sizeof packet->buffer};
    packet->header = (struct msghdr){.msg_iov = &packet->vector,
                                     .msg_iovlen = 1,
                                     .msg_control = &packet->control,
                                     .msg_controllen = sizeof packet->control};
    return &packet->header;
}

static struct msghdr *packet_to_send(struct packet *packet, const char *text, int fd) {
    packet_to_receive(packet);
    packet->vector.iov_len = strlen(strcpy(packet->buffer, text));
    if (fd < 0) {
        packet->header.msg_control = NULL;
        packet->header.msg_controllen = 0;
        return &packet->header;
    }
    struct cmsghdr *control = CMSG_FIRSTHDR(&packet->header);
    *control = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(control), &fd, sizeof fd);
    return &packet->header;
}

static int packet_fd(struct packet *packet) {
    struct cmsghdr *control = CMSG_FIRSTHDR(&packet->header);
    assert_non_null(control);
    assert_int_equal(control->cmsg_type, SCM_RIGHTS);
    int fd;
    memcpy(&fd, CMSG_DATA(control), sizeof fd);
    return fd;
}

/* A job that says when it has begun, and then waits for leave to end. */
struct gate {
    struct probe probe;
    pid_t thread;
    sem_t begun;
    sem_t leave;
};

static void gate_init(struct gate *gate) {
    *gate = (struct gate){0};
    sem_init(&gate->begun, 0, 0);
    sem_init(&gate->leave, 0, 0);
}

static void gate_deinit(struct gate *gate) {
    sem_destroy(&gate->begun);
    sem_destroy(&gate->leave);
}

static void wait_semaphore(sem_t *semaphore) {
    while (sem_wait(semaphore) < 0 && errno == EINTR)
        ;
}

static void gate_run(struct loop_op *op) {
    struct gate *gate = CONTAINER_OF(CONTAINER_OF(op, struct probe, op), struct gate, probe);
    gate->thread = gettid();
    sem_post(&gate->begun);
    wait_semaphore(&gate->leave);
    op->result = 7;
}

static void work_nothing(struct loop_op *op) { op->result = 1; }

static void test_unknown_kind(void **state) {
    struct loop *loop = NULL;
    assert_int_equal(loop_new("carrier pigeon", &loop), -EINVAL);
    assert_null(loop);
}

static void test_nothing_in_flight(void **state) {
    struct fixture *fixture = *state;
    run(fixture->loop);
}

static void test_clocks(void **state) {
    struct fixture *fixture = *state;
    uint64_t before = loop_now(fixture->loop);
    assert_true(loop_now(fixture->loop) >= before);
    assert_true(loop_wall(fixture->loop) > UINT64_C(1700000000) * NANOSECONDS_PER_SECOND);
    assert_int_not_equal(loop_random(fixture->loop), loop_random(fixture->loop));
}

static void test_callbacks_come_from_run_in_order(void **state) {
    struct fixture *fixture = *state;
    struct probe posts[3] = {0};
    turns = 0;
    for (int i = 0; i < 3; i++)
        loop_post(fixture->loop, &posts[i].op, 40 + i, probe_done);
    assert_int_equal(turns, 0);
    assert_true(loop_op_busy(&posts[0].op));
    run(fixture->loop);
    for (int i = 0; i < 3; i++) {
        assert_called(&posts[i], 40 + i);
        assert_int_equal(posts[i].turn, i + 1);
    }
}

static void test_no_submit_calls_back(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct packet in, out;
    struct probe recv = {0}, send = {0}, work = {0}, timer = {0}, poll = {0};
    turns = 0;
    loop_send(fixture->loop, &send.op, fds[0], packet_to_send(&out, "x", -1), probe_done);
    loop_recv(fixture->loop, &recv.op, fds[1], packet_to_receive(&in), probe_done);
    loop_poll(fixture->loop, &poll.op, fds[0], POLLOUT, probe_done);
    loop_work(fixture->loop, &work.op, fixture->group, work_nothing, probe_done);
    loop_timer(fixture->loop, &timer.op, 0, probe_done);
    assert_int_equal(turns, 0);
    run(fixture->loop);
    assert_int_equal(turns, 5);
    close_pair(fds);
}

static void test_stop_keeps_the_rest(void **state) {
    struct fixture *fixture = *state;
    struct probe first = {0}, second = {0};
    loop_post(fixture->loop, &first.op, 0, probe_done_stop);
    loop_post(fixture->loop, &second.op, 0, probe_done);
    run(fixture->loop);
    assert_int_equal(first.calls, 1);
    assert_int_equal(second.calls, 0);
    run(fixture->loop);
    assert_int_equal(second.calls, 1);
}

/* A farewell: sent and stopped in one callback, and the loop never run again. */
struct farewell {
    struct probe probe;
    struct probe send;
    struct packet packet;
    int fd;
};

static void say_farewell(struct loop_op *op) {
    struct farewell *farewell = CONTAINER_OF(op, struct farewell, probe.op);
    loop_send(op->loop, &farewell->send.op, farewell->fd, packet_to_send(&farewell->packet, "bye", -1), probe_done);
    loop_stop(op->loop);
}

static void test_send_before_stop_is_sent(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct farewell farewell = {.fd = fds[0]};
    loop_post(fixture->loop, &farewell.probe.op, 0, say_farewell);
    run(fixture->loop);
    char text[8];
    assert_int_equal(recv(fds[1], text, sizeof text, MSG_DONTWAIT), 3);
    run(fixture->loop);
    assert_called(&farewell.send, 3);
    close_pair(fds);
}

static int temporary_file(int flags) {
    const char *directory = getenv("TMPDIR");
    int fd = open(directory ? directory : "/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0 && flags)
        return -1;
    assert_true(fd >= 0);
    return fd;
}

static void test_file(void **state) {
    struct fixture *fixture = *state;
    CLEANUP(closep) int fd = temporary_file(0);
    const size_t size = MIB(1);
    CLEANUP(freep) char *out = malloc(size);
    CLEANUP(freep) char *in = calloc(1, size);
    for (size_t i = 0; i < size; i++)
        out[i] = i * 31 + i / 251;

    struct probe small = {0}, large = {0}, sync = {0}, read = {0}, past = {0};
    loop_write(fixture->loop, &small.op, fixture->group, fd, out, 1000, 0, probe_done);
    loop_write(fixture->loop, &large.op, fixture->group, fd, out + 1000, size - 1000, 1000, probe_done);
    run(fixture->loop);
    assert_called(&small, 1000);
    assert_called(&large, size - 1000);
    loop_sync(fixture->loop, &sync.op, fixture->group, fd, probe_done);
    loop_read(fixture->loop, &read.op, fixture->group, fd, in, size, 0, probe_done);
    run(fixture->loop);
    assert_called(&sync, 0);
    assert_called(&read, size);
    assert_memory_equal(in, out, size);
    loop_read(fixture->loop, &past.op, fixture->group, fd, in, 100, size - 10, probe_done);
    run(fixture->loop);
    assert_called(&past, 10);
}

static void test_file_errors(void **state) {
    struct fixture *fixture = *state;
    struct probe write = {0}, sync = {0};
    CLEANUP(closep) int read_only = open("/dev/null", O_RDONLY | O_CLOEXEC);
    loop_write(fixture->loop, &write.op, fixture->group, read_only, "x", 1, 0, probe_done);
    loop_sync(fixture->loop, &sync.op, fixture->group, -1, probe_done);
    run(fixture->loop);
    assert_called(&write, -EBADF);
    assert_called(&sync, -EBADF);
}

static void test_file_direct_from_memfd(void **state) {
    struct fixture *fixture = *state;
    CLEANUP(closep) int fd = temporary_file(O_DIRECT);
    if (fd < 0) {
        print_message("SKIP: no O_DIRECT in the temporary directory\n");
        skip();
    }
    const size_t size = MIB(1);
    CLEANUP(closep) int memory_fd = memfd_create("pool", MFD_CLOEXEC);
    assert_int_equal(ftruncate(memory_fd, 2 * size), 0);
    char *memory = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    for (size_t i = 0; i < size; i++)
        memory[i] = i * 7 + i / 4096;

    struct probe write = {0}, sync = {0}, read = {0};
    loop_write(fixture->loop, &write.op, fixture->group, fd, memory, size, 0, probe_done);
    run(fixture->loop);
    assert_called(&write, size);
    loop_sync(fixture->loop, &sync.op, fixture->group, fd, probe_done);
    run(fixture->loop);
    assert_called(&sync, 0);
    loop_read(fixture->loop, &read.op, fixture->group, fd, memory + size, size, 0, probe_done);
    run(fixture->loop);
    assert_called(&read, size);
    assert_memory_equal(memory, memory + size, size);
    munmap(memory, 2 * size);
}

/* Cancelled or not, file I/O runs to its end: begun, queued behind others, or not yet seen by the
 * kernel. */
static void test_file_ignores_cancel(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 40 };
    CLEANUP(closep) int fd = temporary_file(0);
    struct probe writes[COUNT] = {0}, sync = {0};
    for (int i = 0; i < COUNT; i++)
        loop_write(fixture->loop, &writes[i].op, fixture->group, fd, "x", 1, i, probe_done);
    loop_sync(fixture->loop, &sync.op, fixture->group, fd, probe_done);
    for (int i = 0; i < COUNT; i++)
        loop_cancel(fixture->loop, &writes[i].op);
    loop_cancel(fixture->loop, &sync.op);
    run(fixture->loop);
    for (int i = 0; i < COUNT; i++)
        assert_called(&writes[i], 1);
    assert_called(&sync, 0);
}

/* More operations than either ring holds. */
static void test_file_many(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 3000, SIZE = 512 };
    CLEANUP(closep) int fd = temporary_file(0);
    CLEANUP(freep) struct probe *probes = calloc(COUNT, sizeof *probes);
    CLEANUP(freep) char *blocks = malloc(COUNT * SIZE);
    for (int i = 0; i < COUNT; i++) {
        memset(blocks + i * SIZE, i, SIZE);
        loop_write(fixture->loop, &probes[i].op, fixture->group, fd, blocks + i * SIZE, SIZE, i * SIZE, probe_done);
    }
    run(fixture->loop);
    for (int i = 0; i < COUNT; i++)
        assert_called(&probes[i], SIZE);
    CLEANUP(freep) char *read = malloc(COUNT * SIZE);
    assert_int_equal(pread(fd, read, COUNT * SIZE, 0), COUNT * SIZE);
    assert_memory_equal(read, blocks, COUNT * SIZE);
}

static void exchange(struct fixture *fixture, int from, int to) {
    CLEANUP(closep) int sent_fd = memfd_create("passed", MFD_CLOEXEC);
    assert_int_equal(pwrite(sent_fd, "inside", 6, 0), 6);
    struct packet in, out;
    struct probe recv = {0}, send = {0};
    loop_recv(fixture->loop, &recv.op, to, packet_to_receive(&in), probe_done);
    loop_send(fixture->loop, &send.op, from, packet_to_send(&out, "hello", sent_fd), probe_done);
    run(fixture->loop);
    assert_called(&send, 5);
    assert_called(&recv, 5);
    assert_memory_equal(in.buffer, "hello", 5);
    CLEANUP(closep) int received = packet_fd(&in);
    assert_int_equal(fcntl(received, F_GETFD), FD_CLOEXEC);
    char inside[6];
    assert_int_equal(pread(received, inside, 6, 0), 6);
    assert_memory_equal(inside, "inside", 6);
}

static void test_descriptors_both_ways(void **state) {
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    exchange(*state, fds[0], fds[1]);
    exchange(*state, fds[1], fds[0]);
    close_pair(fds);
}

static void test_truncation_is_seen(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    char big[200] = {0};
    assert_int_equal(send(fds[0], big, sizeof big, 0), sizeof big);
    struct packet in;
    struct probe recv = {0};
    loop_recv(fixture->loop, &recv.op, fds[1], packet_to_receive(&in), probe_done);
    run(fixture->loop);
    assert_called(&recv, sizeof in.buffer);
    assert_true(in.header.msg_flags & MSG_TRUNC);
    close_pair(fds);
}

static void test_accept(void **state) {
    struct fixture *fixture = *state;
    CLEANUP(closep) int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* Autobind: the kernel chooses an abstract name. */
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address.sun_family), 0);
    assert_int_equal(listen(listener, 8), 0);
    socklen_t length = sizeof address;
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &length), 0);

    struct probe probes[2] = {0};
    for (int i = 0; i < 2; i++) {
        loop_accept(fixture->loop, &probes[i].op, listener, probe_done_stop);
        CLEANUP(closep) int client = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        assert_int_equal(connect(client, (struct sockaddr *)&address, length), 0);
        run(fixture->loop);
        assert_int_equal(probes[i].calls, 1);
        CLEANUP(closep) int accepted = probes[i].result;
        assert_true(accepted >= 0);
        assert_int_equal(fcntl(accepted, F_GETFD), FD_CLOEXEC);
        assert_true(fcntl(accepted, F_GETFL) & O_NONBLOCK);
        assert_int_equal(send(client, "hi", 2, 0), 2);
        char text[4];
        assert_int_equal(recv(accepted, text, sizeof text, 0), 2);
    }

    struct probe cancelled = {0}, post = {0};
    loop_accept(fixture->loop, &cancelled.op, listener, probe_done);
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    loop_cancel(fixture->loop, &cancelled.op);
    run(fixture->loop);
    assert_called(&cancelled, -ECANCELED);
}

static void check_end(struct fixture *fixture, int type) {
    int fds[2];
    make_pair(type, fds);
    struct packet in, out;
    struct probe recv = {0}, send = {0};
    loop_recv(fixture->loop, &recv.op, fds[1], packet_to_receive(&in), probe_done);
    close(fds[0]);
    run(fixture->loop);
    assert_called(&recv, 0);
    loop_send(fixture->loop, &send.op, fds[1], packet_to_send(&out, "x", -1), probe_done);
    run(fixture->loop);
    assert_called(&send, -EPIPE);
    close(fds[1]);
}

/* Only the stream raises SIGPIPE when it may. */
static void test_end(void **state) {
    check_end(*state, SOCK_SEQPACKET);
    check_end(*state, SOCK_STREAM);
}

static void test_bad_descriptors(void **state) {
    struct fixture *fixture = *state;
    struct packet in, out;
    struct probe recv = {0}, send = {0}, poll = {0}, accept = {0};
    loop_recv(fixture->loop, &recv.op, -1, packet_to_receive(&in), probe_done);
    loop_send(fixture->loop, &send.op, -1, packet_to_send(&out, "x", -1), probe_done);
    loop_poll(fixture->loop, &poll.op, -1, POLLIN, probe_done);
    loop_accept(fixture->loop, &accept.op, -1, probe_done);
    run(fixture->loop);
    assert_called(&recv, -EBADF);
    assert_called(&send, -EBADF);
    assert_called(&poll, -EBADF);
    assert_called(&accept, -EBADF);
}

/* A full socket: the send waits until its peer reads, while a receive and a poll wait on the same
 * descriptor. */
static void test_three_on_one_descriptor(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    static char filler[4096];
    unsigned filled = 0;
    while (send(fds[0], filler, sizeof filler, 0) > 0)
        filled++;
    assert_int_equal(errno, EAGAIN);

    struct packet in, out;
    struct probe recv_probe = {0}, send_probe = {0}, poll_probe = {0}, post = {0};
    loop_recv(fixture->loop, &recv_probe.op, fds[0], packet_to_receive(&in), probe_done_stop);
    loop_send(fixture->loop, &send_probe.op, fds[0], packet_to_send(&out, "late", -1), probe_done_stop);
    loop_poll(fixture->loop, &poll_probe.op, fds[0], POLLRDHUP, probe_done_stop);
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    assert_int_equal(recv_probe.calls + send_probe.calls + poll_probe.calls, 0);

    assert_int_equal(send(fds[1], "early", 5, 0), 5);
    run(fixture->loop);
    assert_called(&recv_probe, 5);
    assert_int_equal(send_probe.calls + poll_probe.calls, 0);

    for (unsigned i = 0; i < filled; i++)
        assert_int_equal(recv(fds[1], filler, sizeof filler, 0), sizeof filler);
    run(fixture->loop);
    assert_called(&send_probe, 4);
    assert_int_equal(recv(fds[1], filler, sizeof filler, 0), 4);
    assert_int_equal(poll_probe.calls, 0);

    close(fds[1]);
    run(fixture->loop);
    assert_int_equal(poll_probe.calls, 1);
    assert_true(poll_probe.result & POLLRDHUP);
    close(fds[0]);
}

/* One of three is cancelled: the others stay armed. */
static void test_cancel_leaves_neighbours(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct packet in;
    struct probe recv_probe = {0}, poll_probe = {0}, post = {0};
    loop_recv(fixture->loop, &recv_probe.op, fds[0], packet_to_receive(&in), probe_done_stop);
    loop_poll(fixture->loop, &poll_probe.op, fds[0], POLLPRI, probe_done_stop);
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    loop_cancel(fixture->loop, &poll_probe.op);
    run(fixture->loop);
    assert_called(&poll_probe, -ECANCELED);
    assert_int_equal(recv_probe.calls, 0);
    assert_int_equal(send(fds[1], "x", 1, 0), 1);
    run(fixture->loop);
    assert_called(&recv_probe, 1);
    close_pair(fds);
}

static uint64_t thread_cpu_ns(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return used.tv_sec * NANOSECONDS_PER_SECOND + used.tv_nsec;
}

/* A descriptor that is closed while its file lives on in a duplicate, its number used again: the
 * old file's events must neither reach the new one's operations nor keep the loop awake. */
static void test_reused_descriptor(void **state) {
    struct fixture *fixture = *state;
    int old[2], new[2];
    make_pair(SOCK_SEQPACKET, old);
    make_pair(SOCK_SEQPACKET, new);
    struct packet in;
    struct probe first = {0}, second = {0}, later = {0};
    loop_recv(fixture->loop, &first.op, old[0], packet_to_receive(&in), probe_done);
    assert_int_equal(send(old[1], "x", 1, 0), 1);
    run(fixture->loop);
    assert_called(&first, 1);

    CLEANUP(closep) int survivor = dup(old[0]);
    assert_true(survivor >= 0);
    assert_int_equal(dup2(new[0], old[0]), old[0]);
    loop_recv(fixture->loop, &second.op, old[0], packet_to_receive(&in), probe_done_stop);
    assert_int_equal(send(old[1], "y", 1, 0), 1);
    loop_timer(fixture->loop, &later.op, loop_now(fixture->loop) + 100 * NANOSECONDS_PER_MS, probe_done_stop);
    uint64_t before = thread_cpu_ns();
    run(fixture->loop);
    assert_true(thread_cpu_ns() - before < 50 * NANOSECONDS_PER_MS);
    assert_int_equal(second.calls, 0);
    assert_int_equal(send(new[1], "zz", 2, 0), 2);
    run(fixture->loop);
    assert_called(&second, 2);
    close_pair(old);
    close_pair(new);
}

static void test_poll_pidfd(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    pid_t child = fork();
    if (child == 0) {
        close(fds[0]);
        struct pollfd pollfd = {.fd = fds[1], .events = POLLIN};
        poll(&pollfd, 1, -1);
        _exit(0);
    }
    close(fds[1]);
    CLEANUP(closep) int pidfd = syscall(SYS_pidfd_open, child, 0);
    assert_true(pidfd >= 0);
    struct probe death = {0}, post = {0};
    loop_poll(fixture->loop, &death.op, pidfd, POLLIN, probe_done_stop);
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    assert_int_equal(death.calls, 0);
    close(fds[0]);
    run(fixture->loop);
    assert_int_equal(death.calls, 1);
    assert_true(death.result & POLLIN);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

static void test_timers_in_order(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 200 };
    static struct probe timers[COUNT];
    memset(timers, 0, sizeof timers);
    uint64_t base = loop_now(fixture->loop) + 2 * NANOSECONDS_PER_MS;
    turns = 0;
    /* Four deadlines in a scrambled order, many timers each. */
    for (unsigned i = 0; i < COUNT; i++)
        loop_timer(fixture->loop, &timers[i].op, base + (i * 7 % 4) * 3 * NANOSECONDS_PER_MS, probe_done);
    run(fixture->loop);
    assert_true(loop_now(fixture->loop) >= base + 9 * NANOSECONDS_PER_MS);
    for (unsigned i = 0; i < COUNT; i++) {
        assert_called(&timers[i], 0);
        for (unsigned j = 0; j < COUNT; j++) {
            bool earlier =
                timers[i].op.offset < timers[j].op.offset || (timers[i].op.offset == timers[j].op.offset && i < j);
            if (earlier)
                assert_true(timers[i].turn < timers[j].turn);
        }
    }
}

static void assert_after_deadline(struct loop_op *op) {
    probe_done(op);
    assert_true(loop_now(op->loop) >= op->offset);
}

static void test_timers_are_not_early(void **state) {
    struct fixture *fixture = *state;
    struct probe timers[20] = {0};
    for (unsigned i = 0; i < ARRAY_SIZE(timers); i++)
        loop_timer(fixture->loop, &timers[i].op, loop_now(fixture->loop) + i * 777777, assert_after_deadline);
    run(fixture->loop);
    for (unsigned i = 0; i < ARRAY_SIZE(timers); i++)
        assert_called(&timers[i], 0);
}

static void test_timers_cancelled(void **state) {
    struct fixture *fixture = *state;
    static struct probe timers[1000];
    memset(timers, 0, sizeof timers);
    uint64_t now = loop_now(fixture->loop);
    for (unsigned i = 0; i < ARRAY_SIZE(timers); i++)
        loop_timer(fixture->loop, &timers[i].op, i % 3 ? now + FAR_NS - i * 997 % 1000 : now, probe_done);
    for (unsigned i = 0; i < ARRAY_SIZE(timers); i++)
        if (i % 3)
            loop_cancel(fixture->loop, &timers[i].op);
    run(fixture->loop);
    for (unsigned i = 0; i < ARRAY_SIZE(timers); i++)
        assert_called(&timers[i], i % 3 ? -ECANCELED : 0);
}

static void test_cancel_idle_does_nothing(void **state) {
    struct fixture *fixture = *state;
    struct probe probe = {0};
    loop_cancel(fixture->loop, &probe.op);
    run(fixture->loop);
    assert_int_equal(probe.calls, 0);
    loop_post(fixture->loop, &probe.op, 5, probe_done);
    loop_cancel(fixture->loop, &probe.op);
    loop_cancel(fixture->loop, &probe.op);
    run(fixture->loop);
    assert_called(&probe, 5);
}

/* Cancelled before the loop ever ran: nothing has reached the kernel yet. */
static void test_cancel_at_once(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct packet in;
    struct probe recv = {0}, poll = {0};
    loop_recv(fixture->loop, &recv.op, fds[0], packet_to_receive(&in), probe_done);
    loop_poll(fixture->loop, &poll.op, fds[0], POLLIN, probe_done);
    loop_cancel(fixture->loop, &recv.op);
    loop_cancel(fixture->loop, &poll.op);
    assert_int_equal(recv.calls + poll.calls, 0);
    run(fixture->loop);
    assert_called(&recv, -ECANCELED);
    assert_called(&poll, -ECANCELED);
    close_pair(fds);
}

struct rearm {
    struct probe probe;
    struct packet packet;
    int fd;
};

static void receive_again(struct loop_op *op) {
    struct rearm *rearm = CONTAINER_OF(op, struct rearm, probe.op);
    probe_done(op);
    loop_recv(op->loop, op, rearm->fd, packet_to_receive(&rearm->packet), probe_done_stop);
}

/* The same operation is submitted again from the callback of its cancellation: the cancel must hit
 * the old submission only. */
static void test_cancel_then_reuse(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct rearm rearm = {.fd = fds[0]};
    struct probe post = {0}, later = {0};
    loop_recv(fixture->loop, &rearm.probe.op, fds[0], packet_to_receive(&rearm.packet), receive_again);
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    loop_cancel(fixture->loop, &rearm.probe.op);
    loop_timer(fixture->loop, &later.op, loop_now(fixture->loop) + 5 * NANOSECONDS_PER_MS, probe_done_stop);
    run(fixture->loop);
    assert_called(&rearm.probe, -ECANCELED);
    assert_true(loop_op_busy(&rearm.probe.op));
    assert_int_equal(send(fds[1], "x", 1, 0), 1);
    run(fixture->loop);
    assert_int_equal(rearm.probe.calls, 2);
    assert_int_equal(rearm.probe.result, 1);
    close_pair(fds);
}

/* Messages arrive while their receives are being cancelled: each calls back once, and what was
 * received or is still in the socket adds up. */
static void test_cancel_races_receive(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    unsigned sent = 0, received = 0, cancelled = 0;
    for (unsigned round = 0; round < 500; round++) {
        struct packet in;
        struct probe recv_probe = {0}, post = {0};
        loop_recv(fixture->loop, &recv_probe.op, fds[0], packet_to_receive(&in), probe_done);
        loop_post(fixture->loop, &post.op, 0, probe_done_stop);
        if (round % 2)
            run(fixture->loop);
        sent += send(fds[1], "x", 1, 0) == 1;
        if (round % 3)
            loop_cancel(fixture->loop, &recv_probe.op);
        while (loop_op_busy(&recv_probe.op))
            run(fixture->loop);
        run(fixture->loop);
        assert_int_equal(recv_probe.calls, 1);
        assert_true(recv_probe.result == 1 || recv_probe.result == -ECANCELED);
        received += recv_probe.result == 1;
        cancelled += recv_probe.result == -ECANCELED;
    }
    char text[4];
    while (recv(fds[0], text, sizeof text, MSG_DONTWAIT) == 1)
        received++;
    assert_int_equal(sent, 500);
    assert_int_equal(received, sent);
    print_message("%s: %u receives cancelled of 500\n", loop_name(fixture->loop), cancelled);
    close_pair(fds);
}

static void test_cancel_races_work(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 2000 };
    CLEANUP(freep) struct probe *probes = calloc(COUNT, sizeof *probes);
    for (unsigned i = 0; i < COUNT; i++) {
        loop_work(fixture->loop, &probes[i].op, fixture->group, work_nothing, probe_done);
        if (i >= 10)
            loop_cancel(fixture->loop, &probes[i - i % 10].op);
    }
    run(fixture->loop);
    for (unsigned i = 0; i < COUNT; i++) {
        assert_int_equal(probes[i].calls, 1);
        assert_true(probes[i].result == 1 || probes[i].result == -ECANCELED);
    }
}

struct owner {
    struct probe probe;
    struct loop_op other;
    bool *freed;
};

static void free_owner(struct loop_op *op) {
    struct owner *owner = CONTAINER_OF(op, struct owner, probe.op);
    *owner->freed = true;
    memset(owner, 0x5a, sizeof *owner);
    free(owner);
}

static void test_owner_freed_in_callback(void **state) {
    struct fixture *fixture = *state;
    bool freed[5] = {0};
    struct owner *owners[5];
    for (int i = 0; i < 5; i++) {
        owners[i] = calloc(1, sizeof *owners[i]);
        owners[i]->freed = &freed[i];
    }
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    assert_int_equal(send(fds[1], "x", 1, 0), 1);
    static struct packet in;
    loop_post(fixture->loop, &owners[0]->probe.op, 0, free_owner);
    loop_timer(fixture->loop, &owners[1]->probe.op, 0, free_owner);
    loop_work(fixture->loop, &owners[2]->probe.op, fixture->group, work_nothing, free_owner);
    loop_recv(fixture->loop, &owners[3]->probe.op, fds[0], packet_to_receive(&in), free_owner);
    loop_poll(fixture->loop, &owners[4]->probe.op, fds[1], POLLIN, free_owner);
    loop_cancel(fixture->loop, &owners[4]->probe.op);
    run(fixture->loop);
    for (int i = 0; i < 5; i++)
        assert_true(freed[i]);
    close_pair(fds);
}

static void test_many_posts(void **state) {
    struct fixture *fixture = *state;
    CLEANUP(freep) struct probe *probes = calloc(MANY, sizeof *probes);
    turns = 0;
    for (unsigned i = 0; i < MANY; i++)
        loop_post(fixture->loop, &probes[i].op, i, probe_done);
    run(fixture->loop);
    for (unsigned i = 0; i < MANY; i++) {
        assert_called(&probes[i], i);
        assert_int_equal(probes[i].turn, i + 1);
    }
}

static void test_many_works(void **state) {
    struct fixture *fixture = *state;
    CLEANUP(freep) struct probe *probes = calloc(MANY, sizeof *probes);
    for (unsigned i = 0; i < MANY; i++)
        loop_work(fixture->loop, &probes[i].op, fixture->group, work_nothing, probe_done);
    run(fixture->loop);
    for (unsigned i = 0; i < MANY; i++)
        assert_called(&probes[i], 1);
}

static void test_many_polls(void **state) {
    struct fixture *fixture = *state;
    enum { COUNT = 400 };
    struct probe *probes = calloc(COUNT, sizeof *probes);
    int fds[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        fds[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        assert_true(fds[i] >= 0);
        loop_poll(fixture->loop, &probes[i].op, fds[i], POLLIN, probe_done);
    }
    struct probe post = {0};
    loop_post(fixture->loop, &post.op, 0, probe_done_stop);
    run(fixture->loop);
    for (unsigned i = 0; i < COUNT; i++) {
        if (i % 2)
            assert_int_equal(eventfd_write(fds[i], 1), 0);
        else
            loop_cancel(fixture->loop, &probes[i].op);
    }
    run(fixture->loop);
    for (unsigned i = 0; i < COUNT; i++) {
        assert_called(&probes[i], i % 2 ? POLLIN : -ECANCELED);
        close(fds[i]);
    }
    free(probes);
}

/* A post that posts itself without end must not keep a socket from being served. */
static void post_again(struct loop_op *op) {
    probe_done(op);
    loop_post(op->loop, op, 0, post_again);
}

static void test_posts_do_not_starve_sockets(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct packet in;
    struct probe endless = {0}, recv_probe = {0}, work = {0}, timer = {0};
    loop_recv(fixture->loop, &recv_probe.op, fds[0], packet_to_receive(&in), probe_done_stop);
    loop_post(fixture->loop, &endless.op, 0, post_again);
    assert_int_equal(send(fds[1], "x", 1, 0), 1);
    run(fixture->loop);
    assert_called(&recv_probe, 1);
    loop_work(fixture->loop, &work.op, fixture->group, work_nothing, probe_done_stop);
    run(fixture->loop);
    assert_called(&work, 1);
    loop_timer(fixture->loop, &timer.op, loop_now(fixture->loop) + NANOSECONDS_PER_MS, probe_done_stop);
    run(fixture->loop);
    assert_called(&timer, 0);
    endless.op.fn = probe_done;
    run(fixture->loop);
    close_pair(fds);
}

static void test_group_arguments(void **state) {
    struct fixture *fixture = *state;
    struct loop_group *group = NULL;
    assert_int_equal(loop_group_new(fixture->loop, "none", 0, 1, &group), -EINVAL);
    assert_int_equal(loop_group_new(fixture->loop, "less", 2, 1, &group), -EINVAL);
    assert_int_equal(loop_group_new(fixture->loop, "more", 1, LOOP_GROUP_THREADS_MAX + 1, &group), -EINVAL);
    assert_null(group);
    assert_int_equal(loop_group_new(fixture->loop, "a name longer than the kernel allows", 1, 1, &group), 0);
    loop_group_free(group);
}

struct thread_facts {
    struct probe probe;
    char name[16];
    sigset_t blocked;
    pthread_t thread;
};

static void gather_facts(struct loop_op *op) {
    struct thread_facts *facts = CONTAINER_OF(op, struct thread_facts, probe.op);
    facts->thread = pthread_self();
    pthread_getname_np(facts->thread, facts->name, sizeof facts->name);
    pthread_sigmask(SIG_SETMASK, NULL, &facts->blocked);
}

static void test_workers_have_names_and_no_signals(void **state) {
    struct fixture *fixture = *state;
    struct thread_facts facts = {0};
    loop_work(fixture->loop, &facts.probe.op, fixture->group, gather_facts, probe_done);
    run(fixture->loop);
    assert_string_equal(facts.name, "test");
    assert_true(sigismember(&facts.blocked, SIGTERM));
    assert_true(sigismember(&facts.blocked, SIGUSR1));
    assert_false(pthread_equal(facts.thread, pthread_self()));
    sigset_t own;
    pthread_sigmask(SIG_SETMASK, NULL, &own);
    assert_false(sigismember(&own, SIGTERM));
}

/* Jobs of one group run at the same time, as many as it has threads, though all were submitted
 * while its only thread slept. */
static void test_group_uses_all_its_threads(void **state) {
    struct fixture *fixture = *state;
    struct probe warm = {0};
    loop_work(fixture->loop, &warm.op, fixture->group, work_nothing, probe_done);
    run(fixture->loop);
    struct gate gates[2];
    for (int i = 0; i < 2; i++) {
        gate_init(&gates[i]);
        loop_work(fixture->loop, &gates[i].probe.op, fixture->group, gate_run, probe_done);
    }
    for (int i = 0; i < 2; i++)
        wait_semaphore(&gates[i].begun);
    for (int i = 0; i < 2; i++)
        sem_post(&gates[i].leave);
    run(fixture->loop);
    for (int i = 0; i < 2; i++) {
        assert_called(&gates[i].probe, 7);
        gate_deinit(&gates[i]);
    }
}

static void test_blocked_group_stalls_only_itself(void **state) {
    struct fixture *fixture = *state;
    struct loop_group *hung, *other;
    assert_int_equal(loop_group_new(fixture->loop, "hung", 1, 1, &hung), 0);
    assert_int_equal(loop_group_new(fixture->loop, "other", 1, 1, &other), 0);
    struct gate gate;
    gate_init(&gate);
    struct probe behind = {0}, elsewhere = {0}, third = {0};
    loop_work(fixture->loop, &gate.probe.op, hung, gate_run, probe_done);
    wait_semaphore(&gate.begun);
    loop_work(fixture->loop, &behind.op, hung, work_nothing, probe_done);
    loop_work(fixture->loop, &elsewhere.op, other, work_nothing, probe_done_stop);
    run(fixture->loop);
    assert_called(&elsewhere, 1);
    loop_work(fixture->loop, &third.op, fixture->group, work_nothing, probe_done_stop);
    run(fixture->loop);
    assert_called(&third, 1);
    assert_int_equal(gate.probe.calls + behind.calls, 0);
    sem_post(&gate.leave);
    run(fixture->loop);
    assert_called(&gate.probe, 7);
    assert_called(&behind, 1);
    gate_deinit(&gate);
    loop_group_free(hung);
    loop_group_free(other);
}

static void test_relieve(void **state) {
    struct fixture *fixture = *state;
    struct loop_group *group;
    assert_int_equal(loop_group_new(fixture->loop, "relieved", 1, 2, &group), 0);
    struct gate gate;
    gate_init(&gate);
    struct probe behind = {0}, later = {0};
    loop_work(fixture->loop, &gate.probe.op, group, gate_run, probe_done_stop);
    wait_semaphore(&gate.begun);
    loop_work(fixture->loop, &behind.op, group, work_nothing, probe_done_stop);
    assert_int_equal(loop_group_relieve(group), 0);
    run(fixture->loop);
    assert_called(&behind, 1);
    assert_int_equal(gate.probe.calls, 0);
    assert_int_equal(loop_group_relieve(group), -EBUSY);
    loop_work(fixture->loop, &later.op, group, work_nothing, probe_done_stop);
    run(fixture->loop);
    assert_called(&later, 1);
    sem_post(&gate.leave);
    run(fixture->loop);
    assert_called(&gate.probe, 7);
    gate_deinit(&gate);
    loop_group_free(group);
}

static void test_cancel_work(void **state) {
    struct fixture *fixture = *state;
    struct loop_group *group;
    assert_int_equal(loop_group_new(fixture->loop, "single", 1, 1, &group), 0);
    struct gate gate;
    gate_init(&gate);
    struct probe queued = {0}, after = {0};
    loop_work(fixture->loop, &gate.probe.op, group, gate_run, probe_done);
    loop_work(fixture->loop, &queued.op, group, work_nothing, probe_done_stop);
    loop_work(fixture->loop, &after.op, group, work_nothing, probe_done);
    wait_semaphore(&gate.begun);
    loop_cancel(fixture->loop, &queued.op);
    assert_int_equal(queued.calls, 0);
    run(fixture->loop);
    assert_called(&queued, -ECANCELED);
    loop_cancel(fixture->loop, &gate.probe.op);
    sem_post(&gate.leave);
    run(fixture->loop);
    assert_called(&gate.probe, 7);
    assert_called(&after, 1);
    gate_deinit(&gate);
    loop_group_free(group);
}

static void test_group_free_cancels_what_is_queued(void **state) {
    struct fixture *fixture = *state;
    struct loop_group *group;
    assert_int_equal(loop_group_new(fixture->loop, "closing", 1, 1, &group), 0);
    struct gate gate;
    gate_init(&gate);
    struct probe queued = {0};
    loop_work(fixture->loop, &gate.probe.op, group, gate_run, probe_done);
    loop_work(fixture->loop, &queued.op, group, work_nothing, probe_done);
    wait_semaphore(&gate.begun);
    sem_post(&gate.leave);
    loop_group_free(group);
    run(fixture->loop);
    assert_called(&gate.probe, 7);
    assert_int_equal(queued.calls, 1);
    gate_deinit(&gate);
}

/* A detached thread shows that it has ended only by its absence. */
static void wait_for_thread_end(pid_t thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d", thread);
    while (access(path, F_OK) == 0)
        usleep(1000);
}

/* In a process of its own, which ends with its worker still stuck, or in which the worker comes
 * back after its loop has been freed. */
static int free_stuck_group(const char *kind, bool comes_back) {
    static struct gate gate;
    static struct probe queued;
    struct loop *loop;
    struct loop_group *group;
    gate_init(&gate);
    if (loop_new(kind, &loop) < 0 || loop_group_new(loop, "stuck", 1, 1, &group) < 0)
        return 1;
    loop_work(loop, &gate.probe.op, group, gate_run, probe_done);
    loop_work(loop, &queued.op, group, work_nothing, probe_done);
    wait_semaphore(&gate.begun);
    uint64_t before = loop_now(loop);
    loop_group_free(group);
    uint64_t took = loop_now(loop) - before;
    if (loop_run(loop) < 0 || queued.calls != 1 || queued.result != -ECANCELED || gate.probe.calls != 0)
        return 2;
    if (!loop_op_busy(&gate.probe.op))
        return 3;
    if (took < NANOSECONDS_PER_SECOND || took > 5 * NANOSECONDS_PER_SECOND)
        return 4;
    loop_free(loop);
    if (comes_back) {
        sem_post(&gate.leave);
        wait_for_thread_end(gate.thread);
    }
    return 0;
}

static void check_stuck_group(const char *kind, bool comes_back) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(free_stuck_group(kind, comes_back));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_stuck_worker_is_left_behind(void **state) {
    struct fixture *fixture = *state;
    check_stuck_group(loop_name(fixture->loop), true);
    check_stuck_group(loop_name(fixture->loop), false);
}

/* Memory whose first touch hangs until it is told otherwise: what reads a file into it hangs in the
 * kernel as in a dead file system. */
struct tar_pit {
    int fd;
    char *memory;
    size_t size;
};

static bool tar_pit_init(struct tar_pit *pit, size_t size) {
    pit->size = size;
    pit->fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    if (pit->fd < 0 || ioctl(pit->fd, UFFDIO_API, &api) < 0)
        return false;
    pit->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register registration = {.range = {(uintptr_t)pit->memory, size},
                                           .mode = UFFDIO_REGISTER_MODE_MISSING};
    return pit->memory != MAP_FAILED && ioctl(pit->fd, UFFDIO_REGISTER, &registration) == 0;
}

static void tar_pit_wait(const struct tar_pit *pit) {
    struct uffd_msg message;
    assert_int_equal(read(pit->fd, &message, sizeof message), sizeof message);
}

static void tar_pit_release(const struct tar_pit *pit) {
    struct uffdio_zeropage zero = {.range = {(uintptr_t)pit->memory, pit->size}};
    assert_int_equal(ioctl(pit->fd, UFFDIO_ZEROPAGE, &zero), 0);
}

static int read_into_tar_pit(const char *kind) {
    static struct probe stuck, elsewhere, later;
    static struct tar_pit pit;
    struct loop *loop;
    struct loop_group *group, *other;
    if (!tar_pit_init(&pit, KIB(128)))
        return 77;
    int fd = temporary_file(0);
    if (ftruncate(fd, KIB(128)) < 0 || loop_new(kind, &loop) < 0 || loop_group_new(loop, "stuck", 1, 1, &group) < 0 ||
        loop_group_new(loop, "other", 1, 1, &other) < 0)
        return 1;
    loop_read(loop, &stuck.op, group, fd, pit.memory, KIB(128), 0, probe_done);
    char text[16];
    loop_read(loop, &elsewhere.op, other, fd, text, sizeof text, 0, probe_done_stop);
    if (loop_run(loop) < 0 || elsewhere.calls != 1 || elsewhere.result != sizeof text || stuck.calls != 0)
        return 2;
    tar_pit_wait(&pit);
    loop_group_free(group);
    if (loop_run(loop) < 0 || stuck.calls != 0 || !loop_op_busy(&stuck.op))
        return 3;
    /* The server is back: nobody waits for the result any more, and the loop goes on. */
    tar_pit_release(&pit);
    loop_timer(loop, &later.op, loop_now(loop) + 20 * NANOSECONDS_PER_MS, probe_done);
    if (loop_run(loop) < 0 || later.calls != 1 || stuck.calls != 0)
        return 4;
    loop_group_free(other);
    loop_free(loop);
    return 0;
}

static void test_stuck_file_is_left_behind(void **state) {
    struct fixture *fixture = *state;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(read_into_tar_pit(loop_name(fixture->loop)));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        print_message("SKIP: no userfaultfd here\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

static long voluntary_switches(void) {
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_THREAD, &usage), 0);
    return usage.ru_nvcsw;
}

/* For 300 ms there is one timer to wait for, and much that does not happen. The thread sleeps once. */
static void test_idle_loop_does_not_wake(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    struct packet in;
    struct gate gate;
    gate_init(&gate);
    struct probe recv = {0}, far = {0}, end = {0};
    loop_recv(fixture->loop, &recv.op, fds[0], packet_to_receive(&in), probe_done);
    loop_timer(fixture->loop, &far.op, loop_now(fixture->loop) + FAR_NS, probe_done);
    loop_work(fixture->loop, &gate.probe.op, fixture->group, gate_run, probe_done);
    wait_semaphore(&gate.begun);
    loop_timer(fixture->loop, &end.op, loop_now(fixture->loop) + 300 * NANOSECONDS_PER_MS, probe_done_stop);
    long before = voluntary_switches();
    run(fixture->loop);
    long switches = voluntary_switches() - before;
    assert_called(&end, 0);
    if (switches > 2)
        fail_msg("%ld voluntary context switches while idle", switches);
    sem_post(&gate.leave);
    loop_cancel(fixture->loop, &recv.op);
    loop_cancel(fixture->loop, &far.op);
    run(fixture->loop);
    assert_called(&recv, -ECANCELED);
    assert_called(&far, -ECANCELED);
    assert_called(&gate.probe, 7);
    gate_deinit(&gate);
    close_pair(fds);
}

static void on_signal(int number) {}

/* Signals without SA_RESTART interrupt the wait, and nothing else. */
static void *send_signals(void *argument) {
    for (int i = 0; i < 20; i++) {
        usleep(1000);
        pthread_kill(*(pthread_t *)argument, SIGUSR1);
    }
    return NULL;
}

static void test_signals_interrupt_nothing(void **state) {
    struct fixture *fixture = *state;
    struct sigaction action = {.sa_handler = on_signal}, saved;
    sigaction(SIGUSR1, &action, &saved);
    struct probe timer = {0};
    uint64_t deadline = loop_now(fixture->loop) + 30 * NANOSECONDS_PER_MS;
    loop_timer(fixture->loop, &timer.op, deadline, assert_after_deadline);
    pthread_t self = pthread_self(), sender;
    assert_int_equal(pthread_create(&sender, NULL, send_signals, &self), 0);
    run(fixture->loop);
    assert_called(&timer, 0);
    pthread_join(sender, NULL);
    sigaction(SIGUSR1, &saved, NULL);
}

struct echo {
    struct loop_op recv;
    struct loop_op send;
    struct packet in;
    struct packet out;
    int fd;
};

static void echo_sent(struct loop_op *op) { assert_int_equal(op->result, 4); }

static void echo_received(struct loop_op *op) {
    struct echo *echo = CONTAINER_OF(op, struct echo, recv);
    if (op->result != 4)
        return;
    loop_send(op->loop, &echo->send, echo->fd, packet_to_send(&echo->out, "pong", -1), echo_sent);
    loop_recv(op->loop, &echo->recv, echo->fd, packet_to_receive(&echo->in), echo_received);
}

#define ROUND_TRIPS 2000

static void *ask(void *argument) {
    int fd = *(int *)argument;
    char text[8];
    for (int i = 0; i < ROUND_TRIPS; i++)
        if (send(fd, "ping", 4, 0) != 4 || recv(fd, text, sizeof text, 0) != 4)
            return argument;
    shutdown(fd, SHUT_RDWR);
    return NULL;
}

/* A client that blocks, as the real ones do. Prints the mean round trip: a figure to look at, since
 * how long it may take depends on the machine. */
static void test_round_trips(void **state) {
    struct fixture *fixture = *state;
    int fds[2];
    make_pair(SOCK_SEQPACKET, fds);
    assert_int_equal(fcntl(fds[1], F_SETFL, 0), 0);
    struct echo echo = {.fd = fds[0]};
    loop_recv(fixture->loop, &echo.recv, fds[0], packet_to_receive(&echo.in), echo_received);
    pthread_t client;
    uint64_t before = loop_now(fixture->loop);
    assert_int_equal(pthread_create(&client, NULL, ask, &fds[1]), 0);
    run(fixture->loop);
    void *failed;
    pthread_join(client, &failed);
    assert_null(failed);
    print_message("%s: %.1f us per round trip\n", loop_name(fixture->loop),
                  (loop_now(fixture->loop) - before) / 1000.0 / ROUND_TRIPS);
    close_pair(fds);
}

/* In a process in which seccomp forbids io_uring, as container runtimes do. */
static int loop_new_without_uring(int error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = ARRAY_SIZE(filter), .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        return 77;
    struct loop *loop;
    if (loop_new("uring", &loop) != -EOPNOTSUPP)
        return 1;
    if (loop_new("auto", &loop) < 0 || strcmp(loop_name(loop), "posix") != 0)
        return 2;
    loop_free(loop);
    return 0;
}

static void test_auto_falls_back(void **state) {
    static const int errors[] = {EPERM, ENOSYS};
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0)
            _exit(loop_new_without_uring(errors[i]));
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77) {
            print_message("SKIP: no seccomp here\n");
            skip();
        }
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}

#define LOOP_TEST(test)                                                                                                \
    { #test, test, setup, teardown, NULL }

static struct CMUnitTest loop_tests[] = {
    LOOP_TEST(test_nothing_in_flight),
    LOOP_TEST(test_clocks),
    LOOP_TEST(test_callbacks_come_from_run_in_order),
    LOOP_TEST(test_no_submit_calls_back),
    LOOP_TEST(test_stop_keeps_the_rest),
    LOOP_TEST(test_send_before_stop_is_sent),
    LOOP_TEST(test_file),
    LOOP_TEST(test_file_errors),
    LOOP_TEST(test_file_direct_from_memfd),
    LOOP_TEST(test_file_ignores_cancel),
    LOOP_TEST(test_file_many),
    LOOP_TEST(test_descriptors_both_ways),
    LOOP_TEST(test_truncation_is_seen),
    LOOP_TEST(test_accept),
    LOOP_TEST(test_end),
    LOOP_TEST(test_bad_descriptors),
    LOOP_TEST(test_three_on_one_descriptor),
    LOOP_TEST(test_cancel_leaves_neighbours),
    LOOP_TEST(test_reused_descriptor),
    LOOP_TEST(test_poll_pidfd),
    LOOP_TEST(test_timers_in_order),
    LOOP_TEST(test_timers_are_not_early),
    LOOP_TEST(test_timers_cancelled),
    LOOP_TEST(test_cancel_idle_does_nothing),
    LOOP_TEST(test_cancel_at_once),
    LOOP_TEST(test_cancel_then_reuse),
    LOOP_TEST(test_cancel_races_receive),
    LOOP_TEST(test_cancel_races_work),
    LOOP_TEST(test_owner_freed_in_callback),
    LOOP_TEST(test_many_posts),
    LOOP_TEST(test_many_works),
    LOOP_TEST(test_many_polls),
    LOOP_TEST(test_posts_do_not_starve_sockets),
    LOOP_TEST(test_group_arguments),
    LOOP_TEST(test_workers_have_names_and_no_signals),
    LOOP_TEST(test_group_uses_all_its_threads),
    LOOP_TEST(test_blocked_group_stalls_only_itself),
    LOOP_TEST(test_relieve),
    LOOP_TEST(test_cancel_work),
    LOOP_TEST(test_group_free_cancels_what_is_queued),
    LOOP_TEST(test_stuck_worker_is_left_behind),
    LOOP_TEST(test_stuck_file_is_left_behind),
    LOOP_TEST(test_idle_loop_does_not_wake),
    LOOP_TEST(test_signals_interrupt_nothing),
    LOOP_TEST(test_round_trips),
};

static int run_kind(const char *kind) {
    struct loop *loop = NULL;
    int r = loop_new(kind, &loop);
    if (r == -EOPNOTSUPP) {
        print_message("SKIP: the %s loop is not possible here\n", kind);
        return 0;
    }
    if (r < 0) {
        print_error("loop_new(%s): %s\n", kind, strerror(-r));
        return 1;
    }
    loop_free(loop);
    for (size_t i = 0; i < ARRAY_SIZE(loop_tests); i++)
        loop_tests[i].initial_state = (void *)kind;
    return cmocka_run_group_tests_name(kind, loop_tests, NULL, NULL);
}

int main(void) {
    /* Test runners may ignore SIGPIPE, which would hide that a loop raises it. */
    signal(SIGPIPE, SIG_DFL);
    const struct CMUnitTest common_tests[] = {
        cmocka_unit_test(test_unknown_kind),
        cmocka_unit_test(test_auto_falls_back),
    };
    int failed = cmocka_run_group_tests_name("common", common_tests, NULL, NULL);
    failed += run_kind("posix");
    failed += run_kind("uring");
    return failed != 0;
}
