/* SPDX-License-Identifier: Apache-2.0 */
/* What is left at the end, work that hangs or fails on the device, and the driver's slow parts. */
#include "tests/cuda-standin/harness.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <time.h>

static char host[8192] __attribute__((__aligned__(4096)));

static void leave_all(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemPoolProps pool_prop = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr pointer;
    CUmemoryPool pool;
    CUstream stream;
    CUevent event;
    void *pinned;
    context_begin();
    device_filled(100, 1);
    OK(cu.cuMemHostRegister_v2(host, sizeof(host), 0));
    OK(cu.cuMemHostAlloc(&pinned, 4096, 0));
    OK(cu.cuStreamCreate(&stream, 0));
    OK(cu.cuEventCreate(&event, 0));
    OK(cu.cuMemCreate(&handle, 2 << 20, &prop, 0));
    OK(cu.cuMemAddressReserve(&pointer, 2 << 20, 0, 0, 0));
    OK(cu.cuMemMap(pointer, 2 << 20, 0, handle, 0));
    OK(cu.cuMemPoolCreate(&pool, &pool_prop));
    OK(cu.cuMemAllocFromPoolAsync(&pointer, 100, pool, NULL));
}

static const char *const left[] = {
    "1 contexts left",
    "1 allocations left",
    "1 mappings left",
    "1 allocations from pools left",
    "1 registered pieces of host memory left",
    "1 pieces of pinned host memory left",
    "1 streams left",
    "1 events left",
    "1 handles of physical memory left",
    "1 reservations of addresses left",
    "1 pools left",
};

static void leaks_fail(void **state) {
    assert_int_equal(scene(leave_all), SCENE_MISTAKES);
    for (size_t i = 0; i < ARRAY_SIZE(left); i++)
        assert_true(mistake_says(left[i]));
}

static void leaks_are_said(void **state) {
    setting("LEAKS", "report");
    assert_int_equal(scene(leave_all), 0);
    assert_true(mistake_says("1 streams left"));
}

static void leaks_do_not_matter(void **state) {
    setting("LEAKS", "ignore");
    assert_int_equal(scene(leave_all), 0);
    assert_true(mistakes_none());
}

static void context_with_things(void) {
    context_begin();
    device_filled(100, 1);
    context_finish();
}

static void contexts_end_empty(void **state) {
    assert_int_equal(scene(context_with_things), SCENE_MISTAKES);
    assert_true(mistake_says("a context ends: 1 allocations left"));
}

static void broken_context(void) {
    context_begin();
    device_filled(100, 1);
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuCtxSynchronize());
    context_finish();
}

static void tidy_up(void) { context_finish(); }

static void late_end(void) {
    atexit(tidy_up); /* before the driver is there: it runs late */
    context_begin();
}

static void exit_handlers_come_first(void **state) {
    assert_int_equal(scene(late_end), 0);
    assert_true(mistakes_none());
}

/* What is in a broken context cannot be ended otherwise. */
static void broken_contexts_may_be_left(void **state) {
    setting("FAULTS", "cuCtxSynchronize:1=700!");
    assert_int_equal(scene(broken_context), 0);
    assert_true(mistakes_none());
}

