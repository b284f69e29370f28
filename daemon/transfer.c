/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfer has two owners, its part and the job in flight; the last one frees it. A forgotten
 * transfer that has not begun does nothing more, one that runs keeps its buffers to its end.
 *
 * Quiet, and the rate: the job looks before it begins, and where it may not it comes back for a while,
 * so that others who want the device are served meanwhile.
 */
#include "daemon/transfer.h"

#include "daemon/flight.h"
#include "daemon/part.h"
#include "daemon/pins.h"
#include "daemon/server.h"

#include <errno.h>

#define STORE_BYTES GIB(1)  /* within a device, in one job: milliseconds */
#define STORE_WINDOW MIB(4) /* of which what is not in device memory is gathered in the host */
#define QUIET_LOOK_NS NANOSECONDS_PER_MS
#define PINS_LOOK_NS NANOSECONDS_PER_MS

struct landing {
    struct pool_buffer *buffer; /* NULL: of a second reading */
    uint8_t *data;
    uint64_t offset; /* in the image */
    uint32_t length;
    uint32_t segment;
    void *segment_data;
    uint64_t segment_size;
};

struct transfer {
    struct device_job job;
    uint32_t refs;
    struct part *part; /* NULL: forgotten */
    _Atomic bool forgotten;
    struct source source; /* with references of its own; empty if the bytes come out of the berth */
    struct word_map *word;
    bool store, landed;
    struct berth *berth; /* NULL: not from or to one */
    uint64_t progress;   /* of a store, on this device */
    uint32_t device;     /* of the set: the index of that at which it is */
    uint64_t quiet_since_ns;
    bool quiet, anyway; /* its client is quiet; has been for too long */
    uint64_t wait_ns;   /* until it may be tried again */
    uint8_t *second;    /* NULL: it is none */
    struct flight flight;
    uint32_t first, count;
    struct landing chunks[];
};

/* ---- on the device's thread ---- */

/* The next piece of [offset, end) that is in the arena of this transfer's device. */
static bool next_run(const struct transfer *transfer, uint64_t offset, uint64_t end, struct spread_run *ret_run) {
    return spread_next(transfer->berth->set->spread, transfer->device, offset, end, ret_run);
}

static int queue_from_arena(struct transfer *transfer, const struct landing *chunk) {
    struct device *device = transfer->job.device;
    struct problem *problem = &transfer->job.problem;
    uint64_t end = chunk->offset + chunk->length;
    struct spread_run run;
    int r = 0;
    for (uint64_t at = chunk->offset; !r && next_run(transfer, at, end, &run); at = run.offset + run.length) {
        CUdeviceptr from = berth_address(transfer->berth, transfer->device, run.at, problem);
        r = from ? device_result(device,
                                 device_cuda(device)->cuMemcpyDtoHAsync_v2(chunk->data + (run.offset - chunk->offset),
                                                                           from, run.length, device->own.stream),
                                 problem, "cuMemcpyDtoHAsync")
                 : -EIO;
    }
    return r;
}

/* Queues the copies and leaves them under way. */
static int depart(struct transfer *transfer) {
    struct device_job *job = &transfer->job;
    int r = 0;
    for (uint32_t i = 0; i < transfer->count; i++) {
        const struct landing *chunk = &transfer->chunks[i];
        if (chunk->buffer)
            pins_make(job->device, chunk->segment, chunk->segment_data, chunk->segment_size);
    }
    for (uint32_t i = 0; !r && i < transfer->count; i++) {
        const struct landing *chunk = &transfer->chunks[i];
        r = transfer->berth ? queue_from_arena(transfer, chunk)
                            : source_fill(&transfer->source, chunk->offset, chunk->length, chunk->data, &job->problem);
    }
    if (!r)
        r = flight_begin(job->device, &transfer->flight, &job->problem);
    if (r < 0 && job->device->own.context) { /* what was queued before that failed */
        struct problem problem = PROBLEM_NONE;
        (void)!device_wait(job->device, &problem);
    }
    job->flying = !r;
    if (r)
        pins_unuse(job->device->pins);
    return r;
}

static int land(struct transfer *transfer) {
    struct device_job *job = &transfer->job;
    int r = flight_await(job->device, &transfer->flight, &job->problem);
    if (r == FLIGHT_E_AWAY)
        return 0;
    job->flying = false;
    pins_unuse(job->device->pins);
    word_copy_end(transfer->word->page);
    return r;
}

