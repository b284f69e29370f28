/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/listener.h"

#include "daemon/service.h"
#include "proto/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define BACKLOG 1024

/* Makes the last directory of the path, and checks that nobody else can put a socket there. */
static int prepare_directory(const char *path, struct problem *problem) {
    char directory[108];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (!slash || slash == directory)
        return problem_set(problem, -EINVAL, "socket %s: give an absolute path in a directory of its own", path);
    *slash = '\0';
    if (mkdir(directory, 0700) < 0 && errno != EEXIST) {
        /* $XDG_RUNTIME_DIR/ckptd may need no more than one level; deeper ones are the caller's. */
        return problem_set(problem, -errno, "cannot make %s: %s", directory, strerror(errno));
    }
    struct stat status;
    if (lstat(directory, &status) < 0)
        return problem_set(problem, -errno, "cannot look at %s: %s", directory, strerror(errno));
    if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & 022))
        return problem_set(
            problem, -EPERM,
            "%s must be a directory of uid %u that nobody else can write to: remove it, or set CKPT_SOCKET", directory,
            geteuid());
    return 0;
}

/* The lock decides who serves the path; it lies in the socket's directory and is never unlinked while
 * held, except by its holder. */
static int take_lock(struct listener *listener, struct problem *problem) {
    char path[128];
    snprintf(path, sizeof path, "%s.lock", listener->path);
    for (;;) {
        struct stat ours, there;
        CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
            return problem_set(problem, -errno, "cannot open %s: %s", path, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) < 0)
            return errno == EWOULDBLOCK ? LISTENER_E_SERVED
                                        : problem_set(problem, -errno, "cannot lock %s: %s", path, strerror(errno));
        /* The last holder may have unlinked it between our open and our lock. */
        if (fstat(fd, &ours) < 0 || stat(path, &there) < 0 || ours.st_ino != there.st_ino)
            continue;
        listener->lock_fd = steal_fd(&fd);
        return 0;
    }
}

int listener_init(struct listener *listener, const char *path, struct problem *problem) {
    *listener = (struct listener){.fd = -1, .lock_fd = -1};
    bool on_demand;
    int r = service_listen_fd();
    if (r >= 0) {
        struct sockaddr_un address = {0};
        socklen_t length = sizeof address;
        listener->fd = r;
        listener->inherited = true;
        if (getsockname(r, (struct sockaddr *)&address, &length) == 0)
            memcpy(listener->path, address.sun_path, sizeof listener->path);
        int flags = fcntl(r, F_GETFL);
        if (flags < 0 || fcntl(r, F_SETFL, flags | O_NONBLOCK) < 0)
            return problem_set(problem, -errno, "cannot use the inherited socket: %s", strerror(errno));
        return 0;
    }
    if (path && strlen(path) >= sizeof listener->path)
        return problem_set(problem, -ENAMETOOLONG, "socket %s: a path of at most %zu bytes is possible", path,
                           sizeof listener->path - 1);
    if (path)
        snprintf(listener->path, sizeof listener->path, "%s", path);
    else if ((r = wire_socket_path(listener->path, &on_demand, problem)) < 0)
        return r;
    r = prepare_directory(listener->path, problem);
    if (!r)
        r = take_lock(listener, problem);
    if (r)
        return r;
    (void)unlink(listener->path); /* of a daemon that was killed: its lock is free */
    CLEANUP(closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", listener->path);
    mode_t mask = umask(0177);
    r = fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, BACKLOG) < 0 ? -errno : 0;
    umask(mask);
    if (r < 0)
        return problem_set(problem, r, "cannot listen on %s: %s", listener->path, strerror(-r));
    listener->fd = steal_fd(&fd);
    return 0;
}

void listener_deinit(struct listener *listener) {
    if (!listener->inherited && listener->lock_fd >= 0) {
        char path[128];
        snprintf(path, sizeof path, "%s.lock", listener->path);
        (void)unlink(listener->path);
        (void)unlink(path);
        close(listener->lock_fd);
    }
    if (listener->fd >= 0)
        close(listener->fd);
}
