/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the processes of one test know of each other: files in CUDA_STANDIN_DIR.
 *
 *     process-*    one for each process, a table of what device memory it holds, mapped by its owner. The owner keeps a
 *                  lock on it, which the kernel drops when it dies, however that comes: whoever adds up then removes
 * the file. Memory is counted once however many hold it, and so stays charged to importers when the exporter dies.
 *     export-*     what a legacy handle stands for
 *     lock         held while tables are added up and changed
 *     driver-lock  held in the slow parts of the driver
 *
 * All locks are of the kind that belongs to a process and is not inherited by its children.
 */
#include "tests/cuda-standin/standin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>

enum { HOLDINGS_MAX = 16384 };

struct holding {
    uint64_t id, size; /* id 0: free */
    int device;
    int is_context;
};

struct process {
    uint32_t n; /* of them were ever used */
    struct holding holdings[HOLDINGS_MAX];
};

static struct process *self;
static char self_name[64];
static int lock_fd = -1, driver_fd = -1, self_fd = -1;

static void path_of(char path[4096], const char *name) {
    snprintf(path, 4096, "%s/%s", standin.settings.directory, name);
}

static int file_open(const char *name, int flags) {
    char path[4096];
    path_of(path, name);
    return open(path, flags | O_CLOEXEC, 0600);
}

static int file_lock(int fd, short type, int command) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
    int result;
    do {
        result = fcntl(fd, command, &lock);
    } while (result < 0 && errno == EINTR);
    return result < 0 ? -errno : lock.l_type;
}

static void lock(void) { file_lock(lock_fd, F_WRLCK, F_SETLKW); }
static void unlock(void) { file_lock(lock_fd, F_UNLCK, F_SETLK); }
void registry_driver_lock(void) { file_lock(driver_fd, F_WRLCK, F_SETLKW); }
void registry_driver_unlock(void) { file_lock(driver_fd, F_UNLCK, F_SETLK); }

uint64_t registry_random(void) {
    uint64_t number;
    while (getrandom(&number, sizeof(number), 0) != sizeof(number) || !number)
        ;
    return number;
}

bool registry_has(const char *name) {
    char path[4096];
    path_of(path, name);
    return access(path, F_OK) == 0;
}

void registry_say(const char *name) {
    CLEANUP(closep) int fd = file_open(name, O_WRONLY | O_CREAT);
    if (fd < 0)
        fprintf(stderr, "cuda-standin: %s: %m\n", name);
}

void registry_append(const char *name, const char *line) {
    CLEANUP(closep) int fd = file_open(name, O_WRONLY | O_CREAT | O_APPEND);
    ssize_t length = (ssize_t)strlen(line);
    if (fd < 0 || write(fd, line, length) != length)
        fprintf(stderr, "cuda-standin: %s: %m\n", name);
}

