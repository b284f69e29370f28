/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon is killed, thousands of times if there is time: at each named fault point (tiers/point.h), at the
 * nth point whichever it is, and at random moments, while crews (crew.h) save through two tiers with
 * retention. After each death the files of both tiers are verified, a new daemon starts, every rank
 * restores and compares every version that is listed, and goes on; then that daemon is the next to die.
 *
 * TORTURE_SECONDS is how long the random ones go on, TORTURE_POINT how the only points begin that are tried.
 */
#include "tests/functional/crew.h"
#include "tiers/point.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SECONDS = 2, POINT_STRIDE = 12 }; /* everything takes ten times as long: some points, and the others next time */
#else
enum { SECONDS = 6, POINT_STRIDE = 1 };
#endif
enum { POINT_PATIENCE_MS = 3000, AGAIN_PATIENCE_MS = 500, POINT_TRIES = 4, RUBBISH_STEPS = 8 };

static struct {
    struct tier *local, *parallel;
    unsigned deaths, at_points, versions_read, provoked;
    unsigned reached[POINT_COUNT];
    long log_read;
    uint64_t damaged; /* packed version of crew 0, in the tier local; 0: none */
} torture;

static void open_tiers(void) {
    struct problem problem = PROBLEM_NONE;
    const struct {
        const char *name;
        enum level level;
        struct tier **tier;
    } tiers[] = {{"local", LEVEL_LOCAL, &torture.local}, {"parallel", LEVEL_GLOBAL, &torture.parallel}};
    for (size_t i = 0; i < ARRAY_SIZE(tiers); i++) {
        const struct tier_posix_options options = {
            .name = tiers[i].name, .root = test_path("%s", tiers[i].name), .level = tiers[i].level};
        int r = tier_posix_new(&options, tiers[i].tier, &problem);
        if (r < 0)
            FAIL("%s", problem_text(&problem, r));
    }
}

/* Which points a daemon or ckptctl has died at since the last look. */
static void count_crashes(void) {
    char line[4096];
    FILE *log = fopen(test_path("log"), "re");
    CHECK(log && fseek(log, torture.log_read, SEEK_SET) == 0);
    while (fgets(line, sizeof line, log)) {
        line[strcspn(line, "\n")] = '\0';
        for (enum point point = 0; point < POINT_COUNT; point++)
            if (strncmp(line, "crash at ", 9) == 0 && strcmp(line + 9, point_name(point)) == 0) {
                torture.reached[point]++;
                torture.at_points++;
            }
    }
    torture.log_read = ftell(log);
    fclose(log);
}

/* ---- what makes a point be reached ---- */

static bool between(enum point point, enum point first, enum point last) { return point >= first && point <= last; }

static void make_file(const char *path, const char *text) { file_write(path, text, strlen(text)); }

/* The oldest complete version that the tier has besides newer ones, or (same) the newest that both have. */
static bool pick_version(struct tier *tier, struct tier *same, struct version_id *ret_id) {
    struct catalog catalog, other = {0};
    struct problem problem = PROBLEM_NONE;
    unsigned found = 0;
    CHECK(catalog_scan(tier, crew_job(0), &catalog, &problem) == 0);
    if (same)
        CHECK(catalog_scan(same, crew_job(0), &other, &problem) == 0);
    for (size_t i = catalog.version_count; i-- > 0;) {
        const struct catalog_version *twin = same ? catalog_find(&other, catalog.versions[i].id) : NULL;
        if (!catalog.versions[i].complete || (same && (!twin || !twin->complete)))
            continue;
        *ret_id = catalog.versions[i].id;
        if (++found && same)
            break;
    }
    catalog_deinit(&catalog);
    catalog_deinit(&other);
    return found > (same ? 0 : 1);
}

