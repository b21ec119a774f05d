/* te.h and transfer_engine_c.h: what a batch promises. Both engines are in this process, and see each other as any peer: over TCP. */
#include <transfer_engine_c.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "peer.h"
#include "wire.h"

enum { LENGTH = 4 << 20 };

static te_engine *target, *initiator;
static te_segment segment;
static unsigned char memory[LENGTH], local[LENGTH];

static uint64_t address_of(size_t offset) { return (uintptr_t)(memory + offset); }

static te_transfer_result task_result(te_batch batch, size_t task) {
    te_transfer_result result;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    OK(te_batch_task_status(initiator, batch, task, &result));
    return result;
}

static te_batch_status poll_batch(te_batch batch) {
    te_batch_status status;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    OK(te_batch_poll(initiator, batch, &status));
    return status;
}

/* --- COMPLETED ------------------------------------------------------------------------------------------------------------------- */

/* Looked at the moment that a task says so, by polling it or by waiting for the batch: its bytes are all in place. And none comes later:
 * what is put there afterwards stays. */
static void move_and_look(te_opcode opcode, size_t count, size_t length, int poll_tasks, uint64_t seed) {
    te_transfer_request requests[64];
    te_batch batch;
    unsigned char looked_at[64] = {0};
    unsigned char *from = opcode == TE_WRITE ? local : memory, *to = opcode == TE_WRITE ? memory : local;
    fill(from, count * length, seed);
    fill(to, count * length, ~seed);
    for (size_t i = 0; i < count; i++) requests[i] = make_request(opcode, local + i * length, segment, address_of(i * length), length);
    OK(te_batch_create(initiator, count, &batch));
    OK(te_batch_submit(initiator, batch, requests, sizeof requests[0], count, NULL));
    if (!poll_tasks) OK(te_batch_wait(initiator, batch, 20000, NULL));
    for (size_t left = count; left > 0;) {
        for (size_t i = 0; i < count; i++) {
            if (looked_at[i]) continue;
            te_transfer_result result = task_result(batch, i);
            if (result.state == TE_STATE_WAITING) continue;
            EXPECT(TE_STATE_COMPLETED, result.state);
            EXPECT(length, result.bytes);
            CHECK(memcmp(from + i * length, to + i * length, length) == 0);
            memset(from + i * length, 0xee, length);
            memset(to + i * length, 0xdd, length);
            looked_at[i] = 1;
            left--;
        }
    }
    OK(te_batch_free(initiator, batch));
    usleep(200);
    for (size_t i = 0; i < count * length; i++) CHECK(from[i] == 0xee && to[i] == 0xdd);
}

static void completed_means_that_all_bytes_are_in_place(void) {
    static const struct {
        size_t count, length;
    } shapes[] = {{1, 1}, {1, 8}, {1, 4096}, {1, 70001}, {1, 1 << 20}, {32, 100}, {64, 4096}, {16, 65536}, {4, (1 << 20) - 3}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int round = 0; round < 8; round++)
            move_and_look(round & 1 ? TE_READ : TE_WRITE, shapes[i].count, shapes[i].length, round & 2, i * 10 + (size_t)round);
    }
}

/* --- borders ----------------------------------------------------------------------------------------------------------------------- */

