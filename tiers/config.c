/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configuration. One table says everything about a key: where its value lies, its kind and
 * bounds, its default in the syntax of the file, and its help. Parsing, defaults and the example
 * come from that table.
 *
 * inih splits lines, but it is lenient in silence: it reads `name: value`, cuts ` ; comments` out of
 * values, joins indented lines to the value before, cuts long section names, ignores what follows a
 * `]`, does not tell of sections without keys, and knows nothing of duplicates. An operator who
 * mistypes would get a daemon that does something else. So inih reads through line_next(), which
 * sees every line first, refuses those forms with file and line, and keeps the section; inih is
 * left with lines on which it and the reader of the file agree.
 */
#include "tiers/config.h"

#include "base/log.h"
#include "tiers/codec.h"
#include "tiers/tier.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <limits.h>
#include <pwd.h>
#include <stdarg.h>
#include <sys/stat.h>

#define CONFIG_FILE_MAX MIB(1)
#define CONFIG_TIER_NAME_MAX 40 /* bytes, so that names stand whole in log lines */
#define CONFIG_PERCENT_MAX 90
#define CONFIG_YEAR_S (365 * 24 * 3600)

enum section { SECTION_DAEMON, SECTION_POOL, SECTION_TIER, SECTION_DEADLINES, SECTION_COUNT };

static const char *const section_names[SECTION_COUNT] = {"daemon", "pool", "tier", "deadlines"};

enum kind {
    KIND_NUMBER,  /* minimum .. maximum, in decimal */
    KIND_SIGNED,  /* the same, an int32_t */
    KIND_BYTES,   /* with K, M, G, T */
    KIND_POOL,    /* bytes, or a percentage: config.pool_size and pool_percent */
    KIND_SECONDS, /* with up to three decimals; kept in ms; bounds in s */
    KIND_SWITCH,  /* yes, no */
    KIND_MODE,    /* octal permission bits, of which `minimum` must be set */
    KIND_LOOP,
    KIND_LOG_LEVEL,
    KIND_ROLE,
    KIND_CODEC,
    KIND_FAULT, /* as tier_fault_parse() reads */
    KIND_PATH,  /* absolute; %u, %U and %% are replaced */
};

struct key {
    enum section section;
    const char *name;
    enum kind kind;
    size_t offset, size; /* in struct config, or for a tier in struct config_tier */
    int64_t minimum, maximum;
    const char *fallback; /* the default, as it would stand in the file; NULL: computed, or none */
    const char *shown;    /* what the example shows where fallback is NULL */
    const char *help;
    bool required;
};

#define IN_CONFIG(member) offsetof(struct config, member), sizeof(((struct config *)NULL)->member)
#define IN_TIER(member) offsetof(struct config_tier, member), sizeof(((struct config_tier *)NULL)->member)

