/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * ckptd.conf: one INI file for the daemon and for ckptctl. Every key stands in one table (config.c)
 * with its kind, bounds, default and help; ckptd.conf(5) and the commented example repeat it, and a
 * test compares. A wrong section, key, value or path is one sentence with file and line.
 *
 *   [daemon]        loop, log_level, log_file, capture_threads, codec_threads, nice, processors,
 *                   stop_grace_s, idle_exit_s
 *   [pool]          size (bytes with K/M/G, or a percentage of what is available), chunk_size, prefault
 *   [device]        use, arena, piece, rate_mib_s, pin
 *   [tier NAME]     role = local | parallel, path, codec, depth, workers, rate_mib_s, keep, keep_every, trash_grace_s,
 *                   backlog, buffered, allow_network, file_mode, directory_mode, fault, delay_ms
 *   [deadlines]     settle_s, takeover_s, tier_s, device_s
 *
 * Search order: --config FILE; CKPTD_CONFIG; $XDG_CONFIG_HOME/ckptd/ckptd.conf (else
 * ~/.config/ckptd/ckptd.conf); /etc/ckptd/ckptd.conf. With none of them, or with no [tier ...] in the
 * file: one local tier in /var/tmp/ckptd-<uid>/local; the parallel tier comes with the job (CKPT_DIR).
 * Nothing is created here. In paths %u is the user's name, %U the uid, %% a percent sign. A comment
 * has a line of its own; a line has at most as many bytes as inih was built for (Debian: 197).
 */

#include "base/problem.h"
#include "proto/codes.h"
#include "proto/manifest.h"

#include <sched.h>
#include <sys/types.h>

#define CONFIG_TIERS_MAX 8

struct config_tier {
    char name[64];
    char path[1024];
    int line; /* of the path in the file, for sentences; 0: it comes from elsewhere */
    enum level level;
    enum codec codec;
    uint32_t depth;      /* chunks in flight; default 8 */
    uint32_t workers;    /* threads for names and syncs; default 4 */
    uint64_t rate_mib_s; /* 0: no limit */
    uint32_t keep;       /* complete versions; default 2 for local, 3 for parallel */
    uint64_t keep_every;
    uint64_t trash_grace_ms; /* default 60 s */
    uint32_t backlog;        /* versions of a job that may wait for this tier; default 8 */
    bool buffered, allow_network;
    mode_t file_mode, directory_mode;
    char fault[128]; /* tier_fault_parse; empty: none */
    uint64_t delay_ms;
};

struct config {
    char file[1024];                            /* where it came from; empty: defaults */
    char loop[16];                              /* "auto" */
    int log_level;                              /* enum log_level */
    char log_file[1024];                        /* empty: stderr, or beside the socket when on demand */
    uint32_t capture_threads;                   /* default 1 per 8 cores, at least 2 if there are */
    uint32_t codec_threads;                     /* default: the same */
    char processors[256];                       /* as config_processors() reads; empty: all */
    int32_t nice;                               /* of capture and codec threads' process; default 0 */
    uint64_t stop_grace_ms;                     /* 30 s */
    uint64_t idle_exit_ms;                      /* on demand only: 600 s */
    uint64_t pool_size;                         /* bytes; 0: pool_percent */
    uint32_t pool_percent;                      /* of min(MemAvailable, cgroup limit - usage); default 25 */
    uint32_t chunk_size;                        /* default 4 MiB; a multiple of 256 KiB, 256 KiB .. 64 MiB */
    bool prefault;                              /* default true */
    bool device_use;                            /* default true: device memory is opened, where it can be */
    uint64_t arena_size;                        /* per device; default 0: no device tier */
    uint32_t device_piece;                      /* bytes of one copy; default 16 MiB */
    uint64_t device_rate_mib_s;                 /* per device; 0: no limit */
    bool device_pin;                            /* default true */
    uint64_t settle_ms, takeover_ms, tier_ms;   /* 30 s, 60 s, 60 s: a tier operation longer than tier_ms is stuck */
    uint64_t capture_ms;                        /* 60 s: the longest silence of a client that pushes */
    uint64_t device_ms;                         /* 30 s: so is a device that does not answer for longer */
    struct config_tier tiers[CONFIG_TIERS_MAX]; /* shallow first: by level */
    size_t tier_count;
};

/* Reads `path`, or (NULL) searches. -EINVAL with the sentence ("/etc/ckptd/ckptd.conf:12: ..."). */
int config_load(const char *path, struct config *ret_config, struct problem *problem) MUST_CHECK;
/* The same from text; `file` for messages. */
int config_parse(const char *text, const char *file, struct config *ret_config, struct problem *problem) MUST_CHECK;
/* What a tier named by a job (CKPT_DIR) gets: defaults of a parallel tier with this path. */
void config_tier_default(const char *name, const char *path, enum level level, struct config_tier *ret_tier);
/* "0-3,8". False: it is something else. */
bool config_processors(const char *text, cpu_set_t *ret_processors);
/* Writes the commented example with every key and its default. */
int config_example(FILE *out);
