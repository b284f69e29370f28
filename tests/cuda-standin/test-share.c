/* SPDX-License-Identifier: Apache-2.0 */
/* Memory between processes by legacy handles. */
#include "tests/cuda-standin/harness.h"

#include <signal.h>

static const size_t size = 1 << 20;

static void receive_handle(CUipcMemHandle *handle) { peer_receive(handle, sizeof(*handle)); }

static void export_one(void) {
    CUipcMemHandle handle, again;
    CUdeviceptr pointer, opened;
    context_begin();
    pointer = device_filled(size, 3);
    OK(cu.cuMemsetD8_v2(pointer + 1000, 4, 1000));
    OK(cu.cuIpcGetMemHandle(&handle, pointer));
    OK(cu.cuIpcGetMemHandle(&again, pointer + 1000)); /* of the whole allocation, wherever it points */
    CHECK(memcmp(&handle, &again, sizeof(handle)) == 0);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcOpenMemHandle_v2(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    peer_send(&handle, sizeof(handle));
    peer_send(&pointer, sizeof(pointer));
    peer_meet(); /* it has it open */
    OK(cu.cuMemsetD8_v2(pointer, 9, 10));
    peer_meet();
    peer_meet(); /* it has closed it */
    OK(cu.cuMemFree_v2(pointer));
    peer_meet();
    context_finish();
}

static void import_one(void) {
    CUipcMemHandle handle, garbage;
    CUdeviceptr theirs, pointer, again;
    size_t length, before, after, total;
    unsigned char bytes[2000];
    context_begin();
    receive_handle(&handle);
    peer_receive(&theirs, sizeof(theirs));
    for (size_t i = 0; i < sizeof(handle); i++) { /* each of its bytes matters */
        garbage = handle;
        garbage.reserved[i] ^= 1;
        GIVES(CUDA_ERROR_INVALID_HANDLE,
              cu.cuIpcOpenMemHandle_v2(&pointer, garbage, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    }
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcOpenMemHandle_v2(&pointer, handle, 0));
    OK(cu.cuMemGetInfo_v2(&before, &total));
    OK(cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu.cuMemGetInfo_v2(&after, &total));
    CHECK(before == after);   /* it is there once */
    CHECK(pointer != theirs); /* but elsewhere */
    OK(cu.cuMemGetAddressRange_v2(&again, &length, pointer + 100));
    CHECK(again == pointer && length == size);
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 2000));
    CHECK(bytes_are(bytes, 3, 1000) && bytes_are(bytes + 1000, 4, 1000));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&garbage, pointer)); /* what is imported is not passed on */
    peer_meet();
    peer_meet();
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 2000));
    CHECK(bytes_are(bytes, 9, 10)); /* the same memory */
    OK(cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(again == pointer);
    OK(cu.cuIpcCloseMemHandle(pointer));
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 2000)); /* once more to close */
    OK(cu.cuIpcCloseMemHandle(pointer));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(bytes, pointer, 2000));
    peer_meet();
    peer_meet();
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    context_finish();
}

static void legacy(void **state) {
    assert_int_equal(scenes(export_one, import_one, 0), 0);
    assert_true(mistakes_none());
}

static void export_plain(void) {
    CUipcMemHandle handle;
    context_begin();
    CUdeviceptr pointer = device_filled(size, 3);
    OK(cu.cuIpcGetMemHandle(&handle, pointer));
    peer_send(&handle, sizeof(handle));
    peer_meet();
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static CUdeviceptr import_plain(void) {
    CUipcMemHandle handle;
    CUdeviceptr pointer;
    context_begin();
    receive_handle(&handle);
    OK(cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    return pointer;
}

static void export_and_change(void) {
    CUipcMemHandle handle;
    context_begin();
    CUdeviceptr pointer = device_filled(size, 3);
    OK(cu.cuIpcGetMemHandle(&handle, pointer));
    peer_send(&handle, sizeof(handle));
    peer_meet(); /* the copy is submitted, and waits */
    OK(cu.cuMemsetD8_v2(pointer, 4, 100));
    peer_meet();
    peer_meet();
    OK(cu.cuMemFree_v2(pointer));
    context_finish();
}

static void hold_up(void *opened) {
    char byte;
    CHECK(read(*(int *)opened, &byte, 1) == 1);
}

static void import_and_copy(void) {
    int gate[2];
    void *to;
    CUdeviceptr pointer = import_plain();
    CHECK(pipe(gate) == 0);
    OK(cu.cuMemHostAlloc(&to, size, 0));
    OK(cu.cuLaunchHostFunc(NULL, hold_up, &gate[0]));
    OK(cu.cuMemcpyDtoHAsync_v2(to, pointer, size, NULL));
    peer_meet();
    peer_meet();
    CHECK(write(gate[1], "", 1) == 1);
    OK(cu.cuStreamSynchronize(NULL));
    CHECK(bytes_are(to, 4, 100) && bytes_are((char *)to + 100, 3, size - 100));
    OK(cu.cuMemFreeHost(to));
    OK(cu.cuIpcCloseMemHandle(pointer));
    peer_meet();
    context_finish();
}

static void changed_while_copied(void **state) {
    assert_int_equal(scenes(export_and_change, import_and_copy, 0), 0);
    assert_true(mistakes_none());
}

static void reopen_refused(void) {
    CUipcMemHandle handle;
    CUdeviceptr pointer, again;
    context_begin();
    receive_handle(&handle);
    OK(cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    GIVES(CUDA_ERROR_ALREADY_MAPPED, cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu.cuIpcCloseMemHandle(pointer));
    peer_meet();
    context_finish();
}

static void opened_twice(void **state) {
    setting("REOPEN", "refuse");
    assert_int_equal(scenes(export_plain, reopen_refused, 0), 0);
    assert_true(mistakes_none());
}

static void import_freed(void) {
    char bytes[1000];
    CUdeviceptr pointer = import_plain();
    peer_meet();
    while (!mistake_says("another process has it open"))
        usleep(1000);
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 1000)); /* poison is written after that is said */
    for (int tries = 0; !bytes_are(bytes, 0xDB, 1000); tries++) {
        CHECK(tries < 10000);
        usleep(1000);
        OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 1000));
    }
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(pointer)); /* an importer closes */
    OK(cu.cuIpcCloseMemHandle(pointer));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcCloseMemHandle(pointer));
    context_finish();
}

