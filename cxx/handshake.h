// The handshake channel without an engine: one request and one reply a connection.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "common.h"
#include "resources.h"

namespace mooncake::transfer_engine_cxx {

// A socket at that port of all interfaces, or none. `reuses_address`: also where connections of the port are not quite over.
FileDescriptor bound_to(uint16_t port, bool reuses_address);

// Sends a request to an engine and gives its reply in `reply`. 0, ERR_DNS, or ERR_SOCKET.
int exchange(const std::string& host, uint16_t port, HandShakeRequestType type, const std::string& request, std::string& reply);

// Answers requests, one after the other, on a thread of its own, until it is destroyed.
class HandshakeServer {
   public:
    // Gives the reply; nothing, or an exception, closes the connection without one.
    using Answer = std::function<std::optional<std::string>(HandShakeRequestType, const std::string&)>;

    // Listens on `sockfd`, which is bound and becomes the server's, or on `port` if that is -1. Null on failure.
    static std::unique_ptr<HandshakeServer> start(uint16_t port, int sockfd, Answer answer);
    HandshakeServer(const HandshakeServer&) = delete;

   private:
    // Throws std::system_error if there can be no thread.
    HandshakeServer(FileDescriptor listener, Answer answer);
    void serve();
    void serve(int connection);
    void stop();

    const FileDescriptor listener_;
    const Answer answer_;
    std::mutex lock_;  // around what follows
    bool stopping_ = false;
    int connection_ = -1;  // the one that is served, or -1
    Thread thread_;        // uses all of these
};

}  // namespace mooncake::transfer_engine_cxx
