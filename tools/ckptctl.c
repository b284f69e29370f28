/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckptctl: the operators' view of the service. With --root it needs no daemon: the tiers are the
 * database, and everything it shows of versions it reads from their files.
 *
 * One table has the verbs, one the options with the verbs that take them; help and the checks of
 * the command line come from these tables.
 */
#include "tools/ckptctl.h"

#include "proto/codes.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/random.h>

#ifndef CKPTD_VERSION
#error "the build defines CKPTD_VERSION"
#endif

enum verb_bit {
    V_STATUS = 1 << 0,
    V_LS = 1 << 1,
    V_SHOW = 1 << 2,
    V_VERIFY = 1 << 3,
    V_EXPORT = 1 << 4,
    V_PIN = 1 << 5,
    V_UNPIN = 1 << 6,
    V_RM = 1 << 7,
    V_DRAIN = 1 << 8,
    V_DOCTOR = 1 << 9,
    V_STOP = 1 << 10,
    V_CONFIG = 1 << 11,
    V_HELP = 1 << 12,
    V_TRACE = 1 << 13,
    V_ANY = (1 << 14) - 1,
    V_ROOTS = V_LS | V_SHOW | V_VERIFY | V_EXPORT | V_PIN | V_UNPIN | V_RM | V_DRAIN | V_DOCTOR,
};

static int verb_help(struct ctl *ctl);

static const struct verb {
    enum verb_bit bit;
    const char *name;
    int (*run)(struct ctl *ctl);
    int words_min, words_max;
    const char *synopsis;
    const char *help;
} verbs[] = {
    {V_STATUS, "status", verb_status, 0, 0, "", "the daemon: pool, tiers, clients, versions in flight, last errors"},
    {V_TRACE, "trace", verb_trace, 0, 1, "[JOB]",
     "what the daemon did lately, as JSON for Perfetto or chrome://tracing"},
    {V_LS, "ls", verb_ls, 0, 1, "[JOB]", "jobs; or a job's versions and generations, and what each resumed from"},
    {V_SHOW, "show", verb_show, 1, 2, "JOB [VERSION]", "a version's parts and tensors"},
    {V_VERIFY, "verify", verb_verify, 1, 2, "JOB [VERSION | --all] [--repair]",
     "read every chunk and check its digest; --repair replaces bad parts from another root"},
    {V_EXPORT, "export", verb_export, 1, 2,
     "JOB [VERSION] -o OUT [--part RANK | --split | [--tensors GLOB]... | --hf [--prefix P]]",
     "write plain .safetensors files"},
    {V_PIN, "pin", verb_pin, 2, 2, "JOB VERSION [--name NAME]", "keep a version until it is unpinned"},
    {V_UNPIN, "unpin", verb_unpin, 2, 2, "JOB VERSION [--name NAME]", "take a pin away"},
    {V_RM, "rm", verb_rm, 2, 2, "JOB VERSION [--force]", "remove a version from all roots"},
    {V_DRAIN, "drain", verb_drain, 0, 1, "[JOB] [--wait [--timeout S]]",
     "what is not drained yet; --wait: until all is; without a daemon, drain"},
    {V_DOCTOR, "doctor", verb_doctor, 0, 0, "", "check this machine: one line per fact, and what to do"},
    {V_STOP, "stop", verb_stop, 0, 0, "[--now]", "end the daemon, drained to the local level unless --now"},
    {V_CONFIG, "config", verb_config, 0, 0, "[--example]", "the configuration in force, or a commented example"},
    {V_HELP, "help", verb_help, 0, 1, "[VERB]", "this"},
};

enum option_id {
    OPTION_JSON = 256,
    OPTION_ROOT,
    OPTION_SOCKET,
    OPTION_CONFIG,
    OPTION_ALL,
    OPTION_REPAIR,
    OPTION_PART,
    OPTION_TENSORS,
    OPTION_SPLIT,
    OPTION_HF,
    OPTION_PREFIX,
    OPTION_NAME,
    OPTION_FORCE,
    OPTION_WAIT,
    OPTION_TIMEOUT,
    OPTION_NOW,
    OPTION_EXAMPLE,
    OPTION_VERSION,
    OPTION_OUTPUT = 'o',
    OPTION_HELP = 'h',
};

