/* SPDX-License-Identifier: Apache-2.0 */
/* `pin`, `unpin`, `rm`: what an operator decides about a version, in every root that has it. */
#include "tiers/retention.h"
#include "tools/daemon.h"
#include "tools/inventory.h"

#include <errno.h>
#include <inttypes.h>

#define PIN_DEFAULT "operator"

static int find(struct ctl *ctl, struct roots *roots, struct inventory *inventory,
                const struct inventory_version **ret_version) {
    int status = inventory_open(ctl, roots, inventory);
    return status == STATUS_OK ? inventory_find(inventory, ctl->words[1], ret_version) : status;
}

static int report(struct ctl *ctl, const char *done, const struct inventory_version *version, size_t count) {
    if (ctl->json)
        return ctl_print_json(json_pack("{s:s, s:I, s:I, s:s, s:I}", "job", ctl->words[0], "generation",
                                        (json_int_t)version->id.generation, "step", (json_int_t)version->id.step,
                                        "done", done, "roots", (json_int_t)count));
    printf("%s %" PRIu64 "/%" PRIu64 " in %zu root%s\n", done, version->id.generation, version->id.step, count,
           count == 1 ? "" : "s");
    return STATUS_OK;
}

int verb_pin(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    const struct inventory_version *version;
    int status = find(ctl, &roots, &inventory, &version);
    size_t pinned = 0;
    for (size_t i = 0; status == STATUS_OK && i < roots.count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (!(version->present & 1u << i))
            continue;
        int r = retention_pin(roots.items[i].tier, inventory.job, version->id, ctl->name ? ctl->name : PIN_DEFAULT, 0,
                              ctl_nonce(), &problem);
        if (r < 0)
            status = ctl_fail(r == -EINVAL ? STATUS_USAGE : ctl_status(r), "%s", problem_text(&problem, r));
        pinned += r == 0;
    }
    if (status != STATUS_OK)
        return status;
    if (!pinned)
        return ctl_fail(STATUS_ABSENT, "the version went away meanwhile");
    return report(ctl, "pinned", version, pinned);
}

int verb_unpin(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    const char *name = ctl->name ? ctl->name : PIN_DEFAULT;
    const struct inventory_version *version;
    int status = find(ctl, &roots, &inventory, &version);
    size_t unpinned = 0;
    for (size_t i = 0; status == STATUS_OK && i < roots.count; i++) {
        struct problem problem = PROBLEM_NONE;
        if (!(version->present & 1u << i))
            continue;
        int r = retention_unpin(roots.items[i].tier, inventory.job, version->id, name, &problem);
        if (r < 0)
            status = ctl_fail(r == -EINVAL ? STATUS_USAGE : ctl_status(r), "%s", problem_text(&problem, r));
        unpinned += r == 0;
    }
    if (status != STATUS_OK)
        return status;
    if (!unpinned)
        return ctl_fail(STATUS_ABSENT, "%s has no pin \"%s\"", ctl->words[1], name);
    return report(ctl, "unpinned", version, unpinned);
}

/* A run that resumed from the version and has none of its own yet would have nothing to go back to. */
static int check_resumed(const struct inventory *inventory, const struct inventory_version *version) {
    for (size_t i = 0; i < inventory->roots->count; i++) {
        const struct catalog *catalog = &inventory->catalogs[i];
        for (size_t k = 0; k < catalog->generation_count; k++) {
            const struct catalog_generation *generation = &catalog->generations[k];
            struct version_id resume = {generation->run.resume_generation, generation->run.resume_step};
            if (!generation->has_run || !generation->run.resumes || version_compare(resume, version->id) != 0)
                continue;
            bool own = false;
            for (size_t v = 0; v < inventory->count; v++)
                own |=
                    inventory->versions[v].complete && inventory->versions[v].id.generation >= generation->generation;
            if (!own)
                return ctl_fail(STATUS_BUSY,
                                "generation %" PRIu64 " resumed from %" PRIu64 "/%" PRIu64
                                " and has no complete version of its own yet; --force removes it all the same",
                                generation->generation, version->id.generation, version->id.step);
        }
    }
    return STATUS_OK;
}

static int check_in_flight(const struct inventory *inventory, const struct inventory_version *version) {
    size_t i;
    json_t *item;
    json_array_foreach(json_list(inventory->roots->status, "versions"), i, item) {
        if (strcmp(json_text(item, "job", ""), inventory->job) == 0 &&
            json_number(item, "generation") == version->id.generation && json_number(item, "step") == version->id.step)
            return ctl_fail(STATUS_BUSY, "the daemon is still draining %" PRIu64 "/%" PRIu64, version->id.generation,
                            version->id.step);
    }
    return STATUS_OK;
}

static int check_removable(struct ctl *ctl, const struct inventory *inventory,
                           const struct inventory_version *version) {
    if (version->pinned)
        return ctl_fail(STATUS_BUSY, "version %" PRIu64 "/%" PRIu64 " is pinned; ckptctl unpin takes the pin away",
                        version->id.generation, version->id.step);
    int status = check_in_flight(inventory, version);
    if (status == STATUS_OK && !ctl->force)
        status = check_resumed(inventory, version);
    return status;
}

int verb_rm(struct ctl *ctl) {
    CLEANUP(roots_close) struct roots roots = {0};
    CLEANUP(inventory_free) struct inventory inventory = {0};
    const struct inventory_version *version;
    int status = find(ctl, &roots, &inventory, &version);
    if (status == STATUS_OK)
        status = check_removable(ctl, &inventory, version);
    if (status != STATUS_OK)
        return status;
    /* The deepest first: what a nearer root still has can be drained again, not the other way round. */
    size_t removed = 0;
    for (size_t i = roots.count; i-- > 0;) {
        struct problem problem = PROBLEM_NONE;
        if (!(version->present & 1u << i))
            continue;
        int r = retention_remove(roots.items[i].tier, inventory.job, version->id, ctl_nonce(), &problem);
        if (r < 0)
            return ctl_fail(ctl_status(r), "%s", problem_text(&problem, r));
        removed += r == 0;
    }
    return report(ctl, "removed", version, removed);
}
