/* te.h: puts and gets through a pool. */
#include <pthread.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

enum { ARENA = 1 << 20, LARGEST = ARENA / 8, MANY = 200 };

static te_engine *engine;
static struct peer peer;
static te_segment segment;

static te_pool *create_pool(uint32_t fallback) {
    te_pool_options options;
    te_pool *pool = NULL;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.bytes = ARENA;
    options.fallback = fallback;
    OK(te_pool_create(engine, &options, &pool));
    return pool;
}

static te_pool_item make_item(void *local, uint64_t offset, uint64_t length) {
    te_pool_item item = {local, length, segment, peer.base + offset};
    return item;
}

static te_pool_transfer_options make_options(uint32_t path) {
    te_pool_transfer_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.path = path;
    return options;
}

/* One item, through a lease. */
static te_status put(te_pool *pool, void *local, uint64_t offset, uint64_t length) {
    te_pool_item item = make_item(local, offset, length);
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    return te_put(engine, pool, &item, sizeof item, 1, &options, NULL, 0);
}

static te_status get(te_pool *pool, void *local, uint64_t offset, uint64_t length) {
    te_pool_item item = make_item(local, offset, length);
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    return te_get(engine, pool, &item, sizeof item, 1, &options, NULL, 0);
}

static te_pool_statistics read_statistics(te_pool *pool) {
    te_pool_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_pool_stats(pool, &statistics));
    return statistics;
}

static te_pool_lease make_lease(uint32_t direction) {
    te_pool_lease lease;
    memset(&lease, 0, sizeof lease);
    lease.struct_size = sizeof lease;
    lease.direction = direction;
    return lease;
}

/* All that puts can have; how many leases that are. */
static int take_all(te_pool *pool, te_pool_lease *leases) {
    int count = 0;
    for (;; count++) {
        leases[count] = make_lease(TE_POOL_PUT);
        if (te_pool_acquire(pool, LARGEST, 0, &leases[count]) != 0) return count;
    }
}

static void give_back(te_pool *pool, const te_pool_lease *leases, int count) {
    for (int i = 0; i < count; i++) OK(te_pool_release(pool, leases[i].id, TE_POOL_OVER, 0));
}

/* --- what arrives -------------------------------------------------------------------------------------------------------------- */

static void items_arrive_and_come_back_by_every_path(void) {
    static const uint32_t paths[] = {TE_POOL_AUTO, TE_POOL_STAGED, TE_POOL_DIRECT};
    enum { TOTAL = 2 << 20 };
    unsigned char *source = malloc(TOTAL), *target = malloc(TOTAL);
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    te_pool_item puts[MANY], gets[MANY];
    te_transfer_result results[MANY];
    for (size_t path = 0; path < sizeof paths / sizeof *paths; path++) {
        te_pool_transfer_options options = make_options(paths[path]);
        uint64_t at = 0;
        int count = 0;
        fill(source, TOTAL, path + 1);
        memset(target, 0, TOTAL);
        /* From nothing to more than a lease. */
        for (; count < MANY; count++) {
            uint64_t length = (uint64_t)count * count * 7 % 20000;
            if (count == 70) length = LARGEST + 1;
            if (at + length > TOTAL) break;
            puts[count] = make_item(source + at, PEER_LARGE + at, length);
            gets[count] = make_item(target + at, PEER_LARGE + at, length);
            at += length;
        }
        CHECK(count > 80);
        memset(results, 0x55, sizeof results);
        OK(te_put(engine, pool, puts, sizeof *puts, (size_t)count, &options, results, sizeof *results));
        for (int i = 0; i < count; i++) {
            EXPECT(TE_STATE_COMPLETED, results[i].state);
            EXPECT(0, results[i].error);
            EXPECT(puts[i].length, results[i].bytes);
        }
        EXPECT((long long)checksum(source, at), (long long)strtoull(peer_ask(&peer, "sum %d %d", PEER_LARGE, (int)at), NULL, 10));
        OK(te_get(engine, pool, gets, sizeof *gets, (size_t)count, &options, NULL, 0));
        CHECK(memcmp(source, target, at) == 0);
    }
    te_pool_statistics statistics = read_statistics(pool);
    EXPECT(3, statistics.puts);
    EXPECT(3, statistics.gets);
    EXPECT(0, statistics.leases);
    CHECK(statistics.items_staged > 0 && statistics.items_direct > 0);
    OK(te_pool_close(pool, 0));
    free(source);
    free(target);
}

