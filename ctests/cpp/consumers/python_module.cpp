// The Python module of the engine, without Python: one retried request at a time, batches with a time limit that is kept in the
// descriptor of the batch, notifications, segments that are dropped when their peer is gone.
#include <transfer_engine.h>
#include <transfer_engine_c.h>
#include <transport/rdma_transport/rdma_transport.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#if __has_include(<pybind11/pybind11.h>)
#include <transport/rpc_communicator/rpc_interface.h>
static_assert(std::is_same_v<decltype(&mooncake::bind_rpc_interface), void (*)(pybind11::module_&)>);
#endif

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<batch_id_t, std::uint64_t>);
static_assert(std::is_same_v<Transport::BatchID, std::uint64_t> && std::is_same_v<Transport::SegmentHandle, std::uint64_t>);
static_assert(std::is_same_v<decltype(Transport::BatchDesc::start_timestamp), std::int64_t>);
static_assert(std::is_same_v<decltype(Transport::TransferTask::slice_list), std::vector<Transport::Slice*>>);
static_assert(std::is_same_v<decltype(Transport::Slice::length), std::size_t>);
static_assert(std::is_polymorphic_v<Transport> && std::has_virtual_destructor_v<Transport>);
static_assert(std::is_same_v<decltype(std::declval<TransferEngine&>().getMetadata()), std::shared_ptr<TransferMetadata>>);
static_assert(std::is_same_v<decltype(std::declval<const TransferEngine&>().numContexts()), int>);

struct EfaTransport : Transport {};

class Binding {
public:
    explicit Binding(const std::vector<std::string>& filter = {}) {
        // Upstream takes what discovery finds; the tests say which transport they want.
        const bool discover = processes::protocol() == "tcp";
        engine_ = std::make_shared<TransferEngine>(discover, filter);
        auto [host, port] = parseHostNameWithPort(processes::host() + ":12001");
        EXPECT(12001, port);
        SUCCEEDS(engine_->init(P2PHANDSHAKE, processes::host(), host, port));
        if (!discover) processes::install(*engine_);
    }

    // The segment of a peer, opened once.
    Transport::SegmentHandle open(const std::string& target) {
        std::lock_guard<std::mutex> guard(mutex_);
        if (auto found = handles_.find(target); found != handles_.end()) {
            if (engine_->CheckSegmentStatus(found->second).ok()) return found->second;
            engine_->closeSegment(found->second);
            engine_->getMetadata()->removeSegmentDesc(target);
            handles_.erase(found);
        }
        Transport::SegmentHandle handle = engine_->openSegment(target);
        if (handle == (Transport::SegmentHandle)-1) return handle;
        return handles_[target] = handle;
    }

    void forget(const std::string& target) {
        std::lock_guard<std::mutex> guard(mutex_);
        SUCCEEDS(engine_->closeSegment(handles_[target]));
        engine_->getMetadata()->removeSegmentDesc(target);
        handles_.erase(target);
    }

    // 0, or -1 if every attempt has failed, each on another path.
    int transfer(const std::string& target, TransferRequest::OpCode opcode, std::uintptr_t local, std::uint64_t remote, std::size_t length,
                 const TransferMetadata::NotifyDesc* notify = nullptr) {
        Transport::SegmentHandle handle = open(target);
        if (handle == (Transport::SegmentHandle)-1) return -1;
        const int attempts = engine_->numContexts() + 1;
        REQUIRE(attempts >= 1);
        for (int attempt = 0; attempt < attempts; ++attempt) {
            BatchID batch = engine_->allocateBatchID(1);
            TransferRequest entry;
            entry.opcode = opcode;
            entry.source = reinterpret_cast<void*>(local);
            entry.target_id = handle;
            entry.target_offset = remote;
            entry.length = length;
            entry.advise_retry_cnt = attempt;
            entry.transport_hint = 0;
            auto* descriptor = reinterpret_cast<Transport::BatchDesc*>(batch);
            const std::int64_t start = getCurrentTimeInNano();
            descriptor->start_timestamp = start;
            Status status = notify != nullptr ? engine_->submitTransferWithNotify(batch, {entry}, *notify) : engine_->submitTransfer(batch, {entry});
            if (!status.ok()) {
                (void)engine_->freeBatchID(batch);
                return -1;
            }
            std::size_t bytes = 0;
            for (const auto& task : descriptor->task_list) {
                for (const auto* slice : task.slice_list) bytes += slice->length;
            }
            EXPECT(length, bytes);
            EXPECT(1u, descriptor->task_list.size());
            bool completed = false;
            while (!completed) {
                TransferStatus progress;
                SUCCEEDS(engine_->getTransferStatus(batch, 0, progress));
                if (progress.s == TransferStatusEnum::COMPLETED) {
                    EXPECT(length, progress.transferred_bytes);
                    completed = true;
                } else if (progress.s == TransferStatusEnum::FAILED || progress.s == TransferStatusEnum::TIMEOUT) {
                    break;
                }
            }
            EXPECT(start, descriptor->start_timestamp);
            (void)engine_->freeBatchID(batch);
            if (completed) return 0;
        }
        return -1;
    }

