/* te.h: what the library does to its process: signals, descriptors, children, limits, and a garbled environment. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

static struct peer peer;
static unsigned char memory[1 << 20];

static te_segment open_peer(te_engine *engine) {
    te_segment segment;
    OK(te_open_segment(engine, peer.address, &segment));
    return segment;
}

static void no_signal_handler_is_installed(void) {
    struct sigaction before[65], after;
    sigset_t blocked_before, blocked_after;
    memset(before, 0, sizeof before);
    for (int number = 1; number < 65; number++) sigaction(number, NULL, &before[number]);
    OK(pthread_sigmask(SIG_BLOCK, NULL, &blocked_before));
    te_engine *engine = create_engine();
    te_segment segment = open_peer(engine);
    OK(transfer(engine, TE_READ, memory, segment, peer.base, 4096));
    for (int number = 1; number < 65; number++) {
        if (sigaction(number, NULL, &after) == 0) CHECK(after.sa_handler == before[number].sa_handler);
    }
    OK(pthread_sigmask(SIG_BLOCK, NULL, &blocked_after));
    CHECK(memcmp(&blocked_before, &blocked_after, 8) == 0);
    OK(te_engine_destroy(engine));
}

/* --- signals of the program ---------------------------------------------------------------------------------------------------- */

enum { MAX_TAKEN = 1 << 16 };

/* Which thread has run the handler, and for which signal. */
static struct {
    int number;
    long thread;
} taken[MAX_TAKEN];
static int taken_count;

static long this_thread(void) { return syscall(SYS_gettid); }

static void take_signal(int number) {
    int error = errno, place = __atomic_fetch_add(&taken_count, 1, __ATOMIC_RELAXED);
    if (place < MAX_TAKEN) {
        __atomic_store_n(&taken[place].number, number, __ATOMIC_RELAXED);
        __atomic_store_n(&taken[place].thread, this_thread(), __ATOMIC_RELEASE);
    }
    errno = error;
}

static int count_taken(void) { return __atomic_load_n(&taken_count, __ATOMIC_ACQUIRE); }

/* Without SA_RESTART, so that system calls end with EINTR. */
static int handle(int number) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = take_signal;
    return sigaction(number, &action, NULL);
}

static int is_fault(int number) {
#ifdef __SANITIZE_THREAD__
    /* The sanitizer takes these for faults as well, and stops at one that is sent. */
    if (number == SIGABRT || number == SIGPIPE) return 1;
#endif
    return number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGTRAP || number == SIGSYS;
}

/* Whether a thread of that name is alive. It names itself after it has started. */
static int has_thread(const char *name) {
    int found = 0;
    DIR *entries = opendir("/proc/self/task");
    struct dirent *entry;
    CHECK(entries != NULL);
    while (!found && (entry = readdir(entries)) != NULL) {
        char path[300], text[32] = {0};
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL) continue;
        if (fgets(text, sizeof text, file) != NULL) found = strncmp(text, name, strlen(name)) == 0;
        fclose(file);
    }
    closedir(entries);
    return found;
}

/* An engine with every kind of thread that there is. */
static te_engine *create_busy_engine(te_segment *segment) {
    static const char *const names[] = {"te-tcp-0", "te-tcp-1", "te-handshake", "te-refresh", "te-metric", "te-tcp-find", "te-notify"};
    te_transfer_options options = make_transfer_options();
    setenv("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "1", 1);
    setenv("MC_TE_METRIC", "1", 1);
    setenv("MC_TE_METRIC_INTERVAL_SECONDS", "1", 1);
    setenv("TE_TCP_IO_THREADS", "2", 1);
    te_engine *engine = create_engine();
    *segment = open_peer(engine);
    options.notify_name = "signals";
    options.notify_message = "";
    te_transfer_request request = make_request(TE_WRITE, memory, *segment, peer.base, 4096);
    te_batch batch;
    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_submit(engine, batch, &request, sizeof request, 1, &options));
    OK(te_batch_wait(engine, batch, 20000, NULL));
    OK(te_batch_free(engine, batch));
    REFUSED(transfer(engine, TE_READ, memory, *segment, peer.base + PEER_GAP, 64));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        for (int round = 0; round < 5000 && !has_thread(names[i]); round++) usleep(1000);
        if (!has_thread(names[i])) fprintf(stderr, "no thread %s\n", names[i]);
        CHECK(has_thread(names[i]));
    }
    return engine;
}