/* What the window has outside of contiguous device memory goes up through the host. */
static int store_mixed(struct transfer *transfer, uint64_t offset, size_t length, CUdeviceptr to, uint8_t *bounce) {
    struct device *device = transfer->job.device;
    struct problem *problem = &transfer->job.problem;
    transfer->source.reach = SOURCE_HOST;
    int r = source_fill(&transfer->source, offset, length, bounce, problem);
    transfer->source.reach = SOURCE_DEVICE_STRIDED;
    if (!r)
        r = source_fill(&transfer->source, offset, length, bounce, problem);
    if (!r)
        r = device_result(device, device_cuda(device)->cuMemcpyHtoDAsync_v2(to, bounce, length, device->own.stream),
                          problem, "cuMemcpyHtoDAsync");
    return r ? r : device_wait(device, problem);
}

static int store_window(struct transfer *transfer, const struct spread_run *run, uint8_t *bounce) {
    struct source *source = &transfer->source;
    struct problem *problem = &transfer->job.problem;
    CUdeviceptr to = berth_address(transfer->berth, transfer->device, run->at, problem);
    int r = to ? 0 : -EIO;
    if (!r && !run->offset)
        image_header(&source->set->layout, source->state_length, source->header);
    if (!r && source_mixed(source, run->offset, run->length))
        r = store_mixed(transfer, run->offset, run->length, to, bounce);
    source->reach = SOURCE_DEVICE_CONTIGUOUS;
    source->within_device = true;
    if (!r)
        r = source_fill(source, run->offset, run->length, (uint8_t *)(uintptr_t)to, problem);
    source->within_device = false;
    return r;
}

/* What is at home with this device. */
static int store(struct transfer *transfer) {
    const uint64_t size = transfer->source.image_size;
    struct spread_run run;
    CLEANUP(freep) uint8_t *bounce = calloc(1, STORE_WINDOW);
    int r = bounce ? 0 : -ENOMEM;
    for (uint64_t stored = 0; !r && stored < STORE_BYTES; stored += run.length) {
        if (!next_run(transfer, transfer->progress, size, &run)) {
            transfer->progress = size;
            break;
        }
        run.length = min_u64(run.length, STORE_WINDOW);
        r = store_window(transfer, &run, bounce);
        transfer->progress = run.offset + run.length;
    }
    int waited = transfer->job.device->own.context ? device_wait(transfer->job.device, &transfer->job.problem) : r;
    return r ? r : waited;
}

/* By the device's rate; a copy within the device does not count. 0: now. */
static uint64_t landing_wait(struct transfer *transfer) {
    uint64_t bytes = 0;
    struct spread_run run;
    for (uint32_t i = 0; i < transfer->count; i++) {
        uint64_t at = transfer->chunks[i].offset, end = at + transfer->chunks[i].length;
        if (!transfer->berth)
            bytes += end - at;
        for (; transfer->berth && next_run(transfer, at, end, &run); at = run.offset + run.length)
            bytes += run.length;
    }
    return device_pace(transfer->job.device, bytes);
}

/* Its client wants no copies now, a context is about to go, or the rate is used up. 0: it may go on, and
 * word_copy_end() is due, and of what lands pins_unuse(). */
static uint64_t must_wait(struct transfer *transfer) {
    transfer->quiet = !word_copy_begin(transfer->word->page, transfer->anyway);
    if (transfer->quiet)
        return QUIET_LOOK_NS;
    uint64_t wait_ns = 0;
    if (!transfer->store && !pins_use(transfer->job.device->pins)) {
        wait_ns = PINS_LOOK_NS;
    } else if (!transfer->store) {
        wait_ns = landing_wait(transfer);
        if (wait_ns)
            pins_unuse(transfer->job.device->pins);
    }
    if (wait_ns)
        word_copy_end(transfer->word->page);
    return wait_ns;
}

static void transfer_run(struct device_job *job) {
    struct transfer *transfer = CONTAINER_OF(job, struct transfer, job);
    if (job->flying) {
        job->result = land(transfer);
        return;
    }
    job->result = transfer->store ? 0 : flight_room(job->device, &job->problem);
    if (!job->result && transfer->forgotten)
        job->result = -ECANCELED;
    if (job->result)
        return;
    transfer->wait_ns = must_wait(transfer);
    if (transfer->wait_ns) {
        job->result = -EAGAIN;
        return;
    }
    transfer->source.device = job->device;
    transfer->source.reach = SOURCE_DEVICE;
    transfer->source.cuda_problem = &job->problem;
    job->result = transfer->store ? store(transfer) : depart(transfer);
    if (!job->flying)
        word_copy_end(transfer->word->page);
}

/* ---- on the control thread ---- */

static const struct set *transfer_set(const struct transfer *transfer) {
    return transfer->berth ? transfer->berth->set : transfer->source.set;
}

