/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire.h"
#include "tests/unit/proto/unit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

static unsigned open_descriptors(void) {
    unsigned count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

struct pair {
    int fds[2];
};

static int setup(void **state) {
    struct pair *pair = calloc(1, sizeof *pair);
    *state = pair;
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair->fds);
}

static int teardown(void **state) {
    struct pair *pair = *state;
    close(pair->fds[0]);
    close(pair->fds[1]);
    free(pair);
    return 0;
}

/* Sends what was packed; receives and checks it on the other side. */
static int pass(struct pair *pair, struct wire_packet *out, struct wire_packet *in, bool from_client, uint32_t state,
                struct wire_message *message, struct problem *problem) {
    assert_int_equal(sendmsg(pair->fds[0], wire_send_header(out), 0), out->size);
    ssize_t received = recvmsg(pair->fds[1], wire_receive_header(in), MSG_CMSG_CLOEXEC);
    return wire_check(in, received, from_client, state, message, problem);
}

static void test_rules(void **state) {
    assert_null(message_rule(0));
    assert_null(message_rule(9));
    assert_null(message_rule(UINT16_MAX));
    const struct message_rule *rule = message_rule(MESSAGE_STATUS);
    assert_string_equal(rule->name, "STATUS");
    assert_true(rule->from_client);
    assert_int_equal(rule->states, MESSAGE_STATE_G | MESSAGE_STATE_O);
    assert_memory_equal(&(uint64_t){MESSAGE_MAGIC}, "cktcptd1", 8);
}

static void test_pass(void **state) {
    struct pair *pair = *state;
    static struct wire_packet out, in;
    struct wire_message message;
    struct problem problem = PROBLEM_NONE;
    struct message_saved saved = {.result = CODE_SKIPPED, .image_size = 77};
    wire_pack(&out, MESSAGE_SAVED, 5, &saved, "busy", 4, -1);
    assert_int_equal(pass(pair, &out, &in, false, 0, &message, &problem), 0);
    assert_int_equal(message.opcode, MESSAGE_SAVED);
    assert_int_equal(message.serial, 5);
    assert_memory_equal(message.body, &saved, sizeof saved);
    assert_int_equal(message.tail_length, 4);
    assert_memory_equal(message.tail, "busy", 4);
    assert_int_equal((uintptr_t)message.body % 8, 0);
    assert_int_equal(in.fd, -1);

    unsigned before = open_descriptors();
    CLEANUP(closep) int fd = wire_memfd("test", "hello", 5);
    assert_true(fd >= 0);
    struct message_area area = {.area = 3, .size = 5};
    wire_pack(&out, MESSAGE_AREA, 6, &area, NULL, 0, fd);
    static struct wire_packet moved; /* a packet may be moved before it is sent */
    moved = out;
    memset(&out, 0xee, sizeof out);
    assert_int_equal(pass(pair, &moved, &in, true, MESSAGE_STATE_O, &message, &problem), 0);
    assert_int_equal(message.opcode, MESSAGE_AREA);
    assert_true(in.fd >= 0 && in.fd != fd);
    assert_true(fcntl(in.fd, F_GETFD) & FD_CLOEXEC);
    wire_packet_close(&in);
    wire_packet_close(&in);
    wire_packet_close(&moved); /* it only borrowed */
    assert_true(fcntl(fd, F_GETFD) >= 0);
    assert_int_equal(open_descriptors(), before + 1);
}

static void send_raw(struct pair *pair, const void *data, size_t size, const int *fds, size_t fd_count) {
    struct iovec iov = {.iov_base = (void *)data, .iov_len = size};
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(8 * sizeof(int))] = {0};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_count) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *cmsg = CMSG_FIRSTHDR(&header);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(cmsg), fds, fd_count * sizeof(int));
    }
    assert_int_equal(sendmsg(pair->fds[0], &header, 0), size);
}

