/* te.h: names, ports and the handshake channel: engines that start together, IPv6, peers that are slow or hostile, and descriptors
 * that are fetched while memory comes and goes. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <transfer_engine_c.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"
#include "wire.h"

static te_segment open_engine(te_engine *from, te_engine *to) {
    char address[256];
    te_segment segment;
    OK(te_engine_address(to, address, sizeof address));
    OK(te_open_segment(from, address, &segment));
    return segment;
}

/* A plain connection to the port that an engine is known by. */
static int connect_to_engine(te_engine *engine) {
    char text[256];
    OK(te_engine_address(engine, text, sizeof text));
    return connect_to(atoi(strrchr(text, ':') + 1));
}

/* --- ports ------------------------------------------------------------------------------------------------------------------- */

/* Ports that connections were ended on cannot be drawn for a minute, and a test may be started again sooner. */
enum { PORTS = 96, ENGINES = 12 };

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
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
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
    int first = 31200 + getpid() % 300 * 4;
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

/* A link-local address of this machine with its zone, such as "fe80::5054:ff:fe12:3456%eth0", if there is one. */
static const char *find_link_local(void) {
    static char found[INET6_ADDRSTRLEN + IF_NAMESIZE + 1];
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0) return NULL;
    for (struct ifaddrs *entry = list; entry != NULL; entry = entry->ifa_next) {
        if (entry->ifa_addr == NULL || entry->ifa_addr->sa_family != AF_INET6 || !(entry->ifa_flags & IFF_RUNNING)) continue;
        const struct in6_addr *address = &((struct sockaddr_in6 *)(void *)entry->ifa_addr)->sin6_addr;
        if (!IN6_IS_ADDR_LINKLOCAL(address)) continue;
        CHECK(inet_ntop(AF_INET6, address, found, INET6_ADDRSTRLEN) != NULL);
        snprintf(found + strlen(found), IF_NAMESIZE + 1, "%%%s", entry->ifa_name);
        break;
    }
    freeifaddrs(list);
    return found[0] ? found : NULL;
}