/* A request across registrations that touch moves as a whole. With a gap of one byte, or a part that is not for peers, none moves. */
static void touching_regions_are_one_range_and_others_are_refused_whole(void) {
    enum { PARTS = 40 };
    size_t starts[PARTS + 1] = {4096};
    OK(te_unregister_local_memory(target, memory));
    for (size_t i = 0; i < PARTS; i++) {
        starts[i + 1] = starts[i] + (i % 3 == 0 ? 1 : i % 3 == 1 ? 4096 : 70001);
        OK(te_register_local_memory(target, memory + starts[i], starts[i + 1] - starts[i], NULL));
    }
    size_t length = starts[PARTS] - starts[0];
    for (size_t first = 0; first < PARTS; first += 7) {
        for (size_t last = first + 1; last < PARTS; last += 5) {
            /* From the middle of one to the middle of the other. */
            size_t start = (starts[first] + starts[first + 1]) / 2, end = (starts[last] + starts[last + 1] + 1) / 2;
            fill(local, end - start, first * PARTS + last);
            memset(memory, 0, sizeof memory);
            OK(transfer(initiator, TE_WRITE, local, segment, address_of(start), end - start));
            CHECK(memcmp(local, memory + start, end - start) == 0 && memory[start - 1] == 0 && memory[end] == 0);
            memset(local, 0, end - start + 1);
            OK(transfer(initiator, TE_READ, local, segment, address_of(start), end - start));
            CHECK(memcmp(local, memory + start, end - start) == 0 && local[end - start] == 0);
            OK(transfer(target, TE_READ, local, TE_LOCAL_SEGMENT, address_of(start), end - start));
        }
    }
    for (int kind = 0; kind < 3; kind++) {
        te_memory_options options = make_memory_options();
        size_t broken = kind == 0 ? 21 : 22; /* of one byte, of a page */
        OK(te_unregister_local_memory(target, memory + starts[broken]));
        if (kind == 1) OK(te_register_local_memory(target, memory + starts[broken], starts[broken + 1] - starts[broken] - 1, NULL));
        options.access = TE_ACCESS_LOCAL;
        if (kind == 2) OK(te_register_local_memory(target, memory + starts[broken], starts[broken + 1] - starts[broken], &options));
        fill(local, length, 3);
        fill(memory, sizeof memory, 4);
        uint64_t before = checksum(memory, sizeof memory), before_local = checksum(local, length);
        for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
            REFUSED(transfer(initiator, (te_opcode)opcode, local, segment, address_of(starts[0]), length));
            REFUSED(transfer(target, (te_opcode)opcode, local, TE_LOCAL_SEGMENT, address_of(starts[0]), length));
        }
        EXPECT(before, checksum(memory, sizeof memory));
        EXPECT(before_local, checksum(local, length));
        if (kind > 0) OK(te_unregister_local_memory(target, memory + starts[broken]));
        OK(te_register_local_memory(target, memory + starts[broken], starts[broken + 1] - starts[broken], NULL));
        OK(transfer(initiator, TE_WRITE, local, segment, address_of(starts[0]), length));
    }
    for (size_t i = 0; i < PARTS; i++) OK(te_unregister_local_memory(target, memory + starts[i]));
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
}

/* --- handles ------------------------------------------------------------------------------------------------------------------------- */

static void expect_no_batch(te_engine *engine, te_batch batch) {
    te_transfer_request request = make_request(TE_READ, local, TE_LOCAL_SEGMENT, address_of(0), 8);
    transfer_request_t entry = {OPCODE_READ, local, LOCAL_SEGMENT, address_of(0), 8};
    transfer_status_t old_status = {77, 77};
    te_transfer_result result;
    te_batch_status status;
    char text[64];
    int fd;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    memset(&status, 0, sizeof status);
    status.struct_size = sizeof status;
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_task_status(engine, batch, 0, &result));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_task_error(engine, batch, 0, text, sizeof text));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_poll(engine, batch, &status));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_wait(engine, batch, 0, &status));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_cancel(engine, batch));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_event_fd(engine, batch, &fd));
    EXPECT(TE_ERR_INVALID_HANDLE, te_batch_free(engine, batch));
    CHECK(submitTransfer((transfer_engine_t)engine, batch, &entry, 1) > 0);
    CHECK(getTransferStatus((transfer_engine_t)engine, batch, 0, &old_status) > 0);
    CHECK(old_status.status == 77 && old_status.transferred_bytes == 77);
    CHECK(freeBatchID((transfer_engine_t)engine, batch) > 0);
}

