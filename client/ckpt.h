/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt.h: checkpoints that do not block, from C and C++.
 *
 * A handle serves one rank of one job. `ckpt_protect` tells it which memory belongs to the job's
 * state; `ckpt_save` asks the node's daemon to snapshot all of it and returns in microseconds;
 * `ckpt_fence` waits until the daemon has copied the bytes, after which the program may change
 * them; everything else (writing to node-local and parallel storage) happens behind the program's
 * back. `ckpt_restore_open` and `ckpt_restore_read` bring any box of any tensor back, on any number
 * of ranks.
 *
 *     ckpt *c;
 *     ckpt_open("job", NULL, &c);
 *     ckpt_protect_array(c, "weights", CKPT_F32, weights, n);
 *     for (step = 0; step < steps; step++) {
 *         compute(weights);                     // reads weights
 *         ckpt_fence(c, CKPT_DEFAULT_TIMEOUT);  // the last save's bytes are out
 *         update(weights);                      // writes weights
 *         ckpt_save(c, step, NULL);
 *     }
 *     ckpt_close(c);
 *
 * Results. Every function that can fail returns 0 (CKPT_OK), a negative CKPT_E_..., or a positive
 * result that its comment names. After a negative result ckpt_strerror_last() has a sentence for
 * the calling thread: what failed, and what to do. Nothing is printed, no signal handler is
 * installed, no thread is started (except where memory cannot be read by the daemon, see
 * ckpt_info.push), and no call ever ends the process.
 *
 * Threads. A handle may be used from one thread at a time; different handles are independent.
 * Functions that say "any thread" lock nothing and may run beside others.
 *
 * Fork. A child does not share the handle: its calls return CKPT_E_FORKED, and its copies of the
 * descriptors are closed in the child at fork.
 *
 * Options. Structures of options begin with `size`: set it with CKPT_INIT, leave zero what you do
 * not care about. Names and other strings are copied.
 *
 * Deadlines are in milliseconds; CKPT_DEFAULT_TIMEOUT (0) means the default said at the call.
 */
#ifndef CKPT_H
#define CKPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CKPT_VERSION_MAJOR 0
#define CKPT_VERSION_MINOR 1
#define CKPT_VERSION_PATCH 0

#if defined(__GNUC__)
#define CKPT_PUBLIC __attribute__((__visibility__("default")))
#else
#define CKPT_PUBLIC
#endif

/* Zeroes an options structure and sets its size: `struct ckpt_save_options o; CKPT_INIT(o);` */
#define CKPT_INIT(options)                                                                                             \
    do {                                                                                                               \
        unsigned char *ckpt_init_ = (unsigned char *)&(options);                                                       \
        size_t ckpt_left_ = sizeof(options);                                                                           \
        while (ckpt_left_)                                                                                             \
            ckpt_init_[--ckpt_left_] = 0;                                                                              \
        (options).size = (uint32_t)sizeof(options);                                                                    \
    } while (0)

typedef struct ckpt ckpt;
typedef struct ckpt_restore ckpt_restore;

enum {
    CKPT_OK = 0,
    CKPT_SKIPPED = 1, /* save: nothing was captured (the pool or a tier is busy); the step may be retried */
    CKPT_ALREADY = 2, /* save: this step was accepted before */
    CKPT_NONE = 3,    /* restore: the job has no version at all: a fresh start */
    CKPT_PENDING = 4, /* test: not yet */