/* While the program's only thread blocks everything, what arrives waits: no thread of the library takes it. */
static void block_all_signals(void *unused) {
    sigset_t all, before;
    int sent = 0;
    (void)unused;
    te_segment segment;
    te_engine *engine = create_busy_engine(&segment);
    sigfillset(&all);
    OK(pthread_sigmask(SIG_BLOCK, &all, &before));
    for (int number = 1; number <= SIGRTMAX; number++) {
        /* Those of SIGKILL and SIGSTOP cannot be set, nor those of the C library's own. SIGCONT and those that
         * stop a process take each other back. */
        if (is_fault(number) || number == SIGCONT || handle(number) != 0) continue;
        OK(kill(getpid(), number));
        sent++;
    }
    CHECK(sent > 40);
    for (int round = 0; round < 50; round++) {
        OK(transfer(engine, TE_WRITE, memory, segment, peer.base, 64 << 10));
        OK(transfer(engine, TE_READ, memory, segment, peer.base, 64));
        OK(te_notify(engine, segment, "signals", ""));
    }
    usleep(50000);
    EXPECT(0, count_taken());
    OK(pthread_sigmask(SIG_SETMASK, &before, NULL));
    EXPECT(sent, count_taken());
    for (int i = 0; i < sent; i++) EXPECT(this_thread(), taken[i].thread);
    OK(te_engine_destroy(engine));
}

static void signals_wait_for_a_thread_of_the_program(void) { in_child(block_all_signals, NULL); }

