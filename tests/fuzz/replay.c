/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay CORPUS...: runs a fuzz target without libFuzzer: on every file of the directories (or on the
 * files) given, then on seeded mutations of them, the same number everywhere unless the machine
 * is too slow for that. With KEEP=FILE in the environment each input is written there first, so
 * that the one that ends the program is found in it.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/unit/proto/unit.h"

#include <dirent.h>
#include <err.h>
#include <fcntl.h>
#include <sys/stat.h>

#define INPUT_MAX KIB(64)
#define MUTATIONS 10000
#define MUTATIONS_MS 2000

struct input {
    uint8_t *data;
    size_t size;
};

struct corpus {
    struct input *items;
    size_t count;
};

static void run(const uint8_t *data, size_t size) {
    const char *keep = getenv("KEEP");
    CLEANUP(closep) int fd = keep ? open(keep, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    if (keep && (fd < 0 || write(fd, data, size) != (ssize_t)size))
        err(1, "%s", keep);
    /* Exactly so much memory, so that AddressSanitizer sees a read behind the end. */
    CLEANUP(freep) uint8_t *exact = malloc(size);
    if (size)
        memcpy(exact, data, size);
    LLVMFuzzerTestOneInput(exact, size);
}

static void add_file(struct corpus *corpus, const char *path) {
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    struct input input = {0};
    if (fd < 0 || fstat(fd, &status) < 0)
        err(1, "%s", path);
    input.data = malloc((size_t)status.st_size + 1);
    ssize_t got = read(fd, input.data, (size_t)status.st_size);
    if (got != status.st_size)
        err(1, "%s", path);
    input.size = (size_t)got;
    corpus->items = realloc(corpus->items, (corpus->count + 1) * sizeof *corpus->items);
    corpus->items[corpus->count++] = input;
}

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void add(struct corpus *corpus, const char *path) {
    struct dirent **entries;
    int count = scandir(path, &entries, is_visible, alphasort);
    if (count < 0) {
        add_file(corpus, path);
        return;
    }
    for (int i = 0; i < count; i++) {
        CLEANUP(freep) char *file = NULL;
        if (asprintf(&file, "%s/%s", path, entries[i]->d_name) < 0)
            err(1, "asprintf");
        add_file(corpus, file);
        free(entries[i]);
    }
    free(entries);
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / NANOSECONDS_PER_MS;
}

int main(int argc, char **argv) {
    struct corpus corpus = {0};
    for (int i = 1; i < argc; i++)
        add(&corpus, argv[i]);
    if (!corpus.count)
        errx(1, "no inputs");
    run((const uint8_t *)"", 0);
    for (size_t i = 0; i < corpus.count; i++)
        run(corpus.items[i].data, corpus.items[i].size);

    struct random random = random_seeded("replay");
    CLEANUP(freep) uint8_t *mutant = malloc(INPUT_MAX);
    uint64_t end = now_ms() + MUTATIONS_MS;
    unsigned mutations = 0;
    while (mutations < MUTATIONS && now_ms() < end) {
        const struct input *input = &corpus.items[random_below(&random, corpus.count)];
        size_t size = min_u64(input->size, INPUT_MAX);
        memcpy(mutant, input->data, size);
        size = random_mutate(&random, mutant, size, INPUT_MAX);
        run(mutant, size);
        mutations++;
    }
    printf("%zu inputs and %u mutations of them\n", corpus.count, mutations);
    for (size_t i = 0; i < corpus.count; i++)
        free(corpus.items[i].data);
    free(corpus.items);
}
