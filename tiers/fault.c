/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/tier.h"

#include <errno.h>
#include <stdatomic.h>

/*
 * A tier around another one that fails when it is told to: the nth operation of a name (or of any)
 * does not happen and answers with an error, or moves too few bytes, or flips one bit. It is part of
 * the product, so that an operator can see what a full disk does to a job before a disk is full.
 *
 * What a faulty device may do, and this one does:
 *   eio, enospc, edquot   the operation has no effect; a close still releases its file
 *   short                 a submitted transfer reports half its bytes, as the loop's contract allows; a
 *                         blocking write stores half and claims all (a torn write), a blocking read
 *                         ends early
 *   flip                  one bit in the middle of the transferred bytes is wrong, and nobody says so
 * The last two concern reads and writes only and do not count other operations.
 *
 * Where a submitted operation is hit, it is done at once and answered through loop_post(): this tier
 * need not be fast in the moment in which it fails.
 */

enum fault_operation {
    FAULT_MAKE_DIRECTORY,
    FAULT_CREATE,
    FAULT_OPEN,
    FAULT_CLOSE,
    FAULT_WRITE,
    FAULT_READ,
    FAULT_TRUNCATE,
    FAULT_SYNC,
    FAULT_LENGTH,
    FAULT_RENAME,
    FAULT_LINK,
    FAULT_UNLINK,
    FAULT_REMOVE_DIRECTORY,
    FAULT_SYNC_DIRECTORY,
    FAULT_LIST,
    FAULT_STAT,
    FAULT_TOUCH,
    FAULT_NOW,
    FAULT_SPACE,
    FAULT_ANY,
    FAULT_OPERATION_COUNT,
};

static const char *const operation_names[FAULT_OPERATION_COUNT] = {
    [FAULT_MAKE_DIRECTORY] = "make_directory",
    [FAULT_CREATE] = "create",
    [FAULT_OPEN] = "open",
    [FAULT_CLOSE] = "close",
    [FAULT_WRITE] = "write",
    [FAULT_READ] = "read",
    [FAULT_TRUNCATE] = "truncate",
    [FAULT_SYNC] = "sync",
    [FAULT_LENGTH] = "length",
    [FAULT_RENAME] = "rename",
    [FAULT_LINK] = "link",
    [FAULT_UNLINK] = "unlink",
    [FAULT_REMOVE_DIRECTORY] = "remove_directory",
    [FAULT_SYNC_DIRECTORY] = "sync_directory",
    [FAULT_LIST] = "list",
    [FAULT_STAT] = "stat",
    [FAULT_TOUCH] = "touch",
    [FAULT_NOW] = "now",
    [FAULT_SPACE] = "space",
    [FAULT_ANY] = "any",
};

static const char *const kind_names[] = {
    [TIER_FAULT_EIO] = "eio",     [TIER_FAULT_ENOSPC] = "enospc", [TIER_FAULT_EDQUOT] = "edquot",
    [TIER_FAULT_SHORT] = "short", [TIER_FAULT_FLIP] = "flip",
};

struct fault {
    struct tier *inner;
    enum fault_operation operation;
    enum tier_fault_kind kind;
    uint64_t nth;
    bool from_then_on;
    _Atomic uint64_t seen, fired;
};

static bool kind_moves_bytes(enum tier_fault_kind kind) { return kind == TIER_FAULT_SHORT || kind == TIER_FAULT_FLIP; }

static bool find_operation(const char *name, enum fault_operation *ret_operation) {
    for (int i = 0; i < FAULT_OPERATION_COUNT; i++) {
        if (strcmp(operation_names[i], name) == 0) {
            *ret_operation = i;
            return true;
        }
    }
    return false;
}

