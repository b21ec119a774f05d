/* te.h: what the library does to its process: signals, descriptors, children, limits, and a garbled environment. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
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
    te_transfer_request request = make_request(TE_READ, memory, own_name, (uintptr_t)memory, 4096);
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
    running_out_of_descriptors_is_an_error_like_any_other();
    few_descriptors_serve_as_many_peers_as_they_can();
    no_signal_handler_is_installed();
    descriptors_are_closed_on_exec();
    children_do_not_disturb_their_parent();
    ending_without_destroying_is_clean();
    peer_end(&peer);
    return 0;
}
