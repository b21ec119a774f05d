// A benchmark with the command line of upstream's transfer_engine_bench, and its conversation: either program may be the target or the
// initiator of the other. "-name=value", "--name=value" and "--name value"; --help lists them.
//
// The target registers one buffer for each NUMA node and serves until SIGINT or SIGTERM. The initiator has threads that fill batches of
// blocks, each of its own part of a buffer, until the time is over; then it prints what was moved.
#include <cuda_alike.h>
#include <transfer_engine.h>

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "numa_memory.hpp"

using namespace mooncake;

namespace {

struct Flag {
    const char* name;
    const char* meaning;
    std::string value;
};

Flag flags[] = {
    {"mode", "initiator or target", "initiator"},
    {"metadata_server", "P2PHANDSHAKE, or the metadata server", "P2PHANDSHAKE"},
    {"local_server_name", "what this engine is called: host:port", ""},
    {"segment_id", "initiator: what the target is called", ""},
    {"protocol", "tcp or rdma", "rdma"},
    {"device_name", "NICs, separated by commas, for rdma", ""},
    {"nic_priority_matrix", "a file with the NICs for each location, for rdma", ""},
    {"auto_discovery", "let the engine find NICs and choose the protocol", "false"},
    {"operation", "read or write", "read"},
    {"block_size", "bytes of a request", "65536"},
    {"batch_size", "requests of a batch", "128"},
    {"buffer_size", "bytes of a buffer", "1073741824"},
    {"threads", "threads that submit", "12"},
    {"duration", "seconds", "10"},
    {"report_unit", "GB, GiB, Gb, MB, MiB, Mb, KB, KiB or Kb", "GB"},
    {"report_precision", "decimal places", "2"},
    {"backend", "classic", "classic"},
};

[[noreturn]] void fail(const std::string& what) {
    std::cerr << "transfer_engine_bench: " << what << std::endl;
    std::exit(1);
}

Flag& find_flag(const std::string& name) {
    for (Flag& flag : flags) {
        if (name == flag.name) return flag;
    }
    fail("there is no flag " + name);
}

const std::string& text(const std::string& name) { return find_flag(name).value; }

std::uint64_t number(const std::string& name) {
    auto value = parseFromString<std::uint64_t>(text(name));
    if (!value || *value == 0) fail(name + " is to be a number from 1, not " + text(name));
    return *value;
}

void read_flags(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word.empty() || word[0] != '-') fail("what is " + word + "?");
        word.erase(0, word.rfind("--", 0) == 0 ? 2 : 1);
        if (word == "help") {
            for (const Flag& flag : flags) std::cout << "  --" << flag.name << " (" << flag.meaning << ") " << flag.value << "\n";
            std::exit(0);
        }
        const std::size_t equals = word.find('=');
        Flag& flag = find_flag(word.substr(0, equals));
        if (equals != std::string::npos) {
            flag.value = word.substr(equals + 1);
        } else if (flag.value == "true" || flag.value == "false") {
            flag.value = "true";
        } else if (i + 1 < argc) {
            flag.value = argv[++i];
        } else {
            fail(word + " needs a value");
        }
    }
    if (text("local_server_name").empty()) find_flag("local_server_name").value = getHostname();
}

std::string nic_matrix() {
    if (!text("nic_priority_matrix").empty()) {
        std::ifstream file(text("nic_priority_matrix"));
        if (!file) fail("cannot read " + text("nic_priority_matrix"));
        return {std::istreambuf_iterator<char>(file), {}};
    }
    std::istringstream names(text("device_name"));
    std::string list, name;
    while (std::getline(names, name, ',')) list += (list.empty() ? "\"" : ", \"") + name + "\"";
    return "{\"cpu:0\": [[" + list + "], []]}";
}

struct Buffer {
    void* address;
    std::size_t length;
};

// An engine with a buffer on each NUMA node.
class Node {
public:
    Node() : engine_(std::make_unique<TransferEngine>(text("auto_discovery") == "true")) {
        auto [host, port] = parseHostNameWithPort(text("local_server_name"));
        if (engine_->init(text("metadata_server"), text("local_server_name"), host, port) != 0) fail("the engine cannot be initialized");
        if (text("auto_discovery") != "true") install();
        std::size_t length = number("buffer_size");
        const std::size_t least = number("block_size") * number("batch_size") * number("threads");
        if (length < least) {
            std::cerr << "transfer_engine_bench: buffers of " << least << " bytes, as that many are under way at a time" << std::endl;
            length = least;
        }
        for (int node = 0; node < count_nodes(); node++) {
            void* memory = allocate_on_node(length, node);
            if (memory == nullptr) fail("no memory on NUMA node " + std::to_string(node));
            if (engine_->registerLocalMemory(memory, length, "cpu:" + std::to_string(node)) != 0) fail("cannot register memory");
            buffers_.push_back({memory, length});
        }
    }

    ~Node() {
        for (const Buffer& buffer : buffers_) {
            engine_->unregisterLocalMemory(buffer.address);
            free_on_node(buffer.address, buffer.length);
        }
    }

