/* SPDX-License-Identifier: Apache-2.0 */
#include "client/save.h"

#include "client/clock.h"
#include "client/options.h"
#include "client/register.h"

/*
 * A save is one small message. Everything that takes longer was done before: the set is registered
 * when it has changed, the memory shared at allocation, and the room for the image kept by the daemon
 * since the save before (the admission, proto/word.h). Only where it could not keep any does `save` wait
 * for an answer, up to the busy deadline.
 *
 * The fence reads the capture word (proto/word.h); while it says "not yet" it waits for the daemon's
 * event. It never waits beyond its deadline: it then revokes the capture, after which the daemon can
 * commit nothing of it, so the program may go on in any case.
 */

#define SAVE_URGENT_MS UINT64_C(60000)
#define SAVE_PUSH_SLICE_MS UINT64_C(20) /* the push thread fails without a message */
#define SAVE_REASON_MS UINT64_C(200)
#define SAVE_SHARD_SLICE_MIN_NS (50 * UINT64_C(1000))
#define SAVE_SHARD_SLICE_MAX_NS (2 * NANOSECONDS_PER_MS)

/* ---- fence ---- */

static int captured(struct ckpt *c) {
    saves_settle(&c->saves, true);
    return CKPT_OK;
}

static int lost(struct ckpt *c, const char *why) {
    uint64_t step = c->saves.step;
    push_stop(&c->push);
    saves_settle(&c->saves, false);
    saves_take_untold(&c->saves);
    return error_set(CKPT_E_LOST, "step %ju was given up before it was captured: %s", (uintmax_t)step, why);
}

/* The word says that it failed, or the daemon has gone. */
static int failed(struct ckpt *c) {
    char reason[SAVES_REASON_MAX];
    if (push_failed(&c->push, reason, sizeof reason))
        return lost(c, reason);
    uint64_t deadline = clock_deadline(SAVE_REASON_MS); /* the reason comes with the event, soon */
    while (!c->saves.reason[0] && link_receive(&c->session.link, deadline) == CKPT_OK)
        link_unclaimed(&c->session.link);
    snprintf(reason, sizeof reason, "%s",
             c->saves.reason[0] ? c->saves.reason : "the daemon could not read the memory");
    return lost(c, reason);
}

static int give_up(struct ckpt *c, uint64_t timeout_ms) {
    uint64_t step = c->saves.step;
    if (!word_revoke(c->session.word, c->saves.counter, c->saves.image_size))
        return captured(c);
    push_stop(&c->push);
    saves_settle(&c->saves, false);
    saves_take_untold(&c->saves);
    return error_set(
        CKPT_E_TIMEOUT,
        "step %ju was not captured within %ju ms and is given up; is the daemon at %s overloaded or stopped?",
        (uintmax_t)step, (uintmax_t)timeout_ms, c->session.link.path);
}

/* Settled meanwhile, when the connection went down. */
static int told_late(struct ckpt *c) {
    if (!saves_take_untold(&c->saves))
        return CKPT_OK;
    return error_set(CKPT_E_LOST, "step %ju was given up before it was captured: %s", (uintmax_t)c->saves.step,
                     c->saves.reason[0] ? c->saves.reason : "the connection to the daemon was lost");
}

/* Waits for one message, not beyond `until`, and handles it. A lost connection settles the capture. */
static void look_at_messages(struct ckpt *c, uint64_t until) {
    struct link *link = &c->session.link;
    int r = link_receive(link, until);
    if (r == CKPT_OK)
        link_unclaimed(link);
    if (!link_is_up(link))
        session_down(c);
}

/* Check mode: the daemon, or the push thread, waits for this before it reads the memory a second time. What the program
 * has queued on a device by now it wants to see, too. */
static void tell_of_fence(struct ckpt *c, uint64_t deadline) {
    devices_await_defaults(&c->devices, c->image.on_device, deadline);
    const struct message_fence body = {.counter = c->saves.counter};
    const struct link_request request = {.opcode = MESSAGE_FENCE, .body = &body, .fd = -1};
    c->saves.check = false;
    if (c->use_push)
        push_fence(&c->push);
    else if (link_send(&c->session.link, &request, deadline, NULL) < 0 && !link_is_up(&c->session.link))
        session_down(c);
}

