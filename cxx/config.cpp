// Fills GlobalConfig from what the library reads of the environment.
#include "config.h"

#include <te.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "common.h"

namespace mooncake {
namespace {

#if __has_include(<infiniband/verbs.h>)
using Mtu = ibv_mtu;
#else
using Mtu = int;
#endif

// The verbs number of a path MTU: 2 for 512 bytes, one more for each doubling.
Mtu mtu_number(uint32_t bytes) {
    int number = 1;
    for (uint32_t size = 256; size < bytes && number < 5; size *= 2) ++number;
    return static_cast<Mtu>(number);
}

// glog's number of a level of our log.
int severity(uint32_t level) {
    if (level <= TE_LOG_ERROR) return google::ERROR;
    return level == TE_LOG_WARNING ? google::WARNING : google::INFO;
}

// "mlx5_0=mlx5_0,mlx5_1;mlx5_1=mlx5_2", as MC_NIC_PEER_AFFINITY has it.
std::unordered_map<std::string, std::vector<std::string>> parse_peer_affinity(std::string_view text) {
    auto trim = [](std::string_view part) {
        size_t first = part.find_first_not_of(" \t");
        return first == part.npos ? std::string() : std::string(part.substr(first, part.find_last_not_of(" \t") - first + 1));
    };
    auto next = [](std::string_view& rest, char separator) {
        std::string_view part = rest.substr(0, rest.find(separator));
        rest.remove_prefix(std::min(part.size() + 1, rest.size()));
        return part;
    };
    std::unordered_map<std::string, std::vector<std::string>> map;
    while (!text.empty()) {
        std::string_view peers = next(text, ';');
        std::string nic = trim(next(peers, '='));
        std::vector<std::string> names;
        while (!peers.empty()) {
            if (std::string name = trim(next(peers, ',')); !name.empty()) names.push_back(std::move(name));
        }
        if (!nic.empty() && !names.empty()) map[nic] = std::move(names);
    }
    return map;
}

te_configuration read_configuration() {
    te_configuration read = {};
    read.struct_size = sizeof read;
    te_read_configuration(&read);
    return read;
}

}  // namespace

void loadGlobalConfig(GlobalConfig& config) {
    const te_configuration read = read_configuration();
    config.num_cq_per_ctx = read.completion_queues;
    config.port = static_cast<uint8_t>(read.ib_port);
    config.pkey_index = static_cast<uint16_t>(read.pkey_index);
    config.max_wr = read.max_work_requests;
    config.max_wr_from_env = read.max_work_requests_is_set != 0;
    config.mtu_length = mtu_number(read.mtu);
    config.slice_size = read.slice_size;
    config.max_mr_size = read.max_mr_size;
    config.max_concurrent_reg_mr = read.registration_threads;
    config.auto_gid_max_retries = static_cast<int>(read.gid_retries);
    config.ib_traffic_class = read.ib_traffic_class;
    config.ib_service_level = read.ib_service_level;
    config.conn_pause_ttl_ms = static_cast<int>(read.reconnect_pause_ms);
    config.endpoint_store_type = read.endpoint_sieve ? EndpointStoreType::SIEVE : EndpointStoreType::FIFO;
    config.enable_hca_peer_affinity = read.peer_affinity != 0;
    // A text, which the library's structure does not have.
    const char* affinity = std::getenv("MC_NIC_PEER_AFFINITY");
    config.nic_peer_affinity = parse_peer_affinity(affinity ? affinity : "");
    // Of a transport that is not here.
    const char* efa_nics = std::getenv("MC_EFA_NIC_SELECTION");
    config.efa_nic_selection = efa_nics && std::string_view(efa_nics) == "LOCAL" ? EfaNicSelection::LOCAL : EfaNicSelection::ALL;
    config.handshake_port = static_cast<uint16_t>(read.handshake_port);
    config.use_ipv6 = read.use_ipv6 != 0;
    config.metacache = read.metadata_cache != 0;
    config.te_metadata_refresh_interval_seconds = read.metadata_refresh_interval_s;
    // The library says less by default than glog does.
    if (std::getenv("MC_LOG_LEVEL")) config.log_level = severity(read.log_level);
    config.trace = read.log_level == TE_LOG_TRACE;
}

GlobalConfig& globalConfig() {
    // Never destroyed: threads may read it while the process ends.
    static GlobalConfig& config = *[] {
        auto* config = new GlobalConfig;
        loadGlobalConfig(*config);
        return config;
    }();
    return config;
}

uint16_t getDefaultHandshakePort() { return globalConfig().handshake_port; }

size_t getHandshakeMaxLength() {
    static const size_t length = read_configuration().handshake_max_length;
    return length;
}

}  // namespace mooncake
