// The memory pool among the example programs: many mappings, registered and unregistered, with a transport that is given its matrix.
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static void mappings_are_registered_and_unregistered() {
    auto engine = std::make_unique<TransferEngine>();
    auto host = getHostname();
    REQUIRE(!host.empty());
    SUCCEEDS(engine->init(P2PHANDSHAKE, processes::host(), processes::host(), 12345));
    std::string matrix = processes::nic_matrix();
    void** args = static_cast<void**>(malloc(2 * sizeof(void*)));
    args[0] = matrix.empty() ? nullptr : matrix.data();
    args[1] = nullptr;
    REQUIRE(engine->installTransport(processes::protocol(), args) != nullptr);
    free(args);

    constexpr std::size_t kLength = 1 << 20;
    std::vector<void*> mappings;
    for (int i = 0; i < 64; i++) {
        void* address = mmap(nullptr, kLength, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(address != MAP_FAILED);
        SUCCEEDS(engine->registerLocalMemory(address, kLength, "cpu:0"));
        mappings.push_back(address);
    }
    REQUIRE(engine->checkOverlap(mappings[7], 1));
    REQUIRE(!engine->checkOverlap(mappings[7], 0));
    for (void* address : mappings) {
        SUCCEEDS(engine->unregisterLocalMemory(address));
        munmap(address, kLength);
    }
    REQUIRE(!engine->checkOverlap(mappings[7], kLength));
}

// Without NICs there is no RDMA, and no crash either.
static void a_matrix_that_cannot_be_used_gives_no_transport() {
    TransferEngine engine;
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host()));
    std::string matrix = R"({"cpu:0": [["no such NIC"], []]})", none = "this is no matrix";
    void* args[] = {matrix.data(), nullptr};
    REQUIRE(engine.installTransport("rdma", args) == nullptr);
    args[0] = none.data();
    REQUIRE(engine.installTransport("rdma", args) == nullptr);
    REQUIRE(engine.installTransport("no such transport", nullptr) == nullptr);
    REQUIRE(engine.getTransport("rdma") == nullptr);
    // What failed has not spoilt what works.
    processes::install(engine);
    REQUIRE(engine.getTransport(processes::protocol()) != nullptr);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        mappings_are_registered_and_unregistered();
        a_matrix_that_cannot_be_used_gives_no_transport();
    }, processes::serve);
}
