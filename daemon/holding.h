/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A holding is a part as it lies in memory and in tiers, for reading: chunks come from the pool if
 * they are there (captured here, or fetched before), else from the nearest lane that has the part,
 * verified in any case. A copy with a wrong chunk is condemned (its manifest renamed .bad) and the
 * next lane is tried; so it is when a tier does not answer.
 */

#include "daemon/part.h"
#include "tiers/catalog.h"

struct holding;
struct holding_request;
typedef void (*holding_fn)(struct holding_request *request);

/* Embedded in its owner, who keeps it alive until fn has run (from the loop, never from the submit). */
struct holding_request {
    uint32_t index; /* chunk */
    uint32_t tag;   /* the owner's */
    bool patient;   /* as long as a tier does not answer, it is not over: that one may have the chunk */
    holding_fn fn;
    int result; /* 0: *buffer is valid and one reference to it is the owner's */
    struct pool_buffer *buffer;
    uint32_t length; /* raw bytes in it */
    struct problem problem;

    /* The holding's own. */
    struct holding *holding;
    struct loop_op op;
    struct pool_waiter waiter;
    struct digest digest;
    bool from_memory, pausing;
};

/* `image_digest`: what the version's index says of this part; whatever differs from it is not this part. */
int holding_new(struct job *job, struct version_id version, uint32_t rank, const struct digest *image_digest,
                struct holding **ret_holding) MUST_CHECK;
struct holding *holding_ref(struct holding *holding);
void holding_unref(struct holding *holding);
void holding_get(struct holding *holding, struct holding_request *request);
/* If it waits for room in the pool: it ends with -ECANCELED. Otherwise it ends by itself, and is patient no more. */
void holding_cancel(struct holding_request *request);
