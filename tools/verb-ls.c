/* SPDX-License-Identifier: Apache-2.0 */
/* `ls`: all jobs; or one job's versions, and its generations with what each resumed from. */
#include "tools/inventory.h"
#include "tools/table.h"

#include <inttypes.h>

/* ---- jobs ---- */

struct jobs {
    char **names; /* sorted */
    uint32_t *roots;
    size_t count;
};

static void jobs_free(struct jobs *jobs) {
    for (size_t i = 0; i < jobs->count; i++)
        free(jobs->names[i]);
    free(jobs->names);
    free(jobs->roots);
}

static bool jobs_add(struct jobs *jobs, const char *name, size_t root) {
    size_t at = 0;
    while (at < jobs->count && strcmp(jobs->names[at], name) < 0)
        at++;
    if (at == jobs->count || strcmp(jobs->names[at], name) != 0) {
        char **names = realloc(jobs->names, (jobs->count + 1) * sizeof *names);
        jobs->names = names ? names : jobs->names;
        uint32_t *masks = realloc(jobs->roots, (jobs->count + 1) * sizeof *masks);
        jobs->roots = masks ? masks : jobs->roots;
        char *copy = strdup(name);
        if (!names || !masks || !copy) {
            free(copy);
            return false;
        }
        memmove(names + at + 1, names + at, (jobs->count - at) * sizeof *names);
        memmove(masks + at + 1, masks + at, (jobs->count - at) * sizeof *masks);
        names[at] = copy;
        masks[at] = 0;
        jobs->count++;
    }
    jobs->roots[at] |= 1u << root;
    return true;
}

static int jobs_load(const struct roots *roots, struct jobs *jobs) {
    for (size_t i = 0; i < roots->count; i++) {
        char **names = NULL;
        size_t count = 0;
        struct problem problem = PROBLEM_NONE;
        int r = catalog_jobs(roots->items[i].tier, &names, &count, &problem);
        if (r != 0)
            return ctl_fail(ctl_status(r), "%s", problem_text(&problem, r));
        bool good = true;
        for (size_t k = 0; k < count; k++) {
            good = good && jobs_add(jobs, names[k], i);
            free(names[k]);
        }
        free(names);
        if (!good)
            return ctl_fail(STATUS_STORAGE, "out of memory");
    }
    return STATUS_OK;
}

static json_t *labels_json(const struct roots *roots, uint32_t mask) {
    json_t *list = json_array();
    for (size_t i = 0; i < roots->count; i++) {
        if (mask & 1u << i)
            json_array_append_new(list, json_string(root_label(roots, i)));
    }
    return list;
}

static void labels_text(const struct roots *roots, uint32_t mask, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < roots->count && used < size; i++) {
        if (mask & 1u << i)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? "," : "", root_label(roots, i));
    }
    if (!text[0])
        strcpy(text, "-");
}

static const struct inventory_version *latest(const struct inventory *inventory, size_t *ret_complete) {
    const struct inventory_version *newest = NULL;
    *ret_complete = 0;
    for (size_t i = 0; i < inventory->count; i++) {
        if (inventory->versions[i].complete) {
            newest = &inventory->versions[i];
            ++*ret_complete;
        }
    }
    return newest;
}

static int list_job(const struct roots *roots, const char *name, uint32_t mask, struct table *table, json_t *list) {
    CLEANUP(inventory_free) struct inventory inventory = {0};
    char where[512], bytes[FORMAT_MAX], age[FORMAT_MAX];
    int status = inventory_load(roots, name, &inventory);
    if (status != STATUS_OK || (!inventory.count && !inventory.generation_count)) /* some directory */
        return status;
    size_t complete;
    const struct inventory_version *newest = latest(&inventory, &complete);
    if (list) {
        json_t *job = json_pack("{s:s, s:I, s:I, s:o}", "job", name, "versions", (json_int_t)inventory.count,
                                "complete", (json_int_t)complete, "roots", labels_json(roots, mask));
        if (newest)
            json_object_set_new(job, "latest",
                                json_pack("{s:I, s:I, s:I, s:I}", "generation", (json_int_t)newest->id.generation,
                                          "step", (json_int_t)newest->id.step, "bytes",
                                          (json_int_t)newest->summary.bytes, "created_ns",
                                          (json_int_t)newest->summary.created_ns));
        json_array_append_new(list, job);
        return STATUS_OK;
    }
    labels_text(roots, mask, where, sizeof where);
    table_cell(table, "%s", name);
    table_cell(table, "%zu", complete);
    if (newest) {
        table_cell(table, "%" PRIu64 "/%" PRIu64, newest->id.generation, newest->id.step);
        table_cell(table, "%s", format_bytes(newest->summary.bytes, bytes));
        table_cell(table, "%s", format_age(newest->summary.created_ns, age));
    } else {
        for (int i = 0; i < 3; i++)
            table_cell(table, "-");
    }
    table_cell(table, "%s", where);
    return STATUS_OK;
}

