/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckptd: the daemon of one user on one node. Exit status: 0 stopped as asked (or another daemon
 * already serves the socket, with --on-demand); 1 a failure; 2 wrong arguments or configuration.
 */
#include "daemon/listener.h"
#include "daemon/server.h"
#include "daemon/service.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>

enum { EXIT_USAGE = 2 };

struct arguments {
    const char *config, *socket, *loop;
    bool on_demand;
};

static const char usage[] = "Usage: ckptd [--config FILE] [--socket PATH] [--loop auto|uring|posix] [--on-demand]\n"
                            "The checkpointing daemon of this user on this node; see ckptd(8).\n"
                            "  --config FILE   read FILE instead of the search order of ckptd.conf(5)\n"
                            "  --socket PATH   listen on PATH instead of the first of the search order of ckptd(8)\n"
                            "  --loop KIND     override the configuration and CKPTD_LOOP\n"
                            "  --on-demand     detach, and exit when nobody has used it for a while\n"
                            "  --example       print a commented configuration with every default\n"
                            "  --version, --help\n";

/* Fills arguments, or ends the program. */
static void parse(int argc, char **argv, struct arguments *arguments) {
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'}, {"socket", required_argument, NULL, 's'},
        {"loop", required_argument, NULL, 'l'},   {"on-demand", no_argument, NULL, 'd'},
        {"example", no_argument, NULL, 'e'},      {"version", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},         {0},
    };
    arguments->loop = getenv("CKPTD_LOOP");
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;)
        switch (option) {
        case 'c':
            arguments->config = optarg;
            break;
        case 's':
            arguments->socket = optarg;
            break;
        case 'l':
            arguments->loop = optarg;
            break;
        case 'd':
            arguments->on_demand = true;
            break;
        case 'e':
            exit(config_example(stdout) < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
        case 'v':
            puts("ckptd " CKPTD_VERSION);
            exit(EXIT_SUCCESS);
        case 'h':
            fputs(usage, stdout);
            exit(EXIT_SUCCESS);
        default:
            fputs(usage, stderr);
            exit(EXIT_USAGE);
        }
    if (optind < argc) {
        fprintf(stderr, "ckptd: unexpected argument %s\n%s", argv[optind], usage);
        exit(EXIT_USAGE);
    }
}

/* Leaves the session, the directory, the descriptors and the processor binding of whoever started us
 * (a rank bound to one core, say), and writes to a log of its own. */
static int detach(const struct config *config, const char *socket_path, struct problem *problem) {
    char path[1024 + 8];
    if (config->log_file[0])
        snprintf(path, sizeof path, "%s", config->log_file);
    else
        snprintf(path, sizeof path, "%s.log", socket_path);
    int log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (log_fd < 0 || null < 0)
        return problem_set(problem, -errno, "cannot open %s: %s", log_fd < 0 ? path : "/dev/null", strerror(errno));
    (void)setsid(); /* fails if we lead a session already: as good */
    if (chdir("/") < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(log_fd, 2) < 0)
        return problem_set(problem, -errno, "cannot detach: %s", strerror(errno));
    close(null);
    close(log_fd);
    cpu_set_t all;
    memset(&all, 0xff, sizeof all);
    (void)sched_setaffinity(0, sizeof all, &all); /* the kernel keeps to the cpuset */
    return 0;
}

static int open_signals(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    if (sigprocmask(SIG_SETMASK, &signals, NULL) < 0)
        return -errno;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    int fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

/* One descriptor per client, pidfd, memory file and open part: as many as we may have. */
static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int fail(int status, const struct problem *problem, int error) {
    fprintf(stderr, "ckptd: %s\n", problem_text(problem, error));
    return status;
}

int main(int argc, char **argv) {
    struct arguments arguments = {0};
    struct problem problem = PROBLEM_NONE;
    static struct config config; /* large, and read as long as the process lives */
    struct log log;
    parse(argc, argv, &arguments);
    if (arguments.on_demand)
        (void)close_range(3, ~0u, 0);
    int r = config_load(arguments.config, &config, &problem);
    if (r < 0)
        return fail(EXIT_USAGE, &problem, r);

    struct listener listener;
    r = listener_init(&listener, arguments.socket, &problem);
    if (r == LISTENER_E_SERVED && arguments.on_demand)
        return EXIT_SUCCESS;
    if (r == LISTENER_E_SERVED)
        problem_set(&problem, r, "another daemon serves %s: stop it with 'ckptctl stop', or give --socket",
                    listener.path);
    if (r)
        return fail(EXIT_FAILURE, &problem, r);
    if (arguments.on_demand)
        r = detach(&config, listener.path, &problem);
    log_init(&log, STDERR_FILENO, config.log_level);
    if (!r && config.log_file[0] && !arguments.on_demand) {
        log.fd = open(config.log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log.fd < 0)
            r = problem_set(&problem, -errno, "cannot open %s: %s", config.log_file, strerror(errno));
    }
    raise_descriptor_limit();
    if (config.nice && setpriority(PRIO_PROCESS, 0, config.nice) < 0)
        log_warning(&log, "cannot set nice %d: %s", config.nice, strerror(errno));
    cpu_set_t processors; /* before there are threads, which inherit it */
    if (config.processors[0] && config_processors(config.processors, &processors) &&
        sched_setaffinity(0, sizeof processors, &processors) < 0)
        log_warning(&log, "cannot keep to processors %s: %s", config.processors, strerror(errno));
    int signal_fd = r ? -1 : open_signals();
    if (!r && signal_fd < 0)
        r = problem_set(&problem, signal_fd, "cannot receive signals: %s", strerror(-signal_fd));

    struct loop *loop = NULL;
    const char *kind = arguments.loop && *arguments.loop ? arguments.loop : config.loop;
    if (!r && (r = loop_new(kind, &loop)) < 0)
        problem_set(&problem, r, "cannot make a loop of kind %s: %s", kind, strerror(-r));
    struct server *server = NULL;
    const struct server_options options = {
        .socket_path = listener.path,
        .listen_fd = listener.fd,
        .signal_fd = signal_fd,
        .on_demand = arguments.on_demand,
    };
    if (!r)
        r = server_new(loop, &config, &log, &options, &server, &problem);
    if (r < 0) {
        listener_deinit(&listener);
        _exit(fail(r == -EINVAL || r == -ENOTSUP ? EXIT_USAGE : EXIT_FAILURE, &problem, r)); /* as at the end */
    }
    log_info(&log, "ckptd " CKPTD_VERSION " serves %s pid=%d loop=%s config=%s", listener.path, getpid(),
             loop_name(loop), config.file[0] ? config.file : "defaults");
    for (size_t i = 0; i < config.tier_count; i++)
        log_info(&log, "tier %s keeps its files in %s", config.tiers[i].name, config.tiers[i].path);
    service_notify("READY=1");
    r = server_run(server);
    service_notify("STOPPING=1");
    if (r < 0)
        log_error(&log, "the loop broke: %s", strerror(-r));
    listener_deinit(&listener);
    /* Workers may be stuck in a file system that never answers: nothing waits for them. */
    _exit(r < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
}
