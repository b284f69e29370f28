/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranks of a crew keep step: none is more than one step ahead, or hardly a version would get all its
 * parts. A step that no daemon took is tried again or left out, by chance, so that there are versions
 * with an absent part as well.
 */
#include "tests/functional/crew.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { WORDS = 40000, EAGER_WORDS = 16, NEWEST = 2 };

struct rank_state {
    _Atomic uint64_t next;                     /* packed: what it saves next; 0: not open */
    _Atomic uint64_t durable[CKPT_GLOBAL + 1]; /* packed */
    _Atomic uint64_t checked;                  /* round */
};

struct crew_state {
    _Atomic bool leaving;
    uint64_t floor; /* was durable when the run began */
    char run_id[32];
    struct rank_state ranks[CREW_RANKS_MAX];
};

static struct shared {
    _Atomic bool skipping;
    _Atomic uint64_t round, checks, compared;
    struct crew_state crews[CREWS];
} * shared;

static struct crew {
    const char *job;
    uint32_t world;
    pid_t pids[CREW_RANKS_MAX]; /* 0: not running */
    uint64_t runs;
} crews[CREWS] = {{.job = "pair", .world = 2}, {.job = "solo", .world = 1}};

static struct member { /* what a rank's process is told */
    unsigned crew;
    uint32_t rank;
} members[CREWS][CREW_RANKS_MAX];

uint64_t crew_pack(struct version_id id) { return id.generation << 32 | id.step; }

struct version_id crew_unpack(uint64_t packed) {
    return (struct version_id){.generation = packed >> 32, .step = packed & UINT32_MAX};
}

void crews_init(void) { shared = shared_memory(sizeof *shared); }

const char *crew_job(unsigned crew) { return crews[crew].job; }
uint32_t crew_world(unsigned crew) { return crews[crew].world; }
uint64_t crews_checks(void) { return shared->checks; }
uint64_t crews_compared(void) { return shared->compared; }
struct version_id crew_next(unsigned crew) {
    return crew_unpack(shared->crews[crew].ranks[0].next);
}

uint64_t crew_durable(unsigned crew, uint32_t level) {
    uint64_t newest = 0;
    for (uint32_t at = level; at <= CKPT_GLOBAL; at++)
        for (uint32_t rank = 0; rank < crews[crew].world; rank++)
            newest = max_u64(newest, shared->crews[crew].ranks[rank].durable[at]);
    return newest;
}

/* ---- a rank ---- */

static uint64_t seed_of(const struct member *member, uint32_t rank, struct version_id id) {
    return ((member->crew * 16 + rank) * UINT64_C(1000003) + id.generation) * UINT64_C(1000003) + id.step;
}

/* The daemon may die in every call. Anything else is an error. */
static bool daemon_was_there(int result, const char *what) {
    if (result >= 0)
        return true;
    if (result != CKPT_E_UNREACHABLE && result != CKPT_E_TIMEOUT && result != CKPT_E_LOST && result != CKPT_E_STOPPING)
        FAIL("%s: %s: %s", what, ckpt_strerror(result), ckpt_strerror_last());
    return false;
}

enum outcome {
    COMPARED,
    GONE, /* not found: retention may have been faster */
    DIED  /* the daemon, meanwhile */
};

static enum outcome compare_tensor(ckpt_restore *r, const struct member *member, uint32_t rank, bool eager,
                                   struct version_id id) {
    static uint64_t words[WORDS];
    char name[32];
    size_t count = eager ? EAGER_WORDS : WORDS;
    snprintf(name, sizeof name, "%s %u", eager ? "eager" : "words", rank);
    memset(words, 0, sizeof words);
    int read = restore_array(r, name, CKPT_U64, words, count);
    if (read == CKPT_E_NOT_FOUND)
        return GONE;
    if (!daemon_was_there(read, "read"))
        return DIED;
    words_check(words, count, seed_of(member, rank, id) + eager);
    return COMPARED;
}

/* Every byte of the version. */
static enum outcome compare(ckpt_restore *r, const struct member *member) {
    struct ckpt_restore_info info;
    CKPT_INIT(info);
    CHECK_OK(ckpt_restore_get_info(r, &info));
    CHECK(info.world == crews[member->crew].world);
    const struct version_id id = {info.generation, info.step};
    enum outcome outcome = COMPARED;
    for (uint32_t rank = 0; outcome == COMPARED && rank < info.world; rank++) {
        outcome = compare_tensor(r, member, rank, false, id);
        if (outcome == COMPARED)
            outcome = compare_tensor(r, member, rank, true, id);
    }
    shared->compared += outcome == COMPARED;
    return outcome;
}