static int list_jobs(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(jobs_free) struct jobs jobs = {0};
    CLEANUP(table_deinit) struct table table = {0};
    int status = roots_open(ctl, NULL, &roots);
    if (status == STATUS_OK)
        status = jobs_load(&roots, &jobs);
    json_t *list = ctl->json ? json_array() : NULL;
    table_init(&table, "JOB|>COMPLETE|>LATEST|>BYTES|>AGE|WHERE");
    for (size_t i = 0; status == STATUS_OK && i < jobs.count; i++)
        status = list_job(&roots, jobs.names[i], jobs.roots[i], &table, list);
    if (status != STATUS_OK || !ctl->json) {
        json_decref(list);
        if (status == STATUS_OK)
            table_print(&table, stdout);
        return status;
    }
    return ctl_print_json(json_pack("{s:o}", "jobs", list));
}

/* ---- one job ---- */

/* What the version is, where it is not simply complete. */
static void note(const struct inventory *inventory, const struct inventory_version *version, char ret_note[64]) {
    const struct catalog_generation *generation = inventory_generation(inventory, version->id.generation);
    ret_note[0] = '\0';
    if (version->pinned)
        strcpy(ret_note, "pinned");
    if (version->complete)
        return;
    size_t used = strlen(ret_note);
    if (generation)
        snprintf(ret_note + used, 64 - used, "%sINCOMPLETE: %" PRIu32 " of %" PRIu32 " parts", used ? ", " : "",
                 version->parts, generation->run.world);
    else
        snprintf(ret_note + used, 64 - used, "%sINCOMPLETE: %" PRIu32 " parts", used ? ", " : "", version->parts);
}

static void print_versions(const struct inventory *inventory) {
    CLEANUP(table_deinit) struct table table = {0};
    table_init(&table, ">VERSION|>RANKS|>TENSORS|>BYTES|>AGE|WHERE|");
    for (size_t i = inventory->count; i-- > 0;) {
        const struct inventory_version *version = &inventory->versions[i];
        char where[512], remark[64], bytes[FORMAT_MAX], age[FORMAT_MAX];
        labels_text(inventory->roots, version->complete ? version->complete : version->present, where, sizeof where);
        note(inventory, version, remark);
        table_cell(&table, "%" PRIu64 "/%" PRIu64, version->id.generation, version->id.step);
        if (version->complete) {
            table_cell(&table, "%" PRIu32, version->summary.world);
            table_cell(&table, "%" PRIu64, version->summary.tensors);
            table_cell(&table, "%s", format_bytes(version->summary.bytes, bytes));
            table_cell(&table, "%s", format_age(version->summary.created_ns, age));
        } else {
            for (int k = 0; k < 4; k++)
                table_cell(&table, "-");
        }
        table_cell(&table, "%s", where);
        table_cell(&table, "%s", remark);
    }
    table_print(&table, stdout);
}

/* The generations that some root has a run record of, each once; ascending. */
static size_t generations(const struct inventory *inventory, const struct catalog_generation **list, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < inventory->roots->count; i++) {
        const struct catalog *catalog = &inventory->catalogs[i];
        for (size_t k = 0; k < catalog->generation_count; k++) {
            const struct catalog_generation *generation = &catalog->generations[k];
            size_t at = 0;
            while (at < count && list[at]->generation < generation->generation)
                at++;
            bool known = at < count && list[at]->generation == generation->generation;
            if (!generation->has_run || known || count == size)
                continue;
            memmove(list + at + 1, list + at, (count - at) * sizeof *list);
            list[at] = generation;
            count++;
        }
    }
    return count;
}

