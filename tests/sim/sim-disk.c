/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk that forgets, after SQLite's model of a crash. A file has the bytes that readers see and
 * those that are on the medium; writes since the last sync are kept in order, and when their writer
 * loses power each is kept, dropped, torn at 512-byte sectors or (on disks that do so) turned into
 * garbage. Names are the same: creations, links, renames and removals since the last sync of their
 * directory are kept or undone, each by itself; a rename is one change, and what it depends on in
 * another directory reaches the medium before it, as in a journal.
 *
 * A crash concerns nodes: of a disk that is shared, the changes of the others stay. Inodes live as
 * long as the run: an undone removal needs them again.
 */
#include "tests/sim/sim.h"

#include <errno.h>

#define SECTOR 512
#define BLOCK 4096 /* of disks with TIER_DIRECT: their blocks are whole */
#define EDITS_MAX 2

struct disk_change;

struct name {
    char *name;
    struct disk_inode *inode;
};

struct names {
    struct name *items;
    size_t count, capacity;
};

struct write {
    uint8_t *data; /* NULL: the size becomes offset */
    uint64_t offset, length;
};

struct changes {
    struct disk_change **items;
    size_t count, capacity;
};

/* A shared directory as a node has it in its cache. */
struct shown {
    struct names names;
    uint64_t until_ns;
};

struct disk_inode {
    struct disk *disk;
    struct disk_inode *next; /* of all */
    bool directory;
    int writer; /* node */
    int64_t mtime_ns;
    uint8_t *data, *synced;
    uint64_t size, synced_size;
    struct write *writes;
    size_t write_count, write_capacity;
    bool lost;
    struct names now, durable;
    struct changes pending; /* in order */
    struct shown shown[SIM_NODES_MAX];
};

/* Names that change together: what `name` means in the directory from now on; NULL: nothing. */
struct disk_change {
    uint64_t order;
    int node;
    bool settled; /* survived a crash: not undone any more */
    bool durable, undone;
    size_t count;
    struct {
        struct disk_inode *directory;
        char *name;
        struct disk_inode *inode;
    } edits[EDITS_MAX];
};

struct disk {
    const char *name;
    unsigned capabilities;
    bool garbage;
    int64_t clock_ns; /* how far its clock is from that of the world */
    enum disk_trouble trouble;
    uint64_t trouble_until_ns;
    struct disk_inode *root, *all;
    uint64_t changes;
};

static void *grown(void *items, size_t count, size_t *capacity, size_t size) {
    if (count < *capacity)
        return items;
    *capacity = *capacity ? 2 * *capacity : 8;
    items = reallocarray(items, *capacity, size);
    assert(items);
    return items;
}

int64_t disk_clock(const struct disk *disk) { return (int64_t)(sim.wall_ns + sim.now_ns) + disk->clock_ns; }
void disk_clock_jump(struct disk *disk, int64_t by_ns) {
    disk->clock_ns += by_ns;
    sim.upsets++;
}

static struct disk_inode *inode_new(struct disk *disk, bool directory) {
    struct disk_inode *inode = calloc(1, sizeof *inode);
    assert(inode);
    inode->disk = disk;
    inode->directory = directory;
    inode->writer = sim.node;
    inode->mtime_ns = disk_clock(disk);
    inode->next = disk->all;
    disk->all = inode;
    return inode;
}

struct disk *disk_new(const char *name, bool shared) {
    struct disk *disk = calloc(1, sizeof *disk);
    assert(disk);
    disk->name = name;
    disk->capabilities = TIER_ATOMIC_RENAME | TIER_LINK | (shared ? TIER_SHARED : 0);
    disk->capabilities |= sim_chance(3, 4) ? TIER_PREALLOCATE : 0;
    disk->capabilities |= sim_chance(1, 2) ? TIER_DIRECT : 0;
    disk->capabilities |= shared || sim_chance(7, 8) ? TIER_SURVIVES_REBOOT : 0;
    disk->garbage = sim_chance(1, 2);
    disk->root = inode_new(disk, true);
    return disk;
}

