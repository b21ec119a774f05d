/* te.h: transfers, batches and notifications between two processes. */
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"
#include "wire.h"

enum { LOCAL_LENGTH = 32 << 20 };

static te_engine *engine;
static unsigned char *local;
static struct peer peer;
static te_segment segment;

static te_transfer_request to_peer(te_opcode opcode, size_t local_offset, size_t offset, size_t length) {
    return make_request(opcode, local + local_offset, segment, peer.base + offset, length);
}

static te_status move(te_opcode opcode, size_t local_offset, size_t offset, size_t length) {
    te_transfer_request request = to_peer(opcode, local_offset, offset, length);
    return te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0);
}

static uint64_t peer_sum(size_t offset, size_t length) {
    return strtoull(peer_ask(&peer, "sum %zu %zu", offset, length), NULL, 10);
}

static te_batch_status poll_batch(te_batch batch) {
    te_batch_status status;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    OK(te_batch_poll(engine, batch, &status));
    return status;
}

static te_transfer_result task_result(te_batch batch, size_t task) {
    te_transfer_result result;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    OK(te_batch_task_status(engine, batch, task, &result));
    return result;
}

static void the_peers_memory_is_listed_in_registration_order(void) {
    te_memory_region regions[8];
    size_t count;
    memset(regions, 0, sizeof regions);
    OK(te_probe_segment(engine, segment));
    OK(te_list_segment_memory(engine, segment, regions, sizeof regions[0], 8, &count));
    /* What peers may not touch is not shown. */
    EXPECT(3, count);
    EXPECT(peer.base + PEER_FIRST, regions[0].addr);
    EXPECT(peer.base + PEER_SECOND, regions[1].addr);
    EXPECT(peer.base + PEER_LARGE, regions[2].addr);
    EXPECT(PEER_LARGE_LENGTH, regions[2].length);
}

/* Powers of two and their neighbours. */
static void every_length_arrives_and_comes_back(void) {
    for (size_t i = 0; i < 3 * 25; i++) {
        size_t length = ((size_t)1 << i / 3) + i % 3 - 1, offset = PEER_LARGE + 1 + i;
        if (length == 0) continue;
        fill(local, length, i);
        uint64_t expected = checksum(local, length);
        peer_ask(&peer, "fill %zu 1 %d", offset - 1, 250);
        peer_ask(&peer, "fill %zu 1 %d", offset + length, 251);
        uint64_t before = peer_sum(offset - 1, 1), after = peer_sum(offset + length, 1);
        OK(move(TE_WRITE, 0, offset, length));
        CHECK(peer_sum(offset, length) == expected);
        CHECK(peer_sum(offset - 1, 1) == before && peer_sum(offset + length, 1) == after);

        memset(local, 0x5a, length + 2);
        OK(move(TE_READ, 1, offset, length));
        CHECK(checksum(local + 1, length) == expected);
        CHECK(local[0] == 0x5a && local[length + 1] == 0x5a);
    }
}

static void empty_transfers_complete(void) { OK(move(TE_WRITE, 0, PEER_FIRST, 0)); }

static void a_range_may_span_regions_that_touch(void) {
    fill(local, 8192, 42);
    OK(move(TE_WRITE, 0, PEER_SECOND - 4096, 8192));
    EXPECT(checksum(local, 8192), peer_sum(PEER_SECOND - 4096, 8192));
}

static void what_is_not_registered_for_peers_is_out_of_reach(void) {
    const struct {
        size_t offset, length;
    } ranges[] = {
        {PEER_GAP, 8}, {PEER_GAP - 8, 9}, {PEER_PRIVATE, 8}, {PEER_PRIVATE - 1, 2}, {PEER_LARGE - 1, 2},
        {PEER_LARGE + PEER_LARGE_LENGTH - 1, 2}, {PEER_LARGE + PEER_LARGE_LENGTH, 1},
    };
    uint64_t gap = peer_sum(PEER_GAP, PEER_LARGE - PEER_GAP);
    uint64_t registered = peer_sum(PEER_GAP - 64, 64), large = peer_sum(PEER_LARGE, PEER_LARGE_LENGTH);
    fill(local, 64, 65);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        REFUSED(move(TE_WRITE, 0, ranges[i].offset, ranges[i].length));
        REFUSED(move(TE_READ, 0, ranges[i].offset, ranges[i].length));
        OK(move(TE_READ, 0, PEER_FIRST, 64));
    }
    EXPECT(gap, peer_sum(PEER_GAP, PEER_LARGE - PEER_GAP));
    EXPECT(registered, peer_sum(PEER_GAP - 64, 64));
    EXPECT(large, peer_sum(PEER_LARGE, PEER_LARGE_LENGTH));
    REFUSED(transfer(engine, TE_READ, local, segment, 0, 8));
    REFUSED(transfer(engine, TE_READ, local, segment, UINT64_MAX - 3, 8));
    REFUSED(transfer(engine, TE_READ, local, segment, peer.base, UINT64_MAX));
    REFUSED(transfer(engine, TE_READ, local, 4711, peer.base, 8));
    REFUSED(transfer(engine, (te_opcode)2, local, segment, peer.base, 8));
    OK(move(TE_READ, 0, PEER_FIRST, 64));
}

