// Which NICs serve which memory: the NIC priority matrix.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common.h"
#include "transfer_engine_cxx/export.h"
#include "transfer_engine_cxx/json.h"

struct te_topology;

namespace mooncake {

// The NICs of one location, such as "cpu:0".
struct TopologyEntry {
    std::string name;
    std::vector<std::string> preferred_hca;
    std::vector<std::string> avail_hca;

    bool operator==(const TopologyEntry&) const = default;
};

using TopologyMatrix = std::unordered_map<std::string, TopologyEntry>;

// A value: a copy has a matrix of its own. That of an engine is live: what it holds when a transport is installed is what the transport
// uses. Any thread may call any member, except that what getHcaList() returned lasts until the matrix is changed. NICs have the numbers of
// their places in getHcaList().
class TRANSFER_ENGINE_CXX_API Topology {
   public:
    Topology();
    Topology(const Topology& other);
    Topology& operator=(const Topology& other);
    ~Topology();

    bool empty() const;
    void clear();

    // What the machine has; with a filter only NICs of these names. 0 or an ERR_ number.
    int discover(const std::vector<std::string>& filter = {});

    // {"<location>": [["preferred NIC", …], ["available NIC", …]], …}. ERR_MALFORMED_JSON leaves the matrix as it was.
    int parse(const std::string& matrix_json);

    // Takes a NIC out of the matrix. ERR_DEVICE_NOT_FOUND if it is not in it.
    int disableDevice(const std::string& device_name);

    // The number of a NIC for memory at `storage_type`: one of the preferred, then, from `retry_count` 1 on, one after the other. With a
    // hint, the NIC of that name where it serves the location. ERR_DEVICE_NOT_FOUND for a location that the matrix lacks.
    int selectDevice(const std::string storage_type, int retry_count = 0);
    int selectDevice(const std::string storage_type, std::string_view hint, int retry_count = 0);

    // The number of a peer's NIC, this being the peer's topology, for work of our NIC `local_hca`: of those that
    // GlobalConfig::nic_peer_affinity named for it when the matrix was read, one that is preferred at `storage_type`. Without one, and
    // without GlobalConfig::enable_hca_peer_affinity, as selectDevice.
    int selectDeviceByLocalHca(const std::string storage_type, std::string_view local_hca, int retry_count = 0);

    TopologyMatrix getMatrix() const;
    const std::vector<std::string>& getHcaList() const;

    // The form that parse() reads.
    std::string toString() const;
#ifdef TRANSFER_ENGINE_HAS_JSONCPP
    Json::Value toJson() const { return transfer_engine_cxx::parse_json(toString()); }
#else
    Json::Value toJson() const;
#endif

    bool operator==(const Topology& other) const;

    // The matrix in the C interface, for te_engine_options; as long as this lives.
    te_topology* handle() const;

   private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace mooncake
