// Small helpers: host names and ports, time, frames on sockets, locks. Free of state, except for what the environment says once.
//
// Brings along what programs expect of it: glog (or its stand-in), libnuma where it is installed, and headers of the system.
#pragma once

#if __cplusplus < 202002L
#error "these headers take C++20: compile with -std=c++20 or a later one"
#endif

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#if !defined(TRANSFER_ENGINE_WITHOUT_NUMA) && __has_include(<numa.h>)
#include <numa.h>
#endif

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <iostream>
#include <mutex>
#include <optional>
#include <queue>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "error.h"
#include "transfer_engine_cxx/export.h"
#include "transfer_engine_cxx/logging.h"

namespace mooncake {

// The number of an engine's own segment.
const static int LOCAL_SEGMENT_ID = 0;

// --- numbers and time ----------------------------------------------------------------------------------------------------------

// The number that all of `text` is.
template <class T>
std::optional<T> parseFromString(std::string_view text) {
    T value{};
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
}

// Of the clock of the day; ERR_CLOCK if it cannot be read.
inline int64_t getCurrentTimeInNano() {
    timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return ERR_CLOCK;
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

inline int64_t getCurrentTimeInMilli() {
    int64_t now = getCurrentTimeInNano();
    return now < 0 ? now : now / 1'000'000;
}

// Fast, and good enough to spread work. One for each thread.
class SimpleRandom {
   public:
    explicit SimpleRandom(uint32_t seed) : state_(seed) {}
    static SimpleRandom& Get() {
        static thread_local SimpleRandom generator(static_cast<uint32_t>(getCurrentTimeInNano()));
        return generator;
    }
    uint32_t next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state_ >> 32);
    }
    uint32_t next(uint32_t max) { return next() % max; }

   private:
    uint64_t state_;
};

// --- hosts and ports -----------------------------------------------------------------------------------------------------------

// The port of names that carry none: MC_HANDSHAKE_PORT, or 12001.
TRANSFER_ENGINE_CXX_API uint16_t getDefaultHandshakePort();

inline bool isValidIpV6(const std::string& address) {
    in6_addr unused;
    return inet_pton(AF_INET6, address.c_str(), &unused) == 1;
}

// An IPv6 address in brackets, all else as it is.
inline std::string maybeWrapIpV6(const std::string& host) { return isValidIpV6(host) ? "[" + host + "]" : host; }

// `default_port` for what is not a number from 0 to 65535.
inline uint16_t getPortFromString(std::string_view port, uint16_t default_port) {
    return parseFromString<uint16_t>(port).value_or(default_port);
}

namespace transfer_engine_cxx {

// Host, and the text of the port if the name has one. IPv6 addresses may have brackets, and a scope ("fe80::1%eth0"). The brackets go.
inline std::pair<std::string, std::optional<std::string>> split_host_and_port(const std::string& name) {
    auto is_address = [](std::string_view text) { return isValidIpV6(std::string(text.substr(0, text.find('%')))); };
    const size_t none = std::string::npos;
    if (name.starts_with('[')) {
        size_t end = name.find(']');
        if (end != none && is_address(std::string_view(name).substr(1, end - 1))) {
            std::string host = name.substr(1, end - 1);
            if (end + 1 < name.size() && name[end + 1] == ':') return {host, name.substr(end + 2)};
            return {host, std::nullopt};
        }
    }
    size_t scope = name.find('%');
    size_t colon = scope == none ? none : name.find(':', scope);
    if (colon == none && is_address(name)) return {name, std::nullopt};
    if (colon == none || !is_address(name)) colon = name.rfind(':');
    if (colon == none) return {name, std::nullopt};
    return {name.substr(0, colon), name.substr(colon + 1)};
}

}  // namespace transfer_engine_cxx

// A port that is missing or none is the default one.
inline std::pair<std::string, uint16_t> parseHostNameWithPort(const std::string& name) {
    auto [host, port] = transfer_engine_cxx::split_host_and_port(name);
    uint16_t default_port = getDefaultHandshakePort();
    return {host, port ? getPortFromString(*port, default_port) : default_port};
}

inline std::string getHostNameWithoutPort(const std::string& name) { return transfer_engine_cxx::split_host_and_port(name).first; }

inline bool hasExplicitPort(const std::string& name) {
    auto port = transfer_engine_cxx::split_host_and_port(name).second;
    return port && parseFromString<uint16_t>(*port);
}

inline std::string buildHostNameWithPort(const std::string& host, uint16_t port) {
    return maybeWrapIpV6(host) + ":" + std::to_string(port);
}

// "<port>" or "<port>:npu_<device>". `device` is written only if there is one.
inline uint16_t parsePortAndDevice(std::string_view text, uint16_t default_port, int* device) {
    size_t colon = text.find(':');
    if (colon != std::string_view::npos) {
        std::string_view name = text.substr(colon + 1);
        const std::string_view prefix = "npu_";
        auto number = name.starts_with(prefix) ? parseFromString<int>(name.substr(prefix.size())) : std::nullopt;
        if (number && device) *device = *number;
    }
    return getPortFromString(text.substr(0, colon), default_port);
}