static void batches_that_are_none_and_tasks_that_are_none_are_refused(void) {
    enum { COUNT = 2000 };
    static te_batch used[COUNT];
    te_transfer_request request = make_request(TE_READ, local, segment, address_of(0), 8);
    te_transfer_result result;
    te_batch batch;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    const te_batch unknown[] = {0, 1, 4711, UINT32_MAX, (te_batch)1 << 32, UINT64_MAX - 1, UINT64_MAX, (uintptr_t)local};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) expect_no_batch(initiator, unknown[i]);

    /* A number is never used again, and means nothing to another engine. */
    for (int i = 0; i < COUNT; i++) {
        OK(te_batch_create(initiator, 1, &used[i]));
        if (i % 100 == 0) {
            for (int j = 0; j < i; j++) CHECK(used[j] != used[i]);
            OK(te_batch_submit(initiator, used[i], &request, sizeof request, 1, NULL));
            OK(te_batch_wait(initiator, used[i], 20000, NULL));
        }
        OK(te_batch_free(initiator, used[i]));
    }
    OK(te_batch_create(initiator, 1, &batch));
    for (int i = 0; i < COUNT; i += 37) expect_no_batch(initiator, used[i]);
    expect_no_batch(initiator, used[COUNT - 1]);

    const size_t none[] = {0, 1, 2, UINT32_MAX, (size_t)1 << 32, SIZE_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) REFUSED(te_batch_task_status(initiator, batch, none[i], &result));
    OK(te_batch_submit(initiator, batch, &request, sizeof request, 1, NULL));
    for (size_t i = 1; i < sizeof none / sizeof *none; i++) REFUSED(te_batch_task_status(initiator, batch, none[i], &result));
    REFUSED(te_batch_task_status(initiator, batch, 0, NULL));
    REFUSED(te_batch_poll(initiator, batch, NULL));
    CHECK(getTransferStatus((transfer_engine_t)initiator, batch, 0, NULL) > 0);
    OK(te_batch_wait(initiator, batch, 20000, NULL));
    OK(te_batch_free(initiator, batch));
}

/* --- refusals ------------------------------------------------------------------------------------------------------------------------ */

static void nothing_is_queued_beyond_the_capacity(void) {
    static const size_t capacities[] = {0, 1, 2, 10, 64};
    te_transfer_request requests[66];
    transfer_request_t entries[66];
    fill(local, LENGTH, 21);
    memset(memory, 0, LENGTH);
    for (size_t i = 0; i < 66; i++) {
        requests[i] = make_request(TE_WRITE, local, segment, address_of(i * 4096), 4096);
        entries[i] = (transfer_request_t){OPCODE_WRITE, local, (int32_t)segment, address_of(i * 4096), 4096};
    }
    for (size_t i = 0; i < sizeof capacities / sizeof *capacities; i++) {
        size_t capacity = capacities[i];
        te_batch batch;
        OK(te_batch_create(initiator, capacity, &batch));
        EXPECT(TE_ERR_TOO_MANY_REQUESTS, te_batch_submit(initiator, batch, requests, sizeof requests[0], capacity + 1, NULL));
        EXPECT(TE_ERR_TOO_MANY_REQUESTS, te_batch_submit(initiator, batch, requests, sizeof requests[0], capacity + 2, NULL));
        EXPECT(2, submitTransfer((transfer_engine_t)initiator, batch, entries, capacity + 1));
        EXPECT(0, poll_batch(batch).tasks);
        usleep(1000);
        for (size_t j = 0; j < LENGTH; j++) CHECK(memory[j] == 0);
        /* What fits is taken, to the last place. */
        if (capacity > 0) {
            OK(te_batch_submit(initiator, batch, requests, sizeof requests[0], capacity - 1, NULL));
            EXPECT(TE_ERR_TOO_MANY_REQUESTS, te_batch_submit(initiator, batch, requests, sizeof requests[0], 2, NULL));
            OK(te_batch_submit(initiator, batch, requests + capacity - 1, sizeof requests[0], 1, NULL));
        }
        EXPECT(TE_ERR_TOO_MANY_REQUESTS, te_batch_submit(initiator, batch, requests, sizeof requests[0], 1, NULL));
        OK(te_batch_wait(initiator, batch, 20000, NULL));
        EXPECT(capacity, poll_batch(batch).tasks);
        EXPECT(TE_STATE_COMPLETED, poll_batch(batch).state);
        for (size_t j = 0; j < capacity; j++) CHECK(memcmp(memory + j * 4096, local, 4096) == 0);
        CHECK(memory[capacity * 4096] == 0);
        OK(te_batch_free(initiator, batch));
        memset(memory, 0, LENGTH);
    }
}

