/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration: what a good file means, the sentence for each kind of mistake, and that the
 * example and the manual page say what the table says. SOURCE_ROOT is the source tree. */
#include "base/log.h"
#include "tiers/config.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>

/* clang-format off: cmocka.h wants the ones above before it */
#include <cmocka.h>
/* clang-format on */

static void parse_good(const char *text, struct config *ret_config) {
    struct problem problem = PROBLEM_NONE;
    int r = config_parse(text, "f", ret_config, &problem);
    if (r != 0)
        print_error("%s\n", problem_text(&problem, r));
    assert_int_equal(r, 0);
}

static void test_defaults(void **state) {
    struct config config;
    parse_good("", &config);
    char path[64];
    snprintf(path, sizeof path, "/var/tmp/ckptd-%u/local", (unsigned)geteuid());
    assert_string_equal(config.loop, "auto");
    assert_int_equal(config.log_level, LOG_LEVEL_INFO);
    assert_string_equal(config.log_file, "");
    assert_true(config.capture_threads >= 1);
    assert_int_equal(config.codec_threads, config.capture_threads);
    assert_int_equal(config.nice, 0);
    assert_int_equal(config.stop_grace_ms, 30000);
    assert_int_equal(config.idle_exit_ms, 600000);
    assert_int_equal(config.pool_size, 0);
    assert_int_equal(config.pool_percent, 25);
    assert_int_equal(config.chunk_size, MIB(4));
    assert_true(config.prefault);
    assert_int_equal(config.settle_ms, 30000);
    assert_int_equal(config.takeover_ms, 60000);
    assert_int_equal(config.tier_ms, 60000);
    assert_int_equal(config.capture_ms, 60000);
    assert_int_equal(config.device_ms, 30000);
    assert_true(config.device_use);
    assert_int_equal(config.arena_size, 0);
    assert_int_equal(config.device_piece, MIB(16));
    assert_int_equal(config.device_rate_mib_s, 0);
    assert_true(config.device_pin);
    assert_int_equal(config.tier_count, 1);
    const struct config_tier *tier = &config.tiers[0];
    assert_string_equal(tier->name, "local");
    assert_string_equal(tier->path, path);
    assert_int_equal(tier->level, LEVEL_LOCAL);
    assert_int_equal(tier->codec, CODEC_RAW);
    assert_int_equal(tier->depth, 8);
    assert_int_equal(tier->workers, 8);
    assert_int_equal(tier->rate_mib_s, 0);
    assert_int_equal(tier->keep, 2);
    assert_int_equal(tier->keep_every, 0);
    assert_int_equal(tier->trash_grace_ms, 60000);
    assert_int_equal(tier->backlog, 8);
    assert_false(tier->buffered || tier->allow_network);
    assert_int_equal(tier->file_mode | tier->directory_mode, 0);
    assert_string_equal(tier->fault, "");
    assert_int_equal(tier->delay_ms, 0);

    struct config_tier job;
    config_tier_default("parallel", "/scratch/x", LEVEL_GLOBAL, &job);
    assert_string_equal(job.name, "parallel");
    assert_string_equal(job.path, "/scratch/x");
    assert_int_equal(job.keep, 3);
    assert_int_equal(job.depth, 8);
}