static void a_warm_put_registers_nothing(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    te_statistics before, after;
    unsigned char bytes[4096] = {0};
    memset(&before, 0, sizeof before);
    before.struct_size = sizeof before;
    after = before;
    OK(put(pool, bytes, PEER_LARGE, sizeof bytes));
    OK(te_get_statistics(engine, &before));
    for (int i = 0; i < 100; i++) OK(put(pool, bytes, PEER_LARGE, sizeof bytes));
    OK(te_get_statistics(engine, &after));
    EXPECT(before.regions_registered, after.regions_registered);
    EXPECT(101, read_statistics(pool).items_staged);
    OK(te_pool_close(pool, 0));
}

/* The caller's bytes are its own again when the call returns, and what arrives is what was there before it. */
static void a_lease_is_filled_before_it_is_transferred(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    static unsigned char bytes[LARGEST];
    for (int round = 0; round < 20; round++) {
        fill(bytes, sizeof bytes, (uint64_t)round);
        uint64_t sum = checksum(bytes, sizeof bytes);
        OK(put(pool, bytes, PEER_LARGE, sizeof bytes));
        memset(bytes, 0xee, sizeof bytes);
        EXPECT((long long)sum, (long long)strtoull(peer_ask(&peer, "sum %d %d", PEER_LARGE, LARGEST), NULL, 10));
    }
    OK(te_pool_close(pool, 0));
}

static void of_items_with_the_same_target_the_last_one_wins(void) {
    static unsigned char bytes[64][4096], expected[4096 + 64 * 32], got[sizeof expected];
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    te_pool_item items[64];
    for (uint32_t path = TE_POOL_AUTO; path <= TE_POOL_DIRECT; path++) {
        te_pool_transfer_options options = make_options(path);
        for (int i = 0; i < 64; i++) {
            memset(bytes[i], i + (int)path * 64, sizeof bytes[i]);
            items[i] = make_item(bytes[i], PEER_LARGE + (uint64_t)i * 32, sizeof bytes[i]);
            memcpy(expected + (size_t)i * 32, bytes[i], sizeof bytes[i]);
        }
        OK(te_put(engine, pool, items, sizeof *items, 64, &options, NULL, 0));
        OK(get(pool, got, PEER_LARGE, sizeof got));
        CHECK(memcmp(got, expected, sizeof expected - 32) == 0);
    }
    OK(te_pool_close(pool, 0));
}

/* --- no room ------------------------------------------------------------------------------------------------------------------- */

static void *put_some(void *pool) {
    static unsigned char bytes[1000];
    return (void *)(intptr_t)put(pool, bytes, PEER_LARGE, sizeof bytes);
}

static te_status join(pthread_t thread) {
    void *status;
    OK(pthread_join(thread, &status));
    return (te_status)(intptr_t)status;
}

