/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the configuration; config-keys.c has the table of keys and their values.
 *
 * inih splits lines, but it is lenient in silence: it reads `name: value`, cuts ` ; comments` out of
 * values, joins indented lines to the value before, cuts long section names, ignores what follows a
 * `]`, does not tell of sections without keys, and knows nothing of duplicates. An operator who
 * mistypes would get a daemon that does something else. So inih reads through line_next(), which
 * sees every line first, refuses those forms with file and line, and keeps the section; inih is
 * left with lines on which it and the reader of the file agree.
 */
#include "tiers/config-keys.h"
#include "tiers/tier.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <limits.h>
#include <stdarg.h>

#define CONFIG_FILE_MAX MIB(1)
#define CONFIG_TIER_NAME_MAX 40 /* bytes, so that names stand whole in log lines */

struct parser {
    const char *file;
    const char *next; /* what inih has not asked for yet */
    int line;         /* of what it is looking at */
    bool failed;
    struct problem *problem;

    struct config *config;
    bool in_section;
    enum config_section section;
    struct config_tier *tier; /* of the section */
    uint64_t seen;            /* keys of the section */
    bool sections[CONFIG_SECTION_COUNT];
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
    parser->section = CONFIG_TIER;
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
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        if (strcmp(name, config_section_names[i]) != 0)
            continue;
        if (parser->sections[i])
            refuse(parser, parser->line, "there is already a section [%s]", name);
        parser->sections[i] = true;
        parser->section = (enum config_section)i;
        return;
    }
    refuse(parser, parser->line,
           "no such section as [%s]; there are [daemon], [pool], [device], [tier NAME] and [deadlines]", name);
}

/* What inih would read otherwise than a person does. */
static void check_assignment(struct parser *parser, const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    const char *colon = memchr(text, ':', length);
    if (!equals || (colon && colon < equals)) {
        refuse(parser, parser->line, "expected [section], key = value, or a comment");
        return;
    }
    for (const char *at = text + 1; at < text + length; at++) { /* before the = it would hide it */
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
    for (size_t i = 0; i < config_key_count; i++) {
        if (config_keys[i].section == parser->section && used < sizeof list)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", config_keys[i].name);
    }
    refuse(parser, parser->line, "no such key as \"%s\" in [%s]; there are %s", name,
           config_section_names[parser->section], list);
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
    while (i < config_key_count &&
           (config_keys[i].section != parser->section || strcmp(config_keys[i].name, name) != 0))
        i++;
    if (i == config_key_count) {
        refuse_key(parser, name);
        return 0;
    }
    if (parser->seen & UINT64_C(1) << i) {
        refuse(parser, parser->line, "%s is set twice in this section", name);
        return 0;
    }
    parser->seen |= UINT64_C(1) << i;
    struct problem reason = PROBLEM_NONE;
    void *base = parser->section == CONFIG_TIER ? (void *)parser->tier : (void *)parser->config;
    int r = value[0] ? config_key_set(&config_keys[i], base, value, &reason)
                     : problem_set(&reason, -EINVAL, "has no value");
    if (r < 0)
        refuse(parser, parser->line, "%s %s", name, problem_text(&reason, r));
    else if (parser->tier && strcmp(name, "path") == 0)
        parser->tier->line = parser->line;
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
            tier->keep = config_keep_default(tier->level);
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
    if (!file)
        return problem_set(problem, -EINVAL, "%s: cannot be read: %s", path, strerror(errno));
    CLEANUP(freep) char *text = malloc(CONFIG_FILE_MAX + 1);
    if (!text)
        return problem_set(problem, -ENOMEM, "%s: out of memory", path);
    size_t got = fread(text, 1, CONFIG_FILE_MAX, file);
    if (ferror(file))
        return problem_set(problem, -EINVAL, "%s: cannot be read: %s", path, strerror(errno));
    if (got == CONFIG_FILE_MAX)
        return problem_set(problem, -EINVAL, "%s: is larger than %llu bytes", path,
                           (unsigned long long)CONFIG_FILE_MAX);
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