static const struct key keys[] = {
    {SECTION_DAEMON, "loop", KIND_LOOP, IN_CONFIG(loop), 0, 0, "auto", NULL,
     "How the daemon waits: auto, uring or posix. auto takes io_uring where the kernel allows it."},
    {SECTION_DAEMON, "log_level", KIND_LOG_LEVEL, IN_CONFIG(log_level), 0, 0, "info", NULL,
     "The least severe lines that are logged: error, warning, info or debug."},
    {SECTION_DAEMON, "log_file", KIND_PATH, IN_CONFIG(log_file), 0, 0, NULL, "/var/tmp/ckptd-%U.log",
     "Where the log goes. Default: stderr; a daemon started on demand: beside its socket."},
    {SECTION_DAEMON, "capture_threads", KIND_NUMBER, IN_CONFIG(capture_threads), 1, 256, NULL, "1",
     "Threads that copy out of the jobs' memory. Default: one per 8 processors, at least 1."},
    {SECTION_DAEMON, "codec_threads", KIND_NUMBER, IN_CONFIG(codec_threads), 1, 256, "1", NULL,
     "Threads that encode and decode chunks."},
    {SECTION_DAEMON, "nice", KIND_SIGNED, IN_CONFIG(nice), -20, 19, "0", NULL,
     "The daemon's nice value; negative ones need the privilege."},
    {SECTION_DAEMON, "stop_grace_s", KIND_SECONDS, IN_CONFIG(stop_grace_ms), 0, CONFIG_YEAR_S, "30", NULL,
     "How long a stopping daemon goes on draining to the local level."},
    {SECTION_DAEMON, "idle_exit_s", KIND_SECONDS, IN_CONFIG(idle_exit_ms), 0, CONFIG_YEAR_S, "600", NULL,
     "A daemon started on demand ends so long after its last client, when all is drained."},

    {SECTION_POOL, "size", KIND_POOL, IN_CONFIG(pool_size), (int64_t)MIB(1), INT64_MAX, "25%", NULL,
     "Host memory for captured bytes: bytes (K, M, G, T), or a percentage (1% to 90%) of the smaller of the available "
     "memory and what the cgroup leaves."},
    {SECTION_POOL, "chunk_size", KIND_BYTES, IN_CONFIG(chunk_size), (int64_t)KIB(256), (int64_t)MIB(64), "4M", NULL,
     "The unit of digest, transfer and repair: a multiple of 256K, 256K to 64M."},
    {SECTION_POOL, "prefault", KIND_SWITCH, IN_CONFIG(prefault), 0, 0, "yes", NULL,
     "Touch the pool's memory in the background, before the first save needs it."},

    {SECTION_TIER, "role", KIND_ROLE, IN_TIER(level), 0, 0, NULL, "local",
     "local: survives the daemon and a reboot; parallel: survives the loss of the job's nodes. At most one tier each. "
     "Required.",
     true},
    {SECTION_TIER, "path", KIND_PATH, IN_TIER(path), 0, 0, NULL, "/var/tmp/ckptd-%U/local",
     "The tier's root, absolute; its parent must exist. %u is replaced by the user's name, %U by the numeric uid, %% "
     "by "
     "one %. Required.",
     true},
    {SECTION_TIER, "codec", KIND_CODEC, IN_TIER(codec), 0, 0, "raw", NULL,
     "raw, lz4, or auto, which samples each part. Raw parts are plain .safetensors files."},
    {SECTION_TIER, "depth", KIND_NUMBER, IN_TIER(depth), 1, 256, "8", NULL, "Chunks in flight."},
    {SECTION_TIER, "workers", KIND_NUMBER, IN_TIER(workers), 1, LOOP_GROUP_THREADS_MAX / 4, "4", NULL,
     "Threads for names and syncs."},
    {SECTION_TIER, "rate_mib_s", KIND_NUMBER, IN_TIER(rate_mib_s), 0, 1 << 20, "0", NULL,
     "The most MiB per second that are drained to the tier; 0: no limit."},
    {SECTION_TIER, "keep", KIND_NUMBER, IN_TIER(keep), 1, 1000000, NULL, "2",
     "The newest complete versions of a job that are kept. Default: 2 for local, 3 for parallel."},
    {SECTION_TIER, "keep_every", KIND_NUMBER, IN_TIER(keep_every), 0, INT64_MAX, "0", NULL,
     "Also keep every version whose step is a multiple of this; 0: none."},
    {SECTION_TIER, "trash_grace_s", KIND_SECONDS, IN_TIER(trash_grace_ms), 0, CONFIG_YEAR_S, "60", NULL,
     "How long a version lies in the trash before its files are unlinked."},
    {SECTION_TIER, "backlog", KIND_NUMBER, IN_TIER(backlog), 1, 1000, "8", NULL,
     "Versions of a job that may wait for this tier; older ones are then given up."},
    {SECTION_TIER, "buffered", KIND_SWITCH, IN_TIER(buffered), 0, 0, "no", NULL, "Never use O_DIRECT."},
    {SECTION_TIER, "allow_network", KIND_SWITCH, IN_TIER(allow_network), 0, 0, "no", NULL,
     "Accept a local tier on a network file system."},
    {SECTION_TIER, "file_mode", KIND_MODE, IN_TIER(file_mode), 0600, 0777, NULL, "0640",
     "Permissions of new files, octal; the owner needs 0600. Default: 0666, less the umask."},
    {SECTION_TIER, "directory_mode", KIND_MODE, IN_TIER(directory_mode), 0700, 0777, NULL, "0750",
     "Permissions of new directories, octal; the owner needs 0700. Default: 0777, less the umask."},
    {SECTION_TIER, "fault", KIND_FAULT, IN_TIER(fault), 0, 0, NULL, "write:100:eio",
     "For tests: OPERATION:N:ERROR makes the Nth such operation fail, and with a + all later ones."},
    {SECTION_TIER, "delay_ms", KIND_NUMBER, IN_TIER(delay_ms), 0, 600000, "0", NULL,
     "For tests: every operation takes so much longer."},

    {SECTION_DEADLINES, "settle_s", KIND_SECONDS, IN_CONFIG(settle_ms), 0, CONFIG_YEAR_S, "30", NULL,
     "How long an opening job waits for parts of its last run that the daemon still holds."},
    {SECTION_DEADLINES, "takeover_s", KIND_SECONDS, IN_CONFIG(takeover_ms), 0, CONFIG_YEAR_S, "60", NULL,
     "After so long another rank's daemon completes a version in rank 0's place."},
    {SECTION_DEADLINES, "tier_s", KIND_SECONDS, IN_CONFIG(tier_ms), 1, CONFIG_YEAR_S, "60", NULL,
     "A tier operation that takes longer is stuck: it is abandoned and its worker replaced."},
};

