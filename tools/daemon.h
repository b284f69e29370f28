/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the daemon says of itself: its STATUS, as a JSON object. Missing fields are empty. */

#include "tools/ckptctl.h"
#include "tools/connection.h"

/* CONNECTION_E_ABSENT: no daemon, with the sentence; negative: it answers badly. */
int daemon_status(struct ctl *ctl, json_t **ret_status, struct problem *problem) MUST_CHECK;
/* The same over a connection that stays, to ask again and again. */
int daemon_ask_status(struct connection *connection, json_t **ret_status, struct problem *problem) MUST_CHECK;
/* Prints the sentence of either; the exit status. */
int daemon_fail(int error, const struct problem *problem);

/* Fields of JSON objects, with a stand-in where they are missing or of another type. */
const char *json_text(json_t *object, const char *key, const char *otherwise);
uint64_t json_number(json_t *object, const char *key);
bool json_flag(json_t *object, const char *key);
/* Never NULL for json_array_foreach: an absent array has no items. */
json_t *json_list(json_t *object, const char *key);
