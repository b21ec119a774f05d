// Upstream's tests of the metadata client, which has no engine: descriptors, addresses and handshakes, through a server and directly.
#include <config.h>
#include <transfer_metadata.h>
#include <transfer_metadata_plugin.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;
using SegmentDesc = TransferMetadata::SegmentDesc;
using BufferDesc = TransferMetadata::BufferDesc;

static_assert(std::is_same_v<mr_key_t, std::uint32_t>);
static_assert(std::is_same_v<TransferMetadata::OnReceiveHandShake,
                             std::function<int(const TransferMetadata::HandShakeDesc&, TransferMetadata::HandShakeDesc&)>>);
static_assert(std::is_aggregate_v<SegmentDesc> && std::is_aggregate_v<BufferDesc> && std::is_aggregate_v<TransferMetadata::DeviceDesc>);
static_assert(std::is_aggregate_v<TransferMetadata::HandShakeDesc> && std::is_aggregate_v<TransferMetadata::RpcMetaDesc>);

static std::shared_ptr<SegmentDesc> describe(const std::string& name) {
    auto description = std::make_shared<SegmentDesc>();
    description->name = name;
    description->protocol = "rdma";
    TransferMetadata::DeviceDesc device{"mlx5_0", 1, "00:11", ""};
    description->devices.push_back(device);
    BufferDesc buffer;
    buffer.name = "cpu:0";
    buffer.addr = 0x100000;
    buffer.length = 4096;
    buffer.lkey = {1};
    buffer.rkey = {2};
    buffer.offset = 0;
    description->buffers.push_back(buffer);
    return description;
}

static void descriptors_go_through_a_server() {
    processes::MetadataServer server;
    TransferMetadata mine(server.url()), other(server.url());
    auto description = describe("node:1");
    SegmentDesc* const object = description.get();
    const TransferMetadata::SegmentID number = 123;
    SUCCEEDS(mine.addLocalSegment(number, "node:1", std::move(description)));
    // NOLINTNEXTLINE: it is not emptied, and is the object that is handed out.
    REQUIRE(description != nullptr && description.get() == object);
    REQUIRE(mine.getSegmentDescByID(number).get() == object);
    REQUIRE(mine.getSegmentDescByName("node:1").get() == object);
    EXPECT(number, mine.getSegmentID("node:1"));

    REQUIRE(other.getSegmentDesc("node:1") == nullptr);
    EXPECT(~std::uint64_t{0}, other.getSegmentID("node:1"));
    SUCCEEDS(mine.updateLocalSegmentDesc(number));
    auto found = other.getSegmentDesc("node:1");
    REQUIRE(found != nullptr && *found == *object);
    EXPECT(std::string("rdma"), found->protocol);
    EXPECT(std::string("mlx5_0"), found->devices.at(0).name);
    EXPECT(2u, found->buffers.at(0).rkey.at(0));
    const auto id = other.getSegmentID("node:1");
    REQUIRE(id != ~std::uint64_t{0});
    REQUIRE(other.getSegmentDescByID(id) == other.getSegmentDescByName("node:1"));

    SUCCEEDS(mine.removeLocalSegment("node:1"));
    REQUIRE(mine.getSegmentDescByID(number) == nullptr);
    SUCCEEDS(other.removeSegmentDesc("node:1"));
}

static void a_buffer_that_comes_or_goes_leaves_earlier_descriptors_alone() {
    processes::MetadataServer server;
    TransferMetadata mine(server.url()), other(server.url());
    auto description = describe("node:2");
    SUCCEEDS(mine.addLocalSegment(LOCAL_SEGMENT_ID, "node:2", std::move(description)));
    auto before = mine.getSegmentDescByID(LOCAL_SEGMENT_ID);
    BufferDesc buffer;
    buffer.name = "cpu:1";
    buffer.addr = 0x200000;
    buffer.length = 8192;
    buffer.lkey = {3};
    buffer.rkey = {4};
    buffer.offset = 0;
    EXPECT(-1, buffer.device_id);
    SUCCEEDS(mine.addLocalMemoryBuffer(buffer, true));
    auto between = mine.getSegmentDescByID(LOCAL_SEGMENT_ID);
    EXPECT(1u, before->buffers.size());
    EXPECT(2u, between->buffers.size());
    REQUIRE(between->buffers[1] == buffer);
    EXPECT(2u, other.getSegmentDesc("node:2")->buffers.size());
    SUCCEEDS(mine.removeLocalMemoryBuffer(reinterpret_cast<void*>(0x100000), false));
    EXPECT(1u, mine.getSegmentDescByID(LOCAL_SEGMENT_ID)->buffers.size());
    EXPECT(2u, between->buffers.size());
    EXPECT(2u, other.getSegmentDesc("node:2")->buffers.size());
    EXPECT(ERR_ADDRESS_NOT_REGISTERED, mine.removeLocalMemoryBuffer(reinterpret_cast<void*>(0x300000), false));
}