static const struct option_rule {
    const char *name;
    int id;
    const char *argument; /* NULL: takes none */
    unsigned verbs;       /* that take it */
    const char *help;
} rules[] = {
    {"json", OPTION_JSON, NULL, V_ANY, "print JSON"},
    {"root", OPTION_ROOT, "DIR", V_ROOTS, "a tier's root; repeatable, nearest first; then no daemon is asked"},
    {"socket", OPTION_SOCKET, "PATH", V_ANY, "the daemon's socket, instead of the usual search"},
    {"config", OPTION_CONFIG, "FILE", V_ANY, "the configuration, instead of the usual search"},
    {"all", OPTION_ALL, NULL, V_VERIFY, "every version"},
    {"repair", OPTION_REPAIR, NULL, V_VERIFY, "replace bad parts from another root's good copy"},
    {"output", OPTION_OUTPUT, "OUT", V_EXPORT, "the file to write, or the directory with --split"},
    {"part", OPTION_PART, "RANK", V_EXPORT, "the image of one rank, as it was captured"},
    {"tensors", OPTION_TENSORS, "GLOB", V_EXPORT, "only tensors with such names; repeatable"},
    {"split", OPTION_SPLIT, NULL, V_EXPORT, "one file per rank"},
    {"hf", OPTION_HF, NULL, V_EXPORT, "a plain model file: global tensors below the prefix, which is cut off"},
    {"prefix", OPTION_PREFIX, "P", V_EXPORT, "with --hf; default: model/"},
    {"name", OPTION_NAME, "NAME", V_PIN | V_UNPIN, "of the pin; default: operator"},
    {"force", OPTION_FORCE, NULL, V_RM, "even if a run resumed from it and has no version of its own yet"},
    {"wait", OPTION_WAIT, NULL, V_DRAIN, "until all is drained"},
    {"timeout", OPTION_TIMEOUT, "S", V_DRAIN, "give up after so many seconds"},
    {"now", OPTION_NOW, NULL, V_STOP, "without draining"},
    {"example", OPTION_EXAMPLE, NULL, V_CONFIG, "print a commented example"},
    {"help", OPTION_HELP, NULL, V_ANY, "help"},
    {"version", OPTION_VERSION, NULL, V_ANY, "the version"},
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number) { interrupted = 1; }

bool ctl_interrupted(void) { return interrupted != 0; }

static void say(const char *format, va_list arguments) __attribute__((format(printf, 1, 0)));
static void say(const char *format, va_list arguments) {
    fflush(stdout);
    fputs("ckptctl: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

int ctl_fail(enum status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return status;
}

void ctl_warn(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

enum status ctl_status(int error) {
    switch (error) {
    case -EBUSY:
        return STATUS_BUSY;
    case -EBADMSG:
    case -ENODATA:
        return STATUS_PROBLEM;
    default:
        return STATUS_STORAGE;
    }
}

int ctl_print_json(json_t *json) {
    int r = json ? json_dumpf(json, stdout, JSON_INDENT(2)) : -1;
    json_decref(json);
    if (r < 0)
        return ctl_fail(STATUS_STORAGE, "cannot write JSON: out of memory, or a name that is not UTF-8");
    putchar('\n');
    return STATUS_OK;
}

uint64_t ctl_nonce(void) {
    uint64_t nonce;
    ssize_t got = getrandom(&nonce, sizeof nonce, 0);
    assert(got == sizeof nonce);
    return nonce;
}

/* ---- help ---- */

static const struct verb *verb_find(const char *name) {
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    }
    return NULL;
}

static void print_verb(const struct verb *verb) {
    printf("usage: ckptctl %s%s%s\n\n%s\n\n", verb->name, verb->synopsis[0] ? " " : "", verb->synopsis, verb->help);
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        char option[64];
        if (!(rules[i].verbs & verb->bit))
            continue;
        snprintf(option, sizeof option, "%s--%s%s%s", rules[i].id == OPTION_OUTPUT ? "-o, " : "", rules[i].name,
                 rules[i].argument ? " " : "", rules[i].argument ? rules[i].argument : "");
        printf("  %-20s %s\n", option, rules[i].help);
    }
}

static int print_help(const char *name) {
    const struct verb *verb = name ? verb_find(name) : NULL;
    if (name && !verb)
        return ctl_fail(STATUS_USAGE, "there is no verb \"%s\"; ckptctl help has the list", name);
    if (verb) {
        print_verb(verb);
        return STATUS_OK;
    }
    puts("usage: ckptctl VERB [ARGUMENT...]\n");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
        printf("  %-10s %s\n", verbs[i].name, verbs[i].help);
    puts("\nVERSION is GENERATION/STEP, STEP (the newest generation that has it), or latest, the default.\n"
         "--root DIR (repeatable, nearest first) looks at tiers without a daemon. ckptctl help VERB has the options.");
    return STATUS_OK;
}

static int verb_help(struct ctl *ctl) { return print_help(ctl->word_count ? ctl->words[0] : NULL); }

/* ---- the command line ---- */

static int parse_part(struct ctl *ctl, const char *text) {
    char *end;
    errno = 0;
    unsigned long rank = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || rank >= UINT32_MAX)
        return ctl_fail(STATUS_USAGE, "--part takes a rank, not \"%s\"", text);
    ctl->has_part = true;
    ctl->part = (uint32_t)rank;
    return STATUS_OK;
}

static int parse_timeout(struct ctl *ctl, const char *text) {
    char *end;
    double seconds = strtod(text, &end);
    if (text[0] < '0' || text[0] > '9' || *end || !(seconds > 0 && seconds < 1e9))
        return ctl_fail(STATUS_USAGE, "--timeout takes seconds, not \"%s\"", text);
    ctl->timeout_ms = (uint64_t)(seconds * 1000) + 1;
    return STATUS_OK;
}

