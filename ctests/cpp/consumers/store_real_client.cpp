// The store's real client: scattered ranges that are awaited with a time limit, again and again; where a buffer's parts lie; names of hosts.
#include <config.h>
#include <transfer_engine.h>

#include <optional>
#include <stdexcept>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;
using namespace std::chrono_literals;

static_assert(std::is_same_v<decltype(std::declval<TransferEngine::ScatterTransferOperation&>().waitFor(1ns)), Status>);
static_assert(std::is_same_v<decltype(Status::InvalidArgument(std::string_view())), Status>);
static_assert(std::is_same_v<decltype(ValidatePortRange(1, 2, 3, 4)), std::pair<int, int>>);

// Several ranges of one call, and a wait in slices of time, as for a get with a deadline.
static void scattered_ranges_are_awaited_in_slices_of_time() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer, other;
    constexpr std::size_t kLength = 4 << 20;
    processes::Memory memory(2 * kLength);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    peer.fill(0, kLength, 1);
    other.fill(0, kLength, 2);

    // What the spans point to lives until the operation is over.
    std::vector<std::size_t> offsets, lengths;
    for (std::size_t offset = 0; offset < kLength; offset += 64 << 10) {
        offsets.push_back(offset);
        lengths.push_back(64 << 10);
    }
    std::vector<int> told(2 * offsets.size(), 0);
    std::vector<TransferEngine::ScatterTransferRange> ranges;
    for (int i = 0; i < 2; i++) {
        const processes::Peer& source = i == 0 ? peer : other;
        ranges.push_back({.opcode = TransferRequest::READ,
                          .remote_segment = source.name(),
                          .remote_base_offset = source.base(),
                          .remote_size = kLength,
                          .local_buffer = memory.data() + i * kLength,
                          .local_capacity = kLength,
                          .local_offsets = offsets,
                          .remote_offsets = offsets,
                          .lengths = lengths,
                          .on_fragment_complete = [&told, &offsets, i](std::size_t fragment, const Status& status) {
                              if (status.ok()) told.at(i * offsets.size() + fragment)++;
                          }});
    }
    std::optional<TransferEngine::ScatterTransferOperation> operation(engine.submitScatter(ranges));
    Status status = Status::OK();
    do status = operation->waitFor(1us);
    while (status.IsClock());
    SUCCEEDS(status);
    SUCCEEDS(operation->waitFor(0ns));
    operation.reset();
    for (int count : told) EXPECT(1, count);
    EXPECT(processes::checksum(memory.data(), kLength), peer.sum(0, kLength));
    EXPECT(processes::checksum(memory.data() + kLength, kLength), other.sum(0, kLength));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

// A failure is never taken for time that has run out, or the wait would go on for ever.
static void a_failed_fragment_ends_the_wait() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    processes::Memory memory(4096);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const std::vector<std::size_t> offsets{0, 2000}, lengths{100, 100};
    std::vector<Status> told(2, Status::InvalidArgument("not told"));
    TransferEngine::ScatterTransferRange range{.opcode = TransferRequest::READ, .remote_segment = peer.name(), .remote_base_offset = 4096,
                                               .remote_size = 1 << 20, .local_buffer = memory.data(), .local_capacity = memory.size(),
                                               .local_offsets = offsets, .remote_offsets = offsets, .lengths = lengths,
                                               .on_fragment_complete = [&](std::size_t i, const Status& status) { told.at(i) = status; }};
    auto operation = engine.submitScatter({range});
    Status status = Status::OK();
    do status = operation.waitFor(1ms);
    while (status.IsClock());
    REQUIRE(!status.ok() && !status.IsInvalidArgument());
    for (const Status& each : told) REQUIRE(!each.ok() && !each.IsClock() && !each.IsInvalidArgument());

    // What cannot even be started is said before anything moves.
    range.remote_segment = "";
    REQUIRE(engine.submitScatter({range}).waitFor(10s).IsInvalidArgument());
    for (const Status& each : told) REQUIRE(each.IsInvalidArgument());
    range.remote_segment = "127.0.0.1:1";
    REQUIRE(engine.submitScatter({range}).waitFor(100s).IsInvalidArgument());
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

// The exception is the caller's; what was started before it is over then, and the engine is not held any more.
static void a_callback_that_cannot_be_copied_leaves_nothing_under_way() {
    struct Callback {
        bool* refuses;
        explicit Callback(bool* refuses) : refuses(refuses) {}
        Callback(const Callback& other) : refuses(other.refuses) {
            if (*refuses) throw std::runtime_error("not to be copied");
        }
        void operator()(std::size_t, const Status&) const {}
    };
    TransferEngine engine, other;
    processes::start(engine);
    processes::start(other);
    processes::Memory memory(8192);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const std::string name = engine.getLocalIpAndPort();
    const std::vector<std::size_t> offsets{0}, lengths{4096};
    TransferEngine::ScatterTransferRange range{.opcode = TransferRequest::WRITE, .remote_segment = name,
                                               .remote_base_offset = reinterpret_cast<std::uintptr_t>(memory.data()) + 4096,
                                               .remote_size = 4096, .local_buffer = memory.data(), .local_capacity = 4096,
                                               .local_offsets = offsets, .remote_offsets = offsets, .lengths = lengths,
                                               .on_fragment_complete = nullptr};
    bool refuses = false, is_thrown = false;
    std::vector<TransferEngine::ScatterTransferRange> ranges(2, range);
    ranges[1].on_fragment_complete = Callback(&refuses);
    refuses = true;
    try {
        engine.transferScatter(ranges);
    } catch (const std::runtime_error&) {
        is_thrown = true;
    }
    REQUIRE(is_thrown);
    SUCCEEDS(engine.freeEngine());
    EXPECT((SegmentHandle)-1, other.openSegment(name));
}

