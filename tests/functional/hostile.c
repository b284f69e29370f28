/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that send rubbish, in any order, with any descriptors; one that behaves well notices nothing. */
#include "proto/shards.h"
#include "tests/functional/beside.h"
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static const struct settings no_parallel = {.no_parallel = true};

static void send_random_packets(void) {
    for (int round = 0; round < 300; round++) {
        struct peer peer;
        peer_connect(&peer);
        uint64_t mode = random_number(3);
        if (mode == 1)
            peer_greet(&peer);
        if (mode == 2) {
            char job[32];
            snprintf(job, sizeof job, "random-%d", round);
            peer_open(&peer, job);
        }
        for (int packets = 0; packets < 5; packets++) {
            _Alignas(8) uint8_t data[MESSAGE_SIZE_MAX];
            size_t size = random_number(20) ? random_number(200) : random_number(sizeof data);
            for (size_t i = 0; i < size; i++)
                data[i] = random_number(3) ? 0 : (uint8_t)random_number(256);
            if (size >= sizeof(struct message_head) && random_number(4)) { /* get past the first checks */
                struct message_head head = {.opcode = (uint16_t)random_number(MESSAGE_STOP), .serial = 1};
                const struct message_rule *rule = message_rule(head.opcode);
                if (rule && sizeof head + rule->body_size <= sizeof data)
                    size = sizeof head + rule->body_size;
                head.size = (uint32_t)size;
                memcpy(data, &head, sizeof head);
            }
            if (!peer_send_raw(&peer, data, size, NULL, 0))
                break;
        }
        peer_close(&peer);
    }
}

static void random_packets(void) { beside_a_good_client(&no_parallel, send_random_packets); }

/* Every message in every state, with a body of zeros and one of ones. */
static void send_everything_everywhere(void) {
    for (uint16_t opcode = 0; opcode < 70; opcode++)
        for (int state = 0; state < 3; state++)
            for (int fill = 0; fill <= 0xff; fill += 0xff) {
                const struct message_rule *rule = message_rule(opcode);
                if (!rule || opcode == MESSAGE_STOP)
                    continue;
                struct peer peer;
                char job[40];
                _Alignas(8) uint8_t body[MESSAGE_SIZE_MAX];
                memset(body, fill, sizeof body);
                snprintf(job, sizeof job, "everything-%u-%d", opcode, fill);
                peer_connect(&peer);
                if (state == 1)
                    peer_greet(&peer);
                if (state == 2)
                    peer_open(&peer, job);
                int fd = rule->descriptors ? wire_memfd("test", body, sizeof body) : -1;
                peer_send(&peer, opcode, body, NULL, 0, fd);
                struct message_empty empty = {0};
                if (state == 2)
                    peer_send(&peer, MESSAGE_VERSIONS, &empty, NULL, 0, -1);
                if (fd >= 0)
                    close(fd);
                shutdown(peer.fd, SHUT_WR);
                peer_expect_end(&peer);
                peer_close(&peer);
            }
}

static void every_message_in_every_state(void) { beside_a_good_client(&no_parallel, send_everything_everywhere); }

static int area_error(struct peer *peer, int fd, uint32_t area, uint64_t size) {
    struct message_area message = {.area = area, .size = size};
    CHECK(peer_send(peer, MESSAGE_AREA, &message, NULL, 0, fd));
    return peer_error(peer);
}