    CKPT_E_INVALID = -1,     /* an argument is wrong */
    CKPT_E_MEMORY = -2,      /* out of memory */
    CKPT_E_UNREACHABLE = -3, /* no daemon, or it went away; the next save tries again */
    CKPT_E_TIMEOUT = -4,     /* the deadline passed */
    CKPT_E_PROTOCOL = -5,    /* the daemon sent what it should not */
    CKPT_E_VERSION = -6,     /* library and daemon share no protocol version, or a file is newer */
    CKPT_E_LIMIT = -7,       /* a limit, named in the sentence */
    CKPT_E_DENIED = -8,      /* permission */
    CKPT_E_HELD = -9,        /* another live run holds the job; the sentence names it */
    CKPT_E_IO = -10,         /* storage failed; the sentence names the tier */
    CKPT_E_DAMAGED = -11,    /* versions exist, but none is usable; or a tensor has no good copy */
    CKPT_E_NOT_FOUND = -12,  /* no such version, tensor, shard */
    CKPT_E_EXISTS = -13,     /* that name is taken */
    CKPT_E_BUG = -14,        /* the library found itself wrong; the handle is disabled, the program goes on */
    CKPT_E_FORKED = -15,     /* the handle belongs to the parent process */
    CKPT_E_LOST = -16,       /* the version was given up; the sentence says why */
    CKPT_E_CONFLICT = -17,   /* pieces of ranks overlap, leave gaps, or disagree */
    CKPT_E_STOPPING = -18,   /* the daemon is stopping */
    CKPT_E_MISMATCH = -19    /* dtype or shape differ from the stored ones */
};

/* What a version survives. */
enum {
    CKPT_CAPTURED = 1, /* the program's death */
    CKPT_LOCAL = 2,    /* the daemon's death, a reboot */
    CKPT_PARTNER = 3,  /* loss of a node (not offered yet) */
    CKPT_GLOBAL = 4    /* loss of the job's nodes */
};

enum {
    CKPT_BOOL = 1,
    CKPT_U8 = 2,
    CKPT_I8 = 3,
    CKPT_F8_E5M2 = 4,
    CKPT_F8_E4M3 = 5,
    CKPT_I16 = 6,
    CKPT_U16 = 7,
    CKPT_F16 = 8,
    CKPT_BF16 = 9,
    CKPT_I32 = 10,
    CKPT_U32 = 11,
    CKPT_F32 = 12,
    CKPT_I64 = 13,
    CKPT_U64 = 14,
    CKPT_F64 = 15,
    CKPT_C64 = 16, /* complex of two F32 */
    CKPT_C128 = 17 /* complex of two F64 */
};

#define CKPT_DEFAULT_TIMEOUT UINT64_C(0)
#define CKPT_NO_WAIT UINT64_MAX /* answer at once */

/* ---- the library and errors: any thread, before any handle ---- */

/* "0.1.0". Static. */
CKPT_PUBLIC const char *ckpt_version(void);
/* A short name for any result: "CKPT_E_TIMEOUT". Static. */
CKPT_PUBLIC const char *ckpt_strerror(int result);
/* The sentence of the last negative result (or warning) on this thread; "" if none. Valid until the thread's next call.
 */
CKPT_PUBLIC const char *ckpt_strerror_last(void);

/* ---- open and close ---- */

struct ckpt_open_options {
    uint32_t size;
    uint32_t rank;            /* 0 .. world - 1 */
    uint32_t world;           /* ranks of the job; 0 means 1 */
    uint32_t flags;           /* 0 */
    const char *run_id;       /* the same on all ranks of one launch and no other; NULL: CKPT_RUN_ID, PMIx
                                 namespace, Slurm job.step.restart; a random one if world is 1. else CKPT_E_INVALID */
    const char *directory;    /* where GLOBAL checkpoints go; NULL: CKPT_DIR, else the daemon's configuration */
    const char *socket;       /* of the daemon; NULL: CKPT_SOCKET, else the search order of ckpt(3) */
    const char *daemon;       /* program to start on demand; NULL: CKPTD_PROGRAM, else the installed ckptd */
    uint64_t open_timeout_ms; /* default 90 s */
    uint64_t busy_timeout_ms; /* how long a save may wait for room; default 1 s; CKPT_NO_WAIT: not at all */
};

