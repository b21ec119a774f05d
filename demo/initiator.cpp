// The initiator: starts the target, moves bytes to and from it, checks them, and measures.
#include "roles.hpp"

#include "content.hpp"
#include "engine.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <sstream>
#include <thread>
#include <type_traits>

namespace {

// Lets one line be seen while the work goes on, and completes it with the time that it took.
template <typename Work>
auto step(const std::string& what, Work work) {
    std::printf("%-78s", (what + " ...").c_str());
    std::fflush(stdout);
    auto start = Clock::now();
    auto finish = [&] { std::printf("%8.2f s\n", seconds_since(start)); };
    if constexpr (std::is_void_v<decltype(work())>) {
        work();
        finish();
    } else {
        auto result = work();
        finish();
        return result;
    }
}

// This program once more, as the target. It dies with the initiator, however that ends.
class TargetProcess {
public:
    TargetProcess() {
        int order[2], answer[2];
        if (pipe2(order, O_CLOEXEC) != 0 || pipe2(answer, O_CLOEXEC) != 0)
            throw std::system_error(errno, std::generic_category(), "pipe2");
        pid_t parent = getpid();
        pid_ = fork();
        if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
        if (pid_ == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);
            dup2(order[0], STDIN_FILENO);
            dup2(answer[1], STDOUT_FILENO);
            execl("/proc/self/exe", "demo", "target", nullptr);
            _exit(127);
        }
        close(order[0]);
        close(answer[1]);
        input_ = order[1];
        output_ = fdopen(answer[0], "r");
    }

    ~TargetProcess() {
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
        if (input_ >= 0) close(input_);
        std::fclose(output_);
    }
    TargetProcess(const TargetProcess&) = delete;
    TargetProcess& operator=(const TargetProcess&) = delete;

    std::string read_line() {
        char line[512];
        if (std::fgets(line, sizeof line, output_) == nullptr) throw std::runtime_error("the target has ended early");
        std::string text(line);
        if (!text.empty() && text.back() == '\n') text.pop_back();
        return text;
    }

    void check_alive() {
        int status;
        if (waitpid(pid_, &status, WNOHANG) == pid_) {
            pid_ = -1;
            throw std::runtime_error("the target has ended early");
        }
    }

    // Tells the target to end, and waits until it has.
    void finish() {
        close(input_);
        input_ = -1;
        int status;
        waitpid(pid_, &status, 0);
        pid_ = -1;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("the target did not end well");
    }

private:
    pid_t pid_;
    int input_;
    FILE* output_;
};

Cost parse_cost(const std::string& text) {
    Cost cost{};
    if (!(std::istringstream(text) >> cost.few >> cost.many)) throw std::runtime_error("not two costs: " + text);
    return cost;
}

class Initiator {
public:
    Initiator(TargetProcess& target, const std::string& target_address) : target_(target), memory_(memory_length) {
        engine_.register_memory(memory_.data(), memory_.size());
        segment_ = engine_.open(target_address);
        find_target_memory();
    }

    // Over TCP in batches of 256 requests, each of random length and alignment.
    void write_regions() {
        for (std::size_t first = 0; first < region_count; first += batch_regions) {
            std::vector<te_transfer_request> requests;
            for (std::size_t i = 0; i < batch_regions; ++i) {
                Part part = written_part(first + i);
                std::size_t offset = (first + i) * region_stride + part.offset;
                unsigned char* local = slot(i);
                fill(local, written_seed, offset, part.length);
                requests.push_back(request(TE_WRITE, local, offset, part.length));
            }
            engine_.transfer(requests);
        }
    }

    // In batches of 1 MiB requests; the next batch is filled while the last one is on its way.
    void write_arena() {
        std::optional<Batch> batches[2];
        for (std::size_t i = 0; i < arena_length / half_length; ++i) {
            auto& batch = batches[i % 2];
            if (batch) batch->wait();
            batch.emplace(engine_, half_length / piece_length);
            unsigned char* local = half(i % 2);
            std::size_t offset = arena_offset + i * half_length;
            fill(local, written_seed, offset, half_length);
            batch->submit(pieces(TE_WRITE, local, offset));
        }
        for (auto& batch : batches) batch->wait();
    }

