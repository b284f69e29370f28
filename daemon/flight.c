/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An event ends each flight; there are as many events as flights can be under way, and since these land in
 * order, the number of the last one that has landed says it of all before.
 *
 * Who awaits a flight makes way for others: a close, a probe, the job that queues the next flight. It does
 * not do so for ever, or a device whose copies never end would not be seen to be stuck while others keep
 * its thread busy.
 */
#include "daemon/flight.h"

#include "daemon/server.h"

#include <errno.h>

#define MAKES_WAY_PART 2 /* of the device's deadline */

CUresult flights_open(struct device *device) {
    CUresult result = CUDA_SUCCESS;
    device->own.landed = device->own.begun; /* those of another context are gone with it */
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < FLIGHTS_MAX; i++)
        result = device_cuda(device)->cuEventCreate(&device->own.flights[i], CU_EVENT_DISABLE_TIMING);
    return result;
}

void flights_close(struct device *device) {
    for (uint32_t i = 0; i < FLIGHTS_MAX; i++)
        if (device->own.flights[i])
            (void)device_cuda(device)->cuEventDestroy_v2(STEAL(device->own.flights[i]));
}

/* Looks once. 0, FLIGHT_E_AWAY, or what the driver says. */
static int look(struct device *device, uint64_t number, struct problem *problem) {
    if (device->own.landed >= number)
        return 0;
    CUresult result = device_cuda(device)->cuEventQuery(device->own.flights[number % FLIGHTS_MAX]);
    if (result == CUDA_ERROR_NOT_READY)
        return FLIGHT_E_AWAY;
    if (result == CUDA_SUCCESS)
        device->own.landed = number;
    return device_result(device, result, problem, "a copy out of device memory");
}

int flight_room(struct device *device, struct problem *problem) {
    int r = 0;
    for (uint32_t looks = 0; !r && device->own.begun - device->own.landed >= FLIGHTS_MAX; looks++) {
        r = look(device, device->own.landed + 1, problem);
        if (r == FLIGHT_E_AWAY) {
            device_pause(looks);
            r = 0;
        }
    }
    return r;
}

int flight_begin(struct device *device, struct flight *ret_flight, struct problem *problem) {
    uint64_t number = device->own.begun + 1;
    int r = device_result(
        device, device_cuda(device)->cuEventRecord(device->own.flights[number % FLIGHTS_MAX], device->own.stream),
        problem, "cuEventRecord");
    if (r < 0)
        return r;
    device->own.begun = number;
    *ret_flight =
        (struct flight){.number = number, .generation = device->own.facts.generation, .begun_ns = device_now()};
    return 0;
}

static bool makes_way(const struct device *device, const struct flight *flight) {
    uint64_t patience_ns = device->server->config->device_ms * NANOSECONDS_PER_MS / MAKES_WAY_PART;
    return device->waiting && device_now() - flight->begun_ns < patience_ns;
}

int flight_await(struct device *device, const struct flight *flight, struct problem *problem) {
    for (uint32_t looks = 0;; looks++) {
        if (!device->own.context || device->own.facts.generation != flight->generation)
            return problem_set(problem, -EIO, "device %s: a copy was lost with its context", device->own.facts.text);
        int r = look(device, flight->number, problem);
        if (r != FLIGHT_E_AWAY || makes_way(device, flight))
            return r;
        device_pause(looks);
    }
}
