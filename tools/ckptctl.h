/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * ckptctl: what all verbs share. A verb is a function in the table of ckptctl.c; it gets the parsed
 * command line and returns the exit status. Whoever finds the error prints its sentence, with
 * ctl_fail(), and returns the status; callers only forward it.
 */

#include "base/problem.h"

#include <jansson.h>

/* Exit statuses; ckptctl(1) documents them, they never change. */
enum status {
    STATUS_OK = 0,
    STATUS_PROBLEM = 1,   /* the verb worked and found something wrong: damage, a failed check */
    STATUS_USAGE = 2,     /* the command line or the configuration */
    STATUS_ABSENT = 3,    /* no such job, version, part, tensor, pin */
    STATUS_NO_DAEMON = 4, /* nobody listens on the socket */
    STATUS_STORAGE = 5,   /* a tier, the output file or the daemon failed */
    STATUS_BUSY = 6,      /* pinned, in use, not drained yet */
};

/* The command line. Strings are those of main(). */
struct ctl {
    const char *verb;
    char **words; /* after the verb */
    int word_count;

    bool json;
    const char **roots;
    size_t root_count;
    const char *socket; /* NULL: searched */
    const char *config;

    bool all, repair, split, hf, wait, now, force, example;
    const char *output;
    const char *prefix;
    const char *name;
    const char **tensors; /* globs */
    size_t tensor_count;
    bool has_part;
    uint32_t part;
    uint64_t timeout_ms; /* 0: none */
};

/* Prints "ckptctl: <sentence>" on stderr and returns the status. */
int ctl_fail(enum status status, const char *format, ...) PRINTF_LIKE(2, 3);
/* The status for a negative errno of a tier. */
enum status ctl_status(int error);
/* Prints "ckptctl: <sentence>" on stderr; the verb goes on. */
void ctl_warn(const char *format, ...) PRINTF_LIKE(1, 2);
/* Prints and frees. STATUS_OK, or STATUS_STORAGE where memory or stdout failed. */
int ctl_print_json(json_t *json);
/* SIGINT or SIGTERM has come: verbs that leave files behind look between two chunks, and unwind. */
bool ctl_interrupted(void);
/* Random bits for temporary names. */
uint64_t ctl_nonce(void);

/* The verbs. */
int verb_status(struct ctl *ctl);
int verb_ls(struct ctl *ctl);
int verb_show(struct ctl *ctl);
int verb_verify(struct ctl *ctl);
int verb_export(struct ctl *ctl);
int verb_pin(struct ctl *ctl);
int verb_unpin(struct ctl *ctl);
int verb_rm(struct ctl *ctl);
int verb_drain(struct ctl *ctl);
int verb_doctor(struct ctl *ctl);
int verb_stop(struct ctl *ctl);
int verb_trace(struct ctl *ctl);
int verb_config(struct ctl *ctl);
