/* SPDX-License-Identifier: Apache-2.0 */
#include "client/session.h"

#include "client/clock.h"
#include "client/handle.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SESSION_SAVE_PATIENCE_MS UINT64_C(1000)
#define SESSION_ATTEMPT_INTERVAL_NS NANOSECONDS_PER_SECOND
#define SESSION_BACKOFF_MIN_NS (2 * NANOSECONDS_PER_MS)
#define SESSION_BACKOFF_MAX_NS (100 * NANOSECONDS_PER_MS)
#define WORD_PAGE_SIZE 4096

static void unmap_word(struct session *session) {
    if (session->word)
        munmap(session->word, WORD_PAGE_SIZE);
    session->word = NULL;
}

void session_deinit(struct session *session) {
    link_close(&session->link);
    starter_deinit(&session->starter);
    unmap_word(session);
    session->phase = SESSION_DOWN;
}

void session_close_descriptors(struct session *session) {
    link_close(&session->link);
    starter_deinit(&session->starter);
}

/* Nobody is left to finish the capture; revoking makes sure that nothing torn is ever committed. The
 * sentence of what went wrong stays. */
static void settle_capture(struct ckpt *c) {
    struct saves *saves = &c->saves;
    if (saves->state == SAVES_IDLE)
        return;
    bool captured = !word_revoke(c->session.word, saves->counter, saves->image_size);
    if (captured && saves->state == SAVES_ASKING)
        saves_answered(saves, CKPT_OK, saves->image_size);
    if (!captured)
        saves_missed_add(saves, saves->step);
    saves_settle(saves, captured);
}

void session_down(struct ckpt *c) {
    struct session *session = &c->session;
    link_close(&session->link);
    settle_capture(c);
    push_stop(&c->push);
    session->phase = SESSION_DOWN;
    c->registered = false;
    areas_forget_announced(&c->areas);
    exports_forget(&c->exports);
    segments_forget(&c->segments);
}

static void pause_until(uint64_t deadline, uint64_t *backoff) {
    uint64_t now = clock_now(), wait = deadline > now ? min_u64(*backoff, deadline - now) : 0;
    struct timespec pause = {.tv_sec = (time_t)(wait / NANOSECONDS_PER_SECOND),
                             .tv_nsec = (long)(wait % NANOSECONDS_PER_SECOND)};
    nanosleep(&pause, NULL);
    *backoff = min_u64(*backoff * 2, SESSION_BACKOFF_MAX_NS);
}

static int session_connect(struct ckpt *c, uint64_t deadline) {
    struct session *session = &c->session;
    const char *path = session->link.path;
    uint64_t backoff = SESSION_BACKOFF_MIN_NS;
    for (;;) {
        int r = link_connect(&session->link);
        if (r == 0)
            return CKPT_OK;
        if (r == -EPERM)
            return error_set(CKPT_E_DENIED, "the socket %s is served by another user; refusing to use it", path);
        if (r == -EACCES)
            return error_set(CKPT_E_DENIED, "no permission to connect to %s", path);
        bool absent = r == -ENOENT || r == -ECONNREFUSED;
        if (!absent && r != -EAGAIN)
            return error_set(CKPT_E_UNREACHABLE, "cannot connect to %s: %s", path, strerror(-r));
        if (absent && session->program) {
            int started = starter_start(&session->starter, session->program, path);
            if (started < 0)
                return started;
        }
        if (clock_now() >= deadline)
            return error_set(CKPT_E_UNREACHABLE, "no daemon answers at %s (%s)%s", path, strerror(-r),
                             session->program ? "; one was started, its log says why it is not there yet"
                                              : "; start ckptd for this user, or set CKPT_SOCKET to its socket");
        pause_until(deadline, &backoff);
    }
}

static int begin_greeting(struct ckpt *c, uint64_t deadline) {
    struct session *session = &c->session;
    int r = session_connect(c, deadline);
    if (r < 0)
        return r;
    session->phase_deadline = clock_deadline(c->open_timeout_ms);
    struct message_hello hello = {
        .magic = MESSAGE_MAGIC, .version_min = PROTOCOL_VERSION_MIN, .version_max = PROTOCOL_VERSION_MAX};
    r = link_send(&session->link, &(struct link_request){.opcode = MESSAGE_HELLO, .body = &hello, .fd = -1}, deadline,
                  &session->awaited);
    if (r == CKPT_OK)
        session->phase = SESSION_GREETING;
    return r;
}

