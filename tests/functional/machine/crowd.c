/* SPDX-License-Identifier: Apache-2.0 */
/* Many users of one daemon, some of whom do not do their part; and one user for a long time. */
#include "tests/functional/beside.h"
#include "tests/functional/peer.h"
#include "tests/functional/support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* ---- many at once ---- */

struct crowd {
    _Atomic uint32_t ready;
    _Atomic int go;
    uint32_t count;
};

struct member {
    struct crowd *crowd;
    uint32_t rank;
};

#define MEMBER_WORDS 20000

static void member_name(char name[32], uint32_t rank) { snprintf(name, 32, "words of %u", rank); }

static void save_together(void *argument) {
    const struct member *member = argument;
    uint64_t *words = malloc(MEMBER_WORDS * 8);
    char name[32];
    member_name(name, member->rank);
    ckpt *c = rank_open("crowd", member->rank, member->crowd->count, "together");
    CHECK_OK(ckpt_protect_array(c, name, CKPT_U64, words, MEMBER_WORDS));
    member->crowd->ready++;
    while (!member->crowd->go)
        pause_ms(1);
    for (uint64_t step = 1; step <= 3; step++) {
        words_fill(words, MEMBER_WORDS, step * 1000 + member->rank);
        save_captured(c, step);
    }
    CHECK_OK(ckpt_wait(c, 3, CKPT_LOCAL, CKPT_VERSION, 2 * PATIENCE_MS));
    ckpt_restore *r = restore_of(c, 3);
    uint32_t other = (member->rank + 1) % member->crowd->count;
    member_name(name, other);
    restore_words_check(r, name, MEMBER_WORDS, 3000 + other);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

static void sixty_four_at_once(void) {
    enum { COUNT = 64 };
    configure(&(struct settings){.pool = "128M", .no_parallel = true});
    daemon_start();
    struct crowd *crowd = shared_memory(sizeof *crowd);
    static struct member members[COUNT];
    pid_t pids[COUNT];
    crowd->count = COUNT;
    for (uint32_t i = 0; i < COUNT; i++) {
        members[i] = (struct member){crowd, i};
        pids[i] = process_start(save_together, &members[i]);
    }
    EVENTUALLY(crowd->ready == COUNT);
    crowd->go = 1;
    for (uint32_t i = 0; i < COUNT; i++)
        process_join(pids[i]);
}

/* A thousand ranks with a kilobyte each, in a pool that could not hold a chunk of each. */
static void thousand_tiny_clients(void) {
    enum { COUNT = 1000, WORDS = 100 };
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (limit.rlim_cur < 10 * COUNT)
        test_skip("%llu descriptors are too few for a thousand clients", (unsigned long long)limit.rlim_cur);
    mounts_begin();
    mount_memory("local", "size=256m"); /* six thousand syncs are not what this is about */
    configure(&(struct settings){.pool = "64M", .chunk = "4M", .no_parallel = true});
    daemon_start();
    static ckpt *clients[COUNT];
    static uint64_t words[COUNT][WORDS];
    for (uint32_t i = 0; i < COUNT; i++) {
        char name[32];
        member_name(name, i);
        clients[i] = rank_open("tiny", i, COUNT, "run");
        words_fill(words[i], WORDS, i);
        CHECK_OK(ckpt_protect_array(clients[i], name, CKPT_U64, words[i], WORDS));
    }
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK_OK(ckpt_save(clients[i], 1, NULL));
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK_OK(ckpt_fence(clients[i], CKPT_DEFAULT_TIMEOUT));
    CHECK(status_number("counters.saves_skipped") == 0);
    CHECK_OK(ckpt_wait(clients[0], 1, CKPT_LOCAL, CKPT_VERSION, 2 * PATIENCE_MS));
    ckpt_restore *r = restore_step(clients[COUNT - 1], 1);
    for (uint32_t i = 0; i < COUNT; i += 97) {
        char name[32];
        member_name(name, i);
        restore_words_check(r, name, WORDS, i);
    }
    ckpt_restore_close(r);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK_OK(ckpt_close(clients[i]));
    EVENTUALLY(status_number("pool.reserved") == 0);
}

/* ---- bad company ---- */

/* Asks and does not read. It is listened to no more once some answers wait for it, which costs nobody anything; when
 * it reads at last, it has all of them. */
static void ask_and_not_read(void) {
    enum { SENT_MAX = 20000, TRIES = 50 };
    uint64_t before = daemon_proc("RssAnon");
    struct peer peer;
    peer_connect(&peer);
    peer_open(&peer, "deaf");
    CHECK(fcntl(peer.fd, F_SETFL, O_NONBLOCK) == 0);
    unsigned sent = 0, refused = 0;
    while (refused < TRIES) {
        struct message_wait wait = {.step = 1, .level = LEVEL_LOCAL};
        if (peer_send(&peer, MESSAGE_WAIT, &wait, NULL, 0, -1)) {
            refused = 0;
            CHECK(++sent < SENT_MAX);
        } else {
            CHECK(errno == EAGAIN);
            refused++;
            pause_ms(2);
        }
    }
    good_client_goes_on();
    uint64_t after = daemon_proc("RssAnon");
    if (MEMORY_TELLS && after > before + 4096)
        FAIL("the daemon grew from %llu to %llu KiB", (unsigned long long)before, (unsigned long long)after);
    while (sent--)
        CHECK(peer_receive(&peer));
    peer_close(&peer);
}

static void client_that_never_reads(void) {
    beside_a_good_client(&(struct settings){.no_parallel = true}, ask_and_not_read);
}

struct hidden {
    _Atomic int stage; /* 1: its save is accepted; 2: show the page; 3: its next save is LOCAL */
};

#define HIDDEN_BYTES (1 << 20)

/* A trainer one page of which does not come: whoever reads it waits until its handler gives it. */
static void train_with_a_hidden_page(void *argument) {
    struct hidden *hidden = argument;
    char job[32];
    snprintf(job, sizeof job, "hidden-%d", getpid());
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    uint64_t *words = mmap(NULL, HIDDEN_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register whole = {.range = {.start = (uintptr_t)words, .len = HIDDEN_BYTES},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(fd >= 0 && words != MAP_FAILED && ioctl(fd, UFFDIO_API, &api) == 0);
    CHECK(ioctl(fd, UFFDIO_REGISTER, &whole) == 0);
    ckpt *c = job_open(job);
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, HIDDEN_BYTES / 8));
    CHECK_OK(ckpt_save(c, 1, NULL));
    CHECK_IS(CKPT_E_TIMEOUT, ckpt_fence(c, 200));
    hidden->stage = 1;
    while (hidden->stage != 2)
        pause_ms(2);
    struct uffdio_zeropage zeros = {.range = whole.range};
    CHECK(ioctl(fd, UFFDIO_ZEROPAGE, &zeros) == 0);
    words_fill(words, HIDDEN_BYTES / 8, 2);
    EVENTUALLY(ckpt_save(c, 2, NULL) == CKPT_OK);
    CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
    CHECK_OK(ckpt_wait(c, 2, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    ckpt_restore *r = restore_step(c, 2);
    restore_words_check(r, "words", HIDDEN_BYTES / 8, 2);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
    hidden->stage = 3;
}

static void hide_pages(void) {
    enum { COUNT = 7 }; /* more than there are workers */
    struct hidden *hidden = shared_memory(COUNT * sizeof *hidden);
    pid_t pids[COUNT];
    for (int i = 0; i < COUNT; i++) {
        pids[i] = process_start(train_with_a_hidden_page, &hidden[i]);
        EVENTUALLY(hidden[i].stage == 1);
    }
    good_client_goes_on();
    CHECK(daemon_logged("a capture worker is stuck in the memory of process"));
    process_kill(pids[0]); /* with it goes its page, and who waits for it */
    for (int i = 1; i < COUNT; i++)
        hidden[i].stage = 2;
    for (int i = 1; i < COUNT; i++)
        process_join(pids[i]);
    EVENTUALLY(status_number("counters.captures_failed") == COUNT);
}

static void page_that_does_not_come(void) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (fd < 0)
        test_skip("userfaultfd is not allowed here: %s", strerror(errno));
    close(fd);
    beside_a_good_client(&(struct settings){.no_parallel = true, .deadlines = "capture_s = 3"}, hide_pages);
}

/* ---- long use ---- */

static void flat_over_a_thousand_saves(void) {
    enum { WORDS = 4000 };
    mounts_begin();
    mount_memory("local", "size=64m");
    mount_memory("parallel", "size=64m");
    configure(&(struct settings){.pool = "4M", .local = "trash_grace_s = 0", .parallel = "trash_grace_s = 0"});
    daemon_start();
    static uint64_t words[WORDS];
    ckpt *c = job_open("long");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    uint64_t memory = 0;
    unsigned descriptors = 0;
    for (uint64_t step = 1; step <= 1000; step++) {
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        words_fill(words, WORDS, step);
        int r;
        while ((r = ckpt_save(c, step, NULL)) == CKPT_SKIPPED)
            ;
        CHECK_OK(r);
        if (step == 100 || step == 1000) {
            CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
            CHECK_OK(ckpt_wait(c, step, CKPT_GLOBAL, CKPT_VERSION, PATIENCE_MS));
            EVENTUALLY(status_number("tiers.0.pending_parts") == 0 && status_number("pool.reserved") == 0);
        }
        if (step == 100) {
            memory = daemon_proc("RssAnon");
            descriptors = daemon_descriptors();
        }
    }
    EVENTUALLY(daemon_descriptors() <= descriptors);
    uint64_t after = daemon_proc("RssAnon");
    printf("RssAnon %llu KiB after 100 saves, %llu KiB after 1000; %u descriptors\n", (unsigned long long)memory,
           (unsigned long long)after, descriptors);
    if (MEMORY_TELLS && after > memory + 1024)
        FAIL("the daemon grew from %llu to %llu KiB", (unsigned long long)memory, (unsigned long long)after);
    ckpt_restore *r = restore_step(c, 1000);
    restore_words_check(r, "words", WORDS, 1000);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {
        TEST(sixty_four_at_once),      TEST(thousand_tiny_clients),      TEST(client_that_never_reads),
        TEST(page_that_does_not_come), TEST(flat_over_a_thousand_saves),
    };
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
