/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/service.h"

#include <systemd/sd-daemon.h>

int service_listen_fd(void) { return sd_listen_fds(1) == 1 ? SD_LISTEN_FDS_START : -1; }
void service_notify(const char *state) { (void)sd_notify(0, state); }
