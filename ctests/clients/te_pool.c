/* te.h: pools of staging buffers. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

enum { ARENA = 1 << 20, LARGEST = ARENA / 8 };

static te_engine *engine;
static struct peer peer;
static te_segment segment;

static te_pool_options make_pool_options(void) {
    te_pool_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.bytes = ARENA;
    return options;
}

static te_pool *create_pool(void) {
    te_pool_options options = make_pool_options();
    te_pool *pool = NULL;
    OK(te_pool_create(engine, &options, &pool));
    CHECK(pool != NULL);
    return pool;
}

static te_pool_lease make_lease(uint32_t direction) {
    te_pool_lease lease;
    memset(&lease, 0, sizeof lease);
    lease.struct_size = sizeof lease;
    lease.direction = direction;
    return lease;
}

static te_pool_lease acquire(te_pool *pool, uint32_t direction, uint64_t bytes) {
    te_pool_lease lease = make_lease(direction);
    OK(te_pool_acquire(pool, bytes, 0, &lease));
    EXPECT(bytes, lease.length);
    CHECK(lease.id != 0 && lease.addr != NULL);
    return lease;
}

static te_pool_statistics read_statistics(te_pool *pool) {
    te_pool_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_pool_stats(pool, &statistics));
    return statistics;
}

static void bytes_go_to_a_peer_and_back_through_leases(void) {
    te_pool *pool = create_pool();
    te_pool_lease put = acquire(pool, TE_POOL_PUT, LARGEST), get = acquire(pool, TE_POOL_GET, LARGEST);
    fill(put.addr, LARGEST, 17);
    OK(transfer(engine, TE_WRITE, put.addr, segment, peer.base + PEER_LARGE, LARGEST));
    OK(transfer(engine, TE_READ, get.addr, segment, peer.base + PEER_LARGE, LARGEST));
    CHECK(memcmp(put.addr, get.addr, LARGEST) == 0);
    EXPECT((long long)checksum(put.addr, LARGEST), (long long)strtoull(peer_ask(&peer, "sum %d %d", PEER_LARGE, LARGEST), NULL, 10));
    OK(te_pool_release(pool, put.id, TE_POOL_OVER, 0));
    OK(te_pool_release(pool, get.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

static void a_peer_cannot_reach_the_memory_of_a_pool(void) {
    te_engine *other = create_engine();
    te_pool *pool = create_pool();
    te_pool_lease lease = acquire(pool, TE_POOL_ANY, 4096);
    char address[256];
    unsigned char bytes[16];
    te_segment own;
    size_t count;
    OK(te_engine_address(engine, address, sizeof address));
    OK(te_open_segment(other, address, &own));
    OK(te_list_segment_memory(other, own, NULL, sizeof(te_memory_region), 0, &count));
    EXPECT(0, count);
    REFUSED(transfer(other, TE_READ, bytes, own, (uintptr_t)lease.addr, sizeof bytes));
    OK(te_engine_destroy(other));
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

static void bad_arguments_are_refused(void) {
    te_pool_options options = make_pool_options();
    te_pool *pool = NULL;
    options.alignment = 24;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, &options, &pool));
    options = make_pool_options();
    options.location = "cuda:0";
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, &options, &pool));
    options = make_pool_options();
    options.put_reserve = options.get_reserve = ARENA / 2;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, &options, &pool));
    options = make_pool_options();
    options.bytes = 1ULL << 60;
    options.alignment = 4096;
    REFUSED(te_pool_create(engine, &options, &pool));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, NULL, NULL));
    CHECK(pool == NULL);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_close(NULL, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close((te_pool *)engine, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close((te_pool *)&pool, 0));

    pool = create_pool();
    te_pool_lease lease = make_lease(7);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_acquire(pool, 1, 0, &lease));
    lease = make_lease(TE_POOL_PUT);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_acquire(pool, 0, 0, &lease));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_acquire(pool, LARGEST + 1, -1, &lease));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_acquire(pool, 1, 0, NULL));
    EXPECT(0, lease.id);
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_destroy((te_engine *)pool));
    lease = acquire(pool, TE_POOL_PUT, 1);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_release(pool, lease.id, 7, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, lease.id, TE_POOL_UNKNOWN, 4711));
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 4711));
    OK(te_pool_close(pool, 0));
}

static void a_lease_is_released_once_and_by_its_pool(void) {
    te_pool *pool = create_pool(), *other = create_pool();
    te_pool_lease first = acquire(pool, TE_POOL_PUT, 100), foreign = acquire(other, TE_POOL_PUT, 100);
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, foreign.id, TE_POOL_OVER, 0));
    OK(te_pool_release(pool, first.id, TE_POOL_OVER, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, first.id, TE_POOL_OVER, 0));
    te_pool_lease second = acquire(pool, TE_POOL_PUT, 100);
    CHECK(second.addr == first.addr && second.id != first.id);
    /* Stale, and not its successor's. */
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, first.id, TE_POOL_OVER, 0));
    EXPECT(1, read_statistics(pool).leases);
    OK(te_pool_release(pool, second.id, TE_POOL_OVER, 0));
    OK(te_pool_release(other, foreign.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
    OK(te_pool_close(other, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close(pool, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_acquire(pool, 1, 0, &first));
}

static void a_pool_that_is_used_up_says_so_and_leaves_gets_their_part(void) {
    te_pool *pool = create_pool();
    te_pool_lease puts[8], get = make_lease(TE_POOL_GET), more = make_lease(TE_POOL_PUT);
    int count = 0;
    for (; count < 8; count++) {
        puts[count] = make_lease(TE_POOL_PUT);
        if (te_pool_acquire(pool, LARGEST, 0, &puts[count]) != 0) break;
    }
    EXPECT(7, count);
    EXPECT(TE_ERR_TIMEOUT, te_pool_acquire(pool, LARGEST, 0, &more));
    EXPECT(TE_ERR_TIMEOUT, te_pool_acquire(pool, LARGEST, 5, &more));
    EXPECT(3, read_statistics(pool).refused);
    OK(te_pool_acquire(pool, LARGEST, 0, &get));
    OK(te_pool_release(pool, get.id, TE_POOL_OVER, 0));
    for (int i = 0; i < count; i++) OK(te_pool_release(pool, puts[i].id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

/* --- several threads ----------------------------------------------------------------------------------------------------------- */

enum { THREADS = 8, LEASES = 4, ROUNDS = 50 };
static te_pool *shared;

static void *use_leases(void *argument) {
    size_t number = (size_t)argument;
    te_pool_lease leases[LEASES];
    for (int round = 0; round < ROUNDS; round++) {
        /* Of all threads together less than there is, so that nobody waits for one who waits. */
        for (int i = 0; i < LEASES; i++) {
            leases[i] = make_lease((uint32_t)(number + (size_t)i) % 3);
            uint64_t bytes = 64 + (number * 131 + (size_t)round * 17 + (size_t)i) % 8192;
            OK(te_pool_acquire(shared, bytes, -1, &leases[i]));
            memset(leases[i].addr, (int)(number * LEASES) + i, bytes);
        }
        for (int i = 0; i < LEASES; i++) {
            const unsigned char *bytes = leases[i].addr;
            for (uint64_t at = 0; at < leases[i].length; at++) CHECK(bytes[at] == number * LEASES + (size_t)i);
            OK(te_pool_release(shared, leases[i].id, TE_POOL_OVER, 0));
        }
    }
    return NULL;
}

static void leases_of_8_threads_never_meet(void) {
    pthread_t threads[THREADS];
    shared = create_pool();
    for (size_t i = 0; i < THREADS; i++) OK(pthread_create(&threads[i], NULL, use_leases, (void *)i));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_join(threads[i], NULL));
    te_pool_statistics statistics = read_statistics(shared);
    EXPECT(THREADS * LEASES * ROUNDS, statistics.acquired);
    EXPECT(0, statistics.leased_bytes);
    OK(te_pool_close(shared, 0));
}

static void *acquire_one(void *direction) {
    te_pool_lease lease = make_lease(*(uint32_t *)direction);
    te_status status = te_pool_acquire(shared, LARGEST, -1, &lease);
    if (status == 0) OK(te_pool_release(shared, lease.id, TE_POOL_OVER, 0));
    return (void *)(intptr_t)status;
}

static void await_waiting(te_pool *pool, uint64_t count) {
    while (read_statistics(pool).waiting != count) usleep(1000);
}

static te_status join(pthread_t thread) {
    void *status;
    OK(pthread_join(thread, &status));
    return (te_status)(intptr_t)status;
}

static void who_waits_is_given_what_is_released(void) {
    te_pool_options options = make_pool_options();
    te_pool_lease held;
    pthread_t thread;
    uint32_t direction = TE_POOL_PUT;
    options.most_leases = 1;
    OK(te_pool_create(engine, &options, &shared));
    held = acquire(shared, TE_POOL_GET, 1);
    OK(pthread_create(&thread, NULL, acquire_one, &direction));
    await_waiting(shared, 1);
    OK(te_pool_release(shared, held.id, TE_POOL_OVER, 0));
    OK(join(thread));
    OK(te_pool_close(shared, 0));
}

/* --- quarantine, closing ------------------------------------------------------------------------------------------------------- */

static te_batch begin_read(te_pool_lease lease) {
    te_transfer_request request = make_request(TE_READ, lease.addr, segment, peer.base, lease.length);
    te_batch batch;
    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    return batch;
}

/* The peer is stopped, so its bytes may come at any time. */
static void a_lease_whose_batch_runs_is_not_lent_again(void) {
    te_pool *pool = create_pool();
    te_pool_lease lease = acquire(pool, TE_POOL_GET, LARGEST);
    void *quarantined = lease.addr;
    peer_stop(&peer);
    te_batch batch = begin_read(lease);
    EXPECT(TE_ERR_TIMEOUT, te_batch_wait(engine, batch, 1, NULL));
    OK(te_pool_release(pool, lease.id, TE_POOL_UNKNOWN, batch));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    EXPECT(1, read_statistics(pool).quarantined);
    te_pool_lease others[8];
    int count = 0;
    for (; count < 8; count++) {
        others[count] = make_lease(TE_POOL_GET);
        if (te_pool_acquire(pool, LARGEST, 0, &others[count]) != 0) break;
        CHECK(others[count].addr != quarantined);
    }
    EXPECT(6, count);
    for (int i = 0; i < count; i++) OK(te_pool_release(pool, others[i].id, TE_POOL_OVER, 0));
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 0));
    OK(te_batch_cancel(engine, batch));
    OK(te_batch_wait(engine, batch, -1, NULL));
    /* The end of the batch is what frees it, whoever sees that first. */
    OK(te_pool_close(pool, 60000));
    OK(te_batch_free(engine, batch));
    peer_continue(&peer);
}

static void a_lease_whose_batch_is_over_is_lent_again_at_once(void) {
    te_pool *pool = create_pool();
    te_pool_lease lease = acquire(pool, TE_POOL_GET, 4096);
    te_batch batch = begin_read(lease);
    OK(te_batch_wait(engine, batch, -1, NULL));
    OK(te_pool_release(pool, lease.id, TE_POOL_UNKNOWN, batch));
    EXPECT(0, read_statistics(pool).quarantined);
    EXPECT(0, read_statistics(pool).leases);
    OK(te_batch_free(engine, batch));
    lease = acquire(pool, TE_POOL_GET, 4096);
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(pool, lease.id, TE_POOL_UNKNOWN, batch));
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

static void closing_is_refused_while_a_lease_is_out_and_the_pool_stays(void) {
    te_pool *pool = create_pool();
    te_pool_lease lease = acquire(pool, TE_POOL_PUT, 100);
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 0));
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 5));
    te_pool_lease other = acquire(pool, TE_POOL_PUT, 100);
    OK(te_pool_release(pool, other.id, TE_POOL_OVER, 0));
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

