/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ckpt.h"

#include "client/clock.h"
#include "client/handle.h"
#include "client/options.h"
#include "client/register.h"
#include "client/restore.h"
#include "client/runid.h"
#include "client/save.h"

#include <errno.h>

/* The handle's beginning and end, and what needs no daemon: memory, and what is protected. */

#define TEXT(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *ckpt_version(void) { return VERSION_TEXT(CKPT_VERSION_MAJOR, CKPT_VERSION_MINOR, CKPT_VERSION_PATCH); }

/* ---- open and close ---- */

#define DIRECTORY_MAX 4096

static void handle_free(struct ckpt *c) {
    push_deinit(&c->push);
    staging_deinit(&c->staging);
    register_free_eager(c);
    exports_deinit(&c->exports);
    devices_deinit(&c->devices);
    session_deinit(&c->session);
    segments_forget(&c->segments);
    set_image_deinit(&c->image);
    set_deinit(&c->set);
    areas_deinit(&c->areas);
    free(c->job);
    free(c->directory);
    free(c->program);
    free(c);
}

static void handle_freep(struct ckpt **c) {
    if (*c)
        handle_free(*c);
}

static int copy_text(const char *text, char **ret_copy) {
    char *copy = strdup(text);
    if (!copy)
        return error_set(CKPT_E_MEMORY, "open: out of memory");
    *ret_copy = copy;
    return CKPT_OK;
}

