/* te.h: much at once and for long. Memory, threads and descriptors are afterwards what they were before, and others are served meanwhile. */
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <transfer_engine_c.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"
#include "wire.h"

static struct peer peer;
static te_engine *engine;
static te_segment segment;
static unsigned char memory[1 << 20];

struct usage {
    int files, threads;
    long kilobytes;
};

static struct usage look(void) {
    struct usage usage = {count_entries("/proc/self/fd"), count_entries("/proc/self/task"), resident_kilobytes()};
    return usage;
}

/* What the allocator keeps for later is not in use. */
static void expect_no_more(struct usage before, long kilobytes) {
    expect_at_most_entries(before.files, "/proc/self/fd");
    expect_at_most_entries(before.threads, "/proc/self/task");
    malloc_trim(0);
    long grown = resident_kilobytes() - before.kilobytes;
    if (grown > kilobytes) fprintf(stderr, "grown by %ld KiB, not %ld\n", grown, kilobytes);
    CHECK(grown <= kilobytes);
}

static size_t bytes_in_use(void) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static te_statistics statistics_of(te_engine *engine) {
    te_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_get_statistics(engine, &statistics));
    return statistics;
}

/* Connections with a port that wait for their end to be forgotten. */
static int count_time_wait(int port) {
    int count = 0;
    char line[512];
    FILE *file = fopen("/proc/net/tcp", "r");
    if (file == NULL) return 0;
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned ours, theirs, state;
        if (sscanf(line, "%*s %*[^:]:%x %*[^:]:%x %x", &ours, &theirs, &state) != 3) continue;
        count += state == 6 && (ours == (unsigned)port || theirs == (unsigned)port);
    }
    fclose(file);
    return count;
}

/* --- a transfer without a limit ---------------------------------------------------------------------------------------------------- */

/* A peer that never answers, found before anything else and looked at again at the end: 30 s pass in between or are waited for. */
static struct peer silent;
static te_engine *patient;
static batch_id_t waiting;
static te_batch watched;
static double asked;

static void ask_the_silent(void) {
    static unsigned char local[8192];
    te_segment to;
    peer_start(&silent);
    patient = create_engine();
    OK(te_open_segment(patient, silent.address, &to));
    peer_stop(&silent);
    transfer_request_t entry = {OPCODE_READ, local, (int32_t)to, silent.base, 4096};
    te_transfer_request request = make_request(TE_WRITE, local + 4096, to, silent.base, 4096);
    asked = now();
    waiting = allocateBatchID((transfer_engine_t)patient, 1);
    OK(submitTransfer((transfer_engine_t)patient, waiting, &entry, 1));
    OK(te_batch_create(patient, 1, &watched));
    OK(te_batch_submit(patient, watched, &request, sizeof request, 1, NULL));
}

/* What te.h calls TIMEOUT is FAILED in the old interface, whose callers take every number that they do not know for success. */
static void a_transfer_without_limits_ends_after_30_seconds(void) {
    te_transfer_result result;
    transfer_status_t status;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    if (now() - asked < 25) {
        OK(getTransferStatus((transfer_engine_t)patient, waiting, 0, &status));
        EXPECT(STATUS_WAITING, status.status);
    }
    OK(te_batch_wait(patient, watched, 60000, NULL));
    CHECK(now() - asked > 29);
    OK(te_batch_task_status(patient, watched, 0, &result));
    EXPECT(TE_STATE_TIMEOUT, result.state);
    for (status.status = STATUS_WAITING; status.status == STATUS_WAITING; usleep(1000)) {
        CHECK(now() - asked < 90);
        OK(getTransferStatus((transfer_engine_t)patient, waiting, 0, &status));
    }
    EXPECT(STATUS_FAILED, status.status);
    OK(te_batch_free(patient, watched));
    OK(freeBatchID((transfer_engine_t)patient, waiting));
    OK(te_engine_destroy(patient));
    peer_kill(&silent);
}

/* --- transfers ------------------------------------------------------------------------------------------------------------------------ */

enum { LIFE = 1000, AT_ONCE = 4, LARGEST_BATCH = 256 };

