#include "memory_location.h"

#include <te.h>

namespace mooncake {

const std::vector<MemoryLocationEntry> getMemoryLocation(void* start, size_t len, bool only_first_page) {
    // Most memory is at one place or a few.
    std::vector<te_location_entry> parts(8);
    size_t count = 0;
    for (;;) {
        te_status status = te_memory_location(start, len, only_first_page, parts.data(), sizeof parts[0], parts.size(), &count);
        if (status != TE_OK) return {{reinterpret_cast<uint64_t>(start), len, kWildcardLocation}};
        if (count <= parts.size()) break;
        // Pages may come while this looks at them.
        parts.resize(count + 8);
    }
    std::vector<MemoryLocationEntry> entries;
    entries.reserve(count);
    for (size_t i = 0; i < count; ++i) entries.push_back({parts[i].addr, parts[i].length, parts[i].location});
    return entries;
}

}  // namespace mooncake
