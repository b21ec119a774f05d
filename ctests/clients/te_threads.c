/* te.h: many threads on one engine at once. Each owns its part of the memory; none may see another's bytes or states. */
#include <pthread.h>

#include "engine.h"
#include "peer.h"

enum { THREADS = 32, ROUNDS = 10, PART = 64 << 10 };

static te_engine *engine;
static te_segment segment;
static struct peer peer;
static unsigned char memory[THREADS][PART];
static unsigned char contested[4096];
static int winners[ROUNDS];
static pthread_barrier_t barrier;

static void *work(void *argument) {
    size_t index = (size_t)argument;
    unsigned char *own = memory[index];
    uint64_t remote = peer.base + PEER_LARGE + index * PART;
    for (int round = 0; round < ROUNDS; round++) {
        /* One winner per round. */
        pthread_barrier_wait(&barrier);
        te_status status = te_register_local_memory(engine, contested, sizeof contested, NULL);
        CHECK(status == 0 || status == TE_ERR_ADDRESS_OVERLAPPED);
        if (status == 0) __atomic_add_fetch(&winners[round], 1, __ATOMIC_RELAXED);
        pthread_barrier_wait(&barrier);
        if (status == 0) OK(te_unregister_local_memory(engine, contested));

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

int main(void) {
    pthread_t threads[THREADS];
    peer_start(&peer);
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    OK(pthread_barrier_init(&barrier, NULL, THREADS));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_create(&threads[i], NULL, work, (void *)i));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_join(threads[i], NULL));
    for (int round = 0; round < ROUNDS; round++) EXPECT(1, winners[round]);
    OK(te_engine_destroy(engine));
    peer_end(&peer);
    return 0;
}
