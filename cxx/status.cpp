#include "common/base/status.h"

namespace mooncake {

std::string_view Status::CodeToString(Code code) {
    switch (code) {
        case Code::kOk: return "OK";
        case Code::kInvalidArgument: return "InvalidArgument";
        case Code::kTooManyRequests: return "TooManyRequests";
        case Code::kAddressNotRegistered: return "AddressNotRegistered";
        case Code::kBatchBusy: return "BatchBusy";
        case Code::kDeviceNotFound: return "DeviceNotFound";
        case Code::kAddressOverlapped: return "AddressOverlapped";
        case Code::kNotSupportedTransport: return "NotSupportedTransport";
        case Code::kDns: return "Dns";
        case Code::kSocket: return "Socket";
        case Code::kMalformedJson: return "MalformedJson";
        case Code::kRejectHandshake: return "RejectHandshake";
        case Code::kMetadata: return "Metadata";
        case Code::kEndpoint: return "Endpoint";
        case Code::kContext: return "Context";
        case Code::kNuma: return "Numa";
        case Code::kClock: return "Clock";
        case Code::kMemory: return "Memory";
        case Code::kNotImplemented: return "NotImplemented";
        case Code::kMaxCode: break;
    }
    return "UnknownCode";
}

std::string Status::ToString() const {
    std::string text(CodeToString(code_));
    if (!ok()) text.append(": ").append(message_);
    return text;
}

std::ostream& operator<<(std::ostream& out, const Status& status) { return out << status.ToString(); }

std::ostream& operator<<(std::ostream& out, Status::Code code) { return out << Status::CodeToString(code); }

}  // namespace mooncake
