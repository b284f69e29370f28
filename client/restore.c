/* SPDX-License-Identifier: Apache-2.0 */
#include "client/restore.h"

#include "client/clock.h"
#include "client/options.h"

#include <sys/mman.h>

/*
 * A restore is an index in memory and a number by which the daemon knows it. The number dies with
 * the session; the version does not change, so after a reconnect it is opened again, by generation
 * and step, and a read that was cut off begins anew: once.
 */

struct restore_block {
    struct restore_block *next;
    const void *owner; /* the tensor, or the part, that it is of */
    uint32_t epoch;
    struct fetch_lease lease; /* segment NULL: `copy` */
    void *copy;
    const void *data;
    uint64_t size;
};

/* Where r's requests go; NULL if its session is gone. */
static struct link *restore_link(const struct ckpt_restore *r, uint32_t epoch) {
    if (!r->c || !session_is_up(&r->c->session) || r->c->session.epoch != epoch)
        return NULL;
    return &r->c->session.link;
}

static int enter(struct ckpt_restore *r) {
    if (!r)
        return error_set(CKPT_E_INVALID, "the restore is NULL");
    if (!r->c)
        return error_set(CKPT_E_INVALID, "the handle of this restore was closed");
    return handle_enter(r->c);
}

/* ---- open ---- */

struct opened {
    uint64_t generation, step, index_size;
    uint32_t number;
    int fd;
};

static int send_open(struct ckpt *c, uint32_t which, uint64_t generation, uint64_t step, uint64_t timeout_ms,
                     struct opened *ret_opened) {
    struct link *link = &c->session.link;
    struct message_restore_open body = {
        .generation = generation, .step = step, .which = which, .timeout_ms = timeout_ms};
    struct link_request request = {.opcode = MESSAGE_RESTORE_OPEN, .body = &body, .fd = -1};
    int r = link_call(link, &request, MESSAGE_RESTORE_OPENED,
                      clock_deadline(min_u64(timeout_ms, UINT64_MAX - HANDLE_GRACE_MS) + HANDLE_GRACE_MS));
    if (r < 0)
        return r;
    const struct message_restore_opened *reply = link->message.body;
    if (reply->result == CKPT_NONE)
        return CKPT_NONE;
    if (reply->result != CKPT_OK)
        return error_known(reply->result)
                   ? error_set(reply->result, "%.*s", (int)link->message.tail_length, link->message.tail)
                   : link_distrust(link, "an unknown result");
    *ret_opened = (struct opened){.generation = reply->generation,
                                  .step = reply->step,
                                  .index_size = reply->index_size,
                                  .number = reply->restore,
                                  .fd = steal_fd(&link->packet.fd)};
    if (link->message.tail_length > 0) /* a warning */
        error_set(CKPT_OK, "%.*s", (int)link->message.tail_length, link->message.tail);
    return CKPT_OK;
}

static void send_close(struct link *link, uint32_t number) {
    struct message_restore_close body = {.restore = number};
    int r = link_send(link, &(struct link_request){.opcode = MESSAGE_RESTORE_CLOSE, .body = &body, .fd = -1},
                      clock_deadline(HANDLE_GRACE_MS), NULL);
    if (r < 0) /* closing the connection closes the restore too */
        link_close(link);
}

static int read_index(struct ckpt *c, const struct opened *opened, struct index *ret_index) {
    struct problem problem = PROBLEM_NONE;
    void *text;
    int r = wire_map(opened->fd, opened->index_size, true, &text, &problem);
    if (r < 0)
        return link_distrust(&c->session.link, problem.text);
    r = index_read(text, opened->index_size, ret_index);
    munmap(text, opened->index_size);
    return r;
}