/* A pin that came between the choice and the rename: the version must be put back. */
static void pin_in_the_trash(void) {
    struct version_id id;
    if (!pick_version(torture.local, NULL, &id))
        return;
    const char *from = test_path("local/%s/%" PRIu64 "/%" PRIu64, crew_job(0), id.generation, id.step);
    make_file(test_path("local/%s/%" PRIu64 "/%" PRIu64 "/pin-late", crew_job(0), id.generation, id.step), "0\n");
    CHECK(rename(from, test_path("local/%s/trash-%" PRIu64 "-%" PRIu64 "-%016x", crew_job(0), id.generation, id.step,
                                 ++torture.provoked)) == 0);
}

static void unlink_pins(const char *directory, unsigned depth) {
    DIR *entries = opendir(directory);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        char path[4400];
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (strcmp(entry->d_name, "pin-late") == 0)
            CHECK(unlink(path) == 0);
        else if (entry->d_type == DT_DIR && entry->d_name[0] != '.' && depth < 3)
            unlink_pins(path, depth + 1);
    }
    if (entries)
        closedir(entries);
}

/* Rubbish where the next files of rank 0 will go. */
static void rubbish_ahead(const char *name, bool temporary) {
    struct version_id next = crew_next(0);
    struct stat status;
    char generation[512];
    snprintf(generation, sizeof generation, "%s", test_path("local/%s/%" PRIu64, crew_job(0), next.generation));
    if (stat(generation, &status) < 0)
        return;
    for (uint64_t step = next.step; step < next.step + (temporary ? 1 : RUBBISH_STEPS); step++) {
        char path[600];
        snprintf(path, sizeof path, "%s/%" PRIu64, generation, step);
        if (mkdir(path, 0777) < 0 && errno != EEXIST)
            FAIL("%s: %s", path, strerror(errno));
        snprintf(path, sizeof path, "%s/%" PRIu64 "/%s", generation, step, name);
        if (!file_exists(path))
            make_file(path, "rubbish\n");
    }
}

/* One wrong byte in a version that the other tier has, too. */
static void damage(void) {
    struct version_id id;
    if (torture.damaged || !pick_version(torture.local, torture.parallel, &id))
        return;
    static const char *const ends[] = {"safetensors", "chunks"};
    for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
        const char *path =
            test_path("local/%s/%" PRIu64 "/%" PRIu64 "/rank-00000.%s", crew_job(0), id.generation, id.step, ends[i]);
        if (!file_exists(path))
            continue;
        file_flip(path, 100); /* of the header or of the first encoded chunk; never of what is between chunks */
        torture.damaged = crew_pack(id);
    }
}

/* Before the daemon starts. */
static void provoke_files(enum point point) {
    unlink_pins(test_path("local/%s", crew_job(0)), 1);
    if (point == POINT_TRASH_PUT_BACK)
        pin_in_the_trash();
    else if (point == POINT_COMPLETE_SET_ASIDE)
        rubbish_ahead("complete.json", false);
    else if (point == POINT_TEMPORARY_REAPED)
        rubbish_ahead("rank-00000.00000000000000aa.data.tmp", true);
}