static int take_option(struct ctl *ctl, int id, const char *argument) {
    switch ((enum option_id)id) {
    case OPTION_JSON:
        ctl->json = true;
        return STATUS_OK;
    case OPTION_ROOT:
        ctl->roots[ctl->root_count++] = argument;
        return STATUS_OK;
    case OPTION_SOCKET:
        ctl->socket = argument;
        return STATUS_OK;
    case OPTION_CONFIG:
        ctl->config = argument;
        return STATUS_OK;
    case OPTION_ALL:
        ctl->all = true;
        return STATUS_OK;
    case OPTION_REPAIR:
        ctl->repair = true;
        return STATUS_OK;
    case OPTION_OUTPUT:
        ctl->output = argument;
        return STATUS_OK;
    case OPTION_PART:
        return parse_part(ctl, argument);
    case OPTION_TENSORS:
        ctl->tensors[ctl->tensor_count++] = argument;
        return STATUS_OK;
    case OPTION_SPLIT:
        ctl->split = true;
        return STATUS_OK;
    case OPTION_HF:
        ctl->hf = true;
        return STATUS_OK;
    case OPTION_PREFIX:
        ctl->prefix = argument;
        return STATUS_OK;
    case OPTION_NAME:
        ctl->name = argument;
        return STATUS_OK;
    case OPTION_FORCE:
        ctl->force = true;
        return STATUS_OK;
    case OPTION_WAIT:
        ctl->wait = true;
        return STATUS_OK;
    case OPTION_TIMEOUT:
        return parse_timeout(ctl, argument);
    case OPTION_NOW:
        ctl->now = true;
        return STATUS_OK;
    case OPTION_EXAMPLE:
        ctl->example = true;
        return STATUS_OK;
    case OPTION_HELP:
    case OPTION_VERSION:
        break;
    }
    assert(!"main() handles this option");
    return STATUS_USAGE;
}

static const struct option_rule *rule_find(int id) {
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        if (rules[i].id == id)
            return &rules[i];
    }
    assert(!"every option has a rule");
    return NULL;
}

/* Reads options wherever they stand. `given` gets the ids in order. */
static int parse_options(struct ctl *ctl, int argc, char **argv, int *given, int *ret_count, bool *ret_help) {
    struct option table[ARRAY_SIZE(rules) + 1] = {0};
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++)
        table[i] = (struct option){
            .name = rules[i].name, .has_arg = rules[i].argument ? required_argument : no_argument, .val = rules[i].id};
    int count = 0, id;
    opterr = 0;
    while ((id = getopt_long(argc, argv, ":o:h", table, NULL)) != -1) {
        if (id == ':')
            return ctl_fail(STATUS_USAGE, "%s needs an argument", argv[optind - 1]);
        if (id == '?')
            return ctl_fail(STATUS_USAGE, "no such option as %s; try ckptctl help", argv[optind - 1]);
        if (id == OPTION_HELP) {
            *ret_help = true;
            continue;
        }
        if (id == OPTION_VERSION) {
            puts("ckptctl " CKPTD_VERSION);
            exit(STATUS_OK);
        }
        given[count++] = id;
        int status = take_option(ctl, id, optarg);
        if (status != STATUS_OK)
            return status;
    }
    *ret_count = count;
    return STATUS_OK;
}

static int run(struct ctl *ctl, int argc, char **argv, int *given) {
    bool help = false;
    int count = 0;
    int status = parse_options(ctl, argc, argv, given, &count, &help);
    if (status != STATUS_OK)
        return status;
    ctl->verb = optind < argc ? argv[optind] : NULL;
    if (help)
        return print_help(ctl->verb);
    if (!ctl->verb) {
        print_help(NULL);
        return STATUS_USAGE;
    }
    const struct verb *verb = verb_find(ctl->verb);
    if (!verb)
        return ctl_fail(STATUS_USAGE, "there is no verb \"%s\"; ckptctl help has the list", ctl->verb);
    for (int i = 0; i < count; i++) {
        const struct option_rule *rule = rule_find(given[i]);
        if (!(rule->verbs & verb->bit))
            return ctl_fail(STATUS_USAGE, "%s does not take --%s", verb->name, rule->name);
    }
    ctl->words = argv + optind + 1;
    ctl->word_count = argc - optind - 1;
    if (ctl->word_count < verb->words_min || ctl->word_count > verb->words_max)
        return ctl_fail(STATUS_USAGE, "usage: ckptctl %s%s%s", verb->name, verb->synopsis[0] ? " " : "",
                        verb->synopsis);
    return verb->run(ctl);
}

int main(int argc, char **argv) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);

    CLEANUP(freep) const char **roots = calloc((size_t)argc + 1, sizeof *roots);
    CLEANUP(freep) const char **tensors = calloc((size_t)argc + 1, sizeof *tensors);
    CLEANUP(freep) int *given = calloc((size_t)argc + 1, sizeof *given);
    if (!roots || !tensors || !given)
        return ctl_fail(STATUS_STORAGE, "out of memory");
    struct ctl ctl = {.roots = roots, .tensors = tensors};
    int status = run(&ctl, argc, argv, given);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == STATUS_OK)
        return ctl_fail(STATUS_STORAGE, "cannot write to stdout: %s", strerror(errno));
    return status;
}