static enum outcome compare_version(ckpt *c, const struct member *member, struct version_id id) {
    ckpt_restore *r;
    struct ckpt_restore_options options;
    CKPT_INIT(options);
    options.which = CKPT_RESTORE_EXACT;
    options.generation = id.generation;
    options.step = id.step;
    int opened = ckpt_restore_open(c, &options, &r);
    if (opened == CKPT_E_NOT_FOUND)
        return GONE;
    if (!daemon_was_there(opened, "open a version"))
        return DIED;
    CHECK_IS(CKPT_OK, opened);
    enum outcome outcome = compare(r, member);
    ckpt_restore_close(r);
    return outcome;
}

static bool is_listed(ckpt *c, struct version_id id) {
    struct ckpt_version_entry *versions;
    size_t count;
    bool found = false;
    if (!daemon_was_there(ckpt_versions(c, &versions, &count), "list the versions"))
        return false;
    for (size_t i = 0; i < count; i++)
        found = found || (versions[i].generation == id.generation && versions[i].step == id.step);
    ckpt_versions_free(versions);
    return found;
}

/* Looks through the list: the newest ones and any of the others. False: the daemon died meanwhile. */
static bool look_through(ckpt *c, const struct member *member) {
    uint64_t floor = crew_durable(member->crew, CKPT_LOCAL);
    struct ckpt_version_entry *versions;
    size_t count;
    if (!daemon_was_there(ckpt_versions(c, &versions, &count), "list the versions"))
        return false;
    uint64_t newest = count ? crew_pack((struct version_id){versions[0].generation, versions[0].step}) : 0;
    if (newest < floor)
        FAIL("%s: the newest version listed is %llx, but %llx was reported durable", crew_job(member->crew),
             (unsigned long long)newest, (unsigned long long)floor);
    enum outcome outcome = COMPARED;
    size_t older = count > NEWEST ? NEWEST + random_number(count - NEWEST) : 0;
    for (size_t i = 0; outcome != DIED && i < count; i++) {
        if (i >= (member->rank ? 1 : NEWEST) && i != older)
            continue; /* crews_verify() reads them all */
        const struct version_id id = {versions[i].generation, versions[i].step};
        /* A tier may lose its copy while it comes to another one: then the second look finds that. */
        unsigned tries = 0;
        char why[512];
        do {
            outcome = compare_version(c, member, id);
            snprintf(why, sizeof why, "%s", ckpt_strerror_last());
        } while (outcome == GONE && is_listed(c, id) && ++tries < 3);
        if (tries == 3)
            FAIL("%s: step %llu is listed, but cannot be read: %s", crew_job(member->crew), (unsigned long long)id.step,
                 why);
    }
    ckpt_versions_free(versions);
    return outcome != DIED;
}

static void note_durable(ckpt *c, struct rank_state *state) {
    static const uint32_t levels[] = {CKPT_LOCAL, CKPT_GLOBAL};
    for (size_t i = 0; i < ARRAY_SIZE(levels); i++) {
        struct ckpt_durable durable;
        CKPT_INIT(durable);
        int known = ckpt_last_durable(c, levels[i], &durable);
        if (known != CKPT_OK)
            daemon_was_there(known, "ask what is durable");
        else
            state->durable[levels[i]] =
                max_u64(state->durable[levels[i]], crew_pack((struct version_id){durable.generation, durable.step}));
    }
}

/* Joins or claims the run, whatever it takes, and compares what it resumes from. */
static ckpt *rank_begin(const struct member *member, struct version_id *ret_next) {
    struct crew_state *crew = &shared->crews[member->crew];
    struct ckpt_open_options options;
    struct ckpt_info info;
    CKPT_INIT(options);
    CKPT_INIT(info);
    options.rank = member->rank;
    options.world = crews[member->crew].world;
    options.run_id = crew->run_id;
    options.open_timeout_ms = 2000;
    ckpt *c = NULL;
    for (int opened; (opened = ckpt_open(crew_job(member->crew), &options, &c)) != CKPT_OK;) {
        if (crew->leaving)
            return NULL;
        if (opened != CKPT_E_HELD) /* the last run's processes take a moment to be gone */
            daemon_was_there(opened, "open");
        pause_ms(1);
    }
    CHECK_OK(ckpt_get_info(c, &info));
    const struct version_id resumed = {info.resume_generation, info.resume_step};
    if ((info.resumes ? crew_pack(resumed) : 0) < crew->floor)
        FAIL("%s resumes from %llx, but %llx was reported durable", crew_job(member->crew),
             (unsigned long long)crew_pack(resumed), (unsigned long long)crew->floor);
    for (bool compared = !info.resumes; !compared && !crew->leaving;) {
        ckpt_restore *r;
        int opened = ckpt_restore_open(c, NULL, &r);
        if (daemon_was_there(opened, "open the version that the run resumes from")) {
            CHECK_OK(opened);
            enum outcome outcome = compare(r, member);
            CHECK(outcome != GONE);
            compared = outcome == COMPARED;
            ckpt_restore_close(r);
        }
        pause_ms(1);
    }
    *ret_next = (struct version_id){info.generation, info.resumes ? info.resume_step + 1 : 1};
    return c;
}