static void transfer_unref(struct transfer *transfer) {
    if (--transfer->refs)
        return;
    const struct set *set = transfer_set(transfer);
    for (uint32_t i = 0; i < set->device_count; i++)
        set->devices[i]->transfers--;
    for (uint32_t i = 0; i < transfer->count; i++)
        if (transfer->chunks[i].buffer)
            pool_buffer_unref(transfer->chunks[i].buffer);
    free(transfer->second);
    struct source *source = &transfer->source;
    free(source->header);
    if (source->state_area)
        area_unref(source->state_area);
    if (source->set) {
        peer_unref(source->peer);
        set_unuse(source->set);
        set_unref(source->set);
    }
    if (transfer->berth)
        berth_unref(transfer->berth);
    word_map_unref(transfer->word);
    free(transfer);
}

static void transfer_free(struct device_job *job) { transfer_unref(CONTAINER_OF(job, struct transfer, job)); }

static void transfer_done(struct device_job *job, int result, const struct problem *problem) {
    struct transfer *transfer = CONTAINER_OF(job, struct transfer, job);
    struct part *part = transfer->part;
    if (!part)
        return;
    if (result == -EAGAIN) {
        uint64_t now = loop_now(part->server->loop);
        if (!transfer->quiet || !transfer->quiet_since_ns)
            transfer->quiet_since_ns = transfer->quiet ? now : 0;
        transfer->anyway = transfer->quiet && now - transfer->quiet_since_ns >= WORD_QUIET_NS;
        device_submit_later(job, transfer->wait_ns);
        return;
    }
    if (result < 0) { /* perhaps abandoned: then it is not ours to touch */
        device_report(job->device, problem, "a capture failed");
        part_transferred(part, transfer, result, problem);
        return;
    }
    transfer->quiet_since_ns = 0;
    transfer->anyway = false;
    if (transfer->store && transfer->progress < transfer->source.image_size) {
        device_submit(job->device, job);
    } else if (++transfer->device < transfer_set(transfer)->device_count) {
        transfer->progress = 0;
        device_submit(transfer_set(transfer)->devices[transfer->device], job);
    } else {
        transfer->landed = true;
        part_transferred(part, transfer, 0, NULL);
    }
}

int transfer_new(const struct transfer_options *options, struct transfer **ret_transfer) {
    const struct part *part = options->part;
    struct transfer *transfer = calloc(1, sizeof *transfer + options->count * sizeof transfer->chunks[0]);
    uint8_t *header = options->store ? malloc(options->source->set->layout.data_start) : NULL;
    uint8_t *second = options->second ? malloc((size_t)options->count * part->chunk_size) : NULL;
    if (!transfer || (options->store && !header) || (options->second && !second)) {
        free(transfer);
        free(header);
        free(second);
        return -ENOMEM;
    }
    struct source *source = &transfer->source;
    if (options->store || !options->berth) { /* what comes out of the berth needs the client no more */
        *source = *options->source;
        source->header = header;
        set_use(set_ref(source->set));
        peer_ref(source->peer);
        if (source->state_area)
            area_ref(source->state_area);
    }
    transfer->refs = 2;
    transfer->part = options->part;
    transfer->word = word_map_ref(options->word);
    transfer->store = options->store;
    transfer->berth = options->berth ? berth_ref(options->berth) : NULL;
    transfer->first = options->first;
    transfer->count = options->count;
    transfer->second = second;
    for (uint32_t i = 0; i < options->count; i++) {
        const struct chunk *chunk = &part->chunks[options->first + i];
        struct landing *landing = &transfer->chunks[i];
        landing->offset = (uint64_t)(options->first + i) * part->chunk_size;
        landing->length = chunk->length;
        if (second) {
            landing->data = second + (size_t)i * part->chunk_size;
            continue;
        }
        landing->buffer = pool_buffer_ref(chunk->buffer);
        landing->data = chunk->buffer->data;
        landing->segment = pool_buffer_segment(chunk->buffer);
        landing->segment_data = pool_segment_data(part->server->pool, landing->segment);
        landing->segment_size = pool_segment_size(part->server->pool, landing->segment);
    }
    transfer->job =
        (struct device_job){.needs_context = true, .run = transfer_run, .done = transfer_done, .free = transfer_free};
    const struct set *set = transfer_set(transfer);
    for (uint32_t i = 0; i < set->device_count; i++)
        set->devices[i]->transfers++;
    device_submit(set->devices[0], &transfer->job);
    *ret_transfer = transfer;
    return 0;
}

void transfer_forget(struct transfer *transfer) {
    transfer->part = NULL;
    transfer->forgotten = true;
    transfer_unref(transfer);
}

bool transfer_landed(const struct transfer *transfer) { return transfer->landed; }
uint32_t transfer_first(const struct transfer *transfer) { return transfer->first; }
uint32_t transfer_count(const struct transfer *transfer) { return transfer->count; }
uint8_t *transfer_second(const struct transfer *transfer) { return transfer->second; }
