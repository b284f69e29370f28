/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The door of the stand-in: settings, initialisation, and what every call must pass. After fork() the child has no
 * driver, as with the real one.
 */
#include "tests/cuda-standin/standin.h"

#include <errno.h>
#include <fcntl.h>

struct standin standin = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static uint64_t setting(const char *name, uint64_t fallback) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : fallback;
}

static bool setting_is(const char *name, const char *value) {
    const char *text = getenv(name);
    return text && strcmp(text, value) == 0;
}

/* A setting that is misspelt would let a test pass for nothing. */
static bool settings_are_known(void) {
    static const char prefix[] = "CUDA_STANDIN_";
    static const char *const known[] = {
        "DIR",         "INIT",   "DEVICES",     "MIG",    "MEMORY_MIB", "DELAY_US", "BANDWIDTH_MIB_S", "COMPUTE_MODE",
        "CONTEXT_MIB", "REOPEN", "REGISTER_MS", "FAULTS", "LEAKS",      "TRACE",    "RECORD"};
    for (char **variable = environ; *variable; variable++) {
        if (strncmp(*variable, prefix, sizeof(prefix) - 1))
            continue;
        const char *name = *variable + sizeof(prefix) - 1;
        size_t i = 0, length = strcspn(name, "=");
        while (i < ARRAY_SIZE(known) && (strlen(known[i]) != length || strncmp(known[i], name, length)))
            i++;
        if (i == ARRAY_SIZE(known)) {
            fprintf(stderr, "cuda-standin: there is no setting %s\n", *variable);
            return false;
        }
    }
    return true;
}

static void settings_read(struct settings *settings) {
    settings->directory = getenv("CUDA_STANDIN_DIR");
    settings->init_error = setting("CUDA_STANDIN_INIT", CUDA_SUCCESS);
    settings->n_devices = min_u64(setting("CUDA_STANDIN_DEVICES", 1), DEVICES_MAX);
    settings->compute_mode = setting("CUDA_STANDIN_COMPUTE_MODE", CU_COMPUTEMODE_DEFAULT);
    settings->device_memory = MIB(setting("CUDA_STANDIN_MEMORY_MIB", 1024));
    settings->context_memory = MIB(setting("CUDA_STANDIN_CONTEXT_MIB", 16));
    settings->copy_delay_us = setting("CUDA_STANDIN_DELAY_US", 100);
    settings->bandwidth_mib_s = setting("CUDA_STANDIN_BANDWIDTH_MIB_S", 0);
    settings->register_delay_ms = setting("CUDA_STANDIN_REGISTER_MS", 0);
    settings->n_mig = min_u64(setting("CUDA_STANDIN_MIG", 0), DEVICES_MAX);
    settings->trace = setting("CUDA_STANDIN_TRACE", 0);
    settings->record = setting("CUDA_STANDIN_RECORD", 0);
    settings->reopen_refused = setting_is("CUDA_STANDIN_REOPEN", "refuse");
    settings->leaks = setting_is("CUDA_STANDIN_LEAKS", "ignore")   ? LEAKS_IGNORE
                      : setting_is("CUDA_STANDIN_LEAKS", "report") ? LEAKS_REPORT
                                                                   : LEAKS_FAIL;
}

static void fork_prepare(void) { pthread_mutex_lock(&standin.lock); }
static void fork_parent(void) { pthread_mutex_unlock(&standin.lock); }
static void fork_child(void) {
    standin.forked = true;
    pthread_mutex_unlock(&standin.lock);
}

CUresult cuInit(unsigned int flags) {
    ENTER(NEEDS_NOTHING);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (standin.initialized)
        return CUDA_SUCCESS;

    if (!settings_are_known())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    settings_read(&standin.settings);
    if (standin.settings.init_error)
        return standin.settings.init_error;
    if (!standin.settings.directory) {
        fprintf(stderr, "cuda-standin: CUDA_STANDIN_DIR names no directory\n");
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    device_find_visible();
    if (standin.n_visible == 0)
        return CUDA_ERROR_NO_DEVICE;
    CUresult error = registry_open();
    if (error)
        return error;

    faults_read();
    standin.buffer_id = 1;
    standin.initialized = true;
    pthread_atfork(fork_prepare, fork_parent, fork_child);
    report_start();
    return CUDA_SUCCESS;
}

struct call standin_enter(const char *name, enum needs needs) {
    struct call call = {0};
    if (standin.forked) {
        call.error = CUDA_ERROR_NOT_INITIALIZED;
        return call;
    }
    pthread_mutex_lock(&standin.lock);
    call.locked = true;
    if (!standin.initialized) {
        if (needs != NEEDS_NOTHING)
            call.error = CUDA_ERROR_NOT_INITIALIZED;
        return call;
    }

    if (standin.settings.trace)
        fprintf(stderr, "cuda-standin: %d %s\n", (int)getpid(), name);
    call.context = context_current();
    bool sticky;
    int fault = faults_take(name, &sticky);
    if (fault == FAULT_HANG) {
        faults_hang();
        fault = 0;
    }
    if (needs == NEEDS_CONTEXT) {
        if (!call.context)
            call.error = CUDA_ERROR_INVALID_CONTEXT;
        else if (call.context->destroyed)
            call.error = CUDA_ERROR_CONTEXT_IS_DESTROYED;
        else
            call.error = call.context->error;
    }
    if (!call.error && fault) {
        call.error = fault;
        if (sticky && call.context)
            call.context->error = fault;
    }
    return call;
}

CUresult cuDriverGetVersion(int *ret_version) {
    ENTER(NEEDS_NOTHING);
    *ret_version = 12000;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **ret_function, int version, unsigned long flags,
                             CUdriverProcAddressQueryResult *ret_status) {
#define CUDA_FUNCTION(name, arguments) {#name, (void *)name},
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
#include "base/cuda-abi.def"
    };
#undef CUDA_FUNCTION
    ENTER(NEEDS_NOTHING);
    /* Asked by the name without suffix; the newest variant that 12.0 knows is all there is, but for cuCtxCreate: since
     * 11.4 that is another function, which is not here. */
    bool fits = strcmp(symbol, "cuCtxCreate") ? version >= 12000 : version < 11040;
    size_t length = strlen(symbol);
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *ret_function = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(functions); i++) {
        const char *name = functions[i].name;
        if (strncmp(name, symbol, length) || (name[length] && strncmp(name + length, "_v", 2)))
            continue;
        status = fits ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (status == CU_GET_PROC_ADDRESS_SUCCESS)
            *ret_function = functions[i].function;
        break;
    }
    if (ret_status)
        *ret_status = status;
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