static void what_is_kept_of_descriptors_is_configured() {
    processes::MetadataServer server;
    TransferMetadata publisher(server.url());
    SUCCEEDS(publisher.addLocalSegment(LOCAL_SEGMENT_ID, "node:3", describe("node:3")));
    SUCCEEDS(publisher.updateLocalSegmentDesc());
    TransferMetadata keeps(server.url());
    globalConfig().metacache = false;
    TransferMetadata asks(server.url());
    globalConfig().metacache = true;
    const auto kept = keeps.getSegmentID("node:3"), asked = asks.getSegmentID("node:3");
    EXPECT(1u, keeps.getSegmentDescByID(kept)->buffers.size());
    EXPECT(1u, asks.getSegmentDescByID(asked)->buffers.size());
    SUCCEEDS(publisher.removeLocalMemoryBuffer(reinterpret_cast<void*>(0x100000), true));
    EXPECT(0u, asks.getSegmentDescByID(asked)->buffers.size());
    EXPECT(1u, keeps.getSegmentDescByID(kept)->buffers.size());
    EXPECT(0u, keeps.getSegmentDescByID(kept, true)->buffers.size());
    EXPECT(0u, keeps.getSegmentDescByID(kept)->buffers.size());
}

static void descriptors_are_refreshed_where_that_is_configured() {
    processes::MetadataServer server;
    TransferMetadata publisher(server.url());
    SUCCEEDS(publisher.addLocalSegment(LOCAL_SEGMENT_ID, "node:4", describe("node:4")));
    SUCCEEDS(publisher.updateLocalSegmentDesc());
    globalConfig().te_metadata_refresh_interval_seconds = 1;
    TransferMetadata refreshes(server.url());
    globalConfig().te_metadata_refresh_interval_seconds = 0;
    const auto id = refreshes.getSegmentID("node:4");
    EXPECT(1u, refreshes.getSegmentDescByID(id)->buffers.size());
    SUCCEEDS(publisher.removeLocalMemoryBuffer(reinterpret_cast<void*>(0x100000), true));
    for (int i = 0; i < 1200 && !refreshes.getSegmentDescByID(id)->buffers.empty(); i++) usleep(50000);
    EXPECT(0u, refreshes.getSegmentDescByID(id)->buffers.size());
}

static void addresses_go_through_a_server() {
    processes::MetadataServer server;
    TransferMetadata mine(server.url()), other(server.url());
    TransferMetadata::RpcMetaDesc address, found;
    address.ip_or_host_name = "127.0.0.1";
    address.rpc_port = findAvailableTcpPort(address.sockfd);
    REQUIRE(address.rpc_port != 0 && address.sockfd >= 0);
    REQUIRE(other.getRpcMetaEntry("node:5", found) != 0);
    SUCCEEDS(mine.addRpcMetaEntry("node:5", address));
    SUCCEEDS(other.getRpcMetaEntry("node:5", found));
    EXPECT(address.ip_or_host_name, found.ip_or_host_name);
    EXPECT(address.rpc_port, found.rpc_port);
    SUCCEEDS(mine.removeRpcMetaEntry("node:5"));
    TransferMetadata fresh(server.url());
    REQUIRE(fresh.getRpcMetaEntry("node:5", found) != 0);
    close(address.sockfd);
}

static void handshakes_are_answered_on_a_socket_that_is_handed_over() {
    processes::MetadataServer server;
    TransferMetadata mine(server.url()), other(server.url());
    TransferMetadata::RpcMetaDesc address;
    address.ip_or_host_name = "127.0.0.1";
    address.rpc_port = findAvailableTcpPort(address.sockfd);
    SUCCEEDS(mine.addRpcMetaEntry("node:6", address));
    std::atomic<int> answered{0};
    const auto caller = std::this_thread::get_id();
    SUCCEEDS(mine.startHandshakeDaemon(
        [&](const TransferMetadata::HandShakeDesc& peer, TransferMetadata::HandShakeDesc& local) {
            REQUIRE(std::this_thread::get_id() != caller);
            local.payload = "answer to " + peer.payload;
            answered++;
            return 0;
        },
        address.rpc_port, address.sockfd));
    TransferMetadata::HandShakeDesc question, answer;
    question.payload = "a question";
    question.qp_num = {1, 2, 3};
    SUCCEEDS(other.sendHandshake("node:6", question, answer));
    EXPECT(std::string("answer to a question"), answer.payload);
    EXPECT(1, answered.load());
    SUCCEEDS(other.sendProbe("node:6"));
    REQUIRE(other.sendHandshake("nobody:6", question, answer) != 0);
}