/* Areas must be memfds, sealed, and whole: the daemon would die of SIGBUS otherwise. */
static void give_wrong_areas(void) {
    enum { SIZE = 1 << 20 };
    struct peer peer;
    int pipes[2];
    peer_connect(&peer);
    peer_open(&peer, "areas");
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    CHECK(area_error(&peer, pipes[0], 0, SIZE) == CODE_E_INVALID);
    int directory = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(area_error(&peer, directory, 0, SIZE) == CODE_E_INVALID);
    int file = open(test_path("plain file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(ftruncate(file, SIZE) == 0);
    CHECK(area_error(&peer, file, 0, SIZE) == CODE_E_INVALID);
    int unsealed = peer_memfd(SIZE, 0);
    CHECK(area_error(&peer, unsealed, 0, SIZE) == CODE_E_INVALID);
    int sparse = peer_memfd(SIZE, F_SEAL_SHRINK);
    CHECK(fallocate(sparse, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, SIZE / 2, 4096) == 0);
    CHECK(area_error(&peer, sparse, 0, SIZE) == CODE_E_INVALID);
    int good = peer_memfd(SIZE, F_SEAL_SHRINK);
    CHECK(area_error(&peer, good, 0, SIZE + 1) == CODE_E_INVALID);
    CHECK(area_error(&peer, good, 0, 0) == CODE_E_INVALID);
    CHECK(area_error(&peer, good, 0, UINT64_MAX) == CODE_E_INVALID);
    CHECK(area_error(&peer, good, AREAS_MAX, SIZE) == CODE_E_INVALID);
    struct message_area message = {.area = 0, .size = SIZE};
    CHECK(peer_send(&peer, MESSAGE_AREA, &message, NULL, 0, good) && peer_answer(&peer) == MESSAGE_OK);
    CHECK(area_error(&peer, good, 0, SIZE) == CODE_E_INVALID);
    /* Holes punched afterwards read as zeros. */
    CHECK(fallocate(good, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SIZE) == 0);
    const int fds[] = {pipes[0], pipes[1], directory, file, unsealed, sparse, good};
    _Alignas(8) uint8_t packet[sizeof(struct message_head) + sizeof message];
    struct message_head head = {.opcode = MESSAGE_AREA, .size = sizeof packet, .serial = 9};
    memcpy(packet, &head, sizeof head);
    memcpy(packet + sizeof head, &message, sizeof message);
    CHECK(peer_send_raw(&peer, packet, sizeof packet, fds, ARRAY_SIZE(fds))); /* more than one: a breach */
    peer_expect_end(&peer);
    peer_close(&peer);
    peer_connect(&peer);
    peer_open(&peer, "no descriptor");
    CHECK(peer_send_raw(&peer, packet, sizeof packet, NULL, 0));
    peer_expect_end(&peer);
    peer_close(&peer);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        close(fds[i]);
}

static void wrong_areas(void) { beside_a_good_client(&no_parallel, give_wrong_areas); }

/* Every kind of descriptor that is no sealed memfd of ordinary pages, in place of areas and tables. */
static void give_wrong_descriptors(void) {
    enum { SIZE = 1 << 21 }; /* a huge page */
    const struct {
        const char *what;
        int fd, seals;
    } wrong[] = {
        {"a socket", socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), 0},
        {"a device", open("/dev/zero", O_RDWR | O_CLOEXEC), 0},
        {"an event counter", eventfd(0, EFD_CLOEXEC), 0},
        {"an epoll set", epoll_create1(EPOLL_CLOEXEC), 0},
        {"a path", open("/proc/self/exe", O_PATH | O_CLOEXEC), 0},
        {"a process", (int)syscall(SYS_pidfd_open, getpid(), 0), 0},
        {"memory of a process", open("/proc/self/mem", O_RDWR | O_CLOEXEC), 0},
        {"a memfd that cannot be sealed", memfd_create("test", MFD_CLOEXEC), 0},
        {"a memfd sealed against growing only", peer_memfd(SIZE, 0), F_SEAL_GROW},
        {"a memfd sealed against all but shrinking", peer_memfd(SIZE, 0), F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL},
        {"secret memory", (int)syscall(SYS_memfd_secret, O_CLOEXEC), 0},
        {"huge pages", memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB),
         F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE},
    };
    struct peer peer;
    peer_connect(&peer);
    peer_open(&peer, "descriptors");
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        if (wrong[i].fd < 0) {
            printf("             no %s here: %s\n", wrong[i].what, strerror(errno));
            continue;
        }
        (void)!ftruncate(wrong[i].fd, SIZE); /* where that is possible */
        CHECK(!wrong[i].seals || fcntl(wrong[i].fd, F_ADD_SEALS, wrong[i].seals) == 0);
        struct message_register table = {.table_size = SIZE, .count = 1, .set = 1};
        if (area_error(&peer, wrong[i].fd, 0, SIZE) != CODE_E_INVALID)
            FAIL("%s as an area: %.*s", wrong[i].what, (int)peer.message.tail_length, peer.message.tail);
        CHECK(peer_send(&peer, MESSAGE_REGISTER, &table, NULL, 0, wrong[i].fd));
        if (peer_error(&peer) != CODE_E_INVALID)
            FAIL("%s as a table: %.*s", wrong[i].what, (int)peer.message.tail_length, peer.message.tail);
        close(wrong[i].fd);
    }
    peer_close(&peer);
}

