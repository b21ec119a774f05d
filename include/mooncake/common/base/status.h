// Status: whether a call succeeded, and if not, why.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "transfer_engine_cxx/export.h"

namespace mooncake {

// Success, or a code with a text.
//
// A value: copies keep code and text, and each owns its text. Making and copying a success allocates nothing.
class TRANSFER_ENGINE_CXX_API Status final {
   public:
    // Why a call failed.
    enum class Code : uint16_t {
        kOk = 0,
        kInvalidArgument = 1,
        kTooManyRequests = 2,
        kAddressNotRegistered = 3,
        kBatchBusy = 4,
        kDeviceNotFound = 6,
        kAddressOverlapped = 7,
        kNotSupportedTransport = 8,
        kDns = 101,
        kSocket = 102,
        kMalformedJson = 103,
        kRejectHandshake = 104,
        kMetadata = 200,
        kEndpoint = 201,
        kContext = 202,
        kNuma = 300,
        kClock = 301,
        kMemory = 302,
        kNotImplemented = 999,
        kMaxCode
    };

    // Success.
    Status() noexcept = default;
    // A status with that code. A success has no text.
    Status(Code code, std::string_view message)
        : code_(code), message_(code == Code::kOk ? std::string_view() : message) {}

    Status(const Status&) = default;
    Status& operator=(const Status&) = default;
    Status(Status&& other) noexcept
        : code_(std::exchange(other.code_, Code::kOk)), message_(std::move(other.message_)) {
        other.message_.clear();
    }
    Status& operator=(Status&& other) noexcept {
        if (this != &other) {
            code_ = std::exchange(other.code_, Code::kOk);
            message_ = std::move(other.message_);
            other.message_.clear();
        }
        return *this;
    }
    ~Status() = default;

    [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
    Code code() const { return code_; }
    // What happened; "" for a success. Valid for as long as this object, unless it is assigned to.
    std::string_view message() const { return message_; }
    // "OK", or the name of the code, ": " and the text.
    std::string ToString() const;

    // The name of a code, such as "InvalidArgument"; "UnknownCode" for other numbers. The text is static.
    static std::string_view CodeToString(Code code);

    [[nodiscard]] bool IsInvalidArgument() const { return code_ == Code::kInvalidArgument; }
    [[nodiscard]] bool IsTooManyRequests() const { return code_ == Code::kTooManyRequests; }
    [[nodiscard]] bool IsAddressNotRegistered() const { return code_ == Code::kAddressNotRegistered; }
    [[nodiscard]] bool IsBatchBusy() const { return code_ == Code::kBatchBusy; }
    [[nodiscard]] bool IsDeviceNotFound() const { return code_ == Code::kDeviceNotFound; }
    [[nodiscard]] bool IsAddressOverlapped() const { return code_ == Code::kAddressOverlapped; }
    [[nodiscard]] bool IsNotSupportedTransport() const { return code_ == Code::kNotSupportedTransport; }
    [[nodiscard]] bool IsDns() const { return code_ == Code::kDns; }
    [[nodiscard]] bool IsSocket() const { return code_ == Code::kSocket; }
    [[nodiscard]] bool IsMalformedJson() const { return code_ == Code::kMalformedJson; }
    [[nodiscard]] bool IsRejectHandshake() const { return code_ == Code::kRejectHandshake; }
    [[nodiscard]] bool IsMetadata() const { return code_ == Code::kMetadata; }
    [[nodiscard]] bool IsEndpoint() const { return code_ == Code::kEndpoint; }
    [[nodiscard]] bool IsContext() const { return code_ == Code::kContext; }
    [[nodiscard]] bool IsNuma() const { return code_ == Code::kNuma; }
    [[nodiscard]] bool IsClock() const { return code_ == Code::kClock; }
    [[nodiscard]] bool IsMemory() const { return code_ == Code::kMemory; }
    [[nodiscard]] bool IsNotImplemented() const { return code_ == Code::kNotImplemented; }

    static Status OK() { return Status(); }
    static Status InvalidArgument(std::string_view message) { return {Code::kInvalidArgument, message}; }
    static Status TooManyRequests(std::string_view message) { return {Code::kTooManyRequests, message}; }
    static Status AddressNotRegistered(std::string_view message) { return {Code::kAddressNotRegistered, message}; }
    static Status BatchBusy(std::string_view message) { return {Code::kBatchBusy, message}; }
    static Status DeviceNotFound(std::string_view message) { return {Code::kDeviceNotFound, message}; }
    static Status AddressOverlapped(std::string_view message) { return {Code::kAddressOverlapped, message}; }
    static Status NotSupportedTransport(std::string_view message) { return {Code::kNotSupportedTransport, message}; }
    static Status Dns(std::string_view message) { return {Code::kDns, message}; }
    static Status Socket(std::string_view message) { return {Code::kSocket, message}; }
    static Status MalformedJson(std::string_view message) { return {Code::kMalformedJson, message}; }
    static Status RejectHandshake(std::string_view message) { return {Code::kRejectHandshake, message}; }
    static Status Metadata(std::string_view message) { return {Code::kMetadata, message}; }
    static Status Endpoint(std::string_view message) { return {Code::kEndpoint, message}; }
    static Status Context(std::string_view message) { return {Code::kContext, message}; }
    static Status Numa(std::string_view message) { return {Code::kNuma, message}; }
    static Status Clock(std::string_view message) { return {Code::kClock, message}; }
    static Status Memory(std::string_view message) { return {Code::kMemory, message}; }
    static Status NotImplemented(std::string_view message) { return {Code::kNotImplemented, message}; }

    // The same code and the same text.
    bool operator==(const Status&) const = default;

   private:
    Code code_ = Code::kOk;
    std::string message_;
};

// Prints ToString().
TRANSFER_ENGINE_CXX_API std::ostream& operator<<(std::ostream& out, const Status& status);
// Prints CodeToString().
TRANSFER_ENGINE_CXX_API std::ostream& operator<<(std::ostream& out, Status::Code code);

}  // namespace mooncake
