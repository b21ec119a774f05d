// The store's submitter in a build with USE_EVENT_DRIVEN_COMPLETION: it sleeps until a batch tells its end, and then looks at flags alone.
#include <transfer_engine.h>

#include <thread>

#include "check.hpp"
#include "processes.hpp"

#ifndef USE_EVENT_DRIVEN_COMPLETION
#error "this is a program of a build with USE_EVENT_DRIVEN_COMPLETION"
#endif

using namespace mooncake;
using namespace std::chrono_literals;

static_assert(std::is_same_v<decltype(Transport::BatchDesc::is_finished), std::atomic<bool>>);
static_assert(std::is_same_v<decltype(Transport::BatchDesc::has_failure), std::atomic<bool>>);
static_assert(std::is_same_v<decltype(Transport::BatchDesc::completion_mutex), std::mutex>);
static_assert(std::is_same_v<decltype(Transport::BatchDesc::completion_cv), std::condition_variable>);

// Whether the batch ended well. Nothing but the end of the batch wakes it up in time.
static bool sleep_until_over(BatchID batch_id) {
    auto& description = Transport::toBatchDesc(batch_id);
    std::unique_lock<std::mutex> lock(description.completion_mutex);
    const bool woken = description.completion_cv.wait_for(lock, 100s, [&] { return description.is_finished.load(std::memory_order_acquire); });
    REQUIRE(woken);
    return !description.has_failure.load(std::memory_order_relaxed);
}

class Submitter {
public:
    Submitter() : memory(4 << 20) {
        processes::start(engine);
        SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
        segment = engine.openSegment(peer.name());
    }
    ~Submitter() { SUCCEEDS(engine.unregisterLocalMemory(memory.data())); }

    // A write of one part of the memory to the same place of the peer's, or where nothing is registered.
    TransferRequest write(std::size_t offset, std::size_t length, bool registered = true) {
        return {.opcode = TransferRequest::WRITE, .source = memory.data() + offset, .target_id = segment,
                .target_offset = registered ? peer.base() + offset : 4096, .length = length};
    }

    TransferEngine engine;
    processes::Peer peer;
    processes::Memory memory;
    SegmentHandle segment = 0;
};

static void the_end_of_a_batch_wakes_who_sleeps() {
    Submitter submitter;
    for (std::uint64_t round = 0; round < 50; round++) {
        processes::fill(submitter.memory.data(), submitter.memory.size(), round);
        std::vector<TransferRequest> requests;
        for (std::size_t i = 0; i < 8; i++) requests.push_back(submitter.write(i << 19, 1 << 19));
        const BatchID batch = submitter.engine.allocateBatchID(requests.size());
        SUCCEEDS(submitter.engine.submitTransfer(batch, requests));
        REQUIRE(sleep_until_over(batch));
        if (round % 10 == 0) EXPECT(processes::checksum(submitter.memory.data(), 4 << 20), submitter.peer.sum(0, 4 << 20));
        // As the store does: each task is asked for once, and has ended.
        for (std::size_t i = 0; i < requests.size(); i++) {
            TransferStatus status;
            SUCCEEDS(submitter.engine.getTransferStatus(batch, i, status));
            EXPECT(TransferStatusEnum::COMPLETED, status.s);
        }
        SUCCEEDS(submitter.engine.freeBatchID(batch));
    }
}

static void a_failure_is_told_with_the_end() {
    Submitter submitter;
    for (int round = 0; round < 10; round++) {
        const BatchID batch = submitter.engine.allocateBatchID(2);
        SUCCEEDS(submitter.engine.submitTransfer(batch, {submitter.write(0, 1000), submitter.write(0, 1000, false)}));
        REQUIRE(!sleep_until_over(batch));
        SUCCEEDS(submitter.engine.freeBatchID(batch));
    }
}

static void many_sleep_at_a_time() {
    Submitter submitter;
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; thread++) {
        threads.emplace_back([&submitter, thread] {
            for (int round = 0; round < 100; round++) {
                const BatchID batch = submitter.engine.allocateBatchID(1);
                SUCCEEDS(submitter.engine.submitTransfer(batch, {submitter.write(thread << 19, 4096)}));
                REQUIRE(sleep_until_over(batch));
                SUCCEEDS(submitter.engine.freeBatchID(batch));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// Several submissions to one batch: its end is that of the last of them.
static void a_batch_is_over_with_its_last_submission() {
    Submitter submitter;
    for (int round = 0; round < 20; round++) {
        const BatchID batch = submitter.engine.allocateBatchID(8);
        for (std::size_t i = 0; i < 8; i++) {
            SUCCEEDS(submitter.engine.submitTransfer(batch, {submitter.write(i << 19, 1 << 19)}));
            if (i % 3 == 2) REQUIRE(sleep_until_over(batch));
        }
        REQUIRE(sleep_until_over(batch));
        for (std::size_t i = 0; i < 8; i++) {
            TransferStatus status;
            SUCCEEDS(submitter.engine.getTransferStatus(batch, i, status));
            EXPECT(TransferStatusEnum::COMPLETED, status.s);
        }
        SUCCEEDS(submitter.engine.freeBatchID(batch));
    }
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        the_end_of_a_batch_wakes_who_sleeps();
        a_failure_is_told_with_the_end();
        many_sleep_at_a_time();
        a_batch_is_over_with_its_last_submission();
    }, processes::serve);
}
