/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the files of the simulator share. One process, one thread, one seeded generator: nodes with
 * a real control plane each, on a simulated loop (sim-loop.c), simulated disks (sim-disk.c,
 * sim-tier.c) and what a kernel says of processes (sim-kernel.c); trainers that use libckpt
 * (sim-program.c, on the system of sim-process.c) or speak the protocol themselves (sim-trainer.c); an
 * operator that breaks things (sim-operator.c); and a model of what must then be true (sim-model.c).
 */

#include "base/loop.h"
#include "daemon/server.h"
#include "tiers/config.h"
#include "tiers/tier.h"

#define SIM_NODES_MAX 2
#define SIM_RANKS_MAX 3
#define SIM_JOB "sim"
#define SIM_CHUNK KIB(8)
#define SIM_OUTSIDE (-1) /* the owner of what is on no node */

/* ---- the run: sim.c ---- */

/* What a run is allowed to do to itself; drawn from the seed. */
struct sim_weather {
    uint32_t eio, enospc, slow, stall, rot; /* of 10000 tier operations */
    uint64_t late_ms;                       /* for so long may a node see a shared directory as it was */
    bool crashes, clock_jumps;
};

struct sim {
    uint64_t seed, random[4];
    uint64_t now_ns, wall_ns; /* what all clocks of the world go by: monotonic, and of the day */
    uint64_t steps;
    uint64_t digest;   /* of all events */
    uint64_t failures; /* that tiers were made to have */
    uint64_t rotten;   /* of these, reads that brought other bytes */
    uint64_t upsets;   /* crashes, lost disks, clocks that jumped: pins may have gone */
    int node;          /* whose code runs now, or SIM_OUTSIDE */
    const char *bug;   /* a planted one, or "" */
    bool verbose;
    struct sim_weather weather;
};
extern struct sim sim;

uint64_t sim_random(void);
uint64_t sim_below(uint64_t bound);
bool sim_chance(uint32_t of, uint32_t in);
bool sim_bug(const char *name);
/* An event: goes into the digest, and is kept for the report of a failure. */
void sim_note(const char *format, ...) PRINTF_LIKE(1, 2);
/* An invariant does not hold: reports and ends the process. */
_Noreturn void sim_fail(const char *invariant, const char *format, ...) PRINTF_LIKE(2, 3);
#define SIM_CHECK(condition, invariant, ...)                                                                           \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            sim_fail(invariant, __VA_ARGS__);                                                                          \
    } while (0)

/* ---- fibers: sim-fiber.c ---- */

struct fiber;
typedef void (*fiber_fn)(void *argument);
struct fiber *fiber_new(int owner, fiber_fn fn, void *argument);
/* In a fiber: lets others go on until the time has come, or the descriptor (-1: none) is readable.
 * True: it is readable. Outside of fibers nothing waits. */
bool fiber_wait(uint64_t until_ns, int fd);
void fiber_pause(void);
bool fiber_inside(void);
void fiber_wake(struct fiber *fiber);
/* Whatever comes, it does not go on before that time: a process that hangs. */
void fiber_hold(struct fiber *fiber, uint64_t until_ns);
/* The fiber is not the one that runs. */
void fiber_kill(struct fiber *fiber);
void fiber_kill_owned(int owner);
/* The fiber is a process of its own: its calls to the system are those of sim-process.c. */
void fiber_set_pid(struct fiber *fiber, uint32_t pid);
uint32_t fiber_pid(const struct fiber *fiber);
/* Of the fiber that runs; 0: it is no process. */
uint32_t fiber_pid_now(void);

struct fiber *fiber_next(struct fiber *after);
int fiber_fd(const struct fiber *fiber);
uint64_t fiber_wake_ns(const struct fiber *fiber);
void fiber_run(struct fiber *fiber, bool readable);

/* ---- the loop: sim-loop.c ---- */

struct loop *sim_loop_new(int node);
/* The fiber in which loop_run() waits. */
void sim_loop_set_runner(struct loop *loop, struct fiber *runner);
/* Of a daemon that died: nothing of it runs or calls back any more. */
void sim_loop_drop(struct loop *loop);
/* A client connects: its end of a socket pair. */
int sim_loop_connect(struct loop *loop, uint32_t pid);
/* Something was sent, or a descriptor closed or written to: they must be looked at again. */
void sim_descriptors_changed(void);
/* When idle, no work is queued, runs, or has not been reaped. */
void sim_loop_check_idle(struct loop *loop);
/* One event somewhere. False: nothing will ever happen again. */
bool sim_step(void);

/* ---- disks and tiers: sim-disk.c, sim-tier.c ---- */

struct disk;
struct disk_inode;
/* What it does is drawn; `capabilities` is what its tiers declare, and how it behaves in a crash. */
struct disk *disk_new(const char *name, bool shared);
const char *disk_name(const struct disk *disk);
unsigned disk_capabilities(const struct disk *disk);
/* The nodes in the mask lose power (all bits: the disk itself): what they had not synced is kept,
 * dropped, torn, or garbage; if it is memory, all is gone. */
void disk_crash(struct disk *disk, uint32_t nodes);
int64_t disk_clock(const struct disk *disk);
void disk_clock_jump(struct disk *disk, int64_t by_ns);

/* Something that lasts, until it is over by itself. */
enum disk_trouble { DISK_WELL, DISK_FULL, DISK_FAILING, DISK_SLOW, DISK_HANGING, DISK_TROUBLES };
void disk_make_trouble(struct disk *disk, enum disk_trouble trouble, uint64_t until_ns);
enum disk_trouble disk_trouble(const struct disk *disk, uint64_t *ret_until_ns);