struct work {
    te_segment segment;
    te_engine *engine;
    long threads[2];
    int stop;
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Sends signals to the process until it is told to stop, and blocks them itself. Returns how many. */
static void *send_signals(void *argument) {
    struct work *work = argument;
    sigset_t all;
    intptr_t sent = 0;
    sigfillset(&all);
    OK(pthread_sigmask(SIG_BLOCK, &all, NULL));
    while (!__atomic_load_n(&work->stop, __ATOMIC_ACQUIRE) && sent < MAX_TAKEN) {
        /* Signals of this kind queue up: none merges with another one. */
        union sigval value = {0};
        if (sigqueue(getpid(), SIGRTMIN + 3, value) == 0) sent++;
        usleep(100);
    }
    return (void *)sent;
}

/* Every blocking call, again and again. */
static void *call_everything(void *argument) {
    struct work *work = argument;
    static unsigned char local[4 << 20];
    work->threads[1] = this_thread();
    while (!__atomic_load_n(&work->stop, __ATOMIC_ACQUIRE)) {
        te_engine *engine = create_engine();
        te_segment segment = open_peer(engine);
        OK(te_register_local_memory(engine, local, sizeof local, NULL));
        OK(transfer(engine, TE_READ, local, segment, peer.base + PEER_LARGE, sizeof local));
        OK(transfer(engine, TE_WRITE, local, segment, peer.base + PEER_LARGE, sizeof local));
        OK(te_probe_segment(engine, segment));
        OK(te_refresh_segment(engine, segment));
        OK(te_notify(engine, segment, "signals", ""));
        OK(te_unregister_local_memory(engine, local));
        OK(te_engine_destroy(engine));
    }
    return NULL;
}

/* Calls that a handler interrupts go on: they neither fail nor end early. */
static void interrupt_calls(void *unused) {
    static struct work work;
    static struct peer silent; /* Only its parent can stop a process and know that it has stopped. */
    pthread_t sender, worker;
    void *sent, *sent_later;
    te_segment segment;
    te_batch batch;
    te_batch_status status;
    (void)unused;
    peer_start(&silent);
    OK(handle(SIGRTMIN + 3));
    work.engine = create_busy_engine(&work.segment);
    work.threads[0] = this_thread();
    OK(pthread_create(&sender, NULL, send_signals, &work));
    OK(pthread_create(&worker, NULL, call_everything, &work));
    for (double end = now() + 1; now() < end;) {
        OK(transfer(work.engine, TE_WRITE, memory, work.segment, peer.base, 4096));
        OK(transfer(work.engine, TE_READ, memory, work.segment, peer.base, 4096));
    }
    __atomic_store_n(&work.stop, 1, __ATOMIC_RELEASE);
    OK(pthread_join(worker, NULL));
    OK(pthread_join(sender, &sent));
    CHECK((intptr_t)sent > 100);

    /* A wait for a peer that is silent lasts as long as was asked, and then until the peer goes on. */
    OK(te_open_segment(work.engine, silent.address, &segment));
    peer_stop(&silent);
    work.stop = 0;
    OK(pthread_create(&sender, NULL, send_signals, &work));
    te_transfer_request request = make_request(TE_READ, memory, segment, silent.base, 4096);
    OK(te_batch_create(work.engine, 1, &batch));
    OK(te_batch_submit(work.engine, batch, &request, sizeof request, 1, NULL));
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    double start = now();
    EXPECT(TE_ERR_TIMEOUT, te_batch_wait(work.engine, batch, 300, &status));
    CHECK(now() - start >= 0.3);
    peer_continue(&silent);
    OK(te_batch_wait(work.engine, batch, 20000, &status));
    EXPECT(TE_STATE_COMPLETED, status.state);
    OK(te_batch_free(work.engine, batch));
    __atomic_store_n(&work.stop, 1, __ATOMIC_RELEASE);
    OK(pthread_join(sender, &sent_later));

    intptr_t all = (intptr_t)sent + (intptr_t)sent_later;
#ifdef __SANITIZE_THREAD__
    all = count_taken(); /* The sanitizer merges signals, whatever their kind. */
    CHECK(all > 100);
#endif
    for (int i = 0; i < 1000 && count_taken() < all; i++) usleep(1000);
    EXPECT(all, count_taken());
    for (int i = 0; i < all && i < MAX_TAKEN; i++) CHECK(taken[i].thread == work.threads[0] || taken[i].thread == work.threads[1]);
    OK(te_engine_destroy(work.engine));
    peer_end(&silent);
}

static void calls_survive_signals(void) { in_child(interrupt_calls, NULL); }

/* ------------------------------------------------------------------------------------------------------------------------------- */

static void descriptors_are_closed_on_exec(void) {
    char before[1024] = {0};
    DIR *entries = opendir("/proc/self/fd");
    struct dirent *entry;
    while ((entry = readdir(entries)) != NULL) {
        int fd = atoi(entry->d_name);
        if (fd < 1024) before[fd] = 1;
    }
    closedir(entries);
    te_engine *engine = create_engine();
    te_segment segment = open_peer(engine);
    te_batch batch;
    int event;
    OK(te_batch_create(engine, 1, &batch));
    OK(te_batch_event_fd(engine, batch, &event));
    OK(transfer(engine, TE_READ, memory, segment, peer.base, 4096));
    int found = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0 || before[fd]) continue;
        CHECK(flags & FD_CLOEXEC);
        found++;
    }
    CHECK(found > 2);
    OK(te_engine_destroy(engine));
}

/* --- children ------------------------------------------------------------------------------------------------------------------ */

static void do_nothing(void *unused) { (void)unused; }

static void exit_normally(void *unused) {
    (void)unused;
    /* As a child that knows nothing of engines does: destructors and exit handlers of its parent run in it. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        exit(0);
    }
    int status;
    /* With which number is not looked at: valgrind has one of its own for what a child cannot reach any more. */
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
}

