/* transfer_engine_c.h: transfers and notifications between two processes, used the way that upstream's callers use it. */
#include <string.h>
#include <time.h>
#include <transfer_engine_c.h>
#include <unistd.h>

#include "check.h"
#include "peer.h"

static transfer_engine_t engine;
static struct peer peer;
static segment_handle_t segment;
static unsigned char *local;
enum { LOCAL_LENGTH = 16 << 20 };

static transfer_request_t request(int opcode, size_t local_offset, size_t offset, size_t length) {
    transfer_request_t request = {opcode, local + local_offset, segment, peer.base + offset, length};
    return request;
}

static int wait_for_task(batch_id_t batch, size_t task, uint64_t *bytes) {
    transfer_status_t status;
    do OK(getTransferStatus(engine, batch, task, &status));
    while (status.status == STATUS_WAITING);
    if (bytes != NULL) *bytes = status.transferred_bytes;
    return status.status;
}

static int move(int opcode, size_t local_offset, size_t offset, size_t length) {
    transfer_request_t entry = request(opcode, local_offset, offset, length);
    batch_id_t batch = allocateBatchID(engine, 1);
    CHECK(batch != INVALID_BATCH);
    OK(submitTransfer(engine, batch, &entry, 1));
    int status = wait_for_task(batch, 0, NULL);
    OK(freeBatchID(engine, batch));
    return status;
}

static uint64_t peer_sum(size_t offset, size_t length) {
    return strtoull(peer_ask(&peer, "sum %zu %zu", offset, length), NULL, 10);
}

static void segments_are_opened_by_address(void) {
    char slashed[300];
    segment = openSegment(engine, peer.address);
    CHECK(segment > 0);
    EXPECT(segment, openSegment(engine, peer.address));
    EXPECT(segment, openSegmentNoCache(engine, peer.address));
    snprintf(slashed, sizeof slashed, "//%s", peer.address);
    EXPECT(segment, openSegment(engine, slashed));
    EXPECT(-1, openSegment(engine, ""));
    EXPECT(-1, openSegment(engine, "127.0.0.1:1"));
    EXPECT(-1, openSegment(engine, NULL));
    OK(closeSegment(engine, segment));
    OK(syncSegmentCache(engine));

    /* Despite its name, it forgets any segment; the next opening gets a new number. */
    OK(removeLocalSegment(engine, peer.address));
    segment_handle_t again = openSegment(engine, peer.address);
    CHECK(again > 0 && again != segment);
    segment = again;
    OK(removeLocalSegment(engine, "never.opened:1"));
    EXPECT(-1, removeLocalSegment(engine, ""));
}

static void batches_write_and_read(void) {
    enum { COUNT = 16 };
    transfer_request_t requests[COUNT];
    uint64_t bytes;
    fill(local, COUNT << 19, 3);
    for (size_t i = 0; i < COUNT; i++) requests[i] = request(OPCODE_WRITE, i << 19, PEER_LARGE + 1 + (i << 20), (1 << 19) - i);
    batch_id_t batch = allocateBatchID(engine, COUNT);
    OK(submitTransfer(engine, batch, requests, COUNT / 2));
    OK(submitTransfer(engine, batch, requests + COUNT / 2, COUNT / 2));
    for (size_t i = 0; i < COUNT; i++) {
        EXPECT(STATUS_COMPLETED, wait_for_task(batch, i, &bytes));
        EXPECT(requests[i].length, bytes);
        EXPECT(checksum(local + (i << 19), requests[i].length), peer_sum(PEER_LARGE + 1 + (i << 20), requests[i].length));
    }
    OK(freeBatchID(engine, batch));

    uint64_t expected = peer_sum(PEER_LARGE, 8 << 20);
    memset(local, 0, LOCAL_LENGTH);
    EXPECT(STATUS_COMPLETED, move(OPCODE_READ, 100, PEER_LARGE, 8 << 20));
    EXPECT(expected, checksum(local + 100, 8 << 20));
    CHECK(local[99] == 0 && local[100 + (8 << 20)] == 0);
}

static void what_is_not_registered_fails(void) {
    uint64_t gap = peer_sum(PEER_GAP, PEER_LARGE - PEER_GAP);
    EXPECT(STATUS_FAILED, move(OPCODE_WRITE, 0, PEER_GAP, 8));
    EXPECT(STATUS_FAILED, move(OPCODE_READ, 0, PEER_PRIVATE, 8));
    EXPECT(STATUS_FAILED, move(OPCODE_WRITE, 0, PEER_PRIVATE, 8));
    EXPECT(STATUS_FAILED, move(OPCODE_READ, 0, PEER_LARGE + PEER_LARGE_LENGTH - 1, 2));
    EXPECT(gap, peer_sum(PEER_GAP, PEER_LARGE - PEER_GAP));
    EXPECT(STATUS_COMPLETED, move(OPCODE_READ, 0, PEER_FIRST, 8));
}

