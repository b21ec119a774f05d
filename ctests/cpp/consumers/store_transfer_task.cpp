// The store's submitter: requests by designated initialisers, every task polled to its end before its batch is freed, scattered ranges.
#if __has_include(<glog/logging.h>)
#include <glog/logging.h>
#endif
#include <transfer_engine.h>

#include <memory>
#include <optional>
#include <thread>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_aggregate_v<TransferRequest> && std::is_aggregate_v<TransferEngine::ScatterTransferRange>);
static_assert(!std::is_default_constructible_v<TransferEngine::ScatterTransferOperation>);
static_assert(!std::is_copy_constructible_v<TransferEngine::ScatterTransferOperation> && !std::is_copy_assignable_v<TransferEngine::ScatterTransferOperation>);
static_assert(std::is_nothrow_move_constructible_v<TransferEngine::ScatterTransferOperation>);
static_assert(std::is_nothrow_move_assignable_v<TransferEngine::ScatterTransferOperation>);
static_assert(std::is_same_v<decltype(INVALID_BATCH_ID), const BatchID>);
static_assert(std::is_same_v<decltype(std::declval<TransferEngine&>().openSegment("")), SegmentHandle>);

class Submitter {
public:
    explicit Submitter(TransferEngine& engine) : engine_(engine), local_endpoint_(engine.getLocalIpAndPort()), copies_(engine.isTcpOnly()) {
        EXPECT(processes::protocol() == "tcp", copies_);
    }

    std::optional<SegmentHandle> open(const std::string& endpoint) {
        SegmentHandle segment = engine_.openSegment(endpoint);
        if (segment == static_cast<std::uint64_t>(ERR_INVALID_ARGUMENT)) {
            LOG(ERROR) << "Failed to open segment for endpoint='" << endpoint << "'";
            return std::nullopt;
        }
        return segment;
    }

    bool is_local(const std::string& endpoint) const { return endpoint == local_endpoint_; }

    // The states in which the tasks have ended; nothing if they could not be started.
    std::optional<std::vector<TransferStatusEnum>> run(const std::vector<TransferRequest>& requests) {
        const std::size_t batch_size = requests.size();
        BatchID batch_id = engine_.allocateBatchID(batch_size);
        if (batch_id == INVALID_BATCH_ID) {
            LOG(ERROR) << "Failed to allocate batch ID";
            return std::nullopt;
        }
        Status s = engine_.submitTransfer(batch_id, requests);
        if (!s.ok()) {
            LOG(ERROR) << "Failed to submit transfers, error code: " << s.code() << ", " << s.message();
            engine_.freeBatchID(batch_id);
            return std::nullopt;
        }
        const std::int64_t start = getCurrentTimeInMilli();
        std::vector<TransferStatusEnum> ends(batch_size, TransferStatusEnum::WAITING);
        for (std::size_t open = batch_size; open > 0;) {
            for (std::size_t i = 0; i < batch_size; ++i) {
                TransferStatus status;
                s = engine_.getTransferStatus(batch_id, i, status);
                REQUIRE(s.ok());
                if (ends[i] != TransferStatusEnum::WAITING) {
                    EXPECT(ends[i], status.s);
                    continue;
                }
                switch (status.s) {
                    case TransferStatusEnum::COMPLETED:
                    case TransferStatusEnum::FAILED:
                    case TransferStatusEnum::CANCELED:
                    case TransferStatusEnum::INVALID:
                        ends[i] = status.s;
                        --open;
                        break;
                    default:
                        break;
                }
            }
            REQUIRE(getCurrentTimeInMilli() - start < 120000);
        }
        EXPECT(true, engine_.freeBatchID(batch_id).ok());
        return ends;
    }

private:
    TransferEngine& engine_;
    const std::string local_endpoint_;
    const bool copies_;
};

static std::shared_ptr<TransferEngine> make_engine() {
    auto engine = std::make_shared<TransferEngine>();
    processes::start(*engine);
    return engine;
}