int save_fence(struct ckpt *c, uint64_t timeout_ms) {
    if (c->saves.check && c->saves.state == SAVES_RUNNING)
        tell_of_fence(c, clock_deadline(clock_timeout_ms(timeout_ms, HANDLE_FENCE_MS)));
    if (c->saves.state == SAVES_IDLE)
        return told_late(c);
    uint64_t wait_ms = clock_timeout_ms(timeout_ms, HANDLE_FENCE_MS), deadline = 0;
    for (;;) {
        switch (saves_judge(&c->saves, word_load(c->session.word))) {
        case SAVES_CAPTURED:
            return captured(c);
        case SAVES_FAILED:
            return failed(c);
        case SAVES_PENDING:
            break;
        }
        if (deadline == 0)
            deadline = clock_deadline(wait_ms);
        else if (clock_now() >= deadline)
            return give_up(c, wait_ms);
        look_at_messages(c, c->push.started ? min_u64(deadline, clock_deadline(SAVE_PUSH_SLICE_MS)) : deadline);
        if (c->saves.state == SAVES_IDLE)
            return told_late(c);
    }
}

/* The way that most fences go, and the only one that must be short: no call, no memory that is not needed. */
static bool captured_meanwhile(struct ckpt *c) {
    if (!c || c->saves.state != SAVES_RUNNING || c->saves.check ||
        word_load(c->session.word) != word_make(c->saves.counter, c->saves.image_size) ||
        atomic_load_explicit(&c->forked, memory_order_relaxed) ||
        atomic_load_explicit(&c->disabled, memory_order_relaxed))
        return false;
    c->saves.state = SAVES_IDLE;
    return true;
}

int ckpt_fence(ckpt *c, uint64_t timeout_ms) {
    if (captured_meanwhile(c))
        return CKPT_OK;
    int r = handle_enter(c);
    return r < 0 ? r : save_fence(c, timeout_ms);
}

static int fence_to(struct ckpt *c, uint64_t end, uint64_t timeout_ms) {
    uint64_t wait_ms = clock_timeout_ms(timeout_ms, HANDLE_FENCE_MS), deadline = 0;
    uint64_t slice = SAVE_SHARD_SLICE_MIN_NS;
    for (;;) {
        uint64_t word = word_load(c->session.word);
        if (saves_reached(&c->saves, word, end))
            return CKPT_OK;
        if (saves_judge(&c->saves, word) == SAVES_FAILED)
            return failed(c);
        uint64_t now = clock_now();
        if (deadline == 0)
            deadline = clock_deadline(wait_ms);
        else if (now >= deadline)
            return give_up(c, wait_ms);
        look_at_messages(c, min_u64(deadline, now + slice)); /* no message tells of a watermark */
        if (c->saves.state == SAVES_IDLE)
            return told_late(c);
        slice = min_u64(slice * 2, SAVE_SHARD_SLICE_MAX_NS);
    }
}

/* Where the piece ends in the running capture's image; 0: it has no part in it. */
static uint64_t shard_end(const struct ckpt *c, const struct set_shard *shard) {
    if (shard->index == SET_INDEX_NONE || !c->image.shards || set_is_copied(shard))
        return 0;
    uint64_t begin = c->image.layout.shard_offset[shard->index];
    return begin == UINT64_MAX ? 0 : begin + shard->bytes;
}

int ckpt_fence_shard(ckpt *c, uint64_t id, uint64_t timeout_ms) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    const struct set_shard *shard = set_find(&c->set, id);
    if (!shard)
        return error_set(CKPT_E_NOT_FOUND, "fence: no protected piece has the id %ju", (uintmax_t)id);
    if (c->saves.state == SAVES_IDLE)
        return told_late(c);
    if (c->saves.check) /* a piece that changes now would be taken for a mistake: all of it is fenced */
        return save_fence(c, timeout_ms);
    uint64_t end = shard_end(c, shard);
    return end == 0 ? CKPT_OK : fence_to(c, end, timeout_ms);
}

/* ---- save ---- */

static int check_options(const struct ckpt_save_options *options) {
    if (options->to > CKPT_GLOBAL || options->to == CKPT_PARTNER)
        return error_set(CKPT_E_INVALID, "save: level %u; it must be CKPT_CAPTURED, CKPT_LOCAL, CKPT_GLOBAL, or 0",
                         options->to);
    if (options->urgent > 1 || options->check > 1)
        return error_set(CKPT_E_INVALID, "save: urgent and check must be 0 or 1");
    if (options->state_size > 0 && !options->state)
        return error_set(CKPT_E_INVALID, "save: state is NULL, but state_size is %ju", (uintmax_t)options->state_size);
    if (options->stream_count > 0 && !options->streams)
        return error_set(CKPT_E_INVALID, "save: streams is NULL, but stream_count is %u", options->stream_count);
    if (options->stream_count > DEVICE_MARKS_MAX)
        return error_set(CKPT_E_LIMIT, "save: %u streams; at most %d are allowed (DEVICE_MARKS_MAX)",
                         options->stream_count, DEVICE_MARKS_MAX);
    if (options->state_size > IMAGE_STATE_MAX)
        return error_set(CKPT_E_LIMIT, "save: %ju bytes of state; at most %ju are allowed (IMAGE_STATE_MAX)",
                         (uintmax_t)options->state_size, (uintmax_t)IMAGE_STATE_MAX);
    return CKPT_OK;
}

