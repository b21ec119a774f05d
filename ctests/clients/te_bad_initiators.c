/* te.h: an engine whose memory peers use who break off, fall silent, take no answers, are killed, stopped or come back, and who open
 * more connections than there are descriptors. The engine lives on, others are served, nothing outside of what was asked for is
 * touched, and memory is given back when its owner wants it. */
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"
#include "wire.h"

enum { LENGTH = 1 << 20, MARGIN = 4096 };

static te_engine *target, *good;
static te_segment segment;
static char address[256];
static int data_port;
static struct {
    unsigned char before[MARGIN], wanted[LENGTH], after[MARGIN], of_others[MARGIN];
} memory;

static void others_are_served(void) {
    static unsigned char local[MARGIN];
    double start = now();
    OK(transfer(good, TE_WRITE, local, segment, (uintptr_t)memory.of_others, MARGIN));
    OK(transfer(good, TE_READ, local, segment, (uintptr_t)memory.of_others, MARGIN));
    OK(te_refresh_segment(good, segment));
    CHECK(now() - start < 2);
}

/* The memory is its owner's again within bounds, and stays as it is. */
static void take_back(void *start, size_t length) {
    double begin = now();
    OK(te_unregister_local_memory(target, start));
    CHECK(now() - begin < 4);
    fill(start, length, 77);
}

static const unsigned char *untouched(size_t length) {
    static unsigned char expected[LENGTH];
    fill(expected, length, 77);
    return expected;
}

static void expect_untouched(void *start, size_t length) { CHECK(memcmp(start, untouched(length), length) == 0); }

/* --- strangers that break the protocol ----------------------------------------------------------------------------------------------- */

enum behaviour {
    CLOSES_IN_HEADER,
    SILENT_IN_HEADER,
    CLOSES_AFTER_HEADER,
    RESETS_AFTER_HEADER,
    HALF_CLOSES_AFTER_HEADER,
    CLOSES_IN_BODY,
    RESETS_IN_BODY,
    HALF_CLOSES_IN_BODY,
    SILENT_IN_BODY,
    DRIPS,
    TAKES_NO_ANSWERS,
    CLOSES_IN_ANSWER,
    RESETS_IN_ANSWER,
    HALF_CLOSES_AND_TAKES_NO_ANSWERS,
    ASKS_FOR_MORE_THAN_THERE_IS,
    BEHAVIOURS
};

/* Leaves the connection open unless closing is what it is about. */
static int misbehave(int what, int opcode) {
    static unsigned char body[LENGTH], answer[LENGTH];
    unsigned char header[HEADER];
    int fd = connect_to(data_port), writes = opcode & 1;
    /* What is sent at once may fill the buffers of both sides. */
    struct timeval limit = {0, 20000};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    put_header(header, LENGTH, (uintptr_t)memory.wanted, opcode);
    if (what == ASKS_FOR_MORE_THAN_THERE_IS) put_header(header, LENGTH + 1, (uintptr_t)memory.wanted, opcode);
    if (what == CLOSES_IN_HEADER || what == SILENT_IN_HEADER) {
        send_all(fd, header, 11);
        if (what == SILENT_IN_HEADER) return fd;
        close(fd);
        return -1;
    }
    send_all(fd, header, HEADER);
    switch (what) {
    case RESETS_AFTER_HEADER: reset_on_close(fd); break;
    case HALF_CLOSES_AFTER_HEADER: shutdown(fd, SHUT_WR); return fd;
    case CLOSES_IN_BODY:
    case RESETS_IN_BODY:
    case HALF_CLOSES_IN_BODY:
    case SILENT_IN_BODY:
        send_all(fd, body, writes ? LENGTH / 2 : 100);
        if (what == RESETS_IN_BODY) reset_on_close(fd);
        if (what == HALF_CLOSES_IN_BODY) shutdown(fd, SHUT_WR);
        if (what == HALF_CLOSES_IN_BODY || what == SILENT_IN_BODY) return fd;
        break;
    case DRIPS:
        for (int i = 0; i < 20; i++) {
            send_all(fd, body, 1);
            usleep(500);
        }
        return fd;
    case TAKES_NO_ANSWERS:
    case HALF_CLOSES_AND_TAKES_NO_ANSWERS:
        for (int i = 0; i < 8; i++) {
            if (writes) send_all(fd, body, LENGTH);
            send_all(fd, header, HEADER);
        }
        if (what == HALF_CLOSES_AND_TAKES_NO_ANSWERS) shutdown(fd, SHUT_WR);
        return fd;
    case CLOSES_IN_ANSWER:
    case RESETS_IN_ANSWER:
        if (writes) send_all(fd, body, LENGTH);
        if (!writes || opcode & VERSION_2) CHECK(receive_all(fd, answer, writes ? 4 : LENGTH / 2));
        if (what == RESETS_IN_ANSWER) reset_on_close(fd);
        break;
    case ASKS_FOR_MORE_THAN_THERE_IS: send_all(fd, body, LENGTH); return fd;
    default: break;
    }
    close(fd);
    return -1;
}