static void wrong_descriptors(void) { beside_a_good_client(&no_parallel, give_wrong_descriptors); }

/* Registers one contiguous shard of so many bytes, wherever it is said to lie. Returns the answer's opcode. */
static uint16_t register_shard(struct peer *peer, uint32_t area, uint64_t address, uint64_t bytes, uint64_t nonce_at,
                               uint64_t nonce) {
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {.name = "bytes",
                          .name_length = 5,
                          .dtype = DTYPE_U8,
                          .area = area,
                          .address = UINT64_C(0x0badc0ffee00), /* the writer would refuse some others */
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = {.dims = 1, .shape = {bytes}, .extent = {bytes}}};
    CHECK(shards_writer_add(&writer, &shard, &problem) == 0);
    uint8_t *place = memmem(writer.data, writer.size, &shard.address, sizeof shard.address);
    CHECK(place);
    memcpy(place, &address, sizeof address);
    CLEANUP(closep) int fd = wire_memfd("table", writer.data, writer.size);
    struct message_register message = {
        .table_size = writer.size, .count = 1, .set = 1, .nonce_address = nonce_at, .nonce = nonce};
    CHECK(peer_send(peer, MESSAGE_REGISTER, &message, NULL, 0, fd));
    shards_writer_deinit(&writer);
    return peer_answer(peer);
}

/* How the capture of a save of the registered set ended. The word page of a session begins with zeros. */
static int32_t first_save_result(struct peer *peer) {
    struct message_save save = {.step = 1, .set = 1};
    CHECK(peer_send(peer, MESSAGE_SAVE, &save, NULL, 0, -1));
    do
        CHECK(peer_receive(peer) && peer->message.opcode != MESSAGE_ERROR);
    while (peer->message.opcode != MESSAGE_CAPTURED);
    return ((const struct message_captured *)peer->message.body)->result;
}

enum { CHANGED_SIZE = 8 << 20 };

static void change_area(void *argument) {
    int fd = *(const int *)argument;
    for (;;) { /* until it is killed */
        off_t at = (off_t)random_number(CHANGED_SIZE / 4096) * 4096;
        CHECK(ftruncate(fd, at) < 0);
        CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, 65536) == 0);
        CHECK(ftruncate(fd, CHANGED_SIZE * 2) == 0); /* growing is allowed */
    }
}

/* What was whole and sealed when it was given is emptied and grown while the daemon copies it. */
static void change_areas(void) {
    unsigned copied = 0;
    int fd = peer_memfd(CHANGED_SIZE, F_SEAL_SHRINK);
    const struct message_area area = {.size = CHANGED_SIZE};
    pid_t changer = process_start(change_area, &fd);
    for (unsigned save = 0; copied < 3; save++) {
        struct peer peer;
        char job[32];
        snprintf(job, sizeof job, "changed-%u", save);
        peer_connect(&peer);
        peer_open(&peer, job);
        CHECK(fallocate(fd, 0, 0, CHANGED_SIZE) == 0);
        CHECK(peer_send(&peer, MESSAGE_AREA, &area, NULL, 0, fd));
        if (peer_answer(&peer) == MESSAGE_OK) { /* else a hole was seen */
            CHECK(register_shard(&peer, 0, 0, CHANGED_SIZE, 0, 0) == MESSAGE_REGISTERED);
            CHECK(first_save_result(&peer) == CODE_OK);
            copied++;
        }
        peer_close(&peer);
    }
    process_kill(changer);
    close(fd);
}