static void *close_shared(void *unused) {
    (void)unused;
    return (void *)(intptr_t)te_pool_close(shared, -1);
}

static void closing_waits_for_the_last_lease(void) {
    pthread_t closing, waiting;
    uint32_t direction = TE_POOL_ANY;
    te_pool_options options = make_pool_options();
    te_pool_lease other = make_lease(TE_POOL_PUT);
    options.most_leases = 1;
    OK(te_pool_create(engine, &options, &shared));
    te_pool_lease lease = acquire(shared, TE_POOL_PUT, 100);
    OK(pthread_create(&waiting, NULL, acquire_one, &direction));
    await_waiting(shared, 1);
    OK(pthread_create(&closing, NULL, close_shared, NULL));
    EXPECT(TE_ERR_CANCELED, join(waiting));
    EXPECT(TE_ERR_CANCELED, te_pool_acquire(shared, 1, -1, &other));
    OK(te_pool_release(shared, lease.id, TE_POOL_OVER, 0));
    OK(join(closing));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close(shared, 0));
}

static void destroying_the_engine_ends_its_pools_and_whoever_waits_for_them(void) {
    te_engine *before = engine;
    pthread_t waiting;
    uint32_t direction = TE_POOL_PUT;
    te_pool_options options = make_pool_options();
    te_pool_lease lease;
    unsigned char present;
    engine = create_engine();
    options.most_leases = 1;
    OK(te_pool_create(engine, &options, &shared));
    lease = acquire(shared, TE_POOL_PUT, LARGEST);
    void *arena = read_statistics(shared).arena;
    OK(mincore(arena, 1, &present));
    OK(pthread_create(&waiting, NULL, acquire_one, &direction));
    await_waiting(shared, 1);
    OK(te_engine_destroy(engine));
    EXPECT(TE_ERR_INVALID_HANDLE, join(waiting));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_release(shared, lease.id, TE_POOL_OVER, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close(shared, -1));
    engine = before;
}

