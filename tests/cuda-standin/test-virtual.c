/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that travels as descriptors: virtual memory management and pools. */
#include "tests/cuda-standin/harness.h"

#include <fcntl.h>

/* ---- virtual memory management ---- */

static CUmemAllocationProp properties(CUmemAllocationHandleType types) {
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = types,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
}

static const CUmemAccessDesc access_all = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static const CUmemAccessDesc access_read = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};

static void vmm_export(void) {
    CUmemAllocationProp prop = properties(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), found;
    CUmemGenericAllocationHandle one, two, again;
    CUipcMemHandle legacy_handle;
    CUdeviceptr pointer, base;
    size_t piece, length;
    char bytes[100];
    int fd;
    context_begin();
    OK(cu.cuMemGetAllocationGranularity(&piece, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemCreate(&one, piece / 2, &prop, 0));
    OK(cu.cuMemCreate(&one, piece, &prop, 0));
    OK(cu.cuMemCreate(&two, piece, &prop, 0));
    OK(cu.cuMemAddressReserve(&pointer, 4 * piece, 0, 0, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemMap(pointer, 2 * piece, 0, one, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemMap(pointer + 4 * piece, piece, 0, one, 0));
    OK(cu.cuMemMap(pointer, piece, 0, one, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemMap(pointer, piece, 0, two, 0));
    OK(cu.cuMemMap(pointer + piece, piece, 0, two, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(pointer, 1, piece)); /* nobody has access yet */
    OK(cu.cuMemSetAccess(pointer, 2 * piece, &access_all, 1));
    OK(cu.cuMemsetD8_v2(pointer, 6, 2 * piece)); /* across two mappings */
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer + piece - 50, 100));
    CHECK(bytes_are(bytes, 6, 100));
    OK(cu.cuMemGetAddressRange_v2(&base, &length, pointer + piece + 5));
    CHECK(base == pointer + piece && length == piece);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&legacy_handle, pointer));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(pointer));
    OK(cu.cuMemRetainAllocationHandle(&again, (void *)(pointer + piece)));
    CHECK(again == two);
    OK(cu.cuMemGetAllocationPropertiesFromHandle(&found, again));
    CHECK(found.location.id == 0 && found.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    OK(cu.cuMemExportToShareableHandle(&fd, again, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    OK(cu.cuMemRelease(again));
    OK(cu.cuMemRelease(two));
    OK(cu.cuMemRelease(one));
    peer_send_fd(fd);
    close(fd);
    peer_meet();
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer + piece, 100)); /* mapped, though the handle is released */
    CHECK(bytes_are(bytes, 7, 100));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemUnmap(pointer, piece / 2));
    OK(cu.cuMemUnmap(pointer, 2 * piece));
    OK(cu.cuMemAddressFree(pointer, 4 * piece));
    peer_meet();
    context_finish();
}

static void vmm_import(void) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr pointer;
    char bytes[100];
    context_begin();
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuMemImportFromShareableHandle(&handle, (void *)2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    int fd = peer_receive_fd();
    OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    OK(cu.cuMemAddressReserve(&pointer, 2 << 20, 0, 0, 0));
    OK(cu.cuMemMap(pointer, 2 << 20, 0, handle, 0));
    OK(cu.cuMemRelease(handle));
    OK(cu.cuMemSetAccess(pointer, 2 << 20, &access_read, 1));
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 100));
    CHECK(bytes_are(bytes, 6, 100));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(pointer, 7, 100));
    OK(cu.cuMemSetAccess(pointer, 2 << 20, &access_all, 1));
    OK(cu.cuMemsetD8_v2(pointer, 7, 100));
    peer_meet();
    peer_meet(); /* the exporter has unmapped it, which does not matter here */
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 100));
    CHECK(bytes_are(bytes, 7, 100));
    OK(cu.cuMemUnmap(pointer, 2 << 20));
    OK(cu.cuMemAddressFree(pointer, 2 << 20));
    context_finish();
}