/* CKPT_RESTORE_..., as the wire says it. */
static int which_on_wire(const struct ckpt *c, uint32_t which, uint32_t *ret_which) {
    switch (which) {
    case CKPT_RESTORE_LATEST:
        *ret_which = c->saves.any ? RESTORE_LATEST : RESTORE_RESUME;
        return CKPT_OK;
    case CKPT_RESTORE_STEP:
        *ret_which = RESTORE_STEP;
        return CKPT_OK;
    case CKPT_RESTORE_EXACT:
        *ret_which = RESTORE_EXACT;
        return CKPT_OK;
    default:
        return error_set(CKPT_E_INVALID, "restore: which is %u; it must be a CKPT_RESTORE_...", which);
    }
}

int ckpt_restore_open(ckpt *c, const struct ckpt_restore_options *options, ckpt_restore **ret) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    struct ckpt_restore_options given;
    r = options_get("ckpt_restore_options", options, &given, sizeof given);
    if (r < 0)
        return r;
    if (!ret)
        return error_set(CKPT_E_INVALID, "restore: the pointer for the result is NULL");
    uint32_t which = 0;
    r = which_on_wire(c, given.which, &which);
    if (r < 0)
        return r;
    uint64_t timeout_ms = clock_timeout_ms(given.timeout_ms, HANDLE_WAIT_MS);
    r = session_ensure(c, clock_deadline(timeout_ms));
    if (r < 0)
        return r;

    struct opened opened;
    r = send_open(c, which, given.generation, given.step, timeout_ms, &opened);
    if (r != CKPT_OK)
        return r;
    CLEANUP(closep) int fd = opened.fd;
    CLEANUP(freep) struct ckpt_restore *restore = calloc(1, sizeof *restore);
    r = restore ? read_index(c, &opened, &restore->index) : error_set(CKPT_E_MEMORY, "restore: out of memory");
    if (r < 0) {
        send_close(&c->session.link, opened.number);
        return r;
    }
    restore->c = c;
    restore->epoch = c->session.epoch;
    restore->number = opened.number;
    restore->generation = opened.generation;
    restore->step = opened.step;
    restore->timeout_ms = timeout_ms;
    LIST_INSERT_HEAD(&c->restores, restore, link);
    *ret = STEAL(restore);
    return CKPT_OK;
}

/* Connected, and the daemon knows the version. */
static int ensure(struct ckpt_restore *r) {
    struct ckpt *c = r->c;
    int result = session_ensure(c, clock_deadline(r->timeout_ms));
    if (result < 0 || r->epoch == c->session.epoch)
        return result;
    struct opened opened;
    result = send_open(c, RESTORE_EXACT, r->generation, r->step, r->timeout_ms, &opened);
    if (result == CKPT_NONE)
        return error_set(CKPT_E_NOT_FOUND, "version %ju of generation %ju is gone since it was opened",
                         (uintmax_t)r->step, (uintmax_t)r->generation);
    if (result < 0)
        return result;
    close(opened.fd);
    r->epoch = c->session.epoch;
    r->number = opened.number;
    return CKPT_OK;
}

static void block_free(struct ckpt_restore *r, struct restore_block *block) {
    if (block->lease.segment) {
        struct link *link = restore_link(r, block->epoch);
        if (r->c)
            fetch_release(&r->c->segments, link, &block->lease);
        else
            segment_unref(block->lease.segment);
    }
    free(block->copy);
    free(block);
}

void ckpt_restore_close(ckpt_restore *r) {
    if (!r || (r->c && handle_enter(r->c) == CKPT_E_FORKED))
        return;
    while (r->blocks) {
        struct restore_block *block = r->blocks;
        r->blocks = block->next;
        block_free(r, block);
    }
    struct link *link = restore_link(r, r->epoch);
    if (link)
        send_close(link, r->number);
    if (r->c)
        LIST_REMOVE(r, link);
    index_deinit(&r->index);
    free(r);
}

void restore_orphan(struct ckpt *c) {
    while (!LIST_EMPTY(&c->restores)) {
        struct ckpt_restore *r = LIST_FIRST(&c->restores);
        LIST_REMOVE(r, link);
        r->c = NULL;
    }
}

/* ---- the index ---- */

