/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's states, devices and contexts, and failures on demand. */
#include "tests/cuda-standin/harness.h"

#include <pthread.h>
#include <sys/wait.h>

static void plain(void) {
    context_begin();
    context_finish();
}

static void plain_life(void **state) {
    assert_int_equal(scene(plain), 0);
    assert_true(mistakes_none());
}

static void init_gives_stub(void) { GIVES(CUDA_ERROR_STUB_LIBRARY, cu.cuInit(0)); }
static void init_gives_no_device(void) { GIVES(CUDA_ERROR_NO_DEVICE, cu.cuInit(0)); }

static void init_gives_not_ready(void) { GIVES(CUDA_ERROR_SYSTEM_NOT_READY, cu.cuInit(0)); }

static void settings(void **state) {
    setting("DEVICE", "2"); /* DEVICES */
    assert_int_equal(scene(init_gives_not_ready), 0);
    unsetenv("CUDA_STANDIN_DEVICE");
    unsetenv("CUDA_STANDIN_DIR");
    assert_int_equal(scene(init_gives_not_ready), 0);
}

static void calls_before_init(void) {
    int n;
    CUcontext context;
    GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuDeviceGetCount(&n));
    GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuDevicePrimaryCtxRetain(&context, 0));
    GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuCtxSynchronize());
}

static void states(void **state) {
    assert_int_equal(scene(calls_before_init), 0);
    setting("INIT", "34");
    assert_int_equal(scene(init_gives_stub), 0);
    setting("INIT", "100");
    assert_int_equal(scene(init_gives_no_device), 0);
    setting("INIT", "");
    setting("DEVICES", "0");
    assert_int_equal(scene(init_gives_no_device), 0);
    setting("DEVICES", "2");
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    assert_int_equal(scene(init_gives_no_device), 0);
    setenv("CUDA_VISIBLE_DEVICES", "7,0", 1);
    assert_int_equal(scene(init_gives_no_device), 0);
}

/* Each entry that must have a context, closing and unregistering too. */
static void without_context(void) {
    CUdeviceptr pointer;
    CUipcMemHandle handle;
    CUstream stream;
    CUevent event;
    size_t size;
    char bytes[16];
    OK(cu.cuInit(0));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemAlloc_v2(&pointer, 1));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemFree_v2(1));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemGetInfo_v2(&size, &size));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcGetMemHandle(&handle, 1));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcCloseMemHandle(1));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemHostRegister_v2(bytes, 16, 0));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemHostUnregister(bytes));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemcpyDtoHAsync_v2(bytes, 1, 16, NULL));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuStreamCreate(&stream, 0));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuStreamDestroy_v2(NULL));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuEventCreate(&event, 0));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxSynchronize());
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxPopCurrent_v2(NULL));
}

static void *thread_without_context(void *argument) {
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxSynchronize());
    OK(cu.cuCtxPushCurrent_v2(argument));
    OK(cu.cuCtxSynchronize());
    return NULL;
}

static void threads_have_stacks(void) {
    pthread_t thread;
    CUcontext context = context_begin(), now;
    CHECK(pthread_create(&thread, NULL, thread_without_context, context) == 0);
    pthread_join(thread, NULL);
    OK(cu.cuCtxGetCurrent(&now));
    CHECK(now == context);
    context_finish();
    OK(cu.cuCtxGetCurrent(&now));
    CHECK(!now);
    GIVES(CUDA_ERROR_CONTEXT_IS_DESTROYED, cu.cuCtxPushCurrent_v2(context));
}

static void contexts_of_threads(void **state) {
    assert_int_equal(scene(without_context), 0);
    assert_int_equal(scene(threads_have_stacks), 0);
    assert_true(mistakes_none());
}

static size_t free_now(void) {
    size_t free, total;
    OK(cu.cuMemGetInfo_v2(&free, &total));
    return free;
}

static void counted_and_charged(void) {
    CUcontext context = context_begin(), again;
    size_t before = free_now(), total;
    OK(cu.cuDeviceTotalMem_v2(&total, 0));
    CHECK(before == total - MIB(16));
    OK(cu.cuDevicePrimaryCtxRetain(&again, 0));
    CHECK(again == context);
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuCtxCreate_v2(&again, 0, 0));
    CHECK(free_now() == before - MIB(16));
    OK(cu.cuCtxDestroy_v2(again));
    CHECK(free_now() == before);
    context_finish();
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuDevicePrimaryCtxRelease_v2(0));
}

static void primary_contexts(void **state) {
    assert_int_equal(scene(counted_and_charged), SCENE_MISTAKES);
    assert_true(mistake_says("released more often than retained"));
}