    // Starts a batch; get_status() tells how it stands.
    batch_id_t submit_write(const std::string& target, const std::vector<TransferRequest>& requests) {
        REQUIRE(open(target) != (Transport::SegmentHandle)-1);
        batch_id_t batch = engine_->allocateBatchID(requests.size());
        auto* descriptor = reinterpret_cast<Transport::BatchDesc*>(batch);
        descriptor->start_timestamp = getCurrentTimeInNano();
        SUCCEEDS(engine_->submitTransfer(batch, requests));
        return batch;
    }

    int get_status(batch_id_t batch) {
        TransferStatus status;
        SUCCEEDS(engine_->getBatchTransferStatus(batch, status));
        auto* descriptor = reinterpret_cast<Transport::BatchDesc*>(batch);
        REQUIRE(descriptor->start_timestamp > 0 && getCurrentTimeInNano() >= descriptor->start_timestamp);
        if (status.s == TransferStatusEnum::COMPLETED) {
            (void)engine_->freeBatchID(batch);
            return 1;
        }
        if (status.s == TransferStatusEnum::FAILED) {
            (void)engine_->freeBatchID(batch);
            return -1;
        }
        return 0;
    }

    std::uint64_t first_buffer(const std::string& target) {
        Transport::SegmentHandle handle = open(target);
        REQUIRE(handle != (Transport::SegmentHandle)-1);
        auto descriptor = engine_->getMetadata()->getSegmentDescByID(handle);
        return descriptor == nullptr || descriptor->buffers.empty() ? 0 : descriptor->buffers[0].addr;
    }

    const std::shared_ptr<TransferEngine>& engine() const { return engine_; }

private:
    std::shared_ptr<TransferEngine> engine_;
    std::mutex mutex_;
    std::unordered_map<std::string, Transport::SegmentHandle> handles_;
};

static void requests_are_retried_and_carry_notifications() {
    Binding binding;
    processes::Peer peer;
    processes::Memory memory(1 << 20);
    SUCCEEDS(binding.engine()->registerLocalMemory(memory.data(), memory.size(), kWildcardLocation));
    const auto local = reinterpret_cast<std::uintptr_t>(memory.data());
    REQUIRE(binding.engine()->getRpcPort() > 0);
    EXPECT(peer.base(), binding.first_buffer(peer.name()));

    processes::fill(memory.data(), 300000, 1);
    EXPECT(0, binding.transfer(peer.name(), TransferRequest::WRITE, local, peer.base() + 77, 300000));
    EXPECT(processes::checksum(memory.data(), 300000), peer.sum(77, 300000));

    peer.fill(500000, 70000, 2);
    TransferMetadata::NotifyDesc notify{"name", "a text with blanks"};
    EXPECT(0, binding.transfer(peer.name(), TransferRequest::READ, local + 100, peer.base() + 500000, 70000, &notify));
    EXPECT(peer.sum(500000, 70000), processes::checksum(memory.data() + 100, 70000));
    EXPECT(std::string("name a text with blanks"), peer.ask("take"));

    EXPECT(std::string("0"), peer.ask("notify " + binding.engine()->getLocalIpAndPort() + " back hello"));
    std::vector<TransferMetadata::NotifyDesc> messages;
    SUCCEEDS(binding.engine()->getNotifies(messages));
    EXPECT(1u, messages.size());
    EXPECT(std::string("back"), messages[0].name);
    EXPECT(std::string("hello"), messages[0].notify_msg);

    // What is not registered there fails, after as many attempts as there are paths.
    EXPECT(-1, binding.transfer(peer.name(), TransferRequest::WRITE, local, 4096, 100));
    SUCCEEDS(binding.engine()->unregisterLocalMemory(memory.data()));
}