static void a_pool_that_is_used_up_falls_back_as_it_was_told(void) {
    te_pool_lease leases[16];
    unsigned char bytes[1000] = {0};
    pthread_t thread;

    te_pool *pool = create_pool(TE_POOL_REGISTER);
    int count = take_all(pool, leases);
    OK(put(pool, bytes, PEER_LARGE, LARGEST / 1000));
    EXPECT(1, read_statistics(pool).fallbacks);
    EXPECT(1, read_statistics(pool).items_direct);
    /* Gets have their own part. */
    OK(get(pool, bytes, PEER_LARGE, sizeof bytes));
    EXPECT(1, read_statistics(pool).items_staged);
    give_back(pool, leases, count);
    OK(te_pool_close(pool, 0));

    pool = create_pool(TE_POOL_FAIL);
    count = take_all(pool, leases);
    EXPECT(TE_ERR_TIMEOUT, put(pool, bytes, PEER_LARGE, sizeof bytes));
    CHECK(strstr(te_last_error(), "no room for a lease of 1000 bytes") != NULL);
    EXPECT(0, read_statistics(pool).fallbacks);
    give_back(pool, leases, count);
    OK(te_pool_close(pool, 0));

    pool = create_pool(TE_POOL_WAIT);
    count = take_all(pool, leases);
    te_pool_item item = make_item(bytes, PEER_LARGE, sizeof bytes);
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    options.timeout_ms = 20;
    EXPECT(TE_ERR_TIMEOUT, te_put(engine, pool, &item, sizeof item, 1, &options, NULL, 0));
    OK(pthread_create(&thread, NULL, put_some, pool));
    while (read_statistics(pool).waiting != 1) usleep(1000);
    give_back(pool, leases, count);
    OK(join(thread));
    EXPECT(1, read_statistics(pool).items_staged);
    OK(te_pool_close(pool, 0));
}

/* --- failures ------------------------------------------------------------------------------------------------------------------ */

static void only_what_fails_is_tried_again(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    static unsigned char bytes[8][1000];
    te_pool_item items[8];
    te_transfer_result results[8];
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    options.retries = 3;
    options.retry_pause_ms = 1;
    for (int i = 0; i < 8; i++) {
        fill(bytes[i], sizeof bytes[i], (uint64_t)i + 50);
        items[i] = make_item(bytes[i], PEER_LARGE + (uint64_t)i * 1000, 1000);
    }
    items[5].remote_addr = peer.base + PEER_PRIVATE;
    te_status status = te_put(engine, pool, items, sizeof *items, 8, &options, results, sizeof *results);
    CHECK(status < 0);
    for (int i = 0; i < 8; i++) {
        EXPECT(i == 5 ? status : 0, results[i].error);
        EXPECT(i == 5 ? TE_STATE_FAILED : TE_STATE_COMPLETED, results[i].state);
        if (i == 5) continue;
        EXPECT((long long)checksum(bytes[i], 1000),
               (long long)strtoull(peer_ask(&peer, "sum %d %d", PEER_LARGE + i * 1000, 1000), NULL, 10));
    }
    te_pool_statistics statistics = read_statistics(pool);
    EXPECT(3, statistics.retried);
    EXPECT(1, statistics.acquired);
    EXPECT(0, statistics.leases);
    OK(te_pool_close(pool, 0));
}

/* The peer is stopped, so its bytes may come at any time. */
static void a_lease_is_not_lent_while_bytes_may_land_in_it(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    static unsigned char bytes[LARGEST];
    te_pool_item item = make_item(bytes, PEER_LARGE, sizeof bytes);
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    options.timeout_ms = 50;
    options.retries = 1000;
    memset(bytes, 7, sizeof bytes);
    peer_stop(&peer);
    EXPECT(TE_ERR_TIMEOUT, te_get(engine, pool, &item, sizeof item, 1, &options, NULL, 0));
    EXPECT(0, read_statistics(pool).retried);
    peer_continue(&peer);
    /* What is not free yet is so without anybody's doing. */
    OK(te_pool_close(pool, 60000));
    for (size_t i = 0; i < sizeof bytes; i++) CHECK(bytes[i] == 7);
}

static void closing_is_busy_while_a_put_is_inside(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    pthread_t thread;
    peer_stop(&peer);
    OK(pthread_create(&thread, NULL, put_some, pool));
    while (read_statistics(pool).items_staged == 0) usleep(1000);
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 0));
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 5));
    peer_continue(&peer);
    OK(join(thread));
    OK(put(pool, &thread, PEER_LARGE, sizeof thread));
    OK(te_pool_close(pool, 0));
}