static void each_request_has_its_own_result(void) {
    te_transfer_request requests[3] = {
        to_peer(TE_WRITE, 0, PEER_FIRST, 100),
        to_peer(TE_WRITE, 0, PEER_GAP, 100),
        to_peer(TE_WRITE, 0, PEER_FIRST + 200, 300),
    };
    te_transfer_result results[3];
    memset(results, 0, sizeof results);
    te_status status = te_batch_transfer(engine, requests, sizeof requests[0], 3, NULL, results, sizeof results[0]);
    CHECK(status < 0 && *te_last_error());
    EXPECT(TE_STATE_COMPLETED, results[0].state);
    EXPECT(100, results[0].bytes);
    EXPECT(0, results[0].error);
    EXPECT(TE_STATE_FAILED, results[1].state);
    EXPECT(status, results[1].error);
    EXPECT(TE_STATE_COMPLETED, results[2].state);
    EXPECT(300, results[2].bytes);
}

static void an_unknown_segment_starts_nothing(void) {
    te_transfer_request requests[2] = {to_peer(TE_WRITE, 0, PEER_FIRST, 4096), to_peer(TE_WRITE, 0, PEER_FIRST, 4096)};
    te_batch batch;
    uint64_t before = peer_sum(PEER_FIRST, 4096);
    fill(local, 4096, 77);
    requests[1].segment = 4711;
    OK(te_batch_create(engine, 2, &batch));
    REFUSED(te_batch_submit(engine, batch, requests, sizeof requests[0], 2, NULL));
    EXPECT(0, poll_batch(batch).tasks);
    EXPECT(before, peer_sum(PEER_FIRST, 4096));
    OK(te_batch_free(engine, batch));
}

static void a_batch_lives_through_its_states(void) {
    te_batch batch;
    te_batch_status status;
    te_transfer_request requests[4];
    te_transfer_result result;
    char text[256];
    int fd = -1;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    fill(local, 4 << 20, 5);
    for (size_t i = 0; i < 4; i++) requests[i] = to_peer(TE_WRITE, i << 20, PEER_LARGE + (i << 20), 1 << 20);

    OK(te_batch_create(engine, 4, &batch));
    OK(te_batch_event_fd(engine, batch, &fd));
    OK(te_batch_submit(engine, batch, requests, sizeof requests[0], 3, NULL));
    EXPECT(TE_ERR_TOO_MANY_REQUESTS, te_batch_submit(engine, batch, requests, sizeof requests[0], 2, NULL));
    OK(te_batch_submit(engine, batch, requests + 3, sizeof requests[0], 1, NULL));
    struct pollfd event = {fd, POLLIN, 0};
    while (poll_batch(batch).finished < 4) EXPECT(1, poll(&event, 1, 10000));
    OK(te_batch_wait(engine, batch, -1, &status));
    EXPECT(TE_STATE_COMPLETED, status.state);
    EXPECT(4, status.tasks);
    EXPECT(4, status.finished);
    EXPECT(0, status.failed);
    EXPECT(4 << 20, status.bytes);
    for (size_t i = 0; i < 4; i++) {
        EXPECT(TE_STATE_COMPLETED, task_result(batch, i).state);
        EXPECT(1 << 20, task_result(batch, i).bytes);
        OK(te_batch_task_error(engine, batch, i, text, sizeof text));
        CHECK(text[0] == '\0');
    }
    REFUSED(te_batch_task_status(engine, batch, 4, &result));
    EXPECT(checksum(local, 4 << 20), peer_sum(PEER_LARGE, 4 << 20));
    OK(te_batch_free(engine, batch));

    /* A freed id names nothing, also after a new batch has taken its place. */
    REFUSED(te_batch_free(engine, batch));
    te_batch next;
    OK(te_batch_create(engine, 4, &next));
    CHECK(next != batch);
    REFUSED(te_batch_poll(engine, batch, &status));
    OK(te_batch_free(engine, next));

    /* A failed task tells why. */
    OK(te_batch_create(engine, 1, &batch));
    requests[0] = to_peer(TE_READ, 0, PEER_GAP, 64);
    OK(te_batch_submit(engine, batch, requests, sizeof requests[0], 1, NULL));
    OK(te_batch_wait(engine, batch, 20000, &status));
    EXPECT(TE_STATE_FAILED, status.state);
    EXPECT(1, status.failed);
    OK(te_batch_task_error(engine, batch, 0, text, sizeof text));
    CHECK(text[0] != '\0');
    OK(te_batch_free(engine, batch));
}