const char *disk_name(const struct disk *disk) { return disk->name; }
unsigned disk_capabilities(const struct disk *disk) { return disk->capabilities; }

void disk_make_trouble(struct disk *disk, enum disk_trouble trouble, uint64_t until_ns) {
    static const char *const words[DISK_TROUBLES] = {"is well", "is full", "fails", "is slow", "hangs"};
    disk->trouble = trouble;
    disk->trouble_until_ns = until_ns;
    sim_note("disk %s: %s", disk->name, words[trouble]);
}

enum disk_trouble disk_trouble(const struct disk *disk, uint64_t *ret_until_ns) {
    *ret_until_ns = disk->trouble_until_ns;
    return disk->trouble_until_ns > sim.now_ns ? disk->trouble : DISK_WELL;
}

/* ---- names ---- */

static struct name *names_find(const struct names *names, const char *name, size_t length) {
    for (size_t i = 0; i < names->count; i++)
        if (strncmp(names->items[i].name, name, length) == 0 && !names->items[i].name[length])
            return &names->items[i];
    return NULL;
}

static void names_set(struct names *names, const char *name, struct disk_inode *inode) {
    struct name *found = names_find(names, name, strlen(name));
    if (found && inode) {
        found->inode = inode;
    } else if (found) {
        *found = names->items[--names->count];
    } else if (inode) {
        names->items = grown(names->items, names->count, &names->capacity, sizeof *names->items);
        names->items[names->count++] = (struct name){.name = strdup(name), .inode = inode};
    }
}

static void names_copy(struct names *names, const struct names *from) {
    names->count = 0;
    for (size_t i = 0; i < from->count; i++)
        names_set(names, from->items[i].name, from->items[i].inode);
}

struct disk_inode *disk_find(struct disk *disk, const char *path) {
    struct disk_inode *inode = disk->root;
    while (*path) {
        size_t length = strcspn(path, "/");
        struct name *name = inode->directory ? names_find(&inode->now, path, length) : NULL;
        if (!name)
            return NULL;
        inode = name->inode;
        path += length + (path[length] == '/');
    }
    return inode;
}

/* ---- what a node sees of a shared disk ---- */

/* As clients of network file systems do: a directory is asked for, and then believed for a while. What
 * the node itself changes (or tries to) in it makes it ask again. */
static void shown_forget(struct disk_inode *directory, int node) {
    if (node >= 0)
        directory->shown[node].until_ns = 0;
}

static const struct names *names_shown(struct disk_inode *directory) {
    if (sim.node < 0 || !sim.weather.late_ms || !(directory->disk->capabilities & TIER_SHARED))
        return &directory->now;
    struct shown *shown = &directory->shown[sim.node];
    if (shown->until_ns > sim.now_ns)
        return &shown->names;
    names_copy(&shown->names, &directory->now);
    shown->until_ns = sim.now_ns + sim_below(sim.weather.late_ms * NANOSECONDS_PER_MS);
    return &shown->names;
}

/* Whoever opens what is there no more is told so by the server. */
struct disk_inode *disk_look(struct disk *disk, const char *path) {
    struct disk_inode *inode = disk->root;
    while (*path && inode && inode->directory) {
        size_t length = strcspn(path, "/");
        struct name *name = names_find(names_shown(inode), path, length), *now = names_find(&inode->now, path, length);
        inode = name && now ? now->inode : NULL;
        path += length + (path[length] == '/');
    }
    return *path ? NULL : inode;
}

static struct disk_inode *find_parent(struct disk *disk, const char *path, const char **ret_name) {
    const char *slash = strrchr(path, '/');
    char parent[TIER_PATH_MAX];
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) : 0, path);
    *ret_name = slash ? slash + 1 : path;
    struct disk_inode *inode = disk_find(disk, parent);
    if (inode)
        shown_forget(inode, sim.node);
    return inode && inode->directory ? inode : NULL;
}

