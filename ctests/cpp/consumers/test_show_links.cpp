// Upstream's tests of links: of an engine that was never initialized, by the class and by the C interface with the object's address.
#include <transfer_engine.h>
#include <transfer_engine_c.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static const char kMatrix[] = R"({"cpu:0": [["nic_a"], ["nic_b"]], "cpu:1": [["nic_b"], ["nic_a"]]})";

static std::string show_by_c(const TransferEngine& engine, bool json) {
    std::vector<char> text(65536);
    EXPECT(0, ::showLinks((transfer_engine_t)&engine, text.data(), text.size(), json));
    return text.data();
}

static void an_engine_that_was_never_initialized_shows_its_topology() {
    TransferEngine engine(false);
    REQUIRE(engine.getLocalTopology() != nullptr);
    EXPECT(0, engine.getLocalTopology()->parse(kMatrix));
    EXPECT(2, engine.numContexts());
    const std::string text = engine.showLinks(), json = engine.showLinks(true);
    for (const std::string& shown : {text, json}) {
        REQUIRE(shown.find("nic_a") != std::string::npos && shown.find("nic_b") != std::string::npos);
        REQUIRE(shown.find("cpu:1") != std::string::npos);
    }
    REQUIRE(json.find("\"source\": \"topology\"") != std::string::npos || json.find("\"source\" : \"topology\"") != std::string::npos);
    EXPECT(text, show_by_c(engine, false));
    EXPECT(json, show_by_c(engine, true));
}

static void an_engine_without_nics_says_so() {
    TransferEngine engine;
    const std::string text = engine.showLinks(), json = engine.showLinks(true);
    REQUIRE(text.find("=== Local NICs ===") != std::string::npos);
    REQUIRE(text.find("=== Topology") == std::string::npos);
    REQUIRE(json.find("local_nics") != std::string::npos);
    char small[8];
    EXPECT(0, ::showLinks((transfer_engine_t)&engine, small, sizeof small, false));
    EXPECT(text.substr(0, 7), std::string(small));
    EXPECT(-1, ::showLinks((transfer_engine_t)&engine, nullptr, 0, false));
}

// The address goes on being a handle once there is an engine, wherever the object is, and no longer when it is gone.
static void the_address_of_the_object_is_a_handle() {
    processes::Memory memory(4096);
    TransferEngine first;
    processes::start(first);
    EXPECT(first.showLinks(true), show_by_c(first, true));
    char address[256];
    EXPECT(0, ::getLocalIpAndPort((transfer_engine_t)&first, address, sizeof address));
    EXPECT(first.getLocalIpAndPort(), std::string(address));
    EXPECT(0, ::registerLocalMemory((transfer_engine_t)&first, memory.data(), memory.size(), "*", 1));
    REQUIRE(first.checkOverlap(memory.data(), 1));

    TransferEngine second(std::move(first));
    EXPECT(0, ::getLocalIpAndPort((transfer_engine_t)&second, address, sizeof address));
    EXPECT(second.getLocalIpAndPort(), std::string(address));
    REQUIRE(::getLocalIpAndPort((transfer_engine_t)&first, address, sizeof address) != 0);

    // In memory that stays when the object is gone.
    alignas(TransferEngine) static std::byte place[sizeof(TransferEngine)];
    const auto handle = reinterpret_cast<transfer_engine_t>(place);
    auto* third = new (place) TransferEngine();
    *third = std::move(second);
    EXPECT(0, ::getLocalIpAndPort(handle, address, sizeof address));
    EXPECT(0, ::unregisterLocalMemory(handle, memory.data()));
    EXPECT(0, third->freeEngine());
    third->~TransferEngine();
    REQUIRE(::getLocalIpAndPort(handle, address, sizeof address) != 0);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        an_engine_that_was_never_initialized_shows_its_topology();
        an_engine_without_nics_says_so();
        the_address_of_the_object_is_a_handle();
    }, processes::serve);
}
