/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A tier is a place that keeps files under one root: a node's NVMe, a parallel file system, memory
 * (the reference, mem.c), or a wrapper around another tier that injects faults or delays. Its
 * implementation is a dumb table of operations; everybody else goes through the functions below,
 * the door (tier.c), which asserts life cycle, paths and ranges, checks capabilities, counts, and
 * alone calls the table.
 *
 * Paths are relative to the root, '/'-separated, without "." or ".."; the empty path is the root
 * itself (to list, stat or sync). Functions are blocking and run
 * on the tier's own workers, except tier_submit_*(), which go through the loop. A tier may be used
 * from several threads at once; one file from one thread at a time (submits excepted).
 *
 * Results: 0; TIER_E_ABSENT / TIER_E_EXISTS where documented; negative errno, forwarded unchanged.
 *
 *   file:   create --> write* --> [truncate] --> sync --> close      (never reopened for writing)
 *           open   --> read*  --> close
 */

#include "base/loop.h"
#include "base/problem.h"
#include "proto/codes.h"
#include "tiers/point.h"

#define TIER_PATH_MAX 1024
#define TIER_NAME_MAX 64
#define TIER_ALIGNMENT 4096      /* of data writes: offset, length, memory */
#define TIER_ENTRIES_MAX 4000000 /* of one directory; a longer listing is refused (-E2BIG) */

enum {
    TIER_E_ABSENT = 1, /* no such file or directory */
    TIER_E_EXISTS = 2, /* the new name is taken */
    TIER_E_REMADE = 3, /* the directory was made, and the root before it: it had been removed */
};

enum tier_capability {
    TIER_ATOMIC_RENAME = 1 << 0,   /* rename replaces at once: readers see the old or the new file */
    TIER_LINK = 1 << 1,            /* link(2) fails if the name exists: used to decide */
    TIER_DIRECT = 1 << 2,          /* O_DIRECT works */
    TIER_SHARED = 1 << 3,          /* other nodes see the same files */
    TIER_SURVIVES_REBOOT = 1 << 4, /* not memory */
    TIER_PREALLOCATE = 1 << 5,     /* fallocate works */
};

struct tier;

/* A file that is open in a tier. */
struct tier_file {
    struct tier *tier;
    int fd;                /* for buffered and small I/O; -1 if the tier has no descriptors */
    int direct_fd;         /* the same file with O_DIRECT; -1 if not possible */
    void *state;           /* of tiers without descriptors and of wrappers */
    bool writable, synced; /* asserted by the door */
};

struct tier_entry {
    char *name;
    bool is_directory;
    uint64_t size;
    int64_t mtime_ns; /* by the file system's clock */
};

struct tier_entries {
    struct tier_entry *items;
    size_t count;
};

