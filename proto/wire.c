/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire.h"

#include "base/map.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pwd.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define SOCKET_PATH_SIZE 108
#define SOCKET_KEY_MAX 64
#define SEALS_IMMUTABLE (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

void wire_pack(struct wire_packet *packet, enum opcode opcode, uint32_t serial, const void *body, const void *tail,
               size_t tail_length, int fd) {
    const struct message_rule *rule = message_rule((uint16_t)opcode);
    assert(rule && tail_length <= rule->tail_max && (fd >= 0) == (rule->descriptors > 0));
    struct message_head head = {
        .opcode = (uint16_t)opcode,
        .size = (uint32_t)(sizeof head + rule->body_size + tail_length),
        .serial = serial,
    };
    uint8_t *at = mempcpy(packet->data, &head, sizeof head);
    at = mempcpy(at, body, rule->body_size);
    if (tail_length)
        memcpy(at, tail, tail_length);
    packet->size = head.size;
    packet->fd = -1;
    packet->header = (struct msghdr){0};
    if (fd < 0)
        return;
    memset(packet->control, 0, sizeof packet->control);
    struct cmsghdr *control = (struct cmsghdr *)packet->control;
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(control), &fd, sizeof fd);
    packet->header.msg_controllen = CMSG_SPACE(sizeof fd);
}

/* The pointers are set anew each time, so that a packet may be moved in between. */
static struct msghdr *point(struct wire_packet *packet, size_t length, size_t control_length) {
    packet->iov = (struct iovec){.iov_base = packet->data, .iov_len = length};
    packet->header = (struct msghdr){
        .msg_iov = &packet->iov,
        .msg_iovlen = 1,
        .msg_control = control_length ? packet->control : NULL,
        .msg_controllen = control_length,
    };
    return &packet->header;
}

struct msghdr *wire_receive_header(struct wire_packet *packet) {
    packet->fd = -1;
    packet->size = 0;
    return point(packet, sizeof packet->data, sizeof packet->control);
}

struct msghdr *wire_send_header(struct wire_packet *packet) {
    return point(packet, packet->size, packet->header.msg_controllen);
}

/* Keeps the first descriptor, closes the others. Returns how many there were. */
static uint32_t take_descriptors(struct wire_packet *packet) {
    uint32_t count = 0;
    for (struct cmsghdr *control = CMSG_FIRSTHDR(&packet->header); control;
         control = CMSG_NXTHDR(&packet->header, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
            continue;
        size_t descriptors = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < descriptors; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(control) + i * sizeof fd, sizeof fd);
            if (count++ == 0)
                packet->fd = fd;
            else
                close(fd);
        }
    }
    packet->header.msg_controllen = 0;
    return count;
}

