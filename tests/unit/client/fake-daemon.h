/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A small daemon in a thread of the test: it speaks the protocol, captures from its own process's
 * memory, keeps the last version, and gives it back. Everything that can go wrong is a knob; knobs may
 * be turned while it runs.
 */

#include "proto/messages.h"
#include "proto/wire.h"

#include <stdatomic.h>

#define FAKE_OPCODES 64
#define FAKE_CHUNK KIB(64)

enum fake_fault {
    FAKE_ANSWERS = 0,
    FAKE_SILENT,  /* the message is read and not answered */
    FAKE_DIES,    /* all sockets are closed instead of answering */
    FAKE_GARBAGE, /* the answer is noise */
    FAKE_WRONG,   /* the answer is of the wrong kind */
    FAKE_ERROR,   /* the answer is ERROR(E_IO, "broken on purpose") */
    FAKE_LATE,    /* answered when the knob is turned back and another message comes */
    FAKE_NO_ROOM, /* FETCH: E_LIMIT if more than one chunk is asked for */
};

struct fake_knobs {
    atomic_int fault[FAKE_OPCODES];
    atomic_bool refuse_private;
    atomic_bool hold;      /* SAVE is accepted, but nothing is captured until this is false */
    atomic_int captured;   /* result of captures: CODE_OK or an error */
    atomic_ullong stop_at; /* with hold: the watermark that is reached all the same */
    atomic_int save_result;
    atomic_bool scattered; /* chunks of a version do not lie in consecutive memory */
    atomic_bool resumes;   /* OPENED names the kept version */
    /* Sees every answer and event before it is sent. Set while nobody is connected. */
    void (*tamper)(void *context, struct wire_packet *packet);
    void *tamper_context;
};

struct fake;

/* Where it listens: a directory of its own, made by the first call, removed by fake_free. */
struct fake *fake_new(void);
void fake_free(struct fake *fake);
const char *fake_path(const struct fake *fake);
struct fake_knobs *fake_knobs(struct fake *fake);
/* The daemon's process, as it were: what was captured outlives it. */
void fake_start(struct fake *fake);
void fake_stop(struct fake *fake);

/* How many messages of this kind came, over all lives. */
unsigned fake_count(struct fake *fake, enum opcode opcode);
/* The last SAVE's body, and the last captured image (borrowed until the next save). */
struct message_save fake_last_save(struct fake *fake);
const uint8_t *fake_image(struct fake *fake, uint64_t *ret_size);
/* Leases given and not yet released; restores open. */
unsigned fake_leases(struct fake *fake);
unsigned fake_restores(struct fake *fake);
/* The nth MISSED step. */
uint64_t fake_missed(struct fake *fake, unsigned n);
