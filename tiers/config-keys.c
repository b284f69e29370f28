/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of keys, how values are read, and the commented example. A value is read strictly: the
 * whole text or nothing, decimal only, named units, bounds from the table.
 */
#include "tiers/config-keys.h"

#include "base/log.h"
#include "tiers/codec.h"
#include "tiers/tier.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <pwd.h>

#define CONFIG_PERCENT_MAX 90
#define CONFIG_YEAR_S (365 * 24 * 3600)

const char *const config_section_names[CONFIG_SECTION_COUNT] = {"daemon", "pool", "device", "tier", "deadlines"};

#define IN_CONFIG(member) offsetof(struct config, member), sizeof(((struct config *)NULL)->member)
#define IN_TIER(member) offsetof(struct config_tier, member), sizeof(((struct config_tier *)NULL)->member)

const struct config_key config_keys[] = {
    {CONFIG_DAEMON, "loop", CONFIG_LOOP, IN_CONFIG(loop), 0, 0, "auto", NULL,
     "How the daemon waits: auto, uring or posix. auto takes io_uring where the kernel allows it."},
    {CONFIG_DAEMON, "log_level", CONFIG_LOG_LEVEL, IN_CONFIG(log_level), 0, 0, "info", NULL,
     "The least severe lines that are logged: error, warning, info or debug."},
    {CONFIG_DAEMON, "log_file", CONFIG_PATH, IN_CONFIG(log_file), 0, 0, NULL, "/var/tmp/ckptd-%U.log",
     "Where the log goes. Default: stderr; a daemon started on demand: beside its socket."},
    {CONFIG_DAEMON, "capture_threads", CONFIG_NUMBER, IN_CONFIG(capture_threads), 1, 256, NULL, "2",
     "Threads that copy out of the jobs' memory. Default: one per 8 processors, at least 2 (1 where there is one "
     "processor)."},
    {CONFIG_DAEMON, "codec_threads", CONFIG_NUMBER, IN_CONFIG(codec_threads), 1, 256, NULL, "2",
     "Threads that encode chunks. Default: as capture_threads."},
    {CONFIG_DAEMON, "nice", CONFIG_NUMBER, IN_CONFIG(nice), -20, 19, "0", NULL,
     "The daemon's nice value; negative ones need the privilege."},
    {CONFIG_DAEMON, "processors", CONFIG_PROCESSORS, IN_CONFIG(processors), 0, 0, NULL, "0-3,8",
     "The processors that the daemon keeps to, all its threads: numbers and ranges. Default: all that it may use."},
    {CONFIG_DAEMON, "stop_grace_s", CONFIG_SECONDS, IN_CONFIG(stop_grace_ms), 0, CONFIG_YEAR_S, "30", NULL,
     "How long a stopping daemon goes on draining to the local level."},
    {CONFIG_DAEMON, "idle_exit_s", CONFIG_SECONDS, IN_CONFIG(idle_exit_ms), 0, CONFIG_YEAR_S, "600", NULL,
     "A daemon started on demand ends so long after its last client, when all is drained."},

    {CONFIG_POOL, "size", CONFIG_SIZE, IN_CONFIG(pool_size), (int64_t)MIB(1), INT64_MAX, "25%", NULL,
     "Host memory for captured bytes: bytes (K, M, G, T), or a percentage (1% to 90%) of the smaller of the available "
     "memory and what the cgroup leaves."},
    {CONFIG_POOL, "chunk_size", CONFIG_CHUNK, IN_CONFIG(chunk_size), (int64_t)KIB(256), (int64_t)MIB(64), "4M", NULL,
     "The unit of digest, transfer and repair: a multiple of 256K, 256K to 64M."},
    {CONFIG_POOL, "prefault", CONFIG_SWITCH, IN_CONFIG(prefault), 0, 0, "yes", NULL,
     "Touch the pool's memory in the background, before the first save needs it."},

    {CONFIG_DEVICE, "use", CONFIG_SWITCH, IN_CONFIG(device_use), 0, 0, "yes", NULL,
     "Open the jobs' GPU memory and copy out of it. With no, the jobs' library copies it to the host itself."},
    {CONFIG_DEVICE, "arena", CONFIG_CHUNK, IN_CONFIG(arena_size), 0, INT64_MAX, "0", NULL,
     "GPU memory, on each GPU in use, in which captured images wait to be brought to the host: a multiple of 256K; 0: "
     "none."},
    {CONFIG_DEVICE, "piece", CONFIG_CHUNK, IN_CONFIG(device_piece), (int64_t)KIB(256), (int64_t)MIB(64), "16M", NULL,
     "How much is copied from a GPU at once: a multiple of 256K, 256K to 64M. At most two pieces are in flight."},
    {CONFIG_DEVICE, "rate_mib_s", CONFIG_NUMBER, IN_CONFIG(device_rate_mib_s), 0, 1 << 20, "0", NULL,
     "The most MiB per second that are copied from each GPU; 0: no limit."},
    {CONFIG_DEVICE, "pin", CONFIG_SWITCH, IN_CONFIG(device_pin), 0, 0, "yes", NULL,
     "Register the pool's memory with the GPU driver, so that copies run at full speed."},

    {CONFIG_TIER, "role", CONFIG_ROLE, IN_TIER(level), 0, 0, NULL, "local",
     "local: survives the daemon and a reboot; parallel: survives the loss of the job's nodes. At most one tier each. "
     "Required.",
     true},
    {CONFIG_TIER, "path", CONFIG_PATH, IN_TIER(path), 0, 0, NULL, "/var/tmp/ckptd-%U/local",
     "The tier's root, absolute; its parent must exist. %u is replaced by the user's name, %U by the numeric uid, %% "
     "by "
     "one %. Required.",
     true},
    {CONFIG_TIER, "codec", CONFIG_CODEC, IN_TIER(codec), 0, 0, "raw", NULL,
     "raw, lz4, or auto, which samples each chunk, and encodes where the tier is slower than that. Raw parts are plain "
     ".safetensors files."},
    {CONFIG_TIER, "depth", CONFIG_NUMBER, IN_TIER(depth), 1, 256, "8", NULL, "Chunks in flight."},
    {CONFIG_TIER, "workers", CONFIG_NUMBER, IN_TIER(workers), 1, LOOP_GROUP_THREADS_MAX / 4, "8", NULL,
     "Threads for names, syncs and what is read back."},
    {CONFIG_TIER, "rate_mib_s", CONFIG_NUMBER, IN_TIER(rate_mib_s), 0, 1 << 20, "0", NULL,
     "The most MiB per second that are drained to the tier; 0: no limit."},
    {CONFIG_TIER, "keep", CONFIG_NUMBER, IN_TIER(keep), 1, 1000000, NULL, "2",
     "The newest complete versions of a job that are kept. Default: 2 for local, 3 for parallel."},
    {CONFIG_TIER, "keep_every", CONFIG_NUMBER, IN_TIER(keep_every), 0, INT64_MAX, "0", NULL,
     "Also keep every version whose step is a multiple of this; 0: none."},
    {CONFIG_TIER, "trash_grace_s", CONFIG_SECONDS, IN_TIER(trash_grace_ms), 0, CONFIG_YEAR_S, "60", NULL,
     "How long a version lies in the trash before its files are unlinked."},
    {CONFIG_TIER, "backlog", CONFIG_NUMBER, IN_TIER(backlog), 1, 1000, "8", NULL,
     "Versions of a job that may wait for this tier; older ones are then given up."},
    {CONFIG_TIER, "buffered", CONFIG_SWITCH, IN_TIER(buffered), 0, 0, "no", NULL, "Never use O_DIRECT."},
    {CONFIG_TIER, "allow_network", CONFIG_SWITCH, IN_TIER(allow_network), 0, 0, "no", NULL,
     "Accept a local tier on a network file system."},
    {CONFIG_TIER, "file_mode", CONFIG_MODE, IN_TIER(file_mode), 0600, 0777, NULL, "0640",
     "Permissions of new files, octal; the owner needs 0600. Default: 0666, less the umask."},
    {CONFIG_TIER, "directory_mode", CONFIG_MODE, IN_TIER(directory_mode), 0700, 0777, NULL, "0750",
     "Permissions of new directories, octal; the owner needs 0700. Default: 0777, less the umask."},
    {CONFIG_TIER, "fault", CONFIG_FAULT, IN_TIER(fault), 0, 0, NULL, "write:100:eio",
     "For tests: OPERATION:N:ERROR makes the Nth such operation fail, and with a + all later ones."},
    {CONFIG_TIER, "delay_ms", CONFIG_NUMBER, IN_TIER(delay_ms), 0, 600000, "0", NULL,
     "For tests: every operation takes so much longer."},

    {CONFIG_DEADLINES, "settle_s", CONFIG_SECONDS, IN_CONFIG(settle_ms), 0, CONFIG_YEAR_S, "30", NULL,
     "How long an opening job waits for parts of its last run that the daemon still holds."},
    {CONFIG_DEADLINES, "takeover_s", CONFIG_SECONDS, IN_CONFIG(takeover_ms), 0, CONFIG_YEAR_S, "60", NULL,
     "After so long another rank's daemon completes a version in rank 0's place."},
    {CONFIG_DEADLINES, "tier_s", CONFIG_SECONDS, IN_CONFIG(tier_ms), 1, CONFIG_YEAR_S, "60", NULL,
     "A tier operation that takes longer is stuck: it is abandoned and its worker replaced."},
    {CONFIG_DEADLINES, "capture_s", CONFIG_SECONDS, IN_CONFIG(capture_ms), 1, CONFIG_YEAR_S, "60", NULL,
     "A save that its client is to push is given up when nothing came for so long."},
    {CONFIG_DEADLINES, "device_s", CONFIG_SECONDS, IN_CONFIG(device_ms), 1, CONFIG_YEAR_S, "30", NULL,
     "A GPU that does not answer for so long is stuck: it is left alone until it answers again."},
};