static void every_kind_of_initiator_lets_go_of_the_memory(void) {
    enum { EACH = 3 };
    static const int opcodes[] = {WIRE_READ, WIRE_WRITE, WIRE_READ | VERSION_2, WIRE_WRITE | VERSION_2};
    fill(memory.before, MARGIN, 1);
    fill(memory.after, MARGIN, 2);
    others_are_served();
    int files = count_entries("/proc/self/fd");
    for (int what = 0; what < BEHAVIOURS; what++) {
        for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
            int left[EACH];
            OK(te_register_local_memory(target, memory.wanted, LENGTH, NULL));
            for (int j = 0; j < EACH; j++) left[j] = misbehave(what, opcodes[i]);
            others_are_served();
            take_back(memory.wanted, LENGTH);
            for (int j = 0; j < EACH; j++) {
                if (left[j] < 0) continue;
                unsigned char more[1000] = {0};
                send_all(left[j], more, sizeof more);
            }
            usleep(2000);
            expect_untouched(memory.wanted, LENGTH);
            for (int j = 0; j < EACH; j++) {
                if (left[j] >= 0) close(left[j]);
            }
        }
    }
    /* Connections go with those who made them. */
    expect_at_most_entries(files, "/proc/self/fd");
    unsigned char expected[MARGIN];
    fill(expected, MARGIN, 1);
    CHECK(memcmp(memory.before, expected, MARGIN) == 0);
    fill(expected, MARGIN, 2);
    CHECK(memcmp(memory.after, expected, MARGIN) == 0);
}

/* --- processes ------------------------------------------------------------------------------------------------------------------------- */

/* A process in the middle of transfers with our memory, in both directions. */
static void start_initiator(struct peer *peer) {
    peer_start(peer);
    memset(memory.wanted, 0, LENGTH);
    OK(te_register_local_memory(target, memory.wanted, LENGTH, NULL));
    peer_ask(peer, "fill %d %d 5", PEER_LARGE, LENGTH);
    CHECK(strcmp(peer_ask(peer, "begin %s %llu %d 20000", address, (unsigned long long)(uintptr_t)memory.wanted, LENGTH), "0") == 0);
    double start = now();
    while (*(volatile unsigned char *)&memory.wanted[LENGTH / 2] == 0 && now() - start < 20) usleep(100);
}

/* Each is another process that takes the place of the one before. */
static void initiators_may_be_killed_and_come_back(void) {
    others_are_served();
    int files = count_entries("/proc/self/fd");
    for (int life = 0; life < 4; life++) {
        struct peer peer;
        start_initiator(&peer);
        peer_kill(&peer);
        others_are_served();
        if (life % 2) usleep(20000);
        take_back(memory.wanted, LENGTH);
        usleep(20000);
        expect_untouched(memory.wanted, LENGTH);
    }
    expect_at_most_entries(files, "/proc/self/fd");
}

