/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a kernel says of the processes of its node. The linker puts these functions before those of
 * the C library (see meson.build), so that the daemon's own code asks them: who is at the other end
 * of a socket, is he alive, which host and boot is this. Trainers have process numbers that no real
 * kernel gives; whatever else is asked goes to the real one.
 */
#include "proto/digest.h"
#include "tests/sim/sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PID_FIRST 5000000
#define PROCESSES_MAX 256
#define SOCKETS_MAX 65536
#define PEERPIDFD 77

static struct process {
    int node, boot;
    int death_fd;
    bool ended, forked;
} processes[PROCESSES_MAX];
static uint32_t process_count;
/* What a descriptor is, as long as its inode is the same: numbers are used again. */
static struct socket {
    enum { SOCKET_NONE, SOCKET_OF_DAEMON, SOCKET_OF_PROCESS, MEMORY_OF_PROCESS } kind;
    uint32_t pid; /* of the client */
    ino_t inode;
    int node;
} sockets[SOCKETS_MAX];
static int socket_end;
static int boots[SIM_NODES_MAX];

FILE *__real_fopen64(const char *path, const char *mode);
FILE *__wrap_fopen64(const char *path, const char *mode);
int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __real_gethostname(char *name, size_t size);
int __wrap_gethostname(char *name, size_t size);
int __real_getsockopt(int fd, int level, int option, void *value, socklen_t *length);
int __wrap_getsockopt(int fd, int level, int option, void *value, socklen_t *length);
void __wrap_digest_copy_leaf(void *destination, const void *source, size_t length, struct digest *ret_digest);

static ino_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

static void note_descriptor(int kind, int node, int fd, uint32_t pid) {
    assert(fd < SOCKETS_MAX);
    sockets[fd] = (struct socket){.kind = kind, .pid = pid, .inode = inode_of(fd), .node = node};
    socket_end = fd >= socket_end ? fd + 1 : socket_end;
}

/* Of a node, and of one process of it (0: of all). */
static void close_descriptors(int kind, int node, uint32_t pid) {
    sim_descriptors_changed();
    for (int fd = 0; fd < socket_end; fd++) {
        if ((int)sockets[fd].kind != kind || sockets[fd].node != node || (pid && sockets[fd].pid != pid))
            continue;
        if (inode_of(fd) == sockets[fd].inode)
            close(fd);
        sockets[fd].kind = SOCKET_NONE;
    }
}

void kernel_socket(int node, int fd, uint32_t pid) { note_descriptor(SOCKET_OF_DAEMON, node, fd, pid); }
void kernel_close_sockets(int node) { close_descriptors(SOCKET_OF_DAEMON, node, 0); }

int kernel_connect(uint32_t pid) {
    int node = processes[pid - PID_FIRST].node;
    int fd = nodes[node].up ? sim_loop_connect(nodes[node].loop, pid) : -ECONNREFUSED;
    if (fd >= 0)
        note_descriptor(SOCKET_OF_PROCESS, node, fd, pid);
    return fd;
}

uint32_t kernel_memory_of(int fd) {
    bool known = fd >= 0 && fd < SOCKETS_MAX && sockets[fd].kind == MEMORY_OF_PROCESS;
    return known && inode_of(fd) == sockets[fd].inode ? sockets[fd].pid : 0;
}