static void the_own_segment_is_a_target_too(void) {
    fill(local, 1000, 9);
    uint64_t expected = checksum(local, 1000);
    OK(te_register_local_memory(engine, local, LOCAL_LENGTH, NULL));
    OK(transfer(engine, TE_WRITE, local, TE_LOCAL_SEGMENT, (uintptr_t)(local + 500), 1000));
    EXPECT(expected, checksum(local + 500, 1000));
    OK(transfer(engine, TE_READ, local + 8000, TE_LOCAL_SEGMENT, (uintptr_t)(local + 500), 1000));
    EXPECT(expected, checksum(local + 8000, 1000));

    /* Ranges of either order may overlap. */
    fill(local, 1000, 10);
    expected = checksum(local, 1000);
    OK(transfer(engine, TE_READ, local + 300, TE_LOCAL_SEGMENT, (uintptr_t)local, 1000));
    EXPECT(expected, checksum(local + 300, 1000));
    OK(transfer(engine, TE_WRITE, local + 300, TE_LOCAL_SEGMENT, (uintptr_t)(local + 1), 1000));
    EXPECT(expected, checksum(local + 1, 1000));

    OK(te_unregister_local_memory(engine, local));
    REFUSED(transfer(engine, TE_WRITE, local, TE_LOCAL_SEGMENT, (uintptr_t)(local + 500), 1000));
}

static void take_one(const char *name, const char *message) {
    te_notification *list = NULL;
    size_t count = 0;
    double start = now();
    while (count == 0 && now() - start < 20) {
        OK(te_take_notifications(engine, &list, &count));
        if (count == 0) {
            CHECK(list == NULL);
            usleep(1000);
        }
    }
    EXPECT(1, count);
    CHECK(strcmp(list[0].name, name) == 0 && strcmp(list[0].message, message) == 0);
    te_free_notifications(list, count);
}

static void notifications_go_both_ways(void) {
    char address[256];
    OK(te_notify(engine, segment, "hello", "from_the_test"));
    CHECK(strcmp(peer_ask(&peer, "take"), "hello from_the_test") == 0);
    OK(te_engine_address(engine, address, sizeof address));
    CHECK(strcmp(peer_ask(&peer, "notify %s hello and back", address), "0") == 0);
    take_one("hello", "and back");
}

