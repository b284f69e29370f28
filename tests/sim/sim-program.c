/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer that uses libckpt, as programs do: opens, restores what its run resumes from, protects
 * private and shared memory, and for each step changes it, saves and fences. Its process is a fiber
 * (sim-process.c): when it is killed, the handle stays as it is and is never touched again.
 *
 * Each call has a bound: its own timeout, and what the library adds to it.
 */
#include "client/handle.h"
#include "tests/sim/sim-trainer.h"

#include <errno.h>

#define SLACK_MS 2000 /* until a process that could go on does */
#define GRACE_MS 2000 /* that the library adds for the answer */
#define OPEN_MS 90000 /* defaults of the library */
#define FENCE_MS 60000
#define REGISTER_MS 11000 /* a second to connect, and ten to register */
#define LONG_MS 600000

static void say(const struct trainer *t, const char *what, long long number) {
    sim_note("rank %u of %s: %s %lld", t->options.rank, t->options.run_id, what, number);
}

static void pause_ms(uint64_t ms) { fiber_wait(sim.now_ns + ms * NANOSECONDS_PER_MS, -1); }

/* ---- calls ---- */

/* What a call returned, and when. True: it has done what it should. */
static bool returned(const struct trainer *t, const char *call, int result, uint64_t began_ns, uint64_t bound_ms) {
    uint64_t took_ms = (sim.now_ns - began_ns) / NANOSECONDS_PER_MS;
    sim_note("rank %u of %s: %s returns %s%s%s", t->options.rank, t->options.run_id, call, ckpt_strerror(result),
             result < 0 ? ": " : "", result < 0 ? ckpt_strerror_last() : "");
    SIM_CHECK(took_ms <= bound_ms + SLACK_MS || t->held_ns > began_ns, "every call ends by its deadline",
              "rank %u of %s: %s took %llu ms of %llu", t->options.rank, t->options.run_id, call,
              (unsigned long long)took_ms, (unsigned long long)bound_ms);
    bool understood = result != CKPT_E_PROTOCOL && result != CKPT_E_BUG && result != CKPT_E_VERSION &&
                      result != CKPT_E_MISMATCH && result != CKPT_E_FORKED;
    SIM_CHECK(understood, "library and daemon understand each other", "%s: %s", call, ckpt_strerror_last());
    SIM_CHECK(result >= 0 || !t->options.quiet, "without faults everything succeeds", "rank %u of %s: %s: %s",
              t->options.rank, t->options.run_id, call, ckpt_strerror_last());
    return result == CKPT_OK;
}

