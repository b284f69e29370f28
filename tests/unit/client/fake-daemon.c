/* SPDX-License-Identifier: Apache-2.0 */
#include "fake-daemon.h"

#include "proto/image.h"
#include "proto/manifest.h"
#include "proto/wire.h"
#include "proto/word.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/un.h>

/* One thread, blocking writes, no deadlines: a test's daemon may hang, since its test has a time limit. */

#define CONNECTIONS_MAX 8
#define MISSED_MAX 256
#define TICK_MS 2

struct connection {
    int fd;
    uint32_t state;
    bool segment_sent;
};

struct late { /* an answer held back */
    bool set;
    int fd;
    struct wire_packet packet;
    bool owns_fd;
    int memfd;
};

struct capture {
    bool running;
    struct message_save save;
    int fd;
    uint64_t image_size, watermark;
    uint8_t *image;
};

struct fake {
    char directory[64], path[108];
    struct fake_knobs knobs;
    pthread_t thread;
    bool running;
    int listen_fd, wake_fd;
    struct connection connections[CONNECTIONS_MAX];
    pthread_mutex_t lock; /* for what the test looks at */
    unsigned counts[FAKE_OPCODES];
    uint64_t missed[MISSED_MAX];
    unsigned missed_count, leases, restores;

    struct word_page *word;
    int word_fd;
    struct {
        void *map;
        uint64_t size;
    } areas[AREAS_MAX];
    struct shards *shards;
    struct image_layout layout;
    bool has_layout, push;
    uint32_t set;
    char job[MANIFEST_JOB_MAX], run_id[MANIFEST_RUN_ID_MAX];
    uint32_t rank, world;
    struct capture capture;
    atomic_bool capturing; /* until all that a capture leaves is in place */
    struct message_save last_save;

    uint8_t *image; /* the kept version */
    uint64_t image_size, step;
    char *index;
    size_t index_size;
    uint64_t generation;
    uint32_t next_lease;
    int segment_fd;
    struct late late;
    int dying;
};

/* ---- sending ---- */

