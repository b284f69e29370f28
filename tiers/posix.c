/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/posix-probe.h"
#include "tiers/tier.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

/*
 * A directory on a POSIX file system, local or parallel. The root is opened once, and every path
 * is relative to that descriptor: if the root is renamed or something is mounted over it, a running
 * daemon goes on in the directory in which it began, and never splits a version over two. Only when
 * that directory was removed, with all it held, another is made in its place, on the same file system;
 * and when the file system's server has died, the root of the one that is mounted there next is taken.
 *
 * Data goes through a second descriptor with O_DIRECT where that works: a checkpoint that passes
 * through the page cache evicts the job's own input data, and its writeback arrives in bursts. What
 * is not aligned (manifests, the tail of a raw image) goes through the buffered descriptor. The two
 * never write the same page at the same time, and the sync covers both.
 *
 * Errors of the last resort: fsync and close report what an earlier write could not. Both are taken
 * at their word; the caller gives the file up and writes a new one.
 */

struct posix {
    int root_fd; /* this number for good, whatever it refers to */
    char root[TIER_PATH_MAX];
    uint64_t type; /* of its file system */
    unsigned capabilities;
    mode_t directory_mode, file_mode;
    char clock_file[32]; /* touched to read the file system's clock; one for each user */
};

static int absent_or_errno(void) { return errno == ENOENT ? TIER_E_ABSENT : -errno; }

static const char *path_or_root(const char *path) { return path[0] ? path : "."; }

static int64_t timespec_ns(struct timespec time) {
    return (int64_t)time.tv_sec * (int64_t)NANOSECONDS_PER_SECOND + time.tv_nsec;
}

