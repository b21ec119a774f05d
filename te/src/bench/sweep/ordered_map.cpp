// An ordered map behind a reader-writer lock, as C++ programs keep memory regions: what te bench sweep measures beside the registry. No
// exception leaves these functions: where memory ends, so does the program.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

namespace {

struct Region {
    std::uint64_t length;
    std::string location;
};

struct OrderedMap {
    std::shared_mutex mutex;
    std::map<std::uint64_t, Region> regions;
};

}  // namespace

extern "C" OrderedMap *ordered_map_new() noexcept { return new OrderedMap; }

extern "C" void ordered_map_free(OrderedMap *map) noexcept { delete map; }

// False if a region has a byte in common with the new one.
extern "C" bool ordered_map_insert(OrderedMap *map, std::uint64_t start, std::uint64_t length) noexcept {
    std::unique_lock lock(map->mutex);
    auto next = map->regions.lower_bound(start + length);
    if (next != map->regions.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second.length > start) return false;
    }
    map->regions.emplace_hint(next, start, Region{length, "cpu:0"});
    return true;
}

// False if no region starts there.
extern "C" bool ordered_map_remove(OrderedMap *map, std::uint64_t start) noexcept {
    std::unique_lock lock(map->mutex);
    return map->regions.erase(start) != 0;
}

// How many of the addresses lie in a region.
extern "C" std::size_t ordered_map_look_up(OrderedMap *map, const std::uint64_t *addresses, std::size_t count) noexcept {
    std::shared_lock lock(map->mutex);
    std::size_t found = 0;
    for (std::size_t index = 0; index < count; index++) {
        auto next = map->regions.upper_bound(addresses[index]);
        if (next == map->regions.begin()) continue;
        auto region = std::prev(next);
        found += addresses[index] - region->first < region->second.length;
    }
    return found;
}
