// Upstream's tests of the TCP transport: one engine with itself and with another process, many blocks, comparisons of statuses.
#include <cuda_alike.h>
#include <transfer_engine.h>

#include <cstring>

#include "check.hpp"
#include "numa_memory.hpp"
#include "processes.hpp"

using namespace mooncake;

class Node {
public:
    explicit Node(std::size_t length) : length_(length), engine(std::make_unique<TransferEngine>(false)) {
        auto [host, port] = parseHostNameWithPort(processes::host() + ":12345");
        int rc = engine->init(P2PHANDSHAKE, processes::host() + ":12345", host, port);
        EXPECT(0, rc);
        Transport* transport = nullptr;
        std::string matrix = processes::nic_matrix();
        void* args[] = {matrix.data(), nullptr};
        transport = engine->installTransport(processes::protocol(), matrix.empty() ? nullptr : args);
        REQUIRE(transport != nullptr);
        memory = static_cast<char*>(allocate_on_node(length, 0));
        REQUIRE(memory != nullptr);
        EXPECT(0, engine->registerLocalMemory(memory, length, "cpu:0"));
    }
    ~Node() {
        engine->unregisterLocalMemory(memory);
        free_on_node(memory, length_);
    }

    void move(TransferRequest::OpCode opcode, SegmentID segment, void* local, std::uint64_t remote, std::size_t length) {
        auto batch = engine->allocateBatchID(1);
        TransferRequest entry;
        entry.opcode = opcode;
        entry.length = length;
        entry.source = local;
        entry.target_id = segment;
        entry.target_offset = remote;
        Status s = engine->submitTransfer(batch, {entry});
        EXPECT(Status::OK(), s);
        TransferStatus status;
        bool completed = false;
        while (!completed) {
            s = engine->getTransferStatus(batch, 0, status);
            EXPECT(Status::OK(), s);
            REQUIRE(status.s != TransferStatusEnum::FAILED);
            completed = status.s == TransferStatusEnum::COMPLETED;
        }
        s = engine->freeBatchID(batch);
        EXPECT(Status::OK(), s);
    }

private:
    const std::size_t length_;

public:
    std::unique_ptr<TransferEngine> engine;
    char* memory;
};

static void an_engine_moves_to_itself() {
    Node node(2 << 20);
    auto segment = node.engine->openSegment(node.engine->getLocalIpAndPort());
    EXPECT(0u, segment);
    std::shared_ptr<TransferMetadata::SegmentDesc> description = node.engine->getMetadata()->getSegmentDescByID(segment);
    REQUIRE(description != nullptr);
    EXPECT(1u, description->buffers.size());
    EXPECT(reinterpret_cast<std::uint64_t>(node.memory), description->buffers[0].addr);
    for (std::size_t length : {1ul, 4096ul, 1048576ul}) {
        processes::fill(node.memory, length, length);
        node.move(TransferRequest::WRITE, segment, node.memory, description->buffers[0].addr + (1 << 20), length);
        EXPECT(0, std::memcmp(node.memory, node.memory + (1 << 20), length));
    }
}

static void blocks_are_written_and_read_back() {
    Node node(2 << 20);
    processes::Peer peer;
    auto segment = node.engine->openSegment(peer.name());
    auto description = node.engine->getMetadata()->getSegmentDescByID(segment);
    REQUIRE(description != nullptr);
    const std::uint64_t remote = description->buffers[0].addr;
    EXPECT(peer.base(), remote);
    for (int round = 0; round < 10; round++) {
        processes::fill(node.memory, 1 << 20, round);
        node.move(TransferRequest::WRITE, segment, node.memory, remote + round, 1 << 20);
        EXPECT(processes::checksum(node.memory, 1 << 20), peer.sum(round, 1 << 20));
        node.move(TransferRequest::READ, segment, node.memory + (1 << 20), remote + round, 1 << 20);
        EXPECT(0, std::memcmp(node.memory, node.memory + (1 << 20), 1 << 20));
    }
}

static void statuses_compare_by_code_and_text() {
    EXPECT(Status::OK(), Status());
    REQUIRE(Status::InvalidArgument("a") == Status::InvalidArgument("a"));
    REQUIRE(Status::InvalidArgument("a") != Status::InvalidArgument("b"));
    REQUIRE(Status::InvalidArgument("a") != Status::AddressNotRegistered("a"));
    std::ostringstream text;
    text << Status::OK() << "|" << Status::InvalidArgument("a text") << "|" << Status::Code::kClock;
    EXPECT(std::string("OK|InvalidArgument: a text|Clock"), text.str());
    EXPECT(std::string("OK"), Status().ToString());
    Status from = Status::Clock("moved");
    Status to = std::move(from);
    REQUIRE(to.IsClock());
    EXPECT(std::string("moved"), std::string(to.message()));
    Status copy = to;
    to = Status::OK();
    EXPECT(std::string("moved"), std::string(copy.message()));
    REQUIRE(to.ok() && to.message().empty());

    // Every code has its number, its factory, its question and its name.
    const struct {
        Status status;
        int code;
        bool (Status::*is)() const;
        const char* name;
    } all[] = {
        {Status::InvalidArgument(""), 1, &Status::IsInvalidArgument, "InvalidArgument"},
        {Status::TooManyRequests(""), 2, &Status::IsTooManyRequests, "TooManyRequests"},
        {Status::AddressNotRegistered(""), 3, &Status::IsAddressNotRegistered, "AddressNotRegistered"},
        {Status::BatchBusy(""), 4, &Status::IsBatchBusy, "BatchBusy"},
        {Status::DeviceNotFound(""), 6, &Status::IsDeviceNotFound, "DeviceNotFound"},
        {Status::AddressOverlapped(""), 7, &Status::IsAddressOverlapped, "AddressOverlapped"},
        {Status::NotSupportedTransport(""), 8, &Status::IsNotSupportedTransport, "NotSupportedTransport"},
        {Status::Dns(""), 101, &Status::IsDns, "Dns"},
        {Status::Socket(""), 102, &Status::IsSocket, "Socket"},
        {Status::MalformedJson(""), 103, &Status::IsMalformedJson, "MalformedJson"},
        {Status::RejectHandshake(""), 104, &Status::IsRejectHandshake, "RejectHandshake"},
        {Status::Metadata(""), 200, &Status::IsMetadata, "Metadata"},
        {Status::Endpoint(""), 201, &Status::IsEndpoint, "Endpoint"},
        {Status::Context(""), 202, &Status::IsContext, "Context"},
        {Status::Numa(""), 300, &Status::IsNuma, "Numa"},
        {Status::Clock(""), 301, &Status::IsClock, "Clock"},
        {Status::Memory(""), 302, &Status::IsMemory, "Memory"},
        {Status::NotImplemented(""), 999, &Status::IsNotImplemented, "NotImplemented"},
    };
    for (const auto& one : all) {
        EXPECT(one.code, static_cast<int>(one.status.code()));
        EXPECT(std::string(one.name), std::string(Status::CodeToString(one.status.code())));
        for (const auto& other : all) EXPECT(one.is == other.is, (one.status.*other.is)());
    }
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        an_engine_moves_to_itself();
        blocks_are_written_and_read_back();
        statuses_compare_by_code_and_text();
    }, processes::serve);
}
