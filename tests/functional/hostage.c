/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that break no rule of the protocol, and never do the next thing: they hold on to what all
 * share (turns, urgency, memory, descriptors, connections). Others must get on meanwhile.
 */
#include "proto/shards.h"
#include "tests/functional/beside.h"
#include "tests/functional/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define CHUNK KIB(256)
#define POOL MIB(16)
#define HEADER KIB(4) /* of an image with few tensors */

/* A client and its push connection, with a set of so many bytes to be pushed. */
struct pusher {
    struct peer peer, push;
    int area;
};

static void register_push(struct peer *peer, uint64_t bytes) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {.name = "pushed",
                          .name_length = 6,
                          .dtype = DTYPE_U8,
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = {.dims = 1, .shape = {bytes}, .extent = {bytes}}};
    CHECK(shards_writer_add(&writer, &shard, &problem) == 0);
    CLEANUP(closep) int fd = wire_memfd("table", writer.data, writer.size);
    struct message_register message = {.table_size = writer.size, .count = 1, .set = 1, .flags = REGISTER_PUSH};
    CHECK(peer_send(peer, MESSAGE_REGISTER, &message, NULL, 0, fd) && peer_answer(peer) == MESSAGE_REGISTERED);
    shards_writer_deinit(&writer);
}

static void pusher_open(struct pusher *pusher, const char *job, uint64_t bytes) {
    peer_connect(&pusher->peer);
    peer_open(&pusher->peer, job);
    struct message_attach attach = {.session = ((const struct message_opened *)pusher->peer.message.body)->session};
    pusher->area = peer_memfd(CHUNK, F_SEAL_SHRINK);
    struct message_area area = {.size = CHUNK};
    CHECK(peer_send(&pusher->peer, MESSAGE_AREA, &area, NULL, 0, pusher->area));
    CHECK(peer_answer(&pusher->peer) == MESSAGE_OK);
    register_push(&pusher->peer, bytes);
    peer_connect(&pusher->push);
    peer_greet(&pusher->push);
    CHECK(peer_send(&pusher->push, MESSAGE_ATTACH, &attach, NULL, 0, -1));
    CHECK(peer_answer(&pusher->push) == MESSAGE_OK);
}

static void pusher_close(struct pusher *pusher) {
    peer_close(&pusher->push);
    peer_close(&pusher->peer);
    close(pusher->area);
}

/* The word page is not even looked at: it begins with zeros, as the counter of the first save. */
static int32_t pusher_save(struct pusher *pusher, uint32_t flags) {
    struct message_save save = {.step = 1, .set = 1, .flags = flags};
    CHECK(peer_send(&pusher->peer, MESSAGE_SAVE, &save, NULL, 0, -1));
    CHECK(peer_answer(&pusher->peer) == MESSAGE_SAVED);
    return ((const struct message_saved *)pusher->peer.message.body)->result;
}

static void push_chunk(struct pusher *pusher, uint64_t offset) {
    struct message_push push = {.image_offset = offset, .length = CHUNK};
    CHECK(peer_send(&pusher->push, MESSAGE_PUSH, &push, NULL, 0, -1));
    CHECK(peer_receive(&pusher->push) && pusher->push.message.opcode == MESSAGE_PUSHED);
    CHECK(((const struct message_pushed *)pusher->push.message.body)->result == CODE_OK);
}

/* Urgent saves, each with a chunk that came and one that never will: they have all turns of the tier,
 * and everybody's drains wait for urgent ones. */
static void keep_all_turns(void) {
    struct pusher pushers[6];
    for (size_t i = 0; i < ARRAY_SIZE(pushers); i++) {
        char job[32];
        snprintf(job, sizeof job, "turn-%zu", i);
        pusher_open(&pushers[i], job, 2 * CHUNK - HEADER);
        CHECK(pusher_save(&pushers[i], SAVE_URGENT) == CODE_OK);
        push_chunk(&pushers[i], 0);
    }
    good_client_goes_on();
    for (size_t i = 0; i < ARRAY_SIZE(pushers); i++) { /* they have lost their turns only */
        struct message_wait wait = {.step = 1, .level = LEVEL_LOCAL, .timeout_ms = PATIENCE_MS};
        push_chunk(&pushers[i], CHUNK);
        CHECK(peer_send(&pushers[i].peer, MESSAGE_WAIT, &wait, NULL, 0, -1));
        CHECK(peer_answer(&pushers[i].peer) == MESSAGE_WAITED);
        CHECK(((const struct message_waited *)pushers[i].peer.message.body)->result == CODE_OK);
        pusher_close(&pushers[i]);
    }
}