struct disk_inode *disk_find(struct disk *disk, const char *path);
/* What the node that runs now sees, which of a shared disk may be what was. */
struct disk_inode *disk_look(struct disk *disk, const char *path);
int disk_make(struct disk *disk, const char *path, bool directory, struct disk_inode **ret_inode);
int disk_link(struct disk *disk, const char *from, const char *to, bool replace);
int disk_rename(struct disk *disk, const char *from, const char *to);
int disk_remove(struct disk *disk, const char *path, bool directory);
int disk_list(struct disk *disk, const char *path, struct tier_entries *ret_entries);
void disk_sync_names(struct disk_inode *directory);
bool disk_is_directory(const struct disk_inode *inode);
void disk_stat(const struct disk_inode *inode, struct tier_entry *ret_entry);
void disk_touch(struct disk_inode *inode);
int disk_write(struct disk_inode *file, const void *data, size_t size, uint64_t offset);
size_t disk_read(const struct disk_inode *file, void *data, size_t size, uint64_t offset);
int disk_truncate(struct disk_inode *file, uint64_t size);
void disk_sync(struct disk_inode *file);
/* The sync failed: what was written since the last one will never be on the medium. */
void disk_sync_failed(struct disk_inode *file);

/* A tier on a disk as a node sees it; as SIM_OUTSIDE sees it, it is instant and without faults. */
struct tier *sim_tier_new(struct disk *disk, const char *name, enum level level, int node);
/* For the loop: a submitted read or write. */
void sim_tier_file_io(struct loop_op *op);
void sim_tier_forget_node(int node);
/* How many files the node has open. */
unsigned sim_tier_open_files(int node);

/* ---- processes: sim-kernel.c ---- */

uint32_t kernel_process_new(int node);
void kernel_process_end(uint32_t pid);
/* A child of it has its sockets, too: they stay when it ends. */
void kernel_process_forked(uint32_t pid);
bool kernel_is_simulated(uint32_t pid);
bool kernel_process_alive(uint32_t pid);
/* Whose memory this descriptor is open on; 0: it is another file. */
uint32_t kernel_memory_of(int fd);
/* The process connects to the daemon of its node: a descriptor, or -errno. */
int kernel_connect(uint32_t pid);
/* The daemon's end of a connection; all of a node's are closed when its daemon dies. */
void kernel_socket(int node, int fd, uint32_t pid);
void kernel_close_sockets(int node);
void kernel_reboot(int node);

/* ---- nodes: sim-node.c ---- */

struct node {
    int number;
    bool up; /* its daemon runs */
    struct loop *loop;
    struct server *server;
    struct config config;
    struct log log;
    struct disk *local; /* NULL: it has no tier of its own */
    int signal_fd;
    int64_t clock_ns; /* how far its clock is from that of the world */
};
extern struct node nodes[SIM_NODES_MAX];
extern int node_count;
extern struct disk *parallel;

void node_init(int number, bool has_local);
void node_start(int number);
void node_kill(int number);  /* the daemon only */
void node_power(int number); /* and the kernel with it; trainers are the operator's to end */
void node_terminate(int number);
/* After every event: bounds that hold at any time. */
void node_check(int number);
/* Nothing is left that was reserved, queued, open or in flight. */
void node_check_idle(int number);
/* Descriptors that the process has, less those that nodes' pools have a right to. */
int nodes_descriptors(void);
/* For the report of a failure. */
void node_describe(int number);

/* ---- the model: sim-model.c ---- */

enum save_state { SAVE_SENT, SAVE_CAPTURED, SAVE_VOID };

struct save {
    struct version_id id;
    uint32_t rank, world;
    int node;
    enum save_state state;
    uint8_t *image;
    uint64_t image_size;
    uint64_t failures; /* of tiers, before it */
};

struct save *model_save(struct version_id id, uint32_t rank, uint32_t world, int node, const void *image,
                        uint64_t image_size);
/* A trainer was told so. */
void model_durable(struct version_id id, uint32_t rank, int node, enum level level, bool whole);
/* A tier was given up: that takes as many failures as a drain has tries. */
void model_given_up(struct version_id id, const char *reason);
/* A run is launched: from now on its decision may be made. */
void model_launch(uint32_t world);
void model_opened(const char *run_id, uint64_t generation, bool resumes, struct version_id resume);
/* Bytes that a read returned as this part. */
void model_check_image(struct version_id id, uint32_t rank, const void *image, uint64_t size, const char *where);
/* Is there a complete copy where this node can read it? */
bool model_reachable(struct version_id id, int node);
/* Everything that lies in all tiers, against what was reported and what was saved. */
void model_check_tiers(void);
/* Of a path in a tier: does it belong to the newest run; is its version complete in the parallel tier? */
bool model_is_newest_run(const char *path);
bool model_is_global(const char *path);
void model_disk_lost(int node);

/* ---- trainers and the operator: sim-trainer.c, sim-program.c, sim-operator.c ---- */

struct trainer_options {
    const char *run_id;
    uint32_t rank, world;
    int node;
    uint32_t steps;
    uint64_t size; /* bytes of its piece of the tensor */
    bool quiet;    /* no faults: everything must succeed */
    bool library;  /* it uses libckpt */
};
struct trainer;
struct trainer *trainer_start(const struct trainer_options *options);
bool trainer_over(const struct trainer *trainer);
bool trainer_closing(const struct trainer *trainer); /* its run may have ended with it */
bool trainer_failed(const struct trainer *trainer);  /* over, but not done */
void trainer_kill(struct trainer *trainer);
void trainer_hang(struct trainer *trainer, uint64_t until_ns);

void operator_start(void);
bool operator_over(void);