static void one_request_that_cannot_be_starts_none_of_ten(void) {
    enum { COUNT = 10 };
    static const size_t places[] = {0, 4, COUNT - 1};
    te_transfer_request good[COUNT], requests[COUNT];
    te_transfer_result results[COUNT];
    te_batch batch;
    fill(local, LENGTH, 22);
    memset(memory, 0, LENGTH);
    for (size_t i = 0; i < COUNT; i++) good[i] = make_request(TE_WRITE, local, segment, address_of(i * 4096), 4096);
    OK(te_batch_create(initiator, COUNT, &batch));
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        for (int kind = 0; kind < 6; kind++) {
            memcpy(requests, good, sizeof good);
            te_transfer_request *bad = &requests[places[i]];
            switch (kind) {
            case 0: bad->segment = 4711; break;
            case 1: bad->segment = UINT64_MAX; break;
            case 2: bad->opcode = 2; break;
            case 3: bad->local = NULL; break;
            case 4: bad->length = SIZE_MAX; break;
            default: bad->reserved = 1; break;
            }
            memset(results, 0x77, sizeof results);
            REFUSED(te_batch_submit(initiator, batch, requests, sizeof requests[0], COUNT, NULL));
            REFUSED(te_batch_transfer(initiator, requests, sizeof requests[0], COUNT, NULL, results, sizeof results[0]));
            EXPECT(0x77777777, results[0].state);
            EXPECT(0, poll_batch(batch).tasks);
            if (kind < 3) {
                transfer_request_t entries[COUNT];
                for (size_t j = 0; j < COUNT; j++)
                    entries[j] = (transfer_request_t){(int)requests[j].opcode, local, (int32_t)requests[j].segment, requests[j].remote_addr, 4096};
                CHECK(submitTransfer((transfer_engine_t)initiator, batch, entries, COUNT) > 0);
                EXPECT(0, poll_batch(batch).tasks);
            }
        }
    }
    usleep(20000);
    for (size_t j = 0; j < LENGTH; j++) CHECK(memory[j] == 0);
    OK(te_batch_submit(initiator, batch, good, sizeof good[0], COUNT, NULL));
    OK(te_batch_wait(initiator, batch, 20000, NULL));
    EXPECT(TE_STATE_COMPLETED, poll_batch(batch).state);
    OK(te_batch_free(initiator, batch));
}

/* --- the own segment ------------------------------------------------------------------------------------------------------------------- */

static void copy_within(void *unused) {
    static unsigned char ours[12 << 10], model[12 << 10];
    static const size_t distances[] = {0, 1, 7, 8, 63, 64, 100, 4095, 4096, 5000};
    static const size_t lengths[] = {0, 1, 2, 9, 64, 65, 1000, 4096, 5001};
    (void)unused;
    te_engine *engine = create_engine();
    OK(te_register_local_memory(engine, ours, sizeof ours, NULL));
    for (size_t i = 0; i < sizeof distances / sizeof *distances; i++) {
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            for (int kind = 0; kind < 4; kind++) {
                /* The segment's range before or after the local one, as source or target. */
                unsigned char *here = ours + (kind & 1 ? distances[i] : 0), *there = ours + (kind & 1 ? 0 : distances[i]);
                te_opcode opcode = kind & 2 ? TE_READ : TE_WRITE;
                fill(ours, sizeof ours, i * 100 + j);
                memcpy(model, ours, sizeof ours);
                if (opcode == TE_WRITE) memmove(model + (there - ours), model + (here - ours), lengths[j]);
                if (opcode == TE_READ) memmove(model + (here - ours), model + (there - ours), lengths[j]);
                OK(transfer(engine, opcode, here, TE_LOCAL_SEGMENT, (uintptr_t)there, lengths[j]));
                CHECK(memcmp(model, ours, sizeof ours) == 0);
            }
        }
    }
    OK(te_engine_destroy(engine));
}