static void run_true(void *unused) {
    (void)unused;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        execlp("true", "true", (char *)NULL);
        _exit(1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Children come and go while the parent's transfers run. */
static void children_do_not_disturb_their_parent(void) {
    enum { COUNT = 16 };
    static void (*const bodies[])(void *) = {do_nothing, exit_normally, run_true};
    te_engine *engine = create_engine();
    te_segment segment = open_peer(engine);
    for (int round = 0; round < 6; round++) {
        te_transfer_request requests[COUNT];
        te_batch batch;
        te_batch_status status;
        memset(&status, 0, sizeof status);
        status.struct_size = sizeof status;
        fill(memory, sizeof memory, round);
        for (int i = 0; i < COUNT; i++)
            requests[i] = make_request(TE_WRITE, memory, segment, peer.base + PEER_LARGE + i * sizeof memory, sizeof memory);
        OK(te_batch_create(engine, COUNT, &batch));
        OK(te_batch_submit(engine, batch, requests, sizeof requests[0], COUNT, NULL));
        in_child(bodies[round % 3], NULL);
        OK(te_batch_wait(engine, batch, 20000, &status));
        EXPECT(TE_STATE_COMPLETED, status.state);
        OK(te_batch_free(engine, batch));
        EXPECT(checksum(memory, sizeof memory),
               strtoull(peer_ask(&peer, "sum %d %zu", PEER_LARGE + (COUNT - 1) * (1 << 20), sizeof memory), NULL, 10));
    }
    OK(te_engine_destroy(engine));
}

/* --- limits -------------------------------------------------------------------------------------------------------------------- */

static void run_with_64_descriptors(void *unused) {
    enum { LIMIT = 64 };
    struct rlimit limit = {LIMIT, LIMIT};
    int spent[LIMIT], count = 0, fd;
    te_engine *second = NULL;
    te_segment segment;
    te_batch batch;
    (void)unused;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return; /* valgrind keeps it to itself */
    te_engine *engine = create_engine();
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    while ((fd = dup(0)) >= 0) spent[count++] = fd;
    CHECK(errno == EMFILE && count > 0);

    /* Nothing that needs a descriptor works, and each says why. */
    EXPECT(TE_ERR_LIMIT, te_open_segment(engine, peer.address, &segment));
    CHECK(strstr(te_last_error(), "ulimit -n") != NULL);
    REFUSED(te_engine_create(NULL, &second));
    CHECK(strstr(te_last_error(), "ulimit -n") != NULL);
    OK(te_batch_create(engine, 1, &batch));
    EXPECT(TE_ERR_LIMIT, te_batch_event_fd(engine, batch, &fd));
    EXPECT(TE_ERR_LIMIT, te_serve_metrics(engine, "metrics.sock"));
    CHECK(strstr(te_last_error(), "ulimit -n") != NULL);
    EXPECT(TE_ERR_LIMIT, te_serve_metrics(engine, NULL));
    OK(te_batch_free(engine, batch));
    OK(transfer(engine, TE_WRITE, memory, TE_LOCAL_SEGMENT, (uintptr_t)(memory + 4096), 4096));

    /* The segment is known, a connection for its bytes cannot be had. */
    for (int i = 0; i < 4; i++) close(spent[--count]);
    OK(te_open_segment(engine, peer.address, &segment));
    while ((fd = dup(0)) >= 0) spent[count++] = fd;
    EXPECT(TE_ERR_LIMIT, transfer(engine, TE_READ, memory, segment, peer.base, 4096));

    /* Who connects meanwhile is served as soon as there are descriptors again. */
    te_segment own_name;
    char address[256];
    OK(te_engine_address(engine, address, sizeof address));
    while (count > 0) close(spent[--count]);
    OK(transfer(engine, TE_READ, memory, segment, peer.base, 4096));
    OK(te_engine_create(NULL, &second));
    OK(te_open_segment(second, address, &own_name));
    while ((fd = dup(0)) >= 0) spent[count++] = fd;
    close(spent[--count]);
    te_transfer_request request = make_request(TE_READ, memory + 4096, own_name, (uintptr_t)memory, 4096);
    OK(te_batch_create(second, 1, &batch));
    OK(te_batch_submit(second, batch, &request, sizeof request, 1, NULL));
    usleep(50000);
    while (count > 0) close(spent[--count]);
    te_batch_status status;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    OK(te_batch_wait(second, batch, 20000, &status));
    EXPECT(TE_STATE_COMPLETED, status.state);
    OK(te_engine_destroy(second));
    OK(te_engine_destroy(engine));
}

static void running_out_of_descriptors_is_an_error_like_any_other(void) { in_child(run_with_64_descriptors, NULL); }

/* Many peers, few descriptors: each transfer completes or tells the limit. */
static void talk_to_many_with_few_descriptors(void *unused) {
    enum { TARGETS = 24 };
    struct rlimit limit = {64, 64};
    te_segment segments[TARGETS];
    (void)unused;
    int orders[2], answers[2];
    CHECK(pipe(orders) == 0 && pipe(answers) == 0);
    pid_t targets = fork();
    CHECK(targets >= 0);
    if (targets == 0) {
        char byte;
        alarm(60);
        close(orders[1]);
        for (int i = 0; i < TARGETS; i++) {
            char address[256];
            te_engine *engine = create_engine();
            OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
            memset(address, 0, sizeof address);
            OK(te_engine_address(engine, address, sizeof address));
            CHECK(write(answers[1], address, sizeof address) == sizeof address);
        }
        CHECK(read(orders[0], &byte, 1) == 0);
        _exit(0);
    }
    close(answers[1]);
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* valgrind keeps it to itself */
    te_engine *engine = create_engine();
    for (int i = 0; i < TARGETS; i++) {
        char address[256];
        CHECK(read(answers[0], address, sizeof address) == sizeof address);
        OK(te_open_segment(engine, address, &segments[i]));
    }
    int completed = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < TARGETS; i++) {
            te_status status = transfer(engine, TE_READ, memory, segments[i], (uintptr_t)memory, 4096);
            CHECK(status == 0 || status == TE_ERR_LIMIT);
            completed += status == 0;
        }
    }
    CHECK(completed > 0);
    OK(te_engine_destroy(engine));
    close(orders[1]);
    CHECK(waitpid(targets, NULL, 0) == targets);
}