static void assert_refused(struct pair *pair, const void *data, size_t size, size_t fd_count, bool from_client,
                           uint32_t state, const char *words) {
    static struct wire_packet in;
    struct wire_message message = {.serial = 4711};
    struct problem problem = PROBLEM_NONE;
    unsigned before = open_descriptors();
    int fds[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    send_raw(pair, data, size, fds, fd_count);
    ssize_t received = recvmsg(pair->fds[1], wire_receive_header(&in), MSG_CMSG_CLOEXEC);
    assert_int_equal(wire_check(&in, received, from_client, state, &message, &problem), -EPROTO);
    if (!strstr(problem.text, words))
        fail_msg("'%s' does not say '%s'", problem.text, words);
    assert_int_equal(in.fd, -1);
    assert_int_equal(message.serial, 4711);
    assert_int_equal(open_descriptors(), before);
}

static void test_refusals(void **state) {
    struct pair *pair = *state;
    struct {
        struct message_head head;
        struct message_area body;
        uint8_t more[MESSAGE_SIZE_MAX];
    } packet = {.head = {.opcode = MESSAGE_AREA, .size = 32, .serial = 1}};
    const uint32_t open = MESSAGE_STATE_O;
    static struct wire_packet in;
    struct wire_message message;

    assert_refused(pair, &packet, 15, 1, true, open, "15 bytes");
    assert_refused(pair, &packet, 32, 0, true, open, "0 descriptors");
    assert_refused(pair, &packet, 32, 2, true, open, "2 descriptors");
    assert_refused(pair, &packet, 32, 4, true, open, "4 descriptors");
    assert_refused(pair, &packet, 32, 8, true, open, "too many descriptors");
    assert_refused(pair, &packet, 32, 1, true, MESSAGE_STATE_G, "state");
    assert_refused(pair, &packet, 32, 1, false, 0, "wrong side");
    assert_refused(pair, &packet, 31, 1, true, open, "head");
    assert_refused(pair, &packet, 33, 1, true, open, "head");
    packet.head.size = 33;
    assert_refused(pair, &packet, 33, 1, true, open, "33 bytes");
    packet.head.size = 24;
    assert_refused(pair, &packet, 24, 1, true, open, "24 bytes");
    packet.head.size = 32;
    packet.head.flags = 1;
    assert_refused(pair, &packet, 32, 1, true, open, "head");
    packet.head.flags = 0;
    packet.head.reserved = 1;
    assert_refused(pair, &packet, 32, 1, true, open, "head");
    packet.head.reserved = 0;
    packet.head.opcode = 9;
    assert_refused(pair, &packet, 32, 1, true, open, "no such message");
    packet.head.opcode = MESSAGE_OPEN;
    packet.head.size = MESSAGE_SIZE_MAX;
    assert_refused(pair, &packet, MESSAGE_SIZE_MAX, 0, true, MESSAGE_STATE_G, "8192 bytes");
    packet.head.size = MESSAGE_SIZE_MAX + 1;
    assert_refused(pair, &packet, MESSAGE_SIZE_MAX + 1, 0, true, MESSAGE_STATE_G, "too long");
    wire_receive_header(&in);
    assert_int_equal(wire_check(&in, 0, true, open, &message, NULL), -EPROTO);
    assert_int_equal(wire_check(&in, -EIO, true, open, &message, NULL), -EPROTO);
}

static void test_hostile(void **state) {
    struct pair *pair = *state;
    struct random random = random_seeded("hostile packets");
    static struct wire_packet in;
    unsigned before = open_descriptors();
    size_t accepted = 0;
    int fds[8] = {0};
    for (unsigned round = 0; round < 50000; round++) {
        uint8_t data[512];
        for (size_t i = 0; i < sizeof data; i++)
            data[i] = (uint8_t)random_next(&random);
        size_t size = 1 + random_below(&random, sizeof data);
        struct message_head head = {.opcode = (uint16_t)random_below(&random, 70), .size = (uint32_t)size};
        const struct message_rule *rule = message_rule(head.opcode);
        if (rule && random_below(&random, 2))
            head.size = (uint32_t)(size = sizeof head + rule->body_size);
        if (random_below(&random, 8))
            memcpy(data, &head, sizeof head);
        size = min_u64(size, sizeof data);
        send_raw(pair, data, size, fds, random_below(&random, 4) ? random_below(&random, 2) : random_below(&random, 9));
        ssize_t received = recvmsg(pair->fds[1], wire_receive_header(&in), MSG_CMSG_CLOEXEC);
        struct wire_message message;
        if (wire_check(&in, received, round % 2, (uint32_t)random_below(&random, 16), &message, NULL) == 0) {
            rule = message_rule(message.opcode);
            assert_non_null(rule);
            assert_true(message.tail_length <= rule->tail_max);
            assert_ptr_equal((const char *)message.body + rule->body_size, message.tail);
            assert_true(message.tail + message.tail_length == (char *)in.data + size);
            assert_int_equal(in.fd >= 0, rule->descriptors);
            accepted++;
        }
        wire_packet_close(&in);
    }
    print_message("%zu of 50000 were messages\n", accepted);
    assert_true(accepted > 500);
    assert_int_equal(open_descriptors(), before);
}

static int map(int fd, size_t size, bool immutable, void **data, const char *words) {
    struct problem problem = PROBLEM_NONE;
    int r = wire_map(fd, size, immutable, data, &problem);
    if (r < 0 && !strstr(problem.text, words))
        fail_msg("'%s' does not say '%s'", problem.text, words);
    return r;
}

static void test_memfd(void **state) {
    void *data = NULL;
    CLEANUP(closep) int sealed = wire_memfd("test", "hello", 5);
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    assert_int_equal(fcntl(sealed, F_GET_SEALS), seals);
    assert_true(fcntl(sealed, F_GETFD) & FD_CLOEXEC);
    assert_true(write(sealed, "x", 1) < 0);
    assert_int_equal(map(sealed, 5, true, &data, ""), 0);
    assert_memory_equal(data, "hello", 5);
    munmap(data, 5);
    data = NULL;
    assert_int_equal(map(sealed, 6, true, &data, "5 bytes"), -EINVAL);
    assert_null(data);

    CLEANUP(closep) int empty = wire_memfd("empty", NULL, 0);
    data = &empty;
    assert_int_equal(map(empty, 0, true, &data, ""), 0);
    assert_null(data);

    CLEANUP(closep) int open_fd = memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(open_fd, 8192), 0);
    assert_int_equal(map(open_fd, 8192, false, &data, "shrinking"), -EINVAL);
    assert_int_equal(fcntl(open_fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(map(open_fd, 8192, true, &data, "writing"), -EINVAL);
    assert_int_equal(map(open_fd, 8192, false, &data, ""), 0);
    munmap(data, 8192);

    CLEANUP(closep) int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int pipes[2];
    assert_int_equal(map(file, 1, false, &data, "not a memfd"), -EINVAL);
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    assert_int_equal(map(pipes[0], 1, false, &data, "not a memfd"), -EINVAL);
    close(pipes[0]);
    close(pipes[1]);
    assert_int_equal(map(-1, 1, false, &data, "not a memfd"), -EINVAL);

    CLEANUP(closep) int huge = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (huge >= 0 && fcntl(huge, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
        assert_int_equal(map(huge, 1, false, &data, "ordinary pages"), -EINVAL);
    else
        print_message("no hugetlb here\n");
}

static int find(char path[108], const char *words) {
    struct problem problem = PROBLEM_NONE;
    bool on_demand = false;
    int r = wire_socket_path(path, &on_demand, &problem);
    if (r < 0 && !strstr(problem.text, words))
        fail_msg("'%s' does not say '%s'", problem.text, words);
    return r < 0 ? r : on_demand;
}

static void test_socket_path(void **state) {
    char path[108], base[] = "/tmp/ckptd-test-XXXXXX", expected[108], buffer[256], link[256];
    struct stat status;
    if (stat("/run/ckptd", &status) == 0) {
        print_message("a ckptd service is installed here: its socket would be found first\n");
        skip();
    }
    assert_non_null(mkdtemp(base));
    unsetenv("SLURM_JOB_ID");
    setenv("XDG_RUNTIME_DIR", base, 1);
    setenv("CKPT_SOCKET", "/some/where", 1);
    assert_int_equal(find(path, ""), 0);
    assert_string_equal(path, "/some/where");
    memset(buffer, 'x', 120);
    buffer[120] = '\0';
    setenv("CKPT_SOCKET", buffer, 1);
    assert_int_equal(find(path, "limit of 107"), -ENAMETOOLONG);
    setenv("CKPT_SOCKET", "", 1); /* as if not set */

    assert_int_equal(find(path, ""), 1);
    snprintf(expected, sizeof expected, "%s/ckptd/user", base);
    assert_string_equal(path, expected);
    setenv("SLURM_JOB_ID", "4711", 1);
    assert_int_equal(find(path, ""), 1);
    snprintf(expected, sizeof expected, "%s/ckptd/4711", base);
    assert_string_equal(path, expected);
    setenv("SLURM_JOB_ID", "../4711", 1);
    assert_int_equal(find(path, "SLURM_JOB_ID"), -EINVAL);
    unsetenv("SLURM_JOB_ID");

    snprintf(buffer, sizeof buffer, "%s/ckptd", base);
    assert_int_equal(mkdir(buffer, 0700), 0);
    assert_int_equal(find(path, ""), 1);
    assert_int_equal(chmod(buffer, 0770), 0);
    assert_int_equal(find(path, "0770"), -EPERM);
    assert_int_equal(rmdir(buffer), 0);
    assert_int_equal(symlink("/tmp", buffer), 0);
    assert_int_equal(find(path, "symbolic link"), -ENOTDIR);
    assert_int_equal(unlink(buffer), 0);
    snprintf(link, sizeof link, "%s/link", base);
    assert_int_equal(symlink(base, link), 0);
    setenv("XDG_RUNTIME_DIR", link, 1);
    assert_int_equal(find(path, "symbolic link"), -ENOTDIR);
    assert_int_equal(unlink(link), 0);
    setenv("XDG_RUNTIME_DIR", base, 1);
    if (geteuid() == 0) {
        assert_int_equal(mkdir(buffer, 0700), 0);
        assert_int_equal(chown(buffer, 1, 1), 0);
        assert_int_equal(find(path, "belongs to user 1"), -EPERM);
        assert_int_equal(rmdir(buffer), 0);
    }
    unsetenv("XDG_RUNTIME_DIR");
    snprintf(expected, sizeof expected, "/tmp/ckptd-%u", geteuid());
    if (lstat(expected, &status) < 0 || (S_ISDIR(status.st_mode) && !(status.st_mode & 022))) {
        assert_int_equal(find(path, ""), 1);
        assert_memory_equal(path, expected, strlen(expected));
    }
    assert_int_equal(rmdir(base), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test_setup_teardown(test_pass, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hostile, setup, teardown),
        cmocka_unit_test(test_memfd),
        cmocka_unit_test(test_socket_path),
    };
    return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
