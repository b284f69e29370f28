/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/output.h"

#include "tools/ckptctl.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <sys/mman.h>

void output_abandon(struct output *output) {
    if (output->data)
        munmap(output->data, output->size);
    if (output->fd >= 0) {
        close(output->fd);
        unlink(output->temporary);
    }
    *output = OUTPUT_NONE;
}

int output_begin(struct output *output, const char *path, uint64_t size) {
    *output = OUTPUT_NONE;
    output->size = (size_t)size;
    int length = snprintf(output->temporary, sizeof output->temporary, "%s.%ld.tmp", path, (long)getpid());
    if (length < 0 || (size_t)length >= sizeof output->temporary)
        return ctl_fail(STATUS_USAGE, "the name %s is too long", path);
    strcpy(output->path, path);
    output->fd = open(output->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (output->fd < 0)
        return ctl_fail(STATUS_STORAGE, "cannot create %s: %s", output->temporary, strerror(errno));
    int r = posix_fallocate(output->fd, 0, (off_t)size);
    if (r == 0) {
        void *data = mmap(NULL, output->size, PROT_READ | PROT_WRITE, MAP_SHARED, output->fd, 0);
        if (data != MAP_FAILED)
            output->data = data;
        else
            r = errno;
    }
    if (r != 0) {
        output_abandon(output);
        return ctl_fail(STATUS_STORAGE, "cannot make %s of %llu bytes: %s", path, (unsigned long long)size,
                        strerror(r));
    }
    return STATUS_OK;
}

static int sync_directory(const char *path) {
    char copy[PATH_MAX];
    strcpy(copy, path);
    CLEANUP(closep) int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* A directory that may not be read, or not be synced, is no reason to doubt the file. */
    if (fd >= 0 && fsync(fd) < 0 && errno == EIO)
        return -EIO;
    return 0;
}

int output_finish(struct output *output) {
    int error = 0;
    if (munmap(output->data, output->size) < 0 || fsync(output->fd) < 0)
        error = errno;
    output->data = NULL;
    int fd = steal_fd(&output->fd);
    if (close(fd) < 0 && !error)
        error = errno;
    if (!error && rename(output->temporary, output->path) < 0)
        error = errno;
    if (error)
        unlink(output->temporary);
    else if (sync_directory(output->path) < 0)
        error = EIO;
    if (error)
        return ctl_fail(STATUS_STORAGE, "cannot write %s: %s", output->path, strerror(error));
    return STATUS_OK;
}
