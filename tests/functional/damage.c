/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes that change where nobody wrote: in the daemon's memory, and in every file of both tiers. All of
 * them are found, told, and repaired where another copy is good.
 */
#include "tests/functional/versions.h"
#include "tiers/catalog.h"
#include "tiers/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>

static const char *const tiers[] = {"local", "parallel"};

static void check_step(ckpt *c, uint64_t step) { words_check_step(c, step, WORDS, step); }

/* verify finds nothing bad, in any of the two roots. */
static void check_verified(const char *job) {
    ctl(0, "verify %s --all --root '%s' --root '%s'", job, test_path("local"), test_path("parallel"));
    CHECK(ctl_said("out", " 0 bad, 0 repaired"));
}

/* ---- in files ---- */

enum file { DATA, MANIFEST, INDEX, FILES };
enum change { FLIP, CUT, EXTEND, REMOVE, DIRECTORY, LINK };

/* `at`: the byte to flip, the bytes to cut or to add; negative: counted from the end; ANYWHERE: drawn. */
#define ANYWHERE INT32_MIN
static const struct {
    enum change change;
    int32_t at;
} changes[] = {
    {FLIP, 0},        {FLIP, 9},   {FLIP, 4095},     {FLIP, 4096}, {FLIP, 262143},  {FLIP, 262144},
    {FLIP, -1},       {FLIP, -2},  {FLIP, ANYWHERE}, {CUT, 1},     {CUT, ANYWHERE}, {EXTEND, 1},
    {EXTEND, 262144}, {REMOVE, 0}, {DIRECTORY, 0},   {LINK, 0},
};

static const char *version_file(const char *tier, const char *job, uint64_t step, enum file file) {
    static const char *const names[] = {"rank-00000.safetensors", "rank-00000.json", "complete.json"};
    const char *encoded = test_path("%s/%s/1/%llu/rank-00000.chunks", tier, job, (unsigned long long)step);
    if (file == DATA && file_exists(encoded))
        return encoded;
    return test_path("%s/%s/1/%llu/%s", tier, job, (unsigned long long)step, names[file]);
}

static void flip_bits(const char *path, off_t offset, uint8_t bits) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    CHECK(fd >= 0 && pread(fd, &byte, 1, offset) == 1);
    byte ^= bits;
    CHECK(pwrite(fd, &byte, 1, offset) == 1);
    close(fd);
}

static uint8_t one_bit(void) { return (uint8_t)(1 << random_number(8)); }

/* Bytes between encoded chunks belong to nobody. */
static bool is_padding(const struct manifest *manifest, uint64_t offset) {
    for (size_t i = 0; i < manifest->chunk_count; i++)
        if (offset >= manifest->chunks[i].offset &&
            offset < manifest->chunks[i].offset + manifest->chunks[i].stored_length)
            return false;
    return true;
}

static struct tier *open_tier(const char *name) {
    struct tier_posix_options options = {.name = name, .root = test_path("%s", name), .level = LEVEL_GLOBAL};
    struct tier *tier = NULL;
    struct problem problem = PROBLEM_NONE;
    if (tier_posix_new(&options, &tier, &problem))
        FAIL("%s", problem.text);
    return tier;
}

static struct manifest read_manifest(struct tier *tier, const char *job, uint64_t step) {
    struct manifest manifest;
    struct problem problem = PROBLEM_NONE;
    if (catalog_read_manifest(tier, job, (struct version_id){1, step}, 0, &manifest, &problem))
        FAIL("%s", problem.text);
    return manifest;
}

/* Flips a bit in a file of an encoded part, which may decode to the same bytes all the same. */
static bool flip_encoded(struct tier *tier, const char *job, uint64_t step, const char *path, int64_t at) {
    struct problem ignored = PROBLEM_NONE;
    flip_bits(path, at, one_bit());
    return catalog_verify_part(tier, job, (struct version_id){1, step}, 0, &ignored) != 0;
}