_Static_assert(ARRAY_SIZE(keys) <= 64, "one word of bits says which keys were seen");

static const struct {
    const char *name;
    enum level level;
} roles[] = {{"local", LEVEL_LOCAL}, {"parallel", LEVEL_GLOBAL}};

static const struct {
    const char *name;
    enum log_level level;
} log_levels[] = {
    {"error", LOG_LEVEL_ERROR}, {"warning", LOG_LEVEL_WARNING}, {"info", LOG_LEVEL_INFO}, {"debug", LOG_LEVEL_DEBUG}};

/* Digits only; no sign, no space, no other base. */
static bool parse_number(const char *text, size_t length, int64_t *ret_number) {
    int64_t number = 0;
    if (!length)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (!isdigit((unsigned char)text[i]) || __builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, text[i] - '0', &number))
            return false;
    }
    *ret_number = number;
    return true;
}

static bool parse_bytes(const char *text, int64_t *ret_bytes) {
    static const char units[] = "KMGT";
    size_t length = strlen(text);
    int64_t factor = 1;
    const char *unit = length ? strchr(units, text[length - 1]) : NULL;
    if (unit && *unit) {
        factor = INT64_C(1) << (10 * (unit - units + 1));
        length--;
    }
    int64_t number;
    if (!parse_number(text, length, &number) || __builtin_mul_overflow(number, factor, &number))
        return false;
    *ret_bytes = number;
    return true;
}

static bool parse_seconds(const char *text, int64_t *ret_ms) {
    size_t whole = strcspn(text, ".");
    int64_t seconds, ms;
    if (!parse_number(text, whole, &seconds) || __builtin_mul_overflow(seconds, 1000, &ms))
        return false;
    if (text[whole]) {
        const char *decimals = text + whole + 1;
        size_t length = strlen(decimals);
        int64_t fraction;
        if (length > 3 || !parse_number(decimals, length, &fraction))
            return false;
        for (; length < 3; length++)
            fraction *= 10;
        if (__builtin_add_overflow(ms, fraction, &ms))
            return false;
    }
    *ret_ms = ms;
    return true;
}

static bool parse_mode(const char *text, int64_t *ret_mode) {
    size_t length = strspn(text, "01234567");
    if (length < 3 || length > 4 || text[length])
        return false;
    *ret_mode = strtol(text, NULL, 8);
    return true;
}

static void store(const struct key *key, void *base, int64_t value) {
    char *place = (char *)base + key->offset;
    if (key->size == sizeof(int64_t)) {
        memcpy(place, &value, sizeof value);
    } else {
        assert(key->size == sizeof(int32_t));
        int32_t narrow = (int32_t)value;
        memcpy(place, &narrow, sizeof narrow);
    }
}

static bool store_text(const struct key *key, void *base, const char *text) {
    size_t length = strlen(text);
    if (length >= key->size)
        return false;
    memcpy((char *)base + key->offset, text, length + 1);
    return true;
}