static void test_all_keys(void **state) {
    struct config config;
    parse_good("# a comment\n"
               "; another\n"
               "[daemon]\r\n"
               "  loop = posix\n"
               "log_level=debug\n"
               "log_file = /var/log/a b//\n"
               "capture_threads = 3\ncodec_threads = 2\nnice = -5\nprocessors = 0-2,7\n"
               "stop_grace_s = 0.25\nidle_exit_s = 7\n"
               "[tier deep-1]\n"
               "role = parallel\npath = /scratch/%U/%%/ckptd/\ncodec = lz4\ndepth = 16\nworkers = 2\nrate_mib_s = 100\n"
               "keep = 9\nkeep_every = 1000\ntrash_grace_s = 1.5\nbacklog = 4\nbuffered = yes\nallow_network = yes\n"
               "file_mode = 0640\ndirectory_mode = 750\nfault = write:3:eio\ndelay_ms = 12\n"
               "[pool]\nsize = 16G\nchunk_size = 256K\nprefault = no\n"
               "[device]\nuse = no\narena = 2G\npiece = 32M\nrate_mib_s = 5\npin = no\n"
               "[tier near]\npath = /nvme/.ckptd\nrole = local\n"
               "[deadlines]\nsettle_s = 1\ntakeover_s = 2\ntier_s = 3\ncapture_s = 4\ndevice_s = 5",
               &config);
    assert_string_equal(config.file, "f");
    assert_string_equal(config.loop, "posix");
    assert_int_equal(config.log_level, LOG_LEVEL_DEBUG);
    assert_string_equal(config.log_file, "/var/log/a b");
    assert_int_equal(config.capture_threads, 3);
    assert_int_equal(config.codec_threads, 2);
    cpu_set_t processors;
    assert_true(config_processors(config.processors, &processors));
    for (size_t i = 0; i < CPU_SETSIZE; i++)
        assert_int_equal(CPU_ISSET(i, &processors) != 0, i <= 2 || i == 7);
    assert_int_equal(config.nice, -5);
    assert_int_equal(config.stop_grace_ms, 250);
    assert_int_equal(config.idle_exit_ms, 7000);
    assert_int_equal(config.pool_size, GIB(16));
    assert_int_equal(config.chunk_size, KIB(256));
    assert_false(config.prefault);
    assert_int_equal(config.settle_ms, 1000);
    assert_int_equal(config.takeover_ms, 2000);
    assert_int_equal(config.tier_ms, 3000);
    assert_int_equal(config.capture_ms, 4000);
    assert_int_equal(config.device_ms, 5000);
    assert_false(config.device_use);
    assert_int_equal(config.arena_size, GIB(2));
    assert_int_equal(config.device_piece, MIB(32));
    assert_int_equal(config.device_rate_mib_s, 5);
    assert_false(config.device_pin);
    assert_int_equal(config.tier_count, 2);
    assert_string_equal(config.tiers[0].name, "near");
    assert_string_equal(config.tiers[0].path, "/nvme/.ckptd");
    assert_int_equal(config.tiers[0].keep, 2);
    const struct config_tier *tier = &config.tiers[1];
    char path[64];
    snprintf(path, sizeof path, "/scratch/%u/%%/ckptd", (unsigned)geteuid());
    assert_string_equal(tier->name, "deep-1");
    assert_string_equal(tier->path, path);
    assert_int_equal(tier->level, LEVEL_GLOBAL);
    assert_int_equal(tier->codec, CODEC_LZ4);
    assert_int_equal(tier->depth, 16);
    assert_int_equal(tier->workers, 2);
    assert_int_equal(tier->rate_mib_s, 100);
    assert_int_equal(tier->keep, 9);
    assert_int_equal(tier->keep_every, 1000);
    assert_int_equal(tier->trash_grace_ms, 1500);
    assert_int_equal(tier->backlog, 4);
    assert_true(tier->buffered && tier->allow_network);
    assert_int_equal(tier->file_mode, 0640);
    assert_int_equal(tier->directory_mode, 0750);
    assert_string_equal(tier->fault, "write:3:eio");
    assert_int_equal(tier->delay_ms, 12);
}

#define LOCAL "[tier a]\nrole = local\npath = /a\n"