/* False: it does no harm. */
static bool apply_flip(const char *tier_name, const char *job, uint64_t step, enum file file, int64_t at) {
    const char *path = version_file(tier_name, job, step, file);
    struct stat status;
    CHECK(stat(path, &status) == 0);
    if (at == ANYWHERE)
        at = (int64_t)random_number((uint64_t)status.st_size);
    else if (at < 0)
        at += status.st_size;
    if (at >= status.st_size)
        return false;
    struct tier *tier = open_tier(tier_name);
    struct manifest manifest = read_manifest(tier, job, step);
    bool encoded = file == DATA && manifest.summary.codec != CODEC_RAW, harmful = true;
    manifest_deinit(&manifest);
    if (encoded)
        harmful = flip_encoded(tier, job, step, path, at);
    else
        flip_bits(path, at, one_bit());
    tier_free(tier);
    return harmful;
}

/* False: it does no harm. */
static bool apply(const char *tier_name, const char *job, uint64_t step, enum file file, size_t change) {
    const char *path = version_file(tier_name, job, step, file);
    int64_t at = changes[change].at;
    struct stat status;
    CHECK(stat(path, &status) == 0);
    switch (changes[change].change) {
    case FLIP:
        return apply_flip(tier_name, job, step, file, at);
    case CUT:
        at = at == ANYWHERE ? (int64_t)random_number((uint64_t)status.st_size) : status.st_size - at;
        CHECK(truncate(path, at) == 0);
        return true;
    case EXTEND:
        CHECK(truncate(path, status.st_size + at) == 0);
        return true;
    case REMOVE:
        if (file == INDEX) /* then the version is not complete here, which is no damage */
            return false;
        CHECK(unlink(path) == 0);
        return true;
    case DIRECTORY:
        CHECK(unlink(path) == 0 && mkdir(path, 0777) == 0);
        return true;
    case LINK:
        CHECK(unlink(path) == 0 && symlink("nowhere", path) == 0);
        return true;
    }
    return false;
}

/* What `verify --json` found: "local 3" and so on, each once, sorted by step. */
static void check_findings(const char *text, unsigned steps, const int *expected_tier) {
    json_error_t error;
    json_t *root = json_loads(text, 0, &error), *finding;
    CHECK(root);
    unsigned *found = calloc(2 * (steps + 1), sizeof *found);
    size_t i;
    CHECK(found);
    json_array_foreach(json_object_get(root, "findings"), i, finding) {
        const char *label = json_string_value(json_object_get(finding, "root"));
        uint64_t step = (uint64_t)json_integer_value(json_object_get(finding, "step"));
        CHECK(label && step <= steps && json_string_value(json_object_get(finding, "problem"))[0]);
        found[2 * step + (strcmp(label, test_path("parallel")) == 0)]++;
    }
    for (uint64_t step = 1; step <= steps; step++)
        for (int tier = 0; tier < 2; tier++)
            if ((found[2 * step + tier] > 0) != (expected_tier[step] == tier))
                FAIL("step %llu: %u findings in %s, damaged is %s\n%s", (unsigned long long)step,
                     found[2 * step + tier], tiers[tier], expected_tier[step] < 0 ? "none" : tiers[expected_tier[step]],
                     text);
    free(found);
    json_decref(root);
}

/* Every change to every file, each in a version of its own; half of them in each tier, and the other halves on the
 * other loop. Nothing is missed, nothing else is blamed, every version restores meanwhile, and is repaired. */