static void *put_much(void *pool) {
    enum { MUCH = 24 << 20 };
    unsigned char *bytes = calloc(1, MUCH);
    enum { ITEMS = MUCH / LARGEST };
    te_pool_item items[ITEMS];
    te_transfer_result results[ITEMS];
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    options.retries = 1;
    for (int i = 0; i < ITEMS; i++) items[i] = make_item(bytes + (size_t)i * LARGEST, PEER_LARGE + (uint64_t)i * LARGEST, LARGEST);
    te_status status = te_put(engine, pool, items, sizeof *items, ITEMS, &options, results, sizeof *results);
    /* As many results as items, and none that is not over. */
    int failed = 0;
    for (int i = 0; i < ITEMS; i++) {
        CHECK(results[i].state == TE_STATE_COMPLETED || results[i].state == TE_STATE_FAILED);
        failed += results[i].state == TE_STATE_FAILED;
    }
    CHECK(failed > 0 && status < 0);
    free(bytes);
    return NULL;
}

static void a_peer_that_dies_inside_a_put_fails_it_and_nothing_else(void) {
    te_pool *pool = create_pool(TE_POOL_WAIT);
    struct peer other;
    te_segment living = segment, dying;
    uint64_t base = peer.base;
    pthread_t thread;
    unsigned char bytes[1000] = {0};
    peer_start(&other);
    OK(te_open_segment(engine, other.address, &dying));
    segment = dying;
    peer.base = other.base;
    /* It has begun, and cannot end. */
    peer_stop(&other);
    OK(pthread_create(&thread, NULL, put_much, pool));
    while (read_statistics(pool).items_staged == 0) usleep(1000);
    peer_kill(&other);
    OK(pthread_join(thread, NULL));
    segment = living;
    peer.base = base;
    EXPECT(0, read_statistics(pool).leases);
    OK(put(pool, bytes, PEER_LARGE, sizeof bytes));
    OK(te_pool_close(pool, 0));
}

static void *put_more(void *pool) {
    static unsigned char bytes[LARGEST];
    /* Where nobody else writes: these bytes may arrive after the call has ended. */
    return (void *)(intptr_t)put(pool, bytes, PEER_LARGE + (16 << 20), sizeof bytes);
}

static void destroying_the_engine_ends_a_put(void) {
    te_engine *before = engine;
    te_segment same = segment;
    pthread_t thread;
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    te_pool *pool = create_pool(TE_POOL_WAIT);
    peer_stop(&peer);
    OK(pthread_create(&thread, NULL, put_more, pool));
    while (read_statistics(pool).items_staged == 0) usleep(1000);
    OK(te_engine_destroy(engine));
    /* All of it may have been on its way already. */
    te_status status = join(thread);
    CHECK(status == TE_ERR_CANCELED || status == 0);
    peer_continue(&peer);
    EXPECT(TE_ERR_INVALID_HANDLE, te_pool_close(pool, 0));
    engine = before;
    segment = same;
}

/* --- leases of what was got ---------------------------------------------------------------------------------------------------- */

