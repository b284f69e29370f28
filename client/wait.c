/* SPDX-License-Identifier: Apache-2.0 */
#include "client/clock.h"
#include "client/handle.h"
#include "client/options.h"
#include "client/save.h"

#include <sys/mman.h>

/* Questions about what is durable: a request and its answer each. */

static int check_level(uint32_t level, uint32_t scope) {
    if (level < CKPT_CAPTURED || level > CKPT_GLOBAL)
        return error_set(CKPT_E_INVALID, "there is no level %u; levels are CKPT_CAPTURED to CKPT_GLOBAL", level);
    if (scope != CKPT_PART && scope != CKPT_VERSION)
        return error_set(CKPT_E_INVALID, "there is no scope %u; it must be CKPT_PART or CKPT_VERSION", scope);
    return CKPT_OK;
}

static uint64_t with_grace(uint64_t timeout_ms) {
    return clock_deadline(min_u64(timeout_ms, UINT64_MAX - HANDLE_GRACE_MS) + HANDLE_GRACE_MS);
}

static int ask_wait(struct ckpt *c, uint64_t step, uint32_t level, uint32_t scope, uint64_t timeout_ms) {
    struct link *link = &c->session.link;
    struct message_wait body = {.step = step, .level = level, .scope = scope, .timeout_ms = timeout_ms};
    struct link_request request = {.opcode = MESSAGE_WAIT, .body = &body, .fd = -1};
    int r = link_call(link, &request, MESSAGE_WAITED, with_grace(timeout_ms));
    if (!link_is_up(link))
        session_down(c);
    if (r < 0)
        return r;
    int result = ((const struct message_waited *)link->message.body)->result;
    if (result == CKPT_OK || result == CKPT_PENDING || result == CKPT_SKIPPED)
        return result;
    if (!error_known(result))
        return link_distrust(link, "an unknown result of a wait");
    if (link->message.tail_length > 0)
        return error_set(result, "%.*s", (int)link->message.tail_length, link->message.tail);
    return error_set(result, "step %ju will not be durable: %s", (uintmax_t)step, error_name(result));
}

static int wait_for(struct ckpt *c, uint64_t step, uint32_t level, uint32_t scope, uint64_t timeout_ms) {
    int r = handle_enter(c);
    if (r == CKPT_OK)
        r = check_level(level, scope);
    if (r == CKPT_OK)
        r = session_ensure(c, clock_deadline(timeout_ms));
    return r < 0 ? r : ask_wait(c, step, level, scope, timeout_ms);
}

/* Check mode: the daemon reads the memory again once the fence has begun, and a wait implies one. */
static int fence_checked(struct ckpt *c, uint64_t timeout_ms) {
    bool checked = c && c->saves.check && c->saves.state == SAVES_RUNNING;
    int r = checked ? handle_enter(c) : CKPT_OK;
    return checked && r == CKPT_OK ? save_fence(c, timeout_ms) : r;
}

int ckpt_wait(ckpt *c, uint64_t step, uint32_t level, uint32_t scope, uint64_t timeout_ms) {
    uint64_t wait_ms = clock_timeout_ms(timeout_ms, HANDLE_WAIT_MS);
    int r = fence_checked(c, wait_ms);
    if (r == CKPT_OK)
        r = wait_for(c, step, level, scope, wait_ms);
    if (r != CKPT_PENDING)
        return r;
    return error_set(CKPT_E_TIMEOUT, "step %ju did not become durable at level %u within %ju ms; its drain goes on",
                     (uintmax_t)step, level, (uintmax_t)wait_ms);
}

int ckpt_test(ckpt *c, uint64_t step, uint32_t level, uint32_t scope) {
    int r = handle_enter(c);
    if (r < 0)
        return r;
    /* Whether the running capture has ended stands in the word: nobody need be asked. */
    if (level == CKPT_CAPTURED && scope == CKPT_PART && c->saves.state == SAVES_RUNNING && step == c->saves.step) {
        enum saves_verdict verdict = saves_judge(&c->saves, word_load(c->session.word));
        if (verdict != SAVES_FAILED)
            return verdict == SAVES_CAPTURED ? CKPT_OK : CKPT_PENDING;
    }
    return wait_for(c, step, level, scope, 0);
}

int ckpt_last_durable(ckpt *c, uint32_t level, struct ckpt_durable *durable) {
    int r = handle_enter(c);
    if (r == CKPT_OK)
        r = check_level(level, CKPT_VERSION);
    uint64_t deadline = clock_deadline(HANDLE_OPEN_MS);
    if (r == CKPT_OK)
        r = session_ensure(c, deadline);
    if (r < 0)
        return r;
    struct link *link = &c->session.link;
    struct message_last_durable body = {.level = level};
    struct link_request request = {.opcode = MESSAGE_LAST_DURABLE, .body = &body, .fd = -1};
    r = link_call(link, &request, MESSAGE_DURABLE, deadline);
    if (r < 0)
        return r;
    const struct message_durable *reply = link->message.body;
    if (!reply->found)
        return CKPT_NONE;
    struct ckpt_durable values = {.generation = reply->generation, .step = reply->step, .age_ms = reply->age_ms};
    return options_fill("ckpt_durable", &values, sizeof values, durable);
}

_Static_assert(sizeof(struct ckpt_version_entry) == sizeof(struct version_record) &&
                   offsetof(struct ckpt_version_entry, levels) == offsetof(struct version_record, levels) &&
                   offsetof(struct ckpt_version_entry, flags) == offsetof(struct version_record, flags),
               "versions are handed on as they come");

int ckpt_versions(ckpt *c, struct ckpt_version_entry **ret, size_t *ret_count) {
    int r = handle_enter(c);
    if (r == CKPT_OK && (!ret || !ret_count))
        r = error_set(CKPT_E_INVALID, "versions: a pointer for the result is NULL");
    uint64_t deadline = clock_deadline(HANDLE_OPEN_MS);
    if (r == CKPT_OK)
        r = session_ensure(c, deadline);
    if (r < 0)
        return r;
    struct link *link = &c->session.link;
    struct message_empty body = {0};
    struct link_request request = {.opcode = MESSAGE_VERSIONS, .body = &body, .fd = -1};
    r = link_call(link, &request, MESSAGE_VERSIONS_ARE, deadline);
    if (r < 0)
        return r;
    const struct message_versions_are *reply = link->message.body;
    size_t count = reply->count;
    if (reply->size < count * sizeof(struct version_record))
        return link_distrust(link, "a list of versions that is too short");
    struct ckpt_version_entry *entries = calloc(max_u64(count, 1), sizeof *entries);
    if (!entries)
        return error_set(CKPT_E_MEMORY, "out of memory for %zu versions", count);
    if (count > 0) {
        struct problem problem = PROBLEM_NONE;
        void *map;
        if (wire_map(link->packet.fd, reply->size, true, &map, &problem) < 0) {
            free(entries);
            return link_distrust(link, problem.text);
        }
        memcpy(entries, map, count * sizeof *entries);
        munmap(map, reply->size);
    }
    *ret = entries;
    *ret_count = count;
    return CKPT_OK;
}

void ckpt_versions_free(struct ckpt_version_entry *versions) { free(versions); }
