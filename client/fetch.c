/* SPDX-License-Identifier: Apache-2.0 */
#include "client/fetch.h"

#include "client/clock.h"

#include <sys/mman.h>

/*
 * A few windows are in flight at once, so that the daemon reads the next while this one is copied.
 * If the daemon has no room for so much (CKPT_E_LIMIT, CKPT_E_MEMORY), windows are asked for one at
 * a time and smaller. Windows that are still in flight when a read fails are answered to nobody, and
 * segments_unclaimed() gives back what they bring.
 */

#define FETCH_FLIGHTS 8
#define FETCH_WINDOW_BYTES MIB(8)
#define FETCH_WINDOW_CHUNKS_MIN 2 /* the smallest pool holds twice that */
#define FETCH_PINNED_MAX (LEASES_MAX / 2)
#define FETCH_RELEASE_MS UINT64_C(1000)

_Static_assert(FETCH_FLIGHTS <= FETCHES_MAX, "the daemon's limit");

static uint32_t window_chunks(uint64_t chunk_size) {
    return (uint32_t)min_u64(max_u64(FETCH_WINDOW_BYTES / chunk_size, FETCH_WINDOW_CHUNKS_MIN), FETCH_CHUNKS_MAX);
}

void segment_unref(struct segment *segment) {
    if (--segment->refs > 0)
        return;
    munmap((void *)(uintptr_t)segment->map, segment->size);
    free(segment);
}

void segments_forget(struct segments *segments) {
    while (segments->first) {
        struct segment *segment = segments->first;
        segments->first = segment->next;
        segment_unref(segment);
    }
    segments->pinned = 0;
}

static struct segment *segment_find(const struct segments *segments, uint32_t number) {
    for (struct segment *segment = segments->first; segment; segment = segment->next)
        if (segment->number == number)
            return segment;
    return NULL;
}

static int segment_add(struct segments *segments, struct link *link) {
    const struct message_segment *body = link->message.body;
    CLEANUP(closep) int fd = steal_fd(&link->packet.fd);
    if (segment_find(segments, body->segment))
        return link_distrust(link, "a segment that was sent before");
    struct problem problem = PROBLEM_NONE;
    void *map;
    if (wire_map(fd, body->size, false, &map, &problem) < 0)
        return link_distrust(link, problem.text);
    struct segment *segment = malloc(sizeof *segment);
    if (!segment) {
        munmap(map, body->size);
        return link_distrust(link, "out of memory for a segment");
    }
    *segment =
        (struct segment){.number = body->segment, .refs = 1, .size = body->size, .map = map, .next = segments->first};
    segments->first = segment;
    return CKPT_OK;
}

static void release(struct link *link, uint32_t lease) {
    struct message_release body = {.lease = lease};
    int r = link_send(link, &(struct link_request){.opcode = MESSAGE_RELEASE, .body = &body, .fd = -1},
                      clock_deadline(FETCH_RELEASE_MS), NULL);
    if (r < 0)
        link_close(link); /* the daemon then gives back all of our leases */
}

void segments_unclaimed(struct segments *segments, struct link *link) {
    if (link->message.opcode == MESSAGE_SEGMENT) {
        if (segment_add(segments, link) < 0)
            link_close(link);
    } else if (link->message.opcode == MESSAGE_FETCHED) {
        const struct message_fetched *body = link->message.body;
        release(link, body->lease);
    } else if (link->message.opcode == MESSAGE_RESTORE_OPENED) {
        const struct message_restore_opened *body = link->message.body;
        struct message_restore_close close_body = {.restore = body->restore};
        struct link_request request = {.opcode = MESSAGE_RESTORE_CLOSE, .body = &close_body, .fd = -1};
        if (body->result == CKPT_OK && link_send(link, &request, clock_deadline(FETCH_RELEASE_MS), NULL) < 0)
            link_close(link);
    }
}

static int send_fetch(struct link *link, uint32_t restore, uint32_t rank, uint32_t first, uint32_t count,
                      uint64_t timeout_ms, uint32_t *ret_serial) {
    struct message_fetch body = {
        .restore = restore, .rank = rank, .first = first, .count = count, .timeout_ms = timeout_ms};
    return link_send(link, &(struct link_request){.opcode = MESSAGE_FETCH, .body = &body, .fd = -1},
                     clock_deadline(timeout_ms), ret_serial);
}

