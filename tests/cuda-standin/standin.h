/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of the stand-in driver: see README.md for what it is and how tests steer it.
 *
 * One lock guards everything; every exported function opens with standin_enter() and so has it until it returns.
 * Nothing is taken back while work that uses it waits: what frees first lets the work end (stream_settle). Handles
 * that programs hold (contexts, streams, events) are never freed but marked dead, so that a stale one is recognised.
 *
 *     call.c      the door: initialised? forked? which context? which fault?     faults.c   failures on demand
 *     device.c    devices and their limits          context.c   contexts, a stack of them for each thread
 *     memory.c    physical memory, ranges of addresses, allocations             host.c     pinned host memory
 *     stream.c    queues, and the thread that runs them later                    event.c    points in queues
 *     copy.c      copies and fills                  pointer.c   what is at an address
 *     ipc.c, vmm.c, pool.c   the three ways to give memory to another process
 *     registry.c  what processes know of each other report.c    mistakes, and what is left at exit
 */
#pragma once

#include "base/cuda-abi.h"
#include "base/util.h"

#include <pthread.h>
#include <sys/queue.h>
#include <sys/types.h>

enum {
    DEVICES_MAX = 8,
    STACK_MAX = 16,
    PAGE = 4096,
    GRANULARITY = 2 << 20,
    POISON_PENDING = 0xCB, /* where a copy has yet to write */
    POISON_FREED = 0xDB,   /* memory that its owner freed although others had it open */
    POISON_NEW = 0xAB,     /* new device memory */
    EXIT_MISTAKES = 97,    /* of a process that made mistakes or left something */
};

#define CUDA_FUNCTION(name, arguments) __attribute__((__visibility__("default"))) CUresult name arguments;
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION

enum leaks { LEAKS_FAIL, LEAKS_REPORT, LEAKS_IGNORE };

struct settings {
    const char *directory; /* what processes share */
    CUresult init_error;
    int n_devices, n_mig, compute_mode; /* the first n_mig of them are MIG instances */
    size_t device_memory, context_memory;
    uint64_t copy_delay_us, register_delay_ms, bandwidth_mib_s; /* a bandwidth of 0: unlimited */
    bool reopen_refused, trace, record;
    enum leaks leaks;
};

struct context {
    LIST_ENTRY(context) link;
    CUdevice ordinal; /* as this process sees it */
    int device;       /* as it is */
    unsigned int flags, references;
    uint64_t charge;
    bool primary, destroyed;
    CUresult error; /* sticky */
    CUstream legacy;
};

/* Bytes on a device, in a memfd that processes share. */
struct memory {
    uint64_t id; /* the same in every process, and what is charged */
    int fd, device;
    size_t size;
    char *bytes; /* the driver's own mapping */
    unsigned int references;
    bool imported, charged;
    unsigned int handle_types; /* in which its owner lets it be exported */
};

enum range_kind {
    RANGE_ALLOCATED,
    RANGE_IMPORTED,
    RANGE_MAPPED,
    RANGE_POOLED,
    RANGE_POOL_IMPORTED,
    RANGE_HOST_REGISTERED,
    RANGE_HOST_ALLOCATED,
};

/* Addresses that mean something to the driver. Those of devices are mapped without access in the process itself. */
struct range {
    LIST_ENTRY(range) link;
    enum range_kind kind;
    uint64_t base;
    size_t size, offset;     /* offset: into the memory */
    struct memory *memory;   /* NULL for host memory */
    struct context *context; /* NULL for what has none */
    unsigned int flags, references;
    unsigned int access[DEVICES_MAX]; /* CUmemAccess_flags */
    uint64_t buffer_id, charge;
    CUmemoryPool pool;
    char handle[33]; /* the name of its entry in the registry, once exported */
};

static inline bool range_on_host(const struct range *range) { return range->kind >= RANGE_HOST_REGISTERED; }

enum operation_kind { OPERATION_COPY, OPERATION_SET, OPERATION_HOST, OPERATION_RECORD, OPERATION_WAIT, OPERATION_FREE };

/* One end of a copy: rows of bytes, a pitch apart. */
struct side {
    uint64_t address;
    size_t pitch;
    bool device;
};

struct operation {
    TAILQ_ENTRY(operation) link;
    enum operation_kind kind;
    uint64_t sequence; /* in the process */
    struct side from, to;
    size_t width, height;
    unsigned char value;
    bool poison_late; /* the destination is poisoned when it starts, not when it is submitted */
    CUevent event;
    uint64_t event_count;
    CUhostFn function;
    void *user_data;
};

struct CUstream_st {
    LIST_ENTRY(CUstream_st) link;
    struct context *context;
    unsigned int flags;
    pid_t thread; /* whose CU_STREAM_PER_THREAD it is; 0: nobody's */
    bool destroyed, running;
    TAILQ_HEAD(, operation) queue;
};

struct CUevent_st {
    LIST_ENTRY(CUevent_st) link;
    struct context *context;
    unsigned int flags;
    bool destroyed;
    uint64_t submitted, done; /* records */
};