/* Nobody polls. It is there after the bytes, once for each submission, and not at all where one of its requests fails. */
static void a_notification_follows_the_bytes_without_polling(void) {
    enum { ROUNDS = 20 };
    te_transfer_options options = make_transfer_options();
    te_transfer_request requests[4];
    te_batch batch, failed;
    options.notify_name = "written";
    for (size_t round = 0; round < ROUNDS; round++) {
        char text[32], expected[64];
        size_t length = round % 2 ? 1000 + round : (1 << 20) + round;
        snprintf(text, sizeof text, "round %zu", round);
        snprintf(expected, sizeof expected, "written %s", text);
        options.notify_message = text;
        fill(local, 4 * length, 31 + round);
        for (size_t i = 0; i < 4; i++) requests[i] = to_peer(TE_WRITE, i * length, PEER_LARGE + i * length, length);
        OK(te_batch_create(engine, 4, &batch));
        OK(te_batch_submit(engine, batch, requests, sizeof requests[0], 4, &options));
        CHECK(strcmp(peer_ask(&peer, "take"), expected) == 0);
        EXPECT(checksum(local, 4 * length), peer_sum(PEER_LARGE, 4 * length));
        OK(te_batch_wait(engine, batch, 20000, NULL));
        EXPECT(TE_STATE_COMPLETED, poll_batch(batch).state);
        OK(te_batch_free(engine, batch));

        requests[round % 4].remote_addr = peer.base + PEER_GAP;
        options.notify_message = "never";
        OK(te_batch_create(engine, 4, &failed));
        OK(te_batch_submit(engine, failed, requests, sizeof requests[0], 4, &options));
        OK(te_batch_wait(engine, failed, 20000, NULL));
        EXPECT(TE_STATE_FAILED, poll_batch(failed).state);
        OK(te_batch_free(engine, failed));
    }
    /* The next one that comes is the next one that was sent. */
    options.notify_message = "all";
    requests[0] = to_peer(TE_WRITE, 0, PEER_LARGE, 100);
    OK(te_batch_transfer(engine, requests, sizeof requests[0], 1, &options, NULL, 0));
    CHECK(strcmp(peer_ask(&peer, "take"), "written all") == 0);

    options.notify_message = NULL;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_batch_transfer(engine, requests, sizeof requests[0], 1, &options, NULL, 0));
}

static void memory_comes_and_goes_while_the_segment_is_open(void) {
    CHECK(strcmp(peer_ask(&peer, "register %d 4096", PEER_GAP), "0") == 0);
    OK(move(TE_READ, 0, PEER_GAP, 4096));
    CHECK(strcmp(peer_ask(&peer, "unregister %d", PEER_GAP), "0") == 0);
    REFUSED(move(TE_READ, 0, PEER_GAP, 4096));
    OK(te_refresh_segment(engine, segment));
    OK(te_close_segment(engine, segment));
    OK(te_open_segment(engine, peer.address, &segment));
    OK(move(TE_READ, 0, PEER_FIRST, 4096));
}

/* A peer that does not answer: deadlines and cancelling end the transfer, and after that the buffer is the caller's again. */
static void a_silent_peer_holds_nobody(void) {
    te_transfer_options options = make_transfer_options();
    te_transfer_request request = to_peer(TE_READ, 0, PEER_LARGE, 1 << 20);
    te_transfer_result result;
    te_batch_status status;
    te_batch batch;
    memset(&result, 0, sizeof result);
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    peer_stop(&peer);

    options.timeout_ms = 300;
    double start = now();
    EXPECT(TE_ERR_TIMEOUT, te_batch_transfer(engine, &request, sizeof request, 1, &options, &result, sizeof result));
    CHECK(now() - start > 0.25 && now() - start < 10);
    EXPECT(TE_STATE_TIMEOUT, result.state);

    /* Without a deadline for the whole, one for standing still. */
    options.timeout_ms = 0;
    options.stall_timeout_ms = 300;
    start = now();
    EXPECT(TE_ERR_TIMEOUT, te_batch_transfer(engine, &request, sizeof request, 1, &options, &result, sizeof result));
    CHECK(now() - start > 0.25 && now() - start < 10);
    EXPECT(TE_STATE_TIMEOUT, result.state);

    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    EXPECT(TE_ERR_TIMEOUT, te_batch_wait(engine, batch, 50, &status));
    EXPECT(TE_ERR_BATCH_BUSY, te_batch_free(engine, batch));
    OK(te_batch_cancel(engine, batch));
    OK(te_batch_wait(engine, batch, 10000, &status));
    EXPECT(TE_STATE_CANCELED, task_result(batch, 0).state);
    EXPECT(TE_ERR_CANCELED, task_result(batch, 0).error);
    OK(te_batch_free(engine, batch));

    fill(local, 1 << 20, 1234);
    uint64_t before = checksum(local, 1 << 20);
    peer_continue(&peer);
    usleep(200000);
    EXPECT(before, checksum(local, 1 << 20));
    OK(move(TE_READ, 0, PEER_FIRST, 4096));
}

