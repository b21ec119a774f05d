/* te.h: what a program may ask an engine and this machine, and what it may have told anew: descriptors, names, overlaps, places of memory,
 * the configuration; the ways of requests; and an engine that is shut down before it is destroyed. */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"

static struct peer peer;

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        count++;
    return count;
}

static void descriptors_are_told_as_json(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    te_segment segment;
    char *own = NULL, *theirs = NULL, part[64];
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_segment_json(engine, TE_LOCAL_SEGMENT, 0, &own));
    snprintf(part, sizeof part, "\"addr\":%llu,\"length\":64", (unsigned long long)(uintptr_t)memory);
    CHECK(own[0] == '{' && own[strlen(own) - 1] == '}' && strstr(own, part) != NULL && strstr(own, "\"protocol\":\"tcp\"") != NULL);
    te_free_text(own);
    OK(te_open_segment(engine, peer.address, &segment));
    OK(te_segment_json(engine, segment, 0, &theirs));
    int known = count_of(theirs, "\"addr\"");
    CHECK(known > 0 && strstr(theirs, peer.address) != NULL);
    te_free_text(theirs);
    CHECK(strcmp(peer_ask(&peer, "register %d %d", PEER_GAP, 4096), "0") == 0);
    OK(te_segment_json(engine, segment, 0, &theirs));
    EXPECT(known, count_of(theirs, "\"addr\""));
    te_free_text(theirs);
    OK(te_segment_json(engine, segment, 1, &theirs));
    EXPECT(known + 1, count_of(theirs, "\"addr\""));
    te_free_text(theirs);
    CHECK(strcmp(peer_ask(&peer, "unregister %d", PEER_GAP), "0") == 0);
    theirs = NULL;
    EXPECT(TE_ERR_INVALID_HANDLE, te_segment_json(engine, segment + 1, 0, &theirs));
    REFUSED(te_segment_json(engine, segment, 0, NULL));
    CHECK(theirs == NULL);
    OK(te_engine_destroy(engine));
    te_engine_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    options.transport = "";
    OK(te_engine_create(&options, &engine));
    EXPECT(TE_ERR_METADATA, te_segment_json(engine, TE_LOCAL_SEGMENT, 0, &theirs));
    OK(te_engine_destroy(engine));
}

static void peers_are_probed_notified_and_forgotten_by_name(void) {
    te_engine *engine = create_engine();
    te_segment segment, again;
    OK(te_probe(engine, peer.address));
    OK(te_notify_name(engine, peer.address, "name", "text"));
    CHECK(strcmp(peer_ask(&peer, "take"), "name text") == 0);
    OK(te_forget_segment(engine, peer.address));
    OK(te_open_segment(engine, peer.address, &segment));
    OK(te_forget_segment(engine, peer.address));
    EXPECT(TE_ERR_INVALID_HANDLE, te_refresh_segment(engine, segment));
    OK(te_open_segment(engine, peer.address, &again));
    CHECK(again != segment);
    EXPECT(TE_ERR_SOCKET, te_probe(engine, "127.0.0.1:1"));
    EXPECT(TE_ERR_SOCKET, te_notify_name(engine, "127.0.0.1:1", "name", "text"));
    REFUSED(te_probe(engine, NULL));
    REFUSED(te_probe(engine, "/"));
    REFUSED(te_forget_segment(engine, NULL));
    REFUSED(te_notify_name(engine, NULL, "name", "text"));
    REFUSED(te_notify_name(engine, peer.address, NULL, "text"));
    /* There is nobody to tell anew where peers ask by themselves. */
    OK(te_publish(engine));
    OK(te_publish_address(engine));
    OK(te_engine_destroy(engine));
}

static void overlaps_are_found(void) {
    static char memory[256];
    te_engine *engine = create_engine();
    te_memory_region region;
    memset(&region, 0, sizeof region);
    region.struct_size = sizeof region;
    OK(te_register_local_memory(engine, memory + 64, 64, NULL));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_find_overlap(engine, memory, 64, &region));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_find_overlap(engine, memory + 128, 64, &region));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_find_overlap(engine, memory + 100, 0, &region));
    EXPECT(0, region.addr);
    OK(te_find_overlap(engine, memory, 65, &region));
    EXPECT((uintptr_t)memory + 64, region.addr);
    EXPECT(64, region.length);
    OK(te_find_overlap(engine, memory + 127, 100, &region));
    REFUSED(te_find_overlap(engine, memory, 65, NULL));
    REFUSED(te_find_overlap(engine, memory, SIZE_MAX, &region));
    region.struct_size = 4;
    REFUSED(te_find_overlap(engine, memory, 65, &region));
    OK(te_engine_destroy(engine));
}