/* %u: the user's name; %U: the uid; %%: a percent sign. Trailing slashes go. */
static int expand_path(const char *text, char *ret_path, size_t size, struct problem *problem) {
    char path[PATH_MAX];
    size_t length = 0;
    if (text[0] != '/')
        return problem_set(problem, -EINVAL, "must be an absolute path, but is \"%s\"", text);
    for (const char *at = text; *at; at++) {
        char piece[256] = {*at};
        if (*at == '%') {
            at++;
            const struct passwd *user = *at == 'u' ? getpwuid(geteuid()) : NULL;
            if (*at == '%')
                piece[0] = '%';
            else if (*at == 'U')
                snprintf(piece, sizeof piece, "%u", (unsigned)geteuid());
            else if (*at == 'u' && user)
                snprintf(piece, sizeof piece, "%s", user->pw_name);
            else if (*at == 'u')
                return problem_set(problem, -EINVAL, "has %%u, but uid %u has no name; write %%U", (unsigned)geteuid());
            else
                return problem_set(problem, -EINVAL, "has %%%.1s, but only %%u, %%U and %%%% are known", at);
        }
        size_t piece_length = strlen(piece);
        if (length + piece_length >= size || length + piece_length >= sizeof path)
            return problem_set(problem, -EINVAL, "is longer than %zu bytes", size - 1);
        memcpy(path + length, piece, piece_length);
        length += piece_length;
    }
    while (length > 1 && path[length - 1] == '/')
        length--;
    path[length] = '\0';
    for (const char *at = path; (at = strstr(at, "/.")); at++) {
        if (strspn(at + 1, ".") <= 2 && strchr("/", at[1 + strspn(at + 1, ".")]))
            return problem_set(problem, -EINVAL, "must be a path without \".\" and \"..\", but is \"%s\"", path);
    }
    memcpy(ret_path, path, length + 1);
    return 0;
}

static int key_set_range(const struct key *key, void *base, bool parsed, int64_t value, int64_t unit, const char *text,
                         const char *what, struct problem *problem) {
    if (!parsed)
        return problem_set(problem, -EINVAL, "must be %s, but is \"%s\"", what, text);
    int64_t minimum = key->minimum * unit, maximum = key->maximum;
    if (__builtin_mul_overflow(maximum, unit, &maximum))
        maximum = INT64_MAX;
    if (value < minimum)
        return problem_set(problem, -EINVAL, "must be at least %lld, but is %s", (long long)key->minimum, text);
    if (value > maximum)
        return problem_set(problem, -EINVAL, "must be at most %lld, but is %s", (long long)key->maximum, text);
    store(key, base, value);
    return 0;
}

static int key_set_pool(struct config *config, const struct key *key, const char *text, struct problem *problem) {
    size_t length = strlen(text);
    int64_t number;
    if (length && text[length - 1] == '%') {
        if (!parse_number(text, length - 1, &number) || number < 1 || number > CONFIG_PERCENT_MAX)
            return problem_set(problem, -EINVAL, "must be 1%% to %d%%, but is \"%s\"", CONFIG_PERCENT_MAX, text);
        config->pool_size = 0;
        config->pool_percent = (uint32_t)number;
        return 0;
    }
    bool parsed = parse_bytes(text, &number);
    return key_set_range(key, config, parsed, number, 1, text, "bytes (with K, M, G or T) or a percentage", problem);
}

