/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/versions.h"

#include <stdlib.h>
#include <sys/wait.h>

uint64_t words[WORDS];

ckpt *open_protected(const char *job) { return words_open(job, words, WORDS); }

void save_words(ckpt *c, uint64_t step) {
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    words_fill(words, WORDS, step);
    EVENTUALLY(ckpt_save(c, step, NULL) == CKPT_OK); /* there may be no room for a moment */
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
}

void make_versions(const char *job, unsigned steps, const char *parallel) {
    char settings[64];
    snprintf(settings, sizeof settings, "keep = 1000\n%s", parallel);
    configure(&(struct settings){.local = "keep = 1000", .parallel = settings});
    daemon_start();
    ckpt *c = open_protected(job);
    for (uint64_t step = 1; step <= steps; step++)
        save_words(c, step);
    EVENTUALLY(files_ending("local", "complete.json") == steps); /* GLOBAL may come before LOCAL */
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
}

int run_ctl(const char *arguments) {
    char command[12000];
    snprintf(command, sizeof command, "'%s' %s >'%s' 2>'%s'", getenv("CKPTCTL"), arguments, test_path("out"),
             test_path("err"));
    int status = system(command);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

void ctl(int expected, const char *format, ...) {
    char arguments[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    int status = run_ctl(arguments);
    if (status != expected)
        FAIL("ckptctl %s gave %d, not %d:\n%s\n%s", arguments, status, expected, file_read(test_path("out"), NULL),
             file_read(test_path("err"), NULL));
}

bool ctl_said(const char *file, const char *words_of_it) {
    char *text = file_read(test_path("%s", file), NULL);
    bool found = strstr(text, words_of_it);
    free(text);
    return found;
}
