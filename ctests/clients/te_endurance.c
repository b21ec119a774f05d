/* te.h: nothing grows: engines, threads, transfers, batches and connections by the thousand. */
#include <pthread.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

static struct peer peer;
static te_engine *engine;
static te_segment segment;
static unsigned char memory[1 << 16];

static void *transfer_a_little(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) {
        te_batch batch;
        te_transfer_request request = make_request(i % 2 ? TE_READ : TE_WRITE, memory, segment, peer.base, 512);
        OK(te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0));
        request.segment = TE_LOCAL_SEGMENT;
        request.remote_addr = (uintptr_t)memory;
        OK(te_batch_create(engine, 1, &batch));
        OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
        OK(te_batch_wait(engine, batch, -1, NULL));
        OK(te_batch_free(engine, batch));
        CHECK(te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0) == 0);
    }
    return NULL;
}

static void transfer_from_threads(int count) {
    for (int i = 0; i < count; i++) {
        pthread_t threads[2];
        for (int j = 0; j < 2; j++) OK(pthread_create(&threads[j], NULL, transfer_a_little, NULL));
        for (int j = 0; j < 2; j++) OK(pthread_join(threads[j], NULL));
    }
}

/* 100,000 transfers and batches, by short-lived threads. */
static void transfers_leave_nothing_behind(void) {
    engine = create_engine();
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_open_segment(engine, peer.address, &segment));
    transfer_from_threads(20);
    int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    long before = resident_kilobytes();
    transfer_from_threads(150);
    expect_entries(files, "/proc/self/fd");
    expect_entries(threads, "/proc/self/task");
    long grown = resident_kilobytes() - before;
    if (grown >= 1024) fprintf(stderr, "grown by %ld KiB\n", grown);
    CHECK(grown < 1024);

    /* The connections are the same ones all the time. */
    te_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_get_statistics(engine, &statistics));
    CHECK(statistics.connections_opened <= 16);
}

static void registrations_leave_nothing_behind(void) {
    enum { COUNT = 4096 };
    static unsigned char regions[COUNT][16];
    long before = 0;
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < COUNT; i++) OK(te_register_local_memory(engine, regions[i], sizeof regions[i], NULL));
        for (int i = 0; i < COUNT; i++) OK(te_unregister_local_memory(engine, regions[(i * 1031) % COUNT]));
        if (round == 4) before = resident_kilobytes();
    }
    long grown = resident_kilobytes() - before;
    if (grown >= 1024) fprintf(stderr, "grown by %ld KiB\n", grown);
    CHECK(grown < 1024);
    OK(te_engine_destroy(engine));
}

static void engines_leave_nothing_behind(void) {
    int files = 0, threads = 0;
    long before = 0;
    for (int i = 0; i < 1000; i++) {
        te_engine *engine = create_engine();
        OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
        if (i % 10 == 0) {
            te_segment segment;
            te_batch batch;
            OK(te_open_segment(engine, peer.address, &segment));
            OK(transfer(engine, TE_WRITE, memory, segment, peer.base, sizeof memory));
            te_transfer_request request = make_request(TE_READ, memory, segment, peer.base, sizeof memory);
            OK(te_batch_create(engine, 1, &batch));
            OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
        }
        OK(te_engine_destroy(engine));
        if (i == 99) {
            usleep(100000);
            files = count_entries("/proc/self/fd");
            threads = count_entries("/proc/self/task");
            before = resident_kilobytes();
        }
    }
    expect_entries(files, "/proc/self/fd");
    expect_entries(threads, "/proc/self/task");
    long grown = resident_kilobytes() - before;
    if (grown >= 2048) fprintf(stderr, "grown by %ld KiB\n", grown);
    CHECK(grown < 2048);
}

int main(void) {
    peer_start(&peer);
    transfers_leave_nothing_behind();
    registrations_leave_nothing_behind();
    engines_leave_nothing_behind();
    peer_end(&peer);
    return 0;
}
