/* SPDX-License-Identifier: Apache-2.0 */
/* Room is kept for the next save, so that it need not wait for an answer; and is given up to whoever needs it. */
#include "proto/word.h"
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#define WORDS 20000
#define LARGE ((size_t)40 << 20) /* bytes; more than half of the pool */

struct program {
    ckpt *ckpt;
    uint64_t *tensor;
    size_t words;
};

static struct program program_new(const char *job, size_t words) {
    struct program program = {.ckpt = job_open(job), .tensor = malloc(words * 8), .words = words};
    words_fill(program.tensor, words, 0);
    CHECK_OK(ckpt_protect_array(program.ckpt, "tensor", CKPT_U64, program.tensor, words));
    return program;
}

static void program_end(struct program *program) {
    CHECK_OK(ckpt_close(program->ckpt));
    free(program->tensor);
}

/* Durable, and the daemon has done all that follows from it. */
static void settle(struct program *program, uint64_t step) {
    words_fill(program->tensor, program->words, step);
    save_durable(program->ckpt, step, CKPT_LOCAL);
    EVENTUALLY(status_number("pool.reserved") == 0);
}

static int save_at_once(struct program *program, uint64_t step) {
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.busy_timeout_ms = CKPT_NO_WAIT;
    return ckpt_save(program->ckpt, step, &options);
}