/* Whatever ended it: what is written into the source afterwards is never sent, and nothing arrives in the sink any more. */
static void the_memory_of_an_ended_transfer_is_left_alone(void) {
    enum { LENGTH = 16 << 20, OLD = 0x11, SENT = 0x22, LATER = 0xee };
    enum { TIMED_OUT, STALLED, CANCELLED, WAYS };
    static unsigned char back[LENGTH];
    for (int way = 0; way < WAYS; way++) {
        for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
            te_transfer_request request = to_peer((te_opcode)opcode, 0, PEER_LARGE, LENGTH);
            te_transfer_options options = make_transfer_options();
            te_batch batch;
            options.timeout_ms = way == TIMED_OUT ? 100 : 0;
            options.stall_timeout_ms = way == STALLED ? 100 : 0;
            memset(local, OLD, LENGTH);
            OK(move(TE_WRITE, 0, PEER_LARGE, LENGTH));
            memset(local, SENT, LENGTH);
            OK(te_batch_create(engine, 1, &batch));
            peer_stop(&peer);
            OK(te_batch_submit(engine, batch, &request, sizeof request, 1, &options));
            usleep(20000);
            if (way == CANCELLED) OK(te_batch_cancel(engine, batch));
            OK(te_batch_wait(engine, batch, 20000, NULL));
            EXPECT(way == CANCELLED ? TE_STATE_CANCELED : TE_STATE_TIMEOUT, task_result(batch, 0).state);
            memset(local, LATER, LENGTH);
            peer_continue(&peer);
            usleep(50000);
            CHECK(local[0] == LATER && memcmp(local, local + 1, LENGTH - 1) == 0);
            OK(te_batch_free(engine, batch));
            OK(transfer(engine, TE_READ, back, segment, peer.base + PEER_LARGE, LENGTH));
            for (size_t i = 0; i < LENGTH; i++) CHECK(back[i] == OLD || (opcode == TE_WRITE && back[i] == SENT));
        }
    }
}

/* What is unregistered with success is left alone from then on, whatever was on its way: here as the target of transfers ... */
static void the_target_may_unregister_under_traffic(void) {
    enum { COUNT = 32 };
    te_transfer_request requests[COUNT];
    te_batch batch;
    fill(local, COUNT << 20, 8);
    for (size_t i = 0; i < COUNT; i++) requests[i] = to_peer(TE_WRITE, i << 20, PEER_LARGE + (i << 20), 1 << 20);
    OK(te_batch_create(engine, COUNT, &batch));
    OK(te_batch_submit(engine, batch, requests, sizeof requests[0], COUNT, NULL));
    CHECK(strcmp(peer_ask(&peer, "unregister %d", PEER_LARGE), "0") == 0);
    peer_ask(&peer, "fill %d %d 99", PEER_LARGE, PEER_LARGE_LENGTH);
    uint64_t before = peer_sum(PEER_LARGE, PEER_LARGE_LENGTH);
    OK(te_batch_wait(engine, batch, 20000, NULL));
    EXPECT(before, peer_sum(PEER_LARGE, PEER_LARGE_LENGTH));
    OK(te_batch_free(engine, batch));
    CHECK(strcmp(peer_ask(&peer, "register %d %d", PEER_LARGE, PEER_LARGE_LENGTH), "0") == 0);
    OK(move(TE_WRITE, 0, PEER_LARGE, 1 << 20));
}

/* ... and here as their local side. */
static void the_source_may_unregister_under_traffic(void) {
    te_transfer_request request = to_peer(TE_READ, 0, PEER_LARGE, 1 << 20);
    te_batch batch;
    OK(te_register_local_memory(engine, local, 1 << 20, NULL));
    peer_stop(&peer);
    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    OK(te_unregister_local_memory(engine, local));
    EXPECT(TE_STATE_CANCELED, task_result(batch, 0).state);
    fill(local, 1 << 20, 4321);
    uint64_t before = checksum(local, 1 << 20);
    peer_continue(&peer);
    usleep(200000);
    EXPECT(before, checksum(local, 1 << 20));
    OK(te_batch_free(engine, batch));
    OK(move(TE_READ, 0, PEER_FIRST, 4096));
}

static void a_dead_peer_fails_its_transfers_only(void) {
    struct peer other;
    te_segment other_segment;
    peer_start(&other);
    OK(te_open_segment(engine, other.address, &other_segment));
    CHECK(other_segment != segment);
    OK(transfer(engine, TE_READ, local, other_segment, other.base, 4096));
    peer_kill(&other);
    REFUSED(transfer(engine, TE_READ, local, other_segment, other.base, 4096));
    REFUSED(te_probe_segment(engine, other_segment));
    OK(move(TE_READ, 0, PEER_FIRST, 4096));
}

