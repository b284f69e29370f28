/* SPDX-License-Identifier: Apache-2.0 */
#include "tiers/posix-probe.h"

#include "tiers/tier.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>

/*
 * File systems are not asked what they are able to do, they are tried: O_DIRECT opens on some that
 * then refuse the first write, fallocate is there on some mounts of a type and not on others, and
 * a FUSE file system is whatever its server makes of it. Only two things are told by the type: that
 * other nodes see the same files (nobody can try that alone), and that it is memory.
 */

static const struct {
    uint64_t type;
    const char *name;
    bool network;
} types[] = {
    {0x6969, "nfs", true},        {0x517b, "smb", true},
    {0xff534d42, "cifs", true},   {0xfe534d42, "smb2", true},
    {0x0bd00bd0, "lustre", true}, {0x47504653, "gpfs", true},
    {0x19830326, "beegfs", true}, {0x00c36400, "ceph", true},
    {0x65735546, "fuse", true}, /* dfuse, Weka, sshfs, virtiofs: nearly always somebody else's disk */
    {0x01021997, "9p", true},     {0x20030528, "orangefs", true},
    {0xaad7aaea, "panfs", true},  {0x01161970, "gfs2", true},
    {0x7461636f, "ocfs2", true},  {0x5346414f, "afs", true},
    {0x6b414653, "kafs", true},   {0x73757245, "coda", true},
    {0x013111a8, "ibrix", true},  {0xa501fcf5, "vxfs", true},
    {0x01021994, "tmpfs", false}, {0x858458f6, "ramfs", false},
};

bool posix_type_is_network(uint64_t type) {
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        if (types[i].type == type)
            return types[i].network;
    }
    return false;
}

const char *posix_type_name(uint64_t type) {
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        if (types[i].type == type)
            return types[i].name;
    }
    return "local";
}

static bool type_is_memory(uint64_t type) { return type == 0x01021994 || type == 0x858458f6; }

/* A write and a read of one block through O_DIRECT. */
static bool direct_works(int root_fd, const char *file) {
    CLEANUP(closep) int fd = openat(root_fd, file, O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return false;
    CLEANUP(freep) char *block = aligned_alloc(TIER_ALIGNMENT, TIER_ALIGNMENT);
    if (!block)
        return false;
    memset(block, 0x5a, TIER_ALIGNMENT);
    if (pwrite(fd, block, TIER_ALIGNMENT, 0) != TIER_ALIGNMENT)
        return false;
    memset(block, 0, TIER_ALIGNMENT);
    return pread(fd, block, TIER_ALIGNMENT, 0) == TIER_ALIGNMENT && block[TIER_ALIGNMENT - 1] == 0x5a;
}

/* Both ways in which posix.c can make a name only if it is new. */
static bool link_works(int root_fd, const char *from, const char *to) {
    if (linkat(root_fd, from, root_fd, to, 0) == 0)
        return unlinkat(root_fd, to, 0) == 0;
    return renameat2(root_fd, from, root_fd, to, RENAME_NOREPLACE) == 0 &&
           renameat2(root_fd, to, root_fd, from, RENAME_NOREPLACE) == 0;
}

int posix_probe(int root_fd, const char *name, const char *root, bool buffered, unsigned *ret_capabilities,
                struct problem *problem) {
    unsigned capabilities = 0;
    struct statfs file_system;
    if (fstatfs(root_fd, &file_system) < 0)
        return problem_set(problem, -errno, "tier %s: cannot examine %s: %s", name, root, strerror(errno));
    uint64_t type = (uint64_t)file_system.f_type & 0xffffffff;
    if (posix_type_is_network(type))
        capabilities |= TIER_SHARED;
    if (!type_is_memory(type))
        capabilities |= TIER_SURVIVES_REBOOT;

    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    char file[64], other[72];
    snprintf(file, sizeof file, ".probe-%lx-%lx-%lx", (long)getpid(), (long)now.tv_sec, now.tv_nsec);
    snprintf(other, sizeof other, "%s-2", file);
    CLEANUP(closep) int fd = openat(root_fd, file, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return problem_set(problem, -errno,
                           "tier %s: cannot write into %s: %s; give the user that runs ckptd write access, or "
                           "configure another root",
                           name, root, strerror(errno));
    if (fallocate(fd, 0, 0, TIER_ALIGNMENT) == 0)
        capabilities |= TIER_PREALLOCATE;
    if (!buffered && direct_works(root_fd, file))
        capabilities |= TIER_DIRECT;
    if (link_works(root_fd, file, other))
        capabilities |= TIER_LINK;
    if (renameat(root_fd, file, root_fd, other) == 0 && renameat(root_fd, other, root_fd, file) == 0)
        capabilities |= TIER_ATOMIC_RENAME;
    unlinkat(root_fd, file, 0);
    unlinkat(root_fd, other, 0);
    unsigned needed = TIER_LINK | TIER_ATOMIC_RENAME;
    if ((capabilities & needed) != needed)
        return problem_set(problem, -ENOTSUP,
                           "tier %s: the file system of %s can neither link nor rename without replacing, so "
                           "nothing can be decided there; configure another root",
                           name, root);
    *ret_capabilities = capabilities;
    return 0;
}
