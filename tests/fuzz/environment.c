/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library finds in the environment: the run id and the daemon's socket. The input has lines, one
 * for each variable. A run id that is found is short enough and UTF-8; a socket on demand lies in a
 * directory below the two places where it may, under one plain word.
 */
#include "client/errors.h"
#include "client/runid.h"
#include "proto/text.h"
#include "proto/wire.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>

static const char *const names[] = {"CKPT_RUN_ID",         "PMIX_NAMESPACE", "SLURM_JOB_ID",        "SLURM_STEP_ID",
                                    "SLURM_RESTART_COUNT", "CKPT_SOCKET",    "TORCHELASTIC_RUN_ID", "XDG_RUNTIME_DIR"};

static void check_run_id(const char *option, uint32_t world) {
    char run_id[MANIFEST_RUN_ID_MAX];
    int r = runid_find(option, world, run_id);
    assert(r == CKPT_OK || error_known(r));
    if (r == CKPT_OK)
        assert(run_id[0] && strlen(run_id) < sizeof run_id && text_is_utf8(run_id, strlen(run_id)));
}

static void check_socket(void) {
    char path[108];
    bool on_demand;
    struct problem problem = PROBLEM_NONE;
    int r = wire_socket_path(path, &on_demand, &problem);
    assert(r <= 0 && (r < 0) == (problem.text[0] != '\0'));
    if (r < 0)
        return;
    assert(path[0] && strlen(path) < sizeof path);
    const char *key = getenv("SLURM_JOB_ID");
    if (on_demand)
        assert(strcmp(strrchr(path, '/') + 1, key && *key ? key : "user") == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    CLEANUP(freep) char *text = fuzz_string(data, size);
    char *rest = text;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char *line = strsep(&rest, "\n");
        if (!line || !*line)
            unsetenv(names[i]);
        else
            setenv(names[i], line, 1);
    }
    check_run_id(NULL, 1);
    check_run_id(NULL, 2);
    check_run_id(rest, 2);
    check_socket();
    return 0;
}
