#include "handshake.h"

#include <fcntl.h>
#include <poll.h>

#include <cerrno>
#include <memory>

#include "config.h"

namespace mooncake::transfer_engine_cxx {

namespace {

constexpr int kBacklog = 128;
constexpr int kConnectMilliseconds = 5000;

// How long one read or write may move nothing.
void limit_waiting(int fd, int seconds) {
    timeval limit = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool connect(int fd, const addrinfo& address) {
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    if (::connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
        if (errno != EINPROGRESS) return false;
        pollfd connecting = {fd, POLLOUT, 0};
        int error = 0;
        socklen_t size = sizeof error;
        if (poll(&connecting, 1, kConnectMilliseconds) != 1) return false;
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) return false;
    }
    return fcntl(fd, F_SETFL, flags) == 0;
}

}  // namespace

FileDescriptor bound_to(uint16_t port, bool reuses_address) {
    const bool ipv6 = globalConfig().use_ipv6;
    FileDescriptor bound(socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int reuse = reuses_address;
    setsockopt(bound.number(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
    sockaddr_in any4{};
    any4.sin_family = AF_INET;
    any4.sin_port = htons(port);
    sockaddr_in6 any6{};
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons(port);
    auto* any = ipv6 ? reinterpret_cast<sockaddr*>(&any6) : reinterpret_cast<sockaddr*>(&any4);
    return bind(bound.number(), any, ipv6 ? sizeof any6 : sizeof any4) == 0 ? std::move(bound) : FileDescriptor(-1);
}

int exchange(const std::string& host, uint16_t port, HandShakeRequestType type, const std::string& request, std::string& reply) {
    addrinfo hints{};
    hints.ai_family = globalConfig().use_ipv6 ? AF_INET6 : AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return ERR_DNS;
    std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
    for (const addrinfo* address = found; address; address = address->ai_next) {
        FileDescriptor connection(socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
        if (connection.number() < 0 || !connect(connection.number(), *address)) continue;
        limit_waiting(connection.number(), 60);
        if (writeString(connection.number(), type, request) != 0) continue;
        auto [reply_type, text] = readString(connection.number());
        if (reply_type != type) continue;
        reply = std::move(text);
        return 0;
    }
    return ERR_SOCKET;
}

std::unique_ptr<HandshakeServer> HandshakeServer::start(uint16_t port, int sockfd, Answer answer) {
    FileDescriptor listener = sockfd < 0 ? bound_to(port, true) : FileDescriptor(sockfd);
    if (listen(listener.number(), kBacklog) != 0) return nullptr;
    try {
        return std::unique_ptr<HandshakeServer>(new HandshakeServer(std::move(listener), std::move(answer)));
    } catch (const std::system_error&) {
        return nullptr;
    }
}

HandshakeServer::HandshakeServer(FileDescriptor listener, Answer answer)
    : listener_(std::move(listener)), answer_(std::move(answer)), thread_([this] { serve(); }, [this] { stop(); }) {}

void HandshakeServer::stop() {
    std::lock_guard guard(lock_);
    stopping_ = true;
    shutdown(listener_.number(), SHUT_RDWR);  // ends accept()
    // A peer that neither reads nor writes is not waited for.
    if (connection_ >= 0) shutdown(connection_, SHUT_RDWR);
}

void HandshakeServer::serve() {
    auto is_stopped_with = [this](int connection) {
        std::lock_guard guard(lock_);
        connection_ = connection;
        return stopping_;
    };
    for (;;) {
        FileDescriptor connection(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC));
        if (is_stopped_with(connection.number())) return;
        if (connection.number() >= 0) {
            try {
                serve(connection.number());
            } catch (...) {
                // Of the program's function, or for want of memory: this peer is refused, others are not.
            }
            if (is_stopped_with(-1)) return;
        } else {
            poll(nullptr, 0, 10);  // the process has no descriptor left, perhaps for a while
        }
    }
}

void HandshakeServer::serve(int connection) {
    limit_waiting(connection, 5);
    auto [type, request] = readString(connection);
    if (type == HandShakeRequestType::Invalid) return;
    std::optional<std::string> reply = answer_(type, request);
    if (!reply || writeString(connection, type, *reply) != 0) return;
    // A connection that is closed first by this side would keep the port.
    shutdown(connection, SHUT_WR);
    char nothing;
    (void)!read(connection, &nothing, 1);
}

}  // namespace mooncake::transfer_engine_cxx
