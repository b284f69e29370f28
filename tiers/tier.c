/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/tier.h"

#include <errno.h>
#include <stdatomic.h>

/*
 * The door to every tier. Implementations are dumb: they do one thing to one path or file and
 * answer. What is the same for all of them stands here, once, so that a mistake of a caller shows
 * up in the memory tier of a unit test and not first on somebody's Lustre:
 *
 *   - paths are relative and plain, so that nothing can leave the root;
 *   - a file is written, then synced, then closed, and never written again. After a failed sync it
 *     is not writable any more: the kernel has dropped the dirty pages and marked them clean, so a
 *     second sync that "succeeds" would mean nothing;
 *   - what was asked is counted, and what failed.
 *
 * Bytes of submitted operations are counted when they are submitted; their errors are seen by the
 * submitter only, and counted there.
 */

static void count(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

/* Every answer of a table goes through here. */
static int answer(struct tier *tier, int r) {
    count(&tier->counters.answers, 1);
    if (r < 0)
        count(&tier->counters.errors, 1);
    return r;
}

static bool path_component_is_plain(const char *component, size_t length) {
    if (length == 0 || (length == 1 && component[0] == '.'))
        return false;
    return !(length == 2 && component[0] == '.' && component[1] == '.');
}

static bool path_is_plain(const char *path) {
    if (strlen(path) >= TIER_PATH_MAX)
        return false;
    for (;;) {
        size_t length = strcspn(path, "/");
        if (!path_component_is_plain(path, length))
            return false;
        if (path[length] == '\0')
            return true;
        path += length + 1;
    }
}

static bool path_is_plain_or_root(const char *path) { return path[0] == '\0' || path_is_plain(path); }

static void path_parent(const char *path, char ret_parent[TIER_PATH_MAX]) {
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 0;
    memcpy(ret_parent, path, length);
    ret_parent[length] = '\0';
}

int tier_new(const char *name, enum level level, unsigned capabilities, const char *root, const struct tier_ops *ops,
             void *self, struct tier **ret_tier) {
    assert(strlen(name) < TIER_NAME_MAX && strlen(root) < TIER_PATH_MAX);
    struct tier *tier = calloc(1, sizeof *tier);
    if (!tier) {
        ops->free(self);
        return -ENOMEM;
    }
    strcpy(tier->name, name);
    strcpy(tier->root, root);
    tier->level = level;
    tier->capabilities = capabilities;
    tier->ops = ops;
    tier->self = self;
    *ret_tier = tier;
    return 0;
}

void tier_free(struct tier *tier) {
    if (!tier)
        return;
    tier->ops->free(tier->self);
    free(tier);
}

void tier_freep(struct tier **tier) { tier_free(*tier); }

int tier_make_directory(struct tier *tier, const char *path) {
    assert(path_is_plain(path));
    int r = answer(tier, tier->ops->make_directory(tier->self, path));
    if (r == TIER_E_REMADE)
        count(&tier->counters.remade, 1);
    return r;
}

int tier_make_directories(struct tier *tier, const char *path) {
    assert(path_is_plain(path));
    char prefix[TIER_PATH_MAX], parent[TIER_PATH_MAX];
    for (const char *at = path;;) {
        at += strcspn(at, "/");
        memcpy(prefix, path, (size_t)(at - path));
        prefix[at - path] = '\0';
        int r = tier_make_directory(tier, prefix);
        if (r < 0)
            return r;
        /* Also where it existed: whoever made it a moment ago may not have synced its name yet, and
         * what we are about to put below would vanish with it. Nothing to write: cheap. */
        path_parent(prefix, parent);
        r = tier_sync_directory(tier, parent);
        if (r)
            return r;
        if (*at == '\0')
            return 0;
        at++;
    }
}

static void file_init(struct tier_file *file, struct tier *tier, bool writable) {
    *file = (struct tier_file){.tier = tier, .fd = -1, .direct_fd = -1, .writable = writable};
}

int tier_create(struct tier *tier, const char *path, uint64_t size, struct tier_file *ret_file) {
    assert(path_is_plain(path) && size < INT64_MAX);
    struct tier_file file;
    file_init(&file, tier, true);
    int r = answer(tier, tier->ops->create(tier->self, path, size, &file));
    if (r == 0)
        *ret_file = file;
    return r;
}

int tier_open(struct tier *tier, const char *path, struct tier_file *ret_file) {
    assert(path_is_plain(path));
    struct tier_file file;
    file_init(&file, tier, false);
    int r = answer(tier, tier->ops->open(tier->self, path, &file));
    if (r == 0)
        *ret_file = file;
    return r;
}

int tier_close(struct tier_file *file) {
    struct tier *tier = file->tier;
    assert(tier);
    int r = answer(tier, tier->ops->close(tier->self, file));
    file_init(file, NULL, false);
    return r;
}

static bool range_is_valid(size_t size, uint64_t offset) {
    uint64_t end;
    return size <= INT64_MAX && !add_overflows(offset, size, &end) && end <= INT64_MAX;
}

int tier_write(struct tier_file *file, const void *data, size_t size, uint64_t offset) {
    assert(file->tier && file->writable && !file->synced && range_is_valid(size, offset));
    struct tier *tier = file->tier;
    count(&tier->counters.writes, 1);
    int r = answer(tier, tier->ops->write(tier->self, file, data, size, offset));
    if (r == 0)
        count(&tier->counters.bytes_written, size);
    return r;
}

int tier_read(struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got) {
    assert(file->tier && !file->writable && range_is_valid(size, offset));
    struct tier *tier = file->tier;
    size_t got = 0;
    count(&tier->counters.reads, 1);
    int r = answer(tier, tier->ops->read(tier->self, file, data, size, offset, &got));
    if (r < 0)
        return r;
    assert(got <= size);
    count(&tier->counters.bytes_read, got);
    *ret_got = got;
    return r;
}

int tier_truncate(struct tier_file *file, uint64_t size) {
    assert(file->tier && file->writable && !file->synced && size < INT64_MAX);
    return answer(file->tier, file->tier->ops->truncate(file->tier->self, file, size));
}

int tier_sync(struct tier_file *file) {
    assert(file->tier && file->writable && !file->synced);
    struct tier *tier = file->tier;
    count(&tier->counters.syncs, 1);
    int r = answer(tier, tier->ops->sync(tier->self, file));
    if (r == 0)
        file->synced = true;
    else
        file->writable = false;
    return r;
}

int tier_length(struct tier_file *file, uint64_t *ret_size) {
    assert(file->tier);
    return answer(file->tier, file->tier->ops->length(file->tier->self, file, ret_size));
}

int tier_rename(struct tier *tier, const char *from, const char *to) {
    assert(path_is_plain(from) && path_is_plain(to));
    count(&tier->counters.renames, 1);
    return answer(tier, tier->ops->rename(tier->self, from, to));
}

int tier_link(struct tier *tier, const char *from, const char *to) {
    assert(path_is_plain(from) && path_is_plain(to));
    assert(tier->capabilities & TIER_LINK);
    return answer(tier, tier->ops->link(tier->self, from, to));
}

int tier_unlink(struct tier *tier, const char *path) {
    assert(path_is_plain(path));
    return answer(tier, tier->ops->unlink(tier->self, path));
}

int tier_remove_directory(struct tier *tier, const char *path) {
    assert(path_is_plain(path));
    return answer(tier, tier->ops->remove_directory(tier->self, path));
}

int tier_sync_directory(struct tier *tier, const char *path) {
    assert(path_is_plain_or_root(path));
    count(&tier->counters.syncs, 1);
    return answer(tier, tier->ops->sync_directory(tier->self, path));
}

static int compare_entries(const void *a, const void *b) {
    const struct tier_entry *left = a, *right = b;
    return strcmp(left->name, right->name);
}

typedef int (*lister)(void *self, const char *path, struct tier_entries *ret_entries);

static int list_by(struct tier *tier, lister list, const char *path, struct tier_entries *ret_entries) {
    assert(path_is_plain_or_root(path));
    struct tier_entries entries = {0};
    int r = answer(tier, list(tier->self, path, &entries));
    if (r)
        return r;
    if (entries.count)
        qsort(entries.items, entries.count, sizeof *entries.items, compare_entries);
    *ret_entries = entries;
    return 0;
}

int tier_list(struct tier *tier, const char *path, struct tier_entries *ret_entries) {
    return list_by(tier, tier->ops->list, path, ret_entries);
}

int tier_list_names(struct tier *tier, const char *path, struct tier_entries *ret_entries) {
    struct tier_entries entries = {0};
    int r = list_by(tier, tier->ops->list_names ? tier->ops->list_names : tier->ops->list, path, &entries);
    if (r)
        return r;
    for (size_t i = 0; i < entries.count; i++) { /* whoever looks at them nevertheless learns it from any tier */
        entries.items[i].size = 0;
        entries.items[i].mtime_ns = 0;
    }
    *ret_entries = entries;
    return 0;
}

int tier_stat(struct tier *tier, const char *path, struct tier_entry *ret_entry) {
    assert(path_is_plain_or_root(path));
    struct tier_entry entry = {0};
    int r = answer(tier, tier->ops->stat(tier->self, path, &entry));
    if (r == 0)
        *ret_entry = entry;
    return r;
}

int tier_touch(struct tier *tier, const char *path) {
    assert(path_is_plain(path));
    return answer(tier, tier->ops->touch(tier->self, path));
}

int tier_now(struct tier *tier, int64_t *ret_now_ns) { return answer(tier, tier->ops->now(tier->self, ret_now_ns)); }

int tier_space(struct tier *tier, uint64_t *ret_free, uint64_t *ret_total) {
    return answer(tier, tier->ops->space(tier->self, ret_free, ret_total));
}

void tier_submit_write(struct tier_file *file, struct loop *loop, struct loop_group *group, struct loop_op *op,
                       const void *data, size_t size, uint64_t offset, loop_fn fn) {
    assert(file->tier && file->writable && !file->synced && size && range_is_valid(size, offset));
    struct tier *tier = file->tier;
    count(&tier->counters.writes, 1);
    count(&tier->counters.bytes_written, size);
    tier->ops->submit_write(tier->self, file, loop, group, op, data, size, offset, fn);
}

void tier_submit_read(struct tier_file *file, struct loop *loop, struct loop_group *group, struct loop_op *op,
                      void *data, size_t size, uint64_t offset, loop_fn fn) {
    assert(file->tier && !file->writable && size && range_is_valid(size, offset));
    struct tier *tier = file->tier;
    count(&tier->counters.reads, 1);
    count(&tier->counters.bytes_read, size);
    tier->ops->submit_read(tier->self, file, loop, group, op, data, size, offset, fn);
}

void tier_entries_deinit(struct tier_entries *entries) {
    for (size_t i = 0; i < entries->count; i++)
        free(entries->items[i].name);
    free(entries->items);
    *entries = (struct tier_entries){0};
}

int tier_write_file(struct tier *tier, const char *path, const void *data, size_t size) {
    struct tier_file file;
    int r = tier_create(tier, path, 0, &file);
    if (r)
        return r;
    uint64_t length = size;
    r = tier_write(&file, data, size, 0);
    if (r == 0)
        r = tier_length(&file, &length);
    if (r == 0 && length != size) /* as with data: what the file system says it holds is what was written */
        r = -EIO;
    if (r == 0)
        r = tier_sync(&file);
    int closed = tier_close(&file);
    if (r == 0)
        r = closed;
    if (r)
        (void)tier_unlink(tier, path);
    return r;
}

int tier_read_file(struct tier *tier, const char *path, uint64_t limit, char **ret_data, size_t *ret_size) {
    struct tier_file file;
    int r = tier_open(tier, path, &file);
    if (r)
        return r;
    CLEANUP(freep) char *data = NULL;
    uint64_t length;
    size_t got = 0;
    r = tier_length(&file, &length);
    if (r == 0) {
        length = min_u64(length, limit);
        data = malloc(length + 1);
        r = data ? tier_read(&file, data, length, 0, &got) : -ENOMEM;
    }
    int closed = tier_close(&file);
    if (r == 0)
        r = closed;
    if (r)
        return r;
    data[got] = '\0';
    *ret_data = STEAL(data);
    *ret_size = got;
    return 0;
}

static int sync_parent(struct tier *tier, const char *path) {
    char parent[TIER_PATH_MAX];
    path_parent(path, parent);
    return tier_sync_directory(tier, parent);
}

int tier_publish(struct tier *tier, const char *path, const char *temporary, const void *data, size_t size,
                 enum point first) {
    int r = tier_write_file(tier, temporary, data, size);
    if (r)
        return r;
    point_reached(tier->hook, first);
    r = tier_rename(tier, temporary, path);
    if (r) {
        (void)tier_unlink(tier, temporary);
        return r == TIER_E_ABSENT ? -ENOENT : r;
    }
    point_reached(tier->hook, first + 1);
    r = sync_parent(tier, path);
    if (r == 0)
        point_reached(tier->hook, first + 2);
    return r;
}

int tier_publish_once(struct tier *tier, const char *path, const char *temporary, const void *data, size_t size,
                      enum point first) {
    int r = tier_write_file(tier, temporary, data, size);
    if (r)
        return r;
    point_reached(tier->hook, first);
    int linked = tier_link(tier, temporary, path);
    if (linked == 0)
        point_reached(tier->hook, first + 1);
    int unlinked = tier_unlink(tier, temporary);
    if (linked == TIER_E_ABSENT)
        return -ENOENT;
    if (linked < 0)
        return linked;
    if (unlinked < 0)
        return unlinked;
    point_reached(tier->hook, first + 2);
    /* Also for the one who lost: he goes on relying on a name that the winner may not have synced yet. */
    r = sync_parent(tier, path);
    if (r)
        return r;
    point_reached(tier->hook, first + 3);
    return linked;
}

void tier_path_text(const struct tier *tier, const char *path, char ret_text[TIER_PATH_MAX * 2]) {
    const char *separator = tier->root[0] && path[0] ? "/" : "";
    snprintf(ret_text, TIER_PATH_MAX * 2, "%s%s%s", tier->root, separator, path);
}

static const char *remedy(int code) {
    switch (-code) {
    case ENOENT:
        return "; was the directory removed, or its file system unmounted?";
    case ENOSPC:
        return "; free some space there, or keep fewer versions";
    case EDQUOT:
        return "; the quota is used up: free some space, or keep fewer versions";
    case EACCES:
    case EPERM:
        return "; check owner and mode of the directory";
    case EROFS:
        return "; the file system is mounted read-only";
    case EIO:
        return "; the kernel log says more";
    case ESTALE:
        return "; the server lost this file, remounting may help";
    default:
        return "";
    }
}

int tier_problem(struct problem *problem, const struct tier *tier, int code, const char *verb, const char *path) {
    const char *what_to_do = remedy(code); /* nothing, where a file is just absent */
    if (code == TIER_E_ABSENT)
        code = -ENOENT;
    else if (code == TIER_E_EXISTS)
        code = -EEXIST;
    char text[TIER_PATH_MAX * 2];
    tier_path_text(tier, path, text);
    /* The cause must fit behind the path: of a very long one, the end tells more. */
    size_t length = strlen(text), shown = PROBLEM_TEXT_MAX / 2;
    bool cut = length > shown;
    return problem_set(problem, code, "tier %s: cannot %s %s%s: %s%s", tier->name, verb, cut ? "..." : "",
                       cut ? text + length - shown : text, strerror(-code), what_to_do);
}