static void speak_ipv6(void *unused) {
    static char memory[4096];
    enum { NAMES = 5 };
    te_engine *engines[NAMES];
    const char *names[NAMES] = {"::1", "[::1]:12345", "[::1]", "0:0::0:1", find_link_local()};
    const char *shown[NAMES] = {"[::1]:", "[::1]:", "[::1]:", "[0:0::0:1]:", "[fe80::"};
    (void)unused;
    setenv("MC_USE_IPV6", "1", 1);
    te_engine_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    for (int i = 0; i < NAMES; i++) {
        char address[256], old_address[256];
        engines[i] = NULL;
        if (names[i] == NULL) continue;
        options.server_name = names[i];
        OK(te_engine_create(&options, &engines[i]));
        OK(te_engine_address(engines[i], address, sizeof address));
        CHECK(strncmp(address, shown[i], strlen(shown[i])) == 0 && strstr(address, "]:") != NULL);
        if (i == NAMES - 1) CHECK(strncmp(address + 1, names[i], strlen(names[i])) == 0);
        OK(getLocalIpAndPort((transfer_engine_t)engines[i], old_address, sizeof old_address));
        CHECK(strcmp(address, old_address) == 0);
        OK(te_register_local_memory(engines[i], memory, sizeof memory, NULL));
        te_segment segment = open_engine(engines[0], engines[i]);
        memset(memory, 0, sizeof memory);
        memcpy(memory, "12345678", 8);
        OK(transfer(engines[0], TE_READ, memory + 100, segment, (uintptr_t)memory, 8));
        OK(transfer(engines[0], TE_WRITE, memory, segment, (uintptr_t)(memory + 200), 8));
        CHECK(memcmp(memory + 100, "12345678", 8) == 0 && memcmp(memory + 200, "12345678", 8) == 0);
        OK(te_notify(engines[0], segment, "over", "ipv6"));
        OK(te_probe_segment(engines[0], segment));
    }
    /* An address that nobody has is one nevertheless, with its zone and brackets; nobody answers there. */
    te_segment segment;
    EXPECT(TE_ERR_SOCKET, te_open_segment(engines[0], "fe80::1%lo", &segment));
    EXPECT(TE_ERR_SOCKET, te_open_segment(engines[0], "fe80::1%lo:12345", &segment));
    EXPECT(TE_ERR_SOCKET, te_open_segment(engines[0], "[fe80::1%lo]:12345", &segment));
    CHECK(strstr(te_last_error(), "[fe80::1%lo]:12345") != NULL);
    for (int i = 0; i < NAMES; i++) OK(te_engine_destroy(engines[i]));
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

static char chosen[1024];

static void keep_choice(void *user_data, te_log_level level, const char *target, const char *message) {
    (void)user_data, (void)target;
    if (level == TE_LOG_INFO && strstr(message, "local address is ") != NULL && chosen[0] == '\0')
        snprintf(chosen, sizeof chosen, "%s", message);
    if (level == TE_LOG_WARNING && strstr(message, "no network interface is up") != NULL) snprintf(chosen, sizeof chosen, "%s", message);
}

/* What is given is what peers see, whatever interfaces there are; otherwise the log says what was chosen, and why. */
static void a_given_address_wins_and_a_choice_is_explained(void) {
    static const char *const given[][2] = {{"127.0.0.2", "127.0.0.2:"}, {"127.0.0.3:4711", "127.0.0.3:"}, {"localhost", "localhost:"}};
    static char memory[64];
    te_engine_options options;
    char address[256], expected[400];
    te_engine *initiator = create_engine(), *engine;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    OK(te_set_log_callback(keep_choice, NULL, TE_LOG_INFO));
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        options.server_name = given[i][0];
        OK(te_engine_create(&options, &engine));
        OK(te_engine_address(engine, address, sizeof address));
        CHECK(strncmp(address, given[i][1], strlen(given[i][1])) == 0);
        OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
        te_segment segment = open_engine(initiator, engine);
        OK(transfer(initiator, TE_READ, memory, segment, (uintptr_t)memory, 32));
        OK(te_probe_segment(initiator, segment));
        OK(te_engine_destroy(engine));
        CHECK(chosen[0] == '\0');
    }
    OK(te_engine_create(NULL, &engine));
    OK(te_engine_address(engine, address, sizeof address));
    *strrchr(address, ':') = '\0';
    CHECK(strstr(chosen, address) != NULL);
    snprintf(expected, sizeof expected, "local address is %s, the IPv4 address of interface ", address);
    CHECK(strncmp(chosen, "no network interface", 20) == 0 || (strncmp(chosen, expected, strlen(expected)) == 0 && strstr(chosen, ": ") != NULL));
    OK(te_engine_destroy(engine));
    OK(te_set_log_callback(NULL, NULL, TE_LOG_WARNING));
    OK(te_engine_destroy(initiator));
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
        idle[i] = connect_to_engine(target);
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

/* --- names that lead to something else -------------------------------------------------------------------------------------------- */

struct stranger {
    int listener, resets;
    const char *answer;
    size_t size;
};

/* Takes a request, gives the answer to it, and ends the connection. */
static void *answer_strangely(void *argument) {
    struct stranger *stranger = argument;
    for (;;) {
        char request[4096];
        int fd = accept(stranger->listener, NULL, NULL);
        if (fd < 0) return NULL;
        CHECK(recv(fd, request, sizeof request, 0) >= 0);
        send_all(fd, stranger->answer, stranger->size);
        if (stranger->resets) reset_on_close(fd);
        close(fd);
    }
}

/* Each of them is an error in good time that names the peer, and leaves nothing behind. */
static void whoever_answers_nonsense_cannot_be_opened(void) {
#define ANSWER(text) text, sizeof text - 1
    static const struct {
        const char *answer;
        size_t size;
    } answers[] = {
        {ANSWER("")},
        {ANSWER("\x05")},
        {ANSWER("\0\0\0\0\0\0\0\0")},
        {ANSWER("\xff\xff\xff\xff\xff\xff\xff\xff\1{}")},
        {ANSWER("\0\0\0\0\1\0\0\0\1{}")},
        {ANSWER("\x40\0\0\0\0\0\0\0\1{\"cut\":")},
        {ANSWER("\1\0\0\0\0\0\0\0\1")},
        {ANSWER("\5\0\0\0\0\0\0\0\1null")},
        {ANSWER("\3\0\0\0\0\0\0\0\1{}")},
        {ANSWER("\3\0\0\0\0\0\0\0\1[]")},
        {ANSWER("\3\0\0\0\0\0\0\0\2{}")},
        {ANSWER("\3\0\0\0\0\0\0\0\x7f{}")},
        {ANSWER("\x14\0\0\0\0\0\0\0\1{\"protocol\":\"smoke\"}")},
        {ANSWER("\x1d\0\0\0\0\0\0\0\1{\"protocol\":7,\"buffers\":true}")},
        {ANSWER("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")},
        {ANSWER("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops")},
        {ANSWER("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")},
        {ANSWER("SSH-2.0-OpenSSH_9.2p1\r\n")},
    };
#undef ANSWER
    te_engine *engine = create_engine();
    int files = count_entries("/proc/self/fd");
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        for (int resets = 0; resets < 2; resets++) {
            struct stranger stranger = {0, resets, answers[i].answer, answers[i].size};
            te_segment segment = 4711;
            pthread_t thread;
            char name[64];
            int port;
            stranger.listener = listen_somewhere(&port);
            OK(pthread_create(&thread, NULL, answer_strangely, &stranger));
            snprintf(name, sizeof name, "127.0.0.1:%d", port);
            double start = now();
            te_status status = te_open_segment(engine, name, &segment);
            CHECK(status == TE_ERR_SOCKET || status == TE_ERR_MALFORMED_JSON || status == TE_ERR_METADATA);
            CHECK(strstr(te_last_error(), name) != NULL);
            CHECK(segment == 4711 && now() - start < 5);
            shutdown(stranger.listener, SHUT_RDWR);
            OK(pthread_join(thread, NULL));
            close(stranger.listener);
        }
    }
    expect_at_most_entries(files, "/proc/self/fd");
    OK(te_engine_destroy(engine));
}