    void read_regions() {
        for (std::size_t first = 0; first < region_count; first += batch_regions) {
            std::vector<te_transfer_request> requests;
            fill(memory_.data(), original_seed, 0, batch_regions * slot_length);
            for (std::size_t i = 0; i < batch_regions; ++i) {
                Part part = written_part(first + i);
                std::size_t offset = (first + i) * region_stride + part.offset;
                requests.push_back(request(TE_READ, slot(i), offset, part.length));
            }
            engine_.transfer(requests);
            for (std::size_t i = 0; i < batch_regions; ++i) {
                Part part = written_part(first + i);
                require_same(slot(i), written_seed, (first + i) * region_stride + part.offset, part.length);
                // Not a byte more than was asked for.
                require_same(slot(i) + part.length, original_seed, i * slot_length + part.length, slot_length - part.length);
            }
        }
    }

    void read_arena() {
        for (std::size_t i = 0; i < arena_length / half_length; ++i) {
            std::size_t offset = arena_offset + i * half_length;
            std::fill_n(half(0), half_length, 0);
            engine_.transfer(pieces(TE_READ, half(0), offset));
            require_same(half(0), written_seed, offset, half_length);
        }
    }

    // Memory that the target did not register stays out of reach, and a refusal harms nothing else.
    void expect_refusals(const std::vector<std::size_t>& offsets) {
        for (std::size_t offset : offsets) {
            for (auto opcode : {TE_READ, TE_WRITE}) {
                bool refused = false;
                try {
                    engine_.transfer({request(opcode, memory_.data(), offset, 64)});
                } catch (const EngineError&) {
                    refused = true;
                }
                if (!refused) throw std::runtime_error("a transfer outside of the registered memory was not refused");
            }
        }
    }

    void expect_gaps_refused() {
        expect_refusals({region_length, region_length - 1, 5 * region_stride - 64, arena_offset + arena_length, arena_offset - 1});
        engine_.transfer({request(TE_READ, memory_.data(), 0, region_length)});
    }

    void expect_everything_refused() { expect_refusals({0, 7 * region_stride, arena_offset, arena_offset + arena_length / 2}); }

    // Sends an order and waits for the answer's text.
    std::string command(const char* order) {
        engine_.notify(segment_, {order, engine_.address()});
        auto start = Clock::now();
        while (seconds_since(start) < 60) {
            for (const Notification& answer : engine_.take_notifications()) {
                if (answer.name == answer_done) return answer.message;
                throw std::runtime_error("the target says: " + answer.message);
            }
            target_.check_alive();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        throw std::runtime_error("the target does not answer");
    }

    // Bytes per second.
    double measure_throughput(te_opcode opcode, std::size_t length) {
        std::vector<te_transfer_request> requests;
        for (std::size_t i = 0; i < 32; ++i)
            requests.push_back(request(opcode, memory_.data() + i * length, arena_offset + i * length, length));
        engine_.transfer(requests);
        std::size_t bytes = 0;
        auto start = Clock::now();
        while (seconds_since(start) < 0.5) {
            engine_.transfer(requests);
            bytes += requests.size() * length;
        }
        return bytes / seconds_since(start);
    }

    // Seconds of single calls, sorted.
    std::vector<double> measure_latency(te_opcode opcode) {
        std::vector<te_transfer_request> requests{request(opcode, memory_.data(), arena_offset, 4096)};
        for (int i = 0; i < 100; ++i) engine_.transfer(requests);
        std::vector<double> calls;
        for (int i = 0; i < 2000; ++i) {
            auto start = Clock::now();
            engine_.transfer(requests);
            calls.push_back(seconds_since(start));
        }
        std::sort(calls.begin(), calls.end());
        return calls;
    }

    void unregister() { engine_.unregister_memory(memory_.data()); }

private:
    static constexpr std::size_t piece_length = 1 << 20;
    static constexpr std::size_t half_length = 32 * piece_length;
    static constexpr std::size_t memory_length = 2 * half_length;
    static constexpr std::size_t batch_regions = 256;
    static constexpr std::size_t slot_length = region_length + 64;

    unsigned char* half(std::size_t which) const { return memory_.data() + which * half_length; }
    unsigned char* slot(std::size_t i) const { return memory_.data() + i * slot_length; }

    te_transfer_request request(te_opcode opcode, void* local, std::size_t offset, std::size_t length) const {
        te_transfer_request request{};
        request.opcode = opcode;
        request.local = local;
        request.segment = segment_;
        request.remote_addr = target_base_ + offset;
        request.length = length;
        return request;
    }

    std::vector<te_transfer_request> pieces(te_opcode opcode, unsigned char* local, std::size_t offset) const {
        std::vector<te_transfer_request> requests;
        for (std::size_t at = 0; at < half_length; at += piece_length)
            requests.push_back(request(opcode, local + at, offset + at, piece_length));
        return requests;
    }

    // The target's segment tells where its memory lies; it must be exactly the layout of content.hpp.
    void find_target_memory() {
        auto regions = engine_.regions(segment_);
        std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) { return a.addr < b.addr; });
        if (regions.size() != region_count + 1)
            throw std::runtime_error("the target shows " + std::to_string(regions.size()) + " regions");
        target_base_ = regions.front().addr;
        for (std::size_t i = 0; i < region_count; ++i) {
            if (regions[i].addr != target_base_ + i * region_stride || regions[i].length != region_length)
                throw std::runtime_error("region " + std::to_string(i) + " of the target is not where it should be");
        }
        if (regions.back().addr != target_base_ + arena_offset || regions.back().length != arena_length)
            throw std::runtime_error("the target's arena is not where it should be");
    }

    static void require_same(const unsigned char* memory, std::uint64_t seed, std::size_t offset, std::size_t length) {
        if (auto difference = find_difference(memory, seed, offset, length)) throw std::runtime_error(*difference);
    }

    TargetProcess& target_;
    // The engine goes first: while it lives it may touch the memory.
    Memory memory_;
    Engine engine_;
    te_segment segment_ = 0;
    std::uint64_t target_base_ = 0;
};