/* Killed while much is on its way to and from it. What has completed has completed; the rest fails, within seconds. */
static void a_peer_may_die_amid_traffic(void) {
    enum { COUNT = 64 };
    struct peer other;
    te_segment other_segment;
    te_transfer_request requests[COUNT];
    te_batch batch;
    te_batch_status status;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    peer_start(&other);
    OK(te_open_segment(engine, other.address, &other_segment));
    for (size_t i = 0; i < COUNT; i++)
        requests[i] = make_request(i % 2 ? TE_READ : TE_WRITE, local + (i % 8 << 22), other_segment, other.base + PEER_LARGE, 4 << 20);
    OK(te_batch_create(engine, COUNT, &batch));
    OK(te_batch_submit(engine, batch, requests, sizeof requests[0], COUNT, NULL));
    while (poll_batch(batch).finished < 3) usleep(100);
    peer_kill(&other);
    double start = now();
    OK(te_batch_wait(engine, batch, 20000, &status));
    CHECK(now() - start < 10);
    EXPECT(TE_STATE_FAILED, status.state);
    CHECK(status.failed > 0 && status.finished == COUNT);
    EXPECT((COUNT - status.failed) * (4 << 20), status.bytes);
    OK(te_batch_free(engine, batch));
    OK(move(TE_READ, 0, PEER_FIRST, 4096));
}

/* A name that can be given to another process: a port that passes on what is said to it to the port of the present bearer. */
static int name_port, bearer_port;