// A peer that does not answer: the wait comes back at its time, as often as it is called, and goes on once there is an answer. Over TCP,
// since a NIC answers for a process that has been stopped.
static void a_wait_without_an_end_comes_back_in_time() {
    TransferEngine engine;
    processes::start(engine);
    processes::Peer peer;
    processes::Memory memory(1 << 20);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    const std::vector<std::size_t> offsets{0}, lengths{1 << 20};
    int told = 0;
    TransferEngine::ScatterTransferRange range{.opcode = TransferRequest::READ, .remote_segment = peer.name(), .remote_base_offset = peer.base(),
                                               .remote_size = 1 << 20, .local_buffer = memory.data(), .local_capacity = memory.size(),
                                               .local_offsets = offsets, .remote_offsets = offsets, .lengths = lengths,
                                               .on_fragment_complete = [&](std::size_t, const Status& status) { told += status.ok(); }};
    SUCCEEDS(engine.transferScatter({range}));
    told = 0;
    peer.stop();
    auto operation = engine.submitScatter({range});
    for (int i = 0; i < 3; i++) REQUIRE(operation.waitFor(5ms).IsClock());
    EXPECT(0, told);
    peer.go_on();
    Status status = Status::OK();
    do status = operation.waitFor(5ms);
    while (status.IsClock());
    SUCCEEDS(status);
    EXPECT(1, told);
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

static void parts_of_a_buffer_are_described() {
    const std::vector<int> nodes{0, 1, 2};
    EXPECT(std::string("segments:2097152:0,1,2"), buildSegmentsLocation(2 << 20, nodes));
    SegmentsLocationInfo info;
    REQUIRE(parseSegmentsLocation(buildSegmentsLocation(4096, nodes), info));
    EXPECT(4096u, info.page_size);
    REQUIRE(info.numa_nodes == nodes);
    EXPECT(std::string("cpu:0"), resolveSegmentsLocation(info, 3000, 999));
    EXPECT(std::string("cpu:1"), resolveSegmentsLocation(info, 3000, 1000));
    EXPECT(std::string("cpu:2"), resolveSegmentsLocation(info, 3001, 3000));
    EXPECT(std::string("cpu:2"), resolveSegmentsLocation(info, 2999, 3000));
    EXPECT(kWildcardLocation, resolveSegmentsLocation(info, 2, 1));
    REQUIRE(!parseSegmentsLocation("cpu:0", info));
    // Such a location may be registered.
    TransferEngine engine;
    processes::start(engine);
    processes::Memory memory(3 * 4096);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), buildSegmentsLocation(4096, {0, 0, 0})));
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

static void names_of_hosts_are_taken_apart_and_put_together() {
    EXPECT(std::string("host"), getHostNameWithoutPort("host:1"));
    EXPECT(std::string("host"), getHostNameWithoutPort("host"));
    EXPECT(std::string("::1"), getHostNameWithoutPort("[::1]:80"));
    REQUIRE(hasExplicitPort("host:1") && hasExplicitPort("[::1]:1") && !hasExplicitPort("host") && !hasExplicitPort("::1") && !hasExplicitPort("[::1]"));
    EXPECT(std::string("host:7"), buildHostNameWithPort("host", 7));
    EXPECT(std::string("[::1]:7"), buildHostNameWithPort("::1", 7));
}

static void a_range_of_ports_is_checked() {
    auto [low, high] = ValidatePortRange(20000, 20100, 15000, 17000);
    EXPECT(20000, low);
    EXPECT(20100, high);
    std::tie(low, high) = ValidatePortRange(17, 20100, 15000, 17000);
    EXPECT(15000, low);
    EXPECT(17000, high);
    std::tie(low, high) = ValidatePortRange(20100, 20000, 15000, 17000);
    EXPECT(15000, low);
    EXPECT(17000, high);
}

static void the_configuration_is_written() {
    globalConfig().ascend_agent_mode = true;
    REQUIRE(globalConfig().ascend_agent_mode);
    globalConfig().ascend_agent_mode = false;
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        scattered_ranges_are_awaited_in_slices_of_time();
        a_failed_fragment_ends_the_wait();
        a_callback_that_cannot_be_copied_leaves_nothing_under_way();
        if (processes::protocol() == "tcp") a_wait_without_an_end_comes_back_in_time();
        parts_of_a_buffer_are_described();
        names_of_hosts_are_taken_apart_and_put_together();
        a_range_of_ports_is_checked();
        the_configuration_is_written();
    }, processes::serve);
}