static void few_descriptors_serve_as_many_peers_as_they_can(void) { in_child(talk_to_many_with_few_descriptors, NULL); }

/* --- environment --------------------------------------------------------------------------------------------------------------- */

static const char *const numbers[] = {
    "MC_HANDSHAKE_PORT", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_HANDSHAKE_LISTEN_BACKLOG", "MC_HANDSHAKE_CONNECT_TIMEOUT",
    "MC_HANDSHAKE_MAX_LENGTH", "MC_SLICE_TIMEOUT", "MC_TCP_SLICE_SIZE", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_LANES_PER_PEER",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "TE_TCP_IO_THREADS", "MC_REDIS_DB_INDEX", "MC_TE_METRIC_INTERVAL_SECONDS",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "MC_TCP_ADMISSION_TIMEOUT_MS",
};
enum { NUMBERS = sizeof numbers / sizeof *numbers };

static int warned[NUMBERS + 1];

static void count_warnings(void *user_data, te_log_level level, const char *target, const char *message) {
    (void)target;
    if (level != TE_LOG_WARNING) return;
    if (strstr(message, "MC_TCP_LANES_PER_PEERS") != NULL) {
        warned[NUMBERS]++;
        return;
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (strstr(message, numbers[i]) != NULL && strstr(message, user_data) != NULL) warned[i]++;
    }
}

/* Each bad value is warned of once, by variable and value, and the engine works with its defaults. */
static void live_with(void *value) {
    for (int i = 0; i < NUMBERS; i++) setenv(numbers[i], value, 1);
    setenv("MC_TCP_LANES_PER_PEERS", "2", 1);
    OK(te_set_log_callback(count_warnings, value, TE_LOG_WARNING));
    for (int engines = 0; engines < 2; engines++) {
        te_engine *engine = create_engine();
        OK(transfer(engine, TE_WRITE, memory, open_peer(engine), peer.base, 4096));
        OK(te_engine_destroy(engine));
    }
    OK(te_set_log_callback(NULL, NULL, TE_LOG_WARNING));
    for (int i = 0; i < NUMBERS; i++) {
        if (warned[i] != 1) fprintf(stderr, "%s=\"%s\": %d warnings\n", numbers[i], (char *)value, warned[i]);
        EXPECT(1, warned[i]);
    }
    EXPECT(1, warned[NUMBERS]);
}

static void bad_numbers_and_misspelt_names_are_warned_of(void) {
    static const char *const values[] = {"", "abc", "1e99", "-1", "99999999999999999999", "3 ", "0x10"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) in_child(live_with, (void *)values[i]);
}