static void areas_changed_under_a_copy(void) { beside_a_good_client(&no_parallel, change_areas); }

/* Private memory that is not the client's, or none. */
static void name_wild_addresses(void) {
    enum { SIZE = 1 << 16 };
    static const uint64_t nonce = UINT64_C(0x0123456789abcdef);
    static const uintptr_t nonces[] = {0, 1, INTPTR_MAX, UINTPTR_MAX, UINTPTR_MAX - 6};
    uint8_t *pages = mmap(NULL, 2 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && munmap(pages + SIZE, SIZE) == 0);
    const struct {
        uint64_t address, bytes;
        bool refused;
    } wild[] = {
        {0, SIZE, false},
        {(uintptr_t)pages + SIZE, SIZE, false},
        {(uintptr_t)pages + SIZE - 1, 2, false},     /* one byte of it is not there */
        {UINT64_C(0x00007ffffffff000), SIZE, false}, /* the end of what a process may have */
        {UINT64_C(0xffff800000000000), SIZE, true},  /* the kernel's */
        {UINT64_C(0xffffffffff600000), 4096, true},  /* the page of system calls */
        {UINT64_MAX - 1, SIZE, true},                /* wraps */
        {INT64_MAX - 1, SIZE, true},
        {INT64_MAX / 2 + 2, INT64_MAX / 2, true},
    };
    struct peer peer;
    for (size_t i = 0; i < ARRAY_SIZE(wild); i++) {
        char job[32];
        snprintf(job, sizeof job, "wild-%zu", i);
        peer_connect(&peer);
        peer_open(&peer, job);
        uint16_t answer =
            register_shard(&peer, SHARDS_AREA_PRIVATE, wild[i].address, wild[i].bytes, (uintptr_t)&nonce, nonce);
        if (answer != (wild[i].refused ? MESSAGE_ERROR : MESSAGE_REGISTERED))
            FAIL("address %016llx: %.*s", (unsigned long long)wild[i].address, (int)peer.message.tail_length,
                 peer.message.tail);
        if (!wild[i].refused)
            CHECK(first_save_result(&peer) == CODE_E_LOST);
        peer_close(&peer);
    }
    peer_connect(&peer);
    peer_open(&peer, "nonces");
    for (size_t i = 0; i < ARRAY_SIZE(nonces); i++) {
        CHECK(register_shard(&peer, SHARDS_AREA_PRIVATE, (uintptr_t)pages, SIZE, nonces[i], nonce) ==
              MESSAGE_REGISTERED);
        CHECK(((const struct message_registered *)peer.message.body)->flags & REGISTERED_PRIVATE_REFUSED);
    }
    peer_close(&peer);
    munmap(pages, SIZE);
}

static void wild_addresses(void) { beside_a_good_client(&no_parallel, name_wild_addresses); }

/* Whose memory is read, and who holds the run, is what the kernel says of the socket, not the client. */
static void claim_for_another(void) {
    struct peer peer;
    char words[64];
    struct message_open open = {
        .world = 1, .pid = (uint32_t)daemon_pid(), .job_length = 5, .run_id_length = 4, .deadline_ms = PATIENCE_MS};
    peer_connect(&peer);
    peer_greet(&peer);
    CHECK(peer_send(&peer, MESSAGE_OPEN, &open, "otherpeer", 9, -1) && peer_answer(&peer) == MESSAGE_OPENED);
    char *record = file_read(test_path("local/other/1/run"), NULL);
    snprintf(words, sizeof words, "\"pid\":%d,", getpid());
    if (!strstr(record, words))
        FAIL("%s is not in the record of the run: %s", words, record);
    free(record);
    snprintf(words, sizeof words, "pid=%d job=other", getpid());
    CHECK(daemon_logged(words));
    peer_close(&peer);
}

static void another_process_is_claimed(void) { beside_a_good_client(&no_parallel, claim_for_another); }