/* Puts one value where it belongs; problem gets the half sentence after "key ". */
static int key_set(const struct key *key, void *base, const char *text, struct problem *problem) {
    int64_t number = 0;
    bool parsed;
    switch (key->kind) {
    case KIND_NUMBER:
        parsed = parse_number(text, strlen(text), &number);
        return key_set_range(key, base, parsed, number, 1, text, "a number", problem);
    case KIND_SIGNED:
        parsed = parse_number(text + (text[0] == '-'), strlen(text + (text[0] == '-')), &number);
        return key_set_range(key, base, parsed, text[0] == '-' ? -number : number, 1, text, "a number", problem);
    case KIND_BYTES:
        parsed = parse_bytes(text, &number);
        return key_set_range(key, base, parsed, number, 1, text, "bytes (with K, M, G or T)", problem);
    case KIND_POOL:
        return key_set_pool(base, key, text, problem);
    case KIND_SECONDS:
        parsed = parse_seconds(text, &number);
        return key_set_range(key, base, parsed, number, 1000, text, "seconds (such as 30 or 0.5)", problem);
    case KIND_SWITCH:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
            return problem_set(problem, -EINVAL, "must be yes or no, but is \"%s\"", text);
        *(bool *)((char *)base + key->offset) = text[0] == 'y';
        return 0;
    case KIND_MODE:
        if (!parse_mode(text, &number))
            return problem_set(problem, -EINVAL, "must be octal permissions such as 0750, but is \"%s\"", text);
        if ((number & key->minimum) != key->minimum || number > key->maximum)
            return problem_set(problem, -EINVAL, "must hold %04llo and nothing above 0777, but is %s",
                               (unsigned long long)key->minimum, text);
        store(key, base, number);
        return 0;
    case KIND_LOOP:
        if (strcmp(text, "auto") != 0 && strcmp(text, "uring") != 0 && strcmp(text, "posix") != 0)
            return problem_set(problem, -EINVAL, "must be auto, uring or posix, but is \"%s\"", text);
        store_text(key, base, text);
        return 0;
    case KIND_LOG_LEVEL:
        for (size_t i = 0; i < ARRAY_SIZE(log_levels); i++) {
            if (strcmp(text, log_levels[i].name) == 0) {
                store(key, base, log_levels[i].level);
                return 0;
            }
        }
        return problem_set(problem, -EINVAL, "must be error, warning, info or debug, but is \"%s\"", text);
    case KIND_ROLE:
        for (size_t i = 0; i < ARRAY_SIZE(roles); i++) {
            if (strcmp(text, roles[i].name) == 0) {
                store(key, base, roles[i].level);
                return 0;
            }
        }
        return problem_set(problem, -EINVAL, "must be local or parallel, but is \"%s\"", text);
    case KIND_CODEC: {
        enum codec codec;
        if (!codec_from_name(text, &codec))
            return problem_set(problem, -EINVAL, "must be raw, lz4 or auto, but is \"%s\"", text);
        store(key, base, codec);
        return 0;
    }
    case KIND_FAULT: {
        struct tier_fault_options options;
        struct problem reason = PROBLEM_NONE;
        int r = tier_fault_parse(text, &options, &reason);
        if (r < 0)
            return problem_set(problem, -EINVAL, "is wrong: %s", problem_text(&reason, r));
        if (!store_text(key, base, text))
            return problem_set(problem, -EINVAL, "is longer than %zu bytes", key->size - 1);
        return 0;
    }
    case KIND_PATH:
        return expand_path(text, (char *)base + key->offset, key->size, problem);
    }
    assert(!"a kind that is not in the table");
    return -EINVAL;
}

static void set_fallbacks(enum section section, void *base) {
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        if (keys[i].section == section && keys[i].fallback) {
            int r = key_set(&keys[i], base, keys[i].fallback, NULL);
            assert(r == 0);
        }
    }
}

void config_tier_default(const char *name, const char *path, enum level level, struct config_tier *ret_tier) {
    *ret_tier = (struct config_tier){.level = level};
    set_fallbacks(SECTION_TIER, ret_tier);
    ret_tier->keep = level == LEVEL_LOCAL ? 2 : 3;
    snprintf(ret_tier->name, sizeof ret_tier->name, "%s", name);
    snprintf(ret_tier->path, sizeof ret_tier->path, "%s", path);
}

static void config_default(struct config *ret_config) {
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *ret_config = (struct config){.capture_threads = processors > 8 ? (uint32_t)processors / 8 : 1};
    set_fallbacks(SECTION_DAEMON, ret_config);
    set_fallbacks(SECTION_POOL, ret_config);
    set_fallbacks(SECTION_DEADLINES, ret_config);
}

/* ---- reading a text ---- */

struct parser {
    const char *file;
    const char *next; /* what inih has not asked for yet */
    int line;         /* of what it is looking at */
    bool failed;
    struct problem *problem;

    struct config *config;
    bool in_section;
    enum section section;
    struct config_tier *tier; /* of the section */
    uint64_t seen;            /* keys of the section */
    bool sections[SECTION_COUNT];
    int tier_lines[CONFIG_TIERS_MAX]; /* where each tier begins */
};