static void print_generations(const struct catalog_generation *const *list, size_t count) {
    CLEANUP(table_deinit) struct table table = {0};
    table_init(&table, ">GENERATION|RESUMED FROM|>RANKS|HOST|>PID|RUN|>LAST SEEN|");
    for (size_t i = count; i-- > 0;) {
        const struct run_record *run = &list[i]->run;
        char age[FORMAT_MAX];
        table_cell(&table, "%" PRIu64, list[i]->generation);
        if (run->resumes)
            table_cell(&table, "%" PRIu64 "/%" PRIu64, run->resume_generation, run->resume_step);
        else
            table_cell(&table, "a fresh start");
        table_cell(&table, "%" PRIu32, run->world);
        table_cell(&table, "%s", run->host);
        table_cell(&table, "%" PRIu32, run->pid);
        table_cell(&table, "%s", run->run_id);
        table_cell(&table, "%s", format_age((uint64_t)list[i]->touched_ns, age));
        table_cell(&table, "%s", list[i]->run_ended ? "ended" : "");
    }
    table_print(&table, stdout);
}

static json_t *version_json(const struct inventory *inventory, const struct inventory_version *version) {
    json_t *json = json_pack("{s:I, s:I, s:b, s:b, s:o, s:o}", "generation", (json_int_t)version->id.generation, "step",
                             (json_int_t)version->id.step, "complete", version->complete != 0, "pinned",
                             version->pinned != 0, "complete_in", labels_json(inventory->roots, version->complete),
                             "present_in", labels_json(inventory->roots, version->present));
    if (version->complete) {
        json_object_set_new(json, "world", json_integer(version->summary.world));
        json_object_set_new(json, "tensors", json_integer((json_int_t)version->summary.tensors));
        json_object_set_new(json, "bytes", json_integer((json_int_t)version->summary.bytes));
        json_object_set_new(json, "created_ns", json_integer((json_int_t)version->summary.created_ns));
    } else {
        json_object_set_new(json, "parts", json_integer(version->parts));
    }
    return json;
}

static json_t *generation_json(const struct catalog_generation *generation) {
    const struct run_record *run = &generation->run;
    json_t *json =
        json_pack("{s:I, s:s, s:s, s:I, s:I, s:I, s:b}", "generation", (json_int_t)generation->generation, "run_id",
                  run->run_id, "host", run->host, "pid", (json_int_t)run->pid, "world", (json_int_t)run->world,
                  "touched_ns", (json_int_t)generation->touched_ns, "ended", generation->run_ended);
    json_object_set_new(json, "resumes",
                        run->resumes ? json_pack("{s:I, s:I}", "generation", (json_int_t)run->resume_generation, "step",
                                                 (json_int_t)run->resume_step)
                                     : json_null());
    return json;
}

static int list_versions(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    int status = inventory_open(ctl, &roots, &inventory);
    if (status != STATUS_OK)
        return status;
    size_t most = 1;
    for (size_t i = 0; i < roots.count; i++)
        most += inventory.catalogs[i].generation_count;
    CLEANUP(freep) const struct catalog_generation **list = calloc(most, sizeof *list);
    if (!list)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    size_t count = generations(&inventory, list, most);
    if (ctl->json) {
        json_t *versions = json_array(), *runs = json_array();
        for (size_t i = inventory.count; i-- > 0;)
            json_array_append_new(versions, version_json(&inventory, &inventory.versions[i]));
        for (size_t i = count; i-- > 0;)
            json_array_append_new(runs, generation_json(list[i]));
        return ctl_print_json(
            json_pack("{s:s, s:o, s:o}", "job", inventory.job, "versions", versions, "generations", runs));
    }
    print_versions(&inventory);
    if (count && inventory.count)
        putchar('\n');
    print_generations(list, count);
    return STATUS_OK;
}

int verb_ls(struct ctl *ctl) { return ctl->word_count ? list_versions(ctl) : list_jobs(ctl); }