/* The place of chunk number i of a FETCHED in link->message, checked. NULL: nonsense. */
static const uint8_t *place(const struct segments *segments, const struct link *link, uint32_t i, uint64_t length,
                            struct segment **ret_segment) {
    struct chunk_place place;
    memcpy(&place, link->message.tail + i * sizeof place, sizeof place);
    struct segment *segment = segment_find(segments, place.segment);
    if (!segment || place.length != length || place.offset > segment->size || length > segment->size - place.offset)
        return NULL;
    *ret_segment = segment;
    return segment->map + place.offset;
}

static bool fetched_is_sound(const struct link *link, uint32_t count) {
    const struct message_fetched *body = link->message.body;
    return body->count == count && link->message.tail_length == count * sizeof(struct chunk_place);
}

static int copy_window(const struct segments *segments, struct link *link, const struct plan *plan,
                       const struct plan_window *window) {
    if (!fetched_is_sound(link, window->count))
        return link_distrust(link, "other chunks than were asked for");
    size_t copy = window->first_copy, end = copy + window->copy_count;
    for (uint32_t i = 0; i < window->count; i++) {
        struct segment *segment;
        uint32_t chunk = window->first + i;
        const uint8_t *data = place(segments, link, i, plan_chunk_length(plan, window->rank, chunk), &segment);
        if (!data)
            return link_distrust(link, "a chunk that lies outside of its segment");
        uint64_t chunk_end = (chunk + UINT64_C(1)) * plan_chunk_size(plan, window->rank);
        for (; copy < end && plan->copies[copy].image_offset < chunk_end; copy++) {
            int r = plan_execute(plan, &plan->copies[copy], data);
            if (r < 0)
                return r;
        }
    }
    return CKPT_OK;
}

struct flight {
    uint32_t serial;
    struct plan_window window;
};

struct flights {
    struct flight items[FETCH_FLIGHTS];
    unsigned count, limit;
    uint32_t chunks; /* of a window, at most */
    size_t next;     /* the first copy that is not asked for */
};

static struct flight *flight_find(struct flights *flights, uint32_t serial) {
    for (unsigned i = 0; i < flights->count; i++)
        if (flights->items[i].serial == serial)
            return &flights->items[i];
    return NULL;
}

static void flight_remove(struct flights *flights, struct flight *flight) {
    flights->count--;
    memmove(flight, flight + 1, (size_t)(&flights->items[flights->count] - flight) * sizeof *flight);
}

static int flights_fill(struct flights *flights, struct link *link, const struct plan *plan, uint32_t restore,
                        uint64_t timeout_ms) {
    while (flights->count < flights->limit) {
        struct flight *flight = &flights->items[flights->count];
        size_t at = flights->next;
        if (!plan_next(plan, &at, flights->chunks, &flight->window))
            return CKPT_OK;
        int r = send_fetch(link, restore, flight->window.rank, flight->window.first, flight->window.count, timeout_ms,
                           &flight->serial);
        if (r < 0)
            return r;
        flights->next = at;
        flights->count++;
    }
    return CKPT_OK;
}

/* The daemon has no room for this window. What is in flight behind it is dropped (and given back when
 * it comes), and asked for again in smaller pieces. */
static bool flights_shrink(struct flights *flights, const struct flight *refused) {
    if (flights->limit == 1 && flights->chunks == 1)
        return false;
    for (unsigned i = 0; i < flights->count; i++)
        flights->next = min_u64(flights->next, flights->items[i].window.first_copy);
    flights->next = min_u64(flights->next, refused->window.first_copy);
    flights->count = 0;
    flights->limit = 1;
    flights->chunks = flights->chunks > 1 ? flights->chunks / 2 : 1;
    return true;
}