// A socket that has sent the request to that port.
static int ask(std::uint16_t port, HandShakeRequestType type) {
    const int asking = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(connect(asking, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    SUCCEEDS(writeString(asking, type, "{}"));
    return asking;
}

// Without an end to the connection its destructor would wait for the peer for ever.
static void a_peer_that_does_not_read_its_reply_does_not_keep_the_client_from_ending() {
    auto mine = std::make_unique<TransferMetadata>(P2PHANDSHAKE);
    auto description = describe("node:7");
    description->buffers.assign(200000, description->buffers[0]);  // more than fits between two sockets
    SUCCEEDS(mine->addLocalSegment(LOCAL_SEGMENT_ID, "node:7", std::move(description)));
    int listener = -1;
    const std::uint16_t port = findAvailableTcpPort(listener);
    SUCCEEDS(mine->startHandshakeDaemon(nullptr, port, listener));
    const int asking = ask(port, HandShakeRequestType::Metadata);
    char first;
    EXPECT(1, recv(asking, &first, 1, MSG_PEEK));
    mine.reset();
    close(asking);
}

static void a_function_that_throws_refuses_the_handshake() {
    TransferMetadata mine(P2PHANDSHAKE), other(P2PHANDSHAKE);
    int listener = -1;
    const std::uint16_t port = findAvailableTcpPort(listener);
    SUCCEEDS(mine.startHandshakeDaemon(
        [](const TransferMetadata::HandShakeDesc&, TransferMetadata::HandShakeDesc&) -> int { throw std::runtime_error("no"); }, port,
        listener));
    const std::string name = "127.0.0.1:" + std::to_string(port);
    TransferMetadata::HandShakeDesc question, answer;
    REQUIRE(other.sendHandshake(name, question, answer) != 0);
    SUCCEEDS(other.sendProbe(name));
}

static void a_segment_may_have_several_names() {
    TransferMetadata mine(P2PHANDSHAKE);
    SUCCEEDS(mine.addLocalSegment(5, "first", describe("first")));
    SUCCEEDS(mine.addLocalSegment(5, "second", describe("second")));
    SUCCEEDS(mine.removeLocalSegment("first"));
    REQUIRE(mine.getSegmentDescByName("second") != nullptr);
    REQUIRE(mine.getSegmentDescByID(5) != nullptr);
    SUCCEEDS(mine.removeLocalSegment("second"));
    REQUIRE(mine.getSegmentDescByID(5) == nullptr);
}

static void slashes_before_a_name_are_no_part_of_it() {
    TransferMetadata mine(P2PHANDSHAKE);
    SUCCEEDS(mine.addLocalSegment(6, "/node:8", describe("node:8")));
    EXPECT(6u, mine.getSegmentID("node:8"));
    EXPECT(6u, mine.getSegmentID("//node:8"));
    SUCCEEDS(mine.removeSegmentDesc("/node:8"));
    REQUIRE(mine.getSegmentDescByID(6) == nullptr);
}

static void frames_are_written_and_read() {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    const std::string text(100000, 'x');
    std::thread writer([&] { SUCCEEDS(writeString(pair[0], HandShakeRequestType::Notify, text)); });
    auto [type, read] = readString(pair[1]);
    writer.join();
    REQUIRE(type == HandShakeRequestType::Notify);
    REQUIRE(read == text);
    REQUIRE(static_cast<int>(HandShakeRequestType::Connection) == 0 && static_cast<int>(HandShakeRequestType::Metadata) == 1);
    REQUIRE(static_cast<int>(HandShakeRequestType::Probe) == 3 && static_cast<int>(HandShakeRequestType::Invalid) == 0xfe);
    REQUIRE(static_cast<int>(HandShakeRequestType::OldProtocol) == 0xff);

    const std::uint64_t too_long = getHandshakeMaxLength() + 1;
    EXPECT(8, writeFully(pair[0], &too_long, 8));
    std::tie(type, read) = readString(pair[1]);
    REQUIRE(type == HandShakeRequestType::Invalid && read.empty());
    close(pair[0]);
    std::tie(type, read) = readString(pair[1]);
    REQUIRE(type == HandShakeRequestType::Invalid && read.empty());
    close(pair[1]);
    EXPECT(std::string("[::1]"), maybeWrapIpV6("::1"));
    EXPECT(std::string("host"), maybeWrapIpV6("host"));
}

static void ports_that_are_found_are_free_and_held() {
    int first = -1, second = -1;
    const std::uint16_t one = findAvailableTcpPort(first), two = findAvailableTcpPort(second);
    REQUIRE(one != 0 && two != 0 && one != two && first >= 0 && second >= 0);
    close(first);
    close(second);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        descriptors_go_through_a_server();
        a_buffer_that_comes_or_goes_leaves_earlier_descriptors_alone();
        what_is_kept_of_descriptors_is_configured();
        descriptors_are_refreshed_where_that_is_configured();
        addresses_go_through_a_server();
        handshakes_are_answered_on_a_socket_that_is_handed_over();
        a_peer_that_does_not_read_its_reply_does_not_keep_the_client_from_ending();
        a_function_that_throws_refuses_the_handshake();
        a_segment_may_have_several_names();
        slashes_before_a_name_are_no_part_of_it();
        frames_are_written_and_read();
        ports_that_are_found_are_free_and_held();
    }, processes::serve);
}