static int refuse(struct parser *parser, int line, const char *format, ...) PRINTF_LIKE(3, 4);
static int refuse(struct parser *parser, int line, const char *format, ...) {
    char text[PROBLEM_TEXT_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    parser->failed = true;
    return problem_set(parser->problem, -EINVAL, "%s:%d: %s", parser->file, line, text);
}

static bool tier_name_valid(const char *name) {
    size_t length = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-");
    return length > 0 && length <= CONFIG_TIER_NAME_MAX && !name[length];
}

static void begin_tier(struct parser *parser, const char *name) {
    struct config *config = parser->config;
    if (!tier_name_valid(name)) {
        refuse(parser, parser->line, "a tier's section is [tier NAME], NAME being 1 to %d of A-Z a-z 0-9 _ -",
               CONFIG_TIER_NAME_MAX);
        return;
    }
    for (size_t i = 0; i < config->tier_count; i++) {
        if (strcmp(config->tiers[i].name, name) == 0) {
            refuse(parser, parser->line, "there is already a [tier %s] in line %d", name, parser->tier_lines[i]);
            return;
        }
    }
    if (config->tier_count == CONFIG_TIERS_MAX) {
        refuse(parser, parser->line, "more than %d tiers", CONFIG_TIERS_MAX);
        return;
    }
    parser->section = SECTION_TIER;
    parser->tier_lines[config->tier_count] = parser->line;
    parser->tier = &config->tiers[config->tier_count++];
    config_tier_default(name, "", LEVEL_NONE, parser->tier);
    parser->tier->keep = 0;
}

/* "[...]" without trailing space. */
static void begin_section(struct parser *parser, const char *text, size_t length) {
    char name[128];
    if (text[length - 1] != ']' || memchr(text, ']', length) != text + length - 1 || length - 2 >= sizeof name) {
        refuse(parser, parser->line, "a section is [name] and nothing after it");
        return;
    }
    memcpy(name, text + 1, length - 2);
    name[length - 2] = '\0';
    parser->in_section = true;
    parser->seen = 0;
    parser->tier = NULL;
    if (strcmp(name, "tier") == 0 || strncmp(name, "tier ", 5) == 0) {
        begin_tier(parser, name[4] ? name + 5 : "");
        return;
    }
    for (size_t i = 0; i < SECTION_COUNT; i++) {
        if (strcmp(name, section_names[i]) != 0)
            continue;
        if (parser->sections[i])
            refuse(parser, parser->line, "there is already a section [%s]", name);
        parser->sections[i] = true;
        parser->section = (enum section)i;
        return;
    }
    refuse(parser, parser->line, "no such section as [%s]; there are [daemon], [pool], [tier NAME] and [deadlines]",
           name);
}

/* What inih would read otherwise than a person does. */
static void check_assignment(struct parser *parser, const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    const char *colon = memchr(text, ':', length);
    if (!equals || (colon && colon < equals)) {
        refuse(parser, parser->line, "expected [section], key = value, or a comment");
        return;
    }
    for (const char *at = equals + 1; at < text + length; at++) {
        if ((*at == ';' || *at == '#') && isspace((unsigned char)at[-1])) {
            refuse(parser, parser->line, "a comment must have a line of its own");
            return;
        }
    }
}

/* inih's reader: gives the next line that says something, checked and stripped. */
static char *line_next(char *buffer, int size, void *context) {
    struct parser *parser = context;
    while (!parser->failed && *parser->next) {
        const char *text = parser->next;
        size_t length = strcspn(text, "\n");
        parser->next = text + length + (text[length] == '\n');
        parser->line++;
        while (length && isspace((unsigned char)text[length - 1]))
            length--;
        for (; length && isspace((unsigned char)*text); length--)
            text++;
        if (!length || *text == '#' || *text == ';')
            continue;
        if (length + 3 > (size_t)size) { /* "\r\n" and NUL are inih's */
            refuse(parser, parser->line, "the line is longer than %d bytes", size - 3);
        } else if (*text == '[') {
            begin_section(parser, text, length);
        } else {
            check_assignment(parser, text, length);
        }
        if (parser->failed)
            break;
        memcpy(buffer, text, length);
        memcpy(buffer + length, "\n", 2);
        return buffer;
    }
    return NULL;
}

static void refuse_key(struct parser *parser, const char *name) {
    char list[PROBLEM_TEXT_MAX / 2] = "";
    size_t used = 0;
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        if (keys[i].section == parser->section && used < sizeof list)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", keys[i].name);
    }
    refuse(parser, parser->line, "no such key as \"%s\" in [%s]; there are %s", name, section_names[parser->section],
           list);
}

