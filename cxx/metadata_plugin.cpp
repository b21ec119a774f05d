// Metadata servers and ports without an engine.
#include "transfer_metadata_plugin.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <cstdlib>
#include <random>

#include "config.h"
#include "handshake.h"
#include "store.h"

namespace mooncake {

using transfer_engine_cxx::Store;

namespace {

struct StorePlugin final : MetadataStoragePlugin {
    explicit StorePlugin(const std::string& conn_string) : store(conn_string) {}

    bool remove(const std::string& key) override { return store.remove(key); }
    bool getText(const std::string& key, std::string& json) override {
        std::optional<std::string> text = store.get(key);
        if (text) json = std::move(*text);
        return text.has_value();
    }
    bool setText(const std::string& key, const std::string& json) override { return store.put(key, json); }

    Store store;
};

int port_of_environment(const char* variable, int otherwise) {
    const char* text = std::getenv(variable);
    return text ? parseFromString<int>(text).value_or(otherwise) : otherwise;
}

}  // namespace

MetadataStoragePlugin::~MetadataStoragePlugin() = default;

std::shared_ptr<MetadataStoragePlugin> MetadataStoragePlugin::Create(const std::string& conn_string) {
    return std::make_shared<StorePlugin>(conn_string);
}

std::vector<std::string> findLocalIpAddresses() {
    std::vector<std::string> addresses;
    ifaddrs* interfaces;
    if (getifaddrs(&interfaces) != 0) return addresses;
    const int family = globalConfig().use_ipv6 ? AF_INET6 : AF_INET;
    for (const ifaddrs* each = interfaces; each; each = each->ifa_next) {
        if (!each->ifa_addr || each->ifa_addr->sa_family != family || std::string_view(each->ifa_name) == "lo") continue;
        if (!(each->ifa_flags & IFF_UP) || !(each->ifa_flags & IFF_RUNNING)) continue;
        char host[NI_MAXHOST];
        socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
        if (getnameinfo(each->ifa_addr, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0) addresses.emplace_back(host);
    }
    freeifaddrs(interfaces);
    return addresses;
}

uint16_t findAvailableTcpPort(int& sockfd, bool) {
    constexpr int kFirst = 15000, kLast = 17000, kAttempts = 500;
    auto [first, last] = ValidatePortRange(port_of_environment("MC_MIN_RPC_PORT", kFirst), port_of_environment("MC_MAX_RPC_PORT", kLast),
                                           kFirst, kLast);
    std::random_device random;
    std::uniform_int_distribution<int> ports(first, last);
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
        const uint16_t port = static_cast<uint16_t>(ports(random));
        // Nor one whose connections are not quite over.
        transfer_engine_cxx::FileDescriptor bound = transfer_engine_cxx::bound_to(port, false);
        if (bound.number() >= 0) {
            sockfd = bound.release();
            return port;
        }
    }
    return 0;
}

}  // namespace mooncake
