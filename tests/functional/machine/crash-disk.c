/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol of /dev/fuse is spoken by hand, since so little of it is needed: the file is the root itself, is
 * never cached, and is read, written and synced. A server that dies takes its connection with it, so that whoever
 * waits for it gets an error instead of waiting for ever: killing everything is always safe.
 *
 * Three images in memory that both processes see: what is read now, what is certain to stay, and what the power
 * has left.
 */
#include "tests/functional/machine/crash-disk.h"

#include "tests/functional/machine/loop-mount.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define DISK_SIZE MIB(64)
#define WRITE_MAX KIB(128)
#define REQUEST_MAX (WRITE_MAX + KIB(64))
#define SECTOR 512

static struct disk {
    _Atomic uint64_t requests, out_at; /* 0: not armed */
    _Atomic uint64_t flushes, lost;
    _Atomic bool out, thawed, forget_log;
    _Atomic int opened;
} * disk;
static char *now, *stable, *left;
static bool liar;
static pid_t server;

struct write {
    struct write *next;
    uint64_t offset;
    uint32_t size;
    char data[];
};
static struct write *log_first, **log_end = &log_first;

/* ---- the server ---- */

static void log_clear(void) {
    while (log_first) {
        struct write *write = log_first;
        log_first = write->next;
        free(write);
    }
    log_end = &log_first;
}

static void flush_log(void) {
    disk->flushes++;
    if (liar)
        return;
    for (struct write *write = log_first; write; write = write->next)
        memcpy(stable + write->offset, write->data, write->size);
    log_clear();
}

/* The power goes. In the order of the writes, each reaches the disk or not, whole or in part. */
static void go_out(void) {
    unsigned mode = (unsigned)random_number(4); /* none, half, most, sector by sector */
    memcpy(left, stable, DISK_SIZE);
    for (struct write *write = log_first; write; write = write->next) {
        bool kept = mode && random_number(mode == 2 ? 8 : 2) > 0;
        if (mode == 3) {
            for (uint32_t at = 0; at < write->size; at += SECTOR)
                if (random_number(2))
                    memcpy(left + write->offset + at, write->data + at, min_u64(SECTOR, write->size - at));
                else
                    disk->lost++;
        } else if (kept) {
            memcpy(left + write->offset, write->data, write->size);
        } else {
            disk->lost++;
        }
    }
    log_clear();
    disk->out = true;
    while (!disk->thawed)
        pause_ms(1);
}

static void count_request(void) {
    uint64_t at = disk->out_at;
    if (++disk->requests >= at && at && !disk->out)
        go_out();
}

static int do_write(const struct fuse_write_in *in, const char *data) {
    if (in->offset > DISK_SIZE || in->size > DISK_SIZE - in->offset)
        return -EFBIG;
    memcpy(now + in->offset, data, in->size);
    if (disk->out)
        return 0; /* forgotten */
    struct write *write = malloc(sizeof *write + in->size);
    CHECK(write);
    *write = (struct write){.offset = in->offset, .size = in->size};
    memcpy(write->data, data, in->size);
    *log_end = write;
    log_end = &write->next;
    return 0;
}

static struct fuse_attr attributes(void) {
    return (struct fuse_attr){.ino = FUSE_ROOT_ID,
                              .size = DISK_SIZE,
                              .blocks = DISK_SIZE / SECTOR,
                              .mode = S_IFREG | 0600,
                              .nlink = 1,
                              .blksize = 4096};
}

static void reply(int fd, uint64_t unique, int error, const void *data, size_t size) {
    static char buffer[sizeof(struct fuse_out_header) + REQUEST_MAX];
    struct fuse_out_header header = {
        .len = (uint32_t)(sizeof header + (error ? 0 : size)), .error = error, .unique = unique};
    memcpy(buffer, &header, sizeof header);
    if (!error && size)
        memcpy(buffer + sizeof header, data, size);
    (void)!write(fd, buffer, header.len); /* an interrupted request is gone: nobody wants the answer */
}