/* inih's handler: one assignment. 0 tells inih of an error. */
static int assign(void *context, const char *section, const char *name, const char *value) {
    (void)section; /* line_next() keeps it, with sections that have no keys */
    struct parser *parser = context;
    if (!parser->in_section) {
        refuse(parser, parser->line, "\"%s\" stands before the first [section]", name);
        return 0;
    }
    size_t i = 0;
    while (i < ARRAY_SIZE(keys) && (keys[i].section != parser->section || strcmp(keys[i].name, name) != 0))
        i++;
    if (i == ARRAY_SIZE(keys)) {
        refuse_key(parser, name);
        return 0;
    }
    if (parser->seen & UINT64_C(1) << i) {
        refuse(parser, parser->line, "%s is set twice in this section", name);
        return 0;
    }
    parser->seen |= UINT64_C(1) << i;
    struct problem reason = PROBLEM_NONE;
    void *base = parser->section == SECTION_TIER ? (void *)parser->tier : (void *)parser->config;
    int r = value[0] ? key_set(&keys[i], base, value, &reason) : problem_set(&reason, -EINVAL, "has no value");
    if (r >= 0 && keys[i].kind == KIND_BYTES && parser->config->chunk_size % KIB(256) != 0)
        r = problem_set(&reason, -EINVAL, "must be a multiple of 256K, but is %s", value);
    if (r < 0)
        refuse(parser, parser->line, "%s %s", name, problem_text(&reason, r));
    return r >= 0;
}

/* One path equal to, or inside, the other. */
static bool paths_nest(const char *a, const char *b) {
    size_t length = strlen(a) < strlen(b) ? strlen(a) : strlen(b);
    const char *longer = strlen(a) < strlen(b) ? b : a;
    return strncmp(a, b, length) == 0 && (!longer[length] || longer[length] == '/');
}

static int check_tiers(struct parser *parser) {
    struct config *config = parser->config;
    for (size_t i = 0; i < config->tier_count; i++) {
        struct config_tier *tier = &config->tiers[i];
        int line = parser->tier_lines[i];
        if (tier->level == LEVEL_NONE)
            return refuse(parser, line, "[tier %s] has no role (local or parallel)", tier->name);
        if (!tier->path[0])
            return refuse(parser, line, "[tier %s] has no path", tier->name);
        for (size_t k = 0; k < i; k++) {
            if (config->tiers[k].level == tier->level)
                return refuse(parser, line, "[tier %s] has the role of [tier %s]; there is one tier of each role",
                              tier->name, config->tiers[k].name);
            if (paths_nest(config->tiers[k].path, tier->path))
                return refuse(parser, line, "[tier %s] and [tier %s] lie in the same directory or one in the other",
                              tier->name, config->tiers[k].name);
        }
        if (!tier->keep)
            tier->keep = tier->level == LEVEL_LOCAL ? 2 : 3;
    }
    return 0;
}

static void sort_tiers(struct config *config) {
    for (size_t i = 1; i < config->tier_count; i++) {
        for (size_t k = i; k > 0 && config->tiers[k - 1].level > config->tiers[k].level; k--) {
            struct config_tier tier = config->tiers[k];
            config->tiers[k] = config->tiers[k - 1];
            config->tiers[k - 1] = tier;
        }
    }
}

static void add_default_tier(struct config *config) {
    char path[64];
    snprintf(path, sizeof path, "/var/tmp/ckptd-%u/local", (unsigned)geteuid());
    config_tier_default("local", path, LEVEL_LOCAL, &config->tiers[0]);
    config->tier_count = 1;
}

int config_parse(const char *text, const char *file, struct config *ret_config, struct problem *problem) {
    struct config config;
    config_default(&config);
    snprintf(config.file, sizeof config.file, "%s", file);
    struct parser parser = {.file = file, .next = text, .problem = problem, .config = &config};
    int r = ini_parse_stream(line_next, &parser, assign, &parser);
    if (!parser.failed && r != 0)
        return r < 0 ? problem_set(problem, -ENOMEM, "%s: out of memory", file)
                     : refuse(&parser, r, "expected [section], key = value, or a comment");
    if (parser.failed || check_tiers(&parser) < 0)
        return -EINVAL;
    if (config.pool_size && config.pool_size < 2 * (uint64_t)config.chunk_size)
        return problem_set(problem, -EINVAL, "%s: the pool (%llu bytes) must hold at least two chunks of %u bytes",
                           file, (unsigned long long)config.pool_size, config.chunk_size);
    if (!config.tier_count)
        add_default_tier(&config);
    sort_tiers(&config);
    *ret_config = config;
    return 0;
}

