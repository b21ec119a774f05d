// Upstream's test of shutting down: an engine that is to be shut down with its process is, by a signal and by exit().
#include <transfer_engine.h>

#include <poll.h>
#include <sys/wait.h>

#include <optional>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static void serve_until_a_signal() {
    // Never destroyed: it is the signal that ends the engine.
    auto* engine = new TransferEngine();
    SUCCEEDS(engine->init(std::getenv("METADATA"), "graceful:1"));
    REQUIRE(engine->installTransport("tcp", nullptr) != nullptr);
    engine->enableGracefulShutdown();
    engine->enableGracefulShutdown();
    std::cout << "graceful:1" << std::endl;
    // Not in read(): the thread sanitizer delivers no signal to a thread that stays in it.
    pollfd input{STDIN_FILENO, POLLIN, 0};
    while (poll(&input, 1, 100) <= 0) {
    }
    std::exit(0);
}

static bool is_found(const std::string& url) {
    TransferEngine engine;
    SUCCEEDS(engine.init(url, "asks:1"));
    REQUIRE(engine.installTransport("tcp", nullptr) != nullptr);
    return engine.openSegment("graceful:1") != (SegmentHandle)-1;
}

static void a_signal_shuts_the_engine_down() {
    processes::MetadataServer server;
    processes::Peer peer({"METADATA=" + server.url()});
    REQUIRE(is_found(server.url()));
    const int status = peer.terminate();
    REQUIRE((WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGTERM) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
    REQUIRE(!is_found(server.url()));
}

static void the_end_of_the_process_shuts_the_engine_down() {
    processes::MetadataServer server;
    {
        processes::Peer peer({"METADATA=" + server.url()});
        REQUIRE(is_found(server.url()));
    }
    REQUIRE(!is_found(server.url()));
}

// Objects with static storage go after the engine has been shut down: an operation that asks for ever keeps the process.
static void an_operation_that_nobody_waited_for_does_not_keep_the_process_from_ending() {
    static std::optional<TransferEngine::ScatterTransferOperation> operation;
    static processes::Memory memory(8192);
    static const std::vector<std::size_t> offsets{0}, lengths{4096};
    TransferEngine engine;
    processes::start(engine);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size()));
    engine.enableGracefulShutdown();
    operation.emplace(engine.submitScatter({{.opcode = TransferRequest::WRITE,
                                             .remote_segment = engine.getLocalIpAndPort(),
                                             .remote_base_offset = reinterpret_cast<std::uintptr_t>(memory.data()) + 4096,
                                             .remote_size = 4096,
                                             .local_buffer = memory.data(),
                                             .local_capacity = 4096,
                                             .local_offsets = offsets,
                                             .remote_offsets = offsets,
                                             .lengths = lengths,
                                             .on_fragment_complete = nullptr}}));
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        a_signal_shuts_the_engine_down();
        the_end_of_the_process_shuts_the_engine_down();
        an_operation_that_nobody_waited_for_does_not_keep_the_process_from_ending();
    }, serve_until_a_signal);
}