static void memory_is_where_its_pages_are(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), length = 64 * page, count = 99;
    char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    te_location_entry entries[64];
    unsigned char resident[64];
    CHECK(memory != MAP_FAILED);
    OK(te_memory_location(memory, length, 0, entries, sizeof *entries, 64, &count));
    EXPECT(1, count);
    CHECK(strcmp(entries[0].location, "*") == 0 && entries[0].addr == (uintptr_t)memory && entries[0].length == length);
    OK(mincore(memory, length, resident));
    for (int i = 0; i < 64; i++)
        CHECK((resident[i] & 1) == 0);
    memory[8 * page] = 1;
    OK(te_memory_location(memory + 10, length - 10, 0, entries, sizeof *entries, 64, &count));
    /* Three parts, or one where the kernel does not tell. */
    CHECK(count == 3 || count == 1);
    uint64_t end = (uintptr_t)memory + 10;
    for (size_t i = 0; i < count; i++) {
        EXPECT(end, entries[i].addr);
        EXPECT(sizeof *entries, entries[i].struct_size);
        end += entries[i].length;
    }
    EXPECT((uintptr_t)memory + length, end);
    if (count == 3) {
        CHECK(strncmp(entries[1].location, "cpu:", 4) == 0);
        EXPECT(page, entries[1].length);
    }
    size_t all = count;
    OK(te_memory_location(memory + 10, length - 10, 0, NULL, sizeof *entries, 0, &count));
    EXPECT(all, count);
    OK(te_memory_location(memory + 8 * page, page, 1, entries, sizeof *entries, 1, &count));
    EXPECT(1, count);
    EXPECT(page, entries[0].length);
    REFUSED(te_memory_location(NULL, length, 0, entries, sizeof *entries, 64, &count));
    REFUSED(te_memory_location(memory, length, 0, entries, sizeof *entries, 64, NULL));
    REFUSED(te_memory_location(memory, length, 0, NULL, sizeof *entries, 1, &count));
    REFUSED(te_memory_location(memory, length, 0, entries, 8, 1, &count));
    REFUSED(te_memory_location(memory, SIZE_MAX, 0, entries, sizeof *entries, 64, &count));
    OK(munmap(memory, length));
}

static void the_configuration_is_read_at_each_call(void) {
    te_configuration configuration;
    memset(&configuration, 0, sizeof configuration);
    REFUSED(te_read_configuration(&configuration));
    REFUSED(te_read_configuration(NULL));
    configuration.struct_size = sizeof configuration;
    OK(unsetenv("MC_MAX_WR"));
    OK(te_read_configuration(&configuration));
    EXPECT(256, configuration.max_work_requests);
    EXPECT(0, configuration.max_work_requests_is_set);
    OK(setenv("MC_MAX_WR", "77", 1));
    OK(setenv("MC_MTU", "nonsense", 1));
    OK(te_read_configuration(&configuration));
    EXPECT(77, configuration.max_work_requests);
    EXPECT(1, configuration.max_work_requests_is_set);
    EXPECT(4096, configuration.mtu);
    OK(unsetenv("MC_MAX_WR"));
    OK(unsetenv("MC_MTU"));
}

static void nics_have_loads_and_tcp_has_none(void) {
    te_engine *engine = create_engine();
    te_nic_load load;
    size_t count = 99;
    OK(te_nic_loads(engine, NULL, sizeof load, 0, &count));
    EXPECT(0, count);
    OK(te_nic_loads(engine, &load, sizeof load, 1, &count));
    REFUSED(te_nic_loads(engine, &load, sizeof load, 1, NULL));
    REFUSED(te_nic_loads(engine, &load, 8, 1, &count));
    REFUSED(te_nic_loads(engine, NULL, sizeof load, 1, &count));
    OK(te_engine_destroy(engine));
}

