// Engines and metadata clients where the system gives out, and in children of fork. As a program with USE_EVENT_DRIVEN_COMPLETION, so that an
// engine of the class has all that it can have.
#include <config.h>
#include <transfer_engine.h>
#include <transfer_metadata_plugin.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>

#include "check.hpp"
#include "processes.hpp"

#ifndef USE_EVENT_DRIVEN_COMPLETION
#error "this is a program of a build with USE_EVENT_DRIVEN_COMPLETION"
#endif

using namespace mooncake;
using namespace std::chrono_literals;

// How many threads can still be started; negative: any number.
static std::atomic<int> threads_left{-1};

// In the place of the C library's, for all libraries of the process.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
    static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    int left = threads_left;
    while (left > 0 && !threads_left.compare_exchange_weak(left, left - 1)) {
    }
    if (left == 0) return EAGAIN;
    return create(thread, attributes, run, argument);
}

static std::size_t count(const char* directory) {
    const std::filesystem::directory_iterator entries(directory);
    return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

// Threads that have been awaited may be there for a moment more.
static void expect_as_before(std::size_t descriptors, std::size_t threads) {
    for (int i = 0; i < 1200 && count("/proc/self/task") != threads; i++) usleep(50000);
    EXPECT(threads, count("/proc/self/task"));
    EXPECT(descriptors, count("/proc/self/fd"));
}

// Whether who sleeps until a batch is over is woken up.
static void expect_completion(TransferEngine& engine) {
    static char memory[8192];
    SUCCEEDS(engine.registerLocalMemory(memory, sizeof memory));
    const BatchID batch = engine.allocateBatchID(1);
    REQUIRE(batch != INVALID_BATCH_ID);
    const auto remote = reinterpret_cast<std::uint64_t>(memory) + 4096;
    SUCCEEDS(engine.submitTransfer(batch, {{TransferRequest::WRITE, memory, LOCAL_SEGMENT_ID, remote, 4096}}));
    auto& description = Transport::toBatchDesc(batch);
    {
        std::unique_lock<std::mutex> lock(description.completion_mutex);
        REQUIRE(description.completion_cv.wait_for(lock, 100s, [&] { return description.is_finished.load(); }));
    }
    SUCCEEDS(engine.freeBatchID(batch));
    SUCCEEDS(engine.unregisterLocalMemory(memory));
}

// Initializes an engine with more and more of something until there is enough; before that it fails and leaves nothing.
template <class Limit>
static void init_until_it_succeeds(Limit limit) {
    const std::size_t descriptors = count("/proc/self/fd"), threads = count("/proc/self/task");
    for (int number = 0;; number++) {
        REQUIRE(number < 1000);
        TransferEngine engine(false);
        limit(number);
        const int result = engine.init(P2PHANDSHAKE, processes::host());
        limit(-1);
        if (result != 0) {
            expect_as_before(descriptors, threads);
            continue;
        }
        REQUIRE(number > 0);
        processes::install(engine);
        expect_completion(engine);
        break;
    }
    expect_as_before(descriptors, threads);
}

static void init_without_descriptors_fails_and_leaves_nothing() {
    // For good: engines raise the limit as far as they can.
    const rlimit limit = {256, 256};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    std::vector<int> spent;
    const auto give_back = [&](std::size_t rest) {
        for (; spent.size() > rest; spent.pop_back()) close(spent.back());
    };
    init_until_it_succeeds([&](int number) {
        if (number < 0) return give_back(0);
        for (int copy; (copy = dup(0)) >= 0;) spent.push_back(copy);
        give_back(spent.size() - static_cast<std::size_t>(number));
    });
}

static void init_without_threads_fails_and_leaves_nothing() {
    init_until_it_succeeds([](int number) { threads_left = number; });
}

static void a_server_without_a_thread_is_not_started_and_leaves_nothing() {
    const std::size_t descriptors = count("/proc/self/fd"), threads = count("/proc/self/task");
    {
        TransferMetadata metadata(P2PHANDSHAKE);
        int listener = -1;
        const std::uint16_t port = findAvailableTcpPort(listener);
        threads_left = 0;
        REQUIRE(metadata.startHandshakeDaemon(nullptr, port, listener) != 0);
        threads_left = -1;
        EXPECT(descriptors, count("/proc/self/fd"));
    }
    expect_as_before(descriptors, threads);
}

// What a child does that has no threads of its parent.
template <class Body>
static void in_child(Body body) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(60);
        body();
        _exit(0);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    EXPECT(0, status);
}

static void a_child_ends_its_copies_and_its_parent_goes_on() {
    auto engine = std::make_unique<TransferEngine>(false);
    processes::start(*engine);
    globalConfig().te_metadata_refresh_interval_seconds = 1;
    auto client = std::make_unique<TransferMetadata>(P2PHANDSHAKE);
    globalConfig().te_metadata_refresh_interval_seconds = 0;
    int listener = -1;
    const std::uint16_t port = findAvailableTcpPort(listener);
    SUCCEEDS(client->startHandshakeDaemon(nullptr, port, listener));
    expect_completion(*engine);
    in_child([&] {
        client.reset();
        engine.reset();
    });
    expect_completion(*engine);
    TransferMetadata other(P2PHANDSHAKE);
    SUCCEEDS(other.sendProbe("127.0.0.1:" + std::to_string(port)));
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] {
        {
            // What the process keeps is made by its first engine.
            TransferEngine engine(false);
            processes::start(engine);
            expect_completion(engine);
        }
        init_without_descriptors_fails_and_leaves_nothing();
        init_without_threads_fails_and_leaves_nothing();
        a_server_without_a_thread_is_not_started_and_leaves_nothing();
        a_child_ends_its_copies_and_its_parent_goes_on();
    }, processes::serve);
}
