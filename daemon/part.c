/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/part.h"

#include "daemon/drain.h"
#include "daemon/session.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#define LOOK_NS (5 * NANOSECONDS_PER_SECOND)
#define LOOKS_MIN 12      /* before a silent client's save is given up */
#define CHECK_PATIENCE 60 /* times capture_s: a step may compute long between its save and its fence */

int word_map_new(struct word_map **ret_map) {
    struct word_map *map = calloc(1, sizeof *map);
    if (!map)
        return -ENOMEM;
    map->refs = 1;
    map->fd = memfd_create("ckptd-word", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int r = 0;
    if (map->fd < 0 || ftruncate(map->fd, POOL_PAGE) < 0 ||
        fcntl(map->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        r = -errno;
    void *page = r ? MAP_FAILED : mmap(NULL, POOL_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, map->fd, 0);
    if (!r && page == MAP_FAILED)
        r = -errno;
    if (r) {
        if (map->fd >= 0)
            close(map->fd);
        free(map);
        return r;
    }
    map->page = page;
    *ret_map = map;
    return 0;
}

struct word_map *word_map_ref(struct word_map *map) {
    map->refs++;
    return map;
}

void word_map_unref(struct word_map *map) {
    if (--map->refs)
        return;
    munmap(map->page, POOL_PAGE);
    close(map->fd);
    free(map);
}

static uint64_t chunk_offset(const struct part *part, uint32_t index) { return (uint64_t)index * part->chunk_size; }

void part_trace(const struct part *part, enum trace_kind kind, const struct lane *lane, uint64_t begin_ns,
                bool failed) {
    trace_add(part->server->trace, &(struct trace_record){.kind = kind,
                                                          .begin_ns = begin_ns,
                                                          .generation = part->version->id.generation,
                                                          .step = part->version->id.step,
                                                          .bytes = part->source.image_size,
                                                          .rank = part->rank,
                                                          .flags = failed ? TRACE_FAILED : 0,
                                                          .job = part->version->job->trace_name,
                                                          .tier = lane ? lane->trace_name : TRACE_NAME_NONE});
}

static void stall_over(struct part *part) {
    if (part->stalled_ns)
        part_trace(part, TRACE_STALL, NULL, part->stalled_ns, false);
    part->stalled_ns = 0;
}

static void drains_advance(struct part *part) {
    for (uint32_t i = 0; i < LANES_MAX; i++)
        if (part->drains[i])
            drain_advance(part->drains[i]);
}

static void release_reservation(struct part *part) {
    if (part->windowed)
        part->server->windowed -= part->reserved;
    if (part->reserved)
        pool_release(part->server->pool, part->reserved);
    part->reserved = 0;
    sessions_admit(part->server);
}

static void drop_buffers(struct part *part) {
    for (uint32_t i = 0; i < part->chunk_count; i++)
        if (part->chunks[i].buffer) {
            pool_buffer_uncache(part->chunks[i].buffer);
            pool_buffer_unref(STEAL(part->chunks[i].buffer));
        }
}

/* What the source needed is let go as soon as the bytes are ours (or never will be). */
static void release_source(struct part *part) {
    free(STEAL(part->source.header));
    if (part->source.state_area)
        area_unref(STEAL(part->source.state_area));
    if (part->push_area)
        area_unref(STEAL(part->push_area));
    if (part->word)
        word_map_unref(STEAL(part->word));
    if (part->source.peer) {
        set_unuse(part->source.set);
        peer_unref(STEAL(part->source.peer));
    }
}

static void forget_transfers(struct part *part) {
    for (uint32_t i = 0; i < TRANSFERS_MAX; i++)
        if (part->transfers[i])
            transfer_forget(STEAL(part->transfers[i]));
    if (part->berth)
        berth_leave(STEAL(part->berth));
}

/* Nothing will drain it any more: names and layout may go too. */
static void release_set(struct part *part) {
    if (part->state == PART_CAPTURING || part->active_drains || capture_busy(&part->capture))
        return;
    if (part->source.set)
        set_unref(STEAL(part->source.set));
    if (part->state == PART_FAILED) {
        free(STEAL(part->chunks));
        part->chunk_count = 0;
    }
}

static void image_digest(struct part *part) {
    struct digest *digests = malloc(part->chunk_count * sizeof *digests);
    if (!digests) { /* then its bytes are never taken for a version's */
        part->foreign = true;
        return;
    }
    for (uint32_t i = 0; i < part->chunk_count; i++)
        digests[i] = part->chunks[i].digest;
    digest_fold(digests, part->chunk_count, &part->image_digest);
    free(digests);
}

static void capture_over(struct part *part, int result) {
    struct server *server = part->server;
    struct session *session = part->session;
    pool_unwait(server->pool, &part->waiter);
    stall_over(part);
    part_trace(part, TRACE_CAPTURE, NULL, part->begun_ns, result != 0);
    if (result && !part->secured)
        (void)word_advance(part->word->page, part->counter, part->capture.watermark, WORD_FAILED);
    forget_transfers(part);
    release_source(part);
    part->session = NULL;
    loop_cancel(server->loop, &part->look);
    if (!result) {
        part->state = PART_CAPTURED;
        image_digest(part);
        server->counters.bytes_captured += part->source.image_size;
        if (!part->secured)
            version_captured(part->version);
        if (!part->active_drains) /* none was wanted, or all were over before */
            part_drain_over(part, LANES_MAX);
    } else {
        part->state = PART_FAILED;
        part->problem = part->capture.problem;
        if (result == -ECANCELED)
            problem_set(&part->problem, -ECANCELED, "the client revoked it: its fence timed out, or it began to close");
        problem_set(&part->problem, result, "its capture failed: %s", strerror(-result));
        server->counters.captures_failed++;
        log_warning(server->log, "a save was given up: %s job=%s step=%llu rank=%u", part->problem.text,
                    part->version->job->name, (unsigned long long)part->version->id.step, part->rank);
        drop_buffers(part);
        release_reservation(part);
        version_absent(part->version, part->rank, part->problem.text);
    }
    if (session)
        session_captured(session, part);
    drains_advance(part);
    release_set(part);
    server_settled(server);
}

bool part_presses(const struct part *part) { return part->urgent && !part->stalled; }

/* A part whose client does nothing keeps its place, but not that of others: they neither wait for its
 * turn in a lane to pass nor for its urgency. */
static void set_stalled(struct part *part, bool stalled) {
    if (part->stalled == stalled)
        return;
    part->stalled = stalled;
    for (uint32_t i = 0; i < LANES_MAX; i++)
        if (part->drains[i] && part->urgent)
            drain_press(part->drains[i], !stalled);
        else if (part->drains[i] && stalled)
            lane_pump(part->version->job->lanes[i]);
}

static void capture_done(struct part *part) {
    struct capture *capture = &part->capture;
    bool pushed = capture->pushed != NULL;
    if (pushed) {
        capture->pushed = NULL;
        area_unref(STEAL(part->push_area));
        if (part->session)
            session_pushed(part->session, chunk_offset(part, capture->first),
                           capture->result ? session_code(capture->result) : CODE_OK);
        if (part->state != PART_CAPTURING) /* the answer ended the session, and that the capture */
            return;
    }
    if (!capture->result && part->condemned.code)
        capture->result = problem_set(&capture->problem, part->condemned.code, "%s", part->condemned.text);
    if (capture->result) {
        capture_over(part, capture->result);
        return;
    }
    if (capture->checking)
        part->checked += capture->count;
    else
        part->captured += capture->count;
    set_stalled(part, false);
    if (capture->landed) {
        capture->landed = false;
        transfer_forget(part->transfers[0]);
        memmove(&part->transfers[0], &part->transfers[1], (TRANSFERS_MAX - 1) * sizeof part->transfers[0]);
        part->transfers[TRANSFERS_MAX - 1] = NULL;
    }
    bool to_be_checked = part->check && part->checked < part->chunk_count;
    if (part->captured == part->chunk_count && !to_be_checked) {
        capture_over(part, 0);
        return;
    }
    drains_advance(part);
    part_capture_next(part);
}

/* Ends a capture that cannot go on, now or when its worker is done with the chunk. */
static void capture_condemn(struct part *part, int code, const char *why) {
    if (part->state != PART_CAPTURING)
        return;
    problem_set(&part->condemned, code, "%s", why);
    if (capture_busy(&part->capture))
        return;
    part->capture.pushed = NULL;
    capture_over(part, problem_set(&part->capture.problem, code, "%s", why));
}

bool part_given_up(const struct part *part) {
    if (part->state != PART_CAPTURING || part->secured)
        return false;
    uint64_t word = word_load(part->word->page);
    return word_counter(word) != part->counter || word_watermark(word) >= WORD_FAILED;
}

bool part_revoked(struct part *part) {
    if (part->secured)
        return false;
    if (part->state != PART_CAPTURING || capture_busy(&part->capture))
        return part->state != PART_CAPTURING;
    if (!part_given_up(part))
        return false;
    part->capture.pushed = NULL;
    capture_over(part, -ECANCELED);
    return true;
}

/* For its start, for the next push, or for the fence of check mode. */
static bool waits_for_client(const struct part *part) {
    return !capture_busy(&part->capture) && (part->held || (part->push && !part->push_area) ||
                                             (part->captured == part->chunk_count && !part->capture.checking));
}

/* The client has been silent for too long: the room that its save was promised is for others. */
static bool give_up(struct part *part, uint64_t now) {
    uint64_t patience_ms =
        part->server->config->capture_ms * (part->check || part->late || part->held ? CHECK_PATIENCE : 1);
    if (!waits_for_client(part) || now - part->progress_ns < patience_ms * NANOSECONDS_PER_MS)
        return false;
    struct problem problem = PROBLEM_NONE;
    problem_set(&problem, -ETIMEDOUT, "process %d did not %s for %llu s", part->source.peer->pid,
                part->held    ? "start it"
                : part->check ? "come to its fence"
                              : "push it",
                (unsigned long long)patience_ms / 1000);
    capture_condemn(part, -ETIMEDOUT, problem.text);
    return true;
}

static void look_start(struct part *part);

/* Only a worker reads the word otherwise, and a sleeping capture has none; a worker that reads a page
 * which never comes is replaced, so that other captures go on. */
static void look_elapsed(struct loop_op *op) {
    struct part *part = CONTAINER_OF(op, struct part, look);
    struct server *server = part->server;
    uint64_t now = loop_now(server->loop);
    bool goes_on = part->looked_chunks != part->captured + part->checked;
    if (goes_on)
        part->progress_ns = now;
    if (part->state != PART_CAPTURING || part_revoked(part) || give_up(part, now)) {
        server_settled(server);
        return;
    }
    bool busy = capture_busy(&part->capture);
    if (busy && !goes_on && !part->stuck) {
        part->stuck = true;
        part_trace(part, TRACE_STUCK, NULL, 0, true);
        log_error(server->log, "a capture worker is stuck in the memory of process %d job=%s rank=%u",
                  part->source.peer->pid, part->version->job->name, part->rank);
        int r = 0;
        for (uint32_t i = 0; i < part->capture.at_work && !r; i++)
            r = loop_group_relieve(server->capturers);
        if (r < 0)
            log_warning(server->log, "captures stand still: all their workers are stuck");
    }
    set_stalled(part, !goes_on && (busy || waits_for_client(part)));
    part->looked_chunks = part->captured + part->checked;
    look_start(part);
}

static void look_start(struct part *part) {
    uint64_t interval = min_u64(LOOK_NS, part->server->config->capture_ms * NANOSECONDS_PER_MS / LOOKS_MIN);
    if (!loop_op_busy(&part->look))
        loop_timer(part->server->loop, &part->look, loop_now(part->server->loop) + interval, look_elapsed);
}

static void room_came(struct pool_waiter *waiter) { part_capture_next(CONTAINER_OF(waiter, struct part, waiter)); }

void part_begin(struct part *part) {
    if (part->state != PART_CAPTURING)
        return;
    part->begun_ns = part->progress_ns = loop_now(part->server->loop);
    look_start(part);
    if (part->source.set->device_count && !part->push && !part->check)
        (void)berth_take(part->source.set, part->source.image_size, &part->berth);
    part_capture_next(part);
}

/* Gives the next chunks their buffers, as many as there are and at most `most`. */
static uint32_t take_buffers(struct part *part, uint32_t first, uint32_t most) {
    uint32_t count = 0;
    while (count < most && first + count < part->chunk_count) {
        struct chunk *chunk = &part->chunks[first + count];
        /* Also the last chunk gets a whole one's place, as was reserved: odd pieces would leave gaps in
         * the pool that together have the room for a chunk, and yet none fits. */
        uint32_t size = part->chunk_count > 1 ? part->chunk_size : chunk->length;
        if (!chunk->buffer && pool_alloc(part->server->pool, size, &chunk->buffer) != 0)
            break;
        count++;
    }
    return count;
}

static bool transfer_begin(struct part *part, uint32_t slot, bool store, uint32_t count) {
    const struct transfer_options options = {
        .part = part,
        .source = &part->source,
        .word = part->word,
        .store = store,
        .second = part->capture.checking,
        .first = store ? 0 : part->transferring,
        .count = count,
        .berth = part->berth,
    };
    int r = transfer_new(&options, &part->transfers[slot]);
    if (r < 0)
        capture_condemn(part, r, "out of memory for a copy out of device memory");
    return r == 0;
}

/* The next stretch for a transfer; 0: there is no room now. The second reading goes to memory of the transfers' own. */
static uint32_t next_piece(struct part *part) {
    if (part->capture.checking)
        return 1;
    uint32_t piece = (uint32_t)min_u64(part->server->config->device_piece / part->chunk_size, CAPTURE_JOB_MAX);
    uint32_t count = take_buffers(part, part->transferring, piece ? piece : 1);
    if (count) {
        stall_over(part);
        return count;
    }
    if (!part->stalled_ns)
        part->stalled_ns = loop_now(part->server->loop);
    pool_wait(part->server->pool, &part->waiter);
    return 0;
}

/* Keeps transfers going, and the worker busy with what has landed. */
static void transfers_next(struct part *part) {
    struct capture *capture = &part->capture;
    if (part->berth && !part->secured) {
        if (!part->transfers[0])
            (void)transfer_begin(part, 0, true, 0);
        return;
    }
    if (part->captured == part->chunk_count && !capture->checking) {
        capture->checking = true;
        part->transferring = 0;
    }
    for (uint32_t slot = 0; slot < TRANSFERS_MAX && part->transferring < part->chunk_count; slot++) {
        uint32_t count = part->transfers[slot] ? 0 : next_piece(part);
        if (!part->transfers[slot] && !count)
            break;
        if (count && !transfer_begin(part, slot, false, count))
            return;
        part->transferring += count;
    }
    struct transfer *oldest = part->transfers[0];
    if (!oldest || !transfer_landed(oldest) || capture_busy(capture))
        return;
    capture->landed = true;
    if (capture->checking)
        capture_check(part, transfer_first(oldest), transfer_count(oldest), transfer_second(oldest));
    else
        capture_start(part, transfer_first(oldest), transfer_count(oldest), capture_workers(part));
}

/* Everything is in the device tier: the client may write again, and what was its is let go. */
static void secure(struct part *part) {
    struct session *session = part->session;
    if (!source_valid(&part->source)) {
        capture_condemn(part, -ESRCH, "the client ended before its save was captured");
        return;
    }
    if (!word_advance(part->word->page, part->counter, 0, part->source.image_size)) {
        capture_over(part, -ECANCELED);
        return;
    }
    part->capture.watermark = part->source.image_size;
    part->secured = true;
    transfer_forget(STEAL(part->transfers[0]));
    struct word_map *word = word_map_ref(part->word); /* its client may still want quiet */
    release_source(part);
    part->word = word;
    part->session = NULL;
    version_captured(part->version);
    if (session)
        session_captured(session, part);
    transfers_next(part);
}

void part_transferred(struct part *part, struct transfer *transfer, int result, const struct problem *problem) {
    if (result < 0)
        capture_condemn(part, result, problem->text);
    else if (part->berth && !part->secured)
        secure(part);
    else if (transfer == part->transfers[0])
        transfers_next(part);
}

void part_capture_next(struct part *part) {
    struct capture *capture = &part->capture;
    if (part->state != PART_CAPTURING || part->held)
        return;
    /* Nobody is left to change shared memory; private memory cannot be read any more. */
    bool second = part->captured == part->chunk_count;
    if (second && !part->fenced && part->session)
        return;
    if (part->source.set->device_count && !part->push) {
        transfers_next(part);
        return;
    }
    if (capture_busy(capture) || (part->push && !part->push_area))
        return;
    if (second) {
        capture_check(part, part->checked, (uint32_t)min_u64(CAPTURE_CHUNKS, part->chunk_count - part->checked), NULL);
        return;
    }
    uint32_t workers = capture_workers(part);
    uint32_t count = take_buffers(part, part->captured, part->push ? 1 : CAPTURE_CHUNKS * workers);
    if (!count) {
        if (!part->stalled_ns)
            part->stalled_ns = loop_now(part->server->loop);
        pool_wait(part->server->pool, &part->waiter);
        return;
    }
    stall_over(part);
    capture_start(part, part->captured, count, workers);
}

int part_push(struct part *part, struct area *area, uint64_t area_offset, uint64_t image_offset, uint32_t length) {
    if (part->state != PART_CAPTURING || !part->push || part->push_area ||
        image_offset != chunk_offset(part, part->captured) || length != part->chunks[part->captured].length ||
        area_offset > area->size || length > area->size - area_offset)
        return -EPROTO;
    part->push_area = area_ref(area);
    part->capture.pushed = area->data + area_offset;
    part_capture_next(part);
    return 0;
}

void part_start(struct part *part) {
    part->held = false;
    part_capture_next(part);
}

void part_fence(struct part *part) {
    part->fenced = true;
    part_capture_next(part);
}

void part_push_lost(struct part *part) {
    if (part->push)
        capture_condemn(part, -ECONNRESET, "the push connection was lost before the save was pushed");
}

void part_session_gone(struct part *part) {
    part->session = NULL;
    if (part->check)
        part_capture_next(part);
    if (part->held)
        capture_condemn(part, -ESRCH, "the client ended before it had started its save");
    if (part->state == PART_CAPTURING && part->source.set->device_count && !part->secured &&
        !peer_alive(part->source.peer))
        capture_condemn(part, -ESRCH, "the client ended before its device memory was captured");
    if (part->push)
        capture_condemn(part, -ESRCH, "the client ended before it had pushed its save");
}

static uint64_t pool_bytes(uint64_t image_size) { return align_up(image_size, POOL_PAGE); }
static uint64_t align_chunk(uint64_t size, uint32_t chunk_size) {
    return (size + chunk_size - 1) / chunk_size * chunk_size;
}

uint64_t part_room(const struct server *server, uint64_t image_size) {
    uint32_t chunk_size = server->config->chunk_size;
    return image_size > chunk_size ? align_chunk(image_size, chunk_size) : pool_bytes(image_size);
}

/* Fetches count, too: a capture that waits for their memory while they wait for its would wait for
 * ever. Not for an image larger than the pool, which gives each chunk back as soon as it is written. */
bool part_reserve(struct server *server, uint64_t bytes, bool windowed) {
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    if (!windowed && server->fetching && usage.reserved + server->fetching + bytes > usage.limit)
        return false;
    return pool_reserve(server->pool, bytes);
}

int part_new(struct version *version, const struct part_options *options, struct part **ret_part,
             struct problem *problem) {
    struct job *job = version->job;
    struct server *server = job->server;
    uint64_t size = image_size(&options->set->layout, options->state_length);
    if (size >= WORD_IMAGE_MAX)
        return problem_set(problem, -EFBIG, "an image of %llu bytes is over the limit of %llu bytes",
                           (unsigned long long)size, (unsigned long long)WORD_IMAGE_MAX);
    struct pool_usage usage;
    pool_get_usage(server->pool, &usage);
    uint64_t whole = part_room(server, size);
    uint64_t reserve = min_u64(whole, usage.limit);
    bool windowed = whole > usage.limit;
    while (!part_reserve(server, reserve, windowed))
        if (!sessions_withdraw_one(server))
            return PART_E_BUSY;

    struct part *part = calloc(1, sizeof *part);
    uint32_t chunk_size = server->config->chunk_size;
    uint64_t chunk_count = (size + chunk_size - 1) / chunk_size;
    int r = -ENOMEM;
    if (part) {
        part->chunk_size = chunk_size;
        part->chunk_count = (uint32_t)chunk_count;
        part->chunks = chunk_count <= UINT32_MAX ? calloc(chunk_count, sizeof *part->chunks) : NULL;
        part->source.header = options->set->push ? NULL : malloc(options->set->layout.data_start);
        r = capture_init(&part->capture, part, capture_done);
    }
    if (r < 0 || !part->chunks || (!part->source.header && !options->set->push)) {
        pool_release(server->pool, reserve);
        if (part) {
            free(part->chunks);
            free(part->source.header);
            capture_deinit(&part->capture);
        }
        free(part);
        return problem_set(problem, -ENOMEM, "out of memory for the tables of an image of %llu bytes",
                           (unsigned long long)size);
    }
    part->version = version;
    part->server = server;
    part->session = options->session;
    part->rank = options->rank;
    part->world = version->world;
    snprintf(part->run_id, sizeof part->run_id, "%s", job->run.run_id);
    part->source.set = set_ref(options->set);
    set_use(options->set);
    part->source.peer = peer_ref(options->peer);
    part->source.state_area = options->state_area ? area_ref(options->state_area) : NULL;
    part->source.state_offset = options->state_offset;
    part->source.state_length = options->state_length;
    part->source.image_size = size;
    part->source.forked = options->forked;
    part->word = word_map_ref(options->word);
    part->counter = options->counter;
    part->created_wall_ns = loop_wall(server->loop);
    for (uint32_t i = 0; i < part->chunk_count; i++)
        part->chunks[i].length = (uint32_t)min_u64(chunk_size, size - chunk_offset(part, i));
    part->reserved = reserve;
    part->windowed = windowed;
    server->windowed += windowed ? reserve : 0;
    part->urgent = options->urgent;
    part->push = options->set->push;
    part->check = options->check && !part->push;
    part->late = options->check && part->push;
    part->held = options->held && !part->push;
    part->waiter.fn = room_came;
    TAILQ_INSERT_TAIL(&version->parts, part, link);

    version->doomed = false; /* if it was this rank that was absent, its part is on the way now */
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (options->to == LEVEL_NONE || job->lanes[i]->config.level <= options->to) {
            part->wanted_lanes |= 1u << i;
            version->lanes[i].wanted = true;
        }
    /* A windowed image goes through its first lane; the others then read it from there. */
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (part->wanted_lanes & 1u << i) {
            r = drain_new(part, i);
            if (r < 0)
                log_error(server->log, "cannot drain: %s job=%s", strerror(-r), job->name);
            if (part->windowed)
                break;
        }
    *ret_part = part;
    if (part->windowed && !part->active_drains)
        capture_condemn(part, -EIO, "an image larger than the pool has no tier to go through");
    return 0;
}

bool part_idle(const struct part *part) {
    return part->state != PART_CAPTURING && !part->active_drains && !capture_busy(&part->capture) &&
           !loop_op_busy(&part->look);
}

void part_free(struct part *part) {
    assert(part_idle(part));
    pool_unwait(part->server->pool, &part->waiter);
    TAILQ_REMOVE(&part->version->parts, part, link);
    release_source(part);
    release_reservation(part);
    drop_buffers(part);
    release_set(part);
    free(part->chunks);
    capture_deinit(&part->capture);
    free(part);
}

/* Durable somewhere (or given up everywhere): what is in memory is a cache from now on. */
static void become_cache(struct part *part) {
    if (part->foreign)
        drop_buffers(part);
    for (uint32_t i = 0; i < part->chunk_count; i++)
        if (part->chunks[i].buffer)
            pool_buffer_cache(part->chunks[i].buffer, &part->chunks[i].buffer);
    release_reservation(part);
}

void part_committed(struct part *part, uint32_t lane) {
    part->committed_lanes |= 1u << lane;
    if (part->durable)
        return;
    part->durable = true;
    become_cache(part);
    struct job *job = part->version->job;
    for (uint32_t i = 0; i < job->lane_count; i++)
        if (part->drains[i]) /* its turn there is another one now */
            lane_pump(job->lanes[i]);
}

bool part_pointless(const struct part *part) { return part->state == PART_FAILED || part->foreign; }

void part_there_already(struct part *part, uint32_t lane) {
    part->foreign = part->durable = true;
    part->committed_lanes |= 1u << lane;
    drains_advance(part); /* no other lane shall get these bytes */
}

void part_chunk_written(struct part *part, uint32_t index) {
    if (part->windowed && !part->durable && part->chunks[index].buffer)
        pool_buffer_unref(STEAL(part->chunks[index].buffer));
}

/* The lanes of a windowed part follow each other: each reads it from one before. */
static void windowed_goes_on(struct part *part, uint32_t lane) {
    struct version *version = part->version;
    if (lane == LANES_MAX) /* there was none */
        return;
    static const struct problem unknown = {.code = -EIO, .text = "the tier before it failed"};
    const struct problem *why = version->lanes[lane].problem ? version->lanes[lane].problem : &unknown;
    for (uint32_t i = lane + 1; i < version->job->lane_count; i++) {
        if (!(part->wanted_lanes & 1u << i) || part->committed_lanes & 1u << i || part->drains[i])
            continue;
        if (part->durable && drain_new(part, i) == 0)
            return;
        if (!part->durable && part->state == PART_CAPTURED) /* its bytes are nowhere any more */
            version_failed(version, i, why);
    }
}

void part_drain_over(struct part *part, uint32_t lane) {
    if (part->windowed)
        windowed_goes_on(part, lane);
    if (part->windowed && !part->durable && !part->active_drains) /* nothing will make room for the rest of it */
        capture_condemn(part, -EIO, "the tier that an image larger than the pool goes through has failed");
    if (!part->active_drains && part->state == PART_CAPTURED && (!part->durable || part->foreign))
        become_cache(part);
    release_set(part);
}