static void retain_gives_unavailable(void) {
    CUcontext context;
    OK(cu.cuInit(0));
    GIVES(CUDA_ERROR_DEVICE_UNAVAILABLE, cu.cuDevicePrimaryCtxRetain(&context, 0));
}

static void alone_first(void) {
    context_begin();
    peer_meet();
    peer_meet();
    context_finish();
}

static void alone_second(void) {
    int mode;
    peer_meet();
    retain_gives_unavailable();
    OK(cu.cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0));
    CHECK(mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
    peer_meet();
}

static void compute_modes(void **state) {
    setting("COMPUTE_MODE", "2");
    assert_int_equal(scene(retain_gives_unavailable), 0);
    setting("COMPUTE_MODE", "3");
    assert_int_equal(scene(plain), 0);
    assert_int_equal(scenes(alone_first, alone_second, 0), 0);
}

static void context_does_not_fit(void) {
    CUcontext context;
    OK(cu.cuInit(0));
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuDevicePrimaryCtxRetain(&context, 0));
}

static void memory_runs_out(void) {
    CUdeviceptr pointer, more;
    size_t free, total;
    context_begin();
    OK(cu.cuMemGetInfo_v2(&free, &total));
    OK(cu.cuMemAlloc_v2(&pointer, free));
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&more, 1));
    OK(cu.cuMemFree_v2(pointer));
    OK(cu.cuMemAlloc_v2(&more, 1));
    OK(cu.cuMemFree_v2(more));
    context_finish();
}

static void no_room(void **state) {
    setting("MEMORY_MIB", "20");
    assert_int_equal(scene(memory_runs_out), 0);
    setting("MEMORY_MIB", "8");
    assert_int_equal(scene(context_does_not_fit), 0);
}

static CUuuid uuid_first;

static void look_at_devices(void) {
    CUuuid one, two;
    int n;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&n));
    CHECK(n == 2);
    OK(cu.cuDeviceGetUuid_v2(&one, 0));
    OK(cu.cuDeviceGetUuid_v2(&two, 1));
    CHECK(memcmp(&one, &two, sizeof(one)));
    GIVES(CUDA_ERROR_INVALID_DEVICE, cu.cuDeviceGetUuid_v2(&two, 2));
    CHECK(one.bytes[15] == uuid_first.bytes[15]);
}

static void look_at_one(void) {
    CUuuid uuid;
    int n;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&n));
    CHECK(n == 1);
    OK(cu.cuDeviceGetUuid_v2(&uuid, 0));
    CHECK(uuid.bytes[15] == uuid_first.bytes[15]);
}

static void devices_seen(void **state) {
    setting("DEVICES", "2");
    uuid_first.bytes[15] = 0;
    assert_int_equal(scene(look_at_devices), 0);
    uuid_first.bytes[15] = 1;
    setenv("CUDA_VISIBLE_DEVICES", "1,0", 1);
    assert_int_equal(scene(look_at_devices), 0);
    setenv("CUDA_VISIBLE_DEVICES", "1,5,0", 1);
    assert_int_equal(scene(look_at_one), 0);
    setenv("CUDA_VISIBLE_DEVICES", "GPU-c5737461-6e64-2d69-6e20-677075206701", 1);
    assert_int_equal(scene(look_at_one), 0);
    setting("MIG", "2");
    setenv("CUDA_VISIBLE_DEVICES", "MIG-c5737461-6e64-2d69-6e20-677075206d01,MIG-c5", 1);
    assert_int_equal(scene(look_at_one), 0);
}

static CUuuid uuid_wanted;
static bool mig_wanted;

static void look_at_one_kind(void) {
    CUuuid uuid;
    char name[64];
    int n;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&n));
    CHECK(n == 1);
    OK(cu.cuDeviceGetUuid_v2(&uuid, 0));
    CHECK(uuid.bytes[15] == uuid_wanted.bytes[15]);
    OK(cu.cuDeviceGetName(name, sizeof(name), 0));
    CHECK(!strstr(name, " MIG ") == !mig_wanted);
}

static void look_at_none(void) { GIVES(CUDA_ERROR_NO_DEVICE, cu.cuInit(0)); }

