/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the daemon tells `ckptctl status`: one JSON object. Its fields are listed in ckptctl(1). */

#include "daemon/server.h"

/* Allocated, for the caller to free. */
int status_text(struct server *server, char **ret_text) MUST_CHECK;
