#include "descriptor.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <type_traits>
#include <utility>

#include "json_value.h"

namespace mooncake::transfer_engine_cxx {

using BufferDesc = TransferMetadata::BufferDesc;
using DeviceDesc = TransferMetadata::DeviceDesc;
using HandShakeDesc = TransferMetadata::HandShakeDesc;
using NotifyDesc = TransferMetadata::NotifyDesc;
using RpcMetaDesc = TransferMetadata::RpcMetaDesc;
using SegmentDesc = TransferMetadata::SegmentDesc;

namespace {

// Whether a value has the type of the field, which then has the value.
bool convert(const JsonValue& value, std::string& field) {
    const std::string* text = value.as<std::string>();
    if (text) field = *text;
    return text;
}

bool convert(const JsonValue& value, bool& field) {
    const bool* flag = value.as<bool>();
    if (flag) field = *flag;
    return flag;
}

template <class T>
    requires std::is_integral_v<T>
bool convert(const JsonValue& value, T& field) {
    const uint64_t* number = value.as<uint64_t>();
    const int64_t* below_zero = value.as<int64_t>();
    if (number && std::in_range<T>(*number)) {
        field = static_cast<T>(*number);
    } else if (below_zero && std::in_range<T>(*below_zero)) {
        field = static_cast<T>(*below_zero);
    } else {
        return false;
    }
    return true;
}

bool convert(const JsonValue& value, DeviceDesc& device);
bool convert(const JsonValue& value, BufferDesc& buffer);

template <class T>
bool convert(const JsonValue& value, std::vector<T>& field) {
    const JsonArray* elements = value.as<JsonArray>();
    if (!elements) return false;
    field.clear();
    for (const JsonValue& element : *elements) {
        if (!convert(element, field.emplace_back())) return false;
    }
    return true;
}

// The same for a member, which may be missing or null: then the field stays as it is.
template <class T>
bool read(const JsonValue& object, std::string_view name, T& field) {
    const JsonValue* value = object.member(name);
    return !value || value->as<std::nullptr_t>() || convert(*value, field);
}

bool convert(const JsonValue& value, DeviceDesc& device) {
    return read(value, "name", device.name) && read(value, "lid", device.lid) && read(value, "gid", device.gid) &&
           read(value, "eid", device.eid) && !device.name.empty() && !device.gid.empty();
}

bool convert(const JsonValue& value, BufferDesc& buffer) {
    buffer.addr = buffer.length = buffer.offset = 0;
    return read(value, "name", buffer.name) && read(value, "addr", buffer.addr) && read(value, "length", buffer.length) &&
           read(value, "lkey", buffer.lkey) && read(value, "rkey", buffer.rkey) && !buffer.name.empty() && buffer.addr != 0 &&
           buffer.length != 0;
}

// Local time with microseconds.
std::string timestamp() {
    auto now = std::chrono::system_clock::now();
    std::time_t seconds = std::chrono::system_clock::to_time_t(now);
    auto micros = std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() % 1'000'000;
    std::tm local{};
    localtime_r(&seconds, &local);
    std::array<char, 64> text;
    size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &local);
    std::snprintf(text.data() + length, text.size() - length, ".%06d", static_cast<int>(micros));
    return text.data();
}

// Writes the members of an object, in the order of the calls: that of their names, as upstream's writers have it.
class ObjectWriter {
   public:
    explicit ObjectWriter(std::string& text) : text_(text) { text_ += '{'; }
    ~ObjectWriter() { text_ += '}'; }

    void member(std::string_view name, std::string_view value) {
        begin(name);
        write_json(value, text_);
    }
    template <class T>
        requires std::is_integral_v<T>
    void member(std::string_view name, T value) {
        begin(name);
        text_ += std::is_same_v<T, bool> ? (value ? "true" : "false") : std::to_string(value);
    }
    void member(std::string_view name, const std::vector<uint32_t>& numbers) {
        elements(name, numbers, [this](uint32_t number) { text_ += std::to_string(number); });
    }
    // An array of objects.
    template <class T, class Write>
    void list(std::string_view name, const std::vector<T>& objects, Write write) {
        elements(name, objects, [&](const T& object) {
            ObjectWriter element(text_);
            write(element, object);
        });
    }
    // A value that is JSON already.
    void json(std::string_view name, std::string_view value) {
        begin(name);
        text_ += value;
    }

   private:
    template <class T, class Write>
    void elements(std::string_view name, const std::vector<T>& elements, Write write) {
        begin(name);
        text_ += '[';
        for (size_t i = 0; i < elements.size(); ++i) {
            if (i > 0) text_ += ',';
            write(elements[i]);
        }
        text_ += ']';
    }
    void begin(std::string_view name) {
        if (text_.back() != '{') text_ += ',';
        write_json(name, text_);
        text_ += ':';
    }

    std::string& text_;
};

// An object with the members that `write` gives it.
template <class Write>
std::string write_object(Write write) {
    std::string text;
    {
        ObjectWriter object(text);
        write(object);
    }
    return text;
}

}  // namespace