/* Two instances of one card, and a card that is whole. */
static void instances_and_cards(void **state) {
    setting("DEVICES", "3");
    setting("MIG", "2");
    mig_wanted = true;
    uuid_wanted.bytes[15] = 0;
    assert_int_equal(scene(look_at_one_kind), 0); /* the first instance, and then no cards */
    setenv("CUDA_VISIBLE_DEVICES", "2,1,0", 1);
    uuid_wanted.bytes[15] = 1;
    assert_int_equal(scene(look_at_one_kind), 0);
    setenv("CUDA_VISIBLE_DEVICES", "MIG-c5737461-6e64-2d69-6e20-677075206d01", 1);
    assert_int_equal(scene(look_at_one_kind), 0);
    setenv("CUDA_VISIBLE_DEVICES", "GPU-c5737461-6e64-2d69-6e20-677075206d01", 1);
    assert_int_equal(scene(look_at_none), 0);
    setenv("CUDA_VISIBLE_DEVICES", "2", 1);
    mig_wanted = false;
    uuid_wanted.bytes[15] = 2;
    assert_int_equal(scene(look_at_one_kind), 0);
}

static void fork_after_init(void) {
    context_begin();
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(cu.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED);
        CHECK(cu.cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED);
        exit(0); /* and what the parent has is not the child's to report */
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    OK(cu.cuCtxSynchronize());
    context_finish();
}

static void forked(void **state) { assert_int_equal(scene(fork_after_init), 0); }

static void fails_as_asked(void) {
    CUdeviceptr pointer;
    context_begin();
    OK(cu.cuMemAlloc_v2(&pointer, 16));
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&pointer, 16));
    OK(cu.cuMemFree_v2(pointer));
    OK(cu.cuCtxSynchronize());
    file_make("faults", "cuCtxSynchronize:1+=999");
    GIVES(CUDA_ERROR_UNKNOWN, cu.cuCtxSynchronize());
    GIVES(CUDA_ERROR_UNKNOWN, cu.cuCtxSynchronize());
    file_make("faults", "other/cuCtxSynchronize:1+=999");
    OK(cu.cuCtxSynchronize());
    context_finish();
}

static void faults(void **state) {
    setting("FAULTS", "cuMemAlloc_v2:2=2,another-program/cuMemFree_v2:1+=999");
    assert_int_equal(scene(fails_as_asked), 0);
    assert_true(mistakes_none());
}

static void nonsense(void) {
    context_begin();
    context_finish();
}

static void faults_that_are_none(void **state) {
    setting("FAULTS", "cuMemAlloc_v2=2");
    assert_int_equal(scene(nonsense), SCENE_MISTAKES);
    assert_true(mistake_says("a fault that is none"));
}

static void error_sticks(void) {
    CUcontext context = context_begin(), other;
    CUdeviceptr pointer;
    OK(cu.cuMemAlloc_v2(&pointer, 16));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuCtxSynchronize());
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuMemFree_v2(pointer));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuMemAlloc_v2(&pointer, 16));
    OK(cu.cuCtxCreate_v2(&other, 0, 0)); /* another context has nothing of it */
    OK(cu.cuCtxSynchronize());
    OK(cu.cuCtxDestroy_v2(other));
    context_finish();
    CHECK(context_begin() != context);
    OK(cu.cuCtxSynchronize());
    context_finish();
}

static void sticky(void **state) {
    setting("FAULTS", "cuCtxSynchronize:1=700!");
    assert_int_equal(scene(error_sticks), 0);
    assert_true(mistakes_none());
}

static void by_name(void) {
    void *function;
    CUdriverProcAddressQueryResult result;
    const char *name;
    OK(cu.cuGetProcAddress_v2("cuMemAlloc", &function, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &result));
    CHECK(function == (void *)cu.cuMemAlloc_v2);
    GIVES(CUDA_ERROR_NOT_FOUND, cu.cuGetProcAddress_v2("cuMemAll", &function, 12000, 0, &result));
    CHECK(result == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    GIVES(CUDA_ERROR_NOT_FOUND, cu.cuGetProcAddress_v2("cuMemAlloc", &function, 3020, 0, &result));
    CHECK(result == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    OK(cu.cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &name));
    CHECK(strcmp(name, "CUDA_ERROR_ILLEGAL_ADDRESS") == 0);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuGetErrorName((CUresult)12345, &name));
}

static void names(void **state) { assert_int_equal(scene(by_name), 0); }

#define TEST(function) cmocka_unit_test_setup_teardown(function, harness_setup, harness_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(plain_life),
        TEST(states),
        TEST(settings),
        TEST(contexts_of_threads),
        TEST(primary_contexts),
        TEST(compute_modes),
        TEST(no_room),
        TEST(devices_seen),
        TEST(instances_and_cards),
        TEST(forked),
        TEST(faults),
        TEST(faults_that_are_none),
        TEST(sticky),
        TEST(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
