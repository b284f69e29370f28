/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices: alike but for their UUIDs. A process sees those that CUDA_VISIBLE_DEVICES names, by number or by (the
 * beginning of) the UUID, up to the first that does not exist. MIG instances (CUDA_STANDIN_MIG: how many of the
 * devices, the first ones) have UUIDs and names of that kind, and are all of one card. A process that would see any
 * sees the first of them, and nothing else.
 */
#include "tests/cuda-standin/standin.h"

static bool is_mig(int device) { return device < standin.settings.n_mig; }

static void device_uuid(int device, CUuuid *ret_uuid) {
    static const char name[16] = "\xc5stand-in gpu ";
    memcpy(ret_uuid->bytes, name, sizeof(name));
    ret_uuid->bytes[14] = is_mig(device) ? 'm' : 'g';
    ret_uuid->bytes[15] = device;
}

static int device_named(const char *name) {
    bool mig = strncmp(name, "MIG-", 4) == 0;
    if ((mig || strncmp(name, "GPU-", 4) == 0) && strlen(name) > 4) {
        for (int device = 0; device < standin.settings.n_devices; device++) {
            CUuuid uuid;
            char text[40];
            device_uuid(device, &uuid);
            const unsigned char *b = (const unsigned char *)uuid.bytes;
            snprintf(text, sizeof(text), "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                     b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
            if (is_mig(device) == mig && strncmp(text, name + 4, strlen(name + 4)) == 0)
                return device;
        }
        return -1;
    }
    char *end;
    long device = strtol(name, &end, 10);
    return end == name || *end || device < 0 || device >= standin.settings.n_devices ? -1 : (int)device;
}

static void find_named(const char *environment) {
    CLEANUP(freep) char *text = strdup(environment);
    char *rest = NULL;
    for (char *word = strtok_r(text, ",", &rest); word && standin.n_visible < DEVICES_MAX;
         word = strtok_r(NULL, ",", &rest)) {
        int device = device_named(word);
        if (device < 0)
            return;
        standin.visible[standin.n_visible++] = device;
    }
}

void device_find_visible(void) {
    const char *environment = getenv("CUDA_VISIBLE_DEVICES");
    standin.n_visible = 0;
    if (environment)
        find_named(environment);
    for (int device = 0; !environment && device < standin.settings.n_devices; device++)
        standin.visible[standin.n_visible++] = device;
    for (int i = 0; i < standin.n_visible; i++) {
        if (is_mig(standin.visible[i])) {
            standin.visible[0] = standin.visible[i];
            standin.n_visible = 1;
        }
    }
}

/* Of the card. */
static int bus_of(int device) { return 0x10 + (is_mig(device) ? 0 : device); }

#define ENTER_DEVICE(device)                                                                                           \
    ENTER(NEEDS_INIT);                                                                                                 \
    if ((device) < 0 || (device) >= standin.n_visible)                                                                 \
        return CUDA_ERROR_INVALID_DEVICE;

CUresult cuDeviceGetCount(int *ret_count) {
    ENTER(NEEDS_INIT);
    *ret_count = standin.n_visible;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *ret_device, int ordinal) {
    ENTER_DEVICE(ordinal);
    *ret_device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *ret_name, int size, CUdevice device) {
    ENTER_DEVICE(device);
    if (size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(ret_name, size, "stand-in GPU%s", is_mig(standin.visible[device]) ? " MIG 1g.1gb" : "");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *ret_uuid, CUdevice device) {
    ENTER_DEVICE(device);
    device_uuid(standin.visible[device], ret_uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *ret_id, int size, CUdevice device) {
    ENTER_DEVICE(device);
    if (size < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(ret_id, size, "0000:%02X:00.0", bus_of(standin.visible[device]));
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *ret_bytes, CUdevice device) {
    ENTER_DEVICE(device);
    *ret_bytes = standin.settings.device_memory;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *ret_can, CUdevice device, CUdevice peer) {
    ENTER_DEVICE(device);
    if (peer < 0 || peer >= standin.n_visible)
        return CUDA_ERROR_INVALID_DEVICE;
    *ret_can = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *ret_value, CUdevice_attribute attribute, CUdevice device) {
    ENTER_DEVICE(device);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *ret_value = 0;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *ret_value = standin.settings.compute_mode;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *ret_value = bus_of(standin.visible[device]);
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *ret_value = 1;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *ret_value = 9;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        *ret_value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        *ret_value = 1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}