static int check(const struct wire_packet *packet, ssize_t received, uint32_t descriptors, bool from_client,
                 uint32_t state, struct wire_message *ret_message, struct problem *problem) {
    struct message_head head;
    if (received < 0 || (size_t)received < sizeof head || (size_t)received > sizeof packet->data)
        return problem_set(problem, -EPROTO, "a packet of %zd bytes", received);
    if (packet->header.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        return problem_set(problem, -EPROTO, "a packet that is too long, or has too many descriptors");
    memcpy(&head, packet->data, sizeof head);
    const struct message_rule *rule = message_rule(head.opcode);
    if (!rule)
        return problem_set(problem, -EPROTO, "no such message: %u", head.opcode);
    if (rule->from_client != from_client)
        return problem_set(problem, -EPROTO, "%s from the wrong side", rule->name);
    if (from_client && !(rule->states & state))
        return problem_set(problem, -EPROTO, "%s is not allowed in this state of the connection", rule->name);
    if (head.size != (size_t)received || head.flags || head.reserved)
        return problem_set(problem, -EPROTO, "%s: the head of the message is wrong", rule->name);
    size_t fixed = sizeof head + rule->body_size;
    if (head.size < fixed || head.size - fixed > rule->tail_max)
        return problem_set(problem, -EPROTO, "%s: %u bytes, where %zu to %zu are possible", rule->name, head.size,
                           fixed, fixed + rule->tail_max);
    if (descriptors != rule->descriptors)
        return problem_set(problem, -EPROTO, "%s: %u descriptors instead of %u", rule->name, descriptors,
                           rule->descriptors);
    *ret_message = (struct wire_message){
        .opcode = head.opcode,
        .serial = head.serial,
        .body = packet->data + sizeof head,
        .tail = (const char *)packet->data + fixed,
        .tail_length = head.size - fixed,
    };
    return 0;
}

int wire_check(struct wire_packet *packet, ssize_t received, bool from_client, uint32_t state,
               struct wire_message *ret_message, struct problem *problem) {
    uint32_t descriptors = received >= 0 ? take_descriptors(packet) : 0;
    int r = check(packet, received, descriptors, from_client, state, ret_message, problem);
    if (r < 0)
        wire_packet_close(packet);
    else
        packet->size = (size_t)received;
    return r;
}

void wire_packet_close(struct wire_packet *packet) {
    closep(&packet->fd);
    packet->fd = -1;
}

int wire_memfd(const char *name, const void *data, size_t size) {
    CLEANUP(closep) int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    for (size_t at = 0; at < size;) {
        ssize_t written = write(fd, (const uint8_t *)data + at, size - at);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written < 0 ? -errno : -EIO;
        at += (size_t)written;
    }
    if (fcntl(fd, F_ADD_SEALS, SEALS_IMMUTABLE | F_SEAL_SEAL) < 0)
        return -errno;
    return steal_fd(&fd);
}

int wire_map(int fd, size_t size, bool immutable, void **ret_data, struct problem *problem) {
    int needed = immutable ? SEALS_IMMUTABLE : F_SEAL_SHRINK;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return problem_set(problem, -EINVAL, "the descriptor is not a memfd");
    if ((seals & needed) != needed)
        return problem_set(problem, -EINVAL, "the memfd is not sealed against %s", immutable ? "writing" : "shrinking");
    struct statfs filesystem;
    struct stat status;
    if (fstatfs(fd, &filesystem) < 0 || fstat(fd, &status) < 0)
        return problem_set(problem, -errno, "the memfd cannot be looked at: %s", strerror(errno));
    /* A page of hugetlbfs that cannot be had when it is touched is a SIGBUS. */
    if (filesystem.f_type != TMPFS_MAGIC)
        return problem_set(problem, -EINVAL, "the memfd is not of ordinary pages");
    if (status.st_size < 0 || (uint64_t)status.st_size < size)
        return problem_set(problem, -EINVAL, "the memfd has %lld bytes, %zu were announced", (long long)status.st_size,
                           size);
    void *data = NULL;
    if (size) {
        data = map_file(fd, size, false);
        if (data == MAP_FAILED)
            return problem_set(problem, -errno, "%zu bytes of a memfd cannot be mapped: %s", size, strerror(errno));
    }
    *ret_data = data;
    return 0;
}

static int path_format(char ret_path[SOCKET_PATH_SIZE], struct problem *problem, const char *format, ...)
    PRINTF_LIKE(3, 4);
static int path_format(char ret_path[SOCKET_PATH_SIZE], struct problem *problem, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(ret_path, SOCKET_PATH_SIZE, format, arguments);
    va_end(arguments);
    if (length < 0 || length >= SOCKET_PATH_SIZE)
        return problem_set(problem, -ENAMETOOLONG, "the socket's path is over the limit of %d bytes: %s...",
                           SOCKET_PATH_SIZE - 1, ret_path);
    return 0;
}

/* Nobody else may put a socket there. A directory that is not there yet is made by whoever starts
 * the daemon. */
static int directory_check(const char *path, struct problem *problem) {
    struct stat status;
    if (lstat(path, &status) < 0) {
        if (errno == ENOENT)
            return 0;
        return problem_set(problem, -errno, "%s: %s", path, strerror(errno));
    }
    if (!S_ISDIR(status.st_mode))
        return problem_set(problem, -ENOTDIR, "%s is not a directory (a symbolic link is not followed)", path);
    if (status.st_uid != geteuid())
        return problem_set(problem, -EPERM, "%s belongs to user %u, not to %u", path, status.st_uid, geteuid());
    if (status.st_mode & 022)
        return problem_set(problem, -EPERM, "%s can be written by others (mode %04o); make it 0700", path,
                           status.st_mode & 07777);
    return 0;
}

/* One word of a path: $SLURM_JOB_ID, or "user". */
static int key_check(const char *key, struct problem *problem) {
    size_t length = strlen(key);
    bool plain = length > 0 && length < SOCKET_KEY_MAX && key[0] != '.';
    for (size_t i = 0; plain && i < length; i++)
        plain = (key[i] >= 'a' && key[i] <= 'z') || (key[i] >= 'A' && key[i] <= 'Z') ||
                (key[i] >= '0' && key[i] <= '9') || key[i] == '_' || key[i] == '-' || key[i] == '.';
    return plain ? 0 : problem_set(problem, -EINVAL, "SLURM_JOB_ID is not one plain word");
}

static const char *environment(const char *name) {
    const char *value = secure_getenv(name);
    return value && value[0] ? value : NULL;
}

/* /run/ckptd/<user>/sock, where the administrator runs the service. 1: it is there. */
static int service_path(char ret_path[SOCKET_PATH_SIZE]) {
    char buffer[4096];
    struct passwd entry, *user = NULL;
    struct stat status;
    if (getpwuid_r(geteuid(), &entry, buffer, sizeof buffer, &user) != 0 || !user || strchr(user->pw_name, '/'))
        return 0;
    int length = snprintf(ret_path, SOCKET_PATH_SIZE, "/run/ckptd/%s/sock", user->pw_name);
    return length < SOCKET_PATH_SIZE && lstat(ret_path, &status) == 0 && S_ISSOCK(status.st_mode) &&
           status.st_uid == geteuid();
}

int wire_socket_path(char ret_path[108], bool *ret_on_demand, struct problem *problem) {
    char path[SOCKET_PATH_SIZE], directory[SOCKET_PATH_SIZE];
    bool on_demand = false;
    int r;
    const char *given = environment("CKPT_SOCKET"), *runtime = environment("XDG_RUNTIME_DIR"),
               *key = environment("SLURM_JOB_ID");
    if (given) {
        r = path_format(path, problem, "%s", given);
        if (r < 0)
            return r;
    } else if (!service_path(path)) {
        on_demand = true;
        key = key ? key : "user";
        r = key_check(key, problem);
        if (r < 0)
            return r;
        /* The runtime directory is ours already; in /tmp the directory of the user is the first of ours. */
        if (runtime) {
            r = directory_check(runtime, problem);
            if (r == 0)
                r = path_format(directory, problem, "%s/ckptd", runtime);
        } else {
            r = path_format(directory, problem, "/tmp/ckptd-%u", geteuid());
        }
        if (r == 0)
            r = directory_check(directory, problem);
        if (r == 0)
            r = path_format(path, problem, "%s/%s", directory, key);
        if (r < 0)
            return r;
    }
    memcpy(ret_path, path, sizeof path);
    *ret_on_demand = on_demand;
    return 0;
}