/* ---- finding the file ---- */

/* TIER_E_ABSENT: there is no such file, which is for the caller to judge. */
static int load_file(const char *path, struct config *ret_config, struct problem *problem) {
    CLEANUP(fclosep) FILE *file = fopen(path, "re");
    if (!file && (errno == ENOENT || errno == ENOTDIR))
        return TIER_E_ABSENT;
    struct stat status;
    if (!file || fstat(fileno(file), &status) < 0)
        return problem_set(problem, -errno, "%s: cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode) || status.st_size > (off_t)CONFIG_FILE_MAX)
        return problem_set(problem, -EINVAL, "%s: not a regular file of at most %llu bytes", path,
                           (unsigned long long)CONFIG_FILE_MAX);
    CLEANUP(freep) char *text = malloc(CONFIG_FILE_MAX + 1);
    if (!text)
        return problem_set(problem, -ENOMEM, "%s: out of memory", path);
    size_t got = fread(text, 1, CONFIG_FILE_MAX, file);
    if (ferror(file))
        return problem_set(problem, -EIO, "%s: cannot be read", path);
    text[got] = '\0';
    if (strlen(text) != got)
        return problem_set(problem, -EINVAL, "%s: has a NUL byte, so it is no configuration", path);
    return config_parse(text, path, ret_config, problem);
}

static int load_named(const char *path, const char *by, struct config *ret_config, struct problem *problem) {
    int r = load_file(path, ret_config, problem);
    if (r == TIER_E_ABSENT)
        return problem_set(problem, -EINVAL, "%s: no such file (%s names it)", path, by);
    return r;
}

int config_load(const char *path, struct config *ret_config, struct problem *problem) {
    if (path)
        return load_named(path, "--config", ret_config, problem);
    const char *named = getenv("CKPTD_CONFIG");
    if (named && named[0])
        return load_named(named, "CKPTD_CONFIG", ret_config, problem);

    char own[PATH_MAX] = "";
    const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    if (xdg && xdg[0] == '/')
        snprintf(own, sizeof own, "%s/ckptd/ckptd.conf", xdg);
    else if (home && home[0] == '/')
        snprintf(own, sizeof own, "%s/.config/ckptd/ckptd.conf", home);
    int r = own[0] ? load_file(own, ret_config, problem) : TIER_E_ABSENT;
    if (r == TIER_E_ABSENT)
        r = load_file("/etc/ckptd/ckptd.conf", ret_config, problem);
    if (r == TIER_E_ABSENT)
        r = config_parse("", "", ret_config, problem);
    return r;
}

/* ---- the example ---- */

#define EXAMPLE_WIDTH 100

/* Comment lines of at most EXAMPLE_WIDTH columns, cut between words. */
static void print_comment(FILE *out, const char *text) {
    size_t column = 0;
    while (*text) {
        size_t word = strcspn(text, " ");
        if (column && column + 1 + word > EXAMPLE_WIDTH) {
            fputc('\n', out);
            column = 0;
        }
        if (!column)
            column += (size_t)fprintf(out, "#");
        column += (size_t)fprintf(out, " %.*s", (int)word, text);
        text += word + (text[word] == ' ');
    }
    fputc('\n', out);
}

int config_example(FILE *out) {
    fputs("# The configuration of ckptd and ckptctl: ckptd.conf(5) explains it. Without this file the daemon does\n"
          "# what stands here. Lines with a default are commented out; a comment has a line of its own.\n",
          out);
    for (int section = 0; section < SECTION_COUNT; section++) {
        fprintf(out, "\n[%s%s]\n", section_names[section], section == SECTION_TIER ? " local" : "");
        for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
            const struct key *key = &keys[i];
            if ((int)key->section != section)
                continue;
            print_comment(out, key->help);
            fprintf(out, "%s%s = %s\n", key->required ? "" : "#", key->name,
                    key->fallback ? key->fallback : key->shown);
        }
        if (section == SECTION_TIER)
            fputs("\n# The parallel tier usually comes with the job (CKPT_DIR). One for all jobs would be:\n"
                  "#[tier parallel]\n#role = parallel\n#path = /scratch/%u/ckptd\n",
                  out);
    }
    return ferror(out) ? -EIO : 0;
}