static struct disk_change *change_new(struct disk *disk) {
    struct disk_change *change = calloc(1, sizeof *change);
    assert(change);
    change->order = disk->changes++;
    change->node = sim.node;
    return change;
}

static void change_add(struct disk_change *change, struct disk_inode *directory, const char *name,
                       struct disk_inode *inode) {
    change->edits[change->count].directory = directory;
    change->edits[change->count].name = strdup(name);
    change->edits[change->count++].inode = inode;
    names_set(&directory->now, name, inode);
    directory->mtime_ns = disk_clock(directory->disk);
    struct changes *pending = &directory->pending;
    if (pending->count && pending->items[pending->count - 1] == change)
        return; /* both edits are here */
    pending->items = grown(pending->items, pending->count, &pending->capacity, sizeof(struct disk_change *));
    pending->items[pending->count++] = change;
}

static void change_one(struct disk_inode *directory, const char *name, struct disk_inode *inode) {
    change_add(change_new(directory->disk), directory, name, inode);
}

static void forget_changes(struct disk_inode *directory) {
    struct changes *pending = &directory->pending;
    size_t kept = 0;
    for (size_t i = 0; i < pending->count; i++)
        if (!pending->items[i]->durable && !pending->items[i]->undone)
            pending->items[kept++] = pending->items[i];
    pending->count = kept;
}

static void make_durable(struct disk_change *change) {
    if (change->durable || change->undone)
        return;
    change->durable = true;
    for (size_t i = 0; i < change->count; i++) {
        struct disk_inode *directory = change->edits[i].directory;
        for (size_t k = 0; k < directory->pending.count && directory->pending.items[k]->order < change->order; k++)
            make_durable(directory->pending.items[k]);
    }
    for (size_t i = 0; i < change->count; i++)
        names_set(&change->edits[i].directory->durable, change->edits[i].name, change->edits[i].inode);
}

void disk_sync_names(struct disk_inode *directory) {
    shown_forget(directory, sim.node);
    for (size_t i = 0; i < directory->pending.count; i++)
        make_durable(directory->pending.items[i]);
    for (struct disk_inode *inode = directory->disk->all; inode; inode = inode->next)
        forget_changes(inode);
}

int disk_make(struct disk *disk, const char *path, bool directory, struct disk_inode **ret_inode) {
    const char *name;
    struct disk_inode *parent = find_parent(disk, path, &name);
    if (!parent)
        return -ENOENT;
    if (names_find(&parent->now, name, strlen(name)))
        return TIER_E_EXISTS;
    *ret_inode = inode_new(disk, directory);
    change_one(parent, name, *ret_inode);
    return 0;
}

int disk_link(struct disk *disk, const char *from, const char *to, bool replace) {
    const char *name;
    struct disk_inode *inode = disk_find(disk, from), *parent = find_parent(disk, to, &name);
    if (!inode || !parent)
        return TIER_E_ABSENT;
    if (!replace && names_find(&parent->now, name, strlen(name)))
        return TIER_E_EXISTS;
    change_one(parent, name, inode);
    return 0;
}

/* A planted bug: a rename that is none. */
static struct disk_inode *copied(const struct disk_inode *file) {
    struct disk_inode *copy = inode_new(file->disk, false);
    (void)disk_write(copy, file->data, file->size, 0);
    return copy;
}

int disk_rename(struct disk *disk, const char *from, const char *to) {
    const char *from_name, *to_name;
    struct disk_inode *inode = disk_find(disk, from), *target = disk_find(disk, to);
    struct disk_inode *from_parent = find_parent(disk, from, &from_name), *to_parent = find_parent(disk, to, &to_name);
    if (!inode || !to_parent)
        return TIER_E_ABSENT;
    if (target && target->directory != inode->directory)
        return target->directory ? -EISDIR : -ENOTDIR;
    if (target && target->directory && target->now.count)
        return -ENOTEMPTY;
    if (sim_bug("rename") && !inode->directory)
        inode = copied(inode);
    struct disk_change *change = change_new(disk);
    change_add(change, from_parent, from_name, NULL);
    change_add(change, to_parent, to_name, inode);
    return 0;
}