static void every_change_is_found_and_repaired(void) {
    enum { STEPS = FILES * ARRAY_SIZE(changes) };
    const char *loop = getenv("CKPTD_LOOP");
    int damaged[STEPS + 1] = {-1}, in_tier[2] = {0};
    make_versions("rot", STEPS, "codec = lz4");
    for (unsigned step = 1; step <= STEPS; step++) {
        int tier = (step + (loop && strcmp(loop, "posix") == 0)) % 2;
        damaged[step] = apply(tiers[tier], "rot", step, (step - 1) % FILES, (step - 1) / FILES) ? tier : -1;
        if (damaged[step] >= 0)
            in_tier[tier]++;
    }
    CHECK(in_tier[0] > 5 && in_tier[1] > 5);
    ctl(1, "verify rot --all --json --root '%s' --root '%s'", test_path("local"), test_path("parallel"));
    char *out = file_read(test_path("out"), NULL);
    check_findings(out, STEPS, damaged);
    free(out);

    daemon_start();
    ckpt *c = open_protected("rot");
    struct ckpt_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_get_info(c, &info));
    CHECK(info.resumes && info.resume_step == STEPS);
    for (uint64_t step = 1; step <= STEPS; step++)
        if (damaged[step] == 0 || step == STEPS) /* the local one is read first */
            check_step(c, step);
    EVENTUALLY(status_number("tiers.0.damage.set_aside") > 0); /* those whose bytes were read and wrong */
    CHECK(status_number("tiers.0.damage.chunks_bad") > 0 && status_number("tiers.0.damage.repaired") == 0);
    CHECK(status_number("tiers.0.damage.copies_bad") >= status_number("tiers.0.damage.chunks_bad"));
    ctl(0, "status");
    CHECK(ctl_said("out", "tier local, damage: "));
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();

    ctl(0, "verify rot --all --repair --root '%s' --root '%s'", test_path("local"), test_path("parallel"));
    check_verified("rot");
    for (int without = 0; without < 2; without++) {
        configure(&(struct settings){
            .local = "keep = 1000", .parallel = "keep = 1000", .no_local = without == 0, .no_parallel = without == 1});
        daemon_start();
        c = open_protected("rot");
        for (uint64_t step = 1; step <= STEPS; step++)
            if (damaged[step] == 1 - without) /* the repaired copy is the only one now */
                check_step(c, step);
        CHECK(status_number("tiers.0.damage.set_aside") > 0);
        CHECK(status_number("tiers.0.damage.repaired") == status_number("tiers.0.damage.set_aside"));
        CHECK(status_number("tiers.0.damage.chunks_bad") == 0);
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
    }
}

/* One bit of each byte of what the daemon wrote, and each length: whatever reads the file refuses it. */
static void search_small_file(struct tier *tier, const char *job, enum file file) {
    const char *path = version_file(tier->name, job, 1, file);
    struct version_id id = {1, 1};
    size_t size;
    char *good = file_read(path, &size);
    for (size_t i = 0; i < 2 * size; i += i < size ? 1 : 3) {
        struct problem problem = PROBLEM_NONE;
        struct manifest manifest = {0};
        struct complete complete = {0};
        uint8_t bit = one_bit();
        if (i < size)
            flip_bits(path, (off_t)i, bit);
        else
            CHECK(truncate(path, (off_t)(i - size)) == 0);
        int r = file == INDEX ? catalog_read_complete(tier, job, id, &complete, &problem)
                              : catalog_read_manifest(tier, job, id, 0, &manifest, &problem);
        if (r != -EBADMSG || !strstr(problem.text, path))
            FAIL("%s, byte %zu %s: %d, %s", path, i % size, i < size ? "flipped" : "cut", r, problem.text);
        if (i < size)
            flip_bits(path, (off_t)i, bit);
        else
            file_write(path, good, size);
    }
    free(good);
}

/* The header with its padding closely, the rest at random. What is not found must do no harm: between encoded chunks
 * nothing matters, and now and then another encoding stands for the same bytes, which their digest proves. */
static void search_data_file(struct tier *tier, const char *job) {
    const char *path = version_file(tier->name, job, 1, DATA);
    struct manifest manifest = read_manifest(tier, job, 1);
    bool raw = manifest.summary.codec == CODEC_RAW;
    struct stat status;
    CHECK(stat(path, &status) == 0);
    unsigned tried = 0, harmless = 0;
    for (size_t i = 0; i < 400; i++) {
        off_t offset = (off_t)(i < 256 ? i * 16 + random_number(16) : random_number((uint64_t)status.st_size));
        struct problem problem = PROBLEM_NONE;
        uint8_t bit = one_bit();
        bool padding = is_padding(&manifest, (uint64_t)offset);
        flip_bits(path, offset, bit);
        int r = catalog_verify_part(tier, job, (struct version_id){1, 1}, 0, &problem);
        flip_bits(path, offset, bit);
        if (padding ? r != 0 : r != -EBADMSG && (raw || r != 0))
            FAIL("%s, byte %lld: %d, %s", path, (long long)offset, r, problem.text);
        tried += !padding;
        harmless += !padding && r == 0;
    }
    CHECK(tried > 200 && harmless < tried / 4);
    manifest_deinit(&manifest);
}