uint32_t kernel_process_new(int node) {
    SIM_CHECK(process_count < PROCESSES_MAX, "simulator", "too many processes");
    processes[process_count] =
        (struct process){.node = node, .boot = boots[node], .death_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    return PID_FIRST + process_count++;
}

void kernel_process_end(uint32_t pid) {
    struct process *process = &processes[pid - PID_FIRST];
    process->ended = true;
    sim_descriptors_changed();
    (void)!write(process->death_fd, &(uint64_t){1}, 8);
    close(steal_fd(&process->death_fd));
    if (!process->forked)
        close_descriptors(SOCKET_OF_PROCESS, process->node, pid);
}

void kernel_process_forked(uint32_t pid) { processes[pid - PID_FIRST].forked = true; }
bool kernel_is_simulated(uint32_t pid) { return pid >= PID_FIRST && pid - PID_FIRST < process_count; }
bool kernel_process_alive(uint32_t pid) { return !processes[pid - PID_FIRST].ended; }

void kernel_reboot(int node) { boots[node]++; }

/* "/proc/<simulated pid>/<what>": the process, or NULL. */
static struct process *process_of(const char *path, const char *what) {
    char rest[16];
    unsigned pid;
    if (sscanf(path, "/proc/%u/%15s", &pid, rest) != 2 || pid < PID_FIRST || strcmp(rest, what) != 0)
        return NULL;
    return pid - PID_FIRST < process_count ? &processes[pid - PID_FIRST] : NULL;
}

static FILE *text_file(const char *text) {
    FILE *file = fmemopen(NULL, strlen(text) + 1, "w+");
    if (file) {
        fputs(text, file);
        rewind(file);
    }
    return file;
}

FILE *__wrap_fopen64(const char *path, const char *mode) {
    struct process *process = process_of(path, "stat");
    char text[256];
    if (process) {
        if (process->ended || process->node != sim.node || process->boot != boots[process->node]) {
            errno = ENOENT;
            return NULL;
        }
        snprintf(text, sizeof text, "1 (trainer) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %u 0\n",
                 1000 + (unsigned)(process - processes));
        return text_file(text);
    }
    if (sim.node != SIM_OUTSIDE && strcmp(path, "/proc/sys/kernel/random/boot_id") == 0) {
        snprintf(text, sizeof text, "boot-%d-%d\n", sim.node, boots[sim.node]);
        return text_file(text);
    }
    return __real_fopen64(path, mode);
}

int __wrap_open64(const char *path, int flags, ...) {
    const struct process *process = process_of(path, "mem");
    if (process) {
        int fd = memfd_create("sim-memory", MFD_CLOEXEC);
        if (fd >= 0)
            note_descriptor(MEMORY_OF_PROCESS, process->node, fd, PID_FIRST + (uint32_t)(process - processes));
        return fd;
    }
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return __real_open64(path, flags, mode);
}

int __wrap_gethostname(char *name, size_t size) {
    if (sim.node == SIM_OUTSIDE)
        return __real_gethostname(name, size);
    snprintf(name, size, "node-%d", sim.node);
    return 0;
}

int __wrap_getsockopt(int fd, int level, int option, void *value, socklen_t *length) {
    int r = __real_getsockopt(fd, level, option, value, length);
    if (fd < 0 || fd >= SOCKETS_MAX || sockets[fd].kind != SOCKET_OF_DAEMON || level != SOL_SOCKET)
        return r;
    uint32_t pid = sockets[fd].pid;
    if (option == SO_PEERCRED)
        ((struct ucred *)value)->pid = (pid_t)pid;
    if (option == PEERPIDFD) {
        if (r == 0)
            close(*(int *)value);
        const struct process *process = &processes[pid - PID_FIRST];
        *(int *)value = process->ended || sim_bug("trust-eof") ? eventfd(process->ended, EFD_CLOEXEC)
                                                               : fcntl(process->death_fd, F_DUPFD_CLOEXEC, 0);
        return 0;
    }
    return r;
}

/* The moment of capture: others come between two leaves. */
void __wrap_digest_copy_leaf(void *destination, const void *source, size_t length, struct digest *ret_digest) {
    fiber_wait(sim.now_ns + sim_below(50000), -1);
    size_t half = fiber_inside() ? sim_below(length + 1) : length;
    memcpy(destination, source, half);
    if (half < length)
        fiber_wait(sim.now_ns + sim_below(50000), -1);
    if (!sim_bug("torn-capture") || !sim_chance(1, 20))
        memcpy((uint8_t *)destination + half, (const uint8_t *)source + half, length - half);
    digest_leaf(destination, length, ret_digest);
}