/* A thread that lives for LIFE transfers of 64 bytes, in batches of the given size. */
static void *transfer_for_a_life(void *batch_size) {
    te_transfer_request requests[LARGEST_BATCH];
    size_t size = (size_t)batch_size;
    for (size_t done = 0; done < LIFE; done += size) {
        te_batch batch;
        for (size_t i = 0; i < size; i++)
            requests[i] = make_request((done + i) % 2 ? TE_READ : TE_WRITE, memory + 64 * i, segment, peer.base + 64 * i, 64);
        if (done / size % 2) {
            OK(te_batch_create(engine, size, &batch));
            OK(te_batch_submit(engine, batch, requests, sizeof requests[0], size, NULL));
            OK(te_batch_wait(engine, batch, -1, NULL));
            OK(te_batch_free(engine, batch));
        } else {
            OK(te_batch_transfer(engine, requests, sizeof requests[0], size, NULL, NULL, 0));
        }
    }
    return NULL;
}

static void live(size_t threads, size_t batch_size) {
    for (size_t i = 0; i < threads; i += AT_ONCE) {
        pthread_t living[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++) OK(pthread_create(&living[j], NULL, transfer_for_a_life, (void *)batch_size));
        for (int j = 0; j < AT_ONCE; j++) OK(pthread_join(living[j], NULL));
    }
}

static void a_million_transfers_of_short_lived_threads_leave_nothing_behind(void) {
    live(40, 1);
    live(40, 250);
    struct usage before = look();
    uint64_t completed = statistics_of(engine).tasks_completed;
    live(100, 1);
    live(200, 50);
    live(700, 250);
    EXPECT(1000 * LIFE, statistics_of(engine).tasks_completed - completed);
    expect_no_more(before, 2048);
    /* The connections are the same ones all the time. */
    EXPECT(4, statistics_of(engine).connections_opened);
    EXPECT(0, count_time_wait(find_data_port(peer.address)));
}

static void three_hundred_thousand_requests_fit_into_a_batch(void) {
    enum { COUNT = 300000 };
    te_transfer_request *requests = malloc(COUNT * sizeof *requests);
    te_transfer_result *results = malloc(COUNT * sizeof *results);
    CHECK(requests != NULL && results != NULL);
    fill(memory, sizeof memory, 3);
    memset(requests, 0, COUNT * sizeof *requests);
    memset(results, 0, COUNT * sizeof *results);
    struct usage before = look();
    size_t in_use = bytes_in_use();
    for (int round = 0; round < 3; round++) {
        te_batch batch;
        te_batch_status status;
        memset(&status, 0, sizeof status);
        status.struct_size = sizeof status;
        for (size_t i = 0; i < COUNT; i++)
            requests[i] = make_request(round == 2 ? TE_READ : TE_WRITE, memory + i % 1000 * 64, segment,
                                       peer.base + PEER_LARGE + i % 1000 * 64, 64);
        if (round == 0) {
            OK(te_batch_transfer(engine, requests, sizeof requests[0], COUNT, NULL, results, sizeof results[0]));
            for (size_t i = 0; i < COUNT; i++) CHECK(results[i].state == TE_STATE_COMPLETED && results[i].bytes == 64);
        } else {
            OK(te_batch_create(engine, COUNT, &batch));
            OK(te_batch_submit(engine, batch, requests, sizeof requests[0], COUNT, NULL));
            OK(te_batch_wait(engine, batch, 60000, &status));
            EXPECT(TE_STATE_COMPLETED, status.state);
            EXPECT(COUNT, status.finished);
            EXPECT(64ull * COUNT, status.bytes);
            OK(te_batch_free(engine, batch));
        }
        EXPECT(checksum(memory, 64000), strtoull(peer_ask(&peer, "sum %d 64000", PEER_LARGE), NULL, 10));
        /* Room for so many is not kept, once those who helped are done with it. */
        for (int i = 0; i < 1000 && bytes_in_use() > in_use + (1 << 20); i++) usleep(1000);
        if (bytes_in_use() > in_use + (1 << 20)) fprintf(stderr, "%zu bytes are kept\n", bytes_in_use() - in_use);
        CHECK(bytes_in_use() <= in_use + (1 << 20));
    }
    expect_no_more(before, 32 << 10);
    free(requests);
    free(results);
}

/* --- engines -------------------------------------------------------------------------------------------------------------------------- */

enum { ENGINES = 64 };

static void *create_one(void *place) {
    *(te_engine **)place = create_engine();
    return NULL;
}

