/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An open restore: a version, its index (handed to the client as it stands in complete.json), and
 * the holdings that chunks are fetched from. Chunks given to the client are leased: they stay where
 * they are until it releases them, or is gone.
 */

#include "daemon/holding.h"
#include "proto/messages.h"

struct restore;
struct session;

/* Begins to open; answers RESTORE_OPENED or ERROR on the session, and calls
 * session_restore_opened() with the restore when it is usable. */
int restore_open(struct session *session, uint32_t serial, uint32_t number,
                 const struct message_restore_open *request) MUST_CHECK;
uint32_t restore_number(const struct restore *restore);
/* Answers FETCHED or ERROR later. -EINVAL: no such part or chunk. */
int restore_fetch(struct restore *restore, uint32_t serial, const struct message_fetch *request,
                  struct problem *problem) MUST_CHECK;
/* True if the lease was this restore's. */
bool restore_release(struct restore *restore, uint32_t lease);
int restore_prefetch(struct restore *restore, uint32_t rank, struct problem *problem) MUST_CHECK;
/* Drops leases and prefetches; freed when nothing is in flight. */
void restore_close(struct restore *restore);
uint32_t restore_leases(const struct restore *restore);
uint32_t restore_fetches(const struct restore *restore);