static void live_with_all_bad(void *unused) {
    static const char *const others[] = {"MC_USE_IPV6X",   "MC_LOG_LEVEL", "TE_CHECKED_LOCAL_COPY", "TE_REGISTER_REFCOUNT", "MC_LOG_DIR",
                                         "MC_TCP_PROTO", "MC_METADATA_CLUSTER_ID", "MC_TCP_ENABLE_CONNECTION_POOL"};
    static char long_text[64 << 10];
    (void)unused;
    memset(long_text, '\xff', sizeof long_text - 1);
    for (int i = 0; i < NUMBERS; i++) setenv(numbers[i], long_text, 1);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) setenv(others[i], long_text, 1);
    te_engine *engine = create_engine();
    OK(transfer(engine, TE_WRITE, memory, open_peer(engine), peer.base, 4096));
    OK(te_engine_destroy(engine));
}

static void long_and_unreadable_values_are_survived(void) { in_child(live_with_all_bad, NULL); }

/* --- the end ------------------------------------------------------------------------------------------------------------------------- */

enum { BY_RETURN, BY_EXIT, BY_EXIT_OF_A_THREAD, BY_QUICK_EXIT, ENDS };

static void *exit_from_a_thread(void *unused) {
    (void)unused;
    exit(7);
}

/* Without te_engine_destroy, with transfers in both directions, a waiter and a thread inside the library. */
static void *wait_for_ever(void *engine) {
    te_batch batch;
    te_transfer_request request = make_request(TE_READ, memory, open_peer(engine), peer.base + PEER_LARGE, sizeof memory);
    for (;;) {
        if (te_batch_create(engine, 1, &batch) != 0 || te_batch_submit(engine, batch, &request, sizeof request, 1, NULL) != 0 ||
            te_batch_wait(engine, batch, -1, NULL) != 0)
            return NULL;
    }
}

static void end_amid_transfers(int way) {
    enum { COUNT = 64 };
    static te_transfer_request requests[COUNT];
    te_engine *engine = create_engine();
    te_batch batch;
    pthread_t thread;
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    te_segment segment = open_peer(engine);
    for (size_t i = 0; i < COUNT; i++)
        requests[i] = make_request(i % 2 ? TE_WRITE : TE_READ, memory, segment, peer.base + PEER_LARGE, sizeof memory);
    OK(te_batch_create(engine, COUNT, &batch));
    OK(te_batch_submit(engine, batch, requests, sizeof requests[0], COUNT, NULL));
    OK(pthread_create(&thread, NULL, wait_for_ever, engine));
    usleep(5000);
    if (way == BY_QUICK_EXIT) quick_exit(7);
    if (way == BY_EXIT) exit(7);
    if (way == BY_EXIT_OF_A_THREAD) {
        OK(pthread_create(&thread, NULL, exit_from_a_thread, NULL));
        pause();
    }
}

static const char *program;

static void ending_without_destroying_is_clean(void) {
    for (int round = 0; round < 3; round++) {
        for (int way = 0; way < ENDS; way++) {
            char number[16];
            int status;
            snprintf(number, sizeof number, "%d", way);
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                /* As a program of its own: it ends with its own main(). */
                execl(program, program, number, peer.address, (char *)NULL);
                _exit(99);
            }
            CHECK(waitpid(child, &status, 0) == child);
            CHECK(WIFEXITED(status));
            EXPECT(7, WEXITSTATUS(status));
        }
    }
}

int main(int count, char **arguments) {
    program = arguments[0];
    if (count == 3) {
        /* Started by ending_without_destroying_is_clean(). */
        alarm(20);
        snprintf(peer.address, sizeof peer.address, "%s", arguments[2]);
        te_memory_region first = {.struct_size = sizeof first};
        size_t regions;
        te_engine *scout = create_engine();
        OK(te_list_segment_memory(scout, open_peer(scout), &first, sizeof first, 1, &regions));
        peer.base = first.addr;
        OK(te_engine_destroy(scout));
        end_amid_transfers(atoi(arguments[1]));
        return 7;
    }
    peer_start(&peer);
    /* First, while this process has no log and no engine that children could inherit. */
    bad_numbers_and_misspelt_names_are_warned_of();
    long_and_unreadable_values_are_survived();
    signals_wait_for_a_thread_of_the_program();
    calls_survive_signals();
    running_out_of_descriptors_is_an_error_like_any_other();
    few_descriptors_serve_as_many_peers_as_they_can();
    no_signal_handler_is_installed();
    descriptors_are_closed_on_exec();
    children_do_not_disturb_their_parent();
    ending_without_destroying_is_clean();
    peer_end(&peer);
    return 0;
}
