/* transfer_engine_c.h: what needs no second process: both error polarities, null and dead handles, memory, texts, shutdown. */
#include <signal.h>
#include <sys/wait.h>
#include <transfer_engine_c.h>
#include <unistd.h>

#include "check.h"
#include "child.h"

#include <string.h>

static transfer_engine_t create(int auto_discover) {
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, auto_discover);
    CHECK(engine != NULL);
    return engine;
}

/* Functions of one kind answer with negative ERR_ numbers, those of the other with positive ones. */
static void all_refuse(transfer_engine_t engine) {
    static char memory[64];
    char text[64] = "";
    buffer_entry_t entry = {memory, sizeof memory};
    void *addrs[1] = {memory};
    transfer_request_t request = {OPCODE_READ, memory, LOCAL_SEGMENT, (uintptr_t)memory, 8};
    transfer_status_t status = {77, 77};
    notify_msg_t message = {(char *)"name", (char *)"message"};
    nic_load_stat_t loads[2];
    size_t count = 2;
    int size = 77;

    CHECK(discoverTopology(engine) < 0);
    CHECK(getLocalIpAndPort(engine, text, sizeof text) < 0);
    CHECK(installTransport(engine, "tcp", NULL) == NULL);
    CHECK(openSegment(engine, "127.0.0.1:9") < 0);
    CHECK(openSegmentNoCache(engine, "127.0.0.1:9") < 0);
    CHECK(removeLocalSegment(engine, "127.0.0.1:9") < 0);
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) < 0);
    CHECK(unregisterLocalMemory(engine, memory) < 0);
    CHECK(registerLocalMemoryBatch(engine, &entry, 1, "*") < 0);
    CHECK(unregisterLocalMemoryBatch(engine, addrs, 1) < 0);
    CHECK(genNotifyInEngine(engine, LOCAL_SEGMENT, message) < 0);
    CHECK(syncSegmentCache(engine) < 0);
    CHECK(showLinks(engine, text, sizeof text, 1) < 0);
    CHECK(*te_last_error());

    CHECK(allocateBatchID(engine, 1) == INVALID_BATCH);
    CHECK(submitTransfer(engine, 1, &request, 1) > 0);
    CHECK(submitTransferWithNotify(engine, 1, &request, 1, message) > 0);
    CHECK(getTransferStatus(engine, 1, 0, &status) > 0);
    CHECK(status.status == 77 && status.transferred_bytes == 77);
    CHECK(freeBatchID(engine, 1) > 0);
    CHECK(getNicLoadStats(engine, loads, &count) != 0);
    CHECK(getNotifsFromEngine(engine, &size) == NULL && size == 0);
    enableGracefulShutdown(engine);
}

static void handles_that_name_nothing_are_refused(void) {
    static char memory[64];
    transfer_engine_t engine = create(1);
    all_refuse(NULL);
    all_refuse((transfer_engine_t)1);
    all_refuse(memory);
    destroyTransferEngine(engine);
    all_refuse(engine);
    destroyTransferEngine(engine);
    destroyTransferEngine(NULL);
}

