/* SPDX-License-Identifier: Apache-2.0 */
#include "client/saves.h"

#include "client/errors.h"

int saves_check(const struct saves *saves, uint64_t step) {
    if (!saves->any || step > saves->last)
        return CKPT_OK;
    if (step == saves->last)
        return saves->retriable ? CKPT_OK : CKPT_ALREADY;
    return error_set(CKPT_E_INVALID, "save of step %ju: step %ju was accepted before, and steps must increase",
                     (uintmax_t)step, (uintmax_t)saves->last);
}

uint16_t saves_begin(struct saves *saves, uint64_t step, uint64_t image_size) {
    saves->state = SAVES_ASKING;
    saves->step = step;
    saves->image_size = image_size;
    saves->reason[0] = '\0';
    saves->untold = false;
    return ++saves->counter;
}

void saves_answered(struct saves *saves, int result, uint64_t image_size) {
    saves->state = SAVES_IDLE;
    if (result == CKPT_OK) {
        saves->state = SAVES_RUNNING;
        saves->image_size = image_size;
        saves->accepted++;
    } else if (result == CKPT_SKIPPED) {
        saves->skipped++;
    }
    if (result == CKPT_OK || result == CKPT_ALREADY) {
        saves->any = true;
        saves->last = saves->step;
        saves->retriable = false;
        /* A step that was missed and is accepted now is missing no longer; it can only be the newest. */
        if (saves->missed_count > 0 &&
            saves->missed[(saves->missed_first + saves->missed_count - 1) % SAVES_MISSED_MAX] == saves->step)
            saves->missed_count--;
    }
}

enum saves_verdict saves_judge(const struct saves *saves, uint64_t word) {
    if (word_counter(word) != saves->counter)
        return SAVES_FAILED;
    if (word_watermark(word) == saves->image_size)
        return SAVES_CAPTURED;
    return word_watermark(word) >= WORD_FAILED ? SAVES_FAILED : SAVES_PENDING;
}

bool saves_reached(const struct saves *saves, uint64_t word, uint64_t end) {
    return word_counter(word) == saves->counter && word_watermark(word) < WORD_FAILED && word_watermark(word) >= end;
}

void saves_settle(struct saves *saves, bool captured) {
    if (saves->state == SAVES_RUNNING && !captured) {
        saves->lost++;
        saves->untold = true;
        saves->retriable = saves->last == saves->step;
    }
    saves->state = SAVES_IDLE;
}

void saves_event(struct saves *saves, uint16_t counter, int result, const char *reason, size_t reason_length) {
    if (saves->state == SAVES_IDLE || counter != saves->counter || result == CKPT_OK)
        return;
    snprintf(saves->reason, sizeof saves->reason, "%.*s", (int)min_u64(reason_length, sizeof saves->reason - 1),
             reason);
}

bool saves_take_untold(struct saves *saves) {
    bool untold = saves->untold;
    saves->untold = false;
    return untold;
}

void saves_missed_add(struct saves *saves, uint64_t step) {
    uint32_t last = (saves->missed_first + saves->missed_count - 1) % SAVES_MISSED_MAX;
    if (saves->missed_count > 0 && saves->missed[last] == step)
        return;
    if (saves->missed_count == SAVES_MISSED_MAX) {
        saves->missed_first = (saves->missed_first + 1) % SAVES_MISSED_MAX;
        saves->missed_count--;
    }
    saves->missed[(saves->missed_first + saves->missed_count++) % SAVES_MISSED_MAX] = step;
}

bool saves_missed_take(struct saves *saves, uint64_t *ret_step) {
    if (saves->missed_count == 0)
        return false;
    *ret_step = saves->missed[saves->missed_first];
    saves->missed_first = (saves->missed_first + 1) % SAVES_MISSED_MAX;
    saves->missed_count--;
    return true;
}