static void a_stopped_initiator_holds_nothing(void) {
    struct peer peer;
    start_initiator(&peer);
    peer_stop(&peer);
    others_are_served();
    take_back(memory.wanted, LENGTH);
    peer_continue(&peer);
    usleep(100000);
    expect_untouched(memory.wanted, LENGTH);
    /* It was left alone, not ended: it can go on. */
    OK(te_register_local_memory(target, memory.wanted, LENGTH, NULL));
    CHECK(strcmp(peer_ask(&peer, "notify %s still here", address), "0") == 0);
    CHECK(strcmp(peer_ask(&peer, "begin %s %llu 4096 2", address, (unsigned long long)(uintptr_t)memory.wanted), "0") == 0);
    double start = now();
    while (memcmp(memory.wanted, untouched(LENGTH), 4096) == 0 && now() - start < 20) usleep(1000);
    CHECK(memcmp(memory.wanted, untouched(LENGTH), 4096) != 0);
    peer_kill(&peer);
    take_back(memory.wanted, LENGTH);
}

/* --- descriptors ------------------------------------------------------------------------------------------------------------------------- */

static int read_once(int fd) {
    unsigned char header[HEADER], answer[8 + 64];
    put_header(header, 64, (uintptr_t)memory.of_others, WIRE_READ | VERSION_2);
    send_all(fd, header, HEADER);
    return receive_all(fd, answer, sizeof answer) && memcmp(answer + 8, memory.of_others, 64) == 0;
}

/* Connects to both ports of an engine as often as it can, until its input ends. */
static void flood(int orders, int answers) {
    enum { FLOOD = 400 };
    int ports[2];
    char byte;
    CHECK(read(orders, ports, sizeof ports) == sizeof ports);
    /* Without waiting: those that are not accepted hang. */
    for (int i = 0; i < FLOOD; i++) CHECK(start_to_connect(ports[i % 2]) >= 0);
    usleep(50000);
    CHECK(write(answers, "+", 1) == 1);
    CHECK(read(orders, &byte, 1) == 0);
}

static void serve_with_few_descriptors(void *unused) {
    (void)unused;
    int orders[2], answers[2], ports[2];
    char own[256], byte;
    struct rlimit limit = {64, 64};
    CHECK(pipe(orders) == 0 && pipe(answers) == 0);
    /* Another process, whose descriptors are not ours. */
    pid_t stranger = fork();
    CHECK(stranger >= 0);
    if (stranger == 0) {
        alarm(60);
        close(orders[1]);
        flood(orders[0], answers[1]);
        _exit(0);
    }
    close(answers[1]);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return; /* valgrind keeps it to itself */
    te_engine *engine = create_engine();
    OK(te_register_local_memory(engine, memory.of_others, MARGIN, NULL));
    OK(te_engine_address(engine, own, sizeof own));
    ports[0] = data_port = find_data_port(own);
    ports[1] = atoi(strrchr(own, ':') + 1);
    int early = connect_to(data_port);
    CHECK(read_once(early));
    CHECK(write(orders[1], ports, sizeof ports) == sizeof ports);
    CHECK(read(answers[0], &byte, 1) == 1);
    /* Who was there before is served. */
    for (int i = 0; i < 100; i++) CHECK(read_once(early));
    close(orders[1]);
    CHECK(waitpid(stranger, NULL, 0) == stranger);
    /* And whoever comes when the flood is over. */
    int served = 0;
    for (double start = now(); !served && now() - start < 20;) {
        int late = try_to_connect(data_port);
        served = late >= 0 && read_once(late);
        if (late >= 0) close(late);
    }
    CHECK(served);
    CHECK(find_data_port(own) == data_port);
    OK(te_unregister_local_memory(engine, memory.of_others));
    OK(te_engine_destroy(engine));
}

static void a_flood_of_connections_shuts_out_nobody_who_was_there(void) { in_child(serve_with_few_descriptors, NULL); }

int main(void) {
    a_flood_of_connections_shuts_out_nobody_who_was_there();
    target = create_engine();
    good = create_engine();
    OK(te_register_local_memory(target, memory.of_others, MARGIN, NULL));
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(good, address, &segment));
    data_port = find_data_port(address);
    every_kind_of_initiator_lets_go_of_the_memory();
    initiators_may_be_killed_and_come_back();
    a_stopped_initiator_holds_nothing();
    OK(te_engine_destroy(good));
    OK(te_engine_destroy(target));
    return 0;
}
