/* SPDX-License-Identifier: Apache-2.0 */
/* Device and host memory, copies, streams and events: what must work, and mistakes that must show. */
#include "tests/cuda-standin/harness.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

static char pinned_space[1 << 16] __attribute__((__aligned__(4096)));

static void touch_device_memory(void) {
    context_begin();
    volatile char *pointer = (char *)device_filled(4096, 1);
    signal(SIGSEGV, SIG_DFL); /* a sanitizer would report it and exit */
    *pointer = 2;
}

static void host_cannot_touch(void **state) { assert_int_equal(scene(touch_device_memory), 128 + SIGSEGV); }

static void there_and_back(void) {
    char from[1000], to[1000];
    context_begin();
    CUdeviceptr one = device_filled(3000, 7), two = device_filled(3000, 8);
    CHECK(one != two);
    memset(from, 9, sizeof(from));
    OK(cu.cuMemcpyHtoD_v2(one + 1000, from, 1000));
    OK(cu.cuMemcpyDtoD_v2(two, one, 2000));
    OK(cu.cuMemcpyDtoH_v2(to, two + 500, 1000));
    CHECK(bytes_are(to, 7, 500) && bytes_are(to + 500, 9, 500));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(to, two + 2500, 1000));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(to, (CUdeviceptr)from, 10));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyHtoD_v2(two, (void *)one, 10));
    OK(cu.cuMemFree_v2(one));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(to, one, 10));
    OK(cu.cuMemFree_v2(two));
    context_finish();
}

static void copies(void **state) {
    assert_int_equal(scene(there_and_back), 0);
    assert_true(mistakes_none());
}

static void rows(void) {
    char to[64];
    context_begin();
    CUdeviceptr from = device_filled(1024, 1);
    for (int row = 0; row < 4; row++)
        OK(cu.cuMemsetD8_v2(from + row * 256 + 8, 10 + row, 16));
    CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                          .srcDevice = from,
                          .srcPitch = 256,
                          .srcXInBytes = 8,
                          .dstMemoryType = CU_MEMORYTYPE_HOST,
                          .dstHost = to,
                          .dstPitch = 16,
                          .WidthInBytes = 16,
                          .Height = 4};
    OK(cu.cuMemcpy2DAsync_v2(&copy, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    for (int row = 0; row < 4; row++)
        CHECK(bytes_are(to + row * 16, 10 + row, 16));
    copy.Height = 5;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpy2DAsync_v2(&copy, NULL));
    copy.Height = 4;
    copy.dstPitch = 15;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpy2DAsync_v2(&copy, NULL));
    OK(cu.cuMemFree_v2(from));
    context_finish();
}

static void copies_of_rows(void **state) { assert_int_equal(scene(rows), 0); }

static CUstream stream;
static CUevent event;

static CUdeviceptr begin_pinned(void) {
    context_begin();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cu.cuMemHostRegister_v2(pinned_space, sizeof(pinned_space), CU_MEMHOSTREGISTER_PORTABLE));
    return device_filled(sizeof(pinned_space), 5);
}

static void finish_pinned(CUdeviceptr pointer) {
    OK(cu.cuMemFree_v2(pointer));
    OK(cu.cuMemHostUnregister(pinned_space));
    OK(cu.cuEventDestroy_v2(event));
    OK(cu.cuStreamDestroy_v2(stream));
    context_finish();
}

/* Holds up the device until the test writes into the pipe. */
static int gate[2];
static void gate_wait(void *unused) {
    char byte;
    CHECK(read(gate[0], &byte, 1) == 1);
}
static void gate_close(CUstream in) {
    CHECK(pipe(gate) == 0);
    OK(cu.cuLaunchHostFunc(in, gate_wait, NULL));
}
static void gate_open(void) { CHECK(write(gate[1], "", 1) == 1); }