static void search_every_file(void) {
    make_versions("search", 1, "codec = lz4");
    for (int i = 0; i < 2; i++) {
        struct tier *tier = open_tier(tiers[i]);
        search_small_file(tier, "search", MANIFEST);
        search_small_file(tier, "search", INDEX);
        search_data_file(tier, "search");
        tier_free(tier);
    }
    check_verified("search");
}

/* ckptctl is killed at each of its fault points: the file is the bad one or the good one, the other tier is as it was,
 * and the next repair ends what this one began. */
static void interrupted_repair(void) {
    enum { KILLED = 128 + SIGKILL }; /* as the shell says it */
    make_versions("broken", 1, "");
    char repair[9000];
    snprintf(repair, sizeof repair, "verify broken --repair --root '%s' --root '%s'", test_path("local"),
             test_path("parallel"));
    struct tier *local = open_tier("local"), *parallel = open_tier("parallel");
    size_t size, size_now;
    char *good = file_read(version_file("local", "broken", 1, DATA), &size);
    unsigned nth = 0;
    for (int status = KILLED; status == KILLED;) {
        struct problem problem = PROBLEM_NONE;
        char where[32];
        off_t offset = (off_t)random_number(size);
        flip_bits(version_file("local", "broken", 1, DATA), offset, one_bit());
        char *bad = file_read(version_file("local", "broken", 1, DATA), NULL);
        snprintf(where, sizeof where, "any:%u", ++nth);
        setenv("CKPTD_CRASH_AT", where, 1);
        status = run_ctl(repair);
        unsetenv("CKPTD_CRASH_AT");
        if (status != KILLED && status != 0)
            FAIL("killed at point %u: status %d: %s", nth, status, file_read(test_path("err"), NULL));
        char *now = file_read(version_file("local", "broken", 1, DATA), &size_now);
        CHECK(size_now == size && (memcmp(now, good, size) == 0 || (status && memcmp(now, bad, size) == 0)));
        free(now);
        free(bad);
        int r = catalog_verify_part(local, "broken", (struct version_id){1, 1}, 0, &problem);
        CHECK(status ? r == 0 || r == -EBADMSG || r == TIER_E_ABSENT : r == 0);
        problem = PROBLEM_NONE;
        if (catalog_verify_part(parallel, "broken", (struct version_id){1, 1}, 0, &problem))
            FAIL("killed at point %u: %s", nth, problem.text);
        if (run_ctl(repair))
            FAIL("after a kill at point %u: %s", nth, file_read(test_path("err"), NULL));
        if (catalog_verify_part(local, "broken", (struct version_id){1, 1}, 0, &problem) ||
            catalog_check(local, "broken", (struct version_id){1, 1}, &problem))
            FAIL("after a kill at point %u and a repair: %s", nth, problem.text);
    }
    check_verified("broken");
    CHECK(nth > 10);
    free(good);
    tier_free(local);
    tier_free(parallel);
    daemon_start();
    ckpt *c = open_protected("broken");
    check_step(c, 1);
    EVENTUALLY(files_ending("local", ".tmp") == 0);
    CHECK_OK(ckpt_close(c));
}

/* ---- in memory ---- */

/* Flips one bit of each place in the daemon's pool that holds these bytes. Returns how many. */
static unsigned flip_in_pool(const void *wanted, size_t length) {
    char line[512];
    unsigned found = 0;
    snprintf(line, sizeof line, "/proc/%d/maps", daemon_pid());
    FILE *maps = fopen(line, "re");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        char access[8];
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, access) != 3 || strcmp(access, "rw-s") != 0 ||
            !strstr(line, "memfd:"))
            continue;
        char *copy = malloc(end - begin);
        struct iovec here = {copy, end - begin}, there = {(void *)begin, end - begin};
        CHECK(copy);
        if (process_vm_readv(daemon_pid(), &here, 1, &there, 1, 0) != (ssize_t)(end - begin))
            test_skip("the daemon's memory cannot be read here");
        for (char *at = copy; (at = memmem(at, (size_t)(copy + (end - begin) - at), wanted, length)); at += length) {
            char byte = (char)(*at ^ 1 << random_number(8));
            struct iovec from = {&byte, 1}, to = {(void *)(begin + (unsigned long)(at - copy)), 1};
            CHECK(process_vm_writev(daemon_pid(), &from, 1, &to, 1, 0) == 1);
            found++;
        }
        free(copy);
    }
    fclose(maps);
    return found;
}

