// The validator among the example programs: threads write blocks of random bytes, read them back and compare.
#include <cuda_alike.h>
#include <transfer_engine.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "numa_memory.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(SimpleRandom::Get()), SimpleRandom&>);
static_assert(std::is_same_v<decltype(SimpleRandom::Get().next()), std::uint32_t>);
static_assert(std::is_same_v<decltype(::GPU_PREFIX), const std::string>);
static_assert(std::is_same_v<decltype(getHostname()), std::string>);

static void blocks_come_back_as_they_were_written() {
    TransferEngine engine;
    auto [host, port] = parseHostNameWithPort(processes::host() + ":12345");
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host() + ":12345", host, port));
    processes::install(engine);
    REQUIRE(!getHostname().empty());
    EXPECT(std::string("cuda:"), GPU_PREFIX);
    processes::Peer peer;

    constexpr int kThreads = 4, kRounds = 20, kBatch = 8;
    constexpr std::size_t kBlock = 16384, kPerThread = 2 * kBatch * kBlock;
    void* memory = allocate_on_node(kThreads * kPerThread, 0);
    REQUIRE(memory != nullptr);
    SUCCEEDS(engine.registerLocalMemory(memory, kThreads * kPerThread, "cpu:" + std::to_string(0)));
    const SegmentID segment = engine.openSegment(peer.name());
    auto description = engine.getMetadata()->getSegmentDescByID(segment);
    REQUIRE(description != nullptr);
    EXPECT(peer.base(), description->buffers[0].addr);

    auto move = [&](TransferRequest::OpCode opcode, unsigned char* local, std::uint64_t remote) {
        BatchID batch = engine.allocateBatchID(kBatch);
        std::vector<TransferRequest> requests;
        for (int i = 0; i < kBatch; ++i) {
            TransferRequest entry;
            entry.opcode = opcode;
            entry.length = kBlock;
            entry.source = local + kBlock * i;
            entry.target_id = segment;
            entry.target_offset = remote + kBlock * i;
            requests.emplace_back(entry);
        }
        Status s = engine.submitTransfer(batch, requests);
        if (!s.ok()) check::fail(__FILE__, __LINE__, s.ToString());
        for (int task = 0; task < kBatch; ++task) {
            TransferStatus status;
            do {
                s = engine.getTransferStatus(batch, task, status);
                REQUIRE(s == Status::OK());
                REQUIRE(status.s != TransferStatusEnum::FAILED);
            } while (status.s != TransferStatusEnum::COMPLETED);
        }
        s = engine.freeBatchID(batch);
        REQUIRE(s.ok());
    };
    std::vector<std::thread> workers;
    for (int thread = 0; thread < kThreads; thread++) {
        workers.emplace_back([&, thread] {
            bindToSocket(0);
            auto* local = static_cast<unsigned char*>(memory) + thread * kPerThread;
            const std::uint64_t remote = description->buffers[thread % description->buffers.size()].addr + thread * kPerThread;
            for (int round = 0; round < kRounds; round++) {
                for (std::size_t i = 0; i < kBatch * kBlock; i += 64) local[i] = static_cast<unsigned char>(SimpleRandom::Get().next(256));
                move(TransferRequest::WRITE, local, remote);
                std::memset(local + kBatch * kBlock, 0, kBatch * kBlock);
                move(TransferRequest::READ, local + kBatch * kBlock, remote);
                EXPECT(0, std::memcmp(local, local + kBatch * kBlock, kBatch * kBlock));
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
    SUCCEEDS(engine.unregisterLocalMemory(memory));
    free_on_node(memory, kThreads * kPerThread);
}

// Random enough to tell blocks apart; bounded where a bound is given.
static void random_numbers_differ() {
    SimpleRandom& random = SimpleRandom::Get();
    REQUIRE(&random == &SimpleRandom::Get());
    SimpleRandom* of_another_thread = nullptr;
    std::thread([&] { of_another_thread = &SimpleRandom::Get(); }).join();
    REQUIRE(&random != of_another_thread);
    bool differ = false;
    const std::uint32_t first = random.next();
    for (int i = 0; i < 100; i++) {
        differ = differ || random.next() != first;
        REQUIRE(random.next(7) < 7);
    }
    REQUIRE(differ);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        blocks_come_back_as_they_were_written();
        random_numbers_differ();
    }, processes::serve);
}