static void what_is_got_into_a_lease_is_handed_out(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    static unsigned char bytes[10000];
    te_pool_item items[3] = {make_item(NULL, PEER_LARGE + 5000, 700), make_item(NULL, PEER_LARGE, 0), make_item(NULL, PEER_LARGE + 1, 3000)};
    te_pool_lease lease = make_lease(TE_POOL_ANY);
    te_transfer_result results[3];
    fill(bytes, sizeof bytes, 99);
    OK(put(pool, bytes, PEER_LARGE, sizeof bytes));
    OK(te_get_leased(engine, pool, items, sizeof *items, 3, NULL, &lease, results, sizeof *results));
    EXPECT(3700, lease.length);
    EXPECT(TE_POOL_GET, lease.direction);
    EXPECT(3000, results[2].bytes);
    CHECK(memcmp(lease.addr, bytes + 5000, 700) == 0 && memcmp((char *)lease.addr + 700, bytes + 1, 3000) == 0);
    EXPECT(1, read_statistics(pool).leases);
    EXPECT(TE_ERR_BATCH_BUSY, te_pool_close(pool, 0));
    OK(te_pool_release(pool, lease.id, TE_POOL_OVER, 0));

    lease = make_lease(TE_POOL_ANY);
    items[1] = make_item(NULL, PEER_PRIVATE, 10);
    CHECK(te_get_leased(engine, pool, items, sizeof *items, 3, NULL, &lease, results, sizeof *results) < 0);
    EXPECT(0, lease.id);
    EXPECT(TE_STATE_FAILED, results[1].state);
    EXPECT(TE_STATE_COMPLETED, results[2].state);
    EXPECT(0, read_statistics(pool).leases);

    items[1] = make_item(NULL, PEER_LARGE, LARGEST);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_get_leased(engine, pool, items, sizeof *items, 3, NULL, &lease, NULL, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_get_leased(engine, pool, NULL, sizeof *items, 0, NULL, &lease, NULL, 0));
    items[1] = make_item(bytes, PEER_LARGE, 10);
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_get_leased(engine, pool, items, sizeof *items, 3, NULL, &lease, NULL, 0));
    OK(te_pool_close(pool, 0));
}

/* --- several threads ----------------------------------------------------------------------------------------------------------- */

enum { THREADS = 8, LEASES = 4, ROUNDS = 20 };
static te_pool *shared;

static void *put_and_get(void *argument) {
    size_t number = (size_t)argument;
    enum { LENGTH = 3000 };
    unsigned char source[LEASES][LENGTH], target[LEASES][LENGTH];
    uint64_t place = PEER_LARGE + number * LEASES * LENGTH;
    te_pool_item puts[LEASES], gets[LEASES], leased[LEASES];
    te_pool_transfer_options options = make_options(TE_POOL_STAGED);
    for (int i = 0; i < LEASES; i++) {
        puts[i] = make_item(source[i], place + (uint64_t)i * LENGTH, LENGTH);
        gets[i] = make_item(target[i], place + (uint64_t)i * LENGTH, LENGTH);
        leased[i] = make_item(NULL, place + (uint64_t)i * LENGTH, LENGTH);
    }
    for (int round = 0; round < ROUNDS; round++) {
        te_pool_lease leases[LEASES];
        for (int i = 0; i < LEASES; i++) fill(source[i], LENGTH, number * 1000 + (size_t)(round * LEASES + i));
        OK(te_put(engine, shared, puts, sizeof *puts, LEASES, &options, NULL, 0));
        OK(te_get(engine, shared, gets, sizeof *gets, LEASES, &options, NULL, 0));
        CHECK(memcmp(source, target, sizeof source) == 0);
        for (int i = 0; i < LEASES; i++) {
            leases[i] = make_lease(TE_POOL_GET);
            OK(te_get_leased(engine, shared, &leased[i], sizeof *leased, 1, NULL, &leases[i], NULL, 0));
        }
        for (int i = 0; i < LEASES; i++) {
            CHECK(memcmp(leases[i].addr, source[i], LENGTH) == 0);
            OK(te_pool_release(shared, leases[i].id, TE_POOL_OVER, 0));
        }
    }
    return NULL;
}

static void puts_and_gets_of_8_threads_with_4_leases_each_never_meet(void) {
    pthread_t threads[THREADS];
    shared = create_pool(TE_POOL_WAIT);
    for (size_t i = 0; i < THREADS; i++) OK(pthread_create(&threads[i], NULL, put_and_get, (void *)i));
    for (size_t i = 0; i < THREADS; i++) OK(pthread_join(threads[i], NULL));
    te_pool_statistics statistics = read_statistics(shared);
    EXPECT(THREADS * ROUNDS, statistics.puts);
    EXPECT(THREADS * ROUNDS * (1 + LEASES), statistics.gets);
    EXPECT(0, statistics.leases);
    EXPECT(0, statistics.registrations);
    OK(te_pool_close(shared, 0));
}