static void *pass_on(void *listener) {
    for (;;) {
        char bytes[4096];
        int ends[2];
        if ((ends[0] = accept(*(int *)listener, NULL, NULL)) < 0) return NULL;
        ends[1] = try_to_connect(__atomic_load_n(&bearer_port, __ATOMIC_ACQUIRE));
        for (int open = 2; open > 0 && ends[1] >= 0;) {
            struct pollfd events[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
            CHECK(poll(events, 2, 10000) > 0);
            for (int i = 0; i < 2; i++) {
                if (!events[i].revents) continue;
                ssize_t got = recv(ends[i], bytes, sizeof bytes, 0);
                if (got > 0 && send(ends[1 - i], bytes, (size_t)got, MSG_NOSIGNAL) == got) continue;
                open = 0;
            }
        }
        if (ends[1] >= 0) close(ends[1]);
        close(ends[0]);
    }
}

static int start_passing_on(pthread_t *thread) {
    static int listener;
    listener = listen_somewhere(&name_port);
    OK(pthread_create(thread, NULL, pass_on, &listener));
    return listener;
}

/* The same name, another process with another port and other addresses: at most one transfer fails, and the segment stays open. */
static void a_peer_may_come_back(void) {
    struct peer bearer;
    te_segment other;
    pthread_t thread;
    char name[64];
    int listener = start_passing_on(&thread);
    snprintf(name, sizeof name, "127.0.0.1:%d", name_port);
    for (int life = 0; life < 3; life++) {
        peer_start(&bearer);
        __atomic_store_n(&bearer_port, atoi(strrchr(bearer.address, ':') + 1), __ATOMIC_RELEASE);
        if (life == 0) OK(te_open_segment(engine, name, &other));
        fill(local, 4096, 80 + life);
        te_status first = transfer(engine, TE_WRITE, local, other, bearer.base, 4096);
        if (first != 0) {
            CHECK(life > 0);
            OK(transfer(engine, TE_WRITE, local, other, bearer.base, 4096));
        }
        EXPECT(checksum(local, 4096), strtoull(peer_ask(&bearer, "sum 0 4096"), NULL, 10));
        /* What it registers now is found, too. */
        CHECK(strcmp(peer_ask(&bearer, "register %d 4096", PEER_GAP), "0") == 0);
        OK(transfer(engine, TE_WRITE, local, other, bearer.base + PEER_GAP, 4096));
        EXPECT(checksum(local, 4096), strtoull(peer_ask(&bearer, "sum %d 4096", PEER_GAP), NULL, 10));
        OK(te_notify(engine, other, "welcome", "back"));
        CHECK(strcmp(peer_ask(&bearer, "take"), "welcome back") == 0);
        peer_kill(&bearer);
        /* The second time somebody notices while it is away. */
        if (life == 1) REFUSED(transfer(engine, TE_WRITE, local, other, bearer.base, 4096));
    }
    shutdown(listener, SHUT_RDWR);
    OK(pthread_join(thread, NULL));
    close(listener);
}

struct watched {
    te_batch batch;
    size_t count;
};

/* Looks at everything until all is over, and checks that nothing ever goes back. */
static void *watch(void *argument) {
    struct watched *watched = argument;
    int32_t seen[256];
    memset(seen, 0, sizeof seen);
    for (;;) {
        te_batch_status status = poll_batch(watched->batch);
        size_t ended = 0;
        uint64_t bytes = 0;
        for (size_t i = 0; i < watched->count; i++) {
            te_transfer_result result = task_result(watched->batch, i);
            CHECK(seen[i] == TE_STATE_WAITING || seen[i] == result.state);
            CHECK(result.state == TE_STATE_WAITING || result.state == TE_STATE_COMPLETED || result.state == TE_STATE_FAILED);
            CHECK(result.bytes <= 64 << 10);
            if (result.state == TE_STATE_COMPLETED) EXPECT(64 << 10, result.bytes);
            if (result.state == TE_STATE_FAILED) CHECK(result.error < 0);
            seen[i] = result.state;
            ended += result.state != TE_STATE_WAITING;
            bytes += result.bytes;
        }
        CHECK(status.finished <= ended && status.bytes <= bytes);
        if (status.state != TE_STATE_WAITING) {
            EXPECT(TE_STATE_FAILED, status.state);
            EXPECT(watched->count, status.finished);
            EXPECT(watched->count, ended);
            EXPECT(watched->count / 8, status.failed);
            EXPECT((uint64_t)(watched->count - watched->count / 8) << 16, bytes);
            return NULL;
        }
    }
}

static void many_may_watch_a_batch(void) {
    enum { COUNT = 128, WATCHERS = 4 };
    te_transfer_request requests[COUNT];
    struct watched watched = {0, COUNT};
    pthread_t threads[WATCHERS];
    for (size_t i = 0; i < COUNT; i++) {
        requests[i] = to_peer(TE_WRITE, i << 16, PEER_LARGE + (i << 16), 64 << 10);
        if (i % 8 == 5) requests[i].remote_addr = peer.base + PEER_GAP - 1;
    }
    OK(te_batch_create(engine, COUNT, &watched.batch));
    OK(te_batch_submit(engine, watched.batch, requests, sizeof requests[0], COUNT, NULL));
    for (size_t i = 0; i < WATCHERS; i++) OK(pthread_create(&threads[i], NULL, watch, &watched));
    for (size_t i = 0; i < WATCHERS; i++) OK(pthread_join(threads[i], NULL));
    OK(te_batch_free(engine, watched.batch));
}

static void counters_have_moved(void) {
    te_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_get_statistics(engine, &statistics));
    CHECK(statistics.bytes_written > (16 << 20) && statistics.bytes_read > (16 << 20));
    CHECK(statistics.tasks_completed > 0 && statistics.tasks_failed > 0);
    EXPECT(2 + 4, statistics.tasks_timed_out);
    EXPECT(2 + 2, statistics.tasks_cancelled);
    EXPECT(statistics.batches_allocated, statistics.batches_freed);
}

int main(void) {
    local = malloc(LOCAL_LENGTH);
    CHECK(local != NULL);
    memset(local, 1, LOCAL_LENGTH);
    peer_start(&peer);
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));

    the_peers_memory_is_listed_in_registration_order();
    every_length_arrives_and_comes_back();
    empty_transfers_complete();
    a_range_may_span_regions_that_touch();
    what_is_not_registered_for_peers_is_out_of_reach();
    each_request_has_its_own_result();
    an_unknown_segment_starts_nothing();
    a_batch_lives_through_its_states();
    the_own_segment_is_a_target_too();
    notifications_go_both_ways();
    a_notification_follows_the_bytes_without_polling();
    memory_comes_and_goes_while_the_segment_is_open();
    a_silent_peer_holds_nobody();
    the_memory_of_an_ended_transfer_is_left_alone();
    the_target_may_unregister_under_traffic();
    the_source_may_unregister_under_traffic();
    a_dead_peer_fails_its_transfers_only();
    a_peer_may_die_amid_traffic();
    a_peer_may_come_back();
    many_may_watch_a_batch();
    counters_have_moved();

    OK(te_engine_destroy(engine));
    peer_end(&peer);
    free(local);
    return 0;
}
