// Upstream's tests of topologies, which are values without an engine.
#include <config.h>
#include <cuda_alike.h>
#include <memory_location.h>
#include <topology.h>

#include <set>

#include "check.hpp"

using namespace mooncake;

static_assert(std::is_copy_constructible_v<Topology> && std::is_copy_assignable_v<Topology> && std::is_default_constructible_v<Topology>);
static_assert(std::is_aggregate_v<TopologyEntry>);
static_assert(std::is_same_v<decltype(std::declval<const Topology&>().toString()), std::string>);
static_assert(std::is_same_v<decltype(std::declval<const Topology&>().toJson()), Json::Value>);

static int number(const Topology& topology, const std::string& nic) {
    const auto& list = topology.getHcaList();
    for (std::size_t i = 0; i < list.size(); i++) {
        if (list[i] == nic) return static_cast<int>(i);
    }
    return -1;
}

static void the_machine_is_discovered() {
    Topology topology;
    REQUIRE(topology.empty());
    SUCCEEDS(topology.discover({}));
    REQUIRE(topology.getMatrix().count("cpu:0") == 1);
    Topology again;
    SUCCEEDS(again.parse(topology.toString()));
    REQUIRE(again == topology);
    topology.clear();
    REQUIRE(topology.empty() && topology.getMatrix().empty() && topology != again);
}

static void an_empty_matrix_is_read() {
    Topology topology;
    SUCCEEDS(topology.parse("{\"cpu:0\" : [[],[]],\"cpu:1\" : [[],[]]}"));
    REQUIRE(topology.getHcaList().empty());
    EXPECT(ERR_DEVICE_NOT_FOUND, topology.selectDevice("cpu:0", 0));
}

static void texts_that_are_no_matrix_are_refused() {
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a"], []]})"));
    for (const char* text : {"", "none", "[]", R"({"cpu:0": ["a"]})", R"({"cpu:0": [["a"]]})", R"({"cpu:0": [[1], []]})"}) {
        EXPECT(ERR_MALFORMED_JSON, topology.parse(text));
    }
    EXPECT(1u, topology.getHcaList().size());
}

static void preferred_nics_come_first_and_then_each_in_turn() {
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a", "b"], ["c"]], "cpu:1": [["c"], ["a", "b"]]})"));
    EXPECT(3u, topology.getHcaList().size());
    std::set<int> preferred;
    for (int i = 0; i < 500; i++) preferred.insert(topology.selectDevice("cpu:0", 0));
    REQUIRE(preferred == std::set<int>({number(topology, "a"), number(topology, "b")}));
    EXPECT(number(topology, "a"), topology.selectDevice("cpu:0", 1));
    EXPECT(number(topology, "b"), topology.selectDevice("cpu:0", 2));
    EXPECT(number(topology, "c"), topology.selectDevice("cpu:0", 3));
    EXPECT(number(topology, "a"), topology.selectDevice("cpu:0", 4));
    EXPECT(ERR_DEVICE_NOT_FOUND, topology.selectDevice("cuda:7"));
    EXPECT(ERR_DEVICE_NOT_FOUND, topology.selectDevice(GPU_PREFIX + "0", "a", 0));
    std::set<int> any;
    for (int i = 0; i < 500; i++) any.insert(topology.selectDevice(kWildcardLocation));
    EXPECT(3u, any.size());
}

static void a_hint_is_followed_where_it_can_be() {
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a", "b"], ["c"]]})"));
    for (int i = 0; i < 50; i++) {
        EXPECT(number(topology, "b"), topology.selectDevice("cpu:0", std::string_view("b")));
        REQUIRE(topology.selectDevice("cpu:0", std::string_view("unknown"), 0) >= 0);
    }
}

static void a_nic_that_is_disabled_is_not_chosen() {
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a", "b"], ["c"]]})"));
    Topology before = topology;
    SUCCEEDS(topology.disableDevice("a"));
    EXPECT(3u, before.getHcaList().size());
    EXPECT(2u, topology.getHcaList().size());
    EXPECT(-1, number(topology, "a"));
    for (int i = 0; i < 100; i++) EXPECT(number(topology, "b"), topology.selectDevice("cpu:0", 0));
    before = topology;
    REQUIRE(before == topology);
}

// What the configuration says when a matrix is read holds for it.
static void peers_nics_are_chosen_by_affinity() {
    globalConfig().enable_hca_peer_affinity = true;
    globalConfig().nic_peer_affinity = {{"local_0", {"b"}}, {"local_1", {"c"}}};
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a", "b", "c"], []]})"));
    globalConfig().enable_hca_peer_affinity = false;
    globalConfig().nic_peer_affinity.clear();
    Topology without;
    SUCCEEDS(without.parse(topology.toString()));
    std::set<int> any;
    for (int i = 0; i < 500; i++) {
        EXPECT(number(topology, "b"), topology.selectDeviceByLocalHca("cpu:0", "local_0", 0));
        EXPECT(number(topology, "c"), topology.selectDeviceByLocalHca("cpu:0", "local_1"));
        any.insert(without.selectDeviceByLocalHca("cpu:0", "local_0"));
    }
    EXPECT(3u, any.size());
}

static void a_matrix_is_iterated_by_binding() {
    Topology topology;
    SUCCEEDS(topology.parse(R"({"cpu:0": [["a"], ["b"]], "cpu:1": [["b"], ["a"]]})"));
    int entries = 0;
    for (auto& [location, entry] : topology.getMatrix()) {
        EXPECT(location, entry.name);
        EXPECT(1u, entry.preferred_hca.size());
        EXPECT(1u, entry.avail_hca.size());
        entries += location != kWildcardLocation;
    }
    EXPECT(2, entries);
    TopologyMatrix matrix = topology.getMatrix();
    TopologyEntry entry{"cpu:9", {"x"}, {}};
    EXPECT(std::string("x"), entry.preferred_hca[0]);
    EXPECT(std::string("a"), matrix["cpu:0"].preferred_hca[0]);
}

int main() {
    the_machine_is_discovered();
    an_empty_matrix_is_read();
    texts_that_are_no_matrix_are_refused();
    preferred_nics_come_first_and_then_each_in_turn();
    a_hint_is_followed_where_it_can_be();
    a_nic_that_is_disabled_is_not_chosen();
    peers_nics_are_chosen_by_affinity();
    a_matrix_is_iterated_by_binding();
}
