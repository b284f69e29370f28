/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/daemon.h"
#include "tools/trace-json.h"

#include <errno.h>
#include <sys/mman.h>

/* Maps what TRACE_IS brought, after a look at its counts. */
static int map(const struct wire_packet *packet, const struct message_trace_is *is, void **ret_data,
               struct problem *problem) {
    uint64_t records = is->records * (uint64_t)sizeof(struct trace_record);
    uint64_t names = is->names * (uint64_t)sizeof(struct trace_name);
    if (records + names != is->size || is->names > TRACE_NAMES_MAX)
        return problem_set(problem, -EPROTO, "the daemon's trace has another size than it says");
    *ret_data = NULL;
    return is->size ? wire_map(packet->fd, (size_t)is->size, true, ret_data, problem) : 0;
}

int verb_trace(struct ctl *ctl) {
    CLEANUP(connection_deinit) struct connection connection;
    struct problem problem = PROBLEM_NONE;
    int r = connection_init(&connection, ctl->socket, &problem);
    if (r != 0)
        return daemon_fail(r, &problem);
    struct message_empty empty = {0};
    struct wire_packet packet = {.fd = -1};
    struct wire_message message;
    r = connection_ask(&connection, MESSAGE_TRACE, &empty, MESSAGE_TRACE_IS, &packet, &message, &problem);
    if (r < 0)
        return daemon_fail(r, &problem);
    struct message_trace_is is;
    void *data = NULL;
    memcpy(&is, message.body, sizeof is);
    r = map(&packet, &is, &data, &problem);
    wire_packet_close(&packet);
    if (r < 0)
        return daemon_fail(r, &problem);
    const struct trace_input input = {
        .records = data,
        .count = is.records,
        .names = data ? (const struct trace_name *)((const struct trace_record *)data + is.records) : NULL,
        .name_count = is.names,
        .forgotten = is.forgotten,
        .wall_ns = is.wall_ns,
    };
    r = trace_json_write(stdout, &input, ctl->word_count ? ctl->words[0] : NULL);
    if (data)
        munmap(data, (size_t)is.size);
    return r < 0 ? ctl_fail(STATUS_STORAGE, "cannot write the trace: %s", strerror(-r)) : STATUS_OK;
}
