// Upstream's tests of where memory is.
#include <memory_location.h>

#include <sys/mman.h>

#include <cstring>

#include "check.hpp"

using namespace mooncake;

static_assert(std::is_aggregate_v<MemoryLocationEntry>);
static_assert(std::is_same_v<decltype(::pagesize), const int> && ::pagesize == 4096);

// On a machine where the kernel tells: else it is "*", everywhere.
static void pages_that_are_there_are_at_a_node_and_others_are_not() {
    constexpr std::size_t kPages = 8;
    auto* memory = static_cast<char*>(mmap(nullptr, kPages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory != MAP_FAILED);
    madvise(memory, kPages * 4096, MADV_NOHUGEPAGE);
    std::memset(memory, 1, 2 * 4096);
    const auto first = getMemoryLocation(memory, kPages * 4096, true);
    EXPECT(1u, first.size());
    EXPECT(reinterpret_cast<std::uint64_t>(memory), first[0].start);
    const auto all = getMemoryLocation(memory, kPages * 4096, false);
    std::size_t length = 0;
    for (const auto& entry : all) {
        EXPECT(reinterpret_cast<std::uint64_t>(memory) + length, entry.start);
        length += entry.len;
    }
    EXPECT(kPages * 4096, length);
    if (first[0].location != kWildcardLocation) {
        REQUIRE(first[0].location.rfind("cpu:", 0) == 0);
        EXPECT(first[0].location, all[0].location);
        REQUIRE(all.size() >= 2);
        EXPECT(2u * 4096, all[0].len);
        EXPECT(kWildcardLocation, all.back().location);
    }
    // From the middle of a page, to the middle of another.
    const auto part = getMemoryLocation(memory + 100, 5000, false);
    EXPECT(reinterpret_cast<std::uint64_t>(memory) + 100, part[0].start);
    length = 0;
    for (const auto& entry : part) length += entry.len;
    EXPECT(5000u, length);
    munmap(memory, kPages * 4096);
    EXPECT(kWildcardLocation, getMemoryLocation(memory, 4096, true)[0].location);
}

int main() { pages_that_are_there_are_at_a_node_and_others_are_not(); }
