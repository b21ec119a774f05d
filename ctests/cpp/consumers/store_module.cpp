// The Python module of the store, without Python: it is given the engine that another module has made.
#include <transfer_engine.h>

#include <memory>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(parseHostNameWithPort("")), std::pair<std::string, std::uint16_t>>);
static_assert(std::is_same_v<decltype(kWildcardLocation), const std::string>);

static void a_store_works_with_the_engine_that_it_is_given() {
    std::shared_ptr<void> handed;
    {
        auto engine = std::make_shared<TransferEngine>();
        processes::start(*engine);
        handed = engine;
    }
    auto engine = std::static_pointer_cast<TransferEngine>(handed);
    handed.reset();
    auto [host, port] = parseHostNameWithPort(engine->getLocalIpAndPort());
    EXPECT(processes::host(), host);
    EXPECT(engine->getRpcPort(), port);
    EXPECT(std::string("*"), kWildcardLocation);

    processes::Memory memory(4096);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size(), kWildcardLocation));
    SegmentHandle self = engine->openSegment(engine->getLocalIpAndPort());
    REQUIRE(self != (SegmentHandle)-1);
    processes::fill(memory.data(), 1000, 9);
    BatchID batch = engine->allocateBatchID(1);
    SUCCEEDS(engine->submitTransfer(batch, {{TransferRequest::WRITE, memory.data(), self, reinterpret_cast<std::uint64_t>(memory.data() + 2000), 1000}}));
    TransferStatus status;
    do SUCCEEDS(engine->getTransferStatus(batch, 0, status));
    while (status.s == TransferStatusEnum::WAITING || status.s == TransferStatusEnum::PENDING);
    EXPECT(TransferStatusEnum::COMPLETED, status.s);
    EXPECT(processes::checksum(memory.data(), 1000), processes::checksum(memory.data() + 2000, 1000));
    SUCCEEDS(engine->freeBatchID(batch));
    SUCCEEDS(engine->unregisterLocalMemory(memory.data()));
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] { a_store_works_with_the_engine_that_it_is_given(); }, processes::serve);
}
