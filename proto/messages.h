/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The messages between client and daemon: one SOCK_SEQPACKET packet each, a 16-byte head, a fixed
 * little-endian struct, then at most a bounded tail; descriptors by SCM_RIGHTS. messages.def is
 * the table; PROTOCOL.md the explanation. All structs are free of padding, and their sizes are
 * asserted, so they are the wire layout on every little-endian machine.
 */

#include "base/util.h"
#include "proto/codes.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire structs are little-endian");

#define MESSAGE_SIZE_MAX 8192 /* bytes of a packet; anything larger travels as a sealed memfd */
#define MESSAGE_FDS_MAX 1
#define MESSAGE_MAGIC UINT64_C(0x3164747063746b63) /* "cktcptd1", as bytes on the wire */
#define PROTOCOL_VERSION_MIN 1
#define PROTOCOL_VERSION_MAX 2 /* 2: device memory, START */

enum opcode {
#define MESSAGE(number, name, type, direction, states, descriptors, tail) MESSAGE_##name = number,
#include "proto/messages.def"
#undef MESSAGE
};

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"

struct message_head {
    uint16_t opcode;
    uint16_t flags;  /* 0 */
    uint32_t size;   /* of the whole packet, this head included */
    uint32_t serial; /* the client counts its requests from 1; a reply repeats it; 0: an event */
    uint32_t reserved;
};

struct message_empty {
    uint64_t reserved;
};

struct message_hello {
    uint64_t magic;
    uint32_t version_min, version_max;
};

struct message_hello_ok {
    uint32_t version;
    uint32_t daemon_pid;
    uint32_t chunk_size;
    uint32_t reserved;
};

struct message_error {
    int32_t code; /* enum code, < 0 */
    uint32_t reserved;
    /* tail: the sentence, UTF-8, no NUL */
};

/* Tail: job, run id, parallel root (CKPT_DIR; may be empty), without NULs, one after the other. */
struct message_open {
    uint32_t rank, world;
    uint32_t pid; /* the claiming process, as it sees itself */
    uint16_t job_length, run_id_length, directory_length;
    uint16_t flags; /* 0 */
    uint32_t reserved;
    uint64_t deadline_ms;
};

enum { OPENED_HAS_RESUME = 1 << 0 };

/* Descriptor: the word page. Tail: a warning to pass on (may be empty). */
struct message_opened {
    uint64_t generation;
    uint64_t resume_generation, resume_step;
    uint64_t session; /* for ATTACH */
    uint32_t flags;
    uint32_t levels; /* bit 1 << LEVEL_x: configured */
};

struct message_attach {
    uint64_t session;
};

/* Descriptor: a memfd sealed with F_SEAL_SHRINK, fully allocated. */
struct message_area {
    uint32_t area; /* chosen by the client, < AREAS_MAX, not in use */
    uint32_t reserved;
    uint64_t size;
};

struct message_area_drop {
    uint32_t area;
    uint32_t reserved;
};

enum { REGISTER_PUSH = 1 << 0 /* every byte of the image comes by PUSH */ };

/* Descriptor: the shard table (shards.h), a memfd sealed SHRINK|GROW|WRITE. Replaces the set. */
struct message_register {
    uint64_t table_size;
    uint32_t count;
    uint32_t set; /* the client numbers its sets; SAVE names one */
    uint32_t flags;
    uint32_t reserved;
    uint64_t nonce_address, nonce; /* in the client's memory: the probe for private reads; 0: no private shard */
};

enum { /* the tail says why; the set is not registered */
       REGISTERED_PRIVATE_REFUSED = 1 << 0,
       REGISTERED_DEVICE_REFUSED = 1 << 1,
};

struct message_registered {
    uint32_t set;
    uint32_t flags;
    uint64_t image_size; /* without inline state */
};

enum {
    SAVE_URGENT = 1 << 0,
    SAVE_CHECK = 1 << 1,
    SAVE_HELD = 1 << 2,     /* answer now, but copy nothing before START */
    SAVE_ADMITTED = 1 << 3, /* the client has taken the admission (word.h): no SAVED comes, CAPTURED tells all */
};

struct message_save {
    uint64_t step;
    uint32_t set;
    uint16_t counter; /* in the word */
    uint16_t to;      /* enum level: the deepest wanted; 0 = all configured */
    uint32_t flags;
    uint32_t state_area; /* inline state lies in this area; state_length 0: none */
    uint64_t state_offset, state_length;
    uint64_t busy_deadline_ms;
    uint64_t forks; /* how often the client has forked: > 0 turns private reads to /proc/PID/mem */
};