int ckpt_restore_get_info(ckpt_restore *r, struct ckpt_restore_info *info) {
    int result = enter(r);
    if (result < 0)
        return result;
    struct ckpt_restore_info values = {
        .world = r->index.complete.summary.world,
        .generation = r->generation,
        .step = r->step,
        .bytes = r->index.complete.summary.bytes,
        .tensors = r->index.count,
    };
    return options_fill("ckpt_restore_info", &values, sizeof values, info);
}

int ckpt_restore_tensor(ckpt_restore *r, uint64_t index, struct ckpt_tensor *tensor) {
    int result = enter(r);
    if (result < 0)
        return result;
    if (index >= r->index.count)
        return error_set(CKPT_E_NOT_FOUND, "there is no tensor %ju: this version has %zu", (uintmax_t)index,
                         r->index.count);
    struct ckpt_tensor values;
    index_describe(&r->index, &r->index.tensors[index], &values);
    return options_fill("ckpt_tensor", &values, sizeof values, tensor);
}

static int find(struct ckpt_restore *r, const char *name, bool local_only, uint32_t rank,
                const struct index_tensor **ret_tensor) {
    if (!name)
        return error_set(CKPT_E_INVALID, "restore: the name is NULL");
    const struct index_tensor *tensor = index_find(&r->index, name, local_only, rank);
    if (!tensor)
        return error_set(CKPT_E_NOT_FOUND, "version %ju of generation %ju has no tensor %s%s", (uintmax_t)r->step,
                         (uintmax_t)r->generation, name, local_only ? " local to that rank" : "");
    *ret_tensor = tensor;
    return CKPT_OK;
}

int ckpt_restore_find(ckpt_restore *r, const char *name, uint32_t rank, struct ckpt_tensor *tensor) {
    const struct index_tensor *found = NULL;
    int result = enter(r);
    if (result == CKPT_OK)
        result = find(r, name, false, rank, &found);
    if (result < 0)
        return result;
    struct ckpt_tensor values;
    index_describe(&r->index, found, &values);
    return options_fill("ckpt_tensor", &values, sizeof values, tensor);
}

/* The tensor that has the bytes. */
static int find_stored(struct ckpt_restore *r, const char *name, bool local_only, uint32_t rank,
                       const struct index_tensor **ret_tensor) {
    const struct index_tensor *tensor = NULL;
    int result = find(r, name, local_only, rank, &tensor);
    if (result < 0)
        return result;
    *ret_tensor = index_resolve(&r->index, tensor);
    if (!*ret_tensor)
        return error_set(CKPT_E_DAMAGED, "tensor %s is an alias of %s, which this version lacks", name,
                         tensor->alias_of);
    return CKPT_OK;
}

/* ---- reads ---- */

static int check_form(const struct ckpt_read *read, const struct index_tensor *tensor) {
    const struct geometry *form = tensor->form;
    if (read->dtype != (uint32_t)tensor->dtype)
        return error_set(CKPT_E_MISMATCH, "tensor %s: stored as %s, to be read as %s", read->name,
                         dtype_name(tensor->dtype),
                         dtype_valid(read->dtype) ? dtype_name((enum dtype)read->dtype) : "no known dtype");
    if (read->dimensions != form->dims)
        return error_set(CKPT_E_MISMATCH, "tensor %s: stored with %u dimensions, to be read with %u", read->name,
                         form->dims, read->dimensions);
    for (unsigned i = 0; read->shape && i < form->dims; i++)
        if (read->shape[i] != form->shape[i])
            return error_set(CKPT_E_MISMATCH, "tensor %s: stored with extent %ju in dimension %u, to be read with %ju",
                             read->name, (uintmax_t)form->shape[i], i, (uintmax_t)read->shape[i]);
    return CKPT_OK;
}