static void not_waited(void) {
    CUdeviceptr pointer = begin_pinned();
    gate_close(stream);
    memset(pinned_space, 5, sizeof(pinned_space)); /* what the copy will bring, from an earlier one */
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, sizeof(pinned_space), stream));
    OK(cu.cuEventRecord(event, stream));
    CHECK(bytes_are(pinned_space, 0xCB, sizeof(pinned_space)));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuEventQuery(event));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(stream));
    gate_open();
    OK(cu.cuEventSynchronize(event));
    OK(cu.cuEventQuery(event));
    CHECK(bytes_are(pinned_space, 5, sizeof(pinned_space)));
    finish_pinned(pointer);
}

static void changed_too_early(void) {
    CUstream other;
    CUdeviceptr pointer = begin_pinned();
    OK(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    gate_close(stream);
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, sizeof(pinned_space), stream));
    OK(cu.cuMemsetD8Async(pointer, 6, 100, other)); /* the change is submitted behind it, and does not wait */
    gate_open();
    OK(cu.cuStreamSynchronize(stream));
    CHECK(bytes_are(pinned_space, 6, 100) && bytes_are(pinned_space + 100, 5, 1000));
    OK(cu.cuStreamDestroy_v2(other));
    finish_pinned(pointer);
}

/* A point in a stream that does not wait for another is reached before the other's work is done. */
static void overtaken(void) {
    CUstream other;
    CUdeviceptr pointer = begin_pinned();
    OK(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 50; i++)
        OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, sizeof(pinned_space), stream));
    OK(cu.cuEventRecord(event, other));
    OK(cu.cuEventSynchronize(event));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(stream));
    OK(cu.cuStreamDestroy_v2(other));
    finish_pinned(pointer);
}

static void streams_overtake(void **state) {
    setting("DELAY_US", "5000");
    assert_int_equal(scene(overtaken), 0);
    assert_true(mistakes_none());
}

static void copies_run_later(void **state) {
    assert_int_equal(scene(not_waited), 0);
    assert_int_equal(scene(changed_too_early), 0);
    assert_true(mistakes_none());
}

static void *other_thread(void *context) {
    OK(cu.cuCtxPushCurrent_v2(context));
    OK(cu.cuStreamQuery(CU_STREAM_PER_THREAD));
    OK(cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
    OK(cu.cuCtxPopCurrent_v2(NULL));
    return NULL;
}

/* Each thread has a default stream of its own. */
static void threads_have_streams(void) {
    CUcontext context;
    pthread_t thread;
    CUdeviceptr pointer = begin_pinned();
    OK(cu.cuCtxGetCurrent(&context));
    gate_close(CU_STREAM_PER_THREAD);
    CHECK(pthread_create(&thread, NULL, other_thread, context) == 0 && pthread_join(thread, NULL) == 0);
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(CU_STREAM_PER_THREAD));
    gate_open();
    OK(cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
    finish_pinned(pointer);
}

static void legacy_stream_orders(void) {
    CUstream blocking;
    CUdeviceptr pointer = begin_pinned();
    OK(cu.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    OK(cu.cuMemsetD8Async(pointer, 1, 100, blocking));
    OK(cu.cuMemsetD8Async(pointer, 2, 100, NULL));
    OK(cu.cuMemsetD8Async(pointer, 3, 100, blocking));
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, 100, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    CHECK(bytes_are(pinned_space, 3, 100));

    /* An event orders streams that otherwise have no order. */
    gate_close(blocking);
    OK(cu.cuMemsetD8Async(pointer, 4, 100, blocking));
    OK(cu.cuEventRecord(event, blocking));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuStreamWaitEvent((CUstream)12345, event, 0));
    OK(cu.cuStreamWaitEvent(stream, event, 0));
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, 100, stream));
    gate_open();
    OK(cu.cuStreamSynchronize(stream));
    CHECK(bytes_are(pinned_space, 4, 100));
    OK(cu.cuStreamDestroy_v2(blocking));
    finish_pinned(pointer);
}

static void streams(void **state) {
    assert_int_equal(scene(legacy_stream_orders), 0);
    assert_int_equal(scene(threads_have_streams), 0);
    assert_true(mistakes_none());
}

