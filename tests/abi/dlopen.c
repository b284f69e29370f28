/* SPDX-License-Identifier: Apache-2.0 */
/* The library can be loaded, asked and unloaded, as languages other than C do; fork works after. */
#include <ckpt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int load_and_unload(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const char *(*version)(void) = NULL;
    int (*open_job)(const char *, const struct ckpt_open_options *, ckpt **) = NULL;
    const char *(*last)(void) = NULL;
    *(void **)&version = dlsym(library, "ckpt_version");
    *(void **)&open_job = dlsym(library, "ckpt_open");
    *(void **)&last = dlsym(library, "ckpt_strerror_last");
    if (!version || !open_job || !last)
        return 1;
    ckpt *c = NULL;
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.socket = "/nonexistent/socket";
    options.open_timeout_ms = CKPT_NO_WAIT;
    int failed = strcmp(version(), "0.1.0") != 0 || open_job("job", &options, &c) != CKPT_E_UNREACHABLE ||
                 !strstr(last(), "/nonexistent/socket");
    return dlclose(library) != 0 || failed;
}

int main(int argc, char **argv) {
    unsetenv("CKPTD_PROGRAM");
    for (int i = 0; i < 3; i++)
        if (argc < 2 || load_and_unload(argv[1]))
            return 1;
    pid_t child = fork(); /* no handler of the unloaded library is left */
    if (child == 0)
        _exit(0);
    int status = 1;
    return waitpid(child, &status, 0) != child || status != 0;
}