/* Tail: a report about an earlier version (a failed drain, an overlap between ranks); may be empty. */
struct message_saved {
    int32_t result; /* CODE_OK, CODE_SKIPPED, CODE_ALREADY */
    uint32_t reserved;
    uint64_t image_size; /* the watermark that means captured */
};

/* An event: the capture ended. Tail: why it failed. */
struct message_captured {
    uint64_t step;
    int32_t result; /* CODE_OK or CODE_E_... */
    uint16_t counter;
    uint16_t reserved;
};

/* One chunk of the image for the running capture, in order; answered by PUSHED when it was copied. */
struct message_push {
    uint64_t image_offset;
    uint64_t area_offset;
    uint32_t area;
    uint32_t length;
    uint16_t counter;
    uint16_t reserved[3];
};

struct message_pushed {
    uint64_t image_offset;
    int32_t result;
    uint32_t reserved;
};

/* A step that was saved while no daemon was there: its version can never be complete. */
struct message_missed {
    uint64_t step;
};

/* The client waits in its fence for a save with SAVE_CHECK: re-read the memory now and compare, then
 * let the word reach the image's size. Not answered; the CAPTURED event comes. */
struct message_fence {
    uint16_t counter;
    uint16_t reserved[3];
};

/* What was queued before a save with SAVE_HELD is over: its memory may be read now. Not answered. Over
 * the push connection too, so that the thread that waits for a GPU's event needs no lock. */
struct message_start {
    uint16_t counter;
    uint16_t reserved[3];
};

enum wait_scope { WAIT_PART = 0, WAIT_VERSION = 1 };

struct message_wait {
    uint64_t step; /* in this run's generation */
    uint32_t level;
    uint32_t scope;
    uint64_t timeout_ms; /* 0: do not wait */
};

struct message_waited {
    int32_t result; /* CODE_OK, CODE_PENDING (not yet), CODE_SKIPPED (never will at this level), CODE_E_... */
    uint32_t reserved;
};

struct message_last_durable {
    uint32_t level;
    uint32_t reserved;
};

struct message_durable {
    uint64_t generation, step;
    uint64_t age_ms; /* since it became durable there (or was created, if by an earlier daemon) */
    uint32_t found;
    uint32_t reserved;
};

struct message_versions_are {
    uint64_t size; /* of the memfd: an array of version_record, newest first */
    uint32_t count;
    uint32_t reserved;
};

enum { VERSION_PINNED = 1 << 0 };

struct version_record {
    uint64_t generation, step;
    uint64_t bytes;
    uint64_t created_ns;
    uint32_t world;
    uint32_t levels; /* bit 1 << LEVEL_x: complete there */
    uint32_t flags;
    uint32_t reserved;
};

enum {
    RESTORE_RESUME = 1, /* the version that this run resumes from */
    RESTORE_LATEST = 2, /* the greatest complete one now */
    RESTORE_STEP = 3,   /* the greatest generation that has this step */
    RESTORE_EXACT = 4,  /* generation and step */
};

struct message_restore_open {
    uint64_t generation, step;
    uint32_t which;
    uint32_t reserved;
    uint64_t timeout_ms;
};

/* Descriptor: the index, a sealed memfd with the text of complete.json, verified (empty where result
 * is CODE_NONE). Tail: a warning. */
struct message_restore_opened {
    uint64_t generation, step;
    uint64_t index_size;
    int32_t result; /* CODE_OK or CODE_NONE */
    uint32_t restore;
};

struct message_restore_close {
    uint32_t restore;
    uint32_t reserved;
};

#define FETCH_CHUNKS_MAX 64

struct message_fetch {
    uint32_t restore;
    uint32_t rank;
    uint32_t first, count; /* chunks of that part; count <= FETCH_CHUNKS_MAX */
    uint64_t timeout_ms;
};

/* Verified chunks, in the pool, until RELEASE. Tail: `count` chunk places. */
struct message_fetched {
    uint32_t lease;
    uint32_t count;
};

struct chunk_place {
    uint32_t segment;
    uint32_t length;
    uint64_t offset; /* in the segment */
};

/* An event before the first FETCHED that names it. Descriptor: the segment, to be mapped read-only. */
struct message_segment {
    uint32_t segment;
    uint32_t reserved;
    uint64_t size;
};

struct message_release {
    uint32_t lease;
    uint32_t reserved;
};

/* Background: bring all chunks of a part (UINT32_MAX: all parts) into the pool while there is room. */
struct message_prefetch {
    uint32_t restore;
    uint32_t rank;
};

struct message_status_is {
    uint64_t size; /* of the memfd: JSON */
};