static void pageable(void) {
    char to[100] = {0};
    context_begin();
    CUdeviceptr pointer = device_filled(100, 5);
    OK(cu.cuMemcpyDtoHAsync_v2(to, pointer, 100, NULL));
    CHECK(bytes_are(to, 5, 100)); /* returned when it was done */
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void registrations(void) {
    context_begin();
    CUdeviceptr pointer = device_filled(8192, 5);
    OK(cu.cuMemHostRegister_v2(pinned_space, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    OK(cu.cuMemHostRegister_v2(pinned_space + 4096, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    OK(cu.cuMemHostRegister_v2(pinned_space + 16384, 4096, CU_MEMHOSTREGISTER_READ_ONLY));
    GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister_v2(pinned_space + 100, 100, 0));
    GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister_v2(pinned_space + 4096 * 3, 8192, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemHostRegister_v2((void *)4096, 4096, 0));
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space + 100, pointer, 1000, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoHAsync_v2(pinned_space + 4000, pointer, 1000, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoHAsync_v2(pinned_space + 8100, pointer, 1000, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoHAsync_v2(pinned_space + 16000, pointer, 1000, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoHAsync_v2(pinned_space + 16384, pointer, 1000, NULL));
    OK(cu.cuMemcpyHtoDAsync_v2(pointer, pinned_space + 16384, 1000, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    GIVES(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(pinned_space + 100));
    OK(cu.cuMemHostUnregister(pinned_space));
    OK(cu.cuMemHostUnregister(pinned_space + 4096));
    OK(cu.cuMemHostUnregister(pinned_space + 16384));
    GIVES(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(pinned_space));
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void host_memory(void **state) {
    assert_int_equal(scene(pageable), 0);
    assert_int_equal(scene(registrations), 0);
    assert_true(mistakes_none());
}

static void *gate_open_later(void *unused) {
    while (!mistake_says("in use") && !mistake_says("copies use it"))
        usleep(1000);
    gate_open();
    return NULL;
}

static void unregister_too_early(void) {
    pthread_t thread;
    CUdeviceptr pointer = begin_pinned();
    gate_close(stream);
    OK(cu.cuMemcpyDtoHAsync_v2(pinned_space, pointer, 100, stream));
    CHECK(pthread_create(&thread, NULL, gate_open_later, NULL) == 0);
    OK(cu.cuMemHostUnregister(pinned_space));
    pthread_join(thread, NULL);
    OK(cu.cuMemHostRegister_v2(pinned_space, sizeof(pinned_space), CU_MEMHOSTREGISTER_PORTABLE));
    finish_pinned(pointer);
}

static void unregistered_in_use(void **state) {
    assert_int_equal(scene(unregister_too_early), SCENE_MISTAKES);
    assert_true(mistake_says("is unregistered while copies use it"));
}

static void unmap_registered(void) {
    context_begin();
    void *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OK(cu.cuMemHostRegister_v2(memory, 8192, 0));
    munmap(memory, 8192);
    OK(cu.cuMemHostUnregister(memory));
    context_finish();
}

static void unmapped_while_registered(void **state) {
    assert_int_equal(scene(unmap_registered), SCENE_MISTAKES);
    assert_true(mistake_says("was unmapped while it was registered"));
}

static void free_twice(void) {
    context_begin();
    CUdeviceptr pointer = device_filled(8192, 1);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(pointer + 1));
    OK(cu.cuMemFree_v2(pointer));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(pointer));
    context_finish();
}

static void freed_twice(void **state) {
    assert_int_equal(scene(free_twice), SCENE_MISTAKES);
    assert_true(mistake_says("which is not the start of an allocation"));
    assert_true(mistake_says("which is not allocated"));
}

static void wait_for_nothing(void) {
    CUevent none;
    context_begin();
    OK(cu.cuEventCreate(&none, 0));
    OK(cu.cuEventSynchronize(none));
    OK(cu.cuEventDestroy_v2(none));
    context_finish();
}

static void use_destroyed(void) {
    CUevent gone;
    CUstream away;
    context_begin();
    OK(cu.cuEventCreate(&gone, 0));
    OK(cu.cuStreamCreate(&away, 0));
    OK(cu.cuEventRecord(gone, away));
    OK(cu.cuEventDestroy_v2(gone));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventQuery(gone));
    OK(cu.cuStreamDestroy_v2(away));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuStreamSynchronize(away));
    context_finish();
}

static void interprocess(void) {
    CUevent between;
    context_begin();
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuEventCreate(&between, CU_EVENT_INTERPROCESS));
    OK(cu.cuEventCreate(&between, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    OK(cu.cuEventDestroy_v2(between));
    context_finish();
}

static void events_unrecorded(void **state) {
    assert_int_equal(scene(wait_for_nothing), SCENE_MISTAKES);
    assert_true(mistake_says("never recorded"));
}

static void events_destroyed(void **state) {
    assert_int_equal(scene(use_destroyed), SCENE_MISTAKES);
    assert_true(mistake_says("destroyed"));
}

static void events_between_processes(void **state) { assert_int_equal(scene(interprocess), 0); }

static void other_device(void) {
    CUcontext second;
    CUstream there;
    CUevent here;
    char to[16];
    context_begin();
    CUdeviceptr pointer = device_filled(16, 1);
    OK(cu.cuEventCreate(&here, 0));
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxPushCurrent_v2(second));
    OK(cu.cuStreamCreate(&there, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoHAsync_v2(to, pointer, 16, there));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventRecord(here, there));
    OK(cu.cuCtxPopCurrent_v2(NULL));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuMemcpyDtoHAsync_v2(to, pointer, 16, there));
    OK(cu.cuCtxPushCurrent_v2(second));
    OK(cu.cuStreamDestroy_v2(there));
    OK(cu.cuCtxPopCurrent_v2(NULL));
    OK(cu.cuDevicePrimaryCtxRelease_v2(1));
    OK(cu.cuEventDestroy_v2(here));
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void wrong_device(void **state) {
    setting("DEVICES", "2");
    assert_int_equal(scene(other_device), 0);
    assert_true(mistakes_none());
}

static void look_at_pointers(void) {
    CUcontext context = context_begin(), found;
    CUdeviceptr pointer = device_filled(3000, 1), base;
    size_t size;
    unsigned long long id, again;
    unsigned int type;
    int device, capable;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
    void *values[] = {&found, &type, &id, &device, &capable};
    OK(cu.cuMemGetAddressRange_v2(&base, &size, pointer + 100));
    CHECK(base == pointer && size == 3000);
    OK(cu.cuPointerGetAttributes(ARRAY_SIZE(attributes), attributes, values, pointer + 100));
    CHECK(found == context && type == CU_MEMORYTYPE_DEVICE && device == 0 && capable == 1);
    OK(cu.cuMemFree_v2(pointer));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuPointerGetAttribute(&again, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
    GIVES(CUDA_ERROR_NOT_FOUND, cu.cuMemGetAddressRange_v2(&base, &size, pointer));
    CUdeviceptr second = device_filled(3000, 1);
    CHECK(second == pointer); /* the address is back, */
    OK(cu.cuPointerGetAttribute(&again, CU_POINTER_ATTRIBUTE_BUFFER_ID, second));
    CHECK(again != id); /* and the buffer another */
    OK(cu.cuMemFree_v2(second));
    OK(cu.cuPointerGetAttributes(ARRAY_SIZE(attributes), attributes, values, (CUdeviceptr)&size));
    CHECK(!found && !type && !id);
    context_finish();
}

static void pointers(void **state) {
    assert_int_equal(scene(look_at_pointers), 0);
    assert_true(mistakes_none());
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, harness_setup, harness_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(host_cannot_touch),         TEST(copies),       TEST(copies_of_rows),    TEST(copies_run_later),
        TEST(streams_overtake),          TEST(streams),      TEST(host_memory),       TEST(unregistered_in_use),
        TEST(unmapped_while_registered), TEST(freed_twice),  TEST(events_unrecorded), TEST(events_destroyed),
        TEST(events_between_processes),  TEST(wrong_device), TEST(pointers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