int disk_remove(struct disk *disk, const char *path, bool directory) {
    const char *name;
    struct disk_inode *inode = disk_find(disk, path), *parent = find_parent(disk, path, &name);
    if (!inode || !parent)
        return TIER_E_ABSENT;
    if (inode->directory != directory)
        return directory ? -ENOTDIR : -EISDIR;
    if (inode->now.count)
        return -ENOTEMPTY;
    change_one(parent, name, NULL);
    return 0;
}

int disk_list(struct disk *disk, const char *path, struct tier_entries *ret_entries) {
    struct disk_inode *inode = disk_look(disk, path);
    if (!inode)
        return TIER_E_ABSENT;
    if (!inode->directory)
        return -ENOTDIR;
    const struct names *names = names_shown(inode);
    struct tier_entries entries = {.items = calloc(names->count + 1, sizeof *entries.items)};
    assert(entries.items);
    for (size_t i = 0; i < names->count; i++) {
        struct tier_entry *entry = &entries.items[entries.count++];
        disk_stat(names->items[i].inode, entry);
        entry->name = strdup(names->items[i].name);
    }
    *ret_entries = entries;
    return 0;
}

bool disk_is_directory(const struct disk_inode *inode) { return inode->directory; }

void disk_stat(const struct disk_inode *inode, struct tier_entry *ret_entry) {
    *ret_entry =
        (struct tier_entry){.is_directory = inode->directory, .size = inode->size, .mtime_ns = inode->mtime_ns};
}

void disk_touch(struct disk_inode *inode) { inode->mtime_ns = disk_clock(inode->disk); }

/* ---- contents ---- */

static void resize(uint8_t **data, uint64_t *size, uint64_t to) {
    if (to > *size) {
        *data = realloc(*data, to);
        assert(*data);
        memset(*data + *size, 0, to - *size);
    }
    *size = to;
}

static void note_write(struct disk_inode *file, const void *data, uint64_t length, uint64_t offset) {
    file->writes = grown(file->writes, file->write_count, &file->write_capacity, sizeof *file->writes);
    struct write *write = &file->writes[file->write_count++];
    *write = (struct write){.offset = offset, .length = length};
    if (data) {
        write->data = malloc(length);
        assert(write->data);
        memcpy(write->data, data, length);
    }
    file->mtime_ns = disk_clock(file->disk);
}

int disk_write(struct disk_inode *file, const void *data, size_t size, uint64_t offset) {
    if (!size)
        return 0;
    resize(&file->data, &file->size, max_u64(file->size, offset + size));
    memcpy(file->data + offset, data, size);
    note_write(file, data, size, offset);
    return 0;
}

size_t disk_read(const struct disk_inode *file, void *data, size_t size, uint64_t offset) {
    size_t got = offset < file->size ? min_u64(size, file->size - offset) : 0;
    if (got)
        memcpy(data, file->data + offset, got);
    return got;
}

int disk_truncate(struct disk_inode *file, uint64_t size) {
    resize(&file->data, &file->size, size);
    note_write(file, NULL, 0, size);
    return 0;
}

static void set_contents(uint8_t **data, uint64_t *size, const uint8_t *from, uint64_t length) {
    *size = 0;
    resize(data, size, length);
    if (length)
        memcpy(*data, from, length);
}

static void forget_writes(struct disk_inode *file) {
    for (size_t i = 0; i < file->write_count; i++)
        free(file->writes[i].data);
    file->write_count = 0;
}

void disk_sync(struct disk_inode *file) {
    if (file->lost)
        return;
    set_contents(&file->synced, &file->synced_size, file->data, file->size);
    forget_writes(file);
}

void disk_sync_failed(struct disk_inode *file) { file->lost = true; }

/* ---- a crash ---- */

enum fate { FATE_KEPT, FATE_DROPPED, FATE_TORN, FATE_COUNT };

