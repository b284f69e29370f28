/* SPDX-License-Identifier: Apache-2.0 */
#include "client/runid.h"

#include "client/errors.h"
#include "proto/text.h"

#include <errno.h>
#include <sys/random.h>

/*
 * The run id must be the same on all ranks of a launch, and differ from that of every other launch:
 * a restarted job with its predecessor's id would join the generation of a dead run and write into
 * its versions. So only sources that have both properties are asked. torchrun's TORCHELASTIC_RUN_ID
 * survives restarts and its restart counter is one per agent: it is not among them.
 */

static int runid_copy(const char *source, const char *text, char ret_run_id[MANIFEST_RUN_ID_MAX]) {
    size_t length = strlen(text);
    if (length >= MANIFEST_RUN_ID_MAX)
        return error_set(CKPT_E_LIMIT, "run id from %s has %zu bytes; at most %d are allowed", source, length,
                         MANIFEST_RUN_ID_MAX - 1);
    if (!text_is_utf8(text, length))
        return error_set(CKPT_E_INVALID, "run id from %s is not UTF-8", source);
    memcpy(ret_run_id, text, length + 1);
    return CKPT_OK;
}

static const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int runid_draw(char ret_run_id[MANIFEST_RUN_ID_MAX]) {
    uint64_t random[2];
    ssize_t n;
    do
        n = getrandom(random, sizeof random, 0);
    while (n < 0 && errno == EINTR);
    if (n != sizeof random)
        return error_set(CKPT_E_IO, "cannot draw a run id: getrandom: %m; set CKPT_RUN_ID");
    snprintf(ret_run_id, MANIFEST_RUN_ID_MAX, "drawn-%016jx%016jx", (uintmax_t)random[0], (uintmax_t)random[1]);
    return CKPT_OK;
}

int runid_find(const char *option, uint32_t world, char ret_run_id[MANIFEST_RUN_ID_MAX]) {
    if (option && *option)
        return runid_copy("the options", option, ret_run_id);

    static const char *const names[] = {"CKPT_RUN_ID", "PMIX_NAMESPACE"};
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (environment(names[i]))
            return runid_copy(names[i], environment(names[i]), ret_run_id);

    const char *job = environment("SLURM_JOB_ID"), *step = environment("SLURM_STEP_ID");
    const char *restart = environment("SLURM_RESTART_COUNT");
    if (job && step) {
        char text[MANIFEST_RUN_ID_MAX + 1];
        snprintf(text, sizeof text, "%s.%s.%s", job, step, restart ? restart : "0");
        return runid_copy("SLURM_JOB_ID", text, ret_run_id);
    }

    if (world <= 1)
        return runid_draw(ret_run_id);
    return error_set(CKPT_E_INVALID,
                     "no run id for %u ranks: set run_id in ckpt_open_options, or CKPT_RUN_ID, to a value that all "
                     "ranks of this launch share and no other launch has%s",
                     world,
                     environment("TORCHELASTIC_RUN_ID")
                         ? " (torchrun's own id survives restarts: open through the process group instead)"
                         : "");
}