static int open_parent(const char *root) {
    char parent[TIER_PATH_MAX];
    strcpy(parent, root);
    char *slash = strrchr(parent, '/');
    slash[slash == parent ? 1 : 0] = '\0';
    return open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* The root is made if only its last component is missing: a missing parent is a typing error or a
 * file system that is not mounted, and making it would fill the wrong disk. */
static int make_root(const char *root, mode_t mode) {
    if (mkdir(root, mode) < 0)
        return errno == EEXIST ? 0 : -errno;
    CLEANUP(closep) int fd = open_parent(root);
    if (fd < 0)
        return errno == EACCES ? 0 : -errno; /* a parent that may be searched, not read */
    return fsync(fd) < 0 && errno != EINVAL ? -errno : 0;
}

/* Somebody removed the root under our feet. What comes in its place must lie on the same file system: on another
 * we would not know what works there, and an empty mount point is not where checkpoints belong. */
static bool make_root_again(const struct posix *posix) {
    struct stat removed, status;
    if (fstat(posix->root_fd, &removed) < 0 || removed.st_nlink > 0)
        return false;
    CLEANUP(closep) int parent = open_parent(posix->root);
    if (parent < 0 || fstat(parent, &status) < 0 || status.st_dev != removed.st_dev ||
        make_root(posix->root, posix->directory_mode) < 0)
        return false;
    CLEANUP(closep) int fd = open(posix->root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    /* At once for all workers, whatever they are about to do relative to it. */
    return fd >= 0 && fstat(fd, &status) == 0 && status.st_dev == removed.st_dev &&
           dup3(fd, posix->root_fd, O_CLOEXEC) >= 0;
}

static bool root_is_cut_off(int error) { return error == ENOTCONN || error == ESTALE; }

/* The file system's server died, or forgot us, and it was mounted again: what is there now is the root, if it is of
 * the same kind. */
static bool open_root_again(const struct posix *posix) {
    struct stat status;
    struct statfs file_system;
    if (fstat(posix->root_fd, &status) == 0 || !root_is_cut_off(errno))
        return false;
    CLEANUP(closep) int fd = open(posix->root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd >= 0 && fstatfs(fd, &file_system) == 0 && ((uint64_t)file_system.f_type & 0xffffffff) == posix->type &&
           dup3(fd, posix->root_fd, O_CLOEXEC) >= 0;
}

static int posix_make_directory(void *self, const char *path) {
    struct posix *posix = self;
    if (mkdirat(posix->root_fd, path, posix->directory_mode) == 0)
        return 0;
    int error = errno;
    if (error == EEXIST)
        return TIER_E_EXISTS;
    if (error == ENOENT && make_root_again(posix))
        return mkdirat(posix->root_fd, path, posix->directory_mode) == 0 ? TIER_E_REMADE : -errno;
    if (!root_is_cut_off(error) || !open_root_again(posix))
        return -error;
    if (mkdirat(posix->root_fd, path, posix->directory_mode) == 0)
        return 0;
    return errno == EEXIST ? TIER_E_EXISTS : -errno;
}

/* The same open file description's file once more, with O_DIRECT; by /proc, so that a rename in
 * between cannot make it another file. -1 where it is not possible. */
static int open_direct(const struct posix *posix, int fd, int access) {
    if (!(posix->capabilities & TIER_DIRECT))
        return -1;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, access | O_DIRECT | O_CLOEXEC);
}

/* So that a full disk is noticed before gigabytes were written to it. */
static int preallocate(int fd, uint64_t size) {
    int r;
    do
        r = fallocate(fd, 0, 0, (off_t)size);
    while (r < 0 && errno == EINTR);
    if (r == 0)
        return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)
        return -errno;
    struct statvfs space;
    if (fstatvfs(fd, &space) < 0 || space.f_blocks == 0) /* no idea: the writes will tell */
        return 0;
    return size / space.f_frsize > space.f_bavail ? -ENOSPC : 0;
}

static int posix_create(void *self, const char *path, uint64_t size, struct tier_file *file) {
    struct posix *posix = self;
    CLEANUP(closep)
    int fd = openat(posix->root_fd, path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, posix->file_mode);
    if (fd < 0)
        return -errno;
    int r = size ? preallocate(fd, size) : 0;
    if (r) {
        unlinkat(posix->root_fd, path, 0);
        return r;
    }
    file->direct_fd = size >= TIER_ALIGNMENT ? open_direct(posix, fd, O_WRONLY) : -1;
    file->fd = steal_fd(&fd);
    return 0;
}

static int posix_open(void *self, const char *path, struct tier_file *file) {
    struct posix *posix = self;
    /* Non-blocking, so that a FIFO that somebody put there does not hang a worker. */
    CLEANUP(closep)
    int fd = openat(posix->root_fd, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0)
        return absent_or_errno();
    struct stat status;
    if (fstat(fd, &status) < 0)
        return -errno;
    if (S_ISDIR(status.st_mode))
        return -EISDIR;
    if (!S_ISREG(status.st_mode))
        return -EBADMSG;
    /* But not for the reads: io_uring takes it as leave to answer -EAGAIN on file systems that cannot
     * read without waiting, which are the network ones. */
    if (fcntl(fd, F_SETFL, 0) < 0)
        return -errno;
    /* Small files are manifests: not worth a second open on a parallel file system. */
    file->direct_fd = (uint64_t)status.st_size >= MIB(1) ? open_direct(posix, fd, O_RDONLY) : -1;
    file->fd = steal_fd(&fd);
    return 0;
}

static int posix_close(void *self, struct tier_file *file) {
    int r = 0;
    if (file->direct_fd >= 0 && close(file->direct_fd) < 0)
        r = -errno;
    if (close(file->fd) < 0 && r == 0)
        r = -errno;
    return r;
}

static int choose_fd(const struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    bool aligned = ((uintptr_t)data | size | offset) % TIER_ALIGNMENT == 0;
    return aligned && file->direct_fd >= 0 ? file->direct_fd : file->fd;
}

static int posix_write(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = pwrite(choose_fd(file, at, size, offset), at, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        at += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

static int posix_read(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    char *at = data;
    size_t got = 0;
    while (got < size) {
        ssize_t n =
            pread(choose_fd(file, at + got, size - got, offset + got), at + got, size - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    *ret_got = got;
    return 0;
}

static int posix_truncate(void *self, struct tier_file *file, uint64_t size) {
    return ftruncate(file->fd, (off_t)size) < 0 ? -errno : 0;
}

static int posix_sync(void *self, struct tier_file *file) { return fsync(file->fd) < 0 ? -errno : 0; }

static int posix_length(void *self, struct tier_file *file, uint64_t *ret_size) {
    struct stat status;
    if (fstat(file->fd, &status) < 0)
        return -errno;
    *ret_size = (uint64_t)status.st_size;
    return 0;
}

static int posix_rename(void *self, const char *from, const char *to) {
    struct posix *posix = self;
    return renameat(posix->root_fd, from, posix->root_fd, to) < 0 ? absent_or_errno() : 0;
}

static bool same_file(const struct posix *posix, const char *a, const char *b) {
    struct stat first, second;
    return fstatat(posix->root_fd, a, &first, AT_SYMLINK_NOFOLLOW) == 0 &&
           fstatat(posix->root_fd, b, &second, AT_SYMLINK_NOFOLLOW) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

static int posix_link(void *self, const char *from, const char *to) {
    struct posix *posix = self;
    if (linkat(posix->root_fd, from, posix->root_fd, to, 0) == 0)
        return 0;
    if (errno == EEXIST) {
        /* Over NFS the answer to a link that worked can get lost; the repeated request then fails
         * although we won. Only then are both names one file. */
        return same_file(posix, from, to) ? 0 : TIER_E_EXISTS;
    }
    if (errno != EPERM && errno != EOPNOTSUPP && errno != ENOSYS)
        return absent_or_errno();
    /* No hard links here (some FUSE, CIFS): a rename that does not replace decides as well. */
    if (renameat2(posix->root_fd, from, posix->root_fd, to, RENAME_NOREPLACE) == 0)
        return 0;
    return errno == EEXIST ? TIER_E_EXISTS : absent_or_errno();
}

static int posix_unlink(void *self, const char *path) {
    struct posix *posix = self;
    return unlinkat(posix->root_fd, path, 0) < 0 ? absent_or_errno() : 0;
}

static int posix_remove_directory(void *self, const char *path) {
    struct posix *posix = self;
    if (unlinkat(posix->root_fd, path, AT_REMOVEDIR) == 0)
        return 0;
    return errno == EEXIST ? -ENOTEMPTY : absent_or_errno();
}

static int open_directory(const struct posix *posix, const char *path) {
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(posix->root_fd, path_or_root(path), flags);
    if (fd < 0 && root_is_cut_off(errno) && open_root_again(posix))
        fd = openat(posix->root_fd, path_or_root(path), flags);
    return fd;
}

static int posix_sync_directory(void *self, const char *path) {
    CLEANUP(closep) int fd = open_directory(self, path);
    if (fd < 0)
        return -errno;
    if (fsync(fd) == 0)
        return 0;
    /* CIFS and some FUSE servers have no such operation: there, names are as durable as they get. */
    return errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP ? 0 : -errno;
}

static void entry_from_status(const struct stat *status, struct tier_entry *entry) {
    entry->is_directory = S_ISDIR(status->st_mode);
    entry->size = (uint64_t)status->st_size;
    entry->mtime_ns = timespec_ns(status->st_mtim);
}

static int append_entry(struct tier_entries *entries, size_t *capacity, const char *name, struct tier_entry entry) {
    if (entries->count == TIER_ENTRIES_MAX)
        return -E2BIG;
    if (entries->count == *capacity) {
        size_t larger = *capacity ? *capacity * 2 : 32;
        struct tier_entry *items = reallocarray(entries->items, larger, sizeof *items);
        if (!items)
            return -ENOMEM;
        entries->items = items;
        *capacity = larger;
    }
    entry.name = strdup(name);
    if (!entry.name)
        return -ENOMEM;
    entries->items[entries->count++] = entry;
    return 0;
}

static void closedirp(DIR **directory) {
    if (*directory)
        closedir(*directory);
}

static int list_entries(void *self, const char *path, bool names_only, struct tier_entries *ret_entries) {
    CLEANUP(closep) int fd = open_directory(self, path);
    if (fd < 0)
        return absent_or_errno();
    CLEANUP(closedirp) DIR *directory = fdopendir(fd);
    if (!directory)
        return -errno;
    fd = -1;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    size_t capacity = 0;
    for (;;) {
        errno = 0;
        const struct dirent *found = readdir(directory);
        if (!found)
            break;
        if (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0)
            continue;
        struct tier_entry entry = {.is_directory = found->d_type == DT_DIR};
        struct stat status;
        if (!names_only || found->d_type == DT_UNKNOWN) {
            if (fstatat(dirfd(directory), found->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0)
                entry_from_status(&status, &entry);
            else if (errno == ENOENT) /* somebody renamed or removed it meanwhile */
                continue;
            else
                return -errno;
        }
        int r = append_entry(&entries, &capacity, found->d_name, entry);
        if (r)
            return r;
    }
    if (errno)
        return -errno;
    *ret_entries = entries;
    entries = (struct tier_entries){0};
    return 0;
}

static int posix_list(void *self, const char *path, struct tier_entries *ret_entries) {
    return list_entries(self, path, false, ret_entries);
}

static int posix_list_names(void *self, const char *path, struct tier_entries *ret_entries) {
    return list_entries(self, path, true, ret_entries);
}

static int posix_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    struct posix *posix = self;
    struct stat status;
    if (fstatat(posix->root_fd, path_or_root(path), &status, AT_SYMLINK_NOFOLLOW) < 0)
        return absent_or_errno();
    entry_from_status(&status, ret_entry);
    return 0;
}

static int posix_touch(void *self, const char *path) {
    struct posix *posix = self;
    /* NULL means now, and on a network file system it is the server's now. */
    return utimensat(posix->root_fd, path, NULL, AT_SYMLINK_NOFOLLOW) < 0 ? absent_or_errno() : 0;
}

static int posix_now(void *self, int64_t *ret_now_ns) {
    struct posix *posix = self;
    CLEANUP(closep)
    int fd = openat(posix->root_fd, posix->clock_file, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
                    posix->file_mode);
    struct stat status;
    if (fd < 0 || futimens(fd, NULL) < 0 || fstat(fd, &status) < 0)
        return -errno;
    *ret_now_ns = timespec_ns(status.st_mtim);
    return 0;
}

static int posix_space(void *self, uint64_t *ret_free, uint64_t *ret_total) {
    struct posix *posix = self;
    struct statvfs space;
    if (fstatvfs(posix->root_fd, &space) < 0)
        return -errno;
    *ret_free = (uint64_t)space.f_bavail * space.f_frsize;
    *ret_total = (uint64_t)space.f_blocks * space.f_frsize;
    return 0;
}

static void posix_submit_write(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                               struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn) {
    loop_write(loop, op, group, choose_fd(file, data, size, offset), data, size, offset, fn);
}

static void posix_submit_read(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                              struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn) {
    loop_read(loop, op, group, choose_fd(file, data, size, offset), data, size, offset, fn);
}

static void posix_free(void *self) {
    struct posix *posix = self;
    close(posix->root_fd);
    free(posix);
}

static const struct tier_ops posix_ops = {
    .kind = "posix",
    .make_directory = posix_make_directory,
    .create = posix_create,
    .open = posix_open,
    .close = posix_close,
    .write = posix_write,
    .read = posix_read,
    .truncate = posix_truncate,
    .sync = posix_sync,
    .length = posix_length,
    .rename = posix_rename,
    .link = posix_link,
    .unlink = posix_unlink,
    .remove_directory = posix_remove_directory,
    .sync_directory = posix_sync_directory,
    .list = posix_list,
    .list_names = posix_list_names,
    .stat = posix_stat,
    .touch = posix_touch,
    .now = posix_now,
    .space = posix_space,
    .submit_write = posix_submit_write,
    .submit_read = posix_submit_read,
    .free = posix_free,
};

int tier_posix_new(const struct tier_posix_options *options, struct tier **ret_tier, struct problem *problem) {
    const char *name = options->name, *root = options->root;
    if (strlen(name) == 0 || strlen(name) >= TIER_NAME_MAX)
        return problem_set(problem, -EINVAL, "a tier's name has 1 to %d bytes", TIER_NAME_MAX - 1);
    size_t length = strlen(root);
    if (root[0] != '/' || length < 2 || root[length - 1] == '/' || length >= TIER_PATH_MAX)
        return problem_set(problem, -EINVAL,
                           "tier %s: the root '%.200s' is not an absolute path of at most %d bytes without a final "
                           "slash",
                           name, root, TIER_PATH_MAX - 1);
    mode_t directory_mode = options->directory_mode ? options->directory_mode : 0777;
    int r = make_root(root, directory_mode);
    if (r)
        return problem_set(problem, r,
                           "tier %s: cannot make the root %s: %s; its parent directory must exist and be writable",
                           name, root, strerror(-r));
    CLEANUP(closep) int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return problem_set(problem, -errno, "tier %s: cannot open the root %s: %s", name, root, strerror(errno));
    struct statfs file_system;
    if (fstatfs(root_fd, &file_system) < 0)
        return problem_set(problem, -errno, "tier %s: cannot examine %s: %s", name, root, strerror(errno));
    uint64_t type = (uint64_t)file_system.f_type & 0xffffffff;
    if (options->level <= LEVEL_LOCAL && posix_type_is_network(type) && !options->allow_network)
        return problem_set(problem, -ENOTSUP,
                           "tier %s: %s lies on a network file system (%s), but this tier is for the node's own disk; "
                           "configure a local directory, or allow_network if it is one after all",
                           name, root, posix_type_name(type));
    unsigned capabilities;
    r = posix_probe(root_fd, name, root, options->buffered, &capabilities, problem);
    if (r)
        return r;
    struct posix *posix = calloc(1, sizeof *posix);
    if (!posix)
        return -ENOMEM;
    strcpy(posix->root, root);
    posix->type = type;
    posix->capabilities = capabilities;
    posix->directory_mode = directory_mode;
    posix->file_mode = options->file_mode ? options->file_mode : 0666;
    snprintf(posix->clock_file, sizeof posix->clock_file, ".clock-%lu", (unsigned long)geteuid());
    posix->root_fd = steal_fd(&root_fd);
    return tier_new(name, options->level, capabilities, root, &posix_ops, posix, ret_tier);
}
