/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/daemon.h"

#include <errno.h>
#include <sys/mman.h>

const char *json_text(json_t *object, const char *key, const char *otherwise) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : otherwise;
}

uint64_t json_number(json_t *object, const char *key) {
    json_int_t number = json_integer_value(json_object_get(object, key));
    return number > 0 ? (uint64_t)number : 0;
}

bool json_flag(json_t *object, const char *key) { return json_is_true(json_object_get(object, key)); }

json_t *json_list(json_t *object, const char *key) { return json_object_get(object, key); }

int daemon_fail(int error, const struct problem *problem) {
    return ctl_fail(error == CONNECTION_E_ABSENT ? STATUS_NO_DAEMON : STATUS_STORAGE, "%s",
                    problem_text(problem, error));
}

static int parse(struct wire_packet *packet, const struct wire_message *message, json_t **ret_status,
                 struct problem *problem) {
    struct message_status_is is;
    memcpy(&is, message->body, sizeof is);
    void *text;
    if (is.size > SIZE_MAX)
        return problem_set(problem, -EPROTO, "the daemon's status is too large");
    int r = wire_map(packet->fd, (size_t)is.size, true, &text, problem);
    if (r < 0)
        return r;
    json_error_t error;
    json_t *status = json_loadb(text, (size_t)is.size, JSON_REJECT_DUPLICATES, &error);
    munmap(text, (size_t)is.size);
    if (!json_is_object(status)) {
        json_decref(status);
        return problem_set(problem, -EPROTO, "the daemon's status is no JSON object: %s", error.text);
    }
    *ret_status = status;
    return 0;
}

int daemon_ask_status(struct connection *connection, json_t **ret_status, struct problem *problem) {
    struct message_empty empty = {0};
    struct wire_packet packet = {.fd = -1};
    struct wire_message message;
    int r = connection_ask(connection, MESSAGE_STATUS, &empty, MESSAGE_STATUS_IS, &packet, &message, problem);
    if (r < 0)
        return r;
    r = parse(&packet, &message, ret_status, problem);
    wire_packet_close(&packet);
    return r;
}

int daemon_status(struct ctl *ctl, json_t **ret_status, struct problem *problem) {
    CLEANUP(connection_deinit) struct connection connection;
    int r = connection_init(&connection, ctl->socket, problem);
    return r == 0 ? daemon_ask_status(&connection, ret_status, problem) : r;
}