static const struct {
    const char *text, *sentence;
} mistakes[] = {
    {"[deamon]\n",
     "f:1: no such section as [deamon]; there are [daemon], [pool], [device], [tier NAME] and [deadlines]"},
    {"\n\n[daemon\n", "f:3: a section is [name] and nothing after it"},
    {"[daemon] # x\n", "f:1: a section is [name] and nothing after it"},
    {"[daemon] ]\n", "f:1: a section is [name] and nothing after it"},
    {"[]\n", "f:1: no such section as []; there are"},
    {"[\n", "f:1: a section is [name] and nothing after it"},
    {"[pool]\n[daemon]\n[pool]\n", "f:3: there is already a section [pool]"},
    {"[tier]\n", "f:1: a tier's section is [tier NAME]"},
    {"[tier a/b]\n", "f:1: a tier's section is [tier NAME]"},
    {"[tier aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]\n", "f:1: a tier's section is [tier NAME]"},
    {LOCAL "[tier a]\n", "f:4: there is already a [tier a] in line 1"},
    {"loop = auto\n", "f:1: \"loop\" stands before the first [section]"},
    {"[daemon]\nfoo\n", "f:2: expected [section], key = value, or a comment"},
    {"[daemon]\nloop: auto\n", "f:2: expected [section], key = value, or a comment"},
    {"[daemon]\nloop = posix ; or not\n", "f:2: a comment must have a line of its own"},
    {"[daemon]\nlog_file = /a #b\n", "f:2: a comment must have a line of its own"},
    {"[daemon]\n\nnice ;= 3\n", "f:3: a comment must have a line of its own"},
    {"[daemon]\nloop = posix\n  auto\n", "f:3: expected [section], key = value, or a comment"},
    {"[daemon]\nlop = posix\n", "f:2: no such key as \"lop\" in [daemon]; there are loop, log_level,"},
    {"[daemon]\nsize = 1G\n", "f:2: no such key as \"size\" in [daemon]"},
    {"[daemon]\n= 1G\n", "f:2: no such key as \"\" in [daemon]"},
    {"[daemon]\nloop =\n", "f:2: loop has no value"},
    {"[daemon]\nloop = posix\nloop = posix\n", "f:3: loop is set twice in this section"},
    {"[daemon]\nloop = epoll\n", "f:2: loop must be auto, uring or posix, but is \"epoll\""},
    {"[daemon]\nlog_level = 7\n", "f:2: log_level must be error, warning, info or debug, but is \"7\""},
    {"[daemon]\nlog_file = log\n", "f:2: log_file must be an absolute path, but is \"log\""},
    {"[daemon]\ncapture_threads = 0\n", "f:2: capture_threads must be at least 1, but is 0"},
    {"[daemon]\ncapture_threads = 257\n", "f:2: capture_threads must be at most 256, but is 257"},
    {"[daemon]\ncapture_threads = 2x\n", "f:2: capture_threads must be a number, but is \"2x\""},
    {"[daemon]\ncapture_threads = -1\n", "f:2: capture_threads must be a number, but is \"-1\""},
    {"[daemon]\ncapture_threads = 99999999999999999999\n", "f:2: capture_threads must be a number"},
    {"[daemon]\nnice = -21\n", "f:2: nice must be at least -20, but is -21"},
    {"[daemon]\nnice = --2\n", "f:2: nice must be a number, but is \"--2\""},
    {"[daemon]\nprocessors = all\n",
     "f:2: processors must be numbers and ranges of processors (such as 0-3,8) below 1024, but is \"all\""},
    {"[daemon]\nprocessors = 3-1\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nprocessors = 1,\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nprocessors = 1-\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nprocessors = 1-2-3\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nprocessors = -1\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nprocessors = 1024\n", "f:2: processors must be numbers and ranges"},
    {"[daemon]\nstop_grace_s = 30s\n", "f:2: stop_grace_s must be seconds (such as 30 or 0.5), but is \"30s\""},
    {"[daemon]\nstop_grace_s = 1.2345\n", "f:2: stop_grace_s must be seconds"},
    {"[daemon]\nstop_grace_s = 1.\n", "f:2: stop_grace_s must be seconds"},
    {"[daemon]\nstop_grace_s = 1e9\n", "f:2: stop_grace_s must be seconds"},
    {"[daemon]\nstop_grace_s = 99999999999\n", "f:2: stop_grace_s must be at most 31536000, but is 99999999999"},
    {"[deadlines]\ntier_s = 0.5\n", "f:2: tier_s must be at least 1, but is 0.5"},
    {"[deadlines]\ncapture_s = 0\n", "f:2: capture_s must be at least 1, but is 0"},
    {"[pool]\nsize = 0%\n", "f:2: size must be 1% to 90%, but is \"0%\""},
    {"[pool]\nsize = 91%\n", "f:2: size must be 1% to 90%, but is \"91%\""},
    {"[pool]\nsize = %\n", "f:2: size must be 1% to 90%, but is \"%\""},
    {"[pool]\nsize = 12X\n", "f:2: size must be bytes (with K, M, G or T) or a percentage, but is \"12X\""},
    {"[pool]\nsize = 1GiB\n", "f:2: size must be bytes"},
    {"[pool]\nsize = 9999999999T\n", "f:2: size must be bytes"},
    {"[pool]\nsize = 4K\n", "f:2: size must be at least 1048576, but is 4K"},
    {"[pool]\nsize = 4M\n", "f: the pool (4194304 bytes) must hold at least two chunks of 4194304 bytes"},
    {"[pool]\nchunk_size = 128K\n", "f:2: chunk_size must be a multiple of 256K, but is 128K"},
    {"[pool]\nchunk_size = 0\n", "f:2: chunk_size must be at least 262144, but is 0"},
    {"[pool]\nchunk_size = 300K\n", "f:2: chunk_size must be a multiple of 256K, but is 300K"},
    {"[pool]\nchunk_size = 65M\n", "f:2: chunk_size must be at most 67108864, but is 65M"},
    {"[pool]\nprefault = true\n", "f:2: prefault must be yes or no, but is \"true\""},
    {"\n[tier a]\npath = /a\n", "f:2: [tier a] has no role (local or parallel)"},
    {"[tier a]\nrole = local\n", "f:1: [tier a] has no path"},
    {"[tier a]\n", "f:1: [tier a] has no role (local or parallel)"},
    {"[tier a]\nrole = global\n", "f:2: role must be local or parallel, but is \"global\""},
    {"[tier a]\npath = a/b\n", "f:2: path must be an absolute path, but is \"a/b\""},
    {"[tier a]\npath = /a/../b\n", "f:2: path must be a path without \".\" and \"..\", but is \"/a/../b\""},
    {"[tier a]\npath = /a/.\n", "f:2: path must be a path without"},
    {"[tier a]\npath = /a/%d\n", "f:2: path has %d, but only %u, %U and %% are known"},
    {"[tier a]\npath = /a/%\n", "f:2: path has %, but only %u, %U and %% are known"},
    {"[tier a]\ncodec = zstd\n", "f:2: codec must be raw, lz4 or auto, but is \"zstd\""},
    {"[tier a]\nfile_mode = rw\n", "f:2: file_mode must be octal permissions such as 0750, but is \"rw\""},
    {"[tier a]\nfile_mode = 0440\n", "f:2: file_mode must hold 0600 and nothing above 0777, but is 0440"},
    {"[tier a]\ndirectory_mode = 2770\n", "f:2: directory_mode must hold 0700 and nothing above 0777, but is 2770"},
    {"[tier a]\nfault = write:x\n", "f:2: fault is wrong: "},
    {"[tier a]\ndelay_ms = 600001\n", "f:2: delay_ms must be at most 600000, but is 600001"},
    {LOCAL "[tier b]\nrole = local\npath = /b\n",
     "f:4: [tier b] has the role of [tier a]; there is one tier of each role"},
    {LOCAL "[tier b]\nrole = parallel\npath = /a\n",
     "f:4: [tier b] and [tier a] lie in the same directory or one in the other"},
    {LOCAL "[tier b]\nrole = parallel\npath = /a/b\n",
     "f:4: [tier b] and [tier a] lie in the same directory or one in the other"},
};

