// Upstream's test of when a write may be seen, without its hooks into the transport: groups of requests, counts of slices, and batches
// that outlive their engine.
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(TransferMetadata::SegmentDesc::tcp_data_port), int>);
static_assert(std::is_same_v<decltype(TransferMetadata::SegmentDesc::tcp_proto_version), int>);
static_assert(Transport::Slice::PENDING == 0 && Transport::Slice::POSTED == 1 && Transport::Slice::SUCCESS == 2);
static_assert(Transport::Slice::TIMEOUT == 3 && Transport::Slice::FAILED == 4);
static_assert(std::is_same_v<decltype(Transport::TransferTask::slice_count), volatile std::uint64_t>);
static_assert(std::is_same_v<decltype(Transport::TransferTask::success_slice_count), volatile std::uint64_t>);
static_assert(std::is_same_v<decltype(Transport::TransferTask::failed_slice_count), volatile std::uint64_t>);

static TransferStatusEnum wait(TransferEngine& engine, BatchID batch, std::size_t task) {
    TransferStatus status;
    do SUCCEEDS(engine.getTransferStatus(batch, task, status));
    while (status.s == TransferStatusEnum::WAITING || status.s == TransferStatusEnum::PENDING);
    return status.s;
}

static void a_write_that_is_complete_may_be_seen() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    processes::Memory memory(1 << 20);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const SegmentID segment = engine.openSegment(peer.name());
    if (processes::protocol() == "tcp") {
        auto description = engine.getMetadata()->getSegmentDescByID(segment);
        REQUIRE(description->tcp_data_port > 0);
        EXPECT(2, description->tcp_proto_version);
    }
    for (std::uint64_t round = 0; round < 50; round++) {
        processes::fill(memory.data(), memory.size(), round);
        BatchID batch = engine.allocateBatchID(1);
        TransferRequest request;
        request.opcode = TransferRequest::WRITE;
        request.source = memory.data();
        request.target_id = segment;
        request.target_offset = peer.base();
        request.length = memory.size();
        SUCCEEDS(engine.submitTransfer(batch, {request}));
        EXPECT(TransferStatusEnum::COMPLETED, wait(engine, batch, 0));
        EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
        Transport::BatchDesc& description = Transport::toBatchDesc(batch);
        Transport::TransferTask& task = description.task_list[0];
        EXPECT(1u, __atomic_load_n(&task.slice_count, __ATOMIC_ACQUIRE));
        EXPECT(1u, __atomic_load_n(&task.success_slice_count, __ATOMIC_ACQUIRE));
        EXPECT(0u, __atomic_load_n(&task.failed_slice_count, __ATOMIC_ACQUIRE));
        EXPECT(Transport::Slice::SUCCESS, task.slice_list[0]->status);
        SUCCEEDS(engine.freeBatchID(batch));
    }
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

// Over TCP the requests of a group are carried out one after the other: the last write to the same bytes is the one that stays.
static void a_group_is_in_order() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    constexpr std::size_t kCount = 64, kLength = 64 << 10;
    processes::Memory memory(kCount * kLength);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    for (std::size_t i = 0; i < kCount; i++) processes::fill(memory.data() + i * kLength, kLength, i);
    const SegmentID segment = engine.openSegment(peer.name());
    for (int round = 0; round < 20; round++) {
        BatchID batch = engine.allocateBatchID(kCount);
        std::vector<TransferRequest> requests;
        for (std::size_t i = 0; i < kCount; i++) {
            TransferRequest request{TransferRequest::WRITE, memory.data() + i * kLength, segment, peer.base(), kLength};
            request.task_group_id = 7;
            requests.push_back(request);
        }
        SUCCEEDS(engine.submitTransfer(batch, requests));
        for (std::size_t i = 0; i < kCount; i++) EXPECT(TransferStatusEnum::COMPLETED, wait(engine, batch, i));
        SUCCEEDS(engine.freeBatchID(batch));
        EXPECT(processes::checksum(memory.data() + (kCount - 1) * kLength, kLength), peer.sum(0, kLength));
    }
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

static void a_batch_is_looked_at_after_its_engine() {
    processes::Peer peer;
    processes::Memory memory(64 << 10);
    auto engine = std::make_unique<TransferEngine>();
    processes::start(*engine);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size()));
    const SegmentID segment = engine->openSegment(peer.name());
    BatchID batch = engine->allocateBatchID(2);
    TransferRequest request{TransferRequest::READ, memory.data(), segment, peer.base(), memory.size()};
    SUCCEEDS(engine->submitTransfer(batch, {request}));
    request.target_offset = 4096;
    SUCCEEDS(engine->submitTransfer(batch, {request}));
    engine.reset();
    auto* description = &Transport::toBatchDesc(batch);
    EXPECT(2u, description->task_list.size());
    for (Transport::TransferTask& task : description->task_list) {
        const auto slices = __atomic_load_n(&task.slice_count, __ATOMIC_ACQUIRE);
        EXPECT(1u, slices);
        EXPECT(slices, __atomic_load_n(&task.success_slice_count, __ATOMIC_ACQUIRE) + __atomic_load_n(&task.failed_slice_count, __ATOMIC_ACQUIRE));
        REQUIRE(task.slice_list[0]->status == Transport::Slice::SUCCESS || task.slice_list[0]->status == Transport::Slice::FAILED);
    }
    EXPECT(1u, __atomic_load_n(&description->task_list[1].failed_slice_count, __ATOMIC_ACQUIRE));
    delete description;
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        a_write_that_is_complete_may_be_seen();
        if (processes::protocol() == "tcp") a_group_is_in_order();
        a_batch_is_looked_at_after_its_engine();
    }, processes::serve);
}
