// The engine behind upstream's newer benchmark: it keeps peers' descriptors and sorts their buffers, and asks where memory is.
#include <char_util.h>
#include <cuda_alike.h>
#include <memory_location.h>
#include <transfer_engine.h>

#include <algorithm>
#include <memory>

#include "check.hpp"
#include "numa_memory.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(to_lower('A')), char>);
static_assert(std::is_same_v<decltype(getMemoryLocation(nullptr, 0, true)), const std::vector<MemoryLocationEntry>>);
static_assert(std::is_swappable_v<TransferMetadata::BufferDesc>);

class Backend {
public:
    Backend() : engine_(std::make_unique<TransferEngine>(false)) {
        auto [host, port] = parseHostNameWithPort(processes::host() + ":12345");
        SUCCEEDS(engine_->init(P2PHANDSHAKE, processes::host(), host, port));
        processes::install(*engine_);
    }

    std::string name() const { return engine_->getLocalIpAndPort(); }

    std::shared_ptr<TransferMetadata::SegmentDesc> target(const std::string& segment) {
        SegmentHandle handle = engine_->openSegment(segment);
        auto info = engine_->getMetadata()->getSegmentDescByID(handle);
        std::sort(info->buffers.begin(), info->buffers.end(),
                  [](const TransferMetadata::BufferDesc& a, const TransferMetadata::BufferDesc& b) { return a.name < b.name; });
        segments_.push_back(info);
        handle_ = handle;
        return segments_.back();
    }

    void move(const std::vector<TransferRequest>& requests) {
        auto batch = engine_->allocateBatchID(requests.size());
        Status status = engine_->submitTransfer(batch, requests);
        if (!status.ok()) check::fail(__FILE__, __LINE__, status.ToString());
        for (std::size_t i = 0; i < requests.size();) {
            TransferStatus progress;
            SUCCEEDS(engine_->getTransferStatus(batch, i, progress));
            REQUIRE(progress.s != TransferStatusEnum::FAILED);
            i += progress.s == TransferStatusEnum::COMPLETED;
        }
        SUCCEEDS(engine_->freeBatchID(batch));
    }

    TransferEngine& engine() { return *engine_; }
    SegmentHandle handle() const { return handle_; }

private:
    std::unique_ptr<TransferEngine> engine_;
    std::vector<std::shared_ptr<TransferMetadata::SegmentDesc>> segments_;
    SegmentHandle handle_ = 0;
};

static void descriptors_of_peers_are_kept_and_sorted() {
    Backend backend;
    processes::Peer peer;
    EXPECT(std::string("0"), peer.ask("register 0 65536"));
    EXPECT(std::string("0"), peer.ask("register 131072 65536"));
    processes::Memory memory(1 << 20);
    SUCCEEDS(backend.engine().registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    REQUIRE(!backend.name().empty());
    auto description = backend.target(peer.name());
    EXPECT(3u, description->buffers.size());
    const TransferMetadata::BufferDesc* arena = nullptr;
    for (const auto& buffer : description->buffers) {
        if (buffer.addr == peer.base()) arena = &buffer;
    }
    REQUIRE(arena != nullptr);
    EXPECT(processes::kPeerMemory, arena->length);
    processes::fill(memory.data(), memory.size(), 4);
    std::vector<TransferRequest> requests;
    for (std::size_t i = 0; i < 16; i++) {
        TransferRequest request;
        request.opcode = TransferRequest::WRITE;
        request.source = memory.data() + i * 65536;
        request.target_id = backend.handle();
        request.target_offset = arena->addr + i * 65536;
        request.length = 65536;
        requests.push_back(request);
    }
    backend.move(requests);
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    // The object that was sorted is still the one that is kept, with what it was sorted to.
    REQUIRE(arena->addr == peer.base());
    SUCCEEDS(backend.engine().unregisterLocalMemory(memory.data()));
}

static void memory_is_where_it_is_used_first() {
    bindToSocket(0);
    processes::Memory memory(4 * 4096);
    memory.data()[0] = 1;
    for (bool first_page : {true, false}) {
        auto entries = getMemoryLocation(memory.data(), memory.size(), first_page);
        REQUIRE(!entries.empty());
        EXPECT(reinterpret_cast<std::uint64_t>(memory.data()), entries[0].start);
        REQUIRE(entries[0].location.rfind("cpu:", 0) == 0 || entries[0].location == kWildcardLocation);
    }
}

static void letters_are_lowered() {
    EXPECT('a', to_lower('A'));
    EXPECT('z', to_lower('z'));
    EXPECT('1', to_lower('1'));
    REQUIRE(!getHostname().empty());
    REQUIRE(count_nodes() >= 1);
    EXPECT(std::string("cuda:"), ::GPU_PREFIX);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        descriptors_of_peers_are_kept_and_sorted();
        memory_is_where_it_is_used_first();
        letters_are_lowered();
    }, processes::serve);
}