static void creation_fails_with_null(void) {
    CHECK(createTransferEngine(NULL, "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    CHECK(createTransferEngine("P2PHANDSHAKE", NULL, "127.0.0.1", 0, 0) == NULL);
    CHECK(createTransferEngine("nothing://127.0.0.1:1", "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    CHECK(*te_last_error());
    /* These two are ignored, as by upstream. */
    destroyTransferEngine(createTransferEngine("P2PHANDSHAKE", "127.0.0.1", NULL, 0, 0));
}

static void transports_are_installed_once(void) {
    transfer_engine_t engine = create(0);
    CHECK(installTransport(engine, "pigeon", NULL) == NULL);
    CHECK(installTransport(engine, NULL, NULL) == NULL);
    OK(discoverTopology(engine));
    void *arguments[2] = {NULL, NULL};
    transport_t tcp = installTransport(engine, "tcp", arguments);
    CHECK(tcp != NULL);
    CHECK(installTransport(engine, "tcp", NULL) == tcp);
    OK(uninstallTransport(engine, "tcp"));
    OK(warmupEfaSegment(engine, "127.0.0.1:9"));
    destroyTransferEngine(engine);
}

static void memory_is_registered_with_upstreams_numbers(void) {
    static char memory[1 << 14];
    transfer_engine_t engine = create(1);
    buffer_entry_t entries[3] = {{memory, 4096}, {memory + 4096, 4096}, {memory + 8192, 0}};
    void *addrs[3] = {memory, memory + 4096, memory + 8192};

    EXPECT(-1, registerLocalMemory(engine, memory, 0, "*", 1));
    EXPECT(-1, registerLocalMemory(engine, NULL, 4096, "*", 1));
    OK(registerLocalMemory(engine, memory, 4096, "cpu:0", 1));
    EXPECT(-7, registerLocalMemory(engine, memory, 4096, "cpu:0", 1));
    EXPECT(-7, registerLocalMemory(engine, memory + 4095, 2, "*", 0));
    OK(registerLocalMemory(engine, memory + 4096, 4096, NULL, 0));
    EXPECT(-3, unregisterLocalMemory(engine, memory + 1));
    OK(unregisterLocalMemory(engine, memory + 4096));
    OK(unregisterLocalMemory(engine, memory));
    EXPECT(-3, unregisterLocalMemory(engine, memory));

    EXPECT(-1, registerLocalMemoryBatch(engine, entries, 3, "*"));
    OK(registerLocalMemoryBatch(engine, entries, 2, "*"));
    EXPECT(-7, registerLocalMemoryBatch(engine, entries, 2, "*"));
    EXPECT(-3, unregisterLocalMemoryBatch(engine, addrs, 3));
    OK(registerLocalMemoryBatch(engine, entries, 2, "*"));
    OK(unregisterLocalMemoryBatch(engine, addrs, 2));
    OK(registerLocalMemoryBatch(engine, NULL, 0, "*"));
    OK(unregisterLocalMemoryBatch(engine, NULL, 0));
    EXPECT(-1, registerLocalMemoryBatch(engine, NULL, 1, "*"));
    destroyTransferEngine(engine);
}

/* The old interface has no argument for it, so the environment switches it on. */
static void count_references(void *unused) {
    static char memory[4096];
    (void)unused;
    setenv("TE_REGISTER_REFCOUNT", "1", 1);
    transfer_engine_t engine = create(1);
    OK(registerLocalMemory(engine, memory, sizeof memory, "*", 1));
    OK(registerLocalMemory(engine, memory, sizeof memory, "*", 1));
    EXPECT(-7, registerLocalMemory(engine, memory, sizeof memory, "*", 0));
    EXPECT(-7, registerLocalMemory(engine, memory, sizeof memory, "cpu:0", 1));
    EXPECT(-7, registerLocalMemory(engine, memory, sizeof memory - 1, "*", 1));
    OK(unregisterLocalMemory(engine, memory));
    EXPECT(-7, registerLocalMemory(engine, memory + 1, 1, "*", 1));
    OK(unregisterLocalMemory(engine, memory));
    EXPECT(-3, unregisterLocalMemory(engine, memory));
    destroyTransferEngine(engine);
}

static void references_are_counted_if_the_environment_says_so(void) { in_child(count_references, NULL); }

static void any_location_is_taken(void) {
    static char memory[4096], long_text[10 << 10];
    const char *locations[] = {"*", "", NULL, "cpu:99", "cpu:-1", "cuda:0", "segments:4096:0,1", long_text};
    transfer_engine_t engine = create(1);
    buffer_entry_t entry = {memory, sizeof memory};
    void *addr = memory;
    memset(long_text, 'x', sizeof long_text - 1);
    for (size_t i = 0; i < sizeof locations / sizeof *locations; i++) {
        OK(registerLocalMemory(engine, memory, sizeof memory, locations[i], 1));
        OK(unregisterLocalMemory(engine, memory));
        OK(registerLocalMemoryBatch(engine, &entry, 1, locations[i]));
        OK(unregisterLocalMemoryBatch(engine, &addr, 1));
    }
    destroyTransferEngine(engine);
}

static int move_within(transfer_engine_t engine, int opcode, void *source, void *target, size_t length) {
    transfer_request_t request = {opcode, source, LOCAL_SEGMENT, (uintptr_t)target, length};
    transfer_status_t status;
    batch_id_t batch = allocateBatchID(engine, 1);
    OK(submitTransfer(engine, batch, &request, 1));
    do OK(getTransferStatus(engine, batch, 0, &status));
    while (status.status == STATUS_WAITING);
    OK(freeBatchID(engine, batch));
    return status.status;
}

/* Without remote access memory is the local side of transfers, and never the other. */
static void private_memory_is_local_only(void) {
    static char memory[8192];
    transfer_engine_t engine = create(1);
    OK(registerLocalMemory(engine, memory, 4096, "*", 0));
    OK(registerLocalMemory(engine, memory + 4096, 4096, "*", 1));
    memcpy(memory, "12345678", 8);
    EXPECT(STATUS_COMPLETED, move_within(engine, OPCODE_WRITE, memory, memory + 4096, 8));
    EXPECT(STATUS_COMPLETED, move_within(engine, OPCODE_READ, memory + 8, memory + 4096, 8));
    EXPECT(STATUS_FAILED, move_within(engine, OPCODE_WRITE, memory + 4096, memory + 16, 8));
    EXPECT(STATUS_FAILED, move_within(engine, OPCODE_READ, memory + 4200, memory, 8));
    EXPECT(STATUS_FAILED, move_within(engine, OPCODE_WRITE, memory + 4200, memory + 4092, 8));
    CHECK(memcmp(memory, "1234567812345678\0\0\0\0\0\0\0", 24) == 0 && memory[4200] == 0);
    destroyTransferEngine(engine);
}

static void batches_count_what_they_are_given(void) {
    static char memory[64];
    transfer_engine_t engine = create(1);
    OK(registerLocalMemory(engine, memory, sizeof memory, "*", 1));
    transfer_request_t requests[3] = {
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uintptr_t)(memory + 32), 8},
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uintptr_t)(memory + 40), 8},
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uintptr_t)(memory + 48), 8},
    };
    transfer_status_t status = {77, 77};
    memcpy(memory, "12345678", 8);

    batch_id_t batch = allocateBatchID(engine, 2);
    CHECK(batch != INVALID_BATCH);
    EXPECT(2, submitTransfer(engine, batch, requests, 3));
    EXPECT(1, getTransferStatus(engine, batch, 0, &status));
    EXPECT(77, status.status);
    requests[1].target_id = 4711;
    EXPECT(1, submitTransfer(engine, batch, requests, 2));
    requests[1].target_id = -1;
    EXPECT(1, submitTransfer(engine, batch, requests, 2));
    requests[1].target_id = LOCAL_SEGMENT;
    requests[1].opcode = 7;
    CHECK(submitTransfer(engine, batch, requests, 2) > 0);
    requests[1].opcode = OPCODE_WRITE;
    CHECK(submitTransfer(engine, batch, NULL, 1) > 0);
    OK(submitTransfer(engine, batch, requests, 0));
    OK(submitTransfer(engine, batch, requests, 2));
    for (size_t task = 0; task < 2; task++) {
        do OK(getTransferStatus(engine, batch, task, &status));
        while (status.status == STATUS_WAITING);
        EXPECT(STATUS_COMPLETED, status.status);
        EXPECT(8, status.transferred_bytes);
    }
    CHECK(memcmp(memory + 32, "1234567812345678", 16) == 0 && memory[48] == 0);
    CHECK(getTransferStatus(engine, batch, 0, NULL) > 0);
    EXPECT(1, getTransferStatus(engine, batch, 2, &status));
    OK(freeBatchID(engine, batch));
    CHECK(freeBatchID(engine, batch) > 0);

    /* Ours: a batch can be freed as soon as it is done, polled or not. */
    batch = allocateBatchID(engine, 1);
    OK(submitTransfer(engine, batch, requests, 1));
    int freed = 4;
    for (int i = 0; i < 10000 && freed == 4; i++) {
        freed = freeBatchID(engine, batch);
        if (freed == 4) usleep(1000);
    }
    OK(freed);
    OK(freeBatchID(engine, allocateBatchID(engine, 0)));
    destroyTransferEngine(engine);
}

