/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/machine/loop-mount.h"

#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>

static int attach(const char *image) {
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int file = open(image, O_RDWR | O_CLOEXEC);
    CHECK(file >= 0);
    for (int tries = 0; control >= 0 && tries < 100; tries++) { /* another process may be faster */
        char path[32];
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(path, sizeof path, "/dev/loop%d", number);
        int fd = number < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
        struct loop_config config = {.fd = (uint32_t)file, .info.lo_flags = LO_FLAGS_AUTOCLEAR};
        if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &config) == 0) {
            close(control);
            close(file);
            return fd;
        }
        if (fd >= 0)
            close(fd);
    }
    close(file);
    test_skip("no loop device can be had here");
}

bool loop_mount(const char *image, const char *directory, const char *type, const char *options) {
    struct loop_info64 info;
    char device[32];
    int fd = attach(image);
    CHECK(ioctl(fd, LOOP_GET_STATUS64, &info) == 0);
    snprintf(device, sizeof device, "/dev/loop%u", info.lo_number);
    bool mounted = mount(device, directory, type, 0, options) == 0;
    int error = errno;
    close(fd); /* the mount holds the device, and lets it go */
    errno = error;
    return mounted;
}