/* --- arguments ----------------------------------------------------------------------------------------------------------------- */

static void bad_arguments_are_refused_before_anything_begins(void) {
    te_engine *other = create_engine();
    te_pool *pool = create_pool(TE_POOL_REGISTER), *foreign;
    unsigned char bytes[100] = {1};
    te_pool_item item = make_item(bytes, PEER_LARGE, sizeof bytes), two[2] = {item, item};
    te_pool_transfer_options options = make_options(3);
    te_pool_options pool_options;
    te_transfer_result result;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.struct_size = sizeof pool_options;
    OK(te_pool_create(other, &pool_options, &foreign));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, foreign, &item, sizeof item, 1, NULL, NULL, 0));
    OK(te_pool_close(foreign, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_put(engine, foreign, &item, sizeof item, 1, NULL, NULL, 0));
    OK(te_engine_destroy(other));

    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, pool, &item, sizeof item, 1, &options, NULL, 0));
    options = make_options(TE_POOL_AUTO);
    options.reserved = 1;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_get(engine, pool, &item, sizeof item, 1, &options, NULL, 0));
    options = make_options(TE_POOL_AUTO);
    options.timeout_ms = -1;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_get(engine, pool, &item, sizeof item, 1, &options, NULL, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, pool, NULL, sizeof item, 1, NULL, NULL, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, pool, &item, sizeof item - 1, 1, NULL, NULL, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, pool, &item, sizeof item, 1, NULL, &result, sizeof result - 1));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, NULL, &item, sizeof item, 1, NULL, NULL, 0));
    two[1].local = NULL;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_put(engine, pool, two, sizeof *two, 2, NULL, NULL, 0));
    two[1].length = 0;
    OK(te_put(engine, pool, two, sizeof *two, 2, NULL, NULL, 0));
    two[1].segment = 4711;
    result.state = 77;
    EXPECT(TE_ERR_INVALID_HANDLE, te_put(engine, pool, two, sizeof *two, 1 + 1, NULL, NULL, 0));
    EXPECT(TE_ERR_INVALID_HANDLE, te_put(engine, pool, &two[1], sizeof *two, 1, NULL, &result, sizeof result));
    EXPECT(77, result.state);
    OK(te_put(engine, pool, NULL, sizeof item, 0, NULL, NULL, 0));
    pool_options.fallback = 3;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_pool_create(engine, &pool_options, &foreign));
    OK(te_pool_close(pool, 0));
}

static void use_the_parents_pool(void *pool) {
    EXPECT(TE_ERR_FORKED, te_put(engine, pool, NULL, sizeof(te_pool_item), 0, NULL, NULL, 0));
    EXPECT(TE_ERR_FORKED, te_get(engine, pool, NULL, sizeof(te_pool_item), 0, NULL, NULL, 0));
}

static void a_child_cannot_put_through_the_pool_of_its_parent(void) {
    te_pool *pool = create_pool(TE_POOL_REGISTER);
    in_child(use_the_parents_pool, pool);
    OK(te_pool_close(pool, 0));
}

int main(void) {
    peer_start(&peer);
    engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    items_arrive_and_come_back_by_every_path();
    a_warm_put_registers_nothing();
    a_lease_is_filled_before_it_is_transferred();
    of_items_with_the_same_target_the_last_one_wins();
    a_pool_that_is_used_up_falls_back_as_it_was_told();
    only_what_fails_is_tried_again();
    a_lease_is_not_lent_while_bytes_may_land_in_it();
    closing_is_busy_while_a_put_is_inside();
    a_peer_that_dies_inside_a_put_fails_it_and_nothing_else();
    destroying_the_engine_ends_a_put();
    what_is_got_into_a_lease_is_handed_out();
    puts_and_gets_of_8_threads_with_4_leases_each_never_meet();
    bad_arguments_are_refused_before_anything_begins();
    a_child_cannot_put_through_the_pool_of_its_parent();
    OK(te_engine_destroy(engine));
    peer_end(&peer);
    return 0;
}
