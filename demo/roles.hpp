// The two processes, and the words that they exchange.
//
// On its standard output the target prints two lines: what registration cost, and its address. All that follows goes over the
// engines themselves, as notifications; each order carries the initiator's address, to which the target answers.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

void run_initiator();
void run_target();

constexpr const char* order_verify = "verify";
constexpr const char* order_unregister = "unregister";
constexpr const char* answer_done = "done";
constexpr const char* answer_failed = "failed";

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

inline double median(std::vector<double> values) {
    auto middle = values.begin() + values.size() / 2;
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// Costs of single calls with few and with many regions present, in seconds.
struct Cost {
    double few;
    double many;
};
constexpr std::size_t few_regions = 256;
constexpr std::size_t sample_calls = 128;