    TransferEngine& engine() { return *engine_; }
    const Buffer& buffer(int thread) const { return buffers_[thread % buffers_.size()]; }

private:
    void install() {
        Transport* transport = nullptr;
        if (text("protocol") == "rdma") {
            std::string matrix = nic_matrix();
            void* arguments[] = {matrix.data(), nullptr};
            transport = engine_->installTransport("rdma", arguments);
        } else {
            transport = engine_->installTransport(text("protocol"), nullptr);
        }
        if (transport == nullptr) fail("cannot install the transport " + text("protocol"));
    }

    std::unique_ptr<TransferEngine> engine_;
    std::vector<Buffer> buffers_;
};

volatile sig_atomic_t stopped = 0;

int run_target() {
    Node node;
    signal(SIGINT, [](int) { stopped = 1; });
    signal(SIGTERM, [](int) { stopped = 1; });
    std::cout << "target is " << node.engine().getLocalIpAndPort() << std::endl;
    while (!stopped) usleep(10000);
    return 0;
}

std::string rate(std::uint64_t bytes, double seconds) {
    static const std::map<std::string, double> units{{"GB", 1e9},           {"GiB", 1024.0 * 1024 * 1024}, {"Gb", 1e9 / 8},
                                                     {"MB", 1e6},           {"MiB", 1024.0 * 1024},        {"Mb", 1e6 / 8},
                                                     {"KB", 1e3},           {"KiB", 1024.0},               {"Kb", 1e3 / 8}};
    auto unit = units.find(text("report_unit"));
    if (unit == units.end()) fail("there is no unit " + text("report_unit"));
    std::ostringstream shown;
    shown << std::fixed << std::setprecision(static_cast<int>(number("report_precision"))) << bytes / unit->second / seconds << " " << unit->first
          << "/s";
    return shown.str();
}

int run_initiator() {
    const std::string operation = text("operation");
    if (operation != "read" && operation != "write") fail("operation is read or write");
    const auto opcode = operation == "read" ? TransferRequest::READ : TransferRequest::WRITE;
    const std::size_t block = number("block_size"), batch_size = number("batch_size"), threads = number("threads");
    Node node;
    TransferEngine& engine = node.engine();
    const SegmentID segment = engine.openSegment(text("segment_id"));
    if (segment == static_cast<SegmentID>(-1)) fail("cannot open " + text("segment_id"));
    auto description = engine.getMetadata()->getSegmentDescByID(segment);
    if (description == nullptr || description->buffers.empty()) fail(text("segment_id") + " has no buffers");

    std::atomic<bool> over{false};
    std::atomic<std::uint64_t> batches{0};
    std::atomic<int> failures{0};
    auto work = [&](std::size_t thread) {
        bindToSocket(static_cast<int>(thread) % count_nodes());
        const auto& remote = description->buffers[thread % description->buffers.size()];
        const std::size_t part = thread * block * batch_size;
        if (part + block * batch_size > remote.length) {
            std::cerr << "transfer_engine_bench: the target's buffer of " << remote.length << " bytes is too small" << std::endl;
            failures++;
            return;
        }
        auto* local = static_cast<char*>(node.buffer(thread).address) + part;
        std::vector<TransferRequest> requests;
        for (std::size_t i = 0; i < batch_size; i++) {
            requests.push_back({opcode, local + i * block, segment, remote.addr + part + i * block, block});
        }
        while (!over) {
            const BatchID batch = engine.allocateBatchID(batch_size);
            Status status = engine.submitTransfer(batch, requests);
            TransferStatus progress{TransferStatusEnum::COMPLETED, 0};
            for (std::size_t task = 0; status.ok() && task < batch_size; task++) {
                do status = engine.getTransferStatus(batch, task, progress);
                while (status.ok() && progress.s == TransferStatusEnum::WAITING);
                if (progress.s != TransferStatusEnum::COMPLETED) break;
            }
            if (!status.ok() || progress.s != TransferStatusEnum::COMPLETED) {
                std::cerr << "transfer_engine_bench: a request ended in state " << progress.s << ": " << status << std::endl;
                failures++;
                return;
            }
            engine.freeBatchID(batch);
            batches++;
        }
    };
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> workers;
    for (std::size_t thread = 0; thread < threads; thread++) workers.emplace_back(work, thread);
    const auto end = start + std::chrono::seconds(number("duration"));
    while (std::chrono::steady_clock::now() < end && failures == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    over = true;
    for (std::thread& worker : workers) worker.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::cout << "Test completed: duration " << std::fixed << std::setprecision(2) << seconds << ", batch count " << batches << ", throughput "
              << rate(batches * batch_size * block, seconds) << std::endl;
    return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    read_flags(argc, argv);
    if (text("backend") != "classic") fail("there is one backend: classic");
    if (text("mode") == "target") return run_target();
    if (text("mode") == "initiator") return run_initiator();
    fail("mode is initiator or target");
}