/* Sends the table in `fd`, or (-1) in a sealed memfd. */
static void send_table(struct peer *peer, const void *table, size_t size, uint64_t said, uint32_t count, int fd) {
    int own = fd < 0 ? wire_memfd("table", table, size) : -1;
    struct message_register message = {.table_size = said, .count = count, .set = 1};
    CHECK(peer_send(peer, MESSAGE_REGISTER, &message, NULL, 0, fd < 0 ? own : fd));
    if (own >= 0)
        close(own);
}

static int register_error(struct peer *peer, const void *table, size_t size, uint64_t said, uint32_t count, int fd) {
    send_table(peer, table, size, said, count, fd);
    return peer_error(peer);
}

static void give_wrong_tables(void) {
    struct peer peer;
    uint8_t table[4096];
    peer_connect(&peer);
    peer_open(&peer, "tables");
    CHECK(register_error(&peer, table, 8, 8, UINT32_MAX, -1) == CODE_E_LIMIT);
    CHECK(register_error(&peer, table, 8, UINT64_MAX, 1, -1) == CODE_E_LIMIT);
    CHECK(register_error(&peer, table, 8, 4096, 1, -1) < 0);
    int writable = peer_memfd(4096, F_SEAL_SHRINK);
    CHECK(register_error(&peer, NULL, 0, 4096, 1, writable) < 0);
    close(writable);
    struct shards_writer writer = {0};
    struct problem problem = PROBLEM_NONE;
    struct shard shard = {.name = "wild",
                          .name_length = 4,
                          .dtype = DTYPE_U64,
                          .area = 17,
                          .contiguous = true,
                          .replica_count = 1,
                          .geometry = {.dims = 1, .shape = {100}, .extent = {100}}};
    CHECK(shards_writer_add(&writer, &shard, &problem) == 0);
    CHECK(register_error(&peer, writer.data, writer.size, writer.size, 1, -1) == CODE_E_INVALID); /* no such area */
    CHECK(register_error(&peer, writer.data, writer.size, writer.size, 2, -1) < 0);
    for (int round = 0; round < 500; round++) { /* a table with some bytes changed */
        memcpy(table, writer.data, writer.size);
        for (uint64_t changes = 1 + random_number(4); changes; changes--)
            table[random_number(writer.size)] = (uint8_t)random_number(256);
        send_table(&peer, table, writer.size, writer.size, 1, -1);
        CHECK(peer_answer(&peer)); /* it may still be a good one */
    }
    shards_writer_deinit(&writer);
    struct message_save save = {.step = 1, .set = 2};
    CHECK(peer_send(&peer, MESSAGE_SAVE, &save, NULL, 0, -1));
    CHECK(peer_error(&peer) == CODE_E_INVALID); /* not registered */
    peer_close(&peer);
}

static void wrong_tables(void) { beside_a_good_client(&no_parallel, give_wrong_tables); }

/* Requests without reading the answers, and connections that say nothing at all. */
static void flood(void) {
    struct peer silent[100], peer;
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++)
        peer_connect(&silent[i]);
    for (int round = 0; round < 5; round++) {
        peer_connect(&peer);
        peer_open(&peer, "flood");
        fcntl(peer.fd, F_SETFL, O_NONBLOCK);
        for (int i = 0; i < 20000; i++) {
            struct message_wait wait = {.step = 1, .level = LEVEL_LOCAL, .timeout_ms = 1000};
            if (!peer_send(&peer, i % 2 ? MESSAGE_WAIT : MESSAGE_VERSIONS, &wait, NULL, 0, -1) && errno != EAGAIN)
                break;
        }
        peer_close(&peer);
    }
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++)
        peer_close(&silent[i]);
}

static void floods_and_silence(void) { beside_a_good_client(&no_parallel, flood); }

#define WORDS 50000