/* Descriptor: a memfd with the last `records` trace_records, oldest first, then `names` trace_names. */
struct message_trace_is {
    uint64_t size;      /* of both */
    uint64_t forgotten; /* records that were older */
    uint64_t wall_ns;   /* the wall clock's time, less the records' */
    uint32_t records, names;
};

enum { STOP_DRAIN = 0 /* drain to LOCAL first */, STOP_NOW = 1 };

struct message_stop {
    uint32_t mode;
    uint32_t reserved;
};

/* Device memory. A device is named by its UUID (of a MIG instance: that one's), since each process
 * numbers devices in its own way. */
#define DEVICE_UUID_SIZE 16
#define DEVICE_HANDLE_SIZE 64 /* of CUipcMemHandle, and of CUmemPoolPtrExportData */

/* Descriptor: the shareable handle of an exportable memory pool. */
struct message_device_pool {
    uint32_t pool; /* chosen by the client, < DEVICE_POOLS_MAX, not in use */
    uint32_t reserved;
    uint8_t uuid[DEVICE_UUID_SIZE];
};

enum device_kind {
    DEVICE_LEGACY = 1, /* one allocation; `handle` is its CUipcMemHandle */
    DEVICE_VMM = 2,    /* a range of addresses; DEVICE_CHUNKs say what is mapped into it */
    DEVICE_POOLED = 3, /* one allocation out of `pool`; `handle` is its CUmemPoolPtrExportData */
};

struct message_device_memory {
    uint32_t memory; /* chosen by the client, < DEVICE_MEMORIES_MAX, not in use */
    uint32_t kind;
    uint8_t uuid[DEVICE_UUID_SIZE];
    uint64_t size;      /* of the allocation, or of the range */
    uint64_t buffer_id; /* CU_POINTER_ATTRIBUTE_BUFFER_ID; DEVICE_VMM: 0, its chunks have one each */
    uint32_t pool;      /* DEVICE_POOLED; else 0 */
    uint32_t reserved;
    uint8_t handle[DEVICE_HANDLE_SIZE]; /* DEVICE_VMM: zeros */
};

/* One physical allocation of a range. Chunks come in ascending order and do not overlap; more may come
 * later, when the range has grown in place. Descriptor: its shareable handle. */
struct message_device_chunk {
    uint32_t memory;
    uint32_t reserved;
    uint64_t offset, size; /* in the range; size is the allocation's */
    uint64_t buffer_id;
};

enum { DEVICE_DROP_POOL = 1 << 0 /* `number` is a pool's; else a memory's */ };

struct message_device_drop {
    uint32_t number;
    uint32_t flags;
};

/* At this offset lie these eight bytes: can you read them? */
struct message_device_probe {
    uint32_t memory;
    uint32_t reserved;
    uint64_t offset, nonce;
    uint64_t free_bytes; /* of the device, as the client sees it now: the daemon, which cannot know that without
                            a context, learns from it what its context takes. 0: not known */
};

enum { DEVICE_PROBED_REFUSED = 1 << 0 /* push instead; the tail says why */ };

struct message_device_probed {
    uint32_t memory;
    uint32_t flags;
    uint64_t context_bytes; /* device memory that the daemon's context takes, whoever uses it */
};

/* What the daemon holds of all devices together. */
struct message_device_usage_is {
    uint32_t contexts;      /* devices in use */
    uint32_t imports;       /* allocations of this client that are open */
    uint64_t context_bytes; /* device memory taken by the contexts */
    uint64_t import_bytes;  /* of those allocations: they stay allocated while they are open */
    uint64_t arena_bytes;   /* device memory for the device tier */
};

#pragma GCC diagnostic pop

/* Names of limits, each charged to the client that reaches it. */
#define AREAS_MAX 1024  /* shared areas of one client */
#define WAITS_MAX 64    /* WAITs of one client in flight */
#define RESTORES_MAX 16 /* open restores of one client */
#define LEASES_MAX 64   /* unreleased FETCHEDs of one client */
#define FETCHES_MAX 16  /* FETCHes of one client in flight */
#define DEVICE_POOLS_MAX 64
#define DEVICE_MEMORIES_MAX 65536 /* device allocations and ranges of one client */
#define DEVICE_CHUNKS_MAX 65536   /* chunks of all its ranges together */

/* What the table says about one opcode. */
enum { MESSAGE_STATE_N = 1, MESSAGE_STATE_G = 2, MESSAGE_STATE_O = 4, MESSAGE_STATE_A = 8 };

struct message_rule {
    const char *name;
    bool from_client;
    uint32_t states;
    uint32_t body_size;
    uint32_t descriptors;
    uint32_t tail_max;
};

/* NULL: no such opcode. */
const struct message_rule *message_rule(uint16_t opcode);
