// What common.h declares that is not inline.
#include "common.h"

#include <endian.h>
#include <sys/socket.h>

#include <cerrno>
#include <fstream>

namespace mooncake {
namespace {

// CPUs of a node, as the kernel lists them: "0-3,8". False if there is no such node.
bool read_cpus(int node, cpu_set_t& cpus) {
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    if (!file) return false;
    CPU_ZERO(&cpus);
    for (std::string part; std::getline(file, part, ',');) {
        while (!part.empty() && part.back() == '\n') part.pop_back();
        size_t dash = part.find('-');
        auto first = parseFromString<unsigned>(std::string_view(part).substr(0, dash));
        auto last = dash == part.npos ? first : parseFromString<unsigned>(std::string_view(part).substr(dash + 1));
        if (!first || !last) continue;
        for (unsigned cpu = *first; cpu <= *last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus);
    }
    return CPU_COUNT(&cpus) > 0;
}

// A peer that is gone is an error, not a signal. What is no socket is written to as a file.
ssize_t write_some(int fd, const void* data, size_t length) {
    ssize_t written = send(fd, data, length, MSG_NOSIGNAL);
    return written < 0 && errno == ENOTSOCK ? write(fd, data, length) : written;
}

// Moves bytes until there are none left, or none can be moved.
template <typename Byte, typename Move>
ssize_t move_fully(int fd, Byte* data, size_t length, Move move_some) {
    size_t done = 0;
    while (done < length) {
        ssize_t moved = move_some(fd, data + done, length - done);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return done == 0 && moved < 0 ? -1 : static_cast<ssize_t>(done);
        done += static_cast<size_t>(moved);
    }
    return static_cast<ssize_t>(done);
}

}  // namespace

int bindToSocket(int socket_id) {
    cpu_set_t cpus;
    if (socket_id < 0 || !read_cpus(socket_id, cpus)) return ERR_INVALID_ARGUMENT;
    return sched_setaffinity(0, sizeof cpus, &cpus) == 0 ? 0 : ERR_NUMA;
}

ssize_t writeFully(int fd, const void* data, size_t length) {
    return move_fully(fd, static_cast<const char*>(data), length, write_some);
}

ssize_t readFully(int fd, void* data, size_t length) { return move_fully(fd, static_cast<char*>(data), length, read); }

// A frame: the length of what follows, in 8 bytes, the least first; the type, in one byte, unless the protocol is the old one; the text.
int writeString(int fd, const HandShakeRequestType type, const std::string& text) {
    bool typed = type != HandShakeRequestType::OldProtocol;
    uint64_t length = htole64(text.size() + typed);
    std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
    if (typed) frame += static_cast<char>(type);
    frame += text;
    return writeFully(fd, frame.data(), frame.size()) == static_cast<ssize_t>(frame.size()) ? 0 : ERR_SOCKET;
}

std::pair<HandShakeRequestType, std::string> readString(int fd) {
    const std::pair<HandShakeRequestType, std::string> invalid{HandShakeRequestType::Invalid, ""};
    uint64_t length = 0;
    if (readFully(fd, &length, sizeof length) != sizeof length) return invalid;
    length = le64toh(length);
    if (length == 0 || length > getHandshakeMaxLength()) return invalid;
    std::string text(length, '\0');
    if (readFully(fd, text.data(), length) != static_cast<ssize_t>(length)) return invalid;
    auto type = static_cast<HandShakeRequestType>(static_cast<unsigned char>(text[0]));
    // JSON begins with none of the types.
    if (type > HandShakeRequestType::Probe) return {HandShakeRequestType::OldProtocol, std::move(text)};
    text.erase(0, 1);
    return {type, std::move(text)};
}

}  // namespace mooncake
