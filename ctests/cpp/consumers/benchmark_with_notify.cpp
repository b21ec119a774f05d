// The benchmark with notifications among the example programs: the target is told of each batch by a message that comes after it.
#include <cuda_alike.h>
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_aggregate_v<TransferMetadata::NotifyDesc>);

static void a_message_follows_each_batch() {
    auto engine = std::make_unique<TransferEngine>(false);
    auto [host, port] = parseHostNameWithPort(processes::host());
    SUCCEEDS(engine->init(P2PHANDSHAKE, processes::host(), host.c_str(), port));
    REQUIRE(engine->getLocalTopology() != nullptr);
    engine->getLocalTopology()->discover({});
    processes::install(*engine);
    processes::Peer peer;
    processes::Memory memory(64 << 10);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    SegmentID segment = engine->openSegment(peer.name().c_str());
    auto description = engine->getMetadata()->getSegmentDescByID(segment);
    REQUIRE(description != nullptr && !description->buffers.empty());
    bindToSocket(0);

    for (std::uint64_t round = 0; round < 20; round++) {
        processes::fill(memory.data(), memory.size(), round);
        TransferRequest entry;
        entry.opcode = TransferRequest::WRITE;
        entry.length = memory.size();
        entry.source = memory.data();
        entry.target_id = segment;
        entry.target_offset = description->buffers[0].addr;
        TransferMetadata::NotifyDesc notify{"round", std::to_string(round)};
        auto batch = engine->allocateBatchID(1);
        Status s = engine->submitTransferWithNotify(batch, std::vector<TransferRequest>{entry}, notify);
        if (!s.ok()) check::fail(__FILE__, __LINE__, s.ToString());
        EXPECT(std::to_string(round), notify.notify_msg);
        TransferStatus status;
        do SUCCEEDS(engine->getTransferStatus(batch, 0, status));
        while (status.s == TransferStatusEnum::WAITING || status.s == TransferStatusEnum::PENDING);
        EXPECT(TransferStatusEnum::COMPLETED, status.s);
        SUCCEEDS(engine->freeBatchID(batch));
        EXPECT("round " + std::to_string(round), peer.ask("take"));
        EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    }

    // Without a transfer: by the number of the segment, and by name.
    SUCCEEDS(engine->sendNotifyByID(segment, {"by", "number"}));
    EXPECT(std::string("by number"), peer.ask("take"));
    SUCCEEDS(engine->sendNotifyByName(peer.name(), {"by", "name"}));
    EXPECT(std::string("by name"), peer.ask("take"));
    REQUIRE(engine->sendNotifyByID(987654, {"to", "nobody"}) != 0);
    REQUIRE(engine->sendNotifyByName("127.0.0.1:1", {"to", "nobody"}) != 0);

    std::vector<TransferMetadata::NotifyDesc> messages{{"is", "kept"}};
    SUCCEEDS(engine->getNotifies(messages));
    EXPECT(1u, messages.size());
    EXPECT(std::string("kept"), messages[0].notify_msg);
    engine->unregisterLocalMemory(memory.data());
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] { a_message_follows_each_batch(); }, processes::serve);
}