/* A daemon that does not get to run holds no save up; what it then did not capture is not committed. */
static void save_does_not_wait_for_the_daemon(void) {
    configure(&(struct settings){.no_parallel = true});
    daemon_start();
    struct program program = program_new("unasked", WORDS);
    settle(&program, 1);
    process_signal(daemon_pid(), SIGSTOP);
    CHECK_OK(ckpt_save(program.ckpt, 2, NULL));
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_fence(program.ckpt, 20));
    words_fill(program.tensor, WORDS, 77); /* allowed: it was revoked */
    process_signal(daemon_pid(), SIGCONT);
    CHECK_IS(CKPT_E_LOST, ckpt_wait(program.ckpt, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    settle(&program, 3);
    CHECK(!file_exists(test_path("local/unasked/1/2/rank-00000.json")));
    ckpt_restore *r = restore_step(program.ckpt, 3);
    restore_words_check(r, "tensor", WORDS, 3);
    ckpt_restore_close(r);
    program_end(&program);
}

/* The save was accepted, then nobody was there to capture it: the fence says so, and it may be saved again. */
static void daemon_that_dies_loses_the_save(void) {
    configure(&(struct settings){.no_parallel = true});
    daemon_start();
    struct program program = program_new("dies", WORDS);
    settle(&program, 1);
    process_signal(daemon_pid(), SIGSTOP);
    CHECK_OK(ckpt_save(program.ckpt, 2, NULL));
    daemon_kill();
    CHECK_IS(CKPT_E_LOST, ckpt_fence(program.ckpt, PATIENCE_MS));
    daemon_start();
    EVENTUALLY(ckpt_save(program.ckpt, 2, NULL) == CKPT_OK);
    CHECK_OK(ckpt_wait(program.ckpt, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    program_end(&program);
}

/* Two programs, and room for one image at a time: each save takes the room that was kept for the other. */
static void kept_room_is_for_who_saves_first(void) {
    configure(&(struct settings){.pool = "64M", .no_parallel = true});
    daemon_start();
    struct program one = program_new("one", LARGE / 8), other = program_new("other", LARGE / 8);
    for (uint64_t step = 1; step <= 6; step += 2) {
        CHECK_OK(save_at_once(&one, step));
        settle(&one, step + 1);
        CHECK_OK(save_at_once(&other, step));
        settle(&other, step + 1);
    }
    program_end(&one);
    program_end(&other);
}

/* What is kept for a save that may never come does not hold up a restore. */
static void kept_room_is_for_who_restores(void) {
    configure(&(struct settings){.pool = "64M", .no_parallel = true});
    daemon_start();
    struct program reader = program_new("reader", (LARGE - (8 << 20)) / 8);
    settle(&reader, 1);
    size_t words = reader.words;
    program_end(&reader);
    daemon_stop_unused(); /* nothing is cached */
    daemon_start();
    ckpt *again = job_open("reader");
    struct program writer = program_new("writer", LARGE / 8);
    settle(&writer, 1);
    ckpt_restore *r = restore_of(again, 1);
    restore_words_check(r, "tensor", words, 1);
    ckpt_restore_close(r);
    CHECK_OK(save_at_once(&writer, 2));
    program_end(&writer);
    CHECK_OK(ckpt_close(again));
}

/* The word's page of this process's only session. */
static struct word_page *own_page(void) {
    char line[512];
    unsigned long begin = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps);
    while (!begin && fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:ckptd-word"))
            begin = strtoul(line, NULL, 16);
    (void)fclose(maps);
    CHECK(begin);
    return (struct word_page *)begin; /* NOLINT(performance-no-int-to-ptr) */
}

/* One that stopped between taking the room and sending its save keeps nobody waiting for long. */
static void room_taken_by_who_then_stops(void) {
    configure(&(struct settings){.pool = "64M", .no_parallel = true});
    daemon_start();
    struct program stopped = program_new("stopped", LARGE / 8);
    settle(&stopped, 1);
    struct word_page *page = own_page();
    EVENTUALLY(word_take_admission(page, 1));
    struct program other = program_new("other", LARGE / 8);
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.busy_timeout_ms = PATIENCE_MS;
    CHECK_OK(ckpt_save(other.ckpt, 1, &options));
    settle(&other, 2);
    settle(&stopped, 2);
    program_end(&other);
    program_end(&stopped);
}

/* Where tiers are slower than saves, some are skipped; those that were accepted are there. */
static void accepted_or_skipped_never_lost(void) {
    enum { STEPS = 60 };
    configure(
        &(struct settings){.pool = "32M", .local = "rate_mib_s = 200\nkeep = 100\nbacklog = 100", .no_parallel = true});
    daemon_start();
    struct program program = program_new("slow", ((size_t)8 << 20) / 8);
    bool accepted[STEPS + 1] = {false};
    unsigned skipped = 0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        words_fill(program.tensor, program.words, step);
        int r = save_at_once(&program, step);
        CHECK(r == CKPT_OK || r == CKPT_SKIPPED);
        accepted[step] = r == CKPT_OK;
        skipped += r == CKPT_SKIPPED;
        CHECK_OK(ckpt_fence(program.ckpt, PATIENCE_MS));
    }
    CHECK(skipped > 0 && skipped < STEPS);
    for (uint64_t step = 1; step <= STEPS; step++)
        if (accepted[step])
            CHECK_OK(ckpt_wait(program.ckpt, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    program_end(&program);
}

/* What had to be sent ahead of a save was refused: the save tells it, and the next one begins anew. */
static void refused_area_is_told_by_the_save(void) {
    enum { PEERS = 16, EACH = 1024 }; /* AREAS_TOTAL_MAX */
    static struct peer peers[PEERS];
    configure(&(struct settings){.no_parallel = true});
    daemon_start();
    struct program program = program_new("areas", WORDS);
    settle(&program, 1);
    CLEANUP(closep) int fd = peer_memfd(4096, F_SEAL_SHRINK);
    for (uint32_t i = 0; i < PEERS; i++) {
        char job[32];
        snprintf(job, sizeof job, "peer-%u", i);
        peer_connect(&peers[i]);
        peer_open(&peers[i], job);
        for (uint32_t area = 0; area < EACH; area++) {
            struct message_area message = {.area = area, .size = 4096};
            CHECK(peer_send(&peers[i], MESSAGE_AREA, &message, NULL, 0, fd) && peer_answer(&peers[i]) == MESSAGE_OK);
        }
    }
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = "state"; /* its area is the one too many */
    options.state_size = 5;
    CHECK_IS(CKPT_E_LIMIT, ckpt_save(program.ckpt, 2, &options));
    CHECK_SAYS("areas of all clients");
    for (uint32_t i = 0; i < PEERS; i++)
        peer_close(&peers[i]);
    EVENTUALLY(ckpt_save(program.ckpt, 2, &options) == CKPT_OK);
    CHECK_OK(ckpt_wait(program.ckpt, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    program_end(&program);
}

/* Who says that it was admitted, and was not, gets what any save gets, and no answer but the event. */
static void pretended_admission(void) {
    configure(&(struct settings){0});
    daemon_start();
    struct peer peer;
    peer_connect(&peer);
    peer_open(&peer, "pretended");
    struct message_save save = {.step = 1, .set = 9, .counter = 1, .flags = SAVE_ADMITTED};
    CHECK(peer_send(&peer, MESSAGE_SAVE, &save, NULL, 0, -1) && peer_receive(&peer));
    const struct message_captured *captured = peer.message.body;
    CHECK(peer.message.opcode == MESSAGE_CAPTURED);
    CHECK(captured->result == CKPT_E_LOST && captured->step == 1 && captured->counter == 1);
    CHECK(strstr(peer.message.tail, "not registered"));
    struct message_register registration = {.set = 9};
    CLEANUP(closep) int table = wire_memfd("table", "", 0); /* without shards */
    CHECK(peer_send(&peer, MESSAGE_REGISTER, &registration, NULL, 0, table));
    CHECK(peer_answer(&peer) == MESSAGE_REGISTERED);
    save.counter = 2;
    CHECK(peer_send(&peer, MESSAGE_SAVE, &save, NULL, 0, -1) && peer_receive(&peer));
    captured = peer.message.body;
    CHECK(peer.message.opcode == MESSAGE_CAPTURED && captured->counter == 2);
    peer_close(&peer);
}

/* Nor does it have steps written down as absent, as many as it likes: MISSED is for that, and has a limit. */
static void pretended_admission_leaves_no_trace(void) {
    configure(&(struct settings){.no_parallel = true});
    daemon_start();
    struct peer peer;
    peer_connect(&peer);
    CHECK(peer_open_as(&peer, "pretended", 0, 2) == MESSAGE_OPENED);
    for (uint16_t i = 1; i <= 10; i++) {
        struct message_save save = {.step = i, .set = 9, .counter = i, .flags = SAVE_ADMITTED};
        CHECK(peer_send(&peer, MESSAGE_SAVE, &save, NULL, 0, -1) && peer_receive(&peer));
        CHECK(peer.message.opcode == MESSAGE_CAPTURED);
    }
    struct message_missed missed = {.step = 11};
    CHECK(peer_send(&peer, MESSAGE_MISSED, &missed, NULL, 0, -1) && peer_answer(&peer) == MESSAGE_OK);
    EVENTUALLY(file_exists(test_path("local/pretended/1/11/rank-00000.json")));
    CHECK(files_ending("local/pretended", "rank-00000.json") == 1);
    peer_close(&peer);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(save_does_not_wait_for_the_daemon),
        TEST(daemon_that_dies_loses_the_save),
        TEST(kept_room_is_for_who_saves_first),
        TEST(kept_room_is_for_who_restores),
        TEST(room_taken_by_who_then_stops),
        TEST(accepted_or_skipped_never_lost),
        TEST(pretended_admission),
        TEST(refused_area_is_told_by_the_save),
        TEST(pretended_admission_leaves_no_trace),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