static void take_one(const char *name, const char *message) {
    int size = 0;
    notify_msg_t *list = NULL;
    for (int i = 0; i < 20000 && list == NULL; i++) {
        list = getNotifsFromEngine(engine, &size);
        if (list == NULL) {
            EXPECT(0, size);
            usleep(1000);
        }
    }
    EXPECT(1, size);
    CHECK(strcmp(list[0].name, name) == 0 && strcmp(list[0].msg, message) == 0);
    OK(freeNotifsMsgBuf(list, size));
    OK(freeNotifsMsgBuf(NULL, 0));
}

static void notifications_go_both_ways_and_to_oneself(void) {
    notify_msg_t message = {(char *)"hello", (char *)"there"}, empty = {NULL, NULL};
    char address[128];
    OK(genNotifyInEngine(engine, segment, message));
    CHECK(strcmp(peer_ask(&peer, "take"), "hello there") == 0);
    OK(getLocalIpAndPort(engine, address, sizeof address));
    CHECK(strcmp(peer_ask(&peer, "notify %s back again", address), "0") == 0);
    take_one("back", "again");
    OK(genNotifyInEngine(engine, LOCAL_SEGMENT, message));
    take_one("hello", "there");
    EXPECT(-200, genNotifyInEngine(engine, 4711, message));
    EXPECT(-1, genNotifyInEngine(engine, segment, empty));
}

static void a_notification_follows_the_bytes(void) {
    transfer_request_t entry = request(OPCODE_WRITE, 0, PEER_LARGE, 1 << 20);
    notify_msg_t message = {(char *)"bytes", (char *)"are_there"}, empty = {NULL, NULL};
    fill(local, 1 << 20, 99);
    batch_id_t batch = allocateBatchID(engine, 1);
    EXPECT(1, submitTransferWithNotify(engine, batch, &entry, 0, message));
    CHECK(submitTransferWithNotify(engine, batch, &entry, 1, empty) > 0);
    OK(submitTransferWithNotify(engine, batch, &entry, 1, message));
    CHECK(strcmp(peer_ask(&peer, "take"), "bytes are_there") == 0);
    EXPECT(checksum(local, 1 << 20), peer_sum(PEER_LARGE, 1 << 20));
    EXPECT(STATUS_COMPLETED, wait_for_task(batch, 0, NULL));
    OK(freeBatchID(engine, batch));
}

/* MC_SLICE_TIMEOUT is set, as main() says: then the old interface tells TIMEOUT, and the batch can be freed. */
static void a_silent_peer_times_out(void) {
    transfer_request_t entry = request(OPCODE_READ, 0, PEER_LARGE, 1 << 20);
    batch_id_t batch = allocateBatchID(engine, 1);
    time_t start = time(NULL);
    peer_stop(&peer);
    OK(submitTransfer(engine, batch, &entry, 1));
    EXPECT(4, freeBatchID(engine, batch));
    transfer_status_t status;
    do {
        usleep(10000);
        OK(getTransferStatus(engine, batch, 0, &status));
    } while (status.status == STATUS_WAITING && time(NULL) - start < 30);
    EXPECT(STATUS_TIMEOUT, status.status);
    OK(freeBatchID(engine, batch));
    peer_continue(&peer);
    EXPECT(STATUS_COMPLETED, move(OPCODE_READ, 0, PEER_FIRST, 4096));
}

int main(void) {
    setenv("MC_SLICE_TIMEOUT", "2", 1);
    local = malloc(LOCAL_LENGTH);
    CHECK(local != NULL);
    peer_start(&peer);
    engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1:12345", "127.0.0.1", 12345, 0);
    CHECK(engine != NULL);
    CHECK(installTransport(engine, "tcp", NULL) != NULL);
    OK(registerLocalMemory(engine, local, LOCAL_LENGTH, "*", 1));

    segments_are_opened_by_address();
    batches_write_and_read();
    what_is_not_registered_fails();
    notifications_go_both_ways_and_to_oneself();
    a_notification_follows_the_bytes();
    a_silent_peer_times_out();

    OK(unregisterLocalMemory(engine, local));
    destroyTransferEngine(engine);
    peer_end(&peer);
    free(local);
    return 0;
}