/* What the socket answers, with its head, and NULs at its end. */
static void read_metrics(const char *path, char *answer, size_t size) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char request[] = "GET /metrics HTTP/1.0\r\n\r\n";
    size_t length = 0;
    ssize_t count;
    int socket_ = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    CHECK(connect(socket_, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(write(socket_, request, sizeof request - 1) == (ssize_t)sizeof request - 1);
    memset(answer, 0, size);
    while ((count = read(socket_, answer + length, size - 1 - length)) > 0)
        length += (size_t)count;
    close(socket_);
}

static void metrics_are_text_and_their_socket_goes_with_the_engine(void) {
    static char answer[256 << 10];
    char directory[] = "/tmp/te-metrics-XXXXXX", path[64], *text = NULL;
    struct stat found;
    te_engine *engine = create_engine();
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/socket", directory);
    OK(te_metrics(engine, &text));
    CHECK(strstr(text, "# TYPE transfer_engine_request_latency_seconds histogram\n") != NULL);
    te_free_text(text);
    REFUSED(te_metrics(engine, NULL));
    CHECK(stat(path, &found) != 0);
    OK(te_serve_metrics(engine, path));
    CHECK(stat(path, &found) == 0 && S_ISSOCK(found.st_mode) && (found.st_mode & 0777) == 0600);
    read_metrics(path, answer, sizeof answer);
    CHECK(strncmp(answer, "HTTP/1.0 200 OK\r\n", 17) == 0);
    CHECK(strstr(answer, "\ntransfer_engine_tasks_completed_total 0\n") != NULL);
    te_engine *other = create_engine();
    REFUSED(te_serve_metrics(other, path));
    OK(te_engine_destroy(other));
    OK(te_engine_destroy(engine));
    CHECK(stat(path, &found) != 0);
    CHECK(rmdir(directory) == 0);
}

static void requests_take_hints_and_those_of_older_programs_have_none(void) {
    enum { COUNT = 16, LENGTH = 128 << 10 };
    static char memory[COUNT * LENGTH];
    te_transfer_request requests[COUNT];
    te_engine *engine = create_engine();
    te_segment segment;
    te_statistics statistics;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_open_segment(engine, peer.address, &segment));
    for (int i = 0; i < COUNT; i++) {
        memset(memory + i * LENGTH, i + 1, LENGTH);
        requests[i] = make_request(TE_WRITE, memory + i * LENGTH, segment, peer.base, LENGTH);
        requests[i].group = 42;
        requests[i].retry_hint = (uint32_t)i;
        requests[i].transport_hint = 1;
    }
    OK(te_batch_transfer(engine, requests, sizeof *requests, COUNT, NULL, NULL, 0));
    OK(te_get_statistics(engine, &statistics));
    EXPECT(1, statistics.connections_opened);
    CHECK(strtoull(peer_ask(&peer, "sum 0 %d", LENGTH), NULL, 0) ==
          checksum((unsigned char *)memory + (COUNT - 1) * LENGTH, LENGTH));
    /* The struct as it was in the first version. */
    struct {
        char bytes[40];
    } older[2];
    for (int i = 0; i < 2; i++)
        memcpy(&older[i], &requests[i], sizeof older[i]);
    OK(te_batch_transfer(engine, (te_transfer_request *)older, sizeof *older, 2, NULL, NULL, 0));
    OK(te_engine_destroy(engine));
}

static struct {
    te_engine *engine;
    te_segment segment;
    int rounds;
} reader;

static void *read_until_it_is_over(void *unused) {
    (void)unused;
    static char memory[64];
    te_status status;
    while ((status = transfer(reader.engine, TE_READ, memory, reader.segment, peer.base, sizeof memory)) == 0)
        __atomic_add_fetch(&reader.rounds, 1, __ATOMIC_RELAXED);
    EXPECT(TE_ERR_CANCELED, status);
    return NULL;
}

static void an_engine_that_is_shut_down_keeps_its_handle(void) {
    static char memory[64];
    pthread_t thread;
    char text[64];
    int installed = 7;
    te_batch batch;
    te_engine *engine = reader.engine = create_engine();
    te_topology *topology = NULL;
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_engine_topology(engine, &topology));
    OK(te_batch_create(engine, 1, &batch));
    OK(te_open_segment(engine, peer.address, &reader.segment));
    OK(pthread_create(&thread, NULL, read_until_it_is_over, NULL));
    while (__atomic_load_n(&reader.rounds, __ATOMIC_RELAXED) == 0)
        usleep(1000);
    OK(te_shut_down(engine));
    OK(pthread_join(thread, NULL));
    OK(te_shut_down(engine));
    EXPECT(TE_ERR_CANCELED, te_register_local_memory(engine, memory, sizeof memory, NULL));
    EXPECT(TE_ERR_CANCELED, te_probe(engine, peer.address));
    EXPECT(TE_ERR_CANCELED, te_publish(engine));
    OK(te_engine_address(engine, text, sizeof text));
    OK(te_has_transport(engine, "tcp", &installed));
    EXPECT(0, installed);
    OK(te_engine_destroy(engine));
    EXPECT(TE_ERR_INVALID_HANDLE, te_shut_down(engine));
    OK(te_topology_destroy(topology));
}

int main(void) {
    peer_start(&peer);
    descriptors_are_told_as_json();
    peers_are_probed_notified_and_forgotten_by_name();
    overlaps_are_found();
    memory_is_where_its_pages_are();
    the_configuration_is_read_at_each_call();
    nics_have_loads_and_tcp_has_none();
    metrics_are_text_and_their_socket_goes_with_the_engine();
    requests_take_hints_and_those_of_older_programs_have_none();
    an_engine_that_is_shut_down_keeps_its_handle();
    peer_end(&peer);
    return 0;
}