static const char *or_environment(const char *option, const char *name) {
    if (option)
        return option;
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* The socket, and whether a daemon may be started for it: where the search order says so, and for a
 * socket that was named, if the program was named too. */
static int find_socket(const struct ckpt_open_options *options, char ret_path[LINK_PATH_MAX], bool *ret_on_demand) {
    bool program_named = or_environment(options->daemon, "CKPTD_PROGRAM");
    const char *named = or_environment(options->socket, "CKPT_SOCKET");
    if (!named) {
        struct problem problem = PROBLEM_NONE;
        int r = wire_socket_path(ret_path, ret_on_demand, &problem);
        return r < 0 ? error_from(r, &problem, "cannot find the daemon's socket") : CKPT_OK;
    }
    if (strlen(named) >= LINK_PATH_MAX)
        return error_set(CKPT_E_LIMIT, "the socket's path is longer than %d bytes: %s", LINK_PATH_MAX - 1, named);
    strcpy(ret_path, named);
    *ret_on_demand = program_named;
    return CKPT_OK;
}

static int fill_handle(struct ckpt *c, const char *job, const struct ckpt_open_options *options) {
    char escaped[256], path[LINK_PATH_MAX];
    struct problem problem = PROBLEM_NONE;
    int r = job_escape(job, escaped, &problem);
    if (r < 0)
        return error_from(r, &problem, "open");
    c->rank = options->rank;
    c->world = options->world ? options->world : 1;
    if (c->rank >= c->world)
        return error_set(CKPT_E_INVALID, "open: rank %u of a world of %u", c->rank, c->world);
    if (options->flags)
        return error_set(CKPT_E_INVALID, "open: unknown flags 0x%x", options->flags);
    c->open_timeout_ms = clock_timeout_ms(options->open_timeout_ms, HANDLE_OPEN_MS);
    c->busy_timeout_ms = options->busy_timeout_ms;

    const char *directory = or_environment(options->directory, "CKPT_DIR");
    if (directory && strlen(directory) > DIRECTORY_MAX)
        return error_set(CKPT_E_LIMIT, "open: the directory's path is longer than %d bytes", DIRECTORY_MAX);
    bool on_demand = false;
    r = runid_find(options->run_id, c->world, c->run_id);
    if (r == CKPT_OK)
        r = find_socket(options, path, &on_demand);
    if (r == CKPT_OK)
        r = copy_text(job, &c->job);
    if (r == CKPT_OK && directory)
        r = copy_text(directory, &c->directory);
    if (r == CKPT_OK && on_demand) {
        const char *program = or_environment(options->daemon, "CKPTD_PROGRAM");
        r = copy_text(program ? program : CKPT_DAEMON_PROGRAM, &c->program);
    }
    if (r < 0)
        return r;
    link_init(&c->session.link, path, handle_unclaimed, c);
    snprintf(c->push.link.path, sizeof c->push.link.path, "%s", path);
    c->session.program = c->program;
    return CKPT_OK;
}

int ckpt_open(const char *job, const struct ckpt_open_options *options, ckpt **ret) {
    if (!job || !ret)
        return error_set(CKPT_E_INVALID, "open: the job's name or the pointer for the result is NULL");
    struct ckpt_open_options given;
    int r = options_get("ckpt_open_options", options, &given, sizeof given);
    if (r < 0)
        return r;
    CLEANUP(handle_freep) struct ckpt *c = calloc(1, sizeof *c);
    if (!c)
        return error_set(CKPT_E_MEMORY, "open: out of memory");
    link_init(&c->session.link, "", handle_unclaimed, c);
    c->session.starter = STARTER_INIT;
    push_init(&c->push, "", &c->devices);
    c->exports.devices = &c->devices;
    c->staging.transfer.devices = &c->devices;
    LIST_INIT(&c->restores);
    const char *force = getenv("CKPT_FORCE_PUSH");
    c->use_push = force && strcmp(force, "1") == 0;
    if (c->use_push)
        snprintf(c->push_reason, sizeof c->push_reason, "CKPT_FORCE_PUSH is set");
    r = fill_handle(c, job, &given);
    if (r == CKPT_OK)
        r = handle_list(c);
    if (r < 0)
        return r;
    error_clear();
    r = session_ensure(c, clock_deadline(c->open_timeout_ms));
    if (r < 0) {
        handle_unlist(c);
        return r;
    }
    *ret = STEAL(c);
    return CKPT_OK;
}

int ckpt_close(ckpt *c) {
    if (!c)
        return CKPT_OK;
    int r = handle_enter(c);
    if (r == CKPT_E_FORKED)
        return r; /* the child may still read its memory, and shares everything else with the parent */
    if (r == CKPT_OK)
        r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
    if (r == CKPT_OK)
        r = register_release_devices(c); /* the program may free the memory */
    if (session_is_up(&c->session)) {
        struct message_empty body = {0};
        struct link_request request = {.opcode = MESSAGE_CLOSE, .body = &body, .fd = -1};
        /* Closing the socket says the same, if later. The answer means that the goodbye was heard: a daemon
         * that is told to stop right afterwards knows that this run is over. */
        if (link_call(&c->session.link, &request, MESSAGE_OK, clock_deadline(HANDLE_GRACE_MS)) < 0)
            link_close(&c->session.link);
    }
    handle_unlist(c);
    restore_orphan(c);
    handle_free(c);
    return r;
}

int ckpt_get_info(ckpt *c, struct ckpt_info *info) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    struct ckpt_info values = {
        .rank = c->rank,
        .world = c->world,
        .connected = session_is_up(&c->session),
        .generation = c->session.generation,
        .resumes = c->session.resumes,
        .levels = c->session.levels,
        .resume_generation = c->session.resume_generation,
        .resume_step = c->session.resume_step,
        .push = c->use_push,
        .image_size = c->saves.image_size,
        .saves = c->saves.accepted,
        .skipped = c->saves.skipped,
        .lost = c->saves.lost,
        .push_reason = c->use_push ? c->push_reason : NULL,
    };
    return options_fill("ckpt_info", &values, sizeof values, info);
}

/* ---- memory ---- */

int ckpt_alloc(ckpt *c, size_t size, void **ret) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    if (!ret)
        return error_set(CKPT_E_INVALID, "alloc: the pointer for the result is NULL");
    return areas_alloc(&c->areas, size, ret);
}

int ckpt_free(ckpt *c, void *pointer) {
    int r = handle_enter(c);
    if (r < 0 || !pointer)
        return r;
    uint64_t size = areas_size(&c->areas, pointer);
    if (size == 0 && !areas_has(&c->areas, pointer))
        return error_set(CKPT_E_INVALID, "free: %p is not from ckpt_alloc of this handle", pointer);
    struct set_shard *shard = set_next_in(&c->set, NULL, pointer, size);
    if (shard)
        r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
    while (shard) {
        set_remove(&c->set, shard);
        shard = set_next_in(&c->set, NULL, pointer, size);
    }
    areas_free(&c->areas, pointer);
    return r;
}