/* A word of the last version, or a piece of its header, which names the tensor; in turn. */
static unsigned flip_somewhere(unsigned turn) {
    size_t i = random_number(WORDS);
    return turn % 3 == 2 ? flip_in_pool("\"words\":", 8) : flip_in_pool(&words[i], sizeof words[i]);
}

/* Between the capture and the drains: no tier gets a wrong byte, the program is told, and has its older version. */
static void bad_memory_before_the_drains(void) {
    static const char *const codecs[] = {"codec = raw", "codec = lz4", "codec = auto"};
    for (unsigned i = 0; i < ARRAY_SIZE(codecs); i++) {
        char local[64], job[16];
        snprintf(local, sizeof local, "delay_ms = 4\nkeep = 100\n%s", codecs[i]);
        snprintf(job, sizeof job, "memory-%u", i);
        configure(&(struct settings){.pool = "2M", .local = local, .no_parallel = true});
        daemon_start();
        ckpt *c = open_protected(job);
        words_fill(words, WORDS, 1);
        save_durable(c, 1, CKPT_LOCAL);
        uint64_t step = 1;
        int r = CKPT_OK;
        /* A drain that was faster than the flip has the right bytes; then again. */
        while (r == CKPT_OK && step < 50) {
            words_fill(words, WORDS, ++step);
            save_captured(c, step);
            flip_somewhere(i);
            r = ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS);
        }
        CHECK_IS(CKPT_E_IO, r);
        CHECK_SAYS("went bad in memory");
        CHECK(status_number("counters.chunks_bad") >= 1 && daemon_logged("went bad in memory"));
        CHECK(!file_exists(test_path("local/%s/1/%llu/rank-00000.json", job, (unsigned long long)step)));
        CHECK_OK(ckpt_save(c, step + 1, NULL));
        CHECK_SAYS("went bad in memory"); /* also who does not wait is told */
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
        ctl(0, "verify %s --all --root '%s'", job, test_path("local"));
        daemon_start();
        c = open_protected(job);
        check_step(c, step - 1);
        CHECK_OK(ckpt_close(c));
        daemon_stop_unused();
    }
}

/* After the first tier has it: the second gets it from there. */
static void bad_memory_between_the_drains(void) {
    configure(&(struct settings){.pool = "2M", .local = "keep = 100", .parallel = "delay_ms = 4\nkeep = 100"});
    daemon_start();
    ckpt *c = open_protected("between");
    uint64_t step = 0;
    do {
        words_fill(words, WORDS, ++step);
        save_captured(c, step);
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_PART, PATIENCE_MS));
        flip_somewhere((unsigned)step);
        CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    } while (!daemon_logged("went bad in memory") && step < 50);
    CHECK(daemon_logged("went bad in memory"));
    check_step(c, step);
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    check_verified("between");
}

/* What is in memory is digested again before a restore gets it. */
static void bad_memory_before_the_restore(void) {
    configure(&(struct settings){.pool = "2M", .local = "keep = 100", .no_parallel = true});
    daemon_start();
    ckpt *c = open_protected("restore");
    for (uint64_t step = 1; step <= 6; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        save_durable(c, step, CKPT_LOCAL);
        ckpt_restore *r = restore_step(c, step);
        CHECK(flip_in_pool(&words[random_number(WORDS)], sizeof words[0]) > 0);
        restore_words_check(r, "words", WORDS, step);
        CHECK(status_number("counters.chunks_bad") == (int64_t)step);
        ckpt_restore_close(r);
    }
    CHECK_OK(ckpt_close(c));
    daemon_stop_unused();
    ctl(0, "verify restore --all --root '%s'", test_path("local"));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(every_change_is_found_and_repaired),
        TEST(search_every_file),
        TEST(interrupted_repair),
        TEST(bad_memory_before_the_drains),
        TEST(bad_memory_between_the_drains),
        TEST(bad_memory_before_the_restore),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
