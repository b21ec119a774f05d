/* te.h: peers that break off, babble or fall silent in the middle of a transfer, and strangers on the port for data. Whatever they
 * do, transfers to them end within bounds, their memory is then left alone, and everybody else is served. */
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"
#include "wire.h"

enum { LENGTH = 1 << 20 };
#define REMOTE 0x100000ull

static te_engine *engine;
static unsigned char local[LENGTH];
static struct peer good_peer;
static te_segment good_segment;

static void others_still_move(void) { OK(transfer(engine, TE_READ, local, good_segment, good_peer.base, 4096)); }

/* --- a peer made of two sockets ------------------------------------------------------------------------------------------------- */

static int data_port, protocol_version;

/* Answers whoever asks for metadata with a segment of one large region. */
static void *serve_names(void *listener) {
    for (;;) {
        char request[1 << 16], json[1024], frame[1100];
        uint64_t length;
        int fd = accept(*(int *)listener, NULL, NULL);
        if (fd < 0) return NULL;
        if (receive_all(fd, &length, sizeof length) && length < sizeof request && receive_all(fd, request, length)) {
            int size = snprintf(json, sizeof json,
                                "{\"buffers\":[{\"addr\":%llu,\"length\":%d,\"name\":\"x\"}],\"name\":\"127.0.0.1:1\",\"protocol\":\"tcp\","
                                "\"tcp_data_port\":%d,\"tcp_proto_version\":%d}\n",
                                REMOTE, 64 << 20, __atomic_load_n(&data_port, __ATOMIC_ACQUIRE),
                                __atomic_load_n(&protocol_version, __ATOMIC_ACQUIRE));
            length = (uint64_t)size + 1;
            memcpy(frame, &length, sizeof length);
            frame[8] = request[0];
            memcpy(frame + 9, json, (size_t)size);
            send_all(fd, frame, 9 + (size_t)size);
        }
        close(fd);
    }
}

enum behaviour {
    CLOSES_AT_ONCE,
    CLOSES_AFTER_HEADER,
    RESETS_AFTER_HEADER,
    RESETS_IN_BODY,
    HALF_CLOSES_AFTER_HEADER,
    HALF_A_STATUS,
    STATUS_OF_NOISE,
    STATUS_UNKNOWN,
    REFUSES,
    CLOSES_IN_REPLY,
    RESETS_IN_REPLY,
    SILENT_IN_REPLY,
    SILENT,
    BABBLES,
    BEHAVIOURS
};

static int behaviour, connections;

static void misbehave(int fd) {
    static unsigned char bytes[LENGTH];
    static const unsigned char okay[8] = {0, 0, 0, 0, 'V', 'T', 'C', 'M'}, refused[8] = {1, 0, 0, 0, 'V', 'T', 'C', 'M'},
                               unknown[8] = {99, 0, 0, 0, 'V', 'T', 'C', 'M'};
    unsigned char header[HEADER];
    int what = __atomic_load_n(&behaviour, __ATOMIC_ACQUIRE);
    if (what == BABBLES) {
        fill(bytes, LENGTH, 3);
        send_all(fd, bytes, 4096);
    }
    if (what != CLOSES_AT_ONCE && !receive_all(fd, header, HEADER)) return;
    int writes = header[16] & 1;
    switch (what) {
    case RESETS_AFTER_HEADER: reset_on_close(fd); break;
    case RESETS_IN_BODY:
        receive_all(fd, bytes, writes ? LENGTH / 2 : 0);
        reset_on_close(fd);
        break;
    case HALF_CLOSES_AFTER_HEADER:
        shutdown(fd, SHUT_WR);
        while (recv(fd, bytes, sizeof bytes, 0) > 0) continue;
        break;
    case HALF_A_STATUS: send_all(fd, okay, 4); break;
    case STATUS_OF_NOISE: send_all(fd, "nonsense", 8); break;
    case STATUS_UNKNOWN: send_all(fd, unknown, 8); break;
    case REFUSES:
        send_all(fd, refused, 8);
        shutdown(fd, SHUT_WR);
        while (recv(fd, bytes, sizeof bytes, 0) > 0) continue;
        break;
    case CLOSES_IN_REPLY:
    case RESETS_IN_REPLY:
    case SILENT_IN_REPLY:
        receive_all(fd, bytes, writes ? LENGTH : 0);
        send_all(fd, okay, 6);
        if (!writes) {
            send_all(fd, okay + 6, 2);
            send_all(fd, bytes, LENGTH / 3);
        }
        if (what == RESETS_IN_REPLY) reset_on_close(fd);
        if (what == SILENT_IN_REPLY) recv(fd, bytes, 1, 0);
        break;
    case SILENT:
        while (recv(fd, bytes, sizeof bytes, 0) > 0) continue;
        break;
    default: break;
    }
}