const size_t config_key_count = ARRAY_SIZE(config_keys);

_Static_assert(ARRAY_SIZE(config_keys) <= CONFIG_KEYS_MAX, "one word of bits says which keys were seen");

struct named {
    const char *name;
    int value;
};
static const struct named roles[] = {{"local", LEVEL_LOCAL}, {"parallel", LEVEL_GLOBAL}, {0}};
static const struct named log_levels[] = {{"error", LOG_LEVEL_ERROR},
                                          {"warning", LOG_LEVEL_WARNING},
                                          {"info", LOG_LEVEL_INFO},
                                          {"debug", LOG_LEVEL_DEBUG},
                                          {0}};

static bool find_named(const struct named *names, const char *text, int64_t *ret_value) {
    while (names->name && strcmp(text, names->name) != 0)
        names++;
    if (names->name)
        *ret_value = names->value;
    return names->name;
}

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

static void store(const struct config_key *key, void *base, int64_t value) {
    char *place = (char *)base + key->offset;
    if (key->size == sizeof(int64_t)) {
        memcpy(place, &value, sizeof value);
    } else {
        assert(key->size == sizeof(int32_t));
        int32_t narrow = (int32_t)value;
        memcpy(place, &narrow, sizeof narrow);
    }
}

static bool store_text(const struct config_key *key, void *base, const char *text) {
    size_t length = strlen(text);
    if (length >= key->size)
        return false;
    memcpy((char *)base + key->offset, text, length + 1);
    return true;
}

