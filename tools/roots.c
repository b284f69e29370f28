/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/roots.h"

#include "tools/daemon.h"

#include <errno.h>
#include <limits.h>
#include <sys/stat.h>

void roots_close(struct roots *roots) {
    for (size_t i = 0; i < roots->count; i++)
        tier_free(roots->items[i].tier);
    json_decref(roots->status);
    *roots = (struct roots){0};
}

const char *root_label(const struct roots *roots, size_t i) {
    const struct tier *tier = roots->items[i].tier;
    return roots->source == ROOTS_GIVEN ? tier->root : tier->name;
}

static bool is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static int add(struct roots *roots, const char *name, const char *path, enum level level,
               const struct config_tier *config, const char *job) {
    char real[PATH_MAX];
    if (roots->count == ROOTS_MAX)
        return ctl_fail(STATUS_USAGE, "more than %d roots", ROOTS_MAX);
    if (!realpath(path, real))
        return ctl_fail(STATUS_STORAGE, "%s: %s", path, strerror(errno));
    for (size_t i = 0; i < roots->count; i++) {
        if (strcmp(roots->items[i].tier->root, real) == 0)
            return STATUS_OK;
    }
    struct tier_posix_options options = {
        .name = name,
        .root = real,
        .level = level,
        .allow_network = true, /* whoever configured the root has decided that */
        .buffered = config && config->buffered,
        .directory_mode = config ? config->directory_mode : 0,
        .file_mode = config ? config->file_mode : 0,
    };
    struct problem problem = PROBLEM_NONE;
    struct root *root = &roots->items[roots->count];
    int r = tier_posix_new(&options, &root->tier, &problem);
    if (r < 0)
        return ctl_fail(STATUS_STORAGE, "%s", problem_text(&problem, r));
    root->tier->hook = point_hook_from_environment();
    snprintf(root->job, sizeof root->job, "%s", job ? job : "");
    roots->count++;
    return STATUS_OK;
}

static int open_given(struct ctl *ctl, struct roots *roots) {
    roots->source = ROOTS_GIVEN;
    for (size_t i = 0; i < ctl->root_count; i++) {
        char name[32];
        if (!is_directory(ctl->roots[i]))
            return ctl_fail(STATUS_ABSENT, "--root %s: no such directory", ctl->roots[i]);
        snprintf(name, sizeof name, "root%zu", i + 1);
        int status = add(roots, name, ctl->roots[i], i == 0 ? LEVEL_LOCAL : LEVEL_GLOBAL, NULL, NULL);
        if (status != STATUS_OK)
            return status;
    }
    return STATUS_OK;
}

static int open_status(struct roots *roots, json_t *status, const char *job) {
    size_t i;
    json_t *tier;
    roots->source = ROOTS_DAEMON;
    roots->status = status;
    json_array_foreach(json_list(status, "tiers"), i, tier) {
        const char *path = json_text(tier, "root", ""), *of = json_text(tier, "job", "");
        if (!path[0] || (job && of[0] && strcmp(of, job) != 0))
            continue;
        bool local = strcmp(json_text(tier, "level", ""), "LOCAL") == 0;
        if (!is_directory(path)) {
            ctl_warn("tier %s: %s is not there", json_text(tier, "name", "?"), path);
            continue;
        }
        int r = add(roots, json_text(tier, "name", "tier"), path, local ? LEVEL_LOCAL : LEVEL_GLOBAL, NULL, of);
        if (r != STATUS_OK)
            return r;
    }
    if (!roots->count)
        return ctl_fail(STATUS_ABSENT, "the daemon has no tier with files; name one with --root DIR");
    return STATUS_OK;
}

static int open_config(struct ctl *ctl, struct roots *roots) {
    struct config config;
    struct problem problem = PROBLEM_NONE;
    int r = config_load(ctl->config, &config, &problem);
    if (r < 0)
        return ctl_fail(STATUS_USAGE, "%s", problem_text(&problem, r));
    roots->source = ROOTS_CONFIG;
    for (size_t i = 0; i < config.tier_count; i++) {
        const struct config_tier *tier = &config.tiers[i];
        int status = is_directory(tier->path) ? add(roots, tier->name, tier->path, tier->level, tier, NULL) : STATUS_OK;
        if (status != STATUS_OK)
            return status;
    }
    const char *directory = getenv("CKPT_DIR");
    if (directory && directory[0] && is_directory(directory)) {
        int status = add(roots, "parallel", directory, LEVEL_GLOBAL, NULL, NULL);
        if (status != STATUS_OK)
            return status;
    }
    if (!roots->count)
        return ctl_fail(STATUS_ABSENT, "no daemon is running, and no tier of %s exists (%s); name one with --root DIR",
                        config.file[0] ? config.file : "the defaults", config.tiers[0].path);
    return STATUS_OK;
}

int roots_open(struct ctl *ctl, const char *job, struct roots *ret_roots) {
    *ret_roots = (struct roots){0};
    if (ctl->root_count)
        return open_given(ctl, ret_roots);
    json_t *status = NULL;
    struct problem problem = PROBLEM_NONE;
    int r = daemon_status(ctl, &status, &problem);
    if (r == 0)
        return open_status(ret_roots, status, job);
    if (r == CONNECTION_E_ABSENT)
        return open_config(ctl, ret_roots);
    return daemon_fail(r, &problem);
}