static void freed_while_imported(void **state) {
    assert_int_equal(scenes(export_plain, import_freed, SCENE_MISTAKES), SCENE_MISTAKES);
    assert_true(mistake_says("freed while another process has it open"));
    assert_true(mistake_says("imported, and must be closed"));
    assert_true(mistake_says("not the start of an open one"));
}

static void die_exporting(void) {
    CUipcMemHandle handle;
    pid_t pid = getpid();
    context_begin();
    CUdeviceptr one = device_filled(size, 3), two = device_filled(size, 4);
    OK(cu.cuIpcGetMemHandle(&handle, one));
    peer_send(&pid, sizeof(pid));
    peer_send(&handle, sizeof(handle));
    OK(cu.cuIpcGetMemHandle(&handle, two));
    peer_send(&handle, sizeof(handle));
    for (;;)
        pause();
}

static void outlive(void) {
    CUipcMemHandle handle;
    CUdeviceptr pointer, second;
    size_t free_now, total;
    char bytes[1000];
    pid_t exporter;
    context_begin();
    peer_receive(&exporter, sizeof(exporter));
    receive_handle(&handle);
    OK(cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    receive_handle(&handle);
    CHECK(kill(exporter, SIGKILL) == 0);
    CHECK(read(peer, bytes, 1) == 0); /* it is gone */
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuIpcOpenMemHandle_v2(&second, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 1000));
    CHECK(bytes_are(bytes, 3, 1000));
    OK(cu.cuMemGetInfo_v2(&free_now, &total));
    CHECK(free_now == total - MIB(16) - size); /* its context and the other allocation are given back */
    OK(cu.cuIpcCloseMemHandle(pointer));
    OK(cu.cuMemGetInfo_v2(&free_now, &total));
    CHECK(free_now == total - MIB(16));
    context_finish();
}

static void exporter_dies(void **state) {
    assert_int_equal(scenes(die_exporting, outlive, 128 + SIGKILL), 0);
    assert_true(mistakes_none());
}

static void importer_is_killed(void) {
    import_plain();
    peer_meet();
    raise(SIGKILL);
}

static void export_to_dying(void) {
    CUipcMemHandle handle;
    char byte;
    size_t free_now, total;
    context_begin();
    CUdeviceptr pointer = device_filled(size, 3);
    OK(cu.cuIpcGetMemHandle(&handle, pointer));
    peer_send(&handle, sizeof(handle));
    peer_meet();
    CHECK(read(peer, &byte, 1) == 0);
    OK(cu.cuMemGetInfo_v2(&free_now, &total));
    CHECK(free_now == total - MIB(16) - size);
    OK(cu.cuMemFree_v2(pointer)); /* nobody has it open any more */
    context_finish();
}

static void importer_dies(void **state) {
    assert_int_equal(scenes(export_to_dying, importer_is_killed, 0), 128 + SIGKILL);
    assert_true(mistakes_none());
}

static void import_elsewhere(void) {
    CUipcMemHandle handle;
    CUdeviceptr pointer;
    CUcontext second;
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxPushCurrent_v2(second));
    receive_handle(&handle);
    GIVES(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
          cu.cuIpcOpenMemHandle_v2(&pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu.cuDevicePrimaryCtxRelease_v2(1));
    peer_meet();
}

static void on_another_device(void **state) {
    setting("DEVICES", "2");
    assert_int_equal(scenes(export_plain, import_elsewhere, 0), 0);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, harness_setup, harness_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(legacy),        TEST(changed_while_copied), TEST(opened_twice),      TEST(freed_while_imported),
        TEST(exporter_dies), TEST(importer_dies),        TEST(on_another_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
