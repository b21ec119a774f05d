// Topology over te_topology, which has the matrix. What is kept here: what was read of its text last, until the text is another, since
// programs ask for it before each transfer; the list that getHcaList() refers to; and which NICs of peers GlobalConfig allowed when the
// matrix was read.
//
// NICs have the numbers of their places among those that are in the matrix now. te_topology counts those that are disabled as well, so its
// numbers are translated by way of the names.
#include "topology.h"

#include <te.h>

#include <algorithm>
#include <mutex>

#include "config.h"
#include "json_value.h"

namespace mooncake {
namespace {

using transfer_engine_cxx::JsonArray;
using transfer_engine_cxx::JsonObject;
using transfer_engine_cxx::JsonValue;

// A text that the library gave.
std::string take(char* text) {
    std::string copy = text;
    te_free_text(text);
    return copy;
}

std::string read_text(te_topology* topology) {
    char* text;
    return te_topology_json(topology, &text) == TE_OK ? take(text) : "{}";
}

std::vector<std::string> read_names(const JsonValue& value) {
    std::vector<std::string> names;
    for (const JsonValue& name : *value.as<JsonArray>()) names.push_back(*name.as<std::string>());
    return names;
}

// A matrix that the library wrote.
struct Matrix {
    TopologyMatrix entries;
    // Each once, in the order of the text, which is that of the locations.
    std::vector<std::string> nics;

    explicit Matrix(const std::string& text) {
        const std::optional<JsonValue> json = transfer_engine_cxx::read_json(text);
        for (const auto& [location, lists] : *json->as<JsonObject>()) {
            const JsonArray& both = *lists.as<JsonArray>();
            TopologyEntry entry{location, read_names(both[0]), read_names(both[1])};
            for (const auto* names : {&entry.preferred_hca, &entry.avail_hca}) {
                for (const std::string& name : *names) {
                    if (std::ranges::find(nics, name) == nics.end()) nics.push_back(name);
                }
            }
            entries.emplace(location, std::move(entry));
        }
    }

    int number(const std::string& nic) const {
        auto found = std::ranges::find(nics, nic);
        return found == nics.end() ? ERR_DEVICE_NOT_FOUND : static_cast<int>(found - nics.begin());
    }
};

}  // namespace

struct Topology::State {
    // Null if there was no memory: then all calls of the C interface fail.
    te_topology* topology = nullptr;

    std::mutex lock;  // around what follows
    std::string text;
    std::shared_ptr<const Matrix> last_matrix;
    std::vector<std::string> nics;
    // Of peers, for our NICs; empty if nothing is prescribed.
    std::unordered_map<std::string, std::vector<std::string>> peer_affinity;

    State() { te_topology_create(&topology); }
    ~State() { te_topology_destroy(topology); }

    // As it is now.
    std::shared_ptr<const Matrix> matrix() {
        std::string now = read_text(topology);
        std::lock_guard guard(lock);
        if (!last_matrix || now != text) {
            last_matrix = std::make_shared<const Matrix>(now);
            text = std::move(now);
        }
        return last_matrix;
    }

    // After the matrix was read.
    int with_affinity(te_status status) {
        if (status != TE_OK) return status;
        const GlobalConfig& config = globalConfig();
        std::lock_guard guard(lock);
        peer_affinity.clear();
        if (config.enable_hca_peer_affinity) peer_affinity = config.nic_peer_affinity;
        return 0;
    }
};

Topology::Topology() : state_(std::make_unique<State>()) {}

Topology::Topology(const Topology& other) : Topology() { *this = other; }

Topology& Topology::operator=(const Topology& other) {
    if (this == &other) return *this;
    te_topology_parse(state_->topology, other.toString().c_str());
    std::scoped_lock guard(state_->lock, other.state_->lock);
    state_->peer_affinity = other.state_->peer_affinity;
    return *this;
}

Topology::~Topology() = default;

te_topology* Topology::handle() const { return state_->topology; }

bool Topology::empty() const { return getMatrix().empty(); }

void Topology::clear() { te_topology_parse(state_->topology, "{}"); }

int Topology::discover(const std::vector<std::string>& filter) {
    std::vector<const char*> names;
    for (const std::string& name : filter) names.push_back(name.c_str());
    return state_->with_affinity(te_topology_discover(state_->topology, names.data(), names.size()));
}

int Topology::parse(const std::string& matrix_json) {
    return state_->with_affinity(te_topology_parse(state_->topology, matrix_json.c_str()));
}

int Topology::disableDevice(const std::string& device_name) { return te_topology_disable(state_->topology, device_name.c_str()); }

int Topology::selectDevice(const std::string storage_type, int retry_count) { return selectDevice(storage_type, {}, retry_count); }

int Topology::selectDevice(const std::string storage_type, std::string_view hint, int retry_count) {
    size_t index;
    std::string wanted(hint);
    te_status status = te_topology_select(state_->topology, storage_type.c_str(), wanted.empty() ? nullptr : wanted.c_str(),
                                          static_cast<uint32_t>(std::max(retry_count, 0)), &index);
    if (status != TE_OK) return status;
    char* name;
    status = te_topology_nic_name(state_->topology, index, &name);
    return status == TE_OK ? state_->matrix()->number(take(name)) : status;
}

int Topology::selectDeviceByLocalHca(const std::string storage_type, std::string_view local_hca, int retry_count) {
    std::vector<std::string> allowed;
    {
        std::lock_guard guard(state_->lock);
        auto found = state_->peer_affinity.find(std::string(local_hca));
        if (found != state_->peer_affinity.end()) allowed = found->second;
    }
    const std::shared_ptr<const Matrix> matrix = state_->matrix();
    auto entry = matrix->entries.find(storage_type);
    if (entry != matrix->entries.end()) {
        const std::vector<std::string>& preferred = entry->second.preferred_hca;
        std::erase_if(allowed, [&](const std::string& nic) { return std::ranges::find(preferred, nic) == preferred.end(); });
        if (!allowed.empty()) {
            size_t turn = retry_count > 0 ? static_cast<size_t>(retry_count - 1) : SimpleRandom::Get().next();
            return matrix->number(allowed[turn % allowed.size()]);
        }
    }
    return selectDevice(storage_type, retry_count);
}

TopologyMatrix Topology::getMatrix() const { return state_->matrix()->entries; }

const std::vector<std::string>& Topology::getHcaList() const {
    const std::shared_ptr<const Matrix> matrix = state_->matrix();
    std::lock_guard guard(state_->lock);
    if (matrix->nics != state_->nics) state_->nics = matrix->nics;
    return state_->nics;
}

std::string Topology::toString() const { return read_text(state_->topology); }

bool Topology::operator==(const Topology& other) const { return toString() == other.toString(); }

}  // namespace mooncake
