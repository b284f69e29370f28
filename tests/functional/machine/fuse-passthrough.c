/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file system that is another directory, until its server is stopped: fuse-passthrough SOURCE MOUNTPOINT.
 * Nothing is cached by name, so that whoever asks it for anything while it stands still hangs, as with a parallel file
 * system whose servers are gone. For tests; it ends with whoever started it.
 */
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int source_fd;

static const char *below(const char *path) { return path[1] ? path + 1 : "."; }
static int answer(int r) { return r < 0 ? -errno : 0; }

static void *begin(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
    config->hard_remove = 1;
    return NULL;
}

static int get_attributes(const char *path, struct stat *status, struct fuse_file_info *file) {
    return answer(file ? fstat((int)file->fh, status) : fstatat(source_fd, below(path), status, AT_SYMLINK_NOFOLLOW));
}

static int set_times(const char *path, const struct timespec times[2], struct fuse_file_info *file) {
    return answer(file ? futimens((int)file->fh, times)
                       : utimensat(source_fd, below(path), times, AT_SYMLINK_NOFOLLOW));
}

static int make_directory(const char *path, mode_t mode) { return answer(mkdirat(source_fd, below(path), mode)); }
static int remove_directory(const char *path) { return answer(unlinkat(source_fd, below(path), AT_REMOVEDIR)); }
static int remove_name(const char *path) { return answer(unlinkat(source_fd, below(path), 0)); }
static int link_name(const char *from, const char *to) {
    return answer(linkat(source_fd, below(from), source_fd, below(to), 0));
}
static int rename_name(const char *from, const char *to, unsigned flags) {
    return answer(renameat2(source_fd, below(from), source_fd, below(to), flags));
}

static int create_file(const char *path, mode_t mode, struct fuse_file_info *file) {
    int fd = openat(source_fd, below(path), (file->flags & ~O_DIRECT) | O_CREAT | O_CLOEXEC, mode);
    file->fh = (uint64_t)fd;
    return answer(fd);
}

static int open_file(const char *path, struct fuse_file_info *file) {
    int fd = openat(source_fd, below(path), (file->flags & ~O_DIRECT) | O_CLOEXEC);
    file->fh = (uint64_t)fd;
    return answer(fd);
}

static int read_file(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)path;
    ssize_t got = pread((int)file->fh, data, size, offset);
    return got < 0 ? -errno : (int)got;
}

static int write_file(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)path;
    ssize_t written = pwrite((int)file->fh, data, size, offset);
    return written < 0 ? -errno : (int)written;
}

static int truncate_file(const char *path, off_t size, struct fuse_file_info *file) {
    if (file)
        return answer(ftruncate((int)file->fh, size));
    int fd = openat(source_fd, below(path), O_WRONLY | O_CLOEXEC);
    int r = answer(fd < 0 ? fd : ftruncate(fd, size));
    if (fd >= 0)
        close(fd);
    return r;
}

static int sync_file(const char *path, int data_only, struct fuse_file_info *file) {
    (void)path;
    (void)data_only;
    return answer(fsync((int)file->fh));
}

static int allocate(const char *path, int mode, off_t offset, off_t length, struct fuse_file_info *file) {
    (void)path;
    return answer(fallocate((int)file->fh, mode, offset, length));
}

static int close_file(const char *path, struct fuse_file_info *file) {
    (void)path;
    return answer(close((int)file->fh));
}

static int list(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file,
                enum fuse_readdir_flags flags) {
    (void)offset;
    (void)file;
    (void)flags;
    int fd = openat(source_fd, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory)
        return -errno;
    for (struct dirent *entry; (entry = readdir(directory));)
        fill(buffer, entry->d_name, NULL, 0, 0);
    closedir(directory);
    return 0;
}

static int sync_directory(const char *path, int data_only, struct fuse_file_info *file) {
    (void)data_only;
    (void)file;
    int fd = openat(source_fd, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int r = answer(fd < 0 ? fd : fsync(fd));
    if (fd >= 0)
        close(fd);
    return r;
}

static int space(const char *path, struct statvfs *ret_space) {
    (void)path;
    return answer(fstatvfs(source_fd, ret_space));
}

static const struct fuse_operations operations = {
    .init = begin,
    .getattr = get_attributes,
    .utimens = set_times,
    .mkdir = make_directory,
    .rmdir = remove_directory,
    .unlink = remove_name,
    .link = link_name,
    .rename = rename_name,
    .create = create_file,
    .open = open_file,
    .read = read_file,
    .write = write_file,
    .truncate = truncate_file,
    .fsync = sync_file,
    .fallocate = allocate,
    .release = close_file,
    .readdir = list,
    .fsyncdir = sync_directory,
    .statfs = space,
};

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: fuse-passthrough SOURCE MOUNTPOINT\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    source_fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (source_fd < 0) {
        perror(argv[1]);
        return 1;
    }
    char foreground[] = "-f", *arguments[] = {argv[0], foreground, argv[2], NULL};
    return fuse_main(3, arguments, &operations, NULL);
}
