/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer: one rank of a run, as a fiber that speaks the protocol itself (those that use libckpt are
 * in sim-program.c), in ways that the library never does. It restores, registers, and for
 * each step fills its memory with bytes that no other step has, saves, fences, spoils its memory,
 * and at times waits for a level. It gives fences up at random, loses its daemon and comes back to
 * the next one. Whatever it is told or handed is checked against the model.
 */
#include "tests/sim/sim-trainer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#define CONNECT_TRIES 400
#define PROMPT_MS 3000   /* the control thread's part of any answer */
#define TIERS_MS 2000000 /* of answers that tiers must give, which stall */

static uint64_t after_ms(uint64_t ms) { return sim.now_ns + ms * NANOSECONDS_PER_MS; }

static void hang_up(struct trainer *t) {
    wire_packet_close(&t->packet);
    sim_descriptors_changed();
    if (t->fd >= 0)
        close(steal_fd(&t->fd));
    for (size_t i = 0; i < SEGMENTS_KEPT; i++)
        if (t->segments[i] >= 0)
            close(steal_fd(&t->segments[i]));
}

static void say(struct trainer *t, const char *what, long long number) {
    sim_note("rank %u of %s: %s %lld", t->options.rank, t->options.run_id, what, number);
}

/* ---- talking ---- */

enum { HEARD, SILENCE, GONE };

static void take_segment(struct trainer *t) {
    const struct message_segment *segment = t->message.body;
    if (segment->segment < SEGMENTS_KEPT && t->segments[segment->segment] < 0)
        t->segments[segment->segment] = steal_fd(&t->packet.fd);
}

/* The next packet. Events are dealt with. */
static int hear(struct trainer *t, uint64_t until_ns) {
    struct problem problem = PROBLEM_NONE;
    wire_packet_close(&t->packet);
    for (;;) {
        ssize_t n = recvmsg(t->fd, wire_receive_header(&t->packet), MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n > 0) {
            int r = wire_check(&t->packet, n, false, 0, &t->message, &problem);
            SIM_CHECK(r == 0, "the daemon keeps to the protocol", "%s", problem.text);
            if (t->message.opcode == MESSAGE_SEGMENT)
                take_segment(t);
            return HEARD;
        }
        if (n == 0 || (errno != EAGAIN && errno != EINTR))
            return GONE;
        if (sim.now_ns >= until_ns)
            return SILENCE;
        fiber_wait(until_ns, t->fd);
    }
}

static bool tell(struct trainer *t, enum opcode opcode, const void *body, const void *tail, size_t tail_length,
                 int fd) {
    static struct wire_packet packet;
    sim_descriptors_changed();
    wire_pack(&packet, opcode, ++t->serial, body, tail, tail_length, fd);
    return sendmsg(t->fd, wire_send_header(&packet), MSG_NOSIGNAL) > 0;
}

/* The opcode of the answer; 0: the daemon is gone. */
static uint16_t ask_with(struct trainer *t, enum opcode opcode, const void *body, const void *tail, size_t tail_length,
                         int fd, uint64_t within_ms) {
    if (!tell(t, opcode, body, tail, tail_length, fd))
        return 0;
    uint32_t serial = t->serial;
    uint64_t until_ns = after_ms(within_ms);
    for (;;) {
        int heard = hear(t, until_ns);
        if (heard == GONE)
            return 0;
        SIM_CHECK(heard == HEARD, "every request is answered by its deadline", "rank %u of %s: %s after %llu ms",
                  t->options.rank, t->options.run_id, message_rule((uint16_t)opcode)->name,
                  (unsigned long long)within_ms);
        if (t->message.serial == serial)
            return t->message.opcode;
    }
}

static uint16_t ask(struct trainer *t, enum opcode opcode, const void *body, uint64_t within_ms) {
    return ask_with(t, opcode, body, NULL, 0, -1, within_ms);
}

static int error_code(const struct trainer *t) { return ((const struct message_error *)t->message.body)->code; }

/* An error that the weather may explain: remembered. In quiet weather there is none. */
static void refused(struct trainer *t, const char *what) {
    SIM_CHECK(!t->options.quiet, "without faults everything succeeds", "rank %u of %s: %s: code %d, %.*s",
              t->options.rank, t->options.run_id, what, error_code(t), (int)t->message.tail_length, t->message.tail);
    say(t, what, error_code(t));
}

