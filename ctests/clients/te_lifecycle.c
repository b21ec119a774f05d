/* te.h: engines come and go: nothing is left behind, waiters wake up, and odd environments harm nobody. */
#include <pthread.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

static void live_once(struct peer *peer) {
    static unsigned char memory[1 << 16];
    te_segment segment;
    te_batch batch;
    te_engine *engine = create_engine();
    te_transfer_request request;
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_open_segment(engine, peer->address, &segment));
    OK(transfer(engine, TE_WRITE, memory, segment, peer->base, sizeof memory));
    /* Left to te_engine_destroy: memory, a batch, and a transfer. */
    request = make_request(TE_READ, memory, segment, peer->base, sizeof memory);
    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    OK(te_engine_destroy(engine));
}

static void nothing_is_left_of_engines_that_were_destroyed(struct peer *peer) {
    live_once(peer);
    int files = count_entries("/proc/self/fd");
    int threads = count_entries("/proc/self/task");
    for (int i = 0; i < 20; i++) live_once(peer);
    expect_entries(files, "/proc/self/fd");
    expect_entries(threads, "/proc/self/task");
}

struct waiter {
    te_engine *engine;
    te_batch batch;
    te_status status;
};

static void *wait_for_batch(void *argument) {
    struct waiter *waiter = argument;
    waiter->status = te_batch_wait(waiter->engine, waiter->batch, -1, NULL);
    return NULL;
}

static void destroying_wakes_those_who_wait(struct peer *peer) {
    static unsigned char memory[4096];
    struct waiter waiter;
    te_segment segment;
    pthread_t thread;
    waiter.engine = create_engine();
    OK(te_open_segment(waiter.engine, peer->address, &segment));
    OK(transfer(waiter.engine, TE_READ, memory, segment, peer->base, sizeof memory));
    OK(te_batch_create(waiter.engine, 1, &waiter.batch));
    peer_stop(peer);
    te_transfer_request request = make_request(TE_READ, memory, segment, peer->base, sizeof memory);
    OK(te_batch_submit(waiter.engine, waiter.batch, &request, sizeof request, 1, NULL));
    OK(pthread_create(&thread, NULL, wait_for_batch, &waiter));
    usleep(100000);
    fill(memory, sizeof memory, 17);
    uint64_t before = checksum(memory, sizeof memory);
    OK(te_engine_destroy(waiter.engine));
    OK(pthread_join(thread, NULL));
    CHECK(waiter.status <= 0);
    peer_continue(peer);
    usleep(100000);
    EXPECT(before, checksum(memory, sizeof memory));
}

/* What cannot be understood is warned about and left at its default. */
static void a_garbled_environment_is_survived(struct peer *peer) {
    static const char *const names[] = {
        "MC_HANDSHAKE_PORT", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_HANDSHAKE_LISTEN_BACKLOG", "MC_HANDSHAKE_CONNECT_TIMEOUT",
        "MC_HANDSHAKE_MAX_LENGTH", "MC_SLICE_TIMEOUT", "MC_TCP_SLICE_SIZE", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_LANES_PER_PEER",
        "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "TE_TCP_IO_THREADS",
    };
    static const char *const values[] = {"", "abc", "1e99", "-1"};
    for (size_t value = 0; value < sizeof values / sizeof *values; value++) {
        for (size_t name = 0; name < sizeof names / sizeof *names; name++) setenv(names[name], values[value], 1);
        live_once(peer);
    }
    for (size_t name = 0; name < sizeof names / sizeof *names; name++) unsetenv(names[name]);
}

int main(void) {
    struct peer peer;
    peer_start(&peer);
    nothing_is_left_of_engines_that_were_destroyed(&peer);
    destroying_wakes_those_who_wait(&peer);
    a_garbled_environment_is_survived(&peer);
    peer_end(&peer);
    /* Ending without te_engine_destroy is clean, too. */
    create_engine();
    return 0;
}
