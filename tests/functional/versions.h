/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Versions of one tensor in two tiers, and what ckptctl says of them. */

#include "tests/functional/support.h"

#define WORDS 33000 /* two chunks of 256 KiB */

extern uint64_t words[WORDS];

/* Opens the job, with `words` protected under this name. */
ckpt *open_protected(const char *job);
/* Words of this step; GLOBAL when it returns. */
void save_words(ckpt *c, uint64_t step);
/* `steps` versions, in both tiers; the daemon has ended. `parallel`: more lines of that tier's section. */
void make_versions(const char *job, unsigned steps, const char *parallel);

/* Runs ckptctl; its exit status. What it says is in the files out and err. */
int run_ctl(const char *arguments);
/* The same; fails unless that is `expected`. */
void ctl(int expected, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One of these files has these words. */
bool ctl_said(const char *file, const char *words_of_it);
