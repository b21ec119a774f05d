/* te.h: unregistering memory on which transfers run. New work on it is refused at once; when the call has returned 0 not one byte of it
 * moves any more, whatever was on its way, and the memory can be unmapped.
 *
 * Both engines are in this process, and see each other as any peer: over TCP. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"

enum { LENGTH = 4 << 20, PIECES = 16, PIECE = LENGTH / PIECES, ROUNDS = 6 };

static te_engine *target, *initiator;
static te_segment segment;
/* What is unregistered, and the other side of its transfers. */
static unsigned char *memory, *other_side;

enum role { IS_WRITTEN_BY_PEERS, IS_READ_BY_PEERS, IS_WRITTEN_LOCALLY, IS_READ_LOCALLY, ROLES };

static int role, stop;
static long started, ended;

static unsigned char *map_memory(void *place) {
    int fixed = place == NULL ? 0 : MAP_FIXED;
    void *mapped = mmap(place, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    CHECK(mapped != MAP_FAILED && (place == NULL || mapped == place));
    return mapped;
}

/* As good as unmapped, except that nobody else, such as an allocator, maps something there meanwhile. */
static void take_memory_away(void) {
    CHECK(mmap(memory, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
}

static te_transfer_request make_piece(int what, size_t piece) {
    te_opcode opcode = what == IS_WRITTEN_BY_PEERS || what == IS_WRITTEN_LOCALLY ? TE_WRITE : TE_READ;
    te_segment where = what >= IS_WRITTEN_LOCALLY ? TE_LOCAL_SEGMENT : segment;
    return make_request(opcode, other_side + piece * PIECE, where, (uintptr_t)(memory + piece * PIECE), PIECE);
}

static te_engine *asker(int what) { return what >= IS_WRITTEN_LOCALLY ? target : initiator; }

static void *keep_asking(void *unused) {
    (void)unused;
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
        te_transfer_request requests[PIECES];
        te_transfer_result results[PIECES];
        memset(results, 0, sizeof results);
        for (size_t i = 0; i < PIECES; i++) requests[i] = make_piece(role, i);
        __atomic_add_fetch(&started, 1, __ATOMIC_RELAXED);
        te_status status = te_batch_transfer(asker(role), requests, sizeof requests[0], PIECES, NULL, results, sizeof results[0]);
        /* A peer whose connection was closed under it may say so. */
        if (status != 0)
            CHECK(status == TE_ERR_ADDRESS_NOT_REGISTERED || status == TE_ERR_CANCELED || status == TE_ERR_SOCKET || status == TE_ERR_FAULT);
        for (size_t i = 0; i < PIECES; i++) CHECK(results[i].bytes == 0 || results[i].bytes == PIECE);
        if (status == 0) __atomic_add_fetch(&ended, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* As the range that peers, or its own engine, read and write without pause. */
static void nothing_moves_after_unregistering_a_target(void) {
    for (role = 0; role < ROLES; role++) {
        pthread_t threads[2];
        __atomic_store_n(&stop, 0, __ATOMIC_RELEASE);
        OK(te_register_local_memory(target, memory, LENGTH, NULL));
        for (int i = 0; i < 2; i++) OK(pthread_create(&threads[i], NULL, keep_asking, NULL));
        for (int round = 0; round < ROUNDS; round++) {
            /* Somewhere in the middle of something. */
            long before = __atomic_load_n(&ended, __ATOMIC_RELAXED);
            while (__atomic_load_n(&ended, __ATOMIC_RELAXED) < before + 2) usleep(50);
            usleep((unsigned)(round * 300));
            OK(te_unregister_local_memory(target, memory));
            te_transfer_request request = make_piece(role, 3);
            REFUSED(te_batch_transfer(asker(role), &request, sizeof request, 1, NULL, NULL, 0));
            fill(memory, LENGTH, (uint64_t)round);
            uint64_t content = checksum(memory, LENGTH);
            usleep(10000);
            EXPECT(content, checksum(memory, LENGTH));
            take_memory_away();
            usleep(1000);
            map_memory(memory);
            OK(te_register_local_memory(target, memory, LENGTH, NULL));
        }
        __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
        for (int i = 0; i < 2; i++) OK(pthread_join(threads[i], NULL));
        OK(te_unregister_local_memory(target, memory));
    }
}

/* As the local range of transfers that are under way: bytes that are put there afterwards do not leave, and none arrives. */
static void nothing_moves_after_unregistering_a_local_range(void) {
    enum { OLD = 0x11, SENT = 0x22, LATER = 0xee };
    OK(te_register_local_memory(target, other_side, LENGTH, NULL));
    for (int round = 0; round < 4 * ROUNDS; round++) {
        te_opcode opcode = round % 2 ? TE_READ : TE_WRITE;
        te_transfer_request requests[PIECES];
        te_batch batch;
        memset(memory, SENT, LENGTH);
        memset(other_side, OLD, LENGTH);
        OK(te_register_local_memory(initiator, memory, LENGTH, NULL));
        for (size_t i = 0; i < PIECES; i++)
            requests[i] = make_request(opcode, memory + i * PIECE, segment, (uintptr_t)(other_side + i * PIECE), PIECE);
        OK(te_batch_create(initiator, PIECES, &batch));
        OK(te_batch_submit(initiator, batch, requests, sizeof requests[0], PIECES, NULL));
        usleep((unsigned)(round * 40));
        OK(te_unregister_local_memory(initiator, memory));
        memset(memory, LATER, LENGTH);
        OK(te_batch_wait(initiator, batch, 20000, NULL));
        usleep(5000);
        CHECK(memory[0] == LATER && memcmp(memory, memory + 1, LENGTH - 1) == 0);
        take_memory_away();
        usleep(1000);
        CHECK(memchr(other_side, LATER, LENGTH) == NULL);
        map_memory(memory);
        OK(te_batch_free(initiator, batch));
    }
    OK(te_unregister_local_memory(target, other_side));
}

/* What runs on it is ended, and says so; what is beside it goes on. */
static void transfers_beside_it_go_on(void) {
    enum { COUNT = 64 };
    te_transfer_request requests[2 * COUNT];
    te_transfer_result results[2 * COUNT];
    te_batch batch;
    for (int round = 0; round < ROUNDS; round++) {
        OK(te_register_local_memory(target, memory, LENGTH / 2, NULL));
        OK(te_register_local_memory(target, memory + LENGTH / 2, LENGTH / 2, NULL));
        fill(other_side, LENGTH, 50 + (uint64_t)round);
        for (size_t i = 0; i < 2 * COUNT; i++)
            requests[i] = make_request(TE_WRITE, other_side + i * (LENGTH / 2 / COUNT), segment, (uintptr_t)(memory + i * (LENGTH / 2 / COUNT)),
                                       LENGTH / 2 / COUNT);
        OK(te_batch_create(initiator, 2 * COUNT, &batch));
        OK(te_batch_submit(initiator, batch, requests, sizeof requests[0], 2 * COUNT, NULL));
        usleep((unsigned)(round * 200));
        OK(te_unregister_local_memory(target, memory));
        OK(te_batch_wait(initiator, batch, 20000, NULL));
        memset(results, 0, sizeof results);
        for (size_t i = 0; i < 2 * COUNT; i++) {
            results[i].struct_size = sizeof results[i];
            OK(te_batch_task_status(initiator, batch, i, &results[i]));
            if (i >= COUNT) EXPECT(TE_STATE_COMPLETED, results[i].state);
            if (results[i].state != TE_STATE_COMPLETED) CHECK(results[i].error < 0);
        }
        CHECK(memcmp(memory + LENGTH / 2, other_side + LENGTH / 2, LENGTH / 2) == 0);
        OK(te_batch_free(initiator, batch));
        OK(te_unregister_local_memory(target, memory + LENGTH / 2));
    }
}

int main(void) {
    char address[256];
    memory = map_memory(NULL);
    other_side = map_memory(NULL);
    target = create_engine();
    initiator = create_engine();
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &segment));
    nothing_moves_after_unregistering_a_target();
    nothing_moves_after_unregistering_a_local_range();
    transfers_beside_it_go_on();
    CHECK(started > ended);
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    return 0;
}
