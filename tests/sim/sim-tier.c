/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of a tier over a simulated disk, as one node sees it. Every operation takes its time (a
 * worker's fiber gives way before and after it, so that others come between and a crash may come on
 * either side), is sometimes slow by a thousand or stalls for a while, and sometimes fails: with no
 * effect, or, as a server may whose answer is lost, after it has been done.
 */
#include "tests/sim/sim.h"

#include <errno.h>

#define HANDLES_MAX 4096

struct sim_tier {
    struct disk *disk;
    int node;
};

struct handle {
    struct disk_inode *inode;
    struct sim_tier *tier;
    char path[TIER_PATH_MAX];
    bool used, writable;
};

static struct handle handles[HANDLES_MAX];

/* ---- the weather ---- */

static void take_time(const struct sim_tier *tier) {
    if (tier->node == SIM_OUTSIDE || !fiber_inside())
        return;
    uint64_t ns = 5000 + sim_below(100000), until_ns;
    enum disk_trouble trouble = disk_trouble(tier->disk, &until_ns);
    if (sim_below(10000) < sim.weather.slow || trouble == DISK_SLOW)
        ns *= 1000;
    if (trouble == DISK_HANGING)
        ns += until_ns - sim.now_ns;
    if (sim_below(10000) < sim.weather.stall) {
        ns = sim_below(150) * NANOSECONDS_PER_SECOND;
        sim_note("disk %s: stalls node %d for %llu s", disk_name(tier->disk), tier->node,
                 (unsigned long long)(ns / NANOSECONDS_PER_SECOND));
    }
    fiber_wait(sim.now_ns + ns, -1);
}

static int fails(const struct sim_tier *tier, const char *operation, const char *path, bool takes_room) {
    if (tier->node == SIM_OUTSIDE)
        return 0;
    int r = 0;
    uint64_t until_ns;
    enum disk_trouble trouble = disk_trouble(tier->disk, &until_ns);
    if (takes_room && (sim_below(10000) < sim.weather.enospc || trouble == DISK_FULL))
        r = -ENOSPC;
    else if (sim_below(10000) < sim.weather.eio || trouble == DISK_FAILING)
        r = -EIO;
    sim.failures += r != 0;
    if (r)
        sim_note("disk %s: %s of %s by node %d fails: %s", disk_name(tier->disk), operation, path, tier->node,
                 strerror(-r));
    return r;
}

/* A change of names whose answer may be lost: done, or not, and an error in any case. */
#define CHANGE(tier, operation, path, call)                                                                            \
    ({                                                                                                                 \
        take_time(tier);                                                                                               \
        int failed_ = fails(tier, operation, path, false);                                                             \
        int r_ = failed_ && sim_chance(1, 2) ? 0 : (call);                                                             \
        if ((tier)->node != SIM_OUTSIDE)                                                                               \
            sim_note("node %d %s %s/%s = %d", (tier)->node, operation, disk_name((tier)->disk), path,                  \
                     failed_ ? failed_ : r_);                                                                          \
        take_time(tier);                                                                                               \
        failed_ ? failed_ : r_;                                                                                        \
    })

/* ---- names ---- */

static int make_directory(struct disk *disk, const char *path) {
    struct disk_inode *inode;
    return disk_make(disk, path, true, &inode);
}

static int sim_make_directory(void *self, const char *path) {
    struct sim_tier *tier = self;
    return CHANGE(tier, "mkdir", path, make_directory(tier->disk, path));
}

static void sync_late(struct sim_tier *tier, const char *path) {
    struct disk_inode *inode = sim_bug("sync-late") ? disk_find(tier->disk, path) : NULL;
    if (!inode || disk_is_directory(inode))
        return;
    take_time(tier);
    disk_sync(inode);
}

