/* te.h: memory that is not what it was when it was registered, or never was what it seemed. A transfer that meets it fails; the
 * process and its other transfers live on.
 *
 * Both engines are in this process, and see each other as any peer: over TCP. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"

enum { LENGTH = 64 << 10, PAGE = 4096 };

static te_engine *target, *initiator;
static te_segment segment;
static unsigned char good[LENGTH], local[LENGTH];

static unsigned char *map(int protection, int flags, int fd) {
    void *memory = mmap(NULL, LENGTH, protection, flags, fd, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static unsigned char *map_anonymous(int protection) { return map(protection, MAP_PRIVATE | MAP_ANONYMOUS, -1); }

/* Where nobody else maps anything, so that it stays a hole once it is unmapped. Not every place is free under sanitizers. */
static unsigned char *map_aside(int protection) {
    static const uintptr_t places[] = {(uintptr_t)1 << 38, (uintptr_t)1 << 45};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        void *place = (void *)places[i];
        if (mmap(place, LENGTH, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == place) return place;
    }
    CHECK(!"no free place");
    return NULL;
}

/* A file of LENGTH bytes that has no name any more. */
static int make_file(void) {
    char name[] = "/tmp/transfer_engine_test_XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && unlink(name) == 0);
    CHECK(write(fd, good, LENGTH) == LENGTH);
    return fd;
}

static te_status move(te_opcode opcode, const void *remote) {
    return transfer(initiator, opcode, local, segment, (uintptr_t)remote, LENGTH);
}

static void others_still_move(void) {
    fill(good, LENGTH, 5);
    memset(local, 0, LENGTH);
    OK(move(TE_READ, good));
    CHECK(memcmp(local, good, LENGTH) == 0);
    fill(local, LENGTH, 6);
    OK(move(TE_WRITE, good));
    CHECK(memcmp(local, good, LENGTH) == 0);
}

static void unmapped_memory_blocks_its_range_and_can_be_removed(void) {
    unsigned char *memory = map_aside(PROT_READ | PROT_WRITE);
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
    OK(move(TE_WRITE, memory));
    OK(munmap(memory, LENGTH));
    REFUSED(move(TE_READ, memory));
    REFUSED(move(TE_WRITE, memory));
    others_still_move();

    /* The range is mapped anew, as other memory. */
    void *again = mmap(memory, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(again == memory);
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(target, memory, LENGTH, NULL));
    OK(te_unregister_local_memory(target, memory));
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
    fill(local, LENGTH, 7);
    OK(move(TE_WRITE, memory));
    CHECK(memcmp(local, memory, LENGTH) == 0);
    OK(te_unregister_local_memory(target, memory));
    OK(munmap(memory, LENGTH));
}

static void a_hole_in_the_middle_fails_the_transfer(void) {
    unsigned char *memory = map_aside(PROT_READ | PROT_WRITE);
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
    OK(munmap(memory + 5 * PAGE, PAGE));
    REFUSED(move(TE_READ, memory));
    REFUSED(move(TE_WRITE, memory));
    others_still_move();
    OK(transfer(initiator, TE_READ, local, segment, (uintptr_t)(memory + 6 * PAGE), 4 * PAGE));
    OK(te_unregister_local_memory(target, memory));
    OK(munmap(memory, LENGTH));
}

/* Refused at once, or at first use. */
static void expect_no_access(unsigned char *memory, int may_read) {
    if (te_register_local_memory(target, memory, LENGTH, NULL) == 0) {
        REFUSED(move(TE_WRITE, memory));
        if (may_read) {
            OK(move(TE_READ, memory));
            CHECK(memcmp(local, memory, LENGTH) == 0);
        } else {
            REFUSED(move(TE_READ, memory));
        }
        OK(te_unregister_local_memory(target, memory));
    }
    others_still_move();
}

static void memory_without_access_fails_at_its_first_use(void) {
    unsigned char *memory = map_aside(PROT_NONE);
    expect_no_access(memory, 0);
    OK(munmap(memory, LENGTH));
    expect_no_access(memory, 0);
}

static void read_only_memory_can_be_read(void) {
    int fd = make_file();
    unsigned char *memory = map(PROT_READ, MAP_SHARED, fd);
    expect_no_access(memory, 1);
    OK(munmap(memory, LENGTH));
    close(fd);
}