/* The daemon names a file and a chunk; whoever restores thinks in tensors. */
static int window_failed(const struct link *link, const struct plan *plan, const struct plan_window *window,
                         int error) {
    const struct plan_target *target = &plan->targets[plan->copies[window->first_copy].target];
    return error_set(error, "tensor %.512s (or a neighbour) cannot be read, objects may be half-written: %.*s",
                     target->name ? target->name : "with the inline state", (int)link->message.tail_length,
                     link->message.tail);
}

int fetch_plan(struct segments *segments, struct link *link, const struct plan *plan, uint32_t restore,
               uint64_t timeout_ms) {
    if (plan->count == 0)
        return CKPT_OK;
    struct flights flights = {.limit = FETCH_FLIGHTS,
                              .chunks = window_chunks(plan_chunk_size(plan, plan->copies[0].rank))};
    uint64_t wait_ms = add_overflows(timeout_ms, FETCH_RELEASE_MS, &wait_ms) ? UINT64_MAX : wait_ms;
    for (bool first = true;; first = false) {
        int r = flights_fill(&flights, link, plan, restore, timeout_ms);
        if (r < 0 || flights.count == 0)
            return r;
        for (unsigned i = 0; first && i < flights.count; i++) /* later there are chunks to copy meanwhile */
            plan_prepare(plan, &flights.items[i].window);
        r = link_receive(link, clock_deadline(wait_ms));
        if (r < 0)
            return r;
        struct flight *flight = flight_find(&flights, link->message.serial);
        if (!flight) {
            link_unclaimed(link);
            continue;
        }
        struct flight answered = *flight;
        flight_remove(&flights, flight);
        if (link->message.opcode == MESSAGE_ERROR) {
            r = link_error(link);
            if ((r == CKPT_E_LIMIT || r == CKPT_E_MEMORY) && flights_shrink(&flights, &answered))
                continue;
            return window_failed(link, plan, &answered.window, r);
        }
        if (link->message.opcode != MESSAGE_FETCHED)
            return link_distrust(link, "a reply of the wrong kind");
        uint32_t lease = ((const struct message_fetched *)link->message.body)->lease;
        r = copy_window(segments, link, plan, &answered.window);
        if (r < 0)
            return r;
        release(link, lease);
    }
}

int fetch_map(struct segments *segments, struct link *link, const struct plan *plan, uint32_t restore, uint32_t rank,
              uint64_t image_offset, uint64_t length, uint64_t timeout_ms, struct fetch_lease *ret_lease) {
    uint64_t chunk_size = plan_chunk_size(plan, rank);
    uint64_t first = image_offset / chunk_size, count = (image_offset + length - 1) / chunk_size - first + 1;
    if (segments->pinned >= FETCH_PINNED_MAX || count > window_chunks(chunk_size))
        return CKPT_NONE;
    uint32_t serial;
    int r = send_fetch(link, restore, rank, (uint32_t)first, (uint32_t)count, timeout_ms, &serial);
    if (r == CKPT_OK)
        r = link_await(link, serial, MESSAGE_FETCHED, clock_deadline(timeout_ms + FETCH_RELEASE_MS));
    if (r < 0)
        return r;
    if (!fetched_is_sound(link, (uint32_t)count))
        return link_distrust(link, "other chunks than were asked for");
    struct fetch_lease lease = {.lease = ((const struct message_fetched *)link->message.body)->lease};
    const uint8_t *begin = NULL;
    bool joined = true;
    for (uint32_t i = 0; i < count; i++) {
        struct segment *segment;
        const uint8_t *data = place(segments, link, i, plan_chunk_length(plan, rank, (uint32_t)first + i), &segment);
        if (!data)
            return link_distrust(link, "a chunk that lies outside of its segment");
        if (i == 0) {
            begin = data;
            lease.segment = segment;
        }
        joined = joined && segment == lease.segment && data == begin + i * chunk_size;
    }
    if (!joined) {
        release(link, lease.lease);
        return CKPT_NONE;
    }
    lease.data = begin + image_offset % chunk_size;
    lease.segment->refs++;
    segments->pinned++;
    *ret_lease = lease;
    return CKPT_OK;
}

void fetch_release(struct segments *segments, struct link *link, struct fetch_lease *lease) {
    segment_unref(lease->segment);
    if (link) {
        release(link, lease->lease);
        segments->pinned--;
    }
}
