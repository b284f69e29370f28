/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The GPUs on which clients have memory. Each device has a thread of its own, which alone makes and
 * enters the device's context: everything that is to happen there is a job in its queue, and what a
 * job found comes back to the control thread. So a device that hangs holds up nobody but itself.
 *
 *   unused --(first job)--> context made --(last user gone)--> context given back, unused
 *
 * A job whose copies are under way leaves the thread to others (flight.h).
 *
 * A context that a sticky error has spoiled is given back at once; `generation` counts contexts, so
 * that what was opened in an older one is known to be gone. A job that does not come back within
 * the deadline is abandoned: its owner is told, it keeps what it may still write to, and the device
 * takes no new work until it has come back after all. What is owed, as a close is, waits for that.
 */

#include "base/cuda.h"
#include "base/loop.h"
#include "proto/messages.h"

#include <stdatomic.h>

#define DEVICES_MAX 64
#define FLIGHTS_MAX 2 /* under way at once */
#define DEVICE_NAME_MAX 64
#define DEVICE_TEXT_SIZE 41 /* "GPU-01234567-89ab-cdef-0123-456789abcdef", or "MIG-..." */

struct device;
struct devices;
struct pins;
struct server;

/* What the control thread knows of the thread's side: copied at the end of each job. */
struct device_facts {
    char name[DEVICE_NAME_MAX];
    char text[DEVICE_TEXT_SIZE]; /* the UUID, as nvidia-smi has it once the device was seen */
    bool context;
    uint32_t generation;    /* of the context, counted from 1 */
    uint64_t context_bytes; /* 0: not known */
    uint64_t pinned_bytes;  /* of the pool, by this context */
    uint64_t copied_bytes;
    CUdeviceptr arena; /* 0: none */
    uint64_t arena_size;
};

/* Copies that a job has queued: flight.h. */
struct flight {
    uint64_t number;
    uint32_t generation; /* of the context */
    uint64_t begun_ns;
};

struct device_job {
    struct loop_op op;
    TAILQ_ENTRY(device_job) link;
    struct device *device;
    bool needs_context; /* one is made if there is none; if that fails, `run` is not called */
    bool last;          /* comes back behind all that was submitted before it, under way or not */
    bool owed; /* gives something back: never abandoned nor refused, it is done when the device answers again */
    /* On the device's thread, in its context: sets result and problem, which are that thread's. */
    void (*run)(struct device_job *job);
    /* Set by run: copies of this job are under way. Then run is called again, behind the jobs that are waiting, until
     * it clears this, whatever becomes of the job meanwhile: only then is anybody told. */
    bool flying;
    /* On the control thread, once for each submission: it is over, with its result, or was abandoned
     * (-ETIMEDOUT): then the device's thread may still be at work on it. */
    void (*done)(struct device_job *job, int result, const struct problem *problem);
    /* On the control thread, after `done`, unless that submitted it again: nobody touches it any more. */
    void (*free)(struct device_job *job);
    int result;
    struct problem problem;

    /* The device's own. */
    uint64_t number; /* of the submission */
    struct device_facts facts;
    _Atomic bool running, abandoned;
    bool waiting; /* for a time after which it is submitted again */
    struct loop_op timer;
};
TAILQ_HEAD(device_job_list, device_job);

TAILQ_HEAD(import_list, import);

struct device {
    struct server *server;
    struct devices *devices;
    struct pins *pins; /* of all devices */
    uint8_t uuid[DEVICE_UUID_SIZE];

    /* The control thread's. */
    struct loop_group *group;
    struct device_job_list jobs; /* submitted, not come back */
    uint64_t submitted;          /* so far */
    _Atomic uint32_t waiting;    /* jobs that the thread has not begun, except those that are to be last */
    struct device_job *watched;
    uint64_t watched_since_ns;
    struct loop_op watch;
    bool stuck;
    _Atomic uint32_t users; /* imports, pools, places in the arena */
    uint32_t transfers;     /* of captures that are under way */
    struct {
        struct device_job job;
        struct loop_op timer;
        bool at_work;
        uint32_t next; /* segment that was not asked for in this context */
        uint32_t segment;
        void *data;
        uint64_t size;
    } pinning; /* of the pool, when there is time: pins.h */
    struct import_list imports;
    struct arena *arena;
    struct problem problem; /* the last thing that went wrong, for status */
    struct device_facts facts;

    /* The device thread's. */
    struct {
        bool found;
        CUdevice number;
        CUcontext context;
        CUstream stream;
        CUevent event, flights[FLIGHTS_MAX];
        uint64_t begun, landed; /* flights */
        bool unmeasured;        /* the context is new: what it takes is not known yet */
        uint64_t context_cost;  /* what a context took when it was measured; it is made and dropped more often */
        uint64_t next_ns;       /* the rate's: when the next copy may begin */
        struct device_facts facts;
    } own;
};

int devices_new(struct server *server, struct devices **ret_devices) MUST_CHECK;
/* Only of a server that has never run. */
void devices_free(struct devices *devices);
/* The device of this UUID, also if nobody has seen whether it exists: opening something there says so. */
int devices_get(struct devices *devices, const uint8_t uuid[DEVICE_UUID_SIZE], struct device **ret_device,
                struct problem *problem) MUST_CHECK;
struct device *devices_next(struct devices *devices, const struct device *after);
/* The driver's state, once a job has looked: "not used yet" before. For status. */
const char *devices_state(struct devices *devices, const char **ret_reason);

/* ---- on the control thread ---- */

/* Also of a device that is stuck: then it is abandoned at once (from the loop). */
void device_submit(struct device *device, struct device_job *job);
/* From `done`: again, after a time. */
void device_submit_later(struct device_job *job, uint64_t after_ns);
/* A job that is to run before the context may go has been submitted: the last unuse gives it back. */
void device_use(struct device *device);
void device_unuse(struct device *device);
/* Notes what went wrong, for status, and logs it. */
void device_report(struct device *device, const struct problem *problem, const char *what);

/* ---- on the device's thread ---- */

const struct cuda *device_cuda(const struct device *device);
/* Notes a result; a sticky one gives the context back. 0, or negative errno with the sentence. */
int device_result(struct device *device, CUresult result, struct problem *problem, const char *what);
uint64_t device_now(void);
/* Between two looks at something: at first for no time. */
void device_pause(uint32_t looks);
/* All that was queued on the device's stream is complete. */
int device_wait(struct device *device, struct problem *problem) MUST_CHECK;
/* May so many bytes be copied now, by the configured rate? 0: yes, they are counted. Else: in how many ns. */
uint64_t device_pace(struct device *device, uint64_t bytes);
/* The client saw so many bytes free before this job: if it made the context, that took the difference. */
void device_measure(struct device *device, uint64_t free_before);