/* ckptctl, which dies at the point ("": it does not, and must succeed). Its exit status; negative: a signal. */
static int ckptctl(const char *crash_at, const char *verb, const char *version, const char *option) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        int log = open(test_path("log"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        setenv("CKPTD_CRASH_AT", crash_at, 1);
        if (log >= 0 && dup2(log, 1) >= 0 && dup2(log, 2) >= 0)
            execl(getenv("CKPTCTL"), "ckptctl", verb, crew_job(0), version, option, (char *)NULL);
        _exit(127);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static int verify_and_repair(const char *crash_at) {
    char version[48];
    struct version_id id = crew_unpack(torture.damaged);
    snprintf(version, sizeof version, "%" PRIu64 "/%" PRIu64, id.generation, id.step);
    return ckptctl(crash_at, "verify", version, "--repair");
}

/* Points of the operator's program; no daemon runs. */
static void operate(enum point point, const char *crash_at) {
    char version[48];
    struct version_id id;
    if (between(point, POINT_PIN_WRITTEN, POINT_PIN_REMOVED)) {
        CHECK(pick_version(torture.local, torture.parallel, &id));
        snprintf(version, sizeof version, "%" PRIu64 "/%" PRIu64, id.generation, id.step);
        int pinned = ckptctl(point == POINT_PIN_REMOVED ? "" : crash_at, "pin", version, NULL);
        torture.deaths += pinned == -SIGKILL;
        if (pinned != 0 && pinned != -SIGKILL) /* a loop of the kernel may hold the dead daemon's socket a while */
            return;
        int unpinned = ckptctl(point == POINT_PIN_REMOVED ? crash_at : "", "unpin", version, NULL);
        torture.deaths += unpinned == -SIGKILL;
    } else {
        damage();
        CHECK(torture.damaged);
        torture.deaths += verify_and_repair(crash_at) == -SIGKILL;
    }
}

/* After the last death: a second try of what it interrupted must do. */
static void repair(void) {
    if (!torture.damaged)
        return;
    int repaired = verify_and_repair("");
    if (repaired != 0)
        FAIL("ckptctl verify --repair ended with %d", repaired);
    torture.damaged = 0;
}

/* ---- one death ---- */

static bool daemon_has_died(void) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)daemon_pid(), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid;
}

/* What the crews do meanwhile: as a rule they go on; now and then they are killed or leave. */
static void disturb_crews(enum point point) {
    bool claim = between(point, POINT_RUN_DIRECTORY_MADE, POINT_RUN_PUBLISHED);
    for (unsigned crew = 0; crew < CREWS; crew++) {
        if (!claim && random_number(10))
            continue;
        crew_kill(crew);
        crew_start(crew);
    }
}

static void let_a_crew_leave(void) {
    unsigned crew = (unsigned)random_number(CREWS);
    crew_leave(crew);
    crew_start(crew);
}

/* Starts a daemon, and waits until it is dead: by itself at crash_at, else killed after `ms`. */
static void live_and_die(enum point point, const char *crash_at, uint64_t ms) {
    bool leave = between(point, POINT_RUN_END_WRITTEN, POINT_RUN_ENDED);
    daemon_launch_with("CKPTD_CRASH_AT", crash_at);
    crews_round();
    uint64_t begin = now_ms(), checked = 0;
    while (!daemon_has_died()) {
        if (!checked && crews_have_checked()) {
            checked = now_ms();
            if (leave || random_number(16) == 0)
                let_a_crew_leave();
            if (point == POINT_MANIFEST_SET_ASIDE) /* not before: what is there when a rank opens is not saved again */
                rubbish_ahead("rank-00000.json", false);
        }
        if (checked && now_ms() - checked >= ms)
            daemon_kill();
        else if (now_ms() - begin > PATIENCE_MS)
            FAIL("the crews have not looked through the versions within %d ms", PATIENCE_MS);
        else
            pause_ms(1);
        if (!daemon_pid())
            break;
    }
    if (daemon_pid()) {
        int status = daemon_gone();
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
            FAIL("the daemon ended with status 0x%x", status);
    }
    torture.deaths++;
    crews_reap();
}

static void verify(void) {
    count_crashes();
    torture.versions_read += crews_verify(torture.local, torture.parallel, torture.damaged);
}

static void advance(void) {
    uint64_t before = crew_pack(crew_next(0));
    EVENTUALLY((crews_reap(), crew_pack(crew_next(0)) >= before + 2));
}

/* A daemon dies, and some steps are left out until the next one is there to be told. */
static void miss_steps(void) {
    daemon_start();
    crews_round();
    EVENTUALLY(crews_have_checked());
    crews_skip(true);
    advance(); /* now nobody asks anything that would wait for the next daemon */
    daemon_kill();
    torture.deaths++;
    advance();
}

