/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The service manager, if there is one (service-systemd.c; service-none.c where libsystemd is absent). */

/* The one socket that it passed, or -1. */
int service_listen_fd(void);
/* "READY=1" and the like; does nothing where nobody listens. */
void service_notify(const char *state);
