// What upstream keeps in one process-wide structure.
//
// The engine reads the environment when it is created, and not this structure: what a program writes here has an effect where a comment
// says so. docs/configuration.md lists the variables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#endif

#include "transfer_engine_cxx/export.h"
#include "transfer_engine_cxx/logging.h"

namespace mooncake {

enum class EndpointStoreType { FIFO = 0, SIEVE = 1 };
enum class EfaNicSelection { ALL = 0, LOCAL = 1 };

struct GlobalConfig {
    // RDMA
    size_t num_cq_per_ctx = 1;
    uint8_t port = 1;
    uint16_t pkey_index = 0;
    size_t max_wr = 256;
    bool max_wr_from_env = false;
#if __has_include(<infiniband/verbs.h>)
    ibv_mtu mtu_length = IBV_MTU_4096;
#else
    int mtu_length = 5;
#endif
    size_t slice_size = 65536;
    uint64_t max_mr_size = 0x10000000000;
    size_t max_concurrent_reg_mr = 0;
    int auto_gid_max_retries = 2;
    int ib_traffic_class = -1;
    int ib_service_level = -1;
    int conn_pause_ttl_ms = 0;
    EndpointStoreType endpoint_store_type = EndpointStoreType::SIEVE;

    // Read by Topology::parse() and Topology::discover().
    bool enable_hca_peer_affinity = false;
    std::unordered_map<std::string, std::vector<std::string>> nic_peer_affinity;

    // Handshakes and metadata. The first is read by getDefaultHandshakePort(), metacache and the interval by new TransferMetadata.
    uint16_t handshake_port = 12001;
    bool use_ipv6 = false;
    bool metacache = true;
    uint64_t te_metadata_refresh_interval_seconds = 0;

    // Log
    int log_level = google::INFO;
    bool trace = false;

    // Of transports that are not here; kept for programs that read or write them.
    uint64_t max_seg_size = 0x10000000000;
    size_t num_jfc_per_ctx = 2;
    size_t num_jfce_per_ctx = 2;
    EfaNicSelection efa_nic_selection = EfaNicSelection::ALL;
    bool ascend_use_fabric_mem = false;
    bool ascend_agent_mode = false;
    bool ascend_store_te_init = false;
    bool sunrise_use_device_mem = false;
};

// The one of this process, whichever module asks; filled from the environment by the first call. Nothing is locked: write before others
// read.
TRANSFER_ENGINE_CXX_API GlobalConfig& globalConfig();

// Reads the environment as it is now. Fields that no variable sets stay as they are.
TRANSFER_ENGINE_CXX_API void loadGlobalConfig(GlobalConfig& config);

TRANSFER_ENGINE_CXX_API uint16_t getDefaultHandshakePort();

// The range [min_port, max_port] where both ends are in 1024 to 32767 or 61000 to 65535 and in order; else the default one.
inline std::pair<int, int> ValidatePortRange(int min_port, int max_port, int default_min, int default_max) {
    auto allowed = [](int port) { return (port >= 1024 && port <= 32767) || (port >= 61000 && port <= 65535); };
    if (allowed(min_port) && allowed(max_port) && min_port <= max_port) return {min_port, max_port};
    return {default_min, default_max};
}

}  // namespace mooncake
