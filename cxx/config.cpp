#include "config.h"

#include <te.h>

#include <cstdlib>

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
int severity(int32_t level) {
    if (level <= TE_LOG_ERROR) return google::ERROR;
    return level == TE_LOG_WARNING ? google::WARNING : google::INFO;
}

std::unordered_map<std::string, std::vector<std::string>> peer_affinity(std::string_view text) {
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

}  // namespace
