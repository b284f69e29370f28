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

/* A group's limit holds for all below it, so the whole way up counts. */
static uint64_t group_left(const char *mount, const char *leaf, const char *limit_name, const char *usage_name) {
    char path[PATH_MAX];
    uint64_t left = UINT64_MAX, limit, usage;
    if ((size_t)snprintf(path, sizeof path, "%s%s", mount, leaf) >= sizeof path)
        return left;
    while (strlen(path) >= strlen(mount)) {
        if (read_number(path, limit_name, &limit) && limit < NO_LIMIT && read_number(path, usage_name, &usage))
            left = min_u64(left, limit > usage ? limit - usage : 0);
        *strrchr(path, '/') = '\0';
    }
    return left;
}

void memory_look(struct memory *ret_memory) {
    struct memory memory = {.available = machine_available(), .group_left = UINT64_MAX, .group_kind = "none"};
    CLEANUP(fclosep) FILE *file = fopen("/proc/self/cgroup", "re");
    char line[PATH_MAX];
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *leaf = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!leaf)
            continue;
        *leaf++ = '\0';
        controllers++;
        if (!controllers[0]) {
            memory.group_kind = "cgroup v2";
            memory.group_left =
                min_u64(memory.group_left, group_left("/sys/fs/cgroup", leaf, "memory.max", "memory.current"));
        } else if (strcmp(controllers, "memory") == 0) {
            memory.group_kind = "cgroup v1";
            memory.group_left =
                min_u64(memory.group_left,
                        group_left("/sys/fs/cgroup/memory", leaf, "memory.limit_in_bytes", "memory.usage_in_bytes"));
        }
    }
    *ret_memory = memory;
}

uint64_t memory_available(void) {
    struct memory memory;
    memory_look(&memory);
    return min_u64(memory.available, memory.group_left);
}
