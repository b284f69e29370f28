/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The two small files that make bytes a checkpoint. Both are lines of JSON:
 *
 *   line 1   a bounded summary, ending in its own digest: all that scans and openings read
 *   line 2.. tables, parsed only when needed
 *   last     fixed width: {"digest":"<32 hex>"}\n, the digest of all bytes before it
 *
 * rank-N.json (the manifest of a part) and complete.json (of a version). Readers treat them as
 * hostile. The same values give the same bytes, whoever writes them. FORMAT.md has every field.
 */

#include "base/problem.h"
#include "proto/digest.h"
#include "proto/image.h"

#define MANIFEST_FORMAT_VERSION 1
#define MANIFEST_LINE_MAX 4096   /* the bound of line 1, newline included */
#define MANIFEST_FILE_MAX GIB(1) /* of a whole manifest; a larger file is refused */
#define MANIFEST_TAIL_SIZE 46    /* bytes of the last line: {"digest":"..."} and newline */
#define MANIFEST_JOB_MAX 256     /* with NUL */
#define MANIFEST_RUN_ID_MAX 128  /* with NUL */
#define MANIFEST_REASON_MAX 256

enum codec { CODEC_RAW = 0, CODEC_LZ4 = 1, CODEC_AUTO = 2 /* configuration only, never stored */ };

struct manifest_chunk {
    uint64_t offset;        /* in the data file */
    uint32_t stored_length; /* == raw length: not encoded */
    uint32_t raw_length;
    struct digest digest; /* of the raw bytes */
};

struct manifest_summary {
    char job[MANIFEST_JOB_MAX];
    char run_id[MANIFEST_RUN_ID_MAX];
    uint64_t generation, step;
    uint32_t rank, world;
    bool absent; /* the save yielded no part: only `reason` counts below */
    char reason[MANIFEST_REASON_MAX];
    uint64_t image_size;
    struct digest image_digest;
    char data_file[64];   /* "rank-00000.safetensors" or "rank-00000.chunks" */
    uint64_t data_length; /* of the data file */
    uint32_t chunk_size;
    enum codec codec;
    uint64_t created_ns; /* wall clock at the save call */
};

struct manifest {
    struct manifest_summary summary;
    struct manifest_chunk *chunks;
    size_t chunk_count;
    struct pieces pieces;
};

/* Serializes; the caller frees *ret_text. */
int manifest_write(const struct manifest *manifest, char **ret_text, size_t *ret_length) MUST_CHECK;
/* Parses line 1 only (data may be the file's first MANIFEST_LINE_MAX bytes). */
int manifest_read_summary(const char *data, size_t size, struct manifest_summary *ret_summary,
                          struct problem *problem) MUST_CHECK;
/* Parses and verifies all of it: both digests, chunk table consistent with sizes, image digest the
 * fold of chunk digests, pieces inside the image. -EBADMSG: damaged; -ENOTSUP: a later format
 * version ("written by a newer ckptd: ..."). */
int manifest_read(const char *data, size_t size, struct manifest *ret_manifest, struct problem *problem) MUST_CHECK;
/* The same without parsing the table of pieces, which stays empty: its bytes are verified all the same. */
int manifest_read_chunks(const char *data, size_t size, struct manifest *ret_manifest,
                         struct problem *problem) MUST_CHECK;
void manifest_deinit(struct manifest *manifest);

struct complete_part {
    uint32_t rank;
    uint64_t image_size;
    struct digest image_digest;
    uint32_t chunk_size;
    uint64_t state_offset, state_length; /* 0,0: no inline state */
};

struct complete_summary {
    char job[MANIFEST_JOB_MAX];
    char run_id[MANIFEST_RUN_ID_MAX];
    uint64_t generation, step;
    uint32_t world;
    uint64_t bytes;      /* sum of image sizes */
    uint64_t tensors;    /* distinct global names */
    uint64_t created_ns; /* the greatest of its parts' */
};

struct complete {
    struct complete_summary summary;
    struct complete_part *parts; /* [summary.world], by rank */
    struct pieces pieces;        /* merged: sorted by name, then rank-local, then rank, then image offset */
};

/* Merges the manifests of all ranks (manifests[i] has rank i, none absent), checking that they
 * agree (job, generation, step, world; dtype and shape of a tensor across ranks), and that global
 * tensors are covered without undeclared overlap or gap. -EINVAL with the tensor and the ranks
 * named in the problem. */
int complete_build(const struct manifest *manifests, size_t count, struct complete *ret_complete,
                   struct problem *problem) MUST_CHECK;
int complete_write(const struct complete *complete, char **ret_text, size_t *ret_length) MUST_CHECK;
int complete_read_summary(const char *data, size_t size, struct complete_summary *ret_summary,
                          struct problem *problem) MUST_CHECK;
int complete_read(const char *data, size_t size, struct complete *ret_complete, struct problem *problem) MUST_CHECK;
/* The same without parsing the index of pieces, which stays empty: its bytes are verified all the same. */
int complete_read_parts(const char *data, size_t size, struct complete *ret_complete,
                        struct problem *problem) MUST_CHECK;
void complete_deinit(struct complete *complete);

/* "rank-00007.json" and the like. */
void manifest_file_name(uint32_t rank, char ret_name[32]);
void manifest_data_name(uint32_t rank, enum codec codec, char ret_name[64]);

/* The `run` file of a generation: one line of JSON. */
struct run_record {
    char job[MANIFEST_JOB_MAX];
    char run_id[MANIFEST_RUN_ID_MAX];
    uint64_t generation;
    bool resumes; /* false: a fresh start */
    uint64_t resume_generation, resume_step;
    char host[256];
    char boot_id[40];
    uint32_t pid;       /* the claiming (client) process */
    uint64_t pid_start; /* field 22 of /proc/PID/stat */
    uint32_t world;
};
int run_record_write(const struct run_record *record, char **ret_text, size_t *ret_length) MUST_CHECK;
int run_record_read(const char *data, size_t size, struct run_record *ret_record, struct problem *problem) MUST_CHECK;

/* Job names on disk: [A-Za-z0-9._-] as they are (no leading '.'), other bytes %XX. 1..255 bytes of
 * UTF-8 whose escaped form has at most 255 bytes. */
int job_escape(const char *job, char ret_directory[256], struct problem *problem) MUST_CHECK;
int job_unescape(const char *directory, char ret_job[MANIFEST_JOB_MAX]) MUST_CHECK;
