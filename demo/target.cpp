// The target: registers its memory, and then only answers; the engine serves the transfers by itself.
#include "roles.hpp"

#include "content.hpp"
#include "engine.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

namespace {

bool initiator_is_gone() {
    // Nothing is ever written to this pipe: it becomes readable when its other end closes.
    pollfd input{STDIN_FILENO, POLLIN, 0};
    return poll(&input, 1, 0) > 0;
}

std::vector<std::size_t> shuffled_regions() {
    std::vector<std::size_t> order(region_count);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    return order;
}

// Costs of the calls in order of time, the first of which met `present` regions; `step` is +1 or -1 a call.
Cost cost_of(const std::vector<double>& calls, bool growing) {
    auto sample = [&](std::size_t present) {
        // The calls next to this number of regions, on the side where fewer are present.
        std::size_t end = growing ? present : calls.size() - present + sample_calls;
        return median(std::vector<double>(calls.begin() + (end - sample_calls), calls.begin() + end));
    };
    return {sample(few_regions), sample(region_count)};
}

std::string to_text(const Cost& cost) {
    std::ostringstream text;
    text << std::setprecision(9) << cost.few << ' ' << cost.many;
    return text.str();
}

class Target {
public:
    Target() : memory_(target_length) { fill(memory_.data(), original_seed, 0, target_length); }

    Cost register_all() {
        std::vector<double> calls;
        for (std::size_t region : shuffled_regions()) {
            auto start = Clock::now();
            engine_.register_memory(address_of(region), region_length);
            calls.push_back(seconds_since(start));
        }
        engine_.register_memory(memory_.data() + arena_offset, arena_length);
        return cost_of(calls, true);
    }

    std::string unregister_all() {
        engine_.unregister_memory(memory_.data() + arena_offset);
        // As when it registered: the same order, and what the calls touch is in the processor's caches, not the transferred bytes.
        auto order = shuffled_regions();
        for (std::size_t region : order) {
            engine_.unregister_memory(address_of(region));
            engine_.register_memory(address_of(region), region_length);
        }
        std::vector<double> calls;
        for (std::size_t region : order) {
            auto start = Clock::now();
            engine_.unregister_memory(address_of(region));
            calls.push_back(seconds_since(start));
        }
        return to_text(cost_of(calls, false));
    }

    // Every byte: what was to be written is, and nothing else has changed.
    void verify() const {
        std::size_t at = 0;
        auto expect = [&](std::uint64_t seed, std::size_t end) {
            if (auto difference = find_difference(memory_.data() + at, seed, at, end - at)) throw std::runtime_error(*difference);
            at = end;
        };
        for (std::size_t region = 0; region < region_count; ++region) {
            Part part = written_part(region);
            expect(original_seed, region * region_stride + part.offset);
            expect(written_seed, at + part.length);
        }
        expect(original_seed, arena_offset);
        expect(written_seed, arena_offset + arena_length);
        expect(original_seed, target_length);
    }

    void serve() {
        while (!initiator_is_gone()) {
            for (const Notification& order : engine_.take_notifications()) engine_.notify(engine_.open(order.message), obey(order));
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    std::string address() const { return engine_.address(); }

private:
    unsigned char* address_of(std::size_t region) const { return memory_.data() + region * region_stride; }

    Notification obey(const Notification& order) {
        try {
            if (order.name == order_verify) {
                verify();
                return {answer_done, ""};
            }
            if (order.name == order_unregister) return {answer_done, unregister_all()};
            return {answer_failed, "unknown order " + order.name};
        } catch (const std::exception& failure) {
            return {answer_failed, failure.what()};
        }
    }

    // The engine goes first: while it lives it may touch the memory.
    Memory memory_;
    Engine engine_;
};

}  // namespace

void run_target() {
    Target target;
    std::cout << to_text(target.register_all()) << std::endl;
    std::cout << target.address() << std::endl;
    target.serve();
}