std::shared_ptr<SegmentDesc> read_descriptor(std::string_view json) {
    std::optional<JsonValue> value = read_json(json);
    if (!value || !value->as<JsonObject>()) return nullptr;
    auto descriptor = std::make_shared<SegmentDesc>();
    bool is_read = read(*value, "name", descriptor->name) && read(*value, "protocol", descriptor->protocol) &&
                   read(*value, "devices", descriptor->devices) && read(*value, "buffers", descriptor->buffers) &&
                   read(*value, "timestamp", descriptor->timestamp) && read(*value, "tcp_data_port", descriptor->tcp_data_port) &&
                   read(*value, "tcp_proto_version", descriptor->tcp_proto_version) &&
                   read(*value, "rdma_server_name", descriptor->rdma_server_name);
    if (!is_read || (descriptor->protocol != "tcp" && descriptor->protocol != "rdma")) return nullptr;
    if (descriptor->protocol == "rdma") {
        for (const BufferDesc& buffer : descriptor->buffers) {
            // Memory that only its own engine may use has no keys for peers.
            if (buffer.rkey.empty()) continue;
            if (buffer.rkey.size() != buffer.lkey.size() || buffer.rkey.size() != descriptor->devices.size()) return nullptr;
        }
        const JsonValue* matrix = value->member("priority_matrix");
        if (matrix && !matrix->as<std::nullptr_t>()) {
            std::string text;
            write_json(*matrix, text);
            if (descriptor->topology.parse(text) != 0) return nullptr;
        }
    }
    return descriptor;
}

std::optional<std::string> write_descriptor(const SegmentDesc& descriptor) {
    const bool rdma = descriptor.protocol == "rdma";
    if (!rdma && descriptor.protocol != "tcp") return std::nullopt;
    return write_object([&](ObjectWriter& object) {
        object.list("buffers", descriptor.buffers, [&](ObjectWriter& element, const BufferDesc& buffer) {
            element.member("addr", buffer.addr);
            element.member("length", buffer.length);
            if (rdma) element.member("lkey", buffer.lkey);
            element.member("name", buffer.name);
            if (rdma) element.member("rkey", buffer.rkey);
        });
        if (rdma) {
            object.list("devices", descriptor.devices, [&](ObjectWriter& element, const DeviceDesc& device) {
                element.member("gid", device.gid);
                element.member("lid", device.lid);
                element.member("name", device.name);
            });
        }
        object.member("name", descriptor.name);
        if (rdma) object.json("priority_matrix", descriptor.topology.empty() ? "null" : descriptor.topology.toString());
        object.member("protocol", descriptor.protocol);
        if (!descriptor.rdma_server_name.empty()) object.member("rdma_server_name", descriptor.rdma_server_name);
        object.member("tcp_data_port", descriptor.tcp_data_port);
        object.member("tcp_proto_version", descriptor.tcp_proto_version);
        object.member("timestamp", timestamp());
    });
}

std::optional<RpcMetaDesc> read_address(std::string_view json) {
    std::optional<JsonValue> value = read_json(json);
    RpcMetaDesc address;
    if (!value || !read(*value, "ip_or_host_name", address.ip_or_host_name) || !read(*value, "rpc_port", address.rpc_port) ||
        address.ip_or_host_name.empty()) {
        return std::nullopt;
    }
    return address;
}

std::string write_address(const RpcMetaDesc& address) {
    return write_object([&](ObjectWriter& object) {
        object.member("ip_or_host_name", address.ip_or_host_name);
        object.member("rpc_port", address.rpc_port);
    });
}

std::optional<HandShakeDesc> read_handshake(std::string_view json) {
    std::optional<JsonValue> value = read_json(json);
    HandShakeDesc handshake;
    if (!value || !read(*value, "payload", handshake.payload) || !read(*value, "local_nic_path", handshake.local_nic_path) ||
        !read(*value, "local_lid", handshake.local_lid) || !read(*value, "local_gid", handshake.local_gid) ||
        !read(*value, "peer_nic_path", handshake.peer_nic_path) || !read(*value, "qp_num", handshake.qp_num) ||
        !read(*value, "ready_ack", handshake.ready_ack) || !read(*value, "reply_msg", handshake.reply_msg)) {
        return std::nullopt;
    }
    handshake.ready_ack_supported = value->member("ready_ack") != nullptr;
    return handshake;
}

std::string write_handshake(const HandShakeDesc& handshake) {
    return write_object([&](ObjectWriter& object) {
        object.member("local_gid", handshake.local_gid);
        object.member("local_lid", handshake.local_lid);
        object.member("local_nic_path", handshake.local_nic_path);
        object.member("payload", handshake.payload);
        object.member("peer_nic_path", handshake.peer_nic_path);
        object.member("qp_num", handshake.qp_num);
        if (handshake.ready_ack_supported) object.member("ready_ack", handshake.ready_ack);
        object.member("reply_msg", handshake.reply_msg);
    });
}

std::optional<NotifyDesc> read_notification(std::string_view json) {
    std::optional<JsonValue> value = read_json(json);
    NotifyDesc notification;
    if (!value || !read(*value, "name", notification.name) || !read(*value, "notify_msg", notification.notify_msg)) return std::nullopt;
    return notification;
}

std::string write_notification(const NotifyDesc& notification) {
    return write_object([&](ObjectWriter& object) {
        object.member("name", notification.name);
        object.member("notify_msg", notification.notify_msg);
    });
}

}  // namespace mooncake::transfer_engine_cxx
