/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/tier.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

/*
 * The reference: files in memory, in the plainest way there is, so that it can be read and believed.
 * Names are a flat array of (path, node); two names may share a node, as with hard links; a node lives
 * as long as a name or an open file holds it. One mutex around everything. It never lies: what was
 * written is there, a rename is atomic, the clock does not go backwards.
 */

#define MEM_SPACE GIB(1024)

struct mem_node {
    unsigned references; /* names and open files */
    bool is_directory;
    char *data;
    uint64_t size, capacity;
    int64_t mtime_ns;
};

struct mem_name {
    char *path;
    struct mem_node *node;
};

struct mem {
    pthread_mutex_t mutex;
    struct mem_name *names;
    size_t count, capacity;
    int64_t last_ns;
};

static void unlockp(pthread_mutex_t **mutex) { pthread_mutex_unlock(*mutex); }

#define MEM_LOCKED(mem)                                                                                                \
    CLEANUP(unlockp) pthread_mutex_t *locked_ = &(mem)->mutex;                                                         \
    pthread_mutex_lock(locked_)

static int64_t mem_clock(struct mem *mem) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    int64_t now = (int64_t)time.tv_sec * (int64_t)NANOSECONDS_PER_SECOND + time.tv_nsec;
    if (now > mem->last_ns)
        mem->last_ns = now;
    return mem->last_ns;
}

static void node_unref(struct mem_node *node) {
    if (--node->references > 0)
        return;
    free(node->data);
    free(node);
}

static struct mem_name *find(struct mem *mem, const char *path) {
    for (size_t i = 0; i < mem->count; i++) {
        if (strcmp(mem->names[i].path, path) == 0)
            return &mem->names[i];
    }
    return NULL;
}

/* True if `path` lies in the directory (at any depth); the root holds everything. */
static bool lies_below(const char *path, const char *directory) {
    size_t length = strlen(directory);
    return length == 0 || (strncmp(path, directory, length) == 0 && path[length] == '/');
}

static bool directory_is_empty(const struct mem *mem, const char *path) {
    for (size_t i = 0; i < mem->count; i++) {
        if (lies_below(mem->names[i].path, path))
            return false;
    }
    return true;
}

static bool is_directory(struct mem *mem, const char *path) {
    if (path[0] == '\0')
        return true;
    const struct mem_name *name = find(mem, path);
    return name && name->node->is_directory;
}

static bool parent_exists(struct mem *mem, const char *path) {
    const char *slash = strrchr(path, '/');
    char parent[TIER_PATH_MAX];
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) : 0, path);
    return is_directory(mem, parent);
}

/* A change of names touches the directory that holds them. */
static void touch_parent(struct mem *mem, const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash)
        return;
    char parent[TIER_PATH_MAX];
    snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
    struct mem_name *name = find(mem, parent);
    if (name)
        name->node->mtime_ns = mem_clock(mem);
}

static int add_name(struct mem *mem, const char *path, struct mem_node *node) {
    if (mem->count == mem->capacity) {
        size_t larger = mem->capacity ? mem->capacity * 2 : 64;
        struct mem_name *names = reallocarray(mem->names, larger, sizeof *names);
        if (!names)
            return -ENOMEM;
        mem->names = names;
        mem->capacity = larger;
    }
    char *copy = strdup(path);
    if (!copy)
        return -ENOMEM;
    mem->names[mem->count++] = (struct mem_name){copy, node};
    node->references++;
    touch_parent(mem, path);
    return 0;
}

static void remove_name(struct mem *mem, struct mem_name *name) {
    touch_parent(mem, name->path);
    node_unref(name->node);
    free(name->path);
    *name = mem->names[--mem->count];
}

static int add_node(struct mem *mem, const char *path, bool directory, struct mem_node **ret_node) {
    struct mem_node *node = calloc(1, sizeof *node);
    if (!node)
        return -ENOMEM;
    node->is_directory = directory;
    node->mtime_ns = mem_clock(mem);
    int r = add_name(mem, path, node);
    if (r)
        free(node);
    else
        *ret_node = node;
    return r;
}