/* What an implementation provides. Every function may block. `self` is its own state. */
struct tier_ops {
    const char *kind;                                    /* "posix", "mem", "fault", "delay" */
    int (*make_directory)(void *self, const char *path); /* TIER_E_EXISTS, _REMADE; parents exist */
    int (*create)(void *self, const char *path, uint64_t size, struct tier_file *file); /* exclusive; preallocates */
    int (*open)(void *self, const char *path, struct tier_file *file);                  /* for reading; TIER_E_ABSENT */
    int (*close)(void *self, struct tier_file *file);
    int (*write)(void *self, struct tier_file *file, const void *data, size_t size, uint64_t offset); /* all of it */
    int (*read)(void *self, struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got);
    int (*truncate)(void *self, struct tier_file *file, uint64_t size);
    int (*sync)(void *self, struct tier_file *file);
    int (*length)(void *self, struct tier_file *file, uint64_t *ret_size);
    int (*rename)(void *self, const char *from, const char *to); /* replaces; TIER_E_ABSENT */
    int (*link)(void *self, const char *from, const char *to);   /* TIER_E_EXISTS, TIER_E_ABSENT */
    int (*unlink)(void *self, const char *path);                 /* TIER_E_ABSENT */
    int (*remove_directory)(void *self, const char *path);       /* TIER_E_ABSENT; -ENOTEMPTY */
    int (*sync_directory)(void *self, const char *path);
    int (*list)(void *self, const char *path, struct tier_entries *ret_entries);       /* TIER_E_ABSENT */
    int (*list_names)(void *self, const char *path, struct tier_entries *ret_entries); /* NULL: list */
    int (*stat)(void *self, const char *path, struct tier_entry *ret_entry);           /* TIER_E_ABSENT; name not set */
    int (*touch)(void *self, const char *path);  /* mtime = the file system's now */
    int (*now)(void *self, int64_t *ret_now_ns); /* the file system's clock */
    int (*space)(void *self, uint64_t *ret_free, uint64_t *ret_total);
    /* Through the loop; as loop_write() and loop_read(). */
    void (*submit_write)(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                         struct loop_op *op, const void *data, size_t size, uint64_t offset, loop_fn fn);
    void (*submit_read)(void *self, struct tier_file *file, struct loop *loop, struct loop_group *group,
                        struct loop_op *op, void *data, size_t size, uint64_t offset, loop_fn fn);
    void (*free)(void *self);
};

/* Counters that the door keeps; any thread may read them. */
struct tier_counters {
    _Atomic uint64_t bytes_written, bytes_read, writes, reads, syncs, renames, errors, remade, answers;
};

struct tier {
    char name[TIER_NAME_MAX]; /* "local", "parallel": as configured */
    enum level level;         /* its role */
    unsigned capabilities;
    char root[TIER_PATH_MAX]; /* for messages; empty for mem */
    const struct tier_ops *ops;
    void *self;
    struct point_hook hook; /* set by the owner before anybody else uses the tier */
    struct tier_counters counters;
};

/* Takes `self` over (also on failure it is the caller's no more: ops->free runs at tier_free). */
int tier_new(const char *name, enum level level, unsigned capabilities, const char *root, const struct tier_ops *ops,
             void *self, struct tier **ret_tier) MUST_CHECK;
void tier_free(struct tier *tier);
void tier_freep(struct tier **tier);

/* A directory on a POSIX file system. Makes the root if its parent exists; probes O_DIRECT,
 * fallocate, link, rename and whether the file system is on a network. `local` on a network file
 * system is refused (-ENOTSUP) unless `allow_network`. Sentence in problem names root and remedy. */
struct tier_posix_options {
    const char *name, *root;
    enum level level;
    bool allow_network;
    bool buffered;                    /* never O_DIRECT */
    mode_t directory_mode, file_mode; /* 0: 0777 and 0666, as the umask leaves them */
};
int tier_posix_new(const struct tier_posix_options *options, struct tier **ret_tier,
                   struct problem *problem) MUST_CHECK;
/* The reference: files in memory; never lies. */
int tier_mem_new(const char *name, enum level level, struct tier **ret_tier) MUST_CHECK;

/* Wrappers: they own the inner tier. See ckptd.conf(5). */
enum tier_fault_kind { TIER_FAULT_EIO, TIER_FAULT_ENOSPC, TIER_FAULT_EDQUOT, TIER_FAULT_SHORT, TIER_FAULT_FLIP };
struct tier_fault_options {
    char operation[32]; /* "write", "read", "sync", "rename", ... or "any" */
    enum tier_fault_kind kind;
    uint64_t nth; /* fires at the nth such operation, from 1 */
    bool from_then_on;
};
int tier_fault_new(struct tier *inner, const struct tier_fault_options *options, struct tier **ret_tier) MUST_CHECK;
/* How often it fired; 0 of tiers that are none. */
uint64_t tier_fault_fired(const struct tier *tier);
/* Parses "write:3:eio", "any:7:enospc+" ('+': from then on), as in ckptd.conf. */
int tier_fault_parse(const char *text, struct tier_fault_options *ret_options, struct problem *problem) MUST_CHECK;
int tier_delay_new(struct tier *inner, uint64_t delay_ms, struct tier **ret_tier) MUST_CHECK;