static int sim_rename(void *self, const char *from, const char *to) {
    struct sim_tier *tier = self;
    bool was_there = disk_find(tier->disk, from);
    int r = CHANGE(tier, "rename to", to, disk_rename(tier->disk, from, to));
    sync_late(tier, to);
    /* The answer was lost, and the client of the file system asked again: what it renamed is there no more. */
    bool asked_again = r == -EIO && was_there && tier->disk == parallel && !disk_find(tier->disk, from);
    return asked_again && sim_chance(1, 2) ? TIER_E_ABSENT : r;
}

static int sim_link(void *self, const char *from, const char *to) {
    struct sim_tier *tier = self;
    return CHANGE(tier, "link to", to, disk_link(tier->disk, from, to, sim_bug("link")));
}

/* Temporaries of the running generation belong to whoever writes them; what goes to the trash first may go. */
static void check_nobody_writes(const struct sim_tier *tier, const char *path) {
    const struct disk_inode *inode = disk_find(tier->disk, path);
    for (int i = 0; inode && i < HANDLES_MAX; i++)
        SIM_CHECK(!handles[i].used || !handles[i].writable || handles[i].inode != inode ||
                      strcmp(handles[i].path, path) != 0 || !model_is_newest_run(path),
                  "what is being written is not removed", "node %d removes %s/%s, which node %d writes", tier->node,
                  disk_name(tier->disk), path, handles[i].tier->node);
}

static int sim_unlink(void *self, const char *path) {
    struct sim_tier *tier = self;
    check_nobody_writes(tier, path);
    return CHANGE(tier, "unlink", path, disk_remove(tier->disk, path, false));
}

static int sim_remove_directory(void *self, const char *path) {
    struct sim_tier *tier = self;
    return CHANGE(tier, "rmdir", path, disk_remove(tier->disk, path, true));
}

static bool sync_lies(const char *path) {
    size_t depth = 0;
    for (const char *at = path; *at; at++)
        depth += *at == '/';
    bool of_version = depth == 2; /* job/generation/step */
    return (sim_bug("directory-sync") && of_version) || (sim_bug("parent-sync") && !of_version);
}

static int sim_sync_directory(void *self, const char *path) {
    struct sim_tier *tier = self;
    take_time(tier);
    struct disk_inode *inode = disk_look(tier->disk, path);
    if (!inode || !disk_is_directory(inode))
        return -ENOENT;
    int r = fails(tier, "sync", path, false);
    if (r)
        return r;
    if (!sync_lies(path))
        disk_sync_names(inode);
    sim_note("node %d syncs %s/%s", tier->node, disk_name(tier->disk), path);
    take_time(tier);
    return 0;
}

static int sim_list(void *self, const char *path, struct tier_entries *ret_entries) {
    struct sim_tier *tier = self;
    take_time(tier);
    int r = fails(tier, "list", path, false);
    r = r ? r : disk_list(tier->disk, path, ret_entries);
    if (r == 0 && sim_bug("listing") && tier->disk == parallel && ret_entries->count && sim_chance(1, 3))
        free(ret_entries->items[--ret_entries->count].name);
    if (sim.verbose)
        sim_note("node %d lists %s/%s: %d, %zu entries", tier->node, disk_name(tier->disk), path, r,
                 r ? 0 : ret_entries->count);
    return r;
}

static int sim_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    struct sim_tier *tier = self;
    take_time(tier);
    struct disk_inode *inode = disk_look(tier->disk, path);
    int r = fails(tier, "stat", path, false);
    if (r || !inode)
        return r ? r : TIER_E_ABSENT;
    disk_stat(inode, ret_entry);
    return 0;
}

static int sim_touch(void *self, const char *path) {
    struct sim_tier *tier = self;
    take_time(tier);
    struct disk_inode *inode = disk_look(tier->disk, path);
    int r = fails(tier, "touch", path, false);
    if (r || !inode)
        return r ? r : TIER_E_ABSENT;
    disk_touch(inode);
    return 0;
}

static int sim_clock(void *self, int64_t *ret_now_ns) {
    const struct sim_tier *tier = self;
    *ret_now_ns = disk_clock(tier->disk);
    return 0;
}

