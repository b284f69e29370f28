/* SPDX-License-Identifier: Apache-2.0 */
#include "client/register.h"

#include "client/clock.h"

#include <sys/random.h>

/*
 * AREA and MISSED are sent without waiting for their answers. If REGISTER or SAVE then fails, the
 * complaint about what came before is the cause that is told (link.h).
 */

/* A buffer in an area, grown as needed. */
static int buffer_grow(struct ckpt *c, void **buffer, uint64_t *size, uint64_t wanted) {
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
    return CKPT_OK;
}

int register_release_devices(struct ckpt *c) {
    if (!session_is_up(&c->session) || !exports_told(&c->exports))
        return CKPT_OK;
    int r = exports_release(&c->exports, &c->session.link, clock_deadline(HANDLE_REGISTER_MS));
    if (r < 0)
        session_down(c); /* which closes them too */
    c->registered = false;
    return r;
}

static int device_buffer_grow(struct ckpt *c, int device, uint64_t wanted) {
    uint64_t size = c->device_eager_size[device];
    if (wanted <= size)
        return CKPT_OK;
    int r = c->eager.device[device] ? register_release_devices(c) : CKPT_OK;
    if (r == CKPT_OK)
        r = device_enter(&c->devices, device);
    if (r < 0)
        return r;
    const struct cuda *cuda = &c->devices.cuda;
    if (c->eager.device[device])
        (void)cuda->cuMemFree_v2(c->eager.device[device]);
    c->eager.device[device] = 0;
    c->device_eager_size[device] = 0;
    uint64_t room = max_u64(wanted, size + size / 2);
    CUdeviceptr memory = 0;
    r = devices_result(&c->devices, cuda->cuMemAlloc_v2(&memory, room),
                       "no device memory for the copies of eager tensors");
    device_leave(&c->devices);
    if (r < 0)
        return r;
    c->eager.device[device] = memory;
    c->device_eager_size[device] = room;
    return CKPT_OK;
}

void register_free_eager(struct ckpt *c) {
    for (int device = 0; device < DEVICES_MAX; device++) {
        if (!c->eager.device[device] || device_enter(&c->devices, device) < 0)
            continue;
        (void)c->devices.cuda.cuMemFree_v2(c->eager.device[device]);
        device_leave(&c->devices);
        c->eager.device[device] = 0;
    }
}

static int buffers_grow(struct ckpt *c) {
    set_place_eager(&c->set);
    int r = buffer_grow(c, &c->eager.host, &c->eager_size, c->set.eager_bytes);
    for (int device = 0; device < DEVICES_MAX && r == CKPT_OK && c->set.on_devices > 0; device++)
        r = device_buffer_grow(c, device, c->set.device_eager_bytes[device]);
    return r;
}

static void turn_to_push(struct ckpt *c) {
    snprintf(c->push_reason, sizeof c->push_reason, "%.*s", HANDLE_REASON_MAX - 1, error_last());
    c->use_push = true;
}

/* Device memory came with version 2 of the protocol. */
static bool daemon_reads_devices(const struct ckpt *c) { return c->session.version >= 2; }

static int build_once(struct ckpt *c, struct set_image *ret_image) {
    struct image_identity identity = {.job = c->job, .rank = c->rank, .world = c->world};
    return set_build(&c->set, &c->areas, c->use_push ? NULL : &c->exports, &c->eager, &identity, ret_image);
}

static int build(struct ckpt *c) {
    struct set_image image = {0};
    int r = buffers_grow(c);
    if (r == CKPT_OK && c->set.on_devices > 0 && !c->use_push && !daemon_reads_devices(c)) {
        error_set(CKPT_NONE, "the daemon is older than this library, and reads no device memory");
        turn_to_push(c);
    }
    if (r == CKPT_OK)
        r = build_once(c, &image);
    if (r == CKPT_NONE) { /* some device memory cannot be given to the daemon */
        turn_to_push(c);
        r = build_once(c, &image);
    }
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

/* CKPT_NONE: the daemon cannot read the memory, the sentence says why. */
static int send_set(struct ckpt *c, uint64_t deadline) {
    struct link *link = &c->session.link;
    static const uint64_t nothing = 0; /* a table without shards has no bytes, but a memfd needs some to be mapped */
    size_t size;
    const void *table = shards_table(c->image.shards, &size);
    CLEANUP(closep) int fd = wire_memfd("ckpt-set", size ? table : &nothing, size ? size : sizeof nothing);
    if (fd < 0)
        return error_from(fd, NULL, "cannot make the shard table");
    bool probe = !c->use_push;
    if (probe && getrandom(&c->nonce, sizeof c->nonce, GRND_NONBLOCK) != sizeof c->nonce)
        c->nonce = clock_now() ^ (uintptr_t)c;
    struct message_register body = {
        .table_size = size,
        .count = shards_count(c->image.shards),
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
    if (registered->flags & (REGISTERED_PRIVATE_REFUSED | REGISTERED_DEVICE_REFUSED))
        return error_set(CKPT_NONE, "%.*s", (int)link->message.tail_length, link->message.tail);
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
    uint64_t size = (uint64_t)PUSH_SLOTS * c->session.chunk_size;
    if (size > c->push.slots_size) {
        push_settle(&c->push);
        push_unpin(&c->push);
    }
    int r = buffer_grow(c, &c->push.slots, &c->push.slots_size, size);
    return r < 0 ? r : announce(c, deadline);
}

/* The daemon accepts a save of a pushed set only while somebody is attached who will push it; and of a set in
 * device memory, the thread that waits for a device speaks over that connection. */
static int attach(struct ckpt *c, uint64_t deadline) {
    return c->use_push || c->set.on_devices > 0 ? push_attach(&c->push, c->session.id, deadline) : CKPT_OK;
}

static int send_pushed(struct ckpt *c, uint64_t deadline) {
    exports_begin(&c->exports); /* the daemon needs none of them */
    int r = prepare_push(c, deadline);
    if (r == CKPT_OK)
        r = send_set(c, deadline);
    return r == CKPT_NONE ? link_distrust(&c->session.link, "it refuses memory that it need not read") : r;
}

/* Device memory is described first; what the daemon refuses to read is pushed from then on. */
static int register_set(struct ckpt *c, uint64_t deadline) {
    if (!c->use_push) {
        struct link *link = &c->session.link;
        int r = exports_announce(&c->exports, link, deadline);
        if (r == CKPT_OK)
            r = send_set(c, deadline);
        if (r < 0 && c->set.on_devices > 0 && link_is_up(link) && link->complaint) { /* about what was announced */
            r = error_set(CKPT_NONE, "%s", link->complaint_text);
            link->complaint = CKPT_OK;
        }
        if (r != CKPT_NONE)
            return r;
        turn_to_push(c);
        if (c->set.on_devices > 0) { /* whose table names memory that the daemon does not have */
            r = build(c);
            if (r < 0)
                return r;
        }
    }
    return send_pushed(c, deadline);
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
    if (exports_are_stale(&c->exports))
        c->set.changed = true;
    int r = buffer_grow(c, &c->state, &c->state_size, state_size);
    if (r == CKPT_OK && (c->set.changed || !c->image.shards))
        r = build(c);
    if (r == CKPT_OK)
        r = announce(c, deadline);
    if (r < 0)
        return r;
    if (!c->registered) {
        r = register_set(c, deadline);
        if (r == CKPT_OK)
            r = exports_trim(&c->exports, &c->session.link, deadline);
        if (r < 0)
            return r;
        areas_trim(&c->areas, area_dropped, c);
    }
    r = attach(c, deadline);
    return r < 0 ? r : send_missed(c, deadline);
}
