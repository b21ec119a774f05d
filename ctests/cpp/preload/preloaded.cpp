// A program that knows nothing of the library that is preloaded into it, but that it asks for its counts.
#include <dlfcn.h>
#include <transfer_engine.h>

#include <cstring>

#include "check.hpp"

using namespace mooncake;

static int count(const char* name) {
    auto function = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, name));
    return function == nullptr ? -1 : function();
}

static void calls_go_through_the_preloaded_library_to_the_engine() {
    EXPECT(0, count("preloaded_submissions"));
    TransferEngine engine;
    SUCCEEDS(engine.init(P2PHANDSHAKE, "127.0.0.1"));
    REQUIRE(engine.installTransport("tcp", nullptr) != nullptr);
    std::vector<char> memory(8192);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const SegmentHandle segment = engine.openSegment(engine.getLocalIpAndPort());
    int refused = 0;
    for (int i = 1; i <= 9; i++) {
        std::memset(memory.data(), i, 4096);
        BatchID batch = engine.allocateBatchID(1);
        Status status = engine.submitTransfer(
            batch, {{TransferRequest::WRITE, memory.data(), segment, reinterpret_cast<std::uint64_t>(memory.data()) + 4096, 4096}});
        if (!status.ok()) {
            EXPECT(std::string("refused by the preloaded library"), std::string(status.message()));
            EXPECT(i - 1, memory[4096]);
            refused++;
        } else {
            TransferStatus progress;
            do SUCCEEDS(engine.getTransferStatus(batch, 0, progress));
            while (progress.s == TransferStatusEnum::WAITING || progress.s == TransferStatusEnum::PENDING);
            EXPECT(TransferStatusEnum::COMPLETED, progress.s);
            EXPECT(i, memory[4096]);
        }
        SUCCEEDS(engine.freeBatchID(batch));
        EXPECT(i, count("preloaded_submissions"));
    }
    EXPECT(3, refused);
    REQUIRE(count("preloaded_statuses") >= 6);
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

int main() { calls_go_through_the_preloaded_library_to_the_engine(); }
