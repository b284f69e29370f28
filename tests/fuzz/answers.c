/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon answers: a program goes through the library's calls with a daemon whose answers and
 * events are changed on their way, some numbers in some of them, as the input says. Whatever they say,
 * each call ends with a documented result before its deadline.
 *
 * The input: 12 bytes for each change: which packet (of those sent), where in it, how wide, what.
 */
#include "client/ckpt.h"
#include "client/errors.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/client/fake-daemon.h"

#define PATIENCE_MS 5 /* of each call */
#define CHANGES_MAX 8
#define PACKETS 32
#define COUNT 4096
#define TENSORS_READ 4

struct change {
    unsigned packet, at, width;
    uint64_t value;
};

struct changes {
    struct change items[CHANGES_MAX];
    size_t count;
    atomic_uint sent;
};

static void change_packet(void *context, struct wire_packet *packet) {
    struct changes *changes = context;
    unsigned number = changes->sent++;
    for (size_t i = 0; i < changes->count; i++) {
        const struct change *change = &changes->items[i];
        if (change->packet != number % PACKETS)
            continue;
        size_t at = change->at % packet->size, width = min_u64(change->width, packet->size - at);
        memcpy(packet->data + at, &change->value, width);
    }
}

static struct fake *fake;

static void end(void) { fake_free(fake); }

static void check(int result) { assert(result >= 0 || error_known(result)); }

static void read_tensors(ckpt_restore *restore) {
    static uint8_t destination[COUNT * 8];
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    check(ckpt_restore_get_info(restore, &info));
    for (uint64_t i = 0; i < info.tensors && i < TENSORS_READ; i++) {
        struct ckpt_tensor tensor;
        CKPT_INIT(tensor);
        check(ckpt_restore_tensor(restore, i, &tensor));
        struct ckpt_read read;
        CKPT_INIT(read);
        read.name = tensor.name;
        read.dtype = tensor.dtype;
        read.rank = tensor.rank;
        read.flags = tensor.flags;
        read.range = 1;
        read.count = COUNT / 2;
        read.data = destination;
        check(ckpt_restore_read(restore, &read));
        const void *map;
        uint64_t size;
        int r = ckpt_restore_map(restore, tensor.name, tensor.rank, &map, &size);
        check(r);
        for (uint64_t byte = 0; r == CKPT_OK && byte < size; byte += 4096)
            (void)*((const volatile uint8_t *)map + byte);
    }
    const void *state;
    uint64_t size;
    int r = ckpt_restore_state(restore, 0, &state, &size);
    check(r);
    for (uint64_t byte = 0; r == CKPT_OK && byte < size; byte++)
        (void)*((const volatile uint8_t *)state + byte);
    check(ckpt_restore_prefetch(restore, UINT32_MAX));
}

static void ask(ckpt *c) {
    struct ckpt_durable durable;
    CKPT_INIT(durable);
    struct ckpt_version_entry *versions = NULL;
    size_t count = 0;
    check(ckpt_last_durable(c, CKPT_LOCAL, &durable));
    int r = ckpt_versions(c, &versions, &count);
    check(r);
    for (size_t i = 0; r == CKPT_OK && i < count; i++)
        (void)*(const volatile uint64_t *)&versions[i].step;
    ckpt_versions_free(versions);
}

static void use(ckpt *c) {
    static float memory[COUNT];
    check(ckpt_protect_array(c, "memory", CKPT_F32, memory, COUNT));
    void *shared;
    if (ckpt_alloc(c, sizeof memory, &shared) == CKPT_OK)
        check(ckpt_protect_array(c, "shared", CKPT_F32, shared, COUNT));
    for (uint64_t step = 1; step <= 2; step++) {
        struct ckpt_save_options options;
        CKPT_INIT(options);
        options.state = "state";
        options.state_size = 5;
        check(ckpt_save(c, step, &options));
        check(ckpt_fence(c, PATIENCE_MS));
        check(ckpt_wait(c, step, CKPT_LOCAL, CKPT_VERSION, PATIENCE_MS));
    }
    ask(c);
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.timeout_ms = PATIENCE_MS;
    ckpt_restore *restore = NULL;
    int r = ckpt_restore_open(c, &options, &restore);
    check(r);
    if (r == CKPT_OK) {
        read_tensors(restore);
        ckpt_restore_close(restore);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct changes changes;
    struct feed feed = {data, size};
    if (!fake) {
        fake = fake_new();
        atexit(end);
        fake_stop(fake);
    }
    fake_start(fake); /* knows nothing of the last input's client */
    changes.sent = 0;
    for (changes.count = 0; feed.left && changes.count < CHANGES_MAX; changes.count++) {
        struct change *change = &changes.items[changes.count];
        change->packet = (unsigned)feed_below(&feed, PACKETS);
        change->at = (unsigned)feed_number(&feed, 2);
        change->width = 1u << feed_below(&feed, 4);
        change->value = feed_number(&feed, 8);
    }
    fake_knobs(fake)->tamper_context = &changes;
    fake_knobs(fake)->tamper = change_packet;
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.socket = fake_path(fake);
    options.run_id = "run";
    options.open_timeout_ms = PATIENCE_MS * 4;
    options.busy_timeout_ms = CKPT_NO_WAIT;
    ckpt *c = NULL;
    int r = ckpt_open("job", &options, &c);
    check(r);
    if (r == CKPT_OK) {
        use(c);
        check(ckpt_close(c));
    }
    fake_stop(fake);
    return 0;
}
