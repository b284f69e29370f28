/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/lines.h"
#include "proto/manifest.h"

#include <errno.h>

#define RUN_FORMAT "ckptd-run"

int run_record_write(const struct run_record *record, char **ret_text, size_t *ret_length) {
    CLEANUP(text_deinit) struct text text = TEXT_NONE;
    text_add(&text, "{\"format\":\"" RUN_FORMAT "\"");
    lines_add_number(&text, "version", MANIFEST_FORMAT_VERSION);
    lines_add_text(&text, "job", record->job);
    lines_add_text(&text, "run", record->run_id);
    lines_add_number(&text, "generation", record->generation);
    lines_add_number(&text, "world", record->world);
    if (record->resumes) {
        text_add(&text, ",\"resumes\":");
        text_add_numbers(&text, (uint64_t[]){record->resume_generation, record->resume_step}, 2);
    }
    lines_add_text(&text, "host", record->host);
    lines_add_text(&text, "boot", record->boot_id);
    lines_add_number(&text, "pid", record->pid);
    lines_add_number(&text, "pid_start", record->pid_start);
    lines_seal(&text, 0);
    if (!text.failed && text.length > MANIFEST_LINE_MAX)
        return -E2BIG;
    return text_take(&text, ret_text, ret_length);
}

int run_record_read(const char *data, size_t size, struct run_record *ret_record, struct problem *problem) {
    json_auto_t *object = NULL;
    size_t length;
    int r = lines_read_sealed(data, size, MANIFEST_LINE_MAX, RUN_FORMAT, MANIFEST_FORMAT_VERSION, &object, &length,
                              problem);
    if (r < 0)
        return r;
    struct run_record record = {0};
    const json_t *resumes = json_object_get(object, "resumes");
    if (length != size || !lines_field_text(object, "job", record.job, sizeof record.job) ||
        !lines_field_text(object, "run", record.run_id, sizeof record.run_id) ||
        !lines_field_number(object, "generation", LINES_NUMBER_MAX, &record.generation) ||
        !lines_field_u32(object, "world", &record.world) ||
        !lines_field_text(object, "host", record.host, sizeof record.host) ||
        !lines_field_text(object, "boot", record.boot_id, sizeof record.boot_id) ||
        !lines_field_u32(object, "pid", &record.pid) ||
        !lines_field_number(object, "pid_start", LINES_NUMBER_MAX, &record.pid_start))
        return problem_set(problem, -EBADMSG, RUN_FORMAT ": a field is missing or out of bounds");
    if (resumes) {
        record.resumes = true;
        if (!json_is_array(resumes) || json_array_size(resumes) != 2 ||
            !lines_number(json_array_get(resumes, 0), LINES_NUMBER_MAX, &record.resume_generation) ||
            !lines_number(json_array_get(resumes, 1), LINES_NUMBER_MAX, &record.resume_step))
            return problem_set(problem, -EBADMSG, RUN_FORMAT ": \"resumes\" is not a version");
    }
    *ret_record = record;
    return 0;
}