struct standin {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool initialized, forked;
    struct settings settings;
    int n_visible, visible[DEVICES_MAX];
    LIST_HEAD(, context) contexts;
    LIST_HEAD(, range) ranges;
    LIST_HEAD(, CUstream_st) streams;
    LIST_HEAD(, CUevent_st) events;
    struct context *primary[DEVICES_MAX];
    uint64_t sequence, buffer_id;
    unsigned int n_mistakes;
};
extern struct standin standin;

/* ---- call.c ---- */

enum needs { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

struct call {
    CUresult error;
    bool locked;
    struct context *context; /* the current one of the thread, if the call needs one */
};

struct call standin_enter(const char *name, enum needs needs);
static inline void standin_leave(struct call *call) {
    if (call->locked)
        pthread_mutex_unlock(&standin.lock);
}
#define ENTER(needs)                                                                                                   \
    CLEANUP(standin_leave) struct call call = standin_enter(__func__, needs);                                          \
    if (call.error)                                                                                                    \
        return call.error;

/* ---- device.c ---- */
void device_find_visible(void);

/* ---- context.c ---- */
struct context *context_current(void);
/* Dead ones too; NULL if there never was one of that address. */
struct context *context_find(CUcontext handle);
static inline CUcontext context_handle(struct context *context) { return (CUcontext)context; }

/* ---- faults.c ---- */
enum { FAULT_HANG = -1 };
void faults_read(void);
/* The error of this call of `name`, FAULT_HANG, or 0. *ret_sticky: it stays with the context. */
int faults_take(const char *name, bool *ret_sticky);
/* Waits, without the lock, until the test says that hung work goes on. */
void faults_hang(void);

/* ---- memory.c ---- */
/* Charged to the device unless `charged` is false. */
CUresult memory_new(int device, size_t size, bool charged, struct memory **ret_memory);
/* From a descriptor of another process, which stays the caller's. */
CUresult memory_import(int fd, bool charged, struct memory **ret_memory);
void memory_unref(struct memory *memory);
/* Addresses without access; not those of `avoid`. */
CUresult address_reserve(size_t size, size_t alignment, uint64_t avoid, uint64_t *ret_base);
void address_release(uint64_t base, size_t size);
struct range *range_new(enum range_kind kind, uint64_t base, size_t size, struct context *context);
void range_free(struct range *range);
struct range *range_find(uint64_t address);
struct range *range_find_base(uint64_t base, enum range_kind kind);
/* Whether any range has one of these addresses. */
bool range_overlaps(uint64_t base, size_t size);
/* Ends it whatever it is, with what it holds; the first lets copies end. */
void range_end(struct range *range);
void range_end_now(struct range *range);

/* ---- stream.c ---- */
struct CUstream_st *stream_new(struct context *context, unsigned int flags);
/* The stream that a handle means in this context; NULL if it means none. */
struct CUstream_st *stream_resolve(CUstream handle, struct context *context);
void stream_submit(struct CUstream_st *stream, struct operation *operation);
CUresult stream_wait_empty(struct CUstream_st *stream);
/* Whether waiting or running work has to do with these addresses. */
bool stream_uses(uint64_t base, size_t size);
void stream_settle(uint64_t base, size_t size);
void stream_end_context(struct context *context);
void stream_start_device(int device);

/* ---- copy.c ---- */
CUresult copy_run(const struct operation *operation);

/* ---- ipc.c, pool.c, vmm.c ---- */
void ipc_forget(struct range *range);
void pool_range_gone(struct range *range);
unsigned int vmm_count(void);
unsigned int vmm_count_reserved(void);
unsigned int pool_count(void);

/* ---- registry.c ---- */
struct registry_export {
    pid_t pid;
    int fd, device;
    uint64_t inode, memory_id, base, size;
};

CUresult registry_open(void);
/* Takes that much of a device; CUDA_ERROR_OUT_OF_MEMORY if there is no room. One id is counted once. */
CUresult registry_charge(int device, uint64_t id, size_t size);
CUresult registry_charge_context(int device, bool alone, uint64_t *ret_id);
void registry_uncharge(uint64_t id);
size_t registry_used(int device);
/* Whether another living process has it. */
bool registry_others_hold(uint64_t id);
uint64_t registry_random(void);
int registry_export_write(const char *name, const struct registry_export *export);
int registry_export_read(const char *name, struct registry_export *ret_export);
void registry_export_remove(const char *name);
/* One process at a time is in the driver's slow parts. */
void registry_driver_lock(void);
void registry_driver_unlock(void);
bool registry_has(const char *name);
/* Makes the file, if it is not there. */
void registry_say(const char *name);
/* Writes a line to the file's end. */
void registry_append(const char *name, const char *line);

/* ---- report.c ---- */
void report_mistake(const char *format, ...) PRINTF_LIKE(1, 2);
void report_context_ends(struct context *context);
void report_start(void);