static void *serve_data(void *listener) {
    for (;;) {
        int fd = accept(*(int *)listener, NULL, NULL);
        if (fd < 0) return NULL;
        struct timeval limit = {5, 0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        __atomic_add_fetch(&connections, 1, __ATOMIC_RELAXED);
        misbehave(fd);
        close(fd);
    }
}

static void every_kind_of_end_is_the_end_of_the_transfer(void) {
    pthread_t threads[2];
    int port, listeners[2];
    listeners[0] = listen_somewhere(&port);
    listeners[1] = listen_somewhere(&data_port);
    OK(pthread_create(&threads[0], NULL, serve_names, &listeners[0]));
    OK(pthread_create(&threads[1], NULL, serve_data, &listeners[1]));
    for (int version = 1; version <= 2; version++) {
        __atomic_store_n(&protocol_version, version, __ATOMIC_RELEASE);
        for (int what = 0; what < BEHAVIOURS; what++) {
            char name[64];
            te_segment segment;
            te_transfer_options options = make_transfer_options();
            __atomic_store_n(&behaviour, what, __ATOMIC_RELEASE);
            /* A name is asked for once: each round has its own way to say 127.0.0.1 port so-and-so. */
            snprintf(name, sizeof name, "127.0.0.1:%0*d", 6 + version * BEHAVIOURS + what, port);
            OK(te_open_segment(engine, name, &segment));
            options.stall_timeout_ms = 400;
            for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
                te_transfer_request request = make_request((te_opcode)opcode, local, segment, REMOTE, LENGTH);
                double start = now();
                int connections_before = __atomic_load_n(&connections, __ATOMIC_RELAXED);
                te_status status = te_batch_transfer(engine, &request, sizeof request, 1, &options, NULL, 0);
                /* Version 1 has no answers: what closed in good order after all was read has confirmed it. */
                int confirmed = version == 1 && opcode == TE_WRITE &&
                                (what == CLOSES_IN_REPLY || what == SILENT || what == REFUSES || what == HALF_CLOSES_AFTER_HEADER);
                if (!confirmed && status >= 0) fprintf(stderr, "version %d, behaviour %d, opcode %d\n", version, what, opcode);
                if (!confirmed) REFUSED(status);
                CHECK(now() - start < 5);
                CHECK(__atomic_load_n(&connections, __ATOMIC_RELAXED) - connections_before <= 4);
                fill(local, LENGTH, (uint64_t)what);
                uint64_t before = checksum(local, LENGTH);
                usleep(20000);
                EXPECT(before, checksum(local, LENGTH));
            }
            others_still_move();
        }
    }
    for (int i = 0; i < 2; i++) {
        shutdown(listeners[i], SHUT_RDWR);
        OK(pthread_join(threads[i], NULL));
        close(listeners[i]);
    }
}

/* --- strangers on the port for data ----------------------------------------------------------------------------------------------- */

static void strangers_read_and_write_nothing(void) {
    static unsigned char noise[64 << 10], memory[4096], beside[4096];
    char address[256];
    te_engine *target = create_engine();
    OK(te_register_local_memory(target, memory, sizeof memory, NULL));
    OK(te_engine_address(target, address, sizeof address));
    int port = find_data_port(address);
    uint64_t start = (uintptr_t)memory;
    const struct {
        uint64_t length, address;
        int opcode;
    } headers[] = {
        {8, 0, 0x80},
        {8, 0, 0x81},
        {0, start, 0x80},
        {0, start, 0x81},
        {8, start - 1, 0x81},
        {4097, start, 0x81},
        {4097, start, 0x80},
        {UINT64_MAX, start, 0x80},
        {UINT64_MAX, start, 0x81},
        {UINT64_MAX - start + 1, start, 0x81},
        {8, UINT64_MAX, 0x81},
        {8, start + 4089, 0x80},
        {8, (uintptr_t)beside, 0x81},
        {8, start + 4095, 0x7f},
        {8, start - 8, 0},
        {8, start - 8, 1},
    };
    fill(noise, sizeof noise, 8);
    fill(memory, sizeof memory, 9);
    uint64_t before = checksum(memory, sizeof memory), before_beside = checksum(beside, sizeof beside);
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        unsigned char header[HEADER], answer[64];
        put_header(header, headers[i].length, headers[i].address, headers[i].opcode);
        int fd = connect_to(port);
        send_all(fd, header, HEADER);
        send_all(fd, noise, 64);
        shutdown(fd, SHUT_WR);
        size_t received = 0;
        for (ssize_t got; (got = recv(fd, answer, sizeof answer, 0)) > 0;) received += (size_t)got;
        /* A refusal at most; no byte of memory. */
        CHECK(received <= 8);
        close(fd);
    }
    for (size_t length = 1; length < sizeof noise; length = length * 3 + 1) {
        int fd = connect_to(port);
        send_all(fd, noise, length);
        close(fd);
    }
    EXPECT(before, checksum(memory, sizeof memory));
    EXPECT(before_beside, checksum(beside, sizeof beside));

    /* A write that stops halfway does not hold the memory. */
    unsigned char header[HEADER];
    put_header(header, sizeof memory, start, 0x81);
    int fd = connect_to(port);
    send_all(fd, header, HEADER);
    send_all(fd, noise, 100);
    usleep(50000);
    double begin = now();
    OK(te_unregister_local_memory(target, memory));
    CHECK(now() - begin < 4);
    before = checksum(memory, sizeof memory);
    send_all(fd, noise, 3000);
    usleep(50000);
    EXPECT(before, checksum(memory, sizeof memory));
    close(fd);
    OK(te_engine_destroy(target));
}

int main(void) {
    peer_start(&good_peer);
    engine = create_engine();
    OK(te_open_segment(engine, good_peer.address, &good_segment));
    every_kind_of_end_is_the_end_of_the_transfer();
    strangers_read_and_write_nothing();
    OK(te_engine_destroy(engine));
    peer_end(&good_peer);
    return 0;
}
