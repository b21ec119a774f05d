/* te.h: a lease that is acquired and released makes no system call and registers nothing. */
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine.h"

enum { LEASES = 64, ROUNDS = 2000 };

static te_engine *engine;
static te_pool *pool;
static int outcome;

static te_pool_lease acquire(uint64_t bytes, uint32_t direction) {
    te_pool_lease lease;
    memset(&lease, 0, sizeof lease);
    lease.struct_size = sizeof lease;
    lease.direction = direction;
    if (te_pool_acquire(pool, bytes, 0, &lease) != 0) lease.id = 0;
    return lease;
}

/* Leases of several sizes that come and go; whether all went well. */
static int turn_over(int rounds) {
    te_pool_lease leases[LEASES];
    memset(leases, 0, sizeof leases);
    for (int round = 0; round < rounds; round++) {
        te_pool_lease *lease = &leases[round * 7 % LEASES];
        if (lease->id && te_pool_release(pool, lease->id, TE_POOL_OVER, 0) != 0) return 0;
        *lease = acquire(1 + (uint64_t)round * 977 % 30000, (uint32_t)round % 3);
        if (!lease->id) return 0;
    }
    for (int i = 0; i < LEASES; i++) {
        if (leases[i].id && te_pool_release(pool, leases[i].id, TE_POOL_OVER, 0) != 0) return 0;
    }
    return 1;
}

/* Strict mode is of this thread alone: the kernel ends it at any call but read, write and exit. */
static void *turn_over_without_calls(void *turns) {
    if (!turn_over(ROUNDS)) return NULL;
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
        outcome = -1;
        return NULL;
    }
    int done = *(int *)turns ? turn_over(ROUNDS) : getpid() > 0;
    __atomic_store_n(&outcome, done, __ATOMIC_RELEASE);
    syscall(SYS_exit, 0);
    return NULL;
}

static int run_strictly(int turns) {
    pthread_t thread;
    outcome = 0;
    OK(pthread_create(&thread, NULL, turn_over_without_calls, &turns));
    OK(pthread_join(thread, NULL));
    return __atomic_load_n(&outcome, __ATOMIC_ACQUIRE);
}

static void a_warm_lease_makes_no_system_call(void) {
    int made = run_strictly(1);
    if (made == -1) {
        fprintf(stderr, "skipped: the kernel does not restrict system calls here\n");
        return;
    }
    EXPECT(1, made);
    /* It would have been noticed. */
    EXPECT(0, run_strictly(0));
}

static void a_warm_lease_registers_nothing(void) {
    te_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    CHECK(turn_over(ROUNDS));
    OK(te_get_statistics(engine, &statistics));
    EXPECT(1, statistics.regions_registered);
    EXPECT(1, statistics.regions_live);
    EXPECT(0, statistics.regions_unregistered);
}

int main(void) {
    engine = create_engine();
    OK(te_pool_create(engine, NULL, &pool));
    a_warm_lease_makes_no_system_call();
    a_warm_lease_registers_nothing();
    OK(te_pool_close(pool, 0));
    OK(te_engine_destroy(engine));
    return 0;
}
