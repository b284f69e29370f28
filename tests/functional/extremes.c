/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every message that a client may send, from messages.def: each is said in a form that is taken, and
 * then with each number in it, of whatever width, at its extremes; with every count of descriptors but
 * the right one; and in every state in which it may not be said. A good client notices nothing.
 */
#include "proto/shards.h"
#include "tests/functional/beside.h"
#include "tests/functional/peer.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>

#define AREA_SIZE KIB(256)
#define VALUES_TRIED 1      /* of each number, drawn: every run tries others */
#define DESCRIPTORS_TRIED 8 /* at once; more than a packet has room for */

#define MESSAGE(number, name, type, direction, states, descriptors, tail)                                              \
    _Static_assert(sizeof(struct type) % sizeof(uint64_t) == 0, "numbers of every width lie at multiples of it");
#include "proto/messages.def"
#undef MESSAGE

static const uint16_t opcodes[] = {
#define MESSAGE(number, name, type, direction, states, descriptors, tail) number,
#include "proto/messages.def"
#undef MESSAGE
};

/* A client that has an area, a set, and a saved version open for restoring. */
struct client {
    struct peer peer;
    uint32_t job;
    uint64_t step;
    int area;
    struct shards_writer table;
    uint32_t restore;
    bool connected, up;
};

static void client_close(struct client *client) {
    if (client->connected)
        peer_close(&client->peer);
    client->up = client->connected = false;
}

static void register_set(struct client *client) {
    struct message_register message = {.table_size = client->table.size, .count = 1, .set = 1};
    CLEANUP(closep) int fd = wire_memfd("table", client->table.data, client->table.size);
    CHECK(peer_send(&client->peer, MESSAGE_REGISTER, &message, NULL, 0, fd));
    CHECK(peer_answer(&client->peer) == MESSAGE_REGISTERED);
}

static void client_open(struct client *client) {
    struct peer *peer = &client->peer;
    char job[40];
    snprintf(job, sizeof job, "extreme-%u", client->job++);
    peer_connect(peer);
    client->connected = true;
    peer_open(peer, job);
    struct message_area area = {.size = AREA_SIZE};
    CHECK(peer_send(peer, MESSAGE_AREA, &area, NULL, 0, client->area) && peer_answer(peer) == MESSAGE_OK);
    register_set(client);
    struct message_save save = {.step = client->step = 1, .set = 1};
    CHECK(peer_send(peer, MESSAGE_SAVE, &save, NULL, 0, -1) && peer_answer(peer) == MESSAGE_SAVED);
    struct message_wait wait = {.step = 1, .level = LEVEL_LOCAL, .scope = WAIT_VERSION, .timeout_ms = PATIENCE_MS};
    CHECK(peer_send(peer, MESSAGE_WAIT, &wait, NULL, 0, -1) && peer_answer(peer) == MESSAGE_WAITED);
    struct message_restore_open open = {.which = RESTORE_LATEST, .timeout_ms = PATIENCE_MS};
    CHECK(peer_send(peer, MESSAGE_RESTORE_OPEN, &open, NULL, 0, -1) && peer_answer(peer) == MESSAGE_RESTORE_OPENED);
    client->restore = ((const struct message_restore_opened *)peer->message.body)->restore;
    client->up = true;
}