/* Counts this operation; true if it is the one to hit. */
static bool fires(struct fault *fault, enum fault_operation operation) {
    if (fault->operation != FAULT_ANY && fault->operation != operation)
        return false;
    if (kind_moves_bytes(fault->kind) && operation != FAULT_WRITE && operation != FAULT_READ)
        return false;
    uint64_t number = atomic_fetch_add(&fault->seen, 1) + 1;
    if (number < fault->nth || (number > fault->nth && !fault->from_then_on))
        return false;
    atomic_fetch_add(&fault->fired, 1);
    return true;
}

static int fault_error(const struct fault *fault) {
    switch (fault->kind) {
    case TIER_FAULT_ENOSPC:
        return -ENOSPC;
    case TIER_FAULT_EDQUOT:
        return -EDQUOT;
    default:
        return -EIO;
    }
}

static struct tier_file *inner_file(struct tier_file *file) { return file->state; }

static int fault_make_directory(void *self, const char *path) {
    struct fault *fault = self;
    return fires(fault, FAULT_MAKE_DIRECTORY) ? fault_error(fault) : tier_make_directory(fault->inner, path);
}

static int fault_create(void *self, const char *path, uint64_t size, struct tier_file *file) {
    struct fault *fault = self;
    if (fires(fault, FAULT_CREATE))
        return fault_error(fault);
    CLEANUP(freep) struct tier_file *inner = malloc(sizeof *inner);
    if (!inner)
        return -ENOMEM;
    int r = tier_create(fault->inner, path, size, inner);
    if (r == 0)
        file->state = STEAL(inner);
    return r;
}

static int fault_open(void *self, const char *path, struct tier_file *file) {
    struct fault *fault = self;
    if (fires(fault, FAULT_OPEN))
        return fault_error(fault);
    CLEANUP(freep) struct tier_file *inner = malloc(sizeof *inner);
    if (!inner)
        return -ENOMEM;
    int r = tier_open(fault->inner, path, inner);
    if (r == 0)
        file->state = STEAL(inner);
    return r;
}

static int fault_close(void *self, struct tier_file *file) {
    struct fault *fault = self;
    bool hit = fires(fault, FAULT_CLOSE);
    int r = tier_close(inner_file(file));
    free(file->state);
    return hit ? fault_error(fault) : r;
}

/* Writes the bytes with one bit wrong. */
static int write_flipped(struct tier_file *inner, const void *data, size_t size, uint64_t offset) {
    CLEANUP(freep) char *copy = malloc(size + 1);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, data, size);
    if (size)
        copy[size / 2] ^= 1;
    return tier_write(inner, copy, size, offset);
}

static int fault_write(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    struct fault *fault = self;
    if (!fires(fault, FAULT_WRITE))
        return tier_write(inner_file(file), data, size, offset);
    if (fault->kind == TIER_FAULT_FLIP)
        return write_flipped(inner_file(file), data, size, offset);
    if (fault->kind == TIER_FAULT_SHORT)
        return tier_write(inner_file(file), data, size / 2, offset);
    return fault_error(fault);
}

static int fault_read(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    struct fault *fault = self;
    bool hit = fires(fault, FAULT_READ);
    if (hit && !kind_moves_bytes(fault->kind))
        return fault_error(fault);
    size_t got;
    int r = tier_read(inner_file(file), data, size, offset, &got);
    if (r)
        return r;
    if (hit && fault->kind == TIER_FAULT_FLIP && got)
        ((char *)data)[got / 2] ^= 1;
    *ret_got = hit && fault->kind == TIER_FAULT_SHORT ? got / 2 : got;
    return 0;
}

static int fault_truncate(void *self, struct tier_file *file, uint64_t size) {
    struct fault *fault = self;
    return fires(fault, FAULT_TRUNCATE) ? fault_error(fault) : tier_truncate(inner_file(file), size);
}

static int fault_sync(void *self, struct tier_file *file) {
    struct fault *fault = self;
    return fires(fault, FAULT_SYNC) ? fault_error(fault) : tier_sync(inner_file(file));
}