/* Finds the daemon (starts one if none runs and the search order allows), joins or claims this
 * run, and learns from which version it resumes. Blocks, by its deadline. If a newer version than that
 * is there and cannot be used, CKPT_OK comes with a warning on every rank, in ckpt_strerror_last(); if
 * none can be used, CKPT_E_DAMAGED. */
CKPT_PUBLIC int ckpt_open(const char *job, const struct ckpt_open_options *options, ckpt **ret);

/* Fences (default 60 s), says goodbye, frees everything, also memory from ckpt_alloc: stop using it
 * first. Versions already captured go on to storage without the program. Returns the fence's
 * result; the handle is gone in any case. NULL is allowed. */
CKPT_PUBLIC int ckpt_close(ckpt *c);

struct ckpt_info {
    uint32_t size;
    uint32_t rank, world;
    uint32_t connected;  /* 1: as far as known, the daemon is there */
    uint64_t generation; /* of this run */
    uint32_t resumes;    /* 1: the next two are the version that this run resumes from */
    uint32_t levels;     /* bit 1 << CKPT_x: configured */
    uint64_t resume_generation, resume_step;
    uint32_t push; /* 1: private or GPU memory cannot be read by the daemon; a thread of the library copies all */
    uint32_t reserved;
    uint64_t image_size;     /* bytes of the last save's image */
    uint64_t saves, skipped; /* accepted, skipped */
    uint64_t lost;           /* accepted, but given up before they were captured */
    const char *push_reason; /* why push is 1, else NULL; lives as long as the handle */
};
/* Fills what fits in info->size. */
CKPT_PUBLIC int ckpt_get_info(ckpt *c, struct ckpt_info *info);

/* ---- memory ---- */

/* Memory that the daemon maps: captured without help, and even after the program's death. 64-byte aligned, zeroed. */
CKPT_PUBLIC int ckpt_alloc(ckpt *c, size_t size, void **ret);
/* Unprotects (with its fence) what lies in it, then frees. */
CKPT_PUBLIC int ckpt_free(ckpt *c, void *pointer);

/* ---- what belongs to the state ---- */

enum {
    CKPT_RANK_LOCAL = 1, /* not a piece of a global tensor: stored under this rank (RNG state, data loaders) */
    CKPT_EAGER = 2       /* may change right after save returns: copied inside save */
};

/* Memory may be the host's or a GPU's (CUDA): the library looks at the pointer. Of a GPU, the daemon opens the
 * allocation and copies out of it by itself (docs/gpu.md says which kinds it can, and what happens to the rest).
 *
 * A piece of a named tensor that this rank holds. Either a box (offset and extent per dimension) or,
 * if `range` is 1, the row-major elements [start, start + count). */
struct ckpt_shard {
    uint32_t size;
    uint32_t dtype;         /* CKPT_F32, ... */
    const char *name;       /* UTF-8, at most 8192 bytes */
    const void *data;       /* element 0 of the piece, in host or device memory; must stay valid until unprotect */
    uint32_t dimensions;    /* of the global tensor, 0..32 */
    uint32_t flags;         /* CKPT_RANK_LOCAL, CKPT_EAGER */
    const uint64_t *shape;  /* of the global tensor, in elements */
    const uint64_t *offset; /* of the box; NULL: zeros */
    const uint64_t *extent; /* of the box; NULL: shape (all of it) */
    const int64_t *stride;  /* in bytes per dimension, may be negative or zero; NULL: row-major without
                               holes. A range: stride[0] per element */
    uint32_t range;         /* 1: a range */
    uint32_t replica_index; /* this rank's of replica_count identical copies; > 0 is not stored */
    uint32_t replica_count; /* 0 means 1 */
    uint32_t reserved;
    uint64_t start, count; /* of the range, in elements */
};

/* Protects a piece; *ret_id (may be NULL) names it for ckpt_fence_shard and ckpt_unprotect. Several
 * pieces may have one name if they do not overlap. CKPT_E_EXISTS: an equal or overlapping piece. */