/* --- memory, processes --------------------------------------------------------------------------------------------------------- */

static void memory_of_the_caller_is_lent_and_left_to_it(void) {
    static unsigned char memory[ARENA] __attribute__((aligned(4096)));
    te_pool_options options = make_pool_options();
    te_pool *pool;
    uint64_t given_back = 4711;
    options.arena = memory;
    OK(te_pool_create(engine, &options, &pool));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 1, NULL));
    te_pool_lease lease = acquire(pool, TE_POOL_GET, LARGEST);
    CHECK((unsigned char *)lease.addr >= memory && (unsigned char *)lease.addr + LARGEST <= memory + ARENA);
    OK(te_pool_trim(pool, &given_back));
    EXPECT(0, given_back);
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
    memset(memory, 1, sizeof memory);
    options.arena = memory + 1;
    options.bytes = ARENA - 1;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, &options, &pool));
}

static void trimming_leaves_what_is_lent(void) {
    te_pool *pool = create_pool();
    te_pool_lease lease = acquire(pool, TE_POOL_PUT, LARGEST);
    uint64_t given_back;
    fill(lease.addr, LARGEST, 5);
    uint64_t sum = checksum(lease.addr, LARGEST);
    OK(te_pool_trim(pool, &given_back));
    CHECK(given_back > 0 && given_back <= ARENA - LARGEST);
    OK(te_pool_trim(pool, NULL));
    CHECK(checksum(lease.addr, LARGEST) == sum);
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));
    OK(te_pool_close(pool, 0));
}