/* What the push thread does for this save: it copies the image, or waits for the devices and tells the daemon to start.
 */
static int start_push(struct ckpt *c, uint64_t state_size) {
    struct push_job job = {
        .starts = !c->use_push,
        .check = c->saves.check && c->use_push,
        .devices = &c->devices,
        .word = c->session.word,
        .counter = c->saves.counter,
        .image_size = c->saves.image_size,
        .image = &c->image,
        .areas = &c->areas,
        .state = c->state,
        .state_size = state_size,
        .chunk_size = c->session.chunk_size,
        .slots = c->push.slots,
        .answer_ms = HANDLE_FENCE_MS,
    };
    uint64_t size = (uint64_t)PUSH_SLOTS * job.chunk_size;
    if (c->use_push)
        client_assert(c, areas_find(&c->areas, job.slots, size, &job.slots_area, &job.slots_offset));
    return push_begin(&c->push, &job);
}

/* Large eager pieces are not copied: they are out before save returns; in check mode twice, and so is all else. */
static int fence_large_eager(struct ckpt *c) {
    if (c->set.has_large_eager && c->saves.check)
        return save_fence(c, CKPT_DEFAULT_TIMEOUT);
    for (size_t i = 0; i < c->set.count && c->set.has_large_eager; i++) {
        const struct set_shard *shard = c->set.shards[i];
        if (!shard || !(shard->flags & SHARD_EAGER) || c->saves.state == SAVES_IDLE)
            continue;
        uint64_t end = shard_end(c, shard);
        int r = end == 0 ? CKPT_OK : fence_to(c, end, CKPT_DEFAULT_TIMEOUT);
        if (r < 0)
            return r;
    }
    return CKPT_OK;
}

/* SAVED has come. */
static int saved(struct ckpt *c, const struct message_save *asked) {
    struct link *link = &c->session.link;
    const struct message_saved *body = link->message.body;
    int result = body->result;
    if (result != CKPT_OK && result != CKPT_SKIPPED && result != CKPT_ALREADY) {
        if (!error_known(result))
            return link_distrust(link, "an unknown result of a save");
        bool says_why = link->message.tail_length > 0;
        return error_set(result, "step %ju was refused: %.*s", (uintmax_t)c->saves.step,
                         says_why ? (int)link->message.tail_length : (int)strlen(error_name(result)),
                         says_why ? link->message.tail : error_name(result));
    }
    uint64_t expected = c->saves.image_size;
    if (result == CKPT_OK && body->image_size != expected)
        return link_distrust(link, "an image of another size than was registered");
    error_clear();                     /* of attempts on the way here */
    if (link->message.tail_length > 0) /* a report about an earlier version */
        error_set(result, "%.*s", (int)link->message.tail_length, link->message.tail);
    saves_answered(&c->saves, result, expected);
    if (result != CKPT_OK)
        return result;
    c->saves.check = asked->flags & SAVE_CHECK;
    if (c->use_push || (asked->flags & SAVE_HELD)) {
        int r = start_push(c, asked->state_length);
        if (r < 0) {
            word_revoke(c->session.word, c->saves.counter, c->saves.image_size);
            saves_settle(&c->saves, false);
            saves_take_untold(&c->saves);
            return r;
        }
    }
    return fence_large_eager(c);
}

/* The save failed. Revoking makes sure of it, or finds that it was captured all the same. */
static int unanswered(struct ckpt *c, int result) {
    if (c->saves.state != SAVES_ASKING)
        return result;
    if (word_revoke(c->session.word, c->saves.counter, c->saves.image_size)) {
        saves_answered(&c->saves, result, 0);
        return result;
    }
    saves_answered(&c->saves, CKPT_OK, c->saves.image_size);
    saves_settle(&c->saves, true);
    error_clear();
    return CKPT_OK;
}

static uint64_t busy_ms(const struct ckpt *c, const struct ckpt_save_options *options) {
    if (options->urgent && options->busy_timeout_ms == CKPT_DEFAULT_TIMEOUT)
        return SAVE_URGENT_MS;
    return clock_timeout_ms(options->busy_timeout_ms, clock_timeout_ms(c->busy_timeout_ms, HANDLE_BUSY_MS));
}

/* The save comes after what the program has queued on its streams: eager tensors are copied behind that, and the daemon
 * is told to hold the capture until it is over. Pushed copies are queued behind it as well, and need no hold. */
