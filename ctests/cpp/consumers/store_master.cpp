// The store's master removes what dead clients have left on the metadata server. There is no engine in its process.
#include <transfer_engine.h>
#include <transfer_metadata_plugin.h>

#include <memory>
#include <thread>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::has_virtual_destructor_v<MetadataStoragePlugin>);
static_assert(std::is_same_v<decltype(MetadataStoragePlugin::Create("")), std::shared_ptr<MetadataStoragePlugin>>);

static bool finds(const std::string& url, const std::string& name) {
    TransferEngine engine;
    SUCCEEDS(engine.init(url, "other:1"));
    REQUIRE(engine.installTransport("tcp", nullptr) != nullptr);
    return engine.openSegment(name) != (SegmentHandle)-1;
}

static void what_a_dead_client_has_left_is_removed() {
    processes::MetadataServer server;
    processes::Peer client({"METADATA=" + server.url()});
    client.kill();
    REQUIRE(finds(server.url(), "dead:1"));
    std::shared_ptr<MetadataStoragePlugin> plugin = MetadataStoragePlugin::Create(server.url());
    REQUIRE(plugin != nullptr);
    std::thread worker([&] {
        REQUIRE(plugin->remove("mooncake/ram/dead:1"));
        REQUIRE(plugin->remove("mooncake/rpc_meta/dead:1"));
    });
    worker.join();
    REQUIRE(!finds(server.url(), "dead:1"));
}

static void without_a_server_nothing_is_removed() {
    std::string url;
    {
        processes::MetadataServer server;
        url = server.url();
    }
    try {
        auto plugin = MetadataStoragePlugin::Create(url);
        REQUIRE(plugin != nullptr && !plugin->remove("mooncake/ram/dead:1"));
    } catch (const std::exception& error) {
        REQUIRE(*error.what() != '\0');
    }
}

static void serve_until_killed() {
    TransferEngine engine;
    SUCCEEDS(engine.init(std::getenv("METADATA"), "dead:1"));
    REQUIRE(engine.installTransport("tcp", nullptr) != nullptr);
    std::cout << "dead:1" << std::endl;
    std::string order;
    std::getline(std::cin, order);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        what_a_dead_client_has_left_is_removed();
        without_a_server_nothing_is_removed();
    }, serve_until_killed);
}