static void send_packet(int fd, struct wire_packet *packet) {
    ssize_t n;
    do
        n = sendmsg(fd, wire_send_header(packet), MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
}

static _Thread_local struct fake *serving; /* whose thread this is */

static void send_message(int fd, enum opcode opcode, uint32_t serial, const void *body, const void *tail,
                         size_t tail_length, int descriptor) {
    struct wire_packet packet;
    wire_pack(&packet, opcode, serial, body, tail, tail_length, descriptor);
    if (serving->knobs.tamper)
        serving->knobs.tamper(serving->knobs.tamper_context, &packet);
    send_packet(fd, &packet);
}

static void send_error(int fd, uint32_t serial, enum code code, const char *text) {
    struct message_error body = {.code = code};
    send_message(fd, MESSAGE_ERROR, serial, &body, text, strlen(text), -1);
}

static void close_all(struct fake *fake) {
    for (size_t i = 0; i < CONNECTIONS_MAX; i++)
        if (fake->connections[i].fd >= 0) {
            close(fake->connections[i].fd);
            fake->connections[i].fd = -1;
        }
}

/* ---- capturing ---- */

static const uint8_t *shard_data(struct fake *fake, const struct shard *shard) {
    return shard->area == SHARDS_AREA_PRIVATE ? (const uint8_t *)(uintptr_t)shard->address
                                              : (const uint8_t *)fake->areas[shard->area].map + shard->address;
}

/* As the real one does, from outside: the fence orders this against the program's writes, but through
 * two mappings of one word, which a race detector cannot follow. */
static void read_memory(void *to, const void *from, size_t length) {
    struct iovec local = {.iov_base = to, .iov_len = length};
    struct iovec remote = {.iov_base = (void *)(uintptr_t)from, .iov_len = length};
    if (length > 0 && process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != (ssize_t)length)
        abort();
}

static void copy_element(uint8_t *to, const struct shard *shard, const uint8_t *data, uint64_t element) {
    unsigned size = dtype_size(shard->dtype), dims = shard->geometry.is_range ? 1 : shard->geometry.dims;
    int64_t at = 0;
    if (shard->contiguous) {
        at = (int64_t)(element * size);
    } else {
        for (unsigned i = dims; i-- > 0;) {
            uint64_t extent = shard->geometry.is_range ? shard->geometry.count : shard->geometry.extent[i];
            at += (int64_t)(element % extent) * shard->stride[i];
            element /= extent;
        }
    }
    read_memory(to, data + at, size);
}

static void copy_all(struct fake *fake) {
    struct capture *capture = &fake->capture;
    image_header(&fake->layout, capture->save.state_length, capture->image);
    for (uint32_t i = 0; i < fake->layout.ordered_count; i++) {
        struct shard shard;
        shards_get(fake->shards, fake->layout.order[i], &shard);
        unsigned size = dtype_size(shard.dtype);
        uint8_t *to = capture->image + fake->layout.shard_offset[fake->layout.order[i]];
        const uint8_t *data = shard_data(fake, &shard);
        if (shard.contiguous)
            read_memory(to, data, shard_bytes(&shard));
        else
            for (uint64_t element = 0; element < shard_bytes(&shard) / size; element++)
                copy_element(to + element * size, &shard, data, element);
    }
    if (capture->save.state_length)
        memcpy(capture->image + fake->layout.state_offset,
               (uint8_t *)fake->areas[capture->save.state_area].map + capture->save.state_offset,
               capture->save.state_length);
}

static void keep_version(struct fake *fake, uint8_t *image, uint64_t size) {
    struct manifest manifest = {0};
    struct manifest_summary *summary = &manifest.summary;
    snprintf(summary->job, sizeof summary->job, "%s", fake->job);
    snprintf(summary->run_id, sizeof summary->run_id, "%s", fake->run_id);
    summary->generation = fake->generation;
    summary->step = fake->capture.save.step;
    summary->rank = 0;
    summary->world = 1;
    summary->image_size = size;
    summary->data_length = size;
    summary->chunk_size = FAKE_CHUNK;
    summary->created_ns = 1;
    manifest_data_name(0, CODEC_RAW, summary->data_file);
    manifest.chunk_count = (size + FAKE_CHUNK - 1) / FAKE_CHUNK;
    manifest.chunks = calloc(manifest.chunk_count, sizeof *manifest.chunks);
    struct digest *digests = calloc(manifest.chunk_count, sizeof *digests);
    for (size_t i = 0; i < manifest.chunk_count; i++) {
        uint64_t length = min_u64(FAKE_CHUNK, size - i * FAKE_CHUNK);
        manifest.chunks[i] = (struct manifest_chunk){
            .offset = i * FAKE_CHUNK, .stored_length = (uint32_t)length, .raw_length = (uint32_t)length};
        digest_chunk(image + i * FAKE_CHUNK, length, &manifest.chunks[i].digest);
        digests[i] = manifest.chunks[i].digest;
    }
    digest_fold(digests, manifest.chunk_count, &summary->image_digest);
    free(digests);
    struct problem problem = PROBLEM_NONE;
    struct complete complete;
    int r = pieces_from_layout(fake->shards, &fake->layout, 0, fake->capture.save.state_length, &manifest.pieces);
    if (r == 0)
        r = complete_build(&manifest, 1, &complete, &problem);
    if (r < 0) {
        fprintf(stderr, "fake daemon: %s\n", problem_text(&problem, r));
        abort();
    }
    free(fake->index);
    if (complete_write(&complete, &fake->index, &fake->index_size) < 0)
        abort();
    complete_deinit(&complete);
    manifest_deinit(&manifest);
    free(fake->image);
    fake->image = image;
    fake->image_size = size;
    fake->step = fake->capture.save.step;
}

static void end_capture(struct fake *fake, int result) {
    struct capture *capture = &fake->capture;
    struct message_captured event = {.step = capture->save.step, .result = result, .counter = capture->save.counter};
    const char *why = result ? "it failed on purpose" : "";
    capture->running = false;
    if (result == CODE_OK)
        keep_version(fake, STEAL(capture->image), capture->image_size);
    free(capture->image);
    capture->image = NULL;
    fake->capturing = false;
    send_message(capture->fd, MESSAGE_CAPTURED, 0, &event, why, strlen(why), -1);
}

/* Called each tick while a capture runs. */
static void step_capture(struct fake *fake) {
    struct capture *capture = &fake->capture;
    if (!capture->running)
        return;
    uint16_t counter = capture->save.counter;
    uint64_t word = word_load(fake->word);
    if (word_counter(word) != counter || word_watermark(word) >= WORD_FAILED) {
        end_capture(fake, CODE_E_LOST);
        return;
    }
    if (fake->push && !fake->knobs.hold)
        return; /* on_push() does it */
    uint64_t at = fake->knobs.stop_at;
    if (fake->knobs.hold) {
        if (at > capture->watermark && word_advance(fake->word, counter, capture->watermark, at))
            capture->watermark = at;
        return;
    }
    int result = fake->knobs.captured;
    if (result != CODE_OK) {
        word_advance(fake->word, counter, capture->watermark, WORD_FAILED);
        end_capture(fake, result);
        return;
    }
    copy_all(fake);
    bool captured = word_advance(fake->word, counter, capture->watermark, capture->image_size);
    end_capture(fake, captured ? CODE_OK : CODE_E_LOST);
}

/* ---- messages ---- */

static void on_open(struct fake *fake, struct connection *connection, const struct wire_message *message) {
    const struct message_open *open = message->body;
    snprintf(fake->job, sizeof fake->job, "%.*s", open->job_length, message->tail);
    snprintf(fake->run_id, sizeof fake->run_id, "%.*s", open->run_id_length, message->tail + open->job_length);
    fake->rank = open->rank;
    fake->world = open->world;
    if (fake->word)
        munmap(fake->word, 4096);
    if (fake->word_fd >= 0)
        close(fake->word_fd);
    fake->word_fd = memfd_create("word", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fake->word_fd < 0 || ftruncate(fake->word_fd, 4096) < 0 ||
        fcntl(fake->word_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        abort();
    fake->word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fake->word_fd, 0);
    connection->state = MESSAGE_STATE_O;
    bool resumes = fake->knobs.resumes && fake->index;
    struct message_opened opened = {.generation = fake->generation,
                                    .resume_generation = resumes ? fake->generation : 0,
                                    .resume_step = resumes ? fake->step : 0,
                                    .session = 77,
                                    .flags = resumes ? OPENED_HAS_RESUME : 0,
                                    .levels = 1 << LEVEL_CAPTURED | 1 << LEVEL_LOCAL};
    send_message(connection->fd, MESSAGE_OPENED, message->serial, &opened, NULL, 0, fake->word_fd);
}

static void drop_set(struct fake *fake) {
    shards_free(fake->shards);
    fake->shards = NULL;
    if (fake->has_layout)
        image_layout_deinit(&fake->layout);
    fake->has_layout = false;
}

static void on_register(struct fake *fake, struct connection *connection, const struct wire_message *message,
                        struct wire_packet *packet) {
    struct message_register request = *(const struct message_register *)message->body;
    struct message_registered reply = {.set = request.set};
    if (fake->knobs.refuse_private && !(request.flags & REGISTER_PUSH)) {
        static const char why[] = "refused on purpose";
        reply.flags = REGISTERED_PRIVATE_REFUSED;
        send_message(connection->fd, MESSAGE_REGISTERED, message->serial, &reply, why, sizeof why - 1, -1);
        return;
    }
    struct problem problem = PROBLEM_NONE;
    void *table = NULL;
    drop_set(fake);
    struct image_identity identity = {.job = fake->job, .rank = fake->rank, .world = fake->world};
    int r = wire_map(packet->fd, request.table_size, true, &table, &problem);
    if (r == 0)
        r = shards_parse(table, request.table_size, request.count, &fake->shards, &problem);
    if (r == 0)
        r = image_layout(fake->shards, &identity, &fake->layout, &problem);
    if (table)
        munmap(table, request.table_size);
    if (r < 0) {
        send_error(connection->fd, message->serial, CODE_E_INVALID, problem_text(&problem, r));
        return;
    }
    fake->has_layout = true;
    fake->set = request.set;
    fake->push = request.flags & REGISTER_PUSH;
    reply.image_size = image_size(&fake->layout, 0);
    send_message(connection->fd, MESSAGE_REGISTERED, message->serial, &reply, NULL, 0, -1);
}

static void on_save(struct fake *fake, struct connection *connection, const struct wire_message *message) {
    struct capture *capture = &fake->capture;
    struct message_save save = *(const struct message_save *)message->body;
    pthread_mutex_lock(&fake->lock);
    fake->last_save = save;
    pthread_mutex_unlock(&fake->lock);
    struct message_saved reply = {.result = fake->knobs.save_result};
    if (save.set != fake->set || !fake->has_layout) {
        send_error(connection->fd, message->serial, CODE_E_NOT_FOUND, "no such set");
        return;
    }
    if (reply.result == CODE_OK) {
        free(capture->image);
        *capture = (struct capture){.running = true,
                                    .save = save,
                                    .fd = connection->fd,
                                    .image_size = image_size(&fake->layout, save.state_length)};
        capture->image = calloc(1, capture->image_size);
        fake->capturing = true;
        reply.image_size = capture->image_size;
    }
    send_message(connection->fd, MESSAGE_SAVED, message->serial, &reply, NULL, 0, -1);
}

static void on_push(struct fake *fake, struct connection *connection, const struct wire_message *message) {
    const struct message_push *push = message->body;
    struct capture *capture = &fake->capture;
    struct message_pushed reply = {.image_offset = push->image_offset, .result = CODE_E_INVALID};
    char early;
    if (recv(connection->fd, &early, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
        abort(); /* a second chunk before the first was answered */
    if (capture->running && push->counter == capture->save.counter && push->image_offset == capture->watermark &&
        push->length <= capture->image_size - push->image_offset) {
        memcpy(capture->image + push->image_offset, (uint8_t *)fake->areas[push->area].map + push->area_offset,
               push->length);
        uint64_t next = capture->watermark + push->length;
        reply.result = word_advance(fake->word, push->counter, capture->watermark, next) ? CODE_OK : CODE_E_LOST;
        capture->watermark = next;
    }
    send_message(connection->fd, MESSAGE_PUSHED, message->serial, &reply, NULL, 0, -1);
    if (reply.result == CODE_OK && capture->watermark == capture->image_size)
        end_capture(fake, CODE_OK);
}

static void on_restore_open(struct fake *fake, struct connection *connection, const struct wire_message *message) {
    const struct message_restore_open *open = message->body;
    bool exact = open->which == RESTORE_EXACT || open->which == RESTORE_STEP;
    bool found =
        fake->index && (!exact || open->step == fake->step) && (open->which != RESTORE_RESUME || fake->knobs.resumes);
    if (exact && !found) {
        send_error(connection->fd, message->serial, CODE_E_NOT_FOUND, "no such version");
        return;
    }
    int fd = wire_memfd("index", found ? fake->index : "", found ? fake->index_size : 0);
    struct message_restore_opened reply = {.generation = fake->generation,
                                           .step = fake->step,
                                           .index_size = found ? fake->index_size : 0,
                                           .result = found ? CODE_OK : CODE_NONE,
                                           .restore = 5};
    pthread_mutex_lock(&fake->lock);
    fake->restores += found;
    pthread_mutex_unlock(&fake->lock);
    send_message(connection->fd, MESSAGE_RESTORE_OPENED, message->serial, &reply, NULL, 0, fd);
    close(fd);
}

/* Where chunk i lies in the segment: in order, or backwards. */
static uint64_t chunk_offset(struct fake *fake, uint64_t chunk, uint64_t chunks) {
    return (fake->knobs.scattered ? chunks - 1 - chunk : chunk) * FAKE_CHUNK;
}

static void send_segment(struct fake *fake, struct connection *connection, uint64_t chunks) {
    int fd = memfd_create("segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)(chunks * FAKE_CHUNK)) < 0)
        abort();
    for (uint64_t i = 0; i < chunks; i++) {
        size_t length = min_u64(FAKE_CHUNK, fake->image_size - i * FAKE_CHUNK);
        if (pwrite(fd, fake->image + i * FAKE_CHUNK, length, (off_t)chunk_offset(fake, i, chunks)) != (ssize_t)length)
            abort();
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        abort();
    struct message_segment segment = {.segment = 9, .size = chunks * FAKE_CHUNK};
    send_message(connection->fd, MESSAGE_SEGMENT, 0, &segment, NULL, 0, fd);
    close(fd);
    connection->segment_sent = true;
}

static void on_fetch(struct fake *fake, struct connection *connection, const struct wire_message *message) {
    const struct message_fetch *fetch = message->body;
    uint64_t chunks = (fake->image_size + FAKE_CHUNK - 1) / FAKE_CHUNK;
    if (fake->knobs.fault[MESSAGE_FETCH] == FAKE_NO_ROOM && fetch->count > 1) {
        send_error(connection->fd, message->serial, CODE_E_LIMIT, "no room");
        return;
    }
    if (fetch->restore != 5 || fetch->rank != 0 || fetch->first + fetch->count > chunks) {
        send_error(connection->fd, message->serial, CODE_E_INVALID, "no such chunks");
        return;
    }
    if (!connection->segment_sent)
        send_segment(fake, connection, chunks);
    struct chunk_place places[FETCH_CHUNKS_MAX];
    for (uint32_t i = 0; i < fetch->count; i++) {
        uint64_t chunk = fetch->first + i;
        places[i] = (struct chunk_place){.segment = 9,
                                         .length = (uint32_t)min_u64(FAKE_CHUNK, fake->image_size - chunk * FAKE_CHUNK),
                                         .offset = chunk_offset(fake, chunk, chunks)};
    }
    struct message_fetched reply = {.lease = ++fake->next_lease, .count = fetch->count};
    pthread_mutex_lock(&fake->lock);
    fake->leases++;
    pthread_mutex_unlock(&fake->lock);
    send_message(connection->fd, MESSAGE_FETCHED, message->serial, &reply, places, fetch->count * sizeof places[0], -1);
}

static void drop_area(struct fake *fake, uint32_t area) {
    if (fake->areas[area].map)
        munmap(fake->areas[area].map, fake->areas[area].size);
    fake->areas[area].map = NULL;
}

static void on_area(struct fake *fake, const struct wire_message *message, struct wire_packet *packet) {
    const struct message_area *area = message->body;
    int seals = fcntl(packet->fd, F_GET_SEALS);
    if (!(seals & F_SEAL_SHRINK))
        abort();
    drop_area(fake, area->area); /* of a connection before this one */
    fake->areas[area->area].map = mmap(NULL, area->size, PROT_READ, MAP_SHARED, packet->fd, 0);
    fake->areas[area->area].size = area->size;
}

static void answer_waits(int fd, uint32_t serial, const struct message_wait *wait) {
    struct message_waited reply = {.result = wait->timeout_ms ? CODE_OK : CODE_PENDING};
    send_message(fd, MESSAGE_WAITED, serial, &reply, NULL, 0, -1);
}

static void send_versions(struct fake *fake, int fd, uint32_t serial) {
    struct version_record record = {
        .generation = fake->generation, .step = fake->step, .bytes = fake->image_size, .world = 1, .levels = 1 << 2};
    uint32_t count = fake->index ? 1 : 0;
    int memfd = wire_memfd("versions", &record, count * sizeof record);
    struct message_versions_are reply = {.size = count * sizeof record, .count = count};
    send_message(fd, MESSAGE_VERSIONS_ARE, serial, &reply, NULL, 0, memfd);
    close(memfd);
}

static void count_down(struct fake *fake, unsigned *count) {
    pthread_mutex_lock(&fake->lock);
    --*count;
    pthread_mutex_unlock(&fake->lock);
}

static void answer(struct fake *fake, struct connection *connection, const struct wire_message *message,
                   struct wire_packet *packet) {
    int fd = connection->fd;
    uint32_t serial = message->serial;
    const struct message_empty empty = {0};
    switch (message->opcode) {
    case MESSAGE_HELLO: {
        struct message_hello_ok reply = {.version = 1, .chunk_size = FAKE_CHUNK};
        connection->state = MESSAGE_STATE_G;
        send_message(fd, MESSAGE_HELLO_OK, serial, &reply, NULL, 0, -1);
        return;
    }
    case MESSAGE_OPEN:
        on_open(fake, connection, message);
        return;
    case MESSAGE_ATTACH:
        connection->state = MESSAGE_STATE_A;
        break;
    case MESSAGE_AREA:
        on_area(fake, message, packet);
        break;
    case MESSAGE_AREA_DROP:
        drop_area(fake, ((const struct message_area_drop *)message->body)->area);
        break;
    case MESSAGE_REGISTER:
        on_register(fake, connection, message, packet);
        return;
    case MESSAGE_SAVE:
        on_save(fake, connection, message);
        return;
    case MESSAGE_PUSH:
        on_push(fake, connection, message);
        return;
    case MESSAGE_MISSED:
        pthread_mutex_lock(&fake->lock);
        fake->missed[fake->missed_count++ % MISSED_MAX] = ((const struct message_missed *)message->body)->step;
        pthread_mutex_unlock(&fake->lock);
        break;
    case MESSAGE_WAIT:
        answer_waits(fd, serial, message->body);
        return;
    case MESSAGE_LAST_DURABLE: {
        struct message_durable reply = {
            .generation = fake->generation, .step = fake->step, .found = fake->index != NULL};
        send_message(fd, MESSAGE_DURABLE, serial, &reply, NULL, 0, -1);
        return;
    }
    case MESSAGE_VERSIONS:
        send_versions(fake, fd, serial);
        return;
    case MESSAGE_RESTORE_OPEN:
        on_restore_open(fake, connection, message);
        return;
    case MESSAGE_FETCH:
        on_fetch(fake, connection, message);
        return;
    case MESSAGE_RELEASE:
        count_down(fake, &fake->leases);
        break;
    case MESSAGE_RESTORE_CLOSE:
        count_down(fake, &fake->restores);
        break;
    default:
        break;
    }
    send_message(fd, MESSAGE_OK, serial, &empty, NULL, 0, -1);
}

static void send_noise(int fd) {
    char noise[100];
    memset(noise, 0x5a, sizeof noise);
    send(fd, noise, sizeof noise, MSG_NOSIGNAL);
}

/* A SAVED or FETCHED that was held back until its knob is turned. */
static void flush_late(struct fake *fake) {
    if (!fake->late.set)
        return;
    struct wire_message message;
    struct problem problem = PROBLEM_NONE;
    struct wire_packet *packet = &fake->late.packet;
    packet->header.msg_controllen = 0;
    packet->header.msg_flags = 0;
    fake->late.set = false;
    if (wire_check(packet, (ssize_t)packet->size, true, MESSAGE_STATE_O, &message, &problem) < 0)
        abort();
    for (size_t i = 0; i < CONNECTIONS_MAX; i++)
        if (fake->connections[i].fd == fake->late.fd)
            answer(fake, &fake->connections[i], &message, packet);
}

static void on_message(struct fake *fake, struct connection *connection) {
    struct wire_packet packet;
    struct wire_message message;
    struct problem problem = PROBLEM_NONE;
    ssize_t n = recvmsg(connection->fd, wire_receive_header(&packet), MSG_CMSG_CLOEXEC);
    if (n <= 0) {
        close(connection->fd);
        connection->fd = -1;
        return;
    }
    if (wire_check(&packet, n, true, connection->state, &message, &problem) < 0) {
        fprintf(stderr, "fake daemon: %s\n", problem.text);
        abort();
    }
    /* First, so that whoever has its answer finds it counted. */
    pthread_mutex_lock(&fake->lock);
    fake->counts[message.opcode]++;
    pthread_mutex_unlock(&fake->lock);
    int fault = fake->knobs.fault[message.opcode];
    static const char broken[] = "broken on purpose";
    switch (fault) {
    case FAKE_ANSWERS:
    case FAKE_NO_ROOM:
        flush_late(fake);
        answer(fake, connection, &message, &packet);
        break;
    case FAKE_SILENT:
        break;
    case FAKE_DIES:
        fake->dying = 1;
        break;
    case FAKE_GARBAGE:
        send_noise(connection->fd);
        break;
    case FAKE_WRONG: {
        struct message_pushed body = {0};
        send_message(connection->fd, MESSAGE_PUSHED, message.serial, &body, NULL, 0, -1);
        break;
    }
    case FAKE_ERROR:
        send_error(connection->fd, message.serial, CODE_E_IO, broken);
        break;
    case FAKE_LATE:
        fake->late = (struct late){.set = true, .fd = connection->fd, .packet = packet};
        fake->late.packet.fd = -1;
        break;
    }
    wire_packet_close(&packet);
}

static void on_connect(struct fake *fake) {
    int fd = accept4(fake->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    for (size_t i = 0; i < CONNECTIONS_MAX && fd >= 0; i++)
        if (fake->connections[i].fd < 0) {
            fake->connections[i] = (struct connection){.fd = fd, .state = MESSAGE_STATE_N};
            return;
        }
    if (fd >= 0)
        close(fd);
}

static void *serve(void *argument) {
    struct fake *fake = argument;
    serving = fake;
    for (;;) {
        struct pollfd polls[CONNECTIONS_MAX + 2];
        polls[0] = (struct pollfd){.fd = fake->wake_fd, .events = POLLIN};
        polls[1] = (struct pollfd){.fd = fake->listen_fd, .events = POLLIN};
        for (size_t i = 0; i < CONNECTIONS_MAX; i++)
            polls[i + 2] = (struct pollfd){.fd = fake->connections[i].fd, .events = POLLIN};
        if (poll(polls, ARRAY_SIZE(polls), fake->capture.running ? TICK_MS : -1) < 0)
            continue;
        if (polls[0].revents || fake->dying)
            break;
        if (polls[1].revents)
            on_connect(fake);
        for (size_t i = 0; i < CONNECTIONS_MAX && !fake->dying; i++)
            if (polls[i + 2].revents && fake->connections[i].fd == polls[i + 2].fd)
                on_message(fake, &fake->connections[i]);
        step_capture(fake);
        if (fake->dying)
            break;
    }
    close(fake->listen_fd);
    unlink(fake->path);
    close_all(fake);
    return NULL;
}

/* ---- life ---- */

struct fake *fake_new(void) {
    struct fake *fake = calloc(1, sizeof *fake);
    strcpy(fake->directory, "/tmp/test-client-XXXXXX");
    if (!mkdtemp(fake->directory))
        abort();
    snprintf(fake->path, sizeof fake->path, "%s/sock", fake->directory);
    pthread_mutex_init(&fake->lock, NULL);
    fake->word_fd = -1;
    fake->generation = 1;
    fake_start(fake);
    return fake;
}

void fake_start(struct fake *fake) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", fake->path);
    for (size_t i = 0; i < CONNECTIONS_MAX; i++)
        fake->connections[i].fd = -1;
    fake->dying = 0;
    fake->wake_fd = eventfd(0, EFD_CLOEXEC);
    fake->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fake->listen_fd < 0 || bind(fake->listen_fd, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(fake->listen_fd, 8) < 0 || pthread_create(&fake->thread, NULL, serve, fake) != 0)
        abort();
    fake->running = true;
}

void fake_stop(struct fake *fake) {
    if (!fake->running)
        return;
    uint64_t one = 1;
    if (write(fake->wake_fd, &one, sizeof one) != sizeof one)
        abort();
    pthread_join(fake->thread, NULL);
    close(fake->wake_fd);
    fake->running = false;
    free(fake->capture.image);
    fake->capture = (struct capture){0};
    fake->capturing = false;
    fake->late.set = false;
    fake->leases = fake->restores = 0;
    drop_set(fake);
    for (uint32_t i = 0; i < AREAS_MAX; i++)
        drop_area(fake, i);
}

void fake_free(struct fake *fake) {
    fake_stop(fake);
    if (fake->word)
        munmap(fake->word, 4096);
    if (fake->word_fd >= 0)
        close(fake->word_fd);
    free(fake->index);
    free(fake->image);
    rmdir(fake->directory);
    pthread_mutex_destroy(&fake->lock);
    free(fake);
}

const char *fake_path(const struct fake *fake) { return fake->path; }

struct fake_knobs *fake_knobs(struct fake *fake) {
    return &fake->knobs;
}

unsigned fake_count(struct fake *fake, enum opcode opcode) {
    pthread_mutex_lock(&fake->lock);
    unsigned count = fake->counts[opcode];
    pthread_mutex_unlock(&fake->lock);
    return count;
}

struct message_save fake_last_save(struct fake *fake) {
    pthread_mutex_lock(&fake->lock);
    struct message_save save = fake->last_save;
    pthread_mutex_unlock(&fake->lock);
    return save;
}

const uint8_t *fake_image(struct fake *fake, uint64_t *ret_size) {
    while (fake->capturing)
        sched_yield();
    *ret_size = fake->image_size;
    return fake->image;
}

unsigned fake_leases(struct fake *fake) {
    pthread_mutex_lock(&fake->lock);
    unsigned leases = fake->leases;
    pthread_mutex_unlock(&fake->lock);
    return leases;
}

unsigned fake_restores(struct fake *fake) {
    pthread_mutex_lock(&fake->lock);
    unsigned restores = fake->restores;
    pthread_mutex_unlock(&fake->lock);
    return restores;
}

uint64_t fake_missed(struct fake *fake, unsigned n) {
    pthread_mutex_lock(&fake->lock);
    uint64_t step = n < fake->missed_count ? fake->missed[n] : UINT64_MAX;
    pthread_mutex_unlock(&fake->lock);
    return step;
}
