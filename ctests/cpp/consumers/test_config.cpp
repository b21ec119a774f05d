// Upstream's tests of the configuration: defaults, and the environment as it is at each call.
#include <config.h>

#include "check.hpp"

using namespace mooncake;

static void defaults_are_upstreams() {
    GlobalConfig config;
    EXPECT(1u, config.num_cq_per_ctx);
    EXPECT(1, config.port);
    EXPECT(0, config.pkey_index);
    EXPECT(256u, config.max_wr);
    EXPECT(false, config.max_wr_from_env);
    EXPECT(5, static_cast<int>(config.mtu_length));
    EXPECT(65536u, config.slice_size);
    EXPECT(2, config.auto_gid_max_retries);
    EXPECT(true, config.metacache);
    EXPECT(0u, config.te_metadata_refresh_interval_seconds);
    EXPECT(google::INFO, config.log_level);
    EXPECT(false, config.trace);
    EXPECT(0, config.conn_pause_ttl_ms);
    EXPECT(false, config.use_ipv6);
    EXPECT(false, config.enable_hca_peer_affinity);
    REQUIRE(config.nic_peer_affinity.empty());
    EXPECT(0u, config.max_concurrent_reg_mr);
    REQUIRE(config.efa_nic_selection == EfaNicSelection::ALL && config.endpoint_store_type == EndpointStoreType::SIEVE);
    EXPECT(-1, config.ib_traffic_class);
    EXPECT(-1, config.ib_service_level);
    EXPECT(2u, config.num_jfc_per_ctx);
    EXPECT(2u, config.num_jfce_per_ctx);
    EXPECT(0x10000000000u, config.max_mr_size);
}

template <class Field>
static void expect(const char* variable, const char* value, Field GlobalConfig::*field, Field expected) {
    GlobalConfig config;
    setenv(variable, value, 1);
    loadGlobalConfig(config);
    unsetenv(variable);
    if (!(config.*field == expected)) check::fail(__FILE__, __LINE__, std::string(variable) + "=" + value + " gives " + check::show(config.*field));
}

static void the_environment_is_read_at_each_call() {
    expect("MC_NUM_CQ_PER_CTX", "7", &GlobalConfig::num_cq_per_ctx, std::size_t{7});
    expect("MC_NUM_CQ_PER_CTX", "8", &GlobalConfig::num_cq_per_ctx, std::size_t{8});
    expect("MC_NUM_CQ_PER_CTX", "256", &GlobalConfig::num_cq_per_ctx, std::size_t{1});
    expect("MC_NUM_CQ_PER_CTX", "none", &GlobalConfig::num_cq_per_ctx, std::size_t{1});
    expect("MC_IB_PORT", "3", &GlobalConfig::port, std::uint8_t{3});
    expect("MC_PKEY_INDEX", "9", &GlobalConfig::pkey_index, std::uint16_t{9});
    expect("MC_PKEY_INDEX", "65536", &GlobalConfig::pkey_index, std::uint16_t{0});
    expect("MC_MAX_WR", "512", &GlobalConfig::max_wr, std::size_t{512});
    expect("MC_MAX_WR", "512", &GlobalConfig::max_wr_from_env, true);
    expect("MC_SLICE_SIZE", "131072", &GlobalConfig::slice_size, std::size_t{131072});
    expect("MC_MAX_MR_SIZE", "1073741824", &GlobalConfig::max_mr_size, std::uint64_t{1} << 30);
    expect("MC_AUTO_GID_MAX_RETRIES", "5", &GlobalConfig::auto_gid_max_retries, 5);
    expect("MC_AUTO_GID_MAX_RETRIES", "17", &GlobalConfig::auto_gid_max_retries, 2);
    expect("MC_DISABLE_METACACHE", "", &GlobalConfig::metacache, false);
    expect("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "11", &GlobalConfig::te_metadata_refresh_interval_seconds, std::uint64_t{11});
    expect("MC_USE_IPV6", "", &GlobalConfig::use_ipv6, true);
    expect("MC_LOG_LEVEL", "WARNING", &GlobalConfig::log_level, static_cast<int>(google::WARNING));
    expect("MC_LOG_LEVEL", "ERROR", &GlobalConfig::log_level, static_cast<int>(google::ERROR));
    expect("MC_LOG_LEVEL", "TRACE", &GlobalConfig::trace, true);
    expect("MC_CONN_PAUSE_TTL_MS", "100", &GlobalConfig::conn_pause_ttl_ms, 100);
    expect("MC_ENABLE_HCA_PEER_AFFINITY", "1", &GlobalConfig::enable_hca_peer_affinity, true);
    expect("MC_NIC_PEER_AFFINITY", "a=b,c;d=e", &GlobalConfig::nic_peer_affinity,
           std::unordered_map<std::string, std::vector<std::string>>{{"a", {"b", "c"}}, {"d", {"e"}}});
    expect("MC_MAX_CONCURRENT_REG_MR", "4", &GlobalConfig::max_concurrent_reg_mr, std::size_t{4});
    expect("MC_EFA_NIC_SELECTION", "LOCAL", &GlobalConfig::efa_nic_selection, EfaNicSelection::LOCAL);
    expect("MC_ENDPOINT_STORE_TYPE", "FIFO", &GlobalConfig::endpoint_store_type, EndpointStoreType::FIFO);
    expect("MC_IB_TC", "255", &GlobalConfig::ib_traffic_class, 255);
    expect("MC_IB_TC", "256", &GlobalConfig::ib_traffic_class, -1);
    expect("MC_IB_SL", "15", &GlobalConfig::ib_service_level, 15);
    expect("MC_IB_SL", "16", &GlobalConfig::ib_service_level, -1);
#if __has_include(<infiniband/verbs.h>)
    expect("MC_MTU", "1024", &GlobalConfig::mtu_length, IBV_MTU_1024);
    expect("MC_MTU", "1000", &GlobalConfig::mtu_length, IBV_MTU_4096);
#endif
}

static void a_range_of_ports_has_two_good_ends() {
    using Range = std::pair<int, int>;
    REQUIRE(ValidatePortRange(15000, 17000, 1, 2) == Range(15000, 17000));
    REQUIRE(ValidatePortRange(1023, 17000, 1, 2) == Range(1, 2));
    REQUIRE(ValidatePortRange(15000, 32768, 1, 2) == Range(1, 2));
    REQUIRE(ValidatePortRange(15000, 61000, 1, 2) == Range(15000, 61000));
    REQUIRE(ValidatePortRange(17000, 15000, 1, 2) == Range(1, 2));
    REQUIRE(ValidatePortRange(65535, 65535, 1, 2) == Range(65535, 65535));
    auto [low, high] = ValidatePortRange(65535, 65536, 3, 4);
    EXPECT(3, low);
    EXPECT(4, high);
}

int main() {
    defaults_are_upstreams();
    the_environment_is_read_at_each_call();
    a_range_of_ports_has_two_good_ends();
}