void print_costs(const char* what, const Cost& cost) {
    std::printf("  %-34s %9.2f us %12.2f us\n", what, cost.few * 1e6, cost.many * 1e6);
}

struct Speed {
    double small_batch;
    double large_batch;
    std::vector<double> calls;
};

Speed measure(Initiator& initiator, te_opcode opcode) {
    return {initiator.measure_throughput(opcode, 64 << 10), initiator.measure_throughput(opcode, 1 << 20),
            initiator.measure_latency(opcode)};
}

void print_speed(const char* what, const Speed& speed) {
    std::printf("  %-8s %11.2f GB/s %11.2f GB/s %12.1f us %12.1f us\n", what, speed.small_batch / 1e9, speed.large_batch / 1e9,
                median(speed.calls) * 1e6, speed.calls[speed.calls.size() * 99 / 100] * 1e6);
}

}  // namespace

void run_initiator() {
    std::printf("transfer engine %s: initiator and target, P2PHANDSHAKE, TCP on loopback\n\n", te_version());

    TargetProcess target;
    Cost register_cost = step("the target fills its memory, registers 8,192 regions one by one and 512 MiB",
                              [&] { return parse_cost(target.read_line()); });
    std::string address = target.read_line();
    std::optional<Initiator> opened;
    step("the initiator opens the segment " + address + " and lists its memory", [&] { opened.emplace(target, address); });
    Initiator& initiator = *opened;

    step("WRITE to a random part of every region, batches of 256", [&] { initiator.write_regions(); });
    step("WRITE random content to the whole arena, batches of 32 x 1 MiB", [&] { initiator.write_arena(); });
    step("by notify: the target checks every byte, also what lies between the regions", [&] { initiator.command(order_verify); });
    step("READ every region back and check it", [&] { initiator.read_regions(); });
    step("READ the arena back and check it", [&] { initiator.read_arena(); });
    step("transfers that leave the registered memory are refused", [&] { initiator.expect_gaps_refused(); });
    step("by notify: the target checks every byte again", [&] { initiator.command(order_verify); });
    Speed write_speed = step("measure WRITE", [&] { return measure(initiator, TE_WRITE); });
    Speed read_speed = step("measure READ", [&] { return measure(initiator, TE_READ); });
    Cost unregister_cost = step("by notify: the target unregisters everything, one by one",
                                [&] { return parse_cost(initiator.command(order_unregister)); });
    step("transfers to what was unregistered are refused", [&] { initiator.expect_everything_refused(); });
    step("the initiator unregisters its memory, both engines end", [&] {
        initiator.unregister();
        opened.reset();
        target.finish();
    });

    std::printf("\n  median of %zu calls             256 regions    8,192 regions\n", sample_calls);
    print_costs("register 8 KiB", register_cost);
    print_costs("unregister", unregister_cost);
    std::printf("\n             64 KiB x 32      1 MiB x 32      4 KiB median      4 KiB p99\n");
    print_speed("WRITE", write_speed);
    print_speed("READ", read_speed);
    std::printf("\nEvery byte was right.\n");
}