CUresult registry_open(void) {
    lock_fd = file_open("lock", O_RDWR | O_CREAT);
    driver_fd = file_open("driver-lock", O_RDWR | O_CREAT);
    snprintf(self_name, sizeof(self_name), "process-%d-%016lx", (int)getpid(), (unsigned long)registry_random());
    if (lock_fd < 0 || driver_fd < 0) {
        fprintf(stderr, "cuda-standin: %s: %m\n", standin.settings.directory);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    lock();
    self_fd = file_open(self_name, O_RDWR | O_CREAT | O_EXCL);
    if (self_fd >= 0 && ftruncate(self_fd, sizeof(*self)) == 0) {
        file_lock(self_fd, F_WRLCK, F_SETLK);
        self = mmap(NULL, sizeof(*self), PROT_READ | PROT_WRITE, MAP_SHARED, self_fd, 0);
    }
    unlock();
    return self && self != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Calls `each` with the table of every living process, this one too. The lock is held. */
static void processes_each(void (*each)(const struct process *, bool own, void *), void *argument) {
    each(self, true, argument);
    DIR *directory = opendir(standin.settings.directory);
    if (!directory)
        return;
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (strncmp(entry->d_name, "process-", 8) || strcmp(entry->d_name, self_name) == 0)
            continue;
        CLEANUP(closep) int fd = file_open(entry->d_name, O_RDWR);
        if (fd < 0)
            continue;
        if (file_lock(fd, F_WRLCK, F_GETLK) == F_UNLCK) {
            unlinkat(dirfd(directory), entry->d_name, 0);
            continue;
        }
        struct process *process = mmap(NULL, sizeof(*process), PROT_READ, MAP_SHARED, fd, 0);
        if (process == MAP_FAILED)
            continue;
        each(process, false, argument);
        munmap(process, sizeof(*process));
    }
    closedir(directory);
}

struct sum {
    int device;
    struct holding *found;
    size_t n, room;
    bool others_have_context;
    uint64_t id;
    bool others_hold;
};

static void sum_add(const struct process *process, bool own, void *argument) {
    struct sum *sum = argument;
    for (uint32_t i = 0; i < process->n; i++) {
        const struct holding *holding = &process->holdings[i];
        if (!holding->id)
            continue;
        if (!own && holding->id == sum->id)
            sum->others_hold = true;
        if (holding->device != sum->device)
            continue;
        if (!own && holding->is_context)
            sum->others_have_context = true;
        if (sum->n == sum->room) {
            sum->room = sum->room ? sum->room * 2 : 64;
            sum->found = realloc(sum->found, sum->room * sizeof(*sum->found));
        }
        sum->found[sum->n++] = *holding;
    }
}

static int holding_compare(const void *a, const void *b) {
    const struct holding *left = a, *right = b;
    return left->id < right->id ? -1 : left->id > right->id;
}

static size_t sum_used(struct sum *sum) {
    size_t used = 0;
    if (sum->n)
        qsort(sum->found, sum->n, sizeof(*sum->found), holding_compare);
    for (size_t i = 0; i < sum->n; i++) {
        if (i == 0 || sum->found[i].id != sum->found[i - 1].id)
            used += sum->found[i].size;
    }
    free(sum->found);
    return used;
}

static CUresult holding_add(int device, uint64_t id, size_t size, bool is_context) {
    for (uint32_t i = 0; i < HOLDINGS_MAX; i++) {
        if (self->holdings[i].id)
            continue;
        self->holdings[i] = (struct holding){.id = id, .size = size, .device = device, .is_context = is_context};
        if (i >= self->n)
            self->n = i + 1;
        return CUDA_SUCCESS;
    }
    report_mistake("more than %d pieces of device memory in one process", HOLDINGS_MAX);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult charge(int device, uint64_t id, size_t size, bool is_context, bool alone) {
    struct sum sum = {.device = device, .id = id};
    lock();
    processes_each(sum_add, &sum);
    size_t used = sum_used(&sum), total = standin.settings.device_memory;
    CUresult error = CUDA_SUCCESS;
    if (alone && sum.others_have_context)
        error = CUDA_ERROR_DEVICE_UNAVAILABLE;
    else if (!sum.others_hold && (used > total || size > total - used))
        error = CUDA_ERROR_OUT_OF_MEMORY;
    else
        error = holding_add(device, id, size, is_context);
    unlock();
    return error;
}

CUresult registry_charge(int device, uint64_t id, size_t size) { return charge(device, id, size, false, false); }

CUresult registry_charge_context(int device, bool alone, uint64_t *ret_id) {
    uint64_t id = registry_random();
    CUresult error = charge(device, id, standin.settings.context_memory, true, alone);
    if (!error)
        *ret_id = id;
    return error;
}

void registry_uncharge(uint64_t id) {
    lock();
    for (uint32_t i = 0; i < self->n; i++) {
        if (self->holdings[i].id == id) {
            self->holdings[i].id = 0;
            break;
        }
    }
    unlock();
}

size_t registry_used(int device) {
    struct sum sum = {.device = device};
    lock();
    processes_each(sum_add, &sum);
    unlock();
    return sum_used(&sum);
}

bool registry_others_hold(uint64_t id) {
    struct sum sum = {.device = -1, .id = id};
    lock();
    processes_each(sum_add, &sum);
    unlock();
    return sum.others_hold;
}

int registry_export_write(const char *name, const struct registry_export *export) {
    char file[64];
    snprintf(file, sizeof(file), "export-%s", name);
    CLEANUP(closep) int fd = file_open(file, O_WRONLY | O_CREAT | O_TRUNC);
    return fd < 0 || write(fd, export, sizeof(*export)) != sizeof(*export) ? -EIO : 0;
}

int registry_export_read(const char *name, struct registry_export *ret_export) {
    char file[64];
    snprintf(file, sizeof(file), "export-%s", name);
    CLEANUP(closep) int fd = file_open(file, O_RDONLY);
    return fd < 0 || read(fd, ret_export, sizeof(*ret_export)) != sizeof(*ret_export) ? -EIO : 0;
}

void registry_export_remove(const char *name) {
    char file[64], path[4096];
    snprintf(file, sizeof(file), "export-%s", name);
    path_of(path, file);
    unlink(path);
}
