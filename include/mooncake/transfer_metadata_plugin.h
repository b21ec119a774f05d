// Access to a metadata server, without an engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transfer_engine_cxx/export.h"
#include "transfer_engine_cxx/json.h"
#include "transfer_metadata.h"

namespace mooncake {

// A metadata server: values in JSON under keys. Any thread may call it.
struct TRANSFER_ENGINE_CXX_API MetadataStoragePlugin {
    virtual ~MetadataStoragePlugin();

    // Opens a server, such as "http://host:8080/metadata", "redis://host:6379" or "etcd://host:2379". Throws std::runtime_error if there
    // is no such kind of server, or it refuses.
    static std::shared_ptr<MetadataStoragePlugin> Create(const std::string& conn_string);

    // False if there is no such key, what is there is no JSON, or the server fails.
#ifdef TRANSFER_ENGINE_HAS_JSONCPP
    bool get(const std::string& key, Json::Value& value) {
        std::string text;
        if (!getText(key, text)) return false;
        value = transfer_engine_cxx::parse_json(text);
        return !value.isNull();
    }
    bool set(const std::string& key, const Json::Value& value) { return setText(key, transfer_engine_cxx::write_json(value)); }
#else
    bool get(const std::string& key, Json::Value& value);
    bool set(const std::string& key, const Json::Value& value);
#endif
    // False if the server fails or says that there is no such key.
    virtual bool remove(const std::string& key) = 0;

    // The library does without jsoncpp, so its own part is about texts.
    virtual bool getText(const std::string& key, std::string& json) = 0;
    virtual bool setText(const std::string& key, const std::string& json) = 0;
};

// Addresses of the network interfaces of this machine that are up, without "lo", of the family that is in use.
TRANSFER_ENGINE_CXX_API std::vector<std::string> findLocalIpAddresses();

// Takes a free port of MC_MIN_RPC_PORT to MC_MAX_RPC_PORT: `sockfd` receives a socket that is bound to it and is the caller's. 0 on
// failure. `set_range` says nothing to this library.
TRANSFER_ENGINE_CXX_API uint16_t findAvailableTcpPort(int& sockfd, bool set_range = false);

}  // namespace mooncake
