/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that break no rule of the protocol, and never do the next thing: they hold on to what all
 * share (turns, urgency, memory, descriptors, connections). Others must get on meanwhile.
 */
#include "proto/shards.h"
#include "tests/functional/beside.h"
#include "tests/functional/peer.h"

#include <fcntl.h>

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

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(stalled_pushes_keep_no_turns),
        TEST(stalled_pushes_lose_their_room),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