static void use_the_parents_pool(void *pool) {
    uint64_t given_back;
    te_pool_lease lease = make_lease(TE_POOL_PUT);
    EXPECT(TE_ERR_FORKED, te_pool_acquire(pool, 1, -1, &lease));
    EXPECT(TE_ERR_FORKED, te_pool_release(pool, 1, TE_POOL_OVER, 0));
    EXPECT(TE_ERR_FORKED, te_pool_close(pool, -1));
    EXPECT(TE_ERR_FORKED, te_pool_trim(pool, &given_back));
    EXPECT(TE_ERR_FORKED, te_pool_create(engine, NULL, (te_pool **)&pool));
}

static void a_child_cannot_use_the_pool_of_its_parent(void) {
    te_pool *pool = create_pool();
    in_child(use_the_parents_pool, pool);
    OK(te_pool_close(pool, 0));
}

int main(void) {
    peer_start(&peer);
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    bytes_go_to_a_peer_and_back_through_leases();
    a_peer_cannot_reach_the_memory_of_a_pool();
    bad_arguments_are_refused();
    a_lease_is_released_once_and_by_its_pool();
    a_pool_that_is_used_up_says_so_and_leaves_gets_their_part();
    leases_of_8_threads_never_meet();
    who_waits_is_given_what_is_released();
    a_lease_whose_batch_runs_is_not_lent_again();
    a_lease_whose_batch_is_over_is_lent_again_at_once();
    closing_is_refused_while_a_lease_is_out_and_the_pool_stays();
    closing_waits_for_the_last_lease();
    destroying_the_engine_ends_its_pools_and_whoever_waits_for_them();
    memory_of_the_caller_is_lent_and_left_to_it();
    trimming_leaves_what_is_lent();
    a_child_cannot_use_the_pool_of_its_parent();
    OK(te_engine_destroy(engine));
    peer_end(&peer);
    return 0;
}
