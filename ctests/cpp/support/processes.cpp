#include "processes.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <iostream>
#include <sstream>

#include "check.hpp"

namespace processes {

namespace {

// Far more than any of them takes on a machine that is busy, under a sanitizer.
constexpr unsigned kLongestRun = 500;

std::string variable(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}

std::string line_of(FILE* file) {
    char line[4096];
    if (std::fgets(line, sizeof line, file) == nullptr) return "";
    line[std::strcspn(line, "\n")] = '\0';
    return line;
}

// Starts a program with pipes to its standard input and output. It dies with this process.
pid_t start_program(const char* program, const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                    FILE** input, FILE** output) {
    int in[2], out[2];
    REQUIRE(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    std::vector<char*> words;
    for (const std::string& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
    words.push_back(nullptr);
    const pid_t parent = getpid();
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        for (const std::string& entry : environment) putenv(const_cast<char*>(entry.c_str()));
        execv(program, words.data());
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    *input = fdopen(in[1], "w");
    *output = fdopen(out[0], "r");
    return child;
}

}  // namespace

std::string host() { return variable("TE_TEST_HOST", "127.0.0.1"); }

std::string protocol() { return variable("TE_TEST_NICS", "").empty() ? "tcp" : "rdma"; }

std::string nic_matrix() {
    std::istringstream nics(variable("TE_TEST_NICS", ""));
    std::string list, nic;
    while (std::getline(nics, nic, ',')) list += (list.empty() ? "\"" : ", \"") + nic + "\"";
    return list.empty() ? "" : "{\"cpu:0\": [[" + list + "], []]}";
}

void install(mooncake::TransferEngine& engine) {
    std::string matrix = nic_matrix();
    void* arguments[] = {matrix.data(), nullptr};
    REQUIRE(engine.installTransport(protocol(), matrix.empty() ? nullptr : arguments) != nullptr);
}

void start(mooncake::TransferEngine& engine) {
    SUCCEEDS(engine.init(P2PHANDSHAKE, host()));
    install(engine);
}

Memory::Memory(std::size_t length) : size_(length) {
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    data_ = static_cast<unsigned char*>(memory);
}

Memory::~Memory() { munmap(data_, size_); }

void serve() {
    mooncake::TransferEngine engine;
    start(engine);
    Memory memory(kPeerMemory), other(kPeerMemory);
    SUCCEEDS(engine.registerLocalMemory(memory.data(), memory.size(), "cpu:0"));
    std::cout << engine.getLocalIpAndPort() << " " << reinterpret_cast<std::uintptr_t>(memory.data()) << std::endl;

    std::deque<mooncake::TransferMetadata::NotifyDesc> waiting;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream order(line);
        std::string verb;
        std::size_t offset = 0, length = 0;
        std::uint64_t seed = 0;
        order >> verb;
        if (verb == "fill") {
            order >> offset >> length >> seed;
            fill(memory.data() + offset, length, seed);
            std::cout << "done" << std::endl;
        } else if (verb == "sum") {
            order >> offset >> length;
            std::cout << checksum(memory.data() + offset, length) << std::endl;
        } else if (verb == "notify") {
            std::string segment, name, text;
            order >> segment >> name;
            std::getline(order >> std::ws, text);
            std::cout << engine.sendNotifyByName(segment, {name, text}) << std::endl;
        } else if (verb == "take") {
            for (int wait = 0; waiting.empty() && wait < 10000; wait++) {
                std::vector<mooncake::TransferMetadata::NotifyDesc> messages;
                SUCCEEDS(engine.getNotifies(messages));
                waiting.insert(waiting.end(), messages.begin(), messages.end());
                if (waiting.empty()) usleep(1000);
            }
            if (waiting.empty()) {
                std::cout << "none" << std::endl;
            } else {
                std::cout << waiting.front().name << " " << waiting.front().notify_msg << std::endl;
                waiting.pop_front();
            }
        } else if (verb == "register") {
            order >> offset >> length;
            std::cout << engine.registerLocalMemory(other.data() + offset, length, "cpu:0") << std::endl;
        } else if (verb == "unregister") {
            order >> offset;
            std::cout << engine.unregisterLocalMemory(other.data() + offset) << std::endl;
        } else {
            std::cout << "unknown order" << std::endl;
        }
    }
    SUCCEEDS(engine.unregisterLocalMemory(memory.data()));
}

Peer::Peer(const std::vector<std::string>& environment) {
    pid_ = start_program("/proc/self/exe", {"peer", "peer"}, environment, &orders_, &answers_);
    std::istringstream words(read());
    words >> name_ >> base_;
}

Peer::~Peer() {
    std::fclose(orders_);
    int status = 0;
    if (pid_ != 0) {
        REQUIRE(waitpid(pid_, &status, 0) == pid_);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) check::fail(__FILE__, __LINE__, "the peer ended with " + std::to_string(status));
    }
    std::fclose(answers_);
}

std::string Peer::read() {
    std::string line = line_of(answers_);
    if (line.empty()) check::fail(__FILE__, __LINE__, "the peer has ended");
    return line;
}

std::string Peer::ask(const std::string& order) {
    std::fprintf(orders_, "%s\n", order.c_str());
    std::fflush(orders_);
    return read();
}

void Peer::kill() {
    REQUIRE(::kill(pid_, SIGKILL) == 0 && waitpid(pid_, nullptr, 0) == pid_);
    pid_ = 0;
}

int Peer::terminate() {
    int status = 0;
    REQUIRE(::kill(pid_, SIGTERM) == 0 && waitpid(pid_, &status, 0) == pid_);
    pid_ = 0;
    return status;
}

void Peer::stop() {
    int status = 0;
    REQUIRE(::kill(pid_, SIGSTOP) == 0 && waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status));
}

void Peer::go_on() { REQUIRE(::kill(pid_, SIGCONT) == 0); }

void Peer::fill(std::size_t offset, std::size_t length, std::uint64_t seed) {
    EXPECT(std::string("done"), ask("fill " + std::to_string(offset) + " " + std::to_string(length) + " " + std::to_string(seed)));
}

std::uint64_t Peer::sum(std::size_t offset, std::size_t length) {
    return std::stoull(ask("sum " + std::to_string(offset) + " " + std::to_string(length)));
}

MetadataServer::MetadataServer() {
    FILE* input = nullptr;
    pid_ = start_program(TE_PROGRAM, {"te", "metadata-server", "--listen", "127.0.0.1:0"}, {}, &input, &output_);
    std::fclose(input);
    std::string port = line_of(output_);
    REQUIRE(!port.empty());
    url_ = "http://127.0.0.1:" + port + "/metadata";
}

MetadataServer::~MetadataServer() {
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    std::fclose(output_);
}

void fill(void* memory, std::size_t length, std::uint64_t seed) {
    std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (std::size_t i = 0; i < length; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        static_cast<unsigned char*>(memory)[i] = static_cast<unsigned char>(state >> 32);
    }
}

std::uint64_t checksum(const void* memory, std::size_t length) {
    std::uint64_t sum = 0xcbf29ce484222325u;
    for (std::size_t i = 0; i < length; i++) sum = (sum ^ static_cast<const unsigned char*>(memory)[i]) * 0x100000001b3u;
    return sum;
}

int run(int argc, char** argv, void (*tests)(), void (*peer)()) {
    signal(SIGPIPE, SIG_IGN);
    alarm(kLongestRun);
    if (argc == 2 && std::strcmp(argv[1], "peer") == 0) {
        peer();
    } else {
        tests();
    }
    return 0;
}

}  // namespace processes
