// Upstream's tests of the store, as far as they use the engine: engines that are freed, scattered transfers in one call, plain switches.
#include <config.h>
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static void engines_are_freed_before_they_are_destroyed() {
    auto engine = std::make_shared<TransferEngine>();
    engine->setAutoDiscover(false);
    EXPECT(false, engine->isUsingTent());
    SUCCEEDS(engine->init(P2PHANDSHAKE, "localhost:17812"));
    REQUIRE(engine->installTransport(processes::protocol(), nullptr) != nullptr || processes::protocol() != "tcp");
    REQUIRE(!engine->getLocalIpAndPort().empty());
    EXPECT(0, engine->freeEngine());
    engine.reset();
}

static void what_is_left_of_an_engine_that_is_freed_fails() {
    TransferEngine engine;
    processes::start(engine);
    processes::Memory memory(4096);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const BatchID batch = engine.allocateBatchID(1);
    auto metadata = engine.getMetadata();
    EXPECT(0, engine.freeEngine());
    REQUIRE(!engine.submitTransfer(batch, {{TransferRequest::WRITE, memory.data(), LOCAL_SEGMENT_ID, 0, 1}}).ok());
    REQUIRE(engine.openSegment(processes::host() + ":1") == (SegmentHandle)-1);
    REQUIRE(engine.registerLocalMemory(memory.data(), memory.size()) != 0);
    REQUIRE(engine.allocateBatchID(1) == INVALID_BATCH_ID);
    SUCCEEDS(engine.freeBatchID(batch));
    REQUIRE(metadata->getSegmentDescByID(4711) == nullptr);
}

static void an_engine_is_initialized_after_it_could_not_be() {
    TransferEngine engine;
    REQUIRE(engine.init("http://127.0.0.1:1/metadata", "name:1") != 0);
    EXPECT(std::string(), engine.getLocalIpAndPort());
    REQUIRE(engine.installTransport("tcp", nullptr) == nullptr);
    REQUIRE(engine.allocateBatchID(1) == INVALID_BATCH_ID);
    processes::start(engine);
    REQUIRE(!engine.getLocalIpAndPort().empty());
}

static void discovery_installs_what_there_is() {
    TransferEngine engine;
    engine.setAutoDiscover(true);
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host()));
    REQUIRE(engine.getTransport("tcp") != nullptr || engine.getTransport("rdma") != nullptr);
}

static void a_scattered_transfer_is_one_call() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    processes::Memory memory(1 << 20);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), kWildcardLocation));
    processes::fill(memory.data(), memory.size(), 1);
    const std::vector<std::size_t> offsets{0, 1000, 2000, 3000}, lengths{1000, 1000, 1000, 50000};
    std::vector<std::size_t> order;
    std::vector<TransferEngine::ScatterTransferRange> ranges(1);
    ranges[0].opcode = TransferRequest::WRITE;
    ranges[0].remote_segment = peer.name();
    ranges[0].remote_base_offset = peer.base();
    ranges[0].remote_size = processes::kPeerMemory;
    ranges[0].local_buffer = memory.data();
    ranges[0].local_capacity = memory.size();
    ranges[0].local_offsets = offsets;
    ranges[0].remote_offsets = offsets;
    ranges[0].lengths = lengths;
    ranges[0].on_fragment_complete = [&](std::size_t fragment, const Status& status) {
        SUCCEEDS(status);
        order.push_back(fragment);
    };
    Status status = engine.transferScatter(ranges);
    EXPECT(Status::OK(), status);
    EXPECT(offsets.size(), order.size());
    EXPECT(processes::checksum(memory.data(), 53000), peer.sum(0, 53000));

    // What is wrong with a range is told by each of its fragments; the other ranges are carried out.
    std::vector<int> wrong(4, 0), right(4, 0);
    ranges.push_back(ranges[0]);
    ranges[0].lengths = std::span<const std::size_t>(lengths).subspan(1);
    ranges[0].on_fragment_complete = [&](std::size_t i, const Status& s) { wrong.at(i) += s.IsInvalidArgument(); };
    ranges[1].on_fragment_complete = [&](std::size_t i, const Status& s) { right.at(i) += s.ok(); };
    REQUIRE(engine.transferScatter(ranges).IsInvalidArgument());
    REQUIRE(right == std::vector<int>(4, 1));
    int told = 0;
    for (int count : wrong) told += count;
    REQUIRE(told >= 3);

    // Offsets that wrap round.
    const std::vector<std::size_t> beyond{~std::size_t{0} - 10}, hundred{100}, zero{0};
    ranges.resize(1);
    ranges[0].local_offsets = beyond;
    ranges[0].remote_offsets = zero;
    ranges[0].lengths = hundred;
    wrong.assign(4, 0);
    REQUIRE(engine.transferScatter(ranges).IsInvalidArgument());
    EXPECT(1, wrong[0]);

    // Nothing to do is done.
    SUCCEEDS(engine.transferScatter({}));

    // No callback is no fault, and one that throws ends as an error, not as a crash.
    ranges[0].local_offsets = zero;
    ranges[0].on_fragment_complete = nullptr;
    SUCCEEDS(engine.transferScatter(ranges));
    ranges[0].on_fragment_complete = [](std::size_t, const Status&) { throw std::runtime_error("thrown on purpose"); };
    REQUIRE(engine.transferScatter(ranges).IsContext());
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

// The operation keeps what it needs, whatever becomes of the engine.
static void a_scattered_transfer_outlives_its_engine() {
    processes::Peer peer;
    processes::Memory memory(4 << 20);
    auto engine = std::make_unique<TransferEngine>();
    processes::start(*engine);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size()));
    processes::fill(memory.data(), memory.size(), 6);
    const std::vector<std::size_t> offsets{0}, lengths{memory.size()};
    int told = 0;
    auto operation = engine->submitScatter({{.opcode = TransferRequest::WRITE, .remote_segment = peer.name(), .remote_base_offset = peer.base(),
                                             .remote_size = processes::kPeerMemory, .local_buffer = memory.data(), .local_capacity = memory.size(),
                                             .local_offsets = offsets, .remote_offsets = offsets, .lengths = lengths,
                                             .on_fragment_complete = [&](std::size_t, const Status& status) { told += status.ok(); }}});
    engine.reset();
    SUCCEEDS(operation.wait());
    EXPECT(1, told);
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
}

// Destroying it waits: what the spans and the callback refer to may go at once afterwards.
static void an_operation_that_is_dropped_is_over() {
    processes::Peer peer;
    processes::Memory memory(4 << 20);
    TransferEngine engine;
    processes::start(engine);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    processes::fill(memory.data(), memory.size(), 7);
    const std::vector<std::size_t> offsets{0}, lengths{memory.size()};
    int told = 0;
    {
        auto operation = engine.submitScatter({{.opcode = TransferRequest::WRITE, .remote_segment = peer.name(), .remote_base_offset = peer.base(),
                                                .remote_size = processes::kPeerMemory, .local_buffer = memory.data(), .local_capacity = memory.size(),
                                                .local_offsets = offsets, .remote_offsets = offsets, .lengths = lengths,
                                                .on_fragment_complete = [&](std::size_t, const Status& status) { told += status.ok(); }}});
    }
    EXPECT(1, told);
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        engines_are_freed_before_they_are_destroyed();
        what_is_left_of_an_engine_that_is_freed_fails();
        an_engine_is_initialized_after_it_could_not_be();
        discovery_installs_what_there_is();
        a_scattered_transfer_is_one_call();
        a_scattered_transfer_outlives_its_engine();
        an_operation_that_is_dropped_is_over();
    }, processes::serve);
}