/* A body that is taken, as far as there is one in the state that the client is in. */
static void fill(const struct client *client, uint16_t opcode, uint8_t *body) {
    memset(body, 0, MESSAGE_SIZE_MAX);
    switch (opcode) {
    case MESSAGE_HELLO:
        *(struct message_hello *)body = (struct message_hello){
            .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
        break;
    case MESSAGE_OPEN:
        *(struct message_open *)body =
            (struct message_open){.world = 1, .job_length = 12, .run_id_length = 1, .deadline_ms = PATIENCE_MS};
        break;
    case MESSAGE_AREA:
        *(struct message_area *)body = (struct message_area){.area = 7, .size = AREA_SIZE};
        break;
    case MESSAGE_REGISTER:
        *(struct message_register *)body =
            (struct message_register){.table_size = client->table.size, .count = 1, .set = 1};
        break;
    case MESSAGE_SAVE:
        *(struct message_save *)body = (struct message_save){.step = client->step + 1, .set = 1, .state_length = 16};
        break;
    case MESSAGE_WAIT:
        *(struct message_wait *)body = (struct message_wait){.step = 1, .level = LEVEL_LOCAL};
        break;
    case MESSAGE_RESTORE_OPEN:
        *(struct message_restore_open *)body =
            (struct message_restore_open){.which = RESTORE_EXACT, .generation = 1, .step = 1};
        break;
    case MESSAGE_FETCH:
        *(struct message_fetch *)body =
            (struct message_fetch){.restore = client->restore, .count = 1, .timeout_ms = PATIENCE_MS};
        break;
    case MESSAGE_PREFETCH:
        *(struct message_prefetch *)body = (struct message_prefetch){.restore = client->restore};
        break;
    default: /* zeros: an area, a lease, a counter that exists, or a question */
        break;
    }
}

static int descriptor_for(const struct client *client, uint16_t opcode) {
    if (message_rule(opcode)->descriptors == 0)
        return -1;
    return opcode == MESSAGE_REGISTER ? wire_memfd("table", client->table.data, client->table.size)
                                      : fcntl(client->area, F_DUPFD_CLOEXEC, 0);
}

/* Said once; then the daemon answers a question of ours (or has hung up, and we come anew). */
static void say(struct client *client, uint16_t opcode, const uint8_t *body) {
    const struct message_rule *rule = message_rule(opcode);
    bool before_open = !(rule->states & MESSAGE_STATE_O), greets = opcode == MESSAGE_HELLO;
    struct peer own, *peer = before_open ? &own : &client->peer;
    char tail[32];
    size_t tail_length = 0;
    if (before_open) {
        peer_connect(peer);
        if (!greets)
            peer_greet(peer);
    } else if (!client->up) {
        client_open(client);
    }
    if (opcode == MESSAGE_OPEN)
        tail_length = (size_t)snprintf(tail, sizeof tail, "job-%08xr", client->job++);
    CLEANUP(closep) int fd = descriptor_for(client, opcode);
    peer_send(peer, opcode, body, tail, tail_length, fd);
    if (greets || opcode == MESSAGE_PUSH || opcode == MESSAGE_CLOSE) {
        shutdown(peer->fd, SHUT_WR);
        peer_expect_end(peer);
    } else {
        if (opcode != MESSAGE_OPEN || peer_answer(peer)) /* suspends until it is answered */
            (void)(peer_send(peer, MESSAGE_STATUS, &(struct message_empty){0}, NULL, 0, -1) && peer_answer(peer));
    }
    if (before_open) {
        peer_close(peer);
        return;
    }
    /* What it may have changed shall not keep the next one from being taken. */
    client->up = peer->message.opcode == MESSAGE_STATUS_IS;
    if (client->up && opcode == MESSAGE_AREA)
        CHECK(peer_send(peer, MESSAGE_AREA_DROP, &(struct message_area_drop){.area = 7}, NULL, 0, -1) &&
              peer_answer(peer) == MESSAGE_OK);
    if (client->up && opcode == MESSAGE_REGISTER)
        register_set(client);
    if (!client->up || opcode == MESSAGE_SAVE || opcode == MESSAGE_AREA_DROP)
        client_close(client);
}

/* In a number of `width` bytes. */
static void put(uint8_t *at, size_t width, uint64_t value) { memcpy(at, &value, width); }

static void say_at_extremes(struct client *client, uint16_t opcode) {
    const struct message_rule *rule = message_rule(opcode);
    _Alignas(8) uint8_t body[MESSAGE_SIZE_MAX];
    fill(client, opcode, body);
    say(client, opcode, body);
    for (size_t width = 2; width <= 8; width *= 2)
        for (size_t at = 0; at < rule->body_size; at += width) {
            uint64_t most = UINT64_MAX >> (64 - 8 * width);
            const uint64_t values[] = {0, 1, most >> 1, (most >> 1) + 1, most - 1, most};
            for (int n = 0; n < VALUES_TRIED; n++) {
                fill(client, opcode, body);
                put(body + at, width, values[random_number(ARRAY_SIZE(values))]);
                say(client, opcode, body);
            }
        }
}

static void with_a_client(void (*each)(struct client *client, uint16_t opcode)) {
    struct client client = {.area = peer_memfd(AREA_SIZE, F_SEAL_SHRINK)};
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {.name = "t",
                          .name_length = 1,
                          .dtype = DTYPE_U64,
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = {.dims = 1, .shape = {100}, .extent = {100}}};
    CHECK(shards_writer_add(&client.table, &shard, &problem) == 0);
    for (size_t i = 0; i < ARRAY_SIZE(opcodes); i++)
        if (message_rule(opcodes[i])->from_client)
            each(&client, opcodes[i]);
    client_close(&client);
    shards_writer_deinit(&client.table);
    close(client.area);
}

/* STOP is taken with any mode, and ends the daemon. */
static void say_all_at_extremes(struct client *client, uint16_t opcode) {
    if (opcode != MESSAGE_STOP)
        say_at_extremes(client, opcode);
}

static void extremes(void) { with_a_client(say_all_at_extremes); }
static void numbers_at_their_extremes(void) { beside_a_good_client(&(struct settings){.no_parallel = true}, extremes); }

/* The same bytes with too few and with too many descriptors. The daemon hangs up, and keeps none. */
static void say_with_descriptors(struct client *client, uint16_t opcode) {
    const struct message_rule *rule = message_rule(opcode);
    _Alignas(8) uint8_t packet[MESSAGE_SIZE_MAX + sizeof(struct message_head)];
    struct message_head head = {.opcode = opcode, .size = (uint32_t)(sizeof head + rule->body_size), .serial = 1};
    int fds[DESCRIPTORS_TRIED];
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = client->area;
    memcpy(packet, &head, sizeof head);
    fill(client, opcode, packet + sizeof head);
    for (size_t count = 0; count <= ARRAY_SIZE(fds); count++) {
        struct peer peer;
        if (count == rule->descriptors)
            continue;
        peer_connect(&peer);
        if (rule->states & MESSAGE_STATE_O)
            peer_open_as(&peer, "descriptors", client->job++, UINT32_MAX);
        else if (!(rule->states & MESSAGE_STATE_N))
            peer_greet(&peer);
        peer_send_raw(&peer, packet, head.size, fds, count);
        peer_expect_end(&peer);
        peer_close(&peer);
    }
}

static void wrong_counts(void) {
    int64_t before = status_number("counters.protocol_errors");
    with_a_client(say_with_descriptors);
    unsigned expected = 0;
    for (size_t i = 0; i < ARRAY_SIZE(opcodes); i++)
        expected += message_rule(opcodes[i])->from_client ? DESCRIPTORS_TRIED : 0;
    CHECK(status_number("counters.protocol_errors") == before + expected);
}

static void wrong_counts_of_descriptors(void) {
    beside_a_good_client(&(struct settings){.no_parallel = true}, wrong_counts);
}

/* In each of the four states; what is not allowed there ends the connection. */
static void say_in_wrong_states(struct client *client, uint16_t opcode) {
    const struct message_rule *rule = message_rule(opcode);
    _Alignas(8) uint8_t body[MESSAGE_SIZE_MAX];
    for (uint32_t state = MESSAGE_STATE_N; state <= MESSAGE_STATE_A; state <<= 1) {
        struct peer owner, peer;
        if (rule->states & state)
            continue;
        peer_connect(&peer);
        if (state == MESSAGE_STATE_G)
            peer_greet(&peer);
        if (state == MESSAGE_STATE_O)
            peer_open_as(&peer, "states", client->job++, UINT32_MAX);
        if (state == MESSAGE_STATE_A) {
            peer_connect(&owner);
            peer_open_as(&owner, "states", client->job++, UINT32_MAX);
            struct message_attach attach = {.session = ((const struct message_opened *)owner.message.body)->session};
            peer_greet(&peer);
            CHECK(peer_send(&peer, MESSAGE_ATTACH, &attach, NULL, 0, -1) && peer_answer(&peer) == MESSAGE_OK);
        }
        fill(client, opcode, body);
        CLEANUP(closep) int fd = descriptor_for(client, opcode);
        peer_send(&peer, opcode, body, NULL, 0, fd);
        peer_expect_end(&peer);
        peer_close(&peer);
        if (state == MESSAGE_STATE_A)
            peer_close(&owner);
    }
}

static void wrong_states(void) { with_a_client(say_in_wrong_states); }
static void messages_in_wrong_states(void) {
    beside_a_good_client(&(struct settings){.no_parallel = true}, wrong_states);
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(numbers_at_their_extremes),
        TEST(wrong_counts_of_descriptors),
        TEST(messages_in_wrong_states),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