static void copy_within_by_the_kernel(void *unused) {
    setenv("TE_CHECKED_LOCAL_COPY", "1", 1);
    copy_within(unused);
}

static void the_own_segment_is_copied_as_by_memmove(void) {
    in_child(copy_within_by_the_kernel, NULL);
    copy_within(NULL);
}

/* --- deadlines ------------------------------------------------------------------------------------------------------------------------- */

static double time_of(te_engine *engine, te_transfer_request request, int64_t timeout, int64_t stall, te_status expected) {
    te_transfer_options options = make_transfer_options();
    options.timeout_ms = timeout;
    options.stall_timeout_ms = stall;
    double start = now();
    EXPECT(expected, te_batch_transfer(engine, &request, sizeof request, 1, &options, NULL, 0));
    return now() - start;
}

/* A peer that is stopped. What the engine was told holds for those who say nothing, and they may say more or less. */
static void wait_for_the_silent(void *unused) {
    struct peer peer;
    te_segment silent;
    (void)unused;
    peer_start(&peer);
    setenv("MC_SLICE_TIMEOUT", "1", 1);
    te_engine *engine = create_engine();
    OK(te_open_segment(engine, peer.address, &silent));
    peer_stop(&peer);
    for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
        te_transfer_request request = make_request((te_opcode)opcode, local, silent, peer.base, 1 << 20);
        double plain = time_of(engine, request, 0, 0, TE_ERR_TIMEOUT);
        CHECK(plain > 0.8 && plain < 5);
        CHECK(time_of(engine, request, 100, 0, TE_ERR_TIMEOUT) < 0.8);
        CHECK(time_of(engine, request, 0, 100, TE_ERR_TIMEOUT) < 0.8);
        double longer = time_of(engine, request, 0, 1400, TE_ERR_TIMEOUT);
        CHECK(longer > 1.3 && longer < 6);
    }
    /* In the old interface, which has no other way to say it. */
    transfer_request_t entry = {OPCODE_READ, local, (int32_t)silent, peer.base, 4096};
    transfer_status_t status = {STATUS_WAITING, 0};
    batch_id_t batch = allocateBatchID((transfer_engine_t)engine, 1);
    OK(submitTransfer((transfer_engine_t)engine, batch, &entry, 1));
    EXPECT(4, freeBatchID((transfer_engine_t)engine, batch));
    for (double start = now(); status.status == STATUS_WAITING && now() - start < 10; usleep(1000))
        OK(getTransferStatus((transfer_engine_t)engine, batch, 0, &status));
    EXPECT(STATUS_TIMEOUT, status.status);
    OK(freeBatchID((transfer_engine_t)engine, batch));
    peer_continue(&peer);
    OK(te_engine_destroy(engine));
    peer_end(&peer);
}

static void a_batch_overrides_the_time_limit_of_the_engine(void) { in_child(wait_for_the_silent, NULL); }

int main(void) {
    char address[256];
    /* First those with children, while no engine is there that they could inherit. */
    a_batch_overrides_the_time_limit_of_the_engine();
    the_own_segment_is_copied_as_by_memmove();
    target = create_engine();
    initiator = create_engine();
    OK(te_register_local_memory(target, memory, LENGTH, NULL));
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &segment));
    completed_means_that_all_bytes_are_in_place();
    touching_regions_are_one_range_and_others_are_refused_whole();
    batches_that_are_none_and_tasks_that_are_none_are_refused();
    nothing_is_queued_beyond_the_capacity();
    one_request_that_cannot_be_starts_none_of_ten();
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    return 0;
}
