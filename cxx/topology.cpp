// Topology over te_topology, which has the matrix. What is kept here: the list that getHcaList() refers to, and which NICs of peers
// GlobalConfig allowed when the matrix was read.
#include "topology.h"

#include <te.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "config.h"

namespace mooncake {
namespace {

// A text that the library gave.
std::string take(char* text) {
    std::string copy = text;
    te_free_text(text);
    return copy;
}

std::string read_json(te_topology* topology) {
    char* text;
    return te_topology_json(topology, &text) == TE_OK ? take(text) : "{}";
}

// All NICs, by their numbers.
std::vector<std::string> read_nics(te_topology* topology) {
    std::vector<std::string> names;
    char* name;
    while (te_topology_nic_name(topology, names.size(), &name) == TE_OK) names.push_back(take(name));
    return names;
}

// Reads the matrix that the library wrote: objects, arrays and strings without white space between them.
class MatrixReader {
   public:
    explicit MatrixReader(std::string_view text) : rest_(text) {}

    TopologyMatrix read() {
        TopologyMatrix matrix;
        skip('{');
        while (!skip('}') && !rest_.empty()) {
            TopologyEntry entry;
            entry.name = read_string();
            skip(':');
            skip('[');
            entry.preferred_hca = read_strings();
            skip(',');
            entry.avail_hca = read_strings();
            skip(']');
            skip(',');
            std::string key = entry.name;
            matrix.emplace(std::move(key), std::move(entry));
        }
        return matrix;
    }

   private:
    bool skip(char expected) {
        if (rest_.empty() || rest_.front() != expected) return false;
        rest_.remove_prefix(1);
        return true;
    }

    char next() {
        char first = rest_.empty() ? '\0' : rest_.front();
        rest_.remove_prefix(std::min<size_t>(1, rest_.size()));
        return first;
    }

    std::vector<std::string> read_strings() {
        std::vector<std::string> strings;
        skip('[');
        while (!skip(']') && !rest_.empty()) {
            strings.push_back(read_string());
            skip(',');
        }
        return strings;
    }

    std::string read_string() {
        std::string text;
        skip('"');
        while (!skip('"') && !rest_.empty()) {
            char letter = next();
            text += letter == '\\' ? read_escaped() : letter;
        }
        return text;
    }

    // The library escapes quotes, backslashes and control characters alone.
    char read_escaped() {
        switch (char letter = next()) {
            case 'b': return '\b';
            case 'f': return '\f';
            case 'n': return '\n';
            case 'r': return '\r';
            case 't': return '\t';
            case 'u': {
                unsigned code = 0;
                std::string_view digits = rest_.substr(0, 4);
                std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
                rest_.remove_prefix(digits.size());
                return static_cast<char>(code);
            }
            default: return letter;
        }
    }

    std::string_view rest_;
};

}  // namespace

struct Topology::State {
    // Null if there was no memory: then all calls of the C interface fail.
    te_topology* topology = nullptr;

    std::mutex lock;
    std::vector<std::string> nics;
    // Of peers, for our NICs; empty if nothing is prescribed.
    std::unordered_map<std::string, std::vector<std::string>> peer_affinity;

    State() { te_topology_create(&topology); }
    ~State() { te_topology_destroy(topology); }

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
    return status == TE_OK ? static_cast<int>(index) : status;
}

int Topology::selectDeviceByLocalHca(const std::string storage_type, std::string_view local_hca, int retry_count) {
    std::vector<std::string> allowed;
    {
        std::lock_guard guard(state_->lock);
        auto found = state_->peer_affinity.find(std::string(local_hca));
        if (found != state_->peer_affinity.end()) allowed = found->second;
    }
    const TopologyMatrix matrix = getMatrix();
    auto entry = matrix.find(storage_type);
    if (!allowed.empty() && entry != matrix.end()) {
        const std::vector<std::string>& preferred = entry->second.preferred_hca;
        std::erase_if(allowed, [&](const std::string& nic) { return std::ranges::find(preferred, nic) == preferred.end(); });
        if (!allowed.empty()) {
            size_t turn = retry_count > 0 ? static_cast<size_t>(retry_count - 1) : SimpleRandom::Get().next();
            const std::vector<std::string> nics = read_nics(state_->topology);
            return static_cast<int>(std::ranges::find(nics, allowed[turn % allowed.size()]) - nics.begin());
        }
    }
    return selectDevice(storage_type, retry_count);
}

TopologyMatrix Topology::getMatrix() const { return MatrixReader(read_json(state_->topology)).read(); }

const std::vector<std::string>& Topology::getHcaList() const {
    std::vector<std::string> nics = read_nics(state_->topology);
    std::lock_guard guard(state_->lock);
    if (nics != state_->nics) state_->nics = std::move(nics);
    return state_->nics;
}

std::string Topology::toString() const { return read_json(state_->topology); }

bool Topology::operator==(const Topology& other) const { return toString() == other.toString(); }

}  // namespace mooncake
