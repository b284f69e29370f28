/* SPDX-License-Identifier: Apache-2.0 */
/* A shard of more than 2^31 bytes, through a pool much smaller than it. */
#include "base/memory.h"
#include "tests/functional/support.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#define BYTES (UINT64_C(3) << 30)
#define STRIDE (UINT64_C(1) << 26) /* a mark every 64 MiB, zeros between */

static void three_gibibytes(void) {
    struct statvfs disk;
    CHECK(statvfs(test_path("."), &disk) == 0);
    if (disk.f_bavail * disk.f_frsize < 2 * BYTES)
        test_skip("less than %llu GiB of disk are free", (unsigned long long)(2 * BYTES >> 30));
    if (memory_available() < UINT64_C(1) << 30)
        test_skip("less than 1 GiB of memory is free");
    configure(&(struct settings){.pool = "256M", .chunk = "4M", .local = "codec = lz4", .no_parallel = true});
    daemon_start();
    uint64_t count = BYTES / 8;
    uint64_t *words = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(words != MAP_FAILED);
    for (uint64_t at = 0; at < count; at += STRIDE / 8)
        words[at] = at + 1;
    words[count - 1] = 42;
    ckpt *c = job_open("large");
    CHECK_OK(ckpt_protect_array(c, "large", CKPT_U64, words, count));
    CHECK_OK(ckpt_save(c, 1, NULL));
    CHECK_OK(ckpt_fence(c, 4 * PATIENCE_MS));
    CHECK_OK(ckpt_wait(c, 1, CKPT_LOCAL, CKPT_VERSION, CKPT_DEFAULT_TIMEOUT));
    munmap(words, BYTES);
    ckpt_restore *r = restore_step(c, 1);
    uint64_t *window = malloc(STRIDE);
    for (uint64_t at = 0; at < count; at += STRIDE / 8) {
        struct ckpt_read read;
        CKPT_INIT(read);
        read.dtype = CKPT_U64;
        read.name = "large";
        read.data = window;
        read.dimensions = 1;
        read.range = 1;
        read.start = at;
        read.count = STRIDE / 8;
        CHECK_OK(ckpt_restore_read(r, &read));
        CHECK(window[0] == at + 1);
        for (uint64_t i = 1; i + 1 < STRIDE / 8; i++)
            if (window[i])
                FAIL("word %llu is not zero", (unsigned long long)(at + i));
        CHECK(window[STRIDE / 8 - 1] == (at + STRIDE / 8 == count ? 42 : 0));
    }
    free(window);
    ckpt_restore_close(r);
    CHECK_OK(ckpt_close(c));
}

int main(int argc, char **argv) {
    const struct test tests[] = {TEST(three_gibibytes)};
    return tests_run(tests, ARRAY_SIZE(tests), argc, argv);
}