static void serve_one(int fd, const struct fuse_in_header *header, const void *body) {
    switch (header->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                          .minor = FUSE_KERNEL_MINOR_VERSION,
                                          .max_background = 64,
                                          .congestion_threshold = 48,
                                          .max_write = WRITE_MAX,
                                          .flags = FUSE_BIG_WRITES | FUSE_ASYNC_READ};
        reply(fd, header->unique, 0, &out, sizeof out);
        return;
    }
    case FUSE_GETATTR:
    case FUSE_SETATTR: {
        const struct fuse_attr_out out = {.attr = attributes()};
        reply(fd, header->unique, 0, &out, sizeof out);
        return;
    }
    case FUSE_OPEN: {
        const struct fuse_open_out out = {.open_flags = FOPEN_DIRECT_IO};
        disk->opened++;
        reply(fd, header->unique, 0, &out, sizeof out);
        return;
    }
    case FUSE_READ: {
        const struct fuse_read_in *in = body;
        uint64_t size = in->offset < DISK_SIZE ? min_u64(in->size, DISK_SIZE - in->offset) : 0;
        reply(fd, header->unique, 0, now + in->offset, min_u64(size, REQUEST_MAX));
        return;
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *in = body;
        const struct fuse_write_out out = {.size = in->size};
        int r = do_write(in, (const char *)(in + 1));
        count_request();
        reply(fd, header->unique, r, &out, sizeof out);
        return;
    }
    case FUSE_FSYNC: {
        bool before = random_number(2); /* the power goes when most is at stake, or when all is done but not said */
        if (before)
            count_request();
        if (!disk->out)
            flush_log();
        if (!before)
            count_request();
        reply(fd, header->unique, 0, NULL, 0);
        return;
    }
    case FUSE_FLUSH:
        reply(fd, header->unique, 0, NULL, 0);
        return;
    case FUSE_RELEASE:
        reply(fd, header->unique, 0, NULL, 0);
        disk->opened--;
        return;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        return;
    default:
        reply(fd, header->unique, -ENOSYS, NULL, 0);
    }
}

_Noreturn static void serve(int fd) {
    static char request[REQUEST_MAX];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        ssize_t size = read(fd, request, sizeof request);
        if (size < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN))
            continue;
        if (size < (ssize_t)sizeof(struct fuse_in_header))
            _exit(0); /* unmounted */
        serve_one(fd, (void *)request, request + sizeof(struct fuse_in_header));
    }
}

/* ---- the other side ---- */

const char *crash_disk_path(void) { return test_path("disk"); }

static void make_file_system(void) {
    char command[9000];
    size_t size;
    snprintf(command, sizeof command, "truncate -s %d '%s' && mkfs.ext4 -q -F '%s' >'%s' 2>&1", (int)DISK_SIZE,
             test_path("image"), test_path("image"), test_path("mkfs.log"));
    if (system(command) != 0)
        test_skip("mkfs.ext4 is not there, or fails");
    char *image = file_read(test_path("image"), &size);
    CHECK(size == DISK_SIZE);
    memcpy(now, image, size);
    memcpy(stable, image, size);
    free(image);
    unlink(test_path("image"));
}

void crash_disk_start(bool lies) {
    mounts_begin();
    disk = shared_memory(sizeof *disk);
    now = shared_memory(DISK_SIZE);
    stable = shared_memory(DISK_SIZE);
    left = shared_memory(DISK_SIZE);
    liar = lies;
    make_file_system();
    file_write(test_path("file"), "", 0);
    CHECK(mkdir(crash_disk_path(), 0755) == 0);
    char options[128];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fd < 0)
        test_skip("/dev/fuse cannot be opened: %s", strerror(errno));
    snprintf(options, sizeof options, "fd=%d,rootmode=100000,user_id=0,group_id=0", fd);
    if (mount("crash-disk", test_path("file"), "fuse", MS_NODEV | MS_NOSUID, options) < 0)
        test_skip("FUSE cannot be mounted here: %s", strerror(errno));
    fflush(NULL);
    server = fork();
    CHECK(server >= 0);
    if (server == 0)
        serve(fd);
    close(fd);
    test_at_end(crash_disk_stop);
}

bool crash_disk_mount(const char *options) { return loop_mount(test_path("file"), crash_disk_path(), "ext4", options); }

void crash_disk_arm(uint64_t requests) { disk->out_at = disk->requests + requests; }

bool crash_disk_is_out(void) { return disk->out; }

void crash_disk_thaw(void) { disk->thawed = true; }

static void detach(void) {
    EVENTUALLY(umount(crash_disk_path()) == 0 || errno == EINVAL);
    EVENTUALLY(disk->opened == 0); /* the loop device has let go */
}

void crash_disk_restart(void) {
    CHECK(disk->out && disk->thawed);
    detach();
    memcpy(now, left, DISK_SIZE);
    memcpy(stable, left, DISK_SIZE);
    disk->out_at = 0;
    disk->out = disk->thawed = false;
}

void crash_disk_counts(uint64_t ret_counts[3]) {
    ret_counts[0] = disk->requests;
    ret_counts[1] = disk->flushes;
    ret_counts[2] = disk->lost;
}

void crash_disk_stop(void) {
    if (!server)
        return;
    disk->thawed = true;
    for (int tries = 0; tries < 1000 && umount2(crash_disk_path(), 0) < 0 && errno == EBUSY; tries++)
        pause_ms(5);
    umount2(crash_disk_path(), MNT_DETACH);
    umount2(test_path("file"), MNT_DETACH);
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    server = 0;
}