static int resize(struct mem_node *node, uint64_t size) {
    if (size > node->capacity) {
        uint64_t larger = max_u64(size, node->capacity * 2);
        char *data = realloc(node->data, larger);
        if (!data)
            return -ENOMEM;
        node->data = data;
        node->capacity = larger;
    }
    if (size > node->size)
        memset(node->data + node->size, 0, size - node->size);
    node->size = size;
    return 0;
}

static int mem_make_directory(void *self, const char *path) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_node *node;
    if (find(mem, path))
        return TIER_E_EXISTS;
    return parent_exists(mem, path) ? add_node(mem, path, true, &node) : -ENOENT;
}

static int mem_create(void *self, const char *path, uint64_t size, struct tier_file *file) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    if (find(mem, path))
        return -EEXIST;
    if (!parent_exists(mem, path))
        return -ENOENT;
    struct mem_node *node;
    int r = add_node(mem, path, false, &node);
    if (r)
        return r;
    r = resize(node, size);
    if (r) {
        remove_name(mem, find(mem, path));
        return r;
    }
    node->references++;
    file->state = node;
    return 0;
}

static int mem_open(void *self, const char *path, struct tier_file *file) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *name = find(mem, path);
    if (!name)
        return TIER_E_ABSENT;
    if (name->node->is_directory)
        return -EISDIR;
    name->node->references++;
    file->state = name->node;
    return 0;
}

static int mem_close(void *self, struct tier_file *file) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    node_unref(file->state);
    return 0;
}

static int mem_write(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_node *node = file->state;
    if (size == 0)
        return 0;
    int r = resize(node, max_u64(node->size, offset + size));
    if (r)
        return r;
    memcpy(node->data + offset, data, size);
    node->mtime_ns = mem_clock(mem);
    return 0;
}

static int mem_read(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    const struct mem_node *node = file->state;
    size_t got = offset < node->size ? min_u64(size, node->size - offset) : 0;
    if (got)
        memcpy(data, node->data + offset, got);
    *ret_got = got;
    return 0;
}

static int mem_truncate(void *self, struct tier_file *file, uint64_t size) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_node *node = file->state;
    node->mtime_ns = mem_clock(mem);
    return resize(node, size);
}

static int mem_sync(void *self, struct tier_file *file) { return 0; }

static int mem_length(void *self, struct tier_file *file, uint64_t *ret_size) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    const struct mem_node *node = file->state;
    *ret_size = node->size;
    return 0;
}

/* What lies below a directory follows it to its new name. */
static int rename_below(struct mem *mem, const char *from, const char *to) {
    size_t length = strlen(from);
    for (size_t i = 0; i < mem->count; i++) {
        struct mem_name *name = &mem->names[i];
        if (strcmp(name->path, from) != 0 && !lies_below(name->path, from))
            continue;
        char *path;
        if (asprintf(&path, "%s%s", to, name->path + length) < 0)
            return -ENOMEM;
        free(name->path);
        name->path = path;
    }
    return 0;
}

static int mem_rename(void *self, const char *from, const char *to) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *source = find(mem, from), *target = find(mem, to);
    if (!source)
        return TIER_E_ABSENT;
    if (!parent_exists(mem, to))
        return TIER_E_ABSENT;
    if (source == target)
        return 0;
    if (target) {
        if (target->node->is_directory != source->node->is_directory)
            return target->node->is_directory ? -EISDIR : -ENOTDIR;
        if (target->node->is_directory && !directory_is_empty(mem, to))
            return -ENOTEMPTY;
        remove_name(mem, target);
    }
    touch_parent(mem, from);
    touch_parent(mem, to);
    return rename_below(mem, from, to);
}

static int mem_link(void *self, const char *from, const char *to) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *source = find(mem, from);
    if (!source || !parent_exists(mem, to))
        return TIER_E_ABSENT;
    if (find(mem, to))
        return TIER_E_EXISTS;
    return add_name(mem, to, source->node);
}

static int mem_unlink(void *self, const char *path) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *name = find(mem, path);
    if (!name)
        return TIER_E_ABSENT;
    if (name->node->is_directory)
        return -EISDIR;
    remove_name(mem, name);
    return 0;
}

static int mem_remove_directory(void *self, const char *path) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *name = find(mem, path);
    if (!name)
        return TIER_E_ABSENT;
    if (!name->node->is_directory)
        return -ENOTDIR;
    if (!directory_is_empty(mem, path))
        return -ENOTEMPTY;
    remove_name(mem, name);
    return 0;
}