// "<host>", "<host>:<port>" or "<host>:<port>:npu_<device>".
inline std::pair<std::string, uint16_t> parseHostNameWithPortAscend(const std::string& name, int* device) {
    std::string address = name, suffix;
    size_t colon = name.rfind(":npu_");
    if (colon != std::string::npos) {
        address = name.substr(0, colon);
        suffix = name.substr(colon);
    }
    auto [host, port] = transfer_engine_cxx::split_host_and_port(address);
    return {host, parsePortAndDevice(port.value_or("") + suffix, getDefaultHandshakePort(), device)};
}

// Of this machine; "" if the system does not say.
inline std::string getHostname() {
    char name[256] = "";
    if (gethostname(name, sizeof name - 1) != 0) return "";
    return name;
}

// --- threads -------------------------------------------------------------------------------------------------------------------

// Lets the calling thread run on the CPUs of a NUMA node only. 0; ERR_INVALID_ARGUMENT for a node that is not there; ERR_NUMA if the
// system refuses.
TRANSFER_ENGINE_CXX_API int bindToSocket(int socket_id);

// Readers share it, writers do not. Threads that wait spin, and let others run: for sections of microseconds. Whoever writes goes before
// whoever reads.
class RWSpinlock {
   public:
    RWSpinlock() = default;
    RWSpinlock(const RWSpinlock&) = delete;
    RWSpinlock& operator=(const RWSpinlock&) = delete;

    void lock() {
        waiting_writers_.fetch_add(1, std::memory_order_relaxed);
        while (!tryLock()) std::this_thread::yield();
        waiting_writers_.fetch_sub(1, std::memory_order_relaxed);
    }
    bool tryLock() {
        int32_t free = 0;
        return holders_.compare_exchange_strong(free, kWriter, std::memory_order_acquire, std::memory_order_relaxed);
    }
    void unlock() { holders_.store(0, std::memory_order_release); }

    void lockShared() {
        while (!tryLockShared()) std::this_thread::yield();
    }
    bool tryLockShared() {
        int32_t holders = holders_.load(std::memory_order_relaxed);
        return holders >= 0 && waiting_writers_.load(std::memory_order_relaxed) == 0 &&
               holders_.compare_exchange_strong(holders, holders + 1, std::memory_order_acquire, std::memory_order_relaxed);
    }
    void unlockShared() { holders_.fetch_sub(1, std::memory_order_release); }

    // Spins without letting others run.
    void writeLockAggressive() {
        while (!tryLock()) {
        }
    }
    void writeLockNice() { lock(); }

    // From writer to reader, with nobody in between.
    void unlockAndLockShared() { holders_.store(1, std::memory_order_release); }

    class WriteGuard {
       public:
        explicit WriteGuard(RWSpinlock& lock) : lock_(lock) { lock_.lock(); }
        WriteGuard(const WriteGuard&) = delete;
        WriteGuard& operator=(const WriteGuard&) = delete;
        ~WriteGuard() { lock_.unlock(); }

       private:
        RWSpinlock& lock_;
    };

    class ReadGuard {
       public:
        explicit ReadGuard(RWSpinlock& lock) : lock_(lock) { lock_.lockShared(); }
        ReadGuard(const ReadGuard&) = delete;
        ReadGuard& operator=(const ReadGuard&) = delete;
        ~ReadGuard() { lock_.unlockShared(); }

       private:
        RWSpinlock& lock_;
    };

   private:
    static constexpr int32_t kWriter = -1;

    // How many read, or kWriter.
    std::atomic<int32_t> holders_{0};
    std::atomic<int32_t> waiting_writers_{0};
};

// --- frames of the handshake channel -------------------------------------------------------------------------------------------

enum class HandShakeRequestType {
    Connection = 0,
    Metadata = 1,
    Notify = 2,
    Probe = 3,
    Invalid = 0xfe,
    // A frame without a type.
    OldProtocol = 0xff,
};

constexpr size_t kDefaultHandshakeMaxLength = size_t(1) << 20;
constexpr size_t kMaxHandshakeMaxLength = size_t(128) << 20;

// The largest frame that is read: MC_HANDSHAKE_MAX_LENGTH as it was at the first call.
TRANSFER_ENGINE_CXX_API size_t getHandshakeMaxLength();

// All of it, in as many calls as it takes; less at an error or, reading, at the end. -1 if nothing could be moved.
TRANSFER_ENGINE_CXX_API ssize_t writeFully(int fd, const void* data, size_t length);
TRANSFER_ENGINE_CXX_API ssize_t readFully(int fd, void* data, size_t length);

// 0 or ERR_SOCKET.
TRANSFER_ENGINE_CXX_API int writeString(int fd, const HandShakeRequestType type, const std::string& text);

// Invalid and "" for a frame that does not arrive or is too long.
TRANSFER_ENGINE_CXX_API std::pair<HandShakeRequestType, std::string> readString(int fd);

}  // namespace mooncake