/* The library's own client, cut off in the middle of anything. */
static void die_somewhere(void *argument) {
    (void)argument;
    uint64_t *words = calloc(WORDS, 8);
    for (;;) {
        ckpt *c = job_open("cut off");
        CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
        CHECK(ckpt_save(c, 1, NULL) >= 0);
        ckpt_restore *r = NULL;
        if (ckpt_restore_open(c, NULL, &r) == CKPT_OK) {
            ckpt_restore_prefetch(r, 0);
            ckpt_restore_close(r);
        }
        CHECK_OK(ckpt_close(c));
    }
}

static void cut_off_clients(void) {
    for (int round = 0; round < 15; round++) {
        pid_t pid = process_start(die_somewhere, NULL);
        pause_ms((unsigned)random_number(60));
        process_kill(pid);
    }
}

static void clients_cut_off_anywhere(void) { beside_a_good_client(&no_parallel, cut_off_clients); }

/* A run whose record was deleted beneath it begins anew, with another number of ranks: what is left of
 * the old one must not be counted in the new one's tables. */
static void grow_a_run(void) {
    static const uint32_t worlds[][2] = {{1, UINT32_MAX}, {UINT32_MAX, 1}};
    for (size_t i = 0; i < ARRAY_SIZE(worlds); i++) {
        struct peer first, second;
        char job[32], command[256];
        struct message_missed missed = {.step = 7};
        struct message_empty empty = {0};
        snprintf(job, sizeof job, "grown-%zu", i);
        peer_connect(&first);
        CHECK(peer_open_as(&first, job, worlds[i][0] - 1, worlds[i][0]) == MESSAGE_OPENED);
        CHECK(peer_send(&first, MESSAGE_MISSED, &missed, NULL, 0, -1) && peer_answer(&first) == MESSAGE_OK);
        snprintf(command, sizeof command, "rm -rf '%s'", test_path("local/%s", job));
        EVENTUALLY(system(command) == 0); /* the daemon may put something into it meanwhile */
        peer_connect(&second);
        CHECK(peer_open_as(&second, job, worlds[i][1] - 1, worlds[i][1]) == MESSAGE_OPENED);
        peer_send(&first, MESSAGE_CLOSE, &empty, NULL, 0, -1);
        peer_expect_end(&first); /* its run is over */
        CHECK(peer_send(&second, MESSAGE_MISSED, &missed, NULL, 0, -1) && peer_answer(&second) == MESSAGE_OK);
        CHECK(peer_send(&second, MESSAGE_CLOSE, &empty, NULL, 0, -1) && peer_answer(&second) == MESSAGE_OK);
        peer_close(&first);
        peer_close(&second);
    }
}

static void runs_that_grow(void) { beside_a_good_client(&no_parallel, grow_a_run); }

/* The socket is for its owner; whoever gets at it all the same is turned away by the daemon. */
static void connect_as_another(void *argument) {
    (void)argument;
    CHECK(setgid(12345) == 0 && setuid(12345) == 0);
    struct peer peer;
    peer_connect(&peer);
    struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    (void)!peer_send(&peer, MESSAGE_HELLO, &hello, NULL, 0, -1);
    CHECK(!peer_receive(&peer));
    peer_close(&peer);
    ckpt *c = NULL;
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.open_timeout_ms = 1000;
    CHECK(ckpt_open("stolen", &options, &c) < 0);
}

static void another_user_is_refused(void) {
    if (geteuid() != 0)
        test_skip("only root can become another user");
    daemon_start();
    struct stat status;
    CHECK(stat(test_path("sock"), &status) == 0 && (status.st_mode & 0777) == 0600);
    CHECK(chmod(test_path("."), 0755) == 0 && chmod(test_path("sock"), 0666) == 0);
    process_join(process_start(connect_as_another, NULL));
    ckpt *c = job_open("mine");
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(random_packets),
        TEST(every_message_in_every_state),
        TEST(wrong_areas),
        TEST(wrong_descriptors),
        TEST(areas_changed_under_a_copy),
        TEST(wild_addresses),
        TEST(another_process_is_claimed),
        TEST(wrong_tables),
        TEST(floods_and_silence),
        TEST(clients_cut_off_anywhere),
        TEST(runs_that_grow),
        TEST(another_user_is_refused),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