CKPT_PUBLIC int ckpt_protect(ckpt *c, const struct ckpt_shard *shard, uint64_t *ret_id);
/* The simple case: a one-dimensional array that this rank alone holds, whole. */
CKPT_PUBLIC int ckpt_protect_array(ckpt *c, const char *name, uint32_t dtype, const void *data, uint64_t count);
/* A second name for a protected tensor (tied weights): stored once, restored under both. */
CKPT_PUBLIC int ckpt_alias(ckpt *c, const char *alias, const char *name);
/* Fences, then forgets the piece (ckpt_unprotect) or all of them and the aliases (ckpt_unprotect_all):
 * its memory may go. On a timeout the running save is revoked. If the piece is in device memory, the daemon closes
 * all allocations that it has open of this handle; the next save opens those it needs again. */
CKPT_PUBLIC int ckpt_unprotect(ckpt *c, uint64_t id);
CKPT_PUBLIC int ckpt_unprotect_all(ckpt *c);

/* ---- save ---- */

struct ckpt_save_options {
    uint32_t size;
    uint32_t to;       /* the deepest level wanted (CKPT_LOCAL, ...); 0: all that is configured */
    const void *state; /* inline bytes of this step (a few KiB of scalars, text); copied inside save */
    uint64_t state_size;
    uint32_t urgent; /* 1: the job is about to be preempted: wait instead of skipping, go first */
    uint32_t check;  /* 1: the fence has the memory read again, a GPU's too, and drops the version if it has changed:
                        CKPT_E_LOST, and the sentence names the tensor. What is still queued on a stream other than the
                        default one is not seen */
    uint64_t busy_timeout_ms; /* overrides the handle's */
    void *const *streams; /* CUDA streams (CUstream or cudaStream_t, at most 64): device memory is read after what was
                             queued on them, without waiting here. On devices with none: after the default stream.
                             CU_STREAM_PER_THREAD is the calling thread's */
    uint32_t stream_count;
    uint32_t reserved;
};

/* Takes a version of everything protected, for this step. Steps increase within a run. The memory must not
 * change until ckpt_fence. A save while the last one is still being captured fences first.
 * The daemon keeps room for a save of the same set as the last one: then this sends a message and returns, in about
 * ten microseconds, whatever the daemon is doing. Otherwise (the first save of a set, room that others needed,
 * urgent, check, large eager pieces, pushed memory) it waits until the daemon has answered. What goes wrong after a
 * save that did not wait is told by its fence, as CKPT_E_LOST.
 *   CKPT_OK        accepted
 *   CKPT_SKIPPED   no room within busy_timeout: nothing was taken, the program may go on changing
 *   CKPT_ALREADY   this step was accepted before
 *   CKPT_E_UNREACHABLE  no daemon: nothing was taken; the next save tries again. ... */
CKPT_PUBLIC int ckpt_save(ckpt *c, uint64_t step, const struct ckpt_save_options *options);

/* Waits until the running capture has ended: afterwards the memory may change. 0 also if none runs. No
 * system call if it has ended. Default 60 s. CKPT_E_TIMEOUT: it was revoked, the version will not
 * exist, and the memory may change all the same. CKPT_E_LOST: likewise, the daemon or a source failed. */
CKPT_PUBLIC int ckpt_fence(ckpt *c, uint64_t timeout_ms);
/* The same for one protected piece: returns as soon as its bytes are out. */
CKPT_PUBLIC int ckpt_fence_shard(ckpt *c, uint64_t id, uint64_t timeout_ms);

/* ---- device memory ---- */

enum { CKPT_QUIET_END = 0, CKPT_QUIET_BEGIN = 1 };
/* Keeps copies out of this handle's device memory away from, say, a collective: after CKPT_QUIET_BEGIN none is under
 * way (it waits for at most two pieces of at most 64 MiB to end) and none begins, until CKPT_QUIET_END or two seconds
 * later. CKPT_E_TIMEOUT: one did not end within two seconds. Without device memory it does nothing. */