/* All start together, transfer in a ring, and are gone without a trace. */
static void live_as_many(void) {
    te_engine *engines[ENGINES];
    pthread_t threads[ENGINES];
    char addresses[ENGINES][256];
    for (int i = 0; i < ENGINES; i++) OK(pthread_create(&threads[i], NULL, create_one, &engines[i]));
    for (int i = 0; i < ENGINES; i++) OK(pthread_join(threads[i], NULL));
    for (int i = 0; i < ENGINES; i++) {
        OK(te_engine_address(engines[i], addresses[i], sizeof addresses[i]));
        for (int j = 0; j < i; j++) CHECK(strcmp(addresses[i], addresses[j]) != 0);
        OK(te_register_local_memory(engines[i], memory + i * 4096, 4096, NULL));
    }
    for (int step = 1; step < ENGINES; step += 31) {
        for (int i = 0; i < ENGINES; i++) {
            te_segment next;
            int other = (i + step) % ENGINES;
            fill(memory + i * 4096, 4096, (uint64_t)(step * ENGINES + i));
            OK(te_open_segment(engines[i], addresses[other], &next));
            OK(transfer(engines[i], TE_WRITE, memory + i * 4096, next, (uintptr_t)(memory + other * 4096), 4096));
            CHECK(memcmp(memory + i * 4096, memory + other * 4096, 4096) == 0);
        }
    }
    for (int i = 0; i < ENGINES; i++) OK(te_engine_destroy(engines[i]));
}

static void sixty_four_engines_live_in_one_process(void) {
    live_as_many();
    struct usage before = look();
    for (int round = 0; round < 3; round++) {
        live_as_many();
        OK(transfer(engine, TE_READ, memory, segment, peer.base, 4096));
    }
    expect_no_more(before, 8192);
}

static void measure_an_idle_engine(void *unused) {
    (void)unused;
    int threads = count_entries("/proc/self/task");
    long before = resident_kilobytes();
    te_engine *idle = create_engine();
    usleep(50000);
    int started = count_entries("/proc/self/task") - threads;
    long grown = resident_kilobytes() - before;
    if (started > 8 || grown > 16 << 10) fprintf(stderr, "%d threads, %ld KiB\n", started, grown);
    CHECK(started <= 8 && grown <= 16 << 10);
    OK(te_engine_destroy(idle));
}

static void an_idle_engine_takes_at_most_8_threads_and_16_mib(void) { in_child(measure_an_idle_engine, NULL); }

/* --- regions --------------------------------------------------------------------------------------------------------------------------- */

/* Of the allocator's own count, once unasked for and once after a peer has asked what there is. */
static void a_region_takes_at_most_300_bytes_and_no_thread(void) {
    enum { COUNT = 65536, STEP = 8192 };
    te_engine *target = create_engine(), *initiator = create_engine();
    te_segment to;
    char address[256];
    size_t count;
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &to));
    unsigned char *pages = mmap(NULL, (size_t)COUNT * STEP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    te_buffer *buffers = malloc(COUNT * sizeof *buffers);
    void **addrs = malloc(COUNT * sizeof *addrs);
    CHECK(pages != MAP_FAILED && buffers != NULL && addrs != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        buffers[i].addr = addrs[i] = pages + i * STEP;
        buffers[i].length = STEP / 2;
    }
    int threads = count_entries("/proc/self/task");
    for (int at_once = 0; at_once < 2; at_once++) {
        size_t before = bytes_in_use();
        if (at_once) {
            OK(te_register_local_memory_batch(target, buffers, sizeof buffers[0], COUNT, NULL));
        } else {
            for (size_t i = 0; i < COUNT; i++) OK(te_register_local_memory(target, buffers[i].addr, buffers[i].length, NULL));
        }
        EXPECT(threads, count_entries("/proc/self/task"));
        size_t registered = bytes_in_use() - before;
        if (registered / COUNT > 300) fprintf(stderr, "%zu bytes a region\n", registered / COUNT);
        CHECK(registered / COUNT <= 300);
        int asker = connect_to(atoi(strrchr(address, ':') + 1));
        send_all(asker, "\3\0\0\0\0\0\0\0\1{}", 11);
        while (recv(asker, memory, sizeof memory, 0) > 0) continue;
        close(asker);
        size_t shown = bytes_in_use() - before;
        if (shown / COUNT > 300) fprintf(stderr, "%zu bytes a region when it is shown to peers\n", shown / COUNT);
        CHECK(shown / COUNT <= 300);
        OK(te_refresh_segment(initiator, to));
        OK(te_list_segment_memory(initiator, to, NULL, sizeof(te_memory_region), 0, &count));
        EXPECT(COUNT, count);
        if (at_once) {
            OK(te_unregister_local_memory_batch(target, addrs, COUNT));
        } else {
            for (size_t i = 0; i < COUNT; i++) OK(te_unregister_local_memory(target, addrs[i * 32749 % COUNT]));
        }
        OK(te_refresh_segment(initiator, to));
        size_t kept = bytes_in_use() - before;
        if (bytes_in_use() > before && kept > 1 << 20) fprintf(stderr, "%zu bytes are kept\n", kept);
        CHECK(bytes_in_use() <= before || kept <= 1 << 20);
    }
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    free(buffers);
    free(addrs);
    munmap(pages, (size_t)COUNT * STEP);
}

