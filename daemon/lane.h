/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A lane is a tier at work: the tier, its own bounded workers, and the queue of drains into it.
 * Configured lanes live as long as the daemon; one that came with a job (CKPT_DIR) lives as long as
 * a job uses it.
 */

#include "daemon/server.h"

struct drain;
TAILQ_HEAD(drain_list, drain);

struct lane {
    TAILQ_ENTRY(lane) link;
    struct server *server;
    struct config_tier config;
    struct tier *tier;
    struct loop_group *group;
    uint32_t refs;
    bool from_job; /* CKPT_DIR */
    uint16_t trace_name;

    struct drain_list waiting; /* in order */
    struct drain_list active;
    uint32_t active_count;
    uint32_t writes; /* chunks in flight, over all active drains */
    uint32_t urgent; /* drains of urgent saves: the others wait for them */

    uint64_t pending_bytes;
    uint32_t pending_parts;
    uint64_t errors, superseded;
    uint64_t chunks_bad, copies_bad; /* read from here: digests that were wrong, copies that were given up as damaged */
    uint32_t stuck_workers;
    struct problem last_error;
    uint64_t remade; /* as often as we have told */

    uint64_t rate_next_ns; /* the limiter: no write before this time */
    struct loop_op rate_timer;
    bool rate_sooner; /* the timer was cancelled because that time has come nearer */

    /* What `auto` decides by: running means, each per MiB and in the time of all that were in flight together. */
    uint32_t writing;    /* chunks that the tier has */
    uint64_t write_ns;   /* of raw chunks */
    uint64_t encode_ns;  /* of what is encoded */
    uint64_t stored_ppm; /* of a chunk, so much is left */
    uint32_t asked;      /* lane_gains */
};

/* Opens the tier (blocking) with its wrappers. */
int lane_open_tier(const struct config_tier *config, struct tier **ret_tier, struct problem *problem) MUST_CHECK;
/* Takes the tier over and adds the lane to the server. One reference. */
int lane_new(struct server *server, const struct config_tier *config, struct tier *tier, bool from_job,
             struct lane **ret_lane) MUST_CHECK;
struct lane *lane_find(struct server *server, const char *root);
struct lane *lane_ref(struct lane *lane);
void lane_unref(struct lane *lane);
void lane_free(struct lane *lane);

/* Remembers and logs an error of this lane. */
void lane_error(struct lane *lane, const struct problem *problem);
/* Does it stand still? Nothing new is asked of it then, until what is stuck there returns. */
bool lane_silent(const struct lane *lane);
/* -ETIMEDOUT, and the sentence. */
int lane_silent_problem(const struct lane *lane, struct problem *problem);
/* Tells if the tier had to make its root again: what it held is lost. */
void lane_tell_remade(struct lane *lane);
/* May `bytes` be written now? False: the limiter's timer will pump the lane again. */
bool lane_rate_allows(struct lane *lane, uint64_t bytes);

/* A chunk took so long, one of `together` in flight. */
void lane_took(uint64_t *mean_ns, uint64_t took_ns, uint32_t together, uint64_t bytes);
/* So much is left of a chunk; all of it: it was not worth encoding. */
void lane_shrank(struct lane *lane, uint32_t raw, uint32_t stored);
/* Would it be faster to encode the next chunk than to write it as it is? */
bool lane_gains(struct lane *lane);