static int end_greeting(struct ckpt *c, uint64_t deadline) {
    struct session *session = &c->session;
    int r = link_await(&session->link, session->awaited, MESSAGE_HELLO_OK, deadline);
    if (r < 0)
        return r;
    const struct message_hello_ok *hello = session->link.message.body;
    if (hello->version < PROTOCOL_VERSION_MIN || hello->version > PROTOCOL_VERSION_MAX)
        return error_set(CKPT_E_VERSION, "the daemon at %s speaks protocol %u; libckpt %s speaks %u to %u",
                         session->link.path, hello->version, ckpt_version(), PROTOCOL_VERSION_MIN,
                         PROTOCOL_VERSION_MAX);
    if (hello->chunk_size < 4096 || hello->chunk_size % 4096)
        return link_distrust(&session->link, "a chunk size that is not a multiple of 4096");
    session->chunk_size = hello->chunk_size;
    session->version = hello->version;

    size_t job = strlen(c->job), run_id = strlen(c->run_id), directory = c->directory ? strlen(c->directory) : 0;
    struct message_open open = {
        .rank = c->rank,
        .world = c->world,
        .pid = (uint32_t)getpid(),
        .job_length = (uint16_t)job,
        .run_id_length = (uint16_t)run_id,
        .directory_length = (uint16_t)directory,
        .deadline_ms = c->open_timeout_ms,
    };
    char tail[MESSAGE_SIZE_MAX];
    client_assert(c, job + run_id + directory <= sizeof tail);
    memcpy(tail, c->job, job);
    memcpy(tail + job, c->run_id, run_id);
    if (directory > 0)
        memcpy(tail + job + run_id, c->directory, directory);
    struct link_request request = {
        .opcode = MESSAGE_OPEN, .body = &open, .tail = tail, .tail_length = job + run_id + directory, .fd = -1};
    session->phase_deadline = clock_deadline(c->open_timeout_ms + HANDLE_GRACE_MS);
    r = link_send(&session->link, &request, deadline, &session->awaited);
    if (r == CKPT_OK)
        session->phase = SESSION_OPENING;
    return r;
}

/* The page is the daemon's, sealed: it cannot be cut off under our feet. */
static int map_word(struct session *session) {
    CLEANUP(closep) int fd = steal_fd(&session->link.packet.fd);
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) < 0 || status.st_size < WORD_PAGE_SIZE)
        return link_distrust(&session->link, "a capture word that is not a sealed page");
    void *page = mmap(NULL, WORD_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return error_set(CKPT_E_MEMORY, "cannot map the capture word: %m");
    unmap_word(session);
    session->word = page;
    return CKPT_OK;
}

static int end_opening(struct ckpt *c, uint64_t deadline) {
    struct session *session = &c->session;
    int r = link_await(&session->link, session->awaited, MESSAGE_OPENED, deadline);
    if (r < 0)
        return r;
    const struct message_opened *opened = session->link.message.body;
    client_assert(c, c->saves.state == SAVES_IDLE); /* a running capture is judged by the old word */
    r = map_word(session);
    if (r < 0)
        return r;
    session->id = opened->session;
    session->generation = opened->generation;
    session->resumes = opened->flags & OPENED_HAS_RESUME;
    session->resume_generation = session->resumes ? opened->resume_generation : 0;
    session->resume_step = session->resumes ? opened->resume_step : 0;
    session->levels = opened->levels;
    session->phase = SESSION_UP;
    session->epoch++;
    session->starter.starts = 0;
    if (session->link.message.tail_length > 0) /* a warning */
        error_set(CKPT_OK, "%.*s", (int)session->link.message.tail_length, session->link.message.tail);
    return CKPT_OK;
}

/* A connection is waited for until one deadline, its phases until the other. */
static int ensure(struct ckpt *c, uint64_t connect_deadline, uint64_t deadline) {
    struct session *session = &c->session;
    uint64_t backoff = SESSION_BACKOFF_MIN_NS;
    if (session->phase != SESSION_DOWN && !link_is_up(&session->link))
        session_down(c);
    while (session->phase != SESSION_UP) {
        int r;
        switch (session->phase) {
        case SESSION_DOWN:
            r = begin_greeting(c, connect_deadline);
            break;
        case SESSION_GREETING:
            r = end_greeting(c, deadline);
            break;
        default:
            r = end_opening(c, deadline);
            break;
        }
        bool goes_on = r == CKPT_E_TIMEOUT && session->phase != SESSION_DOWN && clock_now() < session->phase_deadline;
        /* A daemon that ends just now takes connections and drops them; its successor is waited for. */
        bool ends = session->phase != SESSION_DOWN && (r == CKPT_E_UNREACHABLE || r == CKPT_E_STOPPING);
        if (r < 0 && !goes_on)
            session_down(c);
        if (r < 0 && (!ends || clock_now() >= connect_deadline))
            return r;
        if (ends)
            pause_until(connect_deadline, &backoff);
    }
    return CKPT_OK;
}

int session_ensure(struct ckpt *c, uint64_t deadline) { return ensure(c, deadline, deadline); }

int session_ensure_for_save(struct ckpt *c) {
    struct session *session = &c->session;
    link_drain(&session->link); /* notices a daemon that has gone, before a step is wasted on it */
    if (session_is_up(session))
        return CKPT_OK;
    if (session->phase != SESSION_DOWN && !link_is_up(&session->link))
        session_down(c);
    if (session->phase == SESSION_DOWN && clock_now() < session->next_attempt)
        return error_set(CKPT_E_UNREACHABLE, "no daemon at %s; the last attempt to connect was less than a second ago",
                         session->link.path);
    /* A phase that is under way was waited for before: this time only look. A daemon that somebody else
     * starts is there or not; one that is started here is given its time. */
    uint64_t deadline = session->phase == SESSION_DOWN ? clock_deadline(SESSION_SAVE_PATIENCE_MS) : 0;
    int r = ensure(c, session->program ? deadline : 0, deadline);
    session->next_attempt = clock_now() + SESSION_ATTEMPT_INTERVAL_NS;
    if (r == CKPT_E_TIMEOUT)
        return error_set(CKPT_E_UNREACHABLE, "the daemon at %s is there, but has not opened job %s yet",
                         session->link.path, c->job);
    return r;
}