static int fault_length(void *self, struct tier_file *file, uint64_t *ret_size) {
    struct fault *fault = self;
    return fires(fault, FAULT_LENGTH) ? fault_error(fault) : tier_length(inner_file(file), ret_size);
}

static int fault_rename(void *self, const char *from, const char *to) {
    struct fault *fault = self;
    return fires(fault, FAULT_RENAME) ? fault_error(fault) : tier_rename(fault->inner, from, to);
}

static int fault_link(void *self, const char *from, const char *to) {
    struct fault *fault = self;
    return fires(fault, FAULT_LINK) ? fault_error(fault) : tier_link(fault->inner, from, to);
}

static int fault_unlink(void *self, const char *path) {
    struct fault *fault = self;
    return fires(fault, FAULT_UNLINK) ? fault_error(fault) : tier_unlink(fault->inner, path);
}

static int fault_remove_directory(void *self, const char *path) {
    struct fault *fault = self;
    return fires(fault, FAULT_REMOVE_DIRECTORY) ? fault_error(fault) : tier_remove_directory(fault->inner, path);
}

static int fault_sync_directory(void *self, const char *path) {
    struct fault *fault = self;
    return fires(fault, FAULT_SYNC_DIRECTORY) ? fault_error(fault) : tier_sync_directory(fault->inner, path);
}

static int fault_list(void *self, const char *path, struct tier_entries *ret_entries) {
    struct fault *fault = self;
    return fires(fault, FAULT_LIST) ? fault_error(fault) : tier_list(fault->inner, path, ret_entries);
}

static int fault_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    struct fault *fault = self;
    return fires(fault, FAULT_STAT) ? fault_error(fault) : tier_stat(fault->inner, path, ret_entry);
}

static int fault_touch(void *self, const char *path) {
    struct fault *fault = self;
    return fires(fault, FAULT_TOUCH) ? fault_error(fault) : tier_touch(fault->inner, path);
}

static int fault_now(void *self, int64_t *ret_now_ns) {
    struct fault *fault = self;
    return fires(fault, FAULT_NOW) ? fault_error(fault) : tier_now(fault->inner, ret_now_ns);
}

static int fault_space(void *self, uint64_t *ret_free, uint64_t *ret_total) {
    struct fault *fault = self;
    return fires(fault, FAULT_SPACE) ? fault_error(fault) : tier_space(fault->inner, ret_free, ret_total);
}

static void fault_submit_write(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                               struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn) {
    struct fault *fault = self;
    if (!fires(fault, FAULT_WRITE)) {
        tier_submit_write(inner_file(file), loop, group, op, data, size, offset, fn);
    } else if (fault->kind == TIER_FAULT_FLIP) {
        int r = write_flipped(inner_file(file), data, size, offset);
        loop_post(loop, op, r ? r : (int64_t)size, fn);
    } else if (fault->kind == TIER_FAULT_SHORT) {
        tier_submit_write(inner_file(file), loop, group, op, data, size > 1 ? size / 2 : size, offset, fn);
    } else {
        loop_post(loop, op, fault_error(fault), fn);
    }
}

static void fault_submit_read(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                              struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn) {
    struct fault *fault = self;
    if (!fires(fault, FAULT_READ)) {
        tier_submit_read(inner_file(file), loop, group, op, data, size, offset, fn);
    } else if (fault->kind == TIER_FAULT_FLIP) {
        size_t got;
        int r = tier_read(inner_file(file), data, size, offset, &got);
        if (r == 0 && got)
            ((char *)data)[got / 2] ^= 1;
        loop_post(loop, op, r ? r : (int64_t)got, fn);
    } else if (fault->kind == TIER_FAULT_SHORT) {
        tier_submit_read(inner_file(file), loop, group, op, data, size > 1 ? size / 2 : size, offset, fn);
    } else {
        loop_post(loop, op, fault_error(fault), fn);
    }
}

static void fault_free(void *self) {
    struct fault *fault = self;
    tier_free(fault->inner);
    free(fault);
}