static void stalled_pushes_keep_no_turns(void) {
    beside_a_good_client(&(struct settings){.no_parallel = true, .deadlines = "capture_s = 24"}, keep_all_turns);
}

/* A save as large as the pool that is never pushed. */
static void keep_all_memory(void) {
    struct pusher pusher;
    struct peer *peer = &pusher.peer;
    pusher_open(&pusher, "room", POOL - CHUNK);
    int32_t result;
    do /* as long as the good client's bytes are in the pool */
        result = pusher_save(&pusher, 0);
    while (result == CODE_SKIPPED);
    CHECK(result == CODE_OK);
    push_chunk(&pusher, 0);
    good_client_goes_on();
    while (peer->message.opcode != MESSAGE_CAPTURED)
        CHECK(peer_receive(peer));
    CHECK(((const struct message_captured *)peer->message.body)->result == CODE_E_LOST);
    CHECK(memmem(peer->message.tail, peer->message.tail_length, "did not push", 12));
    pusher_close(&pusher);
}

static void stalled_pushes_lose_their_room(void) {
    beside_a_good_client(
        &(struct settings){.no_parallel = true, .pool = "16M", .chunk = "256K", .deadlines = "capture_s = 1"},
        keep_all_memory);
}

/* ---- memory that never comes ---- */

#define PAGE KIB(4)
#define NONCE UINT64_C(0x1122334455667788)
#define STUCK_PROCESSES 8 /* more than there are workers at first */

/* A page that is there, and one at which whoever reads it waits: as of a file on a server that has died. */
static uint8_t *memory_that_never_comes(void) {
    uint8_t *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    memcpy(pages, &(uint64_t){NONCE}, sizeof(uint64_t));
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register area = {.range = {.start = (uintptr_t)pages + PAGE, .len = PAGE},
                                   .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(ioctl(fd, UFFDIO_API, &api) == 0 && ioctl(fd, UFFDIO_REGISTER, &area) == 0);
    return pages;
}

/* Registers `bytes`, with the nonce at `nonce`. Returns the flags of the answer. */
static uint32_t register_private(struct peer *peer, const uint8_t *bytes, const uint8_t *nonce) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {.name = "stuck",
                          .name_length = 5,
                          .dtype = DTYPE_U8,
                          .area = SHARDS_AREA_PRIVATE,
                          .address = (uintptr_t)bytes,
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = {.dims = 1, .shape = {64}, .extent = {64}}};
    CHECK(shards_writer_add(&writer, &shard, &problem) == 0);
    CLEANUP(closep) int fd = wire_memfd("table", writer.data, writer.size);
    struct message_register message = {
        .table_size = writer.size, .count = 1, .set = 1, .nonce_address = (uintptr_t)nonce, .nonce = NONCE};
    CHECK(peer_send(peer, MESSAGE_REGISTER, &message, NULL, 0, fd) && peer_answer(peer) == MESSAGE_REGISTERED);
    shards_writer_deinit(&writer);
    return ((const struct message_registered *)peer->message.body)->flags;
}