static void texts_are_cut_to_their_buffers(void) {
    transfer_engine_t engine = create(1);
    char whole[128], cut[8];
    OK(getLocalIpAndPort(engine, whole, sizeof whole));
    CHECK(strncmp(whole, "127.0.0.1:", 10) == 0);
    memset(cut, '#', sizeof cut);
    OK(getLocalIpAndPort(engine, cut, 6));
    CHECK(strcmp(cut, "127.0") == 0 && cut[6] == '#');
    CHECK(getLocalIpAndPort(engine, NULL, 10) < 0);

    for (int json = 0; json < 2; json++) {
        char links[4096];
        memset(links, '#', sizeof links);
        OK(showLinks(engine, links, sizeof links, json));
        CHECK(memchr(links, '\0', sizeof links) != NULL);
        CHECK(strstr(links, json ? "\"local_nics\"" : "=== Local NICs ===") != NULL);
        OK(showLinks(engine, links, 4, json));
        EXPECT(3, strlen(links));
        EXPECT(-1, showLinks(engine, links, 0, json));
    }
    EXPECT(-1, showLinks(engine, NULL, 10, 0));

    nic_load_stat_t loads[1];
    size_t count = 1;
    OK(getNicLoadStats(engine, loads, &count));
    EXPECT(0, count);
    EXPECT(-1, getNicLoadStats(engine, loads, NULL));
    destroyTransferEngine(engine);
}