static int mem_sync_directory(void *self, const char *path) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    return is_directory(mem, path) ? 0 : -ENOENT;
}

static void entry_from_node(const struct mem_node *node, struct tier_entry *entry) {
    entry->is_directory = node->is_directory;
    entry->size = node->size;
    entry->mtime_ns = node->mtime_ns;
}

static int mem_list(void *self, const char *path, struct tier_entries *ret_entries) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    if (!is_directory(mem, path))
        return find(mem, path) ? -ENOTDIR : TIER_E_ABSENT;
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    entries.items = calloc(mem->count + 1, sizeof *entries.items);
    if (!entries.items)
        return -ENOMEM;
    size_t skip = path[0] ? strlen(path) + 1 : 0;
    for (size_t i = 0; i < mem->count; i++) {
        const struct mem_name *name = &mem->names[i];
        if (!lies_below(name->path, path) || strchr(name->path + skip, '/'))
            continue;
        struct tier_entry *entry = &entries.items[entries.count];
        entry->name = strdup(name->path + skip);
        if (!entry->name)
            return -ENOMEM;
        entry_from_node(name->node, entry);
        entries.count++;
    }
    *ret_entries = entries;
    entries = (struct tier_entries){0};
    return 0;
}

static int mem_stat(void *self, const char *path, struct tier_entry *ret_entry) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    const struct mem_name *name = find(mem, path);
    if (path[0] == '\0')
        *ret_entry = (struct tier_entry){.is_directory = true};
    else if (name)
        entry_from_node(name->node, ret_entry);
    else
        return TIER_E_ABSENT;
    return 0;
}

static int mem_touch(void *self, const char *path) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    struct mem_name *name = find(mem, path);
    if (!name)
        return TIER_E_ABSENT;
    name->node->mtime_ns = mem_clock(mem);
    return 0;
}

static int mem_now(void *self, int64_t *ret_now_ns) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    *ret_now_ns = mem_clock(mem);
    return 0;
}

static int mem_space(void *self, uint64_t *ret_free, uint64_t *ret_total) {
    struct mem *mem = self;
    MEM_LOCKED(mem);
    uint64_t used = 0;
    for (size_t i = 0; i < mem->count; i++)
        used += mem->names[i].node->size;
    *ret_total = MEM_SPACE;
    *ret_free = MEM_SPACE - min_u64(used, MEM_SPACE);
    return 0;
}

static void mem_submit_write(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                             struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn) {
    int r = mem_write(self, file, data, size, offset);
    loop_post(loop, op, r ? r : (int64_t)size, fn);
}

static void mem_submit_read(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                            struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn) {
    size_t got;
    int r = mem_read(self, file, data, size, offset, &got);
    loop_post(loop, op, r ? r : (int64_t)got, fn);
}

static void mem_free(void *self) {
    struct mem *mem = self;
    while (mem->count)
        remove_name(mem, &mem->names[mem->count - 1]);
    free(mem->names);
    pthread_mutex_destroy(&mem->mutex);
    free(mem);
}

static const struct tier_ops mem_ops = {
    .kind = "mem",
    .make_directory = mem_make_directory,
    .create = mem_create,
    .open = mem_open,
    .close = mem_close,
    .write = mem_write,
    .read = mem_read,
    .truncate = mem_truncate,
    .sync = mem_sync,
    .length = mem_length,
    .rename = mem_rename,
    .link = mem_link,
    .unlink = mem_unlink,
    .remove_directory = mem_remove_directory,
    .sync_directory = mem_sync_directory,
    .list = mem_list,
    .stat = mem_stat,
    .touch = mem_touch,
    .now = mem_now,
    .space = mem_space,
    .submit_write = mem_submit_write,
    .submit_read = mem_submit_read,
    .free = mem_free,
};

int tier_mem_new(const char *name, enum level level, struct tier **ret_tier) {
    struct mem *mem = calloc(1, sizeof *mem);
    if (!mem)
        return -ENOMEM;
    pthread_mutex_init(&mem->mutex, NULL);
    return tier_new(name, level, TIER_ATOMIC_RENAME | TIER_LINK | TIER_PREALLOCATE, "", &mem_ops, mem, ret_tier);
}