/* Three connections of one process: a probe that gets stuck, a capture that does, and then no second one. */
static void keep_workers(void *argument) {
    _Atomic uint32_t *ready = argument;
    const uint8_t *pages = memory_that_never_comes();
    struct peer peers[3];
    struct message_save save = {.step = 1, .set = 1};
    for (size_t i = 0; i < ARRAY_SIZE(peers); i++) {
        char job[64];
        snprintf(job, sizeof job, "stuck-%d-%zu", getpid(), i);
        peer_connect(&peers[i]);
        peer_open(&peers[i], job);
    }
    CHECK(register_private(&peers[0], pages, pages + PAGE) & REGISTERED_PRIVATE_REFUSED);
    CHECK(memmem(peers[0].message.tail, peers[0].message.tail_length, "does not answer", 15));
    CHECK(register_private(&peers[1], pages + PAGE, pages) == 0);
    CHECK(peer_send(&peers[1], MESSAGE_SAVE, &save, NULL, 0, -1) && peer_answer(&peers[1]) == MESSAGE_SAVED);
    EVENTUALLY(register_private(&peers[2], pages, pages) & REGISTERED_PRIVATE_REFUSED);
    ++*ready;
    for (;;)
        pause();
}

static void keep_all_workers(void) {
    pid_t processes[STUCK_PROCESSES];
    _Atomic uint32_t *ready = shared_memory(sizeof *ready);
    for (size_t i = 0; i < ARRAY_SIZE(processes); i++)
        processes[i] = process_start(keep_workers, (void *)ready);
    EVENTUALLY(*ready == ARRAY_SIZE(processes));
    good_client_goes_on();
    ckpt *c = job_open("late"); /* registers while the probers are stuck, too */
    uint64_t words[512];
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, ARRAY_SIZE(words)));
    words_fill(words, ARRAY_SIZE(words), 1);
    save_durable(c, 1, CKPT_LOCAL);
    CHECK_OK(ckpt_close(c));
    for (size_t i = 0; i < ARRAY_SIZE(processes); i++)
        process_kill(processes[i]);
}

static void stuck_memory_keeps_no_workers(void) {
    if (!memory_that_never_comes())
        test_skip("userfaultfd: %s", strerror(errno));
    beside_a_good_client(&(struct settings){.no_parallel = true, .deadlines = "capture_s = 1"}, keep_all_workers);
}

/* ---- connections and descriptors ---- */

#define DESCRIPTORS 600 /* that the daemon may have: a node's usual limit, made smaller */

/* More connections than can be had, first silent ones, then some that ask and do not listen. */
static void keep_all_descriptors(void) {
    struct peer silent[150], deaf[30];
    const struct message_empty empty = {0};
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++) {
        peer_connect(&silent[i]);
        if (i % 2)
            peer_greet(&silent[i]);
    }
    ckpt *c = job_open("late");
    CHECK_OK(ckpt_close(c));
    for (size_t i = 0; i < ARRAY_SIZE(deaf); i++) {
        peer_connect(&deaf[i]);
        peer_greet(&deaf[i]);
        CHECK(fcntl(deaf[i].fd, F_SETFL, O_NONBLOCK) == 0);
    }
    bool heard = true;
    while (heard) { /* until the daemon listens to none of them any more */
        heard = false;
        for (size_t i = 0; i < ARRAY_SIZE(deaf); i++)
            heard = peer_send(&deaf[i], MESSAGE_STATUS, &empty, NULL, 0, -1) || heard;
        if (!heard) {
            good_client_goes_on(); /* and the daemon with what it has received */
            for (size_t i = 0; i < ARRAY_SIZE(deaf); i++)
                heard = peer_send(&deaf[i], MESSAGE_STATUS, &empty, NULL, 0, -1) || heard;
        }
    }
    CHECK(daemon_descriptors() < DESCRIPTORS);
    c = job_open("later");
    CHECK_OK(ckpt_close(c));
    CHECK(!daemon_logged("cannot accept") && !daemon_logged("no descriptor"));
    CHECK(!daemon_logged("does not read its answers")); /* it just is not listened to */
    for (size_t i = 0; i < ARRAY_SIZE(deaf); i++)
        peer_close(&deaf[i]);
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++)
        peer_close(&silent[i]);
}

static void silent_clients_keep_no_descriptors(void) {
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){DESCRIPTORS, DESCRIPTORS}) == 0);
    beside_a_good_client(&(struct settings){.no_parallel = true}, keep_all_descriptors);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(stalled_pushes_keep_no_turns),
        TEST(stalled_pushes_lose_their_room),
        TEST(stuck_memory_keeps_no_workers),
        TEST(silent_clients_keep_no_descriptors),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
