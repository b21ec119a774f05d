// What lies where in the target's memory, and which bytes must be there. Both processes compute it from the same few numbers, so
// neither has to believe the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

constexpr std::size_t region_count = 8192;
constexpr std::size_t region_length = 8 << 10;
// Regions lie apart: the gaps are never registered and must never change.
constexpr std::size_t gap_length = 4 << 10;
constexpr std::size_t region_stride = region_length + gap_length;
constexpr std::size_t arena_offset = region_count * region_stride;
constexpr std::size_t arena_length = std::size_t{512} << 20;
constexpr std::size_t target_length = arena_offset + arena_length + gap_length;

constexpr std::uint64_t original_seed = 1;
constexpr std::uint64_t written_seed = 2;
constexpr std::uint64_t order_seed = 3;

// Steele, Lea and Flood's SplitMix64: every word of the content on its own, in any order.
inline std::uint64_t random_word(std::uint64_t seed, std::uint64_t index) {
    std::uint64_t z = (seed << 56) + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Calls visit(position in the piece, bytes, how many) for the content of [offset, offset + length).
template <typename Visit>
void for_each_word(std::uint64_t seed, std::size_t offset, std::size_t length, Visit visit) {
    std::size_t done = 0;
    while (done < length) {
        std::uint64_t word = random_word(seed, (offset + done) / 8);
        std::size_t skip = (offset + done) % 8;
        std::size_t count = std::min(8 - skip, length - done);
        unsigned char bytes[8];
        std::memcpy(bytes, &word, 8);
        visit(done, bytes + skip, count);
        done += count;
    }
}

inline void fill(unsigned char* memory, std::uint64_t seed, std::size_t offset, std::size_t length) {
    for_each_word(seed, offset, length,
                  [&](std::size_t at, const unsigned char* bytes, std::size_t count) { std::memcpy(memory + at, bytes, count); });
}

// What is wrong with the first wrong byte, if any.
inline std::optional<std::string> find_difference(const unsigned char* memory, std::uint64_t seed, std::size_t offset,
                                                  std::size_t length) {
    std::optional<std::string> difference;
    for_each_word(seed, offset, length, [&](std::size_t at, const unsigned char* bytes, std::size_t count) {
        if (difference || std::memcmp(memory + at, bytes, count) == 0) return;
        std::size_t i = 0;
        while (memory[at + i] == bytes[i]) ++i;
        difference = "byte " + std::to_string(offset + at + i) + " is " + std::to_string(memory[at + i]) + ", not " +
                     std::to_string(bytes[i]);
    });
    return difference;
}

// The part of a region that the initiator overwrites: any length, any alignment.
struct Part {
    std::size_t offset;
    std::size_t length;
};

inline Part written_part(std::size_t region) {
    std::size_t offset = random_word(order_seed, 2 * region) % (region_length / 2);
    std::size_t length = 1 + random_word(order_seed, 2 * region + 1) % (region_length - offset);
    return {offset, length};
}