#define CALL(t, bound_ms, name, ...)                                                                                   \
    ({                                                                                                                 \
        uint64_t began_ns_ = sim.now_ns;                                                                               \
        int result_ = name(__VA_ARGS__);                                                                               \
        (void)returned(t, #name, result_, began_ns_, bound_ms);                                                        \
        result_;                                                                                                       \
    })

/* ---- memory ---- */

static void fill(struct trainer *t) {
    sim_image_fill(t->own, LOCAL_SIZE, sim_random());
    sim_image_fill(t->inline_bytes, STATE_SIZE, sim_random());
}

static void fill_row(struct trainer *t) { sim_image_fill(t->row, t->options.size, sim_random()); }

/* Private, or shared with the daemon. */
static bool allocate(struct trainer *t, size_t size, uint8_t **ret_memory) {
    void *memory = NULL;
    if (sim_chance(1, 3) && CALL(t, 0, ckpt_alloc, t->ckpt, size, &memory) != CKPT_OK)
        return false;
    *ret_memory = memory ? memory : malloc(size);
    assert(*ret_memory);
    return true;
}

static bool protect(struct trainer *t) {
    struct ckpt_shard row, own;
    const uint64_t shape[] = {t->options.world, t->options.size}, offset[] = {t->options.rank, 0};
    const uint64_t extent[] = {1, t->options.size}, own_shape[] = {LOCAL_SIZE};
    if (!allocate(t, t->options.size, &t->row) || !allocate(t, LOCAL_SIZE, &t->own))
        return false;
    t->inline_bytes = malloc(STATE_SIZE);
    assert(t->inline_bytes);
    CKPT_INIT(row);
    row.dtype = CKPT_U8;
    row.name = "w";
    row.data = t->row;
    row.dimensions = 2;
    row.shape = shape;
    row.offset = offset;
    row.extent = extent;
    CKPT_INIT(own);
    own.dtype = CKPT_U8;
    own.name = "rng";
    own.data = t->own;
    own.dimensions = 1;
    own.shape = own_shape;
    own.flags = CKPT_RANK_LOCAL;
    return CALL(t, 0, ckpt_protect, t->ckpt, &row, &t->row_id) == CKPT_OK &&
           CALL(t, 0, ckpt_protect, t->ckpt, &own, NULL) == CKPT_OK;
}

/* ---- restoring ---- */

/* What a restore brought, all ranks of it. */
struct brought {
    struct version_id id;
    uint32_t world;
    uint8_t *rows;
};

static bool check_rank(struct trainer *t, ckpt_restore *restore, const struct brought *brought, uint32_t rank) {
    uint8_t own[LOCAL_SIZE];
    const void *inline_bytes;
    uint64_t inline_length, size;
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U8;
    read.name = "rng";
    read.data = own;
    read.dimensions = 1;
    read.flags = CKPT_RANK_LOCAL;
    read.rank = rank;
    if (CALL(t, 8 * LONG_MS, ckpt_restore_read, restore, &read) != CKPT_OK ||
        CALL(t, 8 * LONG_MS, ckpt_restore_state, restore, rank, &inline_bytes, &inline_length) != CKPT_OK)
        return false;
    const struct sim_state state = {.row = brought->rows + (uint64_t)rank * t->options.size,
                                    .own = own,
                                    .inline_bytes = inline_bytes,
                                    .inline_length = inline_length};
    struct sim_image layout;
    sim_image_init(&layout, rank, brought->world, t->options.size);
    uint8_t *image = sim_image_make(&layout, &state, &size);
    model_check_image(brought->id, rank, image, size, "a restore");
    free(image);
    sim_image_deinit(&layout);
    return true;
}

/* The same bytes, without a copy if they lie well. */
static bool check_map(struct trainer *t, ckpt_restore *restore, const struct brought *brought) {
    const void *mapped;
    uint64_t size;
    if (CALL(t, 8 * LONG_MS, ckpt_restore_map, restore, "w", 0, &mapped, &size) != CKPT_OK)
        return false;
    bool same = size == brought->world * t->options.size && memcmp(mapped, brought->rows, size) == 0;
    SIM_CHECK(same, "bytes are those of the moment of the save", "a mapped tensor of %llu bytes differs",
              (unsigned long long)size);
    return true;
}

static bool check_all(struct trainer *t, ckpt_restore *restore, const struct brought *brought) {
    struct ckpt_read read;
    CKPT_INIT(read);
    read.dtype = CKPT_U8;
    read.name = "w";
    read.data = brought->rows;
    read.dimensions = 2;
    if (sim_chance(1, 3) && CALL(t, LONG_MS, ckpt_restore_prefetch, restore, UINT32_MAX) != CKPT_OK)
        return false;
    if (CALL(t, 8 * LONG_MS, ckpt_restore_read, restore, &read) != CKPT_OK)
        return false;
    for (uint32_t rank = 0; rank < brought->world; rank++)
        if (!check_rank(t, restore, brought, rank))
            return false;
    return !sim_chance(1, 3) || check_map(t, restore, brought);
}

static void restore(struct trainer *t) {
    struct ckpt_restore_options options;
    struct ckpt_restore_info info;
    struct ckpt_info own;
    ckpt_restore *restore;
    CKPT_INIT(options);
    CKPT_INIT(info);
    CKPT_INIT(own);
    bool to_resume = !t->ckpt->saves.any;
    uint64_t began_ns = sim.now_ns;
    int r = ckpt_restore_open(t->ckpt, &options, &restore);
    if (r < 0 && to_resume && t->ckpt->session.resumes &&
        !model_reachable((struct version_id){t->ckpt->session.resume_generation, t->ckpt->session.resume_step},
                         t->options.node))
        say(t, "cannot reach step", (long long)t->ckpt->session.resume_step);
    else
        (void)returned(t, "ckpt_restore_open", r, began_ns, 2 * LONG_MS + GRACE_MS);
    (void)CALL(t, 0, ckpt_get_info, t->ckpt, &own);
    SIM_CHECK(r != CKPT_NONE || !to_resume || !own.resumes, "a run restores what it resumes from", "none");
    if (r != CKPT_OK)
        return;
    (void)CALL(t, 0, ckpt_restore_get_info, restore, &info);
    SIM_CHECK(!to_resume || (own.resumes && info.generation == own.resume_generation && info.step == own.resume_step),
              "a run restores what it resumes from", "%llu/%llu", (unsigned long long)info.generation,
              (unsigned long long)info.step);
    const struct brought brought = {.id = {info.generation, info.step},
                                    .world = info.world,
                                    .rows = malloc(max_u64(info.world * t->options.size, 1))};
    assert(brought.rows);
    if (check_all(t, restore, &brought))
        say(t, "has restored step", (long long)info.step);
    free(brought.rows);
    ckpt_restore_close(restore);
}

/* ---- saving ---- */

static struct save *expect(struct trainer *t, uint64_t step, uint64_t inline_length) {
    const struct sim_state state = {
        .row = t->row, .own = t->own, .inline_bytes = t->inline_bytes, .inline_length = inline_length};
    uint64_t size;
    uint8_t *image = sim_image_make(&t->image, &state, &size);
    struct save *save = model_save((struct version_id){t->ckpt->session.generation, step}, t->options.rank,
                                   t->options.world, t->options.node, image, size);
    free(image);
    return save;
}

/* The memory may change after this, whatever it returns. */
static void fence(struct trainer *t, struct save *save) {
    static const uint64_t timeouts_ms[] = {CKPT_NO_WAIT, 1, 20};
    bool impatient = !t->options.quiet && sim_chance(1, 6);
    uint64_t timeout_ms = impatient ? timeouts_ms[sim_below(ARRAY_SIZE(timeouts_ms))] : CKPT_DEFAULT_TIMEOUT;
    uint64_t before = word_load(t->ckpt->session.word);
    if (sim_bug("early-change"))
        fill_row(t);
    int r = CKPT_OK;
    if (sim_chance(1, 4)) {
        r = CALL(t, FENCE_MS, ckpt_fence_shard, t->ckpt, t->row_id, timeout_ms);
        fill_row(t);
    }
    int all = CALL(t, FENCE_MS, ckpt_fence, t->ckpt, timeout_ms);
    r = r == CKPT_OK ? all : r;
    if (r == CKPT_E_TIMEOUT && sim_bug("revoked-commit"))
        atomic_store(&t->ckpt->session.word->word, before);
    save->state = r == CKPT_OK ? SAVE_CAPTURED : SAVE_VOID;
    fill(t);
    fill_row(t);
}

/* False: nothing was taken. */
static bool save(struct trainer *t, uint64_t step) {
    struct ckpt_save_options options;
    CKPT_INIT(options);
    options.state = t->inline_bytes;
    options.state_size = sim_chance(1, 2) ? 1 + sim_below(STATE_SIZE) : 0;
    options.to = t->options.quiet || sim_chance(3, 4) ? 0 : CKPT_LOCAL;
    options.check = sim_chance(1, 8);
    options.urgent = sim_chance(1, 10);
    options.busy_timeout_ms = t->options.quiet ? LONG_MS : 1000;
    fill(t);
    fill_row(t);
    struct save *expected = expect(t, step, options.state_size);
    say(t, "saves step", (long long)step);
    int r = CALL(t, REGISTER_MS + options.busy_timeout_ms + GRACE_MS, ckpt_save, t->ckpt, step, &options);
    if (r != CKPT_OK) {
        expected->state = SAVE_VOID;
        return false;
    }
    SIM_CHECK(t->ckpt->saves.image_size == expected->image_size &&
                  t->ckpt->session.generation == expected->id.generation,
              "client and daemon see the same image", "%llu and %llu bytes",
              (unsigned long long)t->ckpt->saves.image_size, (unsigned long long)expected->image_size);
    if (sim_chance(1, 20)) /* as if the process had forked: it is read in another way from now on */
        atomic_fetch_add(&t->ckpt->forks, 1);
    if (sim_chance(1, 3))
        pause_ms(sim_below(30));
    fence(t, expected);
    return expected->state == SAVE_CAPTURED;
}

/* ---- questions ---- */

static void wait_level(struct trainer *t, uint64_t step, uint32_t level, bool must) {
    uint32_t scope = must || sim_chance(1, 2) ? CKPT_VERSION : CKPT_PART;
    uint64_t timeout_ms = must ? LONG_MS : 1 + sim_below(2) * sim_below(8000), began_ns = sim.now_ns;
    uint32_t epoch = t->ckpt->session.epoch;
    int r = must || sim_chance(2, 3) ? ckpt_wait(t->ckpt, step, level, scope, timeout_ms)
                                     : ckpt_test(t->ckpt, step, level, scope);
    if (r == CKPT_E_IO && session_is_up(&t->ckpt->session) && t->ckpt->session.epoch == epoch)
        model_given_up((struct version_id){t->ckpt->session.generation, step}, ckpt_strerror_last());
    if (must || r != CKPT_E_TIMEOUT)
        (void)returned(t, "ckpt_wait", r, began_ns, 2 * timeout_ms + GRACE_MS);
    SIM_CHECK(r == CKPT_OK || !must, "without faults everything becomes GLOBAL", "rank %u, step %llu: %s",
              t->options.rank, (unsigned long long)step, ckpt_strerror(r));
    if (r == CKPT_OK && level >= CKPT_LOCAL)
        model_durable((struct version_id){t->ckpt->session.generation, step}, t->options.rank, t->options.node,
                      (enum level)level, scope == CKPT_VERSION);
}

static void ask_something(struct trainer *t) {
    struct ckpt_durable durable;
    struct ckpt_version_entry *versions;
    size_t count;
    CKPT_INIT(durable);
    switch (sim_below(12)) {
    case 0:
        if (CALL(t, OPEN_MS, ckpt_last_durable, t->ckpt, CKPT_GLOBAL, &durable) == CKPT_OK)
            model_durable((struct version_id){durable.generation, durable.step}, t->options.rank, t->options.node,
                          LEVEL_GLOBAL, true);
        break;
    case 1:
        if (CALL(t, OPEN_MS, ckpt_versions, t->ckpt, &versions, &count) != CKPT_OK)
            break;
        for (size_t i = 0; i < count; i++)
            if (versions[i].levels & 1u << CKPT_GLOBAL)
                model_durable((struct version_id){versions[i].generation, versions[i].step}, 0, t->options.node,
                              LEVEL_GLOBAL, true);
        ckpt_versions_free(versions);
        break;
    case 2:
        restore(t);
        break;
    default:
        break;
    }
}

/* ---- life ---- */

static bool come_in(struct trainer *t) {
    struct ckpt_open_options options;
    CKPT_INIT(options);
    options.rank = t->options.rank;
    options.world = t->options.world;
    options.run_id = t->options.run_id;
    options.socket = "simulated";
    if (CALL(t, OPEN_MS, ckpt_open, SIM_JOB, &options, &t->ckpt) != CKPT_OK)
        return false;
    const struct session *session = &t->ckpt->session;
    say(t, "opened generation", (long long)session->generation);
    model_opened(t->options.run_id, session->generation, session->resumes,
                 (struct version_id){session->resume_generation, session->resume_step});
    return true;
}

static void step_once(struct trainer *t, uint64_t step) {
    static const uint64_t pauses_ms[] = {0, 1, 20, 400, 3000};
    pause_ms(sim_below(1 + pauses_ms[sim_below(ARRAY_SIZE(pauses_ms))]));
    bool captured = save(t, step);
    if (!captured && !t->options.quiet && sim_chance(1, 2))
        captured = save(t, step);
    bool last = t->options.quiet && step == t->options.steps;
    if (last || sim_chance(1, 2))
        wait_level(t, step, last ? CKPT_GLOBAL : 1 + (uint32_t)sim_below(4), last);
    if (!last)
        ask_something(t);
}

/* The kernel takes what a process leaves. */
static void give_back(struct trainer *t) {
    sim_image_deinit(&t->image);
    t->ckpt = NULL;
    kernel_process_end(t->pid);
}

void program_live(void *argument) {
    struct trainer *t = argument;
    sim_image_init(&t->image, t->options.rank, t->options.world, t->options.size);
    bool in = false;
    for (int tries = t->options.quiet ? 1 : 4; !in && tries > 0; tries--)
        in = come_in(t);
    if (in && (t->ckpt->session.resumes || sim_chance(1, 2)))
        restore(t);
    in = in && protect(t);
    for (uint64_t step = 1; in && step <= t->options.steps; step++)
        step_once(t, step);
    t->closing = true;
    bool closed = t->ckpt && CALL(t, FENCE_MS + GRACE_MS, ckpt_close, t->ckpt) == CKPT_OK;
    t->failed = !in || !closed;
    say(t, t->failed ? "fails" : "is done", 0);
    give_back(t);
    t->fiber = NULL;
}