static int make_target(struct ckpt *c, const struct ckpt_read *read, const struct index_tensor *tensor,
                       struct plan_target *ret_target) {
    int result = check_form(read, tensor);
    if (result < 0)
        return result;
    if (read->range > 1 || (read->flags & ~(uint32_t)CKPT_RANK_LOCAL))
        return error_set(CKPT_E_INVALID, "read of %s: range is %u, flags 0x%x", read->name, read->range, read->flags);
    const struct geometry *form = tensor->form;
    size_t bytes = form->dims * sizeof(uint64_t);
    struct plan_target target = {
        .name = tensor->name, .stride = read->stride, .data = read->data, .element_size = dtype_size(tensor->dtype)};
    struct geometry *geometry = &target.geometry;
    geometry->dims = form->dims;
    memcpy(geometry->shape, form->shape, bytes);
    if (read->range) {
        if (read->offset || read->extent)
            return error_set(CKPT_E_INVALID, "read of %s: a range has no offset and extent", read->name);
        geometry->is_range = true;
        geometry->start = read->start;
        geometry->count = read->count;
    } else {
        if (read->offset && !read->extent)
            return error_set(CKPT_E_INVALID, "read of %s: an offset needs an extent", read->name);
        if (read->offset)
            memcpy(geometry->offset, read->offset, bytes);
        memcpy(geometry->extent, read->extent ? read->extent : form->shape, bytes);
    }
    if (!geometry_valid(geometry, target.element_size))
        return error_set(CKPT_E_INVALID, "read of %s: the box or range leaves the tensor", read->name);
    if (!read->data && geometry_elements(geometry) > 0)
        return error_set(CKPT_E_INVALID, "read of %s: data is NULL", read->name);
    target.device = devices_find(&c->devices, read->data);
    target.on_device = target.device != DEVICE_HOST && geometry_elements(geometry) > 0;
    if (read->on_stream > 1 || (read->on_stream && target.device == DEVICE_HOST))
        return error_set(CKPT_E_INVALID, "read of %s: on_stream is %u, and data is %s memory", read->name,
                         read->on_stream, target.device == DEVICE_HOST ? "host" : "device");
    target.on_stream = read->on_stream;
    target.stream = read->stream;
    *ret_target = target;
    return CKPT_OK;
}

static int run_plan(void *context, struct plan *plan) {
    struct ckpt_restore *r = context;
    plan_sort(plan);
    return fetch_plan(&r->c->segments, &r->c->session.link, plan, r->number, r->timeout_ms);
}

static void plan_begin(struct ckpt_restore *r, const struct plan_target *targets, struct plan *ret_plan) {
    *ret_plan = (struct plan){.index = &r->index,
                              .targets = targets,
                              .limit = PLAN_COPIES_MAX,
                              .full = run_plan,
                              .context = r,
                              .staging = &r->c->staging,
                              .deadline = clock_deadline(r->timeout_ms)};
}

/* How to fill a plan, so that it can be done twice. */
typedef int (*restore_fill_fn)(const void *context, struct plan *plan);

static int run_once(struct ckpt_restore *r, const struct plan_target *targets, restore_fill_fn fill,
                    const void *context) {
    int result = ensure(r);
    if (result < 0)
        return result;
    CLEANUP(plan_deinit) struct plan plan;
    plan_begin(r, targets, &plan);
    result = fill(context, &plan);
    return result < 0 ? result : run_plan(r, &plan);
}

static int run(struct ckpt_restore *r, const struct plan_target *targets, restore_fill_fn fill, const void *context) {
    int result = run_once(r, targets, fill, context);
    if (result == CKPT_E_UNREACHABLE)
        result = run_once(r, targets, fill, context);
    return result;
}

struct tensors {
    const struct index_tensor **items;
    size_t count;
};

static int fill_tensors(const void *context, struct plan *plan) {
    const struct tensors *tensors = context;
    int result = CKPT_OK;
    for (size_t i = 0; i < tensors->count && result == CKPT_OK; i++)
        result = plan_add(plan, tensors->items[i], (uint32_t)i);
    return result;
}

/* Nobody waits here for what goes to devices. */
static bool all_on_streams(const struct plan_target *targets, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (targets[i].on_device && !targets[i].on_stream)
            return false;
    return true;
}

