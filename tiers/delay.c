/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/tier.h"

#include <errno.h>
#include <time.h>

/*
 * A tier around another one that is slow: every operation waits first. Blocking operations sleep on
 * the worker that they block anyway; submitted ones wait for a timer and are then handed on.
 *
 * While a submitted operation waits, the loop does not know it yet, but its owner must see it in
 * flight (loop_op_busy()), or would submit it a second time. So it is marked as a read or write, and
 * as cancelled, because there is nothing to cancel: file I/O runs to its end. Handing it on begins
 * with a fresh, idle operation.
 */

struct delay {
    struct tier *inner;
    uint64_t delay_ms;
};

struct delay_request {
    struct loop_op timer;
    struct tier_file *file;
    struct loop *loop;
    struct loop_group *group;
    struct loop_op *op;
    void *data; /* only read from if `writes` */
    size_t size;
    uint64_t offset;
    loop_fn fn;
    bool writes;
};

static struct tier *delayed(void *self) {
    const struct delay *delay = self;
    struct timespec rest = {.tv_sec = (time_t)(delay->delay_ms / 1000),
                            .tv_nsec = (long)(delay->delay_ms % 1000 * NANOSECONDS_PER_MS)};
    while (nanosleep(&rest, &rest) < 0 && errno == EINTR)
        continue;
    return delay->inner;
}

static int delay_make_directory(void *self, const char *path) { return tier_make_directory(delayed(self), path); }

static int delay_create(void *self, const char *path, uint64_t size, struct tier_file *file) {
    CLEANUP(freep) struct tier_file *inner = malloc(sizeof *inner);
    if (!inner)
        return -ENOMEM;
    int r = tier_create(delayed(self), path, size, inner);
    if (r == 0)
        file->state = STEAL(inner);
    return r;
}

static int delay_open(void *self, const char *path, struct tier_file *file) {
    CLEANUP(freep) struct tier_file *inner = malloc(sizeof *inner);
    if (!inner)
        return -ENOMEM;
    int r = tier_open(delayed(self), path, inner);
    if (r == 0)
        file->state = STEAL(inner);
    return r;
}

static int delay_close(void *self, struct tier_file *file) {
    delayed(self);
    int r = tier_close(file->state);
    free(file->state);
    return r;
}

static int delay_write(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    delayed(self);
    return tier_write(file->state, data, size, offset);
}

static int delay_read(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    delayed(self);
    return tier_read(file->state, data, size, offset, ret_got);
}

static int delay_truncate(void *self, struct tier_file *file, uint64_t size) {
    delayed(self);
    return tier_truncate(file->state, size);
}

static int delay_sync(void *self, struct tier_file *file) {
    delayed(self);
    return tier_sync(file->state);
}

static int delay_length(void *self, struct tier_file *file, uint64_t *ret_size) {
    delayed(self);
    return tier_length(file->state, ret_size);
}

static int delay_rename(void *self, const char *from, const char *to) { return tier_rename(delayed(self), from, to); }

static int delay_link(void *self, const char *from, const char *to) { return tier_link(delayed(self), from, to); }

static int delay_unlink(void *self, const char *path) { return tier_unlink(delayed(self), path); }

static int delay_remove_directory(void *self, const char *path) { return tier_remove_directory(delayed(self), path); }

static int delay_sync_directory(void *self, const char *path) { return tier_sync_directory(delayed(self), path); }

static int delay_list(void *self, const char *path, struct tier_entries *ret_entries) {
    return tier_list(delayed(self), path, ret_entries);
}

static int delay_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    return tier_stat(delayed(self), path, ret_entry);
}

static int delay_touch(void *self, const char *path) { return tier_touch(delayed(self), path); }

static int delay_now(void *self, int64_t *ret_now_ns) { return tier_now(delayed(self), ret_now_ns); }

static int delay_space(void *self, uint64_t *ret_free, uint64_t *ret_total) {
    return tier_space(delayed(self), ret_free, ret_total);
}

static void hand_on(struct loop_op *timer) {
    struct delay_request *request = CONTAINER_OF(timer, struct delay_request, timer);
    struct loop_op *op = request->op;
    op->kind = LOOP_IDLE;
    if (request->writes)
        tier_submit_write(request->file, request->loop, request->group, op, request->data, request->size,
                          request->offset, request->fn);
    else
        tier_submit_read(request->file, request->loop, request->group, op, request->data, request->size,
                         request->offset, request->fn);
    free(request);
}

static void wait_first(const struct delay *delay, const struct delay_request *fields) {
    struct loop_op *op = fields->op;
    assert(!loop_op_busy(op));
    struct delay_request *request = malloc(sizeof *request);
    if (!request) {
        loop_post(fields->loop, op, -ENOMEM, fields->fn);
        return;
    }
    *request = *fields;
    op->kind = fields->writes ? LOOP_WRITE : LOOP_READ;
    op->cancelled = true;
    loop_timer(request->loop, &request->timer, loop_now(request->loop) + delay->delay_ms * NANOSECONDS_PER_MS, hand_on);
}

static void delay_submit_write(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                               struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn) {
    wait_first(self, &(struct delay_request){.file = file->state,
                                             .loop = loop,
                                             .group = group,
                                             .op = op,
                                             .data = (void *)data,
                                             .size = size,
                                             .offset = offset,
                                             .fn = fn,
                                             .writes = true});
}

static void delay_submit_read(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                              struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn) {
    wait_first(self, &(struct delay_request){.file = file->state,
                                             .loop = loop,
                                             .group = group,
                                             .op = op,
                                             .data = data,
                                             .size = size,
                                             .offset = offset,
                                             .fn = fn});
}

static void delay_free(void *self) {
    struct delay *delay = self;
    tier_free(delay->inner);
    free(delay);
}

static const struct tier_ops delay_ops = {
    .kind = "delay",
    .make_directory = delay_make_directory,
    .create = delay_create,
    .open = delay_open,
    .close = delay_close,
    .write = delay_write,
    .read = delay_read,
    .truncate = delay_truncate,
    .sync = delay_sync,
    .length = delay_length,
    .rename = delay_rename,
    .link = delay_link,
    .unlink = delay_unlink,
    .remove_directory = delay_remove_directory,
    .sync_directory = delay_sync_directory,
    .list = delay_list,
    .stat = delay_stat,
    .touch = delay_touch,
    .now = delay_now,
    .space = delay_space,
    .submit_write = delay_submit_write,
    .submit_read = delay_submit_read,
    .free = delay_free,
};

int tier_delay_new(struct tier *inner, uint64_t delay_ms, struct tier **ret_tier) {
    struct delay *delay = calloc(1, sizeof *delay);
    if (!delay) {
        tier_free(inner);
        return -ENOMEM;
    }
    delay->inner = inner;
    delay->delay_ms = delay_ms;
    return tier_new(inner->name, inner->level, inner->capabilities, inner->root, &delay_ops, delay, ret_tier);
}
