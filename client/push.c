/* SPDX-License-Identifier: Apache-2.0 */
#include "client/push.h"

#include "client/await.h"
#include "client/clock.h"
#include "client/pack.h"
#include "proto/digest.h"

#include <errno.h>
#include <signal.h>

/*
 * The daemon takes one chunk at a time; while it digests that, the next slots are filled. A failure revokes the capture
 * word, so that the fence sees at once what no event will tell. The thread waits for the daemon in slices, so a stop
 * takes effect within one.
 */

#define PUSH_SLICE_MS 20
#define PUSH_CONNECT_MS UINT64_C(2000)
#define PUSH_ATTACH_PAUSE_NS (5 * NANOSECONDS_PER_MS)

static void ignore(void *context, struct link *link) {}

void push_init(struct push *push, const char *path, const struct devices *devices) {
    *push = (struct push){.transfer = {.devices = devices}};
    link_init(&push->link, path, ignore, NULL);
    pthread_mutex_init(&push->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&push->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void push_close_descriptors(struct push *push) { link_close(&push->link); }

static bool stopped(const struct push *push) { return atomic_load_explicit(&push->stop, memory_order_acquire); }

/* One message, in slices. CKPT_E_LOST: stopped. */
static int push_receive(struct push *push, uint64_t deadline) {
    for (;;) {
        if (stopped(push))
            return error_set(CKPT_E_LOST, "stopped");
        int r = link_receive(&push->link, min_u64(deadline, clock_deadline(PUSH_SLICE_MS)));
        if (r != CKPT_E_TIMEOUT || clock_now() >= deadline)
            return r;
    }
}

static int push_hello(struct push *push, uint64_t deadline) {
    int r = link_connect(&push->link);
    if (r < 0)
        return error_set(CKPT_E_UNREACHABLE, "cannot connect to %s for pushing: %s", push->link.path, strerror(-r));
    struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    struct link_request request = {.opcode = MESSAGE_HELLO, .body = &hello, .fd = -1};
    return link_call(&push->link, &request, MESSAGE_HELLO_OK, deadline);
}

/* The daemon may not have noticed yet that an earlier push connection has ended. */
static int push_ask_attach(struct push *push, uint64_t session, uint64_t deadline) {
    struct message_attach attach = {.session = session};
    struct link_request request = {.opcode = MESSAGE_ATTACH, .body = &attach, .fd = -1};
    for (;;) {
        int r = link_call(&push->link, &request, MESSAGE_OK, deadline);
        if (r != CKPT_E_NOT_FOUND || clock_now() >= deadline)
            return r;
        struct timespec pause = {.tv_nsec = PUSH_ATTACH_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
}

int push_attach(struct push *push, uint64_t session, uint64_t deadline) {
    push_settle(push); /* the link is the thread's while it works */
    link_drain(&push->link);
    if (link_is_up(&push->link) && push->attached == session)
        return CKPT_OK;
    link_close(&push->link);
    push->attached = 0;
    deadline = min_u64(deadline, clock_deadline(PUSH_CONNECT_MS));
    int r = push_hello(push, deadline);
    if (r == CKPT_OK)
        r = push_ask_attach(push, session, deadline);
    if (r < 0)
        link_close(&push->link);
    else
        push->attached = session;
    return r;
}

/* ---- device memory ---- */

static int unless_stopped(const struct push *push, int r) {
    return r == CKPT_PENDING && stopped(push) ? error_set(CKPT_E_LOST, "stopped") : r;
}

static int ask_copies(void *context) {
    struct push *push = context;
    return unless_stopped(push, transfer_poll(&push->transfer));
}

static int ask_marks(void *context) {
    const struct push *push = context;
    return unless_stopped(push, devices_marks_over(push->transfer.devices));
}

static int ask_quiet(void *context) {
    const struct push *push = context;
    return unless_stopped(push, word_copy_begin(push->job.word, false) ? CKPT_OK : CKPT_PENDING);
}

void push_unpin(struct push *push) {
    const struct devices *devices = push->transfer.devices;
    if (push->pinned && device_enter(devices, push->pinned_device) == CKPT_OK) {
        (void)devices->cuda.cuMemHostUnregister(push->pinned);
        device_leave(devices);
    }
    push->pinned = NULL;
}

/* Pinned slots are filled at the full rate; others work too, so a refusal is none. */
static int pin(struct push *push, const struct push_job *job, int device) {
    if (push->pinned == job->slots)
        return CKPT_OK;
    push_unpin(push);
    int r = device_enter(job->devices, device);
    if (r < 0)
        return r;
    if (job->devices->cuda.cuMemHostRegister_v2(job->slots, (size_t)PUSH_SLOTS * job->chunk_size,
                                                CU_MEMHOSTREGISTER_PORTABLE) == CUDA_SUCCESS) {
        push->pinned = job->slots;
        push->pinned_device = device;
    }
    device_leave(job->devices);
    return CKPT_OK;
}

/* What one job does to devices. */
struct device_use {
    bool begun[DEVICES_MAX];
    bool copying;            /* word_copy_begin() has said yes */
    uint64_t quiet_deadline; /* since when the program has been quiet, and WORD_QUIET_NS; 0: it is not */
};

/* A program that forgets the end of its quiet is copied from all the same. */
static int await_quiet_end(struct push *push, const struct push_job *job, struct device_use *use) {
    if (use->quiet_deadline == 0)
        use->quiet_deadline = clock_now() + WORD_QUIET_NS;
    int r = await(ask_quiet, push, use->quiet_deadline, "quiet for too long");
    if (r == CKPT_OK)
        use->quiet_deadline = 0;
    if (r != CKPT_E_TIMEOUT)
        return r;
    (void)word_copy_begin(job->word, true);
    return CKPT_OK;
}

static int copy_device_shard(struct push *push, const struct push_job *job, struct device_use *use, int device,
                             const struct pack_view *view, uint64_t first, uint64_t count, uint8_t *destination) {
    int r = CKPT_OK;
    if (!use->begun[device]) {
        r = pin(push, job, device);
        if (r == CKPT_OK)
            r = transfer_begin(&push->transfer, device);
        if (r < 0)
            return r;
        use->begun[device] = true;
    }
    if (!use->copying) {
        r = await_quiet_end(push, job, use);
        if (r < 0)
            return r;
        use->copying = true;
    }
    return transfer_gather(&push->transfer, device, view, first, count, destination);
}

static int settle_devices(struct push *push, const struct push_job *job, struct device_use *use) {
    if (!use->copying)
        return CKPT_OK;
    int r = await(ask_copies, push, clock_deadline(job->answer_ms), "a device did not copy its memory in time");
    word_copy_end(job->word);
    use->copying = false;
    return r;
}

/* ---- the image ---- */

/* Copies bytes [from, from + length) of shard i's row-major storage. */
static int copy_shard(struct push *push, const struct push_job *job, struct device_use *use, uint32_t i,
                      const struct shard *shard, uint64_t from, uint64_t length, uint8_t *destination) {
    unsigned size = dtype_size(shard->dtype);
    int device = job->image->devices ? job->image->devices[i] : DEVICE_HOST;
    uint8_t *data = shard->area == SHARDS_AREA_PRIVATE ? (uint8_t *)(uintptr_t)shard->address
                                                       : job->areas->items[shard->area].map + shard->address;
    struct pack_view view = {.geometry = &shard->geometry,
                             .stride = shard->contiguous ? NULL : shard->stride,
                             .data = data,
                             .element_size = size};
    /* Chunks are whole elements: both are powers of two, and tensors lie aligned. */
    if (device != DEVICE_HOST)
        return copy_device_shard(push, job, use, device, &view, from / size, length / size, destination);
    pack_gather(destination, &view, from / size, length / size);
    return CKPT_OK;
}

/* Fills `to` with image bytes [offset, offset + length). */
static int fill(struct push *push, const struct push_job *job, struct device_use *use, uint64_t offset, uint64_t length,
                const uint8_t *header, uint8_t *to) {
    const struct image_layout *layout = &job->image->layout;
    uint64_t end = offset + length, at = offset;
    if (at < layout->data_start) {
        uint64_t part = min_u64(end, layout->data_start) - at;
        memcpy(to, header + at, part);
        at += part;
    }
    for (uint32_t i = image_find(layout, job->image->shards, at); at < end && i < layout->ordered_count; i++) {
        struct shard shard;
        shards_get(job->image->shards, layout->order[i], &shard);
        uint64_t begin = layout->shard_offset[layout->order[i]], bytes = shard_bytes(&shard);
        uint64_t part = min_u64(end, begin + bytes) - at;
        int r = copy_shard(push, job, use, layout->order[i], &shard, at - begin, part, to + (at - offset));
        if (r < 0)
            return r;
        at += part;
    }
    if (at < end)
        memcpy(to + (at - offset), (const uint8_t *)job->state + (at - layout->state_offset), end - at);
    return settle_devices(push, job, use);
}

/* How far the image has come, in chunks: filled >= sent >= answered. */
struct progress {
    uint64_t chunks, filled, sent, answered;
    uint64_t sendable;      /* chunks, or in check mode all but the last until they were compared */
    struct digest *digests; /* check mode: of the pieces of tensors, as they lie in chunks */
    size_t digest_count;
    struct device_use use;
};

/* Check mode: takes the digests of what was filled or, at the second reading, compares with them. */
static int digest_pieces(const struct push_job *job, uint64_t offset, uint64_t length, const uint8_t *data, bool second,
                         struct progress *progress) {
    const struct image_layout *layout = &job->image->layout;
    uint64_t end = offset + length, at = max_u64(offset, layout->data_start);
    for (uint32_t i = image_find(layout, job->image->shards, at); at < end && i < layout->ordered_count; i++) {
        struct shard shard;
        struct digest now, *before = &progress->digests[progress->digest_count];
        shards_get(job->image->shards, layout->order[i], &shard);
        uint64_t part = min_u64(end, layout->shard_offset[layout->order[i]] + shard_bytes(&shard)) - at;
        if (!part)
            continue;
        digest_chunk(data + (at - offset), part, &now);
        if (second && !digest_equal(&now, before))
            return error_set(CKPT_E_LOST,
                             "the memory of %.200s changed between save and fence: move the change after the fence, or "
                             "protect it with CKPT_EAGER",
                             shard.name);
        *before = now;
        progress->digest_count++;
        at += part;
    }
    return CKPT_OK;
}

static int fill_next(struct push *push, const struct push_job *job, const uint8_t *header, struct progress *progress) {
    uint64_t offset = progress->filled * job->chunk_size;
    uint64_t length = min_u64(job->chunk_size, job->image_size - offset);
    uint8_t *slot = job->slots + progress->filled % PUSH_SLOTS * job->chunk_size;
    int r = fill(push, job, &progress->use, offset, length, header, slot);
    if (r == CKPT_OK && progress->digests)
        r = digest_pieces(job, offset, length, slot, false, progress);
    progress->filled++;
    return r;
}

/* Check mode: the second reading, into a slot that nothing waits in. */
static int compare(struct push *push, const struct push_job *job, const uint8_t *header, struct progress *progress) {
    uint8_t *slot = job->slots + progress->filled % PUSH_SLOTS * job->chunk_size;
    int r = CKPT_OK;
    progress->digest_count = 0;
    for (uint64_t offset = 0; r == CKPT_OK && offset < job->image_size; offset += job->chunk_size) {
        uint64_t length = min_u64(job->chunk_size, job->image_size - offset);
        r = stopped(push) ? error_set(CKPT_E_LOST, "stopped")
                          : fill(push, job, &progress->use, offset, length, header, slot);
        if (r == CKPT_OK)
            r = digest_pieces(job, offset, length, slot, true, progress);
    }
    return r;
}

static int await_fence(struct push *push) {
    pthread_mutex_lock(&push->lock);
    while (!push->fenced && !stopped(push))
        pthread_cond_wait(&push->changed, &push->lock);
    pthread_mutex_unlock(&push->lock);
    return stopped(push) ? error_set(CKPT_E_LOST, "stopped") : CKPT_OK;
}

static int send_next(struct push *push, const struct push_job *job, struct progress *progress) {
    uint64_t offset = progress->sent * job->chunk_size;
    struct message_push body = {
        .image_offset = offset,
        .area_offset = job->slots_offset + progress->sent % PUSH_SLOTS * job->chunk_size,
        .area = job->slots_area,
        .length = (uint32_t)min_u64(job->chunk_size, job->image_size - offset),
        .counter = job->counter,
    };
    progress->sent++;
    return link_send(&push->link, &(struct link_request){.opcode = MESSAGE_PUSH, .body = &body, .fd = -1},
                     clock_deadline(job->answer_ms), NULL);
}

/* A message has come. */
static int take_answer(struct push *push, struct progress *progress) {
    if (push->link.message.opcode == MESSAGE_ERROR)
        return link_error(&push->link);
    if (push->link.message.opcode != MESSAGE_PUSHED)
        return CKPT_OK;
    const struct message_pushed *pushed = push->link.message.body;
    if (pushed->result < 0)
        return error_set(pushed->result, "the daemon refused a pushed chunk (%s)", error_name(pushed->result));
    if (progress->answered == progress->sent)
        return link_distrust(&push->link, "an answer to a chunk that was not sent");
    progress->answered++;
    return CKPT_OK;
}

/* One step: a chunk is sent, filled, or waited for, in this order of preference. */
static int push_step(struct push *push, const struct push_job *job, const uint8_t *header, struct progress *progress) {
    if (progress->sent == progress->answered && min_u64(progress->filled, progress->sendable) > progress->sent)
        return send_next(push, job, progress);
    bool room = progress->filled < progress->chunks && progress->filled - progress->answered < PUSH_SLOTS;
    int r = room ? fill_next(push, job, header, progress) : CKPT_OK;
    if (r < 0)
        return r;
    r = room ? link_receive(&push->link, 0) : push_receive(push, clock_deadline(job->answer_ms));
    if (room && r == CKPT_E_TIMEOUT)
        return CKPT_OK;
    return r < 0 ? r : take_answer(push, progress);
}

/* Until all chunks are filled, and those that may go have gone. */
static int push_chunks(struct push *push, const struct push_job *job, const uint8_t *header,
                       struct progress *progress) {
    int r = CKPT_OK;
    while ((progress->answered < progress->sendable || progress->filled < progress->chunks) && r == CKPT_OK)
        r = stopped(push) ? error_set(CKPT_E_LOST, "stopped") : push_step(push, job, header, progress);
    return r;
}

static int push_image(struct push *push, const struct push_job *job) {
    const struct image_layout *layout = &job->image->layout;
    CLEANUP(freep) uint8_t *header = malloc(layout->data_start);
    if (!header)
        return error_set(CKPT_E_MEMORY, "out of memory for an image header of %ju bytes",
                         (uintmax_t)layout->data_start);
    image_header(layout, job->state_size, header);
    struct progress progress = {.chunks = (job->image_size + job->chunk_size - 1) / job->chunk_size};
    progress.sendable = progress.chunks - (job->check ? 1 : 0);
    CLEANUP(freep)
    struct digest *digests = job->check ? malloc((progress.chunks + layout->ordered_count) * sizeof *digests) : NULL;
    if (job->check && !digests)
        return error_set(CKPT_E_MEMORY, "out of memory for the digests of an image of %ju bytes",
                         (uintmax_t)job->image_size);
    progress.digests = digests;
    /* A job that was stopped may have left copies behind that still write to the slots. */
    int r = await(ask_copies, push, clock_deadline(job->answer_ms), "a device did not end its copies in time");
    if (r == CKPT_OK)
        r = push_chunks(push, job, header, &progress);
    if (r == CKPT_OK && job->check)
        r = await_fence(push);
    if (r == CKPT_OK && job->check)
        r = compare(push, job, header, &progress);
    progress.sendable = progress.chunks;
    if (r == CKPT_OK)
        r = push_chunks(push, job, header, &progress);
    if (progress.use.copying) { /* it failed: nobody may fill the slots any more, nor be kept from a collective */
        int settled = settle_devices(push, job, &progress.use);
        r = r < 0 ? r : settled;
    }
    return r;
}

static int start(struct push *push, const struct push_job *job) {
    int r = await(ask_marks, push, clock_deadline(job->answer_ms),
                  "the work on the device that the save comes after did not end in time");
    if (r < 0)
        return r;
    struct message_start body = {.counter = job->counter};
    return link_send(&push->link, &(struct link_request){.opcode = MESSAGE_START, .body = &body, .fd = -1},
                     clock_deadline(job->answer_ms), NULL);
}

static void push_run(struct push *push, const struct push_job *job) {
    int r = job->starts ? start(push, job) : push_image(push, job);
    if (r == CKPT_OK)
        return;
    if (!stopped(push)) { /* before anybody sees that it failed */
        pthread_mutex_lock(&push->lock);
        snprintf(push->reason, sizeof push->reason, "%.*s", PROBLEM_TEXT_MAX - 1, error_last());
        pthread_mutex_unlock(&push->lock);
        atomic_store_explicit(&push->failed, true, memory_order_release);
    }
    word_revoke(job->word, job->counter, job->image_size);
    link_close(&push->link); /* unanswered chunks die with it */
    push->attached = 0;
}

static void *push_thread(void *argument) {
    struct push *push = argument;
    pthread_mutex_lock(&push->lock);
    while (!push->ending) {
        if (!push->busy) {
            pthread_cond_wait(&push->changed, &push->lock);
            continue;
        }
        struct push_job job = push->job;
        pthread_mutex_unlock(&push->lock);
        push_run(push, &job);
        pthread_mutex_lock(&push->lock);
        push->busy = false;
        pthread_cond_broadcast(&push->changed);
    }
    pthread_mutex_unlock(&push->lock);
    return NULL;
}

/* The program's signals are for the program's threads. */
static int start_thread(struct push *push) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&push->thread, NULL, push_thread, push);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return error_set(CKPT_E_MEMORY, "cannot start the thread that pushes private memory: %s", strerror(error));
    push->started = true;
    return CKPT_OK;
}

int push_begin(struct push *push, const struct push_job *job) {
    if (!push->started) {
        int r = start_thread(push);
        if (r < 0)
            return r;
    }
    push_settle(push); /* the last job may still wait for an answer */
    atomic_store_explicit(&push->failed, false, memory_order_relaxed);
    atomic_store_explicit(&push->stop, false, memory_order_release);
    pthread_mutex_lock(&push->lock);
    push->job = *job;
    push->busy = true;
    push->fenced = false;
    pthread_cond_broadcast(&push->changed);
    pthread_mutex_unlock(&push->lock);
    return CKPT_OK;
}

void push_fence(struct push *push) {
    pthread_mutex_lock(&push->lock);
    push->fenced = true;
    pthread_cond_broadcast(&push->changed);
    pthread_mutex_unlock(&push->lock);
}

void push_settle(struct push *push) {
    if (!push->started)
        return;
    pthread_mutex_lock(&push->lock);
    while (push->busy)
        pthread_cond_wait(&push->changed, &push->lock);
    pthread_mutex_unlock(&push->lock);
}

void push_stop(struct push *push) {
    pthread_mutex_lock(&push->lock);
    atomic_store_explicit(&push->stop, true, memory_order_release);
    pthread_cond_broadcast(&push->changed);
    pthread_mutex_unlock(&push->lock);
    push_settle(push);
}

bool push_failed(struct push *push, char *ret_reason, size_t size) {
    if (!atomic_load_explicit(&push->failed, memory_order_acquire))
        return false;
    pthread_mutex_lock(&push->lock);
    snprintf(ret_reason, size, "%s", push->reason);
    pthread_mutex_unlock(&push->lock);
    return true;
}

void push_deinit(struct push *push) {
    push_stop(push);
    if (push->started) {
        pthread_mutex_lock(&push->lock);
        push->ending = true;
        pthread_cond_broadcast(&push->changed);
        pthread_mutex_unlock(&push->lock);
        pthread_join(push->thread, NULL);
        push->started = false;
    }
    push_unpin(push);
    transfer_deinit(&push->transfer);
    link_close(&push->link);
    pthread_cond_destroy(&push->changed);
    pthread_mutex_destroy(&push->lock);
}