/* `size` is that of the program's struct ckpt_read. */
int ckpt_restore_read_many(ckpt_restore *r, const struct ckpt_read *reads, size_t count) {
    int result = enter(r);
    if (result < 0 || count == 0)
        return result;
    if (!reads || count > UINT32_MAX)
        return error_set(CKPT_E_INVALID, "read: reads is NULL, or there are more than %u", UINT32_MAX);
    CLEANUP(freep) struct plan_target *targets = calloc(count, sizeof *targets);
    CLEANUP(freep) const struct index_tensor **items = calloc(count, sizeof *items);
    if (!targets || !items)
        return error_set(CKPT_E_MEMORY, "out of memory for %zu reads", count);
    const uint8_t *at = (const uint8_t *)reads;
    for (size_t i = 0; i < count; i++) {
        struct ckpt_read read;
        result = options_get("ckpt_read", at, &read, sizeof read);
        if (result == CKPT_OK)
            result = find_stored(r, read.name, read.flags & CKPT_RANK_LOCAL, read.rank, &items[i]);
        if (result == CKPT_OK)
            result = make_target(r->c, &read, items[i], &targets[i]);
        if (result < 0)
            return result;
        uint32_t step; /* elements of the array are as large as the program knows them */
        memcpy(&step, at, sizeof step);
        at += step;
    }
    struct tensors tensors = {.items = items, .count = count};
    result = run(r, targets, fill_tensors, &tensors);
    return result < 0 || all_on_streams(targets, count) ? result
                                                        : staging_settle(&r->c->staging, clock_deadline(r->timeout_ms));
}

int ckpt_restore_read(ckpt_restore *r, const struct ckpt_read *read) { return ckpt_restore_read_many(r, read, 1); }

/* ---- what lives as long as the restore ---- */

static struct restore_block *block_find(const struct ckpt_restore *r, const void *owner) {
    struct restore_block *block = r->blocks;
    while (block && block->owner != owner)
        block = block->next;
    return block;
}

static struct restore_block *block_new(uint64_t size) {
    struct restore_block *block = calloc(1, sizeof *block);
    if (!block)
        return NULL;
    block->size = size;
    return block;
}

static int block_keep(struct ckpt_restore *r, struct restore_block *block, const void *owner, const void **ret_data,
                      uint64_t *ret_size) {
    block->owner = owner;
    block->next = r->blocks;
    r->blocks = block;
    *ret_data = block->data;
    *ret_size = block->size;
    return CKPT_OK;
}

struct bytes {
    uint32_t rank;
    uint64_t offset, length;
};

static int fill_bytes(const void *context, struct plan *plan) {
    const struct bytes *bytes = context;
    return plan_add_bytes(plan, bytes->rank, bytes->offset, bytes->length, 0);
}

int ckpt_restore_state(ckpt_restore *r, uint32_t rank, const void **ret_data, uint64_t *ret_size) {
    int result = enter(r);
    if (result < 0)
        return result;
    if (!ret_data || !ret_size)
        return error_set(CKPT_E_INVALID, "restore: a pointer for the result is NULL");
    uint32_t world = r->index.complete.summary.world;
    if (rank >= world)
        return error_set(CKPT_E_NOT_FOUND, "there is no rank %u: %u ranks wrote this version", rank, world);
    const struct complete_part *part = &r->index.complete.parts[rank];
    struct restore_block *block = block_find(r, part);
    if (block) {
        *ret_data = block->data;
        *ret_size = block->size;
        return CKPT_OK;
    }
    block = block_new(part->state_length);
    if (block)
        block->data = block->copy = malloc(max_u64(part->state_length, 1));
    if (!block || !block->copy) {
        free(block);
        return error_set(CKPT_E_MEMORY, "out of memory for %ju bytes of state", (uintmax_t)part->state_length);
    }
    struct plan_target target = {.data = block->copy, .element_size = 1};
    target.geometry.dims = 1;
    target.geometry.shape[0] = target.geometry.extent[0] = part->state_length;
    struct bytes bytes = {.rank = rank, .offset = part->state_offset, .length = part->state_length};
    result = run(r, &target, fill_bytes, &bytes);
    if (result < 0) {
        block_free(r, block);
        return result;
    }
    return block_keep(r, block, part, ret_data, ret_size);
}

