/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory this process may still take: the machine's, and its control group's. */
#include "daemon/pool.h"

#include <limits.h>

static bool read_number(const char *path, uint64_t *ret_number) {
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    char text[64];
    if (!file || !fgets(text, sizeof text, file))
        return false;
    char *end;
    unsigned long long number = strtoull(text, &end, 10);
    if (end == text) /* "max" */
        return false;
    *ret_number = number;
    return true;
}

static uint64_t machine_available(void) {
    CLEANUP(fclosep) FILE *file = fopen("/proc/meminfo", "re");
    char line[256];
    while (file && fgets(line, sizeof line, file)) {
        unsigned long long kib;
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            return KIB(kib);
    }
    long pages = sysconf(_SC_AVPHYS_PAGES);
    return pages > 0 ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE) : MIB(256);
}

/* The least of limit - usage along the path of groups from `leaf` up to the mount point. */
static uint64_t group_available(const char *mount, const char *leaf, const char *limit_name, const char *usage_name) {
    uint64_t available = UINT64_MAX;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s%s", mount, leaf);
    size_t mount_length = strlen(mount);
    for (;;) {
        char file[PATH_MAX + 64];
        uint64_t limit, usage;
        snprintf(file, sizeof file, "%s/%s", path, limit_name);
        bool limited = read_number(file, &limit);
        snprintf(file, sizeof file, "%s/%s", path, usage_name);
        if (limited && limit < (UINT64_C(1) << 60) && read_number(file, &usage))
            available = min_u64(available, limit > usage ? limit - usage : 0);
        char *slash = strrchr(path, '/');
        if (!slash || (size_t)(slash - path) < mount_length)
            return available;
        *slash = '\0';
    }
}

uint64_t pool_memory_available(void) {
    uint64_t available = machine_available();
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
        if (!*controllers)
            available = min_u64(available, group_available("/sys/fs/cgroup", leaf, "memory.max", "memory.current"));
        else if (strcmp(controllers, "memory") == 0)
            available = min_u64(available, group_available("/sys/fs/cgroup/memory", leaf, "memory.limit_in_bytes",
                                                           "memory.usage_in_bytes"));
    }
    return available;
}