/* ---- memory ---- */

static void fill(struct trainer *t, uint64_t nonce) {
    sim_image_fill(t->area, t->area_size, nonce * UINT64_C(0x9e3779b97f4a7c15) + t->options.rank);
}

static void make_memory(struct trainer *t) {
    t->area_size = align_up(t->options.size + LOCAL_SIZE + STATE_SIZE, 4096);
    t->area_fd = memfd_create("sim-area", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (t->area_fd < 0 || posix_fallocate(t->area_fd, 0, (off_t)t->area_size) != 0 ||
        fcntl(t->area_fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        abort();
    t->area = mmap(NULL, t->area_size, PROT_READ | PROT_WRITE, MAP_SHARED, t->area_fd, 0);
    if (t->area == MAP_FAILED)
        abort();
}

/* What the image of this memory is. */
static struct save *expect(struct trainer *t, uint64_t step, uint64_t state_length) {
    const struct sim_state state = {.row = t->area,
                                    .own = t->area + t->options.size,
                                    .inline_bytes = t->area + t->options.size + LOCAL_SIZE,
                                    .inline_length = state_length};
    uint64_t size;
    uint8_t *image = sim_image_make(&t->image, &state, &size);
    struct save *save = model_save((struct version_id){t->generation, step}, t->options.rank, t->options.world,
                                   t->options.node, image, size);
    free(image);
    return save;
}

/* ---- coming in ---- */

static bool connect_to_daemon(struct trainer *t) {
    for (int i = 0; i < CONNECT_TRIES; i++) {
        if (nodes[t->options.node].up) {
            t->fd = sim_loop_connect(nodes[t->options.node].loop, t->pid);
            if (t->fd >= 0)
                return true;
        }
        fiber_wait(after_ms(100), -1);
    }
    return false;
}

static bool open_job(struct trainer *t) {
    const struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    if (ask(t, MESSAGE_HELLO, &hello, PROMPT_MS) != MESSAGE_HELLO_OK)
        return false;
    struct message_open open = {.rank = t->options.rank,
                                .world = t->options.world,
                                .pid = t->pid,
                                .job_length = sizeof SIM_JOB - 1,
                                .run_id_length = (uint16_t)strlen(t->options.run_id),
                                .deadline_ms = 90000};
    char tail[64];
    snprintf(tail, sizeof tail, "%s%s", SIM_JOB, t->options.run_id);
    uint16_t answer = ask_with(t, MESSAGE_OPEN, &open, tail, strlen(tail), -1, 90000 + TIERS_MS);
    if (answer == MESSAGE_ERROR)
        refused(t, "open is refused");
    if (answer != MESSAGE_OPENED)
        return false;
    const struct message_opened *opened = t->message.body;
    t->generation = opened->generation;
    t->resumes = opened->flags & OPENED_HAS_RESUME;
    t->resume = (struct version_id){opened->resume_generation, opened->resume_step};
    say(t, "opened generation", (long long)t->generation);
    model_opened(t->options.run_id, t->generation, t->resumes, t->resume);
    t->word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, t->packet.fd, 0);
    if (t->word == MAP_FAILED)
        abort();
    return true;
}

static bool register_memory(struct trainer *t) {
    const struct message_area area = {.size = t->area_size};
    uint16_t answer = ask_with(t, MESSAGE_AREA, &area, NULL, 0, t->area_fd, PROMPT_MS);
    if (answer == MESSAGE_ERROR)
        refused(t, "area is refused");
    if (answer != MESSAGE_OK)
        return false;
    CLEANUP(closep) int table = wire_memfd("sim-table", t->image.table.data, t->image.table.size);
    const struct message_register message = {
        .table_size = t->image.table.size, .count = t->image.table.count, .set = ++t->set};
    answer = ask_with(t, MESSAGE_REGISTER, &message, NULL, 0, table, TIERS_MS);
    if (answer == MESSAGE_ERROR)
        refused(t, "register is refused");
    return answer == MESSAGE_REGISTERED;
}

/* ---- restoring ---- */

static uint64_t troubles(void) { return sim.failures + sim.upsets; }

/* A part that is being restored. */
struct reading {
    uint32_t restore;
    struct version_id id;
    const struct complete_part *part;
    uint8_t *image;
    uint64_t trouble; /* of the world, before it was chosen */
};

/* Chunks of one part, into the image. False: refused, or the daemon is gone. */
static bool fetch(struct trainer *t, const struct reading *reading, uint32_t first, uint32_t count) {
    const struct complete_part *part = reading->part;
    const struct message_fetch message = {
        .restore = reading->restore, .rank = part->rank, .first = first, .count = count, .timeout_ms = 20000};
    uint16_t answer = ask(t, MESSAGE_FETCH, &message, message.timeout_ms + PROMPT_MS);
    bool lost = answer == MESSAGE_ERROR && (error_code(t) == CODE_E_NOT_FOUND || error_code(t) == CODE_E_DAMAGED);
    SIM_CHECK(!lost || reading->trouble != troubles(), "what a restore has opened stays until it is closed",
              "rank %u of %s: step %llu: %.*s", t->options.rank, t->options.run_id,
              (unsigned long long)reading->id.step, (int)t->message.tail_length, t->message.tail);
    if (lost && !model_reachable(reading->id, t->options.node))
        say(t, "is too late to fetch from step", (long long)reading->id.step);
    else if (answer == MESSAGE_ERROR)
        refused(t, "fetch is refused");
    if (answer != MESSAGE_FETCHED)
        return false;
    const struct message_fetched *fetched = t->message.body;
    const struct chunk_place *places = (const void *)t->message.tail;
    uint32_t lease = fetched->lease;
    SIM_CHECK(fetched->count == count, "a fetch brings what was asked for", "%u of %u", fetched->count, count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)(first + i) * part->chunk_size;
        SIM_CHECK(places[i].segment < SEGMENTS_KEPT && t->segments[places[i].segment] >= 0 &&
                      places[i].length == min_u64(part->chunk_size, part->image_size - at),
                  "a fetch brings what was asked for", "chunk %u has %u bytes in segment %u", first + i,
                  places[i].length, places[i].segment);
        fiber_pause(); /* the lease holds the bytes meanwhile */
        if (pread(t->segments[places[i].segment], reading->image + at, places[i].length, (off_t)places[i].offset) !=
            (ssize_t)places[i].length)
            abort();
    }
    return tell(t, MESSAGE_RELEASE, &(struct message_release){.lease = lease}, NULL, 0, -1);
}

static bool restore_part(struct trainer *t, uint32_t restore, struct version_id id, const struct complete_part *part,
                         uint64_t trouble) {
    uint8_t *image = calloc(1, part->image_size);
    assert(image);
    const struct reading reading = {.restore = restore, .id = id, .part = part, .image = image, .trouble = trouble};
    uint32_t chunks = (uint32_t)((part->image_size + part->chunk_size - 1) / part->chunk_size), count;
    bool good = true;
    for (uint32_t first = 0; good && first < chunks; first += count) {
        count = (uint32_t)min_u64(chunks - first, 1 + sim_below(2));
        good = fetch(t, &reading, first, count);
    }
    if (good)
        model_check_image(id, part->rank, image, part->image_size, "a restore");
    free(image);
    return good;
}

static bool prefetch(struct trainer *t, uint32_t number) {
    const struct message_prefetch message = {.restore = number, .rank = UINT32_MAX};
    return ask(t, MESSAGE_PREFETCH, &message, PROMPT_MS) == MESSAGE_OK;
}

/* False: the daemon is gone. */
static bool restore(struct trainer *t, uint32_t which) {
    uint64_t trouble = troubles();
    const struct message_restore_open message = {.which = which, .timeout_ms = 60000};
    uint16_t answer = ask(t, MESSAGE_RESTORE_OPEN, &message, TIERS_MS);
    if (answer == MESSAGE_ERROR) {
        /* The version may lie on another node's disk only: whoever decided could read it. */
        if (which == RESTORE_RESUME && !model_reachable(t->resume, t->options.node))
            say(t, "cannot reach step", (long long)t->resume.step);
        else
            refused(t, "restore is refused");
        return true;
    }
    if (answer != MESSAGE_RESTORE_OPENED)
        return false;
    const struct message_restore_opened opened = *(const struct message_restore_opened *)t->message.body;
    struct version_id id = {opened.generation, opened.step};
    if (opened.result == CODE_NONE) {
        SIM_CHECK(which != RESTORE_RESUME || !t->resumes, "a run restores what it resumes from", "none");
        return true;
    }
    SIM_CHECK(which != RESTORE_RESUME || version_compare(id, t->resume) == 0, "a run restores what it resumes from",
              "%llu/%llu", (unsigned long long)id.generation, (unsigned long long)id.step);
    char *text = malloc(opened.index_size + 1);
    struct complete complete;
    struct problem problem = PROBLEM_NONE;
    if (!text || pread(t->packet.fd, text, opened.index_size, 0) != (ssize_t)opened.index_size)
        abort();
    int r = complete_read(text, opened.index_size, &complete, &problem);
    SIM_CHECK(r == 0, "the index of a restore is good", "%s", problem.text);
    bool good = true;
    if (sim_chance(1, 3))
        good = prefetch(t, opened.restore);
    for (uint32_t i = 0; good && i < complete.summary.world; i++)
        if (t->options.quiet || sim_chance(2, 3))
            good = restore_part(t, opened.restore, id, &complete.parts[i], trouble);
    say(t, "has restored step", (long long)id.step);
    complete_deinit(&complete);
    free(text);
    const struct message_restore_close close_message = {.restore = opened.restore};
    return ask(t, MESSAGE_RESTORE_CLOSE, &close_message, PROMPT_MS) == MESSAGE_OK;
}

/* ---- saving ---- */

/* The memory may change after this. False: the daemon is gone. */
static bool fence(struct trainer *t, struct save *save, uint16_t counter, bool check) {
    bool impatient = !t->options.quiet && sim_chance(1, 6);
    uint64_t until_ns = impatient ? sim.now_ns + sim_below(600000) : after_ms(600000);
    bool there = true;
    if (sim_bug("early-change"))
        fill(t, sim_random());
    if (check)
        there = tell(t, MESSAGE_FENCE, &(struct message_fence){.counter = counter}, NULL, 0, -1);
    while (there && sim.now_ns < until_ns && word_watermark(word_load(t->word)) != save->image_size &&
           word_watermark(word_load(t->word)) < WORD_FAILED)
        there = hear(t, min_u64(until_ns, sim.now_ns + NANOSECONDS_PER_MS)) != GONE;
    uint64_t before = word_load(t->word);
    bool captured = !word_revoke(t->word, counter, save->image_size);
    if (!captured && sim_bug("revoked-commit"))
        atomic_store(&t->word->word, before);
    save->state = captured ? SAVE_CAPTURED : SAVE_VOID;
    SIM_CHECK(captured || !t->options.quiet, "without faults everything succeeds", "rank %u: step %llu is not captured",
              t->options.rank, (unsigned long long)save->id.step);
    say(t, captured ? "is captured" : "is given up", (long long)save->id.step);
    fill(t, sim_random());
    return there;
}

static bool save(struct trainer *t, uint64_t step) {
    uint64_t state_length = sim_chance(1, 2) ? 1 + sim_below(STATE_SIZE) : 0;
    bool check = sim_chance(1, 8);
    t->accepted = false;
    fill(t, sim_random());
    struct save *expected = expect(t, step, state_length);
    uint16_t counter = ++t->counter;
    struct message_save message = {
        .step = step,
        .set = t->set,
        .counter = counter,
        .to = t->options.quiet || sim_chance(3, 4) ? LEVEL_NONE : LEVEL_LOCAL,
        .flags = (check ? SAVE_CHECK : 0) | (sim_chance(1, 10) ? SAVE_URGENT : 0),
        .state_offset = t->options.size + LOCAL_SIZE,
        .state_length = state_length,
        .busy_deadline_ms = t->options.quiet ? 600000 : 1000,
    };
    word_begin(t->word, counter);
    bool urgent = message.flags & SAVE_URGENT;
    say(t, "saves step", (long long)step);
    if (!message.flags && sim_chance(2, 3) && word_take_admission(t->word, expected->image_size)) {
        message.flags = SAVE_ADMITTED;
        if (sim_chance(1, 8))
            fiber_wait(after_ms(sim_below(4000)), -1);
        t->accepted = tell(t, MESSAGE_SAVE, &message, NULL, 0, -1);
        return fence(t, expected, counter, false) && t->accepted;
    }
    uint16_t answer = ask(t, MESSAGE_SAVE, &message, urgent ? TIERS_MS : message.busy_deadline_ms + PROMPT_MS);
    if (!answer) {
        expected->state = word_revoke(t->word, counter, expected->image_size) ? SAVE_VOID : SAVE_CAPTURED;
        return false;
    }
    const struct message_saved *saved = t->message.body;
    if (answer == MESSAGE_ERROR || saved->result != CODE_OK) {
        expected->state = SAVE_VOID;
        if (answer == MESSAGE_ERROR)
            refused(t, "save is refused");
        else
            say(t, "save is answered with", saved->result);
        return true;
    }
    SIM_CHECK(saved->image_size == expected->image_size, "client and daemon see the same image", "%llu and %llu bytes",
              (unsigned long long)saved->image_size, (unsigned long long)expected->image_size);
    t->accepted = true;
    if (sim_chance(1, 3))
        fiber_wait(after_ms(sim_below(30)), -1);
    return fence(t, expected, counter, check);
}

static bool wait_level(struct trainer *t, uint64_t step, enum level level, bool must) {
    struct message_wait message = {.step = step,
                                   .level = level,
                                   .scope = must || sim_chance(1, 2) ? WAIT_VERSION : WAIT_PART,
                                   .timeout_ms = must ? 600000 : sim_below(2) * sim_below(8000)};
    uint16_t answer = ask(t, MESSAGE_WAIT, &message, message.timeout_ms + PROMPT_MS);
    if (answer == MESSAGE_ERROR)
        refused(t, "wait is refused");
    if (!answer || answer == MESSAGE_ERROR)
        return answer != 0;
    int32_t result = ((const struct message_waited *)t->message.body)->result;
    sim_note("rank %u of %s: step %llu at level %d, scope %u: %d", t->options.rank, t->options.run_id,
             (unsigned long long)step, level, message.scope, result);
    SIM_CHECK(result == CODE_OK || !must, "without faults everything becomes GLOBAL", "rank %u, step %llu: %d %.*s",
              t->options.rank, (unsigned long long)step, result, (int)t->message.tail_length, t->message.tail);
    if (result == CODE_E_IO) {
        char reason[200];
        snprintf(reason, sizeof reason, "%.*s", (int)t->message.tail_length, t->message.tail);
        model_given_up((struct version_id){t->generation, step}, reason);
    }
    if (result == CODE_OK && level >= LEVEL_LOCAL)
        model_durable((struct version_id){t->generation, step}, t->options.rank, t->options.node, level,
                      message.scope == WAIT_VERSION);
    return true;
}

/* ---- questions ---- */

/* What is listed as durable was reported so, or lies in the tiers: a look at them decides. */
static bool ask_durable(struct trainer *t) {
    const struct message_last_durable message = {.level = LEVEL_GLOBAL};
    if (ask(t, MESSAGE_LAST_DURABLE, &message, PROMPT_MS) != MESSAGE_DURABLE)
        return false;
    const struct message_durable *durable = t->message.body;
    struct version_id id = {durable->generation, durable->step};
    if (durable->found)
        model_durable(id, t->options.rank, t->options.node, LEVEL_GLOBAL, true);
    return true;
}

static bool ask_versions(struct trainer *t) {
    uint16_t answer = ask(t, MESSAGE_VERSIONS, &(struct message_empty){0}, TIERS_MS);
    if (answer == MESSAGE_ERROR)
        refused(t, "versions are refused");
    if (answer != MESSAGE_VERSIONS_ARE)
        return answer != 0;
    const struct message_versions_are *versions = t->message.body;
    struct version_record record;
    for (uint32_t i = 0; i < versions->count; i++) {
        if (pread(t->packet.fd, &record, sizeof record, (off_t)(i * sizeof record)) != sizeof record)
            abort();
        if (record.levels & 1u << LEVEL_GLOBAL)
            model_durable((struct version_id){record.generation, record.step}, 0, t->options.node, LEVEL_GLOBAL, true);
    }
    return true;
}

static bool ask_something(struct trainer *t) {
    switch (sim_below(12)) {
    case 0:
        return ask_durable(t);
    case 1:
        return ask_versions(t);
    case 2:
        return ask(t, MESSAGE_STATUS, &(struct message_empty){0}, PROMPT_MS) == MESSAGE_STATUS_IS;
    case 3:
        return ask(t, MESSAGE_TRACE, &(struct message_empty){0}, PROMPT_MS) == MESSAGE_TRACE_IS;
    default:
        return true;
    }
}

/* ---- life ---- */

static bool come_in(struct trainer *t) {
    hang_up(t);
    if (!connect_to_daemon(t) || !open_job(t))
        return false;
    return (!t->resumes || t->restored || restore(t, RESTORE_RESUME)) && register_memory(t);
}

static bool step_once(struct trainer *t, uint64_t step) {
    static const uint64_t pauses_ms[] = {0, 1, 20, 400, 3000};
    fiber_wait(after_ms(sim_below(1 + pauses_ms[sim_below(ARRAY_SIZE(pauses_ms))])), -1);
    if (!save(t, step))
        return false;
    if (sim_chance(1, 2) && !wait_level(t, step, (enum level)(LEVEL_CAPTURED + sim_below(4)), false))
        return false;
    if (t->options.quiet && step == t->options.steps)
        return wait_level(t, step, LEVEL_GLOBAL, true);
    return ask_something(t) && (!sim_chance(1, 12) || restore(t, RESTORE_LATEST));
}

/* A step that no daemon was told of. */
static bool missed(struct trainer *t, uint64_t step) {
    const struct message_missed message = {.step = step};
    say(t, "has missed step", (long long)step);
    return ask(t, MESSAGE_MISSED, &message, PROMPT_MS) == MESSAGE_OK;
}

/* The process has ended; what its kernel knows of it. */
static void end(struct trainer *t) {
    hang_up(t);
    if (t->area_fd >= 0)
        close(t->area_fd);
    kernel_process_end(t->pid);
}

static void live(void *argument) {
    struct trainer *t = argument;
    int lives = t->options.quiet ? 1 : 4;
    bool in = false;
    make_memory(t);
    sim_image_init(&t->image, t->options.rank, t->options.world, t->options.size);
    for (uint64_t step = 1; step <= t->options.steps; step++) {
        while (!in && lives-- > 0)
            in = come_in(t);
        if (!in)
            break;
        t->restored = true;
        in = t->options.quiet || !sim_chance(1, 20) ? step_once(t, step) : missed(t, step);
        if (!in && sim_chance(1, 2))
            step--; /* once more, with other bytes */
    }
    t->closing = true;
    t->failed = !in || ask(t, MESSAGE_CLOSE, &(struct message_empty){0}, PROMPT_MS) != MESSAGE_OK;
    SIM_CHECK(!t->failed || !t->options.quiet, "without faults everything succeeds", "rank %u of %s lost its daemon",
              t->options.rank, t->options.run_id);
    say(t, t->failed ? "fails" : "is done", 0);
    end(t);
    t->fiber = NULL;
}

struct trainer *trainer_start(const struct trainer_options *options) {
    struct trainer *t = calloc(1, sizeof *t);
    assert(t);
    t->options = *options;
    t->fd = t->packet.fd = t->area_fd = -1;
    for (size_t i = 0; i < SEGMENTS_KEPT; i++)
        t->segments[i] = -1;
    t->pid = kernel_process_new(options->node);
    t->fiber = fiber_new(SIM_OUTSIDE, options->library ? program_live : live, t);
    if (options->library)
        fiber_set_pid(t->fiber, t->pid);
    say(t, "starts on node", options->node);
    return t;
}

bool trainer_over(const struct trainer *t) { return !t->fiber; }
bool trainer_closing(const struct trainer *t) { return t->closing; }
bool trainer_failed(const struct trainer *t) { return t->failed; }

void trainer_kill(struct trainer *t) {
    if (!t->fiber)
        return;
    say(t, "is killed", 0);
    fiber_kill(t->fiber);
    t->fiber = NULL;
    t->failed = true;
    if (sim_chance(1, 4)) { /* a child that it forked still has the socket, and lives for ever */
        t->fd = -1;
        kernel_process_forked(t->pid);
    }
    end(t);
}

void trainer_hang(struct trainer *t, uint64_t until_ns) {
    if (!t->fiber)
        return;
    t->held_ns = until_ns;
    say(t, "hangs for ms:", (long long)((until_ns - sim.now_ns) / NANOSECONDS_PER_MS));
    fiber_hold(t->fiber, until_ns);
}