static void make_a_version_in_both(void) {
    struct version_id id;
    daemon_start();
    EVENTUALLY((crews_reap(), pick_version(torture.local, torture.parallel, &id)));
    daemon_kill();
    torture.deaths++;
    verify();
}

static void die_at(enum point point, unsigned nth) {
    char crash_at[64];
    snprintf(crash_at, sizeof crash_at, "%s:%u", point == POINT_COUNT ? "any" : point_name(point), nth);
    disturb_crews(point);
    if (between(point, POINT_PIN_WRITTEN, POINT_PIN_REMOVED) || between(point, POINT_REPAIR_COPIED, POINT_CONDEMNED)) {
        make_a_version_in_both();
        operate(point, crash_at);
        repair();
        verify();
        live_and_die(POINT_COUNT, "", 0);
    } else {
        provoke_files(point);
        if (between(point, POINT_ABSENT_WRITTEN, POINT_ABSENT_PUBLISHED))
            miss_steps();
        bool again = point == POINT_COUNT || torture.reached[point];
        live_and_die(point, crash_at, again ? AGAIN_PATIENCE_MS : POINT_PATIENCE_MS);
        crews_skip(false);
    }
    repair();
    verify();
}

static void die_at_random(void) {
    if (random_number(2)) {
        die_at(POINT_COUNT, 1 + (unsigned)random_number(150));
        return;
    }
    disturb_crews(POINT_COUNT);
    live_and_die(POINT_COUNT, "", random_number(60));
    verify();
}

static void begin(void) {
    static const char *const codecs[] = {"raw", "lz4", "auto"};
    char local[256], parallel[256];
    snprintf(local, sizeof local, "codec = %s\nkeep = 2\ntrash_grace_s = 0", codecs[random_number(3)]);
    snprintf(parallel, sizeof parallel, "codec = %s\nkeep = %u\ntrash_grace_s = 0", codecs[random_number(3)],
             1 + (unsigned)random_number(3));
    configure(&(struct settings){.log_level = "info", .local = local, .parallel = parallel});
    crews_init();
    daemon_start();
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_start(crew);
    EVENTUALLY((crews_reap(), crew_durable(0, CKPT_GLOBAL) && crew_durable(1, CKPT_GLOBAL)));
    daemon_kill();
    open_tiers();
    verify();
}

static void end(void) {
    daemon_start();
    crews_round();
    EVENTUALLY(crews_have_checked());
    for (unsigned crew = 0; crew < CREWS; crew++)
        crew_leave(crew);
    daemon_stop();
    verify();
    tier_free(torture.local);
    tier_free(torture.parallel);
    printf("             %u deaths, %u of them at points; %" PRIu64 " times looked through all, %" PRIu64
           " versions restored and compared, %u verified\n",
           torture.deaths, torture.at_points, crews_checks(), crews_compared(), torture.versions_read);
}

static void every_point(void) {
    begin();
    const char *only = getenv("TORTURE_POINT");
    unsigned first = only ? 0 : (unsigned)random_number(POINT_STRIDE);
    for (enum point point = first; point < POINT_COUNT; point += only ? 1 : POINT_STRIDE) {
        if (only && strncmp(only, point_name(point), strlen(only)) != 0)
            continue;
        for (unsigned try = 0; try < POINT_TRIES && !torture.reached[point]; try++)
            die_at(point, 1);
        die_at(point, 1 + (unsigned)random_number(4));
        if (!torture.reached[point])
            FAIL("nothing has reached the point %s", point_name(point));
    }
    end();
}

static void at_random(void) {
    const char *seconds = getenv("TORTURE_SECONDS");
    uint64_t end_ms = now_ms() + (seconds ? strtoull(seconds, NULL, 10) : SECONDS) * 1000;
    begin();
    while (now_ms() < end_ms)
        die_at_random();
    end();
}

int main(int argc, char **argv) {
    const struct test tests[] = {TEST(every_point), TEST(at_random)};
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