static void survive_torn(struct disk_inode *file, const struct write *write) {
    uint64_t unit = file->disk->capabilities & TIER_DIRECT ? BLOCK : SECTOR;
    resize(&file->synced, &file->synced_size, max_u64(file->synced_size, write->offset + write->length));
    for (uint64_t at = 0; at < write->length; at += unit) {
        uint8_t *sector = file->synced + write->offset + at;
        uint64_t length = min_u64(unit, write->length - at);
        uint64_t luck = sim_below(file->disk->garbage ? 3 : 2);
        if (luck == 0)
            memcpy(sector, write->data + at, length);
        else if (luck == 2)
            memset(sector, (int)sim_below(256), length);
    }
}

static void survive_write(struct disk_inode *file, const struct write *write) {
    enum fate fate = file->lost ? FATE_DROPPED : (enum fate)sim_below(FATE_COUNT);
    uint64_t end = write->offset + write->length;
    if (!write->data) {
        if (fate != FATE_DROPPED)
            resize(&file->synced, &file->synced_size, write->offset);
    } else if (fate == FATE_KEPT) {
        resize(&file->synced, &file->synced_size, max_u64(file->synced_size, end));
        memcpy(file->synced + write->offset, write->data, write->length);
    } else if (fate == FATE_TORN) {
        survive_torn(file, write);
    } else if (sim_chance(1, 2)) { /* the length may reach the medium without the bytes */
        resize(&file->synced, &file->synced_size, max_u64(file->synced_size, end));
    }
}

static void crash_file(struct disk_inode *file) {
    for (size_t i = 0; i < file->write_count; i++)
        survive_write(file, &file->writes[i]);
    forget_writes(file);
    file->lost = false;
    set_contents(&file->data, &file->size, file->synced, file->synced_size);
}

static bool among(int node, uint32_t mask) { return mask == UINT32_MAX || (node >= 0 && mask & 1u << node); }

/* All, none, the first ones, or each by its own luck. */
static void decide_changes(struct disk *disk, uint32_t mask) {
    uint64_t mode = sim_below(4), until = disk->changes ? sim_below(disk->changes) : 0;
    for (struct disk_inode *inode = disk->all; inode; inode = inode->next)
        for (size_t i = 0; i < inode->pending.count; i++) {
            struct disk_change *change = inode->pending.items[i];
            if (change->settled || change->undone || !among(change->node, mask))
                continue;
            bool kept = mode == 0 ? true : mode == 1 ? false : mode == 2 ? change->order < until : sim_chance(1, 2);
            change->settled = kept;
            change->undone = !kept;
        }
}

static void replay_names(struct disk_inode *directory) {
    forget_changes(directory);
    names_copy(&directory->now, &directory->durable);
    for (size_t i = 0; i < directory->pending.count; i++) {
        const struct disk_change *change = directory->pending.items[i];
        for (size_t k = 0; k < change->count; k++)
            if (change->edits[k].directory == directory)
                names_set(&directory->now, change->edits[k].name, change->edits[k].inode);
    }
}

static void forget_all(struct disk *disk) {
    for (struct disk_inode *inode = disk->all; inode; inode = inode->next)
        inode->now.count = inode->durable.count = inode->pending.count = inode->write_count = 0;
}

void disk_crash(struct disk *disk, uint32_t mask) {
    sim.upsets++;
    if (!(disk->capabilities & TIER_SURVIVES_REBOOT))
        forget_all(disk);
    decide_changes(disk, mask);
    for (struct disk_inode *inode = disk->all; inode; inode = inode->next)
        for (int node = 0; node < SIM_NODES_MAX; node++)
            if (among(node, mask))
                shown_forget(inode, node);
    for (struct disk_inode *inode = disk->all; inode; inode = inode->next)
        if (inode->directory)
            replay_names(inode);
        else if (inode->write_count && among(inode->writer, mask))
            crash_file(inode);
    sim_note("disk %s: crash of nodes %x", disk->name, mask);
}