static void rank_protect(ckpt *c, const struct member *member, uint64_t **ret_words, uint64_t *eager_words) {
    char name[32];
    struct ckpt_shard eager;
    uint64_t count = EAGER_WORDS;
    if (member->rank % 2 == 0)
        *ret_words = malloc(WORDS * 8);
    else
        CHECK_OK(ckpt_alloc(c, WORDS * 8, (void **)ret_words));
    CHECK(*ret_words);
    snprintf(name, sizeof name, "words %u", member->rank);
    CHECK_OK(ckpt_protect_array(c, name, CKPT_U64, *ret_words, WORDS));
    CKPT_INIT(eager);
    snprintf(name, sizeof name, "eager %u", member->rank);
    eager.dtype = CKPT_U64;
    eager.name = name;
    eager.data = eager_words;
    eager.dimensions = 1;
    eager.shape = &count;
    eager.flags = CKPT_EAGER;
    CHECK_OK(ckpt_protect(c, &eager, NULL));
}

/* Nobody of the crew is more than one step behind. */
static bool in_step(const struct member *member, struct version_id next) {
    for (uint32_t rank = 0; rank < crews[member->crew].world; rank++)
        if (shared->crews[member->crew].ranks[rank].next + 1 < crew_pack(next))
            return false;
    return true;
}

static void rank_run(void *argument) {
    const struct member *member = argument;
    struct crew_state *crew = &shared->crews[member->crew];
    struct rank_state *state = &crew->ranks[member->rank];
    struct version_id next;
    uint64_t *words, eager[EAGER_WORDS];
    ckpt *c = rank_begin(member, &next);
    if (!c)
        return;
    rank_protect(c, member, &words, eager);
    state->next = crew_pack(next);
    while (!crew->leaving) {
        uint64_t round = shared->round;
        if (state->checked != round && look_through(c, member)) {
            state->checked = round;
            shared->checks++;
        }
        if (!shared->skipping)
            note_durable(c, state);
        if (!in_step(member, next)) {
            pause_ms(1);
            continue;
        }
        if (!daemon_was_there(ckpt_fence(c, CKPT_DEFAULT_TIMEOUT), "fence"))
            pause_ms(1);
        words_fill(words, WORDS, seed_of(member, member->rank, next));
        words_fill(eager, EAGER_WORDS, seed_of(member, member->rank, next) + 1);
        struct ckpt_save_options options;
        CKPT_INIT(options);
        options.to = random_number(4) == 0 ? CKPT_LOCAL : 0;
        options.busy_timeout_ms = 200;
        int saved = ckpt_save(c, next.step, &options);
        memset(eager, 0xee, sizeof eager);
        bool taken = daemon_was_there(saved, "save") && saved != CKPT_SKIPPED;
        pause_ms(1 + (unsigned)random_number(4)); /* or most versions would be left out, superseded while they wait */
        if (taken || shared->skipping || random_number(16) == 0)
            state->next = crew_pack((struct version_id){next.generation, ++next.step});
    }
    daemon_was_there(ckpt_close(c), "close");
}

/* ---- crews ---- */

void crew_start(unsigned crew) {
    struct crew_state *state = &shared->crews[crew];
    state->leaving = false;
    state->floor = crew_durable(crew, CKPT_LOCAL);
    snprintf(state->run_id, sizeof state->run_id, "run %llu", (unsigned long long)++crews[crew].runs);
    for (uint32_t rank = 0; rank < crews[crew].world; rank++)
        state->ranks[rank].next = 0;
    for (uint32_t rank = 0; rank < crews[crew].world; rank++) {
        random_number(2); /* each process has numbers of its own */
        members[crew][rank] = (struct member){crew, rank};
        crews[crew].pids[rank] = process_start(rank_run, &members[crew][rank]);
    }
}