/* The door. */
int tier_make_directory(struct tier *tier, const char *path);   /* one; TIER_E_EXISTS, _REMADE */
int tier_make_directories(struct tier *tier, const char *path); /* and parents, all durable; EXISTS is 0 */
int tier_create(struct tier *tier, const char *path, uint64_t size, struct tier_file *ret_file);
int tier_open(struct tier *tier, const char *path, struct tier_file *ret_file);
int tier_close(struct tier_file *file); /* an error means that nothing written is certain */
int tier_write(struct tier_file *file, const void *data, size_t size, uint64_t offset);
int tier_read(struct tier_file *file, void *data, size_t size, uint64_t offset, size_t *ret_got);
int tier_truncate(struct tier_file *file, uint64_t size);
int tier_sync(struct tier_file *file);
int tier_length(struct tier_file *file, uint64_t *ret_size);
int tier_rename(struct tier *tier, const char *from, const char *to);
int tier_link(struct tier *tier, const char *from, const char *to);
int tier_unlink(struct tier *tier, const char *path);
int tier_remove_directory(struct tier *tier, const char *path);
int tier_sync_directory(struct tier *tier, const char *path);
int tier_list(struct tier *tier, const char *path, struct tier_entries *ret_entries);
/* Without sizes and times, which are 0: so the implementation need not examine each entry. */
int tier_list_names(struct tier *tier, const char *path, struct tier_entries *ret_entries);
int tier_stat(struct tier *tier, const char *path, struct tier_entry *ret_entry);
int tier_touch(struct tier *tier, const char *path);
int tier_now(struct tier *tier, int64_t *ret_now_ns);
int tier_space(struct tier *tier, uint64_t *ret_free, uint64_t *ret_total);
void tier_submit_write(struct tier_file *file, struct loop *loop, struct loop_group *group, struct loop_op *op,
                       const void *data, size_t size, uint64_t offset, loop_fn fn);
void tier_submit_read(struct tier_file *file, struct loop *loop, struct loop_group *group, struct loop_op *op,
                      void *data, size_t size, uint64_t offset, loop_fn fn);

void tier_entries_deinit(struct tier_entries *entries);

/* Small files, whole. tier_read_file: at most `limit` bytes from the start (+ a NUL that does not
 * count); the caller frees. tier_publish: temporary file, write, sync, rename to `path`, directory
 * sync. tier_publish_once: the same with link(2): TIER_E_EXISTS if somebody was first (then nothing
 * is left behind). `temporary` is the path of the temporary file, in the same directory; `first` is the
 * first of the fault points that it passes, in the order of the enumeration: written, renamed, published,
 * or written, linked, unlinked, published. */
int tier_write_file(struct tier *tier, const char *path, const void *data, size_t size); /* create .. sync, close */
int tier_read_file(struct tier *tier, const char *path, uint64_t limit, char **ret_data, size_t *ret_size);
int tier_publish(struct tier *tier, const char *path, const char *temporary, const void *data, size_t size,
                 enum point first);
int tier_publish_once(struct tier *tier, const char *path, const char *temporary, const void *data, size_t size,
                      enum point first);

/* "<root>/<path>" for messages and for people. */
void tier_path_text(const struct tier *tier, const char *path, char ret_text[TIER_PATH_MAX * 2]);

/* "tier local: cannot sync /x/y: No space left on device; free some ...". `verb` is a phrase that
 * fits after "cannot". A positive result becomes its errno (TIER_E_ABSENT: -ENOENT, TIER_E_EXISTS:
 * -EEXIST). Returns the negative code. */
int tier_problem(struct problem *problem, const struct tier *tier, int code, const char *verb, const char *path);