bool config_processors(const char *text, cpu_set_t *ret_processors) {
    cpu_set_t processors;
    CPU_ZERO(&processors);
    do {
        size_t length = strcspn(text, ",-");
        int64_t first, last;
        if (!parse_number(text, length, &first))
            return false;
        last = first;
        text += length;
        if (*text == '-') {
            length = strcspn(++text, ",");
            if (!parse_number(text, length, &last))
                return false;
            text += length;
        }
        if (last < first || last >= CPU_SETSIZE)
            return false;
        for (int64_t i = first; i <= last; i++)
            CPU_SET((size_t)i, &processors);
    } while (*text++ == ',');
    *ret_processors = processors;
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

static int key_set_range(const struct config_key *key, void *base, bool parsed, int64_t value, int64_t unit,
                         const char *text, const char *what, struct problem *problem) {
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

static int key_set_pool(struct config *config, const struct config_key *key, const char *text,
                        struct problem *problem) {
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

int config_key_set(const struct config_key *key, void *base, const char *text, struct problem *problem) {
    int64_t number = 0;
    bool parsed;
    switch (key->kind) {
    case CONFIG_NUMBER: {
        bool negative = text[0] == '-' && key->minimum < 0;
        parsed = parse_number(text + negative, strlen(text + negative), &number);
        return key_set_range(key, base, parsed, negative ? -number : number, 1, text, "a number", problem);
    }
    case CONFIG_CHUNK:
        parsed = parse_bytes(text, &number);
        if (parsed && number % (int64_t)DIGEST_LEAF_SIZE != 0)
            return problem_set(problem, -EINVAL, "must be a multiple of 256K, but is %s", text);
        return key_set_range(key, base, parsed, number, 1, text, "bytes (with K, M, G or T)", problem);
    case CONFIG_SIZE:
        return key_set_pool(base, key, text, problem);
    case CONFIG_SECONDS:
        parsed = parse_seconds(text, &number);
        return key_set_range(key, base, parsed, number, 1000, text, "seconds (such as 30 or 0.5)", problem);
    case CONFIG_SWITCH:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
            return problem_set(problem, -EINVAL, "must be yes or no, but is \"%s\"", text);
        *(bool *)((char *)base + key->offset) = text[0] == 'y';
        return 0;
    case CONFIG_MODE:
        if (!parse_mode(text, &number))
            return problem_set(problem, -EINVAL, "must be octal permissions such as 0750, but is \"%s\"", text);
        if ((number & key->minimum) != key->minimum || number > key->maximum)
            return problem_set(problem, -EINVAL, "must hold %04llo and nothing above 0777, but is %s",
                               (unsigned long long)key->minimum, text);
        store(key, base, number);
        return 0;
    case CONFIG_LOOP:
        if (strcmp(text, "auto") != 0 && strcmp(text, "uring") != 0 && strcmp(text, "posix") != 0)
            return problem_set(problem, -EINVAL, "must be auto, uring or posix, but is \"%s\"", text);
        store_text(key, base, text);
        return 0;
    case CONFIG_LOG_LEVEL:
        if (!find_named(log_levels, text, &number))
            return problem_set(problem, -EINVAL, "must be error, warning, info or debug, but is \"%s\"", text);
        store(key, base, number);
        return 0;
    case CONFIG_ROLE:
        if (!find_named(roles, text, &number))
            return problem_set(problem, -EINVAL, "must be local or parallel, but is \"%s\"", text);
        store(key, base, number);
        return 0;
    case CONFIG_CODEC: {
        enum codec codec;
        if (!codec_from_name(text, &codec))
            return problem_set(problem, -EINVAL, "must be raw, lz4 or auto, but is \"%s\"", text);
        store(key, base, codec);
        return 0;
    }
    case CONFIG_PROCESSORS: {
        cpu_set_t processors;
        if (!config_processors(text, &processors))
            return problem_set(problem, -EINVAL,
                               "must be numbers and ranges of processors (such as 0-3,8) below %d, but is \"%s\"",
                               CPU_SETSIZE, text);
        if (!store_text(key, base, text))
            return problem_set(problem, -EINVAL, "is longer than %zu bytes", key->size - 1);
        return 0;
    }
    case CONFIG_FAULT: {
        struct tier_fault_options options;
        struct problem reason = PROBLEM_NONE;
        int r = tier_fault_parse(text, &options, &reason);
        if (r < 0)
            return problem_set(problem, -EINVAL, "is wrong: %s", problem_text(&reason, r));
        if (!store_text(key, base, text))
            return problem_set(problem, -EINVAL, "is longer than %zu bytes", key->size - 1);
        return 0;
    }
    case CONFIG_PATH:
        return expand_path(text, (char *)base + key->offset, key->size, problem);
    }
    assert(!"a kind that is not in the table");
    return -EINVAL;
}

static void set_fallbacks(enum config_section section, void *base) {
    for (size_t i = 0; i < ARRAY_SIZE(config_keys); i++) {
        if (config_keys[i].section == section && config_keys[i].fallback) {
            int r = config_key_set(&config_keys[i], base, config_keys[i].fallback, NULL);
            assert(r == 0);
        }
    }
}

uint32_t config_keep_default(enum level level) { return level == LEVEL_LOCAL ? 2 : 3; }

void config_tier_default(const char *name, const char *path, enum level level, struct config_tier *ret_tier) {
    *ret_tier = (struct config_tier){.level = level};
    set_fallbacks(CONFIG_TIER, ret_tier);
    ret_tier->keep = config_keep_default(level);
    snprintf(ret_tier->name, sizeof ret_tier->name, "%s", name);
    snprintf(ret_tier->path, sizeof ret_tier->path, "%s", path);
}

void config_default(struct config *ret_config) {
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = processors > 16 ? (uint32_t)processors / 8 : processors > 1 ? 2 : 1;
    *ret_config = (struct config){.capture_threads = threads, .codec_threads = threads};
    set_fallbacks(CONFIG_DAEMON, ret_config);
    set_fallbacks(CONFIG_POOL, ret_config);
    set_fallbacks(CONFIG_DEVICE, ret_config);
    set_fallbacks(CONFIG_DEADLINES, ret_config);
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
    for (int section = 0; section < CONFIG_SECTION_COUNT; section++) {
        fprintf(out, "\n[%s%s]\n", config_section_names[section], section == CONFIG_TIER ? " local" : "");
        for (size_t i = 0; i < config_key_count; i++) {
            const struct config_key *key = &config_keys[i];
            if ((int)key->section != section)
                continue;
            print_comment(out, key->help);
            fprintf(out, "%s%s = %s\n", key->required ? "" : "#", key->name,
                    key->fallback ? key->fallback : key->shown);
        }
        if (section == CONFIG_TIER)
            fputs("\n# The parallel tier usually comes with the job (CKPT_DIR). One for all jobs would be:\n"
                  "#[tier parallel]\n#role = parallel\n#path = /scratch/%u/ckptd\n",
                  out);
    }
    return ferror(out) ? -EIO : 0;
}