static void test_mistakes(void **state) {
    for (size_t i = 0; i < ARRAY_SIZE(mistakes); i++) {
        struct config config = {.nice = 77};
        struct problem problem = PROBLEM_NONE;
        int r = config_parse(mistakes[i].text, "f", &config, &problem);
        if (r != -EINVAL || strncmp(problem.text, mistakes[i].sentence, strlen(mistakes[i].sentence)) != 0)
            fail_msg("\"%s\" gives %d \"%s\" instead of \"%s\"", mistakes[i].text, r, problem.text,
                     mistakes[i].sentence);
        assert_int_equal(config.nice, 77);
        assert_int_equal(config_parse(mistakes[i].text, "f", &config, NULL), -EINVAL);
    }
}

static void test_siblings_do_not_nest(void **state) {
    struct config config;
    parse_good(LOCAL "[tier b]\nrole = parallel\npath = /ab\n", &config);
}

static void test_long_line(void **state) {
    char text[8192] = "[daemon]\nlog_file = /";
    size_t length = strlen(text);
    memset(text + length, 'x', sizeof text - length - 1);
    text[sizeof text - 1] = '\0';
    struct config config;
    struct problem problem = PROBLEM_NONE;
    assert_int_equal(config_parse(text, "f", &config, &problem), -EINVAL);
    assert_non_null(strstr(problem.text, "f:2: the line is longer than "));
}