static int sim_space(void *self, uint64_t *ret_free, uint64_t *ret_total) {
    (void)self;
    *ret_free = *ret_total = GIB(1);
    return 0;
}

/* ---- files ---- */

static int file_opened(struct sim_tier *tier, struct disk_inode *inode, const char *path, bool writable,
                       struct tier_file *file) {
    for (int i = 0; i < HANDLES_MAX; i++)
        if (!handles[i].used) {
            handles[i] = (struct handle){.inode = inode, .tier = tier, .used = true, .writable = writable};
            snprintf(handles[i].path, sizeof handles[i].path, "%s", path);
            file->state = &handles[i];
            return 0;
        }
    return -EMFILE;
}

static int sim_create(void *self, const char *path, uint64_t size, struct tier_file *file) {
    struct sim_tier *tier = self;
    struct disk_inode *inode;
    take_time(tier);
    int r = fails(tier, "create", path, true);
    if (r)
        return r;
    r = disk_make(tier->disk, path, false, &inode);
    sim_note("node %d creates %s/%s = %d", tier->node, disk_name(tier->disk), path, r);
    if (r)
        return r == TIER_E_EXISTS ? -EEXIST : r;
    if (size && disk_capabilities(tier->disk) & TIER_PREALLOCATE)
        (void)disk_truncate(inode, size);
    take_time(tier);
    return file_opened(tier, inode, path, true, file);
}

static int sim_open(void *self, const char *path, struct tier_file *file) {
    struct sim_tier *tier = self;
    take_time(tier);
    struct disk_inode *inode = disk_look(tier->disk, path);
    int r = fails(tier, "open", path, false);
    if (sim.verbose)
        sim_note("node %d opens %s/%s: %d", tier->node, disk_name(tier->disk), path, r ? r : inode ? 0 : TIER_E_ABSENT);
    if (r || !inode)
        return r ? r : TIER_E_ABSENT;
    return disk_is_directory(inode) ? -EISDIR : file_opened(tier, inode, path, false, file);
}

static int sim_close(void *self, struct tier_file *file) {
    struct handle *handle = file->state;
    (void)self;
    handle->used = false;
    return 0;
}

static int64_t pwrite_some(struct handle *handle, const void *data, size_t size, uint64_t offset) {
    take_time(handle->tier);
    int r = fails(handle->tier, "write", "a file", true);
    if (r)
        return r;
    /* The memory is read now, when it completes, and not at once: it must not have been given to others. */
    size_t first = sim_below(size + 1), all = sim_bug("short-write") && sim_chance(1, 10) ? size / 2 : size;
    (void)disk_write(handle->inode, data, min_u64(first, all), offset);
    if (first < size)
        take_time(handle->tier);
    if (first < all)
        (void)disk_write(handle->inode, (const uint8_t *)data + first, all - first, offset + first);
    return (int64_t)size;
}

/* Bytes that are not what was written. Only where another copy is, or nothing could be done about it. */
static void perhaps_rot(struct handle *handle, uint8_t *data, size_t size) {
    const char *suffix = strrchr(handle->path, '.');
    bool is_data = suffix && (strcmp(suffix, ".safetensors") == 0 || strcmp(suffix, ".chunks") == 0);
    if (!size || handle->tier->node == SIM_OUTSIDE || handle->tier->disk == parallel || !is_data ||
        sim_below(10000) >= sim.weather.rot || !model_is_global(handle->path))
        return;
    data[sim_below(size)] ^= (uint8_t)(1u << sim_below(8));
    sim.failures++;
    sim.rotten++;
    sim_note("disk %s: a read of %s by node %d brings other bytes", disk_name(handle->tier->disk), handle->path,
             handle->tier->node);
}

static int64_t pread_some(struct handle *handle, void *data, size_t size, uint64_t offset) {
    take_time(handle->tier);
    int r = fails(handle->tier, "read", "a file", false);
    if (r)
        return r;
    size_t got = disk_read(handle->inode, data, size, offset);
    perhaps_rot(handle, data, got);
    return (int64_t)got;
}