/* ---- what is protected ---- */

int ckpt_protect(ckpt *c, const struct ckpt_shard *shard, uint64_t *ret_id) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    if (!shard)
        return error_set(CKPT_E_INVALID, "protect: the shard is NULL");
    struct ckpt_shard given;
    r = options_get("ckpt_shard", shard, &given, sizeof given);
    uint64_t id = 0;
    if (r == CKPT_OK)
        r = set_add(&c->set, &given, devices_find(&c->devices, given.data), &id);
    if (r == CKPT_OK && ret_id)
        *ret_id = id;
    return r;
}

int ckpt_protect_array(ckpt *c, const char *name, uint32_t dtype, const void *data, uint64_t count) {
    struct ckpt_shard shard;
    CKPT_INIT(shard);
    shard.dtype = dtype;
    shard.name = name;
    shard.data = data;
    shard.dimensions = 1;
    shard.shape = &count;
    return ckpt_protect(c, &shard, NULL);
}

int ckpt_alias(ckpt *c, const char *alias, const char *name) {
    int r = handle_enter(c);
    return r < 0 ? r : set_alias(&c->set, alias, name);
}

int ckpt_unprotect(ckpt *c, uint64_t id) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    struct set_shard *shard = set_find(&c->set, id);
    if (!shard)
        return error_set(CKPT_E_NOT_FOUND, "unprotect: no protected piece has the id %ju", (uintmax_t)id);
    r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
    int released = shard->device == DEVICE_HOST ? CKPT_OK : register_release_devices(c);
    set_remove(&c->set, shard);
    return r < 0 ? r : released;
}

int ckpt_unprotect_all(ckpt *c) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
    int released = register_release_devices(c);
    set_clear(&c->set);
    return r < 0 ? r : released;
}

/* ---- device memory ---- */

#define QUIET_PAUSE_NS 10000

int ckpt_quiet(ckpt *c, uint32_t begin) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    if (begin > 1)
        return error_set(CKPT_E_INVALID, "quiet: %u; it must be CKPT_QUIET_BEGIN or CKPT_QUIET_END", begin);
    c->quiet = begin;
    struct word_page *page = c->session.word;
    if (!page)
        return CKPT_OK;
    word_quiet(page, begin);
    uint64_t deadline = clock_now() + WORD_QUIET_NS;
    while (begin && word_copying(page)) {
        if (clock_now() >= deadline)
            return error_set(CKPT_E_TIMEOUT, "quiet: a copy out of device memory did not end within two seconds");
        struct timespec pause = {.tv_nsec = QUIET_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    return CKPT_OK;
}

int ckpt_release_imports(ckpt *c) {
    int r = handle_enter(c);
    if (r == CKPT_OK)
        r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
    int released = register_release_devices(c);
    return r < 0 ? r : released;
}

int ckpt_device_usage(ckpt *c, struct ckpt_device_usage *usage) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    struct ckpt_device_usage values = {0};
    if (c->set.on_devices > 0) {
        r = save_fence(c, CKPT_DEFAULT_TIMEOUT);
        if (r == CKPT_OK)
            r = session_ensure(c, clock_deadline(c->open_timeout_ms));
        c->session.link.complaint = CKPT_OK;
        if (r == CKPT_OK)
            r = register_ensure(c, 0);
    }
    if (r == CKPT_OK && session_is_up(&c->session) && c->session.version >= 2) {
        struct message_empty body = {0};
        struct link_request request = {.opcode = MESSAGE_DEVICE_USAGE, .body = &body, .fd = -1};
        r = link_call(&c->session.link, &request, MESSAGE_DEVICE_USAGE_IS, clock_deadline(HANDLE_GRACE_MS));
        const struct message_device_usage_is *is = c->session.link.message.body;
        if (r == CKPT_OK)
            values = (struct ckpt_device_usage){.contexts = is->contexts,
                                                .imports = is->imports,
                                                .context_bytes = is->context_bytes,
                                                .import_bytes = is->import_bytes,
                                                .arena_bytes = is->arena_bytes};
    }
    return r < 0 ? r : options_fill("ckpt_device_usage", &values, sizeof values, usage);
}