static char *slurp(const char *path) {
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    if (!file)
        fail_msg("cannot open %s", path);
    char *text = calloc(1, KIB(256));
    assert_true(fread(text, 1, KIB(256) - 1, file) > 0);
    return text;
}

static char *example(void) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    assert_int_equal(config_example(out), 0);
    fclose(out);
    return text;
}

static void test_example(void **state) {
    CLEANUP(freep) char *text = example();
    struct config config, defaults;
    memset(&config, 0, sizeof config);
    memset(&defaults, 0, sizeof defaults);
    parse_good(text, &config);
    parse_good("", &defaults);
    assert_int_equal(config.tier_count, 1);
    assert_int_not_equal(config.tiers[0].line, 0);
    config.tiers[0].line = 0; /* the default comes from no line */
    assert_memory_equal(&config.tiers[0], &defaults.tiers[0], sizeof config.tiers[0]);
    assert_int_equal(config.pool_percent, defaults.pool_percent);

    /* Every key, uncommented, is accepted. */
    for (char *at = text; (at = strstr(at, "\n#")); at++) {
        size_t name = strspn(at + 2, "abcdefghijklmnopqrstuvwxyz_");
        if (name && strncmp(at + 2 + name, " = ", 3) == 0)
            at[1] = ' ';
        else if (strncmp(at + 2, "[tier", 5) == 0)
            at[1] = ' ';
    }
    parse_good(text, &config);
    assert_int_equal(config.tier_count, 2);

    CLEANUP(freep) char *shipped = slurp(SOURCE_ROOT "/systemd/ckptd.conf");
    CLEANUP(freep) char *again = example();
    if (strcmp(shipped, again) != 0)
        fail_msg("systemd/ckptd.conf is not what config_example() writes: ckptctl config --example > it");
}

/* In ckptd.conf(5) a key is a line of its own, "*key* = ...", below the heading of its section. */
static void test_manual(void **state) {
    CLEANUP(freep) char *manual = slurp(SOURCE_ROOT "/man/ckptd.conf.5.scd");
    CLEANUP(freep) char *text = example();
    size_t keys = 0;
    bool second = false;
    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[64], value[128], expected[256];
        line += line[0] == '#';
        second |= strcmp(line, "[tier parallel]") == 0; /* an example that repeats keys */
        second &= strcmp(line, "[deadlines]") != 0;
        if (second || sscanf(line, "%63[a-z_] = %127[^\n]", name, value) != 2)
            continue;
        keys++;
        snprintf(expected, sizeof expected, "\n*%s* = _", name);
        char *entry = strstr(manual, expected);
        if (!entry)
            fail_msg("ckptd.conf(5) lacks the key %s", name);
        entry[1] = '!';
    }
    assert_true(keys > 20);
    for (char *extra = manual; (extra = strstr(extra, "\n*")); extra++) {
        size_t name = strspn(extra + 2, "abcdefghijklmnopqrstuvwxyz_");
        if (strncmp(extra + 2 + name, "* = _", 5) == 0)
            fail_msg("ckptd.conf(5) has a key %.*s that is not in the table", (int)name, extra + 2);
    }
}

