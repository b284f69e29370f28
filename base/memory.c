/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <limits.h>

#define NO_LIMIT (UINT64_C(1) << 60) /* cgroup v1 says "none" by a number about as large as can be */

static bool read_number(const char *directory, const char *name, uint64_t *ret_number) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path)
        return false;
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    unsigned long long number;
    if (!file || fscanf(file, "%llu", &number) != 1) /* "max" is no number */
        return false;
    *ret_number = number;
    return true;
}

static uint64_t machine_available(void) {
    CLEANUP(fclosep) FILE *file = fopen("/proc/meminfo", "re");
    char line[256];
    unsigned long long kib;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            return KIB(kib);
    }
    return 0;
}

/* A number of memory.stat; 0 if it is not there. */
static uint64_t read_statistic(const char *directory, const char *name) {
    char path[PATH_MAX], line[128], key[64];
    if ((size_t)snprintf(path, sizeof path, "%s/memory.stat", directory) >= sizeof path)
        return 0;
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    unsigned long long number;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %llu", key, &number) == 2 && strcmp(key, name) == 0)
            return number;
    return 0;
}

/* What the two kinds of hierarchy call things. */
struct hierarchy {
    const char *kind;
    const char *file_system, *option; /* of its mount; NULL: any */
    const char *limit, *usage, *reclaimable;
};

/* A group's limit holds for all below it, so the whole way up counts. Cached files count as used there, though the
 * kernel drops them when memory is wanted: those that nobody has looked at twice are as good as free. */
static uint64_t group_left(const struct hierarchy *hierarchy, const char *mount, const char *leaf) {
    char path[PATH_MAX];
    uint64_t left = UINT64_MAX, limit, usage;
    if ((size_t)snprintf(path, sizeof path, "%s%s", mount, leaf) >= sizeof path)
        return left;
    while (strlen(path) >= strlen(mount)) {
        if (read_number(path, hierarchy->limit, &limit) && limit < NO_LIMIT &&
            read_number(path, hierarchy->usage, &usage)) {
            usage -= min_u64(usage, read_statistic(path, hierarchy->reclaimable));
            left = min_u64(left, limit > usage ? limit - usage : 0);
        }
        *strrchr(path, '/') = '\0';
    }
    return left;
}

/* Is `option` one of these, separated by commas? */
static bool has_option(char *options, const char *option) {
    char *rest;
    for (char *one = strtok_r(options, ",\n", &rest); one; one = strtok_r(NULL, ",\n", &rest))
        if (strcmp(one, option) == 0)
            return true;
    return false;
}

/* Where the hierarchy is mounted, and which group lies there: in a container that is not the topmost one, while
 * /proc/self/cgroup counts from the top. Of several mounts the last counts, as it covers the others. */
static bool find_mount(FILE *mounts, const struct hierarchy *hierarchy, char ret_root[PATH_MAX],
                       char ret_mount[PATH_MAX]) {
    char line[3 * PATH_MAX], root[PATH_MAX], mount[PATH_MAX];
    bool found = false;
    rewind(mounts);
    while (fgets(line, sizeof line, mounts)) {
        char file_system[64], options[1024];
        const char *end = strstr(line, " - ");
        if (!end || sscanf(line, "%*d %*d %*s %4095s %4095s", root, mount) != 2 ||
            sscanf(end, " - %63s %*s %1023s", file_system, options) != 2 ||
            strcmp(file_system, hierarchy->file_system) != 0 ||
            (hierarchy->option && !has_option(options, hierarchy->option)))
            continue;
        strcpy(ret_root, root);
        strcpy(ret_mount, mount);
        found = true;
    }
    return found;
}

/* The group's path below the mount; the mount itself if the group lies elsewhere (another namespace's). */
static const char *below_root(const char *leaf, const char *root) {
    size_t length = strcmp(root, "/") == 0 ? 0 : strlen(root);
    if (strncmp(leaf, root, length) != 0 || (leaf[length] != '/' && leaf[length]))
        return "";
    return strcmp(leaf + length, "/") == 0 ? "" : leaf + length;
}

static void look_at_group(struct memory *memory, FILE *mounts, const struct hierarchy *hierarchy, const char *leaf) {
    char root[PATH_MAX], mount[PATH_MAX];
    memory->group_kind = hierarchy->kind;
    if (find_mount(mounts, hierarchy, root, mount))
        memory->group_left = min_u64(memory->group_left, group_left(hierarchy, mount, below_root(leaf, root)));
}

void memory_look(struct memory *ret_memory) {
    static const struct hierarchy one = {
        "cgroup v1", "cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
    static const struct hierarchy two = {"cgroup v2", "cgroup2", NULL, "memory.max", "memory.current", "inactive_file"};
    struct memory memory = {.available = machine_available(), .group_left = UINT64_MAX, .group_kind = "none"};
    CLEANUP(fclosep) FILE *file = fopen("/proc/self/cgroup", "re");
    CLEANUP(fclosep) FILE *mounts = fopen("/proc/self/mountinfo", "re");
    char line[PATH_MAX];
    while (file && mounts && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *leaf = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!leaf)
            continue;
        *leaf++ = '\0';
        controllers++;
        if (!controllers[0])
            look_at_group(&memory, mounts, &two, leaf);
        else if (has_option(controllers, "memory"))
            look_at_group(&memory, mounts, &one, leaf);
    }
    *ret_memory = memory;
}

uint64_t memory_available(void) {
    struct memory memory;
    memory_look(&memory);
    return min_u64(memory.available, memory.group_left);
}