static void every_task_is_polled_to_its_end() {
    auto engine = make_engine();
    processes::Peer peer;
    Submitter submitter(*engine);
    processes::Memory memory(2 << 20);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size(), kWildcardLocation));
    REQUIRE(submitter.is_local(engine->getLocalIpAndPort()) && !submitter.is_local(peer.name()));
    const SegmentHandle segment = submitter.open(peer.name()).value();
    REQUIRE(!submitter.open("127.0.0.1:1"));
    REQUIRE(!submitter.open(""));

    processes::fill(memory.data(), 1 << 20, 1);
    std::vector<TransferRequest> requests;
    std::size_t offset = 0;
    for (std::size_t length : {1ul, 4096ul, 65537ul, 400000ul}) {
        TransferRequest request{.opcode = TransferRequest::WRITE,
                                .source = memory.data() + offset,
                                .target_id = segment,
                                .target_offset = peer.base() + offset,
                                .length = length};
        EXPECT(0, request.advise_retry_cnt);
        EXPECT(0, request.transport_hint);
        EXPECT(TransferRequest::kNoTaskGroup, request.task_group_id);
        requests.emplace_back(request);
        offset += length;
    }
    auto ends = submitter.run(requests);
    REQUIRE(ends == std::vector<TransferStatusEnum>(requests.size(), TransferStatusEnum::COMPLETED));
    EXPECT(processes::checksum(memory.data(), offset), peer.sum(0, offset));

    // One that cannot be carried out fails by itself.
    requests[1].target_offset = 4096;
    ends = submitter.run(requests);
    EXPECT(TransferStatusEnum::FAILED, ends->at(1));
    EXPECT(TransferStatusEnum::COMPLETED, ends->at(0));

    // One whose segment is unknown starts none.
    requests[0].target_id = 999999;
    REQUIRE(!submitter.run(requests));
    SUCCEEDS(engine->unregisterLocalMemory(memory.data()));
}

static void a_batch_takes_no_more_than_it_has_room_for() {
    auto engine = make_engine();
    EXPECT(INVALID_BATCH_ID, ~std::uint64_t{0});
    BatchID empty = engine->allocateBatchID(4);
    REQUIRE(empty != INVALID_BATCH_ID);
    SUCCEEDS(engine->freeBatchID(empty));
    BatchID batch = engine->allocateBatchID(1);
    processes::Memory memory(4096);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size()));
    TransferRequest request{TransferRequest::READ, memory.data(), 0, reinterpret_cast<std::uint64_t>(memory.data()), 10};
    Status too_many = engine->submitTransfer(batch, {request, request});
    REQUIRE(!too_many.ok() && too_many.code() == Status::Code::kTooManyRequests && !too_many.message().empty());
    SUCCEEDS(engine->freeBatchID(batch));
    SUCCEEDS(engine->unregisterLocalMemory(memory.data()));
}

static void scattered_ranges_arrive_and_tell_each_fragment() {
    auto engine = make_engine();
    processes::Peer peer;
    processes::Memory memory(1 << 20);
    SUCCEEDS(engine->registerLocalMemory(memory.data(), memory.size()));
    processes::fill(memory.data(), memory.size(), 5);

    const std::vector<std::size_t> local{0, 5000, 100000, 300000}, remote{10, 20000, 300000, 700000}, lengths{4000, 1, 0, 65000};
    std::vector<int> told(lengths.size(), 0);
    const auto caller = std::this_thread::get_id();
    std::vector<TransferEngine::ScatterTransferRange> ranges;
    ranges.push_back({.opcode = TransferRequest::WRITE,
                      .remote_segment = peer.name(),
                      .remote_base_offset = peer.base(),
                      .remote_size = processes::kPeerMemory,
                      .local_buffer = memory.data(),
                      .local_capacity = memory.size(),
                      .local_offsets = local,
                      .remote_offsets = remote,
                      .lengths = lengths,
                      .on_fragment_complete = [&](std::size_t fragment, const Status& status) {
                          SUCCEEDS(status);
                          REQUIRE(std::this_thread::get_id() == caller);
                          told.at(fragment)++;
                      }});
    std::optional<TransferEngine::ScatterTransferOperation> operation;
    operation.emplace(engine->submitScatter(ranges));
    TransferEngine::ScatterTransferOperation moved = std::move(*operation);
    operation.reset();
    SUCCEEDS(moved.wait());
    for (std::size_t i = 0; i < lengths.size(); i++) {
        EXPECT(1, told[i]);
        EXPECT(processes::checksum(memory.data() + local[i], lengths[i]), peer.sum(remote[i], lengths[i]));
    }
    SUCCEEDS(engine->unregisterLocalMemory(memory.data()));
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        every_task_is_polled_to_its_end();
        a_batch_takes_no_more_than_it_has_room_for();
        scattered_ranges_arrive_and_tell_each_fragment();
    }, processes::serve);
}
