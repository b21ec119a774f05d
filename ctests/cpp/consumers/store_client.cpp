// The store's client: an engine that is set up step by step, memory that is registered now and published later, scattered reads.
#include <config.h>
#include <transfer_engine.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_aggregate_v<AutoDiscoverConfig>);
static_assert(std::is_same_v<decltype(std::declval<const Topology&>().getHcaList()), const std::vector<std::string>&>);
static_assert(std::is_same_v<decltype(std::declval<const Topology&>().getMatrix()), TopologyMatrix>);
static_assert(std::is_same_v<TopologyMatrix, std::unordered_map<std::string, TopologyEntry>>);
static_assert(std::is_same_v<decltype(std::declval<TransferEngine&>().getLocalTopology()), std::shared_ptr<Topology>>);
static_assert(std::is_same_v<decltype(globalConfig()), GlobalConfig&>);

// The configuration is the process's: what is set around a call is taken back.
class ConfigurationGuard {
public:
    ConfigurationGuard() { globalConfig().ascend_store_te_init = true; }
    ~ConfigurationGuard() { globalConfig().ascend_store_te_init = false; }
};

class Client {
public:
    Client(const std::string& metadata, const std::string& name) : name_(name), engine_(std::make_shared<TransferEngine>()) {
        EXPECT(false, engine_->isUsingTent());
        REQUIRE(!AutoDiscoverConfig{}.enabled && AutoDiscoverConfig{}.protocol.empty());
        std::vector<std::string> nics;
        engine_->setAutoDiscover({.enabled = false, .protocol = processes::protocol()});
        engine_->setWhitelistFilters(std::move(nics));
        auto [host, port] = parseHostNameWithPort(name);
        ConfigurationGuard guard;
        SUCCEEDS(engine_->init(metadata, name, host, port));
        processes::install(*engine_);
        REQUIRE(engine_->getBaseAddr() == nullptr);
    }

    // In pieces of what a device can register at most.
    int mount(unsigned char* buffer, std::size_t size) {
        const std::size_t piece = std::min<std::uint64_t>(globalConfig().max_mr_size, globalConfig().max_seg_size);
        for (std::size_t offset = 0; offset < size; offset += std::min(piece, size - offset)) {
            int rc = engine_->registerLocalMemory(buffer + offset, std::min(piece, size - offset), kWildcardLocation, true, false);
            if (rc != 0) return rc;
        }
        return 0;
    }

    int publish() { return engine_->getMetadata()->updateLocalSegmentDesc(); }
    int publish_address() { return engine_->getMetadata()->rePublishRpcMetaEntry(name_); }

    void unmount(void* buffer) {
        int rc = engine_->unregisterLocalMemory(buffer, true);
        REQUIRE(rc == 0 || rc == ERR_ADDRESS_NOT_REGISTERED);
    }

    TransferEngine& engine() { return *engine_; }

private:
    const std::string name_;
    std::shared_ptr<TransferEngine> engine_;
};

// The peer registers 1 MiB without telling, and tells when it is asked to.
static void serve_later() {
    Client client(std::getenv("METADATA"), std::getenv("NAME"));
    processes::Memory memory(1 << 20);
    processes::fill(memory.data(), memory.size(), 8);
    const bool is_named = std::string(std::getenv("METADATA")) != P2PHANDSHAKE;
    std::cout << (is_named ? std::getenv("NAME") : client.engine().getLocalIpAndPort()) << " " << reinterpret_cast<std::uintptr_t>(memory.data()) << std::endl;
    for (std::string order; std::getline(std::cin, order);) {
        int result = -1;
        if (order == "mount") result = client.mount(memory.data(), memory.size());
        if (order == "publish") result = client.publish();
        if (order == "publish address") result = client.publish_address();
        std::cout << result << std::endl;
    }
    client.unmount(memory.data());
    client.unmount(memory.data());
}

static std::size_t count_buffers(TransferEngine& engine, SegmentHandle segment) {
    return engine.getMetadata()->getSegmentDescByID(segment, true)->buffers.size();
}

static void memory_is_published_when_asked_to() {
    processes::MetadataServer server;
    Client client(server.url(), "client:12345");
    processes::Peer peer({"METADATA=" + server.url(), "NAME=store:12345"});
    const SegmentHandle segment = client.engine().openSegment(peer.name());
    REQUIRE(segment != (SegmentHandle)-1);
    EXPECT(std::string("0"), peer.ask("mount"));
    EXPECT(0u, count_buffers(client.engine(), segment));
    EXPECT(std::string("0"), peer.ask("publish"));
    EXPECT(1u, count_buffers(client.engine(), segment));
    EXPECT(std::string("0"), peer.ask("publish address"));
}

