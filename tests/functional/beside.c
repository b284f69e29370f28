/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/functional/beside.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/wait.h>

#define WORDS 50000

/* In memory that both processes share. */
struct good {
    _Atomic uint64_t rounds, skipped;
    _Atomic bool stop;
};

static struct good *good;

/* Saves and restores until told to stop; every byte must be right. A save may be skipped while others
 * hold the pool, as the library promises; it counts as no round. */
static void behave_well(void *argument) {
    (void)argument;
    uint64_t *words = malloc(WORDS * 8);
    ckpt *c = job_open("good");
    CHECK_OK(ckpt_protect_array(c, "words", CKPT_U64, words, WORDS));
    for (uint64_t step = 1; step == 1 || !good->stop; step++) {
        words_fill(words, WORDS, step);
        int r = ckpt_save(c, step, NULL);
        if (r == CKPT_SKIPPED) {
            good->skipped++;
            continue;
        }
        CHECK_OK(r);
        CHECK_OK(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT));
        CHECK_OK(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
        ckpt_restore *r_open = restore_of(c, step);
        restore_words_check(r_open, "words", WORDS, step);
        ckpt_restore_close(r_open);
        good->rounds++;
    }
    CHECK_OK(ckpt_close(c));
    free(words);
}

void good_client_goes_on(void) {
    uint64_t before = good->rounds;
    EVENTUALLY(good->rounds > before + 1);
}

void beside_a_good_client(const struct settings *settings, void (*attack)(void)) {
    configure(settings);
    daemon_start();
    good = shared_memory(sizeof *good);
    pid_t process = process_start(behave_well, NULL);
    EVENTUALLY(good->rounds > 0);
    pid_t daemon = daemon_pid();
    attack();
    good_client_goes_on();
    good->stop = true;
    process_join(process);
    printf("             %" PRIu64 " good rounds, %" PRIu64 " saves skipped\n", good->rounds, good->skipped);
    CHECK(daemon_pid() == daemon && waitpid(daemon, NULL, WNOHANG) == 0);
}