void crew_kill(unsigned crew) {
    crews_reap();
    for (uint32_t rank = 0; rank < crews[crew].world; rank++)
        if (crews[crew].pids[rank]) {
            process_kill(crews[crew].pids[rank]);
            crews[crew].pids[rank] = 0;
        }
}

void crew_leave(unsigned crew) {
    shared->crews[crew].leaving = true;
    for (uint32_t rank = 0; rank < crews[crew].world; rank++)
        if (crews[crew].pids[rank]) {
            process_join(crews[crew].pids[rank]);
            crews[crew].pids[rank] = 0;
        }
}

void crews_skip(bool skip) { shared->skipping = skip; }

void crews_round(void) { shared->round++; }

bool crews_have_checked(void) {
    crews_reap();
    for (unsigned crew = 0; crew < CREWS; crew++)
        for (uint32_t rank = 0; rank < crews[crew].world; rank++)
            if (crews[crew].pids[rank] && shared->crews[crew].ranks[rank].checked != shared->round)
                return false;
    return true;
}

void crews_reap(void) {
    for (unsigned crew = 0; crew < CREWS; crew++)
        for (uint32_t rank = 0; rank < crews[crew].world; rank++) {
            int status;
            pid_t pid = crews[crew].pids[rank];
            if (pid && waitpid(pid, &status, WNOHANG) == pid && !shared->crews[crew].leaving)
                FAIL("rank %u of %s ended with status 0x%x", rank, crews[crew].job, status);
        }
}

/* ---- the files ---- */

/* The newest complete version in the tier, all of which are whole; 0: none. */
static uint64_t verify_tier(struct tier *tier, unsigned crew, uint64_t except, unsigned *ret_read) {
    struct catalog catalog;
    struct problem problem = PROBLEM_NONE;
    uint64_t newest = 0;
    int r = catalog_scan(tier, crew_job(crew), &catalog, &problem);
    if (r < 0)
        FAIL("%s", problem_text(&problem, r));
    for (size_t i = 0; i < catalog.version_count; i++) {
        const struct version_id id = catalog.versions[i].id;
        if (!catalog.versions[i].complete || crew_pack(id) == except)
            continue;
        r = catalog_check(tier, crew_job(crew), id, &problem);
        for (uint32_t rank = 0; r == 0 && rank < crews[crew].world; rank++)
            r = catalog_verify_part(tier, crew_job(crew), id, rank, &problem);
        if (r)
            FAIL("generation %llu, step %llu of %s is listed as complete: %s", (unsigned long long)id.generation,
                 (unsigned long long)id.step, crew_job(crew), r < 0 ? problem_text(&problem, r) : "a part is absent");
        newest = crew_pack(id);
        ++*ret_read;
    }
    catalog_deinit(&catalog);
    return newest;
}

unsigned crews_verify(struct tier *local, struct tier *parallel, uint64_t except) {
    unsigned count = 0;
    for (unsigned crew = 0; crew < CREWS; crew++) {
        uint64_t in_local = verify_tier(local, crew, except, &count);
        uint64_t in_parallel = verify_tier(parallel, crew, 0, &count);
        if (max_u64(in_local, in_parallel) < crew_durable(crew, CKPT_LOCAL) && !except)
            FAIL("%s: %llx was reported LOCAL, the newest is %llx", crew_job(crew),
                 (unsigned long long)crew_durable(crew, CKPT_LOCAL),
                 (unsigned long long)max_u64(in_local, in_parallel));
        if (in_parallel < crew_durable(crew, CKPT_GLOBAL))
            FAIL("%s: %llx was reported GLOBAL, the newest is %llx", crew_job(crew),
                 (unsigned long long)crew_durable(crew, CKPT_GLOBAL), (unsigned long long)in_parallel);
    }
    return count;
}

static uint64_t newest_in(struct tier *tier, unsigned crew) {
    struct catalog catalog;
    uint64_t newest = 0;
    if (catalog_scan(tier, crew_job(crew), &catalog, NULL) < 0)
        return 0;
    for (size_t i = 0; i < catalog.version_count; i++)
        if (catalog.versions[i].complete && catalog_check(tier, crew_job(crew), catalog.versions[i].id, NULL) == 0)
            newest = crew_pack(catalog.versions[i].id);
    catalog_deinit(&catalog);
    return newest;
}

bool crews_lost(struct tier *local, struct tier *parallel) {
    for (unsigned crew = 0; crew < CREWS; crew++)
        if (max_u64(newest_in(local, crew), newest_in(parallel, crew)) < crew_durable(crew, CKPT_LOCAL))
            return true;
    return false;
}