static void publishing_fails_without_a_server_and_succeeds_later() {
    auto server = std::make_unique<processes::MetadataServer>();
    Client client(server->url(), "client:12345");
    processes::Memory memory(4096);
    EXPECT(0, client.mount(memory.data(), memory.size()));
    server.reset();
    REQUIRE(client.publish() != 0);
    REQUIRE(client.publish_address() != 0);
    SUCCEEDS(client.engine().unregisterLocalMemory(memory.data(), false));
    EXPECT(ERR_ADDRESS_NOT_REGISTERED, client.engine().unregisterLocalMemory(memory.data(), false));
}

static void scattered_reads_may_be_kept_and_awaited() {
    Client client(P2PHANDSHAKE, processes::host());
    processes::Peer peer({"METADATA=P2PHANDSHAKE", "NAME=" + processes::host()});
    EXPECT(std::string("0"), peer.ask("mount"));
    EXPECT(std::string("0"), peer.ask("publish"));
    constexpr std::size_t kLength = 1 << 20;
    processes::Memory there(kLength), memory(kLength);
    processes::fill(there.data(), kLength, 8);
    EXPECT(0, client.mount(memory.data(), memory.size()));

    const std::vector<std::size_t> local{0, 10000}, remote{3, 500000}, lengths{9000, 100000};
    std::vector<bool> told(2, false);
    using Range = TransferEngine::ScatterTransferRange;
    Range range{.opcode = TransferRequest::READ, .remote_segment = peer.name(), .remote_base_offset = peer.base(), .remote_size = kLength,
                .local_buffer = memory.data(), .local_capacity = memory.size(), .local_offsets = local, .remote_offsets = remote,
                .lengths = lengths, .on_fragment_complete = [&](std::size_t i, const Status& status) { told.at(i) = status.ok(); }};
    std::optional<TransferEngine::ScatterTransferOperation> operation;
    operation = client.engine().submitScatter({range});
    SUCCEEDS(operation->wait());
    operation.reset();
    for (std::size_t i = 0; i < lengths.size(); i++) {
        REQUIRE(told[i]);
        REQUIRE(std::equal(memory.data() + local[i], memory.data() + local[i] + lengths[i], there.data() + remote[i]));
    }

    // Beyond what is there: told by the fragment and by the whole.
    range.remote_size = 1000;
    std::vector<Status> statuses(2);
    range.on_fragment_complete = [&](std::size_t i, const Status& status) { statuses.at(i) = status; };
    Status status = client.engine().submitScatter({range}).wait();
    REQUIRE(status.IsInvalidArgument() && statuses[0].IsInvalidArgument() && statuses[1].IsInvalidArgument());
    client.unmount(memory.data());
}

static void a_topology_is_there_before_the_engine_is_initialized() {
    TransferEngine engine;
    std::shared_ptr<Topology> topology = engine.getLocalTopology();
    REQUIRE(topology != nullptr);
    SUCCEEDS(topology->discover({}));
    REQUIRE(topology == engine.getLocalTopology());
    bool has_node = false;
    std::size_t nics = 0;
    for (auto& [location, entry] : topology->getMatrix()) {
        has_node = has_node || location.rfind("cpu:", 0) == 0;
        nics = std::max(nics, entry.preferred_hca.size() + entry.avail_hca.size());
        EXPECT(location, entry.name);
    }
    REQUIRE(has_node);
    EXPECT(nics, topology->getHcaList().size());
    const std::vector<std::string> filter{"no such NIC"};
    SUCCEEDS(topology->discover(filter));
    REQUIRE(topology->getHcaList().empty());
    SUCCEEDS(topology->discover({"no such NIC"}));
    REQUIRE(topology->getHcaList().empty());
    EXPECT(0, engine.numContexts());
}

// Without a matrix of its own, the transport takes what the topology has been told, by discovery or else.
static void a_transport_uses_the_topology_as_it_is() {
    TransferEngine engine;
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host()));
    SUCCEEDS(engine.getLocalTopology()->parse(R"({"cpu:0": [["no such NIC"], []]})"));
    REQUIRE(engine.installTransport("rdma", nullptr) == nullptr);
    if (processes::protocol() == "rdma") {
        SUCCEEDS(engine.getLocalTopology()->parse(processes::nic_matrix()));
        const std::vector<std::string> nics = engine.getLocalTopology()->getHcaList();
        SUCCEEDS(engine.getLocalTopology()->discover(nics));
        REQUIRE(engine.getLocalTopology()->getHcaList() == nics);
        REQUIRE(engine.installTransport("rdma", nullptr) != nullptr);
        EXPECT(static_cast<int>(nics.size()), engine.numContexts());
        REQUIRE(engine.showLinks().find(nics.front()) != std::string::npos);
    }
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        memory_is_published_when_asked_to();
        publishing_fails_without_a_server_and_succeeds_later();
        scattered_reads_may_be_kept_and_awaited();
        a_topology_is_there_before_the_engine_is_initialized();
        a_transport_uses_the_topology_as_it_is();
    }, serve_later);
}
