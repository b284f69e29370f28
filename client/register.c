/* SPDX-License-Identifier: Apache-2.0 */
#include "client/register.h"

#include "client/clock.h"

#include <sys/random.h>

/*
 * AREA and MISSED are sent without waiting for their answers. If REGISTER or SAVE then fails, the
 * complaint about what came before is the cause that is told (link.h).
 */

/* A buffer in an area, grown as needed. True: it has moved. */
static int buffer_grow(struct ckpt *c, void **buffer, uint64_t *size, uint64_t wanted, bool *ret_moved) {
    if (wanted <= *size)
        return CKPT_OK;
    void *grown = NULL;
    uint64_t room = max_u64(wanted, *size + *size / 2);
    int r = areas_alloc(&c->areas, room, &grown);
    if (r < 0)
        return r;
    if (*buffer)
        areas_free(&c->areas, *buffer);
    *buffer = grown;
    *size = room;
    *ret_moved = true;
    return CKPT_OK;
}

static int build(struct ckpt *c) {
    bool moved = false;
    int r = buffer_grow(c, &c->eager, &c->eager_size, set_place_eager(&c->set), &moved);
    if (r < 0)
        return r;
    struct image_identity identity = {.job = c->job, .rank = c->rank, .world = c->world};
    struct set_image image = {0};
    r = set_build(&c->set, &c->areas, c->eager, &identity, &image);
    if (r < 0)
        return r;
    set_image_deinit(&c->image);
    c->image = image;
    c->set.changed = false;
    c->registered = false;
    return CKPT_OK;
}

static int announce(struct ckpt *c, uint64_t deadline) {
    for (uint32_t i = 0; i < c->areas.end; i++) {
        struct area *area = &c->areas.items[i];
        if (!area->map || area->announced)
            continue;
        struct message_area body = {.area = i, .size = area->size};
        struct link_request request = {.opcode = MESSAGE_AREA, .body = &body, .fd = area->fd};
        int r = link_send(&c->session.link, &request, deadline, NULL);
        if (r < 0)
            return r;
        area->announced = true;
    }
    return CKPT_OK;
}

static int send_set(struct ckpt *c, uint64_t deadline, bool *ret_refused) {
    struct link *link = &c->session.link;
    static const uint64_t nothing = 0; /* a table without shards has no bytes, but a memfd needs some to be mapped */
    size_t size = c->image.table.size;
    CLEANUP(closep)
    int fd = wire_memfd("ckpt-set", size ? c->image.table.data : (const void *)&nothing, size ? size : sizeof nothing);
    if (fd < 0)
        return error_from(fd, NULL, "cannot make the shard table");
    bool probe = !c->use_push;
    if (probe && getrandom(&c->nonce, sizeof c->nonce, GRND_NONBLOCK) != sizeof c->nonce)
        c->nonce = clock_now() ^ (uintptr_t)c;
    struct message_register body = {
        .table_size = size,
        .count = c->image.table.count,
        .set = ++c->set_number,
        .flags = c->use_push ? REGISTER_PUSH : 0,
        .nonce_address = probe ? (uintptr_t)&c->nonce : 0,
        .nonce = probe ? c->nonce : 0,
    };
    struct link_request request = {.opcode = MESSAGE_REGISTER, .body = &body, .fd = fd};
    int r = link_call(link, &request, MESSAGE_REGISTERED, deadline);
    if (r < 0)
        return r;
    const struct message_registered *registered = link->message.body;
    if (registered->flags & REGISTERED_PRIVATE_REFUSED) {
        *ret_refused = true;
        return CKPT_OK;
    }
    if (registered->set != c->set_number)
        return link_distrust(link, "it registered another set");
    if (registered->image_size != image_size(&c->image.layout, 0))
        return error_set(CKPT_E_VERSION,
                         "the daemon lays out an image of %ju bytes, libckpt %s one of %ju; use matching versions",
                         (uintmax_t)registered->image_size, ckpt_version(), (uintmax_t)image_size(&c->image.layout, 0));
    c->registered = true;
    return CKPT_OK;
}

static int prepare_push(struct ckpt *c, uint64_t deadline) {
    bool moved = false;
    int r = buffer_grow(c, &c->push.slots, &c->push.slots_size, (uint64_t)PUSH_SLOTS * c->session.chunk_size, &moved);
    return r < 0 ? r : announce(c, deadline);
}

/* The daemon accepts a save of a pushed set only while somebody is attached who will push it. */
static int attach(struct ckpt *c, uint64_t deadline) {
    return c->use_push ? push_attach(&c->push, c->session.id, deadline) : CKPT_OK;
}

static int send_missed(struct ckpt *c, uint64_t deadline) {
    struct message_missed body;
    while (saves_missed_take(&c->saves, &body.step)) {
        int r = link_send(&c->session.link, &(struct link_request){.opcode = MESSAGE_MISSED, .body = &body, .fd = -1},
                          deadline, NULL);
        if (r < 0)
            return r;
    }
    return CKPT_OK;
}

static void area_dropped(void *context, uint32_t area) {
    struct ckpt *c = context;
    struct message_area_drop body = {.area = area};
    int r = link_send(&c->session.link, &(struct link_request){.opcode = MESSAGE_AREA_DROP, .body = &body, .fd = -1},
                      clock_deadline(HANDLE_GRACE_MS), NULL);
    if (r < 0) /* the daemon still has that number: begin anew with one that has none */
        link_close(&c->session.link);
}

int register_ensure(struct ckpt *c, uint64_t state_size) {
    uint64_t deadline = clock_deadline(HANDLE_REGISTER_MS);
    client_assert(c, c->saves.state == SAVES_IDLE);
    bool moved = false;
    int r = buffer_grow(c, &c->state, &c->state_size, state_size, &moved);
    if (r == CKPT_OK && (c->set.changed || !c->image.shards))
        r = build(c);
    if (r == CKPT_OK)
        r = announce(c, deadline);
    if (r < 0)
        return r;
    if (!c->registered) {
        bool refused = false;
        if (c->use_push)
            r = prepare_push(c, deadline);
        if (r == CKPT_OK)
            r = send_set(c, deadline, &refused);
        if (r == CKPT_OK && refused) {
            if (c->use_push)
                return link_distrust(&c->session.link, "it refuses memory that it need not read");
            c->use_push = true;
            r = prepare_push(c, deadline);
            if (r == CKPT_OK)
                r = send_set(c, deadline, &refused);
        }
        if (r < 0)
            return r;
        areas_trim(&c->areas, area_dropped, c);
    }
    r = attach(c, deadline);
    return r < 0 ? r : send_missed(c, deadline);
}