/* ---- files ---- */

static char directory[64];

static void write_file(const char *name, const char *text, size_t size) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    CLEANUP(fclosep) FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
}

static int set_up(void **state) {
    snprintf(directory, sizeof directory, "%s/ckptd-config.XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    assert_non_null(mkdtemp(directory));
    unsetenv("CKPTD_CONFIG");
    unsetenv("XDG_CONFIG_HOME");
    setenv("HOME", directory, 1);
    return 0;
}

static int tear_down(void **state) {
    static const char *const names[] = {"a.conf", "nul.conf", ".config/ckptd/ckptd.conf", "ckptd/ckptd.conf"};
    static const char *const directories[] = {".config/ckptd", ".config", "ckptd", ""};
    char path[256];
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        unlink(path);
    }
    for (size_t i = 0; i < ARRAY_SIZE(directories); i++) {
        snprintf(path, sizeof path, "%s/%s", directory, directories[i]);
        rmdir(path);
    }
    return 0;
}

static void make_directory(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void test_search(void **state) {
    struct config config;
    struct problem problem = PROBLEM_NONE;
    char path[256], expected[512];

    make_directory(".config");
    make_directory(".config/ckptd");
    write_file(".config/ckptd/ckptd.conf", "[daemon]\nnice = 1\n", 18);
    assert_int_equal(config_load(NULL, &config, &problem), 0);
    assert_int_equal(config.nice, 1);
    snprintf(path, sizeof path, "%s/.config/ckptd/ckptd.conf", directory);
    assert_string_equal(config.file, path);

    make_directory("ckptd");
    write_file("ckptd/ckptd.conf", "[daemon]\nnice = 2\n", 18);
    setenv("XDG_CONFIG_HOME", directory, 1);
    assert_int_equal(config_load(NULL, &config, &problem), 0);
    assert_int_equal(config.nice, 2);

    write_file("a.conf", "[daemon]\nnice = 3\n", 18);
    snprintf(path, sizeof path, "%s/a.conf", directory);
    setenv("CKPTD_CONFIG", path, 1);
    assert_int_equal(config_load(NULL, &config, &problem), 0);
    assert_int_equal(config.nice, 3);

    setenv("CKPTD_CONFIG", "/nonexistent/x", 1);
    assert_int_equal(config_load(path, &config, &problem), 0);
    assert_int_equal(config_load(NULL, &config, &problem), -EINVAL);
    assert_string_equal(problem.text, "/nonexistent/x: no such file (CKPTD_CONFIG names it)");

    problem = PROBLEM_NONE;
    assert_int_equal(config_load("/nonexistent/y", &config, &problem), -EINVAL);
    assert_string_equal(problem.text, "/nonexistent/y: no such file (--config names it)");

    problem = PROBLEM_NONE;
    assert_int_equal(config_load(directory, &config, &problem), -EINVAL);
    snprintf(expected, sizeof expected, "%s: cannot be read: Is a directory", directory);
    assert_memory_equal(problem.text, expected, strlen(expected));

    problem = PROBLEM_NONE;
    write_file("nul.conf", "[daemon]\n\0nice = 1\n", 19);
    snprintf(path, sizeof path, "%s/nul.conf", directory);
    assert_int_equal(config_load(path, &config, &problem), -EINVAL);
    assert_non_null(strstr(problem.text, "nul.conf: has a NUL byte"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),  cmocka_unit_test(test_all_keys),
        cmocka_unit_test(test_mistakes),  cmocka_unit_test(test_siblings_do_not_nest),
        cmocka_unit_test(test_long_line), cmocka_unit_test(test_example),
        cmocka_unit_test(test_manual),    cmocka_unit_test_setup_teardown(test_search, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
