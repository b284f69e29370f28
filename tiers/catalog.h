/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What a tier holds of a job, as its files say; there is no other store. A scan reads directory
 * names and first lines only. Entries that cannot be read (a foreign or damaged file, an
 * unreadable directory) do not fail the scan: they are counted and named. Whoever decides or deletes
 * must tell what is not there from what could not be read: `unreadable`, `error`. Blocking.
 */

#include "proto/manifest.h"
#include "tiers/layout.h"
#include "tiers/tier.h"

/* Copies of parts, and indexes, that were found damaged and renamed to .bad, by whomever. */
struct catalog_damage {
    uint64_t set_aside;
    uint64_t repaired; /* those of them in whose place a new one stands */
};

struct catalog_version {
    struct version_id id;
    bool complete;                   /* complete.json is there and its summary is good */
    struct complete_summary summary; /* if complete */
    bool damaged;                    /* not complete, but it was: complete.json is bad or condemned */
    bool unreadable;                 /* the tier failed, or a newer program wrote it: it may be complete */
    bool pinned;
};

struct catalog_generation {
    uint64_t generation;
    bool has_run;          /* the run file is there and good */
    bool run_damaged;      /* it is there, but not good */
    bool run_ended;        /* claim_end() */
    struct run_record run; /* if has_run */
    int64_t touched_ns;    /* mtime of the run file, good or not */
    int error;             /* the tier failed when it was looked at: negative errno; what is said above may be wrong */
};

struct catalog {
    struct catalog_version *versions; /* ascending */
    size_t version_count;
    struct catalog_generation *generations; /* ascending */
    size_t generation_count;
    uint64_t bad;             /* entries that could not be understood */
    struct problem first_bad; /* and the first of them */
    struct catalog_damage damage;
};

/* A job that is not there gives an empty catalog and 0. */
int catalog_scan(struct tier *tier, const char *job, struct catalog *ret_catalog, struct problem *problem) MUST_CHECK;
/* The same, for a decision that stays: each directory is synced before it is listed. So what is found is
 * there for good, also what somebody made who died before he had synced it; and the client of a network
 * file system asks the server instead of its own cache, which may lack what other nodes made lately. */
int catalog_scan_fresh(struct tier *tier, const char *job, struct catalog *ret_catalog,
                       struct problem *problem) MUST_CHECK;
/* Only generations, with who holds them: no version is looked at. */
int catalog_scan_runs(struct tier *tier, const char *job, struct catalog *ret_catalog,
                      struct problem *problem) MUST_CHECK;
/* Only the newest versions: down to one that is complete, at most `max`. */
int catalog_scan_newest(struct tier *tier, const char *job, uint32_t max, struct catalog *ret_catalog,
                        struct problem *problem) MUST_CHECK;
void catalog_deinit(struct catalog *catalog);
/* Names (unescaped) of all jobs under the root. */
int catalog_jobs(struct tier *tier, char ***ret_jobs, size_t *ret_count, struct problem *problem) MUST_CHECK;

/* The version of this id in a scan; NULL if it is not there. */
const struct catalog_version *catalog_find(const struct catalog *catalog, struct version_id id);

/* Is this error of tier_read_file() not the tier's, but what stands there: a directory, a link, a device? */
bool catalog_is_no_file(int error);
/* Reads and verifies complete.json, all of it. TIER_E_ABSENT. -EBADMSG: damaged. */
int catalog_read_complete(struct tier *tier, const char *job, struct version_id version, struct complete *ret_complete,
                          struct problem *problem) MUST_CHECK;
/* The same, as verified text (what a restore hands to the client). */
int catalog_read_complete_text(struct tier *tier, const char *job, struct version_id version, char **ret_text,
                               size_t *ret_size, struct problem *problem) MUST_CHECK;
/* Reads and verifies one part's manifest; checks its data file's length. TIER_E_ABSENT: no manifest.
 * -EBADMSG: damaged, or the data file is missing or short. */
int catalog_read_manifest(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                          struct manifest *ret_manifest, struct problem *problem) MUST_CHECK;
/* The same without its pieces, for who only reads chunks. */
int catalog_read_manifest_chunks(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                                 struct manifest *ret_manifest, struct problem *problem) MUST_CHECK;
/* Checks complete.json, every manifest's first line against it, and every data file's length,
 * without reading data. 0, TIER_E_ABSENT, or -EBADMSG. */
int catalog_check(struct tier *tier, const char *job, struct version_id version, struct problem *problem) MUST_CHECK;
/* The same; hands out what it has read: the parts (without the index of pieces) and the text of
 * complete.json, which the caller frees. */
int catalog_check_parts(struct tier *tier, const char *job, struct version_id version, struct complete *ret_complete,
                        char **ret_text, size_t *ret_size, struct problem *problem) MUST_CHECK;

/* Reads one chunk of a part into `data` (>= raw length rounded up to TIER_ALIGNMENT, so aligned),
 * decoding if needed (`scratch`: same size, may be NULL for raw), and verifies its digest.
 * -EBADMSG: wrong bytes. Blocking. */
int catalog_read_chunk(struct tier_file *file, const struct manifest *manifest, uint32_t index, void *data,
                       void *scratch, struct problem *problem) MUST_CHECK;
/* Reads every chunk and checks every digest. TIER_E_ABSENT: there is no such part. */
int catalog_verify_part(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                        struct problem *problem) MUST_CHECK;
/* A bad copy: renames rank-N.json to rank-N.json.bad, and complete.json likewise, so that nobody chooses it. */
int catalog_condemn(struct tier *tier, const char *job, struct version_id version, uint32_t rank,
                    struct problem *problem) MUST_CHECK;
/* Replaces a bad part by a good copy from another tier: the bad manifest is set aside, fresh files are
 * committed, and the version becomes complete again if nothing else is missing. Every chunk is
 * verified on the way. Encoded chunks are copied as they are. */
int catalog_repair_part(struct tier *bad, struct tier *good, const char *job, struct version_id version, uint32_t rank,
                        uint64_t nonce, struct problem *problem) MUST_CHECK;
