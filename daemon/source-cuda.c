/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of a GPU, opened by imports.c. On the device's thread, in its context; copies are queued on
 * the device's stream, by the driver's copy engines and without a kernel. A span may reach over
 * several chunks of a range, each of which is mapped at a place of its own.
 */
#include "daemon/source.h"

static int queue_copy(const struct source *source, CUdeviceptr from, uint8_t *to, size_t length) {
    struct device *device = source->device;
    const struct cuda *cuda = device_cuda(device);
    if (source->within_device)
        return device_result(device,
                             cuda->cuMemcpyDtoDAsync_v2((CUdeviceptr)(uintptr_t)to, from, length, device->own.stream),
                             source->cuda_problem, "cuMemcpyDtoDAsync");
    return device_result(device, cuda->cuMemcpyDtoHAsync_v2(to, from, length, device->own.stream), source->cuda_problem,
                         "cuMemcpyDtoHAsync");
}

static int cuda_read(const struct source *source, uint32_t area, const struct source_span *spans, size_t count) {
    const struct device_memory *memory = source->set->memories[area - SHARDS_AREA_DEVICE];
    for (size_t i = 0; i < count; i++)
        for (size_t done = 0; done < spans[i].length;) {
            CUdeviceptr from;
            uint64_t there;
            int r = device_memory_find(memory, spans[i].address + done, &from, &there);
            if (r < 0)
                return problem_set(source->cuda_problem, r, "device %s: the client's memory was lost with its context",
                                   source->device->own.facts.text);
            size_t now = (size_t)min_u64(there, spans[i].length - done);
            r = queue_copy(source, from, spans[i].destination + done, now);
            if (r < 0)
                return r;
            done += now;
        }
    return 0;
}

static int cuda_read_waiting(const struct source *source, uint32_t area, const struct source_span *spans,
                             size_t count) {
    int r = cuda_read(source, area, spans, count);
    return r < 0 ? r : device_wait(source->device, source->cuda_problem);
}

static const uint8_t *cuda_look(const struct source *source, uint32_t area, uint64_t address, size_t length) {
    (void)source, (void)area, (void)address, (void)length;
    return NULL;
}

const struct source_memory source_cuda = {.name = "cuda", .read = cuda_read, .look = cuda_look};
const struct source_memory source_cuda_waiting = {.name = "cuda", .read = cuda_read_waiting, .look = cuda_look};
