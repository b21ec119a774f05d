// The collective library's links: buffers of several kinds, probes of peers, segments that are dropped and opened anew.
#include <transfer_engine.h>

#include <atomic>
#include <memory>
#include <thread>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<TransferMetadata::SegmentID, std::uint64_t>);
static_assert(std::is_same_v<std::underlying_type_t<PeerLiveness>, std::uint8_t>);
static_assert(static_cast<int>(PeerLiveness::Alive) == 0 && static_cast<int>(PeerLiveness::Unreachable) == 1);
static_assert(std::is_convertible_v<bool, TransferEngine>, "the constructor is implicit");

class Communicator {
public:
    Communicator() : engine_(std::make_shared<TransferEngine>(processes::protocol() == "tcp")) {
        std::vector<std::string> filters;
        engine_->setWhitelistFilters(std::move(filters));
        SUCCEEDS(engine_->init(P2PHANDSHAKE, processes::host()));
        if (processes::protocol() != "tcp") processes::install(*engine_);
        LOG(INFO) << "the process group's engine is at " << engine_->getLocalIpAndPort();
    }
    std::shared_ptr<TransferEngine> engine_;
};

// As its workers do: the status of the submission is not looked at.
static TransferStatusEnum write(TransferEngine& engine, SegmentHandle segment, void* source, std::uint64_t target, std::size_t length) {
    BatchID batch = engine.allocateBatchID(1);
    engine.submitTransfer(batch, {TransferRequest{.opcode = TransferRequest::WRITE, .source = source, .target_id = segment, .target_offset = target, .length = length}});
    TransferStatus status;
    do engine.getTransferStatus(batch, 0, status);
    while (status.s != TransferStatusEnum::COMPLETED && status.s != TransferStatusEnum::FAILED);
    engine.freeBatchID(batch);
    return status.s;
}

static void a_link_is_made_used_and_dropped() {
    Communicator communicator;
    TransferEngine& engine = *communicator.engine_;
    processes::Peer peer;
    processes::Memory send(64 << 10), sync(4096);
    SUCCEEDS(engine.registerLocalMemory(send.data(), send.size(), kWildcardLocation));
    SUCCEEDS(engine.registerLocalMemory(sync.data(), sync.size(), kWildcardLocation, true));
    SegmentHandle segment = engine.openSegment(peer.name());
    REQUIRE(engine.probePeerAliveByID(segment) == PeerLiveness::Alive);
    processes::fill(send.data(), send.size(), 1);
    EXPECT(TransferStatusEnum::COMPLETED, write(engine, segment, send.data(), peer.base(), send.size()));
    EXPECT(processes::checksum(send.data(), send.size()), peer.sum(0, send.size()));

    // Dropped by name, and opened again: another number, of the same peer.
    SUCCEEDS(engine.closeSegment(segment));
    SUCCEEDS(engine.removeLocalSegment(peer.name()));
    SUCCEEDS(engine.closeSegment(segment));  // also when it is gone
    SegmentHandle again = engine.openSegment(peer.name());
    REQUIRE(again != segment && again != (SegmentHandle)-1);
    REQUIRE(engine.probePeerAliveByID(segment) == PeerLiveness::Unreachable);
    EXPECT(TransferStatusEnum::COMPLETED, write(engine, again, send.data(), peer.base() + 100, 1000));
    REQUIRE(engine.probePeerAliveByID(777777) == PeerLiveness::Unreachable);

    peer.kill();
    REQUIRE(engine.probePeerAliveByID(again) == PeerLiveness::Unreachable);
    EXPECT(TransferStatusEnum::FAILED, write(engine, again, send.data(), peer.base(), 1000));
    engine.unregisterLocalMemory(send.data());
    engine.unregisterLocalMemory(sync.data());
}

static void errors_have_texts() {
    Communicator communicator;
    TransferEngine& engine = *communicator.engine_;
    BatchID batch = engine.allocateBatchID(1);
    int something = 0;
    Status status = engine.submitTransfer(batch, {TransferRequest{TransferRequest::WRITE, &something, 4711, 0, 4}});
    REQUIRE(!status.ok());
    Status copy = status;
    status = Status::OK();
    REQUIRE(copy.message().size() > 0);
    REQUIRE(copy.message() == Status(copy).message());
    LOG(WARNING) << "submitTransfer: " << copy.message();
    TransferStatus progress;
    REQUIRE(!engine.getTransferStatus(batch, 17, progress).ok());
    engine.freeBatchID(batch);
}

// One thread works, one probes, as the proxy does.
static void links_are_probed_while_they_work() {
    Communicator communicator;
    TransferEngine& engine = *communicator.engine_;
    processes::Peer peer;
    processes::Memory memory(4096);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    SegmentHandle segment = engine.openSegment(peer.name());
    std::atomic<bool> over{false};
    int alive = 0;
    std::thread prober([&] {
        do {
            REQUIRE(engine.probePeerAliveByID(segment) == PeerLiveness::Alive);
            alive++;
        } while (!over);
    });
    for (int i = 0; i < 200; i++) EXPECT(TransferStatusEnum::COMPLETED, write(engine, segment, memory.data(), peer.base(), memory.size()));
    over = true;
    prober.join();
    REQUIRE(alive > 0);
    engine.unregisterLocalMemory(memory.data());
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        a_link_is_made_used_and_dropped();
        errors_have_texts();
        links_are_probed_while_they_work();
    }, processes::serve);
}
