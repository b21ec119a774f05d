// Upstream's tests of the RDMA transport, by whatever transport there is: loopback, many requests, large regions.
#include <config.h>
#include <transfer_engine.h>

#include <cstring>
#include <thread>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static TransferStatusEnum wait(TransferEngine& engine, BatchID batch, std::size_t task) {
    TransferStatus status;
    Status s;
    do {
        s = engine.getTransferStatus(batch, task, status);
        if (!s.ok()) check::fail(__FILE__, __LINE__, s.ToString());
    } while (status.s == TransferStatusEnum::WAITING);
    return status.s;
}

static void the_own_segment_is_moved_to() {
    TransferEngine engine(false);
    auto [host, port] = parseHostNameWithPort(processes::host() + ":12345");
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host() + ":12345", host, port));
    processes::install(engine);
    processes::Memory memory(1 << 20);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    auto description = engine.getMetadata()->getSegmentDescByID(LOCAL_SEGMENT_ID);
    REQUIRE(description != nullptr);
    EXPECT(processes::protocol(), description->protocol);
    REQUIRE(!getHostname().empty());
    bindToSocket(0);
    const std::size_t half = memory.size() / 2;
    processes::fill(memory.data(), half, 1);
    BatchID batch = engine.allocateBatchID(1);
    SUCCEEDS(engine.submitTransfer(batch, {{TransferRequest::WRITE, memory.data(), LOCAL_SEGMENT_ID, description->buffers[0].addr + half, half}}));
    EXPECT(TransferStatusEnum::COMPLETED, wait(engine, batch, 0));
    EXPECT(Status::OK(), engine.freeBatchID(batch));
    EXPECT(0, std::memcmp(memory.data(), memory.data() + half, half));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

static void threads_move_requests_of_several_slices() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    constexpr int kThreads = 4, kBatches = 10;
    const std::size_t length = 3 * globalConfig().slice_size + 1;
    constexpr std::size_t kBatch = 8;
    processes::Memory memory(kThreads * kBatch * length);
    REQUIRE(memory.size() <= processes::kPeerMemory);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    processes::fill(memory.data(), memory.size(), 2);
    const SegmentID segment = engine.openSegment(peer.name());
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; thread++) {
        threads.emplace_back([&, thread] {
            for (int round = 0; round < kBatches; round++) {
                BatchID batch = engine.allocateBatchID(kBatch);
                for (std::size_t i = 0; i < kBatch; i++) {
                    const std::size_t offset = (thread * kBatch + i) * length;
                    SUCCEEDS(engine.submitTransfer(batch, {{TransferRequest::WRITE, memory.data() + offset, segment, peer.base() + offset, length}}));
                }
                for (std::size_t i = 0; i < kBatch; i++) EXPECT(TransferStatusEnum::COMPLETED, wait(engine, batch, i));
                EXPECT(Status::OK(), engine.freeBatchID(batch));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

// A region that is larger than a device registers in one piece: MC_MAX_MR_SIZE of this test says which.
static void a_region_is_larger_than_one_registration() {
    EXPECT(1u << 20, globalConfig().max_mr_size);
    TransferEngine engine;
    processes::start(engine);
    processes::Memory memory((5 << 20) + 4096);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    processes::Peer peer;
    const SegmentID segment = engine.openSegment(peer.name());
    processes::fill(memory.data(), memory.size(), 3);
    BatchID batch = engine.allocateBatchID(1);
    SUCCEEDS(engine.submitTransfer(batch, {{TransferRequest::WRITE, memory.data(), segment, peer.base(), memory.size()}}));
    EXPECT(TransferStatusEnum::COMPLETED, wait(engine, batch, 0));
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    SUCCEEDS(engine.freeBatchID(batch));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

int main(int argc, char** argv) {
    setenv("MC_MAX_MR_SIZE", "1048576", 1);
    return processes::run(argc, argv, [] {
        the_own_segment_is_moved_to();
        threads_move_requests_of_several_slices();
        a_region_is_larger_than_one_registration();
    }, processes::serve);
}
