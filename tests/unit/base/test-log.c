/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"
#include "tests/unit/base/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <regex.h>
#include <sys/stat.h>

#define TEXT_MAX 65536

struct fixture {
    int pipe[2];
    struct log log;
    char text[TEXT_MAX];
};

static int setup(void **state) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    if (pipe2(fixture->pipe, O_CLOEXEC | O_NONBLOCK) < 0)
        return -1;
    unsetenv("JOURNAL_STREAM");
    log_init(&fixture->log, fixture->pipe[1], LOG_LEVEL_INFO);
    *state = fixture;
    return 0;
}

static int teardown(void **state) {
    struct fixture *fixture = *state;
    close(fixture->pipe[0]);
    close(fixture->pipe[1]);
    free(fixture);
    return 0;
}

static const char *written(struct fixture *fixture) {
    ssize_t n = read(fixture->pipe[0], fixture->text, sizeof fixture->text - 1);
    fixture->text[n > 0 ? n : 0] = '\0';
    return fixture->text;
}

static void assert_matches(const char *text, const char *pattern) {
    regex_t regex;
    assert_int_equal(regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB), 0);
    int r = regexec(&regex, text, 0, NULL, 0);
    regfree(&regex);
    if (r != 0)
        fail_msg("'%s' does not match '%s'", text, pattern);
}

static void test_line(void **state) {
    struct fixture *fixture = *state;
    log_info(&fixture->log, "opened job=%s step=%d", "train", 7);
    assert_matches(
        written(fixture),
        "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z info opened job=train step=7\n$");
}

static void test_priorities(void **state) {
    struct fixture *fixture = *state;
    fixture->log.priorities = true;
    log_error(&fixture->log, "gone");
    log_warning(&fixture->log, "soon");
    assert_string_equal(written(fixture), "<3>error gone\n<4>warning soon\n");
}

static void test_level(void **state) {
    struct fixture *fixture = *state;
    log_debug(&fixture->log, "unheard");
    assert_string_equal(written(fixture), "");
    fixture->log.level = LOG_LEVEL_DEBUG;
    log_debug(&fixture->log, "heard");
    assert_matches(written(fixture), " debug heard\n$");
}

static void test_journal_is_recognised(void **state) {
    struct fixture *fixture = *state;
    struct stat status;
    char stream[64];
    assert_int_equal(fstat(fixture->pipe[1], &status), 0);
    snprintf(stream, sizeof stream, "%ju:%ju", (uintmax_t)status.st_dev, (uintmax_t)status.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    log_init(&fixture->log, fixture->pipe[1], LOG_LEVEL_INFO);
    assert_true(fixture->log.priorities);
    log_init(&fixture->log, STDIN_FILENO, LOG_LEVEL_INFO);
    assert_false(fixture->log.priorities);
    setenv("JOURNAL_STREAM", "nonsense", 1);
    log_init(&fixture->log, fixture->pipe[1], LOG_LEVEL_INFO);
    assert_false(fixture->log.priorities);
}

static void test_control_characters(void **state) {
    struct fixture *fixture = *state;
    fixture->log.priorities = true;
    log_info(&fixture->log, "job=%s", "a\n<3>error forged\x1b[2J\x7f\xc2\x9b\t\xc3\xa9");
    assert_string_equal(written(fixture), "<6>info job=a\\n<3>error forged\\x1b[2J\\x7f\\xc2\x9b\\x09\xc3\xa9\n");
}

static void test_long_line_is_cut(void **state) {
    struct fixture *fixture = *state;
    fixture->log.priorities = true;
    char name[8192];
    memset(name, '\n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    log_info(&fixture->log, "%s", name);
    const char *text = written(fixture);
    assert_matches(text, "\\\\n\\.\\.\\.\n$");
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

static void test_errno_survives(void **state) {
    struct fixture *fixture = *state;
    struct log nowhere;
    log_init(&nowhere, -1, LOG_LEVEL_INFO);
    errno = ENOSPC;
    log_info(&nowhere, "unheard");
    assert_int_equal(errno, ENOSPC);
    log_info(&fixture->log, "heard");
    assert_int_equal(errno, ENOSPC);
}

#define WRITERS 4
#define LINES_EACH 50

static void *write_lines(void *argument) {
    for (int i = 0; i < LINES_EACH; i++)
        log_info(argument, "thread line=%d end", i);
    return NULL;
}

static void test_lines_of_threads_do_not_mix(void **state) {
    struct fixture *fixture = *state;
    fixture->log.priorities = true;
    pthread_t threads[WRITERS];
    for (int i = 0; i < WRITERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, write_lines, &fixture->log), 0);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    written(fixture);
    int lines = 0;
    for (char *line = strtok(fixture->text, "\n"); line; line = strtok(NULL, "\n"), lines++)
        assert_matches(line, "^<6>info thread line=[0-9]+ end$");
    assert_int_equal(lines, WRITERS * LINES_EACH);
}

#define LOG_TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        LOG_TEST(test_line),
        LOG_TEST(test_priorities),
        LOG_TEST(test_level),
        LOG_TEST(test_journal_is_recognised),
        LOG_TEST(test_control_characters),
        LOG_TEST(test_long_line_is_cut),
        LOG_TEST(test_errno_survives),
        LOG_TEST(test_lines_of_threads_do_not_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
