// Where memory is, as texts: "cpu:0" for a NUMA node, "cuda:1" for a GPU, "*" where nobody knows.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "transfer_engine_cxx/export.h"

// The granularity of getMemoryLocation(), whatever the machine's own is.
const int pagesize = 4096;

namespace mooncake {

const static std::string kWildcardLocation = "*";
const static std::string kSegmentsLocationPrefix = "segments:";

struct MemoryLocationEntry {
    uint64_t start;
    size_t len;
    std::string location;
};

// Where [start, start + len) is: pages in a row that are at the same place are one entry, pages that are not there yet are at "*". With
// `only_first_page` nothing but the page of `start` is looked at. No page is touched.
TRANSFER_ENGINE_CXX_API const std::vector<MemoryLocationEntry> getMemoryLocation(void* start, size_t len, bool only_first_page);

// "segments:<page size>:<node>,<node>,…": a buffer in as many parts of equal length as there are nodes, each on its node.
struct SegmentsLocationInfo {
    size_t page_size = 0;
    std::vector<int> numa_nodes;
};

inline std::string buildSegmentsLocation(size_t page_size, const std::vector<int>& numa_nodes) {
    std::string location = kSegmentsLocationPrefix + std::to_string(page_size) + ":";
    for (size_t i = 0; i < numa_nodes.size(); ++i) {
        if (i > 0) location += ',';
        location += std::to_string(numa_nodes[i]);
    }
    return location;
}

// False, and `info` as it was, for a text that is not of that form.
inline bool parseSegmentsLocation(const std::string& location, SegmentsLocationInfo& info) {
    std::string_view rest = location;
    if (!rest.starts_with(kSegmentsLocationPrefix)) return false;
    rest.remove_prefix(kSegmentsLocationPrefix.size());
    size_t colon = rest.find(':');
    if (colon == std::string_view::npos) return false;
    auto page_size = parseFromString<size_t>(rest.substr(0, colon));
    if (!page_size) return false;
    std::vector<int> nodes;
    for (rest.remove_prefix(colon + 1);;) {
        size_t comma = rest.find(',');
        auto node = parseFromString<int>(rest.substr(0, comma));
        if (!node || *node < 0) return false;
        nodes.push_back(*node);
        if (comma == std::string_view::npos) break;
        rest.remove_prefix(comma + 1);
    }
    info = {*page_size, std::move(nodes)};
    return true;
}

// Where the byte at `offset` of a buffer of `length` bytes is. The last part has what the division leaves over; "*" if there are more nodes
// than bytes.
inline std::string resolveSegmentsLocation(const SegmentsLocationInfo& info, uint64_t length, uint64_t offset) {
    uint64_t part = info.numa_nodes.empty() ? 0 : length / info.numa_nodes.size();
    if (part == 0) return kWildcardLocation;
    size_t index = static_cast<size_t>(std::min<uint64_t>(offset / part, info.numa_nodes.size() - 1));
    return "cpu:" + std::to_string(info.numa_nodes[index]);
}

}  // namespace mooncake