static const struct tier_ops fault_ops = {
    .kind = "fault",
    .make_directory = fault_make_directory,
    .create = fault_create,
    .open = fault_open,
    .close = fault_close,
    .write = fault_write,
    .read = fault_read,
    .truncate = fault_truncate,
    .sync = fault_sync,
    .length = fault_length,
    .rename = fault_rename,
    .link = fault_link,
    .unlink = fault_unlink,
    .remove_directory = fault_remove_directory,
    .sync_directory = fault_sync_directory,
    .list = fault_list,
    .stat = fault_stat,
    .touch = fault_touch,
    .now = fault_now,
    .space = fault_space,
    .submit_write = fault_submit_write,
    .submit_read = fault_submit_read,
    .free = fault_free,
};

int tier_fault_new(struct tier *inner, const struct tier_fault_options *options, struct tier **ret_tier) {
    assert(options->nth >= 1);
    enum fault_operation operation;
    struct fault *fault = NULL;
    int r = find_operation(options->operation, &operation) ? 0 : -EINVAL;
    if (r == 0) {
        fault = calloc(1, sizeof *fault);
        r = fault ? 0 : -ENOMEM;
    }
    if (r) {
        tier_free(inner);
        return r;
    }
    fault->inner = inner;
    fault->operation = operation;
    fault->kind = options->kind;
    fault->nth = options->nth;
    fault->from_then_on = options->from_then_on;
    return tier_new(inner->name, inner->level, inner->capabilities, inner->root, &fault_ops, fault, ret_tier);
}

uint64_t tier_fault_fired(const struct tier *tier) {
    if (tier->ops != &fault_ops)
        return 0;
    struct fault *fault = tier->self;
    return atomic_load(&fault->fired);
}

static bool parse_kind(const char *name, size_t length, enum tier_fault_kind *ret_kind) {
    for (size_t i = 0; i < ARRAY_SIZE(kind_names); i++) {
        if (strlen(kind_names[i]) == length && memcmp(kind_names[i], name, length) == 0) {
            *ret_kind = i;
            return true;
        }
    }
    return false;
}

int tier_fault_parse(const char *text, struct tier_fault_options *ret_options, struct problem *problem) {
    struct tier_fault_options options = {0};
    enum fault_operation operation;
    size_t length = strcspn(text, ":");
    if (length < sizeof options.operation) {
        memcpy(options.operation, text, length);
        options.operation[length] = '\0';
    }
    if (text[length] != ':' || !find_operation(options.operation, &operation))
        return problem_set(problem, -EINVAL,
                           "fault '%.100s': '%s' is no operation; write for example write:3:eio, with one of "
                           "make_directory, create, open, close, write, read, truncate, sync, length, rename, link, "
                           "unlink, remove_directory, sync_directory, list, stat, touch, now, space, any",
                           text, options.operation);
    const char *at = text + length + 1;
    size_t digits = strspn(at, "0123456789");
    if (digits == 0 || digits > 18 || at[digits] != ':' || (options.nth = strtoull(at, NULL, 10)) == 0)
        return problem_set(problem, -EINVAL,
                           "fault '%.100s': a number from 1 must follow the operation: at the how many-th it fires",
                           text);
    at += digits + 1;
    length = strcspn(at, "+");
    options.from_then_on = at[length] == '+';
    if (!parse_kind(at, length, &options.kind) || strlen(at) != length + options.from_then_on)
        return problem_set(problem, -EINVAL,
                           "fault '%.100s': it must end in eio, enospc, edquot, short or flip, with a '+' if it "
                           "lasts from then on",
                           text);
    if (kind_moves_bytes(options.kind) && operation != FAULT_WRITE && operation != FAULT_READ && operation != FAULT_ANY)
        return problem_set(problem, -EINVAL, "fault '%.100s': only reads and writes can be short or flip a bit", text);
    *ret_options = options;
    return 0;
}
