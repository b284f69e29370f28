/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entry points come from cuGetProcAddress, which takes a name without its suffix and the version of the
 * API whose variant is wanted: a fixed one, so that a newer driver does not hand out a function with
 * other arguments. For the few names where 12.0 means another function than the suffix that we call,
 * the version is that of the suffix. Only cuInit, which says whether this is a driver at all, and
 * cuGetProcAddress itself are looked up by name.
 */
#include "base/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>

#define CUDA_NAME_MAX 64

static const struct entry {
    const char *name; /* as the driver exports it */
    size_t offset;    /* of its pointer in struct cuda */
} entries[] = {
#define CUDA_FUNCTION(name, arguments) {#name, offsetof(struct cuda, name)},
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION
};

static const struct {
    const char *name;
    int version;
} other_versions[] = {
    {"cuCtxCreate_v2", 3020}, /* 12.0 gives cuCtxCreate_v3 */
};

static int entry_version(const char *name) {
    for (size_t i = 0; i < ARRAY_SIZE(other_versions); i++)
        if (strcmp(name, other_versions[i].name) == 0)
            return other_versions[i].version;
    return CUDA_API_VERSION;
}

/* cuMemAlloc_v2 is cuMemAlloc to cuGetProcAddress. */
static void plain_name(const char *name, char ret_plain[CUDA_NAME_MAX]) {
    snprintf(ret_plain, CUDA_NAME_MAX, "%s", name);
    char *suffix = strstr(ret_plain, "_v");
    if (suffix)
        *suffix = '\0';
}

static void set_state(struct cuda *cuda, enum cuda_state state, CUresult result, const char *sentence) {
    cuda->state = state;
    if (result == CUDA_SUCCESS)
        problem_set(&cuda->problem, -ENODEV, "%s", sentence);
    else
        problem_set(&cuda->problem, -ENODEV, "%s (CUDA error %d)", sentence, (int)result);
}

static void load_entries(struct cuda *cuda, cuGetProcAddress_v2_fn *look_up) {
    for (size_t i = 0; i < ARRAY_SIZE(entries); i++) {
        char plain[CUDA_NAME_MAX];
        void *function = NULL;
        CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
        plain_name(entries[i].name, plain);
        CUresult result =
            look_up(plain, &function, entry_version(entries[i].name), CU_GET_PROC_ADDRESS_DEFAULT, &status);
        if (result != CUDA_SUCCESS || status != CU_GET_PROC_ADDRESS_SUCCESS || !function) {
            cuda->state = CUDA_UNFIT;
            problem_set(&cuda->problem, -ENODEV, "the CUDA driver (version %d) has no %s", cuda->version,
                        entries[i].name);
            return;
        }
        memcpy((char *)cuda + entries[i].offset, &function, sizeof function);
    }
    cuda->state = CUDA_READY;
}

static void *symbol(void *library, const char *name) { return dlsym(library, name); }

static void init(struct cuda *cuda, const char *name, int flags) {
    *cuda = (struct cuda){.state = CUDA_NO_DRIVER};
    void *library = dlopen(name ? name : CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL | flags);
    if (!library) {
        const char *why = dlerror();
        problem_set(&cuda->problem, -ENODEV, "no CUDA driver: %s", why ? why : "nobody has loaded it");
        return;
    }
    cuInit_fn *start = (cuInit_fn *)symbol(library, "cuInit");
    cuDriverGetVersion_fn *get_version = (cuDriverGetVersion_fn *)symbol(library, "cuDriverGetVersion");
    cuDeviceGetCount_fn *get_count = (cuDeviceGetCount_fn *)symbol(library, "cuDeviceGetCount");
    cuGetProcAddress_v2_fn *look_up = (cuGetProcAddress_v2_fn *)symbol(library, "cuGetProcAddress_v2");
    CUresult result = start ? start(0) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_ERROR_STUB_LIBRARY) {
        set_state(cuda, CUDA_STUB, result, "the CUDA library is the toolkit's stub, not a driver");
    } else if (result == CUDA_ERROR_NO_DEVICE) {
        set_state(cuda, CUDA_NO_DEVICE, result, "the CUDA driver sees no device");
    } else if (result != CUDA_SUCCESS) {
        set_state(cuda, CUDA_UNFIT, result, "the CUDA driver cannot be initialized");
    } else if (!get_version || !get_count || !look_up || get_version(&cuda->version) != CUDA_SUCCESS ||
               cuda->version < CUDA_API_VERSION) {
        set_state(cuda, CUDA_UNFIT, CUDA_SUCCESS, "the CUDA driver is older than 12.0");
    } else {
        int count = 0;
        result = get_count(&count);
        if (result != CUDA_SUCCESS || !count)
            set_state(cuda, CUDA_NO_DEVICE, result, "the CUDA driver sees no device");
        else
            load_entries(cuda, look_up);
    }
}

void cuda_init(struct cuda *cuda, const char *library) { init(cuda, library, 0); }

void cuda_init_loaded(struct cuda *cuda, const char *library) { init(cuda, library, RTLD_NOLOAD); }

/* One is added, so that it is never 0. */
static int take_loads(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    *(uint64_t *)context = info->dlpi_adds + 1;
    return 1; /* each library says the same */
}

uint64_t cuda_loads(void) {
    uint64_t loads = 0;
    (void)dl_iterate_phdr(take_loads, &loads);
    return loads;
}

const char *cuda_state_name(enum cuda_state state) {
    static const char *const names[] = {
        [CUDA_NO_DRIVER] = "no driver", [CUDA_STUB] = "stub",   [CUDA_NO_DEVICE] = "no device",
        [CUDA_UNFIT] = "unfit",         [CUDA_READY] = "ready",
    };
    return names[state];
}

static int to_errno(CUresult result) {
    switch (result) {
    case CUDA_SUCCESS:
        return 0;
    case CUDA_ERROR_OUT_OF_MEMORY:
        return -ENOMEM;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_NOT_FOUND:
        return -EINVAL;
    case CUDA_ERROR_NOT_SUPPORTED:
        return -EOPNOTSUPP;
    case CUDA_ERROR_NOT_PERMITTED:
        return -EPERM;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
        return -ENODEV;
    case CUDA_ERROR_NOT_READY:
    case CUDA_ERROR_TIMEOUT:
        return -ETIMEDOUT;
    default:
        return -EIO;
    }
}

int cuda_problem(const struct cuda *cuda, CUresult result, struct problem *problem, const char *what) {
    const char *name = NULL, *sentence = NULL;
    if (result == CUDA_SUCCESS)
        return 0;
    if (cuda->cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "an unknown error";
    if (cuda->cuGetErrorString(result, &sentence) != CUDA_SUCCESS || !sentence)
        sentence = "no explanation";
    return problem_set(problem, to_errno(result), "%s: %s (%d), %s", what, name, (int)result, sentence);
}

bool cuda_is_sticky(CUresult result) {
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_UNKNOWN:
    case CUDA_ERROR_DEINITIALIZED:
        return true;
    default: /* 714 to 718: other ways in which a kernel fails */
        return (int)result >= 714 && (int)result <= 718;
    }
}