static void imports_left_first(void) {
    CUipcMemHandle handle;
    context_begin();
    CUdeviceptr pointer = device_filled(100, 1);
    OK(cu.cuIpcGetMemHandle(&handle, pointer));
    peer_send(&handle, sizeof(handle));
    peer_meet();
    char byte;
    CHECK(read(peer, &byte, 1) == 0);
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void imports_left_second(void) {
    CUipcMemHandle handle;
    CUdeviceptr pointer;
    context_begin();
    peer_receive(&handle, sizeof(handle));
    OK(cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    peer_meet();
}

static void imports_left(void **state) {
    assert_int_equal(scenes(imports_left_first, imports_left_second, 0), SCENE_MISTAKES);
    assert_true(mistake_says("1 imported allocations left"));
}

static void waits_for_release(void) {
    CUevent event;
    char to[100];
    context_begin();
    CUdeviceptr pointer = device_filled(100, 5);
    OK(cu.cuMemHostRegister_v2(host, sizeof(host), 0));
    OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    file_make("faults", "run:1=hang");
    CHECK(!file_is_there("hung"));
    OK(cu.cuMemcpyDtoHAsync_v2(host, pointer, 100, NULL));
    OK(cu.cuEventRecord(event, NULL));
    for (int i = 0; i < 50; i++) {
        GIVES(CUDA_ERROR_NOT_READY, cu.cuEventQuery(event));
        usleep(1000);
    }
    CHECK(bytes_are(host, 0xCB, 100));
    while (!file_is_there("hung"))
        usleep(1000);
    file_make("release", "");
    OK(cu.cuEventSynchronize(event));
    CHECK(bytes_are(host, 5, 100));
    OK(cu.cuEventDestroy_v2(event));
    OK(cu.cuMemHostUnregister(host));
    OK(cu.cuMemcpyDtoH_v2(to, pointer, 100));
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void *call_hangs(void *context) {
    OK(cu.cuCtxPushCurrent_v2(context));
    OK(cu.cuCtxSynchronize());
    return NULL;
}

static void call_hangs_alone(void) {
    pthread_t thread;
    CUcontext context = context_begin();
    file_make("faults", "cuCtxSynchronize:1=hang");
    CHECK(pthread_create(&thread, NULL, call_hangs, context) == 0);
    for (int i = 0; i < 50; i++) { /* other threads go on */
        CUdeviceptr pointer = device_filled(100, 5);
        OK(cu.cuMemFree_v2(pointer));
        CHECK(pthread_tryjoin_np(thread, NULL) != 0);
    }
    file_make("release", "");
    CHECK(pthread_join(thread, NULL) == 0);
    context_finish();
}

static void hangs(void **state) {
    assert_int_equal(scene(waits_for_release), 0);
    file_remove("release");
    file_remove("faults");
    assert_int_equal(scene(call_hangs_alone), 0);
    assert_true(mistakes_none());
}

static void work_fails(void) {
    CUevent event;
    context_begin();
    CUdeviceptr pointer = device_filled(100, 5);
    OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    file_make("faults", "run:2=700");
    OK(cu.cuMemsetD8Async(pointer, 1, 100, NULL));
    OK(cu.cuMemsetD8Async(pointer, 2, 100, NULL));
    CUresult error = cu.cuEventRecord(event, NULL); /* the failure may be there already */
    CHECK(error == CUDA_SUCCESS || error == CUDA_ERROR_ILLEGAL_ADDRESS);
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(NULL));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuEventQuery(event));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuMemFree_v2(pointer));
    context_finish();
}

static void failure_on_the_device(void **state) {
    assert_int_equal(scene(work_fails), 0);
    assert_true(mistakes_none());
}

/* Registers while the other scene has the lock of the driver's slow parts. */
static void register_slowly(void) {
    struct timespec from, to;
    context_begin();
    peer_meet();
    clock_gettime(CLOCK_MONOTONIC, &from);
    OK(cu.cuMemHostRegister_v2(host, sizeof(host), 0));
    clock_gettime(CLOCK_MONOTONIC, &to);
    CHECK((to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000 >= 20);
    peer_send("", 1);
    OK(cu.cuMemHostUnregister(host));
    context_finish();
}

static void hold_driver(void) {
    char path[512], byte;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    struct pollfd done = {.fd = peer, .events = POLLIN};
    peer_receive(&byte, 1); /* its context is there */
    snprintf(path, sizeof(path), "%s/driver-lock", harness_directory);
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fcntl(fd, F_SETLKW, &lock) == 0);
    peer_send("", 1);
    CHECK(poll(&done, 1, 100) == 0);
    lock.l_type = F_UNLCK;
    CHECK(fcntl(fd, F_SETLK, &lock) == 0);
    peer_receive(&byte, 1);
}

static void slow_registration(void **state) {
    setting("REGISTER_MS", "20");
    assert_int_equal(scenes(register_slowly, hold_driver, 0), 0);
    assert_true(mistakes_none());
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, harness_setup, harness_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(leaks_fail),
        TEST(leaks_are_said),
        TEST(leaks_do_not_matter),
        TEST(contexts_end_empty),
        TEST(broken_contexts_may_be_left),
        TEST(imports_left),
        TEST(exit_handlers_come_first),
        TEST(hangs),
        TEST(failure_on_the_device),
        TEST(slow_registration),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
