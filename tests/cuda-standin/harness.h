/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that use the stand-in. The library keeps its state for as long as the process lives, so each scene plays
 * in a child of its own, which opens it anew; two that exchange memory talk over a socket.
 */
#pragma once

#include "base/cuda-abi.h"
#include "base/util.h"
#include "tests/unit/base/unit.h"

struct cuda {
#define CUDA_FUNCTION(name, arguments) name##_fn *name;
#include "base/cuda-abi.def"
#undef CUDA_FUNCTION
};

extern struct cuda cu; /* in children */
extern int peer;       /* the socket to the other scene, or -1 */

enum { SCENE_FAILED = 1, SCENE_MISTAKES = 97 };

int harness_setup(void **state); /* a new directory, and no settings */
int harness_teardown(void **state);
extern char harness_directory[];

/* For the scenes to come: CUDA_STANDIN_ is put in front of the name. */
void setting(const char *name, const char *value);
/* Plays a scene; returns its exit status, or 128 plus the signal that ended it. */
int scene(void (*play)(void));
/* Plays two at once, connected; the first must end as `first_status`. Returns the exit status of the second. */
int scenes(void (*first)(void), void (*second)(void), int first_status);
/* Whether one of the mistakes that were noted says this. */
bool mistake_says(const char *text);
bool mistakes_none(void);
/* Files of the directory. */
void file_make(const char *name, const char *text);
void file_remove(const char *name);
bool file_is_there(const char *name);

/* In a scene. */
#define CHECK(condition) scene_check(condition, #condition, __FILE__, __LINE__)
#define OK(expression) GIVES(CUDA_SUCCESS, expression)
#define GIVES(error, expression) scene_gives(error, expression, #expression, __FILE__, __LINE__)
void scene_check(bool good, const char *text, const char *file, int line);
void scene_gives(CUresult expected, CUresult found, const char *text, const char *file, int line);
CUcontext context_begin(void); /* the primary context of device 0, current */
void context_finish(void);
CUdeviceptr device_filled(size_t size, unsigned char value);
bool bytes_are(const void *memory, unsigned char value, size_t size);
void peer_send(const void *data, size_t size);
void peer_receive(void *data, size_t size);
void peer_send_fd(int fd);
int peer_receive_fd(void);
void peer_meet(void); /* both are here */