static int sim_write(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    (void)self;
    int64_t r = pwrite_some(file->state, data, size, offset);
    return r < 0 ? (int)r : 0;
}

static int sim_read(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    (void)self;
    int64_t r = pread_some(file->state, data, size, offset);
    if (r < 0)
        return (int)r;
    *ret_got = (size_t)r;
    return 0;
}

static int sim_truncate(void *self, struct tier_file *file, uint64_t size) {
    struct handle *handle = file->state;
    take_time(self);
    return disk_truncate(handle->inode, size);
}

static int sim_sync(void *self, struct tier_file *file) {
    struct handle *handle = file->state;
    struct sim_tier *tier = self;
    take_time(tier);
    int r = fails(tier, "sync", "a file", false);
    if (r)
        disk_sync_failed(handle->inode);
    else if (!sim_bug("sync") && !sim_bug("sync-late"))
        disk_sync(handle->inode);
    take_time(tier);
    return r;
}

static int sim_length(void *self, struct tier_file *file, uint64_t *ret_size) {
    struct handle *handle = file->state;
    struct tier_entry entry;
    (void)self;
    disk_stat(handle->inode, &entry);
    *ret_size = entry.size;
    return 0;
}

/* Short counts are allowed: whoever submits goes on. */
static size_t perhaps_less(size_t size) { return size > 1 && sim_chance(1, 30) ? 1 + sim_below(size) : size; }

void sim_tier_file_io(struct loop_op *op) {
    struct handle *handle = &handles[op->fd];
    size_t size = perhaps_less(op->length);
    op->result = op->kind == LOOP_WRITE ? pwrite_some(handle, op->buffer, size, op->offset)
                                        : pread_some(handle, op->buffer, size, op->offset);
}

static void sim_submit_write(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                             struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn) {
    struct handle *handle = file->state;
    (void)self;
    loop_write(loop, op, group, (int)(handle - handles), data, size, offset, fn);
}

static void sim_submit_read(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                            struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn) {
    struct handle *handle = file->state;
    (void)self;
    loop_read(loop, op, group, (int)(handle - handles), data, size, offset, fn);
}

static void sim_free(void *self) { free(self); }

static const struct tier_ops sim_tier_ops = {
    .kind = "sim",
    .make_directory = sim_make_directory,
    .create = sim_create,
    .open = sim_open,
    .close = sim_close,
    .write = sim_write,
    .read = sim_read,
    .truncate = sim_truncate,
    .sync = sim_sync,
    .length = sim_length,
    .rename = sim_rename,
    .link = sim_link,
    .unlink = sim_unlink,
    .remove_directory = sim_remove_directory,
    .sync_directory = sim_sync_directory,
    .list = sim_list,
    .stat = sim_stat,
    .touch = sim_touch,
    .now = sim_clock,
    .space = sim_space,
    .submit_write = sim_submit_write,
    .submit_read = sim_submit_read,
    .free = sim_free,
};

struct tier *sim_tier_new(struct disk *disk, const char *name, enum level level, int node) {
    struct sim_tier *tier = calloc(1, sizeof *tier);
    struct tier *made;
    assert(tier);
    *tier = (struct sim_tier){.disk = disk, .node = node};
    int r = tier_new(name, level, disk_capabilities(disk), "", &sim_tier_ops, tier, &made);
    assert(r == 0);
    return made;
}

void sim_tier_forget_node(int node) {
    for (int i = 0; i < HANDLES_MAX; i++)
        if (handles[i].used && handles[i].tier->node == node)
            handles[i].used = false;
}

unsigned sim_tier_open_files(int node) {
    unsigned count = 0;
    for (int i = 0; i < HANDLES_MAX; i++)
        count += handles[i].used && handles[i].tier->node == node;
    return count;
}