/* A lease on the daemon's own memory. CKPT_NONE: it does not lie in one piece; CKPT_E_LIMIT, CKPT_E_MEMORY:
 * the daemon has no room for all of it at once. */
static int map_lease(struct ckpt_restore *r, const struct index_tensor *tensor, struct restore_block *block) {
    const struct piece *piece = &r->index.complete.pieces.items[tensor->first];
    if (tensor->count != 1 || !geometry_is_whole(&piece->geometry) || block->size == 0)
        return CKPT_NONE;
    int result = ensure(r);
    if (result < 0)
        return result;
    struct plan plan;
    plan_begin(r, NULL, &plan);
    result = fetch_map(&r->c->segments, &r->c->session.link, &plan, r->number, piece->rank, piece->image_offset,
                       block->size, r->timeout_ms, &block->lease);
    block->epoch = r->epoch;
    block->data = block->lease.data;
    return result;
}

static int map_copy(struct ckpt_restore *r, const struct index_tensor *tensor, struct restore_block *block) {
    block->data = block->copy = aligned_alloc(AREA_ALIGNMENT, align_up(max_u64(block->size, 1), AREA_ALIGNMENT));
    if (!block->copy)
        return error_set(CKPT_E_MEMORY, "tensor %s: out of memory for %ju bytes", tensor->name, (uintmax_t)block->size);
    struct plan_target target = {
        .geometry = *tensor->form, .data = block->copy, .element_size = dtype_size(tensor->dtype)};
    target.geometry.is_range = false;
    memset(target.geometry.offset, 0, sizeof target.geometry.offset);
    memcpy(target.geometry.extent, target.geometry.shape, sizeof target.geometry.extent);
    struct tensors tensors = {.items = &tensor, .count = 1};
    return run(r, &target, fill_tensors, &tensors);
}

int ckpt_restore_map(ckpt_restore *r, const char *name, uint32_t rank, const void **ret_data, uint64_t *ret_size) {
    const struct index_tensor *tensor = NULL;
    int result = enter(r);
    if (result == CKPT_OK)
        result = find_stored(r, name, false, rank, &tensor);
    if (result < 0)
        return result;
    if (!ret_data || !ret_size)
        return error_set(CKPT_E_INVALID, "restore: a pointer for the result is NULL");
    struct restore_block *block = block_find(r, tensor);
    if (block) {
        *ret_data = block->data;
        *ret_size = block->size;
        return CKPT_OK;
    }
    block = block_new(geometry_tensor_elements(tensor->form) * dtype_size(tensor->dtype));
    if (!block)
        return error_set(CKPT_E_MEMORY, "tensor %s: out of memory", name);
    result = map_lease(r, tensor, block);
    bool no_room = result == CKPT_E_LIMIT || result == CKPT_E_MEMORY;
    if (result == CKPT_NONE || result == CKPT_E_UNREACHABLE || no_room)
        result = map_copy(r, tensor, block);
    if (result < 0) {
        block_free(r, block);
        return result;
    }
    return block_keep(r, block, tensor, ret_data, ret_size);
}

int ckpt_restore_prefetch(ckpt_restore *r, uint32_t rank) {
    int result = enter(r);
    if (result < 0)
        return result;
    uint32_t world = r->index.complete.summary.world;
    if (rank != UINT32_MAX && rank >= world)
        return error_set(CKPT_E_NOT_FOUND, "there is no rank %u: %u ranks wrote this version", rank, world);
    result = ensure(r);
    if (result < 0)
        return result;
    struct message_prefetch body = {.restore = r->number, .rank = rank};
    return link_send(&r->c->session.link, &(struct link_request){.opcode = MESSAGE_PREFETCH, .body = &body, .fd = -1},
                     clock_deadline(r->timeout_ms), NULL);
}