static void batches_are_watched_from_another_thread() {
    Binding binding;
    processes::Peer peer;
    constexpr std::size_t kCount = 64, kLength = 5000;
    processes::Memory memory(kCount * kLength);
    // Two regions in one call, and away again in one.
    const std::size_t half = memory.size() / 2;
    std::vector<BufferEntry> buffers;
    buffers.push_back(BufferEntry{memory.data(), half});
    buffers.push_back({memory.data() + half, half});
    SUCCEEDS(binding.engine()->registerLocalMemoryBatch(buffers, kWildcardLocation));
    REQUIRE(binding.engine()->registerLocalMemoryBatch(buffers, kWildcardLocation) != 0);

    processes::fill(memory.data(), memory.size(), 3);
    std::vector<TransferRequest> requests;
    const Transport::SegmentHandle segment = binding.open(peer.name());
    for (std::size_t i = 0; i < kCount; i++) {
        TransferRequest entry;
        entry.opcode = TransferRequest::WRITE;
        entry.source = memory.data() + i * kLength;
        entry.target_id = segment;
        entry.target_offset = peer.base() + i * kLength;
        entry.length = kLength;
        requests.push_back(entry);
    }
    batch_id_t batch = binding.submit_write(peer.name(), requests);
    auto* descriptor = reinterpret_cast<Transport::BatchDesc*>(batch);
    EXPECT(kCount, descriptor->task_list.size());
    int state = 0;
    std::thread([&] {
        while ((state = binding.get_status(batch)) == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }).join();
    EXPECT(1, state);
    EXPECT(processes::checksum(memory.data(), memory.size()), peer.sum(0, memory.size()));
    SUCCEEDS(binding.engine()->unregisterLocalMemoryBatch({memory.data(), memory.data() + half}));
    REQUIRE(binding.engine()->unregisterLocalMemory(memory.data()) != 0);
}

// A batch that is submitted in parts, while another thread reads its tasks.
static void tasks_may_be_read_while_more_are_submitted() {
    Binding binding;
    processes::Peer peer;
    constexpr std::size_t kParts = 100, kLength = 100;
    processes::Memory memory(kParts * kLength);
    SUCCEEDS(binding.engine()->registerLocalMemory(memory.data(), memory.size()));
    const Transport::SegmentHandle segment = binding.open(peer.name());
    BatchID batch = binding.engine()->allocateBatchID(kParts);
    auto* descriptor = reinterpret_cast<Transport::BatchDesc*>(batch);
    EXPECT(kParts, descriptor->batch_size);
    EXPECT(0u, descriptor->task_list.size());
    std::vector<const Transport::TransferTask*> places;
    for (std::size_t i = 0; i < kParts; i++) {
        SUCCEEDS(binding.engine()->submitTransfer(
            batch, {TransferRequest{TransferRequest::WRITE, memory.data() + i * kLength, segment, peer.base() + i * kLength, kLength}}));
        EXPECT(i + 1, descriptor->task_list.size());
        places.push_back(&descriptor->task_list[i]);
    }
    for (std::size_t i = 0; i < kParts; i++) {
        REQUIRE(places[i] == &descriptor->task_list[i]);
        EXPECT(1u, places[i]->slice_list.size());
        EXPECT(kLength, places[i]->slice_list[0]->length);
    }
    TransferStatus status;
    do SUCCEEDS(binding.engine()->getBatchTransferStatus(batch, status));
    while (status.s == TransferStatusEnum::WAITING || status.s == TransferStatusEnum::PENDING);
    EXPECT(TransferStatusEnum::COMPLETED, status.s);
    EXPECT(memory.size(), status.transferred_bytes);
    SUCCEEDS(binding.engine()->freeBatchID(batch));
    SUCCEEDS(binding.engine()->unregisterLocalMemory(memory.data()));
}

static void a_peer_that_is_gone_is_found_out_and_forgotten() {
    Binding binding;
    std::string name;
    {
        processes::Peer peer;
        name = peer.name();
        EXPECT(0, binding.engine()->getMetadata()->sendProbe(name));
        REQUIRE(binding.open(name) != (Transport::SegmentHandle)-1);
        peer.kill();
    }
    REQUIRE(binding.engine()->getMetadata()->sendProbe(name) != 0);
    binding.forget(name);
    const auto failed = binding.engine()->openSegment(name);
    EXPECT(~std::uint64_t{0}, failed);
    REQUIRE(failed == (Transport::SegmentHandle)-1);
}

static void an_unknown_segment_has_no_descriptor() {
    Binding binding;
    REQUIRE(binding.engine()->getMetadata()->getSegmentDescByID(123456) == nullptr);
    REQUIRE(binding.engine()->getMetadata()->getSegmentDescByID(~std::uint64_t{0}) == nullptr);
}

static void the_topology_is_told_without_a_name() {
    TransferEngine engine(true, std::vector<std::string>{});
    SUCCEEDS(engine.init(P2PHANDSHAKE, ""));
    const std::string topology = engine.getLocalTopologyString();
    REQUIRE(topology.find("cpu:0") != std::string::npos);
}

static void a_transport_that_is_not_there_is_null() {
    Binding binding;
    Transport* transport = binding.engine()->getTransport("efa");
    REQUIRE(transport == nullptr);
    transport = binding.engine()->getTransport(processes::protocol());
    REQUIRE(transport != nullptr);
    REQUIRE(dynamic_cast<EfaTransport*>(transport) == nullptr);
    std::unique_ptr<Transport> none;
    REQUIRE(none == nullptr);
}

// The address that Python code hands on is an engine again in another module.
static void an_engine_is_reached_by_its_address() {
    Binding binding;
    const auto address = reinterpret_cast<std::uintptr_t>(binding.engine().get());
    auto* engine = reinterpret_cast<TransferEngine*>(address);
    EXPECT(binding.engine()->getLocalIpAndPort(), engine->getLocalIpAndPort());
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        requests_are_retried_and_carry_notifications();
        batches_are_watched_from_another_thread();
        tasks_may_be_read_while_more_are_submitted();
        a_peer_that_is_gone_is_found_out_and_forgotten();
        an_unknown_segment_has_no_descriptor();
        the_topology_is_told_without_a_name();
        a_transport_that_is_not_there_is_null();
        an_engine_is_reached_by_its_address();
    }, processes::serve);
}
