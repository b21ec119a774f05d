/* te.h: names, ports and the handshake channel: engines that start together, IPv6, peers that are slow or hostile, and descriptors
 * that are fetched while memory comes and goes. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static te_segment open_engine(te_engine *from, te_engine *to) {
    char address[256];
    te_segment segment;
    OK(te_engine_address(to, address, sizeof address));
    OK(te_open_segment(from, address, &segment));
    return segment;
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    return address;
}

/* A plain connection to the port that an engine is known by. */
static int connect_to(te_engine *engine) {
    char text[256];
    OK(te_engine_address(engine, text, sizeof text));
    struct sockaddr_in address = loopback(atoi(strrchr(text, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* --- ports ------------------------------------------------------------------------------------------------------------------- */

enum { PORTS = 64, ENGINES = 12 };

static void set_ports(int first, int last) {
    char text[16];
    snprintf(text, sizeof text, "%d", first);
    setenv("MC_MIN_RPC_PORT", text, 1);
    snprintf(text, sizeof text, "%d", last);
    setenv("MC_MAX_RPC_PORT", text, 1);
}

static void *create_one(void *engine) {
    *(te_engine **)engine = create_engine();
    return NULL;
}

static void take_port(int port) {
    struct sockaddr_in address = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0) CHECK(listen(fd, 1) == 0);
}

static void start_many(void *unused) {
    te_engine *engines[ENGINES];
    pthread_t threads[ENGINES];
    char addresses[ENGINES][256];
    int first = 24000 + getpid() % 60 * PORTS;
    (void)unused;
    set_ports(first, first + PORTS - 1);
    for (int port = first; port < first + PORTS; port += 2) take_port(port);
    for (int i = 0; i < ENGINES; i++) OK(pthread_create(&threads[i], NULL, create_one, &engines[i]));
    for (int i = 0; i < ENGINES; i++) OK(pthread_join(threads[i], NULL));
    for (int i = 0; i < ENGINES; i++) {
        OK(te_engine_address(engines[i], addresses[i], sizeof addresses[i]));
        for (int j = 0; j < i; j++) CHECK(strcmp(addresses[i], addresses[j]) != 0);
        int port = atoi(strrchr(addresses[i], ':') + 1);
        CHECK(port >= first && port < first + PORTS);
    }
    for (int i = 0; i < ENGINES; i++) OK(te_probe_segment(engines[i], open_engine(engines[i], engines[(i + 1) % ENGINES])));
    for (int i = 0; i < ENGINES; i++) OK(te_engine_destroy(engines[i]));
}

static void engines_that_start_together_have_ports_of_their_own(void) { in_child(start_many, NULL); }

static void start_without_ports(void *unused) {
    te_engine *engine = NULL;
    int first = 28000 + getpid() % 60 * PORTS;
    (void)unused;
    set_ports(first, first + 3);
    for (int port = first; port < first + 4; port++) take_port(port);
    double start = now();
    te_status status = te_engine_create(NULL, &engine);
    CHECK(status == TE_ERR_SOCKET || status == TE_ERR_LIMIT);
    CHECK(engine == NULL && strstr(te_last_error(), "MC_MIN_RPC_PORT") != NULL);
    CHECK(now() - start < 10);
}

static void an_engine_without_a_free_port_says_so(void) { in_child(start_without_ports, NULL); }

/* --- names ------------------------------------------------------------------------------------------------------------------- */

static void speak_ipv6(void *unused) {
    static char memory[4096];
    te_engine *engines[2];
    const char *names[2] = {"::1", "[::1]:12345"};
    (void)unused;
    setenv("MC_USE_IPV6", "1", 1);
    te_engine_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    for (int i = 0; i < 2; i++) {
        char address[256];
        options.server_name = names[i];
        OK(te_engine_create(&options, &engines[i]));
        OK(te_engine_address(engines[i], address, sizeof address));
        CHECK(strncmp(address, "[::1]:", 6) == 0);
    }
    OK(te_register_local_memory(engines[1], memory, sizeof memory, NULL));
    te_segment segment = open_engine(engines[0], engines[1]);
    memcpy(memory, "12345678", 8);
    OK(transfer(engines[0], TE_READ, memory + 100, segment, (uintptr_t)memory, 8));
    OK(transfer(engines[0], TE_WRITE, memory, segment, (uintptr_t)(memory + 200), 8));
    CHECK(memcmp(memory + 100, "12345678", 8) == 0 && memcmp(memory + 200, "12345678", 8) == 0);
    OK(te_notify(engines[0], segment, "over", "ipv6"));
    for (int i = 0; i < 2; i++) OK(te_engine_destroy(engines[i]));
}

static void ipv6_names_are_bracketed_and_work(void) {
    struct sockaddr_in6 address;
    memset(&address, 0, sizeof address);
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0) {
        in_child(speak_ipv6, NULL);
    } else {
        fprintf(stderr, "no IPv6 on this machine\n");
    }
    if (fd >= 0) close(fd);
}

static void names_that_lead_nowhere_are_told_apart(void) {
    te_engine *engine = create_engine();
    te_segment segment;
    double start = now();
    EXPECT(TE_ERR_SOCKET, te_open_segment(engine, "127.0.0.1:1", &segment));
    EXPECT(TE_ERR_DNS, te_open_segment(engine, "no.such.host.invalid:12345", &segment));
    EXPECT(TE_ERR_DNS, te_open_segment(engine, "not a name:12345", &segment));
    REFUSED(te_open_segment(engine, ":::::", &segment));
    REFUSED(te_open_segment(engine, "127.0.0.1:99999999", &segment));
    REFUSED(te_open_segment(engine, "[::1", &segment));
    REFUSED(te_open_segment(engine, "fe80::1%no-such-interface", &segment));
    REFUSED(te_open_segment(engine, "///", &segment));
    CHECK(now() - start < 30);
    OK(te_engine_destroy(engine));
}

/* --- peers that are slow or hostile --------------------------------------------------------------------------------------------- */

static void idle_connections_keep_nobody_waiting(void) {
    enum { IDLE = 100 };
    int idle[IDLE];
    te_engine *target = create_engine(), *initiator = create_engine();
    te_segment segment = open_engine(initiator, target);
    for (int i = 0; i < IDLE; i++) {
        idle[i] = connect_to(target);
        if (i % 2) CHECK(send(idle[i], "\x20\0\0\0", 4, MSG_NOSIGNAL) == 4); /* half a length */
    }
    for (int i = 0; i < 10; i++) {
        double start = now();
        OK(te_probe_segment(initiator, segment));
        OK(te_refresh_segment(initiator, segment));
        CHECK(now() - start < 0.5);
    }
    for (int i = 0; i < IDLE; i++) close(idle[i]);
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
}

/* Sends it, closes that side, and reads to the end, which must come. */
static size_t send_frame(te_engine *to, uint64_t length, const char *bytes, size_t size) {
    char answer[4096];
    size_t received = 0;
    int fd = connect_to(to);
    struct timeval limit = {10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    /* It may hang up before all is sent. */
    if (send(fd, &length, sizeof length, MSG_NOSIGNAL) == sizeof length && size > 0) {
        if (send(fd, bytes, size, MSG_NOSIGNAL) < 0) CHECK(errno == EPIPE || errno == ECONNRESET);
    }
    shutdown(fd, SHUT_WR);
    ssize_t got;
    while ((got = recv(fd, answer, sizeof answer, 0)) > 0) received += (size_t)got;
    CHECK(got == 0 || errno == ECONNRESET);
    close(fd);
    return received;
}

static long resident_kilobytes(void) {
    long total, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &total, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void odd_frames_do_no_harm(void) {
    static char deep[1 << 20], noise[64 << 10];
    te_engine *target = create_engine(), *initiator = create_engine();
    te_segment segment = open_engine(initiator, target);
    memset(deep, '[', sizeof deep);
    deep[0] = 1; /* asks for metadata */
    fill((unsigned char *)noise, sizeof noise, 4);
    const struct {
        uint64_t length;
        const char *bytes;
        size_t size;
    } frames[] = {
        {0, "", 0},
        {UINT64_MAX, "", 0},
        {UINT64_MAX, noise, sizeof noise},
        {1ull << 40, deep, sizeof deep},
        {1ull << 20, "\1{", 2}, /* cut short */
        {sizeof deep, deep, sizeof deep},
        {sizeof noise, noise, sizeof noise},
        {1, "\0", 1},
        {1, "\1", 1},
        {3, "\1[]", 3},
        {5, "\1null", 5},
        {3, "\1{}", 3},
        {3, "\2{}", 3},
        {31, "\2{\"name\":[1,2],\"notify_msg\":{}}", 31},
        {22, "\1{\"name\":7,\"buffers\":8}", 23},
        {3, "\x7f{}", 3},
        {3, "\xff{}", 3},
        {2, "{}", 2},
        {24, "{\"qp_num\":\"not numbers\"}\n", 24},
    };
    long before = resident_kilobytes();
    for (int round = 0; round < 5; round++) {
        for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
            send_frame(target, frames[i].length, frames[i].bytes, frames[i].size);
            OK(te_probe_segment(initiator, segment));
        }
    }
    CHECK(resident_kilobytes() - before < 64 << 10);
    CHECK(send_frame(target, 3, "\3{}", 3) > 8);
    te_notification *list;
    size_t count;
    OK(te_take_notifications(target, &list, &count));
    te_free_notifications(list, count);
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
}

/* A byte at a time, which takes its time, and is answered in the end. */
static void a_frame_may_come_in_drops(void) {
    static const char frame[] = "\3\0\0\0\0\0\0\0\3{}";
    char answer[64];
    te_engine *engine = create_engine();
    int fd = connect_to(engine);
    for (size_t i = 0; i < sizeof frame - 1; i++) {
        CHECK(send(fd, frame + i, 1, MSG_NOSIGNAL) == 1);
        usleep(5000);
    }
    CHECK(recv(fd, answer, sizeof answer, 0) > 8);
    close(fd);
    OK(te_engine_destroy(engine));
}

/* --- descriptors ----------------------------------------------------------------------------------------------------------------- */

enum { PAIRS = 200 };
static char paired[2 * PAIRS][64];
static int all_registered;

static void *register_pairs(void *engine) {
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < PAIRS; i++) {
            te_buffer pair[2] = {{paired[2 * i], 64}, {paired[2 * i + 1], 64}};
            OK(te_register_local_memory_batch(engine, pair, sizeof pair[0], 2, NULL));
        }
        for (int i = 0; i < PAIRS; i++) {
            void *pair[2] = {paired[2 * i], paired[2 * i + 1]};
            OK(te_unregister_local_memory_batch(engine, pair, 2));
        }
    }
    __atomic_store_n(&all_registered, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* What is registered by one call is seen as a whole or not at all. */
static void every_descriptor_is_one_moment(void) {
    static te_memory_region regions[2 * PAIRS];
    pthread_t thread;
    te_engine *target = create_engine(), *initiator = create_engine();
    te_segment segment = open_engine(initiator, target);
    OK(pthread_create(&thread, NULL, register_pairs, target));
    while (!__atomic_load_n(&all_registered, __ATOMIC_ACQUIRE)) {
        size_t count;
        OK(te_refresh_segment(initiator, segment));
        OK(te_list_segment_memory(initiator, segment, regions, sizeof regions[0], 2 * PAIRS, &count));
        CHECK(count <= 2 * PAIRS);
        EXPECT(0, count % 2);
        for (size_t i = 0; i < count; i += 2) {
            EXPECT(64, regions[i].length);
            EXPECT(0, (regions[i].addr - (uintptr_t)paired) % 128);
            EXPECT(regions[i].addr + 64, regions[i + 1].addr);
        }
    }
    OK(pthread_join(thread, NULL));
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
}

/* Equal addresses on the same host, in another process. */
static void a_twin_is_not_taken_for_the_own_process(void) {
    static char memory[4096];
    int address_pipe[2], end_pipe[2];
    char address[256];
    te_segment segment;
    CHECK(pipe(address_pipe) == 0 && pipe(end_pipe) == 0);
    pid_t twin = fork();
    CHECK(twin >= 0);
    if (twin == 0) {
        char unused;
        alarm(60);
        close(end_pipe[1]);
        te_engine *engine = create_engine();
        memset(memory, 't', sizeof memory);
        OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
        OK(te_engine_address(engine, address, sizeof address));
        CHECK(write(address_pipe[1], address, sizeof address) == sizeof address);
        CHECK(read(end_pipe[0], &unused, 1) == 0);
        OK(te_unregister_local_memory(engine, memory));
        CHECK(memory[7] == 'o' && memory[8] == 't');
        CHECK(write(address_pipe[1], "+", 1) == 1);
        _exit(0);
    }
    close(address_pipe[1]);
    CHECK(read(address_pipe[0], address, sizeof address) == sizeof address);
    te_engine *engine = create_engine();
    memset(memory, 'o', sizeof memory);
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_open_segment(engine, address, &segment));
    CHECK(segment != TE_LOCAL_SEGMENT);
    OK(transfer(engine, TE_READ, memory + 100, segment, (uintptr_t)memory, 100));
    CHECK(memory[99] == 'o' && memory[100] == 't' && memory[199] == 't' && memory[200] == 'o');
    OK(transfer(engine, TE_WRITE, memory + 1000, segment, (uintptr_t)memory, 8));
    close(end_pipe[1]);
    CHECK(read(address_pipe[0], address, 1) == 1 && address[0] == '+');
    CHECK(waitpid(twin, NULL, 0) == twin);
    OK(te_engine_destroy(engine));
}

int main(void) {
    a_twin_is_not_taken_for_the_own_process();
    engines_that_start_together_have_ports_of_their_own();
    an_engine_without_a_free_port_says_so();
    ipv6_names_are_bracketed_and_work();
    names_that_lead_nowhere_are_told_apart();
    idle_connections_keep_nobody_waiting();
    odd_frames_do_no_harm();
    a_frame_may_come_in_drops();
    every_descriptor_is_one_moment();
    return 0;
}
