// The other process of a test: the same program once more, with the argument "peer", which serves memory and obeys orders on its
// standard input. It dies with the test that started it; both are ended when a test takes too long.
#pragma once

#include <transfer_engine.h>

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace processes {

// Runs the tests, or in the process that they start, the peer. A test's main() is nothing but this.
int run(int argc, char** argv, void (*tests)(), void (*peer)());

// Where engines of tests are, and by what they move bytes: TE_TEST_HOST (127.0.0.1), and RDMA over the NICs of TE_TEST_NICS, a list
// with commas, or TCP if there are none.
std::string host();
std::string protocol();
// The matrix of these NICs as installTransport() is given it in args[0]; empty for TCP.
std::string nic_matrix();

// Initializes an engine without a metadata server, with that transport alone.
void start(mooncake::TransferEngine& engine);
void install(mooncake::TransferEngine& engine);

// Pages of this process, zeros, mapped where the system likes.
class Memory {
public:
    explicit Memory(std::size_t length);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    unsigned char* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    unsigned char* data_;
    std::size_t size_;
};

constexpr std::size_t kPeerMemory = 8 << 20;

// A peer that has one region of kPeerMemory bytes, registered for "cpu:0". The main of most peers; it obeys:
//   fill OFFSET LENGTH SEED   fills its memory by fill(); answers "done"
//   sum OFFSET LENGTH         checksum() of its memory
//   notify SEGMENT NAME TEXT  sends a notification by name; answers the result
//   take                      "NAME TEXT" of the oldest notification not told yet; waits for one up to 10 s, then "none"
//   register OFFSET LENGTH, unregister OFFSET    the result, of another mapping of the same size
void serve();

class Peer {
public:
    // Starts it and waits for its first line, of which the first word is the name that it can be opened by, and the second, if
    // there is one, the address of its memory. What the environment is to have besides: "NAME=VALUE".
    explicit Peer(const std::vector<std::string>& environment = {});
    ~Peer();  // ends the test if it did not end well
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    const std::string& name() const { return name_; }
    std::uint64_t base() const { return base_; }
    std::string ask(const std::string& order);
    void kill();  // on the spot
    int terminate();  // by SIGTERM; with what it ended, as waitpid() says it
    void stop();  // no thread of it runs when this returns
    void go_on();

    void fill(std::size_t offset, std::size_t length, std::uint64_t seed);
    std::uint64_t sum(std::size_t offset, std::size_t length);

private:
    std::string read();

    pid_t pid_;
    FILE* orders_;
    FILE* answers_;
    std::string name_;
    std::uint64_t base_ = 0;
};

// A metadata server of its own: the installed program te, on a port that the system draws.
class MetadataServer {
public:
    MetadataServer();
    ~MetadataServer();
    const std::string& url() const { return url_; }

private:
    pid_t pid_;
    FILE* output_;
    std::string url_;
};

// Pseudo-random bytes, and the checksum (FNV-1a) of any.
void fill(void* memory, std::size_t length, std::uint64_t seed);
std::uint64_t checksum(const void* memory, std::size_t length);

}  // namespace processes
