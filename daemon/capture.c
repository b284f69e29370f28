/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workers take leaves in order, each the next that nobody has begun, so they work side by side in one
 * stretch of memory and end together. The word tells of contiguous bytes only: whoever has copied a leaf
 * marks it, and if the word can now move, moves it past all that are marked. One at a time does so
 * (`moving`); who finds another at it leaves its mark and goes on, and the other looks once more after it
 * has let go, so no mark is overlooked.
 *
 * More than one worker are used where threads are idle: reading another process's memory is half
 * copying and half looking for its pages, and that half a second processor takes over. Captures that are
 * under way at the same time have one each.
 */
#include "daemon/capture.h"

#include "daemon/part.h"

#include <errno.h>

#define LEAVES_MAX (MIB(64) / DIGEST_LEAF_SIZE) /* of the largest chunk that the configuration allows */
#define LEAVES_PER_WORKER 4                     /* for less, waking another one is not worth it */

void capture_deinit(struct capture *capture) {
    free(STEAL(capture->digests));
    free(STEAL(capture->copied));
}

static uint32_t leaves_of(uint32_t length) { return (length + DIGEST_LEAF_SIZE - 1) / DIGEST_LEAF_SIZE; }
static uint32_t leaves_per_chunk(const struct part *part) { return leaves_of(part->chunk_size); }

int capture_init(struct capture *capture, struct part *part, void (*done)(struct part *part)) {
    size_t chunks = min_u64(part->chunk_count, CAPTURE_JOB_MAX);
    size_t leaves = chunks * leaves_per_chunk(part);
    capture->done = done;
    capture->digests = calloc(leaves, sizeof *capture->digests);
    capture->copied = calloc(leaves, sizeof *capture->copied);
    if (!capture->digests || !capture->copied) {
        capture_deinit(capture);
        return -ENOMEM;
    }
    for (size_t i = 0; i < CAPTURE_WORKERS_MAX; i++)
        capture->workers[i].part = part;
    return 0;
}

static uint64_t chunk_offset(const struct part *part, uint32_t index) { return (uint64_t)index * part->chunk_size; }

/* ---- on the workers ---- */

/* Fills one leaf from wherever its bytes come and digests it while it is in cache. */
static int copy_leaf(struct part *part, uint64_t offset, size_t length, const uint8_t *pushed, uint8_t *scratch,
                     uint8_t *destination, struct digest *ret_digest, struct problem *problem) {
    if (part->capture.landed) { /* only what lies in host memory is missing, and of a secured part nothing */
        int r = part->secured ? 0 : source_fill(&part->source, offset, length, destination, problem);
        if (!r)
            digest_leaf(destination, length, ret_digest);
        return r;
    }
    const uint8_t *bytes = pushed ? pushed : source_look(&part->source, offset, length);
    if (bytes) {
        digest_copy_leaf(destination, bytes, length, ret_digest);
        return 0;
    }
    /* Gathered where it stays in cache, then copied and digested in one pass. */
    int r = source_fill(&part->source, offset, length, scratch, problem);
    if (!r)
        digest_copy_leaf(destination, scratch, length, ret_digest);
    return r;
}

/* Moves the word to `to`; the move that makes the part captured only if the source is still the one
 * that was registered. */
static int advance(struct part *part, uint64_t to, struct problem *problem) {
    struct capture *capture = &part->capture;
    if (part->secured)
        return 0;
    if (to == part->source.image_size && part->check && !capture->checking)
        return 0; /* after the second reading */
    if (to == part->source.image_size && !source_valid(&part->source))
        return problem_set(problem, -ESRCH, "process %d ended before its save was captured", part->source.peer->pid);
    if (!word_advance(part->word->page, part->counter, capture->watermark, to))
        return -ECANCELED;
    capture->watermark = to;
    return 0;
}

/* A leaf of the job, by its number. */
struct leaf {
    struct chunk *chunk;
    uint32_t number; /* in its chunk */
    uint64_t offset; /* in the image */
    size_t at;       /* in the chunk */
    size_t length;
};

static struct leaf leaf_of(struct part *part, uint32_t number) {
    uint32_t per_chunk = leaves_per_chunk(part), index = part->capture.first + number / per_chunk;
    struct leaf leaf = {.chunk = &part->chunks[index], .number = number % per_chunk};
    leaf.at = leaf.number * (size_t)DIGEST_LEAF_SIZE;
    leaf.offset = chunk_offset(part, index) + leaf.at;
    leaf.length = (size_t)min_u64(DIGEST_LEAF_SIZE, leaf.chunk->length - leaf.at);
    return leaf;
}