static void virtual_memory(void **state) {
    assert_int_equal(scenes(vmm_export, vmm_import, SCENE_MISTAKES), 0);
    assert_true(mistake_says("which is no allocation")); /* the cuMemFree of a mapping, nothing else */
}

static void vmm_wrongly(void) {
    CUmemAllocationProp prop = properties(CU_MEM_HANDLE_TYPE_NONE);
    CUmemGenericAllocationHandle handle;
    CUdeviceptr pointer;
    int fd;
    context_begin();
    OK(cu.cuMemCreate(&handle, 2 << 20, &prop, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cu.cuMemAddressReserve(&pointer, 2 << 20, 0, 0, 0));
    OK(cu.cuMemMap(pointer, 2 << 20, 0, handle, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAddressFree(pointer, 2 << 20));
    OK(cu.cuMemUnmap(pointer, 2 << 20));
    OK(cu.cuMemAddressFree(pointer, 2 << 20));
    OK(cu.cuMemRelease(handle));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemRelease(handle));
    context_finish();
}

static void virtual_memory_wrongly(void **state) {
    assert_int_equal(scene(vmm_wrongly), SCENE_MISTAKES);
    assert_true(mistake_says("still mapped"));
    assert_true(mistake_says("cuMemRelease"));
}

/* ---- pools ---- */

static void pool_export(void) {
    CUmemPoolProps prop = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                           .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemPoolPtrExportData data;
    CUmemoryPool pool, standard;
    CUdeviceptr one, two, plain;
    CUipcMemHandle handle;
    int fd;
    context_begin();
    OK(cu.cuDeviceGetDefaultMemPool(&standard, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuMemPoolExportToShareableHandle(&fd, standard, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cu.cuMemAllocAsync(&plain, 100, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemPoolExportPointer(&data, plain));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&handle, plain));
    OK(cu.cuMemFreeAsync(plain, NULL));

    OK(cu.cuMemPoolCreate(&pool, &prop));
    OK(cu.cuMemAllocFromPoolAsync(&one, 1000, pool, NULL));
    OK(cu.cuMemAllocFromPoolAsync(&two, 1000, pool, NULL));
    OK(cu.cuMemsetD8_v2(one, 1, 1000));
    OK(cu.cuMemsetD8_v2(two, 2, 1000));
    OK(cu.cuMemPoolExportToShareableHandle(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    peer_send_fd(fd);
    close(fd);
    OK(cu.cuMemPoolExportPointer(&data, two));
    peer_send(&data, sizeof(data));
    peer_meet();
    OK(cu.cuMemFree_v2(one));
    OK(cu.cuMemFreeAsync(two, NULL));
    OK(cu.cuMemPoolDestroy(pool));
    OK(cu.cuCtxSynchronize());
    context_finish();
}

static void pool_import(void) {
    CUmemPoolPtrExportData data, garbage;
    CUmemoryPool pool;
    CUdeviceptr pointer, another;
    char bytes[1000];
    context_begin();
    int fd = peer_receive_fd();
    OK(cu.cuMemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAllocFromPoolAsync(&another, 100, pool, NULL));
    peer_receive(&data, sizeof(data));
    garbage = data;
    garbage.reserved[9] ^= 1;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemPoolImportPointer(&pointer, pool, &garbage));
    OK(cu.cuMemPoolImportPointer(&pointer, pool, &data));
    OK(cu.cuMemcpyDtoH_v2(bytes, pointer, 1000));
    CHECK(bytes_are(bytes, 2, 1000));
    OK(cu.cuMemFree_v2(pointer));
    OK(cu.cuMemPoolDestroy(pool));
    peer_meet();
    context_finish();
}

static void pools(void **state) {
    assert_int_equal(scenes(pool_export, pool_import, 0), 0);
    assert_true(mistakes_none());
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, harness_setup, harness_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(virtual_memory), TEST(virtual_memory_wrongly), TEST(pools)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
