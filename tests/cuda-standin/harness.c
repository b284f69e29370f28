/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cuda-standin/harness.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

struct cuda cu;
int peer = -1;
char harness_directory[256];

/* ThreadSanitizer would rest a second at each exit, and there are a hundred. */
__attribute__((__visibility__("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0"; }

int harness_setup(void **state) {
    const char *base = getenv("TMPDIR");
    for (char **variable = environ; *variable;) {
        if (strncmp(*variable, "CUDA_", 5)) {
            variable++;
            continue;
        }
        CLEANUP(freep) char *name = strndup(*variable, strchr(*variable, '=') - *variable);
        unsetenv(name);
        variable = environ;
    }
    snprintf(harness_directory, sizeof(harness_directory), "%s/cuda-standin.XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(harness_directory))
        return -1;
    setenv("CUDA_STANDIN_DIR", harness_directory, 1);
    return 0;
}

int harness_teardown(void **state) {
    DIR *directory = opendir(harness_directory);
    if (!directory)
        return -1;
    for (struct dirent *entry; (entry = readdir(directory));)
        unlinkat(dirfd(directory), entry->d_name, 0);
    closedir(directory);
    return rmdir(harness_directory);
}

void setting(const char *name, const char *value) {
    char variable[64];
    snprintf(variable, sizeof(variable), "CUDA_STANDIN_%s", name);
    setenv(variable, value, 1);
}

static void scene_play(void (*play)(void)) {
    void *library = dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(SCENE_FAILED);
    }
#define CUDA_FUNCTION(name, arguments)                                                                                 \
    cu.name = (name##_fn *)dlsym(library, #name);                                                                      \
    CHECK(cu.name);
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION
    play();
    exit(0);
}

static pid_t scene_start(void (*play)(void), int socket, int other) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid)
        return pid;
    if (other >= 0)
        close(other);
    peer = socket;
    scene_play(play);
    abort();
}

static int scene_wait(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        assert_int_equal(errno, EINTR);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int scene(void (*play)(void)) { return scene_wait(scene_start(play, -1, -1)); }

int scenes(void (*first)(void), void (*second)(void), int first_status) {
    int sockets[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    pid_t one = scene_start(first, sockets[0], sockets[1]), two = scene_start(second, sockets[1], sockets[0]);
    close(sockets[0]);
    close(sockets[1]);
    int status = scene_wait(two);
    assert_int_equal(scene_wait(one), first_status);
    return status;
}

static char *mistakes(void) {
    char path[512];
    snprintf(path, sizeof(path), "%s/mistakes", harness_directory);
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    char *text = calloc(1, 65536);
    if (file)
        text[fread(text, 1, 65535, file)] = 0;
    return text;
}

bool mistake_says(const char *text) {
    CLEANUP(freep) char *all = mistakes();
    return strstr(all, text) != NULL;
}

bool mistakes_none(void) {
    CLEANUP(freep) char *all = mistakes();
    return !*all;
}

void file_make(const char *name, const char *text) {
    char path[512], temporary[600];
    snprintf(path, sizeof(path), "%s/%s", harness_directory, name);
    snprintf(temporary, sizeof(temporary), "%s.new", path);
    FILE *file = fopen(temporary, "we");
    fputs(text, file);
    fclose(file);
    rename(temporary, path);
}

void file_remove(const char *name) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", harness_directory, name);
    unlink(path);
}

bool file_is_there(const char *name) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", harness_directory, name);
    return access(path, F_OK) == 0;
}

void scene_check(bool good, const char *text, const char *file, int line) {
    if (good)
        return;
    fprintf(stderr, "%s:%d: not so: %s\n", file, line, text);
    _exit(SCENE_FAILED);
}

void scene_gives(CUresult expected, CUresult found, const char *text, const char *file, int line) {
    if (expected == found)
        return;
    fprintf(stderr, "%s:%d: %s gives %d, not %d\n", file, line, text, found, expected);
    _exit(SCENE_FAILED);
}

CUcontext context_begin(void) {
    CUcontext context;
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxPushCurrent_v2(context));
    return context;
}

void context_finish(void) {
    OK(cu.cuCtxPopCurrent_v2(NULL));
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
}

CUdeviceptr device_filled(size_t size, unsigned char value) {
    CUdeviceptr pointer;
    OK(cu.cuMemAlloc_v2(&pointer, size));
    OK(cu.cuMemsetD8_v2(pointer, value, size));
    return pointer;
}

bool bytes_are(const void *memory, unsigned char value, size_t size) {
    const unsigned char *bytes = memory;
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != value)
            return false;
    }
    return true;
}

void peer_send(const void *data, size_t size) { CHECK(send(peer, data, size, MSG_NOSIGNAL) == (ssize_t)size); }

void peer_receive(void *data, size_t size) { CHECK(recv(peer, data, size, 0) == (ssize_t)size); }

union descriptor_space {
    struct cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
};

void peer_send_fd(int fd) {
    union descriptor_space control = {0};
    char nothing = 0;
    struct iovec byte = {.iov_base = &nothing, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    control.header =
        (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
    CHECK(sendmsg(peer, &message, MSG_NOSIGNAL) == 1);
}

int peer_receive_fd(void) {
    union descriptor_space control = {0};
    char byte;
    struct iovec into = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &into, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    CHECK(recvmsg(peer, &message, MSG_CMSG_CLOEXEC) == 1);
    CHECK(CMSG_FIRSTHDR(&message));
    int fd;
    memcpy(&fd, CMSG_DATA(&control.header), sizeof(fd));
    return fd;
}

void peer_meet(void) {
    char byte = 0;
    peer_send(&byte, 1);
    peer_receive(&byte, 1);
}
