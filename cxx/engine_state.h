// What a TransferEngine holds.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core.h"
#include "transfer_engine.h"

namespace mooncake {

namespace transfer_engine_cxx {

class InstalledTransport final : public Transport {};

}  // namespace transfer_engine_cxx

// `engine` and `core` are null before init; the C interface refuses null in each call. They change no more after that, so that any
// thread may read them.
class __attribute__((visibility("hidden"))) TransferEngine::State {
   public:
    State() = default;
    State(const State&) = delete;
    ~State();

    te_engine* engine = nullptr;
    std::shared_ptr<transfer_engine_cxx::Core> core;
    const std::shared_ptr<Topology> topology = std::make_shared<Topology>();
    std::shared_ptr<TransferMetadata> metadata;

    AutoDiscoverConfig auto_discover;
    std::vector<std::string> filters;
    bool graceful_shutdown = false;

    // Handed out by address. Entries stay.
    std::mutex transports_lock;
    std::map<std::string, transfer_engine_cxx::InstalledTransport> transports;

    bool has_transport(const char* protocol) const;

    // Has the address of the object stand for what it wraps in the C interfaces. Without it only the cast does not work.
    void set_alias(const void* address);
};

}  // namespace mooncake
