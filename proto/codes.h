/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Results and levels as they cross the wire and as the client API returns them (ckpt.h repeats
 * them as CKPT_...; the client asserts that they agree). They never change. */

enum code {
    CODE_OK = 0,
    CODE_SKIPPED = 1, /* save: nothing was captured, the pool or a tier is busy; retry is allowed */
    CODE_ALREADY = 2, /* save: this step was accepted before */
    CODE_NONE = 3,    /* restore: there is no version at all */
    CODE_PENDING = 4, /* test: not yet */

    CODE_E_INVALID = -1,     /* an argument is wrong */
    CODE_E_MEMORY = -2,      /* out of memory */
    CODE_E_UNREACHABLE = -3, /* no daemon, or it went away */
    CODE_E_TIMEOUT = -4,     /* the deadline passed */
    CODE_E_PROTOCOL = -5,    /* a message that should not be */
    CODE_E_VERSION = -6,     /* client and daemon share no protocol version, or a file is newer */
    CODE_E_LIMIT = -7,       /* a named limit */
    CODE_E_DENIED = -8,      /* permission */
    CODE_E_HELD = -9,        /* another live run holds the job */
    CODE_E_IO = -10,         /* a tier failed */
    CODE_E_DAMAGED = -11,    /* versions exist, none is usable; or no good copy of a chunk */
    CODE_E_NOT_FOUND = -12,  /* no such version, tensor, shard */
    CODE_E_EXISTS = -13,     /* that name is taken */
    CODE_E_BUG = -14,        /* an assertion in the library failed; the handle is disabled */
    CODE_E_FORKED = -15,     /* a handle used in a forked child */
    CODE_E_LOST = -16,       /* the version was given up: revoked fence, source gone, daemon died */
    CODE_E_CONFLICT = -17,   /* overlaps, gaps, disagreement between ranks */
    CODE_E_STOPPING = -18,   /* the daemon is stopping */
    CODE_E_MISMATCH = -19,   /* dtype or shape differ from the stored ones */
};

enum level {
    LEVEL_NONE = 0,
    LEVEL_CAPTURED = 1, /* survives the trainer's death */
    LEVEL_LOCAL = 2,    /* the daemon's death, a reboot */
    LEVEL_PARTNER = 3,  /* loss of a node */
    LEVEL_GLOBAL = 4,   /* loss of the job's nodes */
    LEVEL_COUNT = 5,
};
