/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the client knows of its saves: which steps were accepted, which capture runs, how it ended,
 * and which steps no daemon was there for. A state machine without I/O: the driver tells it what was
 * asked and answered, and it judges the capture word (proto/word.h).
 *
 *   idle --save_begin--> asking --answered OK--> running --settled--> idle
 *                          '--answered otherwise, or abandoned--> idle
 */

#include "base/util.h"
#include "client/ckpt.h"
#include "proto/word.h"

#define SAVES_MISSED_MAX 64 /* steps remembered for the next daemon; older ones are forgotten */
#define SAVES_REASON_MAX 512

enum saves_state { SAVES_IDLE, SAVES_ASKING, SAVES_RUNNING };

struct saves {
    enum saves_state state;
    bool any;                      /* a step was accepted */
    bool retriable;                /* the last accepted one was lost: it may be saved again */
    bool untold;                   /* it was lost, and no fence has told so */
    uint64_t last;                 /* the last accepted step */
    uint64_t step;                 /* asked for, or running */
    uint16_t counter;              /* of that, in the word */
    bool check;                    /* the daemon reads the memory again, once the fence has begun */
    uint64_t image_size;           /* its watermark when captured */
    char reason[SAVES_REASON_MAX]; /* why the running capture failed, as the daemon said */
    uint64_t accepted, skipped, lost;
    uint64_t missed[SAVES_MISSED_MAX];
    uint32_t missed_first, missed_count;
};

/* May this step be saved? CKPT_OK; CKPT_ALREADY; CKPT_E_INVALID naming both steps. */
int saves_check(const struct saves *saves, uint64_t step) MUST_CHECK;
/* A request is about to be sent; returns the counter for the word. */
uint16_t saves_begin(struct saves *saves, uint64_t step, uint64_t image_size);
/* The daemon's answer: CKPT_OK, CKPT_SKIPPED, CKPT_ALREADY, or an error. */
void saves_answered(struct saves *saves, int result, uint64_t image_size);

enum saves_verdict { SAVES_PENDING, SAVES_CAPTURED, SAVES_FAILED };
/* What the word says of the capture that is running (or asked for). */
enum saves_verdict saves_judge(const struct saves *saves, uint64_t word);
/* Whether the image is out up to `end`: that piece may change. */
bool saves_reached(const struct saves *saves, uint64_t word, uint64_t end);
/* The capture has ended; `captured` or lost. */
void saves_settle(struct saves *saves, bool captured);
/* A CAPTURED event: keeps its reason if it is about the running capture. */
void saves_event(struct saves *saves, uint16_t counter, int result, const char *reason, size_t reason_length);

/* Whether the last capture was lost and the program has not heard of it; it has now. */
bool saves_take_untold(struct saves *saves);

/* A step whose version cannot be complete, to be told to the next daemon. */
void saves_missed_add(struct saves *saves, uint64_t step);
/* The oldest; false: none. */
bool saves_missed_take(struct saves *saves, uint64_t *ret_step);
