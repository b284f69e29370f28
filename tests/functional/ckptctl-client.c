/* SPDX-License-Identifier: Apache-2.0 */
/* A job for the tests of ckptctl: saves steps 1, 2 and 3, each durable at LOCAL before the next, says
 * "saved" on stdout, and stays until its stdin ends. */
#include "client/ckpt.h"

#include <stdio.h>
#include <stdlib.h>

#define COUNT (1 << 20)

static void check(int result, const char *what) {
    if (result == CKPT_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, ckpt_strerror(result), ckpt_strerror_last());
    exit(1);
}

int main(void) {
    static float weights[COUNT];
    ckpt *c;
    check(ckpt_open("live", NULL, &c), "open");
    check(ckpt_protect_array(c, "model/weights", CKPT_F32, weights, COUNT), "protect");
    for (uint64_t step = 1; step <= 3; step++) {
        check(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT), "fence");
        for (int i = 0; i < COUNT; i++)
            weights[i] = (float)((uint64_t)i + step);
        check(ckpt_save(c, step, NULL), "save");
        check(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT), "wait");
    }
    puts("saved");
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    check(ckpt_close(c), "close");
    return 0;
}