static int order_devices(struct ckpt *c, const struct ckpt_save_options *options, uint32_t *flags) {
    void *streams[DEVICES_MAX];
    push_settle(&c->push); /* it looks at the marks of the last save */
    int r = devices_streams(&c->devices, options->streams, options->stream_count, streams);
    if (r == CKPT_OK)
        r = set_copy_device_eager(&c->set, &c->devices, &c->eager, streams);
    if (r == CKPT_OK)
        r = devices_mark(&c->devices, options->streams, options->stream_count, c->image.on_device);
    if (r == CKPT_OK && !c->use_push)
        r = devices_marks_over(&c->devices);
    if (r == CKPT_PENDING)
        *flags |= SAVE_HELD;
    return r < 0 ? r : CKPT_OK;
}

/* What must be told at once needs an answer: a capture that this thread has more to do for, an urgent save, a step
 * that the daemon may have had before; and what was sent ahead of it (register.c) may be refused. */
static bool take_admission(struct ckpt *c, const struct message_save *body, bool alone) {
    return alone && !c->use_push && !c->set.has_large_eager && body->flags == 0 && c->saves.any &&
           body->step > c->saves.last && word_take_admission(c->session.word, c->saves.image_size);
}

/* `alone`: nothing was sent ahead of it. */
static int ask(struct ckpt *c, uint64_t step, const struct ckpt_save_options *options, bool alone) {
    struct link *link = &c->session.link;
    struct message_save body = {
        .step = step,
        .set = c->set_number,
        .to = (uint16_t)options->to,
        .flags = (options->urgent ? SAVE_URGENT : 0) | (options->check ? SAVE_CHECK : 0),
        .state_length = options->state_size,
        .busy_deadline_ms = busy_ms(c, options),
        .forks = atomic_load_explicit(&c->forks, memory_order_relaxed),
    };
    if (options->state_size > 0) {
        memcpy(c->state, options->state, options->state_size);
        client_assert(c, areas_find(&c->areas, c->state, options->state_size, &body.state_area, &body.state_offset));
    }
    set_copy_eager(&c->set, &c->eager);
    int r = c->set.on_devices > 0 ? order_devices(c, options, &body.flags) : CKPT_OK;
    if (r < 0)
        return r;
    body.counter = saves_begin(&c->saves, step, image_size(&c->image.layout, options->state_size));
    word_quiet(c->session.word, c->quiet);
    word_begin(c->session.word, body.counter);
    struct link_request request = {.opcode = MESSAGE_SAVE, .body = &body, .fd = -1};
    uint64_t deadline = clock_deadline(min_u64(body.busy_deadline_ms, UINT64_MAX - HANDLE_GRACE_MS) + HANDLE_GRACE_MS);
    if (!take_admission(c, &body, alone)) {
        r = link_call(link, &request, MESSAGE_SAVED, deadline);
        return r < 0 ? r : saved(c, &body);
    }
    body.flags = SAVE_ADMITTED;
    r = link_send(link, &request, deadline, NULL);
    if (r < 0)
        return r;
    error_clear(); /* of attempts on the way here */
    saves_answered(&c->saves, CKPT_OK, c->saves.image_size);
    return CKPT_OK;
}

/* Something sent ahead of the failed request was refused: that is the cause, and the daemon does not
 * have what we believe it has. Begin anew with a session that knows nothing. */
static int told_by_complaint(struct ckpt *c) {
    int r = error_set(c->session.link.complaint, "%s", c->session.link.complaint_text);
    session_down(c);
    return r;
}

int ckpt_save(ckpt *c, uint64_t step, const struct ckpt_save_options *options) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    struct ckpt_save_options given;
    r = options_get("ckpt_save_options", options, &given, sizeof given);
    if (r == CKPT_OK)
        r = check_options(&given);
    if (r == CKPT_OK)
        r = saves_check(&c->saves, step);
    if (r != CKPT_OK)
        return r;
    /* An earlier version that is lost by this fence is counted in ckpt_info; this save goes on. */
    if (c->saves.state != SAVES_IDLE)
        save_fence(c, CKPT_DEFAULT_TIMEOUT);

    r = session_ensure_for_save(c);
    c->session.link.complaint = CKPT_OK;
    uint32_t serial = c->session.link.serial;
    if (r == CKPT_OK)
        r = register_ensure(c, given.state_size);
    if (r == CKPT_OK) {
        r = ask(c, step, &given, c->session.link.serial == serial);
        if (r < 0)
            r = unanswered(c, r);
    }
    if (r < 0)
        c->registered = false;
    if (r < 0 && c->session.link.complaint)
        r = told_by_complaint(c);
    if (!session_is_up(&c->session)) {
        if (r < 0 && c->saves.state != SAVES_RUNNING)
            saves_missed_add(&c->saves, step);
        if (c->session.phase == SESSION_UP)
            session_down(c);
    }
    return r;
}