static void a_truncated_file_raises_no_signal(void) {
    int fd = make_file();
    unsigned char *memory = map(PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
    OK(move(TE_WRITE, memory));
    OK(ftruncate(fd, 2 * PAGE));
    REFUSED(move(TE_READ, memory));
    REFUSED(move(TE_WRITE, memory));
    others_still_move();
    OK(te_unregister_local_memory(target, memory));
    OK(munmap(memory, LENGTH));
    close(fd);
}

/* The local side of a transfer need not be registered, but must be there; a device's address is not. */
static void local_memory_that_is_not_there_fails_the_transfer(void) {
    unsigned char *memory = map_aside(PROT_NONE);
    for (int mapped = 1; mapped >= 0; mapped--) {
        for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
            EXPECT(TE_ERR_FAULT, transfer(initiator, (te_opcode)opcode, memory, segment, (uintptr_t)good, LENGTH));
            char address[32];
            snprintf(address, sizeof address, "%#llx", (unsigned long long)(uintptr_t)memory);
            CHECK(strstr(te_last_error(), address) != NULL && strstr(te_last_error(), "GPU") != NULL);
            others_still_move();
        }
        if (mapped) OK(munmap(memory, LENGTH));
    }

    /* Half of it is there. */
    memory = map_anonymous(PROT_READ | PROT_WRITE);
    OK(mprotect(memory + LENGTH / 2, LENGTH / 2, PROT_NONE));
    EXPECT(TE_ERR_FAULT, transfer(initiator, TE_WRITE, memory, segment, (uintptr_t)good, LENGTH));
    EXPECT(TE_ERR_FAULT, transfer(initiator, TE_READ, memory, segment, (uintptr_t)good, LENGTH));
    others_still_move();
    OK(munmap(memory, LENGTH));
}

/* Reading into memory that cannot be written, writing from memory that can only be read. */
static void read_only_memory_is_a_source_and_no_sink(void) {
    unsigned char *memory = map_anonymous(PROT_READ | PROT_WRITE);
    fill(memory, LENGTH, 12);
    OK(mprotect(memory, LENGTH, PROT_READ));
    OK(transfer(initiator, TE_WRITE, memory, segment, (uintptr_t)good, LENGTH));
    CHECK(memcmp(memory, good, LENGTH) == 0);
    EXPECT(TE_ERR_FAULT, transfer(initiator, TE_READ, memory, segment, (uintptr_t)good, LENGTH));
    others_still_move();
    OK(munmap(memory, LENGTH));
}

/* One bad entry of a batch leaves the others alone. */
static void a_bad_source_fails_its_own_request_only(void) {
    enum { COUNT = 9, BAD = 4, PART = 4096 };
    unsigned char *memory = map_aside(PROT_NONE);
    te_transfer_request requests[COUNT];
    te_transfer_result results[COUNT];
    fill(local, LENGTH, 13);
    memset(good, 0, LENGTH);
    memset(results, 0, sizeof results);
    for (int i = 0; i < COUNT; i++)
        requests[i] = make_request(TE_WRITE, i == BAD ? memory : local + i * PART, segment, (uintptr_t)(good + i * PART), PART);
    EXPECT(TE_ERR_FAULT, te_batch_transfer(initiator, requests, sizeof requests[0], COUNT, NULL, results, sizeof results[0]));
    for (int i = 0; i < COUNT; i++) {
        EXPECT(i == BAD ? TE_STATE_FAILED : TE_STATE_COMPLETED, results[i].state);
        EXPECT(i == BAD ? TE_ERR_FAULT : 0, results[i].error);
        if (i != BAD) CHECK(memcmp(local + i * PART, good + i * PART, PART) == 0);
    }
    OK(munmap(memory, LENGTH));
}

int main(void) {
    char address[256];
    target = create_engine();
    initiator = create_engine();
    OK(te_register_local_memory(target, good, LENGTH, NULL));
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &segment));

    others_still_move();
    unmapped_memory_blocks_its_range_and_can_be_removed();
    a_hole_in_the_middle_fails_the_transfer();
    memory_without_access_fails_at_its_first_use();
    read_only_memory_can_be_read();
    a_truncated_file_raises_no_signal();
    local_memory_that_is_not_there_fails_the_transfer();
    read_only_memory_is_a_source_and_no_sink();
    a_bad_source_fails_its_own_request_only();

    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    return 0;
}
