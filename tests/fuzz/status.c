/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's STATUS as `ckptctl status` reads and prints it. Whatever the JSON says, the verb ends in
 * an exit status, and prints no control characters to the operator's terminal.
 */
#include "tests/fuzz/fuzz.h"
#include "tools/daemon.h"
#include "tools/table.h"

#include <errno.h>

static const uint8_t *answer;
static size_t answer_size;

/* In place of connection.c: the daemon answers with the input. */
int connection_init(struct connection *connection, const char *path, struct problem *problem) {
    *connection = (struct connection){.fd = -1};
    return 0;
}

void connection_deinit(struct connection *connection) {}

int connection_ask(struct connection *connection, enum opcode opcode, const void *body, enum opcode expected,
                   struct wire_packet *ret_packet, struct wire_message *ret_message, struct problem *problem) {
    static struct message_status_is is;
    is.size = answer_size;
    ret_packet->fd = wire_memfd("status", answer, answer_size);
    assert(ret_packet->fd >= 0);
    *ret_message = (struct wire_message){.opcode = (uint16_t)expected, .body = &is};
    return 0;
}

/* In place of ckptctl.c. */
int ctl_fail(enum status status, const char *format, ...) { return (int)status; }

int ctl_print_json(json_t *json) {
    json_decref(json);
    return STATUS_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    FILE *terminal = stdout;
    struct ctl ctl = {.verb = "status"};
    CLEANUP(freep) char *text = NULL;
    size_t length;
    answer = data;
    answer_size = size;
    stdout = open_memstream(&text, &length);
    assert(stdout);
    int status = verb_status(&ctl);
    fclose(stdout);
    stdout = terminal;
    assert(status == STATUS_OK || status == STATUS_STORAGE);
    for (size_t i = 0; i < length; i++)
        assert(text[i] == '\n' || ((unsigned char)text[i] >= 0x20 && text[i] != 0x7f));
    return 0;
}