/* The word goes past this leaf; with its last one, a chunk is whole. */
static int move_past(struct part *part, uint32_t number, struct problem *problem) {
    struct capture *capture = &part->capture;
    struct leaf leaf = leaf_of(part, number);
    if (leaf.at + leaf.length == leaf.chunk->length)
        digest_fold(&capture->digests[number - leaf.number], leaf.number + 1, &leaf.chunk->digest);
    return advance(part, leaf.offset + leaf.length, problem);
}

static bool can_move(struct capture *capture, uint32_t number) {
    return number < capture->leaf_count && atomic_load(&capture->copied[number]);
}

static int move_word(struct part *part, struct problem *problem) {
    struct capture *capture = &part->capture;
    while (can_move(capture, atomic_load(&capture->moved)) && !atomic_flag_test_and_set(&capture->moving)) {
        int r = 0;
        uint32_t number = atomic_load(&capture->moved);
        for (; !r && can_move(capture, number) && !atomic_load(&capture->stopped); number++)
            r = move_past(part, number, problem);
        if (r)
            atomic_store(&capture->stopped, true);
        atomic_store(&capture->moved, r ? number - 1 : number);
        atomic_flag_clear(&capture->moving);
        if (r || atomic_load(&capture->stopped))
            return r;
    }
    return 0;
}

static int capture_leaf(struct capture_worker *worker, uint32_t number, uint8_t *scratch) {
    struct part *part = worker->part;
    struct capture *capture = &part->capture;
    struct leaf leaf = leaf_of(part, number);
    uint8_t *destination = leaf.chunk->buffer->data + leaf.at;
    int r = copy_leaf(part, leaf.offset, leaf.length, capture->pushed ? capture->pushed + leaf.at : NULL, scratch,
                      destination, &capture->digests[number], &worker->problem);
    if (r)
        return r;
    if (leaf.at + leaf.length == leaf.chunk->length)
        memset(destination + leaf.length, 0, align_up(leaf.chunk->length, POOL_PAGE) - leaf.chunk->length);
    atomic_store(&capture->copied[number], true);
    return move_word(part, &worker->problem);
}

static void capture_run(struct loop_op *op) {
    struct capture_worker *worker = CONTAINER_OF(op, struct capture_worker, op);
    struct part *part = worker->part;
    struct capture *capture = &part->capture;
    if (!capture->header_made && !part->push && !part->secured) { /* then there is one worker */
        image_header(&part->source.set->layout, part->source.state_length, part->source.header);
        capture->header_made = true;
    }
    CLEANUP(freep) uint8_t *scratch = aligned_alloc(POOL_PAGE, DIGEST_LEAF_SIZE);
    int r = scratch ? 0 : -ENOMEM;
    uint32_t number;
    while (!r && !atomic_load(&capture->stopped) &&
           (number = atomic_fetch_add(&capture->next, 1)) < capture->leaf_count)
        r = capture_leaf(worker, number, scratch);
    if (r)
        atomic_store(&capture->stopped, true);
    worker->result = r;
}

/* Check mode: reads a chunk again (with `landed`, what is missing there) and compares. A window's chunks have left
 * memory, their digests not. */
static int check_chunk(struct part *part, uint32_t index, uint8_t *landed, uint8_t *scratch, struct problem *problem) {
    const struct chunk *chunk = &part->chunks[index];
    struct digest leaves[LEAVES_MAX], digest;
    size_t leaf_count = 0;
    for (size_t at = 0; at < chunk->length; at += DIGEST_LEAF_SIZE) {
        size_t length = (size_t)min_u64(DIGEST_LEAF_SIZE, chunk->length - at);
        int r = copy_leaf(part, chunk_offset(part, index) + at, length, NULL, scratch,
                          landed ? landed + at : scratch + DIGEST_LEAF_SIZE, &leaves[leaf_count++], problem);
        if (r)
            return r;
    }
    digest_fold(leaves, leaf_count, &digest);
    if (digest_equal(&digest, &chunk->digest))
        return 0;
    /* The first tensor in the chunk that differs, if the chunk is still in memory; else the first in it. */
    uint64_t offset = chunk_offset(part, index);
    for (size_t at = 0; !part->windowed && chunk->buffer && at < chunk->length; at += DIGEST_LEAF_SIZE) {
        size_t length = (size_t)min_u64(DIGEST_LEAF_SIZE, chunk->length - at), same = 0;
        const uint8_t *second = landed ? landed + at : scratch;
        if (!landed && source_fill(&part->source, chunk_offset(part, index) + at, length, scratch, problem))
            break;
        while (same < length && second[same] == chunk->buffer->data[at + same])
            same++;
        offset = chunk_offset(part, index) + at + same;
        if (same < length)
            break;
    }
    struct shard shard = {.name = "the inline state"};
    const struct set *set = part->source.set;
    uint32_t where = image_find(&set->layout, set->shards, max_u64(offset, set->layout.data_start));
    if (where < set->layout.ordered_count)
        shards_get(set->shards, set->layout.order[where], &shard);
    return problem_set(problem, -EFAULT,
                       "the memory of %.200s changed between save and fence: move the change after the fence, or "
                       "protect it with CKPT_EAGER",
                       shard.name);
}