/* --- connections and messages ------------------------------------------------------------------------------------------------------------ */

static void idle_connections_on_both_ports_cost_little_and_delay_nobody(void) {
    enum { IDLE = 100 };
    int idle[2][IDLE];
    char address[256];
    te_segment to;
    te_engine *target = create_engine();
    OK(te_register_local_memory(target, memory, 4096, NULL));
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(engine, address, &to));
    OK(transfer(engine, TE_READ, memory + 8192, to, (uintptr_t)memory, 4096));
    struct usage before = look();
    int ports[2] = {atoi(strrchr(address, ':') + 1), find_data_port(address)};
    for (int i = 0; i < 2 * IDLE; i++) {
        idle[i % 2][i / 2] = connect_to(ports[i % 2]);
        if (i % 3 == 0) send_all(idle[i % 2][i / 2], "\x20\0\0\0", 4); /* a part of a header */
    }
    double longest = 0;
    for (int i = 0; i < 200; i++) {
        double start = now();
        if (i % 10 == 0) OK(te_refresh_segment(engine, to));
        OK(transfer(engine, i % 2 ? TE_READ : TE_WRITE, memory + 8192, to, (uintptr_t)memory, 4096));
        if (now() - start > longest) longest = now() - start;
    }
    CHECK(longest < 0.5);
    struct usage during = look();
    EXPECT(before.threads, during.threads);
    CHECK(during.kilobytes - before.kilobytes < 4096);
    for (int i = 0; i < 2 * IDLE; i++) close(idle[i % 2][i / 2]);
    expect_no_more(before, 4096);
    OK(te_engine_destroy(target));
}

static void messages_leave_nothing_behind(void) {
    char address[256];
    te_segment own;
    te_engine *target = create_engine();
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(engine, address, &own));
    size_t before = 0;
    for (int i = 0; i < 6000; i++) {
        te_notification *list = NULL;
        size_t count = 0;
        int size = 0;
        OK(te_notify(engine, own, "name", "a message of some length, for otherwise nobody would see that it stays"));
        if (i % 2) {
            OK(te_take_notifications(target, &list, &count));
            te_free_notifications(list, count);
        } else {
            notify_msg_t *old = getNotifsFromEngine((transfer_engine_t)target, &size);
            OK(freeNotifsMsgBuf(old, size));
        }
        EXPECT(1, count + (size_t)size);
        if (i == 1000) before = bytes_in_use();
    }
    CHECK(bytes_in_use() <= before + (64 << 10));
    OK(te_engine_destroy(target));
}

/* More than one connection can carry at once: now there are as many as there will be. */
static void open_all_connections(void) {
    enum { COUNT = 16 };
    te_transfer_request requests[COUNT];
    for (size_t i = 0; i < COUNT; i++) requests[i] = make_request(TE_READ, memory, segment, peer.base + PEER_LARGE, sizeof memory);
    for (int round = 0; round < 5; round++) OK(te_batch_transfer(engine, requests, sizeof requests[0], COUNT, NULL, NULL, 0));
    EXPECT(4, statistics_of(engine).connections_opened);
}

int main(void) {
    /* First, while the process is small. */
    an_idle_engine_takes_at_most_8_threads_and_16_mib();
    ask_the_silent();
    peer_start(&peer);
    engine = create_engine();
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_open_segment(engine, peer.address, &segment));
    open_all_connections();
    a_million_transfers_of_short_lived_threads_leave_nothing_behind();
    three_hundred_thousand_requests_fit_into_a_batch();
    a_region_takes_at_most_300_bytes_and_no_thread();
    idle_connections_on_both_ports_cost_little_and_delay_nobody();
    messages_leave_nothing_behind();
    sixty_four_engines_live_in_one_process();
    OK(te_engine_destroy(engine));
    a_transfer_without_limits_ends_after_30_seconds();
    peer_end(&peer);
    return 0;
}
