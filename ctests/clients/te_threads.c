/* te.h: many threads on one engine at once. */
#include <pthread.h>

#include "engine.h"
#include "peer.h"

enum { THREADS = 32, ROUNDS = 10, PART = 64 << 10 };

static te_engine *engine;
static te_segment segment;
static struct peer peer;
static unsigned char memory[THREADS][PART];
static unsigned char contested[8192];
static pthread_barrier_t barrier;

static void run_threads(void *(*body)(void *)) {
    pthread_t threads[THREADS];
    OK(pthread_barrier_init(&barrier, NULL, THREADS));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_create(&threads[i], NULL, body, (void *)i));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_join(threads[i], NULL));
    OK(pthread_barrier_destroy(&barrier));
}

static size_t count_regions(void) {
    size_t count;
    OK(te_list_local_memory(engine, NULL, sizeof(te_memory_region), 0, &count));
    return count;
}

/* --- the same range ------------------------------------------------------------------------------------------------------------ */

enum { CONTESTS = 100 };
static int winners[CONTESTS], unregistered[CONTESTS];

/* The same range in even rounds; in odd ones each thread has a range of its own, and all have one byte in common. */
static void *contend(void *argument) {
    size_t index = (size_t)argument;
    for (int round = 0; round < CONTESTS; round++) {
        unsigned char *start = contested + (round % 2 ? index : 0);
        size_t length = round % 2 ? 4096 - 2 * index : 4096;
        pthread_barrier_wait(&barrier);
        te_status status = te_register_local_memory(engine, start, length, NULL);
        CHECK(status == 0 || status == TE_ERR_ADDRESS_OVERLAPPED);
        if (status == 0) {
            __atomic_add_fetch(&winners[round], 1, __ATOMIC_RELAXED);
            EXPECT(1, count_regions());
        }
        pthread_barrier_wait(&barrier);
        /* All in even rounds: one succeeds, and the others learn that it is gone or going. */
        if (round % 2 ? status == 0 : 1) {
            status = te_unregister_local_memory(engine, start);
            CHECK(status == 0 || status == TE_ERR_ADDRESS_NOT_REGISTERED || status == TE_ERR_BATCH_BUSY);
            if (status == 0) __atomic_add_fetch(&unregistered[round], 1, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

static void of_32_threads_that_register_a_range_one_wins_each_round(void) {
    run_threads(contend);
    for (int round = 0; round < CONTESTS; round++) {
        EXPECT(1, winners[round]);
        EXPECT(1, unregistered[round]);
    }
    EXPECT(0, count_regions());
}

/* --- all at once ----------------------------------------------------------------------------------------------------------------- */

static long balance;

/* A range that was given up is free or registered by somebody else, a transfer that uses it completes or is told why not. */
static void *mix(void *argument) {
    uint64_t state = (uint64_t)(size_t)argument * 0x9E3779B97F4A7C15u + 1;
    for (int i = 0; i < 200; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        int opcode = state >> 20 & 1 ? TE_READ : TE_WRITE;
        te_status status;
        switch (state >> 32 & 3) {
        case 0:
            status = te_register_local_memory(engine, contested, 4096, NULL);
            CHECK(status == 0 || status == TE_ERR_ADDRESS_OVERLAPPED);
            if (status == 0) __atomic_add_fetch(&balance, 1, __ATOMIC_RELAXED);
            break;
        case 1:
            status = te_unregister_local_memory(engine, contested);
            CHECK(status == 0 || status == TE_ERR_ADDRESS_NOT_REGISTERED || status == TE_ERR_BATCH_BUSY);
            if (status == 0) __atomic_add_fetch(&balance, -1, __ATOMIC_RELAXED);
            break;
        case 2:
            status = transfer(engine, (te_opcode)opcode, contested, segment, peer.base, 4096);
            CHECK(status == 0 || status == TE_ERR_ADDRESS_NOT_REGISTERED || status == TE_ERR_CANCELED);
            break;
        default:
            status = transfer(engine, (te_opcode)opcode, contested + 4096, TE_LOCAL_SEGMENT, (uintptr_t)contested, 4096);
            CHECK(status == 0 || status == TE_ERR_ADDRESS_NOT_REGISTERED || status == TE_ERR_CANCELED);
            break;
        }
    }
    return NULL;
}

static void registering_unregistering_and_submitting_may_be_mixed(void) {
    run_threads(mix);
    CHECK(balance == 0 || balance == 1);
    EXPECT(balance, count_regions());
    EXPECT(balance ? 0 : TE_ERR_ADDRESS_NOT_REGISTERED, te_unregister_local_memory(engine, contested));
    OK(te_register_local_memory(engine, contested, 4096, NULL));
    OK(transfer(engine, TE_WRITE, contested, segment, peer.base, 4096));
    OK(te_unregister_local_memory(engine, contested));
}

/* --- each its own ---------------------------------------------------------------------------------------------------------------- */

static void *move_own_part(void *argument) {
    size_t index = (size_t)argument;
    unsigned char *own = memory[index];
    uint64_t remote = peer.base + PEER_LARGE + index * PART;
    for (int round = 0; round < ROUNDS; round++) {
        OK(te_register_local_memory(engine, own, PART, NULL));
        fill(own, PART, index * ROUNDS + round);
        uint64_t expected = checksum(own, PART);
        OK(transfer(engine, TE_WRITE, own, segment, remote, PART));
        memset(own, 0, PART);
        te_batch batch;
        te_batch_status state;
        te_transfer_request request = make_request(TE_READ, own, segment, remote, PART);
        memset(&state, 0, sizeof state);
        state.struct_size = sizeof state;
        OK(te_batch_create(engine, 1, &batch));
        OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
        OK(te_batch_wait(engine, batch, -1, &state));
        EXPECT(TE_STATE_COMPLETED, state.state);
        OK(te_batch_free(engine, batch));
        EXPECT(expected, checksum(own, PART));
        OK(te_unregister_local_memory(engine, own));
    }
    return NULL;
}

static void no_thread_sees_the_bytes_or_states_of_another(void) { run_threads(move_own_part); }

int main(void) {
    peer_start(&peer);
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    of_32_threads_that_register_a_range_one_wins_each_round();
    registering_unregistering_and_submitting_may_be_mixed();
    no_thread_sees_the_bytes_or_states_of_another();
    OK(te_engine_destroy(engine));
    peer_end(&peer);
    return 0;
}