static void one_handle_serves_both_headers(void) {
    static char memory[4096];
    char old_name[128], new_name[128];
    transfer_engine_t engine = create(1);
    OK(getLocalIpAndPort(engine, old_name, sizeof old_name));
    OK(te_engine_address(engine, new_name, sizeof new_name));
    CHECK(strcmp(old_name, new_name) == 0);
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    EXPECT(-7, registerLocalMemory(engine, memory, sizeof memory, "*", 1));
    OK(unregisterLocalMemory(engine, memory));
    OK(te_engine_destroy(engine));
    CHECK(unregisterLocalMemory(engine, memory) < 0);
}

/* Only a process that asks for it gets signal handlers; it then ends by 128 + the signal's number. */
static void graceful_shutdown_is_opt_in(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        struct sigaction action;
        transfer_engine_t engine = create(1);
        OK(sigaction(SIGTERM, NULL, &action));
        CHECK(action.sa_handler == SIG_DFL);
        enableGracefulShutdown(engine);
        raise(SIGTERM);
        for (;;) pause();
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    EXPECT(128 + SIGTERM, WEXITSTATUS(status));
}

int main(void) {
    graceful_shutdown_is_opt_in();
    creation_fails_with_null();
    handles_that_name_nothing_are_refused();
    transports_are_installed_once();
    memory_is_registered_with_upstreams_numbers();
    references_are_counted_if_the_environment_says_so();
    any_location_is_taken();
    private_memory_is_local_only();
    batches_count_what_they_are_given();
    texts_are_cut_to_their_buffers();
    one_handle_serves_both_headers();
    return 0;
}
