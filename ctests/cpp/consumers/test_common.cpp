// Upstream's tests of common.h: names, numbers and locks.
#include <common.h>
#include <config.h>

#include <thread>

#include "check.hpp"

using namespace mooncake;

static_assert(kMaxHandshakeMaxLength == std::size_t{128} << 20 && kDefaultHandshakeMaxLength == std::size_t{1} << 20);
static_assert(!std::is_copy_constructible_v<RWSpinlock> && !std::is_copy_assignable_v<RWSpinlock>);
static_assert(std::is_same_v<decltype(parseFromString<int>("1")), std::optional<int>>);

static void names_of_hosts_are_parsed() {
    const std::uint16_t otherwise = getDefaultHandshakePort();
    const struct {
        const char* name;
        const char* host;
        std::uint16_t port;
    } all[] = {
        {"host", "host", otherwise},
        {"host:1", "host", 1},
        {"host:65535", "host", 65535},
        {"host:65536", "host", otherwise},
        {"host:-1", "host", otherwise},
        {"host:", "host", otherwise},
        {"host:12x", "host", otherwise},
        {"10.1.2.3:80", "10.1.2.3", 80},
        {"::1", "::1", otherwise},
        {"::1:9999", "::1:9999", otherwise},
        {"::1:15087", "::1", 15087},
        {"[::1]", "::1", otherwise},
        {"[::1]:80", "::1", 80},
        {"[fe80::1%eth0]:80", "fe80::1%eth0", 80},
        {"fe80::1%eth0", "fe80::1%eth0", otherwise},
        {"fe80::1%eth0:80", "fe80::1%eth0", 80},
    };
    for (const auto& one : all) {
        auto [host, port] = parseHostNameWithPort(one.name);
        EXPECT(std::string(one.host), host);
        EXPECT(one.port, port);
        EXPECT(std::string(one.host), getHostNameWithoutPort(one.name));
    }
    REQUIRE(isValidIpV6("::1") && isValidIpV6("fe80::1") && !isValidIpV6("1.2.3.4") && !isValidIpV6("host") && !isValidIpV6(""));
}

static void ports_are_numbers_or_the_default() {
    EXPECT(80, getPortFromString("80", 7));
    EXPECT(7, getPortFromString("", 7));
    EXPECT(7, getPortFromString("80x", 7));
    EXPECT(7, getPortFromString("70000", 7));
    int device = -1;
    EXPECT(80, parsePortAndDevice("80:npu_3", 7, &device));
    EXPECT(3, device);
    auto [host, port] = parseHostNameWithPortAscend("host:81:npu_4", &device);
    EXPECT(std::string("host"), host);
    EXPECT(81, port);
    EXPECT(4, device);
    REQUIRE(parseFromString<int>("12") == 12 && !parseFromString<int>("12 ") && !parseFromString<int>("") && !parseFromString<std::uint8_t>("256"));
}

static void a_lock_is_shared_or_exclusive() {
    RWSpinlock lock;
    lock.lock();
    REQUIRE(!lock.tryLock() && !lock.tryLockShared());
    lock.unlockAndLockShared();
    REQUIRE(lock.tryLockShared() && !lock.tryLock());
    lock.unlockShared();
    lock.unlockShared();
    REQUIRE(lock.tryLock());
    lock.unlock();
    lock.writeLockAggressive();
    lock.unlock();
    lock.writeLockNice();
    lock.unlock();
    lock.lockShared();
    lock.unlockShared();

    std::uint64_t counter = 0, sum = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; thread++) {
        threads.emplace_back([&, thread] {
            for (int i = 0; i < 10000; i++) {
                if (thread % 2 == 0 || i % 10 == 0) {
                    RWSpinlock::WriteGuard guard(lock);
                    counter++;
                } else {
                    RWSpinlock::ReadGuard guard(lock);
                    __atomic_fetch_add(&sum, counter > 0, __ATOMIC_RELAXED);
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(22000u, counter);
}

static void binding_to_a_node_is_refused_where_there_is_none() {
    EXPECT(0, bindToSocket(0));
    REQUIRE(bindToSocket(-1) != 0);
    REQUIRE(bindToSocket(100000) != 0);
}

static void clocks_agree() {
    const std::int64_t nano = getCurrentTimeInNano(), milli = getCurrentTimeInMilli();
    REQUIRE(nano > 1600000000000000000 && milli >= nano / 1000000 && milli - nano / 1000000 < 600000);
}

static void frames_are_of_limited_length() {
    EXPECT(kDefaultHandshakeMaxLength, getHandshakeMaxLength());
    setenv("MC_HANDSHAKE_MAX_LENGTH", "2097152", 1);
    EXPECT(kDefaultHandshakeMaxLength, getHandshakeMaxLength());
    unsetenv("MC_HANDSHAKE_MAX_LENGTH");
}

int main() {
    names_of_hosts_are_parsed();
    ports_are_numbers_or_the_default();
    a_lock_is_shared_or_exclusive();
    binding_to_a_node_is_refused_where_there_is_none();
    clocks_agree();
    frames_are_of_limited_length();
}
