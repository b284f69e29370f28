/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/inventory.h"

#include <errno.h>
#include <inttypes.h>

void inventory_free(struct inventory *inventory) {
    for (size_t i = 0; inventory->roots && i < inventory->roots->count; i++)
        catalog_deinit(&inventory->catalogs[i]);
    free(inventory->versions);
    *inventory = (struct inventory){0};
}

static int compare(const void *a, const void *b) {
    const struct inventory_version *one = a, *other = b;
    return version_compare(one->id, other->id);
}

/* How many manifests lie in a version's directory. */
static uint32_t count_parts(struct tier *tier, const char *job, struct version_id version) {
    char directory[256], path[TIER_PATH_MAX];
    if (job_escape(job, directory, NULL) < 0)
        return 0;
    layout_version(directory, version, path);
    CLEANUP(tier_entries_deinit) struct tier_entries entries = {0};
    if (tier_list(tier, path, &entries) != 0)
        return 0;
    uint32_t parts = 0, rank;
    for (size_t i = 0; i < entries.count; i++)
        parts += layout_parse_manifest(entries.items[i].name, &rank);
    return parts;
}

static void merge(struct inventory *inventory, size_t root) {
    const struct catalog *catalog = &inventory->catalogs[root];
    uint32_t bit = UINT32_C(1) << root;
    size_t before = inventory->count;
    for (size_t i = 0; i < catalog->version_count; i++) {
        const struct catalog_version *found = &catalog->versions[i];
        struct inventory_version key = {.id = found->id};
        struct inventory_version *version =
            before ? bsearch(&key, inventory->versions, before, sizeof key, compare) : NULL;
        if (!version) {
            version = &inventory->versions[inventory->count++];
            *version = key;
        }
        version->present |= bit;
        version->pinned |= found->pinned ? bit : 0;
        if (found->complete && !version->complete)
            version->summary = found->summary;
        version->complete |= found->complete ? bit : 0;
    }
    if (inventory->count)
        qsort(inventory->versions, inventory->count, sizeof *inventory->versions, compare);
}

int inventory_load(const struct roots *roots, const char *job, struct inventory *ret_inventory) {
    struct inventory inventory = {.roots = roots, .job = job};
    size_t versions = 0;
    for (size_t i = 0; i < roots->count; i++) {
        struct problem problem = PROBLEM_NONE;
        int r = catalog_scan(roots->items[i].tier, job, &inventory.catalogs[i], &problem);
        if (r != 0) {
            inventory_free(&inventory);
            return ctl_fail(r == -EINVAL ? STATUS_USAGE : ctl_status(r), "%s", problem_text(&problem, r));
        }
        const struct catalog *catalog = &inventory.catalogs[i];
        versions += catalog->version_count;
        inventory.generation_count += catalog->generation_count;
        if (catalog->bad)
            ctl_warn("%s: %" PRIu64 " entries of job %s cannot be read; the first: %s", root_label(roots, i),
                     catalog->bad, job, problem_text(&catalog->first_bad, -EBADMSG));
    }
    inventory.versions = calloc(versions + 1, sizeof *inventory.versions);
    if (!inventory.versions) {
        inventory_free(&inventory);
        return ctl_fail(STATUS_STORAGE, "out of memory");
    }
    for (size_t i = 0; i < roots->count; i++)
        merge(&inventory, i);
    for (size_t v = 0; v < inventory.count; v++) {
        struct inventory_version *version = &inventory.versions[v];
        for (size_t i = 0; !version->complete && i < roots->count; i++) {
            uint32_t parts = version->present & 1u << i ? count_parts(roots->items[i].tier, job, version->id) : 0;
            version->parts = parts > version->parts ? parts : version->parts;
        }
    }
    *ret_inventory = inventory;
    return STATUS_OK;
}

int inventory_open(struct ctl *ctl, struct roots *ret_roots, struct inventory *ret_inventory) {
    *ret_inventory = (struct inventory){0};
    int status = roots_open(ctl, ctl->words[0], ret_roots);
    if (status == STATUS_OK)
        status = inventory_load(ret_roots, ctl->words[0], ret_inventory);
    if (status == STATUS_OK && !ret_inventory->count && !ret_inventory->generation_count)
        return ctl_fail(STATUS_ABSENT, "no root has a job \"%s\"", ctl->words[0]);
    return status;
}

static bool parse_version(const char *text, struct version_id *ret_id, bool *ret_exact) {
    char generation[32];
    const char *slash = strchr(text, '/');
    *ret_exact = slash != NULL;
    if (!slash)
        return layout_parse_number(text, &ret_id->step);
    if ((size_t)(slash - text) >= sizeof generation)
        return false;
    memcpy(generation, text, (size_t)(slash - text));
    generation[slash - text] = '\0';
    return layout_parse_number(generation, &ret_id->generation) && layout_parse_number(slash + 1, &ret_id->step);
}

int inventory_find(const struct inventory *inventory, const char *text, const struct inventory_version **ret_version) {
    struct version_id id = {0};
    bool exact = false, latest = !text || strcmp(text, "latest") == 0;
    if (!latest && !parse_version(text, &id, &exact))
        return ctl_fail(STATUS_USAGE, "\"%s\" is no version; write GENERATION/STEP, STEP, or latest", text);
    for (size_t i = inventory->count; i-- > 0;) {
        const struct inventory_version *version = &inventory->versions[i];
        bool wanted = latest ? version->complete != 0
                             : version->id.step == id.step && (!exact || version->id.generation == id.generation);
        if (wanted) {
            *ret_version = version;
            return STATUS_OK;
        }
    }
    return latest ? ctl_fail(STATUS_ABSENT, "job %s has no complete version", inventory->job)
                  : ctl_fail(STATUS_ABSENT, "job %s has no version %s", inventory->job, text);
}

const struct catalog_generation *inventory_generation(const struct inventory *inventory, uint64_t generation) {
    for (size_t i = inventory->roots->count; i-- > 0;) {
        const struct catalog *catalog = &inventory->catalogs[i];
        for (size_t k = 0; k < catalog->generation_count; k++) {
            if (catalog->generations[k].generation == generation && catalog->generations[k].has_run)
                return &catalog->generations[k];
        }
    }
    return NULL;
}

int inventory_complete(const struct inventory *inventory, const struct inventory_version *version,
                       struct complete *ret_complete) {
    struct problem problem = PROBLEM_NONE;
    for (size_t i = 0; i < inventory->roots->count; i++) {
        if (!(version->complete & 1u << i))
            continue;
        int r =
            catalog_read_complete(inventory->roots->items[i].tier, inventory->job, version->id, ret_complete, &problem);
        if (r == 0)
            return STATUS_OK;
        ctl_warn("%s: %s", root_label(inventory->roots, i), problem_text(&problem, r < 0 ? r : -ENOENT));
        problem = PROBLEM_NONE;
    }
    return ctl_fail(version->complete ? STATUS_PROBLEM : STATUS_ABSENT, "version %" PRIu64 "/%" PRIu64 " of job %s %s",
                    version->id.generation, version->id.step, inventory->job,
                    version->complete ? "has no readable index" : "is not complete anywhere");
}