CKPT_PUBLIC int ckpt_quiet(ckpt *c, uint32_t begin);

/* Device memory that the daemon has open stays allocated, also when the program frees it. This fences, and has the
 * daemon close everything: call it before giving memory back to the driver (torch.cuda.empty_cache()), or when there is
 * too little. The next save opens again what it needs. */
CKPT_PUBLIC int ckpt_release_imports(ckpt *c);

struct ckpt_device_usage {
    uint32_t size;
    uint32_t contexts; /* devices that the daemon uses, for whomever */
    uint32_t imports;  /* allocations of this handle that it has open */
    uint32_t reserved;
    uint64_t context_bytes; /* device memory that its contexts take */
    uint64_t import_bytes;  /* of those allocations */
    uint64_t arena_bytes;   /* device memory of its device tier */
};
/* What protecting costs in device memory. If device memory is protected, it is made known to the daemon first (as the
 * next save would do), with a fence. */
CKPT_PUBLIC int ckpt_device_usage(ckpt *c, struct ckpt_device_usage *usage);

enum {
    CKPT_PART = 0,   /* this rank's part */
    CKPT_VERSION = 1 /* the whole version, all ranks */
};
/* Waits until the step is durable at the level; default 600 s. CKPT_SKIPPED: it never will be at that
 * level (superseded, or not asked for). A deeper level counts: a version that is GLOBAL survives what a
 * LOCAL one does. CKPT_E_NOT_FOUND: there is no such step in this run, neither in the daemon's memory nor in
 * a tier of such a level. ckpt_test never waits: CKPT_PENDING; for the running capture (CKPT_CAPTURED,
 * CKPT_PART) it asks nobody. */
CKPT_PUBLIC int ckpt_wait(ckpt *c, uint64_t step, uint32_t level, uint32_t scope, uint64_t timeout_ms);
CKPT_PUBLIC int ckpt_test(ckpt *c, uint64_t step, uint32_t level, uint32_t scope);

struct ckpt_durable {
    uint32_t size;
    uint32_t reserved;
    uint64_t generation, step;
    uint64_t age_ms; /* since then */
};
/* The newest complete version at the level. CKPT_NONE: there is none. */
CKPT_PUBLIC int ckpt_last_durable(ckpt *c, uint32_t level, struct ckpt_durable *durable);

struct ckpt_version_entry {
    uint64_t generation, step;
    uint64_t bytes;
    uint64_t created_ns; /* wall clock, since 1970 */
    uint32_t world;      /* ranks that wrote it */
    uint32_t levels;     /* bit 1 << CKPT_x: complete there */
    uint32_t flags;      /* 1: pinned */
    uint32_t reserved;
};
/* Complete versions, newest first. Free *ret with ckpt_versions_free. */
CKPT_PUBLIC int ckpt_versions(ckpt *c, struct ckpt_version_entry **ret, size_t *ret_count);
CKPT_PUBLIC void ckpt_versions_free(struct ckpt_version_entry *versions);

/* ---- restore: lazy, by name and box ---- */

enum {
    CKPT_RESTORE_LATEST = 0, /* before this handle's first save: the version that the run resumes from (the same on
                                all ranks); afterwards the greatest complete one */
    CKPT_RESTORE_STEP = 1,   /* the newest generation that has options->step */
    CKPT_RESTORE_EXACT = 2   /* options->generation and ->step */
};

struct ckpt_restore_options {
    uint32_t size;
    uint32_t which;
    uint64_t generation, step;
    uint64_t timeout_ms; /* of the open and of each read; default 600 s */
};

/* Opens a version and returns with its index; no tensor is read. CKPT_NONE: the job has no version
 * (*ret untouched). CKPT_E_DAMAGED: it has, but none is usable. A newer one that was passed over is a
 * warning, as in ckpt_open. */