static void check_run(struct loop_op *op) {
    struct capture_worker *worker = CONTAINER_OF(op, struct capture_worker, op);
    struct part *part = worker->part;
    const struct capture *capture = &part->capture;
    CLEANUP(freep) uint8_t *scratch = aligned_alloc(POOL_PAGE, 2 * DIGEST_LEAF_SIZE);
    int r = scratch ? 0 : -ENOMEM;
    uint32_t end = capture->first + capture->count;
    for (uint32_t i = capture->first; !r && i < end; i++)
        r = check_chunk(part, i, capture->second, scratch, &worker->problem);
    if (!r && end == part->chunk_count)
        r = advance(part, part->source.image_size, &worker->problem);
    worker->result = r;
}

/* ---- on the control thread ---- */

static void worker_done(struct loop_op *op) {
    struct capture_worker *worker = CONTAINER_OF(op, struct capture_worker, op);
    struct part *part = worker->part;
    struct capture *capture = &part->capture;
    part->server->capturing--;
    capture->at_work--;
    if (op->result < 0) /* no thread could be started */
        worker->result = (int)op->result;
    /* What went wrong in the memory says more than that the client has given up since. */
    if (worker->result && (!capture->result || capture->result == -ECANCELED)) {
        capture->result = worker->result;
        capture->problem = worker->problem;
    }
    if (!capture->at_work)
        capture->done(part);
}

uint32_t capture_workers(const struct part *part) {
    const struct server *server = part->server;
    uint32_t threads = server->config->capture_threads;
    if (part->push || !part->capture.header_made || server->capturing >= threads)
        return 1;
    return (uint32_t)min_u64(threads - server->capturing, CAPTURE_WORKERS_MAX);
}

static void put_to_work(struct part *part, uint32_t count, loop_fn run) {
    struct capture *capture = &part->capture;
    capture->result = 0;
    capture->at_work = count;
    part->server->capturing += count;
    for (uint32_t i = 0; i < count; i++) {
        capture->workers[i].result = 0;
        capture->workers[i].problem = PROBLEM_NONE;
        loop_work(part->server->loop, &capture->workers[i].op, part->server->capturers, run, worker_done);
    }
}

void capture_start(struct part *part, uint32_t first, uint32_t count, uint32_t workers) {
    struct capture *capture = &part->capture;
    uint32_t last_length = part->chunks[first + count - 1].length;
    assert(count && count <= CAPTURE_JOB_MAX && !capture_busy(capture));
    capture->first = first;
    capture->count = count;
    capture->leaf_count = (count - 1) * leaves_per_chunk(part) + leaves_of(last_length);
    for (uint32_t i = 0; i < capture->leaf_count; i++)
        atomic_init(&capture->copied[i], false);
    atomic_init(&capture->next, 0);
    atomic_init(&capture->moved, 0);
    atomic_init(&capture->stopped, false);
    atomic_flag_clear(&capture->moving);
    put_to_work(part, (uint32_t)max_u64(1, min_u64(workers, capture->leaf_count / LEAVES_PER_WORKER)), capture_run);
}

void capture_check(struct part *part, uint32_t first, uint32_t count, uint8_t *landed) {
    struct capture *capture = &part->capture;
    assert(count && (!landed || count == 1));
    capture->checking = true;
    capture->first = first;
    capture->count = count;
    capture->second = landed;
    put_to_work(part, 1, check_run);
}
