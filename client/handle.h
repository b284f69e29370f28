/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What is behind a `ckpt *`: the parts, each a module, and what they share. Also the list of all
 * handles of the process, which only fork needs.
 */

#include "client/area.h"
#include "client/device.h"
#include "client/export.h"
#include "client/fetch.h"
#include "client/push.h"
#include "client/saves.h"
#include "client/session.h"
#include "client/set.h"
#include "client/transfer.h"
#include "proto/manifest.h"

#include <stdatomic.h>
#include <sys/queue.h>

#define HANDLE_OPEN_MS UINT64_C(90000)
#define HANDLE_BUSY_MS UINT64_C(1000)
#define HANDLE_FENCE_MS UINT64_C(60000)
#define HANDLE_WAIT_MS UINT64_C(600000)
#define HANDLE_GRACE_MS UINT64_C(2000) /* how long after its own deadline the daemon may answer */
#define HANDLE_REGISTER_MS UINT64_C(10000)
#define HANDLE_REASON_MAX 256

struct ckpt {
    LIST_ENTRY(ckpt) link; /* all handles */
    _Atomic uint64_t forks;

    char *job, *directory, *program;
    char run_id[MANIFEST_RUN_ID_MAX];
    uint32_t rank, world;
    uint64_t open_timeout_ms, busy_timeout_ms;

    struct session session; /* its last member is the word: a fence reads that, and what follows, in one or two lines */
    atomic_bool forked;     /* in the child: nothing works any more */
    atomic_bool disabled;   /* an assertion failed */
    struct saves saves;

    struct areas areas;
    struct devices devices;
    struct exports exports; /* device memory that the daemon reads */
    struct staging staging; /* restored bytes on their way to a device */
    struct set set;
    struct push push;
    struct segments segments;

    /* What the daemon of this session has. */
    struct set_image image;
    uint32_t set_number;
    bool registered;
    bool use_push; /* private or device memory was refused: see push.h */
    char push_reason[HANDLE_REASON_MAX];
    bool quiet;
    uint64_t nonce;

    struct set_eager eager;
    uint64_t eager_size, device_eager_size[DEVICES_MAX];
    void *state; /* a buffer in an area */
    uint64_t state_size;
    LIST_HEAD(, ckpt_restore) restores;
};

/* Every function of the API begins with this: CKPT_OK, or why the handle is of no use. */
int handle_enter(struct ckpt *c) MUST_CHECK;
/* Puts the handle on the list. */
int handle_list(struct ckpt *c) MUST_CHECK;
void handle_unlist(struct ckpt *c);
/* Disables it. Returns CKPT_E_BUG with the sentence. */
int handle_bug(struct ckpt *c, const char *condition, const char *file, int line);

/* The library never aborts the program: what cannot be is answered with CKPT_E_BUG. */
#define client_assert(c, condition)                                                                                    \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return handle_bug(c, #condition, __FILE__, __LINE__);                                                      \
    } while (0)

/* Messages that no call waits for (link.h). */
void handle_unclaimed(void *context, struct link *link);