CKPT_PUBLIC int ckpt_restore_open(ckpt *c, const struct ckpt_restore_options *options, ckpt_restore **ret);
CKPT_PUBLIC void ckpt_restore_close(ckpt_restore *r);

struct ckpt_restore_info {
    uint32_t size;
    uint32_t world; /* ranks that wrote it */
    uint64_t generation, step;
    uint64_t bytes;
    uint64_t tensors; /* for ckpt_restore_tensor */
};
CKPT_PUBLIC int ckpt_restore_get_info(ckpt_restore *r, struct ckpt_restore_info *info);

/* One entry of the index. Pointers live as long as the restore. */
struct ckpt_tensor {
    uint32_t size;
    uint32_t dtype;
    const char *name;
    uint32_t dimensions;
    uint32_t flags;  /* CKPT_RANK_LOCAL */
    uint32_t rank;   /* rank-local: whose */
    uint32_t pieces; /* in how many it was stored */
    const uint64_t *shape;
    const char *alias_of; /* or NULL */
};
/* index: 0 .. info.tensors - 1, sorted by name (bytewise), global before rank-local, then rank. */
CKPT_PUBLIC int ckpt_restore_tensor(ckpt_restore *r, uint64_t index, struct ckpt_tensor *tensor);
/* CKPT_E_NOT_FOUND. `rank` is looked at for rank-local tensors only; a global one of that name goes first. */
CKPT_PUBLIC int ckpt_restore_find(ckpt_restore *r, const char *name, uint32_t rank, struct ckpt_tensor *tensor);

/* What to read, and where to. A box (offset and extent; NULL: all) or a row-major range. */
struct ckpt_read {
    uint32_t size;
    uint32_t dtype; /* must be the stored one */
    const char *name;
    void *data;            /* element 0 of the destination, in host or device memory */
    uint32_t dimensions;   /* must be the stored number; shape likewise if given */
    uint32_t flags;        /* CKPT_RANK_LOCAL: look for the rank-local tensor of `rank` */
    const uint64_t *shape; /* NULL: not compared */
    const uint64_t *offset;
    const uint64_t *extent;
    const int64_t *stride; /* of the destination, bytes; NULL: row-major without holes */
    uint32_t range;
    uint32_t rank;
    uint64_t start, count;
    void *stream; /* if on_stream is 1: data is device memory, and the bytes are there for what is queued on this CUDA
                     stream after the call. Otherwise they are there when the call returns */
    uint32_t on_stream;
    uint32_t reserved;
};
/* Reads one box; only the chunks that it needs. All bytes were verified before they are copied. */
CKPT_PUBLIC int ckpt_restore_read(ckpt_restore *r, const struct ckpt_read *read);
/* Many at once: names, dtypes, shapes of all are checked before the first byte is written, then they are
 * read in the order of storage, with requests in flight. After an error objects may be half-written. */
CKPT_PUBLIC int ckpt_restore_read_many(ckpt_restore *r, const struct ckpt_read *reads, size_t count);

/* The inline state that `rank` gave to save. *ret_data lives as long as the restore; size 0: none. */
CKPT_PUBLIC int ckpt_restore_state(ckpt_restore *r, uint32_t rank, const void **ret_data, uint64_t *ret_size);

/* Asks for the rest (of one writing rank's part; UINT32_MAX: of all) in the background. */
CKPT_PUBLIC int ckpt_restore_prefetch(ckpt_restore *r, uint32_t rank);

/* A whole tensor, read-only and mapped from the daemon's memory without a copy, if it lies in one
 * piece in consecutive memory there (a tensor within one chunk always does); else a copy owned by
 * the restore. Row-major. Lives until ckpt_restore_close. */
CKPT_PUBLIC int ckpt_restore_map(ckpt_restore *r, const char *name, uint32_t rank, const void **ret_data,
                                 uint64_t *ret_size);

#ifdef __cplusplus
}
#endif
#endif