static void *open_the_silent(void *argument) {
    te_segment segment;
    void **pair = argument;
    te_status status = te_open_segment(pair[0], pair[1], &segment);
    CHECK(status == TE_ERR_CANCELED || status == TE_ERR_INVALID_HANDLE);
    return NULL;
}

/* Whoever waits for one that says nothing holds up neither other calls nor the end of the engine. */
static void a_silent_name_holds_up_nobody(void) {
    int port, listener = listen_somewhere(&port);
    char name[64];
    pthread_t thread;
    te_engine *engine = create_engine(), *target = create_engine();
    void *pair[2] = {engine, name};
    snprintf(name, sizeof name, "127.0.0.1:%d", port);
    OK(pthread_create(&thread, NULL, open_the_silent, pair));
    usleep(100000);
    double start = now();
    OK(te_probe_segment(engine, open_engine(engine, target)));
    OK(te_engine_destroy(engine));
    OK(pthread_join(thread, NULL));
    CHECK(now() - start < 5);
    close(listener);
    OK(te_engine_destroy(target));
}

/* --- start and end --------------------------------------------------------------------------------------------------------------------- */

static int over;

/* Creates and destroys engines that draw from few ports. */
static void *come_and_go(void *unused) {
    (void)unused;
    for (int i = 0; i < 20; i++) {
        te_engine *engine = create_engine();
        usleep((unsigned)(i % 4 * 2000));
        OK(te_engine_destroy(engine));
    }
    __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Whenever a peer comes, before te_engine_create has returned or while the engine is destroyed: it is refused, or served in full. */
static void connect_all_the_time(void *unused) {
    pthread_t thread;
    char name[64];
    enum { RANGE = 60 };
    int first = 29800 + getpid() % 20 * RANGE, opened = 0, refused = 0;
    (void)unused;
    te_engine *initiator = create_engine();
    set_ports(first, first + RANGE - 1);
    OK(pthread_create(&thread, NULL, come_and_go, NULL));
    for (int i = 0; !__atomic_load_n(&over, __ATOMIC_ACQUIRE); i++) {
        te_segment segment;
        size_t count;
        /* Its port for data is one of them as well. */
        snprintf(name, sizeof name, "127.0.0.1:%d", first + i % RANGE);
        te_status status = te_open_segment(initiator, name, &segment);
        if (status == 0) {
            opened++;
            OK(te_list_segment_memory(initiator, segment, NULL, sizeof(te_memory_region), 0, &count));
            EXPECT(0, count);
            OK(removeLocalSegment((transfer_engine_t)initiator, name));
        } else {
            refused++;
            CHECK(status == TE_ERR_SOCKET || status == TE_ERR_METADATA);
            if (status == TE_ERR_METADATA) CHECK(strstr(te_last_error(), "try again") != NULL);
        }
    }
    OK(pthread_join(thread, NULL));
    CHECK(opened > 0 && refused > 0);
    OK(te_engine_destroy(initiator));
}

static void peers_that_come_too_early_are_refused_or_served_in_full(void) { in_child(connect_all_the_time, NULL); }

/* --- frames ------------------------------------------------------------------------------------------------------------------------------ */

/* Sends it, closes that side, and reads to the end, which must come. */
static size_t send_frame(te_engine *to, uint64_t length, const char *bytes, size_t size) {
    char answer[4096];
    size_t received = 0;
    int fd = connect_to_engine(to);
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
    int fd = connect_to_engine(engine);
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
    a_given_address_wins_and_a_choice_is_explained();
    names_that_lead_nowhere_are_told_apart();
    whoever_answers_nonsense_cannot_be_opened();
    a_silent_name_holds_up_nobody();
    peers_that_come_too_early_are_refused_or_served_in_full();
    idle_connections_keep_nobody_waiting();
    odd_frames_do_no_harm();
    a_frame_may_come_in_drops();
    every_descriptor_is_one_moment();
    return 0;
}
